"""A range of a Track on one fetch stream (MOQT "FETCH", "Fill Semantics")."""

from __future__ import annotations

from collections.abc import Callable

from moqt.delivery.scheduler import Flow, Progress
from moqt.delivery.stream import Outlet, StreamDelivery
from moqt.track.filters import matches
from moqt.track.listeners import Assumption
from moqt.track.store import TrackStore
from moqt.track.stored import StoredObject, SubgroupLog
from moqt.values.codes import MAX_VI64, EndOfRange, GroupOrder, ObjectStatus, StreamErrorCode
from moqt.values.deadlines import Deadline
from moqt.values.messages import RangeFilter
from moqt.values.names import Location, location_after, location_before
from moqt.wire.objects import ObjectHeader, RangeMarker


class FetchDelivery(StreamDelivery):
    """Sends [start, end] of a store on one fetch stream (MOQT "FETCH")."""

    def __init__(
        self,
        outlet: Outlet,
        flow: Flow,
        store: TrackStore,
        request_id: int,
        *,
        start: Location,
        end: Location,
        group_order: GroupOrder,
        filters: tuple[RangeFilter, ...],
        on_done: Callable[[FetchDelivery, StreamErrorCode | None], None],
        behind: bool = False,
        fill_timeout_ms: int | None = None,
    ) -> None:
        """`behind`: a fill whose group order is not its subscription's goes after it.

        `fill_timeout_ms` is what may be spent on having the source fetch what the store does
        not have; 0: nothing is fetched, None: as long as the source is willing.
        """
        super().__init__(outlet, flow, store)
        self.request_id = request_id
        self.start = start
        self.end = end
        self.group_order = group_order
        self.filters = filters
        self._on_done = on_done
        self._behind = behind
        self._encoder = outlet.codec.fetch_encoder(request_id, group_order)
        self._descending = group_order is GroupOrder.DESCENDING
        group = end.group if self._descending else start.group
        self._next_location, self._stop = self._span(group)
        self._priority = store.default_priority
        """That of the next Object, and ..."""
        self._ranked = self._next_location.group
        """... the group, by which it was ranked last."""
        self.opened = False
        self._assumed: list[tuple[Assumption, Location, Location]] = []
        """Gaps skipped because a fetch on its way left them out; proven when it ends."""
        self._first = self._next_location
        self._written: Location | None = None
        """Location of the last entry on the stream, Object or marker."""
        self._reach = 1
        """Groups asked for at once, descending: twice as many after each that had nothing."""
        self._hole: tuple[Location | None, Location] = (None, self._first)
        """The hole of the store dealt with last, and the lowest group asked for with it."""
        self._fill_timeout_ms = fill_timeout_ms
        self._timed_out = fill_timeout_ms == 0
        self._deadline: Deadline | None = None

    def _span(self, group: int) -> tuple[Location, Location]:
        """What is walked without a change of direction: all of it, or one group of it."""
        if not self._descending:
            return self.start, self.end
        return (
            max(self.start, Location(group, 0)),
            min(self.end, Location(group, MAX_VI64)),
        )

    def begin(self) -> None:
        if self._fill_timeout_ms:
            scheduler = self.outlet.scheduler
            self._deadline = scheduler.deadlines.at(
                scheduler.now + self._fill_timeout_ms / 1000, self._fill_timed_out
            )
        self.wake()

    def _fill_timed_out(self) -> None:
        self._timed_out = True
        self.wake()

    @property
    def position(self) -> Location:
        """Where it goes on, unless it goes downwards: then what lies before that is to come."""
        return self.start if self._descending else self._next_location

    def store_changed(self, log: SubgroupLog | None) -> None:
        self.wake()

    def subgroup_cut(self, log: SubgroupLog) -> None:
        self.wake()

    def datagram_stored(self, stored: StoredObject) -> None:
        self.wake()

    def rank(self) -> tuple[int, ...]:
        if self.current is None:
            following = self.store.next_object(self._next_location, self._stop)
            if following is not None:
                self._priority = following.priority
        group = self._ranked = self._next_location.group
        return (self._priority, int(self._behind), -group if self._descending else group, 0, 0)

    def write_object(self) -> Progress:
        if self.over:
            return Progress.DONE
        if not self.opened:
            stream_id = self.outlet.open_data_stream(self)
            if stream_id is None:
                return Progress.NO_STREAM
            self.stream_id, self.opened = stream_id, True
            self.store.add_listener(self)  # before, there was nothing that it could do about it
            self.outlet.transport.send(stream_id, self._encoder.header())
        assert self.stream_id is not None
        if self.outlet.transport.send_room(self.stream_id) <= 0:
            return Progress.BLOCKED
        if self.current is not None:
            if self.current.gone and not self.current.complete:
                return self._fail(StreamErrorCode.INTERNAL_ERROR)
            return self.send_current()
        stored = self._advance()
        if isinstance(stored, Progress):
            return stored
        if stored.priority != self._priority:  # others may go before it
            self._next_location, self.left = stored.location, 0
            return Progress.MORE
        self._written = stored.location
        self._reach = 1
        head = self._encoder.object(
            ObjectHeader(
                group=stored.location.group,
                object=stored.location.object,
                subgroup=stored.subgroup,
                priority=stored.priority,
                properties=stored.properties,
                length=stored.length,
                status=ObjectStatus.NORMAL,
            )
        )
        progress = self.send_object(stored, head)
        if self.flow.heap and stored.location.group != self._ranked:
            self.left = 0  # others of the flow may go before the next one
        return progress

    def _advance(self) -> StoredObject | Progress:
        """The next Object to send, or why there is none."""
        while True:
            stored = self.store.next_object(self._next_location, self._stop)
            until = stored.location if stored else self._stop
            unknown = self.store.first_unknown(self._next_location, until)
            if unknown is not None and (stored is None or unknown < stored.location):
                missing = self._missing(unknown, stored)
                if missing is not None:
                    return missing
                continue
            if stored is None:
                if not self._descending or not self._previous_group():
                    unproven = self._prove()
                    if unproven is not None:
                        return unproven
                    self.finish()
                    self._close(None)
                    return Progress.DONE
                continue
            self._next_location = location_after(stored.location)
            if not self.filters or matches(
                self.filters,
                object=stored.location.object,
                subgroup=stored.subgroup,
                priority=stored.priority,
                properties=stored.properties,
            ):
                return stored

    def _missing(self, unknown: Location, stored: StoredObject | None) -> Progress | None:
        """Deal with a hole of the store that begins at `unknown`, before `stored` if there is
        one: None to look again, or why nothing more can be sent at the moment."""
        source = None if self._timed_out else self.store.source
        known = self.store.known
        end = known.missing_end(unknown, self._stop)
        limit = min(end, location_before(stored.location)) if stored is not None else end
        gap = source.assumed(unknown) if source is not None else None
        if gap is not None:
            gap_end = min(gap[1], limit)
            self._assumed.append((gap[0], unknown, gap_end))
            self._next_location = location_after(gap_end)
            return None
        if unknown != self._hole[0]:
            low = unknown
            if self._descending and stored is None and end == self._stop:
                low = self._lowest_of(unknown)
            self._hole = unknown, low
            self._reach *= 2
        low = self._hole[1]
        if source is not None and source.want(low, end):
            return Progress.WAITING
        if self.store.first_unknown(unknown, unknown) is None:
            return None
        kind = EndOfRange.TIMED_OUT if self._timed_out else EndOfRange.UNKNOWN
        if low.group != unknown.group:
            limit = self._stop = self._span(low.group)[1]
        self._mark(kind, unknown, limit)
        self._next_location = location_after(limit)
        return Progress.MORE

    def _lowest_of(self, unknown: Location) -> Location:
        """How far down whole groups of which nothing is known are dealt with as one."""
        if unknown != self._span(unknown.group)[0]:
            return unknown
        low = self.store.known.missing_start(self.start, self._stop)
        lowest = low.group + (low > self._span(low.group)[0])
        if unknown.group:
            below = self.store.largest_in(self.start, Location(unknown.group - 1, MAX_VI64))
            if below is not None:
                lowest = max(lowest, below.location.group + 1)
        lowest = max(lowest, unknown.group - self._reach + 1)
        return self._span(min(lowest, unknown.group))[0]

    def _mark(self, kind: EndOfRange, start: Location, end: Location) -> None:
        """Say of everything from `start` to `end` that it is `kind`.

        An entry reaches back to the one before it, so a hole before `start` needs one of its
        own: it does not exist, or, with range filters, may have been left out by them.
        """
        before = EndOfRange.UNKNOWN if self.filters else EndOfRange.NON_EXISTENT
        if kind is not before and start != self._first:
            previous = self._before(start)
            if previous != self._written:
                self._write_marker(before, previous)
        self._write_marker(kind, end)
        counters = self.outlet.scheduler.counters
        if kind is EndOfRange.UNKNOWN:
            counters.ranges_unknown += 1
        else:
            counters.ranges_timed_out += 1

    def _before(self, location: Location) -> Location:
        """The Location before `location` in the order of the stream."""
        if self._descending and location == self._span(location.group)[0]:
            return self._span(location.group + 1)[1]
        return location_before(location)

    def _write_marker(self, kind: EndOfRange, location: Location) -> None:
        assert self.stream_id is not None
        octets = self._encoder.marker(RangeMarker(kind, location))
        self.outlet.transport.send(self.stream_id, octets)
        self.left -= len(octets)
        self._written = location

    def _prove(self) -> Progress | None:
        """None once every gap that was skipped on assumption is known not to exist."""
        while self._assumed:
            assumption, start, end = self._assumed[-1]
            if not assumption.proven and self.store.first_unknown(start, end) is not None:
                if self._timed_out:
                    return self._fail(StreamErrorCode.UNKNOWN_OBJECT_STATUS)
                if assumption.proven is None and not assumption.stalled:
                    return Progress.WAITING
                source = self.store.source
                if source is not None and source.want(start, end):
                    return Progress.WAITING
            if not assumption.proven and (
                self.store.first_unknown(start, end) is not None
                or self.store.next_object(start, end) is not None
            ):
                return self._fail(StreamErrorCode.UNKNOWN_OBJECT_STATUS)
            self._assumed.pop()
        return None

    def _previous_group(self) -> bool:
        """Step down to the next lower group that has, or may have, Objects."""
        group = self._stop.group
        if group == 0 or group <= self.start.group:
            return False
        below = Location(group - 1, MAX_VI64)
        stored = self.store.largest_in(self.start, below)
        unknown = self.store.last_unknown(self.start, below)
        candidates = [c.group for c in (stored.location if stored else None, unknown) if c]
        if not candidates:
            return False
        self._next_location, self._stop = self._span(max(candidates))
        return True

    def _fail(self, code: StreamErrorCode) -> Progress:
        """What is missing cannot be had: say so instead of leaving an unmarked hole."""
        if not self.flushed():
            return Progress.UNFLUSHED
        self.reset(code)
        self._close(code)
        return Progress.DONE

    def _close(self, code: StreamErrorCode | None) -> None:
        if not self.over:
            on_done = self._on_done
            self._forget()
            on_done(self, code)

    def _forget(self) -> None:
        self.over = True
        self._on_done = _done  # who waited for it may refer to it
        self.outlet.scheduler.deadlines.cancel(self._deadline)
        self.store.remove_listener(self)

    def stopped(self) -> None:
        self.reset(StreamErrorCode.CANCELLED)
        self._close(StreamErrorCode.CANCELLED)

    def abort(self, code: StreamErrorCode) -> None:
        """Stop without telling `on_done`."""
        self.reset(code)
        self._forget()


def _done(delivery: FetchDelivery, code: StreamErrorCode | None) -> None:
    """Nobody waits for it any more."""
