"""What the octets of a 1-RTT packet are for, and the record of one that was sent."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any

from aioquic import tls
from aioquic.quic.packet import QuicPacketType

from moqt.quic.congestion.controller import Departure

Address = tuple[Any, ...]
"""Where a peer is, as sockets have it: `(host, port)`, or four members for IPv6. On a socket for
every address of the host one more follows: the address of ours that the peer talks to."""

Datagram = tuple[bytes, Address]

CID_LENGTH = 8
TAG_LENGTH = 16
PN_LENGTH = 2
SAMPLE_LENGTH = 16

SHORT_OVERHEAD = 1 + CID_LENGTH + PN_LENGTH + TAG_LENGTH
"""Octets of a 1-RTT packet that are not frames."""


def show_address(addr: Address | None) -> str:
    """An address for people: `192.0.2.1:4443`, `[2001:db8::1]:4443`."""
    if addr is None:
        return "an unknown address"
    host = str(addr[0]).removeprefix("::ffff:") if "." in str(addr[0]) else str(addr[0])
    return f"[{host}]:{addr[1]}" if ":" in host else f"{host}:{addr[1]}"


def origin_of(addr: Address) -> str:
    """What counts as one address: an IPv4 address, or a /64 of IPv6."""
    try:
        ip = ipaddress.ip_address(addr[0])
    except ValueError:
        return str(addr[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return ip.packed[:8].hex()


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
    ) -> None:
        self.packet_number = packet_number
        self.sent_bytes = sent_bytes
        self.delivery_handlers = delivery_handlers
        self.sent_time = sent_time
        self.departure = departure
        self.quic_logger_frames: list[Any] = []
