"""The transport MOQT runs on, as the session layer sees it: no socket, no clock.

A `Transport` is one connection: native QUIC, or a WebTransport session over HTTP/3.
The session calls its methods; it calls the session's `TransportHandler`.
Nothing outside `moqt.quic` knows which QUIC library is underneath.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from cryptography import x509

from moqt.quic.qlog import QlogWriter


def connection_of(transport: Transport) -> str:
    """How a line of a log about a connection begins: its ID, in brackets, and the peer's address.

    aioquic's own lines begin with the same ID, and an event log has it in its name.
    """
    address = transport.peer_address
    return f"[{transport.connection_id}]{' ' if address else ''}{address}"


class TransportHandler(Protocol):
    """What a session offers to its transport. Calls never block and never raise."""

    def connection_established(self, alpn: str) -> None:
        """The handshake has completed and `alpn` was chosen."""

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        """Octets of a peer's or a bidirectional stream, in order; `data` may be empty with fin."""

    def stream_reset(self, stream_id: int, code: int) -> None:
        """The peer reset its sending direction of the stream."""

    def stop_sending(self, stream_id: int, code: int) -> None:
        """The peer will not read more of our sending direction (our side resets it at once)."""

    def datagram(self, data: bytes) -> None: ...

    def ready_to_send(self) -> None:
        """The connection can use more octets: hand over what should go out next.

        Called after each receive batch, timer and `wake`, repeatedly while the
        congestion window has room, until a call adds nothing.
        """

    def connection_closed(self, code: int, reason: str, application: bool) -> None:
        """Called once. `application` is true for MOQT session codes (CONNECTION_CLOSE of
        application type, from either side), false for QUIC or TLS errors and idle time-outs."""


class Transport(Protocol):
    """One connection. All methods may be called at any time; after close they do nothing."""

    is_client: bool

    authority: str | None
    path: str | None
    """What the transport's own handshake carried (WebTransport's CONNECT request); None on
    native QUIC, where SETUP carries both."""

    @property
    def qlog(self) -> QlogWriter | None:
        """The connection's event log, when one is kept; the transport closes it."""
        ...

    def open_stream(self, *, bidirectional: bool, urgent: bool = False) -> int | None:
        """A new stream's id, or None while the peer's MAX_STREAMS leaves no room.

        What waits on an `urgent` stream goes before everything else, what waits on
        bidirectional streams before unidirectional ones and datagrams (MOQT "Priorities").
        """

    def send(self, stream_id: int, data: bytes | bytearray | memoryview, fin: bool = False) -> None:
        """Queue octets on a stream; `data` must not change afterwards."""

    def reset(self, stream_id: int, code: int) -> None:
        """RESET_STREAM our sending direction; a no-op when it is finished or reset."""

    def stop_receiving(self, stream_id: int, code: int) -> None:
        """STOP_SENDING: no more `stream_data` for the stream; a no-op when it is finished."""

    def send_datagram(self, data: bytes) -> bool:
        """Queue a QUIC DATAGRAM; False (dropped) when it fits no packet or the queue is full."""

    def pause_receiving(self, stream_id: int) -> None:
        """Stop granting flow-control credit on the stream; octets under credit already
        granted still arrive."""

    def resume_receiving(self, stream_id: int) -> None:
        """Grant credit again for what arrived meanwhile and for what comes."""

    @property
    def unsent(self) -> int:
        """Octets accepted by `send` that no packet has carried yet, over all streams."""
        ...

    def send_room(self, stream_id: int) -> int:
        """Octets the peer's flow control still lets us write on the stream.

        0 while blocked; `ready_to_send` is called when credit arrives. A sender that
        stays within it keeps a paused stream from filling the shared send budget.
        """
        ...

    def acknowledged(self, stream_id: int) -> bool:
        """Whether the peer has all that was written on the stream: a reset takes none of it back,
        not even what a lost packet has carried."""
        ...

    def take_credited(self) -> Iterable[int]:
        """The streams on which the peer has granted credit since `ready_to_send` was last
        called: for use in there."""
        ...

    @property
    def packet_sizes(self) -> tuple[int, int]:
        """Octets of UDP payload: the most that a packet of ours may have, as far as is known of
        the path, and the most that one had that came."""
        ...

    @property
    def peer_certificate(self) -> x509.Certificate | None:
        """The certificate that the peer has shown, None without one."""
        ...

    @property
    def connection_id(self) -> str:
        """What logs call the connection, and what its event log is named by: the Destination
        Connection ID that the client began with, as hexadecimal digits."""
        ...

    @property
    def peer_address(self) -> str:
        """Where the peer is, for people; empty when there is no such thing."""
        ...

    def wake(self) -> None:
        """Something was queued outside a handler call: transmit soon."""

    def close(self, code: int, reason: str) -> None:
        """CONNECTION_CLOSE of application type with `code`."""
