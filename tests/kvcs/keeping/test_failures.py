"""What has failed lately is remembered for a while, and no longer, and not without a bound."""

from __future__ import annotations

import pytest

from kvcs.keeping.failures import MOST, Failures


def test_what_failed_is_held_for_so_long():
    failures = Failures(10)
    failures.note("a", 100.0)
    assert failures.holds("a", 109.9) and not failures.holds("b", 100.0)
    assert not failures.holds("a", 110.0)
    assert len(failures) == 0


def test_what_fails_again_is_held_from_then_on():
    failures = Failures(10)
    failures.note("a", 100.0)
    failures.note("a", 105.0)
    assert failures.holds("a", 114.0)


def test_nothing_is_remembered_for_no_time_and_less_is_refused():
    failures = Failures(0)
    failures.note("a", 1.0)
    assert not failures.holds("a", 1.0)
    with pytest.raises(ValueError, match="0 seconds or more"):
        Failures(-1)


def test_the_oldest_give_way_when_there_are_too_many():
    failures = Failures(10)
    for number in range(MOST + 2):
        failures.note(number, 1.0)
    assert len(failures) == MOST
    assert not failures.holds(1, 1.0) and failures.holds(2, 1.0)
