"""The home of a relay's workers: it has the cache, and only the edges ask it. Sans-IO.

Whether a client may do what it asks for is settled at the edge that it has come to, with that
client's tokens; the home takes requests of sessions alone that show a token of this start.
"""

from __future__ import annotations

import hashlib
import logging
from typing import NamedTuple

from moqt.session import Session
from moqt.values.codes import RequestErrorCode, SessionErrorCode
from moqt.values.errors import MoqtError
from moqt.values.messages import Parameters
from moqt.values.names import FullTrackName, TrackNamespace
from moqt.values.tokens import Token
from relay.config import Clock, RelayConfig
from relay.disk.tier import DiskTier
from relay.rights.policy import Action
from relay.scopes import Scopes, scope_of
from relay.service.workers.settings import Secret, Way

logger = logging.getLogger("relay")


class Edge(NamedTuple):
    """Whose session it is."""

    way: Way
    number: int


class HomePolicy:
    """Edges may all, others nothing."""

    def __init__(self, secret: Secret, edges: int) -> None:
        self._known = {
            _digest(secret.value(way, number)): Edge(way, number)
            for number in range(edges)
            for way in Way
        }

    def edge_of(self, session: Session) -> Edge | None:
        for _, value in session.peer_tokens:
            edge = self._known.get(_digest(value))
            if edge is not None:
                return edge
        return None

    def allow(
        self,
        session: Session,
        action: Action,
        namespace: TrackNamespace,
        tokens: tuple[Token, ...] = (),
    ) -> bool:
        return self.edge_of(session) is not None

    def is_relay(self, session: Session) -> bool:
        return self.edge_of(session) is not None

    def check(self, session: Session, token: Token) -> RequestErrorCode | None:
        return None


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()


class HomeScopes(Scopes):
    """Of each session by which an edge brings something the home asks for every track."""

    def __init__(
        self,
        config: RelayConfig,
        secret: Secret,
        edges: int,
        *,
        clock: Clock,
        disk: DiskTier | None = None,
    ) -> None:
        self._edges = HomePolicy(secret, edges)
        super().__init__(config, self._edges, clock=clock, disk=disk)

    def session_established(self, session: Session) -> None:
        super().session_established(session)
        edge = self._edges.edge_of(session)
        scope = scope_of(session.path)
        if edge is None or edge.way is not Way.BRINGING or not self.has_room(scope):
            return  # its requests are refused, each with why
        self.threshold.sessions.discard(session)
        relay = self.enter(session, scope)

        def ended(error: MoqtError | None) -> None:
            if session.closed is None:
                logger.warning("worker %d offers no tracks any more: %s", edge.number, error)

        session.subscribe_tracks(
            (),
            # what nobody has asked for yet need not come
            Parameters(forward=0),
            on_publish=relay.take_publication,
            on_skipped=_skipped,
            on_ended=ended,
        )

    def edge_gone(self, number: int) -> None:
        """It has died: nothing more comes on its sessions."""
        for session in self.sessions():
            edge = self._edges.edge_of(session)
            if edge is not None and edge.number == number:
                session.close(SessionErrorCode.NO_ERROR, "the worker has died")


def _skipped(name: FullTrackName) -> None:
    """It can still be asked for."""
