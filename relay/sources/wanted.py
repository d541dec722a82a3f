"""Which new Objects of a track are wanted: what a subscription to a publisher asks for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moqt.track.filters import RangeFilters, either, update_to
from moqt.values.codes import LocationFilterType
from moqt.values.messages import LocationFilter, Parameters
from moqt.values.names import MAX_LOCATION, START, Location, location_after

_RELATIVE = (
    LocationFilterType.NONE,
    LocationFilterType.NEXT_OBJECT,
    LocationFilterType.RELATIVE_START,
)
"""Filters that have no end, and no start beyond what is published next."""

MOST_RANGES = 64
"""Ranges of all filters together beyond which everything is asked for: otherwise each one's filters
would cost as much as those of all the others."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A part of what is published from now on (MOQT "Subscriber Interactions")."""

    start: Location = START
    end: Location = MAX_LOCATION
    filters: RangeFilters = ()

    @classmethod
    def by(
        cls, chosen: LocationFilter | None, filters: RangeFilters, largest: Location | None
    ) -> Wanted:
        """What a subscriber wants that has these filters, when `largest` is the Largest Object:
        where it begins matters only as long as that is not reached."""
        start, end = START, MAX_LOCATION
        if chosen is not None and chosen.type not in _RELATIVE:
            start, end = chosen.resolve(None)
            if largest is not None and start <= location_after(largest):
                start = START
        return cls(start, end, either(filters, filters)).in_ranges(MOST_RANGES)

    def __or__(self, other: Wanted) -> Wanted:
        """What one of the two wants, and as little more as one Location filter can say."""
        return Wanted(
            min(self.start, other.start),
            max(self.end, other.end),
            either(self.filters, other.filters),
        ).in_ranges(MOST_RANGES)

    def in_ranges(self, limit: int) -> Wanted:
        """The same, or more when that takes more than `limit` ranges (MAX_FILTER_RANGES)."""
        fits = sum(len(each.ranges) for each in self.filters) <= limit
        return self if fits else replace(self, filters=())

    @property
    def location_filter(self) -> LocationFilter | None:
        """None for all there is."""
        start, end = self.start, self.end
        if end == MAX_LOCATION:
            return LocationFilter.absolute_start(*start) if start > START else None
        return LocationFilter.between(start, end)

    def after(self, asked: Wanted) -> Parameters:
        """The REQUEST_UPDATE that asks for this instead of what was `asked`."""
        chosen = None
        if (self.start, self.end) != (asked.start, asked.end):
            chosen = self.location_filter or LocationFilter(LocationFilterType.NONE)
        changed = self.filters != asked.filters
        return Parameters(
            location_filter=chosen,
            range_filters=update_to(asked.filters, self.filters) if changed else (),
        )


EVERYTHING = Wanted()
