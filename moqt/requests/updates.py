"""The REQUEST_UPDATEs of one request, both ways (MOQT "REQUEST_UPDATE").

Each is answered, in order, until the request ends. `Updates` knows which of ours have no answer
and which of the peer's have to wait; what an update means is the request's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from moqt.requests.host import RequestHost
from moqt.requests.stream import RequestStream
from moqt.track.filters import RangeFilters, merge_update
from moqt.values.codes import RequestErrorCode, SessionErrorCode
from moqt.values.deadlines import Deadline
from moqt.values.errors import MisuseError, RequestError, SessionError, protocol_violation
from moqt.values.messages import Message, Parameters, RequestOk, RequestUpdate
from moqt.values.tokens import CARRIES_NOTHING

UpdateAnswer = Callable[[RequestOk | RequestError], None]

REFUSED_BY_END = "the request ended before its answer"


class SentUpdate:
    """A REQUEST_UPDATE of ours that has no answer yet; `timer` once it is on its way."""

    __slots__ = ("carried", "on_answer", "parameters", "timer")

    def __init__(self, parameters: Parameters, on_answer: UpdateAnswer) -> None:
        self.parameters = parameters
        self.on_answer = on_answer
        self.carried = CARRIES_NOTHING
        self.timer: Deadline | None = None


class Updated(Protocol):
    """The request whose updates they are."""

    @property
    def session(self) -> RequestHost: ...

    @property
    def stream(self) -> RequestStream: ...

    def update_sent(self, message: RequestUpdate) -> None:
        """One of ours goes out now, under its Request ID."""

    def give_up(self, error: RequestError) -> None: ...


def _unanswered(request: Updated) -> None:
    request.give_up(
        RequestError(RequestErrorCode.TIMEOUT, "the peer did not answer a REQUEST_UPDATE")
    )


class Updates:
    """What both sides ask to change of one request, and what is still to be answered."""

    __slots__ = (
        "_held",
        "_request",
        "_sent",
        "_session",
        "_stream",
        "_unread_answers",
        "_unsent",
        "asked_filters",
        "gate",
    )

    def __init__(self, session: RequestHost, stream: RequestStream, filters: RangeFilters) -> None:
        self._request: Updated | None = None
        """While some of ours may still be answered: else it and this would refer to each other,
        and be left to the cyclic collector."""
        self._session = session
        self._stream = stream
        self.asked_filters = filters
        """The range filters we have asked for, updates included."""
        self._sent: list[SentUpdate] = []
        """Ours without an answer, in order. Lists, as most requests have none ever: a deque
        takes ten times the memory."""
        self._unsent: list[SentUpdate] = []
        """Ours that are held back: until the request is open, and while the peer's
        MAX_REQUEST_UPDATES are unanswered."""
        self._held: list[RequestUpdate] = []
        """The peer's that came before our answer, or that `gate` holds."""
        self._unread_answers = 0
        self.gate: Callable[[Any, RequestUpdate], bool] | None = None
        """Asked about a request and each update of it that comes before that is applied; False
        holds it, and those after it, until `release`."""

    def __len__(self) -> int:
        """How many of either side are remembered."""
        return len(self._sent) + len(self._unsent) + len(self._held)

    # -- ours ------------------------------------------------------------------------------

    def ask(self, request: Updated, parameters: Parameters, on_answer: UpdateAnswer) -> None:
        """Send it, or hold it back. Raises as the request's `update` says."""
        stream, rules = self._stream, self._session.rules
        if stream.over or stream.ours.fin or stream.theirs.fin:
            raise MisuseError("the request has ended at one side: it cannot be updated")
        if not stream.takes_updates:
            raise MisuseError(f"this side of {stream.opening.name} has nothing to update")
        filters = self.asked_filters
        if parameters.range_filters:
            filters = merge_update(filters, parameters.range_filters)
        rules.check_ranges_to_peer(filters, parameters.fill_parameters)
        rules.check_tokens_to_peer(parameters)
        self._session.codec.encode_message(RequestUpdate(0, parameters))
        self.asked_filters = filters
        self._request = request
        self._unsent.append(SentUpdate(parameters, on_answer))
        self.flush()

    def flush(self) -> None:
        """Send what may be sent now."""
        stream, session = self._stream, self._session
        if not self._unsent or stream.over or not stream.ours.stage:
            return
        request, limit = self._request, session.peer_update_limit
        assert request is not None, "who asks is known until all is answered"
        while self._unsent and not (limit and len(self._sent) >= limit):
            update = self._unsent.pop(0)
            self._sent.append(update)
            parameters, update.carried = session.rules.sent_tokens.compress(
                update.parameters, register=False
            )
            message = RequestUpdate(session.requests.next_id(), parameters)
            request.update_sent(message)
            timeout = session.config.request_timeout
            if timeout is not None:
                update.timer = session.clock.after(timeout, partial(_unanswered, request))
            stream.send(message)

    def answered(self, answer: Message) -> SentUpdate:
        """The one of ours that `answer` is to; it makes room for more."""
        if not self._sent:
            raise protocol_violation("a second answer to one request")
        update = self._sent.pop(0)
        self._session.clock.cancel(update.timer)
        self._session.rules.settle_tokens(update.carried, answer)
        self.flush()
        return update

    def settle_all(self) -> None:
        """None of ours will be answered any more: the request is over, or the peer has said all
        it has to say. An update that crosses such an end is no fault of either side."""
        self._request = None
        while waiting := self._sent or self._unsent:
            update = waiting.pop(0)
            self._session.clock.cancel(update.timer)
            self._session.rules.sent_tokens.release(update.carried)
            update.on_answer(RequestError(RequestErrorCode.INTERNAL_ERROR, REFUSED_BY_END))

    # -- the peer's ------------------------------------------------------------------------

    def received(self, message: RequestUpdate, request: Updated) -> bool:
        """Whether to apply it now. Raises SessionError for one that may not be, and for more
        than our MAX_REQUEST_UPDATES without an answer."""
        session, stream = self._session, self._stream
        session.rules.use_request_id(message.request_id)
        session.counters.updates_received += 1
        session.codec.check_request_update(message.parameters, stream.opening)
        limit = session.config.max_request_updates
        # An answer that no credit is left for is not answered yet, as the peer sees it.
        if stream.ours.fin or session.transport.send_room(stream.stream_id) > 0:
            self._unread_answers = 0
        else:
            self._unread_answers += 1
            if self._unread_answers > limit:
                raise SessionError(
                    SessionErrorCode.TOO_MANY_REQUEST_UPDATES,
                    f"{self._unread_answers} REQUEST_UPDATEs, and their answers are not read",
                )
        if stream.ours.stage and not self._held and self.admits(message, request):
            return True
        self._held.append(message)
        if len(self._held) > limit:
            raise SessionError(
                SessionErrorCode.TOO_MANY_REQUEST_UPDATES,
                f"more than {limit} REQUEST_UPDATEs are unanswered",
            )
        return False

    def admits(self, message: RequestUpdate, request: Updated) -> bool:
        """Whether nothing but our answer holds it back."""
        return self.gate is None or self.gate(request, message)

    def hold(self, messages: list[RequestUpdate]) -> None:
        """They have to wait, before any that has come meanwhile."""
        self._held = messages + self._held

    def release(self) -> list[RequestUpdate]:
        """Those that had to wait, to be applied in this order."""
        held, self._held = self._held, []
        return held
