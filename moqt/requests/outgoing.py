"""What we ask of a peer: what all requests of ours have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moqt.requests.host import RequestHost
from moqt.requests.request import OpenRequest, request_error
from moqt.requests.stream import RequestState, RequestStream
from moqt.values.codes import RequestErrorCode
from moqt.values.deadlines import Deadline
from moqt.values.errors import MoqtError, RequestError
from moqt.values.messages import (
    Message,
    Request,
    RequestErrorMessage,
)


class OutgoingRequest(OpenRequest):
    """A request of ours. Subclasses say what happens on each answer.

    It is sent when the peer grants a stream: at once, or later in the order in which the
    requests were made. Until then it is QUEUED and has no Request ID; `cancel` takes it back.
    """

    def __init__(
        self, session: RequestHost, message: Request, stream: RequestStream | None = None
    ) -> None:
        super().__init__(session, message, stream)
        self.message_sent = message
        self.on_answer: Callable[[MoqtError | None], None] | None = None
        """Called once: with None when the request was accepted, else with why it was not."""
        self._answer_timer: Deadline | None = None

    def opening_message(self, request_id: int) -> Request:
        """The message that opens the request, now that it is sent."""
        return replace(self.message_sent, request_id=request_id)

    def open(self, stream_id: int, request_id: int) -> None:
        """The peer grants a stream: send the request."""
        self.request_id = request_id
        message = self.opening_message(request_id)
        parameters, self.carried = self.session.rules.sent_tokens.compress(message.parameters)
        self.message_sent = replace(message, parameters=parameters)
        self.stream.open(stream_id, self.message_sent)
        self.session.clock.cancel(self._answer_timer)
        timeout = self.session.config.request_timeout
        if timeout is not None:
            self._answer_timer = self.session.clock.after(timeout + self.patience, self._unanswered)
        self.opened()
        self.updates.flush()

    def await_stream(self, timeout: float, too_late: Callable[[OutgoingRequest], None]) -> None:
        """The peer grants no stream for now: `too_late` is called if that takes so long."""
        self._answer_timer = self.session.clock.after(timeout, lambda: too_late(self))

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

    def first_answer(self, message: Message) -> None:
        if isinstance(message, RequestErrorMessage):
            self.session.rules.check_redirect(message, self.stream.opening)
            self.settle_tokens(message)
            self._close()
            self._fail(request_error(message))
            return
        # The peer has read the opening message, and with it the tokens it registers.
        self.settle_tokens(message)
        try:
            self.answered(message)
        except RequestError as error:
            self.give_up(error)
        else:
            self.notify(None)

    def message(self, message: Message) -> None:
        try:
            super().message(message)
        except RequestError as error:
            self.give_up(error)

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
            self.updates.settle_all()
        if self.state is not RequestState.CLOSED:  # whoever was told may have cancelled
            self.cancel()
            self._fail(error)

    def failed(self, error: MoqtError) -> None:
        """The request was refused, or ended by the peer or with the session."""

    def _fail(self, error: MoqtError) -> None:
        self.notify(error)
        self.updates.settle_all()
        self.failed(error)

    def notify(self, error: MoqtError | None) -> None:
        """The answer has come, or never will."""
        self.session.clock.cancel(self._answer_timer)
        if self.on_answer is not None:
            on_answer, self.on_answer = self.on_answer, None
            on_answer(error)

    def cancel(self) -> None:
        """Give the request up; the receiver hears nothing more of it."""
        self.updates.settle_all()
        self.session.clock.cancel(self._answer_timer)
        self._forget()
        self.stream.cancel()

    @property
    def owed(self) -> bool:
        """Whether the peer still owes a message that is no answer to an update: those are
        settled by its end (MOQT "REQUEST_UPDATE")."""
        return self.state is RequestState.PENDING

    def peer_finished(self) -> None:
        if not self.owed:
            self.updates.settle_all()
        else:
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
            self.stream.end()
            self._forget()
            self._fail(error)

    def _close(self) -> None:
        self._forget()
        self.stream.closed()
        self.updates.settle_all()

    def _forget(self) -> None:
        """Drop what the session remembers for this request."""
