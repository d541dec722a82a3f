"""What every delivery has in common: one stream of Objects out of a TrackStore."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from moqt.delivery.scheduler import Delivery, Flow, Progress, Scheduler
from moqt.quic.transport import Transport
from moqt.track.store import TrackStore
from moqt.track.stored import StoredObject, SubgroupLog
from moqt.values.codes import StreamErrorCode
from moqt.wire.codec import Codec

SHORT_PART = 256
"""Octets up to which the first part of a payload is copied behind the Object's header."""


class Outlet(Protocol):
    """What a delivery needs of its session."""

    transport: Transport
    codec: Codec
    scheduler: Scheduler

    def open_data_stream(self, delivery: StreamDelivery) -> int | None: ...

    def data_stream_closed(self, stream_id: int) -> None: ...


class Served(Protocol):
    """What a Subgroup or a datagram on its way out needs of its subscription."""

    outlet: Outlet
    flow: Flow
    track_alias: int

    def subgroup_opened(self) -> None:
        """A stream was opened."""

    def subgroup_done(self, log: SubgroupLog) -> None:
        """Its delivery is over: nothing more of it is sent."""

    def subgroup_broken(self, log: SubgroupLog, position: int) -> None:
        """The upstream stream was reset: the delivery is over, the rest may come later.

        Object IDs up to `position` are dealt with.
        """

    def datagram_done(self) -> None:
        """A datagram was sent or dropped."""


class StreamDelivery(Delivery):
    """A delivery that owns one unidirectional stream at a time."""

    def __init__(self, outlet: Outlet, flow: Flow, store: TrackStore) -> None:
        super().__init__(flow)
        self.outlet = outlet
        self.store = store
        self.current: StoredObject | None = None
        self.offset = 0
        self.over = False
        self.left = 0
        """Octets that the `write` under way may hand over still; a subclass that has to be ranked
        anew before its next Object sets it to 0."""

    def write(self, limit: int) -> Progress:
        self.left = limit
        while True:
            progress = self.write_object()
            if progress is not Progress.MORE or self.left <= 0:
                break
        self.wrote = self.left < limit
        return progress

    @abstractmethod
    def write_object(self) -> Progress:
        """Go on with the Object in hand, or begin the next one, by `send_object`."""

    def wake(self) -> None:
        if not self.over and not self.queued:
            self.outlet.scheduler.ready(self)
            # The store may be filled by another session: this one has to be told to send.
            self.outlet.transport.wake()

    def flushed(self) -> bool:
        """Whether what was written has arrived, so that a reset does not take it back: the
        Objects, and the header, which lets the peer know what was reset."""
        return self.stream_id is None or self.outlet.transport.acknowledged(self.stream_id)

    def reset(self, code: StreamErrorCode) -> None:
        """Reset the stream, if one is open."""
        self.current = None
        if self.stream_id is not None:
            stream_id, self.stream_id = self.stream_id, None
            self.outlet.transport.reset(stream_id, code)
            self.outlet.scheduler.stream_over(stream_id)
            self.outlet.data_stream_closed(stream_id)

    def finish(self) -> None:
        if self.stream_id is not None:
            stream_id, self.stream_id = self.stream_id, None
            self.outlet.transport.send(stream_id, b"", fin=True)
            self.outlet.scheduler.stream_over(stream_id)
            self.outlet.data_stream_closed(stream_id)

    def send_object(self, stored: StoredObject, head: bytes) -> Progress:
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
        self.left -= len(head)
        return self.send_current()

    def send_current(self) -> Progress:
        """Send some of the Object in hand; WAITING when it has not grown that far yet."""
        stored, stream_id = self.current, self.stream_id
        assert stored is not None and stream_id is not None
        transport = self.outlet.transport
        if self.offset < stored.length:
            room = transport.send_room(stream_id)
            while self.offset < stored.length:
                if self.left <= 0:
                    return Progress.MORE
                if room <= 0:
                    return Progress.BLOCKED
                part = stored.read(self.offset, min(self.left, room))
                if not part:
                    return Progress.WAITING
                size = len(part)
                transport.send(stream_id, part)
                self.offset += size
                room -= size
                self.left -= size
        self.current = None
        return Progress.MORE
