"""The origin is the authority: what is cached holds as long as who brings the track does not say
otherwise.

Whoever brings a track vouches for what came of it. When all of them are gone and a publisher comes
that has not, what is cached is inherited: one Object of it is compared with the publisher's before
anybody is served, and whatever contradicts what is inherited (other octets at a Location, an
Object beyond the end, a track that has ended and begins anew) has that dropped and the new taken.
Only where those who are there contradict each other the track is malformed (MOQT "Malformed
Tracks").
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

from moqt.session import Session
from moqt.track.stored import StoredObject
from moqt.values.names import START, Location
from relay.sources.fetches import Unknown, UpstreamFetch
from relay.sources.filled import Filled
from relay.sources.kept import Kept


class Inherited(Filled, Protocol):
    """The track of which something may be cached."""

    @property
    def track_ended(self) -> bool:
        """Nothing more was to come of it."""

    def renew(self, reason: str) -> None:
        """Drop what is cached, and end who reads it; go on with what comes."""

    def confirmed(self) -> None:
        """What is cached has been compared, or cannot be: those who wait may be served."""


class Bringing(Protocol):
    """A subscription that brings the track."""

    session: Session
    published: bool
    """Its publisher offered it (PUBLISH), and need not answer a FETCH."""


class Origin:
    """Who vouches for what one track's cache holds."""

    def __init__(self, track: Inherited) -> None:
        self._track = track
        self._vouched: WeakSet[Session] = WeakSet()
        self.inherited = False
        """What is cached came from sources that are all gone."""
        self.unasked = False
        """A publisher has appeared since a track ended that is cached: it may say otherwise."""
        self._probe: UpstreamFetch | None = None
        self._brought: object | None = None
        """Of an Object that is being read from the disk, to be compared."""
        self._unread: tuple[Session, Location, float] | None = None
        """Who is to be compared with what only the disk has, when it is tried again and again to
        have it read, and until when."""
        self._offered = False
        """Who is asked for that Object has offered the track, and may take no FETCH."""

    @property
    def probing(self) -> bool:
        """An Object is being compared."""
        return any(each is not None for each in (self._probe, self._brought, self._unread))

    def accepted(self, by: Bringing, largest: Location | None, *, alone: bool) -> None:
        """`by` brings the track, whose Largest Object it says is `largest`; `alone`: nobody else
        does."""
        session = by.session
        self.unasked = False
        # who brings a track again that has ended says something new
        vouched = session in self._vouched and not self._track.track_ended
        self._vouched.add(session)
        if not alone:
            return
        store = self._track.store
        ours = store.largest
        self.inherited = not vouched and (ours is not None or store.end_of_track is not None)
        if not self.inherited:
            return
        end = store.end_of_track if self._track.track_ended else None
        if end is not None and (largest is None or ours is None or not ours <= largest < end):
            self.contradicted("a track that had ended goes on, or begins anew")
        elif largest is not None and ours is not None:
            self._offered = by.published
            until = self._track.clock.now + self._track.config.disk_timeout
            self._bring(session, min(largest, ours), until)

    def contradicted(self, reason: str) -> bool:
        """Something says otherwise than what is here: whether that was inherited and is dropped."""
        if not self.inherited:
            return False
        self.inherited, awaited = False, self.probing
        self.stop()
        self._track.counters.tracks_renewed += 1
        self._track.renew(reason)
        if awaited:
            self._track.confirmed()
        return True

    def _bring(self, session: Session, at: Location, until: float) -> None:
        """Have in memory what is to be compared, where only the disk has it. What the disk does not
        tell until then is not taken to be what the publisher has."""
        kept, known = self._track.filling.kept, at in self._track.store.known
        reading = self._brought = object()

        def brought() -> None:
            if self._brought is not reading:
                return
            self._brought = None
            if kept is None or kept.looked_at or kept.entry is None or self._held(at) is not None:
                self._compare(session, at)
            else:
                again(kept)
            if not self.probing:
                self._track.confirmed()

        def again(kept: Kept) -> None:
            self._brought = None
            if kept.answers and self._track.clock.now < until:
                self._unread = session, at, until
            else:
                self.contradicted("the disk does not say whether it is what the publisher has")

        if known or kept is None or kept.entry is None:
            self._brought = None
            self._compare(session, at)
        elif not kept.bring(at, brought):
            again(kept)

    def _held(self, at: Location) -> StoredObject | None:
        return self._track.store.largest_in(START, at)

    def _compare(self, session: Session, at: Location) -> None:
        """Have the Object that is held there, or the last one before, brought by `session`, too:
        what comes twice is compared."""
        held = self._held(at)
        if held is None or not held.complete or self._probe is not None:
            return
        others = [each for each in self._track.sources() if each is not session]
        probe = UpstreamFetch(self._track, self, held.location, held.location, tried=others)
        self._probe = probe
        if not probe.open():
            self._probe = None

    def tick(self, now: float) -> None:
        if self._probe is not None:
            self._probe.tick(now)
        unread, self._unread = self._unread, None
        if unread is not None:
            self._brought = unread  # who waits does so for this
            self._bring(*unread)
            if not self.probing:
                self._track.confirmed()

    def stop(self) -> None:
        """Nothing is to be compared any more."""
        self._brought = self._unread = None
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.cancel()

    # -- Asking ----------------------------------------------------------------------------

    def fetch_answered(self, fetch: UpstreamFetch) -> None:
        """It says nothing of what is compared."""

    def fetch_failed(self, fetch: UpstreamFetch) -> None:
        fetch.denied &= not self._offered
        self.fetch_over(fetch)

    def fetch_over(
        self,
        fetch: UpstreamFetch,
        unknown: list[Unknown] | None = None,
        rejected: list[tuple[Location, Location]] | None = None,
    ) -> None:
        fetch.let_go()
        if fetch is self._probe:
            self._probe = None
            if fetch.denied:
                self.contradicted("its publisher has not got what is cached of it")
            self._track.confirmed()
