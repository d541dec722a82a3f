"""Where tests of moqt.quic look inside: what no interface of it shows, each named once.

A `Probe` sees one connection, ours and aioquic's part of it; the functions below see endpoints,
logs and WebTransport. Some spoil on purpose what they see, to stand for a peer of another make.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pytest
from aioquic import tls
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicPreferredAddress
from aioquic.quic.packet_builder import QuicDeliveryState

import moqt.quic.udp.endpoint as endpoints
from moqt.quic.aio.reassembly import PIECE_OVERHEAD, StreamReceiver
from moqt.quic.aio.sending import Connection
from moqt.quic.aio.streams import StreamSender
from moqt.quic.aio.transport import AioquicTransport
from moqt.quic.packets.layout import Address, Datagram
from moqt.quic.packets.tickets import HeldTickets
from moqt.quic.qlog import QlogWriter
from moqt.quic.transport import Transport
from moqt.quic.udp.endpoint import Endpoint
from moqt.quic.udp.socket import UdpSocket
from moqt.quic.webtransport.session import WebTransport


class Probe:
    """What one connection has inside. Its public members are those of `connection`."""

    def __init__(self, transport: AioquicTransport) -> None:
        self.transport = transport
        self.connection: Connection = transport._connection

    # ---- streams

    @property
    def streams(self) -> Mapping[int, Any]:
        """The streams that are not over on both sides, by their IDs."""
        streams: Mapping[int, Any] = self.connection._streams
        return streams

    @property
    def next_request_stream(self) -> int:
        """The ID of the bidirectional stream that is opened next."""
        stream_id: int = self.connection._local_next_stream_id_bidi
        return stream_id

    @property
    def paused(self) -> Collection[int]:
        """The streams whose credit is kept back."""
        return self.transport._paused

    @property
    def lent(self) -> int:
        """Octets of the session's window that its streams may hold."""
        return self.connection.window._lent

    def chunks(self, stream_id: int) -> Sequence[memoryview]:
        """What waits on a stream to be sent and acknowledged."""
        chunks: Sequence[memoryview] = self.streams[stream_id].sender._chunks
        return chunks

    @property
    def out_of_order(self) -> int:
        """Octets that really are in memory for gaps to close."""
        receivers = [stream.receiver for stream in self.streams.values()]
        return sum(len(piece) for receiver in receivers for piece in receiver._pieces)

    @property
    def queued(self) -> int:
        """Streams that have something to send: frames of their own, credit or data."""
        inner = self.connection
        return len(inner._control_queue) + len(inner._credit_queue) + sum(map(len, inner._queues))

    @property
    def frames_queued(self) -> int:
        """Streams that have RESET_STREAM, STOP_SENDING or credit to send."""
        return len(self.connection._control_queue) + len(self.connection._credit_queue)

    @property
    def credit(self) -> Any:
        """The connection's credit that the peer has: its `value`, and what is `used`."""
        return self.connection._local_max_data

    def count_credit_frames(self) -> list[int]:
        """Note from now on, in the list returned, the octets of each MAX_… frame written."""
        wrote: list[int] = []

        def noting(original: Callable[..., None]) -> Callable[..., None]:
            def write(builder: Any, space: Any, **more: Any) -> None:
                before = builder._buffer.tell()
                original(builder=builder, space=space, **more)
                if builder._buffer.tell() > before:
                    wrote.append(builder._buffer.tell() - before)

            return write

        inner: Any = self.connection
        inner._write_connection_limits = noting(inner._write_connection_limits)
        inner._write_stream_limits = noting(inner._write_stream_limits)
        return wrote

    def send_one_octet_at(self, stream_id: int, offset: int) -> None:
        """Send the octet at `offset` of a stream and none before it."""
        sender = self.streams[stream_id].sender
        assert isinstance(sender, StreamSender)
        sender.highest_offset = sender._buffer_stop = offset
        sender._chunks.append(memoryview(b"x"))
        sender._starts.append(offset)
        sender._cursor = len(sender._chunks) - 1
        sender._buffer_stop = offset + 1
        self.connection.unsent += 1
        self.connection.queue_new(stream_id)

    def ignore_credit(self, stream_id: int) -> None:
        """Send on a stream as if the peer had granted everything."""
        self.streams[stream_id].max_stream_data_remote = 1 << 40
        self.connection._remote_max_data = 1 << 40

    # ---- packets and paths

    @property
    def window(self) -> int:
        """Octets that may be in flight."""
        window: int = self.connection._loss.congestion_window
        return window

    @property
    def in_flight(self) -> int:
        """Octets that are in flight."""
        octets: int = self.connection._loss.bytes_in_flight
        return octets

    @property
    def rtt(self) -> float:
        """The smoothed round trip in seconds."""
        rtt: float = self.connection._loss._rtt_smoothed
        return rtt

    def note_lost(self, stream_id: int) -> list[int]:
        """Note from now on the octets of each STREAM frame of ours that is declared lost."""
        lost: list[int] = []
        sender = self.streams[stream_id].out
        deliver = sender.on_data_delivery

        def noting(delivery: Any, start: int, stop: int, fin: bool) -> None:
            if delivery is not QuicDeliveryState.ACKED:
                lost.append(stop - start)
            deliver(delivery, start, stop, fin)

        sender.on_data_delivery = noting
        return lost

    def note_repeated(self, stream_id: int) -> list[int]:
        """Note from now on the octets of each STREAM frame that are here already."""
        repeated: list[int] = []
        receiver: Any = self.streams[stream_id].inbox
        take = receiver.take

        def kept() -> int:
            start: int = receiver._buffer_start
            return start + receiver.held - PIECE_OVERHEAD * receiver.waiting

        def noting(offset: int, data: bytes, fin: bool) -> Any:
            before = kept()
            taken = take(offset, data, fin)
            if len(data) > kept() - before:
                repeated.append(len(data) - (kept() - before))
            return taken

        receiver.take = noting
        return repeated

    @property
    def confirmed(self) -> bool:
        """Whether the handshake is confirmed (RFC 9001 section 4.1.2)."""
        confirmed: bool = self.connection._handshake_confirmed
        return confirmed

    @property
    def probe_timeouts(self) -> int:
        """Probe timeouts since something was acknowledged."""
        count: int = self.connection._loss._pto_count
        return count

    @property
    def events(self) -> int:
        """Events of aioquic's that wait to be taken."""
        return len(self.connection._events)

    @property
    def datagrams_pending(self) -> int:
        """DATAGRAM frames that wait to be sent."""
        return len(self.connection._datagrams_pending)

    @property
    def paths(self) -> int:
        """Addresses of the peer that are remembered."""
        return len(self.connection._network_paths)

    @property
    def own_cids(self) -> set[int]:
        """Sequence numbers of the connection IDs that the peer may use."""
        return {cid.sequence_number for cid in self.connection._host_cids}

    @property
    def next_own_cid(self) -> int:
        """The sequence number of the connection ID that is issued next."""
        number: int = self.connection._host_cid_seq
        return number

    @property
    def cids_of_peer(self) -> tuple[int, int]:
        """Connection IDs that we may use, and how many we are still to retire."""
        inner = self.connection
        return len(inner._peer_cid_available), len(inner._retire_connection_ids)

    @property
    def updating_keys(self) -> bool:
        """Whether a key update of ours has not been sent yet."""
        updating: bool = self.connection._cryptos[tls.Epoch.ONE_RTT]._update_key_requested
        return updating

    def seal(self, frames: bytes) -> bytes:
        """A 1-RTT packet with `frames` in it, whatever its own code would send."""
        inner = self.connection
        number = inner._packet_number
        inner._packet_number += 1
        header = b"\x41" + inner._peer_cid.cid + (number & 0xFFFF).to_bytes(2, "big")
        packet: bytes = inner._cryptos[tls.Epoch.ONE_RTT].encrypt_packet(header, frames, number)
        return packet

    def prefer(self, address: tuple[str, int]) -> None:
        """Have the server named `address` in its transport parameters."""
        self.connection._remote_preferred_address = QuicPreferredAddress(
            ipv4_address=address,
            ipv6_address=None,
            connection_id=bytes(8),
            stateless_reset_token=bytes(16),
        )


def count_built(probe: Probe) -> list[int]:
    """Note from now on how many packets each call of aioquic's packet builder made, if any."""
    built: list[int] = []
    inner: Any = probe.connection
    flush = inner._flush_builder

    def noting(builder: Any, *given: Any, **named: Any) -> Any:
        datagrams = flush(builder, *given, **named)
        if datagrams:
            built.append(len(datagrams))
        return datagrams

    inner._flush_builder = noting
    return built


def announce(monkeypatch: pytest.MonkeyPatch, octets: bytes) -> None:
    """Connections have `octets` behind their other transport parameters."""
    serialize = Connection._serialize_transport_parameters
    monkeypatch.setattr(
        Connection, "_serialize_transport_parameters", lambda self: serialize(self) + octets
    )


def pieces(receiver: StreamReceiver) -> list[tuple[int, bytes]]:
    """What a receiver holds for gaps to close: offsets and octets."""
    return list(zip(receiver._starts, receiver._pieces, strict=True))


def adapter(transport: Transport) -> AioquicTransport:
    """The connection under whatever logs or multiplexes it."""
    under: Any = transport
    while not isinstance(under, AioquicTransport):
        under = under._transport
    return under


def initial_with_cid(length: int, to: Address) -> bytes:
    """The first datagram of a client of aioquic's, with a connection ID of `length` octets."""
    connection = QuicConnection(
        configuration=QuicConfiguration(is_client=True, alpn_protocols=["moqt-22"])
    )
    connection._peer_cid.cid = os.urandom(length)
    connection._original_destination_connection_id = connection._peer_cid.cid
    connection.connect(to, now=100.0)
    return bytes(connection.datagrams_to_send(now=100.0)[0][0])


# ---- endpoints and their sockets


def take_initial(endpoint: Endpoint, data: bytes, addr: Address) -> None:
    """A first datagram comes from `addr`, forged or not."""
    endpoint._accept(data, addr)


def origins(endpoint: Endpoint) -> Collection[Any]:
    """The addresses whose connections are counted."""
    return endpoint.admission._per_origin


def packet_size(endpoint: Endpoint) -> int:
    """Octets that a packet of an endpoint's only connection may have."""
    (transport,) = endpoint.transports
    return transport.packet_size


def routes(endpoint: Endpoint) -> Collection[bytes]:
    """The connection IDs whose packets reach a connection."""
    return endpoint._routes


def timers(endpoint: Endpoint) -> Collection[Any]:
    """The connections that wait for a time."""
    return endpoint._timers


def backlog(endpoint: Endpoint) -> Sequence[Datagram]:
    """What waits for the socket."""
    return endpoint._backlog


def sending(endpoint: Endpoint) -> Callable[[Sequence[Datagram]], int]:
    """How an endpoint sends datagrams; it returns how many the socket took."""
    return endpoint._udp.send


def send_with(endpoint: Endpoint, send: Callable[[Any], int]) -> None:
    """Have an endpoint send with `send`."""
    udp: Any = endpoint._udp
    udp.send = send


def arrive(endpoint: Endpoint, datagrams: list[bytes], addr: Address) -> None:
    """Datagrams come from `addr` that the kernel hands over in one call."""
    udp: Any = endpoint._udp
    receive, udp.receive = udp.receive, lambda *_: ([(datagrams, addr)], False)
    try:
        endpoint._on_readable()
    finally:
        udp.receive = receive


def mute(endpoint: Endpoint) -> None:
    """Nothing leaves an endpoint any more, and it does not notice."""
    send_with(endpoint, len)


def deafen(endpoint: Endpoint) -> None:
    """Nothing reaches an endpoint any more."""
    endpoint._loop.remove_reader(endpoint._udp.sock.fileno())


def shut(endpoint: Endpoint) -> None:
    """Close an endpoint without a word to its peers."""
    endpoint._shutdown()


def without_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel knows neither UDP_GRO nor UDP_SEGMENT."""
    monkeypatch.setattr(UdpSocket, "_try_option", lambda *_: False)


def reset_token(transport: AioquicTransport) -> bytes:
    """The Stateless Reset Token that the peer gave for the connection id in use."""
    token: bytes = transport._connection._peer_cid.stateless_reset_token
    return token


# ---- logs


def file_of(writer: QlogWriter) -> Any:
    """What a log is written to."""
    return writer._file


def write_to(writer: QlogWriter, file: Any) -> None:
    """Have a log written to `file`."""
    writer._file = file


# ---- WebTransport


def held(session: WebTransport) -> Any:
    """The streams that came before the session they name, and their `octets`."""
    return session._held


def settings_of(session: WebTransport) -> Mapping[int, int]:
    """What is kept of the peer's SETTINGS."""
    settings = session._critical.settings
    assert settings is not None
    return settings


def is_empty(session: WebTransport) -> bool:
    """Whether a session that is over holds no stream."""
    return not session._held and not session._heads and not session._receiving


def kept(session: WebTransport) -> int:
    """Entries and octets the HTTP/3 layer holds beyond the session and its request."""
    requests = session._requests.values()
    readers = [session._critical.reader, *(r.frames for r in requests)]
    readers += [r.capsules for r in requests]
    return (
        len(session._heads)
        + len(session._held)
        + session._held.octets
        + len(session._requests)
        + sum(len(reader._buffer) for reader in readers)
    )


# ---- session tickets


def tickets_of_process(monkeypatch: pytest.MonkeyPatch) -> HeldTickets:
    """What clients use from now on, with nothing in it."""
    held = HeldTickets()
    monkeypatch.setattr(endpoints, "TICKETS", held)
    return held


def early_data(transport: AioquicTransport) -> tuple[bool, bool]:
    """Whether a connection says that it takes early data, and whether it could read it."""
    connection: Any = transport._connection
    return connection.tls.early_data_accepted, connection._cryptos[
        tls.Epoch.ZERO_RTT
    ].recv.is_valid()


@contextlib.contextmanager
def offering_early_data(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Clients of another make, which offer early data with every ticket: what their servers have
    been offered."""
    offered: list[bool] = []
    push, pull = tls.push_client_hello, tls.pull_client_hello

    def pushed(buf: Any, hello: Any) -> None:
        hello.early_data = hello.pre_shared_key is not None
        push(buf, hello)

    def pulled(buf: Any) -> Any:
        hello = pull(buf)
        offered.append(hello.early_data)
        return hello

    with monkeypatch.context() as patched:
        patched.setattr(tls, "push_client_hello", pushed)
        patched.setattr(tls, "pull_client_hello", pulled)
        yield offered
