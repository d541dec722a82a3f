"""What the connections of one endpoint share, and what becomes of a datagram for none of them."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicFrameType,
    QuicPacketType,
    QuicProtocolVersion,
    encode_quic_version_negotiation,
)
from aioquic.quic.packet_builder import QuicPacketBuilder

from moqt.quic.aio.sending import Connection
from moqt.quic.aio.trace import StreamingLogger
from moqt.quic.aio.transport import AioquicTransport, HandlerFactory
from moqt.quic.backend import chosen, tell
from moqt.quic.certificates import check_key_pair, validity_fault
from moqt.quic.config import MIN_DATAGRAM_SIZE, QuicConfig
from moqt.quic.congestion.careful_resume import PathMemory
from moqt.quic.packets.layout import CID_LENGTH, Address, origin_of
from moqt.quic.packets.reset import KEY_LENGTH, Resets, load_key
from moqt.quic.packets.retry import Retries, parse_long_header
from moqt.quic.packets.tickets import GivenTickets, HeldTickets
from moqt.quic.windows import INITIAL_STREAM_WINDOW, WindowMemory

log = logging.getLogger(__name__)

DATAGRAM_FRAME_LIMIT = 65536

MIN_INITIAL_CID = 8
"""Octets of the connection id a client makes up (RFC 9000 section 7.2)."""

SUPPORTED_VERSIONS = [int(QuicProtocolVersion.VERSION_1), int(QuicProtocolVersion.VERSION_2)]

NO_ROOM = "the server has no room for more connections"
MAX_REASON = 256
"""Octets of the reason that a refused client is told."""


class QuicContext:
    """What the connections of one endpoint share: TLS material, settings, the secrets log."""

    def __init__(
        self,
        config: QuicConfig,
        *,
        is_client: bool,
        memory: WindowMemory | None = None,
        paths: PathMemory | None = None,
        tickets: HeldTickets | None = None,
        number: int | None = None,
    ) -> None:
        """`memory`, `paths` and `tickets` are the process's; without them the endpoint has its
        own. The connection ids of a server with a `number` begin with that octet."""
        self._number = number
        self.config = config
        self.memory = memory or WindowMemory()
        self.paths = PathMemory() if paths is None else paths
        self.is_client = is_client
        self.backend = chosen(config.quic_backend)
        tell(config.quic_backend)
        self._secrets: TextIO | None = None
        self._qlog: StreamingLogger | None = None
        self._retry = Retries()
        self._given = GivenTickets(config.max_session_tickets)
        self._tickets = HeldTickets() if tickets is None else tickets
        if not is_client and (config.certfile is None or config.keyfile is None):
            raise ValueError("a QUIC server needs certfile and keyfile")
        key = os.urandom(KEY_LENGTH)
        if not is_client and config.reset_key_file is not None:
            key = load_key(config.reset_key_file)
        self.resets = Resets(key, config.max_resets)
        config.prepare_logs()
        if config.keylog_file is not None:
            handle = os.open(config.keylog_file, os.O_WRONLY | os.O_APPEND)
            self._secrets = os.fdopen(handle, "a", encoding="ascii")
        try:
            if config.qlog_dir is not None:
                self._qlog = StreamingLogger(Path(config.qlog_dir), config.qlog_max_octets)
            self._configuration = self._configure(config.server_name)
            if not is_client:
                self.load_certificate()
        except BaseException:
            self.close()
            raise

    def load_certificate(self) -> None:
        """Read the server's pair anew: connections that come get it, those there are stay.

        Raises ValueError and OSError, and goes on with the one it has.
        """
        certfile, keyfile = self.config.certfile, self.config.keyfile
        assert certfile is not None and keyfile is not None
        check_key_pair(certfile, keyfile)
        configuration = self._configure(self.config.server_name)
        configuration.load_cert_chain(certfile, keyfile)
        self._configuration = configuration
        # They stand for the certificate that there was, as do those of handshakes under way.
        self._given = GivenTickets(self.config.max_session_tickets)
        fault = validity_fault(configuration.certificate, datetime.now(UTC))
        if fault is not None:
            log.warning("clients will refuse the certificate in %s: it %s", certfile, fault)

    def _configure(self, server_name: str | None) -> QuicConfiguration:
        config = self.config
        return QuicConfiguration(
            alpn_protocols=list(config.alpn),
            is_client=self.is_client,
            connection_id_length=CID_LENGTH,
            idle_timeout=config.idle_timeout,
            max_stream_data=min(INITIAL_STREAM_WINDOW, config.stream_window),
            max_datagram_size=MIN_DATAGRAM_SIZE,
            max_datagram_frame_size=DATAGRAM_FRAME_LIMIT,
            server_name=server_name,
            secrets_log_file=self._secrets,
            quic_logger=self._qlog,
            supported_versions=SUPPORTED_VERSIONS,
            cafile=None if config.cafile is None else str(config.cafile),
            verify_mode=None if config.verify else ssl.CERT_NONE,
        )

    @property
    def session_tickets(self) -> int:
        """Those that a server has given out and that were not used."""
        return len(self._given)

    @property
    def log_events_dropped(self) -> int:
        """Events that could not be written to the logs of connections that are over."""
        return 0 if self._qlog is None else self._qlog.dropped

    def close(self) -> None:
        if self._qlog is not None:
            self._qlog.close()
        if self._secrets is not None:
            self._secrets.close()
            self._secrets = None
            self._configuration.secrets_log_file = None

    def connect(
        self, addr: Address, handler_factory: HandlerFactory, *, server_name: str, now: float
    ) -> AioquicTransport:
        """A client's transport whose first flight waits in `datagrams_to_send`."""
        self._start_log(now)
        configuration = self._configure(self.config.server_name or server_name)
        judged = self._judged(addr, configuration)
        held = self._tickets.take(judged) if self.config.max_session_tickets else None
        if held is not None:
            configuration.session_ticket = held.ticket
        connection = Connection(
            configuration=configuration,
            config=self.config,
            memory=self.memory,
            paths=self.paths,
            origin=origin_of(addr),
        )
        if held is not None:
            connection.shown = held.certificate  # which is not shown again
        if self.config.max_session_tickets:
            connection._session_ticket_handler = lambda ticket: self._tickets.keep(
                judged, ticket, connection.tls._peer_certificate
            )
        transport = AioquicTransport(connection, self.config, now=now)
        transport.attach(handler_factory(transport))
        connection.connect(addr, now)
        return transport

    def _judged(self, addr: Address, configuration: QuicConfiguration) -> tuple[Any, ...]:
        """Whom a ticket is of, and all that its certificate has been judged by."""
        config, cafile = self.config, None
        if config.cafile is not None:
            with contextlib.suppress(OSError):
                found = os.stat(config.cafile)
                cafile = str(config.cafile), found.st_ino, found.st_mtime_ns, found.st_size
        verified = config.verify, config.cafile is None, cafile
        return addr[:2], configuration.server_name, config.alpn, verified

    def _start_log(self, now: float) -> None:
        if self._qlog is not None:
            self._qlog.now = now

    def unsolicited(
        self,
        data: bytes,
        *,
        now: float,
        full: bool = False,
        addr: Address | None = None,
        prove: bool = False,
        why: str = "",
    ) -> AioquicTransport | bytes | None:
        """What a server does with a datagram for no known connection.

        One that is `full` refuses it, because of `why` or for want of room.
        With `prove` a client must first show with a Retry packet that it is at `addr`. Returns
        a new transport (which has not seen `data` yet and has no handler), a datagram
        to answer with, or None.
        """
        header = parse_long_header(data)
        if header is None or len(data) < MIN_DATAGRAM_SIZE:
            return None
        version, kind, destination, source = header
        if version == 0:
            return None
        if version not in SUPPORTED_VERSIONS:
            return encode_quic_version_negotiation(
                source_cid=destination,
                destination_cid=source,
                supported_versions=SUPPORTED_VERSIONS,
            )
        if kind != (1 if version == QuicProtocolVersion.VERSION_2 else 0):
            return None  # not an Initial
        if len(destination) < MIN_INITIAL_CID:
            return None
        if full:
            return _refusal(version, destination, source, why or NO_ROOM)
        self._start_log(now)
        original, retried = destination, None
        if addr is not None:
            proven = self._retry.original(data, addr, destination, now)
            if proven is not None:
                original, retried = proven, destination
            elif prove:
                return self._retry.packet(version, addr, destination, source, now)
        connection = Connection(
            configuration=self._configuration,
            config=self.config,
            original_destination_connection_id=original,
            retry_source_connection_id=retried,
            reset_token=self.resets.token,
            number=self._number,
            memory=self.memory,
            paths=self.paths,
            origin="" if addr is None else origin_of(addr),
        )
        if self.config.max_session_tickets:
            connection._session_ticket_fetcher = self._given.take
            connection._session_ticket_handler = self._given.keep
        return AioquicTransport(connection, self.config, now=now)


def _refusal(version: int, destination: bytes, source: bytes, why: str) -> bytes:
    """An Initial packet with CONNECTION_CLOSE(CONNECTION_REFUSED) and the reason `why`."""
    crypto = CryptoPair()
    crypto.setup_initial(cid=destination, is_client=False, version=version)
    builder = QuicPacketBuilder(
        host_cid=destination,
        is_client=False,
        max_datagram_size=MIN_DATAGRAM_SIZE,
        peer_cid=source,
        version=version,
    )
    reason = why.encode()[:MAX_REASON]
    builder.start_packet(QuicPacketType.INITIAL, crypto)
    buf = builder.start_frame(QuicFrameType.TRANSPORT_CLOSE, capacity=25 + len(reason))
    buf.push_uint_var(QuicErrorCode.CONNECTION_REFUSED)
    buf.push_uint_var(QuicFrameType.PADDING)
    buf.push_uint_var(len(reason))
    buf.push_bytes(reason)
    datagrams, _ = builder.flush()
    return datagrams[0]
