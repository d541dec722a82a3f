"""How long a publication may bring nothing before others are looked at."""

from __future__ import annotations

from typing import Final

from kvcs.retrieving.contest import DRIPS
from kvcs.retrieving.stats import Stats

GO_BACK: Final = 4
"""Times its patience after which one is gone back to that had stalled before."""


class Patience:
    """What has come of one publication, and until when more is waited for."""

    def __init__(self, seconds: float, stats: Stats, now: float) -> None:
        self.arrived = now
        """When anything last came."""
        self.until = now + seconds
        self._seconds = seconds
        self._stats = stats
        self._moved = self._gained = now
        """When a layer was last handed over, and an Object was last whole."""
        self._arrivals = 0
        self._octets = stats.octets
        self._layers = (0, 0)

    def look(self, now: float, arrivals: int, *, caught_up: bool) -> None:
        """Take note of what has come by now; `caught_up`: there is nothing to come so far."""
        stats = self._stats
        if stats.octets != self._octets:
            self._octets, self._gained = stats.octets, now
        if arrivals != self._arrivals:
            self._arrivals, self.arrived = arrivals, now
            # what comes drop by drop is no whole Object
            drops = self._gained + (DRIPS - 1) * self._seconds
            self.until = min(now, drops) + self._seconds
        layers = (stats.segments, stats.layers)
        if layers != self._layers or caught_up:
            self._layers, self._moved = layers, now
            self.renew(now)

    def renew(self, now: float) -> None:
        """There is nothing else to be had: wait as long again."""
        self.until = now + self._seconds

    def is_lost(self, now: float) -> bool:
        """Whether nothing came for so long that even one that had stalled before is better."""
        return now >= max(self.arrived, self._moved) + GO_BACK * self._seconds

    def late_at(self, after: float) -> float:
        """When what it owes is late, that should come `after` seconds after what came last."""
        return min(self.arrived, self._moved) + after
