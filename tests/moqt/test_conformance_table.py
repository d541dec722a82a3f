"""`docs/moqt-conformance.md` says nothing of code or tests that are not there."""

from __future__ import annotations

from tests.conformance import faults, rows


def test_every_row_has_a_state_and_names_code_and_tests_that_are_there() -> None:
    assert len(rows("moqt-conformance")) > 500
    assert not faults("moqt-conformance")
