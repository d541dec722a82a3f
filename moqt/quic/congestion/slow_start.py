"""When slow start has filled the path: round trips grow before packets are lost (RFC 9406)."""

from __future__ import annotations

from math import inf

from moqt.quic.congestion.controller import Sample

SAMPLES = 8
"""Round trips measured in a round before its shortest says something."""

LEAST_GROWTH, MOST_GROWTH = 0.004, 0.016
"""Seconds: bounds of what growth of the shortest round trip is one."""


class SlowStartExit:
    """Compares the shortest round trips of this round of packets and of the one before."""

    def __init__(self) -> None:
        self._round_ends = 0  # octets delivered
        self._last = self._current = inf
        self._samples = 0

    def is_due(self, sample: Sample) -> bool:
        """Whether slow start should end; to be asked with each sample that has a departure."""
        departure = sample.departure
        if departure is None or sample.rtt is None:
            return False
        if departure.delivered >= self._round_ends:
            self._round_ends = sample.delivered
            self._last, self._current, self._samples = self._current, inf, 0
        self._current = min(self._current, sample.rtt)
        self._samples += 1
        if self._samples < SAMPLES or self._last == inf:
            return False
        growth = min(max(self._last / 8, LEAST_GROWTH), MOST_GROWTH)
        return self._current >= self._last + growth
