"""The streams of a connection: which wait for their turn, and the credit each side has.

Credit follows what the application consumed, in windows that follow what it consumes in a round
trip (`moqt.quic.windows`). Stock aioquic doubles its windows by the highest offset received, so a
receiver can never push back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import (
    Limit,
    QuicConnection,
    QuicConnectionError,
    QuicConnectionId,
    QuicConnectionState,
    stream_is_client_initiated,
    stream_is_unidirectional,
)
from aioquic.quic.packet import QuicErrorCode, QuicFrameType
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream, StreamFinishedError

from moqt.quic.aio.handshake import AIOQUIC_LOG
from moqt.quic.aio.recovery import Recovery
from moqt.quic.aio.stream_grants import StreamGrants
from moqt.quic.aio.streams import Rank, SendingFinished, Stream
from moqt.quic.aio.trace import StreamingTrace
from moqt.quic.config import QuicConfig
from moqt.quic.counters import Wait
from moqt.quic.packets.layout import SHORT_OVERHEAD, Datagram
from moqt.quic.windows import ROUND_TRIPS, Arrivals, SessionWindow, WindowMemory, grown

# A tuple is searched by identity; a set would call the enum's own, slow hash.
CLOSED_STATES = (
    QuicConnectionState.CLOSING,
    QuicConnectionState.DRAINING,
    QuicConnectionState.TERMINATED,
)


Queue = dict[int, Stream]

CREDIT_KEPT = 16 << 10
"""Octets of the peer's MAX_DATA, or a sixteenth of its first one, that data streams leave to
messages: data that nobody reads must not keep the message that explains it from its reader."""


class StreamTable(QuicConnection):
    """aioquic's connection with our streams, their queues and credit by consumption."""

    _loss: Any  # ours, where aioquic has its `QuicPacketRecovery`

    def __init__(
        self,
        *,
        configuration: QuicConfiguration,
        config: QuicConfig,
        memory: WindowMemory,
        origin: str,
        original_destination_connection_id: bytes | None = None,
        retry_source_connection_id: bytes | None = None,
        reset_token: Callable[[bytes], bytes] | None = None,
        number: int | None = None,
    ) -> None:
        """`memory`: what the connections of the process share, of which this one is counted to
        `origin`. `reset_token`: a server's, of each of its connection ids, which begin with
        `number` where there is one."""
        super().__init__(
            configuration=configuration,
            original_destination_connection_id=original_destination_connection_id,
            retry_source_connection_id=retry_source_connection_id,
        )
        self._logger.logger = AIOQUIC_LOG
        self._reset_token = reset_token
        self._number = None if number is None else bytes([number])
        self._mark(self._host_cids)
        self.host_cid = self._local_initial_source_connection_id = self._host_cids[0].cid
        self.config = config
        self.unsent = 0
        self.consumed = 0  # octets the application is done with, over all streams
        self.close_datagrams: list[Datagram] = []
        self._grants = (
            StreamGrants(
                self._local_max_streams_bidi, config.max_streams_bidi, config.max_open_streams_bidi
            ),
            StreamGrants(
                self._local_max_streams_uni, config.max_streams_uni, config.max_open_streams_uni
            ),
        )
        self.recovery = self._loss = Recovery(
            algorithm=config.congestion_control_algorithm,
            max_datagram_size=self._max_datagram_size,
            initial_rtt=configuration.initial_rtt,
            peer_completed_address_validation=not self._is_client,
            quic_logger=self._quic_logger,
            send_probe=self._send_probe,
            logger=self._logger,
        )
        self._pacer = self.recovery.pacer
        # Streams with something to send, by rank and in the order in which they get their turn:
        # those of which data was lost, and those with new data.
        self._lost_queues: tuple[Queue, ...] = tuple({} for _ in Rank)
        self._new_queues: tuple[Queue, ...] = tuple({} for _ in Rank)
        self._queues = (*self._lost_queues, *self._new_queues)
        lost, new = self._lost_queues, self._new_queues
        self._message_queues = (
            (lost[Rank.CONTROL], True),
            (new[Rank.CONTROL], False),
            (lost[Rank.REQUEST], True),
            (new[Rank.REQUEST], False),
        )
        self._data_queues = ((lost[Rank.DATA], True), (new[Rank.DATA], False))
        self._messages = tuple(queue for queue, _ in self._message_queues)
        self._credit_kept = 0  # MAX_DATA octets that are for messages only
        self._control_queue: dict[int, Stream] = {}  # STOP_SENDING or RESET_STREAM
        self._credit_queue: dict[int, Stream] = {}  # MAX_STREAM_DATA
        self._watched: set[int] = set()  # streams whose `SendingFinished` is waited for
        self._again: Stream | None = None  # its turn is over, but it has more
        self.capped = False  # the last transmission ended at BURST: more can go at once
        self._unacknowledged = 0
        self.credited: set[int] = set()
        """Streams with more credit from the peer than when it was last asked for."""
        self.without_credit: set[int] = set()
        """Streams on which more would have been written, had the peer granted it."""
        self.waits_for = Wait.APPLICATION
        """What sending waits for since it last stopped."""
        self._packets_under_key = 0
        self._key_phase = 0
        self._phase_began = 0  # the first packet number of this key phase
        self.key_updates = 0  # that we began
        self.datagram_backlog = 0  # octets of DATAGRAMs that wait
        self.held = 0  # octets that wait for a gap to close, each piece's overhead included
        self.over_budget = False
        self.path_changes = 0
        self.now = 0.0
        """The time, which whoever drives the connection keeps."""
        self.window = SessionWindow(memory, origin, config.session_window, config.window_memory)
        self._arrivals = Arrivals()
        self._grant_session()
        self._local_max_data.sent = self._local_max_data.value
        fresh = self.window.of_fresh_stream(config.stream_window)
        self._local_max_stream_data_bidi_local = fresh
        self._local_max_stream_data_bidi_remote = fresh
        self._local_max_stream_data_uni = fresh
        trace = self._quic_logger
        self.trace = trace if isinstance(trace, StreamingTrace) else None

    def _replenish_connection_ids(self) -> None:
        before = len(self._host_cids)
        super()._replenish_connection_ids()
        self._mark(self._host_cids[before:])

    def _mark(self, cids: Iterable[QuicConnectionId]) -> None:
        """Say in fresh connection ids whose they are, and give them their reset tokens."""
        for each in cids:
            if self._number is not None:
                each.cid = self._number + each.cid[1:]
            if self._reset_token is not None:
                each.stateless_reset_token = self._reset_token(each.cid)

    # ---- what the transport asks

    @property
    def over(self) -> bool:
        return self._state in CLOSED_STATES or self._close_pending

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

    def open_stream(self, bidirectional: bool, urgent: bool) -> int | None:
        if bidirectional:
            stream_id, limit = self._local_next_stream_id_bidi, self._remote_max_streams_bidi
        else:
            stream_id, limit = self._local_next_stream_id_uni, self._remote_max_streams_uni
        if self.over or stream_id // 4 >= limit:
            return None
        stream = self._get_or_create_stream_for_send(stream_id)
        if urgent:
            assert isinstance(stream, Stream)
            stream.rank = Rank.CONTROL
        return stream_id

    def max_datagram_payload(self) -> int:
        """The largest DATAGRAM that fits a packet of its own and the peer's limit; 0 for none."""
        if not self._remote_max_datagram_frame_size:
            return 0
        frame = min(self._remote_max_datagram_frame_size, self._max_datagram_size - SHORT_OVERHEAD)
        return max(0, frame - 3)

    def begin_credit(self) -> None:
        """The handshake is over: the peer's first MAX_DATA is known, and it gets more of ours."""
        self._credit_kept = min(CREDIT_KEPT, self._remote_max_data >> 4)
        self.window.begin()
        self._grant_session()

    # ---- queues

    def queue_new(self, stream_id: int) -> None:
        stream = self.stream(stream_id)
        if stream is not None:
            self._new_queues[stream.rank].setdefault(stream_id, stream)

    def queue_lost(self, stream_id: int) -> None:
        stream = self.stream(stream_id)
        if stream is not None:
            self._lost_queues[stream.rank].setdefault(stream_id, stream)

    def queue_control(self, stream_id: int) -> None:
        stream = self.stream(stream_id)
        if stream is not None:
            self._control_queue[stream_id] = stream

    def dequeue(self, stream_id: int) -> None:
        """No more STREAM frames for the stream."""
        self.without_credit.discard(stream_id)
        for queue in self._queues:
            queue.pop(stream_id, None)

    def watch(self, stream_id: int) -> bool:
        """Report `SendingFinished` of the stream; False when that will never be."""
        stream = self.stream(stream_id)
        if stream is None or self.over or stream.out.failed or stream.out.is_finished:
            return False
        self._watched.add(stream_id)
        return True

    @property
    def live_streams(self) -> list[int]:
        return list(self._streams)

    def sent_all(self, stream_id: int) -> None:
        """The peer has all of the stream."""
        if stream_id in self._watched:
            self._watched.discard(stream_id)
            self._events.append(SendingFinished(stream_id))
        self.finish(stream_id)

    def finish(self, stream_id: int) -> None:
        """Forget the stream if both of its directions are over, and what it brought is read: it is
        one of those that the peer has open until then, as short ones take little of the window."""
        stream = self.stream(stream_id)
        if stream is None or not stream.settled or not stream.is_finished or stream.paused:
            return
        del self._streams[stream_id]
        self._release(stream)
        for queue in (*self._queues, self._control_queue, self._credit_queue):
            queue.pop(stream_id, None)
        self.without_credit.discard(stream_id)
        if stream_is_client_initiated(stream_id) != self._is_client:
            self._grants[stream_id >> 1 & 1].closed_one()

    def cut_off(self, stream: Stream) -> None:
        """A reset ends the stream: what it skipped will never be consumed. What the handler has
        of a paused one still will."""
        held = stream.delivered - stream.credited if stream.paused else 0
        stream.delivered = stream.receiver.highest_offset
        self.consume(stream, stream.delivered - held)

    def settle(self, stream: Stream) -> None:
        """The handler has been told how the receiving direction ended."""
        stream.settled = True
        held = stream.delivered - stream.credited if stream.paused else 0
        stream.lent = self.window.keep(stream.lent, held)
        self.finish(stream.id)

    def drop_streams(self) -> None:
        """The connection is over: let the application's buffers go."""
        for stream in self._streams.values():
            stream.sender.abandon()  # type: ignore[attr-defined]
            stream.receiver.clear()  # type: ignore[attr-defined]
        for queue in (*self._queues, self._control_queue, self._credit_queue):
            queue.clear()
        self._datagrams_pending.clear()
        self.datagram_backlog = 0
        self.unsent = 0
        self.held = 0
        self.window.close()

    # ---- receive credit

    def consume(self, stream: Stream, upto: int) -> None:
        """Everything before `upto` on the stream no longer occupies the session's window."""
        if upto <= stream.credited:
            return
        self.consumed += upto - stream.credited
        stream.credited = upto
        window, limit = self.window.octets, self._local_max_data.value
        more = self.consumed + window - limit
        if more >= window >> 2:
            self.window.used(limit, self.consumed, self.recovery.trip, self.now)
            self._grant_session()
        elif more >= window >> 6 and more >= limit - self._local_max_data.used:
            # The rest of the window is held by streams that are paused: this is all there is.
            self._grant_session()

    def _grant_session(self) -> None:
        octets = self.window.octets
        self._local_max_data.value = self.consumed + octets
        self._max_held = self.config.max_reassembly or octets * 3 // 2

    def grant(self, stream: Stream) -> None:
        """Raise the stream's limit if a quarter of its window has been used up."""
        window, limit = stream.window, stream.max_stream_data_local
        if (
            stream.delivered + window - limit >= window >> 2
            and stream.receiver._final_size is None
            and not stream.stopped
        ):
            wanted, stream.mark = grown(
                window, limit, stream.mark, stream.delivered, self.recovery.trip, self.now
            )
            self._lend(stream, wanted)

    def press(self, stream: Stream, upto: int) -> None:
        """What came of the stream, up to there, waits for something lost. Nothing is consumed
        meanwhile: beyond a quarter of its window that follows what arrives."""
        window = stream.window
        if upto <= stream.max_stream_data_local - window + (window >> 2):
            return
        wanted = ROUND_TRIPS * self._arrivals.of_a_trip(self.consumed + self.held)
        if wanted > self.window.octets:
            self.window.expect(wanted)
            self._grant_session()
        if wanted > window and stream.receiver._final_size is None:
            self._lend(stream, wanted)

    def _lend(self, stream: Stream, wanted: int) -> None:
        session = self.window.octets
        stream.window = self.window.lend(stream.lent, wanted, self.config.stream_window)
        stream.lent = stream.window
        if self.window.octets != session:
            self._grant_session()
        if stream.delivered + stream.window > stream.max_stream_data_local:
            stream.max_stream_data_local = stream.delivered + stream.window
            self._credit_queue[stream.id] = stream

    def pause(self, stream: Stream) -> None:
        """No more credit for the stream: what comes of it stays on the session's account."""
        if stream.paused:
            return
        stream.paused = True
        final = stream.receiver._final_size
        most = stream.max_stream_data_local if final is None else final
        stream.lent = self.window.pause(stream.lent, most - stream.credited)
        self._grant_session()

    def resume(self, stream: Stream) -> None:
        """What has come of the stream is consumed, and more is granted."""
        stream.paused = False
        self.consume(stream, stream.delivered)
        if stream.settled:
            stream.lent = self.window.keep(stream.lent, 0)
            self.finish(stream.id)
        else:
            self.grant(stream)

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
                if self.trace is not None and builder.quic_logger_frames is not None:
                    builder.quic_logger_frames.append(
                        self.trace.encode_connection_limit_frame(limit.frame_type, limit.value)
                    )

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
        if self.trace is not None and builder.quic_logger_frames is not None:
            builder.quic_logger_frames.append(
                self.trace.encode_max_stream_data_frame(
                    stream.max_stream_data_local, stream.stream_id or 0
                )
            )

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
        if self.trace is not None and builder.quic_logger_frames is not None:
            builder.quic_logger_frames.append(
                self.trace.encode_stop_sending_frame(frame.error_code, frame.stream_id)
            )

    def _on_stop_sending_delivery(self, delivery: QuicDeliveryState, stream: Stream) -> None:
        if delivery is not QuicDeliveryState.ACKED and not stream.receiver.is_finished:
            stream.receiver.stop_pending = True
            self.queue_control(stream.id)

    def stop_receiving(self, stream: Stream, code: int) -> None:
        stream.paused = False
        stream.lent = self.window.keep(stream.lent, 0)
        if stream.settled:
            # Its end was delivered (or it never was ours to read): only the account is open.
            self.consume(stream, stream.delivered)
            self.finish(stream.id)
            return
        stream.stopped = True
        self._credit_queue.pop(stream.id, None)
        self.consume(stream, stream.receiver.highest_offset)
        if stream.receiver._final_size is not None:
            self._end_receiving(stream)
        else:
            stream.receiver.stop(code)
            self._release(stream)
            self._control_queue[stream.id] = stream

    def _release(self, stream: Stream) -> None:
        """Let go what waits for a gap to close."""
        self.held -= stream.inbox.held
        stream.inbox.clear()

    def _end_receiving(self, stream: Stream) -> None:
        receiver = stream.receiver
        receiver.is_finished = True
        self._release(stream)
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
        self._grants[unidirectional].opened()
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
