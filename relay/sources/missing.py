"""Which ranges of a track are asked for upstream: the `Source` of a relay's store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from moqt.requests import IncomingFetch
from moqt.session import Session
from moqt.track.store import TrackStore
from moqt.track.stored import StoredObject, SubgroupLog
from moqt.values.codes import ObjectStatus
from moqt.values.errors import RequestError
from moqt.values.intervals import IntervalSet
from moqt.values.messages import LocationFilter
from moqt.values.names import Location, location_after, location_before
from relay.sources.fetches import Attempt, Unknown, UpstreamFetch
from relay.sources.filled import Filled

Range = tuple[Location, Location]

MAX_FAILURES = 256
"""Ranges remembered as not to be had, per track."""
MAX_WANTED = 32
"""Ranges that are made of what one reader lacks; it asks again when some have come."""
MAX_QUEUED = 256
"""Ranges of a track that may wait to be asked for; for more, readers ask again."""
MAX_ASKED_AGAIN = 32
"""Ranges that one FETCH could not tell which the next publisher is asked for."""


class Ranges:
    """What of one track is asked for with FETCH, what waits for that, what could not be had."""

    def __init__(self, track: Filled) -> None:
        self._track = track
        self.fetches: list[UpstreamFetch] = []
        self.queue: deque[UpstreamFetch] = deque()
        """Ranges that wait for one of the FETCHes to end."""
        self._queued = IntervalSet()
        """The same as a set: each of many readers asks again whenever something has come."""
        self._failures: list[tuple[float, Location, Location]] = []
        self._missed: list[tuple[Location, Location]] = []
        self._held: dict[IncomingFetch, Callable[[], None]] = {}
        """FETCHes that wait for upstream's answer to one of ours, or for the disk."""
        self._held_until: float | None = None
        """Until when the disk is waited for."""

    @property
    def idle(self) -> bool:
        kept = self._track.filling.kept
        return not self.fetches and not self.queue and (kept is None or not kept.busy)

    def stop(self) -> None:
        """Nobody reads any more: cancel everything."""
        fetches = [*self.fetches, *self.queue]
        self.fetches.clear()
        self.queue.clear()
        self._queued = IntervalSet()
        self.forget_missed()
        for fetch in fetches:
            fetch.cancel()

    def dismiss(self, session: Session, error: RequestError) -> None:
        """Ask somebody else for what `session` was asked for."""
        for fetch in [fetch for fetch in self.fetches if fetch.session is session]:
            fetch.request_failed(error)

    def forgive(self) -> None:
        """A publisher has come: what could not be had may be asked for again."""
        self._failures.clear()

    def tick(self, now: float) -> None:
        self._failures = [failure for failure in self._failures if failure[0] > now]
        for fetch in tuple(self.fetches):
            fetch.tick(now)
        if (kept := self._track.filling.kept) is not None:
            kept.check(coming=bool(self.fetches or self.queue))
        self.pump()
        if self._held and (self.idle or self._held_until is not None):
            self._serve_held()  # what they waited for was given up, or is on the disk

    def want(self, start: Location, end: Location) -> bool:
        """Have what of [start, end] is not here nor on its way read from the disk, or FETCH it;
        False when the first of it is not to be had, nor anything behind that."""
        kept = self._track.filling.kept
        if kept is None:
            return self._ask_for(start, end)
        return (
            kept.want(start, end)
            or self._ask_for(start, end)
            or kept.want_behind(start, end)
            or kept.await_turn(start, end)
        )

    def _ask_for(self, start: Location, end: Location) -> bool:
        """FETCH what of [start, end] is not here nor on its way (MOQT "Relay Fetch Handling")."""
        now = self._track.clock.now
        if any(until > now and low <= start <= high for until, low, high in self._failures):
            return False
        for fetch in self.fetches:
            if fetch.paused and fetch.next <= start <= fetch.end:
                fetch.hurry()
        missing = list(islice(self._missing(start, end), MAX_WANTED))
        if not missing:
            return True
        if next(iter(self._track.sources()), None) is None:
            return missing[0][0] > start
        for low, high in missing[: max(0, MAX_QUEUED - len(self.queue))]:
            self._track.cache.misses += 1
            self._enqueue(UpstreamFetch(self._track, self, low, high))
        self.pump()
        return not any(until > now and low <= start <= high for until, low, high in self._failures)

    def fill(self, fill: UpstreamFetch) -> None:
        """Such a range comes with a subscription."""
        self.fetches.append(fill)
        fill.open()

    def assumed(self, start: Location) -> tuple[Attempt, Location] | None:
        """A running FETCH has left out `start`, up to the Location returned."""
        for fetch in self.fetches:
            end = fetch.gap_end(start)
            if end is not None:
                return fetch.attempt, end
        return None

    def used(self, store: TrackStore, stored: StoredObject) -> None:
        """A delivery begins to send `stored`."""
        if stored.status is not ObjectStatus.NORMAL:
            return
        track = self._track
        track.counters.objects_out += 1
        track.counters.octets_out += stored.length
        track.cache.use(store, stored)
        for fetch in self.fetches:
            fetch.read(stored)

    def rejected(self, location: Location) -> None:
        """A subscription has brought it, and the cache had no room: as if a FETCH had."""
        self._remember_failure([(location, location)])

    # -- what was missed -------------------------------------------------------------------

    def missed(self, start: Location, end: Location) -> None:
        """Those who listen are to get [start, end], and a subscription that goes on says nothing
        of it: another one may bring it, else it is to be recovered."""
        self._missed.append((start, end))
        self._track.store.add_listener(self)

    def cut(self, cuts: Iterable[Location], others: Iterable[Location]) -> None:
        """A subscription is lost whose streams were cut at `cuts`: what they were to bring was
        missed, unless those that go on, from `others` on, bring it."""
        low, largest = min(cuts, default=None), self._track.store.largest
        if low is not None and largest is not None and all(low < start for start in others):
            self.missed(low, largest)

    @property
    def missing(self) -> bool:
        """Whether some of what was missed has not come."""
        return bool(self._missed)

    def recover(self) -> bool:
        """FETCH what was missed and has not come; whether some of it is on its way."""
        coming = False
        for start, end in tuple(self._missed):
            gap = self.assumed(start)
            coming |= (gap is not None and not gap[0].stalled) or self.want(start, end)
        return coming

    def vouched(self, start: Location) -> None:
        """A subscription has brought all there is from `start` on."""
        self._missed = [
            (low, min(high, location_before(start))) for low, high in self._missed if low < start
        ]
        self._note_missed()

    def forget_missed(self) -> None:
        self._missed.clear()
        self._track.store.remove_listener(self)

    def _note_missed(self) -> None:
        """What has come has come, even if it is evicted before the rest is here."""
        store = self._track.store
        left = [(store.first_unknown(low, high), high) for low, high in self._missed]
        self._missed = [(low, high) for low, high in left if low is not None]
        if not self._missed:
            store.remove_listener(self)

    def store_changed(self, log: SubgroupLog | None) -> None:
        self._note_missed()
        if log is None or not self._missed:
            self._track.recovered()

    def subgroup_cut(self, log: SubgroupLog) -> None:
        """That brings nothing."""

    def datagram_stored(self, stored: StoredObject) -> None:
        """`store_changed` follows."""

    # -- FETCHes ---------------------------------------------------------------------------

    def _missing(self, start: Location, end: Location) -> Iterable[Range]:
        coming = IntervalSet()
        for fetch in self.fetches:
            if fetch.next <= fetch.end:
                coming.add(fetch.next, fetch.end)
        for stored in self._track.filling.bringing:
            if not stored.retired and start <= stored.location <= end:
                coming.add(stored.location, stored.location)
        missing: Iterable[Range] = ((start, end),)
        kept = self._track.filling.kept
        on_disk = None if kept is None else kept.known
        for known in (self._track.store.known, self._queued, coming, on_disk):
            if known is not None:
                missing = _holes(known, missing)
        return missing

    def _enqueue(self, fetch: UpstreamFetch, *, first: bool = False) -> None:
        (self.queue.appendleft if first else self.queue.append)(fetch)
        self._queued.add(fetch.next, fetch.end)

    def pump(self) -> None:
        """Start what waits, as far as the limits allow."""
        limit = self._track.config.max_fetches_per_track
        # A fetch that waits for a slow reader must not hold up the others.
        while self.queue and sum(not fetch.paused for fetch in self.fetches) < limit:
            fetch = self.queue.popleft()
            self._queued.remove(fetch.next, fetch.end)
            if fetch.open():
                self.fetches.append(fetch)
            else:
                self._remember_failure([(fetch.next, fetch.end)])

    def fetch_answered(self, fetch: UpstreamFetch) -> None:
        self._serve_held()

    def _awaits_disk(self) -> bool:
        """Who fetches a track that no publisher brings any more learns what a crash leaves of it:
        it waits a moment for what is on its way to the disk."""
        kept, now = self._track.filling.kept, self._track.clock.now
        if kept is None or not kept.unwritten or self._track.established:
            self._held_until = None
            return False
        if self._held_until is None:
            self._held_until = now + self._track.config.disk_timeout
        return now < self._held_until

    def asks_for_end(self, request: IncomingFetch, serve: Callable[[], None]) -> bool:
        """Whether FETCH_OK to `request` has to wait for upstream's, which says whether the track
        ends there (MOQT "FETCH_OK"), or for the disk; `serve` is called when that is over."""
        store, largest = self._track.store, self._track.store.largest
        if request.pending and self._awaits_disk():
            self._held[request] = serve
            return True
        if not request.pending or store.end_of_track is not None or largest is None:
            return False
        if request.parameters.fill_timeout is not None:
            return False  # it does not wait for what is not at hand
        chosen = request.parameters.location_filter or LocationFilter.absolute_start(0)
        start, end = chosen.resolve(largest)
        if not start <= largest <= end or largest in store.known:
            return False
        if store.first_unknown(start, largest) != start or not self.want(start, largest):
            return False  # what is cached is sent at once
        if store.get(largest) is None and any(
            fetch.silent for fetch in (*self.fetches, *self.queue) if fetch.end >= largest
        ):
            self._held[request] = serve
            return True
        return False

    def _serve_held(self) -> None:
        held, self._held = self._held, {}
        for serve in held.values():
            serve()

    def fetch_failed(self, fetch: UpstreamFetch) -> None:
        """Refused, reset or lost: ask the next publisher, or say that it cannot be had."""
        if fetch in self.fetches:
            self.fetches.remove(fetch)
            if fetch.next <= fetch.end:
                self._enqueue(fetch, first=True)
            self.fetch_over(fetch)

    def fetch_over(
        self,
        fetch: UpstreamFetch,
        unknown: list[Unknown] | None = None,
        rejected: list[tuple[Location, Location]] | None = None,
    ) -> None:
        """`fetch` is done. `unknown` is what it could not tell: the next publisher is asked,
        or it cannot be had; `rejected` is what the cache had no room for."""
        fetch.let_go()
        if fetch in self.fetches:
            self.fetches.remove(fetch)
        if unknown:
            for low, high, tried in unknown[:MAX_ASKED_AGAIN]:
                self._enqueue(UpstreamFetch(self._track, self, low, high, tried=tried))
            self._remember_failure([each[:2] for each in unknown[MAX_ASKED_AGAIN:]])
        if rejected:
            self._remember_failure(rejected)
        self.pump()
        self._track.store.changed()
        self._serve_held()

    def _remember_failure(self, ranges: list[tuple[Location, Location]]) -> None:
        until = self._track.clock.now + self._track.config.failure_memory
        self._failures += [(until, low, high) for low, high in ranges]
        del self._failures[:-MAX_FAILURES]


def _holes(known: IntervalSet, ranges: Iterable[Range]) -> Iterator[Range]:
    """The parts of `ranges` outside `known`, no more of them looked for than are taken."""
    for start, end in ranges:
        while start <= end:
            low = known.first_missing(start, end)
            if low is None:
                break
            high = known.missing_end(low, end)
            yield low, high
            start = location_after(high)
