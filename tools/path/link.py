"""One direction of a network: what becomes of a datagram that is offered to it, and when.

No socket and no clock: time is a parameter, in seconds, and the dice have a seed. Whoever drives a
`Link` keeps the datagrams themselves and hands each over at the times that `offer` returns.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum

JITTER_SPAN = 0.02
"""Seconds after which a path with jitter has another delay."""

SLOT = 0.001
"""Seconds that a datagram of a burst of losses stands for, where no bandwidth tells them."""


FLOWS = 4096
"""Flows that a policer tells apart; the one that was silent longest is forgotten."""


class Fate(StrEnum):
    """What became of a datagram."""

    SENT = "sent"
    TOO_LONG = "too long"
    BLACKOUT = "blackout"
    POLICED = "policed"
    LOST = "lost"
    QUEUE_FULL = "queue full"


@dataclass(frozen=True, kw_only=True)
class Path:
    """One direction between two hosts.

    Sizes are octets of UDP payload, times seconds, `loss`, `burst`, `reorder` and `duplicate`
    probabilities per datagram. Raises ValueError for what no path can be.
    """

    latency: float = 0.01
    jitter: float = 0.0
    """At most so much more, another each `JITTER_SPAN`; datagrams keep their order."""
    bandwidth: float | None = None
    """Octets a second; None is unlimited."""
    queue: int = 64 << 10
    """Octets that wait at most in front of a limited `bandwidth`; more are dropped."""
    police: float | None = None
    """Octets a second beyond which datagrams are dropped instead of queued (a token bucket)."""
    police_burst: int = 64 << 10
    """Octets that the bucket of `police` holds."""
    police_each: bool = False
    """Whether each flow has a bucket of its own."""
    loss: float = 0.0
    burst: float = 0.0
    """Probability that a burst of losses begins (the model of Gilbert)."""
    burst_length: float = 10.0
    """Datagrams that a burst takes in the mean, of those that pass one after the other: it is over
    in the time of as many, whoever sends in it."""
    reorder: float = 0.0
    """A reordered datagram is late, and others overtake it."""
    reorder_by: float | None = None
    """How late at most; None is twice the latency."""
    duplicate: float = 0.0
    """The copy comes a latency later."""
    mtu: int = 65535
    """Longest datagram that passes."""
    blackouts: tuple[tuple[float, float], ...] = ()
    """`(begin, end)` in seconds since the link was made: nothing passes then."""

    def __post_init__(self) -> None:
        for name in ("loss", "burst", "reorder", "duplicate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1 (100 %)")
        for name in ("latency", "jitter", "queue", "police_burst", "reorder_by"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must not be negative")
        for name in ("bandwidth", "police"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} must be more than 0 octets a second")
        if self.burst_length < 1:
            raise ValueError("burst_length must be at least 1 datagram")
        if self.mtu < 1:
            raise ValueError("mtu must be at least 1 octet")
        if any(begin > end for begin, end in self.blackouts):
            raise ValueError("a blackout must begin before it ends")


class Link:
    """A path in use: its queue, its bucket, its dice, and what it did to how many datagrams.

    Several flows that offer to one link share its bottleneck.
    """

    def __init__(self, path: Path, *, now: float, seed: int | str = 1) -> None:
        self.path = path
        self.offered = 0
        """Datagrams that came."""
        self.octets = 0
        """Octets that went out, copies not counted."""
        self.dropped: Counter[Fate] = Counter()
        self.duplicated = 0
        self.reordered = 0
        self.queue_max = 0
        """Most octets that ever waited, with the datagram that came."""
        self.fate = Fate.SENT
        """What became of the datagram that was offered last."""
        self._random = random.Random(seed)
        self._began = now
        self._free = now
        """When the bottleneck has sent all that waits."""
        self._arrival = now
        """When the last datagram arrives that was not reordered."""
        self._buckets: dict[Hashable, tuple[float, float]] = {}
        """Tokens and since when, of each flow or of all, by the time of the last datagram."""
        self._in_burst = False
        self._burst_at = now
        """When the last datagram met the burst."""
        self._jitter_until = now
        self._late = 0.0

    @property
    def lost(self) -> int:
        """Datagrams that were dropped, for whatever reason."""
        return self.dropped.total()

    def change(self, path: Path, now: float) -> None:
        """From now on the link is like `path`; what waits still waits, at the new bandwidth."""
        waiting = self.waiting(now)
        self._free = now + (waiting / path.bandwidth if path.bandwidth else 0.0)
        self._jitter_until = now
        if path.police_each is not self.path.police_each:
            self._buckets.clear()
        self.path = path

    def waiting(self, now: float) -> float:
        """Octets in the queue."""
        bandwidth = self.path.bandwidth
        return 0.0 if bandwidth is None else max(0.0, self._free - now) * bandwidth

    def offer(self, octets: int, now: float, flow: Hashable = None) -> tuple[float, ...]:
        """When a datagram of so many octets arrives: never, once, or twice. `fate` says why.

        `now` never goes back. `flow` is whose it is, for policers that tell flows apart.
        """
        path = self.path
        self.offered += 1
        self.fate = self._fate(path, octets, now, flow)
        if self.fate is not Fate.SENT:
            self.dropped[self.fate] += 1
            return ()
        self.octets += octets
        arrival = now
        if path.bandwidth is not None:
            arrival = self._free = max(self._free, now) + octets / path.bandwidth
        arrival += path.latency
        if path.jitter:
            if now >= self._jitter_until:
                self._jitter_until = now + JITTER_SPAN
                self._late = self._random.random() * path.jitter
            arrival += self._late
        if path.reorder and self._random.random() < path.reorder:
            self.reordered += 1
            by = 2 * path.latency if path.reorder_by is None else path.reorder_by
            arrival += self._random.random() * by
        elif arrival < self._arrival:
            arrival = self._arrival  # the delay became less: nobody overtakes
        else:
            self._arrival = arrival
        if path.duplicate and self._random.random() < path.duplicate:
            self.duplicated += 1
            return arrival, arrival + path.latency
        return (arrival,)

    def _has_token(self, path: Path, rate: float, octets: int, now: float, flow: Hashable) -> bool:
        key = flow if path.police_each else None
        tokens, at = self._buckets.pop(key, (float(path.police_burst), now))
        tokens = min(tokens + (now - at) * rate, path.police_burst)
        if len(self._buckets) >= FLOWS:
            del self._buckets[next(iter(self._buckets))]
        passes = tokens >= octets
        self._buckets[key] = (tokens - octets if passes else tokens), now
        return passes

    def _fate(self, path: Path, octets: int, now: float, flow: Hashable) -> Fate:
        if octets > path.mtu:
            return Fate.TOO_LONG
        if path.blackouts and any(a <= now - self._began < b for a, b in path.blackouts):
            return Fate.BLACKOUT
        if path.police is not None and not self._has_token(path, path.police, octets, now, flow):
            return Fate.POLICED
        if path.loss and self._random.random() < path.loss:
            return Fate.LOST
        if path.burst:
            odds = path.burst
            if self._in_burst:
                slot = SLOT if path.bandwidth is None else octets / path.bandwidth
                odds = (1 - 1 / path.burst_length) ** max(1.0, (now - self._burst_at) / slot)
            self._in_burst = self._random.random() < odds
            self._burst_at = now
            if self._in_burst:
                return Fate.LOST
        if path.bandwidth is not None:
            waiting = max(0.0, self._free - now) * path.bandwidth + octets
            if waiting > path.queue:
                return Fate.QUEUE_FULL
            if waiting > self.queue_max:
                self.queue_max = int(waiting)
        return Fate.SENT
