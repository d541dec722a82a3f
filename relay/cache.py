"""The cache: one memory budget over all stores, least recently used Objects go first.

Objects, not groups, are what is evicted. Groups can be of any size (a KV cache's layer
is one, and so may be a whole track), so with groups the cache would empty in jumps and
the one group in use could never shrink. The price of the finer grain is an ordered-dict
entry per Object, measured as 93 octets and under 1 us per use: 0.3 % of 32 KiB Objects.

What is evicted or expired becomes unknown, never non-existent (MOQT "Object States").
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from moqt.codes import PropertyType
from moqt.names import Location
from moqt.requests import track_property
from moqt.store import TrackStore
from moqt.stored import StoredObject

OBJECT_OVERHEAD = 768
"""Octets billed per Object beyond its payload and properties: CPython needs about 550.

Without it, a budget of payload octets would not bound the memory of small Objects.
"""


def bill(stored: StoredObject) -> int:
    """What `stored` costs the budget at the moment."""
    return stored.received + len(stored.properties) + OBJECT_OVERHEAD


class Cache:
    """See the module. It never evicts growing Objects: somebody is writing them."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.billed = 0
        """Octets billed now; never more than `budget`."""
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
        self._used: OrderedDict[StoredObject, TrackStore] = OrderedDict()
        self._aging: dict[TrackStore, list[tuple[float, Location]]] = {}
        """When and where each Object came; never the Object, which may be evicted before."""
        self._ticked = 0.0

    @property
    def objects(self) -> int:
        """Whole Objects held."""
        return len(self._used)

    def reserve(self, octets: int, *, payload: bool = True) -> bool:
        """Make room for `octets` more; False when what is growing leaves none."""
        if not self._make_room(octets):
            return False
        self.billed += octets
        if payload:
            self.octets += octets
        return True

    def _make_room(self, octets: int) -> bool:
        while self.billed + octets > self.budget and self._used:
            # Each turn takes one entry away, so this ends whatever cannot be evicted.
            stored, store = self._used.popitem(last=False)
            self.evictions += 1
            self._remove(store, stored)
        return self.billed + octets <= self.budget

    def room_for_status(self) -> bool:
        """Whether one more status can be held; `count_statuses` bills it."""
        return self._make_room(OBJECT_OVERHEAD)

    def count_statuses(self, more: int) -> None:
        self.statuses += more
        self.billed += more * OBJECT_OVERHEAD

    def release(self, stored: StoredObject) -> None:
        """A growing Object was aborted."""
        self.billed -= bill(stored)
        self.octets -= stored.received

    def use(self, stored: StoredObject) -> None:
        """A delivery begins to send `stored`: it is the most recently used now."""
        if stored in self._used:
            self.hits += 1
            self._used.move_to_end(stored)

    def expire(self, now: float) -> None:
        """Drop what may not be served until the next call (MAX_CACHE_DURATION).

        Time stands still between two calls, so arrivals are stamped up to one interval
        early and reads happen up to one interval late. Looking one interval ahead keeps
        the promise that no Object is served too late.
        """
        horizon = now + max(0.0, now - self._ticked)
        self._ticked = now
        for store, aging in tuple(self._aging.items()):
            duration = max_cache_duration(store)
            while aging and duration is not None and horizon > aging[0][0] + duration:
                stored = _aged(store, heapq.heappop(aging))
                if stored is None:
                    continue
                if self._used.pop(stored, None) is not None:
                    self.expirations += 1
                    self._remove(store, stored)
                elif not stored.complete:
                    self.expirations += 1
                    store.retire(stored)
            if not aging:
                del self._aging[store]

    def forget(self, store: TrackStore) -> None:
        """Drop everything of `store`; its growing Objects must have been aborted."""
        for stored in list(store.objects()):
            if self._used.pop(stored, None) is not None:
                self._remove(store, stored)
        self._aging.pop(store, None)
        store.on_statuses = None
        self.count_statuses(-store.statuses)

    def add(self, store: TrackStore, stored: StoredObject) -> None:
        """`stored` is whole, and from now on may go. With a payload it ages since it began."""
        self._used[stored] = store
        if not stored.length:
            self.age(store, stored)

    def age(self, store: TrackStore, stored: StoredObject) -> None:
        """It has arrived, or begun to, once: MAX_CACHE_DURATION counts from then."""
        if max_cache_duration(store) is not None:
            aging = self._aging.setdefault(store, [])
            heapq.heappush(aging, (stored.arrived, stored.location))
            if len(aging) > 2 * len(self._used) + 64:
                aging[:] = [entry for entry in aging if _aged(store, entry) is not None]
                heapq.heapify(aging)

    def _remove(self, store: TrackStore, stored: StoredObject) -> None:
        self.billed -= bill(stored)
        self.octets -= stored.received
        store.evict(stored)


def _aged(store: TrackStore, entry: tuple[float, Location]) -> StoredObject | None:
    """The Object of an entry, unless it is gone; one that came again has an entry of its own."""
    arrived, location = entry
    stored = store.get(location)
    return stored if stored is not None and stored.arrived == arrived else None


def max_cache_duration(store: TrackStore) -> float | None:
    """The track's MAX_CACHE_DURATION in seconds."""
    value = track_property(store.properties, PropertyType.MAX_CACHE_DURATION)
    return value / 1000 if isinstance(value, int) else None
