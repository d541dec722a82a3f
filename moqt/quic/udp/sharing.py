"""Several processes on one port: which of them a datagram is for, and how it gets there.

Each process has a socket of its own on the port (SO_REUSEPORT), and the kernel chooses one by both
addresses: who goes on from another address comes to another process. The first octet of every
connection id that a process issues is its number, so whoever gets a packet of another one's
connection hands it over, with the address that it came from, through that one's inbox (a UNIX
datagram socket). What is handed over is taken or dropped, never handed on. What begins a connection
(an Initial packet) is taken where it arrives.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from moqt.quic.packets.layout import CID_LENGTH, Address
from moqt.quic.packets.retry import parse_long_header

log = logging.getLogger(__name__)

MAX_PROCESSES = 256
"""Numbers are one octet."""
HANDED_AT_ONCE = 256
"""Datagrams that are taken from an inbox in one turn."""
_OCTETS = 1 << 17
_VERSION_2 = 0x6B3343CF


@dataclass(frozen=True, slots=True)
class SharedPort:
    """One process's part of a port that several listen on."""

    number: int
    """Of this process: 0 for the first one."""
    udp: socket.socket
    """Bound to the port with SO_REUSEPORT; it is dup'ed, so whoever made it may keep it."""
    inbox: socket.socket
    """Where the others hand over what is for this one."""
    outboxes: Sequence[socket.socket]
    """Where this one hands over what is for the others, by their numbers; its own is not used."""

    def place_of(self, data: bytes) -> int | None:
        """The number of the other process that `data`, for no connection here, is for."""
        if len(data) <= CID_LENGTH:
            return None
        if data[0] & 0x80 == 0:
            number = data[1]
        else:
            header = parse_long_header(data)
            if header is None:
                return None
            version, kind, destination, _ = header
            initial = 1 if version == _VERSION_2 else 0
            if version == 0 or kind == initial or len(destination) != CID_LENGTH:
                return None
            number = destination[0]
        if number == self.number or number >= len(self.outboxes):
            return None
        return number

    def hand_over(self, data: bytes, addr: Address) -> bool:
        """Whether `data` from `addr` was another process's, which has it now, or has no room."""
        number = self.place_of(data)
        if number is None:
            return False
        try:
            self.outboxes[number].send(_packed(data, addr))
        except (BlockingIOError, ConnectionRefusedError):
            pass  # it is behind, or gone for a moment: as if lost in the network
        except OSError as error:
            log.warning("a datagram for process %d was not handed over: %s", number, error)
        return True

    def handed(self) -> list[tuple[bytes, Address]]:
        """What others have handed over, at most `HANDED_AT_ONCE`."""
        found: list[tuple[bytes, Address]] = []
        for _ in range(HANDED_AT_ONCE):
            try:
                packed = self.inbox.recv(_OCTETS)
            except (BlockingIOError, InterruptedError):
                break
            if packed:
                found.append(_unpacked(packed))
        return found

    def close(self) -> None:
        for each in (self.udp, self.inbox, *self.outboxes):
            each.close()


def _packed(data: bytes, addr: Address) -> bytes:
    """The address, of which the last member may be one of ours in octets, and the datagram."""
    plain = [each.hex() if isinstance(each, bytes) else each for each in addr]
    return json.dumps(plain).encode() + b"\0" + data


def _unpacked(packed: bytes) -> tuple[bytes, Address]:
    plain, _, data = packed.partition(b"\0")
    addr = json.loads(plain)
    if len(addr) % 2:  # on a socket for every address
        addr[-1] = bytes.fromhex(addr[-1])
    return data, tuple(addr)
