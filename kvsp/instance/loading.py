"""Brings blocks into the engine's memory: from the instance's own store, else from holders
(KVSP "Prefetch Directives", "Leases", "Block Retrieval and Storage")."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, Protocol

from kvsp.blocks.container import Container, ContainerReader, LayerSections
from kvsp.blocks.layout import Octets
from kvsp.client.client import Client
from kvsp.client.errors import (
    ClientError,
    LeaseLostError,
    NotFoundError,
    RequestRefusedError,
    RequestTimeoutError,
    VerificationError,
)
from kvsp.holder.holder import BusyError, CodecUnavailableError, Holder
from kvsp.holder.parts import LeasedError
from kvsp.holder.rooms import NoRoomError
from kvsp.holder.store import BlockExistsError, MissError
from kvsp.holder.tiers.tiers import PartLostError, TierFullError, TierUnavailableError
from kvsp.instance.core.directives import CAPACITY, TIMEOUT
from kvsp.instance.engines.engine import KvBlock
from kvsp.instance.engines.pool import BlockPool, CapacityError
from kvsp.locks import Locks
from kvsp.names.codes import Codec
from kvsp.names.errors import DecodeError, KvspError
from kvsp.names.identity import Descriptor
from kvsp.names.uris import BlockId
from kvsp.records.problems import ProblemName
from kvsp.records.records import Link, ReplicaRecord

logger = logging.getLogger("kvsp.instance")

DIGEST_MISMATCH: Final = "digest-mismatch"
UNREACHABLE: Final = "unreachable"
_LINKS_KEPT: Final = 256
_AWAY_KEPT: Final = 256
_AWAY_S: Final = 30.0
_NEWEST: Final = 0.3

WriteLayer = Callable[[int, Octets, Octets], None]
"""Takes layer number, K and V of the next verified layer, ascending."""


class LoadError(KvspError):
    """A block cannot be had; `reason` is the word of a directive's status for it."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Fetcher(Protocol):
    """A way to blocks at holders, HTTP or another transport."""

    def takes(self, source: str) -> bool:
        """Whether it reaches this kind of source (a holder URI)."""
        ...

    async def fetch(
        self, source: str, block: BlockId, descriptor: Descriptor, lease_ms: int, write: WriteLayer
    ) -> None:
        """Give every verified layer of a block to `write`, ascending. Raises LoadError."""
        ...


class HttpFetcher:
    """Holders over HTTP: each block is leased while it is loaded."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._links: OrderedDict[str, Link] = OrderedDict()

    @property
    def links(self) -> list[Link]:
        """What was measured towards holders."""
        return list(self._links.values())

    def takes(self, source: str) -> bool:
        return source.startswith(("https://", "http://"))

    async def fetch(
        self, source: str, block: BlockId, descriptor: Descriptor, lease_ms: int, write: WriteLayer
    ) -> None:
        try:
            await self._fetch(source, block, descriptor, lease_ms, write)
        except LeaseLostError:
            # what came is verified, and nothing else was under the lease
            return
        except ClientError as error:
            raise LoadError(_reason(error), str(error)) from None
        except DecodeError as error:  # a source that is no base URI
            raise LoadError(UNREACHABLE, error.detail) from None

    async def _fetch(
        self, source: str, block: BlockId, descriptor: Descriptor, lease_ms: int, write: WriteLayer
    ) -> None:
        client = self._client
        asked = time.monotonic()
        async with client.lease(
            source, block.scope_id, block.compat_id, [block.block_key], ttl_ms=lease_ms
        ):
            leased = time.monotonic()
            record = await self._record(source, block)
            if record is None:
                layers = await client.get_from(source, block, descriptor, codec=Codec.RAW)
                for layer in layers:
                    write(layer.layer, layer.k, layer.v)
            else:
                stream = client.get(record, descriptor=descriptor)
                async with contextlib.aclosing(stream) as arriving:
                    async for layer in arriving:
                        write(layer.layer, layer.k, layer.v)
            octets = 2 * descriptor.layers * descriptor.section_octets()
            self._measured(source, leased - asked, octets, time.monotonic() - leased)

    async def _record(self, source: str, block: BlockId) -> ReplicaRecord | None:
        """The source's record, whose digests prove the layers; None when the index has none."""
        if self._client.index is None:
            return None
        try:
            records = await self._client.replicas(block)
        except ClientError:
            return None
        for record in records:
            lossless = record.codec in set(Codec) and Codec(record.codec).lossless
            if record.holder == source and lossless:
                return record
        return None

    def _measured(self, source: str, rtt_s: float, octets: int, seconds: float) -> None:
        rate, rtt_us = 8 * octets / max(seconds, 1e-6) / 1e6, rtt_s * 1e6
        known = self._links.pop(source, None)
        if known is not None:
            rate = known.mbit_per_s + _NEWEST * (rate - known.mbit_per_s)
            rtt_us = min(known.rtt_us, rtt_us)
        self._links[source] = Link(source, round(rate, 3), round(rtt_us, 1))
        while len(self._links) > _LINKS_KEPT:
            self._links.popitem(last=False)


def _reason(error: ClientError) -> str:
    if isinstance(error, RequestRefusedError):
        if error.problem.name is not None:
            return str(error.problem.name)
        if isinstance(error, NotFoundError):
            return str(ProblemName.UNKNOWN_RESOURCE)
        return str(ProblemName.FORBIDDEN) if error.problem.status in (401, 403) else UNREACHABLE
    if isinstance(error, VerificationError):
        return DIGEST_MISMATCH
    return TIMEOUT if isinstance(error, RequestTimeoutError) else UNREACHABLE


class BlockLoader:
    """Loads, keeps and publishes blocks of one descriptor."""

    def __init__(
        self,
        descriptor: Descriptor,
        pool: BlockPool,
        holder: Holder,
        fetchers: Sequence[Fetcher],
        *,
        base_uri: str,
        client: Client | None = None,
        export_to: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`holder` is the instance's own store. `export_to` are holders that get computed
        blocks too, through `client`, so that these survive the instance."""
        if export_to and client is None:
            raise ValueError("exporting blocks needs a client")
        self.descriptor = descriptor
        self.pool = pool
        self.holder = holder
        self.counters: Counter[str] = Counter()
        """`fetched`, `local`, `stores_rejected`, `exported`, `exports_failed`, and failed
        loads by reason."""
        self._fetchers = tuple(fetchers)
        self._base_uri = base_uri
        self._client = client
        self._export_to = tuple(export_to)
        self._locks = Locks[BlockId]()
        """One load of a block at a time: the second finds what the first one brought."""
        self._clock = clock
        self._away: dict[str, float] = {}
        """Until when a source that did not answer is asked after the others."""

        self._said: set[str] = set()

    @property
    def block_octets(self) -> int:
        """Octets of one block in the engine's memory."""
        return 2 * self.descriptor.layers * self.descriptor.section_octets()

    async def load(
        self,
        block: BlockId,
        sources: Sequence[str],
        user: str,
        *,
        lease_ms: int = 5000,
        publish: bool = True,
    ) -> KvBlock:
        """A block in the engine's memory, pinned for `user`; the first source that gives it
        is used, those that did not answer lately last. With `publish` it
        becomes a replica of this instance, too.

        Raises LoadError with the reason of the last source.
        """
        async with self._locks.of(block):
            found = self.pool.get(block)
            if found is None:
                found = await self._obtain(block, sources, lease_ms, publish)
            self.pool.pin(block, user)
            return found

    async def _obtain(
        self, block: BlockId, sources: Sequence[str], lease_ms: int, publish: bool
    ) -> KvBlock:
        octets = self.block_octets
        try:
            self.pool.reserve(octets)
        except CapacityError as error:
            raise self._failed(LoadError(CAPACITY, str(error))) from None
        try:
            made = await self._read_own(block)
            if made is None:
                made = await self._fetch(block, sources, lease_ms)
                self.counters["fetched"] += 1
            else:
                self.counters["local"] += 1
        except BaseException:
            self.pool.release(octets)
            raise
        made = self.pool.add(block, made, octets)
        if publish:
            await self.store(block, made)
        return made

    async def _fetch(self, block: BlockId, sources: Sequence[str], lease_ms: int) -> KvBlock:
        failure = LoadError(str(ProblemName.UNKNOWN_RESOURCE), "no source is named")
        now = self._clock()
        for source in sorted(sources, key=lambda each: self._away.get(each, 0.0) > now):
            if source == self._base_uri:
                continue
            fetcher = next((each for each in self._fetchers if each.takes(source)), None)
            if fetcher is None:
                failure = LoadError(UNREACHABLE, "no transport for this kind of source")
                continue
            # each source begins anew: nothing of one that failed is kept
            made = KvBlock(self.descriptor)
            try:
                await fetcher.fetch(source, block, self.descriptor, lease_ms, made.write)
            except LoadError as error:
                failure = error
                if error.reason in (UNREACHABLE, TIMEOUT):
                    self._note_away(source)
                continue
            self._away.pop(source, None)
            if made.complete:
                return made
            failure = LoadError(str(ProblemName.LAYERS_UNAVAILABLE), "some layers did not come")
        raise self._failed(failure)

    def _note_away(self, source: str) -> None:
        """A holder that ended takes as long to fail as its client tries: once, not for each
        of its blocks."""
        self._away.pop(source, None)
        self._away[source] = self._clock() + _AWAY_S
        if len(self._away) > _AWAY_KEPT:
            del self._away[next(iter(self._away))]

    def _failed(self, error: LoadError) -> LoadError:
        self.counters[f"failed_{error.reason}"] += 1
        return error

    async def _read_own(self, block: BlockId) -> KvBlock | None:
        """The block from this instance's store, None when it is not (whole) there."""
        if block not in self.holder.store:
            return None
        try:
            body = await self.holder.open(block, None, Codec.RAW, self._describe)
        except (MissError, CodecUnavailableError, DecodeError, TierUnavailableError, BusyError):
            return None
        made, reader = KvBlock(self.descriptor), ContainerReader(self.descriptor)
        try:
            async for chunk in body.chunks():
                for event in reader.feed(chunk):
                    if isinstance(event, LayerSections):
                        made.write(event.layer, event.k, event.v)
            reader.close()
        except PartLostError as error:
            await self.holder.part_lost(block, error)
            return None
        except (DecodeError, TierUnavailableError):
            return None
        finally:
            body.close()
        return made if made.complete else None

    async def _describe(self, _compat_id: bytes) -> Descriptor:
        return self.descriptor

    # --- publishing ------------------------------------------------------------------

    async def computed(self, block: BlockId, made: KvBlock) -> None:
        """The engine computed a block: keep it, publish it, and hand it to other holders."""
        if block not in self.pool:
            with contextlib.suppress(CapacityError):  # it stays in its context, and is stored
                self.pool.reserve(made.octets)
                self.pool.add(block, made, made.octets)
        await self.store(block, made)
        for holder in self._export_to:
            await self._export(holder, block, made)

    async def store(self, block: BlockId, made: KvBlock) -> None:
        """Put a block into the instance's own store, which publishes it. A store that is
        full costs the replica, not the session."""
        if block in self.holder.store:
            return
        container = Container.build(self.descriptor, made.sections())
        try:
            await self.holder.put(block, self.descriptor, _octets(container))
        except BlockExistsError:
            return
        except (NoRoomError, BusyError):
            self._rejected(CAPACITY)
        except (TierFullError, TierUnavailableError) as error:
            self._rejected(type(error).__name__)

    def _rejected(self, reason: str) -> None:
        self.counters["stores_rejected"] += 1
        self._say_once(f"own-{reason}", "blocks are not kept in the instance's store: %s", reason)

    async def _export(self, holder: str, block: BlockId, made: KvBlock) -> None:
        assert self._client is not None
        try:
            await self._client.put(holder, block, Container.build(self.descriptor, made.sections()))
            self.counters["exported"] += 1
        except ClientError as error:
            self.counters["exports_failed"] += 1
            self._say_once(f"export-{holder}", "blocks are not stored elsewhere: %s", str(error))

    def _say_once(self, what: str, text: str, value: str) -> None:
        """Log the first of many; the counters have them all."""
        if what not in self._said:
            self._said.add(what)
            logger.warning(text, value)

    async def forget(self, block: BlockId) -> None:
        """Drop a block from the engine's memory and the own store, unless it is in use."""
        if not self.pool.discard(block):
            return
        with contextlib.suppress(MissError, LeasedError, TierUnavailableError):
            await self.holder.delete(block)


async def _octets(container: Container) -> AsyncIterator[bytes]:
    for part in container:
        yield bytes(part)
