"""CUBIC (RFC 9438): a window that grows with the time since the last loss, not with ACKs."""

from __future__ import annotations

from moqt.quic.congestion.controller import MINIMUM_WINDOW, Sample
from moqt.quic.congestion.reno import Reno

C = 0.4
"""How fast it grows, in packets a second cubed."""

BETA = 0.7

ALPHA = 3 * (1 - BETA) / (1 + BETA)
"""Packets a round trip by which Reno with this `BETA` would grow (section 4.3)."""


class Cubic(Reno):
    """Reno's slow start and rounds of losses, with CUBIC's way to avoid congestion."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._most = 0.0  # W_max, packets
        self._epoch: float | None = None  # when congestion avoidance began
        self._until_most = 0.0  # K, seconds
        self._friendly = 0.0  # W_est, packets
        self._share = 0.0  # octets that the window is to grow by, less than one

    def _reduce(self, sample: Sample) -> None:
        window = self.window / self.size
        # Fast convergence (section 4.7): a flow that shrinks makes room for others.
        self._most = window * (1 + BETA) / 2 if window < self._most else window
        self.window = self.threshold = max(int(self.window * BETA), MINIMUM_WINDOW * self.size)
        self._epoch = None

    def _avoid(self, sample: Sample) -> None:
        window = self.window / self.size
        if self._epoch is None:
            self._epoch = sample.now
            self._most = max(self._most, window)
            self._until_most = ((self._most - window) / C) ** (1 / 3)
            self._friendly = window
        acked = sample.acked / self.size
        since = sample.now - self._epoch
        self._friendly += (1.0 if self._friendly >= self._most else ALPHA) * acked / window
        ahead = C * (since + sample.rtt_smoothed - self._until_most) ** 3 + self._most
        here = C * (since - self._until_most) ** 3 + self._most
        if here < self._friendly:
            grown = max(window, self._friendly)
        else:
            target = min(max(ahead, window), 1.5 * window)
            grown = window + (target - window) * min(acked / window, 1.0)
        self._share += (grown - window) * self.size
        whole = int(self._share)
        self._share -= whole
        self.window += whole

    def on_spurious(self, now: float) -> None:
        super().on_spurious(now)
        self._epoch = None

    def on_idle_restart(self, now: float) -> None:
        self._epoch = None  # the time without data is no time in which the window grew

    def on_persistent_congestion(self, now: float) -> None:
        super().on_persistent_congestion(now)
        self._epoch = None
        self._most = 0.0
