"""Asking for one publication: subscriptions, fills, fetches and recovery.

Sans-IO over a `moqt` session (KVCS "Retrieval during Production", "Retrieval of Completed
Caches", "Verification and Recovery"): callbacks of the session only take note, `poll(now)`
acts. The callbacks are in `receivers`; the manifest is asked for by `manifest_track`; what
arrives is judged and put together by `assembly`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from kvcs.names.errors import KvcsError, NotAuthorized, PublisherLost, VerificationFailed
from kvcs.names.manifest import Manifest
from kvcs.names.refusals import NO_STREAM_DELAY, not_authorized, retry_delay
from kvcs.names.tracks import DataTrack
from kvcs.retrieving.asking import waits
from kvcs.retrieving.asking.later import Later
from kvcs.retrieving.assembly import Assembly
from kvcs.retrieving.layers import Kept, Layer, Verdict
from kvcs.retrieving.manifest_track import Beside, ManifestVersions, Read
from kvcs.retrieving.receivers import (
    STALL,
    Early,
    FetchReceiver,
    LiveReceiver,
    Spread,
    TrackState,
    max_object_octets,
)
from kvcs.retrieving.stats import Mode, Stats
from kvsp.names.codes import DecodeErrorName
from kvsp.names.errors import DecodeError, KvspError
from moqt.receiving.receiver import IncomingStream, Via
from moqt.requests import RequestState
from moqt.session import Session
from moqt.track.stored import Buffer
from moqt.values.codes import ParameterType, RequestErrorCode
from moqt.values.errors import MoqtError, RequestError, SessionClosed
from moqt.values.messages import RangeFilter
from moqt.values.names import FullTrackName, Location
from moqt.wire.objects import ObjectHeader

_LOCAL_ERRORS: Final = (KvcsError, KvspError, ValueError, LookupError, OSError)
"""What assembling may raise; each ends the retrieval and is handed to the application."""


class Retrieval:
    """One publication, asked for on one session.

    `start`, then `poll` at once, whenever `changed` was called, and when the time it
    returned has come. Layers come in `ready`; at the end `finished` is true or `error` set:
    VerificationFailed, PublisherLost, NotAuthorized, or what the destination raised.
    `close` cancels every request and lets go of the arrays.
    """

    def __init__(
        self,
        session: Session,
        assembly: Assembly,
        stats: Stats,
        *,
        mode: Mode = Mode.AUTO,
        require_listed: bool = False,
        changed: Callable[[], None] = lambda: None,
        hold: bool = False,
        layers: range | None = None,
        again: bool = False,
        beside: Beside | None = None,
    ) -> None:
        """With `hold` no more than `start` asks for is asked for before `go`. With `layers` it is
        a part of another one: `ask_for` says what is asked for, and the arrays are not its own.
        `again`: the assembly has what another session brought. `beside` reads long manifests. With
        `require_listed` it has not finished before the manifest has listed what it can."""
        self.session = session
        self.assembly = assembly
        self.stats = stats
        self.error: Exception | None = None
        self.layers = assembly.layers if layers is None else layers
        self.lanes: Spread | None = None
        """Who asks for the data of complete segments, on several connections."""
        self._is_part = layers is not None
        self._again = again
        self.over = False
        """Whether nothing is to be done any more: there is an error, or it was closed."""
        self._seen, self.quiet = -1, 0.0
        """`arrivals` when it was last looked at; silent since `quiet`."""
        self._mode = mode
        self._require_listed = require_listed
        self._changed = changed
        self._closed = False
        self._tracks: dict[DataTrack, TrackState] = {}
        self._requests = Later()
        self._asked = 0
        """Segments whose tracks were asked for, the first ones."""
        self._arrived = 0
        """`arrivals` on tracks of segments that are whole."""
        self._beside = beside
        self._versions = ManifestVersions(session, assembly, self, beside, again=again)
        self._early: Early | None = None
        self._versions_over = False
        """No further version of the manifest will come, or be waited for."""
        self._confirm_due: float | None = None
        self._filters_refused, self._hold = False, hold

    # -- for the shell -------------------------------------------------------------------

    @property
    def ready(self) -> deque[Layer]:
        """Usable layers, in order, to be taken from the left."""
        return self.assembly.ready

    @property
    def arrivals(self) -> int:
        """Answers, streams and parts of Objects that have come on data tracks."""
        more = 0 if self.lanes is None else self.lanes.arrivals
        return more + self._arrived + sum(state.arrivals for state in self._tracks.values())

    @property
    def manifest_arrivals(self) -> int:
        """Answers and parts of manifests that have come."""
        return self._versions.arrivals

    @property
    def reading(self) -> bool:
        """Whether a version of the manifest has come and is being read."""
        return self._versions.reading

    @property
    def idle(self) -> bool:
        """Whether nothing that was asked for is still to come."""
        return not self._requests and not any(
            state.fetch is not None or state.suspects for state in self._tracks.values()
        )

    @property
    def finished(self) -> bool:
        """Every layer has been handed over, and the manifest has confirmed what it can."""
        if self.error is not None or not self.assembly.whole:
            return False
        given_up = self._versions_over and not self._require_listed
        return self.assembly.confirmed or given_up or self.assembly.settled

    def start(self, *, early: bool = False) -> None:
        """Ask for the manifest; all else follows from it. `early`: and for the beginning of the
        first layer, to be held until it has come, unless a subscription is to bring it."""
        self._versions.ask()
        if early and self._mode is not Mode.LIVE:
            self._early = Early(self.session, self.assembly)
            self.later(0.0, self._early.ask)

    def go(self, over_http: int = 0, kept: Kept | None = None) -> None:
        """Ask for the data, now that there is a manifest. Arguments as of `Assembly.prepare`."""
        self._hold = False
        try:
            self.assembly.prepare(over_http, kept)
        except _LOCAL_ERRORS as error:
            self.fail(error)
            return
        self.stats.mode = Mode.FETCH.value
        self._ask_for_data()

    def poll(self, now: float) -> float | None:
        """Do what is due. Returns when to come back at the latest, None for no such time."""
        if self.over or self._takes_up():
            return None if self.over else now
        self._ask_for_data()
        self._open_requests(now)
        times: list[float | None] = [None if self.lanes is None else self.lanes.poll(now)]
        times += self._requests.times
        arrivals = self.arrivals
        if arrivals != self._seen:
            self._seen, self.quiet = arrivals, now
        if self.assembly.growing and self._versions_over:
            self._end_growth()
        if self.assembly.whole:
            if not self.finished and not self._require_listed:
                if self._confirm_due is None:
                    self._confirm_due = now + waits.CONFIRM_GRACE
                if now >= self._confirm_due:
                    self._versions_over = True
                else:
                    times.append(self._confirm_due)
        else:
            for state in self._tracks.values():
                times.append(state.early_due(now))
                for act in (self._notice_silence, self._recover):
                    times.append(act(state, now) if self.error is None else None)
        if (
            self._versions_over
            and not self.assembly.confirmed
            and (self.assembly.manifest_refused or (self._require_listed and not self.finished))
        ):
            lost = not (self._versions.said_to_end or self.assembly.manifest_refused)
            self.fail(
                (PublisherLost if lost and not self.assembly.complete else VerificationFailed)(
                    f"{self._publication}: the manifest does not list every layer that came"
                )
            )
        return min((at for at in times if at is not None), default=None)

    def _takes_up(self) -> bool:
        """Whether there is more of what an earlier retrieval left, after what is looked at now."""
        try:
            self.assembly.take_up_more()
        except _LOCAL_ERRORS as error:
            self.fail(error)
        return self.assembly.taking_up

    def ask_again(self, layer: int, segment: int) -> None:
        """Objects of `layer` of a segment that were to come another way will not."""
        states = [state for state in self._tracks.values() if state.track.segment == segment]
        for state in states:
            self._suspect(state, (layer,))
        if not states and self.lanes is not None:
            self.lanes.ask_again(layer, segment)

    def close(self) -> None:
        """Cancel every request and release every array; harmless when repeated."""
        if self._closed:
            return
        self._closed = self.over = True
        if self.lanes is not None:
            self.lanes.close()
        self._requests.clear()
        for state in self._tracks.values():
            state.cancel()
        self._versions.cancel()
        if self._early is not None:
            self._early.cancel()
        if not self._is_part:
            self.assembly.release()

    def again_on(self, session: Session) -> Retrieval:
        """The rest of it, on another session; this one is over. `start` it."""
        self._is_part = True  # the arrays are those of the other one from now on
        self.close()
        again = Retrieval(
            session,
            self.assembly,
            self.stats,
            mode=self._mode,
            require_listed=self._require_listed,
            changed=self._changed,
            again=True,
            beside=self._beside,
        )
        again._versions.track = self._versions.track
        return again

    # -- requests ------------------------------------------------------------------------

    def later(self, delay: float, make: Callable[[], None]) -> None:
        """Make a request in `delay` seconds, or later when there is no stream for it."""
        self._requests.add(delay, make)
        self._changed()

    def _open_requests(self, now: float) -> None:
        """Make the requests whose time has come."""
        try:
            self._requests.make_due(now)
        except SessionClosed as error:
            self.relay_lost(error)

    def _filters(self, track: DataTrack) -> tuple[RangeFilter, ...]:
        """OBJECTID_FILTER for the blocks needed, when the peer takes filters."""
        wanted, takes = self.assembly.wanted(track), self.session.peer_max_filter_ranges
        if self._filters_refused or not takes or len(wanted) == self.assembly.entry(track).blocks:
            return ()
        ranges = ((wanted.start, wanted.stop - 1),)
        return (RangeFilter(ParameterType.OBJECTID_FILTER, ranges=ranges),)

    @property
    def _publication(self) -> str:
        return f"publication {self.assembly.namespace.publication_id.hex()}"

    # -- the manifest --------------------------------------------------------------------

    def version_received(self, location: Location, read: Read, after: Manifest | None) -> None:
        if self.over:
            return
        first = self.assembly.manifest is None
        try:
            self.assembly.manifest_read(location, read, after)
        except _LOCAL_ERRORS as error:
            self.fail(error)
            return
        for track, refused in self.assembly.take_back():
            if track in self._tracks:
                self._lost(self._tracks[track], refused)
            else:
                self.ask_again(refused.group, track.segment)
        if first and self.assembly.manifest is not None and not self._hold:
            self.go()
        self._changed()

    def versions_over(self) -> None:
        """No further version of the manifest will come."""
        self._versions_over = True
        self._changed()

    # -- data ----------------------------------------------------------------------------

    def _ask_for_data(self) -> None:
        """Ask for the tracks of the next segments, and for none of those that are whole."""
        assembly = self.assembly
        if self._hold or self._is_part or not assembly.total or assembly.taking_up:
            return
        while self._tracks and next(iter(self._tracks)).segment < assembly.segment:
            state = self._tracks.pop(next(iter(self._tracks)))
            self._arrived += state.arrivals
            state.cancel()
        while self._asked < min(len(assembly.segments), assembly.segment + waits.SEGMENTS_AT_ONCE):
            segment, self._asked = self._asked, self._asked + 1
            if segment < assembly.segment:
                continue
            self.ask_for(segment, again=self._again)
        if self._early is not None:
            self._early.cancel()
            self._early = None

    def ask_for(self, segment: int, *, again: bool = False) -> None:
        """Ask for a segment; `again` for what somebody was asked for before and is missing."""
        assembly, tracks = self.assembly, self.assembly.segments[segment]
        needed = [layer for layer in self.layers if assembly.needs(layer, segment)]
        whole = all(assembly.entry(track).complete for track in tracks)
        if self.lanes is not None and whole and self._mode is not Mode.LIVE:
            self.lanes.begin(segment, needed, again=again)
            return
        for track in tracks if needed else ():
            self._ask_for(track, needed, again=again)

    def _ask_for(self, track: DataTrack, needed: list[int], *, again: bool) -> None:
        assembly = self.assembly
        name = FullTrackName(assembly.namespace.fields, track.name)
        octets, opener = max_object_octets(assembly, track), assembly.terms.opener(name)
        state = self._tracks[track] = TrackState(track, name, needed[0], octets, opener)
        entry, blocks = assembly.entry(track), assembly.wanted(track).stop
        if self._early is not None:
            self._early.begin(state, blocks, self, whole=blocks == entry.blocks)
        if again or self.stats.objects_resumed:
            # what exists and is missing, and no more of it, as after a loss
            state.ends, state.fill_over = blocks - 1, True
            state.fetched = again
            self._suspect(state, needed)
        if self._mode is Mode.FETCH or (self._mode is Mode.AUTO and entry.complete):
            if state.ends is not None:
                return
            end = Location(needed[-1], blocks - 1)
            if state.first <= end:
                self._fetch(state, state.first, end, again=False)
        else:
            self.stats.mode = Mode.LIVE.value
            self._subscribe(state)

    def _end_growth(self) -> None:
        """No version of the manifest will name another segment."""
        assembly = self.assembly
        if self._versions.ended:
            assembly.growing = False
        elif assembly.caught_up:
            self.fail(PublisherLost(f"{self._publication}: its publisher was lost before it ended"))

    def _subscribe(self, state: TrackState, delay: float = 0.0) -> None:
        state.subscribed = True

        def make() -> None:
            if state.track.segment < self.assembly.segment:
                return
            parameters = state.subscription(self._filters(state.track))
            receiver = LiveReceiver(self, state)
            state.requests.append(self.session.subscribe(state.name, receiver, parameters))

        self.later(delay, make)

    def _fetch(
        self, state: TrackState, start: Location, end: Location, *, again: bool, delay: float = 0.0
    ) -> None:
        receiver = state.fetch = FetchReceiver(self, state, start, end, again=again)
        blocks = self.assembly.wanted(state.track).stop

        def make() -> None:
            if state.fetch is not receiver or state.track.segment < self.assembly.segment:
                return
            state.requests = [r for r in state.requests if r.state is not RequestState.CLOSED]
            parameters = state.fetching(start, end, blocks, self._filters(state.track))
            receiver.request = self.session.fetch(state.name, receiver, parameters)
            state.requests.append(receiver.request)

        self.later(delay, make)

    def object_received(
        self, state: TrackState, header: ObjectHeader, parts: list[Buffer], *, again: bool = False
    ) -> bool:
        """An Object of a data track; True when it was needed and good."""
        if self.over:
            return False
        location = header.location
        if state.opener is not None:
            try:
                parts = [state.opener.open(*location, header.priority, header.properties, parts)]
            except DecodeError as error:
                self.object_bad(state, location, error.name)
                return False
        try:
            verdict = self.assembly.object_received(
                state.track, location, parts, again=again or state.fetched
            )
        except _LOCAL_ERRORS as error:
            self.fail(error)
            return False
        if verdict is Verdict.BAD:
            self._lost(state, location)
        elif verdict is Verdict.NEW:
            state.lost.discard(location)
            if self.assembly.ready:
                self._changed()
        return verdict is Verdict.NEW

    def object_bad(self, state: TrackState, location: Location, reason: DecodeErrorName) -> None:
        """An Object that cannot be one of this track is thrown away unread."""
        if self.over:
            return
        try:
            refused = self.assembly.object_refused(state.track, location, reason)
        except _LOCAL_ERRORS as error:
            self.fail(error)
            return
        if refused:
            self._lost(state, location)

    def live_accepted(self, state: TrackState, largest: Location | None) -> None:
        state.accepted(largest)
        if state.fill_over and not self.over:
            self._suspect(state, self.assembly.layers)  # a fill may be faster than the answer
        self._changed()

    def live_stream_ended(
        self, state: TrackState, stream: IncomingStream, error: int | None
    ) -> None:
        if self.over:
            return
        if stream.via is Via.FILL:
            state.fill_ended(error)
            self._suspect(state, self.assembly.layers)
        elif stream.subgroup is not None:
            group = stream.subgroup.group
            state.group_ended(group, error, waits.REOPEN_GRACE)
            self._suspect(state, (group,))

    def live_over(self, state: TrackState, why: str) -> None:
        """The subscription has ended, in whatever way: what is missing is asked for."""
        if self.over:
            return
        state.subscribed, state.silent = False, None
        state.delay, state.cause = 0.0, why
        self._suspect(state, self.assembly.layers)

    def live_failed(self, state: TrackState, error: MoqtError) -> None:
        if not self._refused(error):
            delay = self._delay_again(state, error)
            if delay is not None:
                self._subscribe(state, delay)
            else:
                self.live_over(state, str(error))

    def fetch_accepted(self) -> None:
        self._changed()

    def fetch_failed(self, receiver: FetchReceiver, error: MoqtError) -> None:
        if self._refused(error):
            return
        state = receiver.state
        delay = self._delay_again(state, error)
        if delay is None:
            self.fetch_over(receiver, str(error))
        elif state.fetch is receiver:
            self._fetch(state, receiver.start, receiver.end, again=receiver.again, delay=delay)

    def fetch_over(self, receiver: FetchReceiver, why: str) -> None:
        """A FETCH brought what it will bring."""
        state = receiver.state
        if self.over or state.fetch is not receiver:
            return
        state.fetch = None
        state.failures = 0 if receiver.useful else state.failures + 1
        state.cause = why
        if state.failures < len(waits.RECOVERY_DELAYS):
            state.delay = waits.RECOVERY_DELAYS[state.failures]
        self._suspect(state, range(receiver.start.group, receiver.end.group + 1))

    def early_over(self, state: TrackState) -> None:
        """The request that was made before the manifest brought what it will bring."""
        if not self.over:
            self._suspect(state, self.assembly.layers[:1])

    # -- recovery ------------------------------------------------------------------------

    def _lost(self, state: TrackState, location: Location) -> None:
        state.lost.add(location)
        self._suspect(state, (location.group,))

    def _suspect(self, state: TrackState, layers: Iterable[int]) -> None:
        needs, segment, ours = self.assembly.needs, state.track.segment, self.layers
        state.suspects.update(n for n in layers if n in ours and needs(n, segment))
        self._changed()

    def _recover(self, state: TrackState, now: float) -> float | None:
        """Fetch what is missing and nobody is going to bring; returns when to come back."""
        if state.delay:
            state.due, state.delay = max(state.due, now + state.delay), 0.0
        if state.fetch is not None or not state.suspects:
            return None
        if now < state.due:
            return state.due
        span = state.uncovered(self.assembly)
        if span is None:
            return None
        if state.failures >= len(waits.RECOVERY_DELAYS):
            if state.silent is not None and now < state.silent + waits.PATIENCE:
                # It stands: what has not been published so far, no FETCH can bring.
                state.failures -= 1
                state.due = now + waits.RECOVERY_PAUSE
                return state.due
            self._give_up(state, span[0])
            return None
        self.stats.recoveries += 1
        state.fetched = True
        self._fetch(state, *span, again=True)
        self._open_requests(now)
        return min(self._requests.times, default=None)

    def _notice_silence(self, state: TrackState, now: float) -> float | None:
        """Ask again for what exists and does not come; returns when to look again."""
        fetch = state.fetch
        if not state.owes(self.assembly.entry(state.track).complete):
            return None
        if now < self.quiet + STALL:
            return self.quiet + STALL
        why = f"nothing came for {STALL:g} s"
        if fetch is not None:
            assert fetch.request is not None, "it was answered"
            fetch.request.cancel()
            self.fetch_over(fetch, why)
        else:
            if self.assembly.entry(state.track).complete:
                state.silent = now
            else:
                state.fill_over = True
            state.cause = why
            self._suspect(state, self.assembly.layers)
        return None

    def _give_up(self, state: TrackState, missing: Location) -> None:
        if self.assembly.bad.reasons:
            self.fail(VerificationFailed(str(self.assembly.bad)))
            return
        complete = self.assembly.entry(state.track).complete
        why = state.why_missing(complete, by_fetch=self._mode is Mode.FETCH)
        where = f"{state.track} has no layer {missing.group}, block {missing.object}"
        self.fail(PublisherLost(f"{self._publication}: {where}: {why}"))

    def _refused(self, error: MoqtError) -> bool:
        """Deal with what no recovery on this session can help."""
        if self.over or self.assembly.whole:
            return True
        if not_authorized(error):
            self.fail(NotAuthorized(f"the data is refused: {error}"))
        elif isinstance(error, SessionClosed):
            self.relay_lost(error)
        elif isinstance(error, RequestError) and error.code == RequestErrorCode.MALFORMED_TRACK:
            self.fail(VerificationFailed(f"{self._publication}: {error}"))
        return self.error is not None

    def _delay_again(self, state: TrackState, error: MoqtError) -> float | None:
        """Seconds before a refused request is made again; None when it is not."""
        delay = retry_delay(error)
        if (
            isinstance(error, RequestError)
            and error.code == RequestErrorCode.INVALID_FILTER
            and self._filters(state.track)
        ):
            self._filters_refused = True
            return NO_STREAM_DELAY if delay is None else delay
        return delay

    def relay_lost(self, error: SessionClosed) -> None:
        assembly = self.assembly
        if self.lanes and not (self._tracks or assembly.growing) and assembly.complete:
            self.versions_over()  # and other connections may bring the data
        else:
            self.fail(PublisherLost(f"the relay was lost: {error}"))

    def fail(self, error: Exception) -> None:
        """Nothing more can be had of this publication on this session."""
        if not self.over:
            self.error, self.over = error, True
            self._changed()
