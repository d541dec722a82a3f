"""When a load has stalled: how long nothing may come of it."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

GAPS: Final = 5
"""Median gaps between layers without anything, after which no further layer is expected."""
LEAST: Final = 0.4
"""Of the wait for the first Object, that there is at least for what exists already."""
REMEMBERED: Final = 32
"""Gaps that the median is of, the last ones."""
LATE: Final = 0.05
"""Seconds by which waking up too late shows that this process stood still, not the other end."""


class Line:
    """What all loads on one session share: each has to wait while others are served."""

    def __init__(self) -> None:
        self.loads = 0
        """Those under way."""
        self.heard = 0
        """Answers and parts that have come of all of them, as they have taken note."""


class Stall:
    """What has come of a load, and until when more is waited for. Time is a parameter.

    Time in which others on its line were served is not silence of the other end: of n loads each
    waits n times as long for its turn, so only an n-th of it counts.
    """

    def __init__(self, stall: float, now: float, line: Line | None = None) -> None:
        """`stall` is the wait for the first Object, in seconds."""
        self.producing = True
        """Whether the publication may still be in production: a layer takes the time to compute
        it, and those that were there already came without a gap that would tell how long that
        is. So `stall` is the least that is waited for."""
        self._stall = stall
        self._heard_at = self._looked_at = now
        self._heard = 0
        self._line = line or Line()
        self._line_heard = self._line_began = self._line.heard
        self._layers = 0
        self._layer_at: float | None = None
        self._gaps: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def limit(self) -> float:
        """Seconds that may pass without anything."""
        if self._layers < 2:
            return self._stall
        least = self._stall if self.producing else LEAST * self._stall
        return max(least, GAPS * median(self._gaps)) if self._gaps else least

    @property
    def until(self) -> float:
        """When it has stalled, unless something comes before."""
        return self._heard_at + self.limit

    @property
    def silent(self) -> bool:
        """Whether nothing at all has come, of others on the line neither."""
        return self._line.heard == self._line_began

    def look(self, now: float, heard: int, layers: int) -> None:
        """Take note of how many answers and parts have come, and how many layers."""
        line = self._line
        if heard != self._heard:
            line.heard += heard - self._heard
            self._heard, self._heard_at = heard, now
        elif line.heard != self._line_heard:
            theirs = (now - self._looked_at) * (1 - 1 / max(1, line.loads))
            self._heard_at = min(now, self._heard_at + theirs)
        self._looked_at, self._line_heard = now, line.heard
        if layers > self._layers:
            gap = 0.0 if self._layer_at is None else now - self._layer_at
            if gap * GAPS > LEAST * self._stall:  # others are of a burst, and change nothing
                self._gaps.append(gap / (layers - self._layers))
            self._layers, self._layer_at = layers, now

    def overslept(self, seconds: float) -> None:
        """This process was woken so late: that is not silence of the other end."""
        if seconds > LATE:
            self._heard_at += seconds
