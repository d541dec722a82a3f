"""The cache's budget, eviction and expiry (MOQT "Caching Relays")."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest

import moqt.track.store
from moqt.track.knowledge import INTERVAL_OCTETS, properties_price
from moqt.track.store import TrackStore
from moqt.track.stored import SubgroupLog
from moqt.values.codes import PropertyType, PublishDoneCode
from moqt.values.messages import KeyValue, LocationFilter, Parameters
from moqt.values.names import FullTrackName, Location
from moqt.wire.primitives import encode_key_values
from relay.cache import OBJECT_OVERHEAD, Cache, bill
from tests.relay.inside import ages_looked_at
from tests.relay.star import (
    JOIN,
    LIVE,
    NAME,
    NAMESPACE,
    Star,
    end_track,
    everything,
    payload,
    publish,
    track,
)


def grow(store, group, number, *, subgroup=0, now=0.0):
    """An Object of one octet that has begun to come."""
    return store.begin(
        Location(group, number), subgroup=subgroup, priority=0, properties=b"", length=1, now=now
    )


def watch(cache):
    """Check the budget and the books at every change."""
    reserve, seen = cache.reserve, []

    def checked(*octets):
        done = reserve(*octets)
        assert cache.billed <= cache.budget
        seen.append(cache.billed)
        return done

    cache.reserve = checked
    return seen


def billed(relay):
    """What the cache should have billed."""
    objects = [o for each in relay.tracks.values() for o in each.store.objects()]
    cache = relay.cache
    knowledge = cache.statuses * OBJECT_OVERHEAD + cache.intervals * INTERVAL_OCTETS
    return sum(map(bill, objects)) + knowledge + cache.properties


def test_the_budget_is_never_exceeded_and_evicted_objects_are_unknown():
    star, store = Star(cache_octets=20_000), track()
    star.publisher(store)
    seen = watch(star.relay.cache)
    _, collector = star.subscriber(LIVE)
    for g in range(10):
        for o in range(4):
            publish(store, g, o, 2000)
            star.run()
    assert collector.payloads == everything(10, size=2000)
    cache, held = star.relay.cache, star.relay.tracks[NAME].store
    assert max(seen) <= 20_000 and cache.evictions > 25
    assert cache.billed == billed(star.relay)
    assert cache.octets == held.octets == 2000 * cache.objects
    assert Location(0, 0) not in held.known and Location(9, 3) in held.known


def test_what_was_evicted_is_fetched_again_for_a_late_subscriber():
    star, store = Star(cache_octets=20_000), track()
    publisher = star.publisher(store)
    star.subscriber(LIVE)
    for g in range(10):
        for o in range(4):
            publish(store, g, o, 2000)
            star.run()
    _, late = star.subscriber(JOIN)
    assert late.payloads == everything(10, size=2000) and late.repeated == []
    assert publisher.handler.fetches


def test_a_slow_subscriber_gets_evicted_objects_through_a_new_upstream_fetch():
    star, store = Star(cache_octets=30_000, transit_octets=0), track()
    publisher = star.publisher(store)
    slow, collector = star.subscriber(LIVE, stream_window=3000, max_streams=2)
    for stream in range(64):
        slow.client_transport.paused.add(4 * stream + 3)
    for g in range(10):
        for o in range(4):
            publish(store, g, o, 2000)
            star.run()
    end_track(store, 10)
    star.run()
    assert star.relay.cache.evictions > 20 and len(collector.locations) < 4
    paused = set(slow.client_transport.paused)
    for stream_id in paused:
        slow.client_transport.resume_receiving(stream_id)
    star.run()
    assert collector.payloads == everything(10, size=2000) and collector.repeated == []
    assert publisher.handler.fetches
    assert star.relay.cache.billed <= 30_000


def test_a_subscriber_that_cannot_get_an_evicted_object_is_told_by_a_reset():
    star, store = Star(cache_octets=30_000, transit_octets=0), track()
    publisher = star.publisher(store)
    slow, collector = star.subscriber(LIVE, stream_window=3000)
    slow.client_transport.paused.add(3 + 4)
    for o in range(40):
        publish(store, 0, o, 2000, objects=99)
        star.run()
    publisher.handler.remove_track(NAME)  # every FETCH is refused from now on
    slow.client_transport.resume_receiving(3 + 4)
    star.run()
    assert 0 < len(collector.locations) < 40
    assert any(error is not None for _, error in collector.streams)
    publish(store, 0, 40, 2000, objects=99)
    star.run()
    assert collector.locations[-1] == Location(0, 40) and collector.repeated == []


def test_an_upstream_fetch_waits_for_a_slow_reader_instead_of_evicting_what_it_has_not_read():
    star, store = Star(cache_octets=200_000), track(50, size=10_000)
    publisher = star.publisher(store, stream_window=20_000)
    slow = star.connect(stream_window=15_000)
    for stream in range(8):
        slow.client_transport.paused.add(4 * stream + 3)
    collector = star.fetch(slow)
    assert star.relay.cache.evictions == 0
    assert star.relay.tracks[NAME].ranges.fetches[0].paused
    for stream in range(8):
        slow.client_transport.resume_receiving(4 * stream + 3)
    star.run()
    assert collector.payloads == everything(50, size=10_000)
    assert len(publisher.handler.fetches) == 1


def test_a_fetch_that_waits_for_nobody_any_more_is_given_up():
    star, store = Star(cache_octets=200_000, stall_timeout=3), track(50, size=10_000)
    star.publisher(store, stream_window=20_000)
    star.subscriber(LIVE)
    slow = star.connect(stream_window=15_000)
    for stream in range(8):
        slow.client_transport.paused.add(4 * stream + 3)
    collector = star.fetch(slow)
    assert star.relay.tracks[NAME].ranges.fetches[0].paused
    collector.request.cancel()
    star.run()
    star.pass_time(5)
    assert not star.relay.tracks[NAME].ranges.fetches


@pytest.mark.parametrize("end", ["FIN", "reset", "nobody reads"])
def test_a_stream_that_was_held_back_has_its_credit_again_however_its_fetch_ends(end):
    star, store = Star(cache_octets=200_000, stall_timeout=3), track(50, size=10_000)
    publisher = star.publisher(store, stream_window=10_000_000 if end == "FIN" else 20_000)
    slow = star.connect(stream_window=15_000)
    for stream in range(8):
        slow.client_transport.paused.add(4 * stream + 3)
    collector = star.fetch(slow)
    upstream, fetches = publisher.server_transport, star.relay.tracks[NAME].ranges.fetches
    if end != "FIN":
        assert fetches[0].paused and upstream.paused
        if end == "reset":
            for stream in tuple(upstream.paused):
                publisher.client_transport.reset(stream, 1)
        else:
            collector.request.cancel()
        star.run()
        star.pass_time(5)
    assert not upstream.paused and not fetches


def test_a_faster_reader_is_not_held_up_by_a_slow_one_of_the_same_fetch():
    star, store = Star(cache_octets=200_000), track(50, size=10_000)
    star.publisher(store, stream_window=20_000)
    slow = star.connect(stream_window=15_000)
    for stream in range(8):
        slow.client_transport.paused.add(4 * stream + 3)
    star.fetch(slow)
    fast = star.fetch(star.connect())
    assert fast.payloads == everything(50, size=10_000)
    assert fast.streams == [(2, None)]


def test_least_recently_used_goes_first():
    star = Star(cache_octets=4 * (1000 + OBJECT_OVERHEAD))
    names = [FullTrackName(NAMESPACE, b"%d" % n) for n in range(3)]
    stores = [track(name=name) for name in names]
    star.publisher(*stores)
    pair = star.connect()
    for name in names:
        star.subscribe(pair, LIVE, name)
    for n in (0, 1):
        for o in range(2):
            publish(stores[n], 0, o, 1000)
            star.run()
    star.fetch(pair, (0, 0), (0, 1), names[0])  # used: now the other track is the oldest
    for o in range(2):
        publish(stores[2], 0, o, 1000)
        star.run()
    held = [sorted(o.location for o in star.relay.tracks[n].store.objects()) for n in names]
    assert [len(h) for h in held] == [2, 0, 2]


def test_with_nothing_but_growing_objects_the_relay_stays_responsive():
    """Eviction must make progress when nothing can be evicted."""
    star, store = Star(cache_octets=50_000, transit_octets=0), track()
    star.publisher(store)
    _, collector = star.subscriber(LIVE)
    growing = [
        store.begin(Location(g, 0), subgroup=0, priority=None, properties=b"", length=20_000)
        for g in range(5)
    ]
    for _ in range(4):
        for g, each in enumerate(growing):
            store.grow(each, bytes([g]) * 5000)
            star.run()
            assert star.relay.cache.billed <= 50_000
    for g, each in enumerate(growing):
        store.complete(each)
        store.finish_subgroup(g, 0)
    star.run()
    cache = star.relay.cache
    assert cache.stores_rejected > 0
    # Those there was room for came through, the others are resets, not holes.
    assert 2 <= len(collector.locations) < 5
    assert sum(error is not None for _, error in collector.streams) >= 5 - len(collector.locations)
    publish(store, 9, 0, 1000)
    star.run()
    assert collector.locations[-1] == Location(9, 0)
    assert cache.billed == sum(bill(o) for o in star.relay.tracks[NAME].store.objects())


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("kind", ["listens", "joins", "fetches"])
def test_an_object_larger_than_the_cache_is_forwarded(kind, growing):
    star, store = Star(cache_octets=10_000), track()
    star.publisher(store)
    if kind == "listens":
        pair, collector = star.subscriber(LIVE)
    publish(store, 0, 0, objects=3)
    stored = store.begin(Location(0, 1), subgroup=0, priority=None, properties=b"", length=50_000)
    if growing:
        store.grow(stored, b"a" * 20_000)
        star.run()
    if kind == "joins":
        pair, collector = star.subscriber(JOIN)
    elif kind == "fetches":
        pair = star.connect()
        collector = star.fetch(pair)
    store.grow(stored, b"a" * (50_000 - stored.received))
    store.complete(stored)
    publish(store, 0, 2, objects=3)
    end_track(store, 1)
    star.run()
    due = {Location(0, 0): payload(0, 0), Location(0, 1): b"a" * 50_000}
    if kind != "fetches":
        due[Location(0, 2)] = payload(0, 2)
        assert collector.done == PublishDoneCode.TRACK_ENDED
    elif not growing:
        due = {at: data for at, data in due.items() if at in collector.payloads}
        assert due
    assert collector.payloads == due and not collector.repeated
    assert all(error is None for _, error in collector.streams)
    star.pass_time(2)
    assert star.relay.cache.billed <= 10_000 and star.relay.cache.stores_rejected == 0
    assert star.fetch(pair, (0, 1), (0, 1)).payloads == {Location(0, 1): b"a" * 50_000}


def test_six_growing_objects_in_a_cache_with_room_for_three_reach_who_listens():
    star, store = Star(cache_octets=3 * 11_000), track()
    star.publisher(store)
    _, collector = star.subscriber(LIVE)
    growing = [
        store.begin(Location(g, 0), subgroup=0, priority=None, properties=b"", length=10_000)
        for g in range(6)
    ]
    for _ in range(10):
        for each in growing:
            store.grow(each, bytes([each.location.group]) * 1000)
        star.run()
    assert star.relay.cache.in_transit > 20_000
    for each in growing:
        store.complete(each)
        store.finish_subgroup(each.location.group, 0)
    end_track(store, 6)
    star.run()
    assert collector.payloads == {Location(g, 0): bytes([g]) * 10_000 for g in range(6)}
    assert [error for _, error in collector.streams] == 7 * [None]
    assert collector.done == PublishDoneCode.TRACK_ENDED
    star.pass_time(2)
    assert star.relay.cache.billed <= star.relay.cache.budget


def test_a_burst_that_the_cache_does_not_hold_reaches_who_listens_without_a_fetch():
    star, store = Star(cache_octets=17 * (OBJECT_OVERHEAD + 100)), track()
    publisher = star.publisher(store)
    collectors = [star.subscriber(LIVE)[1] for _ in range(2)]
    for o in range(100):
        publish(store, 0, o, objects=100)
    star.run()
    for collector in collectors:
        assert collector.payloads == everything(1, objects=100) and not collector.repeated
        assert [error for _, error in collector.streams] == [None]
    assert not publisher.handler.fetches
    # nor does a small cache forget for a while that there is more
    assert star.fetch(star.connect()).payloads == everything(1, objects=100)


def test_one_track_takes_no_more_of_what_is_for_objects_under_way_than_its_share(caplog):
    star = Star(cache_octets=20_000, transit_octets=40_000)
    names = [FullTrackName(NAMESPACE, b"%d" % n) for n in range(2)]
    stores = [track(name=name) for name in names]
    star.publisher(*stores)
    collectors = [star.subscriber(LIVE, name)[1] for name in names]
    growing = [
        stores[0].begin(Location(g, 0), subgroup=0, priority=None, properties=b"", length=30_000)
        for g in range(4)
    ]
    growing.append(
        stores[1].begin(Location(0, 0), subgroup=0, priority=None, properties=b"", length=10_000)
    )
    for _ in range(10):
        for each in growing:
            (stores[1] if each is growing[-1] else stores[0]).grow(each, b"x" * (each.length // 10))
        star.run()
        assert star.relay.cache.billed <= 60_000
    star.run()
    assert set(collectors[1].payloads) == {Location(0, 0)}
    assert 1 <= len(collectors[0].payloads) < 4
    told = sum(error is not None for _, error in collectors[0].streams)
    assert told == 4 - len(collectors[0].payloads)
    assert star.relay.cache.stores_rejected == told


def test_an_object_larger_than_the_cache_is_refused_and_the_rest_goes_on():
    star, store = Star(cache_octets=10_000, transit_octets=0), track()
    star.publisher(store)
    _, collector = star.subscriber(LIVE)
    for o, size in enumerate((100, 20_000, 100)):
        publish(store, 0, o, size, objects=3)
    star.run()
    assert collector.locations == [Location(0, 0), Location(0, 2)]
    assert star.relay.cache.stores_rejected == 1
    # The stream could not go on after the hole, and no FIN claims that nothing is missing.
    assert all(error is not None for _, error in collector.streams)


def test_many_empty_objects_are_bounded_too():
    star, store = Star(cache_octets=50 * OBJECT_OVERHEAD, transit_octets=0), track()
    star.publisher(store)
    star.subscriber(LIVE)
    for o in range(500):
        store.append(0, o, b"")
    star.run()
    assert star.relay.cache.objects == 50 and star.relay.cache.octets == 0


def test_max_cache_duration_makes_objects_unknown():
    star = Star()
    store = track(properties=(KeyValue(0x04, 5000),))
    publisher = star.publisher(store)
    pair, _ = star.subscriber(LIVE)
    star.pass_time(1)
    publish(store, 0, 0)
    star.run()
    star.pass_time(3.5)
    assert star.fetch(pair, (0, 0), (0, 0)).payloads == {Location(0, 0): payload(0, 0)}
    assert publisher.handler.fetches == []
    star.pass_time(2)
    assert star.relay.cache.objects == 0 and star.relay.cache.expirations == 1
    assert Location(0, 0) not in star.relay.tracks[NAME].store.known
    assert star.fetch(pair, (0, 0), (0, 0)).payloads == {Location(0, 0): payload(0, 0)}
    assert len(publisher.handler.fetches) == 1


@pytest.mark.parametrize("step", [0.25, 0.5, 1.0])
def test_no_object_is_served_later_than_max_cache_duration_allows(step):
    cache = Cache(1 << 20)
    store = TrackStore(NAME, (KeyValue(0x04, 3000),), authoritative=False)
    store.on_stored = cache.add
    ticks = [n * step for n in range(40)]
    for now, following in itertools.pairwise(ticks):
        cache.expire(now)
        for stored in store.objects():
            assert following - stored.arrived <= 3.0  # it may still be read until then
        cache.reserve(store, 0, OBJECT_OVERHEAD)
        store.complete(
            store.begin(
                Location(int(now / step), 0),
                subgroup=0,
                priority=None,
                properties=b"",
                length=0,
                now=now,
            )
        )
    assert cache.expirations > 0 and cache.objects > 0


def test_an_object_that_still_grows_after_max_cache_duration_is_not_begun_any_more():
    cache, store = Cache(1 << 20), TrackStore(NAME, (KeyValue(0x04, 3000),), authoritative=False)
    stored = grow(store, 0, 0)
    cache.reserve(store, 0, bill(stored))
    cache.age(store, stored)
    for now in (1.0, 2.0, 3.0):
        cache.expire(now)
    assert store.next_object(Location(0, 0), Location(9, 9)) is None
    assert cache.expirations == 1 and not stored.gone, "who reads it already goes on"


def test_what_is_cached_comes_by_a_fill_and_not_by_a_filter_that_starts_in_the_past():
    star, store = Star(), track()
    star.publisher(store)
    star.subscriber(LIVE)
    publish(store, 0, 0)
    star.run()
    past = LocationFilter.absolute_start(0)
    _, late = star.subscriber(Parameters(location_filter=past))
    _, filled = star.subscriber(Parameters(location_filter=past, fill_parameters=Parameters()))
    publish(store, 0, 1)
    star.run()
    assert late.locations == [Location(0, 1)]
    assert filled.locations == [Location(0, 0), Location(0, 1)]


class Watched(bytearray):
    """A payload one can have a weak reference to."""


def test_an_evicted_object_is_let_go_even_while_an_older_one_stays_in_use():
    properties = (KeyValue(PropertyType.MAX_CACHE_DURATION, 600_000),)
    cache = Cache(1 << 20)
    store = TrackStore(NAME, properties, authoritative=False)
    store.on_stored = cache.add
    watched = []
    hot = None
    for number in range(200):
        assert cache.reserve(store, 0, OBJECT_OVERHEAD)
        stored = store.begin(
            Location(0, number), subgroup=0, priority=0, properties=b"", length=65536, now=number
        )
        cache.age(store, stored)
        assert cache.reserve(store, 65536)
        payload = Watched(65536)
        watched.append(weakref.ref(payload))
        store.grow(stored, payload)
        store.complete(stored)
        hot = hot or stored
        cache.use(store, hot)
    del stored, payload
    gc.collect()
    alive = [reference for reference in watched if reference() is not None]
    assert alive[0] is watched[0]
    assert 65536 * len(alive) <= cache.budget


@pytest.fixture
def looked_at(monkeypatch):
    """The entries of which it was asked whether their Object is still there."""
    return ages_looked_at(monkeypatch)


def test_a_full_cache_of_one_track_looks_at_few_ages_for_each_object_that_comes(looked_at):
    properties = (KeyValue(PropertyType.MAX_CACHE_DURATION, 600_000),)
    star = Star(cache_octets=1000 * (100 + OBJECT_OVERHEAD) + properties_price(properties))
    store = TrackStore(NAME, properties)
    star.publisher(store)
    star.subscriber(LIVE)
    for number in range(5000):
        if number == 2000:
            assert star.relay.cache.objects == 1000
            looked_at.clear()
        store.append(0, number, bytes(100))
        star.run()
    assert star.relay.cache.objects == 1000
    assert len(looked_at) < 4 * 3000


def test_max_cache_duration_among_the_immutable_properties_counts_as_well():
    nested = encode_key_values((KeyValue(PropertyType.MAX_CACHE_DURATION, 2000),))
    star = Star()
    star.publisher(
        track(1, properties=(KeyValue(PropertyType.IMMUTABLE_PROPERTIES, nested),)),
    )
    star.subscriber(JOIN)
    assert star.relay.cache.objects == 4
    star.pass_time(3)
    assert star.relay.cache.objects == 0 and star.relay.cache.expirations == 4


def test_many_growing_objects_do_not_make_each_that_comes_look_at_all_ages(looked_at):
    cache = Cache(1 << 30)
    store = TrackStore(
        NAME, (KeyValue(PropertyType.MAX_CACHE_DURATION, 600_000),), authoritative=False
    )
    for number in range(2000):
        cache.age(store, grow(store, 0, number, subgroup=number))
    assert len(looked_at) < 4 * 2000


def test_nothing_is_looked_at_when_nothing_expires(looked_at):
    cache = Cache(1 << 30)
    properties = (KeyValue(PropertyType.MAX_CACHE_DURATION, 10_000),)
    for number in range(100):
        store = TrackStore(FullTrackName(NAMESPACE, b"%d" % number), properties)
        cache.age(store, grow(store, 0, 0, now=number))
    cache.expire(4)
    assert not looked_at and cache.expirations == 0
    cache.expire(10.5)  # looks as far ahead as the last call is back: to 17
    assert cache.expirations == 7
    assert 0 < len(looked_at) < 20


def test_many_that_expire_at_once_go_a_part_at_a_time():
    cache = Cache(1 << 30)
    properties = (KeyValue(PropertyType.MAX_CACHE_DURATION, 10_000),)
    for number in range(3):
        store = TrackStore(FullTrackName(NAMESPACE, b"%d" % number), properties)
        for object_ in range(40):
            cache.age(store, grow(store, 0, object_, now=1))
    cache.expire(4, 50)
    assert cache.expirations == 0 and not cache.expire_more(50)
    cache.expire(12, 50)
    assert cache.expirations == 50
    left = [cache.expire_more(50), cache.expirations, cache.expire_more(50), cache.expirations]
    assert left == [True, 100, False, 120]


def test_a_track_that_is_published_again_with_a_shorter_duration_expires_by_it():
    star = Star()
    first = star.publisher(
        track(1, properties=(KeyValue(PropertyType.MAX_CACHE_DURATION, 600_000),))
    )
    star.subscriber(JOIN)
    assert star.relay.cache.objects == 4
    star.kill(first)
    star.publisher(track(1, properties=(KeyValue(PropertyType.MAX_CACHE_DURATION, 1000),)))
    star.subscriber(JOIN)
    assert star.relay.cache.objects == 4
    star.pass_time(3)
    assert star.relay.cache.objects == 0 and star.relay.cache.expirations == 4


class Counted(dict):
    """Counts how often its values are gone through."""

    looks = 0

    def values(self):
        Counted.looks += 1
        return super().values()


class Moving(list):
    """Counts the entries that move up when one before them is deleted."""

    moved = 0

    def __delitem__(self, index):
        Moving.moved += len(self) - 1 - index
        super().__delitem__(index)


def one_large_group(cache, objects):
    store = TrackStore(NAME, authoritative=False)
    store.on_stored = cache.add
    for number in range(objects):
        assert cache.reserve(store, OBJECT_OVERHEAD + 1)
        stored = grow(store, 0, number)
        store.grow(stored, b"x")
        store.complete(stored)
    return store


def test_an_eviction_from_a_large_group_does_not_look_through_the_group():
    cache = Cache(1000 * (OBJECT_OVERHEAD + 1))
    store = one_large_group(cache, 1000)
    store.groups[0].objects = Counted(store.groups[0].objects)
    Counted.looks = 0
    assert cache.reserve(store, 500 * (OBJECT_OVERHEAD + 1))
    assert cache.evictions == 500 and len(store.groups[0].objects) == 500
    assert Counted.looks == 0


def test_forgetting_a_large_group_moves_nothing_for_each_object():
    cache = Cache(1000 * (OBJECT_OVERHEAD + 1))
    store = one_large_group(cache, 1000)
    store.finish_subgroup(0, 0)
    store.groups[0].ids = Moving(store.groups[0].ids)
    Moving.moved = 0
    cache.forget(store)
    assert cache.objects == cache.billed == 0 and not store.groups
    assert Moving.moved == 0


def test_an_eviction_does_not_look_at_all_subgroups_of_an_empty_group(monkeypatch):
    looked_at = 0

    class Counting(SubgroupLog):
        def __getattribute__(self, name):
            nonlocal looked_at
            looked_at += name == "readers"
            return super().__getattribute__(name)

    monkeypatch.setattr(moqt.track.store, "SubgroupLog", Counting)
    store = TrackStore(NAME, authoritative=False)
    for number in range(1000):
        stored = grow(store, 0, number, subgroup=number)
        store.grow(stored, b"x")
        store.complete(stored)
        if number:
            store.finish_subgroup(0, number - 1)
        store.evict(stored)
    assert store.octets == 0 and len(store.groups[0].subgroups) == 1000
    assert looked_at < 4 * 1000
    store.finish_subgroup(0, 999)
    store.forget_group(0)
    assert not store.groups
