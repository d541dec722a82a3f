"""Layer 0 is on its way before the manifest has come, and is nothing before it has."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kvcs.names.codes import Component
from kvcs.names.errors import VerificationFailed
from kvcs.names.tracks import DataTrack
from kvcs.publishing.publication import Publication
from kvcs.retrieving import receivers
from kvcs.retrieving.assembly import Assembly
from kvcs.retrieving.destinations import MemoryDestination
from kvcs.retrieving.stats import Stats
from kvsp.names.identity import block_keys
from moqt.publisher import Publisher
from moqt.requests import RequestState
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import RequestError
from moqt.values.names import FullTrackName
from tests.kvcs.support import (
    BLOCKS,
    DESCRIPTOR,
    LAYERS,
    SCOPE,
    TOKENS,
    Link,
    Split,
    altered,
    block_by_block,
    collect,
    corrupted,
    kv,
    produced,
    publisher,
    same,
    serve_first_layers,
    until,
)

OBJECTS = 2 * LAYERS * BLOCKS


class ByTrips(Link):
    """One step is one round trip: what was sent goes there, and the answers come back."""

    def __init__(self, handler) -> None:
        super().__init__(handler)
        self.trips = 0

    def step(self) -> None:
        pair, now = self.pair, asyncio.get_running_loop().time()
        pair.client.tick(now)
        pair.server.tick(now)
        pair.client.ready_to_send()
        there = pair.client_transport.deliver()
        pair.server.ready_to_send()
        back = pair.server_transport.deliver()
        self.trips += there or back


async def trips_to_layer_0(publication: Publication, mode: str) -> int:
    async with ByTrips(publisher(publication)) as link:
        await link.settle()
        consumer = link.consumer(publications=[publication.namespace], mode=mode)
        before = link.trips
        async with consumer:
            async for layer in consumer.layers():
                assert layer.index == 0
                return link.trips - before
    raise AssertionError("no layer came")


async def test_layer_0_comes_with_the_manifest_and_not_a_round_trip_later(monkeypatch) -> None:
    publication = produced()
    with_it = await trips_to_layer_0(publication, "auto")
    assert await trips_to_layer_0(publication, "fetch") == with_it
    monkeypatch.setattr(receivers, "EARLY_OBJECTS", 0)
    assert await trips_to_layer_0(publication, "auto") == with_it + 1


class Watched(MemoryDestination):
    begun = 0

    def begin(self, tokens, layers) -> None:
        self.begun += 1
        super().begin(tokens, layers)


class Withholding(Split):
    """Keeps the manifest back until told."""

    def __init__(self, publication) -> None:
        super().__init__(publication)
        self.manifest = publication.tracks[0].name
        self.kept: list = []

    def subscribe_received(self, request) -> None:
        if request.name == self.manifest:
            self.kept.append(request)
        else:
            super().subscribe_received(request)

    def release(self) -> None:
        for request in self.kept:
            super().subscribe_received(request)


async def test_nothing_is_done_with_it_before_the_manifest_shows_that_it_is_ours() -> None:
    cache = kv()
    async with Link(Withholding(produced(cache=cache))) as link:
        destination = Watched(DESCRIPTOR)
        consumer = link.consumer(destination=destination, patience=5)
        collecting = asyncio.create_task(collect(consumer))
        await until(lambda: len(link.handler.fetches) >= 2)
        await link.settle()
        assert destination.begun == 0 and consumer.octets_held == 0
        assert consumer.stats.objects_verified == 0
        link.handler.release()
        layers = await collecting
        assert all(same(each.k, cache[each.index][0]) for each in layers)
        assert consumer.stats.objects_verified == consumer.stats.objects_confirmed == OBJECTS
        assert consumer.stats.duplicates == consumer.stats.recoveries == 0
        await link.assert_clean()


async def test_of_a_publication_whose_manifest_is_refused_nothing_is_written() -> None:
    handler = Split(publication := produced())
    manifest = publication.tracks[0]
    handler.add_track(
        altered(manifest, lambda at, payload: payload.replace(b'"kvcs":1', b'"kvcs":2'))
    )
    async with Link(handler) as link:
        destination = Watched(DESCRIPTOR)
        consumer = link.consumer(destination=destination)
        with pytest.raises(VerificationFailed):
            await collect(consumer)
        assert len(handler.fetches) >= 2 and destination.begun == 0
        await link.assert_clean()


@pytest.mark.parametrize("joined", [0, 1, 2, 4, 5, 7, 25])
async def test_every_object_comes_once_at_whatever_point_of_production_it_is_asked_for(
    joined,
) -> None:
    cache = kv()
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    steps = block_by_block(publication, cache)
    for _ in range(joined):
        next(steps)
    async with Link(publisher(publication)) as link:
        link.on_pump = lambda n: next(steps, None) if n > 20 and n % 2 else None
        consumer = link.consumer()
        layers = await collect(consumer)
        assert all(same(each.v, cache[each.index][1]) for each in layers)
        stats = consumer.stats
        assert (stats.duplicates, stats.recoveries, stats.discarded) == (0, 0, {})
        assert stats.objects_verified == stats.objects_confirmed == OBJECTS
        await link.assert_clean()


async def test_one_that_is_bad_or_does_not_come_is_asked_for_again() -> None:
    cache = kv()
    publication = produced(cache=cache)
    bad = altered(publication.tracks[1], corrupted((0, 1)))
    gone = altered(publication.tracks[2], lambda at, payload: None if at == (0, 3) else payload)

    class Once(Split):
        def fetch_received(self, request) -> None:
            wrong = {store.name: store for store in (bad, gone)}
            if request.name in wrong and len(self.fetches) < 2:
                self.fetches.append(request)
                request.accept(wrong[request.name])
            else:
                super().fetch_received(request)

    async with Link(Once(publication)) as link:
        consumer = link.consumer()
        layers = await collect(consumer)
        assert all(same(each.k, cache[each.index][0]) for each in layers)
        assert consumer.stats.discarded == {"digest-mismatch": 1}
        assert consumer.stats.objects_verified == consumer.stats.objects_confirmed == OBJECTS


async def test_one_request_that_hangs_does_not_keep_layer_0_until_all_else_has_come(monkeypatch):
    monkeypatch.setattr(receivers, "STALL", 0.05)
    cache = kv()
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    steps = block_by_block(publication, cache)
    for _ in range(BLOCKS):
        next(steps)

    class Hanging(Split):
        """Does not answer the first FETCH of K."""

        def fetch_received(self, request) -> None:
            if request.name != publication.tracks[1].name or self.hung is not None:
                super().fetch_received(request)
            else:
                self.hung = request

        hung = None

    async with Link(Hanging(publication)) as link:
        # something comes at all times
        link.on_pump = lambda n: next(steps, None) if n % 200 == 0 else None
        async with link.consumer() as consumer:
            layer = await anext(consumer.layers())
            assert (layer.index, publication.complete) == (0, False)
            assert same(layer.k, cache[0][0])
            assert link.handler.hung is not None and consumer.stats.recoveries == 1


@pytest.mark.parametrize("layers", [range(1), range(2, 3), range(1, 4)])
async def test_a_part_of_the_layers_begins_with_the_first_of_them(layers) -> None:
    cache = kv()
    async with Link(Split(produced(cache=cache))) as link:
        consumer = link.consumer(layers=layers)
        got = await collect(consumer)
        assert [each.index for each in got] == list(layers)
        assert all(same(each.k, cache[each.index][0]) for each in got)
        assert consumer.stats.recoveries == consumer.stats.duplicates == 0
        assert len(link.handler.fetches) == (2 if len(layers) == 1 else 4)
        await link.assert_clean()


async def test_a_peer_that_refuses_it_is_asked_again_when_the_manifest_is_there() -> None:
    cache = kv()

    class NotYet(Split):
        def fetch_received(self, request) -> None:
            if len(self.fetches) < 2:
                self.fetches.append(request)
                request.reject(RequestErrorCode.INTERNAL_ERROR, "not so early")
            else:
                super().fetch_received(request)

    async with Link(NotYet(produced(cache=cache))) as link:
        consumer = link.consumer()
        layers = await collect(consumer)
        assert all(same(each.k, cache[each.index][0]) for each in layers)
        assert consumer.stats.objects_verified == OBJECTS and consumer.stats.duplicates == 0
        await link.assert_clean()


async def test_it_ends_with_the_retrieval_when_another_publication_gave_layer_0_before() -> None:
    first, second = (produced(cache=kv(), deterministic=True) for _ in range(2))

    class Hanging(Split):
        def fetch_received(self, request) -> None:
            self.fetches.append(request)
            of_second = [each for each in self.fetches if each.name.namespace == second_fields]
            if request.name.namespace != second_fields or len(of_second) > 2:
                Publisher.fetch_received(self, request)

    second_fields = second.namespace.fields
    handler = Hanging(first, second)
    serve_first_layers(handler, first, 3)
    async with Link(handler) as link:
        consumer = link.consumer(publications=[first.namespace, second.namespace])
        assert [each.index for each in await collect(consumer)] == list(range(LAYERS))
        assert consumer.stats.publication == second.namespace.publication_id.hex()
        await link.assert_clean()


async def test_what_waits_for_a_stream_is_asked_for_once_and_not_beside_the_data() -> None:
    publication = produced()
    assembly = Assembly(
        publication.namespace,
        DESCRIPTOR,
        block_keys(SCOPE, DESCRIPTOR, TOKENS),
        range(LAYERS),
        MemoryDestination(DESCRIPTOR),
        Stats(),
    )
    asked: list = []

    class Session:
        streams = 1

        def fetch(self, name, receiver, parameters):
            if len(asked) == self.streams:
                raise RequestError(RequestErrorCode.EXCESSIVE_LOAD, "no stream")
            asked.append(name)
            return SimpleNamespace(state=RequestState.PENDING, cancel=lambda: None)

    session = Session()
    early = receivers.Early(session, assembly)
    with pytest.raises(RequestError):
        early.ask()
    v = DataTrack(Component.V, "raw", 0)
    state = receivers.TrackState(v, FullTrackName(publication.namespace.fields, v.name), 0, 100)
    early.begin(state, BLOCKS, retrieval=None, whole=True)
    assert state.early is None and state.first == (0, 0)  # as if there were none
    session.streams = 9
    early.ask()
    assert [name.name for name in asked] == [b"k.raw.s0"]
