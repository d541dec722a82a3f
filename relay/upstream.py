"""One track of a relay: where its Objects come from, and who waits for them.

`UpstreamTrack` owns the TrackStore that downstream requests are served from. It fills it
with a SUBSCRIBE to every matching publisher (`Leg`) and, for what was published before or
has been evicted, with FETCHes (`UpstreamFetch`). Objects that come more than once are
stored once and compared (MOQT "Malformed Tracks"). Sans-IO.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from moqt.codes import (
    MAX_VI64,
    EndOfRange,
    LocationFilterType,
    ObjectStatus,
    PropertyType,
    PublishDoneCode,
    RequestErrorCode,
    StreamErrorCode,
    is_mandatory,
)
from moqt.errors import MoqtError, RequestError
from moqt.messages import LocationFilter, Parameters
from moqt.names import MAX_LOCATION, FullTrackName, Location, TrackNamespace
from moqt.receiving import IncomingStream, Receiver
from moqt.requests import (
    IncomingFetch,
    IncomingSubscribe,
    IncomingTrackStatus,
    OutgoingFetch,
    OutgoingSubscribe,
    RequestState,
)
from moqt.session import Session
from moqt.store import (
    Buffer,
    IntervalSet,
    MalformedTrack,
    StoredObject,
    TrackStore,
    buffer_length,
    location_after,
    location_before,
)
from moqt.wire.objects import ObjectHeader, RangeMarker
from moqt.wire.primitives import iter_key_values, with_immutable
from relay.cache import OBJECT_OVERHEAD, Cache
from relay.config import Counters, RelayConfig

TrackRequest = IncomingSubscribe | IncomingFetch | IncomingTrackStatus
"""What a downstream session may ask about a track."""

MAX_FAILURES = 256
"""Ranges remembered as not to be had, per track."""


class Home(Protocol):
    """What a track needs of its relay."""

    config: RelayConfig
    cache: Cache
    counters: Counters
    now: float

    def publishers(self, namespace: TrackNamespace) -> list[Session]:
        """The sessions that may be asked for a track of `namespace`."""

    def track_ready(self, track: UpstreamTrack) -> None:
        """An upstream subscription is established: serve who waits."""

    def track_refused(self, track: UpstreamTrack, error: RequestError) -> None:
        """No publisher gave the track: tell who waits."""

    def track_ended(self, track: UpstreamTrack) -> None:
        """No upstream subscription is left, or the store lost an Object."""

    def track_malformed(self, track: UpstreamTrack, reason: str) -> None:
        """The track is unusable: end all its requests and forget it."""


@dataclass(slots=True, eq=False)
class Arrival:
    """An Object that one stream is bringing; `offset` octets of it have come there."""

    stored: StoredObject
    offset: int = 0


@dataclass(slots=True, eq=False)
class _Stream:
    """What a receiver remembers of one incoming data stream."""

    incoming: IncomingStream
    previous: int | None = None
    """Last Object ID on it, for the "next object" rule (MOQT "Subgroup Streams")."""
    subgroup: tuple[int, int] | None = None
    arrival: Arrival | None = None
    lossy: bool = False
    """An Object of it was not stored: its FIN does not make the Subgroup known."""


class _Intake(Receiver):
    """Objects of one upstream request, on their way into the store."""

    live: bool

    def __init__(self, track: UpstreamTrack, session: Session) -> None:
        self.track = track
        self.session = session
        self.streams: dict[int, _Stream] = {}

    def _stream(self, incoming: IncomingStream) -> _Stream:
        state = incoming.state
        if not isinstance(state, _Stream):
            state = incoming.state = _Stream(incoming)
            if incoming.stream_id >= 0:  # a datagram is no stream and has no end
                self.streams[incoming.stream_id] = state
        return state

    def stream_opened(self, stream: IncomingStream) -> None:
        self._stream(stream)

    def object_begun(self, stream: IncomingStream, header: ObjectHeader) -> None:
        state = self._stream(stream)
        follows, state.previous = state.previous, header.object
        if self.live and header.subgroup is not None and state.subgroup is None:
            state.subgroup = (header.group, header.subgroup)
            self.track.feed_opened(state.subgroup)
        if header.status is not ObjectStatus.NORMAL:
            self.track.status(header)
            return
        state.arrival = self.track.begin(header, follows, live=self.live)
        if state.arrival is None:
            state.lossy = True
            self.rejected(Location(header.group, header.object))
        if self.live and follows is None and header.subgroup is not None:
            opened = stream.subgroup
            if opened is not None and opened.first_object and state.arrival is not None:
                log = self.track.store.subgroup(header.group, header.subgroup)
                log.first_id = header.object if log.first_id is None else log.first_id

    def object_part(self, stream: IncomingStream, part: Buffer) -> None:
        state = self._stream(stream)
        arrival = state.arrival
        if arrival is not None and not self.track.grow(arrival, part):
            state.arrival = None
            state.lossy = True
            if not arrival.stored.complete:
                self.rejected(arrival.stored.location)

    def object_ended(self, stream: IncomingStream, header: ObjectHeader) -> None:
        self._stream(stream).arrival = None

    def rejected(self, location: Location) -> None:
        """The cache had no room for an Object."""

    def _cut(self, state: _Stream) -> None:
        """The stream ended; a last Object may be incomplete."""
        if state.arrival is not None:
            arrival, state.arrival = state.arrival, None
            self.track.cut(arrival)


class Leg(_Intake):
    """The SUBSCRIBE to one publisher."""

    live = True

    def __init__(self, track: UpstreamTrack, session: Session, deadline: float) -> None:
        super().__init__(track, session)
        self.request: OutgoingSubscribe | None = None
        self.deadline = deadline
        self.established = False
        self.whole = True
        """No stream was reset: what came is all there was."""

    def open(self) -> MoqtError | None:
        """Send SUBSCRIBE; stays closed while the transport has no stream to give."""
        try:
            self.request = self.session.subscribe(
                self.track.name,
                self,
                # Filters are applied downstream, so one subscription serves all
                # (MOQT "Subscriber Interactions").
                Parameters(location_filter=LocationFilter.next_object()),
            )
        except RequestError as error:
            if error.code != RequestErrorCode.EXCESSIVE_LOAD:
                return error
        except MoqtError as error:
            return error
        else:
            self.track.home.counters.upstream_subscriptions += 1
        return None

    def subscribe_accepted(self, request: OutgoingSubscribe) -> None:
        self.established = True
        self.request = request
        self.track.leg_accepted(self)

    def request_failed(self, error: MoqtError) -> None:
        self._end_streams()
        self.track.leg_failed(self, error)

    def subscription_done(self, code: int, reason: str) -> None:
        request = self.request
        if request is None or request.done is None or self.streams:
            self.whole = False
        elif request.streams_ended != request.done.stream_count:
            self.whole = False  # given up waiting: the rest was lost on the way
        self._end_streams()
        self.track.leg_done(self, code, reason)

    def object_begun(self, stream: IncomingStream, header: ObjectHeader) -> None:
        if header.subgroup is None:
            self.whole = False  # others like it may have been lost
        super().object_begun(stream, header)

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        state = self.streams.pop(stream.stream_id, None)
        if state is None:
            return
        if error is not None:
            self.whole = False
        opened = stream.subgroup
        self._close(
            state,
            finished=error is None,
            end_of_group=opened is not None and opened.end_of_group,
        )

    def cancel(self) -> None:
        """Unsubscribe."""
        if self.request is not None:
            self.request.cancel()
        self._end_streams()

    def _end_streams(self) -> None:
        """No more will be read from the streams that are still open."""
        streams, self.streams = self.streams, {}
        for state in streams.values():
            self._close(state, finished=False, end_of_group=False)

    def _close(self, state: _Stream, *, finished: bool, end_of_group: bool) -> None:
        self._cut(state)
        if state.subgroup is not None:
            last = state.previous if finished and not state.lossy else None
            self.track.feed_closed(state.subgroup, last, end_of_group=end_of_group)


@dataclass(slots=True, eq=False)
class Attempt:
    """One FETCH while it runs. What it leaves out does not exist if it ends well."""

    proven: bool | None = None
    stalled: bool = False


class UpstreamFetch(_Intake):
    """One range that is fetched upstream, from one publisher after the other if need be."""

    live = False

    def __init__(self, track: UpstreamTrack, start: Location, end: Location) -> None:
        self.track = track
        self.streams = {}
        self.end = end
        self.next = start
        """Everything before has come, or was declared non-existent or unknown."""
        self.request: OutgoingFetch | None = None
        self.tried: set[Session] = set()
        self.progress = track.home.now
        self._start = start
        self._gaps: list[tuple[Location, Location]] = []
        self._unknown: list[tuple[Location, Location]] = []
        self._accepted: OutgoingFetch | None = None
        self._finished = False
        self._ahead: dict[StoredObject, None] = {}
        self._ahead_octets = 0
        self._read_early: StoredObject | None = None
        """The Object that is arriving, when somebody reads it already."""
        self._paused: int | None = None
        self.attempt = Attempt()

    # -- asking --------------------------------------------------------------------------

    def open(self) -> bool | None:
        """FETCH from a publisher not tried yet; False when none is left, None: try later."""
        while True:
            session = next((s for s in self.track.sources() if s not in self.tried), None)
            if session is None:
                return False
            self.session = session
            self.streams = {}
            self._start = self.next
            self._accepted, self._finished = None, False
            self._gaps.clear()
            self._ahead.clear()
            self._ahead_octets = 0
            self.attempt = Attempt()
            self.progress = self.track.home.now
            try:
                self.request = session.fetch(
                    self.track.name, self, Parameters(location_filter=_range(self.next, self.end))
                )
            except RequestError as error:
                if error.code == RequestErrorCode.EXCESSIVE_LOAD:
                    return None
                self.tried.add(session)
            except MoqtError:
                self.tried.add(session)
            else:
                self.tried.add(session)
                self.track.home.counters.upstream_fetches += 1
                return True

    def cancel(self) -> None:
        """Give the range up; it stays unknown."""
        request, self.request = self.request, None
        if request is not None:
            request.cancel()
        streams, self.streams = self.streams, {}
        for state in streams.values():
            self._cut(state)
        self._paused = None
        self.attempt.proven = False

    def let_go(self) -> None:
        """It is over. The request still refers to it: no payload may wait for that."""
        self._ahead.clear()
        self._ahead_octets = 0
        self._read_early = None
        self._accepted = None

    def tick(self, now: float) -> None:
        config = self.track.home.config
        waited = now - self.progress
        if self.paused:
            if waited > config.stall_timeout:
                # Nobody reads: the range is unknown again and whoever wants it asks again.
                self.cancel()
                self.track.fetch_over(self, None)
        elif waited > (config.upstream_timeout if self._accepted is None else config.stall_timeout):
            self.track.home.counters.upstream_timeouts += 1
            self.request_failed(RequestError(RequestErrorCode.TIMEOUT, "the publisher stalls"))

    # -- Receiver ------------------------------------------------------------------------

    def fetch_accepted(self, request: OutgoingFetch) -> None:
        self._accepted = request
        self.progress = self.track.home.now
        self._check_over()

    def request_failed(self, error: MoqtError) -> None:
        self.cancel()
        if isinstance(error, RequestError) and error.code == RequestErrorCode.MALFORMED_TRACK:
            self.track.malformed(error.reason)
        else:
            self.track.fetch_failed(self)

    def object_begun(self, stream: IncomingStream, header: ObjectHeader) -> None:
        location = Location(header.group, header.object)
        if self.next < location:
            self._gaps.append((self.next, min(location_before(location), self.end)))
        super().object_begun(stream, header)
        self.next = max(self.next, location_after(location))

    def object_part(self, stream: IncomingStream, part: Buffer) -> None:
        self.progress = self.track.home.now
        super().object_part(stream, part)
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
                self.track.store.mark_nonexistent(self.next, until)
            else:
                self._unknown.append((self.next, until))
        self.next = max(self.next, location_after(marker.location))

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        if error is None:
            self.streams.pop(stream.stream_id, None)
        else:
            self.cancel()
            self.track.fetch_failed(self)
            return
        self._finished = True
        self._check_over()

    # -- inside --------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """It waits for those who read it."""
        return self._paused is not None

    @property
    def _window(self) -> int:
        config = self.track.home.config
        return min(config.fetch_window, config.cache_octets // 8)

    def read(self, stored: StoredObject) -> None:
        """`stored` was sent to somebody, or evicted."""
        if not stored.complete:
            self._read_early = stored
        elif stored in self._ahead:
            del self._ahead[stored]
            self._ahead_octets -= stored.length
            self.progress = self.track.home.now
            if self._ahead_octets <= self._window // 2:
                self._resume()

    def hurry(self) -> None:
        """Somebody waits for what comes next: it is not ahead of everybody."""
        self._ahead.clear()
        self._ahead_octets = 0
        self._resume()

    def _resume(self) -> None:
        if self._paused is not None:
            paused, self._paused = self._paused, None
            self.attempt.stalled = False
            self.progress = self.track.home.now
            self.session.transport.resume_receiving(paused)
            self.session.transport.wake()

    def gap_end(self, location: Location) -> Location | None:
        """The end of the gap around `location` that this attempt has left out so far."""
        # They are in order, and there may be one before every Object.
        index = bisect_right(self._gaps, location, key=lambda gap: gap[0]) - 1
        if index >= 0 and location <= self._gaps[index][1]:
            return self._gaps[index][1]
        return None

    def rejected(self, location: Location) -> None:
        self._unknown.append((location, location))

    def _cut(self, state: _Stream) -> None:
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
            self._gaps.append((self.next, covered))
            self.next = location_after(covered)
        if self.next <= self.end:
            self._unknown.append((self.next, self.end))
        for start, end in self._gaps:
            store.mark_nonexistent(start, end)
        try:
            if request.end_of_track and store.end_of_track is None and end_location < MAX_LOCATION:
                store.set_end_of_track(location_after(end_location))
        except MalformedTrack as malformed:
            self.track.malformed(str(malformed))
            return
        self.track.fetch_over(self, self._unknown)


class UpstreamTrack:
    """See the module. It is the `Source` of its store."""

    def __init__(self, home: Home, name: FullTrackName) -> None:
        self.home = home
        self.name = name
        self.store = TrackStore(name, authoritative=False, source=self)
        self.store.on_stored = self._stored
        self.store.on_used = self._used
        self.legs: dict[Session, Leg] = {}
        self.fetches: list[UpstreamFetch] = []
        self.queue: deque[UpstreamFetch] = deque()
        self.waiting: dict[TrackRequest, None] = {}
        self.requests: dict[TrackRequest, None] = {}
        """Accepted downstream requests; the finished ones are found on tick."""
        self.idle_since: float | None = None
        self.held = False
        """Complete and without a publisher: the relay is the publisher now."""
        self.over = False
        self._refusal: RequestError | None = None
        self._lost: tuple[int, str] | None = None
        """How the last established subscription ended, while another may still come."""
        self._feeds: dict[tuple[int, int], int] = {}
        self._bringing: dict[StoredObject, int] = {}
        self._failures: list[tuple[float, Location, Location]] = []

    # -- state ---------------------------------------------------------------------------

    @property
    def established(self) -> bool:
        return any(leg.established for leg in self.legs.values())

    @property
    def opening(self) -> bool:
        return bool(self.legs) and not self.established

    @property
    def track_ended(self) -> bool:
        return self.store.ended and self.store.end_code == PublishDoneCode.TRACK_ENDED

    @property
    def idle(self) -> bool:
        """Nobody downstream needs it."""
        return not self.requests and not self.waiting

    def servable(self, request: TrackRequest) -> bool:
        """Whether `request` can be answered without waiting for a publisher."""
        if self.established:
            return True
        if self.track_ended and (self.store.octets > 0 or self.store.is_complete()):
            return True
        if self.home.publishers(self.name.namespace):
            return self.track_ended
        # Without any publisher the cache is all there is; what it misses resets the stream.
        return isinstance(request, IncomingFetch) and self.store.octets > 0

    def sources(self) -> Iterable[Session]:
        """Who can be asked for a range, in order."""
        sessions = [leg.session for leg in self.legs.values() if leg.established]
        sessions += self.home.publishers(self.name.namespace)
        return (s for s in dict.fromkeys(sessions) if s.closed is None)

    # -- upstream subscriptions ------------------------------------------------------------

    def open(self, sessions: Iterable[Session]) -> None:
        """SUBSCRIBE to each of `sessions` that has no subscription yet."""
        self._refusal = None
        deadline = self.home.now + self.home.config.upstream_timeout
        legs = [Leg(self, session, deadline) for session in sessions if session not in self.legs]
        self.legs.update((leg.session, leg) for leg in legs)
        for leg in legs:
            error = leg.open()
            if error is not None:
                self.leg_failed(leg, error)

    def leg_accepted(self, leg: Leg) -> None:
        request, store = leg.request, self.store
        assert request is not None
        self._lost = None
        if store.ended:
            # A subscription that is still draining would have a hole it does not know of.
            for old in self._subscriptions():
                old.end(store.end_code or PublishDoneCode.INTERNAL_ERROR, "the publisher was lost")
            store.reopen()
        if request.properties != store.properties:
            store.set_properties(request.properties)
        largest = request.largest
        if largest is not None and (store.largest is None or largest > store.largest):
            if store.end_of_track is not None and largest >= store.end_of_track:
                self.malformed("the Largest Object lies beyond the end of the track")
                return
            store.largest = largest
        self._failures.clear()
        self.home.track_ready(self)

    def leg_failed(self, leg: Leg, error: MoqtError) -> None:
        """Refused, cancelled by the publisher, or its session ended."""
        if self.legs.get(leg.session) is not leg:
            return
        del self.legs[leg.session]
        if not leg.established:
            self._note_refusal(error)
            if not self.legs:
                refusal = self._refusal or RequestError(RequestErrorCode.INTERNAL_ERROR)
                self._refusal = None
                if self._lost is not None:
                    self._finish(*self._lost)
                self.home.track_refused(self, refusal)
            return
        if isinstance(error, RequestError) and error.code == RequestErrorCode.MALFORMED_TRACK:
            self.malformed(error.reason)
        elif not self.established:
            self._finish_or_wait(PublishDoneCode.INTERNAL_ERROR, "the publisher was lost")

    def leg_done(self, leg: Leg, code: int, reason: str) -> None:
        """PUBLISH_DONE, and the streams it counts have ended (MOQT "PUBLISH_DONE")."""
        if self.legs.get(leg.session) is not leg:
            return
        del self.legs[leg.session]
        store = self.store
        if code == PublishDoneCode.TRACK_ENDED and leg.whole and store.end_of_track is None:
            store.set_end_of_track(
                location_after(store.largest) if store.largest else Location(0, 0)
            )
        if code == PublishDoneCode.MALFORMED_TRACK:
            self.malformed(reason)
        elif not self.established:
            self._finish_or_wait(code, reason)

    def _finish_or_wait(self, code: int, reason: str) -> None:
        """The last established subscription is over; others may not have been answered yet."""
        if code == PublishDoneCode.TRACK_ENDED:
            # That is final: what another publisher has of the track can be fetched.
            legs, self.legs = self.legs, {}
            for leg in legs.values():
                leg.cancel()
        if self.legs:
            self._lost = (code, reason)
        else:
            self._finish(code, reason)

    def _finish(self, code: int, reason: str) -> None:
        """No upstream subscription is left: downstream ones end with the same meaning."""
        self._lost = None
        if self.store.is_complete():
            code, reason = PublishDoneCode.TRACK_ENDED, ""
        self.store.finish(code, reason)
        self.home.track_ended(self)

    def _note_refusal(self, error: MoqtError) -> None:
        """Of several refusals the one that says most is passed on."""
        if not isinstance(error, RequestError):
            error = RequestError(
                RequestErrorCode.INTERNAL_ERROR,
                "the publisher left before it answered",
                retry_after_ms=self.home.config.retry_after_ms,
            )
        kept = self._refusal
        if kept is None or kept.code == RequestErrorCode.DOES_NOT_EXIST:
            self._refusal = error

    def close_upstream(self) -> None:
        """Unsubscribe and stop fetching; what is cached stays."""
        legs, self.legs = self.legs, {}
        for leg in legs.values():
            leg.cancel()
        self.stop_fetching()

    def stop_fetching(self) -> None:
        fetches = [*self.fetches, *self.queue]
        self.fetches.clear()
        self.queue.clear()
        for fetch in fetches:
            fetch.cancel()

    def malformed(self, reason: str) -> None:
        """MOQT "Malformed Tracks": end everything, forget the track."""
        if self.over:
            return
        self.over = True
        self.home.counters.malformed_tracks += 1
        self.close_upstream()
        self.store.ended = True
        self.store.end_code = PublishDoneCode.MALFORMED_TRACK
        self.store.end_reason = reason
        self.home.track_malformed(self, reason)

    # -- Objects arriving --------------------------------------------------------------------

    def begin(self, header: ObjectHeader, follows: int | None, *, live: bool) -> Arrival | None:
        """Place an Object, or find the one that is there; None when there is no room."""
        store, cache = self.store, self.home.cache
        location = Location(header.group, header.object)
        group = store.groups.get(header.group)
        stored = store.get(location)
        if header.properties:
            self._check_properties(header, stored)
        if stored is None:
            log = None
            if group is not None and header.subgroup is not None:
                log = group.subgroups.get(header.subgroup)
            if log is not None and log.finished and log.ids and header.object > log.ids[-1]:
                raise MalformedTrack(
                    f"{self.name}: Object {header.group}/{header.object} comes after the final "
                    f"Object of its subgroup"
                )
            overhead = len(header.properties) + OBJECT_OVERHEAD
            if header.length + overhead > cache.budget or not cache.reserve(
                overhead, payload=False
            ):
                cache.stores_rejected += 1
                return None
            try:
                stored = store.begin(
                    location,
                    subgroup=header.subgroup,
                    priority=header.priority,
                    properties=header.properties,
                    length=header.length,
                    follows=follows,
                    now=self.home.now,
                    live=live,
                )
            finally:
                if stored is None:
                    cache.billed -= overhead
            assert stored is not None
            if header.subgroup is not None and not live:
                log = store.subgroup(header.group, header.subgroup)
                if not log.finished and (header.group, header.subgroup) not in self._feeds:
                    # No live stream feeds it, so nobody will ever say that it ends.
                    log.broken = True
            if not stored.length:
                store.complete(stored)
        else:
            store.begin(
                location,
                subgroup=header.subgroup,
                priority=header.priority,
                properties=header.properties,
                length=header.length,
            )
        if not stored.complete:
            self._bringing[stored] = self._bringing.get(stored, 0) + 1
        return Arrival(stored)

    def grow(self, arrival: Arrival, part: Buffer) -> bool:
        """More of an Object; what another stream has brought is compared.

        False when it is not stored (any more): the rest of it is of no use.
        """
        stored, store = arrival.stored, self.store
        if stored.gone:
            return False
        size = buffer_length(part)
        known = min(size, stored.received - arrival.offset)
        if known > 0:
            view = memoryview(part)
            if not _same(stored, arrival.offset, view[:known]):
                raise MalformedTrack(
                    f"{self.name}: Object {stored.location.group}/{stored.location.object} came "
                    f"twice with different payloads"
                )
            part = view[known:]
        arrival.offset += size
        if size > known:
            if not self.home.cache.reserve(size - known):
                self.home.cache.stores_rejected += 1
                self._abort(stored)
                return False
            store.grow(stored, part)
            if stored.complete:
                self._bringing.pop(stored, None)
                store.complete(stored)
        return True

    def cut(self, arrival: Arrival) -> None:
        """The stream that brought an Object ended inside it."""
        stored = arrival.stored
        count = self._bringing.get(stored)
        if count is None:
            return
        if count > 1:
            self._bringing[stored] = count - 1
        else:
            self._abort(stored)

    def _abort(self, stored: StoredObject) -> None:
        self._bringing.pop(stored, None)
        self.home.cache.release(stored)
        self.store.abort(stored)
        self.store.forget_group(stored.location.group)

    def status(self, header: ObjectHeader) -> None:
        """An End of Group or End of Track Object (MOQT "Object Status")."""
        location = Location(header.group, header.object)
        if header.subgroup is not None:
            self.store.mark_end(
                location, header.status, subgroup=header.subgroup, priority=header.priority
            )
        elif header.status is ObjectStatus.END_OF_TRACK:
            self.store.set_end_of_track(location)
            self.store.changed()
        else:
            self.store.set_end_of_group(location)
            self.store.changed()

    def feed_opened(self, key: tuple[int, int]) -> None:
        """A live stream brings Objects of this Subgroup."""
        self._feeds[key] = self._feeds.get(key, 0) + 1
        group = self.store.groups.get(key[0])
        log = group.subgroups.get(key[1]) if group is not None else None
        if log is not None:
            log.broken = False

    def feed_closed(self, key: tuple[int, int], last: int | None, *, end_of_group: bool) -> None:
        """It ended; `last` is its last Object ID when it ended with FIN, else None."""
        count = self._feeds.pop(key, 1) - 1
        if count:
            self._feeds[key] = count
        group = self.store.groups.get(key[0])
        log = group.subgroups.get(key[1]) if group is not None else None
        if log is None:
            return
        if last is None:
            if not count:
                self.store.break_subgroup(*key)
        elif log.finished and log.ids and log.ids[-1] != last:
            raise MalformedTrack(
                f"{self.name}: subgroup {key[0]}/{key[1]} ended with Object {log.ids[-1]} and "
                f"with {last}"
            )
        else:
            self.store.finish_subgroup(*key, end_of_group=end_of_group)
        self.store.forget_group(key[0])

    def _check_properties(self, header: ObjectHeader, stored: StoredObject | None) -> None:
        """Gaps the publisher declares, and contradictions (MOQT "MOQT Properties")."""
        found: dict[int, int | bytes] = {}
        for type_, value in with_immutable(iter_key_values(header.properties)):
            if is_mandatory(type_):
                raise MalformedTrack(f"{self.name}: a mandatory track property on an Object")
            if type_ in _GAPS and type_ in found:
                raise MalformedTrack(f"{self.name}: a gap is declared twice on one Object")
            found.setdefault(type_, value)
        if stored is not None and stored.properties != header.properties:
            before_ = dict(iter_key_values(stored.properties))
            if before_.get(PropertyType.IMMUTABLE_PROPERTIES) != found.get(
                PropertyType.IMMUTABLE_PROPERTIES
            ):
                raise MalformedTrack(
                    f"{self.name}: Object {header.group}/{header.object} came twice with "
                    f"different immutable properties"
                )
        groups, objects = (found.get(type_) for type_ in _GAPS)
        if isinstance(groups, int) and groups:
            if groups > header.group:
                raise MalformedTrack(f"{self.name}: a gap before group 0")
            self._declare_gap(
                Location(header.group - groups, 0), Location(header.group - 1, MAX_VI64)
            )
        if isinstance(objects, int) and objects:
            if objects > header.object:
                raise MalformedTrack(f"{self.name}: a gap before Object 0")
            self._declare_gap(
                Location(header.group, header.object - objects),
                Location(header.group, header.object - 1),
            )

    def _declare_gap(self, start: Location, end: Location) -> None:
        if self.store.next_object(start, end) is not None:
            raise MalformedTrack(f"{self.name}: a declared gap covers an Object that came")
        self.store.mark_nonexistent(start, end)

    def _stored(self, store: TrackStore, stored: StoredObject) -> None:
        counters = self.home.counters
        counters.objects_in += 1
        counters.octets_in += stored.length
        self.home.cache.add(store, stored)

    def _used(self, store: TrackStore, stored: StoredObject) -> None:
        if stored.status is not ObjectStatus.NORMAL:
            return
        counters = self.home.counters
        counters.objects_out += 1
        counters.octets_out += stored.length
        self.home.cache.use(stored)
        for fetch in self.fetches:
            fetch.read(stored)

    def evicted(self, stored: StoredObject) -> None:
        """The cache dropped `stored`."""
        for fetch in self.fetches:
            fetch.read(stored)
        if self.held:
            self.home.track_ended(self)

    # -- Source ------------------------------------------------------------------------------

    def want(self, store: TrackStore, start: Location, end: Location) -> bool:
        """FETCH what of [start, end] is not here nor on its way (MOQT "Relay Fetch Handling")."""
        now = self.home.now
        if any(until > now and low <= start <= high for until, low, high in self._failures):
            return False
        for fetch in self.fetches:
            if fetch.paused and fetch.next <= start <= fetch.end:
                fetch.hurry()
        missing = self._missing(start, end)
        if not missing:
            return True
        if next(iter(self.sources()), None) is None:
            return missing[0][0] > start
        for low, high in missing:
            self.home.cache.misses += 1
            self.queue.append(UpstreamFetch(self, low, high))
        self.pump()
        return not any(until > now and low <= start <= high for until, low, high in self._failures)

    def assumed(self, store: TrackStore, start: Location) -> tuple[Attempt, Location] | None:
        """A running FETCH has left out `start`, up to the Location returned."""
        for fetch in self.fetches:
            end = fetch.gap_end(start)
            if end is not None:
                return fetch.attempt, end
        return None

    def _missing(self, start: Location, end: Location) -> list[tuple[Location, Location]]:
        coming = IntervalSet()
        for fetch in (*self.fetches, *self.queue):
            if fetch.next <= fetch.end:
                coming.add(fetch.next, fetch.end)
        for stored in self._bringing:
            coming.add(stored.location, stored.location)
        return [
            hole
            for low, high in _holes(self.store.known, start, end)
            for hole in _holes(coming, low, high)
        ]

    def pump(self) -> None:
        """Start what waits, as far as the limits allow."""
        limit = self.home.config.max_fetches_per_track
        # A fetch that waits for a slow reader must not hold up the others.
        while self.queue and sum(not fetch.paused for fetch in self.fetches) < limit:
            fetch = self.queue[0]
            opened = fetch.open()
            if opened is None:
                return  # no stream is free: the next end of a fetch, or tick, tries again
            self.queue.popleft()
            if opened:
                self.fetches.append(fetch)
            else:
                self._remember_failure([(fetch.next, fetch.end)])

    def fetch_failed(self, fetch: UpstreamFetch) -> None:
        """Refused, reset or lost: ask the next publisher, or say that it cannot be had."""
        if fetch in self.fetches:
            self.fetches.remove(fetch)
            if fetch.next <= fetch.end:
                self.queue.appendleft(fetch)
            self.fetch_over(fetch, None)

    def fetch_over(
        self, fetch: UpstreamFetch, unknown: list[tuple[Location, Location]] | None
    ) -> None:
        """`fetch` is done; `unknown` is what it could not tell."""
        fetch.let_go()
        if fetch in self.fetches:
            self.fetches.remove(fetch)
        if unknown:
            self._remember_failure(unknown)
        self.pump()
        self.store.changed()

    def _remember_failure(self, ranges: list[tuple[Location, Location]]) -> None:
        until = self.home.now + self.home.config.failure_memory
        self._failures += [(until, low, high) for low, high in ranges]
        del self._failures[:-MAX_FAILURES]

    # -- time --------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        config = self.home.config
        self._failures = [failure for failure in self._failures if failure[0] > now]
        for leg in tuple(self.legs.values()):
            if leg.established:
                continue
            if now > leg.deadline:
                self.home.counters.upstream_timeouts += 1
                leg.cancel()
                self.leg_failed(leg, RequestError(RequestErrorCode.TIMEOUT, "no answer in time"))
            elif leg.request is None:
                error = leg.open()
                if error is not None:
                    self.leg_failed(leg, error)
        self.requests = {r: None for r in self.requests if r.state is RequestState.ESTABLISHED}
        if not self.idle:
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now
            self.stop_fetching()
        elif now - self.idle_since >= config.linger and self.legs:
            self.close_upstream()
        for fetch in tuple(self.fetches):
            fetch.tick(now)
        self.pump()

    @property
    def disposable(self) -> bool:
        """Nothing is known, wanted or on its way."""
        return (
            self.idle
            and not self.legs
            and not self.fetches
            and not self.queue
            and next(self.store.objects(), None) is None
        )

    def _subscriptions(self) -> Iterator[IncomingSubscribe]:
        for request in tuple(self.requests):
            if isinstance(request, IncomingSubscribe) and request.state is RequestState.ESTABLISHED:
                yield request

    def end_malformed(self, reason: str) -> None:
        """End every accepted downstream request at once with MALFORMED_TRACK."""
        for request in tuple(self.requests):
            if isinstance(request, IncomingFetch):
                request.abort(StreamErrorCode.MALFORMED_TRACK)
            elif isinstance(request, IncomingSubscribe):
                if request.delivery is not None:
                    request.delivery.cancel(StreamErrorCode.MALFORMED_TRACK)
                request.end(PublishDoneCode.MALFORMED_TRACK, reason)
        self.requests.clear()


_GAPS = (PropertyType.PRIOR_GROUP_ID_GAP, PropertyType.PRIOR_OBJECT_ID_GAP)


def _holes(
    known: IntervalSet, start: Location, end: Location
) -> Iterator[tuple[Location, Location]]:
    """The parts of [start, end] outside `known`."""
    while start <= end:
        low = known.first_missing(start, end)
        if low is None:
            return
        high = known.missing_end(low, end)
        yield low, high
        start = location_after(high)


def _range(start: Location, end: Location) -> LocationFilter:
    if end.object == MAX_VI64:
        return LocationFilter(
            LocationFilterType.ABSOLUTE_START_GROUP_END,
            start.group,
            start.object,
            end.group - start.group,
        )
    return LocationFilter.range(start, end)


def _same(stored: StoredObject, offset: int, part: memoryview) -> bool:
    """Whether `stored` has the octets of `part` at `offset`."""
    done = 0
    while done < part.nbytes:
        held = stored.read(offset + done, part.nbytes - done)
        size = buffer_length(held)
        if held != part[done : done + size]:
            return False
        done += size
    return True
