"""A medium that does not work is asked again only now and then (no I/O; seconds).

Who needs it meanwhile is told so at once, instead of waiting for it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_FAILURES: Final = 3
"""Failures in a row after which a medium counts as one that does not work."""

_FIRST_S: Final = 1.0
_LONGEST_S: Final = 30.0


class Circuit:
    """Whether a medium is asked now."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = 0
        self._next = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the medium counts as one that does not work."""
        return self._failures >= _FAILURES

    def wait_s(self) -> float:
        """Seconds until the medium may be asked; 0 for whoever is to ask it now.

        While it does not work, one asks at a time.
        """
        if not self.is_open:
            return 0.0
        wait = self._next - self._clock()
        if wait > 0:
            return wait
        self._next = self._clock() + self._pause_s
        return 0.0

    def worked(self) -> bool:
        """It answered. True when it had not worked before."""
        again = self.is_open
        self._failures = 0
        return again

    def failed(self) -> bool:
        """It did not. True when it counts as one that does not work from now on."""
        self._failures += 1
        self._next = self._clock() + self._pause_s
        return self._failures == _FAILURES

    @property
    def _pause_s(self) -> float:
        more = max(0, self._failures - _FAILURES)
        return _LONGEST_S if more > 5 else min(_LONGEST_S, _FIRST_S * 2**more)
