"""Keeps the index informed of what a holder holds (KVSP "Publishing and Withdrawing Replicas").

`RecordTable` decides when (no I/O, `now` in seconds); `RecordPublisher` does it through an
`IndexClient`. The index is advisory: when it is away the holder goes on serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from kvsp.names.errors import KvspError
from kvsp.names.identity import Descriptor
from kvsp.names.uris import BlockId
from kvsp.records.records import ReplicaRecord

logger = logging.getLogger("kvsp.holder")

RecordSource = Callable[[BlockId, int], ReplicaRecord | None]
"""The record of a block with a TTL in milliseconds; None when it is not to be published."""

DescriptorSource = Callable[[bytes], Awaitable[Descriptor | None]]
"""The descriptor of a Compatibility ID, None for one that is not known."""

DEFAULT_TTL_MS: Final = 600_000
_FIRST_DELAY_S: Final = 0.5
_LONGEST_DELAY_S: Final = 30.0
_CONCURRENT: Final = 8
_PENDING_WITHDRAWALS: Final = 4096
_AWAY: Final = "the index service is away"
_NO_DESCRIPTOR: Final = "the index service cannot be asked for descriptors"


class IndexUnavailableError(KvspError):
    """The index service does not answer, or not now."""


class IndexRefusedError(KvspError):
    """The index service refused a record; asking again the same way does not help."""


class CompatUnknownError(IndexRefusedError):
    """The index service has no descriptor for a record's Compatibility ID."""


@dataclass(frozen=True, slots=True)
class Published:
    """The index service's answer to a record."""

    ttl_ms: int
    created: bool
    """Whether it was new there: to a refresh, the news that the index lost it."""


class IndexClient(Protocol):
    """What a holder asks of an index service."""

    async def publish(self, record: ReplicaRecord) -> Published:
        """Raises IndexUnavailableError, IndexRefusedError, CompatUnknownError."""
        ...

    async def put_descriptor(self, descriptor: Descriptor) -> None:
        """Store a descriptor; one that is there already is fine. Raises as `withdraw`."""
        ...

    async def withdraw(self, path: str) -> None:
        """Delete the record with that path; an unknown one is fine.
        Raises IndexUnavailableError, IndexRefusedError."""
        ...

    async def descriptor(self, compat_id: bytes) -> Descriptor | None:
        """The descriptor of a Compatibility ID; None when the index has none."""
        ...


@dataclass(slots=True)
class _Row:
    path: str = ""
    due: float = 0.0
    expires: float = 0.0
    dirty: bool = True
    known: bool = False
    """Whether the index is believed to have it."""


class RecordTable:
    """Which records are to be published when; every record before half its TTL is over."""

    def __init__(self) -> None:
        self._rows: dict[BlockId, _Row] = {}
        self._queue: list[tuple[float, BlockId]] = []
        self._failures = 0
        self._resume = 0.0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._rows

    @property
    def unavailable(self) -> bool:
        """Whether the last attempt did not reach the index."""
        return self._failures > 0

    def blocks(self) -> list[BlockId]:
        return list(self._rows)

    def changed(self, block: BlockId, now: float) -> None:
        """Publish a block's record as soon as possible."""
        row = self._rows.setdefault(block, _Row())
        row.dirty = True
        self._schedule(block, row, now)

    def due(self, now: float, limit: int) -> list[BlockId]:
        """Up to `limit` blocks whose records are to be published now."""
        blocks: list[BlockId] = []
        if now < self._resume:
            return blocks
        while self._queue and self._queue[0][0] <= now and len(blocks) < limit:
            due, block = heapq.heappop(self._queue)
            row = self._rows.get(block)
            if row is not None and row.due == due:
                row.due = float("inf")
                row.dirty = False
                blocks.append(block)
        return blocks

    def next_due(self) -> float | None:
        """When `due` has something again; None when there is nothing to wait for."""
        while self._queue and (
            (row := self._rows.get(self._queue[0][1])) is None or row.due != self._queue[0][0]
        ):
            heapq.heappop(self._queue)
        return max(self._queue[0][0], self._resume) if self._queue else None

    def published(self, block: BlockId, path: str, answer: Published, now: float) -> None:
        """The index took a record; a refresh it had not known means that it started anew."""
        row = self._rows.get(block)
        if row is None:
            return
        refreshed = row.known and row.expires > now
        row.path, row.expires, row.known = path, now + answer.ttl_ms / 1000, True
        if not row.dirty:
            # before half of it is over, so that one attempt may fail
            self._schedule(block, row, now + answer.ttl_ms / 1000 * 0.4)
        if self._failures or (refreshed and answer.created):
            self._failures, self._resume = 0, 0.0
            self.republish(now, but=block)

    def republish(self, now: float, but: BlockId | None = None) -> None:
        """Publish every record again."""
        for block, row in self._rows.items():
            if block != but:
                row.known = False
                self._schedule(block, row, now)

    def failed(self, block: BlockId, now: float) -> None:
        """The index could not be reached: everything waits, longer each time."""
        if now >= self._resume:  # attempts that were under way together count once
            self._failures += 1
            delay = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(self._failures - 1, 10))
            self._resume = now + delay
        if (row := self._rows.get(block)) is not None:
            self._schedule(block, row, self._resume)

    def refused(self, block: BlockId, now: float) -> None:
        """The index does not want a record: ask again much later."""
        if (row := self._rows.get(block)) is not None and not row.dirty:
            self._schedule(block, row, now + 10 * _LONGEST_DELAY_S)

    def forget(self, block: BlockId) -> tuple[str, float] | None:
        """Publish a block no more; its path and when it ends at the index, if it is there."""
        row = self._rows.pop(block, None)
        return (row.path, row.expires) if row is not None and row.path else None

    def expires(self, block: BlockId) -> float:
        """When the index drops the record by itself; 0 for one that is not there."""
        row = self._rows.get(block)
        return 0.0 if row is None else row.expires

    def _schedule(self, block: BlockId, row: _Row, at: float) -> None:
        if row.due != at or row.due == 0.0:
            row.due = at
            heapq.heappush(self._queue, (at, block))
        if len(self._queue) > 64 + 4 * len(self._rows):
            self._queue = [(row.due, block) for block, row in self._rows.items()]
            heapq.heapify(self._queue)


class NoIndex:
    """A holder that nobody looks up: nothing is published."""

    unavailable = False

    def __init__(self, ttl_ms: int = DEFAULT_TTL_MS) -> None:
        self._ttl_s = ttl_ms / 1000

    def attach(self, source: RecordSource) -> None:
        """Nothing is asked of it."""

    def describe(self, descriptors: DescriptorSource) -> None:
        """Nothing is asked of it."""

    def changed(self, block: BlockId) -> None:
        """Nobody is told."""

    async def withdraw(self, block: BlockId) -> None:
        """Nobody is told."""

    def remaining_s(self, block: BlockId) -> float:
        return self._ttl_s

    async def descriptor(self, compat_id: bytes) -> Descriptor | None:
        return None

    async def start(self) -> None: ...

    async def drain(self) -> None: ...

    async def stop(self) -> None: ...


class RecordPublisher:
    """Publishes, refreshes and withdraws a holder's records."""

    def __init__(
        self,
        index: IndexClient,
        *,
        ttl_ms: int = DEFAULT_TTL_MS,
        withdraw_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`withdraw_s` bounds how long an eviction waits for its withdrawal; one that did
        not arrive is repeated until the record has expired at the index."""
        self.table = RecordTable()
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
        self._loop: asyncio.Task[None] | None = None
        self._draining = False
        self._warned: dict[str, str] = {}

    @property
    def unavailable(self) -> bool:
        """Whether the index did not answer last time."""
        return self.table.unavailable

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
            until = self._clock() + self._ttl_ms / 1000
            await asyncio.wait([running], timeout=self._withdraw_s)
            self.table.forget(block)
            if path is not None and not running.done():
                # it may reach the index after this withdrawal: then there is one more
                running.add_done_callback(partial(self._late, path))
        if path is None:
            return
        try:
            async with asyncio.timeout(self._withdraw_s):
                await self._index.withdraw(path)
            self.withdrawn += 1
            self._warned.pop(_AWAY, None)
        except (IndexUnavailableError, TimeoutError) as error:
            # running out of the time for this is no other reason than the last one
            self._warn(_AWAY, str(error) or self._warned.get(_AWAY, "no answer in time"))
            self.failures += 1
            self._remember(path, until)
        except IndexRefusedError as error:
            self.refusals += 1
            logger.warning("the index service refused a withdrawal: %s", error)

    def _late(self, path: str, _publication: asyncio.Task[None]) -> None:
        if path not in self._flying.values():  # nor is it published anew
            self._remember(path, self._clock() + self._ttl_ms / 1000)

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
        gate = asyncio.Semaphore(_CONCURRENT)
        failures = self.failures

        async def one(block: BlockId) -> None:
            async with gate:
                if self.failures == failures:
                    await self.withdraw(block)

        await asyncio.gather(*(one(block) for block in self.table.blocks()))

    async def _run(self) -> None:
        while True:
            await self.step()
            now = self._clock()
            waits = [at for at in (self.table.next_due(),) if at is not None]
            if self._pending:
                waits.append(now + _LONGEST_DELAY_S / 10)
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(waits) - now) if waits else None):
                    await self._wake.wait()

    async def step(self) -> None:
        """Publish what is due and repeat withdrawals that did not arrive."""
        await self._withdraw_pending()
        while blocks := self.table.due(self._clock(), _CONCURRENT):
            await self._all(blocks)

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
            self._warn(_AWAY, str(error))
            self.failures += 1
            self.table.failed(block, self._clock())
        except IndexRefusedError as error:
            self.refusals += 1
            logger.warning("the index service refused a record: %s", error)
            self.table.refused(block, self._clock())
        else:
            self.published += 1
            self._warned.pop(_AWAY, None)
            self._pending.pop(record.path, None)
            self.table.published(block, record.path, answer, self._clock())

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
        while len(self._pending) > _PENDING_WITHDRAWALS:
            # the index forgets these by their TTL
            del self._pending[next(iter(self._pending))]
        self._wake.set()

    async def _withdraw_pending(self) -> None:
        now = self._clock()
        for path, until in list(self._pending.items()):
            if until <= now:
                self._pending.pop(path, None)
                continue
            try:
                async with asyncio.timeout(self._withdraw_s):
                    await self._index.withdraw(path)
            except (IndexUnavailableError, TimeoutError):
                return
            except IndexRefusedError as error:
                logger.warning("the index service refused a withdrawal: %s", error)
            self.withdrawn += 1
            self._pending.pop(path, None)
