"""Malformed Tracks (MOQT "Malformed Tracks"): noticing them without a store, and remembering.

A `TrackStore` compares everything with what it holds. A subscriber that keeps nothing has a
`TrackChecker`, which knows ends, priorities and gaps, and forgets the oldest groups.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from moqt.track.gaps import read_gaps
from moqt.values.codes import MAX_VI64, ObjectStatus, RequestErrorCode
from moqt.values.errors import MalformedTrack, RequestError
from moqt.values.intervals import IntervalSet
from moqt.values.names import FullTrackName, Location
from moqt.wire.objects import ObjectHeader

MAX_GROUPS = 256
"""Groups a TrackChecker remembers, those seen last."""
MAX_SUBGROUPS = 256
"""Subgroups of one group it tells apart; the others are not compared."""
MAX_GAPS = 256
"""Declared gaps it remembers."""


@dataclass(slots=True)
class _Subgroup:
    priority: int | None
    last: int = -1
    """The largest Object ID seen."""
    final: int | None = None
    """The last Object ID before FIN."""


@dataclass(slots=True)
class _Group:
    end: int = MAX_VI64 + 1
    """No Object ID is as large."""
    largest: int = -1
    prior_gap: int | None = None
    subgroups: dict[int, _Subgroup] = field(default_factory=dict)


class TrackChecker:
    """Follows the Objects of one Track from one publisher. Raises MalformedTrack."""

    def __init__(self) -> None:
        self._groups: OrderedDict[int, _Group] = OrderedDict()
        self._gaps = IntervalSet()
        self._end: Location | None = None
        self._largest: Location | None = None
        self._run: tuple[int, int | None, int | None] | None = None
        """Group, Subgroup and priority of the Object before, when nothing but its group's end
        bounds the ones that follow it."""
        self._run_group = _Group()
        self._run_subgroup = _Subgroup(None)

    def object(self, header: ObjectHeader) -> None:
        """An Object begins, on whatever stream or datagram."""
        group_id, object_id, subgroup_id, priority, properties, _, status = header
        if (
            (group_id, subgroup_id, priority) == self._run
            and self._run_subgroup.last < object_id < self._run_group.end
            and not properties
            and not status
        ):
            # Nearly every Object: the next one of its Subgroup.
            self._run_subgroup.last = object_id
            if object_id > self._run_group.largest:
                self._run_group.largest = object_id
            return
        self._settle()
        self._object(header)

    def _settle(self) -> None:
        """The run is over: what it brought counts from now on."""
        if self._run is not None:
            at = Location(self._run[0], self._run_group.largest)
            if self._largest is None or at > self._largest:
                self._largest = at
            self._run = None

    def _object(self, header: ObjectHeader) -> None:
        group = self._groups.get(header.group)
        if group is None:
            group = self._group(header.group)
        if header.status is not ObjectStatus.NORMAL:
            self._status(group, header)
            return
        at, object_id = header.location, header.object
        if object_id >= group.end:
            raise _fault(at, "lies beyond the end of its group")
        if self._end is not None and at >= self._end:
            raise _fault(at, "lies beyond the end of the track")
        if self._gaps and at in self._gaps:
            raise _fault(at, "lies in a declared gap")
        if header.properties:
            self._declare(group, at, header.properties)
        if header.subgroup is not None:
            self._in_subgroup(group, header)
        if object_id > group.largest:
            group.largest = object_id
        if self._largest is None or at > self._largest:
            self._largest = at
        if self._end is None and not self._gaps and header.subgroup is not None:
            subgroup = group.subgroups.get(header.subgroup)
            if subgroup is not None and subgroup.final is None:
                self._run = (header.group, header.subgroup, header.priority)
                self._run_group, self._run_subgroup = group, subgroup

    def finished(self, last: ObjectHeader, *, end_of_group: bool = False) -> None:
        """A subgroup stream, whose last Object was `last`, ended with FIN."""
        self._settle()
        group = self._group(last.group)
        subgroup = group.subgroups.get(last.subgroup or 0)
        # Statuses do not count: END_OF_GROUP may say the same.
        if subgroup is not None and last.status is ObjectStatus.NORMAL:
            if subgroup.final is not None and subgroup.final != last.object:
                raise _fault(last.location, f"ends a subgroup that ended with {subgroup.final}")
            if subgroup.last > last.object:
                raise _fault(last.location, f"ends a subgroup that has Object {subgroup.last}")
            subgroup.final = last.object
        if end_of_group and last.status is ObjectStatus.NORMAL:
            self._ends(group, Location(last.group, last.object + 1))

    def track_ends(self, end: Location) -> None:
        """Nothing exists at or beyond `end` (End of Track, or FETCH_OK says so)."""
        self._settle()
        if self._largest is not None and self._largest >= end:
            raise _fault(self._largest, "lies beyond the end of the track")
        self._end = end if self._end is None else min(self._end, end)

    def _group(self, group_id: int) -> _Group:
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = _Group()
            if len(self._groups) > MAX_GROUPS:
                self._groups.popitem(last=False)
        return group

    def _status(self, group: _Group, header: ObjectHeader) -> None:
        if header.status is ObjectStatus.END_OF_TRACK:
            self.track_ends(header.location)
        self._ends(group, header.location)

    def _ends(self, group: _Group, end: Location) -> None:
        if group.largest >= end.object:
            raise _fault(Location(end.group, group.largest), "lies beyond the end of its group")
        group.end = min(group.end, end.object)

    def _in_subgroup(self, group: _Group, header: ObjectHeader) -> None:
        assert header.subgroup is not None
        subgroup = group.subgroups.get(header.subgroup)
        if subgroup is None:
            if len(group.subgroups) >= MAX_SUBGROUPS:
                return
            subgroup = group.subgroups[header.subgroup] = _Subgroup(header.priority)
        elif subgroup.priority != header.priority:
            if subgroup.priority is not None and header.priority is not None:
                raise _fault(header.location, "has another priority than its subgroup")
            # one of them is the track's default, which may be the other's number
            if subgroup.priority is None:
                subgroup.priority = header.priority
        if subgroup.final is not None and header.object > subgroup.final:
            raise _fault(header.location, "comes after the final Object of its subgroup")
        if header.object > subgroup.last:
            subgroup.last = header.object

    def _declare(self, group: _Group, at: Location, properties: bytes) -> None:
        gaps = read_gaps(at, properties)
        if gaps.groups is not None:
            if group.prior_gap not in (None, gaps.groups):
                raise _fault(at, "declares another gap than its group")
            group.prior_gap = gaps.groups
        for start, end in gaps.ranges(at):
            if any(
                self._groups[seen].largest >= 0
                for seen in self._groups
                if start.group <= seen <= end.group < at.group
            ) or (
                start.group == at.group
                and any(start.object <= each.last < at.object for each in group.subgroups.values())
            ):
                raise _fault(at, "declares a gap over an Object that came")
            self._gaps.add(start, end, MAX_GAPS)


def _fault(at: Location, what: str) -> MalformedTrack:
    return MalformedTrack(f"Object {at.group}/{at.object} {what}")


MAX_MALFORMED = 1024
"""Malformed tracks remembered; beyond, the one found first is forgotten."""
MALFORMED_SECONDS = 60.0
"""How long a malformed track is not asked for again."""


class MalformedTracks:
    """The malformed tracks of one publisher, so that none is asked for again and again."""

    def __init__(self) -> None:
        self._tracks: OrderedDict[FullTrackName, tuple[float, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tracks)

    def add(self, name: FullTrackName, reason: str, now: float) -> None:
        self._tracks[name] = (now + MALFORMED_SECONDS, reason)
        self._tracks.move_to_end(name)
        if len(self._tracks) > MAX_MALFORMED:
            self._tracks.popitem(last=False)

    def tick(self, now: float) -> None:
        """Forget what is remembered for long enough, the oldest first."""
        while self._tracks and now >= next(iter(self._tracks.values()))[0]:
            self._tracks.popitem(last=False)

    def refuse(self, name: FullTrackName, now: float) -> None:
        """Raise RequestError MALFORMED_TRACK while `name` is remembered."""
        found = self._tracks.get(name)
        if found is None:
            return
        until, reason = found
        if now >= until:
            del self._tracks[name]
            return
        raise RequestError(
            RequestErrorCode.MALFORMED_TRACK, reason, retry_after_ms=int((until - now) * 1000)
        )
