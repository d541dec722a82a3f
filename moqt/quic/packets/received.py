"""Which packets have come: those that come again are discarded (RFC 9000 section 12.3)."""

from __future__ import annotations

REMEMBERED = 4096
"""Packets before the newest of which each is known: one that comes later counts as there already,
and is lost."""


class ReceivedPackets:
    """The numbers of one packet space: kept are those that are missing, at most `REMEMBERED`."""

    def __init__(self) -> None:
        self._next = 0
        self._missing: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number < self._next and number not in self._missing

    def add(self, number: int) -> None:
        self.add_run(number, number + 1)

    def add_run(self, start: int, stop: int) -> None:
        """The packets numbered [start, stop) have come."""
        missing, following = self._missing, self._next
        if start < following and missing:
            missing.difference_update(range(start, min(stop, following)))
        if stop <= following:
            return
        self._next = stop
        if start > following:
            missing.update(range(max(following, start - REMEMBERED), start))
        if len(missing) > REMEMBERED:
            self._missing = {number for number in missing if number >= stop - REMEMBERED}
