"""A publication over several connections: its layers are split, and nothing else changes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from kvcs.names.errors import PublisherLost, VerificationFailed
from kvcs.publishing.publication import Publication
from kvcs.retrieving.asking import waits
from kvcs.retrieving.consumer import Consumer
from kvcs.retrieving.lanes import lanes as of_lanes
from moqt.values.errors import ConnectError
from tests.kvcs.inside import retrieval_of
from tests.kvcs.support import (
    BLOCKS,
    DESCRIPTOR,
    LAYERS,
    SCOPE,
    TOKENS,
    Link,
    Split,
    altered,
    collect,
    corrupted,
    descriptor,
    kv,
    produced,
    publisher,
    same,
    until,
)

MANY = descriptor(layers=24)


class Site:
    """A relay that a consumer has several connections to."""

    def __init__(self, publication, connections=4, *, serve=Split):
        self.handlers = [serve(publication) for _ in range(connections)]
        self.links = [Link(handler) for handler in self.handlers]
        self._stack = AsyncExitStack()

    async def __aenter__(self):
        for link in self.links:
            await self._stack.enter_async_context(link)
        return self

    async def __aexit__(self, *error):
        await self._stack.__aexit__(*error)

    async def _session(self, index):
        await asyncio.sleep(0)
        return self.links[index].session

    def consumer(self, described=MANY, **settings) -> Consumer:
        others = [self._session(index) for index in range(1, len(self.links))]
        return self.links[0].consumer(described=described, others=others, **settings)

    def fetched(self) -> list[int]:
        """FETCH requests for data that each connection had."""
        return [
            sum(not request.name.name.startswith(b"manifest") for request in handler.fetches)
            for handler in self.handlers
        ]


@pytest.fixture
def publication():
    return produced(MANY, cache=kv(MANY))


async def test_each_connection_brings_its_share_and_the_layers_come_in_order(publication) -> None:
    async with Site(publication) as site:
        consumer = site.consumer()
        layers = await collect(consumer)
        assert [layer.index for layer in layers] == list(range(24))
        for layer, (k, v) in zip(layers, kv(MANY), strict=True):
            assert same(layer.k, k) and same(layer.v, v)
        stats = consumer.stats
        assert sum(stats.layers_by_connection) == 24
        assert min(stats.layers_by_connection) >= 3
        assert stats.objects_verified == stats.objects_confirmed == 2 * 24 * BLOCKS
        assert stats.duplicates == 0 and stats.recoveries == 0 and not stats.discarded
        assert stats.publications_tried == 1 and stats.connections_error is None
        assert all(site.fetched())


async def test_nothing_is_left_on_any_connection_and_those_it_opened_are_closed(
    publication,
) -> None:
    async with Site(publication, 3) as site:
        await collect(site.consumer())
        assert site.links[0].session.closed is None
        assert all(link.session.closed is not None for link in site.links[1:])


async def test_a_part_of_the_layers_and_blocks_is_split_too(publication) -> None:
    async with Site(publication) as site:
        consumer = site.consumer(layers=range(3, 17), blocks=2)
        layers = await collect(consumer)
        assert [layer.index for layer in layers] == list(range(3, 17))
        assert sum(consumer.stats.layers_by_connection) == 14


@pytest.mark.parametrize("lost", [0, 2])
async def test_what_a_lost_connection_had_to_bring_comes_over_the_others(publication, lost) -> None:
    async with Site(publication) as site:
        consumer = site.consumer()
        layers = []
        async with consumer:
            async for layer in consumer.layers():
                layers.append(layer.index)
                if len(layers) == 2:
                    site.links[lost].session.close()
        assert layers == list(range(24))
        assert consumer.stats.publications_tried == 1
        assert consumer.stats.duplicates == 0


async def test_when_all_connections_are_lost_it_fails_as_with_one(publication) -> None:
    async with Site(publication) as site:
        consumer = site.consumer()
        with pytest.raises(PublisherLost, match="lost"):
            async with consumer:
                async for _ in consumer.layers():
                    for link in site.links:
                        link.session.close()


async def test_what_a_silent_connection_had_to_bring_comes_over_the_others(
    publication, monkeypatch
) -> None:
    monkeypatch.setattr(of_lanes, "SILENCE", 0.05)

    class Mute(Split):
        def fetch_received(self, request) -> None:
            if self.deaf and not request.name.name.startswith(b"manifest"):
                self.fetches.append(request)
            else:
                super().fetch_received(request)

    async with Site(publication, serve=Mute) as site:
        for index, handler in enumerate(site.handlers):
            handler.deaf = index == 1
        consumer = site.consumer()
        assert len(await collect(consumer)) == 24
        assert consumer.stats.layers_by_connection[1] == 0
        assert len(site.handlers[1].fetches) <= 2 * of_lanes.DEPTH


async def test_a_connection_that_cannot_be_opened_is_told_and_done_without(publication) -> None:
    async def refused():
        raise ConnectError("the relay has no room")

    async with Link(publisher(publication)) as link:
        consumer = link.consumer(described=MANY, others=[refused()])
        assert len(await collect(consumer)) == 24
        assert consumer.stats.connections_error == "the relay has no room"
        assert consumer.stats.layers_by_connection == [24]


async def test_objects_that_are_bad_on_a_connection_fail_the_publication(publication) -> None:
    class Corrupts(Split):
        def __init__(self, *publications) -> None:
            super().__init__()
            for store in publications[0].tracks:
                self.add_track(altered(store, corrupted((5, 1))))

    async with Site(publication, serve=Corrupts) as site:
        consumer = site.consumer()
        with pytest.raises(VerificationFailed):
            await collect(consumer)
        assert consumer.stats.layers == 5
        assert consumer.octets_held == 0


async def test_what_is_still_in_production_comes_over_the_first() -> None:
    growing = Publication(SCOPE, DESCRIPTOR, TOKENS)
    cache = kv()
    async with Site(growing, 2, serve=Split) as site:
        consumer = site.consumer(described=DESCRIPTOR)
        task = asyncio.ensure_future(collect(consumer))
        await until(lambda: site.handlers[0].subscribes)
        for layer, (k, v) in enumerate(cache):
            await until(lambda due=layer: consumer.stats.layers == due)
            growing.put_layer(layer, k, v)
        assert len(await task) == LAYERS
        assert consumer.stats.mode == "live"
        assert not any(consumer.stats.layers_by_connection)
        assert site.fetched()[1] == 0


async def test_what_holders_do_not_bring_of_one_in_production_is_no_task_for_others(
    monkeypatch,
) -> None:
    monkeypatch.setattr(waits, "RECOVERY_DELAYS", (0.0, 0.0, 0.0))
    growing = Publication(SCOPE, DESCRIPTOR, TOKENS)
    cache = kv()
    async with Site(growing, 2) as site:
        consumer = site.consumer(described=DESCRIPTOR)
        task = asyncio.ensure_future(collect(consumer))
        growing.put_layer(0, *cache[0])
        await until(lambda: consumer.stats.layers)
        retrieval_of(consumer).ask_again(3, 0)
        await site.links[1].settle()
        for layer, (k, v) in list(enumerate(cache))[1:]:
            growing.put_layer(layer, k, v)
        assert len(await task) == LAYERS
        assert site.fetched()[1] == 0
