"""What a session tells its application, and asks it; `SessionHandler` has the defaults.

Where the Protocol says `Any` it means the session or a request: who answers stands above both.
"""

from __future__ import annotations

from typing import Any, Protocol

from moqt.requests.host import Application
from moqt.values.codes import RequestErrorCode, SessionErrorCode
from moqt.values.errors import SessionClosed
from moqt.values.messages import Goaway
from moqt.values.tokens import Token


class SessionEvents(Application, Protocol):
    """The application behind a session; `OPENINGS` names its methods for a peer's requests."""

    def session_established(self, session: Any) -> None: ...

    def session_closed(self, session: Any, error: SessionClosed) -> None: ...

    def goaway_received(self, session: Any, goaway: Goaway) -> None: ...

    def check_token(self, session: Any, token: Token) -> RequestErrorCode | None: ...

    def check_scope(
        self, session: Any, authority: str | None, path: str | None
    ) -> SessionErrorCode | None: ...
