"""One cache for several scopes: whoever floods it displaces what is its own."""

from __future__ import annotations

import pytest

from moqt.session import SessionConfig
from moqt.values.names import FullTrackName
from relay.cache import OBJECT_OVERHEAD
from relay.config import RelayConfig
from relay.scopes import Scopes
from relay.service.metrics import RelayMetrics
from tests.relay.star import JOIN, NAMESPACE, Star, everything, track

PRICE = 12 * (1000 + OBJECT_OVERHEAD)
"""Of one track."""


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
                client_config=SessionConfig(path=path, authority="relay.example"),
            )
            assert self.read(path, number) == everything(3, size=1000)
            self.pass_time(1)
            self.kill(publisher)

    def read(self, path, number):
        name = FullTrackName(NAMESPACE, b"%d" % number)
        config = SessionConfig(path=path, authority="relay.example")
        pair, collector = self.subscriber(JOIN, name, client_config=config)
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
