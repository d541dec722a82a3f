"""What we ask of a peer: the common part, FETCH and TRACK_STATUS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from moqt.receiving.receiver import Receiver, Via
from moqt.requests.request import RequestOwner, check_track_properties, request_error
from moqt.requests.stream import RequestState, RequestStream
from moqt.values.codes import GroupOrder, MessageType, RequestErrorCode
from moqt.values.errors import MoqtError, RequestError, StreamReset, protocol_violation
from moqt.values.messages import (
    Fetch,
    FetchOk,
    Goaway,
    Message,
    Parameters,
    Properties,
    Request,
    RequestErrorMessage,
    RequestOk,
    RequestUpdate,
    TrackStatus,
)
from moqt.values.names import FullTrackName, Location

if TYPE_CHECKING:
    from moqt.session import Session
    from moqt.values.deadlines import Deadline


class OutgoingRequest(RequestOwner):
    """A request of ours. Subclasses say what happens on each answer.

    It is sent when the peer grants a stream: at once, or later in the order in which the
    requests were made. Until then it is QUEUED and has no Request ID; `cancel` takes it back.
    """

    def __init__(self, session: Session, message: Request) -> None:
        super().__init__(
            session, RequestStream(session, message.TYPE, requester=True), message.parameters
        )
        self.message_sent = message
        self.on_answer: Callable[[MoqtError | None], None] | None = None
        """Called once: with None when the request was accepted, else with why it was not."""
        self._answer_timer: Deadline | None = None
        session.submit(self)

    def opening_message(self, request_id: int) -> Request:
        """The message that opens the request, now that it is sent."""
        return replace(self.message_sent, request_id=request_id)

    def open(self, stream_id: int, request_id: int) -> None:
        """The peer grants a stream: send the request."""
        self.stream.opened(stream_id)
        self.request_id = request_id
        message = self.opening_message(request_id)
        parameters, self.carried = self.session.rules.sent_tokens.compress(message.parameters)
        self.message_sent = replace(message, parameters=parameters)
        self.session.send_message(stream_id, self.message_sent, self.stream.fin_sent)
        timeout = self.session.config.request_timeout
        if timeout is not None:
            self._answer_timer = self.session.call_later(timeout + self.patience, self._unanswered)
        self.opened()
        self.flush_updates()

    @property
    def patience(self) -> float:
        """Seconds the peer may take beyond the session's `request_timeout`."""
        return (self.parameters.rendezvous_timeout or 0) / 1000

    def opened(self) -> None:
        """The request is on its way."""

    def _unanswered(self) -> None:
        if self.state is RequestState.PENDING:
            self.session.counters.requests_timed_out += 1
            self.give_up(
                RequestError(
                    RequestErrorCode.TIMEOUT, f"no answer to {self.stream.opening.name} in time"
                )
            )

    def message(self, message: Message) -> None:
        if self.state is not RequestState.PENDING or isinstance(message, Goaway | RequestUpdate):
            self._later(message)
        elif isinstance(message, RequestErrorMessage):
            self.session.rules.check_redirect(message, self.stream.opening)
            self._heard(message)
            self._close()
            self._fail(request_error(message))
        else:
            self._heard(message)
            self._later(message, first=True)

    def _heard(self, answer: Message) -> None:
        """The peer has read the opening message, and with it the tokens it registers."""
        self.settle_tokens(answer)

    def _later(self, message: Message, *, first: bool = False) -> None:
        try:
            if first:
                self.answered(message)
            else:
                super().message(message)
        except RequestError as error:
            self.give_up(error)
        else:
            if first and self.state is not RequestState.PENDING:
                self.notify(None)

    def update_refused(self, error: RequestError) -> None:
        if self.state is not RequestState.CLOSED:
            self._close()
            self._fail(error)

    def update_failed(self, error: RequestError) -> None:
        self.stream.send(RequestErrorMessage(error.code, 0, error.reason), fin=True)
        self._close()
        self._fail(error)

    def give_up(self, error: RequestError) -> None:
        if self.state is not RequestState.CLOSED:
            self.drop_updates()
        if self.state is not RequestState.CLOSED:  # whoever was told may have cancelled
            self.cancel()
            self._fail(error)

    def failed(self, error: MoqtError) -> None:
        """The request was refused, or ended by the peer or with the session."""

    def _fail(self, error: MoqtError) -> None:
        self.notify(error)
        self.drop_updates()
        self.failed(error)

    def notify(self, error: MoqtError | None) -> None:
        """The answer has come, or never will."""
        self.session.deadlines.cancel(self._answer_timer)
        if self.on_answer is not None:
            on_answer, self.on_answer = self.on_answer, None
            on_answer(error)

    def cancel(self) -> None:
        """Give the request up; the receiver hears nothing more of it."""
        self.drop_updates(tell=False)
        self.session.deadlines.cancel(self._answer_timer)
        self._forget()
        self.stream.cancel()

    @property
    def owed(self) -> bool:
        """Whether the peer still owes a message."""
        return self.state is RequestState.PENDING or bool(self._updates)

    def peer_finished(self) -> None:
        if self.owed:
            self._close()
            self._fail(
                RequestError(
                    RequestErrorCode.INTERNAL_ERROR,
                    "the peer ended the stream before everything was said",
                )
            )

    def peer_cancelled(self, code: int) -> None:
        self._forget()
        self._fail(RequestError(RequestErrorCode.INTERNAL_ERROR, "the peer cancelled the request"))

    def peer_overstayed(self) -> None:
        self._forget()
        self._fail(
            RequestError(RequestErrorCode.GOING_AWAY, "the request was not moved away in time")
        )

    def session_closed(self, error: MoqtError) -> None:
        if self.state is not RequestState.CLOSED:
            self.stream.move(RequestState.CLOSED)
            self._forget()
            self._fail(error)

    def _close(self) -> None:
        self._forget()
        self.stream.closed()

    def _forget(self) -> None:
        """Drop what the session remembers for this request."""


class OutgoingFetch(OutgoingRequest):
    """FETCH. Over when its data stream and its answer have both come."""

    def __init__(
        self,
        session: Session,
        name: FullTrackName,
        parameters: Parameters,
        receiver: Receiver,
    ) -> None:
        self.name = name
        self.receiver = receiver
        self.end_location: Location | None = None
        self.end_of_track = False
        self.properties: Properties = ()
        self.data_ended = False
        self.group_order = GroupOrder(parameters.group_order or GroupOrder.ASCENDING)
        location_filter = parameters.location_filter
        self._start = location_filter.resolve(None)[0] if location_filter else Location(0, 0)
        super().__init__(session, Fetch(-1, name.namespace, name.name, parameters))

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
            self.stream.move(RequestState.ESTABLISHED)
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
            self.drop_updates()
            if not self.session.data_streams.reset(self, code):
                self.receiver.request_failed(StreamReset(code, "the fetch"))
        self._forget()

    def failed(self, error: MoqtError) -> None:
        self.receiver.request_failed(error)

    def _forget(self) -> None:
        self.session.data_streams.forget(self, (self.request_id,))


class OutgoingTrackStatus(OutgoingRequest):
    """TRACK_STATUS; answered once."""

    def __init__(self, session: Session, name: FullTrackName, parameters: Parameters) -> None:
        self.name = name
        self.largest: Location | None = None
        self.properties: Properties = ()
        super().__init__(session, TrackStatus(-1, name.namespace, name.name, parameters))
        self.stream.finish()

    def answered(self, message: Message) -> None:
        if isinstance(message, RequestOk):
            self.session.codec.check_request_ok(message, MessageType.TRACK_STATUS)
            check_track_properties(message.properties, self.session.config.known_properties)
            self.largest = message.parameters.largest_object
            self.properties = message.properties
            self._close()
