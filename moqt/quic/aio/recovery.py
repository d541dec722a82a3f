"""aioquic's pacer and loss recovery, which also notices when a path carries no large packets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from aioquic.quic.congestion.base import create_congestion_control
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketPacer, QuicPacketRecovery, QuicPacketSpace

from moqt.quic.aio.black_hole import BlackHole
from moqt.quic.config import MIN_DATAGRAM_SIZE

PACER_TICK = 0.002
"""Event loops wake at best every millisecond: a pacer must let a tick's worth go at once."""

SMALL_PROBES = 2
"""Probe time-outs in a row from which on probes are small: their size may be why none arrives."""


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
    """`narrow` is called once, when packets larger than `MIN_DATAGRAM_SIZE` no longer arrive."""

    def __init__(
        self, *, algorithm: str, max_datagram_size: int, narrow: Callable[[], None], **rest: Any
    ) -> None:
        super().__init__(
            congestion_control_algorithm=algorithm, max_datagram_size=max_datagram_size, **rest
        )
        self.pacer = self._pacer = Pacer(max_datagram_size=max_datagram_size)
        self._algorithm = algorithm
        self._narrow = narrow
        self._black_hole = BlackHole()
        self._large = max_datagram_size > MIN_DATAGRAM_SIZE

    @property
    def wants_small_probes(self) -> bool:
        return self._large and self.handshake_confirmed and self._pto_count >= SMALL_PROBES

    def on_ack_received(
        self, *, ack_rangeset: RangeSet, ack_delay: float, now: float, space: QuicPacketSpace
    ) -> None:
        if self._black_hole.suspected:
            self._black_hole.acknowledged(_sizes(space.sent_packets, ack_rangeset))
        super().on_ack_received(
            ack_rangeset=ack_rangeset, ack_delay=ack_delay, now=now, space=space
        )

    def _on_packets_lost(
        self,
        *,
        congestion_event: bool = True,
        now: float,
        packets: Iterable[QuicSentPacket],
        persistent_congestion: bool = False,
        space: QuicPacketSpace,
    ) -> None:
        super()._on_packets_lost(
            congestion_event=congestion_event,
            now=now,
            packets=packets,
            persistent_congestion=persistent_congestion,
            space=space,
        )
        if (
            packets
            and congestion_event
            and self._large
            and self.handshake_confirmed
            and self._black_hole.lost([(p.sent_time or 0.0, p.sent_bytes) for p in packets], now)
        ):
            self._begin_small()

    def _begin_small(self) -> None:
        """Nothing of what was lost tells of congestion: begin as on a new path."""
        self._large = False
        flight = self._cc.bytes_in_flight
        self._cc = create_congestion_control(self._algorithm, max_datagram_size=MIN_DATAGRAM_SIZE)
        self._cc.bytes_in_flight = flight
        self._pacer._max_datagram_size = MIN_DATAGRAM_SIZE
        self._pacer.update_rate(self._cc.congestion_window, self._rtt_smoothed)
        self._narrow()


def _sizes(sent: dict[int, QuicSentPacket], acknowledged: RangeSet) -> Iterator[int]:
    """The octets of those of `sent`, in the order of their numbers, that are `acknowledged`."""
    numbers = list(sent)
    for each in acknowledged:
        for number in numbers[bisect_left(numbers, each.start) : bisect_left(numbers, each.stop)]:
            yield sent[number].sent_bytes
