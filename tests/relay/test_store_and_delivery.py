"""What the relay needs of `moqt.track.store` and `moqt.delivery`, without a relay in between."""

from __future__ import annotations

import pytest

from moqt.publisher import Publisher
from moqt.track.store import TrackStore
from moqt.values.codes import MAX_VI64, StreamErrorCode
from moqt.values.names import Location, location_after, location_before
from tests.moqt.memory import Pair
from tests.relay.star import LIVE, NAME, Collector, publish, track


def served(store):
    publisher = Publisher()
    publisher.add_track(store)
    pair, collector = Pair(server=publisher), Collector()
    pair.client.subscribe(NAME, collector, LIVE)
    pair.run()
    return pair, collector


def begin(store, object_, length=100, **kwargs):
    return store.begin(
        Location(0, object_), subgroup=0, priority=None, properties=b"", length=length, **kwargs
    )


def test_a_store_that_changes_wakes_the_transports_of_those_it_serves():
    pair, _ = served(store := track())
    woken = []
    pair.server_transport.wake = lambda: woken.append(1)
    publish(store, 0, 0)
    assert woken


def test_what_was_written_before_a_reset_is_not_taken_back():
    pair, collector = served(store := track())
    publish(store, 0, 0)
    cut = begin(store, 1)
    store.grow(cut, b"x" * 10)
    pair.server.ready_to_send()
    store.abort(cut)
    store.break_subgroup(0, 0)
    pair.run()
    assert collector.locations == [Location(0, 0)]
    assert collector.streams == [(0, StreamErrorCode.INTERNAL_ERROR)]


def test_after_a_broken_stream_the_rest_comes_on_another_and_nothing_twice():
    pair, collector = served(store := track())
    publish(store, 0, 0)
    cut = begin(store, 1)
    store.grow(cut, b"x" * 10)
    pair.run()
    store.abort(cut)
    store.break_subgroup(0, 0)
    pair.run()
    store.subgroup(0, 0).broken = False
    for o in (1, 2, 3):
        publish(store, 0, o)
    pair.run()
    assert collector.locations == [Location(0, o) for o in range(4)]
    assert [error for _, error in collector.streams] == [StreamErrorCode.INTERNAL_ERROR, None]


def test_thousands_of_broken_subgroups_do_not_pile_up():
    pair, collector = served(store := track())
    for g in range(5000):
        store.append(g, 0, b"x")
        store.break_subgroup(g, 0)
        if g % 50 == 0:
            pair.run()
    pair.run()
    assert collector.done is None
    assert len(collector.locations) == 5000
    assert all(log.readers == 0 for g in store.groups.values() for log in g.subgroups.values())


def test_an_object_that_was_evicted_and_is_aborted_when_it_comes_back_is_not_forgotten():
    store = TrackStore(NAME, authoritative=False)
    for o in range(3):
        store.complete(begin(store, o, 0))
    store.evict(store.get(Location(0, 1)))
    again = begin(store, 1, 10, live=False)
    store.abort(again)
    assert store.groups[0].subgroups[0].ids == [0, 1, 2]
    store.abort(begin(store, 3, 10))
    assert store.groups[0].subgroups[0].ids == [0, 1, 2]


def test_a_whole_object_holds_nothing_but_its_own_octets():
    store = TrackStore(NAME, authoritative=False)
    stored = begin(store, 0, 10)
    store.grow(stored, memoryview(b"x" * 100_000)[5:15])
    store.complete(stored)
    assert list(stored.parts) == [b"x" * 10] and type(stored.parts[0]) is bytes


def test_an_empty_track_that_has_ended_is_complete():
    store = TrackStore(NAME, authoritative=False)
    assert not store.is_complete()
    store.set_end_of_track(Location(0, 0))
    assert store.is_complete()


@pytest.mark.parametrize(
    ("one", "next_"), [((0, 0), (0, 1)), ((3, MAX_VI64), (4, 0)), ((3, 7), (3, 8))]
)
def test_locations_follow_each_other_across_groups(one, next_):
    assert location_after(Location(*one)) == next_
    assert location_before(Location(*next_)) == one
