"""A whole Object is stored in one step, and the store is the same as if it had come bit by bit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moqt.track.store import TrackStore
from moqt.values.codes import ObjectStatus, PropertyType
from moqt.values.messages import KeyValue
from moqt.values.names import Location
from moqt.wire.objects import ObjectHeader
from relay.cache import bill
from tests.relay.star import JOIN, LIVE, NAME, Star


class Listener:
    """Counts what a store tells of each Subgroup."""

    def __init__(self):
        self.told = 0

    def store_changed(self, log):
        self.told += 1

    def subgroup_cut(self, log):
        self.told += 1

    def datagram_stored(self, stored):
        self.told += 1


def contents(star):
    """Everything that the relay's store says of its track, and what it costs."""
    store = star.relay.tracks[NAME].store
    cache = star.relay.cache
    objects = [each for each in store.objects() if not each.status]
    assert all(each.complete and len(each.parts) <= 1 for each in objects)
    assert cache.billed == sum(map(bill, objects)) + 768 * store.statuses
    assert cache.octets == store.octets == sum(each.length for each in objects)
    return (
        [(each.location, each.subgroup, each.follows, bytes(each.payload)) for each in objects],
        [
            (
                number,
                group.end,
                [(*log.ids, log.finished, log.broken, log.first_id) for log in logs],
            )
            for number, group in sorted(store.groups.items())
            if (logs := list(group.subgroups.values()))
        ],
        (store.largest, store.end_of_track, store.placed, store.octets, cache.objects),
        [location for location in AROUND if location in store.known],
    )


AROUND = [Location(group, object_id) for group in range(5) for object_id in range(12)]


def publish(star, publisher, track, found):
    """Objects of a live track, some at once, some apart."""
    for group, object_id, payload, apart in found:
        track.append(group, object_id, payload)
        if apart:
            star.run()
    for group in {each[0] for each in found}:
        track.finish_subgroup(group, 0)
    star.run()


def relayed(found, *, seed=None, parameters=LIVE):
    star = Star(seed=seed)
    track = TrackStore(NAME)
    publisher = star.publisher(track)
    _, collector = star.subscriber(parameters)
    publish(star, publisher, track, found)
    assert collector.payloads == {Location(g, o): payload for g, o, payload, _ in found}
    return contents(star)


objects = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 9), st.binary(max_size=300), st.booleans()),
    min_size=1,
    max_size=8,
    unique_by=lambda each: each[:2],
).map(sorted)


@given(objects, st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_the_store_is_the_same_wherever_the_octets_of_a_subscription_are_split(found, seed):
    assert relayed(found) == relayed(found, seed=seed)


@given(objects, st.integers(0, 1 << 30))
@settings(max_examples=40, deadline=None)
def test_the_store_is_the_same_wherever_the_octets_of_a_fetch_are_split(found, seed):
    def fetched(seed):
        star = Star(seed=seed)
        track = TrackStore(NAME)
        for group, object_id, payload, _ in found:
            track.append(group, object_id, payload)
        star.publisher(track)
        pair = star.connect()
        collector = star.fetch(pair)
        assert collector.payloads == {Location(g, o): payload for g, o, payload, _ in found}
        return contents(star)

    assert fetched(None) == fetched(seed)


@pytest.mark.parametrize("subgroup", [0, None])
@pytest.mark.parametrize("payload", [b"whole", b""])
def test_who_listens_to_a_store_hears_once_of_a_whole_object(payload, subgroup):
    star = Star()
    track = TrackStore(NAME)
    star.publisher(track)
    _, collector = star.subscriber(LIVE)
    listener = Listener()
    star.relay.tracks[NAME].store.add_listener(listener)
    track.append(0, 0, payload, subgroup=subgroup)
    star.run()
    assert collector.payloads == {Location(0, 0): payload}
    assert listener.told == (2 if subgroup is None else 1)


def test_a_whole_object_that_comes_again_is_compared_and_told_to_nobody():
    star = Star()
    track, same = TrackStore(NAME), TrackStore(NAME)
    star.publisher(track)
    star.publisher(same)
    _, collector = star.subscriber(LIVE)
    track.append(0, 0, b"payload")
    star.run()
    listener = Listener()
    star.relay.tracks[NAME].store.add_listener(listener)
    same.append(0, 0, b"payload")
    star.run()
    assert listener.told == 0 and collector.failed is None
    same.append(0, 1, b"payload")
    star.run()
    track.append(0, 1, b"another")
    star.run()
    assert collector.failed is not None or collector.done is not None
    assert star.relay.cache.billed == 0


def test_a_whole_object_ages_from_its_arrival():
    star = Star()
    track = TrackStore(NAME, (KeyValue(PropertyType.MAX_CACHE_DURATION, 10_000),))
    star.publisher(track)
    star.subscriber(LIVE)
    track.append(0, 0, b"payload")
    star.run()
    assert star.relay.cache.objects == 1
    star.pass_time(5)
    assert star.relay.cache.objects == 1
    star.pass_time(6)
    cache = star.relay.cache
    assert cache.objects == 0 and cache.billed == cache.properties


def test_a_whole_object_that_was_said_not_to_exist_is_not_stored():
    star = Star()
    track = TrackStore(NAME)
    track.append(0, 0, b"first")
    track.append(2, 0, b"third")
    star.publisher(track)
    _, collector = star.subscriber(JOIN)
    store = star.relay.tracks[NAME].store
    store.mark_nonexistent(Location(3, 0), Location(3, 9))
    track.append(3, 0, b"fourth")
    star.run()
    assert Location(3, 0) not in collector.payloads
    assert star.relay.counters.objects_nonexistent == 1


def test_a_whole_object_for_which_growing_ones_leave_no_room_is_rejected():
    star = Star(cache_octets=4000, transit_octets=0)
    track = TrackStore(NAME)
    star.publisher(track)
    star.subscriber(LIVE)
    track.append(0, 0, bytes(5000))
    track.append(0, 1, b"small")
    star.run()
    cache = star.relay.cache
    assert cache.stores_rejected == 1 and cache.objects == 1
    assert cache.billed <= 4000


def test_an_end_of_group_is_no_whole_object():
    star = Star()
    track = TrackStore(NAME)
    star.publisher(track)
    _, collector = star.subscriber(LIVE)
    track.append(0, 0, b"payload")
    track.mark_end(Location(0, 1), ObjectStatus.END_OF_GROUP)
    track.finish_subgroup(0, 0)
    star.run()
    store = star.relay.tracks[NAME].store
    assert store.statuses == 1 and store.groups[0].end == 1
    assert collector.failed is None


def test_a_whole_copy_of_an_object_that_is_growing_pushes_nothing_out():
    star = Star(cache_octets=4000)
    track = TrackStore(NAME)
    star.publisher(track)
    _, collector = star.subscriber(LIVE)
    track.append(0, 0, bytes(1500))
    star.run()
    growing = track.begin(Location(0, 1), subgroup=0, priority=128, properties=b"", length=900)
    track.grow(growing, bytes(10))
    star.run()
    filling, cache = star.relay.tracks[NAME].filling, star.relay.cache
    assert len(filling.bringing) == 1
    copy = ObjectHeader(0, 1, 0, 128, b"", 900)
    assert filling.add(copy, bytes(900), 0, live=True) is None
    assert cache.evictions == 0
    track.grow(growing, bytes(890))
    track.complete(growing)
    star.run()
    assert collector.payloads[Location(0, 1)] == bytes(900)
    assert cache.evictions == cache.stores_rejected == 0 and cache.objects == 2


def test_a_whole_object_larger_than_the_cache_pushes_nothing_out():
    star = Star(cache_octets=4000, transit_octets=0)
    track = TrackStore(NAME)
    star.publisher(track)
    star.subscriber(LIVE)
    track.append(0, 0, b"small")
    star.run()
    large = ObjectHeader(0, 1, 0, 128, b"", 5000)
    assert star.relay.tracks[NAME].filling.add(large, bytes(5000), 0, live=True) is None
    assert star.relay.cache.evictions == 0 and star.relay.cache.objects == 1


def test_the_room_that_the_first_object_of_a_stream_takes_is_none_of_its_subgroups_log():
    star = Star(cache_octets=1700)
    first, second = TrackStore(NAME), TrackStore(NAME)
    leaves = star.publisher(first)
    star.publisher(second)
    star.subscriber(LIVE)
    first.append(0, 5, bytes(100))
    star.run()
    leaves.client.close()
    star.run()
    group = star.relay.tracks[NAME].store.groups[0]
    assert group.subgroups[0].broken
    second.append(0, 6, bytes(100))
    star.run()
    assert star.relay.cache.evictions == 1 and list(group.objects) == [6]
    assert group.subgroups[0].ids == [5, 6] and not group.subgroups[0].broken
