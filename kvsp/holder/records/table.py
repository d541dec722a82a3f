"""Which records of a holder are to be published when (no I/O, `now` in seconds).

A record is published by itself and refreshed before half its TTL is over; or, where the index
service takes many at once, it is kept: published once, and alive as long as the holder is kept
alive there, by one request for all of them.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Final

from kvsp.names.uris import BlockId

FIRST_DELAY_S: Final = 0.5
LONGEST_DELAY_S: Final = 30.0
_REFRESH: Final = 0.4
"""The part of a TTL after which it is renewed, so that one attempt may fail."""


@dataclass(frozen=True, slots=True)
class Published:
    """The index service's answer to a record."""

    ttl_ms: int
    created: bool
    """Whether it was new there: to a refresh, the news that the index lost it."""


@dataclass(slots=True)
class _Row:
    path: str = ""
    due: float = 0.0
    expires: float = 0.0
    dirty: bool = True
    known: bool = False
    """Whether the index is believed to have it."""

    kept: bool = False
    """Whether it is there as long as the holder is kept alive."""

    maybe: float = 0.0
    """Until when it may be there although the index did not say so."""


class RecordTable:
    """Every record before half its TTL is over, and what is kept by one request for all."""

    def __init__(self, ttl_s: float = math.inf) -> None:
        """`ttl_s` is that of the records: an index that was away is asked again within it."""
        self._longest_s = min(LONGEST_DELAY_S, ttl_s * _REFRESH)
        self._rows: dict[BlockId, _Row] = {}
        self._queue: list[tuple[float, BlockId]] = []
        self._failures = 0
        self._resume = 0.0
        self._known = 0
        self.kept = 0
        """Records that the index keeps for the holder."""

        self.alive_until = 0.0
        """When the index drops those, unless it is told before."""

        self.keep_due = math.inf
        """When it is to be told."""

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._rows

    @property
    def unavailable(self) -> bool:
        """Whether the last attempt did not reach the index."""
        return self._failures > 0

    @property
    def unpublished(self) -> int:
        """Blocks that the index is not believed to list."""
        return len(self._rows) - self._known

    def late_s(self, now: float) -> float:
        """How long the record that has waited longest has waited."""
        self._drop_stale()
        return max(0.0, now - self._queue[0][0]) if self._queue else 0.0

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
                row.due = math.inf
                row.dirty = False
                blocks.append(block)
        return blocks

    def _drop_stale(self) -> None:
        """Have the head of the queue be one that counts."""
        while self._queue and (
            (row := self._rows.get(self._queue[0][1])) is None or row.due != self._queue[0][0]
        ):
            heapq.heappop(self._queue)

    def next_due(self) -> float | None:
        """When there is something to do again; None when there is nothing to wait for."""
        self._drop_stale()
        first = min(self._queue[0][0] if self._queue else math.inf, self.keep_due)
        return None if first == math.inf else max(first, self._resume)

    def may_ask(self, now: float) -> bool:
        """Whether the index may be asked again after it could not be reached."""
        return now >= self._resume

    def published(
        self, block: BlockId, path: str, answer: Published, now: float, *, kept: bool = False
    ) -> None:
        """The index took a record; a refresh it had not known means that it started anew."""
        row = self._rows.get(block)
        if row is None:
            return
        refreshed = row.known and self._ends(row) > now
        self._mark(row, known=True, kept=kept)
        row.path, row.expires, row.maybe = path, now + answer.ttl_ms / 1000, 0.0
        if not row.dirty and not kept:
            self._schedule(block, row, now + answer.ttl_ms / 1000 * _REFRESH)
        self.reached()
        if refreshed and answer.created:
            self.republish(now, but=block)

    def kept_alive(self, ttl_ms: int, sent: float) -> None:
        """The index keeps what it keeps for so long from `sent` on."""
        self.alive_until = sent + ttl_ms / 1000
        self.keep_due = sent + ttl_ms / 1000 * _REFRESH if self.kept else math.inf

    def reached(self) -> None:
        """The index has answered: what waited for it waits no more."""
        self._failures, self._resume = 0, 0.0

    def republish(self, now: float, but: BlockId | None = None) -> None:
        """Publish every record again."""
        for block, row in self._rows.items():
            if block != but:
                self._mark(row, known=False, kept=False)
                self._schedule(block, row, now)

    def failed(self, block: BlockId | None, now: float) -> None:
        """The index could not be reached: everything waits, longer each time."""
        if now >= self._resume:  # attempts that were under way together count once
            self._failures += 1
            delay = min(self._longest_s, FIRST_DELAY_S * 2 ** min(self._failures - 1, 10))
            self._resume = now + delay
        if block is not None and (row := self._rows.get(block)) is not None:
            self._schedule(block, row, self._resume)

    def uncertain(self, block: BlockId, path: str, until: float) -> None:
        """The index did not answer to a record that was sent: it may have it."""
        if (row := self._rows.get(block)) is not None:
            row.path, row.maybe = path, until

    def refused(self, block: BlockId, now: float, after_s: float = 10 * LONGEST_DELAY_S) -> None:
        """The index does not want a record: ask again later."""
        if (row := self._rows.get(block)) is not None and not row.dirty:
            self._mark(row, known=False, kept=False)
            self._schedule(block, row, now + after_s)

    def forget(self, block: BlockId) -> tuple[str, float] | None:
        """Publish a block no more; its path and when it ends at the index, if it may be there:
        never by itself when it is kept."""
        row = self._rows.pop(block, None)
        if row is None:
            return None
        ends = math.inf if row.kept else max(row.expires, row.maybe)
        self._mark(row, known=False, kept=False)
        return (row.path, ends) if row.path else None

    def expires(self, block: BlockId) -> float:
        """When the index drops the record by itself; 0 for one that is not there."""
        row = self._rows.get(block)
        return 0.0 if row is None else self._ends(row)

    def _ends(self, row: _Row) -> float:
        return self.alive_until if row.kept else row.expires

    def _mark(self, row: _Row, *, known: bool, kept: bool) -> None:
        self._known += known - row.known
        self.kept += kept - row.kept
        row.known, row.kept = known, kept
        if not self.kept:
            self.keep_due = math.inf

    def _schedule(self, block: BlockId, row: _Row, at: float) -> None:
        if row.due != at or row.due == 0.0:
            row.due = at
            heapq.heappush(self._queue, (at, block))
        if len(self._queue) > 64 + 4 * len(self._rows):
            self._queue = [(row.due, block) for block, row in self._rows.items()]
            heapq.heapify(self._queue)
