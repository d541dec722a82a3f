"""What becomes of stored parts: room is made, parts move between tiers, go, or are lost.

The shell of `store` for all that changes a block that is there. One task at a time is at a
block; whatever was known of it before it had its turn is looked at again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from kvsp.blocks.layout import Octets
from kvsp.holder.leases.table import LeaseTable
from kvsp.holder.rooms import NoRoomError, Reservation
from kvsp.holder.store import BlockInfo, Part, Step, Store
from kvsp.holder.tiers.scrubbing import Pace
from kvsp.holder.tiers.sharing import SharedStorage
from kvsp.holder.tiers.tiers import (
    PartLostError,
    PartWriter,
    TierFullError,
    TierStorage,
    TierUnavailableError,
    verified_pieces,
)
from kvsp.holder.uninterrupted import to_the_end
from kvsp.locks import Locks
from kvsp.names.codes import Tier
from kvsp.names.errors import KvspError
from kvsp.names.uris import BlockId

logger = logging.getLogger("kvsp.holder")

_LOOK_S: Final = 10.0
"""So often a medium that was full is asked for room."""

_SETTLE_S: Final = 1.0
"""Longest time to wait for the room that others make."""

_FIRST_ROOM: Final = 1 << 20
"""Octets that room is made for before any has come."""

_TRIES: Final = 4
"""Times that a full medium is given room for one write."""


class LeasedError(KvspError):
    """The block is leased. `ttl_ms` is what remains of the longest lease."""

    def __init__(self, ttl_ms: int) -> None:
        super().__init__(f"leased for {ttl_ms} ms")
        self.ttl_ms = ttl_ms


class Told(Protocol):
    """Who tells the index of what changes (`kvsp.holder.holder.Records`)."""

    def changed(self, block: BlockId) -> None: ...

    async def withdraw(self, block: BlockId) -> None: ...


async def _at_once(_octets: int) -> None:
    """Nobody else needs the medium so much."""


class Parts:
    """The stored parts of a holder."""

    def __init__(
        self,
        store: Store,
        storage: Mapping[Tier, TierStorage],
        leases: LeaseTable,
        records: Told,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._storage = storage
        self._leases = leases
        self._records = records
        self._clock = clock
        self.locks = Locks[BlockId]()
        self._shrinking = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._looks: dict[Tier, float] = {}

    # --- room ------------------------------------------------------------------------

    async def make_room(self, tier: Tier, octets: int) -> Reservation:
        """Room for `octets` in a tier, for whoever uses it or gives it back.

        Raises NoRoomError.
        """
        if self._store.is_shrunk(tier) and self._clock() >= self._looks.get(tier, 0.0):
            await self._look_for_room(tier)
        try:
            reservation, steps = self._store.reserve(tier, octets, self._clock())
        except NoRoomError:
            if not self._store.is_shrunk(tier):
                raise
            await self._look_for_room(tier)
            reservation, steps = self._store.reserve(tier, octets, self._clock())
        try:
            await to_the_end(self._perform(steps))
        except BaseException:
            reservation.release()
            raise
        return reservation

    async def writer(self, tier: Tier, octets: int) -> RoomyWriter:
        """Writes a part of so many octets, as its sender says: room for them is made as they
        come. The caller gives back what was not used.

        Raises NoRoomError, and what `TierStorage.create` raises.
        """
        if not self._store.may_hold(tier, octets) and self._store.is_shrunk(tier):
            await self._look_for_room(tier)
        if not self._store.may_hold(tier, octets):
            raise NoRoomError(tier, octets)
        reservation = await self.make_room(tier, min(octets, _FIRST_ROOM))
        try:
            return RoomyWriter(self, await self._storage[tier].create(), reservation, octets)
        except BaseException:
            reservation.release()
            raise

    def limit(self, tier: Tier) -> int | None:
        """What a tier may hold now."""
        return self._store.limit(tier)

    async def medium_full(self, reservation: Reservation, limit: int | None) -> None:
        """A write into reserved room found the medium full: have others leave.

        `limit` is what the tier could hold when the write began. Raises NoRoomError.
        """
        tier = reservation.tier
        now_limit = self._store.limit(tier)
        if limit is not None and now_limit is not None and now_limit < limit:
            # somebody found the same; what leaves for them may do for both. Not for ever: the
            # caller can be at a block that one of them waits for
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    await self._settled.wait()
            return
        first = not self._store.is_shrunk(tier)
        steps = self._store.shrink(tier, reservation.octets, self._clock())
        self._looks[tier] = self._clock() + _LOOK_S
        (logger.warning if first else logger.info)(
            "%s is full before its budget is: it holds %s octets from now on instead of %s, "
            "more when there is room again; make room there or lower the budget",
            tier,
            self._store.limit(tier),
            self._store.budget(tier),
        )
        self._shrinking += 1
        self._settled.clear()
        try:
            await to_the_end(self._perform(steps))
        finally:
            self._shrinking -= 1
            if not self._shrinking:
                self._settled.set()

    async def _look_for_room(self, tier: Tier) -> None:
        self._looks[tier] = self._clock() + _LOOK_S
        free = await self._storage[tier].free()
        if free is not None and self._store.grow(tier, free):
            logger.warning("%s has room for its whole budget again", tier)

    # --- leaving ---------------------------------------------------------------------

    async def _perform(self, steps: Sequence[Step]) -> None:
        try:
            for step in steps:
                async with self.locks.of(step.block):
                    await self._let_go(step)
        finally:
            for step in steps:
                if self._store.stays(step):  # not of what is over
                    self._records.changed(step.block)

    async def _let_go(self, step: Step) -> None:
        store = self._store
        if not store.applies(step):
            return
        demotion = step.demotion
        if demotion is not None and not await self._copy(step.block, step, demotion):
            step = step._replace(demotion=None)
        if not store.applies(step):
            return
        if store.only_here(step):
            if self._leases.is_leased(step.block, self._clock()):
                # another tier had it when this was decided, and lost it
                raise NoRoomError(step.tier, step.part.octets)
            await self._records.withdraw(step.block)
        store.dropped(step)
        await self.discard(step.tier, step.block, step.part)
        if step.block in store:
            self._records.changed(step.block)

    async def evict(self, block: BlockId) -> None:
        """Withdraw a block, then let go all of it. Raises MissError, LeasedError."""
        await to_the_end(self._evict(block))

    async def _evict(self, block: BlockId) -> None:
        async with self.locks.of(block):
            now = self._clock()
            if block in self._store and self._leases.is_leased(block, now):
                raise LeasedError(self._leases.remaining_ms(block, now))
            steps = self._store.evict(block)
            await self._records.withdraw(block)
            for step in steps:
                self._store.dropped(step)
            for step in steps:
                await self.discard(step.tier, block, step.part)

    async def discard(self, tier: Tier, block: BlockId, part: Part) -> None:
        """Delete what a tier has of a block; what stays of it is nobody's."""
        try:
            await self._storage[tier].delete(block, part)
        except (TierFullError, TierUnavailableError) as error:
            logger.warning(
                "block %s could not be deleted from %s: %s", block.block_key.hex(), tier, error
            )

    # --- moving ----------------------------------------------------------------------

    async def promote(self, block: BlockId, source: Tier, part: Part, target: Tier) -> None:
        """Copy a part to a faster tier, if it is still there. Raises NoRoomError."""
        with await self.make_room(target, part.octets) as reservation:
            await to_the_end(self._promote(Step(block, source, part), reservation))

    async def _promote(self, step: Step, reservation: Reservation) -> None:
        async with self.locks.of(step.block):
            if await self._copy(step.block, step, reservation):
                self._records.changed(step.block)

    async def _copy(self, block: BlockId, step: Step, target: Reservation) -> bool:
        """Copy a part into reserved room of another tier; False when that failed, or there
        is no such part any more. The caller has the block's lock."""
        entry = self._store.entry(block)
        if (
            entry is None
            or not self._store.holds(block, step.tier, step.part)
            or target.tier in entry.parts
        ):
            return False
        writer: PartWriter | None = None
        try:
            reader = await self._storage[step.tier].open(block, step.part)
            with contextlib.closing(reader):
                writer = await self._storage[target.tier].create()
                async for piece in verified_pieces(reader, step.part):
                    await writer.write(piece)
            await writer.commit(block, entry.info, step.part)
        except PartLostError as error:
            error.tier, error.part = step.tier, step.part
            await self._withdraw_lost(block, error)
            return False
        except (TierFullError, TierUnavailableError) as error:
            if isinstance(error, TierFullError) and not error.file:
                with contextlib.suppress(NoRoomError):
                    # the next one makes room; this one goes
                    for each in self._store.shrink(target.tier, target.octets, self._clock()):
                        self._store.stays(each)
            logger.warning("a block was not copied to %s: %s", target.tier, error)
            return False
        finally:
            if writer is not None:
                await give_up(writer)
        if self._store.moved(block, target, step.part):
            return True
        await self.discard(target.tier, block, step.part)
        return False

    async def adopt(self, block: BlockId, tier: Tier, info: BlockInfo, part: Part) -> None:
        """Have a part that somebody else stored in a medium that holders share."""
        await to_the_end(self._adopt(block, tier, info, part))

    async def _adopt(self, block: BlockId, tier: Tier, info: BlockInfo, part: Part) -> None:
        storage = self._storage[tier]
        assert isinstance(storage, SharedStorage)
        async with self.locks.of(block):
            if block in self._store or not await storage.refer(block, part):
                return
            if not self._store.recovered(block, tier, info, part):
                await self.discard(tier, block, part)  # the room is gone meanwhile
                return
            self._store.counters.adopted += 1
        self._records.changed(block)

    # --- verifying -------------------------------------------------------------------

    async def verify(self, block: BlockId, tier: Tier, pace: Pace = _at_once) -> bool:
        """Read a block's copy in a tier, `pace` called between pieces, and compare its
        digest: one that is damaged is lost. Whether it was sound, or has left meanwhile.

        Raises TierUnavailableError.
        """
        entry = self._store.entry(block)
        part = None if entry is None else entry.parts.get(tier)
        if part is None:
            return True
        counters = self._store.counters
        try:
            with contextlib.closing(await self._storage[tier].open(block, part)) as reader:
                async with contextlib.aclosing(verified_pieces(reader, part)) as arriving:
                    async for piece in arriving:
                        octets = len(memoryview(piece).cast("B"))
                        counters.octets_verified += octets
                        await pace(octets)
                        if not self._store.holds(block, tier, part):
                            return True
        except PartLostError as error:
            if not self._store.holds(block, tier, part):
                return True
            error.tier, error.part = tier, part
            await self.lost(block, error)
            counters.verified["lost"] += 1
            return False
        counters.verified["sound"] += 1
        return True

    # --- faults ----------------------------------------------------------------------

    async def lost(self, block: BlockId, error: PartLostError) -> None:
        """A fault: withdraw, end the leases, forget (KVSP "Leases"). Harmless for a part
        that had left already."""
        await to_the_end(self._lost(block, error))

    async def _lost(self, block: BlockId, error: PartLostError) -> None:
        async with self.locks.of(block):
            await self._withdraw_lost(block, error)

    async def _withdraw_lost(self, block: BlockId, error: PartLostError) -> None:
        tier, part = error.tier, error.part
        assert tier is not None and part is not None
        if not self._store.holds(block, tier, part):
            return
        logger.warning(
            "block %s is gone from %s (%s); its record is withdrawn",
            block.block_key.hex(),
            tier,
            error,
        )
        if self._store.lost(block, tier, part):
            self._leases.revoke(block)
            await self._records.withdraw(block)
        try:
            if await self._storage[tier].quarantine(block, part):
                self._store.counters.quarantined += 1
        except (TierFullError, TierUnavailableError) as refused:
            # among the blocks it would be served again after a restart
            logger.warning("block %s is not quarantined: %s", block.block_key.hex(), refused)
            await self.discard(tier, block, part)
        if block in self._store:
            self._records.changed(block)


class RoomyWriter:
    """A writer that lets others leave: for the octets that come, never for more than twice as
    many, and when the medium is full before its budget is."""

    def __init__(
        self, parts: Parts, writer: PartWriter, reservation: Reservation, octets: int
    ) -> None:
        """`octets` are what the whole part is to have."""
        self.reservation = reservation
        """All of them once all are written."""

        self._parts = parts
        self._writer = writer
        self._octets = octets
        self._written = 0

    async def write(self, octets: Octets) -> None:
        self._written += len(memoryview(octets).cast("B"))
        if self._written > self.reservation.octets:
            have = self.reservation.octets
            wanted = min(self._octets, max(self._written, 2 * have))
            more = await self._parts.make_room(self.reservation.tier, wanted - have)
            self.reservation.absorb(more)
        await self._with_room(partial(self._writer.write, octets))

    async def commit(self, block: BlockId, info: BlockInfo, part: Part) -> None:
        await self._with_room(partial(self._writer.commit, block, info, part))

    async def abort(self) -> None:
        await give_up(self._writer)

    async def _with_room(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        for tries in range(1, _TRIES + 1):
            limit = self._parts.limit(self.reservation.tier)
            try:
                return await call()
            except TierFullError as error:
                if tries == _TRIES or error.file:
                    raise
                try:
                    await self._parts.medium_full(self.reservation, limit)
                except NoRoomError:
                    raise error from None


async def give_up(writer: PartWriter) -> None:
    """Leave nothing of a part behind that was not committed; what cannot be removed is told."""
    try:
        await writer.abort()
    except (TierFullError, TierUnavailableError) as error:
        logger.warning("what was written of a block could not be removed: %s", error)
