"""What BBR measures: filters of bandwidth, of round trips and of how ACKs are bunched."""

from __future__ import annotations

from collections import deque
from enum import Enum
from math import inf

TRIP_WINDOW = 10.0
"""Seconds for which the shortest round trip is believed."""
TRIP_PROBE = 5.0
"""Seconds after which it should have been seen again, or is probed for."""
TRIP_HOLD = 0.2
"""Seconds for which little is kept under way then."""
EXTRA_ROUNDS = 10
"""Round trips for which bunches of ACKs are remembered."""
EXTRA_MOST = 0.1
"""Seconds of bandwidth that a bunch is thought to have at most."""


class Phase(Enum):
    """The states of section 3.3, ProbeBW's with their own names."""

    STARTUP = "startup"
    DRAIN = "drain"
    PROBE_DOWN = "probe_bw_down"
    PROBE_CRUISE = "probe_bw_cruise"
    PROBE_REFILL = "probe_bw_refill"
    PROBE_UP = "probe_bw_up"
    PROBE_RTT = "probe_rtt"


class Feedback(Enum):
    """Which packets the ACKs tell of that come now (the draft's `ack_phase`)."""

    NONE = 0
    REFILLING = 1
    STARTING = 2
    COMING = 3
    STOPPING = 4


class BandwidthFilter:
    """The most of this cycle of probes and the one before."""

    def __init__(self) -> None:
        self._before = self._now = 0.0

    @property
    def value(self) -> float:
        return max(self._before, self._now)

    def take(self, rate: float) -> None:
        self._now = max(self._now, rate)

    def advance(self) -> None:
        """A cycle is over."""
        if self._now:
            self._before, self._now = self._now, 0.0


class RoundTrips:
    """The shortest round trip, and when it is to be probed for (section 5.5.7)."""

    def __init__(self) -> None:
        self.shortest = inf
        self.due = False
        self.round_done = False
        self._at = 0.0
        self._recent = inf  # of the last `TRIP_PROBE` seconds
        self._recent_at = 0.0
        self._hold_until: float | None = None

    def take(self, rtt: float, now: float) -> None:
        self.due = self.shortest < inf and now > self._recent_at + TRIP_PROBE
        if rtt < self._recent or self.due:
            self._recent, self._recent_at = rtt, now
        if self._recent < self.shortest or now > self._at + TRIP_WINDOW:
            self.shortest, self._at = self._recent, self._recent_at

    @property
    def probing(self) -> bool:
        """Whether little is under way, as it should be."""
        return self._hold_until is not None

    def begin_probe(self) -> None:
        self._hold_until = None
        self.round_done = False

    def hold(self, now: float) -> None:
        self._hold_until = now + TRIP_HOLD
        self.round_done = False

    def is_done(self, now: float) -> bool:
        return self._hold_until is not None and self.round_done and now > self._hold_until

    def end_probe(self, now: float) -> None:
        self._hold_until = None
        self._recent_at = now
        self.due = False


class ExtraAcked:
    """Octets acknowledged at once beyond what the bandwidth explains (section 5.5.9)."""

    def __init__(self) -> None:
        self._since = 0.0
        self._acked = 0
        self._round = 0
        self._bunches: deque[tuple[int, float]] = deque()  # falling octets, by round

    @property
    def value(self) -> float:
        return self._bunches[0][1] if self._bunches else 0.0

    def restart(self, now: float) -> None:
        self._since, self._acked = now, 0

    def take(
        self, now: float, acked: int, bandwidth: float, most: float, round_started: bool
    ) -> None:
        if round_started:
            self._round += 1
        bunches = self._bunches
        while bunches and bunches[0][0] <= self._round - EXTRA_ROUNDS:
            bunches.popleft()
        expected = bandwidth * (now - self._since)
        if self._acked <= expected:
            self.restart(now)
            expected = 0.0
        self._acked += acked
        extra = min(self._acked - expected, most, bandwidth * EXTRA_MOST)
        while bunches and bunches[-1][1] <= extra:
            bunches.pop()
        bunches.append((self._round, extra))
