"""What the octets of a 1-RTT packet are for."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Any

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


def stream_header(stream_id: bytes, width: int, start: int, length: int, fin: bool) -> bytes:
    """The octets of a STREAM frame before its data; `width` 0 leaves out an Offset of 0.

    The Offset has `width` octets (4 or 8) and the Length 2, so that frames of one stream have
    headers of one size (RFC 9000 section 16 lets integers be longer than they need).
    """
    if width == 4:
        offset = (start | 0x80000000).to_bytes(4, "big")
    elif width:
        offset = (start | 0xC000000000000000).to_bytes(8, "big")
    else:
        return b"%c%b%c%c" % (0x0A | fin, stream_id, length >> 8 | 0x40, length & 0xFF)
    return b"%c%b%b%c%c" % (0x0E | fin, stream_id, offset, length >> 8 | 0x40, length & 0xFF)


def ack_frame(ranges: Iterable[range], delay: int) -> bytes:
    """An ACK frame of packets in ranges that rise; `delay` as it is on the wire (RFC 9000 section
    19.3)."""
    received = list(ranges)
    newest = received.pop()
    numbers = [newest.stop - 1, delay, len(received), len(newest) - 1]
    following = newest.start
    for run in reversed(received):
        numbers += following - run.stop - 1, len(run) - 1
        following = run.start
    return b"\x02" + b"".join(map(varint, numbers))


def short_prefix(key_phase: int, cid: bytes, spin: bool) -> bytes:
    """What 1-RTT packets have before their numbers, in clear."""
    return b"%c%b" % (0x40 | (spin << 5) | (key_phase << 2) | (PN_LENGTH - 1), cid)
