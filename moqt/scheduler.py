"""The send scheduler: which Object goes out next (MOQT 7, "Priorities").

Objects are not pushed into QUIC when they are produced. Each session has one
scheduler; when the transport can use octets it asks for a few, and the scheduler
takes them from the delivery that the priority rules put first: subscriber
priority, then publisher priority, then, inside one subscription, group order.
Between equal ones of different requests it takes turns, so that none starves.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from enum import IntEnum


class Progress(IntEnum):
    """What a delivery says after it was asked to write."""

    MORE = 0
    """It wrote, and has more."""
    WAITING = 1
    """It has nothing to send until the store changes."""
    BLOCKED = 2
    """The peer's flow control or stream limit holds it back."""
    DONE = 3


class Delivery(ABC):
    """Something that writes Objects on one data stream."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.queued = False

    @abstractmethod
    def rank(self) -> tuple[int, ...]:
        """(publisher priority, then the order inside the flow); smaller goes first."""

    @abstractmethod
    def write(self, limit: int) -> Progress:
        """Hand about `limit` octets of at most one Object to the transport."""


class Flow:
    """The deliveries of one subscription with its fills, or of one fetch."""

    def __init__(self, scheduler: Scheduler, subscriber_priority: int) -> None:
        self.scheduler = scheduler
        self.subscriber_priority = subscriber_priority
        self.heap: list[tuple[tuple[int, ...], int, Delivery]] = []
        self.version = 0

    def set_priority(self, subscriber_priority: int) -> None:
        if subscriber_priority != self.subscriber_priority:
            self.subscriber_priority = subscriber_priority
            self.scheduler.offer(self)


class Scheduler:
    """Chooses among flows; holds no octets itself."""

    def __init__(self) -> None:
        self._flows: list[tuple[int, int, int, int, Flow]] = []
        self._turn = 0
        self._blocked: list[Delivery] = []

    def ready(self, delivery: Delivery) -> None:
        """`delivery` has something to write."""
        if delivery.queued:
            return
        delivery.queued = True
        self._turn += 1
        heapq.heappush(delivery.flow.heap, (delivery.rank(), self._turn, delivery))
        self.offer(delivery.flow)

    def offer(self, flow: Flow) -> None:
        """(Re)enter `flow` under its best delivery; earlier entries become void."""
        flow.version += 1
        if flow.heap:
            self._turn += 1
            heapq.heappush(
                self._flows,
                (flow.subscriber_priority, flow.heap[0][0][0], self._turn, flow.version, flow),
            )

    @property
    def idle(self) -> bool:
        return not self._flows

    def unblock(self) -> None:
        """The transport has new credit: everything held back may try again."""
        blocked, self._blocked = self._blocked, []
        for delivery in blocked:
            self.ready(delivery)

    def write_next(self, limit: int) -> bool:
        """Let the best delivery write; False when nothing could be written."""
        while self._flows:
            _, _, _, version, flow = heapq.heappop(self._flows)
            if version != flow.version:
                continue
            _, _, delivery = heapq.heappop(flow.heap)
            delivery.queued = False
            progress = delivery.write(limit)
            if progress is Progress.MORE:
                self.ready(delivery)
                return True
            if progress is Progress.BLOCKED:
                self._blocked.append(delivery)
            self.offer(flow)
        return False

    def forget(self, flow: Flow) -> None:
        """The request is over: drop what its flow still had queued."""
        for _, _, delivery in flow.heap:
            delivery.queued = False
        flow.heap.clear()
        flow.version += 1
        self._blocked = [d for d in self._blocked if d.flow is not flow]
