"""TLS 1.3, the authorities named, and a client certificate as the credential."""

from __future__ import annotations

import datetime
import socket

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvsp.client import Client, NotAuthorizedError, UnreachableError
from kvsp.http.app import App
from kvsp.http.auth import unauthorized
from kvsp.index.app import IndexApp
from kvsp.index.service import IndexService
from kvsp.index.sqlite import SqliteStore
from kvsp.names.errors import FileError
from moqt.quic import certificates as certs
from moqt.quic.certificates import make_self_signed
from tests.certificates import identified
from tests.kvsp.client.support import (
    DESCRIPTOR,
    FAST,
    KEYS,
    SCOPE,
    Fake,
    client_principal,
    serving,
    serving_app,
)

WHO = "https://client.example/kvsp/"


def client_certificate(folder):
    """A certificate for the URI name of a principal, which is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "client")])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(WHO)]), critical=False
        )
    )
    certificate = identified(builder, key, key, authority=True).sign(key, hashes.SHA256())
    paths = folder / "client.pem", folder / "client-key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths


class ByCertificate:
    def authenticate(self, credentials):
        if WHO in credentials.certificate_uris:
            return client_principal()
        raise unauthorized("a client certificate is needed")


async def test_a_client_certificate_is_a_credential_and_the_server_is_verified(tmp_path):
    certificate, key = make_self_signed(tmp_path / "server", ["127.0.0.1"])
    pair = client_certificate(tmp_path)

    def index(base):
        service = IndexService(SqliteStore(tmp_path / "index.db"))
        return App([IndexApp(service)], base_uri=base, authenticator=ByCertificate())

    async with serving_app(index, certificate=certificate, key=key, client_ca=pair[0]) as app:
        uri = app.base_uri.replace("http://", "https://")

        async def matched(**access):
            async with Client(uri, limits=FAST, **access) as client:
                return (await client.lookup(SCOPE.scope_id, DESCRIPTOR.compat_id, KEYS)).matched

        assert await matched(cafile=certificate, client_cert=pair) == 0
        with pytest.raises(NotAuthorizedError, match="client certificate is needed"):
            await matched(cafile=certificate)
        with pytest.raises(UnreachableError, match="certificate is not trusted"):
            await matched(client_cert=pair)
        elsewhere = uri.replace("127.0.0.1", "localhost")
        with pytest.raises(UnreachableError, match="not trusted: it is not for localhost"):
            async with Client(elsewhere, limits=FAST, cafile=certificate) as client:
                await client.discover(elsewhere)
        with pytest.raises(UnreachableError, match=r"broke off \(is it https://\?\)"):
            async with Client(app.base_uri, limits=FAST, http_loopback=True) as client:
                await client.discover(app.base_uri)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("VALIDITY", datetime.timedelta(minutes=1), "it has expired"),
        (
            "timedelta",
            lambda hours: datetime.timedelta(hours=-hours),
            "certificate is not yet valid",
        ),
    ],
)
async def test_what_is_wrong_with_a_certificate_of_a_known_authority_is_told(
    tmp_path, monkeypatch, name, value, words
):
    with monkeypatch.context() as elsewhen:
        elsewhen.setattr(certs, name, value)
        certificate, key = make_self_signed(tmp_path, ["127.0.0.1"])

    def index(base):
        service = IndexService(SqliteStore(tmp_path / "index.db"))
        return App([IndexApp(service)], base_uri=base, authenticator=ByCertificate())

    async with serving_app(index, certificate=certificate, key=key) as app:
        uri = app.base_uri.replace("http://", "https://")
        with pytest.raises(UnreachableError, match=f"not trusted: {words}$"):
            async with Client(uri, limits=FAST, cafile=certificate) as client:
                await client.discover(uri)


async def test_why_there_is_no_connection_is_said_in_words(monkeypatch):
    resolve = socket.getaddrinfo

    def resolved(host, *arguments, **more):
        if host == "nobody.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    async with serving(Fake(lambda request: None).app) as http:
        uris = {
            http.replace("http://", "https://"): "the server does not speak TLS (is it http://?)",
            "https://127.0.0.1:9/": "connection refused: nobody listens on 127.0.0.1:9",
            "https://[::1]:9/": "[::1]:9",
            "https://nobody.invalid/": "no address is known for the host nobody.invalid",
        }
        for uri, words in uris.items():
            with pytest.raises(UnreachableError) as caught:
                async with Client(uri, limits=FAST) as client:
                    await client.discover(uri)
            assert words in str(caught.value)
            for internal in ("Errno", "_ssl", "Connect call", "('"):
                assert internal not in str(caught.value)


def test_a_file_that_is_no_certificate_is_named(tmp_path):
    (tmp_path / "x.pem").write_text("x")
    for access in (
        {"cafile": tmp_path / "x.pem"},
        {"cafile": tmp_path / "absent.pem"},
        {"client_cert": (tmp_path / "x.pem", tmp_path / "absent.pem")},
    ):
        with pytest.raises(FileError, match=r"\.pem: "):
            Client("https://is.example/kvsp/", **access)
