"""A deployment on loopback: an index and holders as they are, on free ports, and a client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvsp.blocks.container import Container, parse_layers, repr_digest_field
from kvsp.client import Client, ClientLimits, Layer
from kvsp.holder.app import HolderService
from kvsp.holder.descriptors import Descriptors
from kvsp.holder.holder import Holder, HolderSettings
from kvsp.holder.records.index_client import HttpIndexClient
from kvsp.holder.records.publishing import RecordPublisher
from kvsp.holder.tiers.tiers import MemoryTier
from kvsp.http.app import App
from kvsp.http.server import Server, ServerSettings
from kvsp.index.app import IndexApp
from kvsp.index.service import IndexLimits, IndexService
from kvsp.index.sqlite import SqliteStore
from kvsp.names.codes import Codec, Tier
from kvsp.names.identity import Scope, block_keys
from kvsp.names.uris import BlockId
from kvsp.principals import Principal
from kvsp.records.records import ReplicaRecord, replica_digest
from tests.kvsp.holder.support import DESCRIPTOR, OCTETS, container, octets
from tests.kvsp.support_http import Principals, caller

SCOPE = Scope(bytes(range(32)))
OTHER_SCOPE = Scope(bytes([7]) * 32)
TOKENS = list(range(18))
"""Four complete blocks of DESCRIPTOR and two tokens more."""

KEYS = block_keys(SCOPE, DESCRIPTOR, TOKENS)
LAYERS = DESCRIPTOR.layers
HOST = Tier.HOST

FAST = ClientLimits(
    connect_s=2, request_s=3, block_s=3, stall_s=2, attempts=2, max_wait_s=1, hedge_s=0.05
)


def block_of(number: int) -> BlockId:
    return BlockId(DESCRIPTOR.compat_id, SCOPE.scope_id, KEYS[number])


def client_principal(name: str = "client", **more: Any) -> Principal:
    rights = {SCOPE.scope_id.hex(): frozenset({"read", "write"})}
    return Principal(name, **({"scopes": rights} | more))


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """Any ASGI application on a free port; its base URI."""
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    task = asyncio.create_task(server.serve())
    await eventually(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/kvsp/"
    finally:
        server.should_exit = server.force_exit = True
        await task


@contextlib.asynccontextmanager
async def serving_app(make: Callable[[str], App], **settings: Any) -> AsyncIterator[App]:
    """An application of the project on a free port; `make` gets its base URI."""
    # the port is known before the application that needs to know it
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = make(f"http://127.0.0.1:{port}/kvsp/")
    server = Server(app, ServerSettings(port=port, drain_s=1, **settings))
    task = asyncio.create_task(server.serve())
    await eventually(lambda: server.started or task.done())
    try:
        yield app
    finally:
        server.should_exit = True
        await task


@dataclass
class World:
    """An index, holders and a client. Every principal's token is its name."""

    index: App
    service: IndexService
    client: Client
    holders: list[Holder] = field(default_factory=list)
    apps: list[App] = field(default_factory=list)

    @property
    def uris(self) -> list[str]:
        return [app.base_uri for app in self.apps]

    async def fill(self, *numbers: int, holder: int = 0, codec: Codec = Codec.RAW) -> None:
        """Store blocks at a holder, which publishes them."""
        for number in numbers:
            put = await self.client.put(
                self.uris[holder], block_of(number), container(number, codec)
            )
            assert put.created

    async def records(self, count: int = 0) -> list[tuple[ReplicaRecord, ...]]:
        """The replicas of each leading block, once `count` blocks are matched."""
        found: list[tuple[ReplicaRecord, ...]] = []

        async def enough() -> bool:
            found[:] = await self._records()
            return len(found) >= count

        await eventually(enough)
        return found

    async def _records(self) -> list[tuple[ReplicaRecord, ...]]:
        found = await self.client.lookup(
            SCOPE.scope_id, DESCRIPTOR.compat_id, KEYS, descriptor=DESCRIPTOR
        )
        return [block.replicas for block in found.blocks]


@contextlib.asynccontextmanager
async def world(
    path: Path,
    holders: int = 1,
    *,
    limits: ClientLimits = FAST,
    token: str = "client",
    idle_s: int = 75,
    room: int = 100 * OCTETS,
    **settings: Any,
) -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as stack:
        service = IndexService(
            SqliteStore(path / "index.db"), limits=IndexLimits(http_loopback=True)
        )
        names = [f"holder{number}" for number in range(holders)]
        known: list[Principal] = [
            client_principal(publishes_for=frozenset({"https://h9.example/kvsp/"})),
            Principal("stranger"),
        ]
        principals = Principals(*known)

        def index(base: str) -> App:
            return App([IndexApp(service)], base_uri=base, authenticator=principals)

        index_app = await stack.enter_async_context(serving_app(index, idle_s=idle_s))
        client = Client(index_app.base_uri, token=token, http_loopback=True, limits=limits)
        await stack.enter_async_context(client)
        made = World(index_app, service, client)
        if token == "client":
            await client.put_descriptor(DESCRIPTOR)
        for name in names:

            def holder(base: str, name: str = name) -> App:
                principals.by_token[f"Bearer {name}"] = client_principal(
                    name, uris=frozenset({base})
                )
                away = HttpIndexClient(index_app.base_uri, caller(name))
                stack.push_async_callback(away.close)
                publisher = RecordPublisher(away)
                made.holders.append(
                    Holder(
                        [(MemoryTier(), room)],
                        HolderSettings(base_uri=base, **settings),
                        records=publisher,
                    )
                )
                descriptors = Descriptors(ask=publisher.descriptor)
                return App(
                    [HolderService(made.holders[-1], publisher, descriptors)],
                    base_uri=base,
                    authenticator=principals,
                )

            made.apps.append(await stack.enter_async_context(serving_app(holder, idle_s=idle_s)))
        yield made


class Fake:
    """A holder that answers as a test says: `answer` gets each request."""

    def __init__(self, answer: Callable[[Request], Any]) -> None:
        self.requests: list[Request] = []
        self._answer = answer
        methods = ["GET", "PUT", "POST", "DELETE"]
        self.app = Starlette(routes=[Route("/{path:path}", self._handle, methods=methods)])

    async def _handle(self, request: Request) -> Response:
        self.requests.append(request)
        answer = self._answer(request)
        return await answer if asyncio.iscoroutine(answer) else answer


def record_at(holder: str, made: Container, number: int = 0, **more: Any) -> ReplicaRecord:
    """The Replica Record of a container at a holder."""
    digests = tuple(made.layer_digests())
    block = block_of(number)
    members: dict[str, Any] = {
        "block_key": block.block_key,
        "compat_id": block.compat_id,
        "scope_id": block.scope_id,
        "holder": holder,
        "codec": int(made.header.codec),
        "size": made.header.data_octets,
        "digest": replica_digest(digests),
        "ttl_ms": 60_000,
        "layer_digests": digests,
    }
    return ReplicaRecord(**(members | more))


def block_answer(made: Container, **fields: str | None) -> Response:
    """What a right holder answers to a GET of a container; None leaves a field out."""
    headers = {
        "content-type": "application/kvsp-block",
        "repr-digest": repr_digest_field(made.repr_digest()),
    }
    changed = {name.replace("_", "-"): value for name, value in fields.items()}
    kept = {name: value for name, value in (headers | changed).items() if value is not None}
    return Response(octets(made), headers=kept)


def problem(status: int, name: str | None, **more: Any) -> Response:
    """Problem details; `retry_after` becomes the field."""
    headers = {"content-type": "application/problem+json"}
    if (wait := more.pop("retry_after", None)) is not None:
        headers["retry-after"] = str(wait)
    kind = f"https://iana.org/assignments/http-problem-types#{name}" if name else "about:blank"
    body = {"type": kind, "status": status, "title": "", "detail": "so it is"} | more
    return Response(json.dumps(body), status, headers)


def select(request: Request, made: Container) -> Container:
    """The layers of a container that a request asks for."""
    layers = request.query_params.get("layers")
    return made if layers is None else made.select(parse_layers(layers))


class Memory(dict[tuple[int, int], tuple[bytes, bytes]]):
    """A destination that keeps what it is given, and refuses anything twice."""

    def write(self, layer: Layer) -> None:
        assert (layer.block, layer.layer) not in self
        self[layer.block, layer.layer] = (bytes(layer.k), bytes(layer.v))

    def holds(self, block: int, made: Container) -> bool:
        """Whether it has all layers of a raw container as that block."""
        return all(
            self.get((block, layer)) == (bytes(k), bytes(v))
            for layer, (k, v) in enumerate(made.sections)
        )


async def eventually(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds; it may be a coroutine function."""

    async def met() -> bool:
        value = condition()
        return bool(await value if asyncio.iscoroutine(value) else value)

    async with asyncio.timeout(10):
        while not await met():  # noqa: ASYNC110  (a server has no event for it)
            await asyncio.sleep(0.005)
