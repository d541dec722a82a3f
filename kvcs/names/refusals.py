"""What a peer's refusal of a request asks of us: to give up, or to ask again, and when."""

from __future__ import annotations

from typing import Final

from moqt.values.codes import RequestErrorCode
from moqt.values.errors import MoqtError, RequestError

NO_STREAM_DELAY: Final = 0.02
"""Seconds before another try when the peer grants no request stream."""

_AUTHORIZATION: Final = (
    RequestErrorCode.UNAUTHORIZED,
    RequestErrorCode.MALFORMED_AUTH_TOKEN,
    RequestErrorCode.EXPIRED_AUTH_TOKEN,
    RequestErrorCode.UNKNOWN_AUTH_TOKEN_ALIAS,
)

_CANNOT_TELL: Final = (RequestErrorCode.INTERNAL_ERROR, RequestErrorCode.TIMEOUT)


def not_authorized(error: MoqtError) -> bool:
    """Whether a request was refused for lack of rights."""
    return isinstance(error, RequestError) and error.code in _AUTHORIZATION


def cannot_tell(error: MoqtError) -> bool:
    """Whether a request was refused because somebody who may have what is asked for could not be
    asked: that says nothing of whether there is such a thing."""
    return isinstance(error, RequestError) and error.code in _CANNOT_TELL


def retry_delay(error: MoqtError) -> float | None:
    """Seconds after which the peer lets the request be repeated; None when it does not."""
    if not isinstance(error, RequestError) or error.retry_after_ms is None:
        return None
    return max(error.retry_after_ms / 1000, NO_STREAM_DELAY)
