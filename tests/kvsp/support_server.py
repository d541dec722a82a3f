"""Servers on sockets of this machine, and certificates for them."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from starlette.responses import Response

from kvsp.http.app import App, Operation, Service
from kvsp.http.call import Call, json_response
from kvsp.http.server import Server, ServerSettings
from tests.certificates import identified


@asynccontextmanager
async def serving(app: App, **settings: Any) -> AsyncIterator[Server]:
    """The application on a free port of this machine."""
    server = Server(app, ServerSettings(**{"drain_s": 1.0, **settings}))
    task = asyncio.create_task(server.serve())
    try:
        while not server.started:
            assert not task.done(), task.exception()
            await asyncio.sleep(0.005)
        yield server
    finally:
        server.should_exit = True
        await task


def free_port() -> int:
    """A port of this machine that nobody listens on, for who must know it beforehand."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


class Authority:
    """A certificate authority of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        builder = self._builder(self._name, self._key)
        self._certificate = identified(builder, self._key, self._key, authority=True).sign(
            self._key, hashes.SHA256()
        )
        self.path = folder / "ca.pem"
        self.path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *names: x509.GeneralName) -> tuple[Path, Path]:
        """A certificate and its key, as files."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key).add_extension(
            x509.SubjectAlternativeName(names), critical=False
        )
        certificate = identified(builder, key, self._key, authority=False).sign(
            self._key, hashes.SHA256()
        )
        paths = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return paths

    def server(self) -> tuple[Path, Path]:
        return self.issue("server", x509.IPAddress(ipaddress.ip_address("127.0.0.1")))

    def client(self, uri: str) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.path))
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # as from Python 3.13 on
        context.load_cert_chain(*self.issue("client", x509.UniformResourceIdentifier(uri)))
        return context

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
        )


class Who(Service):
    role = "index"

    def operations(self) -> Sequence[Operation]:
        return (
            Operation(method="GET", path="who", handler=self.who, summary="who"),
            Operation(method="POST", path="never", handler=self.refuse, summary="never"),
            Operation(method="POST", path="wait", handler=self.wait, summary="wait"),
        )

    def __init__(self) -> None:
        self.waiting = asyncio.Event()

    async def wait(self, call: Call) -> Response:
        self.waiting.set()
        return json_response(await call.read_object())

    async def who(self, call: Call) -> Response:
        return json_response(call.principal.name)

    async def refuse(self, call: Call) -> Response:
        return json_response("no need to read", 200)
