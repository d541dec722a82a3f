"""How many streams the peer may open: as many as it needs, up to a limit."""

from __future__ import annotations

import logging

from aioquic.quic.connection import Limit

log = logging.getLogger(__name__)


class StreamGrants:
    """How many streams of one kind the peer may open (RFC 9000 section 4.6): some at first, then
    as many more as it has open, so that a peer that needs many has them in a few round trips, up
    to a limit of those that are open at a time."""

    __slots__ = ("_ahead", "_closed", "_limit", "_most", "_told")

    def __init__(self, limit: Limit, ahead: int, most: int) -> None:
        self._limit = limit
        self._ahead = ahead
        self._most = most
        self._closed = 0
        self._told = False
        limit.value = limit.sent = min(ahead, most)

    def closed_one(self) -> None:
        """One that the peer had opened is over."""
        self._closed += 1
        self._raise()

    def opened(self) -> None:
        """The peer has opened some. The log says so when it first has as many as it may."""
        self._raise()
        if self._limit.used - self._closed >= self._most > 0 and not self._told:
            self._told = True
            kind = self._limit.name.removeprefix("max_streams_")
            log.warning(
                "a peer has %d %sdirectional streams open, which is max_open_streams_%s: more "
                "wait until some have ended",
                self._most,
                kind.removesuffix("di"),
                kind,
            )

    def _raise(self) -> None:
        used, limit = self._limit.used, self._limit
        value = min(used + max(self._ahead, used - self._closed), self._closed + self._most)
        if value > limit.value:
            limit.value = value
