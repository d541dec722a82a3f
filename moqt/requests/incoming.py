"""What a peer asks: what all requests of a peer have in common."""

from __future__ import annotations

from collections.abc import Callable

from moqt.requests.host import RequestHost
from moqt.requests.request import OpenRequest
from moqt.requests.stream import RequestState, RequestStream
from moqt.values.codes import RequestErrorCode, StreamErrorCode
from moqt.values.deadlines import Deadline
from moqt.values.errors import MoqtError, RequestError
from moqt.values.messages import (
    Fetch,
    Message,
    Parameters,
    Publish,
    Redirect,
    Request,
    RequestErrorMessage,
    RequestOk,
    RequestUpdate,
    Subscribe,
    TrackStatus,
)
from moqt.values.names import FullTrackName, TrackNamespace


class IncomingRequest(OpenRequest):
    """A peer's request. Answer it once, with `reject` or the subclass's `accept`."""

    def __init__(
        self, session: RequestHost, message: Request, stream: RequestStream | None = None
    ) -> None:
        super().__init__(session, message, stream)
        self._when_ended: list[Callable[[], None]] = []
        self.lifetime_ms: int | None = None
        """The EXPIRES that was told; each REQUEST_UPDATE extends the request by it again."""
        self._expiry: Deadline | None = None
        self._stalled = False

    @property
    def pending(self) -> bool:
        return self.state is RequestState.PENDING

    @property
    def namespace(self) -> TrackNamespace:
        """The namespace (or prefix of one) that it is about."""
        raise NotImplementedError

    def admit(self) -> bool:
        """Whether the application is to hear of it; what can be answered without it is."""
        return True

    def when_ended(self, action: Callable[[], None]) -> None:
        """Have `action` called once when the request is over, whoever ends it; those of several
        who ask are called in the order in which they asked."""
        self._when_ended.append(action)

    def reject(
        self,
        code: RequestErrorCode,
        reason: str = "",
        *,
        retry_after_ms: int | None = None,
        redirect: Redirect | None = None,
    ) -> None:
        """REQUEST_ERROR, then FIN. A no-op when the request was cancelled meanwhile.

        `redirect` goes with REDIRECT only; see `redirect`.
        """
        if not self.pending:
            return
        self.session.counters.requests_refused += 1
        self.stream.send(
            RequestErrorMessage(
                code, 0 if retry_after_ms is None else retry_after_ms + 1, reason, redirect
            ),
            fin=True,
        )
        self._end()

    def redirect(
        self,
        uri: str,
        namespace: TrackNamespace,
        name: bytes = b"",
        *,
        reason: str = "",
        retry_after_ms: int | None = None,
    ) -> None:
        """REQUEST_ERROR REDIRECT: ask at `uri` ("" = this session) for the names given.

        Raises MisuseError when a client names a URI.
        """
        self.session.rules.check_uri_to_peer(uri, "REDIRECT")
        self.reject(
            RequestErrorCode.REDIRECT,
            reason,
            retry_after_ms=retry_after_ms,
            redirect=Redirect(uri, namespace, name),
        )

    def _accept(self, message: Message, *, fin: bool = False) -> bool:
        if not self.pending:
            return False
        self.stream.send(message, fin=fin)
        return True

    def _accept_for(self, expires_ms: int | None) -> None:
        """REQUEST_OK with EXPIRES, and the updates that came before it."""
        if self._accept(RequestOk(Parameters(expires=expires_ms))):
            self.live_for(expires_ms)
            self.apply_held_updates()

    def live_for(self, lifetime_ms: int | None) -> None:
        """Cancel it that long from now (MOQT "EXPIRES Parameter"); None or 0 for no such end."""
        self.lifetime_ms = lifetime_ms
        self.session.clock.cancel(self._expiry)
        if lifetime_ms and self.state is RequestState.ESTABLISHED:
            self._expiry = self.session.clock.after(lifetime_ms / 1000, self._expired)

    def _expired(self) -> None:
        self.give_up(RequestError(RequestErrorCode.TIMEOUT, "its lifetime was not extended"))

    def updated(self, update: RequestUpdate) -> None:
        self.stream.send(self.extended())

    def extended(self) -> RequestOk:
        """The answer to an update, which begins the lifetime anew."""
        self.live_for(self.lifetime_ms)
        return RequestOk(Parameters(expires=self.lifetime_ms or None))

    def tell(self, message: Message) -> None:
        """A notification on a stream that has no end. A peer that reads nothing loses the
        request, by a reset with EXCESSIVE_LOAD, instead of having what it does not read kept."""
        if self._stalled:
            return
        if self.session.transport.send_room(self.stream.stream_id) > 0:
            self.stream.send(message)
        else:
            self._stalled = True  # later, as the caller may be going through its requests
            self.session.clock.after(0, lambda: self.revoke(StreamErrorCode.EXCESSIVE_LOAD))

    def _end(self) -> None:
        self.stream.closed()
        self.ended()

    def update_failed(self, error: RequestError) -> None:
        self.stream.send(RequestErrorMessage(error.code, 0, error.reason), fin=True)
        self._end()

    def peer_cancelled(self, code: int) -> None:
        self.ended()

    def peer_overstayed(self) -> None:
        self.ended()

    def give_up(self, error: RequestError) -> None:
        self.revoke()

    def ended(self) -> None:
        self.session.clock.cancel(self._expiry)
        self.session.requests.over(self.stream.stream_id)
        actions, self._when_ended = self._when_ended, []
        for action in actions:
            action()

    def revoke(self, code: StreamErrorCode = StreamErrorCode.CANCELLED) -> None:
        """Cancel it from this side: what was accepted holds no longer."""
        if self.state is not RequestState.CLOSED:
            self.stream.cancel(code)
            self.ended()

    def session_closed(self, error: MoqtError) -> None:
        if self.state is not RequestState.CLOSED:
            self.stream.end()
            self.ended()


class IncomingTrackRequest(IncomingRequest):
    """A peer's request about one track."""

    def __init__(
        self,
        session: RequestHost,
        message: Subscribe | Fetch | TrackStatus | Publish,
        stream: RequestStream | None = None,
    ) -> None:
        super().__init__(session, message, stream)
        self.name = FullTrackName(message.namespace, message.name)

    @property
    def namespace(self) -> TrackNamespace:
        return self.name.namespace
