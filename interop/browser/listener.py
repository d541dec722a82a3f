"""The other end where no relay will do: what tells back every code that it is told, and leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import moqt
from interop.case import DRAFT
from interop.processes import LOOPBACK
from moqt.quic.accept import by_alpn
from moqt.quic.transport import Transport, TransportHandler
from moqt.quic.udp import endpoint

SHORT = timedelta(days=13)
"""Browsers take a certificate by its hash that is valid for at most 14 days."""


def make_short_lived(folder: Path) -> tuple[Path, Path]:
    """Write `(cert.pem, key.pem)` for loopback, ECDSA P-256, that a browser takes by its hash."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    names = [x509.DNSName("localhost"), x509.IPAddress(ip_address(LOOPBACK))]
    start = datetime.now(UTC) - timedelta(hours=1)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + SHORT)
        .add_extension(x509.SubjectAlternativeName(names), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(parents=True, exist_ok=True)
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    cert_path.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return cert_path, key_path


def hash_of(certificate: Path) -> bytes:
    """The SHA-256 of a PEM certificate's DER, as `serverCertificateHashes` has it."""
    cert = x509.load_pem_x509_certificate(certificate.read_bytes())
    return cert.fingerprint(hashes.SHA256())


class Teller(TransportHandler):
    """A session without MOQT: answers octets with one, a reset with a reset, a stop with a stop.

    The answer has the code that came, or what `told_back` has for it. `resets` and `stops` are
    the codes that came; `ended` is how the session did.
    """

    def __init__(
        self, transport: Transport, leave: tuple[int, str] | None, told_back: Mapping[int, int]
    ) -> None:
        self._transport, self._leave, self._told_back = transport, leave, told_back
        self.resets: list[int] = []
        self.stops: list[int] = []
        self.ended: asyncio.Future[tuple[int, str, bool]] = (
            asyncio.get_running_loop().create_future()
        )

    def connection_established(self, alpn: str) -> None:
        if self._leave is not None:
            self._transport.close(*self._leave)

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        if data:
            self._transport.send(stream_id, b"\x00")

    def stream_reset(self, stream_id: int, code: int) -> None:
        self.resets.append(code)
        self._transport.reset(stream_id, self._told_back.get(code, code))

    def stop_sending(self, stream_id: int, code: int) -> None:
        self.stops.append(code)
        self._transport.stop_receiving(stream_id, self._told_back.get(code, code))

    def datagram(self, data: bytes) -> None: ...

    def ready_to_send(self) -> None: ...

    def connection_closed(self, code: int, reason: str, application: bool) -> None:
        if not self.ended.done():
            self.ended.set_result((code, reason, application))


class Listener:
    """A server on loopback with a short-lived certificate."""

    def __init__(self, port: int, certificate: Path) -> None:
        self.url = f"https://{LOOPBACK}:{port}/"
        self.hash = hash_of(certificate)
        self.tellers: list[Teller] = []


@asynccontextmanager
async def tell(
    folder: Path,
    *,
    leave: tuple[int, str] | None = None,
    told_back: Mapping[int, int] = MappingProxyType({}),
) -> AsyncIterator[Listener]:
    """Serve `Teller`s; with `leave` each closes its session at once with that code and reason."""
    cert, key = make_short_lived(folder)
    tellers: list[Teller] = []

    def make(transport: Transport) -> TransportHandler:
        tellers.append(Teller(transport, leave, told_back))
        return tellers[-1]

    quic = moqt.QuicConfig(certfile=cert, keyfile=key, alpn=(DRAFT, "h3"))
    serving = await endpoint.serve(LOOPBACK, 0, quic, by_alpn(make, (DRAFT,)))
    try:
        listener = Listener(serving.port, cert)
        listener.tellers = tellers
        yield listener
    finally:
        await serving.close()


@asynccontextmanager
async def serve_sessions(folder: Path) -> AsyncIterator[tuple[Listener, moqt.Server]]:
    """Serve MOQT sessions that the case itself has in hand."""
    cert, key = make_short_lived(folder)
    quic = moqt.QuicConfig(certfile=cert, keyfile=key)
    async with await moqt.serve(LOOPBACK, 0, quic=quic, handler=moqt.Publisher()) as server:
        yield Listener(server.port, cert), server
