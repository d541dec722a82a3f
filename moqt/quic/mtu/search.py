"""The search for the largest packet a path carries (DPLPMTUD, RFC 8899; RFC 9000 section 14.3).

A probe is a packet larger than any that is known to arrive. Those of the first round have the sizes
that are common, the likeliest first: on nearly every path one of them is the answer. Whoever sends
them says how much room there is for one now. What is left between the largest that arrived and the
smallest that did not is halved. A probe may be lost by chance, so the smallest size that failed is
tried again before the search ends.
"""

from __future__ import annotations

import math

from moqt.quic.config import MIN_DATAGRAM_SIZE

COMMON_SIZES = (1452, 8952)
"""UDP payload on Ethernet and in jumbo frames, over IPv6: over IPv4 20 octets more may fit, which
is what the interface says or the search finds."""

MAX_PROBES = 3
"""Probes of one size that are lost before the path does not carry it (RFC 8899 section 5.1.2)."""

RAISE_SECONDS = 600.0
"""After so long a search that is over begins again, from what is known: the path may have grown
(PMTU_RAISE_TIMER, RFC 8899 section 5.1.1)."""

NEVER = math.inf


class PathMtu:
    """What one path carries: `size` now, and the probes that may raise it. Octets of UDP payload.

    `begin` starts it; before that, and after `stop`, the size is the one every path must carry.
    """

    def __init__(self) -> None:
        self.size = MIN_DATAGRAM_SIZE
        self.probe_at = NEVER
        """The time from which on `next_probe` may have one; of no use to wake up for."""
        self._limit = MIN_DATAGRAM_SIZE
        self._failed: dict[int, int] = {}
        """Sizes above `size` of which probes were lost, and how many."""
        self._wanted: list[int] = []
        self._flying: dict[int, int] = {}
        """The sizes of the probes under way, by packet number."""
        self._now = 0.0

    @property
    def done(self) -> bool:
        """Whether nothing larger is being tried."""
        return not self._wanted and not self._flying

    def begin(self, limit: int, now: float) -> None:
        """Search up to `limit` octets on a new path."""
        self.stop()
        self._limit = limit
        self._begin_round(now)

    def stop(self) -> None:
        """Forget the path."""
        self.size = MIN_DATAGRAM_SIZE
        self.probe_at = NEVER
        self._failed.clear()
        self._wanted.clear()
        self._flying.clear()

    def next_probe(self, room: int, number: int, now: float) -> int | None:
        """The size of the probe to send now, if it has at most `room` octets, or None.

        It is sent as the packet `number`, by which `arrived` and `lost` know it again.
        """
        self._now = now
        if self.done:
            self._failed.clear()
            self._begin_round(now)
        if not self._wanted or self._wanted[0] > room:
            return None
        size = self._flying[number] = self._wanted.pop(0)
        self._schedule()
        return size

    @property
    def wanted(self) -> int | None:
        """The size of the probe that is next, if it only waits for room."""
        return self._wanted[0] if self._wanted else None

    def arrived(self, number: int) -> bool:
        """A probe was acknowledged; whether `size` has grown."""
        size = self._flying.pop(number, 0)
        if not size:
            return False  # of a search that has been given up since
        grown = size > self.size
        if grown:
            self.size = size
            self._failed = {failed: n for failed, n in self._failed.items() if failed > size}
        self._plan()
        return grown

    def lost(self, number: int) -> None:
        """A probe was not acknowledged in time."""
        size = self._flying.pop(number, 0)
        if not size:
            return
        if size > self.size:
            self._failed[size] = self._failed.get(size, 0) + 1
        self._plan()

    def untold(self, number: int) -> None:
        """Nothing at all arrives: what became of a probe says nothing of its size."""
        size = self._flying.pop(number, 0)
        if size > self.size:
            self._wanted = sorted({*self._wanted, size})
        self._schedule()

    def narrowed(self) -> None:
        """Packets of `size` no longer arrive: search again below it, from the smallest size."""
        size = self.size
        self.begin(self._limit, self._now)
        self._failed[size] = MAX_PROBES
        self._wanted = [wanted for wanted in self._wanted if wanted < size]
        self._plan()

    def _begin_round(self, now: float) -> None:
        self._now = now
        sizes = {*COMMON_SIZES, self._limit}
        self._wanted = sorted(size for size in sizes if self.size < size <= self._limit)
        self._schedule()

    def _plan(self) -> None:
        """What to try next, once it is known what became of the round before."""
        least = min(self._failed, default=None)
        self._wanted = [
            size for size in self._wanted if self.size < size and (least is None or size < least)
        ]
        if self.done:
            if least is None:
                following = self._limit
            elif least - self.size > max(16, self.size >> 6):
                following = (self.size + least) // 2
            else:
                following = least if self._failed[least] < MAX_PROBES else self.size
            if following > self.size:
                self._wanted.append(following)
        self._schedule()

    def _schedule(self) -> None:
        if self._wanted:
            self.probe_at = self._now
        elif self._flying or self.size >= self._limit:
            self.probe_at = NEVER
        else:
            self.probe_at = self._now + RAISE_SECONDS
