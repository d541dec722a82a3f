"""The send scheduler: which Object goes out next (MOQT "Priorities").

Objects are not pushed into QUIC when they are produced. Each session has one
scheduler; when the transport can use octets it asks for a few, and the scheduler
takes them from the delivery that the priority rules put first: subscriber
priority, then publisher priority, then, inside one subscription, group order.
Between equal ones of different requests it takes turns, so that none starves.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

from moqt.values.deadlines import Deadlines


class Progress(IntEnum):
    """What a delivery says after it was asked to write."""

    MORE = 0
    """It wrote, and has more."""
    WAITING = 1
    """It has nothing to send until the store changes."""
    BLOCKED = 2
    """The peer's credit on its stream is used up."""
    NO_STREAM = 3
    """It needs a stream and the peer grants none."""
    DONE = 4
    UNFLUSHED = 5
    """What was written before has to leave first."""


@dataclass(slots=True)
class DeliveryLimits:
    """How much one subscription may have waiting to be sent."""

    pending_subgroups: int = 4096
    """Subgroups it may be behind; beyond, it ends with TOO_FAR_BEHIND."""
    pending_datagrams: int = 1024
    """Objects waiting to go out as datagrams; beyond, they are dropped."""
    pending_fills: int = 64
    """Fills it may have open; an update that asks for one more gets EXCESSIVE_LOAD."""
    stream_patience: float = 1.0
    """Seconds without a new stream from the peer after which a Subgroup that waits for one takes
    that of another of lower priority."""


@dataclass(slots=True)
class DeliveryCounters:
    """What the deliveries of one session gave up."""

    too_far_behind: int = 0
    """Subscriptions ended with TOO_FAR_BEHIND."""
    expired_subscriptions: int = 0
    """Subscriptions ended with EXPIRED."""
    expired_objects: int = 0
    """Objects not sent because a delivery timeout had passed."""
    expired_streams: int = 0
    """Streams reset with DELIVERY_TIMEOUT."""
    streams_given_up: int = 0
    """Streams reset so that a Subgroup of higher priority gets one."""
    datagrams_sent: int = 0
    datagrams_too_large: int = 0
    """Datagrams the transport did not take: no packet holds them, or its queue is full."""
    datagrams_dropped: int = 0
    """Objects for which the queue of datagrams had no room."""
    ranges_unknown: int = 0
    """End of Range entries UNKNOWN written on fetch streams."""
    ranges_timed_out: int = 0
    """End of Range entries TIMED_OUT written on fetch streams."""


class Delivery(ABC):
    """Something that writes Objects on one data stream."""

    stream_id: int | None = None
    """The open stream it writes on."""
    wrote = False
    """The last `write` has handed octets to the transport, whatever kept it from handing more."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.queued = False
        self.streamless = False
        """It waits in the scheduler for a stream."""

    @property
    def importance(self) -> tuple[int, int]:
        """(subscriber priority, publisher priority); smaller goes first."""
        return self.flow.subscriber_priority, self.rank()[0]

    def stopped(self) -> None:
        """The peer sent STOP_SENDING for the open stream (the transport has reset it)."""
        raise NotImplementedError

    def give_way(self) -> bool:
        """Give up the open stream, once all on it has arrived, and go on with another; False for
        one that has to keep it."""
        return False

    @abstractmethod
    def rank(self) -> tuple[int, ...]:
        """(publisher priority, then the order inside the flow); smaller goes first."""

    @abstractmethod
    def write(self, limit: int) -> Progress:
        """Hand about `limit` octets to the transport, of as many Objects as that is: while it runs
        nothing comes that would go first."""


class Flow:
    """The deliveries of one subscription with its fills, or of one fetch."""

    def __init__(self, scheduler: Scheduler, subscriber_priority: int) -> None:
        self.scheduler = scheduler
        self.subscriber_priority = subscriber_priority
        self.heap: list[tuple[tuple[int, ...], int, Delivery]] = []
        self.turn = 0
        """When it was served last or came: of equals, the one that waits longest is next."""
        self.entry: Entry | None = None
        """Where it stands in the scheduler's queue."""
        self.streamless: list[tuple[tuple[int, ...], int, Delivery]] = []
        """Deliveries of it that wait for a stream, the first of them first."""
        self.streamless_entry: StreamlessEntry | None = None
        """Where it stands among the flows that wait for one."""
        self.over = False
        """The scheduler was told to forget it."""

    def set_priority(self, subscriber_priority: int) -> None:
        if subscriber_priority != self.subscriber_priority:
            self.subscriber_priority = subscriber_priority
            self.scheduler.offer(self)
            if self.streamless:
                self.scheduler.offer_streamless(self)


Entry = tuple[int, int, int, int, Flow]
"""Subscriber priority, publisher priority, turn, a number that makes it unique, the flow."""

StreamlessEntry = tuple[int, tuple[int, ...], int, int, Flow]
"""Subscriber priority, rank and number of the flow's first delivery, a number that makes it
unique, the flow."""


class Scheduler:
    """Chooses among flows; holds no octets itself.

    It also brings the deliveries the time. Delivery timeouts are milliseconds, and ticks
    come less often than that, so a shell may set `clock`, which is asked only where a
    timeout is in force. Without it, time is that of the last `tick`.
    """

    def __init__(
        self,
        limits: DeliveryLimits | None = None,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.limits = limits or DeliveryLimits()
        self.counters = DeliveryCounters()
        self.deadlines = Deadlines()
        self.clock = clock
        self.fills = 0
        """Fills that are not over, of all subscriptions."""
        self._ticked = 0.0
        self._flows: list[Entry] = []
        self._next_number: Callable[[], int] = itertools.count(1).__next__
        self._unflushed: dict[Delivery, None] = {}
        self._blocked: dict[int, Delivery] = {}
        """By stream: those that wait for credit on it."""
        self._streamless: list[StreamlessEntry] = []
        """Flows with deliveries that need a stream, by priority: one tries, the others wait."""
        self._trying: Delivery | None = None
        self._streamless_since: float | None = None
        """Since when the peer has granted none of them a stream."""
        self.sending: dict[int, Delivery] = {}
        """Deliveries by their open streams."""
        self._compact_at = self._compact_streamless_at = 256

    @property
    def now(self) -> float:
        return self._ticked if self.clock is None else self.clock()

    def tick(self, now: float) -> None:
        """Time has passed: what is due by `now` happens."""
        self._ticked = now
        self.deadlines.run(now)
        since = self._streamless_since
        if since is not None and now - since >= self.limits.stream_patience:
            self._streamless_since = now  # one after the other: what is freed takes a round trip
            self._make_way()

    def _make_way(self) -> None:
        """The peer's limit of streams is reached: cancel the one of the lowest priority, if one
        waits that goes before it (MOQT "Resource Exhaustion")."""
        waiting = [e[4].streamless[0][2] for e in self._streamless if e[4].streamless_entry is e]
        if self._trying is not None:
            waiting.append(self._trying)
        if not waiting:
            self._streamless_since = None
            return
        first = min(each.importance for each in waiting)
        lower = [each for each in self.sending.values() if each.importance > first]
        for each in sorted(lower, key=lambda each: each.importance, reverse=True):
            if each.give_way():
                break

    def ready(self, delivery: Delivery) -> None:
        """`delivery` has something to write."""
        if delivery.queued or delivery.streamless:
            return
        delivery.queued = True
        if not delivery.flow.heap:
            delivery.flow.turn = self._next_number()
        heapq.heappush(delivery.flow.heap, (delivery.rank(), self._next_number(), delivery))
        self.offer(delivery.flow)

    def offer(self, flow: Flow) -> None:
        """Enter `flow` under its best delivery; an earlier entry becomes void."""
        if not flow.heap:
            flow.entry = None
            return
        place = (flow.subscriber_priority, flow.heap[0][0][0], flow.turn)
        if flow.entry is not None and flow.entry[:3] == place:
            return
        flow.entry = (*place, self._next_number(), flow)
        heapq.heappush(self._flows, flow.entry)
        if len(self._flows) > self._compact_at:
            self._flows = [entry for entry in self._flows if entry[4].entry is entry]
            heapq.heapify(self._flows)
            self._compact_at = max(256, 2 * len(self._flows))

    def offer_streamless(self, flow: Flow) -> None:
        """The same among those that need a stream."""
        if not flow.streamless:
            flow.streamless_entry = None
            return
        place = (flow.subscriber_priority, *flow.streamless[0][:2])
        if flow.streamless_entry is not None and flow.streamless_entry[:3] == place:
            return
        flow.streamless_entry = (*place, self._next_number(), flow)
        heapq.heappush(self._streamless, flow.streamless_entry)
        if len(self._streamless) > self._compact_streamless_at:
            self._streamless = [e for e in self._streamless if e[4].streamless_entry is e]
            heapq.heapify(self._streamless)
            self._compact_streamless_at = max(256, 2 * len(self._streamless))

    @property
    def idle(self) -> bool:
        return not self._flows

    def unblock(self, credited: Iterable[int]) -> None:
        """What was held back may try again: of those that wait for credit, the ones whose
        stream is among `credited`. A peer may grant many streams and no credit on them."""
        held = [self._blocked.pop(each) for each in credited if each in self._blocked]
        held += self._unflushed
        self._unflushed.clear()
        for delivery in held:
            if not delivery.flow.over:
                self.ready(delivery)
        if self._trying is None:
            self._try_stream()

    def _try_stream(self) -> None:
        """Let the first by priority of those that need a stream ask for one."""
        while self._streamless:
            entry = heapq.heappop(self._streamless)
            flow = entry[4]
            if flow.streamless_entry is not entry:
                continue
            flow.streamless_entry = None
            delivery = heapq.heappop(flow.streamless)[2]
            delivery.streamless = False
            self.offer_streamless(flow)
            self._trying = delivery
            self.ready(delivery)
            return

    def write_next(self, limit: int) -> bool:
        """Let the best delivery write; False when nothing could be written."""
        while self._flows:
            entry = heapq.heappop(self._flows)
            flow = entry[4]
            if flow.entry is not entry:
                continue
            flow.entry, flow.turn = None, self._next_number()
            _, _, delivery = heapq.heappop(flow.heap)
            delivery.queued = delivery.wrote = False
            progress = delivery.write(limit)
            tried = delivery is self._trying
            if tried:
                self._trying = None
            if progress is Progress.NO_STREAM and not flow.over:
                if self._streamless_since is None:
                    self._streamless_since = self._ticked
                delivery.streamless = True
                heapq.heappush(flow.streamless, (delivery.rank(), self._next_number(), delivery))
                self.offer_streamless(flow)
            elif tried:
                self._streamless_since = None
                self._try_stream()
            if progress is Progress.MORE:
                self.ready(delivery)
                return True
            if progress is Progress.UNFLUSHED:
                self._unflushed[delivery] = None
            elif progress is Progress.BLOCKED:
                assert delivery.stream_id is not None
                self._blocked[delivery.stream_id] = delivery
            self.offer(flow)
            if delivery.wrote:
                return True
        return False

    def stream_over(self, stream_id: int) -> None:
        """Nothing is sent on the stream any more: no delivery waits for credit on it."""
        self._blocked.pop(stream_id, None)

    def forget(self, flow: Flow) -> None:
        """The request is over: drop what its flow still had queued."""
        for _, _, delivery in flow.heap:
            delivery.queued = False
        flow.heap.clear()
        flow.entry = None
        flow.over = True
        flow.streamless.clear()
        flow.streamless_entry = None
        if self._trying is not None and self._trying.flow is flow:
            self._trying = None
