"""How large a connection's packets are: probes of the path go out and come back here.

The search itself is `moqt.quic.mtu`; this is what it needs of QUIC (RFC 9000 sections 14.3, 14.4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from aioquic import tls
from aioquic._buffer import Buffer
from aioquic.quic.connection import QuicNetworkPath
from aioquic.quic.packet import (
    QuicFrameType,
    QuicPacketType,
    pull_quic_transport_parameters,
)
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder

from moqt.quic.aio.receiving import ReceivingConnection
from moqt.quic.aio.streams import PathNarrowed
from moqt.quic.config import MAX_DATAGRAM_SIZE, MIN_DATAGRAM_SIZE
from moqt.quic.congestion.careful_resume import PathMemory, Saved
from moqt.quic.congestion.controller import INITIAL_WINDOW, at_once
from moqt.quic.mtu.search import PathMtu
from moqt.quic.packets.layout import Address, Datagram, varint

MAX_UDP_PAYLOAD_SIZE = b"\x03"
"""The number of the transport parameter (RFC 9000 section 18.2)."""

FIRST_TRIPS = 4
"""Round trips of a path in which a probe leaves the first flight of data its room ..."""
WHILE_BUSY = 16
"""... and takes a sixteenth of the window at most, when data waits to be sent. After that it takes
what is free."""


def _not_known(addr: Address) -> int | None:
    """Nobody knows the interface towards `addr`."""
    return None


class ProbingConnection(ReceivingConnection):
    """A connection whose packets are as large as its path carries."""

    def __init__(self, *, paths: PathMemory, **options: Any) -> None:
        """`paths`: what the process remembers of those of connections that are over."""
        super().__init__(**options)
        self._paths = paths
        self.mtu = PathMtu()
        self.interface_limit: Callable[[Address], int | None] = _not_known
        """The octets that the interface towards an address takes in one datagram, if known."""
        self._searched: QuicNetworkPath | None = None
        """The path that `mtu` is about ..."""
        self._left: str | None = None
        """... and the host at the end of the one before."""
        self._first_until = 0.0
        """When its first round trips are over."""
        self.probe_again: float | None = None
        """When a probe may go that is too large for now, though nothing else happens."""
        self._peer_limit = MAX_DATAGRAM_SIZE
        self.recovery.narrow = self._narrow

    # ---- limits of both sides

    def _serialize_transport_parameters(self) -> bytes:
        parameters: bytes = super()._serialize_transport_parameters()
        if self.config.max_datagram_size == MAX_DATAGRAM_SIZE:
            return parameters
        value = varint(self.config.max_datagram_size)
        return parameters + MAX_UDP_PAYLOAD_SIZE + varint(len(value)) + value

    def _parse_transport_parameters(self, data: bytes, from_session_ticket: bool = False) -> None:
        super()._parse_transport_parameters(data, from_session_ticket)
        limit = pull_quic_transport_parameters(Buffer(data=data)).max_udp_payload_size
        if limit is not None:
            self._peer_limit = limit

    # ---- what is known of it

    def remember_path(self) -> None:
        """The connection is over: leave behind what its path held, for the next one."""
        state = self.recovery.state()
        if self._searched is None or state.rtt_min is None or self.config.remember_paths == 0:
            return
        octets = state.window if state.bandwidth is None else int(state.bandwidth * state.rtt_min)
        at = self.recovery.delivery.last_at
        self._paths.keep(self._searched.addr[0], Saved(octets, state.rtt_min, at))

    # ---- the search

    def _follow_path(self, path: QuicNetworkPath, now: float) -> None:
        """Packets go over `path`, of which nothing is known, from now on."""
        if self._searched is not None:
            self._left, self._searched = self._searched.addr[0], None
            self.mtu.stop()
            self._resize()
            self.recovery.resize(MIN_DATAGRAM_SIZE)
        if not self._handshake_confirmed or not path.is_validated:
            return
        if self._left not in (None, path.addr[0]):
            self.recovery.begin_path(now)  # another port alone is the same path (section 9.4)
        elif self._left is None:
            saved = self._paths.claim(path.addr[0], now, self.config.remember_paths)
            if saved is not None:
                self.recovery.resume(saved, now)
            elif self.config.first_flight:
                self.recovery.jump(self.config.first_flight, now)
        self._searched = path
        limit = min(self.config.max_datagram_size, self._peer_limit)
        interface = self.interface_limit(path.addr)
        if interface is not None:
            limit = min(limit, max(interface, MIN_DATAGRAM_SIZE))
        self.mtu.begin(limit, now)
        trip = self.recovery.trip or self._configuration.initial_rtt
        self._first_until = now + FIRST_TRIPS * trip

    def _mtu_probes(self, path: QuicNetworkPath, now: float) -> list[Datagram]:
        """The probes that may go now."""
        datagrams: list[Datagram] = []
        recovery = self.recovery
        recovery.reserved = 0
        self.probe_again = None
        if self.over:
            return datagrams
        first = now < self._first_until
        while self.mtu.probe_at <= now:
            window, number = recovery.congestion_window, self._packet_number
            room = window - recovery.bytes_in_flight
            most = window // WHILE_BUSY if first and self.unsent else window
            if first and not self.unsent:
                room -= at_once(INITIAL_WINDOW, self.mtu.size)
            size = self.mtu.next_probe(min(room, most), number, now)
            if size is None:
                wanted = self.mtu.wanted
                if first and (not self.unsent or (wanted or 0) > most):
                    self.probe_again = self._first_until
                elif wanted is not None and wanted <= most:
                    # Data would take whatever becomes free.
                    recovery.reserved = wanted
                break
            recovery.mtu_probes.add(number)
            datagrams += self._mtu_probe(size, path, now)
            recovery.pacer.spend(size)
        return datagrams

    def _mtu_probe(self, size: int, path: QuicNetworkPath, now: float) -> list[Datagram]:
        """A packet of `size` octets with PING and PADDING (RFC 9000 section 14.4)."""
        assert self._version is not None
        builder = QuicPacketBuilder(
            host_cid=self.host_cid,
            is_client=self._is_client,
            max_datagram_size=size,
            packet_number=self._packet_number,
            peer_cid=self._peer_cid.cid,
            quic_logger=self._quic_logger,
            spin_bit=self._spin_bit,
            version=self._version,
        )
        builder.start_packet(QuicPacketType.ONE_RTT, self._cryptos[tls.Epoch.ONE_RTT])
        builder.start_frame(
            QuicFrameType.PING, handler=self._on_mtu_probe, handler_args=(self._packet_number,)
        )
        if self.trace is not None and builder.quic_logger_frames is not None:
            builder.quic_logger_frames.append(self.trace.encode_ping_frame())
        builder._datagram_needs_padding = True
        datagrams: list[Datagram] = self._flush_builder(builder, path, self._peer_cid.cid, now)
        return datagrams

    def _on_mtu_probe(self, delivery: QuicDeliveryState, number: int) -> None:
        self.recovery.mtu_probes.discard(number)
        if delivery is not QuicDeliveryState.ACKED:
            if self.recovery.in_silence:
                self.mtu.untold(number)
            else:
                self.mtu.lost(number)
        elif self.mtu.arrived(number):
            self._resize()
            self.recovery.resize(self.mtu.size)

    def _narrow(self) -> None:
        """Packets of this size no longer arrive; what is sent again is cut to fit."""
        self._events.append(PathNarrowed(self.mtu.size))
        self.mtu.narrowed()
        self._resize()

    def _resize(self) -> None:
        """Packets have the size of `mtu` from now on."""
        size, self._max_datagram_size = self._max_datagram_size, self.mtu.size
        if self.trace is not None and size != self.mtu.size:
            self.trace.log_event(
                category="connectivity",
                event="mtu_updated",
                data={"old": size, "new": self.mtu.size, "done": self.mtu.done},
            )
        if size > self.mtu.size and self._datagrams_pending:
            most = self.max_datagram_payload()
            fitting = [data for data in self._datagrams_pending if len(data) <= most]
            self._datagrams_pending = deque(fitting)
            self.datagram_backlog = sum(map(len, fitting))

    # ---- packets that prove a path do not depend on what another one carries

    def _send_probing_frames(self, network_path: QuicNetworkPath, now: float) -> list[Datagram]:
        size, self._max_datagram_size = self._max_datagram_size, MIN_DATAGRAM_SIZE
        try:
            datagrams: list[Datagram] = super()._send_probing_frames(network_path, now)
        finally:
            self._max_datagram_size = size
        return datagrams
