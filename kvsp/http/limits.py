"""The limits of a server and the token buckets that slow a client down."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvsp.names.bounds import Count, Seconds, Whole

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What one request and one client may cost. Octets, seconds, requests per second."""

    json_octets: Count = 8 * MIB
    """Octets of a JSON body, lookups and checkpoints included; beyond, 413."""

    json_containers: Count = 262_144
    """Arrays and objects in a JSON body; beyond, 413."""

    json_items: Count = 2_000_000
    """Items and members in a JSON body; beyond, 413."""

    bodies_octets: Count = 256 * MIB
    """Bodies in memory and what is read of them, of all requests together; one more is
    answered with 503."""

    bodies_octets_per_principal: Count = 64 * MIB
    """The same of one principal; one more, unless it is the only one, is answered with 429."""

    header_octets: Count = 32 << 10
    """Octets of a header section; beyond, 431."""

    request_s: Seconds = 30.0
    """Longest time for a request whose body is JSON, reading the body included."""

    head_s: Seconds = 10.0
    """Longest time for a header section to arrive whole."""

    stall_s: Seconds = 30.0
    """Longest time one chunk of a streamed body may take, in either direction."""

    min_octets_per_s: Whole = 64 << 10
    """Slowest mean rate of a streamed body after `stall_s`; below it the stream is cut."""

    requests_per_s: Seconds = 1000.0
    """Requests of one principal, in the mean; beyond, 429 with Retry-After."""

    burst: Annotated[float, msgspec.Meta(ge=1)] = 2000.0
    """Requests of one principal at once, after a pause."""

    failures_per_s: Seconds = 5.0
    """Refused credentials from one address, in the mean; beyond, 429."""

    failure_burst: Annotated[float, msgspec.Meta(ge=1)] = 50.0
    """Refused credentials from one address at once, after a pause."""

    clients: Count = 4096
    """Token buckets kept; the one used longest ago goes first."""

    connections: Count = 1024
    """Open connections; one more closes the one that has been without a request longest."""


class TokenBuckets:
    """One token bucket per key, in a table of bounded size (sans-IO: `now` in seconds)."""

    def __init__(self, rate: float, burst: float, size: int) -> None:
        self._rate = rate
        self._burst = burst
        self._size = size
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str, now: float) -> float:
        """Take a token and return 0, or return the seconds until there is one."""
        level = self._level(key, now)
        if level < 1.0:
            return (1.0 - level) / self._rate
        self._buckets[key] = (level - 1.0, now)
        self._buckets.move_to_end(key)
        while len(self._buckets) > self._size:
            self._buckets.popitem(last=False)
        return 0.0

    def _level(self, key: str, now: float) -> float:
        level, then = self._buckets.get(key, (self._burst, now))
        return min(self._burst, level + max(0.0, now - then) * self._rate)
