"""Publisher side of one established subscription."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

from moqt.delivery.datagram import DatagramDelivery
from moqt.delivery.fetch import FetchDelivery
from moqt.delivery.scheduler import Flow
from moqt.delivery.selection import Selection
from moqt.delivery.stream import Outlet
from moqt.delivery.subgroup import SubgroupDelivery
from moqt.delivery.timeouts import Timeouts, subgroup_timeouts, track_timeouts
from moqt.track.knowledge import MAX_INTERVALS
from moqt.track.stored import StoredObject, SubgroupLog
from moqt.values.codes import MAX_VI64, GroupOrder, PublishDoneCode, StreamErrorCode
from moqt.values.deadlines import Deadline
from moqt.values.intervals import IntervalSet
from moqt.values.messages import RangeFilter
from moqt.values.names import Location


class SubscriptionDelivery:
    """Publisher side of one established subscription (MOQT "Subscriptions")."""

    def __init__(
        self,
        outlet: Outlet,
        selection: Selection,
        track_alias: int,
        *,
        subscriber_priority: int,
        on_done: Callable[[int, str], None],
        timeouts: Timeouts | None = None,
    ) -> None:
        """`timeouts` are the subscriber's own; those of the track and of Subgroups join them."""
        self.outlet = outlet
        self.selection = selection
        self.store = selection.store
        self.track_alias = track_alias
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
        self._fills: dict[FetchDelivery, None] = {}
        self.over = False
        self.done_waits = False
        """No PUBLISH_DONE yet: the subscriber may still ask for a fill."""
        self.pending_datagrams = 0
        self.timeouts = timeouts or Timeouts()
        """The subscriber's own."""
        self.timed = False
        """Whether a delivery timeout may be in force: the clocks have to be kept."""
        self._expiry: Deadline | None = None

    @property
    def paused(self) -> bool:
        return self.selection.paused

    @property
    def group_order(self) -> GroupOrder:
        return self.selection.group_order

    def begin(self) -> None:
        """Deliver what comes from now on; what is there is for a fill or a FETCH.

        (MOQT "Publishing and Receiving Tracks": a subscription delivers newly published Objects)
        """
        self.store.add_listener(self)
        self.timed = any((*self.timeouts, *track_timeouts(self.store)))
        self.selection.begin()
        # Statuses beyond the Largest Object may be there already, and no fill brings them.
        last = self.store.largest or Location(0, -1)
        for group_id in self.store.group_ids[bisect_left(self.store.group_ids, last.group) :]:
            group = self.store.groups[group_id]
            for log in tuple(group.subgroups.values()):
                self._consider(log)
            beyond = bisect_right(group.ids, last.object) if group_id == last.group else 0
            for object_id in group.ids[beyond:]:
                if group.objects[object_id].subgroup is None:
                    self.datagram_stored(group.objects[object_id])
        self.check_done()

    def store_changed(self, log: SubgroupLog | None) -> None:
        if log is None:
            for delivery in tuple(self._subgroups.values()):
                delivery.wake()
            self.check_done()
        else:
            self._consider(log)

    def subgroup_cut(self, log: SubgroupLog) -> None:
        self._consider(log, cut=True)

    def datagram_stored(self, stored: StoredObject) -> None:
        if self.selection.selects_datagram(stored):
            self._queue_datagram(stored)

    def _consider(self, log: SubgroupLog, *, cut: bool = False) -> None:
        """Deliver what is new of a Subgroup; `cut`: its stream was reset just now, which the
        subscriber is told even if nothing of it is new."""
        key = (log.group, log.subgroup)
        delivery = self._subgroups.get(key)
        if delivery is None:
            selection = self.selection
            if (
                self.over
                or selection.paused
                or key in self._finished
                or not (selection.reaches_cut(log) if cut else selection.reaches(log))
                or Location(log.group, 0) in self._past
            ):
                return
            low = max(selection.before_start(log.group), self._resume.get(key, -1))
            if selection.reaches(log) and log.ids[-1] > low:
                position = max(low, selection.last_old(log))
            elif cut and key not in self._resume:
                position = max(low, log.ids[-1] if log.ids else -1)
            else:
                return
            self._resume.pop(key, None)
            if len(self._subgroups) >= self.outlet.scheduler.limits.pending_subgroups:
                self.outlet.scheduler.counters.too_far_behind += 1
                reason = "too many groups are waiting to be sent"
                self._end(PublishDoneCode.TOO_FAR_BEHIND, reason, StreamErrorCode.TOO_FAR_BEHIND)
                return
            delivery = self._subgroups[key] = SubgroupDelivery(self, selection, log, position)
            if selection.owes(log, low, position):
                delivery.incomplete = StreamErrorCode.CANCELLED
            if self.timed or log.timeouts is not None:
                self._set_timeouts(delivery)
        elif delivery.timed:
            delivery.noted()
        delivery.wake()

    # -- time ----------------------------------------------------------------------------

    def _set_timeouts(self, delivery: SubgroupDelivery) -> None:
        publisher = subgroup_timeouts(delivery.log, track_timeouts(self.store))
        delivery.set_timeouts(self.timeouts.merged(publisher))

    def set_timeouts(self, timeouts: Timeouts) -> None:
        """A REQUEST_UPDATE may have changed the subscriber's own."""
        if timeouts == self.timeouts:
            return
        self.timeouts = timeouts
        self.timed = any((*self.timeouts, *track_timeouts(self.store)))
        for delivery in self._subgroups.values():
            self._set_timeouts(delivery)

    def expire_at(self, when: float | None) -> None:
        """End with PUBLISH_DONE EXPIRED at `when`, which replaces an earlier one."""
        deadlines = self.outlet.scheduler.deadlines
        deadlines.cancel(self._expiry)
        self._expiry = None if when is None or self.over else deadlines.at(when, self._expired)

    def _expired(self) -> None:
        self.outlet.scheduler.counters.expired_subscriptions += 1
        self._end(PublishDoneCode.EXPIRED, "the subscription has expired")

    # -- datagrams -----------------------------------------------------------------------

    def _queue_datagram(self, stored: StoredObject) -> None:
        scheduler = self.outlet.scheduler
        if self.pending_datagrams >= scheduler.limits.pending_datagrams:
            scheduler.counters.datagrams_dropped += 1
            return
        expires = None
        if self.timed:
            after = self.timeouts.merged(track_timeouts(self.store)).datagram_ms
            expires = (stored.arrived or scheduler.now) + after / 1000 if after else None
        self.pending_datagrams += 1
        scheduler.ready(DatagramDelivery(self, self.selection, stored, expires))
        self.outlet.transport.wake()

    def datagram_done(self) -> None:
        self.pending_datagrams -= 1
        if self.store.ended:  # a call less per datagram
            self.check_done()

    # -- streams -------------------------------------------------------------------------

    @property
    def open_fills(self) -> int:
        """Fills that are not over, whether or not they have a stream."""
        return len(self._fills)

    def add_fill(self, fill: FetchDelivery) -> None:
        self._fills[fill] = None
        self.outlet.scheduler.fills += 1
        fill.begin()

    def fill_done(self, fill: FetchDelivery) -> None:
        del self._fills[fill]
        self.outlet.scheduler.fills -= 1
        self.streams_opened += fill.opened
        self.check_done()

    def subgroup_opened(self) -> None:
        self.streams_opened += 1

    def subgroup_done(self, log: SubgroupLog) -> None:
        key = (log.group, log.subgroup)
        self._subgroups.pop(key, None)
        self._finished.add(key)
        if len(self._finished) > self._trim_at:
            self._trim()
        self.check_done()

    def subgroup_broken(self, log: SubgroupLog, position: int) -> None:
        """Forget the delivery, but not what was sent."""
        key = (log.group, log.subgroup)
        self._subgroups.pop(key, None)
        self._resume[key] = position
        if len(self._resume) > self._trim_at:
            self._trim()
        self.check_done()

    def _trim(self) -> None:
        """Keep what is known of forgotten groups as intervals."""
        kept = self.store.groups
        forgotten = {group for group, _ in (*self._finished, *self._resume) if group not in kept}
        for group in forgotten | self.selection.trim():
            self._past.add(Location(group, 0), Location(group, MAX_VI64))
        self._finished = {k for k in self._finished if k[0] in kept}
        self._resume = {k: p for k, p in self._resume.items() if k[0] in kept}
        self._past.coarsen(MAX_INTERVALS)
        self._trim_at = max(
            2048, 2 * len(self._finished), 2 * len(self._resume), 2 * self.selection.remembered
        )

    def pause(self, paused: bool) -> None:
        """FORWARD changed: streams that would miss Objects are reset.

        (MOQT "Pausing Subscriptions")
        """
        if paused == self.selection.paused:
            return
        self.selection.paused = paused
        if paused:
            for delivery in tuple(self._subgroups.values()):
                delivery.reset(StreamErrorCode.CANCELLED)
                delivery.close()
            self._subgroups.clear()
        else:
            self.selection.from_now_on()

    def refilter(
        self, start: Location | None, end: Location | None, filters: tuple[RangeFilter, ...]
    ) -> None:
        """REQUEST_UPDATE changed the filters. What was sent stays sent."""
        self.selection.set_filters(filters)
        if start is None or end is None:
            return
        self.selection.set_range(start, end)
        if self.selection.remembered > self._trim_at:
            self._trim()
        for delivery in tuple(self._subgroups.values()):
            if not start.group <= delivery.log.group <= end.group:
                # (MOQT "Closing Subgroup Streams") What comes of it may be wanted again later.
                delivery.reset(StreamErrorCode.CANCELLED)
                delivery.close()
                self.subgroup_broken(delivery.log, delivery.position)
        if self.over:
            return
        ids = self.store.group_ids
        ids = ids[bisect_left(ids, start.group) : bisect_right(ids, end.group)]
        for group in [self.store.groups[group_id] for group_id in ids]:
            for log in tuple(group.subgroups.values()):
                self._consider(log)

    def check_done(self) -> None:
        if (
            self.store.ended
            and not self._subgroups
            and not self._fills
            and not self.pending_datagrams
            and not self.done_waits
            and not self.over
        ):
            code = self.store.end_code
            self._end(PublishDoneCode.TRACK_ENDED if code is None else code, self.store.end_reason)

    def _end(
        self, code: int, reason: str, streams: StreamErrorCode = StreamErrorCode.CANCELLED
    ) -> None:
        on_done = self._on_done
        self.cancel(streams)
        on_done(code, reason)

    def cancel(self, code: StreamErrorCode = StreamErrorCode.CANCELLED) -> None:
        """Stop: reset every stream that is still open and forget the cursors."""
        if self.over:
            return
        self.over = True
        self._on_done = _done  # who waited for it may refer to it
        self.expire_at(None)
        self.store.remove_listener(self)
        for delivery in self._subgroups.values():
            delivery.reset(code)
            delivery.close()
        for fill in tuple(self._fills):
            fill.abort(code)
            self.streams_opened += fill.opened
        self.outlet.scheduler.fills -= len(self._fills)
        self._subgroups.clear()
        self._fills.clear()
        self.outlet.scheduler.forget(self.flow)


def _done(code: int, reason: str) -> None:
    """Nobody waits for it any more."""
