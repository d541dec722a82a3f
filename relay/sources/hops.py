"""Circles of relays: a request says which relays wait for its answer (RELAY_PATH).

How relays are joined is out of MOQT's scope. draft-lcurley-moq-relay-hops has namespaces say which
relays they came through; a relay here asks upstream also for what nobody has announced, so it is
the requests that say it: who is among those that wait cannot be the one that has the answer. The
parameter goes to none but relays that have announced that they understand it (RELAY_ID).
"""

from __future__ import annotations

from collections.abc import Iterable

from moqt.requests import OpenRequest
from moqt.session import Session, session_of

MAX_NAMED = 64
"""Relays that a request names besides its sender; a circle that goes on is found a hop later."""

_NOBODY: frozenset[int] = frozenset()


def waiting_relays(request: OpenRequest) -> frozenset[int]:
    """The relays that wait for the answer to `request`, or get what it brings."""
    peer = session_of(request).peer_relay
    named = request.parameters.relay_path
    if peer is None:
        return _NOBODY if named is None else frozenset(named)
    return frozenset((*(named or ()), peer.id))


def is_one_of(session: Session, relays: frozenset[int]) -> bool:
    """Whether the peer is one of `relays`."""
    return session.peer_relay is not None and session.peer_relay.id in relays


def is_circle(request: OpenRequest) -> bool:
    """Whether this relay itself waits for the answer to `request`."""
    own, named = session_of(request).config.relay_id, request.parameters.relay_path
    return own is not None and named is not None and own in named


def relay_path(session: Session, waiting: Iterable[int] = ()) -> tuple[int, ...] | None:
    """RELAY_PATH of a request on `session` for whose answer the relays in `waiting` wait, too;
    None where the peer would not understand it."""
    own = session.config.relay_id
    if own is None or session.peer_relay is None:
        return None
    others = sorted(set(waiting) - {own, session.peer_relay.id})
    return (*others[:MAX_NAMED], own)
