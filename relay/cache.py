"""The cache: one memory budget over all stores, least recently used Objects go first.

Objects, not groups, are what is evicted. Groups can be of any size (a KV cache's layer
is one, and so may be a whole track), so with groups the cache would empty in jumps and
the one group in use could never shrink. The price of the finer grain is an ordered-dict
entry per Object, measured as 93 octets and under 1 us per use: 0.3 % of 32 KiB Objects.

What is under way is no cache: an Object that grows, or that nobody has begun to send although
somebody listens, is forwarded whatever the budget is. When all else is evicted it takes of
`transit`, and stays for as long as a cursor needs to come to it: until the second tick.

What is evicted or expired becomes unknown, never non-existent (MOQT "Object States").
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import OrderedDict

from moqt.track.knowledge import INTERVAL_OCTETS
from moqt.track.store import TrackStore
from moqt.track.stored import StoredObject
from moqt.values.deadlines import Deadline, Deadlines
from moqt.values.names import Location

logger = logging.getLogger("relay")

OBJECT_OVERHEAD = 768
"""Octets billed per Object beyond its payload and properties: CPython needs about 550.

Without it, a budget of payload octets would not bound the memory of small Objects.
"""


def bill(stored: StoredObject) -> int:
    """What `stored` costs the budget at the moment."""
    return stored.received + len(stored.properties) + OBJECT_OVERHEAD


class _Ages:
    """When and where each Object of a store came; never the Object, which may be evicted before."""

    __slots__ = ("came", "compact_at", "deadline")

    def __init__(self) -> None:
        self.came: list[tuple[float, Location]] = []
        self.compact_at = 64
        """So many entries are worth a look for those whose Object is gone."""
        self.deadline: Deadline | None = None
        """When the first Object expires."""


class Cache:
    """Bills, evicts and expires Objects; never growing ones, since somebody is writing them."""

    def __init__(self, budget: int, transit: int = 0) -> None:
        self.budget = budget
        self.transit = transit
        """Octets that what is under way may take beyond the budget, one track half of them."""
        self.billed = 0
        """Octets billed now; more than `budget` only while Objects are under way."""
        self.octets = 0
        """Payload octets among them."""
        self.hits = 0
        """Objects whose sending began."""
        self.misses = 0
        """Ranges that had to be asked for upstream."""
        self.evictions = 0
        self.expirations = 0
        self.stores_rejected = 0
        """Objects that were not stored because growing ones left no room."""
        self.statuses = 0
        """End of Group and End of Track Objects held; they go when their group does."""
        self.intervals = 0
        """Intervals of knowledge that are billed, of tracks and of FETCHes that run."""
        self.intervals_refused = 0
        """Ranges that were not remembered: at `max_intervals_per_track`, or without room."""
        self._told = False
        """The log has heard of a track at `max_intervals_per_track`."""
        self.properties = 0
        """Octets billed for Track Properties."""
        self._used: OrderedDict[StoredObject, TrackStore] = OrderedDict()
        self._fresh: OrderedDict[StoredObject, TrackStore] = OrderedDict()
        """Whole Objects of tracks to which somebody listens that nobody has begun to send yet."""
        self._awaited: OrderedDict[StoredObject, TrackStore] = OrderedDict()
        """The same, of the tick before."""
        self._full = False
        """The log has heard that `transit` is used up."""
        self._aging: dict[TrackStore, _Ages] = {}
        self._expiries = Deadlines()
        """One for each store of `_aging` whose Objects expire: nothing else is looked at."""
        self._ticked = 0.0
        self._horizon = 0.0
        self._left: float = math.inf
        """Objects that may be dropped before somebody else has a turn."""

    @property
    def objects(self) -> int:
        """Whole Objects held."""
        return len(self._used) + len(self._fresh) + len(self._awaited)

    @property
    def in_transit(self) -> int:
        """Octets beyond the budget."""
        return max(0, self.billed - self.budget)

    def fits(self, octets: int) -> bool:
        """Whether so much of one track, be it a single Object, can ever be here."""
        return octets <= self.budget + self.transit // 2

    def reserve(self, payload: int, overhead: int = 0, store: TrackStore | None = None) -> bool:
        """Make room for so many octets more, of an Object of `store`; False when what is under
        way leaves none."""
        octets = payload + overhead
        if (
            self.billed + octets > self.budget
            and not self._make_room(octets)
            and not self.carries(octets, store)
        ):
            return False
        self.billed += octets
        self.octets += payload
        return True

    def give_back(self, payload: int, overhead: int) -> None:
        """What was reserved is not needed."""
        self.billed -= payload + overhead
        self.octets -= payload

    def _make_room(self, octets: int) -> bool:
        if octets > self.budget:
            return False  # whatever goes
        while self.billed + octets > self.budget and self._used:
            # Each turn takes one entry away, so this ends whatever cannot be evicted.
            self._evict_first(self._used)
        return self.billed + octets <= self.budget

    def carries(self, octets: int, store: TrackStore | None) -> bool:
        """Whether so many more of `store` may be under way beyond the budget."""
        most = self.budget + self.transit
        if store is None or not self.fits(store.octets + octets):
            return False
        for waiting in (self._awaited, self._fresh):
            while self.billed + octets > most and waiting:
                self._evict_first(waiting)
        if self.billed + octets <= most:
            return True
        if self.transit and not self._full:
            self._full = True
            logger.warning(
                "Objects under way have used up the cache and %d octets more (transit_octets): "
                "streams of others are reset",
                self.transit,
            )
        return False

    def _evict_first(self, waiting: OrderedDict[StoredObject, TrackStore]) -> None:
        stored, store = waiting.popitem(last=False)
        self.evictions += 1
        self._remove(store, stored)

    def room(self, octets: int) -> bool:
        """Whether so much more can be held, of statuses or knowledge; the counts bill it."""
        return self.billed + octets <= self.budget or self._make_room(octets)

    def count_statuses(self, more: int) -> None:
        self.statuses += more
        self.billed += more * OBJECT_OVERHEAD

    def count_intervals(self, more: int) -> None:
        self.intervals += more
        self.billed += more * INTERVAL_OCTETS

    def count_properties(self, more: int) -> None:
        self.properties += more
        self.billed += more

    def count_refused(self, limit: int) -> None:
        self.intervals_refused += 1
        if limit and not self._told:
            self._told = True
            logger.warning(
                "a track is at its limit of %d separate ranges (max_intervals_per_track): what "
                "else of it does not exist is not remembered, and is asked for again",
                limit,
            )

    def release(self, stored: StoredObject) -> None:
        """A growing Object was aborted."""
        self.billed -= bill(stored)
        self.octets -= stored.received

    def use(self, stored: StoredObject) -> None:
        """A delivery begins to send `stored`: it is the most recently used now."""
        if stored in self._used:
            self.hits += 1
            self._used.move_to_end(stored)
        elif (store := self._pop(stored)) is not None:
            self.hits += 1
            self._used[stored] = store

    def _pop(self, stored: StoredObject) -> TrackStore | None:
        """Take it out, if it is here; returns its store."""
        for held in (self._fresh, self._used, self._awaited):
            store = held.pop(stored, None)
            if store is not None:
                return store
        return None

    def expire(self, now: float, most: int | None = None) -> None:
        """Drop what may not be served until the next call (MAX_CACHE_DURATION); with `most` no more
        Objects at once, and the others by `expire_more`.

        Time stands still between two calls, so arrivals are stamped up to one interval
        early and reads happen up to one interval late. Looking one interval ahead keeps
        the promise that no Object is served too late.
        """
        self._horizon = now + max(0.0, now - self._ticked)
        self._ticked = now
        self.expire_more(most)
        # what nobody has begun in a whole interval waits for no cursor
        self._used.update(self._awaited)
        self._awaited, self._fresh = self._fresh, OrderedDict()
        if self.billed > self.budget:
            self._make_room(0)

    def expire_more(self, most: int | None = None) -> bool:
        """Go on with what `expire` has left; whether there is more of it."""
        self._left = math.inf if most is None else most
        self._expiries.run(self._horizon)
        due = self._expiries.next
        return self._left <= 0 and due is not None and due <= self._horizon

    def _expire(self, store: TrackStore, ages: _Ages) -> None:
        duration = store.max_cache_duration
        came = ages.came
        while came and duration is not None and self._horizon > came[0][0] + duration:
            if self._left <= 0:
                break
            self._left -= 1
            stored = _aged(store, heapq.heappop(came))
            if stored is None:
                continue
            if self._pop(stored) is not None:
                self.expirations += 1
                self._remove(store, stored)
            elif not stored.complete:
                self.expirations += 1
                store.retire(stored)
        if came:
            self.retime(store)
        else:
            self._aging.pop(store, None)

    def retime(self, store: TrackStore) -> None:
        """Its first Object, or its MAX_CACHE_DURATION, may be another one than before."""
        ages = self._aging.get(store)
        if ages is None:
            return
        self._expiries.cancel(ages.deadline)
        ages.deadline = None
        duration = store.max_cache_duration
        if duration is not None:
            due = ages.came[0][0] + duration
            ages.deadline = self._expiries.at(due, lambda: self._expire(store, ages))

    def forget(self, store: TrackStore) -> None:
        """Drop everything of `store`; its growing Objects must have been aborted."""
        # From the end: there nothing has to move up for what goes.
        for stored in reversed(list(store.objects())):
            if self._pop(stored) is not None:
                self._remove(store, stored)
        ages = self._aging.pop(store, None)
        if ages is not None:
            self._expiries.cancel(ages.deadline)
        knowledge = store.knowledge
        self.count_statuses(-store.statuses)
        self.count_intervals(-knowledge.billed)
        self.count_properties(-knowledge.properties)
        knowledge.account, knowledge.billed, knowledge.properties = None, 0, 0

    def add(self, store: TrackStore, stored: StoredObject) -> None:
        """`stored` is whole, and from now on may go. With a payload it ages since it began."""
        (self._fresh if store.listeners else self._used)[stored] = store
        if not stored.length and store.max_cache_duration is not None:
            self.age(store, stored)

    def age(self, store: TrackStore, stored: StoredObject) -> None:
        """It has arrived, or begun to: the track's MAX_CACHE_DURATION counts from then."""
        ages = self._aging.get(store)
        if ages is None:
            ages = self._aging[store] = _Ages()
        came, entry = ages.came, (stored.arrived, stored.location)
        heapq.heappush(came, entry)
        if len(came) > ages.compact_at:
            came[:] = [each for each in came if _aged(store, each) is not None]
            heapq.heapify(came)
            ages.compact_at = 2 * len(came) + 64
        if came[0] is entry:
            self.retime(store)

    def _remove(self, store: TrackStore, stored: StoredObject) -> None:
        self.billed -= bill(stored)
        self.octets -= stored.received
        store.evict(stored)


def _aged(store: TrackStore, entry: tuple[float, Location]) -> StoredObject | None:
    """The Object of an entry, unless it is gone; one that came again has an entry of its own."""
    arrived, location = entry
    stored = store.get(location)
    return stored if stored is not None and stored.arrived == arrived else None
