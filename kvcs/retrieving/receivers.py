"""Who the requests for data bring their answers, streams and Objects to.

Callbacks of the session: they note in a track's `TrackState` what has come and who is still to
bring what, and tell the retrieval, which decides (`DataNeeds`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from kvcs.names.codes import PAYLOAD_HEADER_OCTETS, Component
from kvcs.names.encoding import max_data_octets
from kvcs.names.tracks import DataTrack, subscriber_priority
from kvcs.retrieving.assembly import Assembly
from kvcs.trust.sealing import OVERHEAD_OCTETS, TrackOpener
from kvsp.names.codes import Codec, DecodeErrorName
from moqt.receiving.receiver import (
    AcceptedFetch,
    AcceptedSubscribe,
    IncomingStream,
    ObjectReceiver,
)
from moqt.requests import OutgoingFetch, OutgoingSubscribe, RequestState
from moqt.session import Session
from moqt.track.stored import Buffer
from moqt.values.codes import GroupOrder, PublishDoneCode, StreamErrorCode, code_name
from moqt.values.errors import MoqtError, escaped
from moqt.values.messages import LocationFilter, Parameters, RangeFilter
from moqt.values.names import FullTrackName, Location
from moqt.wire.objects import ObjectHeader, Payload

STALL: Final = 2.0
"""Seconds of silence on every data track after which what should have come is asked for again.

A stream that is reset before its header came leaves no trace: nobody can tell whose it
was. Only Objects known to exist are meant, never those still to be produced."""

EARLY_OCTETS: Final = 4 << 20
"""Octets that are asked for before the manifest is known, of all tracks together; as much may be
held, and is wasted when the publication is not the one that is retrieved,"""
EARLY_OBJECTS: Final = 512
"""and Objects of each track."""


class DataNeeds(Protocol):
    """What the receivers of data tracks need of the retrieval that made their requests."""

    def object_received(
        self, state: TrackState, header: ObjectHeader, parts: list[Buffer], *, again: bool = False
    ) -> bool:
        """An Object, whole; True when it was needed and good."""
        ...

    def object_bad(self, state: TrackState, location: Location, reason: DecodeErrorName) -> None:
        """An Object that cannot be one of this track is thrown away unread."""

    def live_accepted(self, state: TrackState, largest: Location | None) -> None:
        """SUBSCRIBE_OK, with the largest Object there was."""

    def live_stream_ended(
        self, state: TrackState, stream: IncomingStream, error: int | None
    ) -> None:
        """FIN (`error` None) or a reset of a stream of the subscription or its fill."""

    def live_over(self, state: TrackState, why: str) -> None:
        """The subscription has ended."""

    def live_failed(self, state: TrackState, error: MoqtError) -> None:
        """The subscription was refused, or the session has ended."""

    def early_over(self, state: TrackState) -> None:
        """The request that was made before the manifest brought what it will bring."""

    def fetch_accepted(self) -> None:
        """FETCH_OK."""

    def fetch_over(self, receiver: FetchReceiver, why: str) -> None:
        """The FETCH brought what it will bring."""

    def fetch_failed(self, receiver: FetchReceiver, error: MoqtError) -> None:
        """The FETCH was refused, or the session has ended."""


class Spread(Protocol):
    """What a retrieval needs of who asks for its data on several connections, and fails it when
    that cannot go on."""

    @property
    def arrivals(self) -> int: ...

    def begin(self, segment: int, layers: Sequence[int], *, again: bool = False) -> None: ...

    def ask_again(self, layer: int, segment: int) -> None: ...

    def poll(self, now: float) -> float | None: ...

    def close(self) -> None: ...


def max_object_octets(assembly: Assembly, track: DataTrack) -> int:
    """The most octets that the payload of an Object of a track of a known codec can have."""
    sealed = OVERHEAD_OCTETS if assembly.terms.content_keys else 0
    return PAYLOAD_HEADER_OCTETS + max_data_octets(assembly.descriptor, track) + sealed


class TrackState:
    """What is asked for on one data track, and so, what is nobody's to bring any more."""

    def __init__(
        self,
        track: DataTrack,
        name: FullTrackName,
        first_layer: int,
        max_object_octets: int,
        opener: TrackOpener | None = None,
    ) -> None:
        self.track = track
        self.name = name
        self.first = Location(first_layer, 0)
        self.max_object_octets = max_object_octets
        self.opener = opener
        """What its Objects are opened with; None when they come in clear."""
        self.arrivals = 0
        """Answers, streams and parts of Objects that have come."""
        self.subscribed = False
        """There is a subscription, answered or not."""
        self.silent: float | None = None
        """Since when the subscription stands and brings nothing: what it owes is asked for, too."""
        self.answered = False
        self.largest: Location | None = None
        """Largest Object at the time of the subscription: up to it is the fill's part."""
        self.fill_open = False
        self.fill_over = False
        self.brought: set[int] = set()
        """Groups of which the subscription has brought all that it will."""
        self.broken: set[int] = set()
        """Groups whose subscription stream was reset and not continued so far."""
        self.lost: set[Location] = set()
        """Objects that came and were bad: nobody sends them again unasked."""
        self.suspects: set[int] = set()
        """Layers in which Objects may be missing that nobody is going to bring."""
        self.fetch: FetchReceiver | None = None
        self.early: EarlyFetch | None = None
        """The request that was made before the manifest was known, until it is over."""
        self.requests: list[OutgoingSubscribe | OutgoingFetch] = []
        """Those that were made and may not be over."""
        self.fetched = False
        """Something was asked for again: what comes twice is no fault of the peer."""
        self.ends: int | None = None
        """The last Object ID needed of each Group, when much is there already: what is missing
        is asked for, and nothing between it."""
        self.failures = 0
        self.delay = 0.0
        self.due = 0.0
        self.cause = ""

    def cancel(self) -> None:
        """Cancel every request of the track; harmless when repeated."""
        if self.early is not None:
            self.early.cancel()
        for request in self.requests:
            if request.state is not RequestState.CLOSED:
                request.cancel()
        self.requests.clear()

    def accepted(self, largest: Location | None) -> None:
        self.answered = True
        self.largest = largest
        if largest is None or largest < self.first:
            self.fill_over = True

    def early_due(self, now: float) -> float | None:
        """When the request that was made early counts as hung; then it is given up, whatever else
        comes meanwhile, and what it owes is asked for again."""
        if self.early is None:
            return None
        due = self.early.silent_at(now)
        if now < due:
            return due
        self.early.cancel()
        return None

    def speaks(self) -> None:
        """The subscription brings something (again)."""
        if self.silent is not None:
            self.silent, self.failures = None, 0

    def fill_ended(self, error: int | None) -> None:
        """FIN (`error` None) or a reset of the stream of the fill."""
        self.fill_over = True
        if error is not None:
            self.cause = f"the fill was reset with {code_name(StreamErrorCode, error)}"

    def group_ended(self, group: int, error: int | None, grace: float) -> None:
        """The same of a stream of the subscription; one that was reset may be continued on
        another within `grace` seconds."""
        if error is None:
            self.brought.add(group)
            return
        self.broken.add(group)
        self.delay = max(self.delay, grace)
        name = code_name(StreamErrorCode, error)
        self.cause = f"the stream of layer {group} was reset with {name}"

    def unasked(self, layer: int, blocks: int) -> list[range]:
        """The Objects of a layer, of the first `blocks`, that nobody is still to bring: ascending,
        and none touches the one before. Takes the same time however many they are."""
        early = self.early.covers(layer) if self.early is not None else 0
        start, edge = min(early, blocks), self._of_the_fill(layer, blocks)
        ranges = [range(start, blocks)]
        if self.subscribed and self.silent is None:
            fill = range(start, edge) if self.answered and self.fill_over else range(0)
            cut = self.answered and (layer in self.brought or layer in self.broken)
            rest = range(max(start, edge), blocks) if cut else range(0)
            ranges = [fill, rest]
        if self.lost:  # few: they were bad
            bad = [each.object for each in self.lost if each.group == layer]
            ranges += [range(each, each + 1) for each in bad if each < blocks]
        return joined(ranges)

    def _of_the_fill(self, layer: int, blocks: int) -> int:
        """How many of the first `blocks` Objects of a layer there were when the subscription
        began, so that its fill brings them."""
        if self.largest is None or layer > self.largest.group:
            return 0
        return blocks if layer < self.largest.group else min(blocks, self.largest.object + 1)

    def owes(self, complete: bool) -> bool:
        """Whether those who were asked bring nothing of what there is: all, when `complete`."""
        if self.fetch is not None:
            return self.fetch.answered and not self.fetch.opened
        if not self.subscribed or self.silent is not None or not self.answered:
            return False
        return complete or not (self.fill_over or self.fill_open)

    def why_missing(self, complete: bool, *, by_fetch: bool) -> str:
        """Why an Object of it cannot be had, in words."""
        if complete:
            why = "no publisher is left to bring what the relay does not have"
        elif by_fetch:
            why = "it is still being produced: retrieve it live"
        else:
            why = "its publisher stopped or was lost before it was complete"
        return f"{why} ({self.cause})"

    def subscription(self, filters: tuple[RangeFilter, ...]) -> Parameters:
        """Of a SUBSCRIBE for what is to come, with a fill of what there is, unless some of it is
        held: that is fetched."""
        first = Parameters(location_filter=LocationFilter.absolute_start(*self.first))
        return Parameters(
            location_filter=LocationFilter.next_object(),
            fill_parameters=first if self.ends is None else None,
            group_order=GroupOrder.ASCENDING,
            range_filters=filters,
            subscriber_priority=subscriber_priority(self.track),
        )

    def fetching(
        self, start: Location, end: Location, needed: int, filters: tuple[RangeFilter, ...]
    ) -> Parameters:
        """Of a FETCH from `start` to `end`; of each Group so many Objects are `needed`."""
        several = start.object == 0 or end.group > start.group
        return Parameters(
            location_filter=LocationFilter.through(start, end.group)
            if several and end.object == needed - 1
            else LocationFilter.range(start, end),
            group_order=GroupOrder.ASCENDING,
            range_filters=filters,
            subscriber_priority=subscriber_priority(self.track),
        )

    def uncovered(self, assembly: Assembly) -> tuple[Location, Location] | None:
        """First and last Object of the first run of layers with Objects to be asked for."""
        first = last = None
        for layer in sorted(self.suspects):
            owed = [
                (run, within)
                for within in self.unasked(layer, assembly.wanted(self.track).stop)
                if (run := assembly.missing(self.track, layer, within))
            ]
            if not owed:
                self.suspects.discard(layer)
                if last is not None:
                    break
                continue
            if last is not None and layer != last.group + 1:
                break
            run, _ = owed[0]
            end = run.stop - 1
            if self.ends is None:
                end = assembly.last_missing(self.track, layer, owed[-1][1])
            elif last is not None and (last.object, run.start) != (self.ends, 0):
                break  # it does not follow
            if first is None:
                first = Location(layer, run.start)
            last = Location(layer, end)
        return None if first is None or last is None else (first, last)


def joined(ranges: Iterable[range]) -> list[range]:
    """The same numbers in ascending ranges, of which none touches another."""
    found: list[range] = []
    for each in sorted(filter(None, ranges), key=lambda each: each.start):
        if found and each.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, each.stop))
        else:
            found.append(each)
    return found


class DataReceiver(ObjectReceiver):
    """A request for Objects of a data track: longer ones than they can be are not kept."""

    def __init__(self, retrieval: DataNeeds, state: TrackState) -> None:
        self.retrieval = retrieval
        self.state = state
        self.max_object_octets = state.max_object_octets

    def object_too_large(self, stream: IncomingStream, header: ObjectHeader) -> None:
        self.retrieval.object_bad(self.state, header.location, DecodeErrorName.TRAILING_OCTETS)

    def object_arrived(
        self, stream: IncomingStream, header: ObjectHeader, payload: Payload
    ) -> bool:
        if header.length:
            self.state.arrivals += 1
        return super().object_arrived(stream, header, payload)

    def object_part(self, stream: IncomingStream, part: Buffer) -> None:
        super().object_part(stream, part)
        self.state.arrivals += 1


class LiveReceiver(DataReceiver):
    """The subscription to a data track, with its fill."""

    def subscribe_accepted(self, request: AcceptedSubscribe) -> None:
        self.state.arrivals += 1
        if self.state.opener is not None:
            self.state.opener.track_properties(request.properties)
        self.retrieval.live_accepted(self.state, request.largest)

    def stream_opened(self, stream: IncomingStream) -> None:
        self.state.arrivals += 1
        self.state.speaks()
        if stream.subgroup is not None:
            self.state.broken.discard(stream.subgroup.group)
        else:
            self.state.fill_open = True

    def object_whole(
        self, stream: IncomingStream, header: ObjectHeader, parts: list[Buffer]
    ) -> None:
        self.state.speaks()
        if not header.status:
            self.retrieval.object_received(self.state, header, parts)

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        self.retrieval.live_stream_ended(self.state, stream, error)

    def subscription_done(self, code: int, reason: str) -> None:
        why = f"the subscription ended with {code_name(PublishDoneCode, code)}"
        self.retrieval.live_over(self.state, f"{why}: {escaped(reason)}" if reason else why)

    def request_failed(self, error: MoqtError) -> None:
        self.retrieval.live_failed(self.state, error)


class FetchReceiver(DataReceiver):
    """A FETCH of a part of a data track, [start, end]."""

    def __init__(
        self,
        retrieval: DataNeeds,
        state: TrackState,
        start: Location,
        end: Location,
        *,
        again: bool,
    ) -> None:
        super().__init__(retrieval, state)
        self.start = start
        self.end = end
        self.again = again
        self.request: OutgoingFetch | None = None
        """None while it waits to be made."""
        self.useful = False
        """It brought an Object that was needed."""
        self.answered = False
        self.opened = False

    def fetch_accepted(self, request: AcceptedFetch) -> None:
        self.answered = True
        self.state.arrivals += 1
        self.retrieval.fetch_accepted()

    def stream_opened(self, stream: IncomingStream) -> None:
        self.opened = True

    def object_whole(
        self, stream: IncomingStream, header: ObjectHeader, parts: list[Buffer]
    ) -> None:
        if not header.status and self.retrieval.object_received(
            self.state, header, parts, again=self.again
        ):
            self.useful = True

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        if error is None:
            self.retrieval.fetch_over(self, "the fetch ended without them")
        else:
            name = code_name(StreamErrorCode, error)
            self.retrieval.fetch_over(self, f"the fetch was reset with {name}")

    def request_failed(self, error: MoqtError) -> None:
        self.retrieval.fetch_failed(self, error)


class Early:
    """The beginning of the first layer, on its way before the manifest has come.

    How many blocks the first segment has, the Anchor Key tells; how long an Object is, the
    descriptor. So the first Objects are asked for with the manifest, of the tracks that a
    publication nearly always has, and held. Once the manifest has shown that they are of our
    tokens they are judged as those that come later; until then nothing is done with them.
    """

    def __init__(self, session: Session, assembly: Assembly) -> None:
        self._session = session
        self._requests: dict[DataTrack, EarlyFetch] = {}
        keys, anchor = assembly.keys or (), assembly.namespace.anchor_key
        needed = assembly.most(keys.index(anchor) + 1) if anchor in keys else 0
        for component in (Component.K, Component.V):
            track = DataTrack(component, Codec.RAW.label, 0)
            octets = max_object_octets(assembly, track)
            blocks = min(needed, EARLY_OBJECTS, EARLY_OCTETS // (2 * octets))
            if blocks:
                name = FullTrackName(assembly.namespace.fields, track.name)
                self._requests[track] = EarlyFetch(name, assembly.layers.start, blocks, octets)

    def ask(self) -> None:
        """Make the requests. Raises moqt RequestError, SessionClosed as `Session.fetch`."""
        for request in self._requests.values():
            if not request.made:
                request.ask(self._session)

    def begin(self, state: TrackState, blocks: int, retrieval: DataNeeds, *, whole: bool) -> None:
        """The manifest is there, and `blocks` of the track are needed from `state.first` on, all
        that a Group has (`whole`) or not: hand over what came, and what comes. What is to be asked
        for now begins at `state.first`."""
        request = self._requests.pop(state.track, None)
        if request is None:
            return
        if state.first == request.start and request.made:
            request.begin(state, blocks, retrieval, whole=whole)
        else:
            request.cancel()

    def cancel(self) -> None:
        """Cancel what no track has begun with; harmless when repeated."""
        for request in self._requests.values():
            request.cancel()
        self._requests.clear()


class EarlyFetch(ObjectReceiver):
    """The FETCH of the first Objects of one track."""

    def __init__(self, name: FullTrackName, layer: int, blocks: int, octets: int) -> None:
        self.start = Location(layer, 0)
        self.over = False
        """It brought what it will bring."""
        self.max_object_octets = octets
        self._name = name
        self._blocks = blocks
        self._request: OutgoingFetch | None = None
        self._held: list[tuple[ObjectHeader, list[Buffer]]] = []
        self._state: TrackState | None = None
        self._retrieval: DataNeeds | None = None
        self._arrivals = self._seen = 0
        """Answers and parts of Objects that have come, and how many had when last looked at."""
        self._since: float | None = None

    def covers(self, layer: int) -> int:
        """How many Objects of a layer it is to bring, the first ones."""
        return self._blocks if layer == self.start.group else 0

    def silent_at(self, now: float) -> float:
        """When it counts as hung, unless something comes of it before."""
        if self._since is None or self._arrivals != self._seen:
            self._since, self._seen = now, self._arrivals
        return self._since + STALL

    @property
    def made(self) -> bool:
        """Whether the request was made; until then it may wait for a stream."""
        return self._request is not None

    def ask(self, session: Session) -> None:
        """Make the request. Raises as `Session.fetch`."""
        end = Location(self.start.group, self._blocks - 1)
        self._request = session.fetch(
            self._name,
            self,
            Parameters(
                location_filter=LocationFilter.range(self.start, end),
                group_order=GroupOrder.ASCENDING,
            ),
        )

    def begin(self, state: TrackState, blocks: int, retrieval: DataNeeds, *, whole: bool) -> None:
        """See `Early.begin`."""
        self._state, self._retrieval = state, retrieval
        covered = self._blocks
        if self.over:
            # a part that follows from the first is as good as all: the rest is asked for as ever
            came = {header.object for header, _ in self._held}
            covered = next(n for n in range(self._blocks + 1) if n not in came)
        else:
            state.early = self
        group = self.start.group
        if whole or covered < blocks:
            # with the end of the Group, which tells relays that they have all of it
            state.first = Location(group, min(covered, blocks))
        else:
            state.first = Location(group + 1, 0)
        held, self._held = self._held, []
        for header, parts in held:
            retrieval.object_received(state, header, parts)

    def cancel(self) -> None:
        """Nothing of it is needed any more; harmless when repeated."""
        request = self._request
        if request is not None and request.state is not RequestState.CLOSED:
            request.cancel()
        self._held.clear()
        self._end()

    # -- what it brings ------------------------------------------------------------------

    def object_arrived(
        self, stream: IncomingStream, header: ObjectHeader, payload: Payload
    ) -> bool:
        self._heard()
        return super().object_arrived(stream, header, payload)

    def object_part(self, stream: IncomingStream, part: Buffer) -> None:
        super().object_part(stream, part)
        self._heard()

    def object_whole(
        self, stream: IncomingStream, header: ObjectHeader, parts: list[Buffer]
    ) -> None:
        if header.status or self.over or len(self._held) >= self._blocks:
            return
        if self._state is None or self._retrieval is None:
            self._held.append((header, parts))
            return
        self._retrieval.object_received(self._state, header, parts)

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        self._end()

    def request_failed(self, error: MoqtError) -> None:
        self._end()

    def _heard(self) -> None:
        self._arrivals += 1
        if self._state is not None:
            self._state.arrivals += 1

    def _end(self) -> None:
        if self.over:
            return
        self.over = True
        if self._state is not None and self._retrieval is not None:
            self._state.early = None
            self._retrieval.early_over(self._state)
