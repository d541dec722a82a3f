"""One track on its way to a file: what of it was handed over, and when the file is finished.

That is when all of the track is written, to its end; or, when it is known where it ends, as soon as
nothing more of it comes for a moment: readers do not want all of every track. What comes later is
for another file. What the queue had no room for is handed over later, if it is still in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from moqt.track.knowledge import INTERVAL_OCTETS
from moqt.track.store import TrackStore
from moqt.track.stored import StoredObject
from moqt.values.intervals import IntervalSet
from moqt.values.names import START, Location, location_after
from relay.disk.files import Sealed
from relay.disk.records import Summary, record_octets
from relay.disk.tier import Bill, DiskTier, Shelf

MAX_SKIPPED: Final = 65_536
"""Objects of a track that may wait for the queue, and ranges of it that may be remembered; with
more it is not kept."""
MAX_KNOWN: Final = 8192
"""Ranges that a file says to be known; beyond, they are asked for upstream."""
SKIPPED_OCTETS: Final = 160
"""Octets of memory billed for an Object that waits for the queue, which CPython needs;"""
ROW_OCTETS: Final = 32
"""for where one stands in the file that is written."""
CAUGHT_UP: Final = 256
"""Of those, how many are handed over at a time."""
QUIET_SECONDS: Final = 2.0
"""After so long without anything new a file is finished that has not all of its track."""
MAX_FILES: Final = 16
"""Files of one track; what comes after that is not kept."""


class Lost:
    """What came of a track and is in no file."""

    def __init__(self, shelf: Shelf) -> None:
        self._bill = Bill(shelf)
        self._ranges = IntervalSet()
        self.overflowed = False
        """It is more than may be remembered: nothing more is said to be known of the track."""

    def __len__(self) -> int:
        return len(self._ranges)

    def __iter__(self) -> Iterator[tuple[Location, Location]]:
        return iter(self._ranges)

    def add(self, at: Location) -> None:
        if self.overflowed:
            return
        if not self._ranges.add(at, at, MAX_SKIPPED) or not self._rebill():
            self.close()
            self.overflowed = True

    def remove(self, at: Location) -> None:
        self._ranges.remove(at, at)
        self._rebill()

    def _rebill(self) -> bool:
        return self._bill.be(len(self._ranges) * INTERVAL_OCTETS)

    def close(self) -> None:
        """Remember nothing."""
        self._ranges = IntervalSet()
        self._bill.be(0)


class Keeping:
    """Has a file of a track written, from its first Object to its name."""

    def __init__(self, shelf: Shelf, store: TrackStore, known: IntervalSet, lost: Lost) -> None:
        """What exists of what is `known` is in files already; what is `lost` came and is in none,
        and who ignores an Object adds to that."""
        self.shelf = shelf
        self.over = False
        """The file is finished, or will not be."""
        self.sealed = False
        """The file is finished."""
        self._tier: DiskTier = shelf.tier
        self._tier.open[self] = None
        self._store = store
        self.part = self._tier.part(shelf, store.name)
        self._handed = IntervalSet()
        """What was handed to the queue, now or before."""
        self._before: tuple[tuple[Location, Location], ...] = tuple(known)
        for low, high in known:
            self._handed.add(low, high)
        self._put_at = 0.0
        self._absent = IntervalSet()
        """Where nothing exists but what was handed over, is to be, or is lost."""
        self._skipped: dict[Location, None] = {}
        """What the queue had no room for, and is in memory."""
        self._lost = lost
        self._bill = Bill(shelf)
        self._billed = 0
        self._octets = 0
        """Of the payloads handed over."""
        self._objects = 0
        self._arrived: float | None = None
        """When the first one came, in seconds of the epoch."""
        self._unwritten = 0
        self._sealing = False
        self._busy = False

    @property
    def busy(self) -> bool:
        """Something of it is on its way to the disk, or waits for that."""
        return self._busy

    @property
    def waits(self) -> bool:
        """There is something in the file, which is finished when nothing more comes."""
        return not self.over and self._objects > 0 and self._store.end_of_track is not None

    def put(self, stored: StoredObject) -> None:
        """It is whole in memory now."""
        at = stored.location
        if at in self._handed:
            return
        if self.over or self._sealing:
            self._lost.add(at)
            return
        octets = record_octets(stored)
        if not self._tier.takes(self.shelf, octets):
            self._skip(at)
            return
        if (
            self._billed + octets > self._tier.budget // 2
            or not self._handed.add(at, at, MAX_SKIPPED)
            or not self._rebill()
            or not self._tier.admit(self.shelf, octets)
        ):
            self.give_up()
            return
        self._put_at = self._tier.clock.now
        self._billed += octets
        self._octets += stored.length
        self._objects += 1
        self._unwritten += octets
        if len(self._lost):
            self._lost.remove(at)
        tier = self._tier
        arrived = tier.wall() - max(0.0, tier.clock.now - stored.arrived)
        if self._arrived is None or arrived < self._arrived:
            self._arrived = arrived
        tier.write(self, stored, arrived)
        self._note_busy()

    def _skip(self, location: Location) -> None:
        self._tier.counters.objects_skipped += 1
        self._tier.tell(
            "queue",
            "Objects come faster than the disk takes them: what the queue has no room for "
            "(disk_queue_octets) is written later, if it is still in memory then",
        )
        self._skipped[location] = None
        if len(self._skipped) > MAX_SKIPPED or not self._rebill():
            self.give_up()
        self._note_busy()

    def vouched(self, start: Location, end: Location) -> None:
        """Nothing exists in [start, end] but what has come."""
        if not self.over:
            self._absent.add(start, end, MAX_SKIPPED)
            if not self._rebill():
                self.give_up()

    def _rebill(self) -> bool:
        """Whether there is room in memory for what is remembered of the track."""
        ranges = len(self._handed) + len(self._before) + len(self._absent)
        return self._bill.be(
            ranges * INTERVAL_OCTETS
            + len(self._skipped) * SKIPPED_OCTETS
            + self._objects * ROW_OCTETS
        )

    def _forget(self) -> None:
        """Nothing more is asked of it."""
        self._handed, self._absent, self._before = IntervalSet(), IntervalSet(), ()
        self._skipped.clear()
        self._bill.be(0)

    def written(self, octets: int, error: Exception | None) -> None:
        """For the tier: so much is on the disk, or is not."""
        self._unwritten -= octets
        if self._busy:
            self._tier.count_busy(self, True)
        if error is not None and not self.over:
            self.give_up()
        self.check()

    def give_up(self) -> None:
        """It is not kept; what was written of it goes."""
        if self.over:
            return
        self.over = True
        self._tier.open.pop(self, None)
        if self._objects:
            self._tier.counters.tracks_given_up += 1
        self._forget()
        self._tier.release(self.shelf, self._billed)
        self._billed = 0
        self._tier.give_up(self)
        self._note_busy()

    def check(self, *, coming: bool = True) -> None:
        """Hand over what waits, and give the file its name when that is all of the track, or all
        that comes for now: nothing is `coming`."""
        if self.over or self._sealing:
            self._note_busy()
            return
        self._catch_up()
        if not self.over and not self._unwritten and not self._skipped:
            quiet = not coming and self._tier.clock.now - self._put_at >= QUIET_SECONDS
            if self._is_whole() or (quiet and self.waits and not self._skipped):
                self._seal()
        self._note_busy()

    def finish(self) -> None:
        """Nothing more comes, ever: finish the file, if there is something in it."""
        if self.waits and not self._sealing and not self._unwritten:
            self._seal()
            self._note_busy()

    def _catch_up(self) -> None:
        for location in list(islice(self._skipped, CAUGHT_UP)):
            stored = self._store.get(location)
            if stored is None or not stored.complete:
                del self._skipped[location]
                self._lost.add(location)  # perhaps it comes again
                continue
            if not self._tier.takes(self.shelf, record_octets(stored)):
                return
            del self._skipped[location]
            self.put(stored)
            if self.over:
                return

    def _is_whole(self) -> bool:
        """Whether every Object of the track, to its end, was handed over; what is here and was not
        is to be."""
        store = self._store
        if store.end_of_track is None or len(self._lost) or self._lost.overflowed:
            return False
        if store.largest is None and store.end_of_track != START:
            return False
        at = START
        while store.largest is not None and at <= store.largest:
            ends = (each.end_of(at) for each in (store.known, self._handed, self._absent))
            end = next((each for each in ends if each is not None), None)
            if end is None:
                return False
            at = location_after(end)
        forgotten = [o.location for o in store.objects() if o.location not in self._handed]
        self._skipped = dict.fromkeys(forgotten)
        return not forgotten

    def _seal(self) -> None:
        store, end = self._store, self._store.end_of_track
        if end is None:
            return
        self._sealing = True
        known = self._known()
        summary = Summary(
            scope=self.shelf.scope,
            name=store.name,
            properties=store.properties,
            largest=store.largest,
            end=end,
            objects=self._objects,
            octets=self._octets,
            arrived=self._arrived if self._arrived is not None else self._tier.wall(),
            known=known[:MAX_KNOWN],
        )
        self._tier.seal(self, summary, lambda sealed: self._sealed(summary, sealed), self._refused)

    def _known(self) -> tuple[tuple[Location, Location], ...]:
        """Of which ranges all that exists is in this file: another one may be lost."""
        known = IntervalSet()
        if self._lost.overflowed:
            return ()
        for part in (self._store.known, self._absent, self._handed):
            for low, high in part:
                known.add(low, high)
        for stored in self._store.objects():
            if stored.location not in self._handed:
                known.remove(stored.location, stored.location)
        for low, high in (*self._lost, *self._before):
            known.remove(low, high)
        return tuple(known)

    def _refused(self, error: Exception) -> None:
        self._sealing = False
        if not self.over:
            self._tier.count_error(error)
            self.give_up()

    def _sealed(self, summary: Summary, sealed: Sealed) -> None:
        self._sealing = False
        if self.over:
            self._tier.remove(sealed)
            return
        self.over = self.sealed = True
        self._tier.open.pop(self, None)
        self._tier.release(self.shelf, self._billed)
        self._billed = 0
        self._forget()
        self._tier.sealed(self)
        self._tier.counters.files_written += 1
        self._note_busy()
        self.shelf.add(summary, sealed)

    def _note_busy(self) -> None:
        busy = not self.over and (self._sealing or self._unwritten > 0 or bool(self._skipped))
        if busy is not self._busy:
            self._busy = busy
            self._tier.count_busy(self, busy)
