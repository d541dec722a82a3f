"""What a relay may not begin, cache or pass on (MOQT "Caching Relays", "MAX_CACHE_DURATION")."""

from __future__ import annotations

import pytest

from moqt.track.knowledge import INTERVAL_OCTETS, PROPERTY_OCTETS
from moqt.track.store import TrackStore
from moqt.values.codes import ObjectStatus, RequestErrorCode
from moqt.values.messages import KeyValue, LocationFilter, Parameters
from moqt.values.names import Location
from relay.cache import OBJECT_OVERHEAD
from relay.config import RelayConfig
from tests.relay.inside import make_room
from tests.relay.star import JOIN, LIVE, NAME, Star, end_track, everything, payload, publish, track


def begin(store, group, object_, length):
    return store.begin(
        Location(group, object_), subgroup=0, priority=None, properties=b"", length=length
    )


def test_a_growing_object_past_its_duration_goes_on_to_who_reads_it_and_is_begun_for_nobody():
    star, store = Star(), track(properties=(KeyValue(0x04, 2000),))
    publisher = star.publisher(store)
    _, reader = star.subscriber(LIVE)
    growing = begin(store, 0, 0, 1000)
    store.grow(growing, b"a" * 400)
    star.run()
    star.pass_time(3)
    relay = star.relay
    assert relay.cache.expirations == 1 and reader.parts == 400
    _, late = star.subscriber(JOIN)
    assert publisher.handler.fetch_ranges == [(Location(0, 0), Location(0, 0))]
    store.grow(growing, b"a" * 600)
    store.complete(growing)
    star.run()
    assert reader.payloads == late.payloads == {Location(0, 0): b"a" * 1000}
    assert reader.repeated == late.repeated == []
    [fresh] = relay.tracks[NAME].store.objects()
    assert relay.cache.billed == relay.cache.properties + 1000 + OBJECT_OVERHEAD and fresh.complete
    assert not relay.tracks[NAME].filling.bringing and relay.tracks[NAME].store.octets == 1000


def test_a_growing_object_past_its_duration_that_is_cut_leaves_nothing_behind():
    star, store = Star(), track(properties=(KeyValue(0x04, 2000),))
    publisher = star.publisher(store)
    _, reader = star.subscriber(LIVE)
    store.grow(begin(store, 0, 0, 1000), b"a" * 400)
    star.run()
    star.pass_time(3)
    star.kill(publisher)
    assert reader.parts == 400 and reader.payloads == {}
    cache = star.relay.cache
    assert cache.billed == cache.properties == PROPERTY_OCTETS and cache.octets == 0


def test_an_object_that_comes_after_it_was_declared_non_existent_is_dropped_and_counted():
    star, store = Star(), track()
    star.publisher(store)
    pair, live = star.subscriber(LIVE)
    store.append(0, 0, b"zero")
    store.append(0, 3, b"three")
    star.run()
    star.fetch(pair, (0, 0), (0, 3))
    assert Location(0, 1) in star.relay.tracks[NAME].store.known
    store.append(0, 1, b"too late", subgroup=1)
    store.append(0, 4, b"four")
    store.finish_subgroup(0, 1)
    star.run()
    assert live.locations == [Location(0, 0), Location(0, 3), Location(0, 4)]
    assert star.relay.counters.objects_nonexistent == 1
    assert star.relay.counters.malformed_tracks == 0
    again = star.fetch(pair, (0, 0), (0, 4))
    assert again.locations == [Location(0, 0), Location(0, 3), Location(0, 4)]


def test_statuses_are_billed_until_their_group_is_forgotten():
    star, store = Star(cache_octets=100 * OBJECT_OVERHEAD), track()
    star.publisher(store)
    _, live = star.subscriber(LIVE)
    for group in range(4):
        for at in range(4):
            publish(store, group, at)
    star.run()
    cache = star.relay.cache
    assert cache.statuses == 4
    assert cache.billed == 20 * OBJECT_OVERHEAD + 1600 and cache.intervals == 0
    end_track(store, 4)
    star.run()
    assert len(live.objects) == 21 and cache.billed <= 21 * OBJECT_OVERHEAD + 1600
    make_room(cache, cache.budget)
    # What lies after the last Object of each group is known still, and paid for.
    assert cache.objects == 0 and cache.statuses == 0
    assert cache.billed == cache.intervals * INTERVAL_OCTETS == 4 * INTERVAL_OCTETS


def test_statuses_beyond_the_budget_are_not_held_and_unknown_where_there_is_no_room_at_all():
    star, store = Star(cache_octets=10 * OBJECT_OVERHEAD, transit_octets=0), track()
    star.publisher(store)
    star.subscriber(LIVE)
    for group in range(50):
        store.mark_end(Location(group, 1), ObjectStatus.END_OF_GROUP)
    star.run()
    cache, held = star.relay.cache, star.relay.tracks[NAME].store
    assert cache.billed <= cache.budget and cache.stores_rejected >= 40
    assert len(held.known) >= 10 and held.knowledge.refused == 50 - len(held.known)
    assert all(len(group.objects) <= 1 for group in held.groups.values())


class Forgetful(TrackStore):
    """A publisher that has a hole it cannot tell anything of."""

    def __init__(self, *holes):
        super().__init__(NAME, authoritative=False)
        for at in range(6):
            if at not in holes:
                self.append(0, at, payload(0, at))
        self.largest = Location(0, 5)


def test_what_one_publisher_cannot_tell_is_asked_of_the_next():
    star = Star()
    one = star.publisher(Forgetful(1, 2, 4))
    two = star.publisher(Forgetful(2, 5))
    pair, _ = star.subscriber(LIVE)
    collector = star.fetch(pair, (0, 0), (0, 5))
    assert collector.payloads == {Location(0, at): payload(0, at) for at in (0, 1, 3, 4, 5)}
    assert collector.unknown == [Location(0, 2)]
    assert one.handler.fetch_ranges == [(Location(0, 0), Location(0, 5))]
    assert two.handler.fetch_ranges == [
        (Location(0, 1), Location(0, 2)),
        (Location(0, 4), Location(0, 4)),
    ]
    assert collector.repeated == []


def test_many_holes_do_not_become_as_many_fetches():
    star = Star()
    holes = range(1, 200, 2)
    stores = [TrackStore(NAME, authoritative=False), track(1, 200)]
    for at in range(200):
        if at not in holes:
            stores[0].append(0, at, payload(0, at))
    stores[0].largest = Location(0, 199)
    star.publisher(stores[0])
    two = star.publisher(stores[1])
    pair, _ = star.subscriber(LIVE)
    star.fetch(pair, (0, 0), (0, 199))
    assert 0 < len(two.handler.fetches) <= 40
    assert star.relay.counters.malformed_tracks == 0


def test_a_track_found_malformed_is_refused_to_every_session():
    star = Star()
    stores = [track(), track()]
    for store in stores:
        star.publisher(store)
    star.subscriber(LIVE)
    stores[0].append(0, 0, b"one")
    stores[1].append(0, 0, b"two")
    star.run()
    star.publisher(track(1))
    for request in (star.subscribe(star.connect()), star.fetch(star.connect())):
        assert request.failed.code == RequestErrorCode.MALFORMED_TRACK
        assert request.failed.retry_after_ms > 0


def test_the_limits_of_deliveries_are_the_relays_and_what_they_gave_up_is_counted():
    star = Star(config=RelayConfig(pending_subgroups=3, pending_datagrams=2))
    store = track()
    star.publisher(store)
    pair, _ = star.subscriber(LIVE, max_streams=2)
    limits = pair.server.scheduler.limits
    assert (limits.pending_subgroups, limits.pending_datagrams) == (3, 2)
    for group in range(12):
        store.append(group, 0, b"x")
    star.run()
    assert star.relay.numbers().deliveries.too_far_behind == 1
    star.kill(pair)
    assert star.relay.numbers().deliveries.too_far_behind == 1


def test_an_empty_track_whose_publisher_has_left_is_forgotten():
    star = Star(linger=0)
    publisher = star.connect()
    for number in range(20):
        publisher.client.publish(TrackStore(NAME._replace(name=b"%d" % number)))
    star.run()
    star.pass_time(2)
    assert len(star.relay.tracks) == 20 and not star.relay.active
    star.kill(publisher)
    star.pass_time(1)
    star.assert_empty()


@pytest.mark.parametrize("start", [0, 3])
def test_an_end_that_came_while_the_resumption_was_on_its_way_is_asked_for(start):
    star, store = Star(linger=0), track(1)
    handler = star.connect()
    handler.client.publish(store, Parameters(forward=0))
    star.run()
    pair = star.connect()
    filter_ = LocationFilter.absolute_start(start, 0)
    request = star.subscribe(pair, Parameters(location_filter=filter_, forward=0))
    star.pass_time(2)
    publish(store, 1, 0, objects=1)
    end_track(store, 2)
    request.request.update(Parameters(forward=1), lambda answer: None)
    star.run()
    star.pass_time(2)
    star.publisher(store)
    late = star.subscribe(pair, JOIN)
    assert late.payloads == everything(1) | {Location(1, 0): payload(1, 0)}
