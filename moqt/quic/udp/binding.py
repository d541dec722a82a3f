"""Names and numbers to addresses, and sockets that are bound to these."""

from __future__ import annotations

import asyncio
import socket

from moqt.quic.packets.layout import Address
from moqt.quic.udp.socket import UdpSocket


async def bound(
    host: str | None, port: int, *, buffer_size: int, shared: bool = False
) -> UdpSocket:
    """A socket on `host` (None or "" for every address) and `port` (0 for a free one); `shared`:
    further ones may be bound there. Raises OSError."""
    infos = await resolve(host or None, port, passive=True)
    if not host:
        # One IPv6 socket serves both families; without IPv6 there is only the other.
        infos.sort(key=lambda info: info[0] != socket.AF_INET6)
    failure: OSError | None = None
    for family, _, _, _, addr in infos:
        try:
            return UdpSocket(family, local=addr, buffer_size=buffer_size, shared=shared)
        except OSError as exc:
            failure = failure or exc
    raise failure or OSError(f"cannot resolve {host}")


async def resolve(
    host: str | None, port: int, *, passive: bool
) -> list[tuple[int, int, int, str, Address]]:
    infos = await asyncio.get_running_loop().getaddrinfo(
        host,
        port,
        type=socket.SOCK_DGRAM,
        flags=socket.AI_PASSIVE if passive else 0,
    )
    seen: dict[Address, tuple[int, int, int, str, Address]] = {}
    for info in infos:
        seen.setdefault(info[4], info)
    return list(seen.values())
