"""One cache for several scopes: whoever floods it displaces what is its own."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from moqt.session import SessionConfig
from moqt.track.knowledge import INTERVAL_OCTETS
from moqt.track.store import TrackStore
from moqt.values.codes import RequestErrorCode
from moqt.values.messages import KeyValue
from moqt.values.names import FullTrackName, Location
from relay.cache import OBJECT_OVERHEAD, Cache
from relay.config import RelayConfig
from relay.scopes import Scopes
from relay.service.metrics import RelayMetrics
from tests.relay.star import JOIN, LIVE, NAME, NAMESPACE, Star, everything, track

PRICE = 12 * (1000 + OBJECT_OVERHEAD)
"""Of one track."""


def at(path):
    return SessionConfig(path=path, authority="relay.example")


class Tenants(Star):
    """A Star whose relay has several scopes, and room for about ten tracks."""

    def __init__(self, **settings):
        super().__init__()
        settings = {"cache_octets": 10 * PRICE + 9000, "publisher_linger": 0, **settings}
        self.relay = Scopes(RelayConfig(**settings))

    def brings(self, path, *numbers):
        """The tenant has these tracks published, read once, and left to the cache."""
        for number in numbers:
            name = FullTrackName(NAMESPACE, b"%d" % number)
            publisher = self.publisher(
                track(3, size=1000, ended=True, name=name),
                client_config=at(path),
            )
            assert self.read(path, number) == everything(3, size=1000)
            self.pass_time(1)
            self.kill(publisher)

    def read(self, path, number):
        name = FullTrackName(NAMESPACE, b"%d" % number)
        pair, collector = self.subscriber(JOIN, name, client_config=at(path))
        self.kill(pair)
        return collector.payloads

    def has(self, path):
        """How many tracks of the tenant are cached in whole."""
        relay = self.relay.relays[path]
        return sum(held.store.is_complete() for held in relay.tracks.values())

    def octets(self, path):
        return self.relay.cache.shares[path].octets


def test_a_scope_that_is_alone_may_have_all_of_the_cache():
    star = Tenants()
    star.brings("/a", *range(14))
    assert star.has("/a") >= 9 and star.octets("/a") > 0.9 * star.relay.cache.budget


def test_a_flood_of_one_tenant_displaces_nothing_of_another_that_has_less():
    star = Tenants()
    star.brings("/quiet", 0, 1, 2)
    star.brings("/loud", *range(30))
    assert star.has("/quiet") == 3
    for number in range(3):
        assert star.read("/quiet", number) == everything(3, size=1000)


def test_who_has_more_than_its_share_gives_to_who_comes_later():
    star = Tenants()
    star.brings("/first", *range(12))
    star.brings("/second", *range(12))
    assert star.has("/first") in (4, 5) and star.has("/second") in (4, 5)
    both = [star.octets("/first"), star.octets("/second")]
    assert min(both) / max(both) > 0.8 and sum(both) <= star.relay.cache.budget


def test_how_many_scopes_there_are_costs_no_eviction_more():
    class Counting(dict):
        looked_at = 0

        def values(self):
            self.looked_at += len(self)
            return super().values()

    costs = []
    for scopes in (16, 64):
        star = Tenants(max_scopes=scopes + 1, cache_octets=(10 + scopes) * PRICE)
        for number in range(scopes):
            star.brings(f"/{number}", 0)
        cache = star.relay.cache
        cache.shares = counting = Counting(cache.shares)
        before = cache.evictions
        star.brings("/loud", *range(25))
        assert star.has("/0") == star.has(f"/{scopes - 1}") == 1
        costs.append(counting.looked_at / (cache.evictions - before))
    assert costs[1] < 1.5 * costs[0] + 1


@pytest.mark.parametrize("alone", [True, False])
def test_a_scope_has_no_more_than_its_quota(alone, caplog):
    star = Tenants(cache_octets_per_scope=3 * PRICE + 4000)
    if not alone:
        star.brings("/other", 0)
    star.brings("/a", *range(8))
    assert star.has("/a") in (2, 3) and star.octets("/a") <= 3 * PRICE + 4000
    assert "/a is at its limit in memory (cache_octets_per_scope" in caplog.text


def test_shares_add_up_to_what_is_billed_and_go_with_their_scopes():
    star = Tenants(linger=1, max_scopes=2)
    star.brings("/a", 0, 1)
    star.brings("/b", 0)
    cache = star.relay.cache
    assert star.octets("/a") + star.octets("/b") == cache.billed > 0
    assert len(cache.owners) == 3
    star.brings("/c", 0)  # one path too many: one that only the cache knows makes room
    assert set(cache.shares) == set(star.relay.relays) and len(cache.shares) == 2
    assert sum(share.octets for share in cache.shares.values()) == cache.billed
    assert len(cache.owners) == sum(len(r.tracks) for r in star.relay.relays.values())


def test_what_each_scope_has_is_a_metric():
    star = Tenants()
    star.brings("/a", 0)
    registry = RelayMetrics(star.relay).registry
    has = registry.get_sample_value("kvcs_relay_scope_cache_bytes", {"scope": "/a"})
    assert has == star.octets("/a") > 0


def test_what_is_known_of_the_tracks_of_a_scope_is_within_its_quota_too():
    most = 20 * INTERVAL_OCTETS
    cache = Cache(1 << 20, per_scope=most)
    share = cache.share("/a")
    store = TrackStore(NAME, authoritative=False)
    share.take(store)
    for number in range(0, 200, 2):
        store.mark_nonexistent(Location(0, number), Location(0, number))
    assert 0 < share.octets <= most and cache.intervals_refused
    assert not share.room(most) and cache.share("/b").room(most)


def test_objects_under_way_beyond_the_quota_of_a_scope_take_no_room_from_what_is_known():
    cache = Cache(1 << 20, per_scope=10_000)
    share, store = cache.share("/a"), track(name=NAME)
    share.take(store)
    store.on_stored = cache.add
    store.add_listener(Mock())  # who has begun to send nothing yet
    for group in range(20):
        assert cache.reserve(store, 1000, OBJECT_OVERHEAD)
        store.append(group, 0, bytes(1000))
    assert share.octets > 10_000 and share.room(INTERVAL_OCTETS)


def test_properties_of_a_publication_are_within_the_quota_of_its_scope():
    star = Tenants(cache_octets_per_scope=1000)
    link, refused = star.connect(client_config=at("/a")), []
    large = TrackStore(NAME, (KeyValue(0x41, bytes(2000)),))
    link.client.publish(large, on_ended=refused.append)
    star.run()
    (error,) = refused
    assert error.code == RequestErrorCode.EXCESSIVE_LOAD and star.octets("/a") == 0


def test_what_a_fetch_that_runs_leaves_out_is_billed_to_its_scope():
    star, store = Tenants(), TrackStore(NAME)
    for number in range(0, 100, 2):
        store.append(0, number, b"")
    star.publisher(store, client_config=at("/a"))
    share, billed = star.relay.cache.shares["/a"], [0]
    count = share.count_intervals
    share.count_intervals = lambda more: (count(more), billed.append(billed[-1] + more))
    link = star.connect(client_config=at("/a"))
    assert len(star.fetch(link, (0, 0), (0, 98)).locations) == 50
    assert max(billed) == 49 and billed[-1] == 0


def test_what_grows_of_one_tenant_leaves_half_of_the_room_for_objects_under_way_to_others():
    """However many tracks it takes for it; a tenant that is alone may have all."""
    star = Tenants(cache_octets=20_000, transit_octets=40_000)
    stores, growing, collectors = {}, [], []
    for path, size, numbers in (("/a", 30_000, range(4)), ("/b", 10_000, range(1))):
        for number in numbers:
            name = FullTrackName(NAMESPACE, b"%d" % number)
            store = stores[path, number] = track(name=name)
            star.publisher(store, client_config=at(path))
            collectors.append(star.subscriber(LIVE, name, client_config=at(path))[1])
            begun = store.begin(
                Location(0, 0), subgroup=0, priority=None, properties=b"", length=size
            )
            growing.append((store, begun))
    for _ in range(10):
        for store, each in growing:
            store.grow(each, b"x" * (each.length // 10))
        star.run()
        assert star.relay.cache.billed <= 60_000
    *of_a, of_b = collectors
    assert set(of_b.payloads) == {Location(0, 0)}
    told = [error for each in of_a for _, error in each.streams if error is not None]
    assert 1 <= len(told) < 4 and len(told) + sum(len(each.payloads) for each in of_a) == 4
    assert not any(share.growing for share in star.relay.cache.shares.values())
