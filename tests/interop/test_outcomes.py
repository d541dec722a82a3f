"""Who is at fault: a departure of the peer is no pass, a skip is no pass, and both are seen."""

from __future__ import annotations

import pytest

import interop.cases  # noqa: F401  fills the table
from interop.case import CASES
from interop.outcomes import Departure, Outcome, Run, judge, load_departures
from interop.report import markdown, write
from interop.tap import Point, parse

LISTED = {("kvcs", "peer", "fetch"): Departure("kvcs", "peer", "fetch", "cuts it", "FETCH")}


def outcome(point, relay="peer", client="kvcs"):
    (result,) = judge([point], client, relay, LISTED)
    return result


def test_a_listed_departure_is_the_peers_and_never_a_pass():
    result = outcome(Point("fetch", False))
    assert result.outcome is Outcome.PEER
    assert result.cell == "peer: cuts it (FETCH)"


def test_a_listed_departure_that_passes_is_reported():
    assert outcome(Point("fetch", True)).outcome is Outcome.SURPRISE


def test_a_departure_of_one_relay_excuses_no_other():
    assert outcome(Point("fetch", False), relay="kvcs").outcome is Outcome.FAIL


def test_a_case_of_the_same_name_of_another_client_is_another_case():
    assert outcome(Point("fetch", True), client="other").outcome is Outcome.PASS
    assert outcome(Point("fetch", False), client="other").outcome is Outcome.FAIL


def test_a_skip_is_a_skip_also_where_a_departure_is_listed():
    assert outcome(Point("fetch", True, "not offered")).outcome is Outcome.SKIP


def test_a_failure_says_what_was_expected_and_what_came():
    result = outcome(Point("join", False, None, {"expected": "3 Objects", "received": "2"}))
    assert result.cell == "FAIL: expected 3 Objects, received 2"


def test_every_entry_of_the_list_names_a_case_a_reason_and_a_section():
    departures = load_departures()
    assert departures
    for (client, relay, case), departure in departures.items():
        assert relay == "aiomoqt", "our own relay is excused nothing"
        assert client == "kvcs" and case in CASES
        assert departure.reason and departure.section


def test_an_entry_without_a_reason_is_refused(tmp_path):
    listed = tmp_path / "list.toml"
    listed.write_text('[[departure]]\nclient="k"\nrelay="a"\ncase="b"\nreason=""\nsection="c"\n')
    with pytest.raises(ValueError, match="lacks its reason"):
        load_departures(listed)


@pytest.fixture
def runs():
    points = [
        Point("setup-only", True),
        Point("fetch", False),
        Point("join", False, None, {"message": "a | b"}),
        Point("token-alias", True, "the relay caches no tokens"),
    ]
    return [Run("kvcs", "peer", "quic", judge(points, "kvcs", "peer", LISTED))]


def test_the_table_counts_each_outcome_by_itself(runs):
    text = markdown(runs, {"kvcs": "1"}, "2026-01-02")
    assert "| kvcs × peer, quic | 1 | 1 | 1 | 1 | 0 |" in text
    assert "| fetch | peer |" in text
    assert "`join`: FAIL: a / b" in text
    assert "`token-alias`: skip: the relay caches no tokens" in text


def test_the_tap_of_a_run_keeps_a_departure_as_a_failure(runs, tmp_path):
    (tmp_path / "old.tap").write_text("of a run before")
    write(tmp_path, runs, {"kvcs": "1"}, "2026-01-02")
    (written,) = tmp_path.glob("*.tap")
    points = {point.name: point for point in parse(written.read_text())}
    assert points["fetch"].failed
    assert points["fetch"].diagnostics["peer"] == "cuts it (FETCH)"
