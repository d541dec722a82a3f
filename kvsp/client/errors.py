"""What the client raises. Messages are for people; none holds a credential."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvsp.names import ijson
from kvsp.names.errors import DecodeError, KvspError
from kvsp.records.problems import PROBLEM_MEDIA_TYPE, ProblemName, problem_name

_DETAIL_CHARACTERS: Final = 500
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


@dataclass(frozen=True, slots=True)
class ProblemDetails:
    """Why a service refused: problem details (RFC 9457) or, without any, the status alone."""

    status: int
    type: str | None = None
    """What follows `#` in the problem's type; None when the status says all."""

    detail: str = ""
    retry_after: float | None = None
    """Seconds after which to ask again, when the service says so."""

    members: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The document's members, extra ones included."""

    @property
    def name(self) -> ProblemName | None:
        """The problem type, when it is one of KVSP."""
        return _KNOWN.get(self.type or "")

    @classmethod
    def read(
        cls,
        status: int,
        body: bytes,
        media_type: str,
        retry_after: str | None,
        credential: str | None = None,
    ) -> ProblemDetails:
        """What a refused request says; a malformed document counts as none.

        A server never echoes the `credential` it was shown; one that does is not repeated.
        """
        document: Any = None
        if media_type == PROBLEM_MEDIA_TYPE:
            try:
                document = ijson.loads(body)
            except DecodeError:
                document = None
        members = document if isinstance(document, dict) else {}
        if credential:
            members = _without(credential, members)
        detail = members.get("detail")
        return cls(
            status=status,
            type=problem_name(members),
            detail=plain(detail) if isinstance(detail, str) else "",
            retry_after=_seconds(retry_after),
            members=members,
        )


_KNOWN: Final = {str(name): name for name in ProblemName}


def _without(credential: str, tree: Any) -> Any:
    """`tree` with something else in the place of a credential, however it was escaped."""
    match tree:
        case str():
            return tree.replace(credential, "[credential]")
        case list():
            return [_without(credential, each) for each in tree]
        case dict():
            return {
                _without(credential, name): _without(credential, each)
                for name, each in tree.items()
            }
    return tree


def plain(text: str) -> str:
    """Text of a peer on one line, shortened, without control characters."""
    return _CONTROLS.sub(" ", text)[:_DETAIL_CHARACTERS]


def _seconds(field_value: str | None) -> float | None:
    # the other form, a date, needs a clock that both ends share
    text = (field_value or "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


class ClientError(KvspError):
    """Base of what the client raises; `source` is the base URI that was asked."""

    def __init__(self, source: str, detail: str) -> None:
        super().__init__(f"{source}: {detail}")
        self.source = source


class RequestRefusedError(ClientError):
    """The service said no; `problem` says why."""

    def __init__(self, source: str, problem: ProblemDetails) -> None:
        what = problem.type or f"status {problem.status}"
        super().__init__(source, f"{what}: {problem.detail}" if problem.detail else what)
        self.problem = problem


class NotFoundError(RequestRefusedError):
    """404: there is no such resource, or it does not have what was asked for."""


class NotAuthorizedError(RequestRefusedError):
    """401 or 403: no acceptable credential, or no right to do this."""


class ConflictError(RequestRefusedError):
    """409, 412 or 428: the resource is in another state."""


class QuotaError(RequestRefusedError):
    """429 `kvsp-lease-quota`: the lease is over the quota."""


class UnavailableError(RequestRefusedError):
    """The service cannot answer now (408, 429, 5xx)."""


class UnreachableError(ClientError):
    """No answer: the name, the connection or TLS failed, or the answer broke off."""


class RequestTimeoutError(ClientError):
    """A request was not answered within its time."""


class NoTokenError(ClientError):
    """There is no token to show now (its file cannot be used); nothing was sent."""


class BadAnswerError(ClientError):
    """The answer is not what the protocol says, or it would lead elsewhere (a redirect)."""


class VerificationError(ClientError):
    """Octets are not what a digest says, or there is no digest to say it."""


class LeaseLostError(ClientError):
    """A lease ended although it was to be renewed; its blocks may be evicted."""


def refusal(source: str, problem: ProblemDetails) -> RequestRefusedError:
    """The exception for a problem."""
    kind: type[RequestRefusedError] = RequestRefusedError
    if problem.name is ProblemName.LEASE_QUOTA:
        kind = QuotaError
    elif problem.status == 404:
        kind = NotFoundError
    elif problem.status in (401, 403):
        kind = NotAuthorizedError
    elif problem.status in (409, 412, 428):
        kind = ConflictError
    elif problem.status in (408, 425, 429) or problem.status >= 500:
        kind = UnavailableError
    return kind(source, problem)
