"""Retrieves blocks for an instance from their sources, with the planner of the client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from kvsp.client.client import Client
from kvsp.client.errors import ClientError
from kvsp.client.retrieving.receiving import Layer
from kvsp.client.retrieving.retrieval import RetrievalResult
from kvsp.client.retrieving.sources import NamedReplica, Replica
from kvsp.instance.engines.engine import KvBlock
from kvsp.instance.loading.fetchers import Fetcher, FetcherWay, LoadError, failure_of
from kvsp.names.codes import NAMESPACE_FRAGMENT, Codec
from kvsp.names.identity import Descriptor
from kvsp.names.uris import BlockId
from kvsp.records.records import ReplicaRecord

_AWAY_KEPT: Final = 256
_AWAY_S: Final = 30.0
_LOOKUP_S: Final = 1.0
"""Longest time to ask for the records of blocks whose sources are known."""

_LOOKUPS: Final = 8
"""Requests for that: each ends at a block that nobody has."""


class Wanted(NamedTuple):
    """A block to load, and where it may be had: Replica Records, or URIs of sources."""

    block: BlockId
    sources: Sequence[ReplicaRecord | str] = ()
    prior: bytes | None = None
    """Key of the block before it in its prompt, where that is known."""


def source_of(record: ReplicaRecord) -> str:
    """The source that a Replica Record is of, as directives have it."""
    if record.moqt_namespace is None:
        return record.holder
    return f"{record.holder}#{NAMESPACE_FRAGMENT}{record.moqt_namespace}"


class Sources:
    """Where blocks of one descriptor come from."""

    def __init__(
        self,
        client: Client,
        descriptor: Descriptor,
        fetchers: Sequence[Fetcher],
        base_uri: str,
        block_octets: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`client` reaches the index and holders; `base_uri` is the instance itself, which is
        no source."""
        self._client = client
        self._descriptor = descriptor
        self._fetchers = tuple(fetchers)
        self._base_uri = base_uri
        self._octets = block_octets
        self._clock = clock
        self._away: dict[str, float] = {}
        """Until when a source that did not answer is asked after the others."""

    async def retrieve(
        self,
        wanted: Sequence[Wanted],
        whole: Callable[[BlockId, KvBlock], None],
        lease_ms: int,
        seconds: float | None,
    ) -> dict[BlockId, LoadError]:
        """Retrieve blocks of one scope, many at once, the first ones first; each goes to
        `whole` when all of it is there. Why the others did not come within `seconds`.

        They are leased for `lease_ms` at holders until they have come.
        """
        now = asyncio.get_running_loop().time
        began = now()
        replicas = await self._replicas(wanted, seconds)
        result = await self._client.get_blocks(
            replicas,
            _Arriving(self._descriptor, wanted, whole),
            descriptor=self._descriptor,
            by_block=True,
            lease_ms=lease_ms,
            ways=[FetcherWay(each, self._descriptor, lease_ms) for each in self._fetchers],
            late=self._late(),
            deadline_s=None if seconds is None else max(0.0, seconds - (now() - began)),
        )
        self._note(result)
        return {
            wanted[gap.block].block: failure_of(gap.reason, result.failures.get(gap.block))
            for gap in result.missing
        }

    async def _replicas(
        self, wanted: Sequence[Wanted], seconds: float | None
    ) -> list[list[Replica]]:
        """What a retrieval is to know of each block's sources."""
        named = [each for each in wanted if any(isinstance(s, str) for s in each.sources)]
        known = await self._known([each.block for each in named], seconds)
        return [
            [
                replica
                for source in each.sources
                if (replica := self._replica(each.block, source, known)) is not None
            ]
            for each in wanted
        ]

    def _replica(
        self,
        block: BlockId,
        source: ReplicaRecord | str,
        known: Mapping[tuple[BlockId, str], ReplicaRecord],
    ) -> Replica | None:
        record = known.get((block, source)) if isinstance(source, str) else source
        if record is not None and record.moqt_namespace is None and _is_lossless(record):
            return None if record.holder == self._base_uri else record
        name = source if isinstance(source, str) else source_of(source)
        return None if name == self._base_uri else NamedReplica(block, name, self._octets)

    async def _known(
        self, blocks: Sequence[BlockId], seconds: float | None
    ) -> dict[tuple[BlockId, str], ReplicaRecord]:
        """The records that the index has of blocks, which prove layers as they come; what is
        not known in time is proven at the end of each answer."""
        known: dict[tuple[BlockId, str], ReplicaRecord] = {}
        if not blocks or self._client.index is None:
            return known
        keys, start = [block.block_key for block in blocks], 0
        with contextlib.suppress(ClientError, TimeoutError):
            async with asyncio.timeout(_LOOKUP_S if seconds is None else min(seconds, _LOOKUP_S)):
                for _ in range(_LOOKUPS):
                    found = await self._client.lookup(
                        blocks[0].scope_id,
                        blocks[0].compat_id,
                        keys[start:],
                        descriptor=self._descriptor,
                    )
                    for block, matched in zip(blocks[start:], found.blocks, strict=False):
                        known |= {(block, source_of(each)): each for each in matched.replicas}
                    start += found.matched + 1  # it ends at the first that nobody has
                    if start >= len(keys):
                        break
        return known

    def _late(self) -> list[str]:
        now = self._clock()
        return [source for source, until in self._away.items() if until > now]

    def _note(self, result: RetrievalResult) -> None:
        """A holder that ended takes as long to fail as its client tries: once, not for each
        of its blocks."""
        for arrived in result.arrived:
            self._away.pop(arrived.source, None)
        for source in result.late:
            self._away.pop(source, None)
            self._away[source] = self._clock() + _AWAY_S
        while len(self._away) > _AWAY_KEPT:
            del self._away[next(iter(self._away))]


def _is_lossless(record: ReplicaRecord) -> bool:
    return record.codec in set(Codec) and Codec(record.codec).lossless


class _Arriving:
    """Takes layers of many blocks; what is whole goes on to `whole`."""

    def __init__(
        self,
        descriptor: Descriptor,
        wanted: Sequence[Wanted],
        whole: Callable[[BlockId, KvBlock], None],
    ) -> None:
        self._descriptor = descriptor
        self._wanted = wanted
        self._whole = whole
        self._begun: dict[int, KvBlock] = {}

    def write(self, layer: Layer) -> None:
        made = self._begun.get(layer.block)
        if made is None:
            made = self._begun[layer.block] = KvBlock(self._descriptor)
        made.write(layer.layer, layer.k, layer.v)
        if made.complete:
            del self._begun[layer.block]
            self._whole(self._wanted[layer.block].block, made)
