"""Refusals as an operator reads them: who was refused what, and why, without a flood of lines."""

from __future__ import annotations

import logging
import re
from typing import Final

from moqt.quic.transport import connection_of
from moqt.requests import IncomingRequest
from moqt.session import session_of
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import escaped
from moqt.values.names import printable_namespace

logger = logging.getLogger("relay")

PERIOD: Final = 10.0
"""Seconds"""
TOLD: Final = 5
"""and the refusals that are logged in that, one by one."""

EXPECTED: Final = frozenset({RequestErrorCode.DOES_NOT_EXIST, RequestErrorCode.EXCESSIVE_LOAD})
"""What clients ask to find out, and what lies beyond a limit that a line of its own has told of: at
INFO; everything else is a WARNING."""


class RefusalLog:
    """The refusals of one path: those of one tenant do not silence those of another."""

    def __init__(self) -> None:
        self._until = 0.0
        self._told = self._untold = 0

    def note(self, request: IncomingRequest, code: RequestErrorCode, reason: str) -> None:
        """Log that `request` is answered with `code` and `reason`; beyond `TOLD` in a `PERIOD` only
        how many there were, with the first one after it."""
        level = logging.INFO if code in EXPECTED else logging.WARNING
        if not logger.isEnabledFor(level):
            return
        session = session_of(request)
        if session.now >= self._until:
            self._until, self._told = session.now + PERIOD, 0
        if self._told >= TOLD:
            self._untold += 1
            return
        self._told += 1
        more = f" ({self._untold} more have been refused since the line before)"
        logger.log(
            level,
            "%s: %s of %s is refused: %s: %s%s",
            connection_of(session.transport),
            re.sub("(?<=[a-z])(?=[A-Z])", "_", type(request).__name__[8:]).upper(),
            getattr(request, "name", None) or printable_namespace(request.namespace) or "()",
            code.name,
            escaped(reason),
            more if self._untold else "",
        )
        self._untold = 0
