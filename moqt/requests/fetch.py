"""FETCH and TRACK_STATUS, both sides (MOQT "FETCH", "TRACK_STATUS")."""

from __future__ import annotations

from moqt.delivery import FetchDelivery
from moqt.delivery.scheduler import Flow
from moqt.receiving.receiver import Receiver, Via
from moqt.requests.host import RequestHost
from moqt.requests.incoming import IncomingTrackRequest
from moqt.requests.outgoing import OutgoingRequest
from moqt.requests.stream import RequestState, RequestStream
from moqt.track.properties import check_track_properties
from moqt.track.store import TrackStore
from moqt.values.codes import MAX_VI64, GroupOrder, MessageType, RequestErrorCode, StreamErrorCode
from moqt.values.errors import MoqtError, StreamReset, protocol_violation
from moqt.values.messages import (
    Fetch,
    FetchOk,
    LocationFilter,
    Message,
    Parameters,
    Properties,
    RequestOk,
    RequestUpdate,
    TrackStatus,
)
from moqt.values.names import FullTrackName, Location, location_after


class OutgoingFetch(OutgoingRequest):
    """FETCH. Over when its data stream and its answer have both come."""

    def __init__(
        self,
        session: RequestHost,
        name: FullTrackName,
        parameters: Parameters,
        receiver: Receiver,
    ) -> None:
        super().__init__(session, Fetch(-1, name.namespace, name.name, parameters))
        self.name = name
        self.receiver = receiver
        self.end_location: Location | None = None
        self.end_of_track = False
        self.properties: Properties = ()
        self.data_ended = False
        self.group_order = GroupOrder(parameters.group_order or GroupOrder.ASCENDING)
        location_filter = parameters.location_filter
        self._start = location_filter.resolve(None)[0] if location_filter else Location(0, 0)

    via = Via.FETCH
    ready = True
    """Its data stream can be read as soon as it comes."""

    def opened(self) -> None:
        self.session.data_streams.expect(self.request_id, self)

    def answered(self, message: Message) -> None:
        if isinstance(message, FetchOk):
            if message.end_location < self._start:
                raise protocol_violation("FETCH_OK ends before the range that was asked for")
            check_track_properties(message.properties, self.session.config.known_properties)
            self.end_location = message.end_location
            self.end_of_track = message.end_of_track
            self.properties = message.properties
            self.receiver.fetch_accepted(self)
            self._check_over()

    def stream_ended(self) -> None:
        self.data_ended = True
        self._check_over()

    def _check_over(self) -> None:
        if self.data_ended and self.state is RequestState.ESTABLISHED:
            self._close()

    def peer_cancelled(self, code: int) -> None:
        """As if its data stream had been reset, when there is one."""
        if self.end_location is None:
            super().peer_cancelled(code)
        elif not self.data_ended:
            self.updates.settle_all()
            if not self.session.data_streams.reset(self, code):
                self.receiver.request_failed(StreamReset(code, "the fetch"))
        self._forget()

    def failed(self, error: MoqtError) -> None:
        self.receiver.request_failed(error)

    def _forget(self) -> None:
        self.session.data_streams.forget(self)


class IncomingFetch(IncomingTrackRequest):
    """FETCH from a peer."""

    def __init__(
        self, session: RequestHost, message: Fetch, stream: RequestStream | None = None
    ) -> None:
        super().__init__(session, message, stream)
        self.delivery: FetchDelivery | None = None

    def accept(self, store: TrackStore) -> None:
        """FETCH_OK and the fetch stream from `store`, or INVALID_RANGE."""
        largest = store.largest
        chosen = self.parameters.location_filter or LocationFilter.absolute_start(0)
        start, end = chosen.resolve(largest)
        if largest is None or start > largest:
            self.reject(
                RequestErrorCode.INVALID_RANGE, "nothing is published at or after the start"
            )
            return
        if start > end:
            self.reject(RequestErrorCode.INVALID_RANGE, "the range ends before it starts")
            return
        end = min(end, largest)
        at_end = (
            store.end_of_track is not None
            and end == largest
            # a relay may have lost Objects between the last it holds and the end
            and store.first_unknown(location_after(largest), store.end_of_track) is None
        )
        shown = end
        if end.object == MAX_VI64 and store.first_unknown(Location(end.group, 0), end) is None:
            last = store.largest_in(start, end)
            if last is not None and last.location.group == end.group:
                shown = last.location
        if not self._accept(
            FetchOk(
                at_end,
                shown,
                properties=store.properties if self.parameters.include_properties != 0 else (),
            )
        ):
            return
        priority = self.parameters.subscriber_priority
        self.delivery = FetchDelivery(
            self.session,
            Flow(self.session.scheduler, 128 if priority is None else priority),
            store,
            self.request_id,
            start=start,
            end=end,
            group_order=GroupOrder(self.parameters.group_order or GroupOrder.ASCENDING),
            filters=self.parameters.range_filters,
            on_done=lambda _delivery, code: self._end() if code is None else self._failed(code),
            fill_timeout_ms=self.parameters.fill_timeout,
        )
        self.delivery.begin()
        self.apply_held_updates()

    def updated(self, update: RequestUpdate) -> None:
        priority = update.parameters.subscriber_priority
        if priority is not None and self.delivery is not None:
            self.delivery.flow.set_priority(priority)
        self.stream.send(RequestOk())

    def abort(self, code: StreamErrorCode) -> None:
        """Reset the data stream: what was not delivered stays unknown to the peer."""
        if self.delivery is not None and self.state is RequestState.ESTABLISHED:
            self.delivery.abort(code)
            self._failed(code)

    def _failed(self, code: StreamErrorCode) -> None:
        """The data stream was reset: reset this one too, as its header may be lost."""
        self.stream.cancel(code)
        self.ended()

    def ended(self) -> None:
        if self.delivery is not None:
            self.delivery.abort(StreamErrorCode.CANCELLED)
        super().ended()


class OutgoingTrackStatus(OutgoingRequest):
    """TRACK_STATUS; answered once."""

    def __init__(self, session: RequestHost, name: FullTrackName, parameters: Parameters) -> None:
        super().__init__(session, TrackStatus(-1, name.namespace, name.name, parameters))
        self.name = name
        self.largest: Location | None = None
        self.properties: Properties = ()
        self.stream.finish()

    def answered(self, message: Message) -> None:
        if isinstance(message, RequestOk):
            self.session.codec.check_request_ok(message, MessageType.TRACK_STATUS)
            check_track_properties(message.properties, self.session.config.known_properties)
            self.largest = message.parameters.largest_object
            self.properties = message.properties
            self._close()


class IncomingTrackStatus(IncomingTrackRequest):
    """TRACK_STATUS from a peer."""

    def accept(self, store: TrackStore) -> None:
        """TRACK_STATUS_OK with what `store` knows."""
        self.answer(store.largest, store.properties)

    def answer(self, largest: Location | None, properties: Properties) -> None:
        """TRACK_STATUS_OK, for who asked elsewhere (a relay without the track)."""
        shown = properties if self.parameters.include_properties != 0 else ()
        if self._accept(RequestOk(Parameters(largest_object=largest), shown), fin=True):
            self._end()
