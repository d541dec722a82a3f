"""Cursors over a TrackStore: how Objects get from the store onto data streams.

`SubscriptionDelivery` serves one established subscription with one
`SubgroupDelivery` per Subgroup; `FetchDelivery` serves a FETCH or a fill.
A slow peer costs a cursor, never a copy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

from moqt.codes import (
    MAX_VI64,
    GroupOrder,
    ObjectStatus,
    PublishDoneCode,
    StreamErrorCode,
)
from moqt.filters import matches
from moqt.messages import RangeFilter
from moqt.names import Location
from moqt.quic.base import Transport
from moqt.scheduler import Delivery, Flow, Progress, Scheduler
from moqt.store import StoredObject, SubgroupLog, TrackStore
from moqt.wire.codec import Codec
from moqt.wire.objects import DatagramObject, ObjectHeader, SubgroupHeader

MAX_PENDING_SUBGROUPS = 4096
"""Subgroups one subscription may be behind; beyond it ends with TOO_FAR_BEHIND."""


class Outlet(Protocol):
    """What a delivery needs of its session."""

    transport: Transport
    codec: Codec
    scheduler: Scheduler

    def open_data_stream(self, delivery: StreamDelivery) -> int | None: ...

    def data_stream_closed(self, stream_id: int) -> None: ...


class StreamDelivery(Delivery):
    """A delivery that owns one unidirectional stream at a time."""

    def __init__(self, outlet: Outlet, flow: Flow, store: TrackStore) -> None:
        super().__init__(flow)
        self.outlet = outlet
        self.store = store
        self.stream_id: int | None = None
        self.current: StoredObject | None = None
        self.offset = 0
        self.over = False

    def wake(self) -> None:
        if not self.over:
            self.outlet.scheduler.ready(self)

    def reset(self, code: StreamErrorCode) -> None:
        """Reset the stream, if one is open."""
        self.current = None
        if self.stream_id is not None:
            stream_id, self.stream_id = self.stream_id, None
            self.outlet.transport.reset(stream_id, code)
            self.outlet.data_stream_closed(stream_id)

    def stopped(self) -> None:
        """The peer sent STOP_SENDING for the open stream (the transport has reset it)."""
        raise NotImplementedError

    def finish(self) -> None:
        if self.stream_id is not None:
            stream_id, self.stream_id = self.stream_id, None
            self.outlet.transport.send(stream_id, b"", fin=True)
            self.outlet.data_stream_closed(stream_id)

    def send_current(self, limit: int) -> Progress:
        """Send some of the Object in hand; WAITING when it has not grown that far yet."""
        stored, stream_id = self.current, self.stream_id
        assert stored is not None and stream_id is not None
        transport = self.outlet.transport
        room = min(limit, transport.send_room(stream_id))
        while self.offset < stored.length:
            if room <= 0:
                return Progress.BLOCKED if limit > 0 else Progress.MORE
            part = stored.read(self.offset, room)
            if not part:
                return Progress.WAITING
            size = len(part)
            transport.send(stream_id, part)
            self.offset += size
            room -= size
            limit -= size
        self.current = None
        return Progress.MORE


class SubgroupDelivery(StreamDelivery):
    """Sends the Objects of one Subgroup from the subscription's start on."""

    def __init__(self, subscription: SubscriptionDelivery, log: SubgroupLog) -> None:
        super().__init__(subscription.outlet, subscription.flow, subscription.store)
        self.subscription = subscription
        self.log = log
        log.readers += 1
        start = subscription.start
        self.position = start.object - 1 if log.group == start.group else -1
        """Object IDs up to here are dealt with: sent, filtered out or given up."""
        self.previous: int | None = None
        """Last Object ID written on the open stream."""
        self.passed: int | None = None
        """Last Object ID of this stream dealt with, filtered ones included."""
        self.incomplete = False
        """An Object had to be given up: the stream must not end with FIN."""

    def rank(self) -> tuple[int, ...]:
        group = self.log.group
        ascending = self.subscription.group_order is GroupOrder.ASCENDING
        return (self.log.priority, group if ascending else -group, 1, self.log.subgroup)

    def write(self, limit: int) -> Progress:
        if self.over or self.subscription.paused:
            return Progress.WAITING
        if self.current is not None:
            if self.current.gone and not self.current.complete:
                self.reset(StreamErrorCode.INTERNAL_ERROR)
            else:
                return self.send_current(limit)
        stored = self._next()
        if stored is None:
            return self._at_end()
        object_id = stored.location.object
        if self.stream_id is not None and not self._may_follow(stored):
            self.reset(StreamErrorCode.CANCELLED)
        if self.stream_id is None:
            stream_id = self.outlet.open_data_stream(self)
            if stream_id is None:
                self.position = object_id - 1
                return Progress.BLOCKED
            self.stream_id = stream_id
            self.previous = None
            header = SubgroupHeader(
                track_alias=self.subscription.track_alias,
                group=self.log.group,
                subgroup=self.log.subgroup,
                priority=self.log.priority,
                end_of_group=False,
                first_object=object_id == self._first_id(),
            )
            self.outlet.transport.send(
                stream_id, self.outlet.codec.encode_subgroup_header(header, properties=True)
            )
            self.subscription.streams_opened += 1
        assert self.stream_id is not None
        if self.outlet.transport.send_room(self.stream_id) <= 0:
            self.position = object_id - 1
            return Progress.BLOCKED
        self.outlet.transport.send(
            self.stream_id,
            self.outlet.codec.encode_subgroup_object(
                self.previous,
                object_id,
                properties=stored.properties,
                with_properties=True,
                length=stored.length,
                status=stored.status,
            ),
        )
        self.previous = self.passed = object_id
        self.current, self.offset = stored, 0
        return self.send_current(limit)

    def _first_id(self) -> int | None:
        if self.store.authoritative:
            return self.log.ids[0]
        return self.log.first_id

    def _next(self) -> StoredObject | None:
        """The next Object that passes the filters; None when there is none (yet)."""
        ids = self.log.ids
        group = self.store.groups.get(self.log.group)
        while group is not None:
            at = bisect_right(ids, self.position)
            if at == len(ids):
                return None
            object_id = ids[at]
            if Location(self.log.group, object_id) > self.subscription.end:
                return None
            stored = group.objects.get(object_id)
            if stored is None:
                if self._want(object_id):
                    return None
                self.reset(StreamErrorCode.TOO_FAR_BEHIND)
                self.position = object_id
                self.incomplete = True
                continue
            self.position = object_id
            if stored.status is not ObjectStatus.NORMAL or self.subscription.passes(stored):
                return stored
            self.passed = object_id
        return None

    def _want(self, object_id: int) -> bool:
        """Have the source bring back an evicted Object and what is missing after it."""
        source = self.store.source
        if source is None:
            return False
        start = Location(self.log.group, object_id)
        end = min(self.subscription.end, Location(self.log.group, self.log.ids[-1]))
        if not self.store.authoritative:
            end = self.store.known.missing_end(start, end)
        return source.want(self.store, start, end)

    def _may_follow(self, stored: StoredObject) -> bool:
        """The relay "next object" rule (MOQT 12.2 of our reference)."""
        if (
            self.store.authoritative
            or self.passed is None
            or stored.location.object == (self.passed + 1)
        ):
            return True
        if stored.follows == self.passed:
            return True
        return (
            self.store.first_unknown(
                Location(self.log.group, self.passed + 1),
                Location(self.log.group, stored.location.object - 1),
            )
            is None
        )

    def _at_end(self) -> Progress:
        ids = self.log.ids
        if (
            ids
            and self.position < ids[-1]
            and (
                Location(self.log.group, ids[bisect_right(ids, self.position)])
                <= self.subscription.end
            )
        ):
            return Progress.WAITING  # an evicted Object is on its way back
        beyond = Location(self.log.group, self.position + 1) > self.subscription.end
        if self.log.finished and not self.incomplete:
            self.finish()
        elif self.log.finished:
            self.reset(StreamErrorCode.TOO_FAR_BEHIND)
        elif beyond or self.log.broken or self.store.ended:
            self.reset(StreamErrorCode.CANCELLED if beyond else StreamErrorCode.INTERNAL_ERROR)
            if self.log.broken and not (beyond or self.store.ended):
                return Progress.WAITING  # the upstream may open another stream for the rest
        else:
            return Progress.WAITING
        self.close()
        self.subscription.subgroup_done(self)
        return Progress.DONE

    def stopped(self) -> None:
        self.reset(StreamErrorCode.CANCELLED)
        self.close()
        self.subscription.subgroup_done(self)

    def close(self) -> None:
        if not self.over:
            self.over = True
            self.log.readers -= 1
            if not self.store.authoritative:
                self.store.forget_group(self.log.group)


class SubscriptionDelivery:
    """Publisher side of one established subscription (MOQT 5.1)."""

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
    ) -> None:
        self.outlet = outlet
        self.store = store
        self.track_alias = track_alias
        self.start = start
        self.end = end
        self.filters = filters
        self.group_order = group_order
        self.paused = paused
        self.flow = Flow(outlet.scheduler, subscriber_priority)
        self.streams_opened = 0
        self._on_done = on_done
        self._subgroups: dict[tuple[int, int], SubgroupDelivery] = {}
        self._finished: set[tuple[int, int]] = set()
        self._fills: list[FetchDelivery] = []
        self._next_datagram = start
        self.over = False

    def begin(self) -> None:
        """Start delivering: everything at or beyond `start` that is there, then what comes."""
        self.store.add_listener(self)
        for group_id in tuple(self.store.group_ids):
            if group_id >= self.start.group:
                for log in tuple(self.store.groups[group_id].subgroups.values()):
                    self._consider(log)
        self.check_done()

    def store_changed(self, store: TrackStore, log: SubgroupLog | None) -> None:
        if log is None:
            for delivery in tuple(self._subgroups.values()):
                delivery.wake()
            self._send_datagrams()
            self.check_done()
        else:
            self._consider(log)

    def _consider(self, log: SubgroupLog) -> None:
        key = (log.group, log.subgroup)
        delivery = self._subgroups.get(key)
        if delivery is None:
            if (
                key in self._finished
                or not log.ids
                or Location(log.group, log.ids[-1]) < self.start
                or log.group > self.end.group
                or self.paused
            ):
                return
            if len(self._subgroups) >= MAX_PENDING_SUBGROUPS:
                self._end(PublishDoneCode.TOO_FAR_BEHIND, "too many groups are waiting to be sent")
                return
            delivery = self._subgroups[key] = SubgroupDelivery(self, log)
        delivery.wake()

    def _send_datagrams(self) -> None:
        """Objects in Delivery Mode Datagram go out as soon as they are whole."""
        while not self.paused:
            stored = self.store.next_object(self._next_datagram, self.end)
            if stored is None or not (stored.complete or stored.subgroup is not None):
                return
            self._next_datagram = Location(stored.location.group, stored.location.object + 1)
            if stored.subgroup is None and self.passes(stored):
                self.outlet.transport.send_datagram(
                    self.outlet.codec.encode_datagram(
                        DatagramObject(
                            track_alias=self.track_alias,
                            group=stored.location.group,
                            object=stored.location.object,
                            priority=stored.priority,
                            properties=stored.properties,
                            payload=bytes(stored.payload),
                        )
                    )
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
        self.check_done()

    def subgroup_done(self, delivery: SubgroupDelivery) -> None:
        key = (delivery.log.group, delivery.log.subgroup)
        self._subgroups.pop(key, None)
        self._finished.add(key)
        if len(self._finished) > 2048:
            self._finished = {k for k in self._finished if k[0] in self.store.groups}
        self.check_done()

    def pause(self, paused: bool) -> None:
        """FORWARD changed. Streams that would miss Objects are reset (MOQT 8.4)."""
        if paused == self.paused:
            return
        self.paused = paused
        if paused:
            for delivery in tuple(self._subgroups.values()):
                delivery.reset(StreamErrorCode.CANCELLED)
                delivery.close()
            self._subgroups.clear()
        else:
            largest = self.store.largest
            if largest is not None:
                self.start = max(self.start, Location(largest.group, largest.object + 1))
            self.store_changed(self.store, None)

    def refilter(
        self, start: Location | None, end: Location | None, filters: tuple[RangeFilter, ...]
    ) -> None:
        """REQUEST_UPDATE changed the filters; what was sent stays sent."""
        self.filters = filters
        if start is not None and end is not None:
            self.start, self.end = start, end
            for log in [
                log
                for g in tuple(self.store.groups.values())
                for log in tuple(g.subgroups.values())
            ]:
                if log.group >= start.group:
                    self._consider(log)

    def check_done(self) -> None:
        if self.store.ended and not self._subgroups and not self._fills and not self.over:
            code = self.store.end_code
            self._end(PublishDoneCode.TRACK_ENDED if code is None else code, self.store.end_reason)

    def _end(self, code: int, reason: str) -> None:
        self.cancel(StreamErrorCode.TOO_FAR_BEHIND)
        self._on_done(code, reason)

    def cancel(self, code: StreamErrorCode = StreamErrorCode.CANCELLED) -> None:
        """Stop: reset every stream that is still open and forget the cursors."""
        if self.over:
            return
        self.over = True
        self.store.remove_listener(self)
        for delivery in self._subgroups.values():
            delivery.reset(code)
            delivery.close()
        for fill in tuple(self._fills):
            fill.abort(code)
        self._subgroups.clear()
        self._fills.clear()
        self.outlet.scheduler.forget(self.flow)


class FetchDelivery(StreamDelivery):
    """Sends [start, end] of a store on one fetch stream (MOQT 9 of our reference)."""

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
    ) -> None:
        super().__init__(outlet, flow, store)
        self.request_id = request_id
        self.start = start
        self.end = end
        self.group_order = group_order
        self.filters = filters
        self._on_done = on_done
        self._encoder = outlet.codec.fetch_encoder(request_id, group_order)
        self._descending = group_order is GroupOrder.DESCENDING
        group = end.group if self._descending else start.group
        self._next_location, self._stop = self._span(group)
        self._priority = store.default_priority
        self._opened = False

    def _span(self, group: int) -> tuple[Location, Location]:
        """What is walked without a change of direction: all of it, or one group of it."""
        if not self._descending:
            return self.start, self.end
        return (
            max(self.start, Location(group, 0)),
            min(self.end, Location(group, MAX_VI64)),
        )

    def begin(self) -> None:
        self.store.add_listener(self)
        self.wake()

    def store_changed(self, store: TrackStore, log: SubgroupLog | None) -> None:
        self.wake()

    def rank(self) -> tuple[int, ...]:
        group = self._next_location.group
        return (self._priority, -group if self._descending else group, 0, 0)

    def write(self, limit: int) -> Progress:
        if self.over:
            return Progress.DONE
        if not self._opened:
            stream_id = self.outlet.open_data_stream(self)
            if stream_id is None:
                return Progress.BLOCKED
            self.stream_id, self._opened = stream_id, True
            self.outlet.transport.send(stream_id, self._encoder.header())
        assert self.stream_id is not None
        if self.outlet.transport.send_room(self.stream_id) <= 0:
            return Progress.BLOCKED
        if self.current is not None:
            if self.current.gone and not self.current.complete:
                return self._fail(StreamErrorCode.INTERNAL_ERROR)
            return self.send_current(limit)
        stored = self._advance()
        if isinstance(stored, Progress):
            return stored
        self._priority = stored.priority
        self.outlet.transport.send(
            self.stream_id,
            self._encoder.object(
                ObjectHeader(
                    group=stored.location.group,
                    object=stored.location.object,
                    subgroup=stored.subgroup,
                    priority=stored.priority,
                    properties=stored.properties,
                    length=stored.length,
                    status=ObjectStatus.NORMAL,
                )
            ),
        )
        self.current, self.offset = stored, 0
        return self.send_current(limit)

    def _advance(self) -> StoredObject | Progress:
        """The next Object to send, or why there is none."""
        while True:
            stored = self.store.next_object(self._next_location, self._stop)
            until = stored.location if stored else self._stop
            unknown = self.store.first_unknown(self._next_location, until)
            if unknown is not None and (stored is None or unknown < stored.location):
                source = self.store.source
                end = self.store.known.missing_end(unknown, self._stop)
                if self._descending and stored is None:
                    end = min(end, self._stop)
                if source is not None and source.want(self.store, unknown, end):
                    return Progress.WAITING
                if self.store.first_unknown(unknown, unknown) is None:
                    continue
                return self._fail(StreamErrorCode.UNKNOWN_OBJECT_STATUS)
            if stored is None:
                if not self._descending or not self._previous_group():
                    self.finish()
                    self._close(None)
                    return Progress.DONE
                continue
            self._next_location = Location(stored.location.group, stored.location.object + 1)
            if not self.filters or matches(
                self.filters,
                object=stored.location.object,
                subgroup=stored.subgroup,
                priority=stored.priority,
                properties=stored.properties,
            ):
                return stored

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
        self.reset(code)
        self._close(code)
        return Progress.DONE

    def _close(self, code: StreamErrorCode | None) -> None:
        if not self.over:
            self.over = True
            self.store.remove_listener(self)
            self._on_done(self, code)

    def stopped(self) -> None:
        self._fail(StreamErrorCode.CANCELLED)

    def abort(self, code: StreamErrorCode) -> None:
        """Stop without telling `on_done`."""
        self.reset(code)
        self.over = True
        self.store.remove_listener(self)
