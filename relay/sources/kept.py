"""One track's part in the disk tier: what comes is written, what is not in memory is read.

What was read stands in the store like what a FETCH has brought; what files leave out of the ranges
that they know does not exist. One that is damaged is dropped, and publishers are asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from moqt.track.store import TrackStore
from moqt.track.stored import StoredObject
from moqt.values.errors import MalformedTrack
from moqt.values.intervals import IntervalSet
from moqt.values.names import Location, location_after, location_before
from moqt.wire.objects import ObjectHeader, Payload
from relay.disk.entries import Entry
from relay.disk.files import Read
from relay.disk.keeping import MAX_FILES, Keeping, Lost
from relay.disk.reads import Reading
from relay.disk.records import Kept as KeptObject
from relay.disk.tier import Shelf

READ_OCTETS: Final = 4 << 20
"""Octets of one read; whoever needs more asks again when they have come."""
MAX_READS: Final = 256
"""Ranges of a track that may wait to be read; for more, readers ask again."""


class Placing(Protocol):
    """What puts Objects into the track's store."""

    store: TrackStore

    def add(
        self,
        header: ObjectHeader,
        payload: Payload,
        follows: int | None,
        *,
        live: bool,
        arrived: float | None = None,
    ) -> StoredObject | None:
        """Place a whole Object; None when it is there, or there is no room."""

    @property
    def contradicted(self) -> Callable[[str], bool]:
        """Told that what comes is not what is here: whether there is another store now."""


class Kept:
    """A track that is, or is to be, on the disk."""

    def __init__(self, shelf: Shelf, filling: Placing) -> None:
        self._shelf = shelf
        self._filling = filling
        self._keeping: Keeping | None = None
        self._lost = Lost(shelf)
        """What came and is in no file."""
        self.placing = False
        """What is stored now comes from the disk."""
        self.looked_at = False
        """The disk has answered what `bring` asked it last."""
        self._reading: Reading | None = None
        self._bringing: Reading | None = None
        self._coming: tuple[Location, Location] | None = None
        self._wanted: deque[tuple[Location, Location]] = deque()
        self._no_room_until = 0.0

    @property
    def entry(self) -> Entry | None:
        """What of the track is on the disk."""
        return self._shelf.entries.get(self._filling.store.name)

    @property
    def whole(self) -> bool:
        """All of the track is on the disk."""
        entry = self.entry
        return entry is not None and entry.whole

    @property
    def known(self) -> IntervalSet | None:
        """What can be read."""
        entry, now = self.entry, self._shelf.tier.clock.now
        if entry is None or max(entry.suspended, self._no_room_until) > now:
            return None
        if self._reading is None and not self._shelf.tier.reads.allowed(self._shelf):
            return None
        return entry.known

    @property
    def answers(self) -> bool:
        """What is read of it comes, as far as is known."""
        entry, tier = self.entry, self._shelf.tier
        return entry is not None and entry.suspended <= tier.clock.now and not tier.reads.hung

    @property
    def busy(self) -> bool:
        """Something is on its way to the disk, or from there."""
        reads = self._reading is not None or self._bringing is not None or bool(self._wanted)
        return reads or self.writing

    @property
    def writing(self) -> bool:
        """A file of it is being written, or will be finished when nothing more comes."""
        return self._keeping is not None and (self._keeping.busy or self._keeping.waits)

    @property
    def unwritten(self) -> bool:
        """Something is on its way to the disk."""
        return self._keeping is not None and self._keeping.busy

    # -- to the disk -----------------------------------------------------------------------

    def stored(self, stored: StoredObject) -> None:
        """An Object has come whole."""
        keeping, at = self._keeping, stored.location
        if keeping is None or keeping.sealed:
            entry = self.entry
            if entry is not None and at in entry.known:
                return
            full = entry is not None and len(entry.files) >= MAX_FILES
            if full or self._shelf.tier.failing or self._lost.overflowed:
                self._lost.add(at)
                return
            known = IntervalSet() if entry is None else entry.known
            keeping = Keeping(self._shelf, self._filling.store, known, self._lost)
            self._keeping = keeping
        keeping.put(stored)

    def vouched(self, start: Location, end: Location) -> None:
        """Nothing exists in [start, end] but what has come."""
        if self._keeping is not None:
            self._keeping.vouched(start, end)

    def check(self, *, coming: bool) -> None:
        """More may be known of the track; whether more of it is on its way here."""
        if self._keeping is not None:
            self._keeping.check(coming=coming)

    def drop(self) -> None:
        """Nothing that is, or is to be, on the disk counts: the track is another one now."""
        self.close()
        self._lost = Lost(self._shelf)
        self._shelf.drop(self._filling.store.name)

    def close(self) -> None:
        """The track is forgotten: what is not whole is not kept."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.give_up()
        for reading in (self._reading, self._bringing):
            if reading is not None:
                reading.cancel()
        self._reading = self._bringing = None
        self._coming = None
        self._wanted.clear()
        self._shelf.tier.reads.forgo(self._shelf, self._turn)
        self._lost.close()

    # -- from the disk ---------------------------------------------------------------------

    def want(self, start: Location, end: Location) -> bool:
        """Have what is missing of [start, end] read; False when it is not to be had here."""
        entry, known = self.entry, self.known
        if known is None and entry is not None and self._reading is None:
            self._note_refused()
        until = None if known is None else known.end_of(start)
        if entry is None or until is None:
            return False
        end = min(end, until)
        if self._reading is None:
            self._read(entry, start, end)
        elif self._coming is not None and self._coming[0] <= start <= self._coming[1]:
            pass  # it is being read
        elif len(self._wanted) < MAX_READS and (start, end) not in self._wanted:
            self._wanted.append((start, end))
        return True

    def _note_refused(self) -> None:
        reads = self._shelf.tier.reads
        if not reads.allowed(self._shelf):
            reads.refuse(self._shelf)

    def await_turn(self, start: Location, end: Location) -> bool:
        """Have it read when there is room for one read more, as nobody else has it; False when
        that is not what it lacks."""
        entry, tier = self.entry, self._shelf.tier
        if (
            entry is None
            or self._reading is not None
            or max(entry.suspended, self._no_room_until) > tier.clock.now
        ):
            return False
        until = entry.known.end_of(start)
        if until is None or not tier.reads.await_turn(self._shelf, self._turn):
            return False
        wanted = start, min(end, until)
        if len(self._wanted) < MAX_READS and wanted not in self._wanted:
            self._wanted.append(wanted)
        return True

    def _turn(self, mine: bool) -> None:
        """There is room for one read more, or was not for too long."""
        if not mine:
            tier = self._shelf.tier
            self._no_room_until = tier.clock.now + tier.config.failure_memory
        self._go_on()

    def want_behind(self, start: Location, end: Location) -> bool:
        """`start` is not to be had: read what is behind it, so that only so much is missing."""
        known = self.known
        if known is None:
            return False
        last = known.missing_end(start, end)
        behind = location_after(last)
        if last >= end or behind in self._filling.store.known:
            return False
        return self.want(behind, end)

    def _read(self, entry: Entry, start: Location, end: Location) -> None:
        tier = self._shelf.tier
        octets = min(READ_OCTETS, tier.config.cache_octets // 8)
        self._coming = start, end
        self._shelf.use(entry.name)
        self._reading = tier.reads.range(
            self._shelf, entry, start, end, octets, lambda read: self._came(entry, start, end, read)
        )

    def _came(self, entry: Entry, start: Location, end: Location, read: Read | None) -> None:
        self._reading = self._coming = None
        if read is not None and not self._place(start, read):
            tier = self._shelf.tier
            self._no_room_until = tier.clock.now + tier.config.failure_memory
        self._go_on()

    def _go_on(self) -> None:
        """Read what is wanted besides, and have those who wait look at what has come."""
        while self._wanted and self._reading is None:
            low, high = self._wanted.popleft()
            missing = self._filling.store.first_unknown(low, high)
            if missing is not None and self.want(missing, high):
                break
        self._filling.store.changed()

    def _place(self, start: Location, read: Read) -> bool:
        """Store what was read, from `start` on; False when there was no room for all of it."""
        store = self._filling.store
        at = start
        try:
            for each in read.objects:
                location = each.header.location
                if at < location:
                    store.mark_nonexistent(at, location_before(location))
                if location not in store.known and not self._add(each):
                    return False
                at = location_after(location)
        except MalformedTrack as contradiction:
            # what publishers have brought since counts
            if not self._filling.contradicted(str(contradiction)):
                self._shelf.drop(store.name)
            return True
        if at <= read.until:
            store.mark_nonexistent(at, read.until)
        return True

    def _add(self, kept: KeptObject) -> bool:
        clock, wall = self._shelf.tier.clock, self._shelf.tier.wall
        self.placing = True
        try:
            stored = self._filling.add(
                kept.header,
                kept.payload,
                None,
                live=False,
                arrived=clock.now - max(0.0, wall() - kept.arrived),
            )
        finally:
            self.placing = False
        return stored is not None or self._filling.store.get(kept.header.location) is not None

    def bring(self, at: Location, done: Callable[[], None]) -> bool:
        """Have the last Object at `at` or before it in memory, then call `done`; False when that
        cannot be begun. It is to be tried again while there is an `entry` that is not `looked_at`
        then."""
        entry, tier = self.entry, self._shelf.tier
        if entry is None or entry.suspended > tier.clock.now:
            return False
        if not tier.reads.allowed(self._shelf):
            tier.reads.refuse(self._shelf)
            return False
        if self._bringing is not None:
            self._bringing.cancel()

        def came(read: Read | None) -> None:
            self._bringing = None
            self.looked_at = read is not None
            if read is not None and read.objects:
                self._place(read.objects[0].header.location, read)
            done()

        self.looked_at = False
        self._bringing = tier.reads.last(self._shelf, entry, at, came)
        return True
