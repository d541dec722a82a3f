"""Loss detection and the seat of congestion control (RFC 9002), in place of aioquic's.

aioquic's connection calls it by the names that its own has. What it costs is in proportion to what
an ACK frame acknowledges and what it finds missing, never to what is under way; the congestion
controller is called once per ACK frame. Differences to aioquic's, beside `moqt.quic.congestion`:

- packets that others have overtaken are given time as RACK does (RFC 8985), not three packets;
- a packet that comes after it was found lost is noticed, and its consequences are undone;
- a probe time-out sends data again without declaring it lost (RFC 9002 section 6.2.1);
- persistent congestion is recognised across ACK frames and probes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from aioquic.quic.logger import QuicLoggerTrace
from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketSpace

from moqt.quic.aio.trace import log_metrics
from moqt.quic.config import MIN_DATAGRAM_SIZE
from moqt.quic.congestion.algorithms import create_controller
from moqt.quic.congestion.careful_resume import LEAST_TRIP, Saved
from moqt.quic.congestion.controller import Controller, ControllerState, Departure, Sample
from moqt.quic.congestion.delivery import Delivery
from moqt.quic.congestion.losses import LostPackets
from moqt.quic.congestion.pacer import Pacer
from moqt.quic.congestion.reordering import GRANULARITY, PACKET_THRESHOLD, ReorderingWindow
from moqt.quic.counters import Wait
from moqt.quic.mtu.black_hole import BlackHole
from moqt.quic.packets.sent import SentPackets

SMALL_PROBES = 1
"""Probe time-outs in a row from which on probes are small: that of the last packets may be why none
arrived. Where it is not, a packet is cut in two."""

SHORTEST_TRIP = 1e-6
"""Seconds: a clock may stand still over a round trip in one process."""

LONGEST_BACKOFF = 1.0
"""Seconds that probes of a silent path are apart at most, if two time-outs are not longer."""

PERSISTENT_CONGESTION = 3
"""Probe time-outs without an arrival between two losses (RFC 9002 section 7.6.1)."""

_ACKED, _LOST = QuicDeliveryState.ACKED, QuicDeliveryState.LOST


class Recovery:
    """One connection's, whose packets have the size that the path carries.

    `send_probe` asks for a packet that elicits an ACK, whatever the window says.
    """

    def __init__(
        self,
        *,
        algorithm: str,
        initial_rtt: float,
        max_datagram_size: int,
        peer_completed_address_validation: bool,
        send_probe: Callable[[], None],
        logger: logging.LoggerAdapter[Any] | None = None,
        quic_logger: QuicLoggerTrace | None = None,
    ) -> None:
        self.handshake_confirmed = False
        self.max_ack_delay = 0.025
        self.peer_completed_address_validation = peer_completed_address_validation
        self.controller: Controller = create_controller(algorithm, max_datagram_size)
        self.delivery = Delivery()
        self.pacer = Pacer(max_datagram_size)
        self.narrow: Callable[[], None] = _nothing
        """Called when packets of the size they have no longer arrive, and have 1,200 octets now."""
        self.mtu_probes: set[int] = set()
        """Packet numbers of probes of the path's MTU: their loss is no sign of congestion."""
        self.reserved = 0
        """Octets of the window that data leaves to such a probe."""
        self.news = False
        """Whether packets were lost, or came late, since `take_news`."""
        self.lost_packets = 0
        self.spurious_losses = 0
        self._told = (0, 0)
        self._algorithm = algorithm
        self._send_probe = send_probe
        self._logger = logger
        self._quic_logger = quic_logger
        self._black_hole = BlackHole()
        self._size = max_datagram_size
        self._lost = LostPackets()
        self._reordering = ReorderingWindow()
        self._round_had_loss = False
        self._round_ends = 0  # octets delivered
        self._window_limited = False
        self._phase = self.controller.state().phase
        self._pto_count = 0
        self._rtt_first_sample_time: float | None = None
        self._rtt_initial = initial_rtt
        self._rtt_latest = 0.0
        self._rtt_min = inf
        self._rtt_smoothed = 0.0
        self._rtt_variance = 0.0
        self._time_of_last_sent_ack_eliciting_packet = 0.0
        self._spaces: list[QuicPacketSpace] = []

    # ---- what the connection asks

    @property
    def spaces(self) -> list[QuicPacketSpace]:
        return self._spaces

    @spaces.setter
    def spaces(self, spaces: list[QuicPacketSpace]) -> None:
        # Those of before a Retry or a change of version: nothing of them will be acknowledged.
        for space in self._spaces:
            self.discard_space(space)
        self._spaces = spaces
        for space in spaces:
            # In the order of their numbers, so that those acknowledged first stand first.
            space.sent_packets = SentPackets()  # type: ignore[assignment]

    @property
    def bytes_in_flight(self) -> int:
        return self.delivery.in_flight

    @property
    def congestion_window(self) -> int:
        return self.controller.window - self.reserved

    def state(self) -> ControllerState:
        """The controller's, with the shortest round trip."""
        state = self.controller.state()
        if state.rtt_min is None and self._rtt_min < inf:
            state = replace(state, rtt_min=self._rtt_min)
        return state

    @property
    def trip(self) -> float:
        """The round trip, smoothed, in seconds; 0 before the first was measured."""
        return self._rtt_smoothed

    @property
    def sees_reordering(self) -> bool:
        return self._reordering.seen

    def take_news(self) -> tuple[int, int]:
        """Packets found lost, and packets that came after that, since the last call."""
        lost, late = self._told
        self._told = self.lost_packets, self.spurious_losses
        self.news = False
        return self.lost_packets - lost, self.spurious_losses - late

    @property
    def wants_small_probes(self) -> bool:
        return (
            self._pto_count >= SMALL_PROBES
            and self._size > MIN_DATAGRAM_SIZE
            and self.handshake_confirmed
        )

    @property
    def in_silence(self) -> bool:
        """Whether not even the probe of one time-out was answered before the next."""
        return self._pto_count > 1

    def resize(self, size: int) -> None:
        """Packets have at most `size` octets from now on."""
        self._size = self.pacer.size = size
        self._black_hole = BlackHole()
        self.controller.on_new_size(size)

    def resume(self, saved: Saved, now: float) -> None:
        """The handshake is over; a connection before this one left behind what the path held."""
        self.jump(saved.jump(self._rtt_smoothed), now)

    def jump(self, octets: int, now: float) -> None:
        """The handshake is over, and so much may be under way if nothing was lost in it."""
        trip = self._rtt_smoothed
        if octets and trip >= LEAST_TRIP and not self.lost_packets:
            self.controller.resume(octets, trip, self.delivery.delivered, now)
            self._set_pace(now)

    def begin_path(self, now: float) -> None:
        """Packets go to another host from now on: what is known of the path is of no use.

        What is under way has no octets any more: whether it is acknowledged or lost, it tells
        nothing of the new path (RFC 9000 section 9.4).
        """
        for space in self._spaces:
            for packet in self._sent(space):
                packet.sent_bytes = 0
        self.delivery.expired(self.delivery.in_flight)
        self._lost = LostPackets()
        self.controller = create_controller(self._algorithm, self._size)
        self._set_pace(now)
        self._rtt_first_sample_time = None
        self._rtt_min = inf
        self._rtt_latest = self._rtt_smoothed = self._rtt_variance = 0.0

    def get_probe_timeout(self, *, include_max_ack_delay: bool = True) -> float:
        """The probe time-out without backoff, in seconds (RFC 9002 section 6.2.1)."""
        if self._rtt_first_sample_time is None:
            return 2 * self._rtt_initial
        timeout = self._rtt_smoothed + max(4 * self._rtt_variance, GRANULARITY)
        return timeout + self.max_ack_delay if include_max_ack_delay else timeout

    def get_loss_detection_time(self, *, amplification_limited: bool) -> float | None:
        """When `on_loss_detection_timeout` is to be called; None for no timer.

        With `amplification_limited` no probe may be sent, so that none is waited for.
        """
        space = self._loss_space()
        if space is not None:
            return space.loss_time
        if amplification_limited:
            return None
        # Application data arms no probe before the handshake is confirmed (section 6.2.1).
        waiting = any(
            space.ack_eliciting_in_flight
            for space in self._spaces
            if self.handshake_confirmed or not space.is_application_data
        )
        if self.peer_completed_address_validation and not waiting:
            return None
        timeout = self.get_probe_timeout(include_max_ack_delay=self.handshake_confirmed)
        apart = min(timeout * (1 << self._pto_count), max(2 * timeout, LONGEST_BACKOFF))
        return self._time_of_last_sent_ack_eliciting_packet + apart

    def _loss_space(self) -> QuicPacketSpace | None:
        """The space of which a packet is given up first."""
        found, first = None, inf
        for space in self._spaces:
            if space.loss_time is not None and space.loss_time < first:
                found, first = space, space.loss_time
        return found

    # ---- sending

    def on_packet_sent(self, *, packet: Any, space: QuicPacketSpace) -> None:
        """A packet of the general path leaves."""
        now = packet.sent_time
        if packet.in_flight:
            packet.departure = self._leaves(packet.sent_bytes, now)
            if packet.is_ack_eliciting and (
                self.handshake_confirmed or not space.is_application_data
            ):
                self._time_of_last_sent_ack_eliciting_packet = now
        packet.count = count = getattr(packet, "count", 1)  # aioquic's stand for themselves
        if packet.is_ack_eliciting:
            space.ack_eliciting_in_flight += count
        self._sent(space).append(packet)

    def depart(self, now: float) -> Departure:
        """A train of 1-RTT packets is about to leave: what they remember; `departed` follows."""
        return self._leaves(0, now)

    def departed(
        self, packets: Sequence[Any], count: int, octets: int, now: float, space: QuicPacketSpace
    ) -> None:
        """The train's `packets`, `count` in all and of so many octets, have left."""
        self.delivery.sent(octets, now)
        self._time_of_last_sent_ack_eliciting_packet = now
        space.ack_eliciting_in_flight += count
        self._sent(space).extend(packets)

    def _leaves(self, octets: int, now: float) -> Departure:
        delivery = self.delivery
        if delivery.in_flight == 0 and delivery.delivered:
            self.controller.on_idle_restart(now)
            self._set_pace(now)
        return delivery.sent(octets, now)

    @staticmethod
    def _sent(space: QuicPacketSpace) -> SentPackets:
        sent: Any = space.sent_packets
        assert isinstance(sent, SentPackets)
        return sent

    def sending_stopped(self, room: int, paced: bool) -> Wait:
        """Nothing more goes now: `paced` for the pacer's sake; packets have `room` octets."""
        if paced:
            return Wait.PACING
        self.pacer.released()
        if self.delivery.in_flight + room > self.congestion_window:
            self._window_limited = True
            return Wait.CONGESTION_WINDOW
        self.delivery.limited_by_application()
        return Wait.APPLICATION

    # ---- acknowledgements

    def on_ack_received(
        self, *, ack_rangeset: RangeSet, ack_delay: float, now: float, space: QuicPacketSpace
    ) -> None:
        """An ACK frame of ranges that rise came; `ack_delay` is in seconds."""
        sent = self._sent(space)
        ranges = list(ack_rangeset)
        largest = ranges[-1].stop - 1
        late = self._came_late(ranges, now) if self._lost else 0
        acked, missing = sent.take(ranges)
        if not acked:
            return
        if acked[0].packet_number < space.largest_acked_packet:
            self._reordering.overtaken()
        departure: Departure | None = None
        octets = eliciting = 0
        suspected, sizes = self._black_hole.suspected, []
        for packet in acked:
            if packet.in_flight:
                octets += packet.sent_bytes
                departure = packet.departure
            if packet.is_ack_eliciting:
                eliciting += packet.count
            if suspected:
                sizes.append(packet.sent_bytes // packet.count)
            for handler, args in packet.delivery_handlers:
                handler(_ACKED, *args)
        newest = acked[-1]
        space.ack_eliciting_in_flight -= eliciting
        if largest > space.largest_acked_packet:
            space.largest_acked_packet = largest
        missing += sent.take_before(space.largest_acked_packet)
        rtt = None
        if largest == newest.packet_number + newest.count - 1 and eliciting and newest.sent_bytes:
            rtt = max(now - newest.sent_time, SHORTEST_TRIP)
            self._measured(rtt, ack_delay, now)
        rate = None
        if not octets:
            departure = None
        if departure is not None:
            self.delivery.acked(octets, departure, now)
            rate = self.delivery.rate(departure, self._rtt_min)
        if suspected:
            self._black_hole.acknowledged(sizes)
        lost = self._detect(missing, space, now)
        self._tell(now, octets + late, lost, departure, rtt, rate, space)
        if self.peer_completed_address_validation:
            self._pto_count = 0

    def _measured(self, rtt: float, ack_delay: float, now: float) -> None:
        """RFC 9002 section 5."""
        if self._rtt_first_sample_time is None:
            self._rtt_first_sample_time = now
            self._rtt_min = self._rtt_latest = self._rtt_smoothed = rtt
            self._rtt_variance = rtt / 2
            return
        self._rtt_min = min(self._rtt_min, rtt)
        if self.handshake_confirmed:
            ack_delay = min(ack_delay, self.max_ack_delay)
        self._rtt_latest = rtt - ack_delay if rtt >= self._rtt_min + ack_delay else rtt
        self._rtt_variance += (abs(self._rtt_smoothed - self._rtt_latest) - self._rtt_variance) / 4
        self._rtt_smoothed += (self._rtt_latest - self._rtt_smoothed) / 8

    def _came_late(self, ranges: Sequence[range], now: float) -> int:
        """Octets of packets that were found lost and are acknowledged now."""
        self._lost.forget(now - 2 * self.get_probe_timeout())
        late = self._lost.came(ranges)
        if not late:
            return 0
        self.spurious_losses += len(late)
        self.news = True
        self._reordering.too_small(now, self._rtt_smoothed)
        self._round_had_loss = False
        octets = sum(late)
        self.delivery.came_late(octets)
        if not self._lost:
            self.controller.on_spurious(now)
        return octets

    def _tell(
        self,
        now: float,
        acked: int,
        lost: list[Any],
        departure: Departure | None,
        rtt: float | None,
        rate: float | None,
        space: QuicPacketSpace,
    ) -> None:
        """Tell the controller what an ACK frame or the timer has shown, and act on its answer."""
        delivery = self.delivery
        if departure is not None and departure.delivered >= self._round_ends:
            self._round_ends = delivery.delivered
            if self._round_had_loss:
                self._reordering.was_loss()
            self._round_had_loss = False
        congestive = [packet for packet in lost if packet.in_flight and packet.sent_bytes]
        octets = sum(packet.sent_bytes for packet in congestive)
        self._round_had_loss = self._round_had_loss or bool(congestive)
        self.controller.on_acks(
            Sample(
                now=now,
                acked=acked,
                lost=octets,
                lost_runs=self._lost.take_runs() if congestive else 0,
                in_flight=delivery.in_flight,
                delivered=delivery.delivered,
                lost_ever=delivery.lost,
                departure=departure,
                newest_loss=congestive[-1].departure if congestive else None,
                rate=rate,
                rtt=rtt,
                rtt_smoothed=self._rtt_smoothed,
                window_limited=self._window_limited,
            )
        )
        self._window_limited = False
        if lost and self._is_persistent(lost):
            self._lost.break_silence()
            self._rtt_min = self._rtt_latest  # section 5.2
            self.controller.on_persistent_congestion(now)
        if self.pacer.late or self.controller.wants_app_limited:
            self.pacer.late = False
            delivery.limited_by_application()
        self._set_pace(now)
        if self._quic_logger is not None:
            self._phase = log_metrics(
                self._quic_logger,
                self.state(),
                self._phase,
                in_flight=delivery.in_flight,
                trips=(self._rtt_smoothed, self._rtt_variance, self._rtt_latest),
                probe_timeouts=self._pto_count,
            )
        if (
            congestive
            and self._size > MIN_DATAGRAM_SIZE
            and self._black_hole.lost(
                [(p.sent_time, p.sent_bytes // p.count) for p in congestive for _ in _numbers(p)],
                now,
                self._size,
            )
        ):
            self._begin_small(now)

    def _set_pace(self, now: float) -> None:
        controller = self.controller
        trip = max(self._rtt_min, self._rtt_smoothed / 8)  # a path may become longer
        self.pacer.set_rate(controller.pacing_rate, controller.quantum, now, trip)

    # ---- losses

    def on_loss_detection_timeout(self, *, now: float) -> None:
        space = self._loss_space()
        if space is None:
            self._pto_count += 1
            self.reschedule_data(now=now)
            return
        missing = self._sent(space).take_before(space.largest_acked_packet)
        lost = self._detect(missing, space, now)
        if lost:
            self._tell(now, 0, lost, None, None, None, space)

    def _detect(self, missing: list[Any], space: QuicPacketSpace, now: float) -> list[Any]:
        """Those of the packets `missing`, in order, that are lost; the others wait on.

        All were sent before one that is acknowledged.
        """
        space.loss_time = None
        if not missing:
            return missing
        measured = self._rtt_first_sample_time is not None
        delay = self._reordering.delay(
            self._rtt_latest if measured else self._rtt_initial,
            self._rtt_smoothed,
            self._rtt_min if measured else self._rtt_initial,
        )
        overdue = now - delay
        behind = -1 if self._reordering.seen else space.largest_acked_packet - PACKET_THRESHOLD
        lost: list[Any] = []
        for index, packet in enumerate(missing):
            # Numbers and times rise: behind the first that may still come all may.
            if packet.sent_time > overdue:
                overtaken = behind + 1 - packet.packet_number
                if overtaken < packet.count:
                    if overtaken > 0:
                        lost.append(packet.cut(overtaken))
                    space.loss_time = packet.sent_time + delay
                    self._sent(space).put_back(missing[index:])
                    break
            lost.append(packet)
        for packet in lost:
            self._give_up(packet, space, now)
        return lost

    def _give_up(self, packet: Any, space: QuicPacketSpace, now: float) -> None:
        if packet.packet_number in self.mtu_probes:
            # Lost or not, it tells of the path's MTU and of nothing else.
            self.delivery.expired(packet.sent_bytes)
            packet.in_flight = False
        elif packet.in_flight:
            self.delivery.found_lost(packet.sent_bytes)
            each = packet.sent_bytes // packet.count
            for number in _numbers(packet):
                self._lost.add(number, each, now)
            self.lost_packets += packet.count
            self.news = True
        if packet.is_ack_eliciting:
            space.ack_eliciting_in_flight -= packet.count
        trace = self._quic_logger
        if trace is not None:
            kind = trace.packet_type(packet.packet_type)
            data = {"type": kind, "packet_number": packet.packet_number}
            trace.log_event(category="recovery", event="packet_lost", data=data)
        self._send_again(packet)

    @staticmethod
    def _send_again(packet: Any) -> None:
        """What the packet carried is to be sent again; its handlers hear of it but once."""
        handlers, packet.delivery_handlers = packet.delivery_handlers, ()
        for handler, args in handlers:
            handler(_LOST, *args)

    def _is_persistent(self, lost: Sequence[Any]) -> bool:
        since = self._rtt_first_sample_time
        if since is None:
            return False
        longest = max(
            self._lost.silence(
                number,
                packet.sent_time,
                packet.in_flight and packet.is_ack_eliciting and packet.sent_time > since,
            )
            for packet in lost
            for number in _numbers(packet)
        )
        return longest > PERSISTENT_CONGESTION * self.get_probe_timeout()

    def reschedule_data(self, *, now: float, speed_up_handshake: bool = False) -> None:
        """Send a probe with what was sent and is not acknowledged: all CRYPTO data, or else the
        oldest packet's. The packets stay under way: a time-out is no loss (section 6.2).

        To `speed_up_handshake` only CRYPTO data is sent again (section 6.2.3).
        """
        # Probes of the MTU have nothing to send again, and take room from what has.
        for space in self._spaces if self.mtu_probes else ():
            sent = self._sent(space)
            probes = [packet for packet in sent if packet.packet_number in self.mtu_probes]
            for packet in probes:
                sent.remove(packet)
                self._give_up(packet, space, now)
        crypto = [p for space in self._spaces for p in self._sent(space) if p.is_crypto_packet]
        if crypto:
            for packet in crypto:
                self._send_again(packet)
        elif not speed_up_handshake:
            candidates = [
                packet
                for space in self._spaces
                if self.handshake_confirmed or not space.is_application_data
                if (packet := self._sent(space).oldest_with_data()) is not None
            ]
            if candidates:
                self._send_again(min(candidates, key=lambda packet: packet.sent_time))
        self._send_probe()

    def discard_space(self, space: QuicPacketSpace) -> None:
        """The keys of the space are gone: nothing of it will be acknowledged."""
        sent = self._sent(space)
        self.delivery.expired(sum(packet.sent_bytes for packet in sent if packet.in_flight))
        sent.clear()
        space.ack_at = None
        space.ack_eliciting_in_flight = 0
        space.loss_time = None
        self._pto_count = 0

    def _begin_small(self, now: float) -> None:
        """Nothing of what was lost tells of congestion: begin as on a new path."""
        self.controller = create_controller(self._algorithm, MIN_DATAGRAM_SIZE)
        self.resize(MIN_DATAGRAM_SIZE)
        self._set_pace(now)
        self.narrow()


def _numbers(packet: Any) -> range:
    """The numbers of a run of packets."""
    return range(packet.packet_number, packet.packet_number + packet.count)


def _nothing() -> None:
    """Nobody else has to know."""
