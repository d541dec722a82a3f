"""Which Objects of a Track are for a subscription, as they are published."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from moqt.track.filters import matches
from moqt.track.store import TrackStore
from moqt.track.stored import StoredObject, SubgroupLog
from moqt.values.codes import MAX_VI64, GroupOrder, ObjectStatus
from moqt.values.intervals import IntervalSet
from moqt.values.messages import RangeFilter
from moqt.values.names import MAX_LOCATION, Location, location_after, location_before


class Selection:
    """What one subscription's filters and FORWARD let through (MOQT "Subscriptions").

    What is there when it begins or is resumed is old: that is for a fill or a FETCH, and never
    sent by the subscription.
    """

    __slots__ = (
        "_filtered_from",
        "_largest",
        "_owed_after",
        "_since",
        "_unfiltered",
        "_withheld",
        "end",
        "filters",
        "group_order",
        "paused",
        "start",
        "store",
    )

    def __init__(
        self,
        store: TrackStore,
        *,
        start: Location,
        end: Location,
        filters: tuple[RangeFilter, ...],
        group_order: GroupOrder,
        paused: bool,
        unfiltered: bool = False,
    ) -> None:
        """`unfiltered`: no Location filter was asked for; `start` is then no promise to send
        anything that is older than the subscription.
        """
        self.store = store
        self.start = start
        self.end = end
        self.filters = filters
        self.group_order = group_order
        self.paused = paused
        self._unfiltered = unfiltered
        self._withheld: dict[tuple[int, int], IntervalSet] = {}
        """Object IDs, by Subgroup, that the filter of then kept back for good."""
        self._largest: Location | None = None
        """Largest Object when the subscription began or was last resumed, and ..."""
        self._since = 0
        """... how many Objects the store had been given by then."""
        self._owed_after: Location | None = None
        self._filtered_from: Location | None = None
        """Largest Object when these range filters came into force."""

    def begin(self) -> None:
        self.from_now_on()
        self._filtered_from = self._largest
        if self._unfiltered:
            self._owed_after = self._largest

    def from_now_on(self) -> None:
        """Whatever is there by now is old."""
        self._largest, self._since = self.store.largest, self.store.placed

    def set_filters(self, filters: tuple[RangeFilter, ...]) -> None:
        """The range filters have changed, or not."""
        if filters != self.filters:
            self.filters = filters
            self._filtered_from = self.store.largest

    def is_sifted_for(self, location: Location) -> bool:
        """Whether filters upstream, where there are some, let through whatever lies before the
        Object on its stream and is selected here: those in force here were by then in force."""
        return bool(self.filters) and (
            self._filtered_from is None or location > self._filtered_from
        )

    def set_range(self, start: Location, end: Location) -> None:
        """The Location filter has changed. What the old one kept back stays back: a wider
        filter is for what is published from now on."""
        self._owed_after = None
        if start < self.start:
            self._withhold(start, location_before(self.start))
        if end > self.end:
            self._withhold(location_after(self.end), MAX_LOCATION)
        self.start, self.end = start, end

    def _withhold(self, start: Location, end: Location) -> None:
        """Never send what is there of [start, end] by now."""
        for group_id, group in self.store.groups.items():
            if not start.group <= group_id <= end.group:
                continue
            low = start.object if group_id == start.group else 0
            high = end.object if group_id == end.group else MAX_VI64
            for log in group.subgroups.values():
                first, last = bisect_left(log.ids, low), bisect_right(log.ids, high)
                if first < last:
                    self._withheld.setdefault((group_id, log.subgroup), IntervalSet()).add(
                        Location(0, log.ids[first]), Location(0, log.ids[last - 1])
                    )

    @property
    def remembered(self) -> int:
        """Subgroups of which something is kept back for good."""
        return len(self._withheld)

    def trim(self) -> set[int]:
        """Forget what was kept back of groups that the store has forgotten: returns which."""
        kept = self.store.groups
        forgotten = {group for group, _ in self._withheld if group not in kept}
        self._withheld = {key: ids for key, ids in self._withheld.items() if key[0] in kept}
        return forgotten

    # -- Objects -------------------------------------------------------------------------

    def passes(self, stored: StoredObject) -> bool:
        """Whether the range filters let the Object through."""
        return not self.filters or matches(
            self.filters,
            object=stored.location.object,
            subgroup=stored.subgroup,
            priority=stored.priority,
            properties=stored.properties,
        )

    def withholds(self, location: Location, subgroup: int) -> bool:
        """Whether a stream leaves out the Object: it lies before the start, was kept back by
        the filter of then, or is old."""
        if location < self.start:
            return True
        if self._withheld:
            ids = self._withheld.get((location.group, subgroup))
            if ids is not None and Location(0, location.object) in ids:
                return True
        return self._largest is not None and location <= self._largest and self._is_old(location)

    def is_owed(self, location: Location) -> bool:
        """Whether a subgroup stream without the Object, which the filter selects, is cut short."""
        return self._owed_after is None or location > self._owed_after

    def selects_datagram(self, stored: StoredObject) -> bool:
        """Whether it is to be sent, by what the subscription wants now."""
        return (
            not self.paused
            and stored.live
            and self.start <= stored.location <= self.end
            and not self._is_old(stored.location)
            and (stored.status is not ObjectStatus.NORMAL or self.passes(stored))
        )

    def _is_old(self, location: Location) -> bool:
        """Whether the Object was there when the subscription began or was resumed.

        One that only a fetch has brought since then was, too, if not here. An evicted one is
        taken to be old: it may have come late, but nobody can tell.
        """
        if self._largest is None or location > self._largest:
            return False
        stored = self.store.get(location)
        return stored is None or stored.number <= self._since or not stored.live

    # -- Subgroups -----------------------------------------------------------------------

    def reaches(self, log: SubgroupLog) -> bool:
        """Whether there may be something for the subscription at the end of `log`."""
        if not log.ids:
            return False
        last = Location(log.group, log.ids[-1])
        return (
            last >= self.start
            and log.group <= self.end.group
            and (log.number > self._since or not self._is_old(last))
        )

    def reaches_cut(self, log: SubgroupLog) -> bool:
        """Whether what was lost behind the end of `log` may be for the subscription."""
        last = Location(log.group, log.ids[-1] if log.ids else -1)
        return self.start.group <= log.group and last < self.end

    def before_start(self, group: int) -> int:
        """The last Object ID of the group that lies before the start; -1 for none."""
        return self.start.object - 1 if group == self.start.group else -1

    def last_old(self, log: SubgroupLog) -> int:
        """The Object ID before the new ones at the end of `log`; -1 when there are none there."""
        if self._largest is None or log.group > self._largest.group:
            return -1
        for at in range(len(log.ids) - 1, -1, -1):
            if self._is_old(Location(log.group, log.ids[at])):
                return log.ids[at] if at + 1 < len(log.ids) else -1
        return log.forgotten if Location(log.group, log.forgotten) <= self._largest else -1

    def last_there(self, group: int) -> int:
        """The last Object ID of the group that can be old, whether or not it is in the store."""
        if self._largest is None or group > self._largest.group:
            return -1
        return self._largest.object if group == self._largest.group else MAX_VI64

    def owes(self, log: SubgroupLog, low: int, high: int) -> bool:
        """Whether a stream that leaves out the Objects of (low, high] lacks one of the filter's.

        (MOQT "Closing Subgroup Streams": then it must not end with FIN)
        """
        at = bisect_right(log.ids, high) - 1
        missing = [log.ids[at] if at >= 0 else log.forgotten]
        if log.sifted:
            missing.append(self.last_there(log.group))  # it may be an old one of the Subgroup
        return any(last > low and self.is_owed(Location(log.group, last)) for last in missing)
