"""One connection's MOQT session: its handshake, its open requests and what applications hear of it.

May import everything of moqt below it (requests, delivery, receiving, track, log, wire, values)
and of `moqt.quic` only the seam, `moqt.quic.transport`. Never asyncio, never what stands above:
publisher, responses, aio, client, server.
"""

from moqt.session.handler import SessionHandler
from moqt.session.handshake import SESSION_MOVES, SessionState
from moqt.session.remembered import Remembered
from moqt.session.session import WRITE_QUANTUM, Session, session_of
from moqt.values.config import SessionConfig

__all__ = [
    "SESSION_MOVES",
    "WRITE_QUANTUM",
    "Remembered",
    "Session",
    "SessionConfig",
    "SessionHandler",
    "SessionState",
    "session_of",
]
