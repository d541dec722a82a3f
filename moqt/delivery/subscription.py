"""Publisher side of one established subscription."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

from moqt.delivery.datagram import DatagramDelivery
from moqt.delivery.fetch import FetchDelivery
from moqt.delivery.scheduler import Flow
from moqt.delivery.stream import Outlet
from moqt.delivery.subgroup import SubgroupDelivery
from moqt.delivery.timeouts import Timeouts, subgroup_timeouts, track_timeouts
from moqt.track.filters import matches
from moqt.track.store import MAX_INTERVALS, TrackStore
from moqt.track.stored import StoredObject, SubgroupLog
from moqt.values.codes import MAX_VI64, GroupOrder, ObjectStatus, PublishDoneCode, StreamErrorCode
from moqt.values.deadlines import Deadline
from moqt.values.intervals import IntervalSet
from moqt.values.messages import RangeFilter
from moqt.values.names import MAX_LOCATION, Location, location_after, location_before


class SubscriptionDelivery:
    """Publisher side of one established subscription (MOQT "Subscriptions")."""

    def __init__(
        self,
        outlet: Outlet,
        store: TrackStore,
        track_alias: int,
        *,
        start: Location,
        end: Location,
        filters: tuple[RangeFilter, ...],
        subscriber_priority: int,
        group_order: GroupOrder,
        paused: bool,
        on_done: Callable[[int, str], None],
        timeouts: Timeouts | None = None,
        unfiltered: bool = False,
    ) -> None:
        """`timeouts` are the subscriber's own; those of the track and of Subgroups join them.

        `unfiltered`: no Location filter was asked for; `start` is then no promise to send
        anything that is older than the subscription.
        """
        self.outlet = outlet
        self.store = store
        self.track_alias = track_alias
        self.start = start
        self.end = end
        self._withheld: dict[tuple[int, int], IntervalSet] = {}
        """Object IDs, by Subgroup, that the filter of then kept back for good."""
        self._unfiltered = unfiltered
        self._largest: Location | None = None
        """Largest Object when the subscription began or was last resumed, and ..."""
        self._since = 0
        """... how many Objects the store had been given by then."""
        self._owed_after: Location | None = None
        self.filters = filters
        self.group_order = group_order
        self.paused = paused
        self.flow = Flow(outlet.scheduler, subscriber_priority)
        self.streams_opened = 0
        self._on_done = on_done
        self._subgroups: dict[tuple[int, int], SubgroupDelivery] = {}
        self._finished: set[tuple[int, int]] = set()
        self._trim_at = 2048
        self._past = IntervalSet()
        """Groups dealt with that the store has forgotten since: never send them again."""
        self._resume: dict[tuple[int, int], int] = {}
        """How far a Subgroup had come when its upstream stream was reset."""
        self._fills: list[FetchDelivery] = []
        self.over = False
        self.held = False
        """No PUBLISH_DONE yet: the subscriber may still ask for a fill."""
        self.pending_datagrams = 0
        self._asked = timeouts or Timeouts()
        self.timed = False
        """Whether a delivery timeout may be in force: the clocks have to be kept."""
        self._expiry: Deadline | None = None

    def begin(self) -> None:
        """Deliver what comes from now on; what is there is for a fill or a FETCH.

        (MOQT "Publishing and Receiving Tracks": a subscription delivers newly published Objects)
        """
        self.store.add_listener(self)
        self.timed = any((*self._asked, *track_timeouts(self.store)))
        self._from_now_on()
        if self._unfiltered:
            self._owed_after = self._largest
        # Statuses beyond the Largest Object may be there already, and no fill brings them.
        last = self._largest or Location(0, -1)
        for group_id in self.store.group_ids[bisect_left(self.store.group_ids, last.group) :]:
            group = self.store.groups[group_id]
            for log in tuple(group.subgroups.values()):
                self._consider(log)
            beyond = bisect_right(group.ids, last.object) if group_id == last.group else 0
            for object_id in group.ids[beyond:]:
                if group.objects[object_id].subgroup is None:
                    self.datagram_stored(group.objects[object_id])
        self.check_done()

    def _from_now_on(self) -> None:
        self._largest, self._since = self.store.largest, self.store.placed

    def _is_old(self, location: Location) -> bool:
        """Whether the Object was there when the subscription began or was resumed.

        One that only a fetch has brought since then was, too, if not here. An evicted one is
        taken to be old: it may have come late, but nobody can tell.
        """
        if self._largest is None or location > self._largest:
            return False
        stored = self.store.get(location)
        return stored is None or stored.number <= self._since or not stored.live

    def store_changed(self, log: SubgroupLog | None) -> None:
        if log is None:
            for delivery in tuple(self._subgroups.values()):
                delivery.wake()
            self.check_done()
        else:
            self._consider(log)

    def datagram_stored(self, stored: StoredObject) -> None:
        if self.selects_datagram(stored):
            self._queue_datagram(stored)

    def _consider(self, log: SubgroupLog) -> None:
        key = (log.group, log.subgroup)
        delivery = self._subgroups.get(key)
        if delivery is None:
            if (
                self.over
                or key in self._finished
                or not log.ids
                or Location(log.group, log.ids[-1]) < self.start
                or log.group > self.end.group
                or self.paused
                or Location(log.group, 0) in self._past
                or (log.number <= self._since and self._is_old(Location(log.group, log.ids[-1])))
            ):
                return
            low = self.start.object - 1 if log.group == self.start.group else -1
            low = max(low, self._resume.get(key, -1))
            if log.ids[-1] <= low:
                return
            self._resume.pop(key, None)
            position = max(low, self._last_old(log))
            if len(self._subgroups) >= self.outlet.scheduler.limits.pending_subgroups:
                self.outlet.scheduler.counters.too_far_behind += 1
                self.cancel(StreamErrorCode.TOO_FAR_BEHIND)
                self._end(PublishDoneCode.TOO_FAR_BEHIND, "too many groups are waiting to be sent")
                return
            delivery = self._subgroups[key] = SubgroupDelivery(self, log, position)
            if self._owes(log, low, position):
                delivery.incomplete = StreamErrorCode.CANCELLED
            if self.timed or log.timeouts is not None:
                self._set_timeouts(delivery)
        elif delivery.timed:
            delivery.noted()
        delivery.wake()

    def _last_old(self, log: SubgroupLog) -> int:
        """The Object ID before the new ones at the end of `log`; -1 when there are none there."""
        if self._largest is None or log.group > self._largest.group:
            return -1
        for at in range(len(log.ids) - 1, -1, -1):
            if self._is_old(Location(log.group, log.ids[at])):
                return log.ids[at] if at + 1 < len(log.ids) else -1
        return log.forgotten if Location(log.group, log.forgotten) <= self._largest else -1

    def _owes(self, log: SubgroupLog, low: int, high: int) -> bool:
        """Whether a stream that leaves out the Objects of (low, high] lacks one of the filter's.

        (MOQT "Closing Subgroup Streams": then it must not end with FIN)
        """
        at = bisect_right(log.ids, high) - 1
        missing = log.ids[at] if at >= 0 else log.forgotten
        return missing > low and self.is_owed(Location(log.group, missing))

    def is_owed(self, location: Location) -> bool:
        """Whether a subgroup stream without the Object, which the filter selects, is cut short."""
        return self._owed_after is None or location > self._owed_after

    # -- time ----------------------------------------------------------------------------

    def _set_timeouts(self, delivery: SubgroupDelivery) -> None:
        publisher = subgroup_timeouts(self.store, delivery.log, track_timeouts(self.store))
        delivery.set_timeouts(self._asked.merged(publisher))

    def set_timeouts(self, timeouts: Timeouts) -> None:
        """A REQUEST_UPDATE may have changed the subscriber's own."""
        if timeouts == self._asked:
            return
        self._asked = timeouts
        self.timed = any((*self._asked, *track_timeouts(self.store)))
        for delivery in self._subgroups.values():
            self._set_timeouts(delivery)

    @property
    def timeouts(self) -> Timeouts:
        """The subscriber's own."""
        return self._asked

    def expire_at(self, when: float | None) -> None:
        """End with PUBLISH_DONE EXPIRED at `when`, which replaces an earlier one."""
        deadlines = self.outlet.scheduler.deadlines
        deadlines.cancel(self._expiry)
        self._expiry = None if when is None or self.over else deadlines.at(when, self._expired)

    def _expired(self) -> None:
        self.outlet.scheduler.counters.expired_subscriptions += 1
        self._end(PublishDoneCode.EXPIRED, "the subscription has expired")

    # -- datagrams -----------------------------------------------------------------------

    def selects_datagram(self, stored: StoredObject) -> bool:
        """Whether it is to be sent, by what the subscription wants now."""
        return (
            not self.paused
            and stored.live
            and self.start <= stored.location <= self.end
            and not self._is_old(stored.location)
            and (stored.status is not ObjectStatus.NORMAL or self.passes(stored))
        )

    def _queue_datagram(self, stored: StoredObject) -> None:
        scheduler = self.outlet.scheduler
        if self.pending_datagrams >= scheduler.limits.pending_datagrams:
            scheduler.counters.datagrams_dropped += 1
            return
        expires = None
        if self.timed:
            after = self._asked.merged(track_timeouts(self.store)).datagram_ms
            expires = (stored.arrived or scheduler.now) + after / 1000 if after else None
        self.pending_datagrams += 1
        scheduler.ready(DatagramDelivery(self, stored, expires))
        self.outlet.transport.wake()

    # -- what is to be sent --------------------------------------------------------------

    def withholds(self, log: SubgroupLog, object_id: int) -> bool:
        held = self._withheld.get((log.group, log.subgroup))
        location = Location(log.group, object_id)
        return (
            location < self.start
            or (held is not None and Location(0, object_id) in held)
            or self._is_old(location)
        )

    def passes(self, stored: StoredObject) -> bool:
        """Whether the range filters let the Object through."""
        return not self.filters or matches(
            self.filters,
            object=stored.location.object,
            subgroup=stored.subgroup,
            priority=stored.priority,
            properties=stored.properties,
        )

    def add_fill(self, fill: FetchDelivery) -> None:
        self._fills.append(fill)
        fill.begin()

    def fill_done(self, fill: FetchDelivery) -> None:
        self._fills.remove(fill)
        self.streams_opened += fill.opened
        self.check_done()

    def subgroup_done(self, delivery: SubgroupDelivery) -> None:
        key = (delivery.log.group, delivery.log.subgroup)
        self._subgroups.pop(key, None)
        self._finished.add(key)
        if len(self._finished) > self._trim_at:
            self._trim()
        self.check_done()

    def subgroup_broken(self, delivery: SubgroupDelivery) -> None:
        """The upstream stream was reset: forget the delivery, but not what was sent."""
        key = (delivery.log.group, delivery.log.subgroup)
        self._subgroups.pop(key, None)
        self._resume[key] = delivery.position
        if len(self._resume) > self._trim_at:
            self._trim()
        self.check_done()

    def _trim(self) -> None:
        """Keep what is known of forgotten groups as intervals."""
        kept = self.store.groups
        for group, _ in (*self._finished, *self._resume, *self._withheld):
            if group not in kept:
                self._past.add(Location(group, 0), Location(group, MAX_VI64))
        self._finished = {k for k in self._finished if k[0] in kept}
        self._resume = {k: p for k, p in self._resume.items() if k[0] in kept}
        self._withheld = {k: held for k, held in self._withheld.items() if k[0] in kept}
        self._past.coarsen(MAX_INTERVALS)
        self._trim_at = max(
            2048, 2 * len(self._finished), 2 * len(self._resume), 2 * len(self._withheld)
        )

    def pause(self, paused: bool) -> None:
        """FORWARD changed: streams that would miss Objects are reset.

        (MOQT "Pausing Subscriptions")
        """
        if paused == self.paused:
            return
        self.paused = paused
        if paused:
            for delivery in tuple(self._subgroups.values()):
                delivery.reset(StreamErrorCode.CANCELLED)
                delivery.close()
            self._subgroups.clear()
        else:
            self._from_now_on()

    def refilter(
        self, start: Location | None, end: Location | None, filters: tuple[RangeFilter, ...]
    ) -> None:
        """REQUEST_UPDATE changed the filters. What was sent stays sent, and what the old ones
        kept back stays back: a wider filter is for what is published from now on."""
        self.filters = filters
        if start is None or end is None:
            return
        self._owed_after = None
        if start < self.start:
            self._withhold(start, location_before(self.start))
        if end > self.end:
            self._withhold(location_after(self.end), MAX_LOCATION)
        self.start, self.end = start, end
        for delivery in tuple(self._subgroups.values()):
            if not start.group <= delivery.log.group <= end.group:
                # (MOQT "Closing Subgroup Streams") What comes of it may be wanted again later.
                delivery.reset(StreamErrorCode.CANCELLED)
                delivery.close()
                self.subgroup_broken(delivery)
        if self.over:
            return
        ids = self.store.group_ids
        ids = ids[bisect_left(ids, start.group) : bisect_right(ids, end.group)]
        for group in [self.store.groups[group_id] for group_id in ids]:
            for log in tuple(group.subgroups.values()):
                self._consider(log)

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
        if len(self._withheld) > self._trim_at:
            self._trim()

    def check_done(self) -> None:
        if (
            self.store.ended
            and not self._subgroups
            and not self._fills
            and not self.pending_datagrams
            and not self.held
            and not self.over
        ):
            code = self.store.end_code
            self._end(PublishDoneCode.TRACK_ENDED if code is None else code, self.store.end_reason)

    def _end(self, code: int, reason: str) -> None:
        self.cancel()
        self._on_done(code, reason)

    def cancel(self, code: StreamErrorCode = StreamErrorCode.CANCELLED) -> None:
        """Stop: reset every stream that is still open and forget the cursors."""
        if self.over:
            return
        self.over = True
        self.expire_at(None)
        self.store.remove_listener(self)
        for delivery in self._subgroups.values():
            delivery.reset(code)
            delivery.close()
        for fill in tuple(self._fills):
            fill.abort(code)
            self.streams_opened += fill.opened
        self._subgroups.clear()
        self._fills.clear()
        self.outlet.scheduler.forget(self.flow)
