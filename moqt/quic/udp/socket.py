"""A non-blocking UDP socket that moves datagrams in batches.

UDP_GRO hands over, and UDP_SEGMENT takes, many equal-sized datagrams of one address in one
system call, where the kernel has them; elsewhere a plain loop does the same.

A socket on every address of the host gives the address that a datagram was sent to as one more,
last member of the peer's address, and sends from it what goes there (RFC 9000 section 9: a path is
both ends' addresses). Left to the routing table the answer would come from an address the client
has never heard of.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

from moqt.quic.config import MIN_DATAGRAM_SIZE

log = logging.getLogger(__name__)

Address = tuple[Any, ...]

# Linux constants that the socket module does not name.
UDP_SEGMENT = 103
UDP_GRO = 104
IP_MTU = 14
IPV6_MTU = 24

DONT_FRAGMENT = {
    # IP_MTU_DISCOVER and IPV6_MTU_DISCOVER: PROBE lets us find out what the path carries
    "linux": ((socket.IPPROTO_IP, 10, 3), (socket.IPPROTO_IPV6, 23, 3)),
    # IP_DONTFRAG and IPV6_DONTFRAG
    "darwin": ((socket.IPPROTO_IP, 28, 1), (socket.IPPROTO_IPV6, 62, 1)),
}
"""The options for IPv4 and for IPv6, and their values (RFC 9000 section 14)."""

IP_PKTINFO = {"linux": 8, "darwin": 26}.get(sys.platform)  # named by the module from 3.12 on
IPV6_RECVPKTINFO = getattr(socket, "IPV6_RECVPKTINFO", None)
IPV6_PKTINFO = getattr(socket, "IPV6_PKTINFO", None)

IPV4_OVERHEAD = 20 + 8
"""Octets of the headers around a UDP payload ..."""
IPV6_OVERHEAD = 40 + 8
"""... in IPv6."""

MAX_SEGMENTS = 64
MAX_BATCH = 65_000
RECEIVE_CALLS = 64
RECEIVE_OCTETS = 512 << 10

_GRO_SPACE = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0
_PKTINFO_SPACE = socket.CMSG_SPACE(20) if hasattr(socket, "CMSG_SPACE") else 0
_NO_OFFLOAD = frozenset((errno.EIO, errno.EINVAL))
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
        shared: bool = False,
        bound: socket.socket | None = None,
    ) -> None:
        """`shared`: others may bind sockets of theirs to `local`, too, of this user. `bound` is
        such a one, to be used in place of a new one; it stays its maker's."""
        self.refused = False
        self.dropped = 0  # datagrams the kernel would not send
        self._connected = remote is not None
        self._warned: set[tuple[int, int]] = set()
        self._buffer = bytearray(1 << 16)
        self._view = memoryview(self._buffer)
        self.sock = socket.socket(family, socket.SOCK_DGRAM) if bound is None else bound.dup()
        if bound is not None:
            local = bound.getsockname()
        try:
            self.sock.setblocking(False)
            if shared:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                with contextlib.suppress(OSError):
                    self.sock.setsockopt(socket.SOL_SOCKET, option, buffer_size)
            if family == socket.AF_INET6 and bound is None:
                with contextlib.suppress(OSError):
                    # "::" then also serves IPv4; a specific address is not affected.
                    self.sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._unfragmented = self._forbid_fragments(family)
            self.gro = offload and self._try_option(UDP_GRO, 1)
            self.gso = offload and self._try_option(UDP_SEGMENT, 0)
            self._pktinfo = local is not None and _is_wildcard(local) and self._ask_pktinfo(family)
            if local is not None and bound is None:
                self.sock.bind(local)
            if remote is not None:
                self.sock.connect(remote)
        except BaseException:
            self.sock.close()
            raise

    def _forbid_fragments(self, family: int) -> bool:
        options = DONT_FRAGMENT.get(sys.platform, ())
        # An IPv6 socket has the option of IPv4 too, for mapped addresses, if the system knows that.
        done = [self._set_option(o) for o in options[: 2 if family == socket.AF_INET6 else 1]]
        return bool(done) and done[-1]

    def _set_option(self, option: tuple[int, int, int]) -> bool:
        try:
            self.sock.setsockopt(*option)
        except OSError:
            return False
        return True

    def _try_option(self, option: int, value: int) -> bool:
        if not hasattr(self.sock, "recvmsg_into"):
            return False
        try:
            self.sock.setsockopt(socket.IPPROTO_UDP, option, value)
        except OSError:
            return False
        return True

    def _ask_pktinfo(self, family: int) -> bool:
        """Have the kernel say where each datagram was sent to; an IPv6 socket does so for
        IPv4, too, as a mapped address."""
        if family == socket.AF_INET6:
            level, option = socket.IPPROTO_IPV6, IPV6_RECVPKTINFO
        else:
            level, option = socket.IPPROTO_IP, IP_PKTINFO
        try:
            if option is None or not hasattr(self.sock, "recvmsg_into"):
                raise OSError(errno.ENOPROTOOPT, "no such option")
            self.sock.setsockopt(level, option, 1)
        except OSError as exc:
            log.warning(
                "this system does not say which of its addresses a datagram was sent to (%s): "
                "answers leave from the address that its routes choose, which clients of another "
                "one do not accept; on a host with several addresses listen on a single one",
                exc,
            )
            return False
        return True

    @property
    def address(self) -> Address:
        address: Address = self.sock.getsockname()
        return address

    def payload_limit(self, addr: Address) -> int | None:
        """The octets that the interface towards `addr` takes in one datagram, unfragmented.

        None on a system that does not tell; what every path carries on one that would fragment.
        """
        if not self._unfragmented:
            return MIN_DATAGRAM_SIZE
        if sys.platform != "linux":
            return None
        sock = self.sock
        try:
            if self._connected:
                return _payload_limit(sock, addr)
            with socket.socket(sock.family, socket.SOCK_DGRAM) as asking:
                asking.connect(_ends(addr)[0])
                return _payload_limit(asking, addr)
        except OSError:
            return None

    def close(self) -> None:
        self.sock.close()

    def receive(self, most: int = RECEIVE_OCTETS) -> tuple[list[tuple[list[bytes], Address]], bool]:
        """`([(datagrams, address), ...], whether more may be waiting)`: no further ones when there
        are `most` octets."""
        batches: list[tuple[list[bytes], Address]] = []
        octets = 0
        view, buffer = self._view, self._buffer
        space = (_GRO_SPACE if self.gro else 0) + (_PKTINFO_SPACE if self._pktinfo else 0)
        for _ in range(RECEIVE_CALLS):
            try:
                if space:
                    count, ancillary, _flags, addr = self.sock.recvmsg_into([buffer], space)
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
                elif level == socket.IPPROTO_IPV6 and kind == IPV6_PKTINFO and len(data) >= 16:
                    addr = (*addr, data[:16])
                elif level == socket.IPPROTO_IP and kind == IP_PKTINFO and len(data) >= 12:
                    addr = (*addr, data[4:8])
            if count <= size:
                batches.append(([bytes(view[:count])], addr))
            else:
                whole = bytes(view[:count])
                batches.append(([whole[i : i + size] for i in range(0, count, size)], addr))
            octets += count
            if octets >= most:
                break
        return batches, True

    def send(self, datagrams: Sequence[tuple[bytes, Address]]) -> int:
        """Send in order; returns how many are done with (fewer when the buffer is full)."""
        index, count = 0, len(datagrams)
        while index < count:
            data, addr = datagrams[index]
            fault: OSError | None = None
            if self.gso and len(segments := _alike(datagrams, index)) > 1:
                fault = self._send_segments(segments, addr, len(data))
                if fault is None:
                    index += len(segments)
                    continue
                if isinstance(fault, BlockingIOError | InterruptedError):
                    return index
                # Not on this socket, device or route: one by one.
            dropped = self.dropped
            if not self._send_one(data, addr):
                return index
            # What cannot leave alone either has another fault: its address may be gone.
            if fault is not None and fault.errno in _NO_OFFLOAD and self.dropped == dropped:
                log.info("UDP segmentation offload does not work here: %s", fault)
                self.gso = False
            index += 1
        return count

    def _send_segments(self, segments: list[bytes], addr: Address, size: int) -> OSError | None:
        """What kept equal-sized datagrams from leaving in one call."""
        ancillary = [(socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("=H", size))]
        to: Address | None = None
        if not self._connected:
            to, source = _ends(addr)
            ancillary += source
        refused: OSError | None = None
        for _ in range(3):
            try:
                self.sock.sendmsg(segments, ancillary, 0, to)
                return None
            except ConnectionRefusedError as exc:
                self.refused = True  # of an earlier datagram: this one has not been sent
                refused = exc
            except OSError as exc:
                return exc
        return refused

    def _send_one(self, data: bytes, addr: Address) -> bool:
        """False when the socket's buffer is full; a datagram that cannot be sent is dropped."""
        for _ in range(3):
            try:
                if self._connected:
                    self.sock.send(data)
                elif self._pktinfo:
                    to, source = _ends(addr)
                    self.sock.sendmsg([data], source, 0, to)
                else:
                    self.sock.sendto(data, addr)
                return True
            except (BlockingIOError, InterruptedError):
                return False
            except ConnectionRefusedError:
                self.refused = True
            except OSError as exc:
                # QUIC treats it as lost; a lasting fault ends in a time-out.
                needed = len(data) <= MIN_DATAGRAM_SIZE
                self._warn(exc, f"sending {len(data)} octets", needed=needed)
                break
        self.dropped += 1
        return True

    def _warn(self, exc: OSError, what: str, *, needed: bool = True) -> None:
        """Log it once; `needed` tells a datagram that must arrive from one that may not."""
        number = exc.errno or 0
        level, hint = logging.WARNING, ""
        if number == errno.EMSGSIZE:
            if needed:
                hint = " (QUIC needs an interface that takes so many)"
            else:
                level, hint = logging.INFO, " (more than the interface takes: smaller ones follow)"
        elif number in _DROPPED:
            level = logging.INFO
        if (number, level) in self._warned:
            return
        self._warned.add((number, level))
        log.log(level, "%s failed: %s%s; reported once", what, exc, hint)


def _alike(datagrams: Sequence[tuple[bytes, Address]], index: int) -> list[bytes]:
    """Those from `index` on that one call can take: to one address and of one size, of which the
    last may fall short."""
    data, addr = datagrams[index]
    size = len(data)
    some = datagrams[index : index + max(1, min(MAX_SEGMENTS, MAX_BATCH // (size or 1)))]
    segments = [each for each, to in some if to is addr]
    if len(segments) == len(some) and set(map(len, segments)) == {size}:
        return segments
    count = 1
    for each, to in some[1:]:
        if to != addr or len(each) > size:
            break
        count += 1
        if len(each) < size:
            break
    return [each for each, _ in some[:count]]


def _payload_limit(sock: socket.socket, addr: Address) -> int:
    """The same for a connected socket. Raises OSError."""
    if sock.family != socket.AF_INET6:
        return sock.getsockopt(socket.IPPROTO_IP, IP_MTU) - IPV4_OVERHEAD
    mapped = "." in str(addr[0])
    overhead = IPV4_OVERHEAD if mapped else IPV6_OVERHEAD
    return sock.getsockopt(socket.IPPROTO_IPV6, IPV6_MTU) - overhead


def _is_wildcard(local: Address) -> bool:
    try:
        return ipaddress.ip_address(local[0]).is_unspecified
    except ValueError:
        return False


def _ends(addr: Address) -> tuple[Address, list[tuple[int, int, bytes]]]:
    """The address of the peer, and the control message with ours if `addr` has it."""
    if len(addr) % 2 == 0:
        return addr, []
    local: bytes = addr[-1]
    if len(local) == 4:
        assert IP_PKTINFO is not None
        # struct in_pktinfo: interface (the routes choose), source, nothing
        return addr[:-1], [(socket.IPPROTO_IP, IP_PKTINFO, bytes(4) + local + bytes(4))]
    assert IPV6_PKTINFO is not None
    return addr[:-1], [(socket.IPPROTO_IPV6, IPV6_PKTINFO, local + bytes(4))]
