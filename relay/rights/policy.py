"""Who may do what: the hook that a relay asks (MOQT "Authorization")."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from moqt.session import Session
from moqt.values.codes import RequestErrorCode
from moqt.values.names import TrackNamespace
from moqt.values.tokens import Token


class Action(StrEnum):
    """What a session asks for (the request's name in the draft)."""

    PUBLISH_NAMESPACE = "PUBLISH_NAMESPACE"
    PUBLISH = "PUBLISH"
    SUBSCRIBE_NAMESPACE = "SUBSCRIBE_NAMESPACE"
    SUBSCRIBE_TRACKS = "SUBSCRIBE_TRACKS"
    SUBSCRIBE = "SUBSCRIBE"
    FETCH = "FETCH"
    TRACK_STATUS = "TRACK_STATUS"


class Policy(Protocol):
    """Decides who may do what. Asked for every request, also when it is served from cache."""

    def allow(
        self,
        session: Session,
        action: Action,
        namespace: TrackNamespace,
        tokens: tuple[Token, ...] = (),
    ) -> bool:
        """Whether `session` may (MOQT "Authorization"); `tokens` are those of the request itself.

        Those of the session's SETUP are `session.peer_tokens`.
        """

    def is_relay(self, session: Session) -> bool:
        """Whether what `session`, which has come to us, says as a relay is believed: which one it
        is (RELAY_ID), and which others wait for what it asks for (RELAY_PATH)."""

    def check(self, session: Session, token: Token) -> RequestErrorCode | None:
        """Why `token` is refused wherever it is shown; None when it is not."""


class AllowAll:
    """The default policy."""

    def allow(
        self,
        session: Session,
        action: Action,
        namespace: TrackNamespace,
        tokens: tuple[Token, ...] = (),
    ) -> bool:
        return True

    def is_relay(self, session: Session) -> bool:
        return True

    def check(self, session: Session, token: Token) -> RequestErrorCode | None:
        return None
