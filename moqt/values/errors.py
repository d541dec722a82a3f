"""The three kinds of failure: the peer's fault, a refused request, local misuse."""

from __future__ import annotations

from moqt.values.codes import RequestErrorCode, SessionErrorCode, code_name
from moqt.values.names import TrackNamespace


class MoqtError(Exception):
    """Base of every exception this package raises."""


def escaped(text: str) -> str:
    """A peer's text made fit for a log line: what is not printable is written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class SessionError(MoqtError):
    """The peer broke a rule that ends the session: close it with `code`.

    `reason` says which rule, in words a person debugging the peer can act on.
    """

    def __init__(self, code: SessionErrorCode, reason: str) -> None:
        super().__init__(f"{code.name}: {reason}")
        self.code = code
        self.reason = reason


def protocol_violation(reason: str) -> SessionError:
    return SessionError(SessionErrorCode.PROTOCOL_VIOLATION, reason)


class RequestError(MoqtError):
    """A request was refused with REQUEST_ERROR (MOQT "REQUEST_ERROR"); the session goes on.

    `retry_after_ms` is None when the request must not be repeated as it was.
    """

    def __init__(
        self,
        code: int,
        reason: str = "",
        *,
        retry_after_ms: int | None = None,
        redirect: tuple[str, TrackNamespace, bytes] | None = None,
    ) -> None:
        super().__init__(
            f"{code_name(RequestErrorCode, code)}: {escaped(reason)}"
            if reason
            else code_name(RequestErrorCode, code)
        )
        self.code = code
        self.reason = reason
        self.retry_after_ms = retry_after_ms
        self.redirect = redirect


class SessionClosed(MoqtError):
    """The session ended before, or while, the operation ran.

    `code` is the session close code, or the QUIC error code when `transport` is true.
    """

    def __init__(self, code: int, reason: str, *, transport: bool = False) -> None:
        name = hex(code) if transport else code_name(SessionErrorCode, code)
        super().__init__(f"session closed ({name}){': ' + escaped(reason) if reason else ''}")
        self.code = code
        self.reason = reason
        self.transport = transport


class ConnectError(MoqtError):
    """No session could be established: unreachable, refused, bad certificate, no common ALPN."""


class MisuseError(MoqtError):
    """The local application used the API wrongly; the message says how."""


class MalformedTrack(MoqtError):
    """The Objects of a Track contradict each other (MOQT "Malformed Tracks")."""


class StreamReset(MoqtError):
    """A data stream was reset by its sender with `code`: what was not delivered is unknown."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{what} was reset by the peer with code {code:#x}")
        self.code = code
