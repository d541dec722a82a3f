"""Keeps the index informed of what a holder holds (KVSP "Publishing and Withdrawing Replicas").

`table` decides when; `RecordPublisher` does it through an `IndexClient`: many records in one
request, and one request that keeps all of them alive, where the index takes that. The index is
advisory: when it is away the holder goes on serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from kvsp.holder.records.index import (
    DEFAULT_TTL_MS,
    CompatUnknownError,
    DescriptorSource,
    IndexClient,
    IndexRefusedError,
    IndexUnavailableError,
    Kept,
    ManyRecords,
    ManyUnsupportedError,
    OvertakenError,
    RecordSource,
    TooManyError,
)
from kvsp.holder.records.table import (
    FIRST_DELAY_S,
    LONGEST_DELAY_S,
    Published,
    RecordTable,
)
from kvsp.names.identity import Descriptor
from kvsp.names.uris import BlockId
from kvsp.records.records import ReplicaRecord

logger = logging.getLogger("kvsp.holder")

_CONCURRENT: Final = 8
_MORE_AFTER: Final = 600.0
"""Seconds after which an index that took fewer records at once is offered as many as before."""
MANY_OCTETS: Final = 2 << 20
"""Octets of records in one request, about."""

_LATE_S: Final = 10.0
"""A record that has waited longer than this is late."""

PENDING_WITHDRAWALS: Final = 4096
_AWAY: Final = "the index service is away"
_BEHIND: Final = "records are late"
_NO_DESCRIPTOR: Final = "the index service cannot be asked for descriptors"


class RecordPublisher:
    """Publishes, refreshes and withdraws a holder's records."""

    def __init__(
        self,
        index: IndexClient,
        *,
        holder: str = "",
        many: ManyRecords | None = None,
        most: int = 256,
        ttl_ms: int = DEFAULT_TTL_MS,
        withdraw_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `many`, what the index has of `holder`, a base URI, from before is withdrawn at
        the start, and records are published `most` at once and kept alive together; without,
        one by one, as KVSP has it.

        `withdraw_s` bounds how long an eviction waits for its withdrawal; one that did
        not arrive is repeated until the record has expired at the index."""
        self.table = RecordTable(ttl_ms / 1000)
        self._holder = holder
        self._many = many
        self._most = self._wanted = most
        self._more_at = math.inf
        self._stale = many is not None
        """Whether the index may have records of this holder that are not true."""

        self.missing = 0
        """Records that the index turned out not to have although it took them."""
        self.published = 0
        self.withdrawn = 0
        self.failures = 0
        self.refusals = 0
        self._index = index
        self._ttl_ms = ttl_ms
        self._withdraw_s = withdraw_s
        self._clock = clock
        self._source: RecordSource | None = None
        self._descriptors: DescriptorSource | None = None
        self._wake = asyncio.Event()
        self._busy: dict[BlockId, asyncio.Task[None]] = {}
        self._flying: dict[BlockId, str] = {}
        self._pending: dict[str, float] = {}
        self._withdrawing = 0
        self._loop: asyncio.Task[None] | None = None
        self._draining = False
        self._warned: dict[str, str] = {}

    @property
    def unavailable(self) -> bool:
        """Whether the index did not answer last time."""
        return self.table.unavailable

    @property
    def behind(self) -> str:
        """In words, that records are published more slowly than they come; empty when not."""
        late_s = self.table.late_s(self._clock())
        if self.missing:
            return (
                f"the index service does not have {self.missing} of {len(self.table)} records "
                "that it took; does it evict them for want of room?"
            )
        if late_s < _LATE_S or self.unavailable:
            return ""
        return (
            f"{self.table.unpublished} of {len(self.table)} blocks are not to be found: the index "
            f"service takes records too slowly, the oldest has waited {late_s:.0f} s"
        )

    @property
    def pending_withdrawals(self) -> int:
        """Withdrawals that the index has not heard of yet."""
        return len(self._pending)

    def attach(self, source: RecordSource) -> None:
        """Where records come from."""
        self._source = source

    def describe(self, descriptors: DescriptorSource) -> None:
        """Where descriptors come from, for an index service that lost them."""
        self._descriptors = descriptors

    def changed(self, block: BlockId) -> None:
        if not self._draining:
            self.table.changed(block, self._clock())
            self._wake.set()

    def remaining_s(self, block: BlockId) -> float:
        return max(0.0, self.table.expires(block) - self._clock())

    async def withdraw(self, block: BlockId) -> None:
        # nothing new starts for it now; what is under way must not arrive after the DELETE
        known = self.table.forget(block)
        path, until = known if known is not None else (None, 0.0)
        if (running := self._busy.get(block)) is not None:
            path = self._flying.get(block, path)
            until = self._ends_by_itself()
            if not self.table.unavailable:
                await asyncio.wait([running], timeout=self._withdraw_s)
            self.table.forget(block)
            if path is not None and not running.done():
                # it may reach the index after this withdrawal: then there is one more
                running.add_done_callback(partial(self._late, path))
        if path is None:
            return
        if self.table.unavailable:
            # whoever makes room waits for an index that answers, not for one that does not
            self._remember(path, until)
            return
        self._withdrawing += 1
        try:
            async with asyncio.timeout(self._withdraw_s):
                await self._index.withdraw(path)
            self.withdrawn += 1
            self._warned.pop(_AWAY, None)
        except (IndexUnavailableError, TimeoutError) as error:
            # running out of the time for this is no other reason than the last one
            self._warn(_AWAY, str(error) or self._warned.get(_AWAY, "no answer in time"))
            self.failures += 1
            self.table.failed(None, self._clock())
            self._remember(path, until)
        except IndexRefusedError as error:
            self.refusals += 1
            logger.warning("the index service refused a withdrawal: %s", error)
        finally:
            self._withdrawing -= 1

    def _late(self, path: str, _publication: asyncio.Task[None]) -> None:
        if path not in self._flying.values():  # nor is it published anew
            self._remember(path, self._ends_by_itself())

    def _ends_by_itself(self) -> float:
        """When the index drops a record that it is just told of."""
        return math.inf if self._many else self._clock() + self._ttl_ms / 1000

    async def descriptor(self, compat_id: bytes) -> Descriptor | None:
        """Raises IndexUnavailableError, IndexRefusedError."""
        try:
            descriptor = await self._index.descriptor(compat_id)
        except (IndexUnavailableError, IndexRefusedError) as error:
            self._warn(_NO_DESCRIPTOR, str(error))
            raise
        self._warned.pop(_NO_DESCRIPTOR, None)
        return descriptor

    async def start(self) -> None:
        self._loop = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End without withdrawing."""
        for task in [*self._busy.values(), *([self._loop] if self._loop else [])]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._loop = None

    async def drain(self) -> None:
        """Withdraw every record and publish none any more.

        Records that an index that is away hears nothing of end with their TTL.
        """
        self._draining = True
        if self._many is not None and not await self._drain_at_once(self._many):
            return
        gate = asyncio.Semaphore(_CONCURRENT)
        failures = self.failures

        async def one(block: BlockId) -> None:
            async with gate:
                if self.failures == failures:
                    await self.withdraw(block)

        await asyncio.gather(*(one(block) for block in self.table.blocks()))

    async def _drain_at_once(self, many: ManyRecords) -> bool:
        """Withdraw all by one request; whether there is something left to do one by one."""
        if self._busy:  # what is under way must not arrive after the DELETE
            await asyncio.wait(self._busy.values(), timeout=self._withdraw_s)
        blocks = self.table.blocks()
        try:
            await many.withdraw_all(self._holder)
        except ManyUnsupportedError:
            return True
        except (IndexUnavailableError, IndexRefusedError) as error:
            self._warn(_AWAY, str(error))
            self.failures += 1
            return False
        self.withdrawn += len(blocks)
        self._pending.clear()
        for block in blocks:
            self.table.forget(block)
        return False

    async def _run(self) -> None:
        while True:
            await self.step()
            now = self._clock()
            waits = [at for at in (self.table.next_due(),) if at is not None and not self._draining]
            if self._pending:
                waits.append(now + LONGEST_DELAY_S / 10)
            if self._stale and not self._draining:
                waits.append(now + FIRST_DELAY_S)
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(waits) - now) if waits else None):
                    await self._wake.wait()

    async def step(self) -> None:
        """Publish what is due, repeat withdrawals that did not arrive, and have the index keep
        what it keeps."""
        many = self._many
        if self._stale and many is not None and not await self._start_clean(many):
            return
        await self._withdraw_pending()
        if self._clock() >= self._more_at:
            self._most, self._more_at = self._wanted, math.inf
        while not self._draining and (
            blocks := self.table.due(self._clock(), _CONCURRENT if many is None else self._most)
        ):
            await (self._all(blocks) if many is None else self._all_at_once(blocks, many))
            many = self._many
            self._tell_whether_behind()
        now, many = self._clock(), None if self._draining else many
        if many is not None and self.table.keep_due <= now and self.table.may_ask(now):
            await self._keep_alive(many)
        self._tell_whether_behind()

    async def _start_clean(self, many: ManyRecords) -> bool:
        """Have the index forget what a process of before, or this one, told it; False when it
        cannot be asked now."""
        if not self.table.may_ask(self._clock()) or self._draining:
            return False
        try:
            await many.withdraw_all(self._holder)
        except IndexUnavailableError as error:
            self._unreached(error)
            return False
        except IndexRefusedError as error:
            # then they end by themselves
            self.refusals += 1
            logger.warning("the index service does not withdraw what it has from before: %s", error)
        self._stale = False
        self._pending.clear()
        self.table.reached()
        self.table.republish(self._clock())
        return True

    def _unreached(self, error: IndexUnavailableError, blocks: Iterable[BlockId] = ()) -> None:
        self._warn(_AWAY, str(error))
        self.failures += 1
        now = self._clock()
        for block in (*blocks, None):
            self.table.failed(block, now)

    async def _all_at_once(self, blocks: Sequence[BlockId], many: ManyRecords) -> None:
        task = asyncio.create_task(self._publish_many(blocks, many))
        for block in blocks:
            self._busy[block] = task
            task.add_done_callback(partial(self._done, block))
        await asyncio.wait([task])

    async def _publish_many(self, blocks: Sequence[BlockId], many: ManyRecords) -> None:
        assert self._source is not None
        sent = self._clock()
        told: list[tuple[BlockId, ReplicaRecord]] = []
        texts: list[bytes] = []
        octets = 0
        for block in blocks:
            if octets > MANY_OCTETS:
                self.table.changed(block, sent)
            elif (record := self._source(block, self._ttl_ms)) is not None:
                self._flying[block] = record.path
                told.append((block, record))
                texts.append(record.to_json())
                octets += len(texts[-1])
        if not told:
            return
        try:
            kept = await many.keep(self._holder, self._ttl_ms, texts)
        except ManyUnsupportedError:
            logger.info("the index service takes records one by one")
            self._many = None
            for block in blocks:
                self.table.changed(block, sent)
        except IndexUnavailableError as error:
            for block, record in told:
                self.table.uncertain(block, record.path, self._ends_by_itself())
            self._unreached(error, blocks)
        except TooManyError as error:
            self._send_fewer(error, told)
        except IndexRefusedError as error:
            self.refusals += 1
            logger.warning("the index service refused records: %s", error)
            for block in blocks:
                self.table.refused(block, self._clock())
        else:
            await self._take_results(told, kept, sent)

    def _send_fewer(
        self, error: TooManyError, told: Sequence[tuple[BlockId, ReplicaRecord]]
    ) -> None:
        """The index takes fewer records in a request than there were: from now on there are."""
        if len(told) == 1:
            self._refuse(told[0][0], error)
            return
        fewer = len(told) // 2
        if error.limit is not None and 0 < error.limit < len(told):
            fewer = error.limit
        self._most, self._more_at = min(self._most, fewer), self._clock() + _MORE_AFTER
        logger.warning(
            "the index service takes no %d records at once, it gets %d from now on (%s); lower "
            "holder.records_per_request or raise its limit",
            len(told),
            self._most,
            error,
        )
        for block, _ in told:
            self.table.changed(block, self._clock())

    async def _take_results(
        self, told: Sequence[tuple[BlockId, ReplicaRecord]], kept: Kept, sent: float
    ) -> None:
        self._warned.pop(_AWAY, None)
        self.table.reached()
        lacking: dict[bytes, bool] = {}
        for (block, record), result in zip(told, kept.results, strict=True):
            if isinstance(result, Published):
                self._take(block, record, result, kept=True)
            elif isinstance(result, CompatUnknownError):
                compat = record.compat_id
                if compat not in lacking:
                    lacking[compat] = await self._has_told_descriptor(compat)
                if lacking[compat] and block in self.table:
                    self.table.changed(block, self._clock())
                else:
                    self._refuse(block, result)
            else:
                self._refuse(block, result)
        self.table.kept_alive(kept.ttl_ms, sent)

    def _take(
        self, block: BlockId, record: ReplicaRecord, answer: Published, *, kept: bool = False
    ) -> None:
        self.published += 1
        self._pending.pop(record.path, None)
        self.table.published(block, record.path, answer, self._clock(), kept=kept)

    def _refuse(self, block: BlockId, error: IndexRefusedError) -> None:
        if isinstance(error, OvertakenError):
            self.table.refused(block, self._clock(), FIRST_DELAY_S)
            return
        self.refusals += 1
        logger.warning("the index service refused a record: %s", error)
        self.table.refused(block, self._clock())

    async def _has_told_descriptor(self, compat_id: bytes) -> bool:
        """Tell the index a descriptor that it lacks, as one does that restarted empty."""
        try:
            known = None if self._descriptors is None else await self._descriptors(compat_id)
            if known is not None:
                await self._index.put_descriptor(known)
        except (IndexUnavailableError, IndexRefusedError) as error:
            self._warn(_NO_DESCRIPTOR, str(error))
            return False
        return known is not None

    async def _keep_alive(self, many: ManyRecords) -> None:
        """One request for all records; the index tells how many it has."""
        sent, before = self._clock(), self.table.kept
        # withdrawals that are under way may or may not have arrived
        under_way = len(self._pending) + self._withdrawing
        try:
            kept = await many.keep(self._holder, self._ttl_ms, ())
        except IndexUnavailableError as error:
            self._unreached(error)
            return
        except IndexRefusedError as error:
            self.refusals += 1
            logger.warning("the index service does not keep the records: %s", error)
            if isinstance(error, ManyUnsupportedError):
                self._many = None
            self.table.kept_alive(self._ttl_ms, sent)
            self.table.republish(self._clock())
            return
        self._warned.pop(_AWAY, None)
        self.table.reached()
        self.table.kept_alive(kept.ttl_ms, sent)
        self.missing = max(0, self.table.kept - kept.records)
        if self.missing:
            self.table.republish(self._clock())
        elif kept.records > before + under_way:
            logger.warning(
                "the index service has %d records of this holder instead of %d: all are withdrawn "
                "and published anew",
                kept.records,
                before,
            )
            self._stale = True
            self._wake.set()

    def _tell_whether_behind(self) -> None:
        """Log that records are late, once until they are not."""
        if said := self.behind:
            if _BEHIND not in self._warned:
                self._warned[_BEHIND] = said
                logger.warning("%s", said)
        elif self._warned.pop(_BEHIND, None):
            logger.warning("the records are at the index service again")

    async def _all(self, blocks: Iterable[BlockId]) -> None:
        tasks = []
        for block in blocks:
            task = asyncio.create_task(self._publish(block))
            self._busy[block] = task
            task.add_done_callback(partial(self._done, block))
            tasks.append(task)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, block: BlockId, task: asyncio.Task[None]) -> None:
        self._busy.pop(block, None)
        self._flying.pop(block, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a record was not published", exc_info=error)
            self.table.failed(block, self._clock())

    async def _publish(self, block: BlockId) -> None:
        assert self._source is not None
        # a little different each time, so that many holders do not come all at once
        ttl_ms = int(self._ttl_ms * random.uniform(0.9, 1.0))
        record = self._source(block, max(1, ttl_ms))
        if record is None:
            return  # it is about to go: who lets it go withdraws it, or says that it stays
        self._flying[block] = record.path
        try:
            answer = await self._told(block, record)
        except IndexUnavailableError as error:
            self.table.uncertain(block, record.path, self._ends_by_itself())
            self._unreached(error, [block])
        except IndexRefusedError as error:
            self._refuse(block, error)
        else:
            self._warned.pop(_AWAY, None)
            self._take(block, record, answer)

    async def _told(self, block: BlockId, record: ReplicaRecord) -> Published:
        """Publish a record, and its descriptor first when the index service lacks it, as
        one does that restarted empty. Raises IndexUnavailableError, IndexRefusedError."""
        try:
            return await self._index.publish(record)
        except CompatUnknownError:
            descriptor = None
            if self._descriptors is not None:
                descriptor = await self._descriptors(record.compat_id)
            if descriptor is None:
                raise
        await self._index.put_descriptor(descriptor)
        if block not in self.table:
            raise IndexRefusedError("the block went before its record was taken")
        return await self._index.publish(record)

    def _warn(self, what: str, reason: str) -> None:
        """Log what does not go and why, once until it does or the reason is another."""
        if self._warned.get(what) != reason:
            self._warned[what] = reason
            logger.warning("%s: %s", what, reason)

    def _remember(self, path: str, until: float) -> None:
        self._pending[path] = until
        while len(self._pending) > PENDING_WITHDRAWALS:
            # the index forgets it by its TTL, or has to be told all anew
            del self._pending[next(iter(self._pending))]
            self._stale = self._many is not None
        self._wake.set()

    async def _withdraw_pending(self) -> None:
        now = self._clock()
        for path, until in list(self._pending.items()):
            if until <= now:
                self._pending.pop(path, None)
                continue
            if not self.table.may_ask(now):
                return
            try:
                async with asyncio.timeout(self._withdraw_s):
                    await self._index.withdraw(path)
                self.table.reached()
            except (IndexUnavailableError, TimeoutError):
                self.table.failed(None, self._clock())
                return
            except IndexRefusedError as error:
                logger.warning("the index service refused a withdrawal: %s", error)
            self.withdrawn += 1
            self._pending.pop(path, None)
