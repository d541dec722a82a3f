"""The cache: one memory budget over all stores.

Objects are what is evicted: Groups can be of any size, and a budget in Groups would empty in
jumps. Which one goes next is read off the stores, so that an Object in memory costs the cache
nothing:

- of a track that nobody reads, the least recently used one, all of it goes, from its end, before
  anything of the next track: half of a track has to be asked for upstream like none of it;
- of a track that comes without an end, where all who listen stand at its head, the oldest Object,
  before whole tracks that were used since it came;
- of a track that is read from its beginning by one or several, what the last of them has passed;
  then what lies behind the first of them, who has passed it a moment ago: whoever comes next to
  that has the longest way to it; then the end of what nobody has come to.

Whose track it is comes first: with several scopes, who has most in the cache gives, who asks
before others that have as much. One alone may have all of it.

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
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Final

from moqt.delivery.fetch import FetchDelivery
from moqt.track.knowledge import INTERVAL_OCTETS
from moqt.track.store import TrackStore
from moqt.track.stored import StoredObject
from moqt.values.deadlines import Deadline, Deadlines
from moqt.values.names import MAX_LOCATION, START, Location, location_after, location_before
from relay.config import RelayConfig

logger = logging.getLogger("relay")

OBJECT_OVERHEAD = 768
"""Octets billed per Object beyond its payload and properties: CPython needs about 550.

Without it, a budget of payload octets would not bound the memory of small Objects.
"""


MAX_LOOKED_AT: Final = 64
"""Tracks that are looked at for one to evict from; those that are read have their turn again
behind all others."""
MAX_PASSED_OVER: Final = 8
"""Objects of a track that are looked at for one that may go: others are still arriving."""
MAX_READERS: Final = 16
"""Of a track, the first ones, that are looked at for what they have just passed."""
NEAR: Final = 64
"""Object IDs behind a reader that it has just passed."""
MAX_GROWING: Final = 64
"""The same of a track where nobody waits for any: those still grow."""
POSITIONS_HOLD: Final = 16
"""Evictions after which the readers of a track are asked anew where they are; of one that has many
readers after as many as a part of them: no eviction costs what all of them do."""
READERS_LOOKED_AT: Final = 256
"""Readers that may be asked for every eviction."""
SHARES_PER_EVICTION: Final = 8
"""Scopes of which it is seen who has most, for each eviction: of more, all after several."""
_octets_of = attrgetter("octets")


def _is_near(location: Location, reader: Location) -> bool:
    same = location.group == reader.group
    return reader.object - location.object <= NEAR if same else reader.object <= NEAR


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


@dataclass(slots=True)
class _Use:
    """How a track is used of which there are Objects."""

    at: float
    """When one of its Objects was sent, or came, last."""
    readers: list[Location] = field(default_factory=list)
    """Where those were who read it from its beginning, the first one first."""
    listens: bool = False
    """Somebody else waits for what comes."""
    evictions: int = 0
    """Until they are asked again."""
    asked: int = 0
    """How many were asked, less what evictions since then have paid for."""


class Share:
    """What one scope has in the cache; pays for what its stores remember (`Account`)."""

    def __init__(self, cache: Cache, scope: str) -> None:
        self.cache = cache
        self.scope = scope
        self.octets = 0
        """Billed for whole Objects and for what is known of tracks."""
        self.known = 0
        """Of these, for what is known."""
        self.growing = 0
        """Billed for Objects that are not whole."""
        self.told = False
        """The log has heard that it is at `cache_octets_per_scope`."""
        self.uses: OrderedDict[TrackStore, _Use] = OrderedDict()
        """Of the tracks of which something may be evicted; least recently used first."""

    def take(self, store: TrackStore) -> None:
        """`store` is of this scope, until it is forgotten."""
        self.cache.owners[store] = self
        store.knowledge.account = self

    def room(self, octets: int) -> bool:
        return self.cache.room(octets, self)

    def count_statuses(self, more: int) -> None:
        self._know(more * OBJECT_OVERHEAD)
        self.cache.count_statuses(more)

    def count_intervals(self, more: int) -> None:
        self._know(more * INTERVAL_OCTETS)
        self.cache.count_intervals(more)

    def count_properties(self, more: int) -> None:
        self._know(more)
        self.cache.count_properties(more)

    def _know(self, octets: int) -> None:
        self.known += octets
        self.octets += octets

    def count_refused(self, limit: int) -> None:
        self.cache.count_refused(limit)


class Cache:
    """Bills, evicts and expires Objects; never growing ones, since somebody is writing them."""

    def __init__(self, budget: int, transit: int = 0, per_scope: int = 0) -> None:
        """`per_scope`: octets that one scope may have; 0: all."""
        self.budget = budget
        self.per_scope = per_scope or budget
        self.shares: dict[str, Share] = {}
        """Of the scopes that are in use."""
        self.owners: dict[TrackStore, Share] = {}
        """Whose the stores are."""
        self._unowned = Share(self, "")
        """Of stores of no scope."""
        self._largest = self._unowned
        """Who had most when it was looked for last, or asked since and has more ..."""
        self._giver_holds = 0
        """... and for how many evictions that holds."""
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
        self.objects = 0
        """Whole Objects held."""
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

    def share(self, scope: str) -> Share:
        """What `scope` has."""
        share = self.shares.get(scope)
        if share is None:
            share = self.shares[scope] = Share(self, scope)
        return share

    @property
    def in_transit(self) -> int:
        """Octets beyond the budget."""
        return max(0, self.billed - self.budget)

    def fits(self, octets: int) -> bool:
        """Whether so much of one track, be it a single Object, can ever be here."""
        return octets <= self.budget + self.transit // 2

    def reserve(self, store: TrackStore, payload: int, overhead: int = 0) -> bool:
        """Make room for so many octets more, of an Object of `store`; False when what is under
        way leaves none."""
        octets = payload + overhead
        if (
            (self.billed + octets > self.budget or self.per_scope < self.budget)
            and not self._make_room(octets, self.owners.get(store))
            and not self.carries(store, octets)
        ):
            return False
        self.billed += octets
        self.octets += payload
        self._owner(store).growing += octets
        return True

    def give_back(self, store: TrackStore, payload: int, overhead: int) -> None:
        """What was reserved is not needed."""
        self.billed -= payload + overhead
        self.octets -= payload
        self._owner(store).growing -= payload + overhead

    def _make_room(self, octets: int, asking: Share | None = None) -> bool:
        if octets > self.budget:
            return False  # whatever goes
        if asking is not None and asking.octets + octets > self.per_scope:
            self._tell_quota(asking)
            while asking.octets + octets > self.per_scope and self._evict_of(asking):
                pass
        while self.billed + octets > self.budget:
            if not self._evict_of(self._giver(asking)):
                # who has most may have nothing that can go
                all_of_them = (self._unowned, *self.shares.values())
                if not any(map(self._evict_of, sorted(all_of_them, key=_octets_of, reverse=True))):
                    break
        # Objects that cannot go yet take no room from what is known
        within = asking is None or asking.known + octets <= self.per_scope
        return within and self.billed + octets <= self.budget

    def _giver(self, asking: Share | None) -> Share:
        """Who has most; of those who have as much, who asks."""
        if len(self.shares) == 1 and not self._unowned.uses:
            return next(iter(self.shares.values()))
        giver = asking or self._unowned
        if self._giver_holds:
            self._giver_holds -= 1
            giver = max(giver, self._largest, key=_octets_of)
        else:
            self._giver_holds = len(self.shares) // SHARES_PER_EVICTION
            giver = max((giver, *self.shares.values()), key=_octets_of)
        self._largest = giver
        return giver

    def _evict_of(self, share: Share) -> bool:
        victim = self._victim(share)
        if victim is None:
            return False
        self.evictions += 1
        self._remove(*victim)
        return True

    def _tell_quota(self, share: Share) -> None:
        if not share.told:
            share.told = True
            logger.warning(
                "%s is at its limit in memory (cache_octets_per_scope, %d octets): what it brings "
                "displaces its own",
                share.scope,
                self.per_scope,
            )

    def carries(self, store: TrackStore, octets: int) -> bool:
        """Whether so many more of `store` may be under way beyond the budget. What of one scope
        grows leaves half of that to others, where there are any."""
        most = self.budget + self.transit
        growing = self._owner(store).growing if len(self.shares) > 1 else 0
        if not self.fits(max(store.octets, growing) + octets):
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

    def _victim(self, share: Share) -> tuple[TrackStore, StoredObject] | None:
        """What of a scope goes next, as the head of this module says; None when nothing can."""
        read: list[TrackStore] = []
        uses = share.uses
        for _ in range(min(MAX_LOOKED_AT, len(uses))):
            store = next(iter(uses))
            if store.listeners:
                uses.move_to_end(store)
                read.append(store)
                continue
            stored = self._last_of(store, START, MAX_LOCATION, awaited=False)
            if stored is None:
                del uses[store]  # until something of it is whole
                continue
            live = next(reversed(uses))
            oldest = self._oldest_of(live) if live.listeners else None
            if oldest is not None and oldest[1].arrived < uses[store].at:
                return oldest
            return store, stored
        return next(filter(None, map(self._part_of, read)), None)

    def _last_of(
        self, store: TrackStore, start: Location, end: Location, *, awaited: bool
    ) -> StoredObject | None:
        """The last Object of [start, end] that may go; `awaited`: somebody may come to what was
        not sent yet."""
        for _ in range(MAX_PASSED_OVER if awaited else MAX_GROWING):
            stored = store.largest_in(start, end)
            if stored is None or self._may_go(stored, awaited):
                return stored
            if stored.location == start:
                return None
            end = location_before(stored.location)
        return None

    def _may_go(self, stored: StoredObject, awaited: bool) -> bool:
        waits = awaited and (stored in self._fresh or stored in self._awaited)
        return stored.complete and not waits

    def _oldest_of(self, store: TrackStore) -> tuple[TrackStore, StoredObject] | None:
        """The oldest Object of a track whose readers all stand at its head."""
        if self._look(store).readers:
            return None
        stored = store.next_object(START, MAX_LOCATION)
        for _ in range(MAX_PASSED_OVER):
            if stored is None:
                return None
            if self._may_go(stored, True):
                return store, stored
            stored = store.next_object(location_after(stored.location), MAX_LOCATION)
        return None

    def _part_of(self, store: TrackStore) -> tuple[TrackStore, StoredObject] | None:
        """What of a track that is read goes first."""
        use = self._look(store)
        if not use.readers:
            return self._oldest_of(store)
        stored = self._between(store, START, use.readers[-1], awaited=use.listens)
        if stored is None:
            if use.asked <= READERS_LOOKED_AT:
                use.evictions = 0
                use = self._look(store)
                stored = self._between(store, START, use.readers[-1], awaited=use.listens)
            stored = stored or self._needed(store, use)
        if stored is None:
            stored = self._last_of(store, START, MAX_LOCATION, awaited=True)
        return None if stored is None else (store, stored)

    def _between(
        self, store: TrackStore, low: Location, high: Location, *, awaited: bool
    ) -> StoredObject | None:
        """The last Object from `low` up to `high` that may go."""
        if low >= high:
            return None
        return self._last_of(store, low, location_before(high), awaited=awaited)

    def _needed(self, store: TrackStore, use: _Use) -> StoredObject | None:
        """Of what some reader still needs: what another has just passed, the first one's first,
        before what waits for longer for who comes next."""
        other = None
        for high, low in pairwise(use.readers[:MAX_READERS]):
            stored = self._between(store, low, high, awaited=True)
            if stored is not None and _is_near(stored.location, high):
                return stored
            other = other or stored
        return other

    def _look(self, store: TrackStore) -> _Use:
        """How `store` is used, and where those are who read it."""
        use = self._owner(store).uses[store]
        use.evictions -= 1
        use.asked -= READERS_LOOKED_AT
        if use.evictions < 0 and use.asked <= READERS_LOOKED_AT:
            use.evictions = POSITIONS_HOLD
            use.asked = len(store.listeners)
            at = {each.position for each in store.listeners if isinstance(each, FetchDelivery)}
            use.readers = sorted(at, reverse=True)
            use.listens = any(not isinstance(each, FetchDelivery) for each in store.listeners)
        return use

    def _owner(self, store: TrackStore) -> Share:
        return self.owners.get(store, self._unowned)

    def _evict_first(self, waiting: OrderedDict[StoredObject, TrackStore]) -> None:
        stored, store = waiting.popitem(last=False)
        self.evictions += 1
        self._remove(store, stored)

    def room(self, octets: int, asking: Share | None = None) -> bool:
        """Whether so much more can be held, of statuses or knowledge; the counts bill it."""
        within = asking is None or asking.octets + octets <= self.per_scope
        return (within and self.billed + octets <= self.budget) or self._make_room(octets, asking)

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

    def release(self, store: TrackStore, stored: StoredObject) -> None:
        """A growing Object was aborted."""
        self.give_back(store, stored.received, bill(stored) - stored.received)

    def use(self, store: TrackStore, stored: StoredObject) -> None:
        """A delivery begins to send `stored`: its track is the most recently used now."""
        if not stored.complete or stored.gone:
            return
        self.hits += 1
        uses = self._owner(store).uses
        use = uses.get(store)
        if use is None:
            use = uses[store] = _Use(self._ticked)
        use.at = self._ticked
        uses.move_to_end(store)
        if self._fresh.pop(stored, None) is None and self._awaited:
            self._awaited.pop(stored, None)

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
            self.expirations += 1
            if stored.complete:
                self._remove(store, stored)
            else:
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
            if stored.complete:
                self._remove(store, stored)
        self._owner(store).uses.pop(store, None)
        ages = self._aging.pop(store, None)
        if ages is not None:
            self._expiries.cancel(ages.deadline)
        knowledge = store.knowledge
        owner = self._owner(store)
        owner.count_statuses(-store.statuses)
        owner.count_intervals(-knowledge.billed)
        owner.count_properties(-knowledge.properties)
        self.owners.pop(store, None)
        knowledge.account, knowledge.billed, knowledge.properties = None, 0, 0

    def add(self, store: TrackStore, stored: StoredObject) -> None:
        """`stored` is whole, and from now on may go. With a payload it ages since it began."""
        self.objects += 1
        if store.listeners:
            self._fresh[stored] = store
        share, price = self._owner(store), bill(stored)
        share.octets += price
        share.growing -= price
        uses = share.uses
        use = uses.get(store)
        if use is None:
            uses[store] = _Use(self._ticked)
        else:
            use.at = self._ticked
            uses.move_to_end(store)
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
        self.objects -= 1
        self._fresh.pop(stored, None)
        self._awaited.pop(stored, None)
        price = bill(stored)
        self.billed -= price
        self._owner(store).octets -= price
        self.octets -= stored.received
        store.evict(stored)


def cache_of(config: RelayConfig) -> Cache:
    """The cache of a relay."""
    return Cache(config.cache_octets, config.transit_octets, config.cache_octets_per_scope)


def _aged(store: TrackStore, entry: tuple[float, Location]) -> StoredObject | None:
    """The Object of an entry, unless it is gone; one that came again has an entry of its own."""
    arrived, location = entry
    stored = store.get(location)
    return stored if stored is not None and stored.arrived == arrived else None
