"""What an application does with a session's events."""

from __future__ import annotations

from moqt.requests import (
    IncomingFetch,
    IncomingPublish,
    IncomingPublishNamespace,
    IncomingSubscribe,
    IncomingSubscribeNamespace,
    IncomingSubscribeTracks,
    IncomingTrackStatus,
    OpenRequest,
)
from moqt.session.session import Session
from moqt.values.codes import RequestErrorCode, SessionErrorCode
from moqt.values.errors import SessionClosed
from moqt.values.messages import Goaway
from moqt.values.names import TrackNamespace
from moqt.values.tokens import Token


class SessionHandler:
    """What an application (publisher, relay) does with a session's events.

    The defaults refuse every request with NOT_SUPPORTED. Methods are called
    synchronously and must not block; a request may be answered later.
    """

    def session_established(self, session: Session) -> None: ...

    def session_closed(self, session: Session, error: SessionClosed) -> None: ...

    def subscribe_received(self, request: IncomingSubscribe) -> None:
        request.reject(RequestErrorCode.NOT_SUPPORTED, "this endpoint publishes nothing")

    def fetch_received(self, request: IncomingFetch) -> None:
        request.reject(RequestErrorCode.NOT_SUPPORTED, "this endpoint publishes nothing")

    def track_status_received(self, request: IncomingTrackStatus) -> None:
        request.reject(RequestErrorCode.NOT_SUPPORTED, "this endpoint publishes nothing")

    def publish_received(self, request: IncomingPublish) -> None:
        """PUBLISH for which no SUBSCRIBE_TRACKS of ours asked; those go to its `on_publish`.

        `request.accept(receiver)`, now or later, or `request.reject`. Unless FORWARD is 0,
        Objects may be on their way already; they are held meanwhile.
        """
        request.reject(RequestErrorCode.UNINTERESTED, "nobody here asked for the track")

    def publish_namespace_received(self, request: IncomingPublishNamespace) -> None:
        request.reject(RequestErrorCode.NOT_SUPPORTED, "this endpoint accepts no publishers")

    def subscribe_namespace_received(self, request: IncomingSubscribeNamespace) -> None:
        request.reject(RequestErrorCode.NOT_SUPPORTED, "this endpoint publishes nothing")

    def check_prefix(
        self,
        request: IncomingSubscribeNamespace | IncomingSubscribeTracks,
        prefix: TrackNamespace,
    ) -> RequestErrorCode | None:
        """Why an update may not move `request` to `prefix`, None when it may; asked before it
        is answered, and with the update's tokens in `request.tokens`."""
        return None

    def namespace_prefix_changed(self, request: IncomingSubscribeNamespace) -> None:
        """An update has changed `request.prefix`: `add` what is under the new one."""

    def subscribe_tracks_received(self, request: IncomingSubscribeTracks) -> None:
        """SUBSCRIBE_TRACKS: `accept` it, then `offer` each track under `request.prefix`, also
        those that come later, except what the subscriber publishes or may not have."""
        request.reject(RequestErrorCode.NOT_SUPPORTED, "this endpoint publishes nothing")

    def subscribe_tracks_changed(self, request: IncomingSubscribeTracks) -> None:
        """An update has changed its prefix or filters: `offer` the tracks that match now."""

    def check_scope(
        self, session: Session, authority: str | None, path: str | None
    ) -> SessionErrorCode | None:
        """At a server: why what the client dialled is not served, INVALID_AUTHORITY or
        INVALID_PATH; None when it is. None for either: the client did not name it."""
        return None

    def check_token(self, session: Session, token: Token) -> RequestErrorCode | None:
        """Why the token cannot be accepted, before the request it came with is looked at.

        EXPIRED_AUTH_TOKEN, MALFORMED_AUTH_TOKEN or UNAUTHORIZED; None when it can. Asked for
        each use, also through an alias, as a token may expire while it is registered. In
        SETUP the session is closed instead.
        """
        return None

    def goaway_received(self, session: Session, goaway: Goaway) -> None:
        """The peer is going to end the session: move to `goaway.uri` ("" = the same) and
        `session.drain()`. No request has changed by it."""

    def request_goaway_received(self, request: OpenRequest, goaway: Goaway) -> None:
        """The peer asks to move this one request, which may be of either side."""
