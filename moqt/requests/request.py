"""What every request has, whoever made it: updates both ways, GOAWAY, expiry, its end."""

from __future__ import annotations

from collections.abc import Callable

from moqt.requests.host import RequestHost
from moqt.requests.stream import RequestState, RequestStream
from moqt.requests.updates import UpdateAnswer, Updates
from moqt.values.errors import MoqtError, RequestError
from moqt.values.messages import (
    Goaway,
    Message,
    Parameters,
    Request,
    RequestErrorMessage,
    RequestOk,
    RequestUpdate,
)
from moqt.values.tokens import CARRIES_NOTHING, Token


class OpenRequest:
    """What stands behind a request stream, on either side of it.

    Building one sends nothing: the session submits what is ours.
    """

    def __init__(
        self, session: RequestHost, message: Request, stream: RequestStream | None = None
    ) -> None:
        """`stream` is the one that the peer opened with `message`; None for a request of ours."""
        self.session = session
        self.stream = stream or RequestStream(session, message.TYPE, requester=True)
        self.stream.owner = self
        self.request_id = message.request_id
        """Its Request ID; -1 while the request is queued."""
        self.parameters = message.parameters
        """Those of the message that opened the request."""
        self.tokens: tuple[Token, ...] = ()
        """Authorization Tokens the peer sent last for this request, resolved."""
        self.carried = CARRIES_NOTHING
        """Of our aliases in the peer's token cache: what the opening message says, unanswered."""
        self.expires_at: float | None = None
        """When the peer says it will end the request (EXPIRES), on the session's clock."""
        self.on_goaway: Callable[[Goaway], None] | None = None
        """Called with a GOAWAY on this request's stream, before the session's handler."""
        self.updates = Updates(session, self.stream, message.parameters.range_filters)

    @property
    def state(self) -> RequestState:
        return self.stream.state

    @property
    def over(self) -> bool:
        return self.stream.over

    # -- what the peer says ----------------------------------------------------------------

    def message(self, message: Message) -> None:
        match message:
            case Goaway():
                if self.on_goaway is not None:
                    self.on_goaway(message)
                self.session.handler.request_goaway_received(self, message)
            case RequestUpdate():
                if self.updates.received(message, self):
                    self._apply(message)
            case RequestOk():
                self.session.codec.check_request_ok(message, RequestUpdate.TYPE)
                update = self.updates.answered(message)
                self.expires(message.parameters)
                self.update_accepted(message, update.parameters)
                update.on_answer(message)
            case RequestErrorMessage():
                self.session.rules.check_redirect(message, self.stream.opening)
                error = request_error(message)
                self.updates.answered(message).on_answer(error)
                self.update_refused(error)
            case _:
                self.answered(message)

    def first_answer(self, message: Message) -> None:
        """The answer to the opening message; only requests of ours get one."""
        raise NotImplementedError

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

    def give_up(self, error: RequestError) -> None:
        """Cancel because of `error`, and say so to whoever waits."""
        raise NotImplementedError

    def expires(self, parameters: Parameters) -> None:
        """EXPIRES of an answer: absent leaves what was known, 0 means no known expiry."""
        if parameters.expires is not None:
            after = parameters.expires / 1000
            self.expires_at = self.session.clock.now + after if after else None

    def settle_tokens(self, answer: Message | None = None) -> None:
        """The opening message was answered, or (None) never will be."""
        if self.carried is not CARRIES_NOTHING or isinstance(answer, RequestErrorMessage):
            carried, self.carried = self.carried, CARRIES_NOTHING
            self.session.rules.settle_tokens(carried, answer)

    # -- GOAWAY ----------------------------------------------------------------------------

    def send_goaway(self, uri: str = "", timeout_ms: int = 0) -> None:
        """Ask the peer to move this request, to `uri` when it is given (MOQT "GOAWAY").

        After `timeout_ms`, unless 0, the request is reset with GOING_AWAY. Raises MisuseError
        when a client names a URI or FIN was sent.
        """
        self.stream.send_goaway(uri, timeout_ms)

    # -- updates of ours -------------------------------------------------------------------

    def update(self, parameters: Parameters, on_answer: UpdateAnswer) -> None:
        """REQUEST_UPDATE. `on_answer` is called once: with a RequestError also when the request,
        or all the peer has to say on it, ends before the answer, whoever ends it.

        It is held back while the peer's MAX_REQUEST_UPDATES are unanswered. Raises
        MisuseError when the request has ended, or the peer has ended its side of the stream or
        sent PUBLISH_DONE: nothing could be answered. RequestError INVALID_FILTER when the
        range filters would be more than the peer's MAX_FILTER_RANGES.
        """
        self.updates.ask(self, parameters, on_answer)

    def update_sent(self, message: RequestUpdate) -> None:
        """It goes out now, under its Request ID."""

    def update_accepted(self, message: RequestOk, asked: Parameters) -> None:
        """REQUEST_OK to an update with `asked`, before its sender hears of it."""

    def update_refused(self, error: RequestError) -> None:
        """A refused update ends the request (MOQT "REQUEST_UPDATE")."""
        raise NotImplementedError

    # -- updates of the peer ---------------------------------------------------------------

    def apply_held_updates(self, asked: int = 0) -> None:
        """What they waited for is there: our answer and what it starts, or what the gate wanted,
        which was `asked` about so many of them."""
        held = self.updates.release()
        for at, update in enumerate(held):
            if self.state is not RequestState.ESTABLISHED:
                break
            if at >= asked and not self.updates.admits(update, self):
                self.updates.hold(held[at:])
                break
            self._apply(update)
        self.session.transport.wake()

    def _apply(self, update: RequestUpdate) -> None:
        parameters = update.parameters
        try:
            if parameters.authorization_tokens:
                self.tokens = self.session.rules.resolve_tokens(parameters) or self.tokens
            if parameters.range_filters or parameters.fill_parameters is not None:
                self.session.rules.check_filters(parameters)
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
