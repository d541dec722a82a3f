"""Packets found lost: which came after all, and for how long nothing arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

REMEMBERED = 256
"""Packets whose late arrival is noticed."""


class LostPackets:
    """Remembers the packets found lost lately, in the order of their numbers."""

    def __init__(self) -> None:
        self._packets: deque[tuple[int, int, float]] = deque(maxlen=REMEMBERED)
        self._run_end = -1
        self._run_since: float | None = None
        self._newest = -1
        self._runs = 0

    def __len__(self) -> int:
        return len(self._packets)

    def add(self, number: int, octets: int, now: float) -> None:
        self._packets.append((number, octets, now))
        self._runs += number != self._newest + 1
        self._newest = number

    def take_runs(self) -> int:
        """Runs of successive packets that were found lost since the last call."""
        runs, self._runs = self._runs, 0
        return runs

    def forget(self, before: float) -> None:
        """Those found lost before a time will not come any more."""
        packets = self._packets
        while packets and packets[0][2] < before:
            packets.popleft()

    def came(self, acknowledged: Sequence[range]) -> list[int]:
        """The octets of each packet that an ACK frame has in one of its (rising) ranges."""
        left: deque[tuple[int, int, float]] = deque(maxlen=REMEMBERED)
        octets: list[int] = []
        at, count = 0, len(acknowledged)
        for packet in self._packets:
            number = packet[0]
            while at < count and acknowledged[at].stop <= number:
                at += 1
            if at < count and acknowledged[at].start <= number:
                octets.append(packet[1])
            else:
                left.append(packet)
        if octets:
            self._packets = left
        return octets

    def silence(self, number: int, sent_time: float, counts: bool) -> float:
        """Take the next packet found lost; seconds between the first and this one in a row.

        In a row are those of which none between them was acknowledged, whether they were found
        lost at one time or not (RFC 9002 section 7.6.2). Only those that elicit an ACK `count`.
        """
        if number != self._run_end + 1:
            self._run_since = None
        self._run_end = number
        if not counts:
            return 0.0
        if self._run_since is None:
            self._run_since = sent_time
        return sent_time - self._run_since

    def break_silence(self) -> None:
        """What was lost until now has had its consequence."""
        self._run_since = None
        self._run_end = -1
