"""FETCHes to publishers: ranges a relay does not hold (MOQT "Relay Fetch Handling")."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from moqt.receiving.receiver import AcceptedFetch, IncomingStream, Receiver
from moqt.requests import OutgoingFetch, RequestState
from moqt.session import Session
from moqt.track.knowledge import INTERVAL_OCTETS
from moqt.track.stored import Buffer, StoredObject
from moqt.values.codes import MAX_VI64, EndOfRange, RequestErrorCode
from moqt.values.errors import MalformedTrack, MoqtError, RequestError
from moqt.values.intervals import IntervalSet
from moqt.values.messages import LocationFilter, Parameters, Properties, RequestOk
from moqt.values.names import MAX_LOCATION, Location, location_after, location_before
from moqt.wire.objects import ObjectHeader, Payload, RangeMarker
from relay.sources.filled import Filled
from relay.sources.hops import relay_path
from relay.sources.receiver import StreamState, UpstreamReceiver

MAX_RANGES = 256
"""Ranges that one FETCH could not tell, or that were not stored, each kind: beyond, the last one
grows over what lies between. That is more than need be asked again, and never wrong."""

_DENIALS = frozenset({RequestErrorCode.DOES_NOT_EXIST, RequestErrorCode.INVALID_RANGE})
"""Refusals that say that there is nothing of the range."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One FETCH while it runs. What it leaves out does not exist if it ends well."""

    proven: bool | None = None
    stalled: bool = False


class Unknown(NamedTuple):
    """A range that the publishers in `tried` could not tell anything of."""

    start: Location
    end: Location
    tried: frozenset[Session]


class Asking(Protocol):
    """Who has ranges fetched, and is told how each ends."""

    def fetch_answered(self, fetch: UpstreamFetch) -> None:
        """FETCH_OK, or the stream, has come."""

    def fetch_failed(self, fetch: UpstreamFetch) -> None:
        """Refused, reset or lost: the next publisher may be asked."""

    def fetch_over(
        self,
        fetch: UpstreamFetch,
        unknown: list[Unknown] | None = None,
        rejected: list[tuple[Location, Location]] | None = None,
    ) -> None:
        """It is done; `unknown` is what it could not tell, `rejected` what had no room."""


class UpstreamFetch(UpstreamReceiver):
    """One range that is fetched upstream, from one publisher after the other if need be."""

    live = False

    def __init__(
        self,
        track: Filled,
        asking: Asking,
        start: Location,
        end: Location,
        *,
        tried: Iterable[Session] = (),
    ) -> None:
        """`tried` are publishers that could not tell."""
        self.track = track
        self._asking = asking
        self.filling = track.filling
        self.streams = {}
        self.end = end
        self.next = start
        """Everything before has come, or was declared non-existent or unknown."""
        self.request: OutgoingFetch | None = None
        self.tried = frozenset(tried)
        self.progress = track.clock.now
        self.denied = False
        """Whoever was asked has said that some of the range does not exist."""
        self._start = start
        self._gaps = IntervalSet()
        """What was left out so far; each is billed to its scope."""
        self._unknown: list[Unknown] = []
        self._rejected: list[tuple[Location, Location]] = []
        self._unstored: list[Location] = []
        """Objects that came and found no room."""
        self._accepted: AcceptedFetch | None = None
        self._finished = False
        self._ahead: dict[StoredObject, None] = {}
        self._ahead_octets = 0
        self._read_early: StoredObject | None = None
        """The Object that is arriving, when somebody reads it already."""
        self._paused: int | None = None
        self.attempt = Attempt()

    # -- asking --------------------------------------------------------------------------

    def open(self) -> bool:
        """FETCH from a publisher not tried yet; False when none is left."""
        for session in self.track.sources():
            if session in self.tried:
                continue
            self.tried |= {session}
            self.session = session
            self.streams = {}
            self._start = self.next
            self._accepted, self._finished = None, False
            self._forget_gaps()
            self._ahead.clear()
            self._ahead_octets = 0
            self.attempt = Attempt()
            self.progress = self.track.clock.now
            try:
                wanted = LocationFilter.between(self.next, self.end)
                self.request = session.fetch(
                    self.track.name,
                    self,
                    Parameters(location_filter=wanted, relay_path=relay_path(session)),
                )
            except MoqtError:
                continue
            self.track.counters.upstream_fetches += 1
            return True
        return False

    def cancel(self) -> None:
        """Give the range up; it stays unknown."""
        request, self.request = self.request, None
        if request is not None:
            request.cancel()
        streams, self.streams = self.streams, {}
        for state in streams.values():
            self._cut(state)
        self._let_flow()
        self._forget_gaps()
        self.attempt.proven = False

    def let_go(self) -> None:
        """It is over. The request still refers to it: no payload may wait for that."""
        self._let_flow()
        self._forget_gaps()
        self._ahead.clear()
        self._ahead_octets = 0
        self._read_early = None
        self._accepted = None

    def tick(self, now: float) -> None:
        config = self.track.config
        waited = now - self.progress
        if self.paused:
            if waited > config.stall_timeout:
                # Nobody reads: the range is unknown again and whoever wants it asks again.
                self.cancel()
                self._asking.fetch_over(self)
        elif waited > (config.upstream_timeout if self._unanswered else config.stall_timeout):
            self.track.counters.upstream_timeouts += 1
            self.request_failed(RequestError(RequestErrorCode.TIMEOUT, "the publisher stalls"))

    # -- Receiver ------------------------------------------------------------------------

    def fetch_accepted(self, request: AcceptedFetch) -> None:
        self._accepted = request
        self.progress = self.track.clock.now
        if request.end_of_track and not self._learn_end(request):
            return
        self._asking.fetch_answered(self)
        self._check_over()

    def _learn_end(self, request: AcceptedFetch) -> bool:
        """FETCH_OK says that nothing lies beyond its End Location; False: that cannot be."""
        store, end_location = self.track.store, request.end_location
        assert end_location is not None
        try:
            if store.end_of_track is None and end_location < MAX_LOCATION:
                store.set_end_of_track(location_after(end_location))
        except MalformedTrack as malformed:
            if not self.filling.contradicted(str(malformed)):
                self.track.malformed(str(malformed))
            return False
        return True

    def request_failed(self, error: MoqtError) -> None:
        self.denied |= isinstance(error, RequestError) and error.code in _DENIALS
        self.cancel()
        if isinstance(error, RequestError) and error.code == RequestErrorCode.MALFORMED_TRACK:
            self.track.malformed(error.reason)
        else:
            self._asking.fetch_failed(self)

    def stream_opened(self, stream: IncomingStream) -> None:
        super().stream_opened(stream)
        self._asking.fetch_answered(self)  # the answer may be late

    def object_arrived(
        self, stream: IncomingStream, header: ObjectHeader, payload: Payload
    ) -> bool:
        try:
            stored = self._add(stream, header, payload)
        except MalformedTrack as contradiction:
            self._settle(contradiction)
            return True  # it has been cancelled
        if stored is None:
            return False
        self._left_out(stored.location)
        self.next = max(self.next, location_after(stored.location))
        if header.length:
            self._came(stream)
            self._ahead[stored] = None
            self._ahead_octets += header.length
        return True

    def object_begun(self, stream: IncomingStream, header: ObjectHeader) -> None:
        location = Location(header.group, header.object)
        self._left_out(location)
        super().object_begun(stream, header)
        self.next = max(self.next, location_after(location))

    def _left_out(self, location: Location) -> None:
        """What lies before an Object that comes, and was asked for, has not come."""
        if self.next < location:
            self._leave_out(self.next, min(location_before(location), self.end))

    def _leave_out(self, start: Location, end: Location) -> None:
        share = self.filling.share
        self.denied |= start <= end
        before, room = len(self._gaps), share.room(INTERVAL_OCTETS)
        if start <= end and not self._gaps.add(start, end, None if room else 0):
            share.count_refused(0)
            self._reject(start, end)
        share.count_intervals(len(self._gaps) - before)

    def _forget_gaps(self) -> None:
        self.filling.share.count_intervals(-len(self._gaps))
        self._gaps = IntervalSet()

    def object_part(self, stream: IncomingStream, part: Buffer) -> None:
        super().object_part(stream, part)
        self._came(stream)

    def _came(self, stream: IncomingStream) -> None:
        """More of the range, perhaps more than is read."""
        self.progress = self.track.clock.now
        if self._ahead_octets > self._window and self._paused is None:
            # Faster than it is read: better wait than evict what nobody has read yet.
            self._paused = stream.stream_id
            self.attempt.stalled = True
            self.session.transport.pause_receiving(stream.stream_id)
            self.track.store.changed()

    def object_ended(self, stream: IncomingStream, header: ObjectHeader) -> None:
        arrival = self._stream(stream).arrival
        if (
            arrival is not None
            and header.length
            and not arrival.stored.gone
            and arrival.stored is not self._read_early
        ):
            self._ahead[arrival.stored] = None
            self._ahead_octets += header.length
        super().object_ended(stream, header)

    def range_marker(self, stream: IncomingStream, marker: RangeMarker) -> None:
        until = min(marker.location, self.end)
        if self.next <= until:
            if marker.kind is EndOfRange.NON_EXISTENT:
                self.denied = True
                if not self.track.store.mark_nonexistent(self.next, until):
                    self._reject(self.next, until)
            else:
                self._add_unknown(self.next, until)
        self.next = max(self.next, location_after(marker.location))

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        if error is None:
            self.streams.pop(stream.stream_id, None)
        else:
            self.cancel()
            self._asking.fetch_failed(self)
            return
        self._finished = True
        self._check_over()

    # -- inside --------------------------------------------------------------------------

    @property
    def _unanswered(self) -> bool:
        """The publisher has the request; before that, it grants no stream for it."""
        request = self.request
        return (
            self._accepted is None
            and request is not None
            and request.state is not RequestState.QUEUED
        )

    @property
    def silent(self) -> bool:
        """Nothing has come: no answer, and no stream."""
        return self._accepted is None and not self.streams and not self._finished

    @property
    def paused(self) -> bool:
        """It waits for those who read it."""
        return self._paused is not None

    @property
    def _window(self) -> int:
        config = self.track.config
        return min(config.fetch_window, config.cache_octets // 8)

    def read(self, stored: StoredObject) -> None:
        """`stored` was sent to somebody, or evicted."""
        if not stored.complete:
            self._read_early = stored
        elif stored in self._ahead:
            del self._ahead[stored]
            self._ahead_octets -= stored.length
            self.progress = self.track.clock.now
            if self._ahead_octets <= self._window // 2:
                self._resume()

    def hurry(self) -> None:
        """Somebody waits for what comes next: it is not ahead of everybody."""
        self._ahead.clear()
        self._ahead_octets = 0
        self._resume()

    def _resume(self) -> None:
        if self._paused is not None:
            self.attempt.stalled = False
            self.progress = self.track.clock.now
            self._let_flow()

    def _let_flow(self) -> None:
        """What was held back is not any more, also after its end: the cache has what came."""
        if self._paused is not None:
            paused, self._paused = self._paused, None
            self.session.transport.resume_receiving(paused)
            self.session.transport.wake()

    def gap_end(self, location: Location) -> Location | None:
        """The end of the gap around `location` that this attempt has left out so far."""
        return self._gaps.end_of(location)

    def _add_unknown(self, start: Location, end: Location) -> None:
        tried = self.tried
        if self._unknown and _joins(len(self._unknown), self._unknown[-1].end, start):
            last = self._unknown.pop()
            start, tried = last.start, last.tried & tried
        self._unknown.append(Unknown(start, end, tried))

    def rejected(self, location: Location) -> None:
        self._unstored.append(location)
        self._reject(location, location)

    def _reject(self, start: Location, end: Location) -> None:
        """[start, end] could be had, and there is no room for it: it stays unknown."""
        if self._rejected and _joins(len(self._rejected), self._rejected[-1][1], start):
            start = self._rejected.pop()[0]
        self._rejected.append((start, end))

    def _cut(self, state: StreamState) -> None:
        if state.arrival is not None:
            # It has to be asked for again, whole.
            self.next = min(self.next, state.arrival.stored.location)
        super()._cut(state)

    def _check_over(self) -> None:
        """FIN and FETCH_OK have both come: what was left out does not exist.

        (MOQT "Gaps in a Fetch Stream")
        """
        request = self._accepted
        if request is None or not self._finished:
            return
        end_location = request.end_location
        assert end_location is not None
        self.request = None
        self.attempt.proven = True
        store = self.track.store
        covered = min(end_location, self.end)
        if (
            self.end.object == MAX_VI64
            and end_location.group == self.end.group
            and store.largest is not None
            and store.largest.group > self.end.group
        ):
            # Whole groups were asked for and a later one has begun: End Location names the
            # last Object there is, not where the answer's knowledge ends (MOQT "FETCH_OK").
            covered = self.end
        if self.next <= covered:
            self._leave_out(self.next, covered)
            self.next = location_after(covered)
        if self.next <= self.end:
            self._add_unknown(self.next, self.end)
        self._vouch(covered)
        for start, end in self._gaps:
            if not store.mark_nonexistent(start, end):
                self._reject(start, end)
        self._asking.fetch_over(self, self._unknown, self._rejected)

    def _vouch(self, covered: Location) -> None:
        """All there is up to `covered` has come, but for what is said to be unknown or had no
        room."""
        kept = self.filling.kept
        if kept is None:
            return
        left = IntervalSet()
        left.add(self._start, covered)
        for low, high, _ in self._unknown:
            left.remove(low, high)
        for location in self._unstored:
            left.remove(location, location)
        for low, high in left:
            kept.vouched(low, high)


@dataclass(frozen=True, slots=True)
class FillOk:
    """What is known of a fill from the answer to its update."""

    end_location: Location
    end_of_track: bool = False
    properties: Properties = ()


class Resumable(Protocol):
    """A paused subscription."""

    session: Session

    def forward(self, wanted: bool, fill: UpstreamFill | None = None) -> None:
        """Resume it, with that fill."""


class UpstreamFill(UpstreamFetch):
    """A range that comes with a subscription of a publisher, as it is resumed (MOQT "Fill
    Semantics"): one that has the track for subscribers alone is asked for no FETCH. When it fails,
    it is a FETCH like all others."""

    def __init__(
        self, track: Filled, asking: Asking, subscription: Resumable, start: Location
    ) -> None:
        super().__init__(track, asking, start, MAX_LOCATION)
        self._subscription: Resumable | None = subscription
        self._given_up = False
        """It is, or is to be, a FETCH."""

    @property
    def is_over(self) -> bool:
        """It has come with the subscription, or will not."""
        return self._given_up or self.attempt.proven is not None

    def open(self) -> bool:
        subscription, self._subscription = self._subscription, None
        if subscription is None:
            return super().open()
        self.session = subscription.session
        subscription.forward(True, self)
        return True

    def answered(self, answer: RequestOk | RequestError) -> None:
        """The publisher has taken the update, or has not."""
        if self.is_over:
            return
        if isinstance(answer, RequestError):
            self.request_failed(answer)
            return
        largest = answer.parameters.largest_object
        if largest is None or largest < self._start:
            self.attempt.proven = True
            self._asking.fetch_over(self)  # no stream comes
            return
        self.end = min(self.end, largest)
        self.fetch_accepted(FillOk(self.end))

    def cancel(self) -> None:
        self._given_up = True
        for state in self.streams.values():
            state.incoming.receiver = Receiver()  # which leaves all alone
        super().cancel()


def _joins(count: int, last: Location, start: Location) -> bool:
    """Whether what begins at `start` is to be one with the range before, of `count`, that ends
    with `last`."""
    return count >= MAX_RANGES or location_after(last) == start
