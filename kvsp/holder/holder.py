"""The asyncio shell of a holder: carries out what `store` and `leases` decide."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from kvsp.holder.leases.journal import LeaseJournal
from kvsp.holder.leases.table import Lease, LeaseQuota, LeaseTable
from kvsp.holder.parts import Parts
from kvsp.holder.reading import Body, Sections, StoredBody, span_of, transcode
from kvsp.holder.records.index import RecordSource
from kvsp.holder.rooms import NoRoomError, Reservation, Shares
from kvsp.holder.store import (
    BlockExistsError,
    BlockInfo,
    Entry,
    Found,
    MissError,
    MissReason,
    Part,
    Store,
)
from kvsp.holder.tiers.scrubbing import Scrubber
from kvsp.holder.tiers.sharing import SharedStorage, Sharing
from kvsp.holder.tiers.tiers import (
    PartLostError,
    PartReader,
    PartWriter,
    TierFullError,
    TierStorage,
    TierUnavailableError,
)
from kvsp.holder.uninterrupted import to_the_end
from kvsp.holder.upload import MAX_CONTAINER_OCTETS, Upload
from kvsp.names.codes import MAX_SAFE_INTEGER, Codec, Tier
from kvsp.names.errors import KvspError
from kvsp.names.identity import Descriptor
from kvsp.names.uris import BlockId
from kvsp.records.records import ReplicaRecord, Residency

logger = logging.getLogger("kvsp.holder")

Describe = Callable[[bytes], Awaitable[Descriptor]]
"""The descriptor of a Compatibility ID."""

_RANGE_DIGESTS: Final = 4096
_SOUND_KEPT: Final = 4096
_OPENINGS: Final = 16
"""Times that a block is looked up again because it changed while it was being opened."""

_PROMOTE_AFTER_READS: Final = 2
_PROMOTED_SHARE: Final = 4
"""A block larger than this fraction of a faster tier is not copied into it."""


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
    uploads_per_client: int = 32
    transcodings: int = 2
    transcodings_per_client: int = 1
    checks: int = 2
    checks_per_client: int = 1
    """Blocks being read at once without sending them: to verify what a client doubts, or for
    the digest in the answer to a HEAD."""

    lossy_transcoding: bool = False
    scrub_octets_per_s: float = 0.0
    """Blocks on disk are read and verified at this rate; 0 for never."""

    look_s: float = 0.0
    """So often a medium that holders share is looked through for what others did; 0 for never."""

    verified_s: float = 60.0
    """A copy that was found sound is not read again for somebody who doubts it for so long."""

    lease_file: Path | None = None
    """Keeps leases beyond the process, as the disk tier does blocks; None: they end with it."""

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
        outlives the process, or to the first one when none does."""
        self.settings = settings
        self.records = records
        records.attach(self.record)
        self.clock = clock
        self._storage: Mapping[Tier, TierStorage] = {each.tier: each for each, _ in tiers}
        self.store = Store(
            {each.tier: budget for each, budget in tiers},
            lambda block, now: self.leases.is_leased(block, now),
        )
        self._given_quota = quota or LeaseQuota()
        self._journal = LeaseJournal(settings.lease_file)
        self.leases = LeaseTable(
            self._quota(), on_ended=self._journal.ended, on_free=self.store.freed
        )
        self._home = next((each.tier for each, _ in tiers if each.lasts), self.store.tiers[0])
        self._uploads = asyncio.Semaphore(settings.uploads)
        self._uploads_of = Shares(
            "blocks being stored",
            settings.uploads_per_client,
            lambda: self.store.rejected("client-busy"),
        )
        self._transcodings_of = Shares(
            "blocks being transcoded", settings.transcodings_per_client, self.store.refused
        )
        self._transcodings = asyncio.Semaphore(settings.transcodings)
        self.parts = Parts(self.store, self._storage, self.leases, records, clock)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._checks_of = Shares(
            "blocks being checked", settings.checks_per_client, self.store.refused
        )
        self._checking = asyncio.Semaphore(settings.checks)
        self._sound: OrderedDict[BlockId, tuple[Mapping[Tier, Part], float]] = OrderedDict()
        self.scrubber = Scrubber(
            self.store, Tier.DISK, self.parts.verify, settings.scrub_octets_per_s
        )
        self.shared = [each for each, _ in tiers if isinstance(each, SharedStorage)]
        """Media that other holders have, too."""

        self._background: list[asyncio.Task[None]] = []
        self._promoting = False
        self._started = False
        self._range_digests: OrderedDict[tuple[BlockId, bytes, int, int], bytes] = OrderedDict()

    async def start(self) -> None:
        """Find what the tiers kept; once. Raises TierUnavailableError."""
        if self._started:
            return
        self._started = True
        leases = await self._journal.start()
        leased = {block for lease in leases for block in lease.blocks}
        for tier in reversed(self.store.tiers):
            found = await self._storage[tier].start()
            octets = sum(part.octets for _, _, part in found)
            await self._fit(tier, octets)
            limit = self.store.limit(tier)
            excess = 0 if limit is None else octets - limit
            for block, info, part in found:
                if excess > 0 and block not in leased:  # the oldest go first
                    excess -= part.octets
                    await self.parts.discard(tier, block, part)
                elif self.store.recovered(block, tier, info, part, leased=block in leased):
                    self.records.changed(block)
                else:
                    await self.parts.discard(tier, block, part)
        self.leases.quota = self._quota()
        sizes = {
            block: entry.info.size
            for block in leased
            if (entry := self.store.entry(block)) is not None
        }
        for lease in leases:
            self.leases.restore(lease, sizes, self.clock())
        if self.settings.scrub_octets_per_s > 0 and Tier.DISK in self.store.tiers:
            self._background.append(asyncio.create_task(self.scrubber.run()))
        if self.settings.look_s > 0:
            for medium in self.shared:
                looking = Sharing(
                    self.store, medium, self.parts.adopt, self.parts.lost, self.settings.look_s
                )
                self._background.append(asyncio.create_task(looking.run()))

    def _quota(self) -> LeaseQuota:
        """What one client may lease: a share of what there is room for, when nothing is given."""
        given, capacity = self._given_quota, self.store.capacity
        if given.octets:
            return given
        return replace(given, octets=MAX_SAFE_INTEGER if capacity is None else capacity // 4)

    async def _fit(self, tier: Tier, octets: int) -> None:
        """Bound a tier by what its medium has room for, beside the `octets` that are there."""
        free = await self._storage[tier].free()
        budget = self.store.budget(tier)
        if free is not None and budget is not None and octets + free < budget:
            self.store.fit(tier, octets + free)
            logger.warning(
                "%s has room for %d octets, not for its budget of %d: it holds that many for "
                "now; make room there or lower the budget",
                tier,
                octets + free,
                budget,
            )

    async def stop(self) -> None:
        """End what is done now and then, and wait for what else runs."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # where all have ended nothing was waited for, from 3.12 on

    async def close(self) -> None:
        """Let go of everything; leases are there again after the next start."""
        await self.stop()
        await self._journal.stop()

    # --- blocks ----------------------------------------------------------------------

    async def put(
        self,
        block: BlockId,
        descriptor: Descriptor,
        chunks: AsyncIterator[bytes],
        repr_digest: bytes | None = None,
        *,
        client: str | None = None,
        prior: bytes | None = None,
    ) -> BlockInfo:
        """Store a whole block; afterwards it is there, or nothing of it is.

        `prior` is the key of the block before it in its prompt, where that is known: it stays
        as long as this one. `client` has its share of the uploads at once; None is this process
        itself. Raises BlockExistsError, NoRoomError, DecodeError, ContainerTooLargeError,
        BusyError, ClientBusyError, TierFullError, TierUnavailableError, and what `chunks` raises.
        """
        if block in self.store:
            self.store.rejected("exists")
            raise BlockExistsError
        if self._uploads.locked():
            self.store.rejected("busy")
            raise BusyError(f"{self.settings.uploads} blocks are being stored already")
        with contextlib.ExitStack() as reserved:
            reserved.enter_context(self._uploads_of.of(client))

            async def make_room(octets: int) -> PartWriter:
                writer = await self.parts.writer(self._home, octets)
                rooms.append(reserved.enter_context(writer.reservation))
                return writer

            rooms: list[Reservation] = []
            upload = Upload(
                descriptor,
                make_room,
                repr_digest=repr_digest,
                limit=self.settings.max_container_octets,
            )
            try:
                async with self._uploads:
                    info, part = await upload.receive(chunks)
                    info = replace(info, prior=prior, position=self.store.after(block, prior))
                    # the end is not interrupted: a file that has its name is in the table, too
                    await to_the_end(self._commit(block, upload, info, part, rooms[0]))
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
                if upload.writer is not None:
                    await to_the_end(upload.writer.abort())
        return info

    async def _commit(
        self, block: BlockId, upload: Upload, info: BlockInfo, part: Part, room: Reservation
    ) -> None:
        assert upload.writer is not None
        async with self.parts.locks.of(block):
            if block in self.store:
                raise BlockExistsError
            await upload.writer.commit(block, info, part)
            self.store.commit(block, room, info, part)
        self.records.changed(block)

    async def open(
        self,
        block: BlockId,
        layers: range | None = None,
        codec: int | None = None,
        describe: Describe | None = None,
        *,
        client: str | None = None,
        head: bool = False,
    ) -> Body:
        """What a GET sends, or a HEAD with `head` shows the fields of. The caller closes it.

        `describe` is asked when the block has to be transcoded; of that, and of reading for a
        HEAD, `client` has its share at once. Raises MissError, CodecUnavailableError,
        BusyError, ClientBusyError, TierUnavailableError, DecodeError when a section cannot be
        transcoded, and what `describe` raises.
        """
        descriptor: Descriptor | None = None
        for _ in range(_OPENINGS):
            found = self.store.find(block, layers)
            stored = found.info.codec
            target = stored if codec is None else codec
            if target != stored:
                self._check_codec(stored, target)
                if descriptor is None and describe is not None:
                    descriptor = await describe(block.compat_id)
                    continue  # it may be another block by now
            try:
                sections = await self._sections(block, found)
            except PartLostError as error:
                await self.parts.lost(block, error)
                continue
            if sections is not None:
                return await self._body(block, found, sections, target, descriptor, client, head)
        raise BusyError("the block is being moved all the time")

    async def _body(
        self,
        block: BlockId,
        found: Found,
        sections: Sections,
        target: int,
        descriptor: Descriptor | None,
        client: str | None,
        head: bool,
    ) -> Body:
        try:
            if target == found.info.codec:
                digest = self._known_digest(block, found)
                if digest is None:
                    async with self._check(client) if head else contextlib.nullcontext():
                        digest = await self._read_digest(block, found, sections)
                return StoredBody(sections, digest)
            with self._transcodings_of.of(client):
                return await self._transcode(sections, found.info.codec, target, descriptor)
        except PartLostError as error:
            sections.close()
            await self.parts.lost(block, error)
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
        await self.parts.evict(block)

    async def doubted(self, block: BlockId, *, client: str | None = None) -> bool:
        """Somebody got octets of a block that fail verification: read every copy. False when
        one was damaged, which is lost then.

        A client has its share of such readings at once, and others wait for it; one that was
        found sound just now is not read again. Raises MissError, ClientBusyError,
        TierUnavailableError.
        """
        if self._is_sound(block):
            return True
        async with self._check(client):
            if self._is_sound(block):  # somebody else doubted it meanwhile
                return True
            parts = dict(self._entry(block).parts)
            sound = all([await self.parts.verify(block, tier) for tier in parts])
        if sound:
            self._sound[block] = (parts, self.clock() + self.settings.verified_s)
            while len(self._sound) > _SOUND_KEPT:
                self._sound.popitem(last=False)
        return sound

    def _entry(self, block: BlockId) -> Entry:
        """Raises MissError."""
        entry = self.store.entry(block)
        if entry is None:
            raise self.store.miss(block)
        return entry

    def _is_sound(self, block: BlockId) -> bool:
        """Whether every copy was verified just now. Raises MissError."""
        parts, known = self._entry(block).parts, self._sound.get(block)
        return known is not None and known[0] == parts and self.clock() < known[1]

    @contextlib.asynccontextmanager
    async def _check(self, client: str | None) -> AsyncIterator[None]:
        """A turn to read a block that is not sent. Raises ClientBusyError."""
        with self._checks_of.of(client):
            async with self._checking:
                yield

    # --- leases ----------------------------------------------------------------------

    async def lease(self, client: str, blocks: Sequence[BlockId], ttl_ms: int) -> Lease | None:
        """Lease what is held of `blocks`; None when nothing is.

        Raises LeaseQuotaError, LeaseJournalError.
        """
        sizes = {block: self.store.leasable(block) for block in blocks}
        held = {block: size for block, size in sizes.items() if size is not None}
        if not held:
            return None
        missing = tuple(block for block, size in sizes.items() if size is None)
        lease = self.leases.acquire(client, held, ttl_ms, self.clock(), missing)
        try:
            await self._journal.keep(lease)
        except BaseException:  # what was not granted holds nothing
            self.leases.release(client, lease.lease_id, self.clock())
            raise
        return lease

    async def renew(self, client: str, lease_id: str, ttl_ms: int) -> Lease | None:
        """Start the time of a lease again; None for one that is not `client`'s or is gone.

        Raises LeaseQuotaError, LeaseJournalError.
        """
        now = self.clock()
        known = self.leases.get(client, lease_id, now)
        same = known is not None and known.ttl_ms == ttl_ms
        lease = self.leases.renew(client, lease_id, ttl_ms, now)
        if lease is not None and not same:  # its whole time is what it gets after a restart
            await self._journal.keep(lease)
        return lease

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
            position=entry.info.position or None,
            layer_digests=entry.info.layer_digests,
            residency=tuple(
                Residency(str(tier), layers, self.store.read_mbit_per_s(tier))
                for tier, layers in self.store.residency(block)
            ),
        )

    # --- inside ----------------------------------------------------------------------

    async def _sections(self, block: BlockId, found: Found) -> Sections | None:
        """The parts of what was found, open; None when one of them is not the block's any
        more. Raises PartLostError for one that a fault took away."""
        with contextlib.ExitStack() as opened:
            readers: dict[Tier, PartReader] = {}
            for tier in dict.fromkeys(segment.tier for segment in found.segments):
                part = found.parts[tier]
                try:
                    reader = await self._storage[tier].open(block, part, span_of(found, tier))
                except PartLostError as error:
                    if not self.store.holds(block, tier, part):
                        return None  # it left, and its octets with it
                    error.tier, error.part = tier, part
                    raise
                readers[tier] = opened.enter_context(contextlib.closing(reader))
            if not all(self.store.holds(block, tier, found.parts[tier]) for tier in readers):
                # what was opened may be what was stored in its place
                return None
            self._maybe_promote(block, found)
            sections = Sections(
                found.header(), found.segments, found.parts, readers, self.store.read
            )
            opened.pop_all()
            return sections

    def _known_digest(self, block: BlockId, found: Found) -> bytes | None:
        """The digest of the container of what was found, if it need not be read for it."""
        if (digest := found.container_digest()) is not None:
            return digest
        return self._range_digests.get(_range_key(block, found))

    async def _read_digest(self, block: BlockId, found: Found, sections: Sections) -> bytes:
        digest = self._range_digests[_range_key(block, found)] = await sections.digest()
        while len(self._range_digests) > _RANGE_DIGESTS:
            self._range_digests.popitem(last=False)
        return digest

    def _check_codec(self, stored: Codec, target: int) -> None:
        served = self.codecs(stored)
        if target not in served:
            raise CodecUnavailableError(served)

    async def _transcode(
        self, sections: Sections, stored: Codec, target: int, descriptor: Descriptor | None
    ) -> Body:
        if descriptor is None:
            raise CodecUnavailableError([int(stored)])
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
        """A part turned out to be damaged while it was read."""
        await self.parts.lost(block, error)

    def _maybe_promote(self, block: BlockId, found: Found) -> None:
        target = self.store.tiers[0]
        tiers = {segment.tier for segment in found.segments}
        if self._promoting or tiers == {target} or len(found.segments) != 1:
            return
        source = found.segments[0].tier
        part = found.parts[source]
        budget = self.store.budget(target)
        if (
            found.reads >= _PROMOTE_AFTER_READS
            and part.layers == range(found.info.layers)
            and (budget is None or part.octets * _PROMOTED_SHARE <= budget)
        ):
            self._promoting = True
            task = asyncio.ensure_future(self._promote(block, source, part, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _promote(self, block: BlockId, source: Tier, part: Part, target: Tier) -> None:
        try:
            await self.parts.promote(block, source, part, target)
        except NoRoomError:
            logger.debug("no room for a block in %s", target)
        except TierUnavailableError as error:
            logger.warning("a block was not copied to %s: %s", target, error)
        finally:
            self._promoting = False


def _range_key(block: BlockId, found: Found) -> tuple[BlockId, bytes, int, int]:
    return (block, found.info.digest, found.layers.start, found.layers.stop)
