"""A handshake that fails says why, to the client and to the server's operator."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import NameOID

from moqt.quic.certificates import make_self_signed
from moqt.quic.config import QuicConfig
from moqt.quic.udp import refusals
from moqt.quic.udp.endpoint import QuicConnectError, connect
from moqt.quic.udp.refusals import PERIOD, TOLD, Refusals
from tests.moqt.quic.udp.sockets import dial, echo, hang_up, start, until
from tests.moqt.quic_pair import Recorder, quic_config

OBJECTS = ("<", "Pattern(", "Error(", "_ID(", "b'", "datetime")
"""How Python objects look where they are printed."""


def lines(caplog: pytest.LogCaptureFixture, name: str = refusals.__name__) -> list[str]:
    return [
        each.getMessage()
        for each in caplog.records
        if each.name == name and each.levelno >= logging.WARNING
    ]


async def refused(
    caplog: pytest.LogCaptureFixture, server: QuicConfig, client: QuicConfig
) -> tuple[str, str]:
    """What the client is told, and what the server logs."""
    listening = await start(server)
    port = listening.endpoint.port
    with pytest.raises(QuicConnectError) as failure:
        await dial(listening, client)
    await until(lambda: listening.endpoint.counters.handshakes_failed == 1)
    await listening.endpoint.close()
    (line,) = lines(caplog)
    told = str(failure.value)
    for text in [told, *(each.getMessage() for each in caplog.records)]:
        assert not [mark for mark in OBJECTS if mark in text], text
    assert not [each for each in caplog.records if each.name == "quic"]
    assert line.startswith("refused a client at 127.0.0.1:")
    assert f"127.0.0.1:{port}: " in told
    return told, line


def certified(folder: Path, *names: str, years: int = 0) -> tuple[QuicConfig, QuicConfig]:
    """The settings of a server with a certificate made so many years from now, and a client's."""
    now = datetime.now(UTC) + timedelta(days=365 * years)
    cert, key = make_self_signed(folder, names or ("localhost", "127.0.0.1"), now=now)
    return QuicConfig(certfile=cert, keyfile=key), QuicConfig(cafile=cert)


@pytest.mark.parametrize(("years", "word"), [(-3, "was valid until"), (3, "is valid from")])
async def test_a_certificate_out_of_its_time_is_told_with_the_clock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, years: int, word: str
) -> None:
    told, line = await refused(caplog, *certified(tmp_path, years=years))
    words = rf"it {word} \d{{4}}-\d\d-\d\d \d\d:\d\d UTC; this machine's clock says \d{{4}}-"
    assert_matches(words, told, line)
    assert "the server's certificate was not accepted" in told
    assert "it gave up: our certificate was not accepted" in line
    (warned,) = lines(caplog, "moqt.quic.aio.context")  # the server can know it at once
    assert "clients will refuse the certificate" in warned
    assert_matches(words, warned)


def assert_matches(pattern: str, *texts: str) -> None:
    for text in texts:
        assert re.search(pattern, text), text


async def test_a_certificate_for_another_name_is_told_with_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told, line = await refused(caplog, *certified(tmp_path, "relay.example", "192.0.2.7"))
    for text in (told, line):
        assert "it is for relay.example, 192.0.2.7, not for 127.0.0.1" in text


async def test_of_many_names_some_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"relay{i}.example" for i in range(20)]
    told, _ = await refused(caplog, *certified(tmp_path, *names))
    assert "relay5.example, 14 more, not for 127.0.0.1" in told


async def test_an_unknown_authority_is_told_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, _ = certified(tmp_path / "served")
    _, client = certified(tmp_path / "expected")
    told, line = await refused(caplog, server, client)
    for text in (told, line):
        assert "no authority trusted here has signed it: self-signed certificate" in text.replace(
            "self signed", "self-signed"
        )
    assert "does cafile name its authority?" in told


async def test_no_common_alpn_is_told_with_both_lists(caplog: pytest.LogCaptureFixture) -> None:
    server = quic_config(alpn=("moqt-22", "h3"))
    told, line = await refused(caplog, server, quic_config(alpn=("moqt-99", "hq")))
    for text in (told, line):
        assert "the client offers moqt-99, hq; spoken here: moqt-22, h3" in text
    assert "offered were moqt-99, hq" in told


async def test_what_a_client_offers_cannot_forge_log_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, line = await refused(caplog, quic_config(), quic_config(alpn=("x\nERROR all lost",)))
    assert "\n" not in line and "x\\nERROR" in line


@pytest.mark.parametrize("full", [False, True])
async def test_a_version_that_is_not_spoken_is_logged(
    caplog: pytest.LogCaptureFixture, full: bool
) -> None:
    server = await start(quic_config(max_connections=1))
    client = (await dial(server))[0] if full else None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", server.endpoint.port))
        sock.send(b"\xc0\xba\xba\xba\xba\x08ABCDEFGH\x03xyz".ljust(1200, b"\0"))
        port = sock.getsockname()[1]
        await until(lambda: server.endpoint.counters.versions_refused == 1)
    assert lines(caplog) == [
        f"refused a client at 127.0.0.1:{port}: it speaks QUIC 0xbabababa; spoken here: 1, 2"
    ]
    assert server.endpoint.counters.connections_refused == 0
    if client is not None:
        await hang_up(client)
    await server.endpoint.close()


async def test_a_client_is_told_which_versions_the_server_speaks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        dialling = asyncio.ensure_future(
            connect("127.0.0.1", sock.getsockname()[1], quic_config(), Recorder, within=5)
        )
        data, addr = await loop.sock_recvfrom(sock, 2000)
        destination, source = data[6:14], data[15 : 15 + data[14]]
        answer = b"\x80\0\0\0\0" + bytes([len(source)]) + source + b"\x08" + destination
        await loop.sock_sendto(sock, answer + b"\xba\xba\xba\xba\xff\0\0\x1d", addr)
        with pytest.raises(QuicConnectError) as failure:
            await dialling
    assert "the server speaks QUIC 0xbabababa, 0xff00001d; spoken here: 1, 2" in str(failure.value)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"max_connections": 1}, "there are 1 connections already (max_connections)"),
        (
            {"max_connections_per_address": 1, "retry_threshold": 10**6},
            "127.0.0.1 has 1 connections already (max_connections_per_address)",
        ),
    ],
)
async def test_a_full_server_logs_which_limit_was_met(
    caplog: pytest.LogCaptureFixture, changes: dict[str, int], why: str
) -> None:
    server = await start(quic_config(**changes))
    client, _ = await dial(server)
    with pytest.raises(QuicConnectError, match="no room for more connections"):
        await dial(server)
    assert lines(caplog)[0].endswith(why)
    await hang_up(client)
    await server.endpoint.close()


async def test_a_handshake_that_stops_is_logged_with_its_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = await start(quic_config(handshake_timeout=0.3))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.setblocking(False)
        dialling = asyncio.ensure_future(
            connect("127.0.0.1", sock.getsockname()[1], quic_config(), Recorder, within=5)
        )
        loop = asyncio.get_running_loop()
        first, _ = await loop.sock_recvfrom(sock, 2000)  # and no more of it reaches the server
        await loop.sock_sendto(sock, first, ("127.0.0.1", server.endpoint.port))
        await until(lambda: server.endpoint.counters.handshakes_failed == 1)
        dialling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialling
    assert lines(caplog)[0].endswith("the handshake did not complete within 0.3 s")
    await server.endpoint.close()


async def test_noise_is_counted_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = await start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", server.endpoint.port))
        sock.send(b"")
        for packet in (b"\x40" + bytes(50), b"\xc3\0\0\0\x01\x08" + bytes(1300), b"\xff" * 1200):
            sock.send(packet)
        await until(lambda: server.endpoint.counters.datagrams_ignored == 3)
    client, record = await dial(server)
    await echo(record, b"still here")
    await hang_up(client)
    assert not lines(caplog)
    await server.endpoint.close()


async def test_a_handshake_that_succeeds_is_no_refusal(caplog: pytest.LogCaptureFixture) -> None:
    server = await start()
    client, _ = await dial(server)
    await hang_up(client)
    await until(lambda: server.endpoint.connections == 0)
    await server.endpoint.close()
    assert server.endpoint.counters.handshakes_failed == 0
    assert not lines(caplog)


# --------------------------------------------------------------------- how much is logged


class Clock:
    """A clock with one timer."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timer: tuple[float, Callable[[], None]] | None = None
        self.refusals = Refusals(lambda: self.now, self.call_later)

    def call_later(self, seconds: float, action: Callable[[], None]) -> Clock:
        assert self.timer is None
        self.timer = self.now + seconds, action
        return self

    def cancel(self) -> None:
        self.timer = None

    def go(self, seconds: float) -> None:
        self.now += seconds
        if self.timer is not None and self.timer[0] <= self.now:
            (_, action), self.timer = self.timer, None
            action()

    def refuse(self, count: int) -> None:
        for port in range(count):
            self.refusals.note(("192.0.2.1", port), "why")


def test_the_first_of_a_period_are_logged_and_the_rest_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    clock.refuse(TOLD + 300)
    assert len(lines(caplog)) == TOLD
    clock.go(PERIOD)
    assert lines(caplog)[TOLD:] == [
        f"refused 300 more clients within 30 s, the last at 192.0.2.1:{TOLD + 299}: why"
    ]
    caplog.clear()
    clock.refuse(1)  # a new period
    assert lines(caplog) == ["refused a client at 192.0.2.1:0: why"]


def test_what_is_untold_is_told_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    clock.refuse(TOLD + 2)
    clock.refusals.close()
    assert lines(caplog)[-1].startswith("refused 2 more clients")
    assert clock.timer is None
    clock.refusals.close()
    assert len(lines(caplog)) == TOLD + 1


# ------------------------------------------------------------------------- kinds of keys


def with_key(folder: Path, key: CertificateIssuerPrivateKeyTypes) -> QuicConfig:
    """The settings of both sides, with a certificate of `key`, which is its own authority."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    signed_by_itself = isinstance(key, ed25519.Ed25519PrivateKey)
    now = datetime.now(UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None if signed_by_itself else hashes.SHA256())
    )
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    cert_path.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return QuicConfig(
        certfile=cert_path, keyfile=key_path, cafile=cert_path, server_name="localhost"
    )


@pytest.mark.parametrize(
    "key",
    [
        rsa.generate_private_key(65537, 2048),
        ec.generate_private_key(ec.SECP384R1()),
        ed25519.Ed25519PrivateKey.generate(),
    ],
    ids=["rsa", "p-384", "ed25519"],
)
async def test_a_key_may_be_of_several_kinds(
    tmp_path: Path, key: CertificateIssuerPrivateKeyTypes
) -> None:
    config = with_key(tmp_path, key)
    server = await start(config)
    client, record = await dial(server, config)
    await echo(record, b"hello")
    await hang_up(client)
    await server.endpoint.close()


async def test_a_key_that_cannot_sign_here_is_refused_at_the_start(tmp_path: Path) -> None:
    """Every handshake would fail."""
    config = with_key(tmp_path, ec.generate_private_key(ec.SECP521R1()))
    with pytest.raises(ValueError, match=r"of a kind that cannot sign here: RSA, ECDSA P-256"):
        await start(config)


async def test_a_pair_that_does_not_do_leaves_a_server_the_one_it_has(tmp_path: Path) -> None:
    config = with_key(tmp_path, ec.generate_private_key(ec.SECP256R1()))
    server = await start(config)
    right = (tmp_path / "key.pem").read_bytes()
    (tmp_path / "key.pem").write_bytes(make_self_signed(tmp_path / "other")[1].read_bytes())
    with pytest.raises(ValueError, match="does not belong to"):
        server.endpoint.reload_certificate()
    (tmp_path / "key.pem").write_bytes(right)
    client, record = await dial(server, config)
    await echo(record, b"hello")
    await hang_up(client)
    await server.endpoint.close()
