"""How often a peer may begin a request (MOQT "Resource Exhaustion")."""

from __future__ import annotations


class RequestRate:
    """`per_second` requests a second, and `burst` at once by who has begun none for a while."""

    def __init__(self, per_second: int, burst: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._left = float(burst)
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Count one at `now`, in seconds; False when it is one too many, which does not count."""
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
