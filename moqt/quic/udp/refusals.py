"""Who was refused, and why, told to the operator without letting anybody fill the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from moqt.quic.packets.layout import Address, show_address
from moqt.values.errors import escaped

log = logging.getLogger(__name__)

PERIOD = 30.0
"""Seconds in which so many are told of:"""

TOLD = 5


class Timer(Protocol):
    def cancel(self) -> None: ...


class Refusals:
    """Logs the first few refusals of a period at WARNING, and then how many more there were.

    `clock` is in seconds; `call_later(seconds, action)` sets a timer.
    """

    def __init__(
        self, clock: Callable[[], float], call_later: Callable[[float, Callable[[], None]], Timer]
    ) -> None:
        self._clock = clock
        self._call_later = call_later
        self._until = 0.0
        self._told = 0
        self._untold = 0
        self._last = ""
        self._timer: Timer | None = None

    def note(self, addr: Address | None, why: str) -> None:
        """A client at `addr` got no connection; `why` may hold words of its own."""
        now = self._clock()
        if self._timer is None and now >= self._until:
            self._until, self._told = now + PERIOD, 0
        text = f"{show_address(addr)}: {escaped(why)}"
        if self._told < TOLD:
            self._told += 1
            log.warning("refused a client at %s", text)
            return
        self._untold += 1
        self._last = text
        if self._timer is None:
            self._timer = self._call_later(max(0.0, self._until - now), self._tell_rest)

    def close(self) -> None:
        """The endpoint ends: what is untold is told now."""
        if self._timer is not None:
            self._timer.cancel()
            self._tell_rest()

    def _tell_rest(self) -> None:
        self._timer = None
        log.warning(
            "refused %d more clients within %g s, the last at %s", self._untold, PERIOD, self._last
        )
        self._untold = 0
