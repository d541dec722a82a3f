"""A request stream: what either side may say on it, by one table; FIN, cancel, reject and GOAWAY.

What a side may say depends on what that side has said before, and on nothing of the other's: so
no message is illegal because it crossed another one on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple, Protocol

from moqt.requests.host import RequestHost
from moqt.values.codes import MessageType, StreamErrorCode
from moqt.values.deadlines import Deadline
from moqt.values.errors import MisuseError, RequestError, protocol_violation
from moqt.values.messages import Goaway, Message, RequestUpdate


class Stage(IntEnum):
    """How far one side of a request stream has got."""

    SILENT = 0
    """The requester has not opened it; the answering side has not answered."""
    TALKING = 1
    DONE = 2
    """It has said PUBLISH_DONE, after which it has nothing more to say."""


Says = Mapping[Stage, Mapping[MessageType, Stage]]
"""What one side may say at each stage, and at which stage it is then."""


class Sides(NamedTuple):
    """What both sides of a kind of request stream may say."""

    requester: Says
    answering: Says


_M = MessageType
_SILENT, _TALKING, _DONE = Stage.SILENT, Stage.TALKING, Stage.DONE
_UPDATES = {_M.REQUEST_UPDATE: _TALKING, _M.GOAWAY: _TALKING}
_ANSWERS = {_M.REQUEST_OK: _TALKING, _M.REQUEST_ERROR: _TALKING, _M.GOAWAY: _TALKING}
_DELIVERS = {_M.PUBLISH_STATE_NOTIFY: _TALKING, _M.PUBLISH_DONE: _DONE}


def _sides(
    opening: MessageType,
    requester: Mapping[MessageType, Stage],
    accepting: MessageType,
    answering: Mapping[MessageType, Stage],
) -> Sides:
    return Sides(
        {_SILENT: {opening: _TALKING}, _TALKING: requester, _DONE: {}},
        {
            _SILENT: {accepting: _TALKING, _M.REQUEST_ERROR: _TALKING, _M.GOAWAY: _SILENT},
            _TALKING: answering,
            _DONE: {},
        },
    )


REQUEST_TABLE: dict[MessageType, Sides] = {
    _M.SUBSCRIBE: _sides(_M.SUBSCRIBE, _UPDATES, _M.SUBSCRIBE_OK, {**_ANSWERS, **_DELIVERS}),
    _M.PUBLISH: _sides(
        _M.PUBLISH,
        {**_UPDATES, **_ANSWERS, **_DELIVERS},
        _M.REQUEST_OK,
        {**_ANSWERS, **_UPDATES},
    ),
    _M.FETCH: _sides(_M.FETCH, _UPDATES, _M.FETCH_OK, _ANSWERS),
    _M.TRACK_STATUS: _sides(
        _M.TRACK_STATUS, {_M.GOAWAY: _TALKING}, _M.REQUEST_OK, {_M.GOAWAY: _TALKING}
    ),
    _M.PUBLISH_NAMESPACE: _sides(_M.PUBLISH_NAMESPACE, _UPDATES, _M.REQUEST_OK, _ANSWERS),
    _M.SUBSCRIBE_NAMESPACE: _sides(
        _M.SUBSCRIBE_NAMESPACE,
        _UPDATES,
        _M.REQUEST_OK,
        {**_ANSWERS, _M.NAMESPACE: _TALKING, _M.NAMESPACE_DONE: _TALKING},
    ),
    _M.SUBSCRIBE_TRACKS: _sides(
        _M.SUBSCRIBE_TRACKS,
        _UPDATES,
        _M.REQUEST_OK,
        {**_ANSWERS, _M.PUBLISH_SKIPPED: _TALKING},
    ),
}
"""What may be said on a request stream, by the message that opened it: checked for what comes
and for what goes."""


class Crossing(NamedTuple):
    """Two messages of one request stream that pass each other on their way."""

    opening: MessageType
    requester: Stage
    answering: Stage
    said: MessageType
    """By the requester, at its stage."""
    answered: MessageType
    """By the answering side, at its stage."""


def crossings(opening: MessageType) -> Iterator[Crossing]:
    """Every pair of messages that can cross on such a stream, from each pair of stages."""
    sides = REQUEST_TABLE[opening]
    for ours in (Stage.TALKING, Stage.DONE):
        for theirs in Stage:
            for said in sides.requester[ours]:
                for answered in sides.answering[theirs]:
                    yield Crossing(opening, ours, theirs, said, answered)


class RequestState(IntEnum):
    """Where a request stands (MOQT "Subscription State Management", for every request)."""

    QUEUED = 0
    """Ours, and the peer grants no stream for it yet."""
    PENDING = 1
    ESTABLISHED = 2
    CLOSED = 3


class Side:
    """What one side of a request stream has said."""

    __slots__ = ("fin", "goaway", "stage")

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.goaway = False
        self.fin = False
        """Its direction is over: by FIN or, with the request, by a reset."""


class StreamOwner(Protocol):
    """The request behind a request stream."""

    def message(self, message: Message) -> None:
        """What the peer says, but for the first answer."""

    def first_answer(self, message: Message) -> None:
        """The answer to the message that opened the stream."""

    def peer_finished(self) -> None:
        """FIN is not cancellation: the peer only has no more to say."""

    def peer_cancelled(self, code: int) -> None:
        """RESET_STREAM or STOP_SENDING came; the stream is over already."""

    def peer_overstayed(self) -> None:
        """Our GOAWAY ran out and the stream was reset."""

    def settle_tokens(self) -> None:
        """The opening message will not be answered any more."""


class RequestStream:
    """One request stream: framing, the table above, FIN, cancel and reject."""

    def __init__(
        self, session: RequestHost, opening: MessageType, *, requester: bool, stream_id: int = -1
    ) -> None:
        self.session = session
        self.stream_id = stream_id
        """-1 while the request is queued."""
        self.opening = opening
        self.requester = requester
        """Whether the request is ours."""
        self.ours = Side(Stage.SILENT)
        self.theirs = Side(Stage.SILENT if requester else Stage.TALKING)
        sides = REQUEST_TABLE[opening]
        self._we_say, self._they_say = sides if requester else (sides.answering, sides.requester)
        self.over = False
        """The request has ended, whatever may still come on the stream."""
        self.owner: StreamOwner | None = None
        """The request, until it is over: then nothing here refers to it."""
        self._goaway_timer: Deadline | None = None

    @property
    def state(self) -> RequestState:
        """Where the request stands, by how far both sides have got."""
        if self.over:
            return RequestState.CLOSED
        if self.ours.stage and self.theirs.stage:
            return RequestState.ESTABLISHED
        return RequestState.PENDING if self.stream_id >= 0 else RequestState.QUEUED

    @property
    def takes_updates(self) -> bool:
        """Whether REQUEST_UPDATE is ours to send, at some time."""
        return MessageType.REQUEST_UPDATE in self._we_say[Stage.TALKING]

    def end(self) -> StreamOwner | None:
        """The request, which this returns, is over; the directions that are open are ended by the
        caller."""
        self.over = True
        self.session.clock.cancel(self._goaway_timer)
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.settle_tokens()
        return owner

    def open(self, stream_id: int, message: Message) -> None:
        """The peer grants a stream: the opening message goes out on it now."""
        self.stream_id = stream_id
        self.ours.stage = Stage.TALKING
        self.session.send_message(stream_id, message, self.ours.fin)

    def receive(self, message: Message) -> None:
        kind, theirs = message.TYPE, self.theirs
        stage = self._they_say[theirs.stage].get(kind)
        if stage is None:
            raise protocol_violation(
                f"{kind.name} does not belong on a {self.opening.name} stream {_WHEN[theirs.stage]}"
            )
        if isinstance(message, Goaway):
            if theirs.goaway:
                raise protocol_violation("second GOAWAY on a request stream")
            theirs.goaway = True
            self.session.rules.check_goaway(message)
        before, theirs.stage = theirs.stage, stage
        if self.owner is None:
            self._received_after_end(message)
        elif before is Stage.SILENT and stage is not before:
            self.owner.first_answer(message)
        else:
            self.owner.message(message)

    def _received_after_end(self, message: Message) -> None:
        """It crossed the end of the request: nothing is answered, and nothing kept of it. A
        REQUEST_UPDATE has used its Request ID, and what it registers is registered, all the
        same."""
        if isinstance(message, RequestUpdate):
            self.session.rules.use_request_id(message.request_id)
            self.session.codec.check_request_update(message.parameters, self.opening)
            with suppress(RequestError):  # nobody is told any more
                self.session.rules.resolve_tokens(message.parameters)

    def send(self, message: Message, *, fin: bool = False) -> None:
        """Say it, unless our direction is over. Raises MisuseError for what is not ours to say."""
        ours = self.ours
        if ours.fin:
            return
        stage = self._we_say[ours.stage].get(message.TYPE)
        if stage is None:
            raise MisuseError(
                f"{message.TYPE.name} cannot be sent on a {self.opening.name} stream "
                f"{_WHEN[ours.stage]}"
            )
        self.session.send_message(self.stream_id, message, fin)
        ours.stage = stage
        ours.fin = fin

    def send_goaway(self, uri: str, timeout_ms: int) -> None:
        """GOAWAY for this request only; after the time it is reset (MOQT "GOAWAY")."""
        if self.over or self.stream_id < 0 or self.ours.goaway:
            return
        if self.ours.fin:
            raise MisuseError("FIN was sent on the request stream: no GOAWAY can follow")
        self.session.rules.check_uri_to_peer(uri, "GOAWAY")
        self.ours.goaway = True
        self.send(Goaway(uri, timeout_ms))
        if timeout_ms:
            self._goaway_timer = self.session.clock.after(timeout_ms / 1000, self._goaway_timeout)

    def _goaway_timeout(self) -> None:
        owner = self.owner
        if owner is not None:
            self.cancel(StreamErrorCode.GOING_AWAY)
            owner.peer_overstayed()

    def finish(self) -> None:
        """FIN our direction: nothing more from us."""
        if not self.ours.fin:
            self.ours.fin = True
            if self.stream_id >= 0:
                self.session.transport.send(self.stream_id, b"", fin=True)
                self.session.transport.wake()

    def cancel(self, code: StreamErrorCode = StreamErrorCode.CANCELLED) -> None:
        """End both directions abruptly: RESET_STREAM and STOP_SENDING."""
        if self.over:
            return
        owner = self.end()
        if self.stream_id < 0:
            if owner is not None:
                self.session.requests.take_back(owner)
            return
        if not self.ours.fin:
            self.ours.fin = True
            self.session.transport.reset(self.stream_id, code)
        if not self.theirs.fin:
            self.session.transport.stop_receiving(self.stream_id, code)
        self.session.transport.wake()
        self.session.forget_stream(self.stream_id)

    def cancel_reading(self) -> None:
        """The request is over already: do not wait for the peer's FIN."""
        if not self.theirs.fin:
            self.session.transport.stop_receiving(self.stream_id, StreamErrorCode.CANCELLED)
        self.session.forget_stream(self.stream_id)

    def closed(self) -> None:
        """Nothing more will be said on either side."""
        self.end()
        self.finish()
        self.session.requests.forget(self.stream_id)
        if self.theirs.fin:
            self.session.forget_stream(self.stream_id)

    def peer_finished(self) -> None:
        self.theirs.fin = True
        if self.owner is None:
            self.session.forget_stream(self.stream_id)
        else:
            self.owner.peer_finished()

    def peer_cancelled(self, code: int) -> None:
        """RESET_STREAM or STOP_SENDING: the request is over, whichever came first."""
        if self.over:
            self.cancel_reading()
            return
        if self.ours.fin and self.theirs.fin:
            return  # it crossed our FIN: there is nothing left to cancel
        owner = self.owner
        self.cancel()
        if owner is not None:
            owner.peer_cancelled(code)


_WHEN = {
    Stage.SILENT: "before its answer",
    Stage.TALKING: "at this point",
    Stage.DONE: "after PUBLISH_DONE",
}
