"""Holders without a network, for a client in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsp.blocks.container import Container, parse_layers, repr_digest_field
from kvsp.client.caller import Answer
from kvsp.client.errors import ClientError, ProblemDetails, refusal
from kvsp.records.records import LeaseGrant, LeaseRequest
from tests.kvsp.instance.support import ENGINE, computed

ROUND_TRIP_S = 0.01


@dataclass
class Holders:
    """Answers in the place of a `Caller`; a source that is `hung` takes what comes and says
    nothing."""

    hung: set[str] = field(default_factory=set)
    lacking: dict[str, set[bytes]] = field(default_factory=dict)
    """Block Keys that a source does not have."""

    most: int = 1000
    """Block Keys that a lease may be of."""

    http_loopback = False
    leases: dict[str, tuple[str, tuple[bytes, ...]]] = field(default_factory=dict)
    """Source and Block Keys of each lease that was not given back."""

    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method and source of every request."""

    blocks: Mapping[bytes, Any] = field(default_factory=computed)

    def requests(self, method: str, source: str) -> int:
        return self.asked.count((method, source))

    async def _arrive(self, method: str, source: str) -> None:
        self.asked.append((method, source))
        if source in self.hung:
            await asyncio.Event().wait()
        await asyncio.sleep(ROUND_TRIP_S)

    async def ask(
        self, method: str, source: str, path: str, *, body: bytes | None = None, **_: Any
    ) -> Answer:
        await self._arrive(method, source)
        if method == "DELETE":
            del self.leases[path.rpartition("/")[2]]
            return Answer(source, 204, {}, b"")
        assert (method, path) == ("POST", "leases") and body is not None
        request = LeaseRequest.from_json(body)
        if len(request.block_keys) > self.most:
            raise _refused(source, 429, "kvsp-lease-quota")
        held = self._held(source)
        leased = tuple(key for key in request.block_keys if key in held)
        missing = tuple(key for key in request.block_keys if key not in held)
        if not leased:
            raise _refused(source, 404, "kvsp-unknown-resource")
        lease = str(uuid.uuid4())
        self.leases[lease] = source, leased
        grant = LeaseGrant(lease, request.ttl_ms, leased, missing)
        return Answer(source, 201, {}, grant.to_json())

    def _held(self, source: str) -> set[bytes]:
        return set(self.blocks) - self.lacking.get(source, set())

    @contextlib.asynccontextmanager
    async def open(self, method: str, source: str, path: str, **_: Any) -> AsyncIterator[Any]:
        await self._arrive(method, source)
        name, _, query = path.partition("?")
        key = bytes.fromhex(name.rpartition("/")[2])
        if key not in self._held(source):
            raise _refused(source, 404, "kvsp-unknown-resource")
        made = Container.build(ENGINE.descriptor, self.blocks[key].sections())
        for each in query.split("&"):
            if each.startswith("layers="):
                made = made.select(parse_layers(each.removeprefix("layers=")))
        yield _Response(made)

    async def close(self) -> None: ...


class _Response:
    def __init__(self, made: Container) -> None:
        self.headers = {
            "Content-Type": "application/kvsp-block",
            "Content-Length": str(made.total_octets),
            "Repr-Digest": repr_digest_field(made.repr_digest()),
        }
        self.content = self
        self._parts: Iterable[Any] = made

    async def iter_chunked(self, _octets: int) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield bytes(part)


def _refused(source: str, status: int, name: str) -> ClientError:
    return refusal(source, ProblemDetails(status, name))
