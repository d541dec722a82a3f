"""aioquic's pacer and loss recovery, which also notices when a path carries no large packets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from aioquic.quic.congestion.base import K_INITIAL_WINDOW, create_congestion_control
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketPacer, QuicPacketRecovery, QuicPacketSpace

from moqt.quic.config import MIN_DATAGRAM_SIZE
from moqt.quic.mtu.black_hole import BlackHole

PACER_TICK = 0.002
"""Event loops wake at best every millisecond: a pacer must let a tick's worth go at once."""

SMALL_PROBES = 1
"""Probe time-outs in a row from which on probes are small: that of the last packets may be why none
arrived. Where it is not, a packet is cut in two."""


class Pacer(QuicPacketPacer):
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


class Recovery(QuicPacketRecovery):
    """aioquic's recovery with our pacer, for packets whose size changes with the path's."""

    def __init__(self, *, algorithm: str, max_datagram_size: int, **rest: Any) -> None:
        super().__init__(
            congestion_control_algorithm=algorithm, max_datagram_size=max_datagram_size, **rest
        )
        self.pacer = self._pacer = Pacer(max_datagram_size=max_datagram_size)
        self.narrow: Callable[[], None] = _nothing
        """Called when packets of the size they have no longer arrive, and have 1,200 octets now."""
        self.mtu_probes: set[int] = set()
        """Packet numbers of probes of the path's MTU: their loss is no sign of congestion."""
        self.reserved = 0
        """Octets of the window that data leaves to such a probe."""
        self._algorithm = algorithm
        self._black_hole = BlackHole()
        self._size = max_datagram_size

    @property
    def congestion_window(self) -> int:
        return self._cc.congestion_window - self.reserved

    @property
    def wants_small_probes(self) -> bool:
        return (
            self._pto_count >= SMALL_PROBES
            and self._size > MIN_DATAGRAM_SIZE
            and self.handshake_confirmed
        )

    def resize(self, size: int) -> None:
        """Packets have at most `size` octets from now on."""
        self._size = size
        self._black_hole = BlackHole()
        cc: Any = self._cc
        cc._max_datagram_size = size
        if self._algorithm == "cubic":
            cc.additive_increase_factor = size
        if cc.ssthresh is None:
            # RFC 9002 section 7.2: nothing is known of the path yet but what it carries.
            cc.congestion_window = max(cc.congestion_window, K_INITIAL_WINDOW * size)
        self._pacer._max_datagram_size = size
        if self._pacer.packet_time is not None:
            self._pacer.update_rate(cc.congestion_window, self._rtt_smoothed)

    def on_ack_received(
        self, *, ack_rangeset: RangeSet, ack_delay: float, now: float, space: QuicPacketSpace
    ) -> None:
        if self._black_hole.suspected:
            self._black_hole.acknowledged(_sizes(space.sent_packets, ack_rangeset))
        super().on_ack_received(
            ack_rangeset=ack_rangeset, ack_delay=ack_delay, now=now, space=space
        )

    def reschedule_data(self, *, now: float, speed_up_handshake: bool = False) -> None:
        # Else a probe time-out would find the probes first, which have nothing to send again.
        for space in self.spaces if self.mtu_probes else ():
            sent = space.sent_packets
            probes = [sent[number] for number in self.mtu_probes if number in sent]
            if probes:
                self._on_packets_lost(congestion_event=False, now=now, packets=probes, space=space)
        super().reschedule_data(now=now, speed_up_handshake=speed_up_handshake)

    def _in_persistent_congestion(self, *, packets: list[QuicSentPacket]) -> bool:
        return super()._in_persistent_congestion(packets=self._without_probes(packets))

    def _without_probes(self, packets: Iterable[QuicSentPacket]) -> list[QuicSentPacket]:
        probes = self.mtu_probes
        return [packet for packet in packets if packet.packet_number not in probes]

    def _on_packets_lost(
        self,
        *,
        congestion_event: bool = True,
        now: float,
        packets: Iterable[QuicSentPacket],
        persistent_congestion: bool = False,
        space: QuicPacketSpace,
    ) -> None:
        packets = list(packets)
        if not packets:
            return
        if self.mtu_probes and congestion_event:
            others = self._without_probes(packets)
            if len(others) < len(packets):
                probes = [packet for packet in packets if packet.packet_number in self.mtu_probes]
                super()._on_packets_lost(
                    congestion_event=False, now=now, packets=probes, space=space
                )
                packets = others
        super()._on_packets_lost(
            congestion_event=congestion_event,
            now=now,
            packets=packets,
            persistent_congestion=persistent_congestion,
            space=space,
        )
        if (
            congestion_event
            and self._size > MIN_DATAGRAM_SIZE
            and self._black_hole.lost(
                [(p.sent_time or 0.0, p.sent_bytes) for p in packets], now, self._size
            )
        ):
            self._begin_small()

    def _begin_small(self) -> None:
        """Nothing of what was lost tells of congestion: begin as on a new path."""
        flight = self._cc.bytes_in_flight
        self._cc = create_congestion_control(self._algorithm, max_datagram_size=MIN_DATAGRAM_SIZE)
        self._cc.bytes_in_flight = flight
        self.resize(MIN_DATAGRAM_SIZE)
        self.narrow()


def _nothing() -> None:
    """Nobody else has to know."""


def _sizes(sent: dict[int, QuicSentPacket], acknowledged: RangeSet) -> Iterator[int]:
    """The octets of those of `sent`, in the order of their numbers, that are `acknowledged`."""
    numbers = list(sent)
    for each in acknowledged:
        for number in numbers[bisect_left(numbers, each.start) : bisect_left(numbers, each.stop)]:
            yield sent[number].sent_bytes
