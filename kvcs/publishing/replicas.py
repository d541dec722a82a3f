"""Telling the index service of a publication (KVSP "Publishing and Withdrawing Replicas").

Each block of a publication is a replica whose holder is a `moqt` URI and whose record names
the publication, so that it is found by anybody who knows the key of one of its blocks, also
by those who know fewer tokens than it has (KVCS "Discovering Publications").
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from kvcs.names.namespace import PublicationNamespace
from kvsp.blocks.container import layer_digest
from kvsp.blocks.layout import Tensor, block_section
from kvsp.client import Client, ClientError, RequestRefusedError
from kvsp.holder.records.index import (
    DEFAULT_TTL_MS,
    CompatUnknownError,
    IndexRefusedError,
    IndexUnavailableError,
)
from kvsp.holder.records.publishing import RecordPublisher
from kvsp.holder.records.table import Published
from kvsp.names.codes import Codec
from kvsp.names.identity import Descriptor
from kvsp.names.uris import BlockId, check_moqt_uri
from kvsp.records.problems import ProblemName
from kvsp.records.records import ReplicaRecord, replica_digest

Layers = Sequence[tuple[Tensor, Tensor]]
"""K and V of every layer, `[tokens, kv_heads, head_dim]`."""

_WITHDRAW_SECONDS: Final = 5.0


def layer_digests(layers: Layers, block: int, descriptor: Descriptor) -> Iterator[bytes]:
    """The layer digests of a block of codec raw: SHA-256 of its K, then its V section."""
    rows = descriptor.block_tokens
    for tensors in layers:
        yield layer_digest(*(block_section(tensor, block, rows) for tensor in tensors))


def moqt_record(
    namespace: PublicationNamespace,
    block_key: bytes,
    layers: Layers,
    block: int,
    descriptor: Descriptor,
    url: str,
    ttl_ms: int = DEFAULT_TTL_MS,
) -> ReplicaRecord:
    """The Replica Record of a block of a publication at a relay or publisher (KVSP "Records").

    Reads the whole block. Raises DecodeError `codec-unsupported`.
    """
    digests = tuple(layer_digests(layers, block, descriptor))
    return ReplicaRecord(
        block_key=block_key,
        compat_id=namespace.compat_id,
        scope_id=namespace.scope_id,
        holder=url,
        codec=int(Codec.RAW),
        size=2 * descriptor.layers * descriptor.section_octets(),
        digest=replica_digest(digests),
        ttl_ms=ttl_ms,
        layer_digests=digests,
        moqt_namespace=namespace.text,
    )


class ClientIndex:
    """An index service, through a client: the descriptor first, then the records."""

    def __init__(self, client: Client, descriptor: Descriptor) -> None:
        self._client = client
        self._descriptor = descriptor
        self._described = False
        self._records: dict[str, ReplicaRecord] = {}

    async def publish(self, record: ReplicaRecord) -> Published:
        """Raises IndexUnavailableError, IndexRefusedError, CompatUnknownError."""
        try:
            if not self._described:
                await self.put_descriptor(self._descriptor)
            answer = await self._client.publish(record)
        except ClientError as error:
            raise self._failure(error) from None
        self._records[record.path] = record
        return Published(answer.ttl_ms, answer.created)

    async def put_descriptor(self, descriptor: Descriptor) -> None:
        """Raises IndexUnavailableError, IndexRefusedError."""
        try:
            await self._client.put_descriptor(descriptor)
        except ClientError as error:
            raise self._failure(error) from None
        self._described = True

    async def withdraw(self, path: str) -> None:
        """Raises IndexUnavailableError, IndexRefusedError."""
        record = self._records.get(path)
        if record is None:
            return
        try:
            await self._client.withdraw(record)
        except ClientError as error:
            raise self._failure(error) from None
        self._records.pop(path, None)

    async def descriptor(self, compat_id: bytes) -> Descriptor | None:
        """The descriptor of the publication, which is the only one of interest."""
        return self._descriptor if compat_id == self._descriptor.compat_id else None

    def _failure(self, error: ClientError) -> IndexUnavailableError | IndexRefusedError:
        if not isinstance(error, RequestRefusedError):
            return IndexUnavailableError(str(error))
        if error.problem.name is ProblemName.COMPAT_UNKNOWN:  # it has forgotten everything
            return CompatUnknownError(str(error))
        passing = error.problem.status >= 500 or error.problem.status in (408, 429)
        return IndexUnavailableError(str(error)) if passing else IndexRefusedError(str(error))


class Replicas:
    """The records of a complete publication: published, refreshed, and withdrawn at the end.

    A record holds the digest of every layer, so there is none before all are known.
    """

    def __init__(
        self,
        client: Client,
        namespace: PublicationNamespace,
        block_keys: Sequence[bytes],
        descriptor: Descriptor,
        url: str,
        *,
        ttl_ms: int = DEFAULT_TTL_MS,
        keep: bool = False,
    ) -> None:
        """`client` is open and has an index service. `url` is the `moqt` URI of the relay,
        or of the publisher itself. With `keep` the records are left to their TTL at the end,
        for a relay that goes on serving what it has cached.

        Raises DecodeError `bad-uri` for a URL that is no `moqt` URI.
        """
        check_moqt_uri(url)
        self._namespace = namespace
        self._keys = block_keys
        self._descriptor = descriptor
        self._url = url
        self._keep = keep
        self._records: dict[BlockId, ReplicaRecord] = {}
        index = ClientIndex(client, descriptor)
        self.publisher = RecordPublisher(index, ttl_ms=ttl_ms)
        self.publisher.describe(index.descriptor)
        self.publisher.attach(self._record)

    async def run(self, layers: Layers) -> None:
        """Publish a record for every block and keep them alive, until cancelled; then
        withdraw them. The index service may be away: that is repeated."""
        await self.publisher.start()
        try:
            for number, key in enumerate(self._keys):
                record = await asyncio.to_thread(
                    moqt_record,
                    self._namespace,
                    key,
                    layers,
                    number,
                    self._descriptor,
                    self._url,
                )
                self._records[record.block] = record
                self.publisher.changed(record.block)
            await asyncio.Event().wait()
        finally:
            if not self._keep:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WITHDRAW_SECONDS):
                        await self.publisher.drain()
            await self.publisher.stop()

    def _record(self, block: BlockId, ttl_ms: int) -> ReplicaRecord | None:
        record = self._records.get(block)
        return None if record is None else replace(record, ttl_ms=ttl_ms)
