"""What the disk holds, and what of it goes: one budget, shared out among the scopes.

Sans-IO: what blocks is a job for a `Worker`. Tracks are the unit: a file holds a whole one, and
goes as a whole, the least recently used of the scope that has more than its share first.
"""

from __future__ import annotations

import errno
import logging
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import takewhile
from typing import Final, Protocol

from moqt.track.stored import StoredObject
from moqt.values.names import FullTrackName, TrackNamespace, is_prefix
from relay.config import Clock, RelayConfig, cache_duration
from relay.disk.entries import DiskCounters, Entry
from relay.disk.files import Folder, Found, Part, Sealed, remove
from relay.disk.reads import Reads, Worker
from relay.disk.records import Summary, record_octets

logger = logging.getLogger("relay")

FLUSH_SECONDS: Final = 0.005
"""Objects that come within so long are written together."""
RETRY_SECONDS: Final = 10.0
"""After the disk has refused something, so long nothing more is written; then twice as long."""
MAX_RETRY_SECONDS: Final = 300.0
ROOM_KEPT: Final = 8
"""A full disk has its budget become what is held without one in so many parts of that."""
WRITE_SECONDS: Final = 60.0
"""After so long without anything written of a track that is to be, it is given up."""
BILLED_AT_ONCE: Final = 1024
"""Octets of memory that bookkeeping is billed in."""


class Shelf:
    """What of one scope is on the disk."""

    def __init__(self, tier: DiskTier, scope: str) -> None:
        self.tier = tier
        self.scope = scope
        self.entries: OrderedDict[FullTrackName, Entry] = OrderedDict()
        """Least recently used first."""
        self.octets = 0
        """Of all files, and of what is to be written."""
        self.reads = 0
        """Reads that have not come back."""
        self.turns: dict[Callable[[bool], None], float] = {}
        """Who waits to read, and until when."""
        self.told: set[str] = set()
        """What the log has heard of it."""
        self.remembered = 0
        """Octets of memory that are billed for bookkeeping."""
        self.changed: Callable[[TrackNamespace, Entry, bool], None] = _unheard
        """Told of each entry that comes (True) or goes."""

    def add(self, summary: Summary, sealed: Sealed) -> None:
        """There is another file of the track."""
        expires = self.tier.expires(summary)
        entry = self.entries.get(summary.name)
        if entry is not None and not entry.fits(summary):
            self.drop(summary.name)
            entry = None
        if entry is None:
            entry = self.entries[summary.name] = Entry(summary, sealed, expires)
        else:
            entry.add(summary, sealed, expires)
        self.octets += sealed.octets
        self.tier.files += 1
        self.tier.octets += sealed.octets
        self.tier.expire_at(self, entry)
        self.changed(summary.name.namespace, entry, True)
        while not self.tier.remember(self, entry.price - entry.billed):
            self.tier.evict_of(self)
            if summary.name not in self.entries:
                return  # it was the last one
        entry.billed = entry.price

    def drop(self, name: FullTrackName) -> Entry | None:
        """Have it no more; its file goes."""
        entry = self.entries.pop(name, None)
        if entry is not None:
            self.octets -= entry.octets
            self.tier.remember(self, -entry.billed)
            self.tier.files -= len(entry.files)
            self.tier.octets -= entry.octets
            for sealed in entry.files:
                self.tier.remove(sealed)
            self.changed(name.namespace, entry, False)
        return entry

    def use(self, name: FullTrackName) -> None:
        if name in self.entries:
            self.entries.move_to_end(name)

    def purge(
        self, prefix: TrackNamespace, kept: Container[FullTrackName]
    ) -> dict[FullTrackName, int]:
        """Drop the tracks under `prefix` but those `kept`: each, and the octets of its files."""
        gone = {
            name: entry.octets
            for name, entry in self.entries.items()
            if is_prefix(prefix, name.namespace) and name not in kept
        }
        for name in gone:
            self.drop(name)
        return gone


class Bill:
    """What the bookkeeping of one track is billed to its scope."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._billed = 0

    def be(self, octets: int) -> bool:
        """So many octets are remembered now; False when there is no room for them."""
        if self._billed - BILLED_AT_ONCE < octets <= self._billed:
            return True
        wanted = -(-octets // BILLED_AT_ONCE) * BILLED_AT_ONCE
        tier = self._shelf.tier
        while not tier.remember(self._shelf, wanted - self._billed):
            # what is new displaces what was not used for longest, but no piece of it does
            if self._billed or not tier.evict_of(self._shelf):
                return False
        self._billed = wanted
        return True


class Writing(Protocol):
    """A track that is being written."""

    part: Part
    shelf: Shelf

    def written(self, octets: int, error: Exception | None) -> None:
        """So many octets that were handed over are on the disk, or could not be written."""

    def give_up(self) -> None:
        """It is not kept."""

    def finish(self) -> None:
        """Nothing more comes: it is kept as it is."""


class DiskTier:
    """All shelves, the budget, and the queue of what is to be written."""

    def __init__(
        self, folder: Folder, worker: Worker, config: RelayConfig, clock: Clock,
        wall: Callable[[], float],
    ) -> None:  # fmt: skip
        """`wall`: the time in seconds of the epoch, which alone means something after a restart."""
        self.folder = folder
        self.worker = worker
        self.config = config
        self.clock = clock
        self.wall = wall
        self.counters = DiskCounters()
        self.budget = config.disk_octets
        """What may be held; less than was asked for when the disk was full before."""
        self.octets = 0
        """Of all files, and of what is to be written."""
        self.files = 0
        self.queued = 0
        """Octets that wait to be written."""
        self.shelves: dict[str, Shelf] = {}
        self._expiries: list[tuple[float, str, FullTrackName]] = []
        """A heap; entries that are gone are still in it."""
        self.reading = True
        """It is still being looked at what there is."""
        self._queued_by: dict[Shelf, int] = {}
        self._pending: dict[Writing, list[tuple[StoredObject, float]]] = {}
        self._writing = False
        self._failed_until: float | None = None
        self._failures = 0
        """One after the other, without anything written in between."""
        self._number = 0
        self._told: set[str] = set()
        self.reads = Reads(self)
        self.remembered = 0
        """Octets of memory that are billed for bookkeeping."""
        self._touched: dict[Writing, None] = {}
        """Tracks of which something was handed to the worker: there may be a file."""
        self.open: dict[Writing, None] = {}
        """Files that are not finished."""
        self._busy: dict[Writing, float] = {}
        """Tracks on their way to the disk, and when there was something of them last; who waits
        for longest stands first."""

    def sealed(self, writing: Writing) -> None:
        """Its file has its name: there is nothing of it to be removed."""
        self._touched.pop(writing, None)

    def shelf(self, scope: str) -> Shelf:
        shelf = self.shelves.get(scope)
        if shelf is None:
            shelf = self.shelves[scope] = Shelf(self, scope)
        return shelf

    @property
    def tracks(self) -> int:
        return sum(len(shelf.entries) for shelf in self.shelves.values())

    def expire_at(self, shelf: Shelf, entry: Entry) -> None:
        """Drop it when that is due."""
        if entry.expires is not None:
            heappush(self._expiries, (entry.expires, shelf.scope, entry.name))
        if len(self._expiries) > 2 * self.files + 64:  # others have gone before they were due
            every = ((s.scope, e) for s in self.shelves.values() for e in s.entries.values())
            self._expiries = [(e.expires, s, e.name) for s, e in every if e.expires is not None]
            heapify(self._expiries)

    def leave(self, scope: str) -> None:
        """Nobody is in the scope any more; what the disk has of it stays."""
        shelf = self.shelves.get(scope)
        if shelf is not None:
            shelf.changed = _unheard
            if not shelf.octets:
                del self.shelves[scope]

    @property
    def busy(self) -> bool:
        """Something is on its way to the disk."""
        return bool(self._busy)

    @property
    def failing(self) -> bool:
        """The disk has refused something a moment ago: nothing is written."""
        return self._failed_until is not None

    # -- what is found ---------------------------------------------------------------------

    def found(self, files: Iterable[Found], bad: int) -> None:
        """These were there at the start, the least recently used first, and so many more that were
        of no use."""
        if bad:
            self.count_bad(bad, "a file of the disk tier is damaged, or cannot be read")
        for each in files:
            shelf = self.shelf(each.summary.scope)
            expires = self.expires(each.summary)
            if expires is not None and expires <= self.wall():
                self.counters.expirations += 1
                self.remove(each.sealed)
                continue
            shelf.add(each.summary, each.sealed)
        self.make_room(0)

    def expires(self, summary: Summary) -> float | None:
        """When a track may be served no more, in seconds of the epoch."""
        duration = cache_duration(summary.properties, self.config)
        return None if duration is None else summary.arrived + duration

    # -- room ------------------------------------------------------------------------------

    def admit(self, shelf: Shelf, octets: int) -> bool:
        """Bill so many octets more of `shelf`, for which others may have to go."""
        if self.failing or not self._make_room(shelf, octets):
            return False
        shelf.octets += octets
        self.octets += octets
        return True

    def release(self, shelf: Shelf, octets: int) -> None:
        """What was billed is not there."""
        shelf.octets -= octets
        self.octets -= octets

    def remember(self, shelf: Shelf, octets: int) -> bool:
        """Bill so many octets of memory more, or fewer, for bookkeeping of `shelf`, which takes
        half of them at most; False, and nothing has changed, when there is no room."""
        most = self.config.disk_memory_octets
        if octets > 0 and (
            self.remembered + octets > most or shelf.remembered + octets > most // 2
        ):
            self.counters.memory_refused += 1
            self.tell(
                "memory",
                f"{shelf.scope}: the bookkeeping of the disk tier has no room in memory "
                f"(disk_memory_octets, {most}, one scope half): tracks in many pieces are kept in "
                "memory alone, or go",
                shelf,
            )
            return False
        self.remembered += octets
        shelf.remembered += octets
        return True

    def make_room(self, octets: int) -> None:
        """Hold no more than the budget has, without so many octets."""
        while self.octets + octets > self.budget and self._evict(None):
            pass

    def _make_room(self, shelf: Shelf, octets: int) -> bool:
        quota = self.config.disk_octets_per_scope or self.budget
        while shelf.octets + octets > quota:
            if not self.evict_of(shelf):
                self.tell(
                    "quota",
                    f"{shelf.scope} is at its limit on the disk (disk_octets_per_scope, "
                    f"{quota} octets): what it brings more is kept in memory alone",
                    shelf,
                )
                return False
        while self.octets + octets > self.budget or self.files >= self.config.disk_files:
            if not self._evict(shelf):
                self.tell(
                    "budget",
                    f"the disk tier is full ({self.budget} octets, --cache-disk) of what is being "
                    "written: more is kept in memory alone",
                )
                return False
        return True

    def _evict(self, asking: Shelf | None) -> bool:
        """Drop the track that was not used for longest, of who asks if that has more than its
        share, else of who has most."""
        holding = [shelf for shelf in self.shelves.values() if shelf.entries]
        if not holding:
            return False
        users = sum(1 for shelf in self.shelves.values() if shelf.octets)
        share = self.budget // max(1, users)
        if asking is not None and asking.entries and asking.octets >= share:
            return self.evict_of(asking)
        return self.evict_of(max(holding, key=lambda shelf: shelf.octets))

    def evict_of(self, shelf: Shelf) -> bool:
        """Drop of it the track that was not used for longest; False when there is none."""
        if not shelf.entries:
            return False
        self.counters.evictions += 1
        shelf.drop(next(iter(shelf.entries)))
        return True

    # -- writing ---------------------------------------------------------------------------

    def part(self, shelf: Shelf, name: FullTrackName) -> Part:
        self._number = max(self._number + 1, int(self.wall() * 1000))
        return self.folder.part(shelf.scope, name, self._number)

    def takes(self, shelf: Shelf, octets: int) -> bool:
        """Whether the queue has room for so much; one scope takes half of it at most."""
        most = self.config.disk_queue_octets
        return (
            self.queued + octets <= most and self._queued_by.get(shelf, 0) + octets <= most // 2
        ) or not self._queued_by.get(shelf, 0)

    def write(self, writing: Writing, stored: StoredObject, arrived: float) -> None:
        """Have it written behind; it is billed already."""
        octets = record_octets(stored)
        self._count_queued(writing.shelf, octets)
        self._pending.setdefault(writing, []).append((stored, arrived))
        if not self._writing:
            self._writing = True
            self.worker.later(FLUSH_SECONDS, self._flush)

    def _count_queued(self, shelf: Shelf, octets: int) -> None:
        self.queued += octets
        count = self._queued_by.get(shelf, 0) + octets
        if count:
            self._queued_by[shelf] = count
        else:
            self._queued_by.pop(shelf, None)

    def _flush(self) -> None:
        batch, self._pending = self._pending, {}
        if not batch:
            self._writing = False
            return
        work = list(batch.items())
        self._touched |= dict.fromkeys(batch)
        self.worker.submit(
            partial(_write_all, work),
            partial(self._written, work),
            lambda error: self._written(work, dict.fromkeys(batch, error)),
            writes=True,
        )

    def _written(
        self,
        work: list[tuple[Writing, list[tuple[StoredObject, float]]]],
        errors: dict[Writing, Exception],
    ) -> None:
        if errors:
            self.count_error(next(iter(errors.values())))
        else:
            self._failures = 0
        for writing, objects in work:
            octets = sum(record_octets(stored) for stored, _ in objects)
            self._count_queued(writing.shelf, -octets)
            if writing not in errors:
                self.counters.octets_written += octets
            writing.written(octets, errors.get(writing))
        self._flush()

    def count_busy(self, writing: Writing, busy: bool) -> None:
        """Something of it is on its way to the disk, and goes on, or nothing is any more."""
        self._busy.pop(writing, None)
        if busy:
            self._busy[writing] = self.clock.now

    def give_up(self, writing: Writing) -> None:
        """Nothing more of it is to be written, and what was is to go."""
        pending = self._pending.pop(writing, [])
        for stored, _ in pending:
            self._count_queued(writing.shelf, -record_octets(stored))
        if writing in self._touched:
            # behind what is being written of it; else there is no file, and a disk that hangs is
            # not to have a job for each track that it never saw
            del self._touched[writing]
            self.worker.submit(writing.part.remove, _nothing, _nothing, writes=True)

    def seal(
        self,
        writing: Writing,
        summary: Summary,
        done: Callable[[Sealed], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Give the file its name: nothing more of it is to be written."""
        self._touched[writing] = None
        self.worker.submit(partial(writing.part.seal, summary), done, failed)

    def remove(self, sealed: Sealed) -> None:
        self.worker.submit(partial(remove, sealed.path), _nothing, _nothing, writes=True)

    # -- time and faults -------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed."""
        self.reads.tick(now)
        late = [
            each for each, _ in takewhile(lambda b: now - b[1] > WRITE_SECONDS, self._busy.items())
        ]
        if late:
            self.count_error(TimeoutError("it takes too long to write"))
        for writing in late:
            writing.give_up()
        if self._failed_until is not None and now >= self._failed_until:
            self._failed_until = None
            self._told.discard("failing")
            self.budget = self.config.disk_octets
        wall = self.wall()
        while self._expiries and self._expiries[0][0] <= wall:
            due, scope, name = heappop(self._expiries)
            shelf = self.shelves.get(scope)
            entry = None if shelf is None else shelf.entries.get(name)
            if shelf is not None and entry is not None and entry.expires == due:
                self.counters.expirations += 1
                shelf.drop(name)

    def count_error(self, error: Exception) -> None:
        """The operating system has refused something: nothing is written for a while."""
        self.counters.errors += 1
        wait = min(MAX_RETRY_SECONDS, RETRY_SECONDS * 2**self._failures)
        self._failures += 1
        self._failed_until = self.clock.now + wait
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full:
            # others fill the disk: hold less than there is
            self.budget = max(1, self.octets - self.octets // ROOM_KEPT)
            self.make_room(0)
        said = error.strerror if isinstance(error, OSError) else None
        self.tell(
            "failing",
            f"{self.folder.path}: {said or error}: what comes is kept in memory alone; the disk is "
            f"tried again in {wait:g} s",
        )

    def count_bad(self, count: int, what: str) -> None:
        self.counters.files_bad += count
        logger.warning("%s: %s; what it held is asked for upstream", self.folder.path, what)

    def tell(self, about: str, sentence: str, of: Shelf | None = None) -> None:
        """Log it the first time, `of` one scope or of all."""
        told = self._told if of is None else of.told
        if about not in told:
            told.add(about)
            logger.warning("%s", sentence)


def _unheard(namespace: TrackNamespace, entry: Entry, here: bool) -> None:
    """Nobody wants to be told."""


def _write_all(
    work: list[tuple[Writing, list[tuple[StoredObject, float]]]],
) -> dict[Writing, Exception]:
    """Write all of it; what of it failed, and how."""
    errors: dict[Writing, Exception] = {}
    for writing, objects in work:
        try:
            writing.part.write(objects)
        except OSError as error:
            errors[writing] = error
    return errors


def _nothing(result: object) -> None:
    """Whatever came of it."""
