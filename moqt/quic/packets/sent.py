"""The packets of one space that are under way, oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from aioquic import tls
from aioquic.quic.packet import QuicPacketType

from moqt.quic.congestion.controller import Departure


class SentPacket:
    """`QuicSentPacket` for 1-RTT packets of STREAM frames, without a dict and default lists.

    It stands for a run of `count` packets, numbered from `packet_number` on, that left together:
    each has as many octets, and each an equal part of what the one handler is told of.
    """

    __slots__ = (
        "count",
        "delivery_handlers",
        "departure",
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
        self,
        packet_number: int,
        sent_bytes: int,
        delivery_handlers: Sequence[tuple[Any, Any]],
        sent_time: float,
        departure: Departure,
        count: int = 1,
    ) -> None:
        self.packet_number = packet_number
        self.count = count
        self.sent_bytes = sent_bytes
        self.delivery_handlers = delivery_handlers
        self.sent_time = sent_time
        self.departure = departure
        self.quic_logger_frames: list[Any] = []

    def cut(self, count: int) -> SentPacket:
        """Take the first `count` packets off, and not all."""
        octets = self.sent_bytes // self.count * count
        handlers = self.delivery_handlers
        if handlers:
            ((handler, (start, stop, fin)),) = handlers
            middle = start + (stop - start) // self.count * count
            handlers = ((handler, (start, middle, False)),)
            self.delivery_handlers = ((handler, (middle, stop, fin)),)
        front = SentPacket(
            self.packet_number, octets, handlers, self.sent_time, self.departure, count
        )
        self.packet_number += count
        self.count -= count
        self.sent_bytes -= octets
        return front


class SentPackets(deque[Any]):
    """Those of one space, in the order of their numbers. An entry may be a run of them.

    What a call costs is in proportion to the entries it gives and puts back.
    """

    def take(self, ranges: Sequence[range]) -> tuple[list[Any], list[Any]]:
        """Those that an ACK frame has in its (rising) ranges, and those between that it has not.

        Nothing is taken where it has none.
        """
        acked: list[Any] = []
        missing: list[Any] = []
        first = self[0].packet_number if self else 0
        for run in ranges:
            start, stop = run.start, run.stop
            if stop <= first:
                continue
            while self:
                packet = self[0]
                number = packet.packet_number
                if number >= stop:
                    break
                end = number + packet.count
                if number < start:
                    if end > start:
                        packet = packet.cut(start - number)
                    else:
                        self.popleft()
                    missing.append(packet)
                    continue
                if end > stop:
                    packet = packet.cut(stop - number)
                else:
                    self.popleft()
                acked.append(packet)
        if not acked:
            self.put_back(missing)
            missing = []
        return acked, missing

    def take_before(self, number: int) -> list[Any]:
        """Those with lower numbers."""
        taken: list[Any] = []
        while self and (first := self[0].packet_number) < number:
            packet = self[0]
            if first + packet.count > number:
                packet = packet.cut(number - first)
            else:
                self.popleft()
            taken.append(packet)
        return taken

    def put_back(self, packets: Sequence[Any]) -> None:
        """Some that were taken, which are older than all that are here."""
        self.extendleft(reversed(packets))

    def oldest_with_data(self) -> Any:
        """The oldest single packet of which there is something to send again; None if none has.

        An ACK is nothing to send again.
        """
        for index, packet in enumerate(self):
            if packet.is_ack_eliciting and packet.delivery_handlers:
                if packet.count == 1:
                    return packet
                front = packet.cut(1)
                self.insert(index, front)
                return front
        return None
