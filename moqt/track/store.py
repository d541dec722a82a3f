"""TrackStore: one Track as an ordered, immutable log that any number of cursors read.

A publisher is a store the application fills; a relay is a store the upstream fills.
Payload octets are held once and handed out by reference. Pure logic: no I/O, no clock
(`now` is a parameter where age matters).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator

from moqt.track.gaps import Gaps, read_gaps, with_gaps
from moqt.track.knowledge import MAX_INTERVALS, Knowledge
from moqt.track.listeners import Source, StoreListener
from moqt.track.properties import max_cache_duration
from moqt.track.stored import Buffer, GroupLog, StoredObject, SubgroupLog, buffer_length
from moqt.values.codes import DEFAULT_PRIORITY, MAX_VI64, ObjectStatus, PropertyType
from moqt.values.errors import MalformedTrack, MisuseError
from moqt.values.messages import Properties, property_value
from moqt.values.names import MAX_LOCATION, FullTrackName, Location
from moqt.wire.primitives import track_properties_fault

MAX_JOINED = 16 << 20
"""Octets up to which the payload of a whole Object is joined; larger ones stay in parts."""


class TrackStore:
    """All that is held, and known, of one Track.

    `authoritative` stores (original publishers) know all of their Track: what they do not hold
    at or below Largest does not exist.
    """

    def __init__(
        self,
        name: FullTrackName,
        properties: Properties = (),
        *,
        authoritative: bool = True,
        source: Source | None = None,
        max_intervals: int = MAX_INTERVALS,
    ) -> None:
        self.name = name
        self.authoritative = authoritative
        self.source = source
        self.groups: dict[int, GroupLog] = {}
        self.group_ids: list[int] = []
        self.largest: Location | None = None
        self.end_of_track: Location | None = None
        """No Object exists at or beyond this Location."""
        self.ended = False
        """Nothing will be added any more: subscriptions end with PUBLISH_DONE."""
        self.end_code: int | None = None
        self.end_reason = ""
        self.octets = 0
        self.statuses = 0
        """End of Group and End of Track Objects held."""
        self.placed = 0
        """Objects, statuses included, that were ever added."""
        self.knowledge = Knowledge(max_intervals)
        self.known = self.knowledge.known
        self.listeners: dict[StoreListener, None] = {}
        """Who is told of what comes."""
        self.on_stored: Callable[[TrackStore, StoredObject], None] | None = None
        """Called for each complete Object stored (cache accounting)."""
        self.on_used: Callable[[TrackStore, StoredObject], None] | None = None
        """Called whenever a delivery begins to send an Object (cache accounting)."""
        self.on_evicted: Callable[[TrackStore, StoredObject], None] | None = None
        """Called for each Object that was evicted."""
        self.on_new_group: Callable[[TrackStore, int], None] | None = None
        """The application's: called with the group a subscriber knows to be next, or 0."""
        self.set_properties(properties)

    def set_properties(self, properties: Properties) -> None:
        """Raises MisuseError for a known Track Property with a value it cannot have."""
        fault = track_properties_fault(properties)
        if fault is not None:
            raise MisuseError(f"{self.name}: {fault} is no legal track property")
        self.properties = properties
        self.knowledge.bill_properties(properties)
        value = property_value(properties, PropertyType.DEFAULT_PUBLISHER_PRIORITY)
        self.default_priority = value if isinstance(value, int) else DEFAULT_PRIORITY
        self.dynamic_groups = property_value(properties, PropertyType.DYNAMIC_GROUPS) == 1
        self.max_cache_duration = max_cache_duration(properties)
        """In seconds."""

    def request_new_group(self, value: int) -> bool:
        """A subscriber's NEW_GROUP_REQUEST: tell the application, when the rule says so.

        (MOQT "NEW GROUP REQUEST": the track has DYNAMIC_GROUPS, and `value` is 0 or larger
        than the current group.) Returns whether it was told.
        """
        current = self.largest.group if self.largest is not None else -1
        if not self.dynamic_groups or self.on_new_group is None or self.ended:
            return False
        if value and value <= current:
            return False
        self.on_new_group(self, value)
        return True

    # -- listeners ---------------------------------------------------------------------

    def add_listener(self, listener: StoreListener) -> None:
        self.listeners[listener] = None

    def remove_listener(self, listener: StoreListener) -> None:
        self.listeners.pop(listener, None)

    def changed(self, log: SubgroupLog | None = None) -> None:
        for listener in tuple(self.listeners):
            listener.store_changed(log)

    # -- writing -----------------------------------------------------------------------

    def append(
        self,
        group: int,
        object_id: int,
        payload: Buffer | Iterable[Buffer],
        *,
        subgroup: int | None = 0,
        priority: int | None = None,
        properties: bytes = b"",
        gaps: Gaps | None = None,
        end_of_group: bool = False,
        now: float = 0.0,
    ) -> StoredObject:
        """Publish a whole Object. `payload` is one buffer or several, kept by reference.

        `properties` are encoded Key-Value-Pairs, passed on as they are; `gaps` are written into
        them. `subgroup` None publishes it in Delivery Mode Datagram. `end_of_group`: no larger
        Object ID of the group will be published. `now` starts its delivery timeouts; without it
        they start when a subscription first sees it.

        Raises MisuseError when the Location is taken, the track has ended or the priority is
        not 0 to 255, MalformedTrack when it contradicts what was published.
        """
        if gaps is not None:
            properties = with_gaps(properties, gaps)
        parts = [payload] if isinstance(payload, bytes | bytearray | memoryview) else list(payload)
        length = sum(map(buffer_length, parts))
        if priority is not None and not 0 <= priority <= 255:
            raise MisuseError(f"{self.name}: priority {priority} is not in 0..255")
        stored = self._place(
            Location(group, object_id),
            subgroup,
            self.default_priority if priority is None else priority,
            properties,
            length,
            now=now,
            declared=gaps is not None,
        )
        if stored is None:
            raise MisuseError(f"{self.name}: Object {group}/{object_id} was already published")
        if end_of_group:
            self.set_end_of_group(Location(group, object_id + 1))
        for part in parts:
            self.octets += stored.extend(part)
        self._finish(stored)
        return stored

    def begin(
        self,
        location: Location,
        *,
        subgroup: int | None,
        priority: int | None,
        properties: bytes,
        length: int,
        follows: int | None = None,
        now: float = 0.0,
        live: bool = True,
        payload: Buffer | None = None,
    ) -> StoredObject | None:
        """Place an Object; None for a duplicate. Its payload arrives later through `grow`, or has
        come whole with it and is copied: then it is complete, and the listeners are told once.

        `live` is true when it came through a subscription: only then does it move Largest.
        Raises MalformedTrack when it contradicts what is known.
        """
        priority = self.default_priority if priority is None else priority
        stored = self._place(
            location, subgroup, priority, properties, length, follows=follows, now=now, live=live
        )
        if payload is not None and stored is not None:
            self.octets += stored.hold(bytes(payload))
            self._finish(stored)
        return stored

    def grow(self, stored: StoredObject, part: Buffer) -> None:
        self.octets += stored.extend(part)
        self.changed(self._log_of(stored))

    def complete(self, stored: StoredObject) -> None:
        """The payload is whole: join its parts so that they are held without overhead."""
        if stored.length <= MAX_JOINED:
            stored.join()
        self._finish(stored)

    def abort(self, stored: StoredObject) -> None:
        """The rest of a growing Object will not come: forget it."""
        self._drop(stored)
        log = self._log_of(stored)
        if log is not None and not stored.again and not stored.retired:
            del log.ids[bisect_left(log.ids, stored.location.object)]
        self.changed(log)

    def mark_end(
        self,
        location: Location,
        status: ObjectStatus,
        *,
        subgroup: int | None = 0,
        priority: int | None = None,
        follows: int | None = None,
    ) -> None:
        """Record an End of Group or End of Track status Object at `location`.

        `subgroup` None: it comes, and goes on, as a datagram. Raises MalformedTrack when an
        Object lies at or beyond it.
        """
        if status is ObjectStatus.END_OF_TRACK:
            self.set_end_of_track(location)
        else:
            self.set_end_of_group(location)
        if subgroup is None:
            priority = self.default_priority if priority is None else priority
            stored = self._place(location, None, priority, b"", 0, status)
            if stored is not None:
                for listener in tuple(self.listeners):
                    listener.datagram_stored(stored)
            self.changed()
            return
        log = self.subgroup(location.group, subgroup, priority)
        self._place(location, subgroup, log.priority, b"", 0, status, follows=follows)
        self.changed(log)

    def set_end_of_group(self, location: Location) -> None:
        """No Object ID of the group is, or will be, as large as that of `location`."""
        group = self._group(location.group)
        last = next((i for i in reversed(group.ids) if not group.objects[i].status), None)
        if last is not None and last >= location.object:
            raise MalformedTrack(
                f"{self.name}: Object {location.group}/{last} lies beyond the end "
                f"of its group, {location.object}"
            )
        group.end = location.object if group.end is None else min(group.end, location.object)
        self.mark_nonexistent(location, Location(location.group, MAX_VI64))

    def set_end_of_track(self, location: Location) -> None:
        """No Object exists at or beyond `location`."""
        beyond = self.largest_in(location, MAX_LOCATION)
        last = beyond.location if beyond is not None else self.largest
        if last is not None and last >= location:
            raise MalformedTrack(
                f"{self.name}: Object {last.group}/{last.object} lies beyond the end of the track"
            )
        if self.end_of_track is None or location < self.end_of_track:
            self.end_of_track = location
        if not self.authoritative:
            self.knowledge.learn_end(location)

    def mark_nonexistent(self, start: Location, end: Location) -> bool:
        """Nothing exists in [start, end] beyond what is held (a fetch gap, a 0x8C marker); False
        when there is no room to remember it: it stays unknown."""
        return start > end or self.authoritative or self.knowledge.learn(start, end)

    def finish_subgroup(
        self,
        group: int,
        subgroup: int,
        *,
        end_of_group: bool = False,
        last: int | None = None,
    ) -> None:
        """Every Object of the Subgroup has been published.

        `last` is the final Object ID of the stream that said so. Raises MalformedTrack when
        another stream ended with a different one, or brought an Object after it.
        """
        log = self.subgroup(group, subgroup)
        end = self.groups[group].end
        if last is not None and (end is None or last < end):
            # Statuses do not count: END_OF_GROUP may say the same.
            at = len(log.ids) if end is None else bisect_left(log.ids, end)
            known = log.ids[at - 1] if at else last
            if known > last or (log.finished and known != last):
                raise MalformedTrack(
                    f"{self.name}: subgroup {group}/{subgroup} ended with Object {last} and "
                    f"has Object {known}"
                )
        log.finished = log.done = True
        log.broken = False
        if end_of_group:
            log.end_of_group = True
            if log.ids and self.groups[group].end is None:
                self.set_end_of_group(Location(group, log.ids[-1] + 1))
        self.changed(log)

    def break_subgroup(self, group: int, subgroup: int, *, priority: int | None = None) -> None:
        """More Objects of the Subgroup may exist, and do not come.

        `priority` is the Subgroup's, should none of its Objects have come.
        """
        log = self.subgroup(group, subgroup, priority)
        if not log.done:
            log.broken = True
            for listener in tuple(self.listeners):
                listener.subgroup_cut(log)

    def finish(self, code: int, reason: str = "") -> None:
        """Nothing more will be added; subscriptions end with PUBLISH_DONE `code`."""
        self.ended = True
        self.end_code = code
        self.end_reason = reason
        self.changed()

    def reopen(self) -> None:
        """A new upstream continues the track."""
        self.ended = False
        self.end_code = None

    # -- eviction ----------------------------------------------------------------------

    def evict(self, stored: StoredObject) -> None:
        """Forget a complete Object's payload: it becomes unknown, never non-existent."""
        self._drop(stored)
        self.forget_group(stored.location.group)
        if self.on_evicted is not None:
            self.on_evicted(self, stored)

    def retire(self, stored: StoredObject) -> None:
        """A growing Object may not be begun any more (MOQT "MAX_CACHE_DURATION")."""
        stored.retired = True
        self._unlink(stored)
        self.changed(self._log_of(stored))

    def forget_group(self, group_id: int) -> None:
        """Drop the log of a group that holds nothing and that nobody reads."""
        group = self.groups.get(group_id)
        if group is None or len(group.objects) > group.statuses:
            return
        if all(
            log.readers == 0 and (log.done or log.broken or self.ended)
            # The last one is the likeliest to be needed still.
            for log in reversed(group.subgroups.values())
        ):
            if len(self.known) >= self.knowledge.limit:
                # What is known not to exist stays known, as long as it costs little.
                self.knowledge.forget(Location(group_id, 0), Location(group_id, MAX_VI64))
            self._count_statuses(-len(group.objects))
            del self.groups[group_id]
            del self.group_ids[bisect_left(self.group_ids, group_id)]

    # -- reading -----------------------------------------------------------------------

    def get(self, location: Location) -> StoredObject | None:
        group = self.groups.get(location.group)
        return group.objects.get(location.object) if group else None

    def subgroup(self, group: int, subgroup: int, priority: int | None = None) -> SubgroupLog:
        """The log of a Subgroup, made if need be."""
        group_log = self._group(group)
        log = group_log.subgroups.get(subgroup)
        if log is None:
            log = SubgroupLog(
                group, subgroup, self.default_priority if priority is None else priority
            )
            group_log.subgroups[subgroup] = log
        return log

    def next_object(self, start: Location, end: Location) -> StoredObject | None:
        """The first real Object of [start, end], statuses left out."""
        index = bisect_left(self.group_ids, start.group)
        while index < len(self.group_ids):
            group_id = self.group_ids[index]
            if group_id > end.group:
                return None
            group = self.groups[group_id]
            at = bisect_left(group.ids, start.object) if group_id == start.group else 0
            while at < len(group.ids):
                stored = group.objects[group.ids[at]]
                if stored.location > end:
                    return None
                if stored.status is ObjectStatus.NORMAL:
                    return stored
                at += 1
            index += 1
        return None

    def largest_in(self, start: Location, end: Location) -> StoredObject | None:
        """The last real Object of [start, end]."""
        index = bisect_right(self.group_ids, end.group) - 1
        while index >= 0 and self.group_ids[index] >= start.group:
            group_id = self.group_ids[index]
            group = self.groups[group_id]
            limit = end.object if group_id == end.group else MAX_VI64
            for at in range(bisect_right(group.ids, limit) - 1, -1, -1):
                stored = group.objects[group.ids[at]]
                if stored.location < start:
                    return None
                if stored.status is ObjectStatus.NORMAL:
                    return stored
            index -= 1
        return None

    def first_unknown(self, start: Location, end: Location) -> Location | None:
        """The smallest Location of [start, end] of which this store knows nothing."""
        if self.authoritative or start > end:
            return None
        return self.known.first_missing(start, end)

    def last_unknown(self, start: Location, end: Location) -> Location | None:
        if self.authoritative or start > end:
            return None
        return self.known.last_missing(start, end)

    def is_complete(self) -> bool:
        """Whether every Object of the Track, to its end, is held whole."""
        if self.end_of_track is None or self.largest is None:
            return self.end_of_track == Location(0, 0)
        if self.first_unknown(Location(0, 0), self.largest) is not None:
            return False
        held = sum(len(group.objects) - group.statuses for group in self.groups.values())
        whole = held == self.knowledge.whole  # counted by a relay, whose tracks may be long
        return whole or (self.authoritative and all(o.complete for o in self.objects()))

    def used(self, stored: StoredObject) -> None:
        """A delivery begins to send `stored`."""
        if self.on_used is not None:
            self.on_used(self, stored)

    def objects(self) -> Iterator[StoredObject]:
        """Every real Object held, in order."""
        for group_id in self.group_ids:
            group = self.groups[group_id]
            for object_id in group.ids:
                stored = group.objects[object_id]
                if stored.status is ObjectStatus.NORMAL:
                    yield stored

    # -- inside ------------------------------------------------------------------------

    def _group(self, group_id: int) -> GroupLog:
        group = self.groups.get(group_id)
        if group is None:
            group = self.groups[group_id] = GroupLog()
            insort(self.group_ids, group_id)
        return group

    def _log_of(self, stored: StoredObject) -> SubgroupLog | None:
        group = self.groups.get(stored.location.group)
        if group is None or stored.subgroup is None:
            return None
        return group.subgroups.get(stored.subgroup)

    def _place(
        self,
        location: Location,
        subgroup: int | None,
        priority: int,
        properties: bytes,
        length: int,
        status: ObjectStatus = ObjectStatus.NORMAL,
        *,
        follows: int | None = None,
        now: float = 0.0,
        live: bool = True,
        declared: bool = False,
    ) -> StoredObject | None:
        if self.ended and self.authoritative:
            raise MisuseError(f"{self.name}: the track has ended")
        normal = status is ObjectStatus.NORMAL
        if normal and self.end_of_track is not None and location >= self.end_of_track:
            raise MalformedTrack(
                f"{self.name}: Object {location.group}/{location.object} lies beyond the end "
                f"of the track"
            )
        group = self._group(location.group)
        if normal and group.end is not None and location.object >= group.end:
            raise MalformedTrack(
                f"{self.name}: Object {location.group}/{location.object} lies beyond the end "
                f"of its group"
            )
        existing = group.objects.get(location.object)
        if existing is not None:
            # A duplicate must be the same Object (MOQT "Malformed Tracks").
            if not existing.is_alike(subgroup, priority, status, properties, length):
                raise MalformedTrack(
                    f"{self.name}: Object {location.group}/{location.object} came twice and differs"
                )
            return None
        if normal and self.knowledge.gaps and location in self.knowledge.gaps:
            raise MalformedTrack(
                f"{self.name}: Object {location.group}/{location.object} lies in a declared gap"
            )
        if properties and (declared or not self.authoritative):
            self._declare_gaps(group, location, properties)
        stored = StoredObject(
            location, subgroup, priority, status, properties, length, follows, now, live=live
        )
        if subgroup is not None:
            log = self.subgroup(location.group, subgroup, priority)
            ids = log.ids
            if normal and ids:
                if log.priority != priority:
                    raise MalformedTrack(
                        f"{self.name}: priority changes inside subgroup {location.group}/{subgroup}"
                    )
                if log.finished and location.object > ids[-1]:
                    raise MalformedTrack(
                        f"{self.name}: Object {location.group}/{location.object} comes after the "
                        f"final Object of its subgroup"
                    )
            if not ids:
                if self.authoritative and log.first_id is None:
                    log.first_id = location.object
                log.begin(location.object, properties)
            log.priority = priority
            at = bisect_left(ids, location.object)
            if at == len(ids) or ids[at] != location.object:
                ids.insert(at, location.object)
                if len(ids) > log.max_ids:
                    log.trim(group.objects)
            else:
                stored.again = True
            if live:
                log.number = self.placed + 1
        self.placed += 1
        stored.number = self.placed
        group.objects[location.object] = stored
        insort(group.ids, location.object)
        if not normal:
            group.statuses += 1
            self._count_statuses(1)
        if normal and live and (self.largest is None or location > self.largest):
            self.largest = location
        return stored

    def _count_statuses(self, more: int) -> None:
        self.statuses += more
        if more and self.knowledge.account is not None:
            self.knowledge.account.count_statuses(more)

    def _declare_gaps(self, group: GroupLog, location: Location, properties: bytes) -> None:
        gaps = read_gaps(location, properties)
        if gaps.groups is not None:
            if group.prior_gap is not None and group.prior_gap != gaps.groups:
                raise MalformedTrack(
                    f"{self.name}: Objects of group {location.group} declare different gaps"
                )
            group.prior_gap = gaps.groups
        for start, end in gaps.ranges(location):
            if self.next_object(start, end) is not None:
                raise MalformedTrack(
                    f"{self.name}: Object {location.group}/{location.object} declares a gap over "
                    f"an Object that exists"
                )
            self.knowledge.learn_gap(start, end)

    def _finish(self, stored: StoredObject) -> None:
        if not self.authoritative:
            self.known.add(stored.location, stored.location)
            self.knowledge.whole += 1
        if self.on_stored is not None:
            self.on_stored(self, stored)
        if stored.subgroup is None:
            for listener in tuple(self.listeners):
                listener.datagram_stored(stored)
        self.changed(self._log_of(stored))

    def _drop(self, stored: StoredObject) -> None:
        if stored.gone:
            return
        stored.gone = True
        self.octets -= stored.received
        if not stored.retired:
            self._unlink(stored)

    def _unlink(self, stored: StoredObject) -> None:
        location = stored.location
        group = self.groups[location.group]
        del group.objects[location.object]
        del group.ids[bisect_left(group.ids, location.object)]
        if self.authoritative:
            return
        before = after = None
        if len(self.known) >= self.knowledge.limit:
            before = self.largest_in(Location(0, 0), location)
            after = self.next_object(location, MAX_LOCATION)
        self.knowledge.lost(location, stored.complete, before, after)
