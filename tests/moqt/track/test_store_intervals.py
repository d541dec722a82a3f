"""IntervalSet against a plain set, and what a store refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.track.store import TrackStore
from moqt.values.codes import MAX_VI64, ObjectStatus, PublishDoneCode
from moqt.values.errors import MalformedTrack, MisuseError
from moqt.values.intervals import IntervalSet
from moqt.values.names import FullTrackName, Location

NAME = FullTrackName((b"demo",), b"t")
SIZE = 12


def at(number):
    """Numbers to Locations next to each other, across the end of a group."""
    half = SIZE // 2
    return (
        Location(3, MAX_VI64 - half + 1 + number) if number < half else Location(4, number - half)
    )


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, SIZE - 1), st.integers(0, SIZE - 1)), max_size=20
    ),
    st.integers(0, SIZE - 1),
    st.integers(0, SIZE - 1),
)
def test_an_interval_set_is_a_set_of_locations(changes, low, high):
    intervals, model = IntervalSet(), set()
    for add, a, b in changes:
        a, b = min(a, b), max(a, b)
        (intervals.add if add else intervals.remove)(at(a), at(b))
        (model.update if add else model.difference_update)(range(a, b + 1))
        assert all((at(n) in intervals) == (n in model) for n in range(SIZE))
        assert len(intervals) == sum(n in model and n - 1 not in model for n in range(SIZE))
    low, high = min(low, high), max(low, high)
    missing = [n for n in range(low, high + 1) if n not in model]
    first = intervals.first_missing(at(low), at(high))
    last = intervals.last_missing(at(low), at(high))
    if not missing:
        assert first is None and last is None
        return
    assert (first, last) == (at(missing[0]), at(missing[-1]))
    end = missing[0]
    while end < high and end + 1 not in model:
        end += 1
    assert intervals.missing_end(at(missing[0]), at(high)) == at(end)


def store():
    made = TrackStore(NAME)
    made.append(0, 0, b"x")
    return made


def test_a_publisher_is_told_what_it_did_wrong():
    made = store()
    with pytest.raises(MisuseError, match="already"):
        made.append(0, 0, b"x")
    with pytest.raises(MisuseError, match="priority"):
        made.append(0, 1, b"x", priority=256)
    made.finish(PublishDoneCode.TRACK_ENDED)
    with pytest.raises(MisuseError, match="ended"):
        made.append(1, 0, b"x")


def test_objects_that_contradict_what_is_known_make_a_track_malformed():
    made = store()
    with pytest.raises(MalformedTrack):
        made.append(0, 0, b"longer")
    with pytest.raises(MalformedTrack):
        made.append(0, 1, b"x", priority=3)  # one priority for each subgroup
    made.mark_end(Location(0, 1), ObjectStatus.END_OF_GROUP)
    with pytest.raises(MalformedTrack):
        made.append(0, 5, b"x")
    with pytest.raises(MalformedTrack):
        made.set_end_of_track(Location(0, 0))
    made.mark_end(Location(1, 0), ObjectStatus.END_OF_TRACK)
    with pytest.raises(MalformedTrack):
        made.append(1, 0, b"x")


def test_largest_is_the_largest_real_object_and_never_a_marker():
    made = store()
    assert made.largest == (0, 0)
    made.mark_end(Location(0, 1), ObjectStatus.END_OF_GROUP)
    made.mark_end(Location(1, 0), ObjectStatus.END_OF_TRACK)
    assert made.largest == (0, 0)
    assert made.is_complete()


def test_what_a_fetch_brings_does_not_move_the_largest_object():
    made = TrackStore(NAME, authoritative=False)
    for number, live in ((3, True), (5, False), (4, True), (2, False)):
        made.begin(Location(number, 0), subgroup=0, priority=1, properties=b"", length=1, live=live)
    assert made.largest == (4, 0)


def test_a_payload_is_held_by_reference():
    made = store()
    array = bytearray(100)
    stored = made.append(0, 1, [b"head", memoryview(array)])
    assert stored.length == 104
    array[0] = 7
    assert stored.read(4, 1) == b"\x07"
    assert bytes(stored.payload)[4] == 7


def test_what_only_a_fetch_has_brought_does_not_move_the_largest_object():
    store = TrackStore(NAME, authoritative=False)
    for group, live in ((1, True), (2, False)):
        location = Location(group, 0)
        store.begin(
            location, subgroup=0, priority=None, properties=b"", length=1, live=live, payload=b"x"
        )
        assert store.get(location) is not None
    assert store.largest == Location(1, 0)
