"""A non-blocking UDP socket that moves datagrams in batches.

UDP_GRO hands over, and UDP_SEGMENT takes, many equal-sized datagrams of one address in one
system call, where the kernel has them; elsewhere a plain loop does the same.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import struct
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)

Address = tuple[Any, ...]

# Linux constants that the socket module does not name.
UDP_SEGMENT = 103
UDP_GRO = 104
IP_MTU_DISCOVER = 10
IPV6_MTU_DISCOVER = 23
PMTUDISC_PROBE = 3  # don't fragment, and let us find out what the path carries

MAX_SEGMENTS = 64
MAX_BATCH = 65_000
RECEIVE_CALLS = 64
RECEIVE_OCTETS = 512 << 10

_ANCILLARY = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0
_DROPPED = frozenset(
    (
        errno.ENETUNREACH,
        errno.EHOSTUNREACH,
        errno.EPERM,
        errno.EACCES,
        errno.ENOBUFS,
        errno.ENETDOWN,
        errno.EADDRNOTAVAIL,
    )
)


class UdpSocket:
    """`receive` and `send` never block; `refused` is set by an ICMP port-unreachable answer."""

    def __init__(
        self,
        family: int,
        *,
        local: Address | None = None,
        remote: Address | None = None,
        buffer_size: int = 4 << 20,
        offload: bool = True,
    ) -> None:
        self.refused = False
        self.dropped = 0  # datagrams the kernel would not send
        self._connected = remote is not None
        self._warned: set[int] = set()
        self._buffer = bytearray(1 << 16)
        self._view = memoryview(self._buffer)
        self.sock = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self.sock.setblocking(False)
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                with contextlib.suppress(OSError):
                    self.sock.setsockopt(socket.SOL_SOCKET, option, buffer_size)
            if family == socket.AF_INET6:
                with contextlib.suppress(OSError):
                    # "::" then also serves IPv4; a specific address is not affected.
                    self.sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                with contextlib.suppress(OSError):
                    self.sock.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, PMTUDISC_PROBE)
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, PMTUDISC_PROBE)
            self.gro = offload and self._try_option(UDP_GRO, 1)
            self.gso = offload and self._try_option(UDP_SEGMENT, 0)
            if local is not None:
                self.sock.bind(local)
            if remote is not None:
                self.sock.connect(remote)
        except BaseException:
            self.sock.close()
            raise

    def _try_option(self, option: int, value: int) -> bool:
        if not hasattr(self.sock, "recvmsg_into"):
            return False
        try:
            self.sock.setsockopt(socket.IPPROTO_UDP, option, value)
        except OSError:
            return False
        return True

    @property
    def address(self) -> Address:
        address: Address = self.sock.getsockname()
        return address

    def close(self) -> None:
        self.sock.close()

    def receive(self) -> tuple[list[tuple[list[bytes], Address]], bool]:
        """`([(datagrams, address), ...], whether more may be waiting)`."""
        batches: list[tuple[list[bytes], Address]] = []
        octets = 0
        view, buffer = self._view, self._buffer
        for _ in range(RECEIVE_CALLS):
            try:
                if self.gro:
                    count, ancillary, _flags, addr = self.sock.recvmsg_into([buffer], _ANCILLARY)
                else:
                    count, addr = self.sock.recvfrom_into(buffer)
                    ancillary = []
            except (BlockingIOError, InterruptedError):
                return batches, False
            except ConnectionRefusedError:
                self.refused = True
                continue
            except OSError as exc:
                self._warn(exc, "receiving")
                return batches, False
            size = count
            for level, kind, data in ancillary:
                if level == socket.IPPROTO_UDP and kind == UDP_GRO and len(data) >= 4:
                    size = struct.unpack_from("=i", data)[0]
            if count <= size:
                batches.append(([bytes(view[:count])], addr))
            else:
                whole = bytes(view[:count])
                batches.append(([whole[i : i + size] for i in range(0, count, size)], addr))
            octets += count
            if octets >= RECEIVE_OCTETS:
                break
        return batches, True

    def send(self, datagrams: Sequence[tuple[bytes, Address]]) -> int:
        """Send in order; returns how many are done with (fewer when the buffer is full)."""
        index, count = 0, len(datagrams)
        while index < count:
            data, addr = datagrams[index]
            stop = index + 1
            if self.gso:
                size = total = len(data)
                limit = min(count, index + MAX_SEGMENTS)
                while stop < limit:
                    following, to = datagrams[stop]
                    length = len(following)
                    if length > size or to != addr or total + length > MAX_BATCH:
                        break
                    total += length
                    stop += 1
                    if length < size:
                        break  # only the last segment may be shorter
                if stop - index > 1 and not self._send_segments(datagrams, index, stop, size):
                    # Not on this socket, device or route: one by one.
                    stop = index + 1
                elif stop - index > 1:
                    if self._full:
                        return index
                    index = stop
                    continue
            if not self._send_one(data, addr):
                return index
            index = stop
        return count

    _full = False

    def _send_segments(
        self, datagrams: Sequence[tuple[bytes, Address]], index: int, stop: int, size: int
    ) -> bool:
        self._full = False
        addr = datagrams[index][1]
        for _ in range(3):
            try:
                self.sock.sendmsg(
                    [data for data, _ in datagrams[index:stop]],
                    [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", size))],
                    0,
                    None if self._connected else addr,
                )
                return True
            except (BlockingIOError, InterruptedError):
                self._full = True
                return True
            except ConnectionRefusedError:
                self.refused = True  # of an earlier datagram: this one has not been sent
            except OSError as exc:
                if exc.errno in (errno.EIO, errno.EINVAL):
                    log.info("UDP segmentation offload does not work here: %s", exc)
                    self.gso = False
                return False
        return False

    def _send_one(self, data: bytes, addr: Address) -> bool:
        """False when the socket's buffer is full; a datagram that cannot be sent is dropped."""
        for _ in range(3):
            try:
                if self._connected:
                    self.sock.send(data)
                else:
                    self.sock.sendto(data, addr)
                return True
            except (BlockingIOError, InterruptedError):
                return False
            except ConnectionRefusedError:
                self.refused = True
            except OSError as exc:
                # QUIC treats it as lost; a lasting fault ends in a time-out.
                self._warn(exc, f"sending {len(data)} octets")
                break
        self.dropped += 1
        return True

    def _warn(self, exc: OSError, what: str) -> None:
        number = exc.errno or 0
        if number in self._warned:
            return
        self._warned.add(number)
        hint = ""
        if number == errno.EMSGSIZE:
            hint = " (more than the path carries: lower max_datagram_size)"
        level = logging.INFO if number in _DROPPED else logging.WARNING
        log.log(level, "%s failed: %s%s; reported once", what, exc, hint)
