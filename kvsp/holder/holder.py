"""The asyncio shell of a holder: carries out what `store` and `leases` decide."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from kvsp.holder.leases import Lease, LeaseQuota, LeaseTable
from kvsp.holder.reading import Body, Sections, StoredBody, header_for, transcode
from kvsp.holder.records.publishing import RecordSource
from kvsp.holder.store import (
    BlockExistsError,
    BlockInfo,
    Found,
    MissError,
    MissReason,
    NoRoomError,
    Part,
    Step,
    Store,
)
from kvsp.holder.tiers.tiers import (
    PartLostError,
    PartReader,
    PartWriter,
    TierFullError,
    TierStorage,
    TierUnavailableError,
    pieces,
)
from kvsp.holder.uninterrupted import to_the_end, uninterrupted
from kvsp.holder.upload import MAX_CONTAINER_OCTETS, Upload
from kvsp.names.codes import Codec, Tier
from kvsp.names.errors import KvspError
from kvsp.names.identity import Descriptor
from kvsp.names.uris import BlockId
from kvsp.records.records import ReplicaRecord, Residency

logger = logging.getLogger("kvsp.holder")

_RANGE_DIGESTS: Final = 4096
_PROMOTE_AFTER_READS: Final = 2
_PROMOTED_SHARE: Final = 4
"""A block larger than this fraction of a faster tier is not copied into it."""


class LeasedError(KvspError):
    """The block is leased. `ttl_ms` is what remains of the longest lease."""

    def __init__(self, ttl_ms: int) -> None:
        super().__init__(f"leased for {ttl_ms} ms")
        self.ttl_ms = ttl_ms


class CodecUnavailableError(KvspError):
    """The block is not served in that codec. `codecs` are those it is served in."""

    def __init__(self, codecs: Sequence[int]) -> None:
        super().__init__("codec not available")
        self.codecs = tuple(codecs)


class BusyError(KvspError):
    """As much of this is going on as may; it is worth asking again."""


class Records(Protocol):
    """Who tells the index (`kvsp.holder.records.publishing`)."""

    def attach(self, source: RecordSource) -> None:
        """Where records come from."""
        ...

    def changed(self, block: BlockId) -> None:
        """The block is new, or resides elsewhere than before."""
        ...

    async def withdraw(self, block: BlockId) -> None:
        """Withdraw the record of a block that is about to go or has gone. Never raises."""
        ...

    def remaining_s(self, block: BlockId) -> float:
        """What remains of the record's TTL at the index, in seconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderSettings:
    """How a holder behaves. Octets, seconds."""

    base_uri: str
    max_container_octets: int = MAX_CONTAINER_OCTETS
    uploads: int = 64
    transcodings: int = 2
    lossy_transcoding: bool = False
    scratch: Path | None = None
    """Folder for temporary files of transcodings; the system's when None."""


class Holder:
    """Blocks in tiers, fastest first, with leases and records."""

    def __init__(
        self,
        tiers: Sequence[tuple[TierStorage, int | None]],
        settings: HolderSettings,
        *,
        records: Records,
        quota: LeaseQuota | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tiers` with their budgets in octets; new blocks go to the first one that
        outlives the process, or to the first one when none does. The default quota is a
        quarter of all budgets."""
        self.settings = settings
        self.records = records
        records.attach(self.record)
        self.clock = clock
        self._storage: Mapping[Tier, TierStorage] = {each.tier: each for each, _ in tiers}
        self.store = Store(
            {each.tier: budget for each, budget in tiers},
            lambda block, now: self.leases.is_leased(block, now),
        )
        self.leases = LeaseTable(quota or LeaseQuota(octets=self.store.capacity // 4))
        self._home = next(
            (tier for tier in self.store.tiers if tier is not Tier.HOST), self.store.tiers[0]
        )
        self._uploads = asyncio.Semaphore(settings.uploads)
        self._transcodings = asyncio.Semaphore(settings.transcodings)
        self._locks = _Locks()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._promoting = False
        self._started = False
        self._range_digests: OrderedDict[tuple[BlockId, bytes, int, int], bytes] = OrderedDict()

    async def start(self) -> None:
        """Find what the tiers kept; once. Raises TierUnavailableError."""
        if self._started:
            return
        self._started = True
        for tier in reversed(self.store.tiers):
            found = await self._storage[tier].start()
            budget = self.store.budget(tier)
            excess = sum(part.octets for _, _, part in found) - budget if budget else 0
            for block, info, part in found:
                if excess > 0:  # the oldest go first
                    excess -= part.octets
                    await self._storage[tier].delete(block)
                elif self.store.recovered(block, tier, info, part):
                    self.records.changed(block)
                else:
                    await self._storage[tier].delete(block)

    async def stop(self) -> None:
        """Wait for what runs in the background."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- blocks ----------------------------------------------------------------------

    async def put(
        self,
        block: BlockId,
        descriptor: Descriptor,
        chunks: AsyncIterator[bytes],
        repr_digest: bytes | None = None,
    ) -> BlockInfo:
        """Store a whole block; afterwards it is there, or nothing of it is.

        Raises BlockExistsError, NoRoomError, DecodeError, ContainerTooLargeError,
        TierFullError, TierUnavailableError, and what `chunks` raises.
        """
        if block in self.store:
            self.store.rejected("exists")
            raise BlockExistsError
        reserved: list[int] = []

        async def make_room(octets: int) -> PartWriter:
            await self._make_room(self._home, octets)
            reserved.append(octets)
            return await self._storage[self._home].create()

        upload = Upload(
            descriptor,
            make_room,
            repr_digest=repr_digest,
            limit=self.settings.max_container_octets,
        )
        if self._uploads.locked():
            self.store.rejected("busy")
            raise BusyError(f"{self.settings.uploads} blocks are being stored already")
        try:
            async with self._uploads:
                info, part = await upload.receive(chunks)
                # the end is not interrupted: a file that has its name is in the table, too
                await to_the_end(self._commit(block, upload, info, part, reserved))
        except NoRoomError:
            self.store.rejected("capacity")
            raise
        except TierFullError:
            self.store.rejected("disk-full")
            raise
        except BlockExistsError:
            self.store.rejected("exists")
            raise
        finally:
            await to_the_end(self._give_up(upload.writer, reserved))
        return info

    async def _commit(
        self, block: BlockId, upload: Upload, info: BlockInfo, part: Part, reserved: list[int]
    ) -> None:
        assert upload.writer is not None
        async with self._locks.of(block):
            if block in self.store:
                raise BlockExistsError
            await upload.writer.commit(block, info, part)
            self.store.commit(block, self._home, info, part)
            reserved.clear()
        self.records.changed(block)

    async def _give_up(self, writer: PartWriter | None, reserved: Sequence[int]) -> None:
        for octets in reserved:
            self.store.release(self._home, octets)
        if writer is not None:
            await writer.abort()

    async def open(
        self,
        block: BlockId,
        layers: range | None = None,
        codec: int | None = None,
        descriptor: Descriptor | None = None,
    ) -> Body:
        """What a GET sends. The caller closes it.

        `descriptor` is needed to transcode only. Raises MissError, CodecUnavailableError,
        TierUnavailableError, DecodeError when a section cannot be transcoded.
        """
        while True:
            found = self.store.find(block, layers)
            try:
                sections = await self._sections(block, found)
                break
            except PartLostError as error:
                await self.part_lost(block, error)
        try:
            stored = found.entry.info.codec
            target = stored if codec is None else codec
            if target == stored:
                return StoredBody(sections, await self._container_digest(block, found, sections))
            return await self._transcode(sections, stored, target, descriptor)
        except PartLostError as error:
            sections.close()
            await self.part_lost(block, error)
            raise MissError(MissReason.LOST) from error
        except BaseException:
            sections.close()
            raise

    def codecs(self, stored: Codec) -> list[int]:
        """The codecs in which a replica of codec `stored` is served."""
        if not stored.lossless and not self.settings.lossy_transcoding:
            return [int(stored)]
        return [
            int(codec)
            for codec in Codec
            if codec is stored or codec.lossless or self.settings.lossy_transcoding
        ]

    async def delete(self, block: BlockId) -> None:
        """Withdraw and evict a block. Raises MissError, LeasedError."""
        now = self.clock()
        if block in self.store and self.leases.is_leased(block, now):
            raise LeasedError(self.leases.remaining_ms(block, now))
        await to_the_end(self._perform(self.store.evict(block, now)))

    # --- leases ----------------------------------------------------------------------

    def lease(self, client: str, blocks: Sequence[BlockId], ttl_ms: int) -> Lease | None:
        """Lease what is held of `blocks`; None when nothing is. Raises LeaseQuotaError."""
        sizes = {block: self.store.leasable(block) for block in blocks}
        held = {block: size for block, size in sizes.items() if size is not None}
        if not held:
            return None
        missing = tuple(block for block, size in sizes.items() if size is None)
        return self.leases.acquire(client, held, ttl_ms, self.clock(), missing)

    # --- records ---------------------------------------------------------------------

    def record(self, block: BlockId, ttl_ms: int) -> ReplicaRecord | None:
        """The Replica Record of a block; None when it is not held or about to go."""
        entry = self.store.entry(block)
        if entry is None or not entry.staying():
            return None
        return ReplicaRecord(
            block_key=block.block_key,
            compat_id=block.compat_id,
            scope_id=block.scope_id,
            holder=self.settings.base_uri,
            codec=int(entry.info.codec),
            size=entry.info.size,
            digest=entry.info.digest,
            ttl_ms=ttl_ms,
            layer_digests=entry.info.layer_digests,
            residency=tuple(
                Residency(str(tier), layers, self.store.read_mbit_per_s(tier))
                for tier, layers in self.store.residency(block)
            ),
        )

    # --- inside ----------------------------------------------------------------------

    async def _make_room(self, tier: Tier, octets: int) -> None:
        steps = self.store.reserve(tier, octets, self.clock())
        try:
            await to_the_end(self._perform(steps))
        except BaseException:
            self.store.release(tier, octets)
            raise

    async def _perform(self, steps: Sequence[Step]) -> None:
        for position, step in enumerate(steps):
            try:
                async with self._locks.of(step.block):
                    await self._let_go(step)
            except BaseException:
                for rest in steps[position:]:
                    self.store.stays(rest)
                raise

    async def _let_go(self, step: Step) -> None:
        if step.demote_to is not None and not await self._copy(
            step.block, step.tier, step.demote_to
        ):
            step = step._replace(demote_to=None, withdraw=True)
        if step.withdraw:
            await self.records.withdraw(step.block)
        self.store.dropped(step)
        await self._storage[step.tier].delete(step.block)
        if step.block in self.store:
            self.records.changed(step.block)

    async def _copy(self, block: BlockId, source: Tier, target: Tier) -> bool:
        """Copy a part into room that is reserved there; False when that failed."""
        entry = self.store.entry(block)
        assert entry is not None
        part = entry.parts[source]
        writer: PartWriter | None = None
        try:
            reader = await self._storage[source].open(block, part)
            with contextlib.closing(reader):
                writer = await self._storage[target].create()
                digest = hashlib.sha256()
                async for piece in pieces(reader, 0, part.octets):
                    await uninterrupted(digest.update, piece)
                    await writer.write(piece)
            if digest.digest() != part.container_digest:
                raise PartLostError("its digest does not match any more")
            await writer.commit(block, entry.info, part)
        except (PartLostError, TierFullError, TierUnavailableError) as error:
            logger.warning("a block was not copied from %s to %s: %s", source, target, error)
            self.store.release(target, part.octets)
            return False
        finally:
            if writer is not None:
                await writer.abort()
        if not self.store.moved(block, target, part):
            await self._storage[target].delete(block)
            return False
        return True

    async def _sections(self, block: BlockId, found: Found) -> Sections:
        readers: dict[Tier, PartReader] = {}
        try:
            for segment in found.segments:
                if segment.tier not in readers:
                    part = found.entry.parts[segment.tier]
                    try:
                        readers[segment.tier] = await self._storage[segment.tier].open(block, part)
                    except PartLostError as error:
                        error.tier = segment.tier
                        raise
        except BaseException:
            for reader in readers.values():
                reader.close()
            raise
        self._maybe_promote(block, found)
        return Sections(header_for(found), found.segments, readers, self.store.read)

    async def _container_digest(self, block: BlockId, found: Found, sections: Sections) -> bytes:
        for part in found.entry.parts.values():
            if part.layers == found.layers:
                return part.container_digest
        info = found.entry.info
        key = (block, info.digest, found.layers.start, found.layers.stop)
        if (digest := self._range_digests.get(key)) is None:
            digest = await sections.digest()
            self._range_digests[key] = digest
            while len(self._range_digests) > _RANGE_DIGESTS:
                self._range_digests.popitem(last=False)
        return digest

    async def _transcode(
        self, sections: Sections, stored: Codec, target: int, descriptor: Descriptor | None
    ) -> Body:
        served = self.codecs(stored)
        if target not in served or descriptor is None:
            raise CodecUnavailableError(served)
        if self._transcodings.locked():
            raise BusyError(f"{self.settings.transcodings} blocks are being transcoded already")
        try:
            async with self._transcodings:
                return await transcode(sections, Codec(target), descriptor, self.settings.scratch)
        except OSError as error:
            raise TierUnavailableError(f"transcoding: {error.strerror or error}") from error
        finally:
            sections.close()

    async def part_lost(self, block: BlockId, error: PartLostError) -> None:
        """A fault: withdraw, end the leases, forget (KVSP "Leases")."""
        assert error.tier is not None
        logger.warning(
            "block %s is gone from %s (%s); its record is withdrawn",
            block.block_key.hex(),
            error.tier,
            error,
        )
        await to_the_end(self._withdraw_lost(block, error.tier))

    async def _withdraw_lost(self, block: BlockId, tier: Tier) -> None:
        async with self._locks.of(block):
            if self.store.lost(block, tier):
                self.leases.revoke(block)
                await self.records.withdraw(block)
            await self._storage[tier].delete(block)
            if block in self.store:
                self.records.changed(block)

    def _maybe_promote(self, block: BlockId, found: Found) -> None:
        target = self.store.tiers[0]
        tiers = {segment.tier for segment in found.segments}
        if self._promoting or tiers == {target} or len(found.segments) != 1:
            return
        part = found.entry.parts[found.segments[0].tier]
        budget = self.store.budget(target)
        if (
            found.entry.reads >= _PROMOTE_AFTER_READS
            and part.layers == range(found.entry.info.layers)
            and (budget is None or part.octets * _PROMOTED_SHARE <= budget)
        ):
            self._promoting = True
            task = asyncio.ensure_future(self._promote(block, found.segments[0].tier, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _promote(self, block: BlockId, source: Tier, target: Tier) -> None:
        try:
            entry = self.store.entry(block)
            if entry is None or source not in entry.parts:
                return
            await self._make_room(target, entry.parts[source].octets)
            octets = entry.parts[source].octets
            async with self._locks.of(block):
                entry = self.store.entry(block)
                if entry is None or source not in entry.parts or target in entry.parts:
                    self.store.release(target, octets)
                elif await self._copy(block, source, target):
                    self.records.changed(block)
        except NoRoomError:
            logger.debug("no room for a block in %s", target)
        finally:
            self._promoting = False


class _Locks:
    """One lock per block that somebody is at."""

    def __init__(self) -> None:
        self._locks: dict[BlockId, tuple[asyncio.Lock, int]] = {}

    @contextlib.asynccontextmanager
    async def of(self, block: BlockId) -> AsyncIterator[None]:
        lock, users = self._locks.get(block, (asyncio.Lock(), 0))
        self._locks[block] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(block)
            if users > 1:
                self._locks[block] = (lock, users - 1)
