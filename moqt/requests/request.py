"""What every request has, whoever made it: updates both ways, GOAWAY, expiry, its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from moqt.requests.stream import RequestState, RequestStream
from moqt.track.filters import merge_update
from moqt.values.codes import PropertyType, RequestErrorCode, SessionErrorCode, is_mandatory
from moqt.values.errors import (
    MisuseError,
    MoqtError,
    RequestError,
    SessionError,
    protocol_violation,
)
from moqt.values.messages import (
    Goaway,
    Message,
    Parameters,
    Properties,
    RequestErrorMessage,
    RequestOk,
    RequestUpdate,
)
from moqt.values.tokens import CARRIES_NOTHING, Carried, Token
from moqt.wire.primitives import iter_key_values, with_immutable

if TYPE_CHECKING:
    from moqt.session import Session
    from moqt.values.deadlines import Deadline

UpdateAnswer = Callable[[RequestOk | RequestError], None]

UPDATE_REFUSED_BY_END = "the request ended before its answer"


class SentUpdate:
    """A REQUEST_UPDATE of ours that has no answer yet; `timer` once it is on its way."""

    __slots__ = ("carried", "on_answer", "parameters", "timer")

    def __init__(self, parameters: Parameters, on_answer: UpdateAnswer) -> None:
        self.parameters = parameters
        self.on_answer = on_answer
        self.carried = CARRIES_NOTHING
        self.timer: Deadline | None = None


class RequestOwner:
    """What stands behind a request stream, on either side of it."""

    def __init__(self, session: Session, stream: RequestStream, parameters: Parameters) -> None:
        self.session = session
        self.stream = stream
        stream.owner = self
        self.request_id = -1
        """Its Request ID; -1 while the request is queued."""
        self.parameters = parameters
        """Those of the message that opened the request."""
        self.tokens: tuple[Token, ...] = ()
        """Authorization Tokens the peer sent last for this request, resolved."""
        self.carried = CARRIES_NOTHING
        """Of our aliases in the peer's token cache: what the opening message says, unanswered."""
        self.expires_at: float | None = None
        """When the peer says it will end the request (EXPIRES), on the session's clock."""
        self.on_goaway: Callable[[Goaway], None] | None = None
        """Called with a GOAWAY on this request's stream, before the session's handler."""
        self._asked_filters = parameters.range_filters
        """The range filters we have asked for, updates included."""
        self._updates: deque[SentUpdate] = deque()
        """Our updates without an answer, in order; the last ones may be unsent."""
        self._unsent_updates: deque[Parameters] = deque()
        """Held back while the peer's MAX_REQUEST_UPDATES are unanswered."""
        self.gate: Callable[[RequestUpdate], bool] | None = None
        """Asked about each update of the peer before it is applied; False holds it, and those
        after it, until `apply_held_updates`."""
        self._unread_answers = 0
        self._held_updates: list[RequestUpdate] = []
        """Updates of the peer that came before our answer, or that `gate` holds."""

    @property
    def state(self) -> RequestState:
        return self.stream.state

    @property
    def over(self) -> bool:
        return self.stream.state is RequestState.CLOSED

    # -- what the peer says ----------------------------------------------------------------

    def message(self, message: Message) -> None:
        match message:
            case Goaway():
                if self.on_goaway is not None:
                    self.on_goaway(message)
                self.session.handler.request_goaway_received(self, message)
            case RequestUpdate():
                self._update_received(message)
            case RequestOk():
                self._update_answered(message)
            case RequestErrorMessage():
                self.session.rules.check_redirect(message, self.stream.opening)
                error = request_error(message)
                self._next_update(message).on_answer(error)
                self.update_refused(error)
            case _:
                self.answered(message)

    def answered(self, message: Message) -> None:
        """An answer or notification; raises RequestError to give the request up."""
        raise NotImplementedError

    def peer_finished(self) -> None:
        """FIN is not cancellation: the peer only has no more to say."""

    def peer_cancelled(self, code: int) -> None:
        """RESET_STREAM or STOP_SENDING came; the stream is over already."""
        raise NotImplementedError

    def peer_overstayed(self) -> None:
        """Our GOAWAY ran out and the stream was reset."""
        raise NotImplementedError

    def session_closed(self, error: MoqtError) -> None:
        raise NotImplementedError

    def expires(self, parameters: Parameters) -> None:
        """EXPIRES of an answer: absent leaves what was known, 0 means no known expiry."""
        if parameters.expires is not None:
            after = parameters.expires / 1000
            self.expires_at = self.session.now + after if after else None

    # -- GOAWAY ----------------------------------------------------------------------------

    def send_goaway(self, uri: str = "", timeout_ms: int = 0) -> None:
        """Ask the peer to move this request, to `uri` when it is given (MOQT "GOAWAY").

        After `timeout_ms`, unless 0, the request is reset with GOING_AWAY. Raises MisuseError
        when a client names a URI or FIN was sent.
        """
        self.stream.send_goaway(uri, timeout_ms)

    # -- updates of ours -------------------------------------------------------------------

    def update(self, parameters: Parameters, on_answer: UpdateAnswer) -> None:
        """REQUEST_UPDATE. `on_answer` is called once, unless the request is cancelled here.

        It is held back while the peer's MAX_REQUEST_UPDATES are unanswered. Raises
        MisuseError when nothing more can be sent, RequestError INVALID_FILTER when the
        range filters would be more than the peer's MAX_FILTER_RANGES.
        """
        if self.state is RequestState.CLOSED or self.stream.fin_sent:
            raise MisuseError("the request is over, or FIN was sent: it cannot be updated")
        filters = merge_update(self._asked_filters, parameters.range_filters)
        self.session.rules.check_ranges_to_peer(filters, parameters.fill_parameters)
        self.session.rules.check_tokens_to_peer(parameters)
        self._asked_filters = filters
        self._updates.append(SentUpdate(parameters, on_answer))
        self._unsent_updates.append(parameters)
        self.flush_updates()

    def flush_updates(self) -> None:
        """Send what the peer's MAX_REQUEST_UPDATES allows now."""
        if self.state in (RequestState.QUEUED, RequestState.CLOSED):
            return
        limit = self.session.peer_update_limit
        while self._unsent_updates:
            unanswered = len(self._updates) - len(self._unsent_updates)
            if limit and unanswered >= limit:
                return
            parameters = self._unsent_updates.popleft()
            tokens = self.session.rules.sent_tokens
            parameters, self._updates[unanswered].carried = tokens.compress(
                parameters, register=False
            )
            message = RequestUpdate(self.session.next_request_id(), parameters)
            self.update_sent(message)
            timeout = self.session.config.request_timeout
            if timeout is not None:
                self._updates[unanswered].timer = self.session.call_later(
                    timeout, self._update_unanswered
                )
            self.stream.send(message)

    def update_sent(self, message: RequestUpdate) -> None:
        """It goes out now, under its Request ID."""

    def update_refused(self, error: RequestError) -> None:
        """A refused update ends the request (MOQT "REQUEST_UPDATE")."""
        raise NotImplementedError

    def _update_unanswered(self) -> None:
        self.give_up(
            RequestError(RequestErrorCode.TIMEOUT, "the peer did not answer a REQUEST_UPDATE")
        )

    def give_up(self, error: RequestError) -> None:
        """Cancel because of `error`, and say so to whoever waits."""
        raise NotImplementedError

    def _update_answered(self, message: RequestOk) -> None:
        self.session.codec.check_request_ok(message, RequestUpdate.TYPE)
        update = self._next_update(message)
        self.expires(message.parameters)
        self.update_accepted(message, update.parameters)
        update.on_answer(message)

    def update_accepted(self, message: RequestOk, asked: Parameters) -> None:
        """REQUEST_OK to an update with `asked`, before its sender hears of it."""

    def _next_update(self, answer: Message) -> SentUpdate:
        """The one that was answered; it makes room for more updates."""
        if len(self._updates) == len(self._unsent_updates):
            raise protocol_violation("a second answer to one request")
        update = self._updates.popleft()
        self.session.deadlines.cancel(update.timer)
        self._settle(update.carried, answer)
        self.flush_updates()
        return update

    def drop_updates(self, *, tell: bool = True) -> None:
        """The request is over: no update will be answered any more."""
        self._unsent_updates.clear()
        while self._updates:
            update = self._updates.popleft()
            self.session.deadlines.cancel(update.timer)
            self.session.rules.sent_tokens.release(update.carried)
            if tell:
                update.on_answer(
                    RequestError(RequestErrorCode.INTERNAL_ERROR, UPDATE_REFUSED_BY_END)
                )

    # -- our tokens in the peer's cache ----------------------------------------------------

    def settle_tokens(self, answer: Message | None = None) -> None:
        """The opening message was answered, or (None) never will be."""
        carried, self.carried = self.carried, CARRIES_NOTHING
        self._settle(carried, answer)

    def _settle(self, carried: Carried, answer: Message | None) -> None:
        tokens = self.session.rules.sent_tokens
        unknown = isinstance(answer, RequestErrorMessage) and (
            answer.code == RequestErrorCode.UNKNOWN_AUTH_TOKEN_ALIAS
        )
        if answer is None or unknown:
            tokens.release(carried)
        else:
            tokens.settle(carried)
        if unknown:
            tokens.doubt()

    # -- updates of the peer ---------------------------------------------------------------

    def _update_received(self, message: RequestUpdate) -> None:
        self.session.rules.use_request_id(message.request_id)
        self.session.counters.updates_received += 1
        self.session.codec.check_request_update(message.parameters, self.stream.opening)
        self._count_unread()
        if (
            self.state is not RequestState.PENDING
            and not self._held_updates
            and (self.gate is None or self.gate(message))
        ):
            self._apply(message)
            return
        self._held_updates.append(message)
        limit = self.session.config.max_request_updates
        if len(self._held_updates) > limit:
            raise SessionError(
                SessionErrorCode.TOO_MANY_REQUEST_UPDATES,
                f"more than {limit} REQUEST_UPDATEs are unanswered",
            )

    def _count_unread(self) -> None:
        """An answer that no credit is left for is not answered yet, as the peer sees it."""
        stream, limit = self.stream, self.session.config.max_request_updates
        if stream.fin_sent or self.session.transport.send_room(stream.stream_id) > 0:
            self._unread_answers = 0
            return
        self._unread_answers += 1
        if self._unread_answers > limit:
            raise SessionError(
                SessionErrorCode.TOO_MANY_REQUEST_UPDATES,
                f"{self._unread_answers} REQUEST_UPDATEs, and their answers are not read",
            )

    def apply_held_updates(self) -> None:
        """What they waited for is there: our answer and what it starts, or what `gate` wanted."""
        held, self._held_updates = self._held_updates, []
        for update in held:
            if self.state is RequestState.ESTABLISHED:
                self._apply(update)
        self.session.transport.wake()

    def _apply(self, update: RequestUpdate) -> None:
        try:
            tokens = self.session.rules.resolve_tokens(update.parameters)
            self.tokens = tokens or self.tokens
            self.session.rules.check_filters(update.parameters)
            self.updated(update)
        except RequestError as error:
            self.update_failed(error)

    def updated(self, update: RequestUpdate) -> None:
        """Apply it and answer; raises RequestError when it cannot be applied."""
        self.stream.send(RequestOk())

    def update_failed(self, error: RequestError) -> None:
        """REQUEST_ERROR, and with it the request ends (MOQT "REQUEST_UPDATE")."""
        raise NotImplementedError


def request_error(message: RequestErrorMessage) -> RequestError:
    redirect = message.redirect
    return RequestError(
        message.code,
        message.reason,
        retry_after_ms=message.retry_interval - 1 if message.retry_interval else None,
        redirect=(redirect.uri, redirect.namespace, redirect.name) if redirect else None,
    )


def check_track_properties(properties: Properties, known: frozenset[int]) -> None:
    """Raise RequestError for Track Properties that this end cannot accept.

    UNSUPPORTED_EXTENSION for a mandatory one not in `known`, MALFORMED_TRACK for
    IMMUTABLE_PROPERTIES that break their rules. (MOQT "Properties", "Immutable Properties")
    """
    immutable = [p for p in properties if p.type == PropertyType.IMMUTABLE_PROPERTIES]
    if len(immutable) > 1:
        raise _malformed("IMMUTABLE_PROPERTIES twice")
    for pair in immutable:
        try:
            nested = list(iter_key_values(pair.value if isinstance(pair.value, bytes) else b""))
        except SessionError:
            raise _malformed("IMMUTABLE_PROPERTIES that cannot be read") from None
        if any(type_ == PropertyType.IMMUTABLE_PROPERTIES for type_, _ in nested):
            raise _malformed("IMMUTABLE_PROPERTIES inside IMMUTABLE_PROPERTIES")
    for type_, _ in with_immutable((pair.type, pair.value) for pair in properties):
        if is_mandatory(type_) and type_ not in known:
            raise RequestError(
                RequestErrorCode.UNSUPPORTED_EXTENSION,
                f"the track has mandatory property {type_:#x}, which is not known here",
            )


def _malformed(what: str) -> RequestError:
    return RequestError(RequestErrorCode.MALFORMED_TRACK, f"the track has {what}")


def track_property(properties: Properties, type_: int) -> int | bytes | None:
    """The value of a Track Property, also from inside IMMUTABLE_PROPERTIES; None if absent."""
    for found, value in with_immutable((pair.type, pair.value) for pair in properties):
        if found == type_:
            return value
    return None
