"""What a store knows of its Track besides the Objects it holds, and what that costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from moqt.values.intervals import IntervalSet
from moqt.values.messages import Properties
from moqt.values.names import MAX_LOCATION, Location, location_after, location_before

MAX_INTERVALS: Final = 4096
"""Separate intervals of knowledge up to which a store learns of more that does not exist."""
INTERVAL_OCTETS: Final = 128
"""Octets billed for one interval; CPython needs about 120."""
PROPERTY_OCTETS: Final = 128
"""Octets billed for one Track Property besides its octets; CPython needs about 120."""


def properties_price(properties: Properties) -> int:
    """Octets billed for a track's Track Properties."""
    values = (each.value for each in properties if isinstance(each.value, bytes))
    return len(properties) * PROPERTY_OCTETS + sum(map(len, values))


class Held(Protocol):
    """What a store holds at a Location."""

    @property
    def location(self) -> Location: ...


class Account(Protocol):
    """Who pays for what a store remembers besides its Objects (a relay's cache)."""

    def room(self, octets: int) -> bool:
        """Whether so much more may be remembered; who asks bills it then."""

    def count_statuses(self, more: int) -> None:
        """So many more, or fewer, statuses are held."""

    def count_intervals(self, more: int) -> None:
        """So many more, or fewer, intervals are remembered, each at `INTERVAL_OCTETS`."""

    def count_properties(self, more: int) -> None:
        """So many more, or fewer, octets of Track Properties are remembered."""

    def count_refused(self, limit: int) -> None:
        """A range is not remembered: its track has `limit` of them, or there is no `room` (0)."""


class Knowledge:
    """Which Locations are known: held, or known to have no Object.

    A whole Object held may cost an interval of its own, which is in its price. What is known not
    to exist and touches another interval costs nothing; what lies apart is learned only while
    there are fewer than `limit` of them, and room for it. What is not learned, or is forgotten,
    is unknown: never wrong.
    """

    __slots__ = (
        "account", "billed", "end", "gaps", "heard", "known", "limit", "properties", "refused",
        "whole",
    )  # fmt: skip

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.account: Account | None = None
        self.heard: Callable[[Location, Location], None] | None = None
        """Told of every range in which nothing exists but what is held, remembered or not."""
        self.known = IntervalSet()
        self.gaps = IntervalSet()
        """Where publishers declared by gap properties that nothing exists; at most `limit`."""
        self.end: Location | None = None
        """No Object exists at or beyond this Location, which is never forgotten."""
        self.whole = 0
        """Whole Objects held."""
        self.billed = 0
        """Intervals billed: those of `known` beyond one for each whole Object, and of `gaps`."""
        self.properties = 0
        """Octets billed for Track Properties."""
        self.refused = 0
        """Ranges that were not learned."""

    def learn(self, start: Location, end: Location) -> bool:
        """Nothing exists in [start, end] but what is held; False when that is not remembered."""
        if self.heard is not None:
            self.heard(start, end)
        limit = self._limit
        learned = self.known.add(start, end, limit)
        if not learned:
            self._refuse(limit)
        self.bill()
        return learned

    def learn_gap(self, start: Location, end: Location) -> None:
        """A publisher has declared that nothing exists in [start, end]."""
        limit = self._limit
        declared = self.gaps.add(start, end, limit)
        if self.learn(start, end) and not declared:
            self._refuse(limit)

    def learn_end(self, end: Location) -> None:
        """No Object exists at or beyond `end`. There is one such interval, whatever the limit."""
        self.end = end if self.end is None else min(self.end, end)
        self.known.add(end, MAX_LOCATION)
        self.bill()

    def lost(
        self, location: Location, whole: bool, before: Held | None, after: Held | None
    ) -> None:
        """The Object at `location`, `whole` or not, is held no more; `before` and `after` are
        held next to it. They need not be told while there are fewer intervals than `limit`."""
        self.known.remove(location, location)
        self.whole -= whole
        if len(self.known) > self.limit:
            # What lies between it and its neighbours cost nothing with them. Now it would.
            low = location_after(before.location) if before is not None else Location(0, 0)
            high = location_before(after.location) if after is not None else MAX_LOCATION
            self.forget(low, high)
        else:
            self.bill()

    def forget(self, start: Location, end: Location) -> None:
        """[start, end], where nothing is held, is unknown; but for the end of the track."""
        self.known.remove(start, end)
        if self.end is not None:
            self.known.add(self.end, MAX_LOCATION)
        self.bill()

    def bill(self) -> None:
        """To be called when there may be more to pay. What is stored makes it only less."""
        intervals = max(0, len(self.known) - self.whole) + len(self.gaps)
        more, self.billed = intervals - self.billed, intervals
        if more and self.account is not None:
            self.account.count_intervals(more)

    def bill_properties(self, properties: Properties) -> None:
        """These are the Track Properties from now on."""
        octets = properties_price(properties)
        more, self.properties = octets - self.properties, octets
        if more and self.account is not None:
            self.account.count_properties(more)

    def _refuse(self, limit: int) -> None:
        self.refused += 1
        if self.account is not None:
            self.account.count_refused(limit)

    @property
    def _limit(self) -> int:
        """How many intervals there may be before what is learned must touch one of them."""
        room = self.account is None or self.account.room(INTERVAL_OCTETS)
        return self.limit if room else 0
