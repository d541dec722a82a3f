"""What an Object costs a relay is the same however many are cached, and grows with the number of
its readers as much as each of them costs."""

from __future__ import annotations

import pytest

from moqt.track.store import TrackStore
from tests.relay.calls import calls
from tests.relay.star import JOIN, LIVE, NAME, Star


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
