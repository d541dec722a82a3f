"""Who a Retrieval's requests bring their answers, streams and Objects to.

Callbacks of the session: they note in a track's `TrackState` what has come and who is still to
bring what, and tell the Retrieval, which decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcs.names.codes import MAX_MANIFEST_OCTETS, PAYLOAD_HEADER_OCTETS
from kvcs.names.tracks import DataTrack, raw_octets
from moqt.receiving.receiver import (
    AcceptedFetch,
    AcceptedSubscribe,
    IncomingStream,
    ObjectReceiver,
    ReceivedObject,
    Via,
)
from moqt.track.stored import Buffer
from moqt.values.codes import ObjectStatus, PublishDoneCode, StreamErrorCode, code_name
from moqt.values.errors import MoqtError, escaped
from moqt.values.names import FullTrackName, Location
from moqt.wire.objects import ObjectHeader

if TYPE_CHECKING:
    from kvcs.retrieving.retrieval import Retrieval


class TrackState:
    """What is asked for on one data track, and so, what is nobody's to bring any more."""

    def __init__(self, track: DataTrack, name: FullTrackName, first_layer: int) -> None:
        self.track = track
        self.name = name
        self.first = Location(first_layer, 0)
        self.subscribed = False
        """There is a subscription, answered or not."""
        self.answered = False
        self.largest: Location | None = None
        """Largest Object at the time of the subscription: up to it is the fill's part."""
        self.fill_open = False
        self.fill_over = False
        self.closed: set[int] = set()
        """Groups of which the subscription has brought all that it will."""
        self.broken: set[int] = set()
        """Groups whose subscription stream was reset and not continued so far."""
        self.lost: set[Location] = set()
        """Objects that came and were bad: nobody sends them again unasked."""
        self.suspects: set[int] = set()
        """Layers in which Objects may be missing that nobody is going to bring."""
        self.fetch: FetchReceiver | None = None
        self.fetched = False
        """Something was asked for again: what comes twice is no fault of the peer."""
        self.failures = 0
        self.delay = 0.0
        self.due = 0.0
        self.cause = ""

    def accepted(self, largest: Location | None) -> None:
        self.answered = True
        self.largest = largest
        if largest is None or largest < self.first:
            self.fill_over = True

    def is_coming(self, location: Location) -> bool:
        """Whether somebody is still to bring the Object."""
        if location in self.lost:
            return False
        if not self.subscribed:
            return False
        if not self.answered:
            return True
        if self.largest is not None and location <= self.largest:
            return not self.fill_over
        return location.group not in self.closed and location.group not in self.broken


class DataReceiver(ObjectReceiver):
    """A request for Objects of a data track: longer ones than they can be are not kept."""

    def __init__(self, retrieval: Retrieval, state: TrackState) -> None:
        self.retrieval = retrieval
        self.state = state
        self.max_object_octets = PAYLOAD_HEADER_OCTETS + raw_octets(
            retrieval.assembly.descriptor, state.track.component
        )

    def object_too_large(self, stream: IncomingStream, header: ObjectHeader) -> None:
        self.retrieval.object_too_large(self.state, header.location)

    def object_part(self, stream: IncomingStream, part: Buffer) -> None:
        super().object_part(stream, part)
        self.retrieval.arrivals += 1

    def object_whole(
        self, stream: IncomingStream, header: ObjectHeader, parts: list[Buffer]
    ) -> None:
        if not header.status:
            self.data_received(header, parts)

    def data_received(self, header: ObjectHeader, parts: list[Buffer]) -> None:
        self.retrieval.object_received(self.state, header, parts)


class LiveReceiver(DataReceiver):
    """The subscription to a data track, with its fill."""

    def subscribe_accepted(self, request: AcceptedSubscribe) -> None:
        self.retrieval.live_accepted(self.state, request.largest)

    def stream_opened(self, stream: IncomingStream) -> None:
        self.retrieval.arrivals += 1
        if stream.subgroup is not None:
            self.state.broken.discard(stream.subgroup.group)
        else:
            self.state.fill_open = True

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
        retrieval: Retrieval,
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
        self.useful = False
        """It brought an Object that was needed."""
        self.answered = False
        self.opened = False

    def fetch_accepted(self, request: AcceptedFetch) -> None:
        self.answered = True
        self.retrieval.arrivals += 1
        self.retrieval.wake()

    def stream_opened(self, stream: IncomingStream) -> None:
        self.opened = True

    def data_received(self, header: ObjectHeader, parts: list[Buffer]) -> None:
        if self.retrieval.object_received(self.state, header, parts, again=self.again):
            self.useful = True

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        if error is None:
            self.retrieval.fetch_over(self, "the fetch ended without them")
        else:
            name = code_name(StreamErrorCode, error)
            self.retrieval.fetch_over(self, f"the fetch was reset with {name}")

    def request_failed(self, error: MoqtError) -> None:
        self.retrieval.fetch_failed(self, error)


class ManifestReceiver(ObjectReceiver):
    """The manifest track, subscribed to or fetched."""

    max_object_octets = MAX_MANIFEST_OCTETS

    def __init__(self, retrieval: Retrieval, *, fetched: bool) -> None:
        self.retrieval = retrieval
        self.fetched = fetched

    def object_received(self, received: ReceivedObject) -> None:
        if received.status is ObjectStatus.NORMAL:
            self.retrieval.manifest_received(received)

    def object_too_large(self, stream: IncomingStream, header: ObjectHeader) -> None:
        self.retrieval.manifest_too_large(header.length)

    def stream_ended(self, stream: IncomingStream, error: int | None) -> None:
        if self.fetched or stream.via is Via.FILL:
            self.retrieval.manifest_stream_ended("its stream ended without it", self.fetched)

    def subscription_done(self, code: int, reason: str) -> None:
        name = code_name(PublishDoneCode, code)
        self.retrieval.manifest_over(f"its subscription ended with {name}", self.fetched)

    def request_failed(self, error: MoqtError) -> None:
        self.retrieval.manifest_failed(error, self.fetched)
