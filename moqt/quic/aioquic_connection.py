"""aioquic's connection, made fit for bulk transfer. Only `moqt.quic.aioquic` uses this module.

`Connection` is aioquic's sans-IO `QuicConnection` with four parts replaced, because the stock
ones do not hold up under bulk transfer:

- flow-control credit follows what the application consumed, in fixed windows; stock aioquic
  doubles its windows by the highest offset received, so a receiver can never push back;
- streams wait in queues of those that have something to say, and payloads are referenced, not
  copied; stock aioquic visits every stream for every packet and moves its whole buffer per ACK;
- 1-RTT packets that carry only STREAM frames (nearly all of them) are built and read without
  the general packet builder and buffer, with the header-protection masks of a whole batch
  computed at once;
- the pacer releases what is due within a timer tick.

No socket and no clock in here.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from typing import Any

from aioquic import tls
from aioquic._buffer import Buffer
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import (
    Limit,
    QuicConnection,
    QuicConnectionError,
    QuicConnectionState,
    QuicNetworkPath,
    QuicReceiveContext,
    stream_is_client_initiated,
    stream_is_unidirectional,
)
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicFrameType,
    QuicPacketType,
    QuicStreamFrame,
    decode_packet_number,
)
from aioquic.quic.packet_builder import (
    QuicDeliveryState,
    QuicPacketBuilder,
    QuicPacketBuilderStop,
)
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketPacer, QuicPacketSpace
from aioquic.quic.stream import (
    FinalSizeError,
    QuicStream,
    QuicStreamSender,
    StreamFinishedError,
)
from cryptography.exceptions import InvalidTag

from moqt.quic.config import QuicConfig

log = logging.getLogger(__name__)

Address = tuple[Any, ...]
Datagram = tuple[bytes, Address]

CID_LENGTH = 8
TAG_LENGTH = 16
PN_LENGTH = 2
SAMPLE_LENGTH = 16

SHORT_OVERHEAD = 1 + CID_LENGTH + PN_LENGTH + TAG_LENGTH
"""Octets of a 1-RTT packet that are not frames."""

ACK_EVERY = 32
"""Packets after which an ACK no longer waits for the ACK timer."""

BURST = 256 << 10
"""Octets built before they go to the socket: the peer reads while we build the next ones."""

MIN_STREAM_ROOM = 64
"""A packet with less room left than this does not begin another STREAM frame."""

TURN = 64 << 10
"""Octets a stream sends before the next one that waits has its turn."""

MAX_FRAME_DATA = 0x3FFF - 64
"""What a two-octet STREAM length (and the packet around it) can carry."""

KEY_UPDATE_PACKETS = 1 << 22
"""Half the confidentiality limit of AES-GCM (RFC 9001 section 6.6); aioquic never updates."""

PACER_TICK = 0.002
"""Event loops wake at best every millisecond: a pacer must let a tick's worth go at once."""

_CLOSED_STATES = frozenset(
    (QuicConnectionState.CLOSING, QuicConnectionState.DRAINING, QuicConnectionState.TERMINATED)
)


def _varint(value: int) -> bytes:
    if value < 0x40:
        return value.to_bytes(1, "big")
    if value < 0x4000:
        return (value | 0x4000).to_bytes(2, "big")
    if value < 0x40000000:
        return (value | 0x80000000).to_bytes(4, "big")
    return (value | 0xC000000000000000).to_bytes(8, "big")


# --------------------------------------------------------------------------- sending streams


class StreamSender(QuicStreamSender):
    """The sending part of a stream, over the application's own buffers.

    `_chunks` are views of what `write` was given, `_starts` their stream offsets; a chunk is
    let go when all of it is acknowledged. New data is read at a cursor, lost ranges are found
    by bisection, so no call costs more with more data queued.
    """

    def __init__(self, connection: Connection, stream_id: int, writable: bool) -> None:
        super().__init__(stream_id=stream_id, writable=writable)
        self._connection = connection
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
    def has_new(self) -> bool:
        """Whether there is data, or a FIN, that was never sent or whose FIN was lost."""
        return self._reset_error_code is None and (
            self._buffer_stop > self.highest_offset or self._pending_eof
        )

    @property
    def has_lost(self) -> bool:
        return self._reset_error_code is None and len(self._lost) > 0

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
            self._connection.unsent += size
        if end_stream:
            self._buffer_fin = self._buffer_stop
            self._pending_eof = True
        self.buffer_is_empty = False
        self._connection.queue_new(self._id)

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
            self._connection.unsent -= stop - start
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
                self._connection.finish(self._id)
        else:
            if stop > start:
                self._lost.add(start, stop)
                self._connection.queue_lost(self._id)
            elif fin:
                self._pending_eof = True
                self._connection.queue_new(self._id)
            self.buffer_is_empty = False

    def on_reset_delivery(self, delivery: QuicDeliveryState) -> None:
        super().on_reset_delivery(delivery)
        if self.is_finished:
            self._connection.finish(self._id)
        else:
            self._connection.queue_control(self._id)

    def reset(self, error_code: int) -> None:
        if self._reset_error_code is None and not self.is_finished:
            self._connection.unsent -= self.unsent
            super().reset(error_code)
            self._drop()
            self._connection.dequeue(self._id)
            self._connection.queue_control(self._id)

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


_NOTHING = memoryview(b"")


class Stream(QuicStream):
    """aioquic's stream with our sender and the account of its receive credit."""

    def __init__(
        self,
        connection: Connection,
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
        self.id_octets = _varint(stream_id)
        self.out = StreamSender(connection, stream_id, writable)
        self.sender = self.out
        self.served = 0  # octets sent in this turn
        self.delivered = 0  # the offset up to which the handler has the data
        self.credited = 0  # the offset up to which it counts as consumed
        self.paused = False
        self.stopped = False
        self.settled = not readable  # the handler knows how the receiving direction ended

    @property
    def send_room(self) -> int:
        """Octets the peer's stream credit leaves beyond what was already given to `write`."""
        return max(0, int(self.max_stream_data_remote) - self.out._buffer_stop)


class _SentPacket:
    """`QuicSentPacket` for a 1-RTT packet of STREAM frames, without a dict and default lists."""

    __slots__ = (
        "delivery_handlers",
        "packet_number",
        "quic_logger_frames",
        "sent_bytes",
        "sent_time",
    )
    epoch = tls.Epoch.ONE_RTT
    in_flight = True
    is_ack_eliciting = True
    is_crypto_packet = False
    packet_type = QuicPacketType.ONE_RTT

    def __init__(
        self, packet_number: int, sent_bytes: int, delivery_handlers: list[tuple[Any, Any]]
    ) -> None:
        self.packet_number = packet_number
        self.sent_bytes = sent_bytes
        self.sent_time: float | None = None
        self.delivery_handlers = delivery_handlers
        self.quic_logger_frames: list[Any] = []


class _Pacer(QuicPacketPacer):
    """aioquic's pacer with the gain of RFC 9002 section 7.7 and bursts of a timer tick."""

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        super().update_rate(congestion_window * 5 // 4, smoothed_rtt)
        self.bucket_max = max(self.bucket_max, PACER_TICK)

    def allowance(self, now: float) -> int:
        """How many packets may go now."""
        if self.packet_time is None:
            return 1 << 30
        self.update_bucket(now=now)
        if self.bucket_time <= 0:
            return 0
        return int(self.bucket_time / self.packet_time) + 1

    def spend(self, packets: int) -> None:
        if self.packet_time is not None:
            self.bucket_time = max(0.0, self.bucket_time - packets * self.packet_time)


# ------------------------------------------------------------------------------ connection


class Connection(QuicConnection):
    """aioquic's connection with credit by consumption and short paths for bulk data."""

    def __init__(
        self,
        *,
        configuration: QuicConfiguration,
        config: QuicConfig,
        original_destination_connection_id: bytes | None = None,
    ) -> None:
        super().__init__(
            configuration=configuration,
            original_destination_connection_id=original_destination_connection_id,
        )
        self.config = config
        self.unsent = 0
        self.consumed = 0  # octets the application is done with, over all streams
        self.close_datagrams: list[Datagram] = []
        self._local_max_streams_bidi.value = config.max_streams_bidi
        self._local_max_streams_bidi.sent = config.max_streams_bidi
        self._local_max_streams_uni.value = config.max_streams_uni
        self._local_max_streams_uni.sent = config.max_streams_uni
        self._loss._pacer = _Pacer(max_datagram_size=self._max_datagram_size)
        self._pacer: _Pacer = self._loss._pacer
        # Streams with something to send, in the order in which they get their turn. Requests
        # and control messages travel on bidirectional streams and must not wait behind data.
        self._lost_queue: dict[int, Stream] = {}
        self._bidi_queue: dict[int, Stream] = {}
        self._uni_queue: dict[int, Stream] = {}
        self._queues = (self._lost_queue, self._bidi_queue, self._uni_queue)
        self._control_queue: dict[int, Stream] = {}  # STOP_SENDING or RESET_STREAM
        self._credit_queue: dict[int, Stream] = {}  # MAX_STREAM_DATA
        self._again: Stream | None = None  # its turn is over, but it has more
        self.capped = False  # the last transmission ended at BURST: more can go at once
        self._unacknowledged = 0
        self._packets_under_key = 0
        self.key_updates = 0  # that we began
        self.datagram_backlog = 0  # octets of DATAGRAMs that wait

    # ---- what the transport asks

    @property
    def over(self) -> bool:
        return self._state in _CLOSED_STATES or self._close_pending

    @property
    def close_event(self) -> events.ConnectionTerminated | None:
        return self._close_event

    @property
    def terminated(self) -> bool:
        return self._state is QuicConnectionState.TERMINATED

    @property
    def closing(self) -> bool:
        return self._state is QuicConnectionState.CLOSING

    @property
    def heard_from_peer(self) -> bool:
        return self._state is not QuicConnectionState.FIRSTFLIGHT

    def stream(self, stream_id: int) -> Stream | None:
        stream: Stream | None = self._streams.get(stream_id)  # type: ignore[assignment]
        return stream

    def open_stream(self, bidirectional: bool) -> int | None:
        if bidirectional:
            stream_id, limit = self._local_next_stream_id_bidi, self._remote_max_streams_bidi
        else:
            stream_id, limit = self._local_next_stream_id_uni, self._remote_max_streams_uni
        if self.over or stream_id // 4 >= limit:
            return None
        self._get_or_create_stream_for_send(stream_id)
        return stream_id

    def max_datagram_payload(self) -> int:
        """The largest DATAGRAM that fits a packet of its own and the peer's limit; 0 for none."""
        if not self._remote_max_datagram_frame_size:
            return 0
        frame = min(self._remote_max_datagram_frame_size, self._max_datagram_size - SHORT_OVERHEAD)
        return max(0, frame - 3)

    # ---- queues

    def queue_new(self, stream_id: int) -> None:
        stream = self.stream(stream_id)
        if stream is not None:
            queue = self._uni_queue if stream_id & 2 else self._bidi_queue
            queue.setdefault(stream_id, stream)

    def queue_lost(self, stream_id: int) -> None:
        stream = self.stream(stream_id)
        if stream is not None:
            self._lost_queue.setdefault(stream_id, stream)

    def queue_control(self, stream_id: int) -> None:
        stream = self.stream(stream_id)
        if stream is not None:
            self._control_queue[stream_id] = stream

    def dequeue(self, stream_id: int) -> None:
        """No more STREAM frames for the stream."""
        for queue in self._queues:
            queue.pop(stream_id, None)

    def finish(self, stream_id: int) -> None:
        """Forget the stream if both of its directions are over."""
        stream = self.stream(stream_id)
        if stream is None or not stream.settled or not stream.is_finished:
            return
        del self._streams[stream_id]
        for queue in (*self._queues, self._control_queue, self._credit_queue):
            queue.pop(stream_id, None)
        if stream_is_client_initiated(stream_id) != self._is_client:
            # RFC 9000 section 4.6: the peer may open a new one for each that closes.
            self._stream_limit(stream_id).value += 1

    def settle(self, stream: Stream) -> None:
        """The handler has been told how the receiving direction ended."""
        stream.settled = True
        self.finish(stream.id)

    def drop_streams(self) -> None:
        """The connection is over: let the application's buffers go."""
        for stream in self._streams.values():
            stream.sender.abandon()  # type: ignore[attr-defined]
        for queue in (*self._queues, self._control_queue, self._credit_queue):
            queue.clear()
        self._datagrams_pending.clear()
        self.datagram_backlog = 0
        self.unsent = 0

    # ---- receive credit

    def consume(self, stream: Stream, upto: int) -> None:
        """Everything before `upto` on the stream no longer occupies the session's window."""
        if upto <= stream.credited:
            return
        self.consumed += upto - stream.credited
        stream.credited = upto
        window, limit = self.config.session_window, self._local_max_data
        if self.consumed + window - limit.value >= window >> 2:
            limit.value = self.consumed + window

    def grant(self, stream: Stream) -> None:
        """Raise the stream's limit if a quarter of its window has been used up."""
        window = self.config.stream_window
        limit = stream.delivered + window
        if (
            limit - stream.max_stream_data_local >= window >> 2
            and stream.receiver._final_size is None
            and not stream.stopped
        ):
            stream.max_stream_data_local = limit
            self._credit_queue[stream.id] = stream

    def _write_connection_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace) -> None:
        for limit in (
            self._local_max_data,
            self._local_max_streams_bidi,
            self._local_max_streams_uni,
        ):
            if self._limit_is_due(limit):
                buf = builder.start_frame(
                    limit.frame_type,
                    capacity=9,
                    handler=self._on_connection_limit_delivery,
                    handler_args=(limit,),
                )
                buf.push_uint_var(limit.value)
                limit.sent = limit.value

    def _limit_is_due(self, limit: Limit) -> bool:
        if limit.value == limit.sent:
            return False
        # MAX_STREAMS waits until the peer has fewer streams left than the update would grant.
        return limit is self._local_max_data or limit.sent - limit.used < limit.value - limit.sent

    def _write_stream_limits(
        self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream
    ) -> None:
        buf = builder.start_frame(
            QuicFrameType.MAX_STREAM_DATA,
            capacity=17,
            handler=self._on_max_stream_data_delivery,
            handler_args=(stream,),
        )
        buf.push_uint_var(stream.stream_id or 0)
        buf.push_uint_var(stream.max_stream_data_local)
        stream.max_stream_data_local_sent = stream.max_stream_data_local

    def _on_max_stream_data_delivery(self, delivery: QuicDeliveryState, stream: QuicStream) -> None:
        if (
            delivery is not QuicDeliveryState.ACKED
            and isinstance(stream, Stream)
            and stream.receiver._final_size is None
            and not stream.stopped
            and stream.id in self._streams
        ):
            self._credit_queue[stream.id] = stream

    def _write_stop_sending_frame(self, builder: QuicPacketBuilder, stream: QuicStream) -> None:
        buf = builder.start_frame(
            QuicFrameType.STOP_SENDING,
            capacity=17,
            handler=self._on_stop_sending_delivery,
            handler_args=(stream,),
        )
        frame = stream.receiver.get_stop_frame()
        buf.push_uint_var(frame.stream_id)
        buf.push_uint_var(frame.error_code)

    def _on_stop_sending_delivery(self, delivery: QuicDeliveryState, stream: Stream) -> None:
        if delivery is not QuicDeliveryState.ACKED and not stream.receiver.is_finished:
            stream.receiver.stop_pending = True
            self.queue_control(stream.id)

    def stop_receiving(self, stream: Stream, code: int) -> None:
        if stream.settled:
            # Its end was delivered (or it never was ours to read): only the account is open.
            self.consume(stream, stream.delivered)
            return
        stream.stopped = True
        self._credit_queue.pop(stream.id, None)
        self.consume(stream, stream.receiver.highest_offset)
        if stream.receiver._final_size is not None:
            self._end_receiving(stream)
        else:
            stream.receiver.stop(code)
            stream.receiver._buffer.clear()
            self._control_queue[stream.id] = stream

    def _end_receiving(self, stream: Stream) -> None:
        receiver = stream.receiver
        receiver.is_finished = True
        receiver._buffer.clear()
        self.settle(stream)

    # ---- streams

    def _get_or_create_stream(self, frame_type: int, stream_id: int) -> QuicStream:
        stream = self._streams.get(stream_id)
        if stream is not None:
            return stream
        if self._stream_is_discarded(stream_id):
            raise StreamFinishedError
        if stream_is_client_initiated(stream_id) == self._is_client:
            raise QuicConnectionError(
                QuicErrorCode.STREAM_STATE_ERROR, frame_type, "Wrong stream initiator"
            )
        limit = self._stream_limit(stream_id)
        count = stream_id // 4 + 1
        if count > limit.value:
            raise QuicConnectionError(
                QuicErrorCode.STREAM_LIMIT_ERROR, frame_type, "Too many streams open"
            )
        unidirectional = stream_is_unidirectional(stream_id)
        # Opening a stream opens all lower-numbered ones of its type (RFC 9000 section 2.1).
        for new_id in range(limit.used * 4 + stream_id % 4, stream_id + 4, 4):
            stream = self._streams[new_id] = Stream(
                self,
                new_id,
                max_stream_data_local=(
                    self._local_max_stream_data_uni
                    if unidirectional
                    else self._local_max_stream_data_bidi_remote
                ),
                max_stream_data_remote=(
                    0 if unidirectional else self._remote_max_stream_data_bidi_local
                ),
                readable=True,
                writable=not unidirectional,
            )
        limit.used = count
        assert stream is not None
        return stream

    def _get_or_create_stream_for_send(self, stream_id: int) -> QuicStream:
        stream = self._streams.get(stream_id)
        if stream is not None:
            return stream
        if self._stream_is_discarded(stream_id):
            raise ValueError("cannot send on a finished stream")
        if stream_is_client_initiated(stream_id) != self._is_client:
            raise ValueError("cannot send on an unknown stream of the peer's")
        unidirectional = stream_is_unidirectional(stream_id)
        stream = self._streams[stream_id] = Stream(
            self,
            stream_id,
            max_stream_data_local=0 if unidirectional else self._local_max_stream_data_bidi_local,
            max_stream_data_remote=(
                self._remote_max_stream_data_uni
                if unidirectional
                else self._remote_max_stream_data_bidi_remote
            ),
            readable=not unidirectional,
            writable=True,
        )
        if unidirectional:
            self._local_next_stream_id_uni = stream_id + 4
        else:
            self._local_next_stream_id_bidi = stream_id + 4
        return stream

    # ---- receiving

    def receive_batch(self, datagrams: Sequence[bytes], addr: Address, now: float) -> None:
        """`receive_datagram` for several datagrams from one address, in order."""
        index, count = 0, len(datagrams)
        while index < count and self._state not in _CLOSED_STATES and not self._close_pending:
            if self._handshake_confirmed:
                path = self._network_paths[0]
                if path.addr == addr and path.is_validated:
                    index = self._receive_short(datagrams, index, path, now)
                    if index >= count:
                        break
            self.receive_datagram(datagrams[index], addr, now)
            self._unacknowledged += 1
            index += 1
        if self._unacknowledged >= ACK_EVERY and not self.over:
            space = self._spaces[tls.Epoch.ONE_RTT]
            if space.ack_at is not None:
                space.ack_at = now

    def _receive_short(
        self, datagrams: Sequence[bytes], index: int, path: QuicNetworkPath, now: float
    ) -> int:
        """Read the run of 1-RTT packets to our current connection id that begins at `index`.

        Returns the index of the first datagram that needs the general path.
        """
        cid = self.host_cid
        cid_end = 1 + len(cid)
        sample_at = cid_end + 4
        sample_end = sample_at + SAMPLE_LENGTH
        stop, count = index, len(datagrams)
        samples = []
        while stop < count:
            data = datagrams[stop]
            if len(data) < sample_end or data[0] & 0xC0 != 0x40 or data[1:cid_end] != cid:
                break
            samples.append(data[sample_at:sample_end])
            stop += 1
        if not samples:
            return index

        keys = self._cryptos[tls.Epoch.ONE_RTT].recv
        if keys.aead is None or keys.hp is None:
            return index
        masks = _masks(keys.hp, samples)
        phase = keys.key_phase << 2
        iv, decrypt = keys.aead._iv, keys.aead._aead.decrypt
        space = self._spaces[tls.Epoch.ONE_RTT]
        received, ack_queue = space.received_packets, space.ack_queue
        expected = space.expected_packet_number
        largest = space.largest_received_packet
        base = index
        accepted = 0
        gap = False
        run_start = run_stop = -1  # packet numbers received but not yet in the ACK queue

        try:
            while index < stop:
                data = datagrams[index]
                offset = (index - base) * SAMPLE_LENGTH
                first = data[0] ^ (masks[offset] & 0x1F)
                if first & 0x04 != phase:
                    return index  # the peer updates its keys: the general path follows
                if first & 0x03 == 1:
                    head = cid_end + 2
                    truncated = (data[cid_end] ^ masks[offset + 1]) << 8 | (
                        data[cid_end + 1] ^ masks[offset + 2]
                    )
                    number = decode_packet_number(truncated, 16, expected)
                    header = b"%c%b%c%c" % (first, cid, truncated >> 8, truncated & 0xFF)
                else:
                    length = (first & 0x03) + 1
                    head = cid_end + length
                    octets = bytes(data[cid_end + i] ^ masks[offset + 1 + i] for i in range(length))
                    number = decode_packet_number(
                        int.from_bytes(octets, "big"), 8 * length, expected
                    )
                    header = b"%c%b%b" % (first, cid, octets)
                index += 1
                try:
                    plain = decrypt((iv ^ number).to_bytes(12, "big"), data[head:], header)
                except InvalidTag:
                    continue
                if number in received:
                    continue
                if first & 0x18:
                    self.close(
                        QuicErrorCode.PROTOCOL_VIOLATION,
                        QuicFrameType.PADDING,
                        "Reserved bits must be zero",
                    )
                    return count
                if number >= expected:
                    expected = space.expected_packet_number = number + 1

                try:
                    eliciting = self._frames_received(plain, cid, path, now)
                except QuicConnectionError as exc:
                    log.warning("%s", exc)
                    self.close(exc.error_code, exc.frame_type, exc.reason_phrase)
                if self._state in _CLOSED_STATES or self._close_pending:
                    return count

                accepted += 1
                received.add(number)
                if number == run_stop:
                    run_stop += 1
                else:
                    if run_start >= 0:
                        ack_queue.add(run_start, run_stop)
                        if len(ack_queue) > 60:  # aioquic keeps 64
                            ack_queue.shift()
                    run_start, run_stop = number, number + 1
                if number > largest:
                    gap = gap or number != largest + 1
                    largest = space.largest_received_packet = number
                    space.largest_received_time = now
                    self._spin_highest_pn = number
                    spin = bool(first & 0x20)
                    self._spin_bit = spin != self._is_client
                else:
                    gap = True
                if eliciting:
                    self._unacknowledged += 1
                    if space.ack_at is None:
                        space.ack_at = now + self._ack_delay
        finally:
            if run_start >= 0:
                ack_queue.add(run_start, run_stop)
                if len(ack_queue) > 60:
                    ack_queue.shift()
            if accepted and not self.over:
                self._close_at = now + self._idle_timeout()
                self._ack_eliciting_sent_since_receipt = False
        if gap and space.ack_at is not None:
            # RFC 9000 section 13.2.1: report reordering and loss at once.
            space.ack_at = now
        return index

    def _frames_received(
        self, plain: bytes, host_cid: bytes, path: QuicNetworkPath, now: float
    ) -> bool:
        """Handle the frames of a 1-RTT packet; whether it elicits an ACK."""
        pos, end = 0, len(plain)
        eliciting = False
        try:
            while pos < end:
                kind = plain[pos]
                if kind & 0xF8 != 0x08:
                    # Anything but STREAM: aioquic reads the rest of the packet. Frames after
                    # the first are mostly few, so the copy is small.
                    context = QuicReceiveContext(
                        epoch=tls.Epoch.ONE_RTT,
                        host_cid=host_cid,
                        network_path=path,
                        quic_logger_frames=None,
                        time=now,
                        version=None,
                    )
                    rest, _ = self._payload_received(context, plain[pos:] if pos else plain)
                    return eliciting or rest
                eliciting = True
                pos += 1
                size = 1 << (plain[pos] >> 6)
                stream_id = int.from_bytes(plain[pos : pos + size], "big")
                stream_id &= (1 << (8 * size - 2)) - 1
                pos += size
                offset = 0
                if kind & 4:
                    size = 1 << (plain[pos] >> 6)
                    offset = int.from_bytes(plain[pos : pos + size], "big")
                    offset &= (1 << (8 * size - 2)) - 1
                    pos += size
                if kind & 2:
                    size = 1 << (plain[pos] >> 6)
                    length = int.from_bytes(plain[pos : pos + size], "big")
                    length &= (1 << (8 * size - 2)) - 1
                    pos += size
                    stop = pos + length
                    if stop > end:
                        raise IndexError
                else:
                    stop = end
                if pos > end:
                    raise IndexError
                self._stream_received(kind, stream_id, offset, plain[pos:stop], bool(kind & 1))
                pos = stop
        except IndexError:
            raise QuicConnectionError(
                QuicErrorCode.FRAME_ENCODING_ERROR, kind, "Failed to parse frame"
            ) from None
        if not end:
            raise QuicConnectionError(
                QuicErrorCode.PROTOCOL_VIOLATION,
                QuicFrameType.PADDING,
                "Packet contains no frames",
            )
        return eliciting

    def _handle_stream_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        stream_id = buf.pull_uint_var()
        offset = buf.pull_uint_var() if frame_type & 4 else 0
        length = buf.pull_uint_var() if frame_type & 2 else buf.capacity - buf.tell()
        data = buf.pull_bytes(length)
        self._stream_received(frame_type, stream_id, offset, data, bool(frame_type & 1))

    def _stream_received(
        self, frame_type: int, stream_id: int, offset: int, data: bytes, fin: bool
    ) -> None:
        stream: Stream | None = self._streams.get(stream_id)  # type: ignore[assignment]
        if stream is None:
            self._assert_stream_can_receive(frame_type, stream_id)
            try:
                stream = self._get_or_create_stream(frame_type, stream_id)  # type: ignore[assignment]
            except StreamFinishedError:
                return
            assert stream is not None
        elif stream.max_stream_data_local == 0:
            self._assert_stream_can_receive(frame_type, stream_id)
        receiver = stream.receiver
        stop = offset + len(data)
        if stop > stream.max_stream_data_local:
            raise QuicConnectionError(
                QuicErrorCode.FLOW_CONTROL_ERROR, frame_type, "Over stream data limit"
            )
        grown = stop - receiver.highest_offset
        if grown > 0:
            limit = self._local_max_data
            if limit.used + grown > limit.value:
                raise QuicConnectionError(
                    QuicErrorCode.FLOW_CONTROL_ERROR, frame_type, "Over connection data limit"
                )
            limit.used += grown

        if (
            offset == receiver._buffer_start
            and data
            and not receiver._buffer
            and not fin
            and receiver._final_size is None
            and not receiver.is_finished
            and not stream.stopped
        ):
            # In order, nothing waiting: no need for the reassembly buffer.
            receiver._buffer_start = stop
            if grown > 0:
                receiver.highest_offset = stop
            self._events.append((stream, data, stop, False))  # type: ignore[arg-type]
            return

        if stream.stopped:
            self._discard_stopped(stream, frame_type, stop, fin)
            return
        try:
            event = receiver.handle_frame(QuicStreamFrame(data=data, fin=fin, offset=offset))
        except FinalSizeError as exc:
            raise QuicConnectionError(
                QuicErrorCode.FINAL_SIZE_ERROR, frame_type, str(exc)
            ) from None
        if event is not None:
            self._events.append(
                (stream, event.data, receiver._buffer_start, event.end_stream)  # type: ignore[arg-type]
            )

    def _discard_stopped(self, stream: Stream, frame_type: int, stop: int, fin: bool) -> None:
        """Octets nobody wants any more: only the final size still matters."""
        receiver = stream.receiver
        final = receiver._final_size
        if (
            (final is not None and (stop > final or (fin and stop != final)))
            or (fin and stop < receiver.highest_offset)
        ):  # fmt: skip
            raise QuicConnectionError(
                QuicErrorCode.FINAL_SIZE_ERROR, frame_type, "Cannot change final size"
            )
        receiver.highest_offset = max(receiver.highest_offset, stop)
        self.consume(stream, receiver.highest_offset)
        if fin:
            receiver._final_size = stop
            self._end_receiving(stream)

    def _handle_reset_stream_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        start = buf.tell()
        stream_id = buf.pull_uint_var()
        buf.seek(start)
        super()._handle_reset_stream_frame(context, frame_type, buf)
        stream = self.stream(stream_id)
        if stream is not None:
            # What the reset skipped, and what was waiting for a gap to close, will never be
            # consumed: it goes back to the session's window here.
            stream.receiver._buffer.clear()
            stream.paused = False
            self.consume(stream, stream.receiver.highest_offset)

    def _handle_stop_sending_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        start = buf.tell()
        stream_id = buf.pull_uint_var()
        buf.seek(start)
        stream = self.stream(stream_id)
        over = stream is not None and (stream.out.failed or stream.out.is_finished)
        super()._handle_stop_sending_frame(context, frame_type, buf)
        if over:
            self._events.pop()  # we had reset or finished it ourselves: nothing new

    def _handle_max_stream_data_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        start = buf.tell()
        stream_id = buf.pull_uint_var()
        buf.seek(start)
        super()._handle_max_stream_data_frame(context, frame_type, buf)
        stream = self.stream(stream_id)
        if stream is not None and stream.out.has_new:
            self.queue_new(stream_id)

    # ---- sending

    def datagrams_to_send(self, now: float) -> list[Datagram]:
        if not self._network_paths:
            return []
        closing = self._close_pending
        self.capped = False
        datagrams: list[Datagram] = super().datagrams_to_send(now)
        if closing and datagrams:
            self.close_datagrams = datagrams
        return datagrams

    def _write_ack_frame(
        self, builder: QuicPacketBuilder, space: QuicPacketSpace, now: float
    ) -> None:
        super()._write_ack_frame(builder, space, now)
        if space.is_application_data:
            self._unacknowledged = 0

    def _control_is_pending(
        self, space: QuicPacketSpace, network_path: QuicNetworkPath, now: float
    ) -> bool:
        """Whether anything but stream data waits to be sent."""
        return bool(
            (space.ack_at is not None and space.ack_at <= now)
            or self._control_queue
            or self._credit_queue
            or self._limit_is_due(self._local_max_data)
            or self._limit_is_due(self._local_max_streams_bidi)
            or self._limit_is_due(self._local_max_streams_uni)
            or self._datagrams_pending
            or self._ping_pending
            or self._probe_pending
            or self._handshake_done_pending
            or self._retire_connection_ids
            or network_path.remote_challenges
            or not self._crypto_streams[tls.Epoch.ONE_RTT].sender.buffer_is_empty
            or any(not cid.was_sent for cid in self._host_cids)
        )

    def _write_application(
        self, builder: QuicPacketBuilder, network_path: QuicNetworkPath, now: float
    ) -> None:
        crypto = self._cryptos[tls.Epoch.ONE_RTT]
        if not crypto.send.is_valid():
            return  # 0-RTT is not offered
        space = self._spaces[tls.Epoch.ONE_RTT]
        crypto_stream = self._crypto_streams[tls.Epoch.ONE_RTT]
        if self._packets_under_key >= KEY_UPDATE_PACKETS and self._handshake_confirmed:
            self._packets_under_key = 0
            self.key_updates += 1
            crypto.update_key()

        while True:
            if (
                self._handshake_confirmed
                and network_path.is_validated
                and not crypto._update_key_requested
                and not self._control_is_pending(space, network_path, now)
            ):
                self._write_stream_packets(builder, crypto, now)
                return

            # ACKs are not paced.
            if space.ack_at is None or space.ack_at > now:
                self._pacing_at = self._pacer.next_send_time(now=now)
                if self._pacing_at is not None:
                    return
            builder.start_packet(QuicPacketType.ONE_RTT, crypto)

            if space.ack_at is not None and space.ack_at <= now:
                self._write_ack_frame(builder=builder, space=space, now=now)

            if self._handshake_complete:
                if not (network_path.is_validated or network_path.local_challenge_sent):
                    self._write_path_challenge_frame(builder=builder, network_path=network_path)
                    if network_path.validation_deadline is None:
                        # RFC 9000 section 8.2.4: three times the larger PTO.
                        network_path.validation_deadline = now + 3 * max(
                            self._loss.get_probe_timeout(), 2 * self._configuration.initial_rtt
                        )
                if self._handshake_done_pending:
                    self._write_handshake_done_frame(builder=builder)
                    self._handshake_done_pending = False
                while network_path.remote_challenges:
                    self._write_path_response_frame(
                        builder=builder, challenge=network_path.remote_challenges[0]
                    )
                    network_path.remote_challenges.popleft()
                for connection_id in self._host_cids:
                    if not connection_id.was_sent:
                        self._write_new_connection_id_frame(
                            builder=builder, connection_id=connection_id
                        )
                while self._retire_connection_ids:
                    self._write_retire_connection_id_frame(
                        builder=builder, sequence_number=self._retire_connection_ids[0]
                    )
                    self._retire_connection_ids.pop(0)
                self._write_connection_limits(builder=builder, space=space)

            while self._credit_queue:
                stream_id, stream = next(iter(self._credit_queue.items()))
                self._write_stream_limits(builder=builder, space=space, stream=stream)
                del self._credit_queue[stream_id]
            if self._ping_pending:
                self._write_ping_frame(builder, self._ping_pending)
                self._ping_pending.clear()
            if self._probe_pending:
                self._write_ping_frame(builder, comment="probe")
                self._probe_pending = False
            if not crypto_stream.sender.buffer_is_empty:
                self._write_crypto_frame(builder=builder, space=space, stream=crypto_stream)
            while self._datagrams_pending:
                try:
                    self._write_datagram_frame(
                        builder=builder,
                        data=self._datagrams_pending[0],
                        frame_type=QuicFrameType.DATAGRAM_WITH_LENGTH,
                    )
                except QuicPacketBuilderStop:
                    break
                self.datagram_backlog -= len(self._datagrams_pending.popleft())
            while self._control_queue:
                stream_id, stream = next(iter(self._control_queue.items()))
                if stream.receiver.stop_pending:
                    self._write_stop_sending_frame(builder=builder, stream=stream)
                if stream.sender.reset_pending:
                    self._write_reset_stream_frame(builder=builder, stream=stream)
                del self._control_queue[stream_id]

            # What room is left goes to streams.
            while (room := builder.remaining_flight_space) >= MIN_STREAM_ROOM:
                frame = self._next_frame(room)
                if frame is None:
                    break
                stream, header, pieces, handler_args = frame
                buf = builder.start_frame(
                    header[0],
                    capacity=len(header),
                    handler=stream.sender.on_data_delivery,
                    handler_args=handler_args,
                )
                buf.push_bytes(header[1:])
                for piece in pieces:
                    buf.push_bytes(bytes(piece))

            if builder.packet_is_empty:
                return
            self._packets_under_key += 1
            self._pacer.update_after_send(now=now)

    def _next_frame(
        self, room: int
    ) -> tuple[Stream, bytes, list[memoryview], tuple[int, int, bool]] | None:
        """The next STREAM frame of at most `room` octets: stream, header, payload, and what
        its delivery callback needs. Lost data goes first, then bidirectional streams."""
        for queue in self._queues:
            if not queue:
                continue
            lost = queue is self._lost_queue
            credit = self._remote_max_data - self._remote_max_data_used
            leave: list[int] = []
            found = None
            for stream_id, stream in queue.items():
                out = stream.out
                # Around the payload: type, id, offset (at most 8 octets), length.
                space = room - 11 - len(stream.id_octets)
                if space > MAX_FRAME_DATA:
                    space = MAX_FRAME_DATA
                if lost:
                    if not out.has_lost:
                        leave.append(stream_id)
                        continue
                    start, length, fin, pieces = out.take_lost(space)
                    if not out.has_lost:
                        leave.append(stream_id)
                else:
                    limit = out.highest_offset + credit
                    if limit > stream.max_stream_data_remote:
                        limit = stream.max_stream_data_remote
                    taken = out.take_new(space, limit)
                    if taken is None:
                        # MAX_STREAM_DATA queues it again; for MAX_DATA all wait in the queue.
                        if not out.has_new or out.highest_offset >= stream.max_stream_data_remote:
                            leave.append(stream_id)
                        continue
                    start, length, fin, pieces = taken
                    self._remote_max_data_used += length
                    stream.served += length
                    if out.highest_offset == out._buffer_stop:
                        stream.served = 0
                        leave.append(stream_id)
                    elif stream.served >= TURN:
                        stream.served = 0
                        if len(queue) > 1:
                            leave.append(stream_id)
                            self._again = stream
                if not start:
                    header = b"%c%b%c%c" % (
                        0x0A | fin,
                        stream.id_octets,
                        length >> 8 | 0x40,
                        length & 0xFF,
                    )
                else:
                    header = b"%c%b%b%c%c" % (
                        0x0E | fin,
                        stream.id_octets,
                        (start | 0x80000000).to_bytes(4, "big")
                        if 0x4000 <= start < 0x40000000
                        else _varint(start),
                        length >> 8 | 0x40,
                        length & 0xFF,
                    )
                found = stream, header, pieces, (start, start + length, fin)
                break
            for stream_id in leave:
                del queue[stream_id]
            if found is not None:
                if self._again is not None:
                    queue[self._again.id] = self._again  # at the end
                    self._again = None
                return found
        return None

    def _write_stream_packets(
        self, builder: QuicPacketBuilder, crypto: CryptoPair, now: float
    ) -> None:
        """Add packets that hold nothing but STREAM frames, without the packet builder."""
        if not any(self._queues):
            return
        if builder._packet is not None:
            builder._end_packet()
        allowance = self._pacer.allowance(now)
        if allowance == 0:
            self._pacing_at = self._pacer.next_send_time(now=now)
            return
        keys = crypto.send
        assert keys.aead is not None and keys.hp is not None
        iv, encrypt = keys.aead._iv, keys.aead._aead.encrypt
        cid = builder._peer_cid
        first = 0x40 | (builder._spin_bit << 5) | (crypto.key_phase << 2) | (PN_LENGTH - 1)
        prefix = b"%c%b" % (first, cid)
        overhead = len(prefix) + PN_LENGTH + TAG_LENGTH
        size = self._max_datagram_size
        burst = max(1, BURST // size)
        most = min(allowance, burst)
        flight = (builder.max_flight_bytes or 0) - builder._flight_bytes
        number = builder._packet_number
        numbers: list[int] = []
        sealed: list[bytes] = []
        samples: list[bytes] = []
        # Packets are registered in the order of their numbers: here, if the builder has none.
        packets: list[Any] = builder._packets
        register = None if packets else self._loss.on_packet_sent
        space = self._spaces[tls.Epoch.ONE_RTT]
        sample_at = 4 - PN_LENGTH
        next_frame = self._next_frame

        # A packet is only begun when a full one fits: runts would cost as much as full ones,
        # and segmentation offload wants equal sizes.
        while len(sealed) < most and flight >= size:
            room = size - overhead
            parts: list[bytes | memoryview] = []
            handlers: list[tuple[Any, Any]] = []
            while room >= MIN_STREAM_ROOM:
                frame = next_frame(room)
                if frame is None:
                    break
                stream, frame_header, pieces, args = frame
                parts.append(frame_header)
                parts += pieces
                handlers.append((stream.out.on_data_delivery, args))
                room -= len(frame_header) + args[1] - args[0]
            if not parts:
                break
            header = prefix + (number & 0xFFFF).to_bytes(PN_LENGTH, "big")
            cipher = encrypt((iv ^ number).to_bytes(12, "big"), b"".join(parts), header)
            sent = len(header) + len(cipher)
            numbers.append(number)
            sealed.append(cipher)
            samples.append(cipher[sample_at : sample_at + SAMPLE_LENGTH])
            packet: Any = _SentPacket(number, sent, handlers)
            if register is None:
                packets.append(packet)
            else:
                packet.sent_time = now
                register(packet=packet, space=space)
            flight -= sent
            number += 1

        if not sealed:
            return
        masks = _masks(keys.hp, samples)
        datagrams = builder._datagrams
        total = 0
        at = 0
        for number_sent, cipher in zip(numbers, sealed, strict=True):
            datagrams.append(
                b"%c%b%c%c%b"
                % (
                    first ^ (masks[at] & 0x1F),
                    cid,
                    (number_sent >> 8 & 0xFF) ^ masks[at + 1],
                    (number_sent & 0xFF) ^ masks[at + 2],
                    cipher,
                )
            )
            total += overhead - TAG_LENGTH + len(cipher)
            at += SAMPLE_LENGTH
        builder._packet_number = number
        builder._flight_bytes += total
        builder._total_bytes += total
        if register is not None and not self._ack_eliciting_sent_since_receipt:
            # RFC 9000 section 10.1: the first ack-eliciting packet restarts the idle timer.
            self._close_at = now + self._idle_timeout()
            self._ack_eliciting_sent_since_receipt = True
        self._packets_under_key += len(sealed)
        self._pacer.spend(len(sealed))
        if not any(self._queues):
            return
        if len(sealed) == allowance:
            self._pacing_at = self._pacer.next_send_time(now=now) or now
        else:
            self.capped = len(sealed) == burst


def _masks(hp: Any, samples: list[bytes]) -> bytes:
    """Header-protection masks for several packets, 16 octets apart."""
    if hp._is_chacha20:
        return b"".join(hp._mask(sample) + bytes(SAMPLE_LENGTH - 5) for sample in samples)
    masks: bytes = hp._encryptor.update(b"".join(samples))
    return masks
