"""A request stream: what may travel on it, by table; FIN, cancel, reject and GOAWAY."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from moqt.values.codes import MessageType, StreamErrorCode
from moqt.values.errors import MisuseError, protocol_violation
from moqt.values.messages import Goaway, Message
from moqt.values.states import move

if TYPE_CHECKING:
    from moqt.requests.request import RequestOwner
    from moqt.session import Session
    from moqt.values.deadlines import Deadline

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


class RequestState(IntEnum):
    """Where a request stands (MOQT "Subscription State Management", for every request)."""

    QUEUED = 0
    """Ours, and the peer grants no stream for it yet."""
    PENDING = 1
    ESTABLISHED = 2
    CLOSED = 3


_S = RequestState
REQUEST_MOVES: dict[RequestState, frozenset[RequestState]] = {
    _S.QUEUED: frozenset({_S.PENDING, _S.CLOSED}),
    _S.PENDING: frozenset({_S.ESTABLISHED, _S.CLOSED}),
    _S.ESTABLISHED: frozenset({_S.CLOSED}),
    _S.CLOSED: frozenset(),
}


class RequestStream:
    """One request stream: framing, the tables above, FIN, cancel and reject."""

    def __init__(
        self, session: Session, opening: MessageType, *, requester: bool, stream_id: int = -1
    ) -> None:
        self.session = session
        self.stream_id = stream_id
        """-1 while the request is queued."""
        self.opening = opening
        self.requester = requester
        self.state = RequestState.QUEUED if stream_id < 0 else RequestState.PENDING
        self.goaway_seen = False
        self.goaway_sent = False
        self.fin_sent = False
        self.fin_received = False
        self.owner: RequestOwner
        self._goaway_timer: Deadline | None = None

    def move(self, to: RequestState) -> None:
        self.state = move(REQUEST_MOVES, self.state, to)
        if to is RequestState.CLOSED:
            self.session.deadlines.cancel(self._goaway_timer)
            self.owner.settle_tokens()

    def opened(self, stream_id: int) -> None:
        """The peer grants a stream: the opening message goes out on it now."""
        self.stream_id = stream_id
        self.move(RequestState.PENDING)

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
            self.session.rules.check_goaway(message)
        if self.state is not RequestState.CLOSED:
            self.owner.message(message)

    def send(self, message: Message, *, fin: bool = False) -> None:
        if not self.fin_sent:
            self.fin_sent = fin
            self.session.send_message(self.stream_id, message, fin)

    def send_goaway(self, uri: str, timeout_ms: int) -> None:
        """GOAWAY for this request only; after the time it is reset (MOQT "GOAWAY")."""
        if self.state in (RequestState.QUEUED, RequestState.CLOSED) or self.goaway_sent:
            return
        if self.fin_sent:
            raise MisuseError("FIN was sent on the request stream: no GOAWAY can follow")
        self.session.rules.check_uri_to_peer(uri, "GOAWAY")
        self.goaway_sent = True
        self.send(Goaway(uri, timeout_ms))
        if timeout_ms:
            self._goaway_timer = self.session.call_later(timeout_ms / 1000, self._goaway_timeout)

    def _goaway_timeout(self) -> None:
        if self.state is not RequestState.CLOSED:
            self.cancel(StreamErrorCode.GOING_AWAY)
            self.owner.peer_overstayed()

    def finish(self) -> None:
        """FIN our direction: nothing more from us."""
        if not self.fin_sent:
            self.fin_sent = True
            if self.stream_id >= 0:
                self.session.transport.send(self.stream_id, b"", fin=True)
                self.session.transport.wake()

    def cancel(self, code: StreamErrorCode = StreamErrorCode.CANCELLED) -> None:
        """End both directions abruptly: RESET_STREAM and STOP_SENDING."""
        if self.state is RequestState.CLOSED:
            return
        self.move(RequestState.CLOSED)
        if self.stream_id < 0:
            self.session.queue.take_back(self.owner)
            return
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
        self.move(RequestState.CLOSED)
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
