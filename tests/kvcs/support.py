"""Publications, and consumers joined to them in memory: no socket, a real event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

import numpy as np

from kvcs.names.manifest import Manifest
from kvcs.publishing.publication import Publication
from kvcs.retrieving.consumer import Consumer
from kvsp.names.identity import Descriptor, Scope
from moqt.aio import MoqtSession
from moqt.publisher import Publisher
from moqt.session import SessionHandler
from moqt.track.store import TrackStore
from moqt.values.names import Location
from tests.kvcs.copies import Copy, served
from tests.moqt.memory import ALPN, Pair

LAYERS = 6
BLOCK = 4
BLOCKS = 5
TOKENS = list(range(1000, 1000 + BLOCK * BLOCKS))
SCOPE = Scope(bytes(range(32)))


def descriptor(**changes) -> Descriptor:
    return Descriptor.parse(
        {
            "model": "test-model",
            "model_digest": "sha-256:" + "11" * 32,
            "tokenizer_digest": "sha-256:" + "22" * 32,
            "layers": LAYERS,
            "kv_heads": 2,
            "head_dim": 8,
            "kv_dtype": "bf16",
            "positional": "rope",
            "block_tokens": BLOCK,
            "layout": "kvsp-layout-1",
            **changes,
        }
    )


DESCRIPTOR = descriptor()


def kv(described: Descriptor = DESCRIPTOR, tokens: int = len(TOKENS), seed: int = 0):
    """[(k, v), …] of every layer, random octets."""
    random = np.random.default_rng(seed)
    shape = (tokens, described.kv_heads, described.head_dim)
    octets = tokens * described.kv_heads * described.head_dim * described.element_octets

    def tensor():
        return random.integers(0, 256, octets, dtype=np.uint8).view(described.dtype).reshape(shape)

    return [(tensor(), tensor()) for _ in range(described.layers)]


def same(a, b) -> bool:
    """Equality of octets: NaNs are as good as any value."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def produced(
    described: Descriptor = DESCRIPTOR, tokens=TOKENS, cache=None, *, scope=SCOPE, **settings
) -> Publication:
    """A publication that is complete, or has as many layers as `cache`."""
    publication = Publication(scope, described, tokens, **settings)
    cache = kv(described, len(tokens)) if cache is None else cache
    for layer, (k, v) in enumerate(cache):
        publication.put_layer(layer, k, v)
    return publication


def block_by_block(publication: Publication, cache, layers=range(LAYERS)) -> Iterator[None]:
    """Puts a block of `layers` at each step."""
    for layer in layers:
        for block in range(BLOCKS):
            rows = slice(block * BLOCK, (block + 1) * BLOCK)
            publication.put_block(layer, block, *(tensor[rows] for tensor in cache[layer]))
            yield


def serving(handler, *publications):
    """`handler`, which serves the tracks that publications have now."""
    for publication in publications:
        for store in publication.tracks:
            handler.add_track(store)
    return handler


def publisher(*publications: Publication) -> Publisher:
    return serving(Publisher(), *publications)


def manifests(publication):
    store = publication.tracks[0]
    return [Manifest.parse(stored.payload, publication.namespace) for stored in store.objects()]


def altered(store: TrackStore, change) -> TrackStore:
    """A copy of a complete store; `change(location, payload)` gives a payload or None to drop."""

    def changed(location: Location, copy: Copy) -> Copy | None:
        payload = change(location, copy.payload)
        return None if payload is None else copy._replace(payload=payload)

    return served(store, changed)


def serve_first_layers(handler, publication: Publication, layers: int) -> None:
    """The data tracks of a publication have no more than these, as `handler` serves them."""
    for store in publication.tracks[1:]:
        handler.add_track(altered(store, lambda at, data: data if at.group < layers else None))


def corrupted(*locations):
    """A change for `altered`: one bit of the Data at these Locations is wrong."""
    wanted = {Location(*location) for location in locations}

    def change(location, payload):
        if location in wanted:
            return payload[:-1] + bytes([payload[-1] ^ 1])
        return payload

    return change


class Split(Publisher):
    """Serves some tracks differently to SUBSCRIBE than to FETCH."""

    def __init__(self, *publications: Publication) -> None:
        super().__init__()
        serving(self, *publications)
        self.subscribed = {}
        self.subscribes = 0
        self.fetches = []

    def subscribe_received(self, request) -> None:
        self.subscribes += 1
        store = self.subscribed.get(request.name)
        if store is not None:
            request.accept(store)
        else:
            super().subscribe_received(request)

    def fetch_received(self, request) -> None:
        self.fetches.append(request)
        super().fetch_received(request)


class Accepting(SessionHandler):
    """A relay that accepts namespaces."""

    accepts = True

    def publish_namespace_received(self, request):
        if self.accepts:
            request.accept()
        else:
            super().publish_namespace_received(request)


class Link:
    """A consumer's session joined in memory to one that serves `handler`."""

    def __init__(self, handler, *, client_config=None, server_config=None, seed=None, **transport):
        self.pair = Pair(
            server=handler,
            client_config=client_config,
            server_config=server_config,
            seed=seed,
            start=False,
            **transport,
        )
        self.handler = handler
        self.session = MoqtSession(self.pair.client)
        self.objects: Counter = Counter()
        self.pumped = 0
        self.on_pump = None
        self._task: asyncio.Task | None = None

    async def __aenter__(self):
        self.pair.client.connection_established(ALPN)
        self.pair.server.connection_established(ALPN)
        self.step()
        self._task = asyncio.create_task(self._pump())
        return self

    async def __aexit__(self, *_):
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _pump(self):
        while True:
            self.step()
            await asyncio.sleep(0)
            await asyncio.sleep(0.0002)

    def step(self):
        loop = asyncio.get_running_loop()
        self.pair.client.tick(loop.time())
        self.pair.server.tick(loop.time())
        self.pair.run()
        self.pumped += 1
        if self.on_pump is not None:
            self.on_pump(self.pumped)

    async def settle(self):
        for _ in range(5):
            await asyncio.sleep(0.001)

    async def assert_clean(self):
        """Nothing of any request is left in either session."""
        await self.settle()
        for session in (self.pair.client, self.pair.server):
            left = session.remembered().of_requests
            assert not any(left.values()), left
        others = asyncio.all_tasks() - {asyncio.current_task(), self._task}
        assert not others

    def consumer(self, *, scope=SCOPE, described=DESCRIPTOR, tokens=TOKENS, **settings):
        settings.setdefault("timeout", 10)
        settings.setdefault("grace", 0.02)
        return Consumer(self.session, scope, described, tokens, **settings)


async def until(condition) -> None:
    """Let the loop run until something holds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  (nothing of what is tested signals it)
            await asyncio.sleep(0.001)


async def collect(consumer) -> list:
    async with consumer:
        return [layer async for layer in consumer.layers()]
