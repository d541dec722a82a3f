"""Sets of Locations kept as intervals: a range costs one entry, however wide it is."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from moqt.values.codes import MAX_VI64
from moqt.values.names import Location


class IntervalSet:
    """A set of Locations kept as closed intervals, so that ranges cost one entry."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    @staticmethod
    def _key(location: Location) -> int:
        return location.group << 64 | location.object

    @staticmethod
    def _location(key: int) -> Location:
        return Location(key >> 64, key & MAX_VI64)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[Location, Location]]:
        """The intervals, ascending, each by its first and last Location."""
        return map(
            lambda low, high: (self._location(low), self._location(high)), self._starts, self._ends
        )

    def add(self, start: Location, end: Location, limit: int | None = None) -> bool:
        """Add [start, end]. False, and nothing has changed, when it would be one more interval
        and there are `limit` already: what touches another one costs nothing."""
        low = start.group << 64 | start.object
        high = end.group << 64 | end.object
        starts, ends = self._starts, self._ends
        first = bisect_left(ends, low - 1)
        if (
            first < len(ends)
            and ends[first] == low - 1
            and (first + 1 == len(ends) or starts[first + 1] > high + 1)
        ):  # nearly always: it goes on where one ends
            ends[first] = high
            return True
        last = bisect_right(starts, high + 1)
        if limit is not None and first == last and len(starts) >= limit:
            return False
        if first < last:
            low = min(low, starts[first])
            high = max(high, ends[last - 1])
        starts[first:last] = [low]
        ends[first:last] = [high]
        return True

    def remove(self, start: Location, end: Location) -> None:
        low, high = self._key(start), self._key(end)
        first = bisect_left(self._ends, low)
        last = bisect_right(self._starts, high)
        if first >= last:
            return
        starts: list[int] = []
        ends: list[int] = []
        if self._starts[first] < low:
            starts.append(self._starts[first])
            ends.append(low - 1)
        if self._ends[last - 1] > high:
            starts.append(high + 1)
            ends.append(self._ends[last - 1])
        self._starts[first:last] = starts
        self._ends[first:last] = ends

    def pop_first(self) -> tuple[Location, Location]:
        """Take the lowest interval out; its first and last Location."""
        return self._location(self._starts.pop(0)), self._location(self._ends.pop(0))

    def first_missing(self, start: Location, end: Location) -> Location | None:
        """The smallest Location of [start, end] outside the set."""
        low = self._key(start)
        index = bisect_left(self._ends, low)
        if index < len(self._starts) and self._starts[index] <= low:
            low = self._ends[index] + 1
        return self._location(low) if low <= self._key(end) else None

    def last_missing(self, start: Location, end: Location) -> Location | None:
        """The largest Location of [start, end] outside the set."""
        high = self._key(end)
        index = bisect_right(self._starts, high) - 1
        if index >= 0 and self._ends[index] >= high:
            high = self._starts[index] - 1
        return self._location(high) if high >= self._key(start) else None

    def missing_end(self, start: Location, end: Location) -> Location:
        """The last Location of the hole that begins at `start`, not beyond `end`."""
        index = bisect_right(self._starts, self._key(start))
        if index < len(self._starts):
            return min(end, self._location(self._starts[index] - 1))
        return end

    def missing_start(self, start: Location, end: Location) -> Location:
        """The first Location of the hole that ends at `end`, not before `start`."""
        index = bisect_left(self._ends, self._key(end)) - 1
        if index >= 0:
            return max(start, self._location(self._ends[index] + 1))
        return start

    def end_of(self, location: Location) -> Location | None:
        """The last Location of the interval that `location` is in; None outside the set."""
        key = self._key(location)
        index = bisect_left(self._ends, key)
        if index < len(self._starts) and self._starts[index] <= key:
            return self._location(self._ends[index])
        return None

    def coarsen(self, limit: int) -> None:
        """Keep at most `limit` intervals, by counting the lowest holes as in the set."""
        extra = len(self._starts) - limit
        if extra > 0:
            del self._starts[1 : extra + 1]
            del self._ends[:extra]

    def __contains__(self, location: Location) -> bool:
        key = location.group << 64 | location.object
        index = bisect_left(self._ends, key)
        return index < len(self._starts) and self._starts[index] <= key
