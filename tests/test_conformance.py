"""What holds the conformance tables notices each kind of mistake in a row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.conformance import wrong_with
from tools.mutants.rows import Row

HERE = "tests/test_conformance.py"
GOOD = Row(
    "docs/table.md:1",
    ("A section",),
    "A rule",
    ("tests/conformance.py", "tests/conformance.py::STATES", "tools.mutants.rows.Row.reason"),
    (f"{HERE}::test_a_row_that_is_right_has_no_fault",),
    "implemented",
)


def test_a_row_that_is_right_has_no_fault() -> None:
    for state in ("implemented", "partly: why", "not implemented: why", "not applicable: why"):
        assert not list(wrong_with(replace(GOOD, state=state)))
    assert not list(wrong_with(replace(GOOD, where=(), tests=(), state="not applicable: why")))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"rule": ""}, "no rule"),
        ({"state": "done"}, "'done' is none of"),
        ({"state": "implemented: mostly"}, "'implemented' stands with a reason"),
        ({"state": "partly"}, "'partly' stands alone"),
        ({"state": "not implemented: "}, "'not implemented' stands alone"),
        ({"where": ()}, "no code, or no test"),
        ({"tests": (), "state": "partly: why"}, "no code, or no test"),
        ({"where": ("moqt/none.py",)}, "no file moqt/none.py"),
        ({"where": ("tests/conformance.py::OTHER",)}, "no OTHER in tests/conformance.py"),
        ({"where": ("tools.mutants.rows.Row.other",)}, "no Row.other in tools/mutants/rows.py"),
        ({"where": ("nowhere.at.all",)}, "no module nowhere.at.all"),
        ({"tests": (f"{HERE}::test_other",)}, f"no test_other in {HERE}"),
        ({"tests": (f"{HERE}::GOOD",)}, "is no test"),
    ],
)
def test_a_mistake_in_a_row_is_named(change, fault) -> None:
    (found,) = wrong_with(replace(GOOD, **change))
    assert fault in found
