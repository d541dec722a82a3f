"""Requests: one bidirectional stream each, in both directions (MOQT "Control Messages").

`RequestStream` enforces what may travel on such a stream, by table. On top of it
stand the objects an application holds: `Outgoing…` for what we ask, `Incoming…`
for what a peer asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from typing import TYPE_CHECKING

from moqt.codes import (
    MAX_FULL_TRACK_NAME,
    MAX_NAMESPACE_FIELDS,
    MAX_VI64,
    GroupOrder,
    MessageType,
    PropertyType,
    PublishDoneCode,
    RequestErrorCode,
    SessionErrorCode,
    StreamErrorCode,
    is_mandatory,
)
from moqt.delivery import FetchDelivery, SubscriptionDelivery
from moqt.errors import (
    MisuseError,
    MoqtError,
    RequestError,
    SessionError,
    StreamReset,
    protocol_violation,
)
from moqt.filters import merge_update
from moqt.messages import (
    Fetch,
    FetchOk,
    Goaway,
    LocationFilter,
    Message,
    Namespace,
    NamespaceDone,
    Parameters,
    Properties,
    Publish,
    PublishDone,
    PublishNamespace,
    PublishStateNotify,
    Request,
    RequestErrorMessage,
    RequestOk,
    RequestUpdate,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    TrackStatus,
    property_value,
)
from moqt.names import FullTrackName, Location, TrackNamespace, is_prefix, is_reserved
from moqt.receiving import Receiver
from moqt.scheduler import Flow
from moqt.store import TrackStore, location_after
from moqt.tokens import Token

if TYPE_CHECKING:
    from moqt.session import Session, SessionHandler

UpdateAnswer = Callable[[RequestOk | RequestError], None]

_M = MessageType
_UPDATE = frozenset({_M.REQUEST_UPDATE, _M.GOAWAY})
_ANSWERS = frozenset({_M.REQUEST_OK, _M.REQUEST_ERROR, _M.GOAWAY})

AFTER_OPENING: dict[MessageType, frozenset[MessageType]] = {
    _M.SUBSCRIBE: _UPDATE,
    _M.PUBLISH: _UPDATE | _ANSWERS | {_M.PUBLISH_STATE_NOTIFY, _M.PUBLISH_DONE},
    _M.FETCH: _UPDATE,
    _M.TRACK_STATUS: frozenset({_M.GOAWAY}),
    _M.PUBLISH_NAMESPACE: _UPDATE,
    _M.SUBSCRIBE_NAMESPACE: _UPDATE,
    _M.SUBSCRIBE_TRACKS: _UPDATE,
}
"""What the requester may send after the message that opened the stream."""

FIRST_ANSWER: dict[MessageType, frozenset[MessageType]] = {
    _M.SUBSCRIBE: frozenset({_M.SUBSCRIBE_OK, _M.REQUEST_ERROR, _M.GOAWAY}),
    _M.PUBLISH: _ANSWERS,
    _M.FETCH: frozenset({_M.FETCH_OK, _M.REQUEST_ERROR, _M.GOAWAY}),
    _M.TRACK_STATUS: _ANSWERS,
    _M.PUBLISH_NAMESPACE: _ANSWERS,
    _M.SUBSCRIBE_NAMESPACE: _ANSWERS,
    _M.SUBSCRIBE_TRACKS: _ANSWERS,
}
"""What the answering side may send first."""

LATER_ANSWERS: dict[MessageType, frozenset[MessageType]] = {
    _M.SUBSCRIBE: _ANSWERS | {_M.PUBLISH_STATE_NOTIFY, _M.PUBLISH_DONE},
    _M.PUBLISH: _ANSWERS | _UPDATE,
    _M.FETCH: _ANSWERS,
    _M.TRACK_STATUS: frozenset({_M.GOAWAY}),
    _M.PUBLISH_NAMESPACE: _ANSWERS,
    _M.SUBSCRIBE_NAMESPACE: _ANSWERS | {_M.NAMESPACE, _M.NAMESPACE_DONE},
    _M.SUBSCRIBE_TRACKS: _ANSWERS | {_M.PUBLISH_SKIPPED},
}
"""What the answering side may send after its answer."""

_OVERLAP = "overlaps a namespace subscription of this session"

MAX_PATIENCE = 300.0
"""Seconds a subscriber waits at most for streams after PUBLISH_DONE."""


class RequestState(IntEnum):
    PENDING = 0
    ESTABLISHED = 1
    CLOSED = 2


class RequestStream:
    """One request stream: framing, the tables above, FIN, cancel and reject."""

    def __init__(
        self, session: Session, stream_id: int, opening: MessageType, *, requester: bool
    ) -> None:
        self.session = session
        self.stream_id = stream_id
        self.opening = opening
        self.requester = requester
        self.state = RequestState.PENDING
        self.goaway_seen = False
        self.fin_sent = False
        self.fin_received = False
        self.owner: OutgoingRequest | IncomingRequest

    def receive(self, message: Message) -> None:
        kind = message.TYPE
        if self.requester:
            table = FIRST_ANSWER if self.state is RequestState.PENDING else LATER_ANSWERS
        else:
            table = AFTER_OPENING
        if kind not in table[self.opening]:
            raise protocol_violation(
                f"{kind.name} does not belong on a {self.opening.name} stream "
                f"{'before its answer' if self.state is RequestState.PENDING else 'at this point'}"
            )
        if isinstance(message, Goaway):
            if self.goaway_seen:
                raise protocol_violation("second GOAWAY on a request stream")
            self.goaway_seen = True
            self.session.check_goaway(message)
        if self.state is not RequestState.CLOSED:
            self.owner.message(message)

    def send(self, message: Message, *, fin: bool = False) -> None:
        if not self.fin_sent:
            self.fin_sent = fin
            self.session.send_message(self.stream_id, message, fin)

    def finish(self) -> None:
        """FIN our direction: nothing more from us."""
        if not self.fin_sent:
            self.fin_sent = True
            self.session.transport.send(self.stream_id, b"", fin=True)
            self.session.transport.wake()

    def cancel(self, code: StreamErrorCode = StreamErrorCode.CANCELLED) -> None:
        """End both directions abruptly: RESET_STREAM and STOP_SENDING."""
        if self.state is RequestState.CLOSED:
            return
        self.state = RequestState.CLOSED
        if not self.fin_sent:
            self.fin_sent = True
            self.session.transport.reset(self.stream_id, code)
        if not self.fin_received:
            self.session.transport.stop_receiving(self.stream_id, code)
        self.session.transport.wake()
        self.session.forget_stream(self.stream_id)

    def cancel_reading(self) -> None:
        """The request is over already: do not wait for the peer's FIN."""
        if not self.fin_received:
            self.session.transport.stop_receiving(self.stream_id, StreamErrorCode.CANCELLED)
        self.session.forget_stream(self.stream_id)

    def closed(self) -> None:
        """Nothing more will be said on either side."""
        self.state = RequestState.CLOSED
        self.finish()
        self.session.request_closed(self.stream_id)
        if self.fin_received:
            self.session.forget_stream(self.stream_id)

    def peer_finished(self) -> None:
        self.fin_received = True
        if self.state is RequestState.CLOSED:
            self.session.forget_stream(self.stream_id)
        else:
            self.owner.peer_finished()

    def peer_cancelled(self, code: int) -> None:
        """RESET_STREAM or STOP_SENDING: the request is over, whichever came first."""
        if self.state is RequestState.CLOSED:
            self.cancel_reading()
            return
        if self.fin_sent and self.fin_received:
            return  # it crossed our FIN: there is nothing left to cancel
        self.cancel()
        self.owner.peer_cancelled(code)


# -- what we ask -------------------------------------------------------------------------


class OutgoingRequest:
    """A request of ours. Subclasses say what happens on each answer."""

    def __init__(self, session: Session, message: Request) -> None:
        self.session = session
        self.message_sent = message
        self.request_id = message.request_id
        self.stream = session.open_request(message, self)
        self._updates: deque[UpdateAnswer] = deque()
        self._unsent_updates: deque[RequestUpdate] = deque()
        """Held back while the peer's MAX_REQUEST_UPDATES are unanswered."""
        self.on_answer: Callable[[MoqtError | None], None] | None = None
        """Called once: with None when the request was accepted, else with why it was not."""

    @property
    def state(self) -> RequestState:
        return self.stream.state

    def message(self, message: Message) -> None:
        match message:
            case RequestErrorMessage():
                error = request_error(message)
                if self.state is RequestState.PENDING:
                    self.session.check_redirect(message, self.stream.opening)
                    self._close()
                    self._fail(error)
                else:
                    self._update_answer()(error)
                    self.update_refused(error)
            case RequestOk() if self.state is RequestState.ESTABLISHED:
                self.session.codec.check_request_ok(message, MessageType.REQUEST_UPDATE)
                self._update_answer()(message)
            case Goaway():
                self.session.handler.request_goaway_received(self, message)
            case _:
                try:
                    self.answered(message)
                except RequestError as error:
                    self.give_up(error)
                else:
                    if self.state is not RequestState.PENDING:
                        self._notify(None)

    def _update_answer(self) -> UpdateAnswer:
        """Who waits for the answer that has come; it makes room for one more update."""
        if not self._updates:
            raise protocol_violation("a second answer to one request")
        if self._unsent_updates:
            self.stream.send(self._unsent_updates.popleft())
        return self._updates.popleft()

    def update_refused(self, error: RequestError) -> None:
        """A refused update ends the request (MOQT "REQUEST_UPDATE")."""
        if self.state is not RequestState.CLOSED:
            self._close()
            self._fail(error)

    def give_up(self, error: RequestError) -> None:
        """Cancel because of `error`, and say so to whoever waits."""
        self.cancel()
        self._fail(error)

    def answered(self, message: Message) -> None:
        """An answer or notification; raises RequestError to give the request up."""
        raise NotImplementedError

    def failed(self, error: MoqtError) -> None:
        """The request was refused, or ended by the peer or with the session."""

    def _fail(self, error: MoqtError) -> None:
        self._notify(error)
        self._drop_updates()
        self.failed(error)

    def _drop_updates(self) -> None:
        """The request is over: no update will be answered any more."""
        self._unsent_updates.clear()
        while self._updates:
            self._updates.popleft()(
                RequestError(RequestErrorCode.INTERNAL_ERROR, "the request ended before its answer")
            )

    def _notify(self, error: MoqtError | None) -> None:
        if self.on_answer is not None:
            on_answer, self.on_answer = self.on_answer, None
            on_answer(error)

    def update(self, parameters: Parameters, on_answer: UpdateAnswer) -> int:
        """REQUEST_UPDATE; returns its Request ID. `on_answer` is called once, unless the
        request is cancelled here."""
        if self.state is RequestState.CLOSED or self.stream.fin_sent:
            raise MisuseError("the request is over, or FIN was sent: it cannot be updated")
        message = RequestUpdate(self.session.next_request_id(), parameters)
        limit = self.session.peer_max_request_updates
        self._updates.append(on_answer)
        if limit and len(self._updates) > limit:
            self._unsent_updates.append(message)
        else:
            self.stream.send(message)
        return message.request_id

    def cancel(self) -> None:
        """Give the request up; the receiver hears nothing more of it."""
        self._updates.clear()
        self._unsent_updates.clear()
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

    def session_closed(self, error: MoqtError) -> None:
        if self.state is not RequestState.CLOSED:
            self.stream.state = RequestState.CLOSED
            self._forget()
            self._fail(error)

    def _close(self) -> None:
        self._forget()
        self.stream.closed()

    def _forget(self) -> None:
        """Drop what the session remembers for this request."""


def request_error(message: RequestErrorMessage) -> RequestError:
    redirect = message.redirect
    return RequestError(
        message.code,
        message.reason,
        retry_after_ms=message.retry_interval - 1 if message.retry_interval else None,
        redirect=(redirect.uri, redirect.namespace, redirect.name) if redirect else None,
    )


def refuse_unknown_mandatory(properties: Properties) -> None:
    """Raise RequestError when there is a mandatory Track Property: none is known here."""
    if any(is_mandatory(pair.type) for pair in properties):
        raise RequestError(
            RequestErrorCode.UNSUPPORTED_EXTENSION,
            "the track has a mandatory property that is not known here",
        )


class OutgoingSubscribe(OutgoingRequest):
    """SUBSCRIBE. The receiver gets the answer and the Objects."""

    def __init__(
        self,
        session: Session,
        name: FullTrackName,
        parameters: Parameters,
        receiver: Receiver,
    ) -> None:
        self.name = name
        self.receiver = receiver
        self.track_alias: int | None = None
        self.largest: Location | None = None
        self.properties: Properties = ()
        self.streams_ended = 0
        self.done: PublishDone | None = None
        self.done_deadline = 0.0
        fill = parameters.fill_parameters
        order = (fill.group_order if fill else None) or parameters.group_order
        self._order_follows_track = order is None
        self.group_order = GroupOrder(order or GroupOrder.ASCENDING)
        """In which order fills come; the track's default is known from SUBSCRIBE_OK on."""
        super().__init__(
            session,
            Subscribe(session.next_request_id(), name.namespace, name.name, parameters),
        )
        self._request_ids = [self.request_id]
        if parameters.fill_parameters is not None:
            session.fetch_receivers[self.request_id] = self

    def answered(self, message: Message) -> None:
        match message:
            case SubscribeOk():
                self.largest = message.parameters.largest_object
                self.properties = message.properties
                if (
                    self._order_follows_track
                    and property_value(
                        message.properties, PropertyType.DEFAULT_PUBLISHER_GROUP_ORDER
                    )
                    == GroupOrder.DESCENDING
                ):
                    self.group_order = GroupOrder.DESCENDING
                self.session.register_alias(message.track_alias, self)
                self.track_alias = message.track_alias
                self.stream.state = RequestState.ESTABLISHED
                refuse_unknown_mandatory(message.properties)
                self.receiver.subscribe_accepted(self)
                self.session.place_waiting()
            case PublishDone():
                self.done = message
                self.done_deadline = self.session.now + self._patience()
                self.stream.finish()
                self.check_done()
            case PublishStateNotify():
                self._saw(message.parameters.largest_object)

    def _saw(self, largest: Location | None) -> None:
        if largest is not None and (self.largest is None or largest > self.largest):
            self.largest = largest

    @property
    def order_known(self) -> bool:
        """Whether `group_order` is final; the track's default is told in SUBSCRIBE_OK."""
        return not self._order_follows_track or self.state is not RequestState.PENDING

    @property
    def owed(self) -> bool:
        return self.done is None or super().owed

    def message(self, message: Message) -> None:
        if self.done is not None:
            raise protocol_violation(f"{message.TYPE.name} after PUBLISH_DONE")
        super().message(message)

    def update_refused(self, error: RequestError) -> None:
        """PUBLISH_DONE UPDATE_FAILED follows."""

    def _patience(self) -> float:
        """How long streams may be late: no less than the larger delivery timeout."""
        parameters = self.message_sent.parameters
        timeouts = [
            property_value(self.properties, PropertyType.OBJECT_DELIVERY_TIMEOUT),
            property_value(self.properties, PropertyType.SUBGROUP_DELIVERY_TIMEOUT),
            parameters.object_delivery_timeout,
            parameters.subgroup_delivery_timeout,
        ]
        longest = max((t for t in timeouts if isinstance(t, int)), default=0)
        return max(self.session.config.done_timeout, min(longest / 1000, MAX_PATIENCE))

    def update(self, parameters: Parameters, on_answer: UpdateAnswer) -> int:
        def answered(answer: RequestOk | RequestError) -> None:
            if isinstance(answer, RequestOk):
                self._saw(answer.parameters.largest_object)
            on_answer(answer)

        request_id = super().update(parameters, answered)
        if parameters.fill_parameters is not None:
            self._request_ids.append(request_id)
            self.session.fetch_receivers[request_id] = self
        return request_id

    def stream_ended(self) -> None:
        self.streams_ended += 1
        self.check_done()

    def check_done(self, *, expired: bool = False) -> None:
        """The subscription is over once the streams PUBLISH_DONE counts have ended."""
        done = self.done
        if done is None or self.state is RequestState.CLOSED:
            return
        if expired or self.streams_ended >= done.stream_count:
            self._close()
            self._drop_updates()
            self.receiver.subscription_done(done.code, done.reason)

    def failed(self, error: MoqtError) -> None:
        self.receiver.request_failed(error)

    def _forget(self) -> None:
        for request_id in self._request_ids:
            self.session.fetch_receivers.pop(request_id, None)
        if self.track_alias is not None:
            self.session.release_alias(self.track_alias, self)
        self.session.drop_streams(self)


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
        super().__init__(
            session, Fetch(session.next_request_id(), name.namespace, name.name, parameters)
        )
        session.fetch_receivers[self.request_id] = self

    def answered(self, message: Message) -> None:
        if isinstance(message, FetchOk):
            if message.end_location < self._start:
                raise protocol_violation("FETCH_OK ends before the range that was asked for")
            refuse_unknown_mandatory(message.properties)
            self.end_location = message.end_location
            self.end_of_track = message.end_of_track
            self.properties = message.properties
            self.stream.state = RequestState.ESTABLISHED
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
            self._drop_updates()
            if not self.session.reset_streams(self, code):
                self.receiver.request_failed(StreamReset(code, "the fetch"))
        self._forget()

    def failed(self, error: MoqtError) -> None:
        self.receiver.request_failed(error)

    def _forget(self) -> None:
        self.session.fetch_receivers.pop(self.request_id, None)
        self.session.drop_streams(self)


class OutgoingPublishNamespace(OutgoingRequest):
    """PUBLISH_NAMESPACE; lives until either side cancels."""

    def __init__(
        self,
        session: Session,
        namespace: TrackNamespace,
        parameters: Parameters,
        *,
        on_ended: Callable[[MoqtError], None],
    ) -> None:
        self.namespace = namespace
        self._on_ended = on_ended
        super().__init__(
            session, PublishNamespace(session.next_request_id(), namespace, parameters)
        )

    def answered(self, message: Message) -> None:
        if isinstance(message, RequestOk):
            self.session.codec.check_request_ok(message, MessageType.PUBLISH_NAMESPACE)
            self.stream.state = RequestState.ESTABLISHED

    def failed(self, error: MoqtError) -> None:
        self._on_ended(error)


class OutgoingSubscribeNamespace(OutgoingRequest):
    """SUBSCRIBE_NAMESPACE; reports full namespaces as they come and go.

    When it ends, every namespace is gone without further word.
    """

    def __init__(
        self,
        session: Session,
        prefix: TrackNamespace,
        parameters: Parameters,
        *,
        on_namespace: Callable[[TrackNamespace, bool], None],
        on_ended: Callable[[MoqtError | None], None],
    ) -> None:
        self.prefix = prefix
        self.namespaces: set[TrackNamespace] = set()
        self._on_namespace = on_namespace
        self._on_ended = on_ended
        super().__init__(session, SubscribeNamespace(session.next_request_id(), prefix, parameters))

    def answered(self, message: Message) -> None:
        match message:
            case RequestOk():
                self.session.codec.check_request_ok(message, MessageType.SUBSCRIBE_NAMESPACE)
                self.stream.state = RequestState.ESTABLISHED
            case Namespace():
                namespace = self.prefix + message.suffix
                limit = self.session.config.max_namespaces
                if namespace in self.namespaces:
                    return
                if len(self.namespaces) >= limit:
                    raise RequestError(
                        RequestErrorCode.NAMESPACE_TOO_LARGE, f"more than {limit} namespaces"
                    )
                if len(namespace) > MAX_NAMESPACE_FIELDS or (
                    sum(map(len, namespace)) > MAX_FULL_TRACK_NAME
                ):
                    raise protocol_violation("a namespace longer than allowed, with its prefix")
                self.namespaces.add(namespace)
                self._on_namespace(namespace, True)
            case NamespaceDone():
                namespace = self.prefix + message.suffix
                if namespace not in self.namespaces:
                    raise protocol_violation("NAMESPACE_DONE without NAMESPACE")
                self.namespaces.remove(namespace)
                self._on_namespace(namespace, False)

    def update(self, parameters: Parameters, on_answer: UpdateAnswer) -> int:
        prefix = parameters.track_namespace_prefix

        def answered(answer: RequestOk | RequestError) -> None:
            if prefix is not None and isinstance(answer, RequestOk):
                self.prefix = prefix
                for namespace in [n for n in self.namespaces if not is_prefix(prefix, n)]:
                    self.namespaces.remove(namespace)
                    self._on_namespace(namespace, False)
            on_answer(answer)

        return super().update(parameters, answered)

    def failed(self, error: MoqtError) -> None:
        self._on_ended(error)

    def peer_finished(self) -> None:
        super().peer_finished()
        if self.state is not RequestState.CLOSED:
            self._close()
            self._on_ended(None)

    def _forget(self) -> None:
        self.namespaces.clear()


class OutgoingTrackStatus(OutgoingRequest):
    """TRACK_STATUS; answered once."""

    def __init__(
        self,
        session: Session,
        name: FullTrackName,
        parameters: Parameters,
    ) -> None:
        self.largest: Location | None = None
        self.properties: Properties = ()
        super().__init__(
            session, TrackStatus(session.next_request_id(), name.namespace, name.name, parameters)
        )
        self.stream.finish()

    def answered(self, message: Message) -> None:
        if isinstance(message, RequestOk):
            self.session.codec.check_request_ok(message, MessageType.TRACK_STATUS)
            self.largest = message.parameters.largest_object
            self.properties = message.properties
            self._close()


# -- what a peer asks --------------------------------------------------------------------


class IncomingRequest:
    """A peer's request. Answer it once, with `reject` or the subclass's `accept`."""

    def __init__(self, session: Session, stream: RequestStream, message: Request) -> None:
        self.session = session
        self.stream = stream
        stream.owner = self
        self.request_id = message.request_id
        self.parameters = message.parameters
        self.tokens: tuple[Token, ...] = ()
        self._held_updates: list[RequestUpdate] = []
        self.on_ended: Callable[[], None] | None = None
        """Called once when the request is over, whoever ended it."""

    @property
    def state(self) -> RequestState:
        return self.stream.state

    @property
    def pending(self) -> bool:
        return self.state is RequestState.PENDING

    @property
    def namespace(self) -> TrackNamespace:
        """The namespace (or prefix of one) that it is about."""
        raise NotImplementedError

    def dispatch(self, handler: SessionHandler) -> None:
        """Hand it to the application."""
        raise NotImplementedError

    def reject(
        self, code: RequestErrorCode, reason: str = "", *, retry_after_ms: int | None = None
    ) -> None:
        """REQUEST_ERROR, then FIN. A no-op when the request was cancelled meanwhile."""
        if not self.pending:
            return
        self.stream.send(
            RequestErrorMessage(code, 0 if retry_after_ms is None else retry_after_ms + 1, reason),
            fin=True,
        )
        self._end()

    def _accept(self, message: Message, *, fin: bool = False) -> bool:
        if not self.pending:
            return False
        self.stream.state = RequestState.ESTABLISHED
        self.stream.send(message, fin=fin)
        return True

    def _end(self) -> None:
        self.stream.closed()
        self.ended()

    def message(self, message: Message) -> None:
        if isinstance(message, RequestUpdate):
            self.session.use_request_id(message.request_id)
            self.session.codec.check_request_update(message.parameters, self.stream.opening)
            if self.pending:
                self._held_updates.append(message)
                limit = self.session.config.max_request_updates
                if len(self._held_updates) > limit:
                    raise SessionError(
                        SessionErrorCode.TOO_MANY_REQUEST_UPDATES,
                        f"more than {limit} REQUEST_UPDATEs are unanswered",
                    )
            else:
                self._apply(message)

    def _accepted(self) -> None:
        """Everything the answer starts has started: now the updates that came before it."""
        held, self._held_updates = self._held_updates, []
        for update in held:
            if self.state is RequestState.ESTABLISHED:
                self._apply(update)
        self.session.transport.wake()

    def _apply(self, update: RequestUpdate) -> None:
        try:
            self.tokens = self.session.resolve_tokens(update.parameters) or self.tokens
            self.updated(update)
        except RequestError as error:
            self.update_failed(error)

    def updated(self, update: RequestUpdate) -> None:
        """Apply it and answer; raises RequestError when it cannot be applied."""
        self.stream.send(RequestOk())

    def update_failed(self, error: RequestError) -> None:
        """REQUEST_ERROR, and with it the request ends (MOQT "REQUEST_UPDATE")."""
        self.stream.send(RequestErrorMessage(error.code, 0, error.reason), fin=True)
        self._end()

    def peer_finished(self) -> None:
        """FIN is not cancellation: the peer only has no more to say."""

    def peer_cancelled(self, code: int) -> None:
        self.ended()

    def ended(self) -> None:
        self.session.request_over(self)
        if self.on_ended is not None:
            on_ended, self.on_ended = self.on_ended, None
            on_ended()

    def revoke(self) -> None:
        """Cancel it from this side: what was accepted holds no longer."""
        if self.state is not RequestState.CLOSED:
            self.stream.cancel()
            self.ended()

    def session_closed(self, error: MoqtError) -> None:
        if self.state is not RequestState.CLOSED:
            self.stream.state = RequestState.CLOSED
            self.ended()


class IncomingTrackRequest(IncomingRequest):
    """A peer's request about one track."""

    def __init__(
        self, session: Session, stream: RequestStream, message: Subscribe | Fetch | TrackStatus
    ) -> None:
        super().__init__(session, stream, message)
        self.name = FullTrackName(message.namespace, message.name)

    @property
    def namespace(self) -> TrackNamespace:
        return self.name.namespace


class IncomingSubscribe(IncomingTrackRequest):
    """SUBSCRIBE from a peer."""

    def __init__(self, session: Session, stream: RequestStream, message: Subscribe) -> None:
        super().__init__(session, stream, message)
        self.delivery: SubscriptionDelivery | None = None
        self.filter = message.parameters.location_filter
        self.range_filters = message.parameters.range_filters
        self.store: TrackStore | None = None
        self.track_alias: int | None = None

    def dispatch(self, handler: SessionHandler) -> None:
        handler.subscribe_received(self)

    def accept(self, store: TrackStore, *, expires_ms: int | None = None) -> None:
        """SUBSCRIBE_OK, then deliver from `store` by the filters, fill included."""
        if not self.pending:
            return
        parameters = self.parameters
        largest = store.largest
        self.track_alias = self.session.next_track_alias()
        if not self._accept(
            SubscribeOk(
                self.track_alias,
                Parameters(largest_object=largest, expires=expires_ms),
                store.properties if parameters.include_properties != 0 else (),
            )
        ):
            return
        self.store = store
        start, end = (self.filter or LocationFilter.absolute_start(0)).resolve(largest)
        order = parameters.group_order or property_value(
            store.properties, PropertyType.DEFAULT_PUBLISHER_GROUP_ORDER
        )
        priority = parameters.subscriber_priority
        self.delivery = SubscriptionDelivery(
            self.session,
            store,
            self.track_alias,
            start=start,
            end=end,
            filters=self.range_filters,
            subscriber_priority=128 if priority is None else priority,
            group_order=GroupOrder.DESCENDING
            if order == GroupOrder.DESCENDING
            else GroupOrder.ASCENDING,
            paused=parameters.forward == 0,
            on_done=self._done,
        )
        if parameters.fill_parameters is not None:
            self._fill(self.request_id, parameters.fill_parameters, largest)
        self.delivery.begin()
        self._accepted()

    def _fill(self, request_id: int, fill: Parameters, largest: Location | None) -> None:
        """Open the fill fetch stream, unless there is nothing to fill (MOQT "Fill Semantics")."""
        delivery = self.delivery
        assert delivery is not None and self.store is not None
        if delivery.paused or largest is None:
            return
        chosen = fill.location_filter or self.filter or LocationFilter.absolute_start(0)
        start, end = chosen.resolve(largest)
        end = min(end, largest)
        if start > end:
            return
        order = fill.group_order or delivery.group_order
        priority = fill.subscriber_priority
        flow = delivery.flow
        if priority is not None and priority != flow.subscriber_priority:
            flow = Flow(self.session.scheduler, priority)
        delivery.add_fill(
            FetchDelivery(
                self.session,
                flow,
                self.store,
                request_id,
                start=start,
                end=end,
                group_order=GroupOrder(order),
                filters=fill.range_filters or self.range_filters,
                on_done=lambda done, _code: delivery.fill_done(done),
                behind=order != delivery.group_order,
            )
        )

    def updated(self, update: RequestUpdate) -> None:
        delivery, store, parameters = self.delivery, self.store, update.parameters
        assert delivery is not None and store is not None
        merged = merge_update(self.range_filters, parameters.range_filters)
        self.session.check_filters(parameters)
        self.session.check_filters(replace(parameters, range_filters=merged))
        largest = store.largest
        self.range_filters = merged
        start: Location | None = None
        end: Location | None = None
        if parameters.location_filter is not None:
            self.filter = parameters.location_filter
            start, end = self.filter.resolve(largest)
        if parameters.subscriber_priority is not None:
            delivery.flow.set_priority(parameters.subscriber_priority)
        delivery.refilter(start, end, merged)
        if parameters.forward is not None:
            delivery.pause(parameters.forward == 0)
        self.stream.send(RequestOk(Parameters(largest_object=largest)))
        if parameters.fill_parameters is not None:
            self._fill(update.request_id, parameters.fill_parameters, largest)

    def update_failed(self, error: RequestError) -> None:
        self.stream.send(RequestErrorMessage(error.code, 0, error.reason))
        self._done(PublishDoneCode.UPDATE_FAILED, error.reason)

    def end(self, code: int, reason: str = "") -> None:
        """PUBLISH_DONE before the track has ended, e.g. when the relay lets go."""
        if self.state is RequestState.ESTABLISHED:
            self._done(code, reason)

    def _done(self, code: int, reason: str) -> None:
        delivery = self.delivery
        assert delivery is not None
        delivery.cancel()
        self.stream.send(PublishDone(code, delivery.streams_opened, reason), fin=True)
        self._end()

    def ended(self) -> None:
        if self.delivery is not None:
            self.delivery.cancel()
        super().ended()


class IncomingFetch(IncomingTrackRequest):
    """FETCH from a peer."""

    def __init__(self, session: Session, stream: RequestStream, message: Fetch) -> None:
        super().__init__(session, stream, message)
        self.delivery: FetchDelivery | None = None

    def dispatch(self, handler: SessionHandler) -> None:
        handler.fetch_received(self)

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
        )
        self.delivery.begin()
        self._accepted()

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


class IncomingPublishNamespace(IncomingRequest):
    """PUBLISH_NAMESPACE from a peer."""

    def __init__(self, session: Session, stream: RequestStream, message: PublishNamespace) -> None:
        super().__init__(session, stream, message)
        self._namespace = message.namespace

    @property
    def namespace(self) -> TrackNamespace:
        return self._namespace

    def dispatch(self, handler: SessionHandler) -> None:
        handler.publish_namespace_received(self)

    def accept(self) -> None:
        if self._accept(RequestOk()):
            self._accepted()


class IncomingSubscribeNamespace(IncomingRequest):
    """SUBSCRIBE_NAMESPACE from a peer."""

    def __init__(
        self, session: Session, stream: RequestStream, message: SubscribeNamespace
    ) -> None:
        super().__init__(session, stream, message)
        self.prefix = message.prefix
        self._told: set[TrackNamespace] = set()

    @property
    def namespace(self) -> TrackNamespace:
        return self.prefix

    def dispatch(self, handler: SessionHandler) -> None:
        if self.session.prefix_overlaps(self.prefix, self):
            self.reject(RequestErrorCode.PREFIX_OVERLAP, _OVERLAP)
        else:
            handler.subscribe_namespace_received(self)

    def accept(self) -> None:
        if self._accept(RequestOk()):
            self._accepted()

    def add(self, namespace: TrackNamespace) -> None:
        """NAMESPACE, once per namespace."""
        if (
            self.state is RequestState.ESTABLISHED
            and is_prefix(self.prefix, namespace)
            and namespace not in self._told
        ):
            self._told.add(namespace)
            self.stream.send(Namespace(namespace[len(self.prefix) :]))

    def remove(self, namespace: TrackNamespace) -> None:
        if self.state is RequestState.ESTABLISHED and namespace in self._told:
            self._told.remove(namespace)
            self.stream.send(NamespaceDone(namespace[len(self.prefix) :]))

    def updated(self, update: RequestUpdate) -> None:
        prefix = update.parameters.track_namespace_prefix
        if prefix is not None:
            if is_reserved(prefix):
                raise RequestError(RequestErrorCode.DOES_NOT_EXIST, "the namespace is reserved")
            if self.session.prefix_overlaps(prefix, self):
                raise RequestError(RequestErrorCode.PREFIX_OVERLAP, _OVERLAP)
            self.prefix = prefix
            self._told = {n for n in self._told if is_prefix(prefix, n)}
        self.stream.send(RequestOk())
        if prefix is not None:
            self.session.handler.namespace_prefix_changed(self)


class IncomingTrackStatus(IncomingTrackRequest):
    """TRACK_STATUS from a peer."""

    def dispatch(self, handler: SessionHandler) -> None:
        handler.track_status_received(self)

    def accept(self, store: TrackStore) -> None:
        properties = store.properties if self.parameters.include_properties != 0 else ()
        if self._accept(RequestOk(Parameters(largest_object=store.largest), properties), fin=True):
            self._end()


class IncomingUnsupported(IncomingRequest):
    """PUBLISH and SUBSCRIBE_TRACKS: decoded, checked, and refused for now."""

    def __init__(self, session: Session, stream: RequestStream, message: Request) -> None:
        super().__init__(session, stream, message)
        self.properties = message.properties if isinstance(message, Publish) else ()

    @property
    def namespace(self) -> TrackNamespace:
        return ()  # it is refused, whatever it is about

    def dispatch(self, handler: SessionHandler) -> None:
        try:
            refuse_unknown_mandatory(self.properties)
        except RequestError as error:
            self.reject(RequestErrorCode(error.code), error.reason)
        else:
            self.reject(RequestErrorCode.NOT_SUPPORTED, "not supported by this endpoint")


def build_incoming(session: Session, stream: RequestStream, message: Request) -> IncomingRequest:
    """The object for a peer's opening message."""
    kinds: dict[type[Request], Callable[..., IncomingRequest]] = {
        Subscribe: IncomingSubscribe,
        Fetch: IncomingFetch,
        PublishNamespace: IncomingPublishNamespace,
        SubscribeNamespace: IncomingSubscribeNamespace,
        TrackStatus: IncomingTrackStatus,
    }
    return kinds.get(type(message), IncomingUnsupported)(session, stream, message)
