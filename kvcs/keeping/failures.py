"""Publications that failed or stood still, and relays that were silent, for a while."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

MOST: Final = 4096
"""Remembered at a time; the oldest go first."""

DEFAULT_SECONDS: Final = 60.0


class Failures:
    """What was seen to fail lately, by whatever names it; at most `MOST` of them.

    What is in here is tried after everything else, not never: it may be well again.
    """

    def __init__(self, seconds: float = DEFAULT_SECONDS) -> None:
        """Each is remembered for `seconds`; 0: nothing is. Raises ValueError below that."""
        if seconds < 0:
            raise ValueError("failures are remembered for 0 seconds or more")
        self._seconds = seconds
        self._until: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def note(self, what: Hashable, now: float) -> None:
        """It has failed."""
        self._until.pop(what, None)
        if self._seconds:
            self._until[what] = now + self._seconds
        while len(self._until) > MOST:
            del self._until[next(iter(self._until))]

    def holds(self, what: Hashable, now: float) -> bool:
        """Whether it has failed lately."""
        until = self._until.get(what)
        if until is None:
            return False
        if now < until:
            return True
        del self._until[what]
        return False
