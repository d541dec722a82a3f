"""How long to wait before connecting again."""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """Growing delays between tries to reconnect, with jitter.

    Only a session that lived for `healthy` seconds makes the delays short again: one that
    is accepted and closed at once does not.
    """

    def __init__(
        self,
        *,
        first: float = 0.5,
        most: float = 30.0,
        healthy: float = 10.0,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._first = first
        self._most = most
        self._healthy = healthy
        self._jitter = jitter
        self._failures = 0

    def next(self, lived: float = 0.0) -> float:
        """Seconds to wait, after a session that lived for `lived` seconds."""
        if lived >= self._healthy:
            self._failures = 0
        delay = min(self._first * 2.0 ** min(self._failures, 32), self._most)
        self._failures += 1
        # a quarter at most, so that each delay is longer than the one before
        return delay * (1 - self._jitter() / 4)
