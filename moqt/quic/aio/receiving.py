"""The receive path: batches of datagrams in, stream data out, limits kept.

Runs of 1-RTT packets are opened together and their STREAM frames joined before they get to their
streams; everything else goes through aioquic.
"""

from __future__ import annotations

import logging
from math import inf
from typing import Any

from aioquic import tls
from aioquic._buffer import Buffer, BufferReadError
from aioquic.quic import events
from aioquic.quic.connection import (
    QuicConnectionError,
    QuicConnectionState,
    QuicNetworkPath,
    QuicReceiveContext,
)
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicFrameType,
    QuicHeader,
    QuicStreamFrame,
)
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import FinalSizeError, StreamFinishedError
from cryptography import x509

from moqt.quic.acks.frequency import (
    ACK_FREQUENCY,
    IMMEDIATE_ACK,
    MIN_ACK_DELAY,
    OUR_MIN_DELAY,
    AckRequests,
    AckRule,
    Request,
)
from moqt.quic.aio.credit import CLOSED_STATES, StreamTable
from moqt.quic.aio.handshake import PlainContext, explain, versions
from moqt.quic.aio.streams import Stream
from moqt.quic.backend import Backend, chosen, native
from moqt.quic.congestion.reordering import PACKET_THRESHOLD
from moqt.quic.packets.layout import Address, show_address, varint
from moqt.quic.packets.protection import RESERVED_BITS, KeysOfDirection
from moqt.quic.packets.received import ReceivedPackets
from moqt.quic.packets.reset import is_reset

log = logging.getLogger(__name__)


def _note_received(space: QuicPacketSpace, start: int, stop: int) -> None:
    """The packets numbered [start, stop) have come: for ACKs, and to tell duplicates."""
    space.ack_queue.add(start, stop)
    if len(space.ack_queue) > 60:  # aioquic keeps 64
        space.ack_queue.shift()
    received: Any = space.received_packets
    received.add_run(start, stop)


class ReceivingConnection(StreamTable):
    """The table of streams, and what fills it."""

    closed_by_peer = False
    shown: x509.Certificate | None = None
    """The certificate that a session ticket in use stands for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        extension = native() if chosen(self.config.quic_backend) is Backend.NATIVE else None
        self._sealing = KeysOfDirection(extension, sealing=True)
        self._opening = KeysOfDirection(extension, sealing=False)
        self._sealed: list[bytes] = []
        """Packets of the transmission under way that the packet builder has not seen."""
        self.ack_rule = AckRule()
        self.ack_requests = AckRequests()
        self._ack_at_once = False  # IMMEDIATE_ACK came
        handlers: Any = self.__dict__["_QuicConnection__frame_handlers"]  # aioquic knows no others
        one_rtt = frozenset({tls.Epoch.ONE_RTT})
        handlers[ACK_FREQUENCY] = self._handle_ack_frequency_frame, one_rtt
        handlers[IMMEDIATE_ACK] = self._handle_immediate_ack_frame, one_rtt

    # ---- how often packets are acknowledged

    def _serialize_transport_parameters(self) -> bytes:
        parameters: bytes = super()._serialize_transport_parameters()
        value = varint(int(OUR_MIN_DELAY * 1e6))
        return parameters + varint(MIN_ACK_DELAY) + varint(len(value)) + value

    def _parse_transport_parameters(self, data: bytes, from_session_ticket: bool = False) -> None:
        super()._parse_transport_parameters(data, from_session_ticket)
        if from_session_ticket:
            return  # it is not remembered (section 3)
        buf = Buffer(data=data)
        while not buf.eof():
            kind, length = buf.pull_uint_var(), buf.pull_uint_var()
            value = buf.pull_bytes(length)
            if kind == MIN_ACK_DELAY:
                self._take_min_ack_delay(value)

    def _take_min_ack_delay(self, value: bytes) -> None:
        try:
            buf = Buffer(data=value)
            least = buf.pull_uint_var() / 1e6
        except BufferReadError:
            least = inf
        if least > self.recovery.max_ack_delay or not buf.eof():
            raise QuicConnectionError(
                QuicErrorCode.TRANSPORT_PARAMETER_ERROR,
                QuicFrameType.CRYPTO,
                "min_ack_delay is malformed, or more than max_ack_delay",
            )
        self.ack_requests.least = least

    def _handle_ack_frequency_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        sequence = buf.pull_uint_var()
        request = Request(buf.pull_uint_var(), buf.pull_uint_var(), buf.pull_uint_var())
        if context.quic_logger_frames is not None:
            context.quic_logger_frames.append(
                {"frame_type": "ack_frequency", "sequence_number": sequence, **request._asdict()}
            )
        try:
            if self.ack_rule.take(sequence, request):
                self._ack_delay = request.delay / 1e6
        except ValueError as error:
            raise QuicConnectionError(
                QuicErrorCode.PROTOCOL_VIOLATION, frame_type, str(error)
            ) from None

    def _handle_immediate_ack_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        if context.quic_logger_frames is not None:
            context.quic_logger_frames.append({"frame_type": "immediate_ack"})
        self._ack_at_once = True

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls.__class__ = PlainContext  # aioquic makes its own, which has the same attributes
        self.tls._peer_certificate = self.shown  # another one with each Retry
        for space in self._spaces.values():
            # aioquic's takes a packet for a duplicate that 128 others have overtaken.
            space.received_packets = ReceivedPackets()  # type: ignore[assignment]

    def _update_traffic_key(
        self,
        direction: tls.Direction,
        epoch: tls.Epoch,
        cipher_suite: tls.CipherSuite,
        secret: bytes,
    ) -> None:
        super()._update_traffic_key(direction, epoch, cipher_suite, secret)
        if epoch is tls.Epoch.ONE_RTT:
            crypto = self._cryptos[epoch]
            if direction is tls.Direction.ENCRYPT:
                self._sealing.begin(crypto.send)
            else:
                self._opening.begin(crypto.recv)

    def _receive_version_negotiation_packet(self, header: QuicHeader, now: float) -> None:
        before = self._close_event
        super()._receive_version_negotiation_packet(header, now)
        if self._close_event is not None and self._close_event is not before:
            self._close_event.reason_phrase = (
                f"the server speaks QUIC {versions(header.supported_versions)}; "
                f"spoken here: {versions(self._configuration.supported_versions)}"
            )

    def _handle_connection_close_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        before = self._close_event
        super()._handle_connection_close_frame(context, frame_type, buf)
        self.closed_by_peer = before is None

    def is_reset(self, data: bytes, addr: Address) -> bool:
        """Whether a datagram of no connection is the peer's Stateless Reset of this one."""
        return (
            self._state is QuicConnectionState.CONNECTED
            and self._network_paths[0].addr == addr
            and is_reset(data, self._peer_cid.stateless_reset_token)
        )

    def take_reset(self, now: float) -> None:
        """The peer knows nothing of the connection: not a word more is sent on it."""
        self._close_event = events.ConnectionTerminated(
            error_code=QuicErrorCode.NO_ERROR,
            frame_type=QuicFrameType.PADDING,
            reason_phrase="the peer has forgotten this connection: it was restarted",
        )
        self.closed_by_peer = True
        self._close_begin(is_initiator=False, now=now)

    def receive_batch(self, datagrams: list[bytes], addr: Address, now: float) -> None:
        """`receive_datagram` for several datagrams from one address, in order."""
        if now >= self._arrivals.ends:
            self._arrivals.next_trip(self.consumed + self.held, self.recovery.trip, now)
        index, count = 0, len(datagrams)
        while index < count and self._state not in CLOSED_STATES and not self._close_pending:
            if self._handshake_confirmed and self.trace is None:
                path = self._network_paths[0]
                if path.addr == addr and path.is_validated:
                    index = self._receive_short(datagrams, index, path, now)
                    if index >= count:
                        break
            before = self._network_paths[0] if self._network_paths else None
            self.receive_datagram(datagrams[index], addr, now)
            if before is not None and self._network_paths[0] is not before:
                self.path_changes += 1
            self._unacknowledged += 1
            index += 1
        if self._unacknowledged and not self.over and self._spaces:  # none before a first packet
            space = self._spaces[tls.Epoch.ONE_RTT]
            if space.ack_at is not None and (
                self._ack_at_once
                or self.ack_rule.is_due(self._unacknowledged, space.largest_received_packet)
            ):
                space.ack_at = now
            self._ack_at_once = False

    def _receive_short(
        self, datagrams: list[bytes], index: int, path: QuicNetworkPath, now: float
    ) -> int:
        """Read the run of 1-RTT packets to our current connection id that begins at `index`.

        Returns the index of the first datagram that needs the general path.
        """
        context = self._cryptos[tls.Epoch.ONE_RTT].recv
        if context.aead is None:
            return index
        space = self._spaces[tls.Epoch.ONE_RTT]
        received = space.received_packets
        begin, count = index, len(datagrams)
        index, runs = self._opening.of(context).open(
            datagrams,
            index,
            self.host_cid,
            context.key_phase,
            space.expected_packet_number,
            space.largest_received_packet,
        )
        if index == begin:
            return index
        accepted = gap = False
        elicited = 0
        for start, stop, first, eliciting, content in runs:
            largest = space.largest_received_packet
            if start <= largest:
                # Not `expected`: aioquic leaves it at a number that came just as expected.
                if start in received:
                    continue
                gap = True
            if first & RESERVED_BITS:
                self.close(
                    QuicErrorCode.PROTOCOL_VIOLATION,
                    QuicFrameType.PADDING,
                    "Reserved bits must be zero",
                )
                return count
            elicited += eliciting
            try:
                for event in content:
                    if len(event) == 4:
                        stream_id, offset, data, fin = event
                        self._stream_received(0x0E | fin, stream_id, offset, data, fin)
                    else:
                        elicited += self._others_received(event[0], path, now) and not event[1]
            except QuicConnectionError as exc:
                log.warning(
                    "closing the connection with %s, which broke the rules of QUIC: %s (%s)",
                    show_address(path.addr),
                    exc.reason_phrase,
                    explain(exc.error_code, "", is_client=self._is_client),
                )
                self.close(exc.error_code, exc.frame_type, exc.reason_phrase)
            if self._close_pending or self._state is not QuicConnectionState.CONNECTED:
                return count
            accepted = True
            _note_received(space, start, stop)
            if stop > space.expected_packet_number:
                space.expected_packet_number = stop
            if start > largest:
                gap = gap or start != largest + 1
                space.largest_received_packet = self._spin_highest_pn = stop - 1
                space.largest_received_time = now
                self._spin_bit = (first & 0x20 != 0) != self._is_client
        if elicited:
            self._unacknowledged += elicited
            if space.ack_at is None:
                space.ack_at = now + self._ack_delay
        if accepted and not self.over:
            self._close_at = now + self._idle_timeout()
            self._ack_eliciting_sent_since_receipt = False
        if space.ack_at is not None and self.ack_rule.reports(gap, space.ack_queue):
            # RFC 9000 section 13.2.1: report reordering and loss at once.
            space.ack_at = now
        return index

    def _others_received(self, frames: bytes, path: QuicNetworkPath, now: float) -> bool:
        """Handle the frames of a 1-RTT packet from its first on that is no STREAM frame; whether
        one elicits an ACK. They are mostly few."""
        context = QuicReceiveContext(
            epoch=tls.Epoch.ONE_RTT,
            host_cid=self.host_cid,
            network_path=path,
            quic_logger_frames=None,
            time=now,
            version=None,
        )
        eliciting, _ = self._payload_received(context, frames)
        return bool(eliciting)

    def _handle_stream_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        stream_id = buf.pull_uint_var()
        offset = buf.pull_uint_var() if frame_type & 4 else 0
        length = buf.pull_uint_var() if frame_type & 2 else buf.capacity - buf.tell()
        data = buf.pull_bytes(length)
        if self.trace is not None and context.quic_logger_frames is not None:
            frame = QuicStreamFrame(data=data, fin=bool(frame_type & 1), offset=offset)
            context.quic_logger_frames.append(self.trace.encode_stream_frame(frame, stream_id))
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
        receiver = stream.inbox
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
            and not receiver.held
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
        before = receiver.held
        try:
            taken = receiver.take(offset, data, fin)
        except FinalSizeError as exc:
            raise QuicConnectionError(
                QuicErrorCode.FINAL_SIZE_ERROR, frame_type, str(exc)
            ) from None
        self.held += receiver.held - before
        if self.held > self._max_held or receiver.waiting > self.config.max_pieces:
            self.over_budget = True
            raise QuicConnectionError(
                QuicErrorCode.INTERNAL_ERROR, frame_type, "Too much stream data out of order"
            )
        if receiver.held and not stream.paused:
            self.press(stream, stop)
        if taken is not None:
            self._events.append((stream, taken[0], receiver._buffer_start, taken[1]))  # type: ignore[arg-type]

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

    def _handle_padding_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        # aioquic looks at each octet, and a probe of the path's MTU has nothing else.
        rest = buf.data_slice(buf.tell(), buf.capacity)
        buf.seek(buf.capacity - len(rest.lstrip(b"\0")))
        if self.trace is not None and context.quic_logger_frames is not None:
            context.quic_logger_frames.append(self.trace.encode_padding_frame())

    def _handle_ack_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        # Every later packet would count as lost once one beyond it was "received".
        start = buf.tell()
        largest = buf.pull_uint_var()
        buf.seek(start)
        if largest >= self._packet_number:
            raise QuicConnectionError(
                QuicErrorCode.PROTOCOL_VIOLATION, frame_type, "ACK of a packet that was not sent"
            )
        super()._handle_ack_frame(context, frame_type, buf)
        if self.ack_requests.least is not None:
            recovery = self.recovery
            self.ack_requests.look(
                recovery.congestion_window // self._max_datagram_size,
                recovery.trip,
                recovery.sees_reordering,
                PACKET_THRESHOLD,
            )

    def _handle_reset_stream_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        start = buf.tell()
        stream_id = buf.pull_uint_var()
        buf.seek(start)
        super()._handle_reset_stream_frame(context, frame_type, buf)
        stream = self.stream(stream_id)
        if stream is not None:
            self._release(stream)  # what waits for a gap to close

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
        if stream is not None:
            self.credited.add(stream_id)
            self.without_credit.discard(stream_id)
            if stream.out.has_new:
                self.queue_new(stream_id)
