"""The limits of a server and the token buckets that slow a client down."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What one request and one client may cost. Octets, seconds, requests per second."""

    json_octets: int = 8 * MIB
    json_containers: int = 262_144
    """Arrays and objects in a JSON body."""

    json_items: int = 2_000_000
    """Items and members in a JSON body."""

    bodies_octets: int = 256 * MIB
    """Bodies in memory and what is read of them, of all requests together; one more is
    answered with 503."""

    bodies_octets_per_principal: int = 64 * MIB
    """The same of one principal; one more, unless it is the only one, is answered with 429."""

    header_octets: int = 32 << 10
    request_s: float = 30.0
    """Longest time for a request whose body is JSON, reading the body included."""

    head_s: float = 10.0
    """Longest time for a header section to arrive whole."""

    stall_s: float = 30.0
    """Longest time one chunk of a streamed body may take, in either direction."""

    min_octets_per_s: int = 64 << 10
    """Slowest mean rate of a streamed body after `stall_s`; below it the stream is cut."""

    requests_per_s: float = 1000.0
    burst: float = 2000.0
    """Of one principal."""

    failures_per_s: float = 5.0
    failure_burst: float = 50.0
    """Of refused credentials from one address."""

    clients: int = 4096
    """Token buckets kept; the one used longest ago goes first."""

    connections: int = 1024


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
