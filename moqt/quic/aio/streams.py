"""One stream: what waits to be sent, what was received, and the account of its credit."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from aioquic.quic import events
from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.stream import QuicStream, QuicStreamSender

from moqt.quic.aio.reassembly import StreamReceiver
from moqt.quic.packets.layout import varint
from moqt.quic.windows import NO_MARK

_NOTHING = memoryview(b"")


class Turns(Protocol):
    """Where the streams of a connection wait for their turn to send, by stream id."""

    unsent: int
    """Octets over all streams that no packet has carried yet."""

    def queue_new(self, stream_id: int) -> None:
        """It has data, or a FIN, that was never sent."""

    def queue_lost(self, stream_id: int) -> None:
        """Data of it was lost."""

    def queue_control(self, stream_id: int) -> None:
        """It has a RESET_STREAM or STOP_SENDING to send."""

    def dequeue(self, stream_id: int) -> None:
        """No more STREAM frames for it."""

    def sent_all(self, stream_id: int) -> None:
        """The peer has all of it."""

    def finish(self, stream_id: int) -> None:
        """Forget it if both of its directions are over."""


class StreamSender(QuicStreamSender):
    """The sending part of a stream, over the application's own buffers.

    `_chunks` are views of what `write` was given, `_starts` their stream offsets; a chunk is
    let go when all of it is acknowledged. New data is read at a cursor, lost ranges are found
    by bisection, so no call costs more with more data queued.
    """

    def __init__(self, turns: Turns, stream_id: int, writable: bool) -> None:
        super().__init__(stream_id=stream_id, writable=writable)
        self._turns = turns
        self._id = stream_id
        self._chunks: list[memoryview] = []
        self._starts: list[int] = []
        self._released = 0  # chunks let go at the front of both lists
        self._cursor = 0  # the chunk that holds `highest_offset`
        self._lost = RangeSet()

    @property
    def unsent(self) -> int:
        return 0 if self._reset_error_code is not None else self._buffer_stop - self.highest_offset

    @property
    def acknowledged(self) -> bool:
        """Whether the peer has all that was written."""
        return self._reset_error_code is not None or self._buffer_start == self._buffer_stop

    @property
    def has_new(self) -> bool:
        """Whether there is data, or a FIN, that was never sent or whose FIN was lost."""
        return self._reset_error_code is None and (
            self._buffer_stop > self.highest_offset or self._pending_eof
        )

    @property
    def has_lost(self) -> bool:
        return self._reset_error_code is None and len(self._lost) > 0

    @property
    def next_lost(self) -> int:
        """Where the first lost range begins; 0 if there is none."""
        return self._lost[0].start if len(self._lost) else 0

    @property
    def lost_in_a_row(self) -> int:
        """The octets of the first lost range; there must be one."""
        return len(self._lost[0])

    @property
    def failed(self) -> bool:
        return self._reset_error_code is not None

    def write(self, data: bytes | bytearray | memoryview, end_stream: bool = False) -> None:
        if self._buffer_fin is not None:
            raise RuntimeError("cannot send on a stream after its end")
        if self._reset_error_code is not None:
            return
        view = data if type(data) is memoryview else memoryview(data)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        size = len(view)
        if size:
            self._chunks.append(view)
            self._starts.append(self._buffer_stop)
            self._buffer_stop += size
            self._turns.unsent += size
        if end_stream:
            self._buffer_fin = self._buffer_stop
            self._pending_eof = True
        self.buffer_is_empty = False
        self._turns.queue_new(self._id)

    def take_new(
        self, max_size: int, max_offset: int
    ) -> tuple[int, int, bool, list[memoryview]] | None:
        """The next `(offset, length, fin, pieces)` never sent before, or None when blocked."""
        start = self.highest_offset
        stop = start + max_size
        if stop > max_offset:
            stop = max_offset
        if stop > self._buffer_stop:
            stop = self._buffer_stop
        pieces: list[memoryview] = []
        if stop <= start:
            # A FIN alone needs no credit, but all octets before it must have gone.
            if not (self._pending_eof and start == self._buffer_stop):
                return None
            stop = start
        else:
            pieces, self._cursor = self._pieces(self._cursor, start, stop)
            self._turns.unsent -= stop - start
            self.highest_offset = stop
        fin = stop == self._buffer_fin
        if fin:
            self._pending_eof = False
        return start, stop - start, fin, pieces

    def take_lost(self, max_size: int) -> tuple[int, int, bool, list[memoryview]]:
        """The first lost range, as `take_new`; there must be one."""
        lost = self._lost[0]
        start, stop = lost.start, min(lost.stop, lost.start + max_size)
        self._lost.subtract(start, stop)
        index = bisect.bisect_right(self._starts, start) - 1
        pieces, _ = self._pieces(index, start, stop)
        fin = stop == self._buffer_fin
        if fin:
            self._pending_eof = False
        return start, stop - start, fin, pieces

    def _pieces(self, index: int, start: int, stop: int) -> tuple[list[memoryview], int]:
        """The views of [start, stop), which begins in chunk `index`, and the chunk after it."""
        chunks, starts = self._chunks, self._starts
        pieces = []
        while True:
            chunk, base = chunks[index], starts[index]
            end = base + len(chunk)
            if stop < end:
                pieces.append(chunk[start - base : stop - base])
                return pieces, index
            pieces.append(chunk[start - base :] if start > base else chunk)
            index += 1
            if stop == end:
                return pieces, index
            start = end

    def _release(self, upto: int) -> None:
        """Let go the chunks that end at or before `upto`."""
        self._buffer_start = upto
        chunks, starts, index = self._chunks, self._starts, self._released
        while index < len(chunks) and starts[index] + len(chunks[index]) <= upto:
            # Not deleted yet (that would move the rest): an empty view drops the reference.
            starts[index] += len(chunks[index])
            chunks[index] = _NOTHING
            index += 1
        if index > 32 and index * 2 > len(chunks):
            del chunks[:index], starts[:index]
            self._cursor -= index
            index = 0
        self._released = index

    def on_data_delivery(
        self, delivery: QuicDeliveryState, start: int, stop: int, fin: bool
    ) -> None:
        if self._reset_error_code is not None:
            return
        if delivery is QuicDeliveryState.ACKED:
            if stop > start:
                if start == self._buffer_start and not len(self._acked):
                    self._release(stop)
                else:
                    self._acked.add(start, stop)
                    first = self._acked[0]
                    if first.start == self._buffer_start:
                        self._acked.shift()
                        self._release(first.stop)
            if fin:
                self._acked_fin = True
            if self._acked_fin and self._buffer_start == self._buffer_fin:
                self.is_finished = True
                self._turns.sent_all(self._id)
        else:
            if stop > start:
                self._lost.add(start, stop)
                self._turns.queue_lost(self._id)
            elif fin:
                self._pending_eof = True
                self._turns.queue_new(self._id)
            self.buffer_is_empty = False

    def on_reset_delivery(self, delivery: QuicDeliveryState) -> None:
        super().on_reset_delivery(delivery)
        if self.is_finished:
            self._turns.finish(self._id)
        else:
            self._turns.queue_control(self._id)

    def reset(self, error_code: int) -> None:
        if self._reset_error_code is None and not self.is_finished:
            self._turns.unsent -= self.unsent
            super().reset(error_code)
            self._drop()
            self._turns.dequeue(self._id)
            self._turns.queue_control(self._id)

    def abandon(self) -> None:
        """Let everything go: the connection is over."""
        if self._reset_error_code is None:
            self._reset_error_code = 0
        self._drop()

    def _drop(self) -> None:
        self._chunks.clear()
        self._starts.clear()
        self._released = self._cursor = 0
        self._lost = RangeSet()


class Rank(IntEnum):
    """Whose octets go first (MOQT "Priorities")."""

    CONTROL = 0
    REQUEST = 1
    """Bidirectional streams."""
    DATA = 2


@dataclass(frozen=True, slots=True)
class SendingFinished(events.QuicEvent):
    """The peer has acknowledged all of a watched stream, its FIN included."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class PathNarrowed(events.QuicEvent):
    """Packets of `octets` no longer pass."""

    octets: int


class Stream(QuicStream):
    """aioquic's stream with our sender and receiver and the account of its receive credit."""

    def __init__(
        self,
        turns: Turns,
        stream_id: int,
        *,
        max_stream_data_local: int,
        max_stream_data_remote: int,
        readable: bool,
        writable: bool,
    ) -> None:
        super().__init__(
            stream_id=stream_id,
            max_stream_data_local=max_stream_data_local,
            max_stream_data_remote=max_stream_data_remote,
            readable=readable,
            writable=writable,
        )
        self.id = stream_id
        self.id_octets = varint(stream_id)
        self.rank = Rank.DATA if stream_id & 2 else Rank.REQUEST
        self.out = StreamSender(turns, stream_id, writable)
        self.sender = self.out
        self.inbox = StreamReceiver(stream_id, readable)
        self.receiver = self.inbox
        self.served = 0  # octets sent in this turn
        self.delivered = 0  # the offset up to which the handler has the data
        self.credited = 0  # the offset up to which it counts as consumed
        self.window = max_stream_data_local
        """Octets beyond what the handler has that the peer may send."""
        self.lent = 0
        """Octets of the session's window that it may hold; 0 before it has used a part of its own
        and was never paused."""
        self.mark = NO_MARK
        self.paused = False
        self.stopped = False
        self.settled = not readable  # the handler knows how the receiving direction ended

    @property
    def send_room(self) -> int:
        """Octets the peer's stream credit leaves beyond what was already given to `write`."""
        return max(0, int(self.max_stream_data_remote) - self.out._buffer_stop)
