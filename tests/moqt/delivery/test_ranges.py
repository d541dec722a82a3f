"""Holes on fetch streams: End of Range entries, FILL_TIMEOUT (MOQT "Fetch Streams")."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moqt.receiving.receiver import Via
from moqt.track.store import TrackStore
from moqt.values.codes import MAX_VI64, EndOfRange, GroupOrder, ParameterType, StreamErrorCode
from moqt.values.messages import LocationFilter, Parameters, RangeFilter
from moqt.values.names import Location
from tests.moqt.deliveries import Recorder, World, grow
from tests.moqt.peers import NAME

UNKNOWN, TIMED_OUT, NONE = EndOfRange.UNKNOWN, EndOfRange.TIMED_OUT, EndOfRange.NON_EXISTENT


class Entries(Recorder):
    """Remembers Objects and markers in the order of the stream."""

    def __init__(self):
        super().__init__()
        self.entries = []

    def object_received(self, received):
        super().object_received(received)
        self.entries.append(tuple(received.location))

    def range_marker(self, stream, marker):
        self.entries.append((marker.kind, tuple(marker.location)))


def relay_store(*locations):
    store = TrackStore(NAME, authoritative=False)
    for at in locations:
        stored = grow(store, at, 1)
        store.grow(stored, b"x")
        store.complete(stored)
    return store


def fetch(world, **parameters):
    got = Entries()
    world.pair.client.fetch(NAME, got, Parameters(**parameters))
    world.run()
    return got


class Asked:
    """A source that is asked, and brings what it is told to bring."""

    def __init__(self, store, *, willing=True):
        self.store, self.willing, self.wanted = store, willing, []
        store.source = self

    def assumed(self, start):
        return None

    def want(self, start, end):
        if not self.wanted or self.wanted[-1] != (start, end):
            self.wanted.append((start, end))
        return self.willing


@pytest.mark.parametrize("source", [True, False])
def test_what_nobody_can_tell_is_marked_unknown_and_the_fetch_goes_on(source):
    store = relay_store((0, 0), (0, 2))
    if source:
        Asked(store, willing=False)
    world = World(store, None)
    got = fetch(world)
    assert got.entries == [(0, 0), (UNKNOWN, (0, 1)), (0, 2)]
    assert [error for *_, error in got.ends] == [None]
    assert world.pair.server.scheduler.counters.ranges_unknown == 1
    world.clean()


def test_an_unknown_range_may_come_first_and_last():
    world = World(relay_store((3, 0)), None)
    world.store.largest = Location(4, 5)
    got = fetch(world)
    assert got.entries == [(UNKNOWN, (2, MAX_VI64)), (3, 0), (UNKNOWN, (4, 5))]
    world.clean()


def test_a_hole_that_does_not_exist_before_an_unknown_one_is_marked_by_itself():
    store = relay_store((0, 0), (0, 9))
    store.mark_nonexistent(Location(0, 1), Location(0, 3))
    store.mark_nonexistent(Location(0, 6), Location(0, 7))
    world = World(store, None)
    got = fetch(world)
    assert got.entries == [
        (0, 0),
        (NONE, (0, 3)),
        (UNKNOWN, (0, 5)),
        (NONE, (0, 7)),
        (UNKNOWN, (0, 8)),
        (0, 9),
    ]


def test_with_range_filters_a_hole_means_unknown_and_is_never_said_not_to_exist():
    store = relay_store((0, 0), (0, 2), (0, 4))
    store.mark_nonexistent(Location(0, 1), Location(0, 1))
    world = World(store, None)
    only = RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((0, 0), (4, 4)))
    got = fetch(world, range_filters=(only,))
    assert got.entries == [(0, 0), (UNKNOWN, (0, 3)), (0, 4)]


def test_descending_an_unknown_range_ends_where_the_order_says():
    store = relay_store((5, 0), (5, 1), (1, 1))
    store.mark_nonexistent(Location(5, 2), Location(5, MAX_VI64))
    store.mark_nonexistent(Location(1, 2), Location(1, MAX_VI64))
    world = World(store, None)
    store.largest = Location(5, 1)
    got = fetch(world, group_order=GroupOrder.DESCENDING)
    assert got.entries[:3] == [(5, 0), (5, 1), (UNKNOWN, (4, MAX_VI64))]
    assert got.entries[-5:] == [
        (UNKNOWN, (2, MAX_VI64)),
        (UNKNOWN, (1, 0)),
        (1, 1),
        (NONE, (1, MAX_VI64)),
        (UNKNOWN, (0, MAX_VI64)),
    ]


@pytest.mark.parametrize("order", list(GroupOrder))
@pytest.mark.parametrize("willing", [True, False])
def test_an_unknown_range_of_2_to_the_60_groups_costs_a_few_entries(order, willing):
    store = relay_store((1 << 60, 0))
    source = Asked(store, willing=willing)
    world = World(store, None)
    got = fetch(world, group_order=order)
    if willing:
        for _ in range(200):
            if got.ends:
                break
            low, high = source.wanted[-1]
            store.mark_nonexistent(low, high)
            store.changed()
            world.run()
    assert [error for *_, error in got.ends] == [None]
    assert got.locations == [(1 << 60, 0)]
    assert len(got.entries) < 70 and len(source.wanted) < 70


def test_a_fill_timeout_of_0_sends_what_is_at_hand_and_fetches_nothing():
    store = relay_store((0, 0), (0, 2))
    source = Asked(store)
    world = World(store, None)
    got = fetch(world, fill_timeout=0)
    assert got.entries == [(0, 0), (TIMED_OUT, (0, 1)), (0, 2)] and source.wanted == []
    assert [error for *_, error in got.ends] == [None]
    world.clean()


@pytest.mark.parametrize("kind", ["fetch", "fill"])
def test_a_fill_timeout_that_has_passed_marks_what_is_missing_and_goes_on(kind):
    store = relay_store((0, 0), (0, 2))
    source = Asked(store)
    world = World(store, None)
    world.pair.server.tick(100.0)
    if kind == "fetch":
        got = fetch(world, fill_timeout=500)
    else:
        got = Entries()
        world.pair.client.subscribe(
            NAME,
            got,
            Parameters(
                location_filter=LocationFilter.next_object(),
                fill_parameters=Parameters(
                    location_filter=LocationFilter.absolute_start(0), fill_timeout=500
                ),
            ),
        )
        world.run()
    world.pair.server.tick(100.4)
    world.run()
    assert got.entries == [(0, 0)] and source.wanted == [(Location(0, 1), Location(0, 1))]
    world.pair.server.tick(100.5)
    world.run()
    assert got.entries == [(0, 0), (TIMED_OUT, (0, 1)), (0, 2)]
    via = Via.FETCH if kind == "fetch" else Via.FILL
    assert got.ends == [(via, None, None)]
    assert world.pair.server.scheduler.counters.ranges_timed_out == 1


def test_without_a_fill_timeout_a_fetch_waits_as_long_as_its_source_is_willing():
    store = relay_store((0, 0), (0, 2))
    source = Asked(store)
    world = World(store, None)
    got = fetch(world)
    world.pair.server.tick(3600.0)
    world.run()
    assert got.entries == [(0, 0)]
    source.willing = False
    store.changed()
    world.run()
    assert got.entries == [(0, 0), (UNKNOWN, (0, 1)), (0, 2)]


def test_a_fetch_that_is_over_leaves_no_deadline():
    world = World(relay_store((0, 0)), None)
    fetch(world, fill_timeout=60_000)
    assert len(world.pair.server.scheduler.deadlines) == 0


def meaning(entries, ends, start, end, *, descending):
    """What a reader of the stream knows of each Location of a small range."""
    groups = range(start[0], end[0] + 1)
    sequence = [
        (g, o)
        for g in (reversed(groups) if descending else groups)
        for o in range(4)
        if start <= (g, o) <= end
    ]
    told, at = {}, 0
    for entry in entries:
        kind, location = entry if isinstance(entry[0], EndOfRange) else ("object", entry)
        group, object_id = location
        until = (group, min(object_id, 3))
        reached = max((n for n, each in enumerate(sequence) if each == until), default=at - 1)
        for n in range(at, reached + 1):
            told[sequence[n]] = "none" if kind in ("object", NONE) else "unknown"
        if kind == "object":
            told[location] = "object"
        at = reached + 1
    assert ends == [None]
    for each in sequence[at:]:
        told[each] = "none"
    return told


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.integers(0, 3), st.integers(0, 3)), st.sampled_from(["object", "none"])
    ),
    st.sampled_from(list(GroupOrder)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_a_reader_of_a_fetch_stream_knows_exactly_what_the_store_knows(known, order, start):
    known[3, 3] = "object"
    store = relay_store(*sorted(at for at, what in known.items() if what == "object"))
    for at, what in known.items():
        if what == "none":
            store.mark_nonexistent(Location(*at), Location(*at))
    for group in range(4):
        store.mark_nonexistent(Location(group, 4), Location(group, MAX_VI64))
    world = World(store, None)
    got = fetch(
        world,
        group_order=order,
        location_filter=LocationFilter.range(Location(*start), Location(3, 3)),
    )
    told = meaning(
        got.entries,
        [error for *_, error in got.ends],
        start,
        (3, 3),
        descending=order is GroupOrder.DESCENDING,
    )
    assert told == {
        (g, o): known.get((g, o), "unknown")
        for g in range(4)
        for o in range(4)
        if start <= (g, o) <= (3, 3)
    }


def test_an_object_lost_in_the_middle_still_resets_the_fetch():
    store = TrackStore(NAME)
    stored = grow(store, (0, 0))
    store.grow(stored, b"012")
    world = World(store, None)
    got = fetch(world)
    store.abort(stored)
    world.run()
    assert [error for *_, error in got.ends] == [StreamErrorCode.INTERNAL_ERROR]
