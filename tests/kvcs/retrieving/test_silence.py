"""A subscription that stands and brings nothing for a while is not one that has ended."""

from __future__ import annotations

import asyncio

import pytest

from kvcs.names.errors import PublisherLost
from kvcs.retrieving import retrieval
from kvcs.retrieving.asking import waits
from moqt.publisher import Publisher
from moqt.requests import IncomingFetch, RequestState
from moqt.track.store import TrackStore
from moqt.values.names import FullTrackName, Location
from tests.kvcs.support import BLOCK, BLOCKS, Link, collect, kv, produced, same, serving

STANDS_AT = Location(2, 3)


class Standing(Publisher):
    """Its data tracks stand still in the middle; the manifest says that all is produced."""

    def __init__(self, publication) -> None:
        super().__init__()
        manifest, *data = publication.tracks
        self.add_track(manifest)
        self.pairs = [(store, TrackStore(store.name, store.properties)) for store in data]
        self.fetches = 0
        self.asked_often = asyncio.Event()
        for _, standing in self.pairs:
            self.add_track(standing)

    def fetch_received(self, request) -> None:
        self.fetches += 1
        if self.fetches == 12:  # more than would give a publication up
            self.asked_often.set()
        super().fetch_received(request)

    def go_on(self, start: Location, end: Location) -> None:
        for whole, standing in self.pairs:
            for stored in whole.objects():
                if start <= stored.location < end and not stored.status:
                    standing.append(*stored.location, bytes(stored.payload))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(retrieval, "STALL", 0.05)
    monkeypatch.setattr(waits, "RECOVERY_DELAYS", (0.0, 0.005, 0.01))
    monkeypatch.setattr(waits, "RECOVERY_PAUSE", 0.01)


async def test_what_a_standing_subscription_owes_still_comes_when_it_goes_on():
    """Nobody has it yet, so that no FETCH could bring it: the publisher only paused."""
    cache = kv()
    handler = Standing(produced(cache=cache))
    async with Link(handler) as link, link.consumer(mode="live") as consumer:
        task = asyncio.create_task(collect(consumer))
        await link.settle()
        handler.go_on(Location(0, 0), STANDS_AT)
        async with asyncio.timeout(10):
            await handler.asked_often.wait()
        assert not task.done()
        handler.go_on(STANDS_AT, Location(99, 0))
        layers = await task
        assert [layer.index for layer in layers] == list(range(len(cache)))
        for layer, (k, v) in zip(layers, cache, strict=True):
            assert same(layer.k, k[: BLOCK * BLOCKS]) and same(layer.v, v[: BLOCK * BLOCKS])


async def test_a_subscription_that_stays_silent_is_given_up_in_the_end(monkeypatch):
    monkeypatch.setattr(waits, "PATIENCE", 0.2)
    handler = Standing(produced())
    async with Link(handler) as link:
        task = asyncio.create_task(collect(link.consumer(mode="live")))
        await link.settle()
        handler.go_on(Location(0, 0), STANDS_AT)
        with pytest.raises(PublisherLost, match="has no layer 2, block 3"):
            await task
        await link.assert_clean()


def begins_at(request) -> tuple[int, int]:
    asked = request.parameters.location_filter
    return asked.start_group, asked.start_object


class Reticent(Publisher):
    """Accepts the first FETCH of each data track, and never opens its stream."""

    def __init__(self, publication) -> None:
        super().__init__()
        _, *data = publication.tracks
        serving(self, publication)
        self.silent: dict[FullTrackName, IncomingFetch | None] = {s.name: None for s in data}
        self.states: list[RequestState] = []
        """Of the first FETCH of a track, whenever another came that begins where it does."""

    def fetch_received(self, request) -> None:
        super().fetch_received(request)
        if request.name not in self.silent:
            return
        first = self.silent[request.name]
        if first is None:
            self.silent[request.name] = request
            request.session.scheduler.forget(request.delivery.flow)
        elif begins_at(request) == begins_at(first):
            self.states.append(first.state)


async def test_a_fetch_that_was_given_up_is_cancelled_before_another_asks_for_the_same():
    handler = Reticent(produced())
    async with Link(handler) as link:
        assert len(await collect(link.consumer(mode="fetch"))) == len(kv())
        assert set(handler.states) == {RequestState.CLOSED}
