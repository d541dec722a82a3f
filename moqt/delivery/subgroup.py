"""One Subgroup on its stream (MOQT "Subgroup Streams")."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

from moqt.delivery.scheduler import Progress
from moqt.delivery.selection import Selection
from moqt.delivery.stream import Served, StreamDelivery
from moqt.delivery.timeouts import Timeouts
from moqt.track.stored import StoredObject, SubgroupLog
from moqt.values.codes import GroupOrder, ObjectStatus, StreamErrorCode
from moqt.values.deadlines import Deadline
from moqt.values.names import Location
from moqt.wire.objects import SubgroupHeader


class SubgroupDelivery(StreamDelivery):
    """Sends the Objects of one Subgroup from the subscription's start on."""

    def __init__(
        self, subscription: Served, selection: Selection, log: SubgroupLog, position: int
    ) -> None:
        super().__init__(subscription.outlet, subscription.flow, selection.store)
        self.subscription = subscription
        self.selection = selection
        self.log = log
        log.readers += 1
        self.position = position
        """Object IDs up to here are dealt with: sent, filtered out or given up."""
        self.previous: int | None = None
        """Last Object ID written on the open stream."""
        self._real: int | None = None
        """The same, statuses left out."""
        self.passed: int | None = None
        """Last Object ID of this stream dealt with, filtered ones included."""
        self._blocked_by: Progress | None = None
        """Why `_next` gave nothing although there is something."""
        self.incomplete: StreamErrorCode | None = None
        """Why the stream must not end with FIN: an Object was given up or withheld."""
        self._ends_group = False
        """The open stream's header has END_OF_GROUP."""
        self._yields = False
        """It gives up its stream as soon as what is under way there has arrived."""
        self._opened = False
        """A stream was opened: its end tells the subscriber how much of the Subgroup came."""
        self.timed = False
        """Whether a delivery timeout is in force."""
        self._timeouts = Timeouts()
        self._arrivals: deque[tuple[int, float]] = deque()
        """(Object ID, when the IDs up to it and beyond the entry before were first seen)."""
        self._began = 0.0
        self._deadline: Deadline | None = None
        self._last_deadline: Deadline | None = None
        """When the Subgroup itself expires."""

    def rank(self) -> tuple[int, ...]:
        group = self.log.group
        ascending = self.selection.group_order is GroupOrder.ASCENDING
        return (self.log.priority, 0, group if ascending else -group, 2, self.log.subgroup)

    def write_object(self) -> Progress:
        if self.over or self.selection.paused:
            return Progress.WAITING
        if self._yields and self.stream_id is not None:
            if not self.flushed():
                return Progress.UNFLUSHED
            self._yield()
        if self.current is not None:
            if self.current.gone and not self.current.complete:
                if not self.flushed():
                    return Progress.UNFLUSHED
                # What was sent of it counts for nothing: should it come again, send it again.
                self.position = self.current.location.object - 1
                self.reset(StreamErrorCode.INTERNAL_ERROR)
            else:
                return self.send_current()
        self._blocked_by = None
        stored = self._next()
        if stored is None:
            return self._at_end() if self._blocked_by is None else self._blocked_by
        object_id = stored.location.object
        if self.timed and not stored.status and self._due(stored):
            if not self.flushed():
                self.position = object_id - 1
                return Progress.UNFLUSHED
            self.outlet.scheduler.counters.expired_objects += 1
            if self.stream_id is not None:
                return self._expire()
            # Nothing of the Subgroup was sent yet: it may begin with a later Object.
            self.incomplete = StreamErrorCode.DELIVERY_TIMEOUT
            return Progress.MORE
        if self.stream_id is not None and not self._may_follow(stored):
            if not self.flushed():
                self.position = object_id - 1
                return Progress.UNFLUSHED
            self.reset(StreamErrorCode.CANCELLED)
        if not self._writable(object_id):
            self.position = object_id - 1
            if self.timed:
                self._arm()
            return self._no_room()
        assert self.stream_id is not None
        head = self.outlet.codec.encode_subgroup_object(
            self.previous,
            object_id,
            properties=stored.properties,
            with_properties=True,
            length=stored.length,
            status=stored.status,
        )
        self.previous = self.passed = object_id
        if not stored.status:
            self._real = object_id
        progress = self.send_object(stored, head)
        if self.timed:
            self._arm()
        return progress

    def _no_room(self) -> Progress:
        return Progress.NO_STREAM if self.stream_id is None else Progress.BLOCKED

    def _writable(self, object_id: int) -> bool:
        """Whether there is a stream, opened now for `object_id` if need be, with credit."""
        if self.stream_id is None and not self._open(object_id):
            return False
        assert self.stream_id is not None
        return self.outlet.transport.send_room(self.stream_id) > 0

    def _open(self, object_id: int | None) -> bool:
        """Begin a stream that brings `object_id` first, or nothing at all; False: no credit."""
        stream_id = self.outlet.open_data_stream(self)
        if stream_id is None:
            return False
        self.stream_id = stream_id
        self._opened = True
        self.previous = None
        self._ends_group = object_id is not None and self._holds_end(object_id)
        header = SubgroupHeader(
            track_alias=self.subscription.track_alias,
            group=self.log.group,
            subgroup=self.log.subgroup,
            priority=self.log.priority,
            end_of_group=self._ends_group,
            first_object=object_id is not None and object_id == self._first_id(),
        )
        self.outlet.transport.send(
            stream_id, self.outlet.codec.encode_subgroup_header(header, properties=True)
        )
        self.subscription.subgroup_opened()
        return True

    def _first_id(self) -> int | None:
        if self.store.authoritative and self.log.forgotten < 0:
            return self.log.ids[0]
        return self.log.first_id

    def _holds_end(self, object_id: int) -> bool:
        """Whether the group's largest Object is in this Subgroup and will be on this stream,
        which begins with `object_id`: END_OF_GROUP says so, and no status has to be made up."""
        group = self.store.groups.get(self.log.group)
        end = group.end if group is not None else None
        if not end or object_id >= end or self.selection.filters:
            return False
        at = bisect_right(self.log.ids, end - 1)
        last = Location(self.log.group, self.log.ids[at - 1])
        return (
            (last.object == end - 1 or self.log.end_of_group)
            and last <= self.selection.end
            and not self.selection.withholds(last, self.log.subgroup)
        )

    def _next(self) -> StoredObject | None:
        """The next Object that passes the filters; None when there is none (yet)."""
        ids = self.log.ids
        group = self.store.groups.get(self.log.group)
        while group is not None:
            if self.position < self.log.forgotten:
                if not self.flushed():
                    self._blocked_by = Progress.UNFLUSHED
                    return None
                self.reset(StreamErrorCode.TOO_FAR_BEHIND)
                self.position = self.log.forgotten
                self.incomplete = StreamErrorCode.TOO_FAR_BEHIND
            at = bisect_right(ids, self.position)
            if at == len(ids):
                return None
            object_id = ids[at]
            location = Location(self.log.group, object_id)
            if location > self.selection.end:
                return None
            if self.selection.withholds(location, self.log.subgroup):
                self.position = object_id
                if self.selection.is_owed(location):
                    self.incomplete = StreamErrorCode.CANCELLED
                continue
            stored = group.objects.get(object_id)
            if stored is None:
                # It comes back only for who can send it: else many that cannot would keep
                # pushing each other's Objects out of the cache.
                if self.store.source is not None and not self._writable(object_id):
                    self._blocked_by = self._no_room()
                    return None
                if self._want(object_id):
                    return None
                if not self.flushed():
                    self._blocked_by = Progress.UNFLUSHED
                    return None
                self.reset(StreamErrorCode.TOO_FAR_BEHIND)
                self.position = object_id
                self.incomplete = StreamErrorCode.TOO_FAR_BEHIND
                continue
            if (
                self.passed is None
                and not self.store.authoritative  # which knows all of its Track
                and not self._may_begin(stored)
            ):
                return None
            self.position = object_id
            if stored.status is not ObjectStatus.NORMAL or self.selection.passes(stored):
                return stored
            if self._may_follow(stored):  # else something may lie before it that is selected
                self.passed = object_id
        return None

    def _want(self, object_id: int) -> bool:
        """Have the source bring back an evicted Object and what is missing after it."""
        source = self.store.source
        if source is None:
            return False
        start = Location(self.log.group, object_id)
        end = min(self.selection.end, Location(self.log.group, self.log.ids[-1]))
        if not self.store.authoritative:
            end = self.store.known.missing_end(start, end)
        return source.want(start, end)

    def _may_begin(self, stored: StoredObject) -> bool:
        """Whether nothing that may exist lies before the first Object of all, or it cannot be
        had: then the stream does not end with FIN. False when it is on its way.

        Another publisher may be about to bring it: the FIN of one that came later says
        nothing of what is older than its subscription.
        """
        object_id, group = stored.location.object, self.log.group
        low = max(self.position, self.selection.before_start(group))
        if object_id <= low + 1 or object_id == self.log.first_id or self._follows(stored, low):
            return True
        end = Location(group, object_id - 1)
        hole = self.store.first_unknown(Location(group, low + 1), end)
        there = self.selection.last_there(group)
        if hole is not None and hole.object <= there:
            # It is not sent in any case.
            if self.selection.is_owed(hole):
                self.incomplete = StreamErrorCode.CANCELLED
            if there >= end.object:
                return True
            hole = self.store.first_unknown(Location(group, there + 1), end)
        if hole is None:
            return True
        if self._is_coming(hole, end):
            return False
        self.incomplete = StreamErrorCode.CANCELLED
        return True

    def _is_coming(self, start: Location, end: Location) -> bool:
        """Whether the source fetches [start, end], of which it may find that it does not exist."""
        source = self.store.source
        if source is None:
            return False
        gap = source.assumed(start)
        if gap is not None and not gap[0].stalled:
            return True
        return source.want(start, self.store.known.missing_end(start, end))

    def _may_follow(self, stored: StoredObject) -> bool:
        """The relays' "next object" rule: nothing that may exist lies between on the stream."""
        if (
            self.store.authoritative
            or self.passed is None
            or stored.location.object == (self.passed + 1)
        ):
            return True
        if self._follows(stored, self.passed):
            return True
        return (
            self.store.first_unknown(
                Location(self.log.group, self.passed + 1),
                Location(self.log.group, stored.location.object - 1),
            )
            is None
        )

    def _follows(self, stored: StoredObject, passed: int) -> bool:
        """Whether the stream that brought it says that nothing lies between `passed` and it. Where
        filters upstream left Objects out, it says so to no one who wants them."""
        follows = stored.follows
        if follows is None or follows > passed:
            return False
        return not self.log.sifted or self.selection.is_sifted_for(stored.location)

    def _at_end(self) -> Progress:
        ids = self.log.ids
        at = bisect_right(ids, self.position)
        left = at < len(ids)
        if left and Location(self.log.group, ids[at]) <= self.selection.end:
            return Progress.WAITING  # an evicted Object is on its way back
        if left and not (self.log.done or self.store.ended):
            return Progress.WAITING  # the filter ends inside the Subgroup; an update may move it
        complete = self.log.done and not left and self.incomplete is None
        if complete and self._ends_group and self.stream_id is not None:
            # A filter that came later may have left out the group's largest Object.
            complete = self._last_written()
            if not complete:
                self.incomplete = StreamErrorCode.CANCELLED
        if not complete and self._is_untold_loss(left) and not self._open(None):
            return Progress.NO_STREAM
        if complete:
            self._end_group()
            self.finish()
        elif (self.log.done or self.store.ended or self.log.broken) and not self.flushed():
            return Progress.UNFLUSHED
        elif self.log.done or left:
            if self.stream_id is not None and self.incomplete is StreamErrorCode.DELIVERY_TIMEOUT:
                self.outlet.scheduler.counters.expired_streams += 1
            self.reset(self.incomplete or StreamErrorCode.CANCELLED)
        elif self.store.ended:
            self.reset(StreamErrorCode.INTERNAL_ERROR)
        elif self.log.broken:
            # The upstream may open another stream for the rest: then there is a new delivery.
            self.reset(StreamErrorCode.INTERNAL_ERROR)
            self.close()
            self.subscription.subgroup_broken(self.log, self.position)
            return Progress.DONE
        else:
            return Progress.WAITING
        self.close()
        self.subscription.subgroup_done(self.log)
        return Progress.DONE

    def _is_untold_loss(self, left: bool) -> bool:
        """Whether Objects were lost and there never was a stream whose reset says so.

        Without one the subscriber could not tell that Subgroup from one that is not there.
        """
        return not self._opened and (
            self.incomplete is StreamErrorCode.TOO_FAR_BEHIND or (self.log.broken and not left)
        )

    def _last_written(self) -> bool:
        """Whether the group's largest Object went out on the open stream."""
        group = self.store.groups.get(self.log.group)
        end = group.end if group is not None else None
        at = len(self.log.ids) if end is None else bisect_right(self.log.ids, end - 1)
        return self._real == self.log.ids[at - 1] if at else True

    def _end_group(self) -> None:
        """Say as an End of Group Object what END_OF_GROUP said upstream (MOQT "Caching Relays").

        The stream's header went out before that was known.
        """
        group = self.store.groups.get(self.log.group)
        end = group.end if group is not None else None
        if (
            not self.log.end_of_group
            or self._ends_group
            or self.stream_id is None
            or self.previous is None
            or end is None
            or end <= self.previous
            or Location(self.log.group, end) > self.selection.end
        ):
            return
        self.outlet.transport.send(
            self.stream_id,
            self.outlet.codec.encode_subgroup_object(
                self.previous,
                end,
                with_properties=True,
                length=0,
                status=ObjectStatus.END_OF_GROUP,
            ),
        )

    # -- delivery timeouts (MOQT "Delivery Timeouts") ------------------------------------

    def set_timeouts(self, timeouts: Timeouts) -> None:
        """They are in force from now on; called again when they change."""
        scheduler = self.outlet.scheduler
        if not self.timed:
            self._began = scheduler.now
        self._timeouts = timeouts
        self.timed = bool(timeouts.object_ms or timeouts.subgroup_ms)
        for deadline in (self._deadline, self._last_deadline):
            scheduler.deadlines.cancel(deadline)
        self._deadline = self._last_deadline = None
        if self.timed:
            self.noted()

    def noted(self) -> None:
        """The Subgroup has grown, or ended: that starts the clocks."""
        scheduler, ids = self.outlet.scheduler, self.log.ids
        now = scheduler.now
        seen = self._arrivals[-1][0] if self._arrivals else self.position
        if self._timeouts.object_ms and ids and ids[-1] > seen:
            self._arrivals.append((ids[-1], now))
            self._arm()
        subgroup_ms = self._timeouts.subgroup_ms
        if subgroup_ms and self.log.done and self._last_deadline is None:
            self._last_deadline = scheduler.deadlines.at(
                now + subgroup_ms / 1000, self._subgroup_expired
            )

    def _expires(self, stored: StoredObject) -> float:
        if not self._timeouts.object_ms:
            return float("inf")
        arrivals = self._arrivals
        while arrivals and arrivals[0][0] < stored.location.object:
            arrivals.popleft()
        since = arrivals[0][1] if arrivals else self._began
        if stored.arrived:
            since = min(since, stored.arrived)
        return since + self._timeouts.object_ms / 1000

    def _due(self, stored: StoredObject) -> bool:
        return self._expires(stored) <= self.outlet.scheduler.now

    def _arm(self) -> None:
        """Look at the next Object when it expires, also if nothing else happens by then."""
        if not self._timeouts.object_ms or (
            self._deadline is not None and self._deadline.action is not None
        ):
            return
        at = bisect_right(self.log.ids, self.position)
        group = self.store.groups.get(self.log.group)
        if group is None or at == len(self.log.ids):
            return
        stored = group.objects.get(self.log.ids[at])
        if stored is not None:
            when = self._expires(stored)
            if when > self.outlet.scheduler.now:
                self._deadline = self.outlet.scheduler.deadlines.at(when, self.wake)

    def _subgroup_expired(self) -> None:
        if not self.over:
            self._expire()

    def _expire(self) -> Progress:
        """Reset the stream with DELIVERY_TIMEOUT; the Subgroup is not opened again."""
        if self.stream_id is not None:
            self.outlet.scheduler.counters.expired_streams += 1
        self.reset(StreamErrorCode.DELIVERY_TIMEOUT)
        self.outlet.transport.wake()
        self.close()
        self.subscription.subgroup_done(self.log)
        return Progress.DONE

    # -- the peer's limit of streams -----------------------------------------------------

    def give_way(self) -> bool:
        self._yields = not self.over
        self.wake()
        return self._yields

    def _yield(self) -> None:
        """Another stream continues the Subgroup, with the Object that this one was in."""
        self._yields = False
        if self.current is not None:
            self.position = self.current.location.object - 1
        self.reset(StreamErrorCode.CANCELLED)
        self.outlet.scheduler.counters.streams_given_up += 1

    # -- the end -------------------------------------------------------------------------

    def stopped(self) -> None:
        self.reset(StreamErrorCode.CANCELLED)
        self.close()
        self.subscription.subgroup_done(self.log)

    def close(self) -> None:
        if not self.over:
            self.over = True
            if self.timed:
                self.outlet.scheduler.deadlines.cancel(self._deadline)
                self.outlet.scheduler.deadlines.cancel(self._last_deadline)
            self.log.readers -= 1
            if not self.store.authoritative:
                self.store.forget_group(self.log.group)
