"""What an Object costs a relay is the same however many are cached, and grows with the number of
its readers as much as each of them costs."""

from __future__ import annotations

import pytest

from moqt.delivery.fetch import FetchDelivery
from moqt.track.store import TrackStore
from moqt.values.messages import Parameters
from moqt.values.names import FullTrackName, Location
from relay.cache import Cache, bill
from tests.relay.calls import calls
from tests.relay.inside import make_room
from tests.relay.peers import offering
from tests.relay.star import JOIN, LIVE, NAME, NAMESPACE, Collector, Star, track


def world(cached=1, readers=1, parameters=LIVE):
    """A track of which so many Objects have passed the relay to so many readers."""
    star, store = Star(), TrackStore(NAME)
    store.append(0, 0, bytes(10))
    star.publisher(store)
    for _ in range(readers):
        star.subscriber(parameters)
    for number in range(1, cached + 1):
        store.append(0, number, bytes(10))
        if not number % 500:
            star.run()
    star.run()
    return star, store


def cost_of_another(star, store):
    """Calls, at all ends, until an Object that is published has arrived everywhere."""
    number = store.largest.object + 1
    store.append(0, number, bytes(10))
    return calls(star.run)


@pytest.mark.parametrize("cached", [1_000, 5_000])
def test_an_object_costs_the_same_however_many_are_cached(cached):
    assert cost_of_another(*world(cached)) == cost_of_another(*world(100))


def test_an_object_costs_each_further_reader_the_same():
    costs = {readers: cost_of_another(*world(readers=readers)) for readers in (1, 4, 16, 64)}
    each = (costs[4] - costs[1]) / 3
    assert costs[16] - costs[4] == 12 * each and costs[64] - costs[16] == 48 * each


@pytest.mark.parametrize("parameters", [JOIN, None])
def test_an_object_that_is_cached_costs_the_same_however_many_are(parameters):
    def each(cached):
        star, _ = world(cached)
        pair = star.connect()
        star.run()

        def retrieve():
            got = star.fetch(pair) if parameters is None else star.subscribe(pair, parameters)
            assert len(got.objects) == cached + 1

        return calls(retrieve) / cached

    assert each(4_000) <= each(1_000)  # what the request itself costs is divided among more


def asked_of_readers(readers, evictions=64):
    """How often readers of a track are asked where they are, for so many evictions, each of which
    finds nothing that all of them have passed."""
    asked = 0

    class Reader(FetchDelivery):
        def __init__(self):
            """Nothing of a session is needed."""

        @property
        def position(self):
            nonlocal asked
            asked += 1
            return Location(0, 0)

    store, cache = TrackStore(NAME), Cache(10**9)
    for number in range(evictions + 1):
        stored = store.append(0, number, bytes(10))
        cache.billed += bill(stored)
        cache.add(store, stored)
    for _ in range(readers):
        store.listeners[Reader()] = None
    for _ in range(evictions):
        cache.budget = cache.billed - 1
        assert make_room(cache, 0)
    return asked


def test_an_eviction_costs_no_more_where_ten_thousand_read_than_where_some_hundred_do():
    assert asked_of_readers(10_000) <= 4 * asked_of_readers(256)


def test_a_publish_looks_at_no_request_that_waits_for_another_track():
    def cost(others):
        star = Star(max_pending=4 * others)
        pair, wait = star.connect(), Parameters(rendezvous_timeout=9_000)
        for number in range(others):
            pair.client.subscribe(FullTrackName(NAMESPACE, b"%d" % number), Collector(), wait)
        star.run()
        assert len(star.relay.waiting) == others
        return calls(lambda: star.relay.waiting.of(NAME)), calls(lambda: offering(star, track(1)))

    assert cost(10) == cost(100)


def test_a_relay_that_is_found_wakes_only_tracks_that_wait_for_one():
    def cost(others):
        star, stores = Star(publisher_linger=5), [track(1)]
        stores += [track(1, name=FullTrackName(NAMESPACE, b"%d" % n)) for n in range(others)]
        pair, publisher = star.connect(), star.publisher(*stores)
        for store in stores:
            star.fetch(pair, name=store.name)
        star.subscribe(pair, JOIN)
        star.kill(publisher)
        assert len(star.relay.tracks) == others + 1 and len(star.relay.lingering) == 1
        session = star.connect().server
        return calls(lambda: star.relay.source_found((), session))

    assert cost(10) == cost(200)
