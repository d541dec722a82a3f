"""Whether a path has ceased to carry large packets (RFC 8899 "Black Hole Detection").

Small packets still pass then, acknowledgements among them, so that no time-out ends the
connection while every large packet is lost and sent again.
"""

from __future__ import annotations

from collections.abc import Iterable

from moqt.quic.config import MIN_DATAGRAM_SIZE

ROUNDS = 2
"""Round trips in which large packets were lost and none arrived ..."""
PACKETS = 6
"""... and how many of them, before it is no accident."""


class BlackHole:
    """Counts losses of packets that are larger than every path has to carry."""

    def __init__(self) -> None:
        self._packets = 0
        self._rounds = 0
        self._round_began = 0.0
        self._smallest = 0

    @property
    def suspected(self) -> bool:
        """Whether acknowledgements matter."""
        return self._packets > 0

    def lost(self, packets: Iterable[tuple[float, int]], now: float, size: int) -> bool:
        """Take the (time of sending, octets) of packets found lost; whether it is a black hole.

        Packets larger than `size`, which packets have now, are of an earlier time: no evidence.
        """
        large = [packet for packet in packets if MIN_DATAGRAM_SIZE < packet[1] <= size]
        if not large:
            return False
        smallest = min(size for _, size in large)
        self._smallest = min(smallest, self._smallest) if self._packets else smallest
        self._packets += len(large)
        if max(sent for sent, _ in large) >= self._round_began:
            self._rounds += 1
            self._round_began = now
        return self._rounds >= ROUNDS and self._packets >= PACKETS

    def acknowledged(self, sizes: Iterable[int]) -> None:
        """Take the octets of packets that have arrived."""
        if max(sizes, default=0) >= self._smallest:
            self._packets = self._rounds = 0
