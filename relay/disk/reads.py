"""Reads from the disk that are under way: so many at most, each for so long.

A job that does not come back cannot be taken back: it counts until it does, also when nobody waits
for it any more. When as many as there are threads are overdue the disk hangs, and nothing more is
asked of it until one of them comes back. Sans-IO.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from moqt.values.names import FullTrackName, Location
from relay.config import Clock, RelayConfig
from relay.disk.entries import DiskCounters, Entry
from relay.disk.files import Read, read_last, read_range, touch
from relay.disk.records import Damaged

logger = logging.getLogger("relay")

T = TypeVar("T")

READERS: Final = 4
"""Reads, and files that are given their names, at a time; writes have a thread of their own."""
SUSPENDED_SECONDS: Final = 30.0
"""A file that could not be read in time is not read for so long."""


class Worker(Protocol):
    """Who does what blocks, elsewhere, and says so here."""

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it in so long."""

    def submit(
        self,
        job: Callable[[], T],
        done: Callable[[T], None],
        failed: Callable[[Exception], None],
        *,
        writes: bool = False,
    ) -> None:
        """Do `job`, then call one of the others; those that write are done one after the other."""


class Tier(Protocol):
    """Whose files are read."""

    worker: Worker
    config: RelayConfig
    clock: Clock
    counters: DiskCounters

    def count_bad(self, count: int, what: str) -> None:
        """So many files are of no use."""

    def tell(self, about: str, sentence: str, of: Any = None) -> None:
        """Log it the first time, `of` one scope or of all."""


class Holder(Protocol):
    """Whose tracks they are: one scope."""

    reads: int
    """Jobs of it that have not come back."""
    turns: dict[Callable[[bool], None], float]
    """Who waits to read, and until when."""

    @property
    def scope(self) -> str: ...

    @property
    def entries(self) -> Mapping[FullTrackName, Entry]: ...

    def drop(self, name: FullTrackName) -> Entry | None:
        """Have it no more."""


class Reads:
    """All reads of a disk tier."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.jobs = 0
        """That have not come back."""
        self.overdue = 0
        """Of these, the ones that nobody waits for any more."""
        self._waiting: dict[Reading, None] = {}
        """The first deadline stands first."""
        self._queue: dict[Holder, None] = {}
        """Those of which somebody waits for a turn."""

    @property
    def hung(self) -> bool:
        """No thread is left to read with."""
        return self.overdue >= READERS

    def allowed(self, shelf: Holder) -> bool:
        """Whether one more may begin; a scope takes half of them at most."""
        most = self.tier.config.disk_reads
        return not self.hung and self.jobs < most and shelf.reads < max(1, most // 2)

    def refuse(self, shelf: Holder) -> None:
        """One was not begun: memory and publishers are asked alone."""
        self.tier.counters.reads_refused += 1
        if self.hung:
            self.tier.tell("hung", "the disk does not answer: it is not asked until it does")
        else:
            self.tier.tell(
                "reads",
                f"{shelf.scope}: as many reads are under way as may be (disk_reads, "
                f"{self.tier.config.disk_reads}, one scope half): what more is wanted is asked of "
                "publishers, and waits where there is none",
                shelf,
            )

    def await_turn(self, shelf: Holder, turn: Callable[[bool], None]) -> bool:
        """Call `turn` when one more may begin (True), or it has taken too long (False); whether
        that is to be waited for, as the disk answers."""
        if self.hung:
            return False
        tier = self.tier
        shelf.turns.setdefault(turn, tier.clock.now + tier.config.disk_timeout)
        self._queue[shelf] = None
        return True

    def forgo(self, shelf: Holder, turn: Callable[[bool], None]) -> None:
        """It is not waited for any more."""
        shelf.turns.pop(turn, None)
        if not shelf.turns:
            self._queue.pop(shelf, None)

    def go_on(self) -> None:
        """There is room for one more: who has waited for longest of a scope, one scope after the
        other."""
        while (shelf := next(filter(self.allowed, self._queue), None)) is not None:
            turn = next(iter(shelf.turns))
            del self._queue[shelf]
            self._queue[shelf] = None
            self.forgo(shelf, turn)
            turn(True)

    def _give_up_waiting(self, now: float) -> None:
        for shelf in tuple(self._queue):
            for turn, until in tuple(shelf.turns.items()):
                if now < until and not self.hung:
                    break
                self.forgo(shelf, turn)
                turn(False)

    def range(
        self, shelf: Holder, entry: Entry, start: Location, end: Location, octets: int,
        done: Callable[[Read | None], None],
    ) -> Reading:  # fmt: skip
        """Read the Objects of [start, end], about so many octets of them; None when they cannot
        be had from here. Ask `allowed` before."""
        job = partial(read_range, tuple(entry.files), start, end, octets)
        return self._read(shelf, entry, job, done)

    def last(
        self, shelf: Holder, entry: Entry, at: Location, done: Callable[[Read | None], None]
    ) -> Reading:
        """Read the last Object at `at` or before it. Ask `allowed` before."""
        return self._read(shelf, entry, partial(read_last, tuple(entry.files), at), done)

    def _read(
        self, shelf: Holder, entry: Entry, job: Callable[[], Read],
        done: Callable[[Read | None], None],
    ) -> Reading:  # fmt: skip
        tier = self.tier
        reading = Reading(self, shelf, entry, done, tier.clock.now + tier.config.disk_timeout)
        self._waiting[reading] = None
        self.jobs += 1
        shelf.reads += 1

        def read() -> Read:
            touch(entry.files[0].path)
            return job()

        tier.worker.submit(read, reading.came, reading.failed)
        return reading

    def back(self, reading: Reading, shelf: Holder) -> None:
        """Its job has come back."""
        self.jobs -= 1
        shelf.reads -= 1
        if reading not in self._waiting:
            self.overdue -= 1

    def given_up(self, reading: Reading) -> None:
        """Nobody waits for it any more; its job has not come back."""
        if reading in self._waiting:
            del self._waiting[reading]
            self.overdue += 1

    def over(self, reading: Reading) -> None:
        """It is done."""
        self._waiting.pop(reading, None)

    def tick(self, now: float) -> None:
        """Time has passed."""
        while self._waiting:
            reading = next(iter(self._waiting))
            if now < reading.deadline:
                break
            self.given_up(reading)
            if reading.cancelled:
                continue
            self.tier.counters.timeouts += 1
            reading.entry.suspended = now + SUSPENDED_SECONDS
            self.tier.tell("slow", "the disk tier does not read in time (disk_timeout)")
            reading.over(None)
        self._give_up_waiting(now)


class Reading:
    """A read that is under way: it ends once, in time."""

    def __init__(
        self, reads: Reads, shelf: Holder, entry: Entry, done: Callable[[Read | None], None],
        deadline: float,
    ) -> None:  # fmt: skip
        self.entry = entry
        self.deadline = deadline
        self._reads = reads
        self._shelf = shelf
        self._done: Callable[[Read | None], None] | None = done

    @property
    def cancelled(self) -> bool:
        """Nobody waits for it."""
        return self._done is None

    def came(self, read: Read) -> None:
        self._reads.back(self, self._shelf)
        counters = self._reads.tier.counters
        counters.hits += len(read.objects)
        counters.octets_read += sum(len(each.payload) for each in read.objects)
        self.over(read)
        self._reads.go_on()

    def failed(self, error: Exception) -> None:
        self._reads.back(self, self._shelf)
        name = self.entry.name
        if self._shelf.entries.get(name) is self.entry:
            said = error.strerror if isinstance(error, OSError) else None
            if not isinstance(error, Damaged | OSError):
                logger.error("reading %s failed", name, exc_info=error)
            self._reads.tier.count_bad(1, f"{name}: {said or error}")
            self._shelf.drop(name)
        self.over(None)
        self._reads.go_on()

    def over(self, read: Read | None) -> None:
        """Tell who waits for it."""
        done, self._done = self._done, None
        self._reads.over(self)
        if done is not None:
            done(read)

    def cancel(self) -> None:
        """Nobody waits for it; its job goes on."""
        self._done = None
