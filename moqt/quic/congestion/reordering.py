"""How long a packet is waited for that others have overtaken (RFC 8985 "RACK", section 6.2)."""

from __future__ import annotations

PACKET_THRESHOLD = 3
"""RFC 9002 section 6.1.1: packets by which another may be ahead, on a path that keeps the order."""

GRANULARITY = 0.001
"""Seconds (RFC 9002 section 6.1.2)."""

PERSISTENCE = 16
"""Rounds in which losses were real, after which the window is small again."""

MOST_STEPS = 8
"""Steps of a quarter of the shortest round trip."""


class ReorderingWindow:
    """The window grows with each round in which a packet came after it was found lost."""

    def __init__(self) -> None:
        self.seen = False
        """Whether any packet was ever overtaken: the number of those ahead says nothing then."""
        self._steps = 1
        self._grown_at = 0.0
        self._rounds_left = 0

    def overtaken(self) -> None:
        """A packet arrived after one that was sent later."""
        self.seen = True

    def too_small(self, now: float, round_trip: float) -> None:
        """A packet came that was found lost; a round trip of these counts once."""
        self.seen = True
        self._rounds_left = PERSISTENCE
        if now - self._grown_at >= round_trip:
            self._grown_at = now
            self._steps = min(self._steps + 1, MOST_STEPS)

    def was_loss(self) -> None:
        """A round trip had losses, and none of them spurious."""
        if self._rounds_left:
            self._rounds_left -= 1
            if not self._rounds_left:
                self._steps = 1

    def delay(self, latest: float, smoothed: float, shortest: float) -> float:
        """Seconds after its sending that a packet is given up, from three round-trip times."""
        round_trip = max(latest, smoothed)
        window = round_trip / 8
        if self.seen:
            window = max(window, min(self._steps * shortest / 4, smoothed))
        return max(round_trip + window, GRANULARITY)
