"""One connection's MOQT session: its handshake, its open requests and what applications hear of it.

May import everything of moqt below it (requests, delivery, receiving, track, log, wire, values)
and of `moqt.quic` only the seam, `moqt.quic.transport`. Never asyncio, never what stands above:
publisher, responses, aio, client, server.
"""

from moqt.session.handler import SessionHandler
from moqt.session.session import SESSION_MOVES, WRITE_QUANTUM, Session, SessionState
from moqt.values.config import SessionConfig

__all__ = [
    "SESSION_MOVES",
    "WRITE_QUANTUM",
    "Session",
    "SessionConfig",
    "SessionHandler",
    "SessionState",
]
