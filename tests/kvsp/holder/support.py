"""Blocks, holders and an index that lives in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsp.blocks.codecs import encode_section
from kvsp.blocks.container import Container
from kvsp.holder.app import HolderService
from kvsp.holder.descriptors import Descriptors
from kvsp.holder.holder import Holder, HolderSettings
from kvsp.holder.leases.table import LeaseQuota
from kvsp.holder.records.index import (
    CompatUnknownError,
    IndexRefusedError,
    IndexUnavailableError,
    Kept,
    ManyUnsupportedError,
)
from kvsp.holder.records.publishing import RecordPublisher
from kvsp.holder.records.table import Published
from kvsp.holder.store import BlockInfo, Part
from kvsp.holder.tiers.tiers import MemoryTier, TierStorage
from kvsp.http.app import App
from kvsp.http.limits import HttpLimits
from kvsp.names.codes import Codec, Tier
from kvsp.names.identity import Descriptor
from kvsp.names.uris import BlockId
from kvsp.principals import Principal
from kvsp.records.records import ReplicaRecord
from tests.kvsp.support_http import BASE, Client, Principals
from tests.kvsp.support_vectors import geometry, stream

DESCRIPTOR = geometry(layers=4, kv_heads=2, head_dim=8, block_tokens=4)
SECTION = DESCRIPTOR.section_octets()
SCOPE = b"\x5c" * 16
OTHER_SCOPE = b"\x07" * 16
OCTETS = 20 + 4 * 16 + 8 * SECTION
"""A whole raw container of DESCRIPTOR."""


def block_id(number: int, scope: bytes = SCOPE, descriptor: Descriptor = DESCRIPTOR) -> BlockId:
    key = hashlib.sha256(f"block {number}".encode()).digest()
    return BlockId(descriptor.compat_id, scope, key)


def container(
    number: int, codec: Codec = Codec.RAW, descriptor: Descriptor = DESCRIPTOR
) -> Container:
    """The whole block `number`; its octets are a function of the number."""

    def section(layer: int, component: str) -> Any:
        # small numbers, so that no bf16 is an infinity or NaN
        raw = bytes(
            octet & 0x3F
            for octet in stream(f"{number} {layer} {component}", descriptor.section_octets())
        )
        return encode_section(codec, raw, descriptor)

    sections = [(section(layer, "k"), section(layer, "v")) for layer in range(descriptor.layers)]
    return Container.build(descriptor, sections, codec=codec)


def octets(made: Container) -> bytes:
    return b"".join(bytes(part) for part in made)


def info_and_part(made: Container) -> tuple[BlockInfo, Part]:
    digests = tuple(made.layer_digests())
    digest = hashlib.sha256(b"".join(digests)).digest()
    return (
        BlockInfo(made.header.codec, made.header.data_octets, digest, digests),
        Part(made.header, made.repr_digest()),
    )


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class MemoryIndex:
    """An index service without HTTP: remembers records and everything that was asked."""

    records: dict[str, ReplicaRecord] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    up: bool = True
    ttl_ms: int = 600_000
    descriptors: list[Descriptor] = field(default_factory=lambda: [DESCRIPTOR])
    takes_many: bool = True
    kept: set[str] = field(default_factory=set)
    room: int | None = None
    """How many records there is room for."""

    async def publish(self, record: ReplicaRecord) -> Published:
        self._check()
        self.calls.append(("PUT", record.path))
        if await self.descriptor(record.compat_id) is None:
            raise CompatUnknownError("status 409, kvsp-compat-unknown")
        created = record.path not in self.records
        self.records[record.path] = record
        return Published(min(self.ttl_ms, record.ttl_ms), created)

    async def keep(self, holder: str, ttl_ms: int, records: Sequence[bytes]) -> Kept:
        self._check()
        if not self.takes_many:
            raise ManyUnsupportedError("status 405")
        self.calls.append(("POST", str(len(records))))
        results: list[Published | IndexRefusedError] = []
        for text in records:
            record = ReplicaRecord.from_json(text)
            if await self.descriptor(record.compat_id) is None:
                results.append(CompatUnknownError("kvsp-compat-unknown"))
                continue
            results.append(Published(self.ttl_ms, record.path not in self.records))
            self.records[record.path] = record
            self.kept.add(record.path)
        if self.room is not None:
            for path in sorted(self.kept)[self.room :]:
                self.kept.discard(path)
                self.records.pop(path, None)
        return Kept(min(self.ttl_ms, ttl_ms), len(self.kept & self.records.keys()), results)

    async def withdraw_all(self, holder: str) -> None:
        self._check()
        self.calls.append(("DELETE", holder))
        for path in [path for path, each in self.records.items() if each.holder == holder]:
            del self.records[path]

    async def put_descriptor(self, descriptor: Descriptor) -> None:
        self._check()
        self.descriptors.append(descriptor)

    async def withdraw(self, path: str) -> None:
        self._check()
        self.calls.append(("DELETE", path))
        self.records.pop(path, None)

    async def descriptor(self, compat_id: bytes) -> Descriptor | None:
        self._check()
        return next((each for each in self.descriptors if each.compat_id == compat_id), None)

    def restart_empty(self) -> None:
        """Everything it knew is lost."""
        self.records.clear()
        self.descriptors.clear()
        self.calls.clear()

    def _check(self) -> None:
        if not self.up:
            raise IndexUnavailableError("down")

    def lists(self, block: BlockId) -> bool:
        return any(record.block == block for record in self.records.values())


READER = Principal("reader", scopes={SCOPE.hex(): frozenset({"read"})})
WRITER = Principal("writer", scopes={SCOPE.hex(): frozenset({"read", "write"})})
TENANT = Principal("tenant", scopes={OTHER_SCOPE.hex(): frozenset({"read", "write"})})
OPERATOR = Principal("operator", roles=frozenset({"operator"}))


@dataclass
class World:
    """A holder service with its index, without sockets."""

    holder: Holder
    index: MemoryIndex
    publisher: RecordPublisher
    service: HolderService
    app: App
    clock: Clock

    @property
    def client(self) -> Client:
        return Client(self.app, "writer")

    async def put(self, number: int, **more: Any) -> Any:
        return await put_block(self.client, number, **more)

    async def get(self, number: int, query: str = "", **headers: str) -> Any:
        return await self.client.get(f"blocks/{block_id(number).path}{query}", headers)

    async def lease(self, *numbers: int, ttl_ms: int = 1000, token: str = "writer") -> Any:
        return await self.client.as_(token).request(
            "POST", "leases", json_body=lease_request(*numbers, ttl_ms=ttl_ms)
        )


async def put_block(client: Client, number: int, **more: str) -> Any:
    return await client.request(
        "PUT",
        f"blocks/{block_id(number).path}",
        octets(container(number)),
        {"content-type": "application/kvsp-block", "if-none-match": "*"} | more,
    )


def lease_request(*numbers: int, ttl_ms: int = 1000) -> dict[str, Any]:
    return {
        "compat_id": DESCRIPTOR.compat_id.hex(),
        "scope_id": SCOPE.hex(),
        "block_keys": [block_id(number).block_key.hex() for number in numbers],
        "ttl_ms": ttl_ms,
    }


def make_world(
    tiers: Sequence[tuple[TierStorage, int | None]] | None = None,
    *,
    quota: LeaseQuota | None = None,
    limits: HttpLimits | None = None,
    index: MemoryIndex | None = None,
    many: bool = False,
    most: int = 256,
    **settings: Any,
) -> World:
    clock = Clock()
    index = index or MemoryIndex()
    publisher = RecordPublisher(
        index, holder=BASE, many=index if many else None, most=most, clock=clock, withdraw_s=0.2
    )
    holder = Holder(
        tiers if tiers is not None else [(MemoryTier(), 10 * OCTETS)],
        HolderSettings(base_uri=BASE, **settings),
        records=publisher,
        quota=quota,
        clock=clock,
    )
    service = HolderService(holder, publisher, Descriptors(ask=publisher.descriptor))
    app = App(
        [service],
        base_uri=BASE,
        authenticator=Principals(READER, WRITER, TENANT, OPERATOR),
        limits=limits,
    )
    return World(holder, index, publisher, service, app, clock)


def cut(data: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


HOST, DISK, REMOTE = Tier.HOST, Tier.DISK, Tier.REMOTE
