"""`docs/kvsp-conformance.md` says nothing of code or tests that are not there, and every rule that
is kept is broken on purpose."""

from __future__ import annotations

from tests.conformance import faults, rows
from tests.paths import ROOT
from tools.mutants.breaks import Stale, read_lists


def test_every_row_has_a_state_and_names_code_and_tests_that_are_there() -> None:
    assert len(rows("kvsp-conformance")) > 100
    assert not faults("kvsp-conformance")


def test_every_rule_that_is_kept_is_broken_on_purpose_or_says_why_it_cannot_be() -> None:
    lists = read_lists(ROOT, [ROOT / "tools" / "mutants" / "kvsp.toml"])
    assert not lists.wrong
    assert not [str(row) for row in lists.rows if not row.reason and not lists.of(row)]


def test_every_break_of_the_list_can_still_be_made() -> None:
    stale = []
    for each in read_lists(ROOT, [ROOT / "tools" / "mutants" / "kvsp.toml"]).breaks:
        try:
            each.files(ROOT)
        except Stale as error:
            stale.append(f"{each.row}: {error}")
    assert not stale
