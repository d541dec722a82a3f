"""aioquic's connection, made fit for bulk transfer. Only `aio.transport` uses it.

`Connection` is aioquic's sans-IO `QuicConnection` with its parts replaced, because the stock
ones do not hold up under bulk transfer:

- flow-control credit follows what the application consumed; stock aioquic doubles its windows
  by the highest offset received, so a receiver can never push back;
- streams wait in queues of those that have something to say, and payloads are referenced, not
  copied; stock aioquic visits every stream for every packet and moves its whole buffer per ACK;
- messages go before Objects: control streams, then requests, then data (MOQT "Priorities");
- 1-RTT packets that carry only STREAM frames of data streams (nearly all of them) are made and
  read in batches (`moqt.quic.packets.protection`), and those of one stream that leave together are
  one entry of what is under way;
- loss detection, congestion control and pacing are ours (`recovery`).

With an event log the general paths are taken throughout: they log, and they are slow.

No socket and no clock in here.
"""

from __future__ import annotations

from typing import Any

from aioquic import tls
from aioquic.quic.connection import QuicNetworkPath
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import QuicFrameType, QuicPacketType
from aioquic.quic.packet_builder import (
    QuicDeliveryState,
    QuicPacketBuilder,
    QuicPacketBuilderStop,
)
from aioquic.quic.recovery import QuicPacketSpace

from moqt.quic.acks.frequency import ACK_FREQUENCY, IMMEDIATE_ACK
from moqt.quic.aio.path_mtu import ProbingConnection
from moqt.quic.aio.streams import Stream
from moqt.quic.config import MIN_DATAGRAM_SIZE
from moqt.quic.counters import Wait
from moqt.quic.packets.layout import (
    PN_LENGTH,
    TAG_LENGTH,
    Datagram,
    ack_frame,
    short_prefix,
    stream_header,
)
from moqt.quic.packets.protection import Frame, Group, Keys
from moqt.quic.packets.sent import SentAck, SentPacket

BURST = 256 << 10
"""Octets built before they go to the socket: the peer reads while we build the next ones."""

MIN_STREAM_ROOM = 64
"""A packet with less room left than this does not begin another STREAM frame."""

TURN = 64 << 10
"""Octets a stream sends before the next one that waits has its turn."""

MAX_FRAME_DATA = 0x3FFF - 64
"""What a two-octet STREAM length (and the packet around it) can carry."""

FEW_RANGES = 8
"""Ranges of an ACK frame that is made without the packet builder."""

KEY_UPDATE_PACKETS = 1 << 22
"""Half the confidentiality limit of AES-GCM (RFC 9001 section 6.6); aioquic never updates."""

_EARLY_CLOSES = (
    ((tls.Epoch.ONE_RTT, QuicPacketType.ONE_RTT),),
    (
        (tls.Epoch.INITIAL, QuicPacketType.INITIAL),
        (tls.Epoch.HANDSHAKE, QuicPacketType.HANDSHAKE),
    ),
)
"""The packets of a close before the handshake is confirmed, by datagram."""

RankedQueues = tuple[tuple[dict[int, Stream], bool], ...]
"""Streams in the order of their turns, and whether it is lost data they are to send."""


class Connection(ProbingConnection):
    """aioquic's connection with credit by consumption and short paths for bulk data."""

    def datagrams_to_send(self, now: float) -> list[Datagram]:
        if not self._network_paths:
            return []
        path = self._network_paths[0]
        if path is not self._searched:
            self._follow_path(path, now)
        probes: list[Datagram] = []
        if self.mtu.probe_at <= now or self.recovery.reserved or self.probe_again is not None:
            probes = self._mtu_probes(path, now)
        closing = self._close_pending
        self.capped = False
        if self._has_only_data_and_acks(path):
            alone = self._data_or_ack(path, now)
            if alone is not None:
                return probes + alone
        size = self._max_datagram_size
        if self.recovery.wants_small_probes or path.remote_challenges:
            # What has full size, an answer to PATH_CHALLENGE too, may be what does not arrive.
            self._max_datagram_size = MIN_DATAGRAM_SIZE
        try:
            datagrams: list[Datagram] = (
                self._close_early(now)
                if closing and not self._handshake_confirmed and self._application_closes
                else super().datagrams_to_send(now)
            )
        finally:
            self._max_datagram_size = size
            sealed, self._sealed = self._sealed, []
        if sealed:
            addr = path.addr
            path.bytes_sent += sum(map(len, sealed))
            datagrams += [(data, addr) for data in sealed]
        if closing and datagrams:
            self.close_datagrams = datagrams
        return probes + datagrams if probes else datagrams

    def sending_stopped(self) -> Wait:
        """All that may be sent now has been: note whether more could have been, and say why not."""
        paced = self._pacing_at is not None
        wait = self.recovery.sending_stopped(self._max_datagram_size, paced)
        if wait is Wait.APPLICATION and (self.unsent or self.without_credit):
            wait = Wait.FLOW_CONTROL
        if wait is not self.waits_for:
            self.waits_for = wait
            if self.trace is not None:
                data = {"waits_for": wait.value}
                self.trace.log_event(category="transport", event="sending_stopped", data=data)
        return wait

    @property
    def _application_closes(self) -> bool:
        return self._close_event is not None and self._close_event.frame_type is None

    def _close_early(self, now: float) -> list[Datagram]:
        """Close for the application before the handshake is confirmed (RFC 9000 section 10.2.3).

        Only 1-RTT packets may carry its code and reason. Initial and Handshake packets say
        APPLICATION_ERROR, and the first packet that can be read ends the connection: the 1-RTT
        packet goes before them, and before that what the handshake owes, which has its keys.
        """
        self._close_pending = False
        try:
            datagrams: list[Datagram] = super().datagrams_to_send(now)
        finally:
            self._close_pending = True
        event = self._close_event
        assert event is not None and self._version is not None
        for types in _EARLY_CLOSES:
            builder = QuicPacketBuilder(
                host_cid=self.host_cid,
                is_client=self._is_client,
                max_datagram_size=self._max_datagram_size,
                packet_number=self._packet_number,
                peer_cid=self._peer_cid.cid,
                peer_token=self._peer_token,
                quic_logger=self._quic_logger,
                spin_bit=self._spin_bit,
                version=self._version,
            )
            for epoch, kind in types:
                if self._cryptos[epoch].send.is_valid():
                    builder.start_packet(kind, self._cryptos[epoch])
                    self._write_connection_close_frame(
                        builder, epoch, event.error_code, None, event.reason_phrase
                    )
            path = self._network_paths[0]
            datagrams += self._flush_builder(builder, path, self._peer_cid.cid, now)
        self._close_pending = False
        self._close_begin(is_initiator=True, now=now)
        return datagrams

    def _has_only_data_and_acks(self, path: QuicNetworkPath) -> bool:
        """Whether there is surely nothing to send but data of streams, or an ACK frame."""
        return (
            self._handshake_confirmed
            and not self.over
            and path.is_validated
            and len(self._network_paths) == 1
            and self._remote_preferred_address is None  # else it is to be probed
            and not self._control_is_pending(path)
        )

    def _data_or_ack(self, path: QuicNetworkPath, now: float) -> list[Datagram] | None:
        """The packets of nothing but data, or the one of an ACK frame, that go now, without the
        packet builder: nearly all are such. None where it takes the builder."""
        space = self._spaces[tls.Epoch.ONE_RTT]
        crypto = self._cryptos[tls.Epoch.ONE_RTT]
        due = space.ack_at is not None and space.ack_at <= now
        waiting = any(self._queues)
        if not due and not waiting:
            self._pacing_at = None
            return []
        if (
            (due and waiting)
            or self.trace is not None
            or crypto._update_key_requested
            or self._packets_under_key >= KEY_UPDATE_PACKETS
            or self.recovery.wants_small_probes
        ):
            return None
        self._follow_phase(crypto)
        if due:
            return self._lone_ack(path, crypto, space, now)
        self._pacing_at = None
        flight = self.recovery.congestion_window - self.recovery.bytes_in_flight
        prefix = short_prefix(crypto.key_phase, self._peer_cid.cid, self._spin_bit)
        keys, number = self._sealing.of(crypto.send), self._packet_number
        self._send_data(keys, prefix, number, flight, now, [])
        sealed, self._sealed = self._sealed, []
        path.bytes_sent += sum(map(len, sealed))
        return [(data, path.addr) for data in sealed]

    def _lone_ack(
        self, path: QuicNetworkPath, crypto: CryptoPair, space: QuicPacketSpace, now: float
    ) -> list[Datagram] | None:
        """The packet with the ACK frame that is due, if it is a simple one."""
        received, number = space.ack_queue, self._packet_number
        if len(received) > FEW_RANGES or (len(received) > 1 and number % 8 == 0):
            return None  # every eighth with gaps has a PING, too
        assert space.largest_received_time is not None
        delay = int((now - space.largest_received_time) * 1e6) >> self._local_ack_delay_exponent
        frame = ack_frame(received, delay)
        largest = space.largest_received_packet
        handlers = [(self._on_ack_delivery, (space, largest))]
        prefix = short_prefix(crypto.key_phase, self._peer_cid.cid, self._spin_bit)
        (data,) = self._sealing.of(crypto.send).seal(prefix, number, [(1, frame)])
        self._packet_number += 1
        self._packets_under_key += 1
        self._pacing_at = None
        self._unacknowledged = 0
        self.ack_rule.acked = received[-1].stop - 1
        space.ack_at = None
        packet = SentAck(number, len(data), handlers, now, None)
        self.recovery.on_packet_sent(packet=packet, space=space)
        self._pacer.spend(len(data))
        path.bytes_sent += len(data)
        return [(data, path.addr)]

    def _write_ack_frame(
        self, builder: QuicPacketBuilder, space: QuicPacketSpace, now: float
    ) -> None:
        super()._write_ack_frame(builder, space, now)
        if space.is_application_data:
            self._unacknowledged = 0
            self.ack_rule.acked = space.ack_queue[-1].stop - 1

    def _write_ack_frequency_frame(self, builder: QuicPacketBuilder) -> None:
        """Ask the peer to acknowledge more or less often."""
        requests, recovery = self.ack_requests, self.recovery
        buf = builder.start_frame(
            ACK_FREQUENCY,
            capacity=2 + 4 * 8,
            handler=self._on_ack_frequency_delivery,
            handler_args=(requests.sequence, requests.wish.delay / 1e6),
        )
        for value in (requests.sent(), *requests.wish):
            buf.push_uint_var(value)
        # Until it is acknowledged, the peer may do as before (section 7).
        recovery.max_ack_delay = max(recovery.max_ack_delay, requests.wish.delay / 1e6)
        if self.trace is not None and builder.quic_logger_frames is not None:
            builder.quic_logger_frames.append(
                {"frame_type": "ack_frequency", **requests.wish._asdict()}
            )

    def _on_ack_frequency_delivery(
        self, delivery: QuicDeliveryState, sequence: int, delay: float
    ) -> None:
        arrived = delivery is QuicDeliveryState.ACKED
        self.ack_requests.settled(sequence, arrived)
        if arrived:
            self.recovery.max_ack_delay = delay

    def _control_is_pending(self, network_path: QuicNetworkPath) -> bool:
        """Whether anything but ACKs and the octets of data streams waits to be sent."""
        return bool(
            self._control_queue
            or self._credit_queue
            or any(self._messages)
            or self._limit_is_due(self._local_max_data)
            or self._limit_is_due(self._local_max_streams_bidi)
            or self._limit_is_due(self._local_max_streams_uni)
            or self._datagrams_pending
            or self._ping_pending
            or self._probe_pending
            or self.ack_requests.pending
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
        # First of all the peer's update, which is as good as one of ours.
        self._follow_phase(crypto)
        if (
            self._packets_under_key >= KEY_UPDATE_PACKETS
            and self._handshake_confirmed
            and space.largest_acked_packet >= self._phase_began  # RFC 9001 section 6.1
        ):
            self.key_updates += 1
            crypto.update_key()
            self._follow_phase(crypto)

        while True:
            if (
                self._handshake_confirmed
                and self.trace is None
                and network_path.is_validated
                and not crypto._update_key_requested
                and (space.ack_at is None or space.ack_at > now)
                and not self._control_is_pending(network_path)
            ):
                self._write_stream_packets(builder, crypto, now)
                return

            # ACKs are not paced.
            if space.ack_at is None or space.ack_at > now:
                self._pacing_at = self._pacer.next_send_time(now)
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
                if self.ack_requests.least is not None:
                    builder.start_frame(IMMEDIATE_ACK)
                self._write_ping_frame(builder, comment="probe")
                self._probe_pending = False
            if self.ack_requests.pending and self._handshake_confirmed:
                self._write_ack_frequency_frame(builder)
            if not crypto_stream.sender.buffer_is_empty:
                self._write_crypto_frame(builder=builder, space=space, stream=crypto_stream)
            self._write_stream_frames(builder, self._message_queues)
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

            # What room is left goes to data.
            self._write_stream_frames(builder, self._data_queues, self._credit_kept)

            if builder.packet_is_empty:
                return
            self._packets_under_key += 1
            self._pacer.spend(self._max_datagram_size - builder.remaining_buffer_space)

    def _follow_phase(self, crypto: CryptoPair) -> None:
        """Count anew where the keys have been updated, by us or by the peer."""
        if crypto.key_phase != self._key_phase:
            self._key_phase, self._phase_began = crypto.key_phase, self._packet_number
            self._packets_under_key = 0

    def _write_stream_frames(
        self, builder: QuicPacketBuilder, queues: RankedQueues, kept: int = 0
    ) -> None:
        """Fill the packet under way from `queues`."""
        while (room := builder.remaining_flight_space) >= MIN_STREAM_ROOM:
            frame = self._next_data(room, queues, kept)
            if frame is None:
                return
            stream, width, start, length, fin, pieces, _ = frame
            header = stream_header(stream.id_octets, width, start, length, fin)
            buf = builder.start_frame(
                header[0],
                capacity=len(header),
                handler=stream.sender.on_data_delivery,
                handler_args=(start, start + length, fin),
            )
            buf.push_bytes(header[1:])
            for piece in pieces:
                buf.push_bytes(bytes(piece))
            if self.trace is not None and builder.quic_logger_frames is not None:
                builder.quic_logger_frames.append(
                    {
                        "fin": fin,
                        "frame_type": "stream",
                        "length": length,
                        "offset": start,
                        "stream_id": stream.id,
                    }
                )

    def _next_data(
        self, room: int, queues: RankedQueues, kept: int, packets: int = 1
    ) -> tuple[Stream, int, int, int, bool, list[memoryview], int] | None:
        """The next octets to send: a frame of at most `room`, or equal ones for up to `packets`.

        Returns the stream, the octets that the Offset is to have, Offset, length, FIN, the data
        and how many frames it fills. New data leaves `kept` octets of the session's credit.
        """
        for queue, lost in queues:
            if not queue:
                continue
            credit = self._remote_max_data - self._remote_max_data_used - kept
            leave: list[int] = []
            found = None
            for stream_id, stream in queue.items():
                out = stream.out
                start = out.next_lost if lost else out.highest_offset
                width = 4 if start + packets * room < 1 << 30 else 8
                # Around the payload: type, id, offset, length.
                space = room - 3 - width - len(stream.id_octets)
                if space > MAX_FRAME_DATA:
                    space = MAX_FRAME_DATA
                count = 1
                if lost:
                    if not out.has_lost:
                        leave.append(stream_id)
                        continue
                    if packets > 1:
                        count = max(1, min(packets, out.lost_in_a_row // space))
                    start, length, fin, pieces = out.take_lost(space * count)
                    if not out.has_lost:
                        leave.append(stream_id)
                else:
                    limit = out.highest_offset + credit
                    if limit > stream.max_stream_data_remote:
                        limit = stream.max_stream_data_remote
                    if packets > 1:
                        waiting = min(limit, out._buffer_stop) - out.highest_offset
                        turn = -(-(TURN - stream.served) // space)
                        count = max(1, min(packets, turn, waiting // space))
                    taken = out.take_new(space * count, limit)
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
                if not start and length < space:
                    width = 0
                found = stream, width, start, length, fin, pieces, count
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
        """Add packets that hold nothing but STREAM frames behind those of the packet builder, which
        is done with them: nothing else is written."""
        if not any(self._queues):
            return
        if builder._packet is not None:
            builder._end_packet()
        flight = (builder.max_flight_bytes or 0) - builder._flight_bytes
        before: list[Any] = builder._packets
        prefix = short_prefix(crypto.key_phase, builder._peer_cid, builder._spin_bit)
        first, keys = builder._packet_number, self._sealing.of(crypto.send)
        builder._packet_number = self._send_data(keys, prefix, first, flight, now, before)

    def _send_data(
        self, keys: Keys, prefix: bytes, first: int, flight: int, now: float, before: list[Any]
    ) -> int:
        """Seal packets of STREAM frames, numbered from `first` on and of `flight` octets at most,
        into `_sealed`; they are registered with those `before`, if there are any. Returns the
        number of the next packet."""
        allowance = self._pacer.allowance(now)
        if allowance == 0:
            self._pacing_at = self._pacer.next_send_time(now)
            return first
        overhead = len(prefix) + PN_LENGTH + TAG_LENGTH
        size = self._max_datagram_size
        burst = max(1, BURST // size)
        most = min(allowance, burst)
        number = first
        departure = self.recovery.depart(now)
        groups: list[Group] = []
        train: list[SentPacket] = []
        next_data, queues, kept = self._next_data, self._data_queues, self._credit_kept
        total = 0

        # A packet is only begun when a full one fits: runts would cost as much as full ones,
        # and segmentation offload wants equal sizes.
        while (left := min(first + most - number, flight // size)) > 0:
            room = size - overhead
            count = 1
            frames: list[Frame] = []
            handlers: list[tuple[Any, Any]] = []
            while room >= MIN_STREAM_ROOM:
                found = next_data(room, queues, kept, 1 if frames else left)
                if found is None:
                    break
                stream, width, start, length, fin, pieces, count = found
                frames.append((stream.id_octets, width, start, length, fin, pieces))
                handlers.append((stream.out.on_data_delivery, (start, start + length, fin)))
                room -= 3 + len(stream.id_octets) + width + length // count
                if count > 1:
                    break
            if not frames:
                break
            groups.append((count, frames))
            octets = (size - room) * count
            train.append(SentPacket(number, octets, handlers, now, departure, count))
            flight -= octets
            total += octets
            number += count

        if not groups:
            return first
        self._sealed = keys.seal(prefix, first, groups)
        self._packet_number = number
        # Packets are registered in the order of their numbers: here, if the builder has none.
        if before:
            before += train
        else:
            space = self._spaces[tls.Epoch.ONE_RTT]
            self.recovery.departed(train, number - first, total, now, space)
            if not self._ack_eliciting_sent_since_receipt:
                # RFC 9000 section 10.1: the first ack-eliciting packet restarts the idle timer.
                self._close_at = now + self._idle_timeout()
                self._ack_eliciting_sent_since_receipt = True
        self._packets_under_key += number - first
        self._pacer.spend(total)
        if any(self._queues):
            if number - first == allowance:
                self._pacing_at = self._pacer.next_send_time(now) or now
            else:
                self.capped = number - first == burst
        return number
