"""Circles of relays: a request says which relays wait for its answer (RELAY_PATH).

How relays are joined is out of MOQT's scope. draft-lcurley-moq-relay-hops has namespaces say which
relays they came through; a relay here asks upstream also for what nobody has announced, so it is
the requests that say it: who is among those that wait cannot be the one that has the answer. The
parameter goes to none but relays that have announced that they understand it (RELAY_ID).

Whoever makes others believe that a relay waits keeps that relay from being asked for them, so both
count only from a relay: one that this one has dialled, or that shows in its SETUP that it is one
(`Policy.is_relay`). FIRST_HAND is believed of everybody: who asks for less gets less.
"""

from __future__ import annotations

from collections.abc import Iterable

from moqt.requests import OpenRequest
from moqt.session import Session, session_of

MAX_NAMED = 64
"""Relays that a request names besides its sender; a circle that goes on is found a hop later."""

_NOBODY: frozenset[int] = frozenset()


def relay_of(session: Session) -> int | None:
    """Which relay the peer is; None for one that is none, or only says that it is."""
    peer = session.peer_relay
    return None if peer is None else peer.id


def claims(request: OpenRequest) -> bool:
    """Whether it names relays though its sender is not believed to be one."""
    return request.parameters.relay_path is not None and relay_of(session_of(request)) is None


def waiting_relays(request: OpenRequest) -> frozenset[int]:
    """The relays that wait for the answer to `request`, or get what it brings."""
    peer = relay_of(session_of(request))
    if peer is None:
        return _NOBODY
    return frozenset((*(request.parameters.relay_path or ()), peer))


def is_one_of(session: Session, relays: frozenset[int]) -> bool:
    """Whether the peer is one of `relays`."""
    return relay_of(session) in relays


def is_circle(request: OpenRequest) -> bool:
    """Whether this relay itself waits for the answer to `request`."""
    session, named = session_of(request), request.parameters.relay_path
    own = session.config.relay_id
    if own is None or named is None or own not in named:
        return False
    return relay_of(session) is not None


def relay_path(session: Session, waiting: Iterable[int] = ()) -> tuple[int, ...] | None:
    """RELAY_PATH of a request on `session` for whose answer the relays in `waiting` wait, too;
    None where the peer would not understand it."""
    own, peer = session.config.relay_id, relay_of(session)
    if own is None or peer is None:
        return None
    others = sorted(set(waiting) - {own, peer})
    return (*others[:MAX_NAMED], own)
