"""Cursors over a TrackStore: how Objects get from the store onto data streams.

`SubscriptionDelivery` serves one established subscription with one
`SubgroupDelivery` per Subgroup; `FetchDelivery` serves a FETCH or a fill.
A slow peer costs a cursor, never a copy.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
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
from moqt.names import MAX_LOCATION, Location
from moqt.quic.base import Transport
from moqt.scheduler import Delivery, Flow, Progress, Scheduler
from moqt.store import (
    Assumption,
    IntervalSet,
    StoredObject,
    SubgroupLog,
    TrackStore,
    location_after,
    location_before,
)
from moqt.wire.codec import Codec
from moqt.wire.objects import DatagramObject, ObjectHeader, SubgroupHeader

SHORT_PART = 256
"""Octets up to which the first part of a payload is copied behind the Object's header."""

MAX_PENDING_SUBGROUPS = 4096
"""Subgroups one subscription may be behind; beyond it ends with TOO_FAR_BEHIND."""


FLUSH_ROUNDS = 64
"""Rounds of sending a stream that is to be reset is given to get rid of what it holds."""


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
        self._patience = FLUSH_ROUNDS

    def wake(self) -> None:
        if not self.over and not self.queued:
            self.outlet.scheduler.ready(self)
            # The store may be filled by another session: this one has to be told to send.
            self.outlet.transport.wake()

    def flushed(self) -> bool:
        """Whether what was written has left, so that a reset does not take it back.

        Only a header that arrives lets the peer know what was reset. The transport does
        not say what of one stream is unsent, hence the limit.
        """
        if self.stream_id is None or self.outlet.transport.unsent == 0:
            return True
        self._patience -= 1
        return self._patience < 0

    def reset(self, code: StreamErrorCode) -> None:
        """Reset the stream, if one is open."""
        self.current = None
        if self.stream_id is not None:
            stream_id, self.stream_id = self.stream_id, None
            self.outlet.transport.reset(stream_id, code)
            self.outlet.data_stream_closed(stream_id)
        self._patience = FLUSH_ROUNDS

    def stopped(self) -> None:
        """The peer sent STOP_SENDING for the open stream (the transport has reset it)."""
        raise NotImplementedError

    def finish(self) -> None:
        if self.stream_id is not None:
            stream_id, self.stream_id = self.stream_id, None
            self.outlet.transport.send(stream_id, b"", fin=True)
            self.outlet.data_stream_closed(stream_id)

    def send_object(self, stored: StoredObject, head: bytes, limit: int) -> Progress:
        """Begin an Object: its header on the stream is `head`.

        A short first part of the payload goes along: each piece the transport is given
        costs about as much as sending a packet's worth of octets.
        """
        self.store.used(stored)
        self.current, self.offset = stored, 0
        if stored.parts and stored.ends[0] <= SHORT_PART:
            head += stored.parts[0]
            self.offset = stored.ends[0]
        assert self.stream_id is not None
        self.outlet.transport.send(self.stream_id, head)
        return self.send_current(limit)

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

    def __init__(self, subscription: SubscriptionDelivery, log: SubgroupLog, position: int) -> None:
        super().__init__(subscription.outlet, subscription.flow, subscription.store)
        self.subscription = subscription
        self.log = log
        log.readers += 1
        self.position = position
        """Object IDs up to here are dealt with: sent, filtered out or given up."""
        self.previous: int | None = None
        """Last Object ID written on the open stream."""
        self.passed: int | None = None
        """Last Object ID of this stream dealt with, filtered ones included."""
        self._blocked = False
        self.incomplete: StreamErrorCode | None = None
        """Why the stream must not end with FIN: an Object was given up or withheld."""

    def rank(self) -> tuple[int, ...]:
        group = self.log.group
        ascending = self.subscription.group_order is GroupOrder.ASCENDING
        return (self.log.priority, 0, group if ascending else -group, 1, self.log.subgroup)

    def write(self, limit: int) -> Progress:
        if self.over or self.subscription.paused:
            return Progress.WAITING
        if self.current is not None:
            if self.current.gone and not self.current.complete:
                if not self.flushed():
                    return Progress.BLOCKED
                # What was sent of it counts for nothing: should it come again, send it again.
                self.position = self.current.location.object - 1
                self.reset(StreamErrorCode.INTERNAL_ERROR)
            else:
                return self.send_current(limit)
        self._blocked = False
        stored = self._next()
        if stored is None:
            return self._held_back() if self._blocked else self._at_end()
        object_id = stored.location.object
        if self.stream_id is not None and not self._may_follow(stored):
            if not self.flushed():
                self.position = object_id - 1
                return Progress.BLOCKED
            self.reset(StreamErrorCode.CANCELLED)
        if not self._writable(object_id):
            self.position = object_id - 1
            return self._held_back()
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
        return self.send_object(stored, head, limit)

    def _held_back(self) -> Progress:
        return Progress.NO_STREAM if self.stream_id is None else Progress.BLOCKED

    def _writable(self, object_id: int) -> bool:
        """Whether there is a stream, opened now for `object_id` if need be, with credit."""
        if self.stream_id is None:
            stream_id = self.outlet.open_data_stream(self)
            if stream_id is None:
                return False
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
        return self.outlet.transport.send_room(self.stream_id) > 0

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
            location = Location(self.log.group, object_id)
            if location > self.subscription.end:
                return None
            if self.subscription.withholds(self.log, object_id):
                self.position = object_id
                self.incomplete = StreamErrorCode.CANCELLED
                continue
            stored = group.objects.get(object_id)
            if stored is None:
                # It comes back only for who can send it: else many that cannot would keep
                # pushing each other's Objects out of the cache.
                if self.store.source is not None and not self._writable(object_id):
                    self._blocked = True
                    return None
                if self._want(object_id):
                    return None
                if not self.flushed():
                    self._blocked = True
                    return None
                self.reset(StreamErrorCode.TOO_FAR_BEHIND)
                self.position = object_id
                self.incomplete = StreamErrorCode.TOO_FAR_BEHIND
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
        """The relays' "next object" rule: nothing that may exist lies between on the stream."""
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
        at = bisect_right(ids, self.position)
        left = at < len(ids)
        if left and Location(self.log.group, ids[at]) <= self.subscription.end:
            return Progress.WAITING  # an evicted Object is on its way back
        if left and not (self.log.finished or self.store.ended):
            return Progress.WAITING  # the filter ends inside the Subgroup; an update may move it
        complete = self.log.finished and not left and self.incomplete is None
        if complete:
            self._end_group()
            self.finish()
        elif (self.log.finished or self.store.ended or self.log.broken) and not self.flushed():
            return Progress.BLOCKED
        elif self.log.finished or left:
            self.reset(self.incomplete or StreamErrorCode.CANCELLED)
        elif self.store.ended:
            self.reset(StreamErrorCode.INTERNAL_ERROR)
        elif self.log.broken:
            # The upstream may open another stream for the rest: then there is a new delivery.
            self.reset(StreamErrorCode.INTERNAL_ERROR)
            self.close()
            self.subscription.subgroup_broken(self)
            return Progress.DONE
        else:
            return Progress.WAITING
        self.close()
        self.subscription.subgroup_done(self)
        return Progress.DONE

    def _end_group(self) -> None:
        """Say as an End of Group Object what END_OF_GROUP said upstream (MOQT "Caching Relays").

        The stream's header went out before that was known.
        """
        group = self.store.groups.get(self.log.group)
        end = group.end if group is not None else None
        if (
            not self.log.end_of_group
            or self.stream_id is None
            or self.previous is None
            or end is None
            or end <= self.previous
            or Location(self.log.group, end) > self.subscription.end
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
    ) -> None:
        self.outlet = outlet
        self.store = store
        self.track_alias = track_alias
        self.start = start
        self.end = end
        self._withheld: dict[tuple[int, int], IntervalSet] = {}
        """Object IDs, by Subgroup, that the filter of then or a pause kept back for good."""
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

    def begin(self) -> None:
        """Start delivering: everything at or beyond `start` that is there, then what comes."""
        self.store.add_listener(self)
        for group_id in tuple(self.store.group_ids):
            if group_id >= self.start.group:
                for log in tuple(self.store.groups[group_id].subgroups.values()):
                    self._consider(log)
        self._send_datagrams()
        self.check_done()

    def store_changed(self, store: TrackStore, log: SubgroupLog | None) -> None:
        if log is None:
            for delivery in tuple(self._subgroups.values()):
                delivery.wake()
            self.check_done()
        else:
            self._consider(log)

    def datagram_stored(self, store: TrackStore, stored: StoredObject) -> None:
        if not (self.paused or stored.location > self.end or stored.location < self.start):
            self._send_datagram(stored)

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
            ):
                return
            position = self.start.object - 1 if log.group == self.start.group else -1
            position = max(position, self._resume.get(key, -1))
            if log.ids[-1] <= position:
                return
            self._resume.pop(key, None)
            if len(self._subgroups) >= MAX_PENDING_SUBGROUPS:
                self._end(PublishDoneCode.TOO_FAR_BEHIND, "too many groups are waiting to be sent")
                return
            delivery = self._subgroups[key] = SubgroupDelivery(self, log, position)
        delivery.wake()

    def _send_datagrams(self) -> None:
        """What is there in Delivery Mode Datagram; later ones go out as they arrive."""
        if self.paused or self.over or not self.store.has_datagrams:
            return
        at = self.start
        while (stored := self.store.next_object(at, self.end)) is not None:
            at = location_after(stored.location)
            if stored.subgroup is None and stored.complete:
                self._send_datagram(stored)

    def _send_datagram(self, stored: StoredObject) -> None:
        if self.passes(stored):
            self.store.used(stored)
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
            self.outlet.transport.wake()

    def withholds(self, log: SubgroupLog, object_id: int) -> bool:
        held = self._withheld.get((log.group, log.subgroup))
        return Location(log.group, object_id) < self.start or (
            held is not None and Location(0, object_id) in held
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
            self._withhold(Location(0, 0), MAX_LOCATION)
            self.store_changed(self.store, None)

    def refilter(
        self, start: Location | None, end: Location | None, filters: tuple[RangeFilter, ...]
    ) -> None:
        """REQUEST_UPDATE changed the filters. What was sent stays sent, and what the old ones
        kept back stays back: a wider filter is for what is published from now on."""
        self.filters = filters
        if start is None or end is None:
            return
        if start < self.start:
            self._withhold(start, location_before(self.start))
        if end > self.end:
            self._withhold(location_after(self.end), MAX_LOCATION)
        self.start, self.end = start, end
        for group in tuple(self.store.groups.values()):
            for log in tuple(group.subgroups.values()):
                if log.group >= start.group:
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
            self.streams_opened += fill.opened
        self._subgroups.clear()
        self._fills.clear()
        self.outlet.scheduler.forget(self.flow)


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
    ) -> None:
        """`behind`: a fill whose group order is not its subscription's goes after it."""
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
        self.opened = False
        self._assumed: list[tuple[Assumption, Location, Location]] = []
        """Gaps skipped because a fetch on its way left them out; proven when it ends."""

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

    def datagram_stored(self, store: TrackStore, stored: StoredObject) -> None:
        self.wake()

    def rank(self) -> tuple[int, ...]:
        if self.current is None:
            following = self.store.next_object(self._next_location, self._stop)
            if following is not None:
                self._priority = following.priority
        group = self._next_location.group
        return (self._priority, int(self._behind), -group if self._descending else group, 0, 0)

    def write(self, limit: int) -> Progress:
        if self.over:
            return Progress.DONE
        if not self.opened:
            stream_id = self.outlet.open_data_stream(self)
            if stream_id is None:
                return Progress.NO_STREAM
            self.stream_id, self.opened = stream_id, True
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
        return self.send_object(stored, head, limit)

    def _advance(self) -> StoredObject | Progress:
        """The next Object to send, or why there is none."""
        while True:
            stored = self.store.next_object(self._next_location, self._stop)
            until = stored.location if stored else self._stop
            unknown = self.store.first_unknown(self._next_location, until)
            if unknown is not None and (stored is None or unknown < stored.location):
                source = self.store.source
                end = self.store.known.missing_end(unknown, self._stop)
                gap = source.assumed(self.store, unknown) if source is not None else None
                if gap is not None:
                    gap_end = min(gap[1], end)
                    if stored is not None:
                        gap_end = min(gap_end, location_before(stored.location))
                    self._assumed.append((gap[0], unknown, gap_end))
                    self._next_location = location_after(gap_end)
                    continue
                if source is not None and source.want(self.store, unknown, end):
                    return Progress.WAITING
                if self.store.first_unknown(unknown, unknown) is None:
                    continue
                return self._fail(StreamErrorCode.UNKNOWN_OBJECT_STATUS)
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

    def _prove(self) -> Progress | None:
        """None once every gap that was skipped on assumption is known not to exist."""
        while self._assumed:
            assumption, start, end = self._assumed[-1]
            if not assumption.proven and self.store.first_unknown(start, end) is not None:
                if assumption.proven is None and not assumption.stalled:
                    return Progress.WAITING
                source = self.store.source
                if source is not None and source.want(self.store, start, end):
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
            return Progress.BLOCKED
        self.reset(code)
        self._close(code)
        return Progress.DONE

    def _close(self, code: StreamErrorCode | None) -> None:
        if not self.over:
            self.over = True
            self.store.remove_listener(self)
            self._on_done(self, code)

    def stopped(self) -> None:
        self.reset(StreamErrorCode.CANCELLED)
        self._close(StreamErrorCode.CANCELLED)

    def abort(self, code: StreamErrorCode) -> None:
        """Stop without telling `on_done`."""
        self.reset(code)
        self.over = True
        self.store.remove_listener(self)
