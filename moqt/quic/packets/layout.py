"""Short cuts for 1-RTT packets that hold only STREAM frames, and how fast they may go."""

from __future__ import annotations

from typing import Any

from aioquic import tls
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.recovery import QuicPacketPacer

Address = tuple[Any, ...]
Datagram = tuple[bytes, Address]

CID_LENGTH = 8
TAG_LENGTH = 16
PN_LENGTH = 2
SAMPLE_LENGTH = 16

SHORT_OVERHEAD = 1 + CID_LENGTH + PN_LENGTH + TAG_LENGTH
"""Octets of a 1-RTT packet that are not frames."""

PACER_TICK = 0.002
"""Event loops wake at best every millisecond: a pacer must let a tick's worth go at once."""


def varint(value: int) -> bytes:
    if value < 0x40:
        return value.to_bytes(1, "big")
    if value < 0x4000:
        return (value | 0x4000).to_bytes(2, "big")
    if value < 0x40000000:
        return (value | 0x80000000).to_bytes(4, "big")
    return (value | 0xC000000000000000).to_bytes(8, "big")


class SentPacket:
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


def header_masks(hp: Any, samples: list[bytes]) -> bytes:
    """Header-protection masks for several packets, 16 octets apart."""
    if hp._is_chacha20:
        return b"".join(hp._mask(sample) + bytes(SAMPLE_LENGTH - 5) for sample in samples)
    masks: bytes = hp._encryptor.update(b"".join(samples))
    return masks
