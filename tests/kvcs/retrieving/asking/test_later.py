"""Requests that wait for their time, or for a stream."""

from __future__ import annotations

import pytest

from kvcs.names.refusals import NO_STREAM_DELAY
from kvcs.retrieving.asking.later import Later
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import RequestError, SessionClosed


def raising(error):
    def make() -> None:
        raise error

    return make


def test_each_request_is_made_once_when_its_time_has_come() -> None:
    later, made = Later(), []
    assert not later
    for delay in (2.0, 0.0, 1.0):
        later.add(delay, lambda delay=delay: made.append(delay))
    assert later
    later.make_due(10.0)
    assert made == [0.0] and sorted(later.times) == [11.0, 12.0]
    later.make_due(12.0)
    assert sorted(made) == [0.0, 1.0, 2.0] and not later and later.times == []


def test_one_for_which_there_is_no_stream_waits_and_holds_up_no_other() -> None:
    later, made = Later(), []
    later.add(0.0, raising(RequestError(RequestErrorCode.EXCESSIVE_LOAD)))
    later.add(0.0, lambda: made.append(1))
    later.make_due(10.0)
    assert made == [1] and later.times == [10.0 + NO_STREAM_DELAY]


@pytest.mark.parametrize(
    "error", [SessionClosed(0, "gone"), RequestError(RequestErrorCode.INVALID_FILTER)]
)
def test_what_makes_a_request_impossible_is_raised(error) -> None:
    later = Later()
    later.add(0.0, raising(error))
    with pytest.raises(type(error)):
        later.make_due(10.0)
    assert not later


def test_what_was_cleared_is_not_made() -> None:
    later = Later()
    later.add(1.0, raising(AssertionError))
    later.make_due(0.0)
    later.add(0.0, raising(AssertionError))
    later.clear()
    later.make_due(10.0)
