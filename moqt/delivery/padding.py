"""Padding (MOQT "Padding"): octets that mean nothing, sent when nothing else is to be sent."""

from __future__ import annotations

from moqt.delivery.scheduler import Delivery, Flow, Progress
from moqt.delivery.stream import Outlet
from moqt.values.codes import StreamErrorCode

LAST = 256
"""Behind every subscriber and publisher priority."""

_PIECE = bytes(16 * 1024)


class PaddingDelivery(Delivery):
    """`octets` zero octets on a padding stream. Only for a peer known to take padding."""

    def __init__(self, outlet: Outlet, octets: int) -> None:
        super().__init__(Flow(outlet.scheduler, LAST))
        self.outlet = outlet
        self.left = octets
        self.stream_id: int | None = None

    def begin(self) -> None:
        self.outlet.scheduler.ready(self)
        self.outlet.transport.wake()

    def rank(self) -> tuple[int, ...]:
        return (LAST,)

    def write(self, limit: int) -> Progress:
        transport = self.outlet.transport
        if self.stream_id is None:
            self.stream_id = transport.open_stream(bidirectional=False)
            if self.stream_id is None:
                return Progress.NO_STREAM
            transport.send(self.stream_id, self.outlet.codec.encode_padding_header())
        size = min(limit, self.left, len(_PIECE), transport.send_room(self.stream_id))
        if size <= 0 < self.left:
            return Progress.BLOCKED
        self.left -= size
        transport.send(self.stream_id, memoryview(_PIECE)[:size], fin=not self.left)
        return Progress.MORE if self.left else Progress.DONE

    def stop(self) -> None:
        """Reset the stream, which padding may be at any time."""
        self.outlet.scheduler.forget(self.flow)
        if self.stream_id is not None and self.left:
            self.outlet.transport.reset(self.stream_id, StreamErrorCode.CANCELLED)
            self.outlet.scheduler.stream_over(self.stream_id)
        self.left = 0
