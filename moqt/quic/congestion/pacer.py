"""Packets spread over time (RFC 9002 section 7.7)."""

from __future__ import annotations

from moqt.quic.congestion.controller import PACING_TICK

LATENESS = 0.01
"""Seconds an event loop may come late without losing what was due meanwhile."""


class Pacer:
    """Releases octets at a rate, in trains: a timer per packet would be more than a loop can do."""

    def __init__(self, size: int) -> None:
        self.size = size
        """Octets of a packet."""
        self.late = False
        """Whether more was due than is let go at once: the sender was too slow for the rate."""
        self._rate: float | None = None
        self._quantum = 0.0
        self._budget = 0.0
        self._at = 0.0
        self._wanted: float | None = None  # when the next train is due

    def set_rate(self, rate: float | None, quantum: int, now: float, trip: float) -> None:
        """`rate` octets a second, or None for no limit, at most `quantum` octets at once.

        `trip` is the shortest round trip of the path in seconds. Where an acknowledgement is
        sooner than the next train, the window spreads packets better than a timer can.
        """
        if rate is None or trip <= PACING_TICK:
            self._rate = self._wanted = None
            return
        if self._rate is None:
            self._budget, self._at = float(quantum), now
        else:
            self._earn(now)
        self._rate, self._quantum = rate, max(quantum, self.size)

    def _earn(self, now: float) -> None:
        assert self._rate is not None
        if now <= self._at:
            return
        budget = self._budget + (now - self._at) * self._rate
        most = self._quantum
        if self._wanted is not None and now > self._wanted:
            most += self._rate * min(now - self._wanted, LATENESS)
        if budget > most:
            # Octets that were due and will not be made up for, if there was something to send.
            self.late = self.late or self._wanted is not None
            budget = most
        self._budget, self._at = budget, now

    def allowance(self, now: float) -> int:
        """How many packets may go now."""
        if self._rate is None:
            return 1 << 30
        self._earn(now)
        return max(0, int((self._budget + 1) // self.size))  # one octet for what rounding took

    def spend(self, octets: int) -> None:
        """So many octets go.

        Packets with ACKs go unasked; what they are ahead of the rate is owed up to a quantum.
        """
        if self._rate is not None:
            self._budget = max(self._budget - octets, -self._quantum)
            self._wanted = None

    def released(self) -> None:
        """It holds nothing back now: what goes unused is no fault of the sender's."""
        self._wanted = None

    def next_send_time(self, now: float) -> float | None:
        """When the next packets may go; None for at once."""
        if self._rate is None:
            return None
        self._earn(now)
        if self._budget + 1 >= self.size:
            return None
        train = max(self.size, min(self._quantum, self._rate * PACING_TICK) / 2)
        self._wanted = now + (train - self._budget) / self._rate
        return self._wanted
