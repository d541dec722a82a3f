"""Which publications are kept: within a budget, those asked for longest ago go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

_K = TypeVar("_K")


@dataclass(slots=True)
class _Entry:
    octets: int
    used: float


class Kept(Generic[_K]):
    """What is kept, by whatever names it, with its octets and when it was last of use. Time is a
    parameter."""

    def __init__(self, octets: int, most: int, seconds: float) -> None:
        """At most `octets` and `most` things, each for `seconds` after it was of use."""
        self._budget = octets
        self._most = most
        self._seconds = seconds
        self._entries: OrderedDict[_K, _Entry] = OrderedDict()
        self.octets = 0
        """Octets of all that is kept."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, what: _K) -> bool:
        return what in self._entries

    def admit(
        self, what: _K, octets: int, now: float, spare: Callable[[_K], bool]
    ) -> list[_K] | None:
        """Keep it, in place of those that are returned: the ones used longest ago that can be
        `spare`d. None when that would not make room enough; then nothing has changed."""
        if octets > self._budget:
            return None
        gone: list[_K] = []
        left, count = self.octets, len(self._entries)
        for each, entry in self._entries.items():
            if left + octets <= self._budget and count < self._most:
                break
            if spare(each):
                gone.append(each)
                left, count = left - entry.octets, count - 1
        if left + octets > self._budget or count >= self._most:
            return None
        for each in gone:
            self.drop(each)
        self._entries[what] = _Entry(octets, now)
        self.octets += octets
        return gone

    def use(self, what: _K, now: float) -> None:
        """It is of use now; harmless when it is not kept."""
        entry = self._entries.get(what)
        if entry is not None:
            entry.used = now
            self._entries.move_to_end(what)

    def drop(self, what: _K) -> None:
        """Keep it no longer; harmless when it is not kept."""
        entry = self._entries.pop(what, None)
        if entry is not None:
            self.octets -= entry.octets

    def expired(self, now: float) -> list[_K]:
        """Those of no use for so long: the order is that of their last use."""
        gone = []
        for each, entry in self._entries.items():
            if now < entry.used + self._seconds:
                break
            gone.append(each)
        return gone
