"""Endpoints on real loopback sockets, and the UDP socket under them."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import stat
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

from moqt.quic import certificates as certs
from moqt.quic.aio.transport import AioquicTransport
from moqt.quic.certificates import check_key_pair, make_self_signed, names_of
from moqt.quic.config import QuicConfig
from moqt.quic.udp import socket as udp_module
from moqt.quic.udp.endpoint import QuicConnectError, connect, serve
from moqt.quic.udp.socket import UdpSocket
from tests.moqt.probe import (
    Probe,
    arrive,
    backlog,
    deafen,
    mute,
    reset_token,
    routes,
    send_with,
    sending,
    shut,
    timers,
    without_offload,
)
from tests.moqt.quic.udp.sockets import Server, dial, echo, hang_up, start, until
from tests.moqt.quic_pair import Recorder, quic_config


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = await start()
    yield made
    await made.endpoint.close()


@pytest.mark.parametrize("size", [1200, 1452, 8952])
async def test_echo(size: int) -> None:
    config = quic_config(max_datagram_size=size)
    server = await start(config)
    client, record = await dial(server, config)
    assert record.alpn == "moqt-22"
    await echo(record, os.urandom(1 << 20))
    await hang_up(client)
    await until(lambda: bool(server.handlers[0].closed))
    assert server.handlers[0].closed == [(0, "done", True)]
    await until(lambda: server.endpoint.connections == 0)
    await server.endpoint.close()


async def test_echo_without_kernel_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    without_offload(monkeypatch)
    server = await start()
    client, record = await dial(server)
    await echo(record, os.urandom(300_000))
    await hang_up(client)
    await server.endpoint.close()


async def test_echo_over_ipv6() -> None:
    try:
        server = await start(host="::1")
    except OSError:
        pytest.skip("no IPv6 loopback here")
    client, record = await dial(server, host="::1")
    await echo(record, os.urandom(100_000))
    await hang_up(client)
    await server.endpoint.close()


async def test_a_name_with_several_addresses_is_tried_in_order(server: Server) -> None:
    """`localhost` may be ::1 first, where nobody listens."""
    client, record = await dial(server, quic_config(server_name=None), host="localhost")
    await echo(record, b"x" * 1000)
    await hang_up(client)


async def test_server_on_every_address_serves_both_families() -> None:
    server = await start(host="")
    hosts = ["127.0.0.1"]
    if server.endpoint.address[0] == "::":
        hosts.append("::1")
    for host in hosts:
        client, record = await dial(server, host=host)
        await echo(record, b"x" * 100_000)
        await hang_up(client)
    await server.endpoint.close()


async def test_many_clients_at_once(server: Server) -> None:
    async def one(index: int) -> None:
        client, record = await dial(server, within=20)
        await echo(record, bytes([index]) * 50_000)
        await hang_up(client)

    await asyncio.gather(*(one(index) for index in range(25)))
    assert len(server.handlers) == 25
    await until(lambda: server.endpoint.connections == 0)
    assert not routes(server.endpoint) and not timers(server.endpoint)


async def test_of_datagrams_that_came_together_each_connection_gets_its_own(
    server: Server,
) -> None:
    """Two connections may have one address, and the kernel joins what comes from it."""
    clients = [await dial(server) for _ in range(2)]
    # until then a connection takes nothing from another's address
    await until(lambda: all(Probe(handler.transport).confirmed for handler in server.handlers))
    sides = [Probe(client.transports[0]) for client, _ in clients]
    one, other = ([side.seal(b"\x0a\x02\x02" + text) for text in (b"ab", b"ab")] for side in sides)
    together = [one[0], other[0], b"\x41short", one[1], other[1]]
    addr = clients[0][0].address
    arrive(server.endpoint, together, addr)
    assert [bytes(handler.data[2]) for handler in server.handlers] == [b"ab", b"ab"]
    more = [sides[1].seal(b"\x0e\x02\x02\x02cd"), sides[1].seal(b"\x0e\x02\x04\x02ef")]
    arrive(server.endpoint, more, addr)
    assert [bytes(handler.data[2]) for handler in server.handlers] == [b"ab", b"abcdef"]
    for client, _ in clients:
        await hang_up(client)


async def test_what_takes_long_is_received_a_little_at_a_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no turn of the loop takes long, however small the Objects are that come."""
    receive, asked, seconds = UdpSocket.receive, [], itertools.count()

    def noted(self: UdpSocket, most: int = 0):
        asked.append(most)
        return receive(self, most)

    monkeypatch.setattr(UdpSocket, "receive", noted)
    monkeypatch.setattr(time, "thread_time", lambda: next(seconds))
    client, record = await dial(server)
    for _ in range(20):
        await echo(record, b"x")
    assert asked[-1] == 1, "one look at the socket in each turn"
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    for _ in range(20):
        await echo(record, b"x")
    assert asked[-1] == udp_module.RECEIVE_OCTETS
    await hang_up(client)


async def test_close_of_the_server_reaches_its_clients(server: Server) -> None:
    client, record = await dial(server)
    await server.endpoint.close(0x10, "maintenance")
    await until(lambda: bool(record.closed))
    assert record.closed == [(0x10, "maintenance", True)]
    async with asyncio.timeout(5):
        await client.wait_closed()
        await server.endpoint.wait_closed()


async def test_an_untrusted_certificate_is_refused_with_a_reason(server: Server) -> None:
    with pytest.raises(QuicConnectError, match="certificate was not accepted"):
        await dial(server, quic_config(cafile=None))
    await until(lambda: server.endpoint.connections == 0)


async def test_an_untrusted_certificate_is_fine_without_verification(server: Server) -> None:
    client, record = await dial(server, quic_config(cafile=None, verify=False))
    await echo(record, b"hello")
    await hang_up(client)


async def test_no_common_alpn_is_refused_with_a_reason(server: Server) -> None:
    with pytest.raises(QuicConnectError, match="ALPN"):
        await dial(server, quic_config(alpn=("other",)))


async def test_a_close_right_after_the_handshake_is_told_to_the_handler_alone(
    server: Server,
) -> None:
    class Leaving(Recorder):
        def connection_established(self, alpn: str) -> None:
            super().connection_established(alpn)
            self.transport.close(0, "")

    made: list[Leaving] = []

    def make(transport: AioquicTransport) -> Leaving:
        made.append(Leaving(transport))
        return made[0]

    client = await connect("127.0.0.1", server.endpoint.port, quic_config(), make)
    await until(lambda: bool(made[0].closed))
    assert made[0].closed == [(0, "", True)]
    await client.close()


async def test_nobody_listening_is_noticed_at_once(server: Server) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    async with asyncio.timeout(30):
        with pytest.raises(QuicConnectError, match="nobody listens"):
            await connect("127.0.0.1", port, quic_config(), Recorder, within=600)


@pytest.mark.parametrize("listening", [True, False])
async def test_who_gives_up_just_as_the_answer_comes_has_given_up(
    server: Server, listening: bool
) -> None:
    """Whatever the answer is: a cancellation is never lost, or its task would go on for ever."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        port = server.endpoint.port if listening else sock.getsockname()[1]
    connecting: list[asyncio.Task[object]] = []

    class Late(Recorder):
        def connection_established(self, alpn: str) -> None:
            asyncio.get_running_loop().call_soon(connecting[0].cancel)

        def connection_closed(self, code: int, reason: str, application: bool) -> None:
            asyncio.get_running_loop().call_soon(connecting[0].cancel)

    connecting.append(asyncio.ensure_future(connect("127.0.0.1", port, quic_config(), Late)))
    with pytest.raises(asyncio.CancelledError):
        await connecting[0]


async def test_a_silent_peer_is_given_up_within_the_deadline() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        async with asyncio.timeout(30):
            with pytest.raises(QuicConnectError, match=r"no answer within .* 1200 octets"):
                port = sock.getsockname()[1]
                await connect("127.0.0.1", port, quic_config(), Recorder, within=0.5)


async def test_an_abandoned_attempt_is_told_to_the_server(server: Server) -> None:
    """A client that gives up does not leave the server waiting for its idle time-out."""
    mute(server.endpoint)
    task = asyncio.ensure_future(dial(server))
    await until(lambda: bool(server.handlers))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: server.endpoint.connections == 0, within=5)


async def test_a_name_that_does_not_resolve_is_an_error() -> None:
    with pytest.raises(QuicConnectError, match="cannot resolve"):
        await connect("no-such-host.invalid", 1, quic_config(), Recorder, within=5)


async def test_a_killed_client_is_forgotten_after_the_idle_timeout() -> None:
    server = await start(quic_config(idle_timeout=0.5))
    client, _ = await dial(server)
    assert server.endpoint.connections == 1
    # Gone without a word: nothing is sent any more.
    deafen(client)
    mute(client)
    await until(lambda: server.endpoint.connections == 0, within=5)
    assert server.handlers[0].closed[0][2] is False
    assert "dle" in server.handlers[0].closed[0][1]
    assert not routes(server.endpoint)
    shut(client)
    await server.endpoint.close()


async def test_garbage_datagrams_are_ignored(server: Server) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", server.endpoint.port))
        for length in (0, 1, 5, 20, 21, 1199, 1200, 1452, 9000):
            for first in (0x00, 0x40, 0x80, 0xC0, 0xC3, 0xFF):
                sock.send(bytes([first]) + os.urandom(length))
                # A well-formed header of an Initial whose content is noise.
                sock.send(b"\xc3\x00\x00\x00\x01\x08" + os.urandom(8) + b"\0" + os.urandom(length))
        client, record = await dial(server)
        await echo(record, b"still here")
        await hang_up(client)
    assert len(server.handlers) == 1


async def test_an_unknown_version_is_answered_with_version_negotiation(server: Server) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(0)
        sock.connect(("127.0.0.1", server.endpoint.port))
        packet = b"\xc0\x1a\x2a\x3a\x4a\x04ABCD\x03xyz"
        sock.send(packet)  # too short to be answered: that would amplify
        sock.send(packet.ljust(1200, b"\0"))
        async with asyncio.timeout(5):
            answer = await asyncio.get_running_loop().sock_recv(sock, 2000)
        assert answer[1:5] == bytes(4)
        assert answer[5:14] == b"\x03xyz\x04ABCD"
        assert b"\x00\x00\x00\x01" in answer[14:]
        with pytest.raises(BlockingIOError):
            sock.recv(2000)  # one answer only
    assert server.endpoint.connections == 0


async def test_a_full_server_refuses_with_a_reason() -> None:
    server = await start(quic_config(max_connections=2))
    first, record = await dial(server)
    second, _ = await dial(server)
    with pytest.raises(QuicConnectError, match="no room"):
        await dial(server)
    assert server.endpoint.counters.connections_refused > 0
    await echo(record, b"unharmed")
    await hang_up(second)
    await until(lambda: server.endpoint.connections == 1)
    third, _ = await dial(server)
    for client in (first, third):
        await hang_up(client)
    await server.endpoint.close()


async def test_a_handler_factory_that_fails_costs_one_connection(server: Server) -> None:
    server.failing = True
    with pytest.raises(QuicConnectError):
        await dial(server)
    server.failing = False
    client, record = await dial(server)
    await echo(record, b"fine")
    await hang_up(client)


async def test_send_outside_a_handler_call_goes_out_without_wake(server: Server) -> None:
    client, record = await dial(server)
    await asyncio.sleep(0.05)
    await echo(record, b"no wake needed")
    assert record.transport.send_datagram(b"dg")
    await until(lambda: bool(server.handlers[0].datagrams))
    await hang_up(client)


async def test_a_full_socket_is_waited_for(server: Server) -> None:
    """EAGAIN: datagrams wait, in order and within a bound, until the socket takes them."""
    client, record = await dial(server)
    real = sending(client)
    calls = 0

    def reluctant(datagrams: list[tuple[bytes, tuple[object, ...]]]) -> int:
        nonlocal calls
        calls += 1
        return 0 if calls % 3 else real(datagrams[:2])

    send_with(client, reluctant)
    await echo(record, os.urandom(200_000))
    await until(lambda: not backlog(client))
    send_with(client, real)
    await hang_up(client)


async def test_a_timer_that_is_due_while_the_socket_takes_nothing_is_not_called_for_ever(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, record = await dial(server)
    real = sending(client)
    monkeypatch.setattr(asyncio.get_running_loop(), "add_writer", lambda *_: None)
    monkeypatch.setattr(asyncio.get_running_loop(), "remove_writer", lambda *_: None)
    send_with(client, lambda datagrams: 0)
    for _ in range(2):
        stream_id = record.transport.open_stream(bidirectional=True)
        assert stream_id is not None
        record.transport.send(stream_id, bytes(1 << 20), True)
    await until(lambda: bool(backlog(client)))
    (transport,) = client.transports
    calls = 0

    def handle(now: float) -> None:
        nonlocal calls
        calls += 1
        AioquicTransport.handle_timer(transport, now)

    monkeypatch.setattr(transport, "handle_timer", handle)
    await asyncio.sleep(0.2)
    assert calls <= 30
    send_with(client, real)
    await hang_up(client)


async def test_the_secrets_log_gets_tls_secrets(tmp_path: Path, server: Server) -> None:
    path = tmp_path / "keys.log"
    client, _ = await dial(server, quic_config(keylog_file=path))
    await hang_up(client)
    assert "CLIENT_TRAFFIC_SECRET_0" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# ------------------------------------------------------------------------------ UDP socket


def sockets(offload: bool) -> tuple[UdpSocket, UdpSocket]:
    receiver = UdpSocket(socket.AF_INET, local=("127.0.0.1", 0), offload=offload)
    sender = UdpSocket(socket.AF_INET, remote=receiver.address, offload=offload)
    return sender, receiver


@pytest.mark.parametrize("offload", [True, False])
def test_batches_arrive_as_the_datagrams_they_were(offload: bool) -> None:
    sender, receiver = sockets(offload)
    lengths = [1200] * 70 + [300, 1200, 1200, 1300, 1300, 7, 7, 1452] + [8952] * 9 + [1]
    datagrams = [os.urandom(length) for length in lengths]
    assert sender.send([(data, receiver.address) for data in datagrams]) == len(datagrams)
    arrived: list[bytes] = []
    deadline = time.monotonic() + 5
    while len(arrived) < len(datagrams) and time.monotonic() < deadline:
        for batch, addr in receiver.receive()[0]:
            assert addr == sender.address
            arrived += batch
    assert arrived == datagrams
    sender.close()
    receiver.close()


def test_a_socket_that_refuses_segmentation_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = sockets(True)
    sender.gso = True
    monkeypatch.setattr(udp_module, "UDP_SEGMENT", 9999)  # EINVAL: no such control message
    datagrams = [(os.urandom(1200), receiver.address) for _ in range(5)]
    assert sender.send(datagrams) == 5
    assert not sender.gso
    time.sleep(0.05)
    assert sum(len(batch) for batch, _ in receiver.receive()[0]) == 5
    sender.close()
    receiver.close()


def test_a_datagram_larger_than_the_path_is_dropped_and_counted() -> None:
    sender, receiver = sockets(True)
    large = bytes(66_000)
    assert sender.send([(large, receiver.address), (b"next", receiver.address)]) == 2
    assert sender.dropped == 1
    time.sleep(0.05)
    assert receiver.receive()[0][0][0] == [b"next"]
    sender.close()
    receiver.close()


def test_a_refusal_is_noted() -> None:
    sender, receiver = sockets(True)
    receiver.close()
    for _ in range(3):
        sender.send([(b"x", ("127.0.0.1", 1))])
        time.sleep(0.02)
    sender.receive()
    assert sender.refused
    sender.close()


# ---------------------------------------------------------------------------- certificates


def test_certificates_are_private_reused_and_renamed(tmp_path: Path) -> None:
    cert, key = make_self_signed(tmp_path)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    first = cert.read_bytes()
    assert make_self_signed(tmp_path) == (cert, key)
    assert cert.read_bytes() == first
    make_self_signed(tmp_path, ("relay.example", "192.0.2.7"))
    parsed = x509.load_pem_x509_certificate(cert.read_bytes())
    names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["relay.example"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cert.pem", "cert.sha256", "key.pem"]


def test_a_certificate_we_make_has_what_strict_clients_ask_of_an_authority(tmp_path: Path) -> None:
    """RFC 5280 sections 4.2.1.1 to 4.2.1.3, 4.2.1.9; Python 3.13 and browsers look at them."""
    cert, _ = make_self_signed(tmp_path)
    extensions = x509.load_pem_x509_certificate(cert.read_bytes()).extensions
    its_own = extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    signer = extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    assert signer.key_identifier == its_own.digest
    use = extensions.get_extension_for_class(x509.KeyUsage)
    assert use.critical and use.value.key_cert_sign and use.value.digital_signature
    assert extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_damaged_certificate_is_replaced(tmp_path: Path) -> None:
    cert, _ = make_self_signed(tmp_path)
    cert.write_text("nonsense")
    make_self_signed(tmp_path)
    x509.load_pem_x509_certificate(cert.read_bytes())


def test_why_a_certificate_was_replaced_is_told_but_not_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def make(*names: str) -> bytes:
        cert, key = make_self_signed(tmp_path, names, replaced=told.append)
        check_key_pair(cert, key)
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        return cert.read_bytes()

    with monkeypatch.context() as soon:
        soon.setattr(certs, "VALIDITY", timedelta(hours=20))
        first = make("one.example")
    assert told == []
    second = make("one.example")
    assert second != first and "valid until" in told.pop()
    assert make("one.example") == second and told == []
    make("one.example", "192.0.2.7")
    assert told.pop() == "the one there was not for 192.0.2.7"
    (tmp_path / "key.pem").write_bytes(make_self_signed(tmp_path / "other")[1].read_bytes())
    make("one.example")
    assert "does not belong to" in told.pop()
    (tmp_path / "key.pem").unlink()
    make("one.example")
    assert "key.pem was missing" in told.pop()
    assert names_of(tmp_path / "cert.pem") == ["one.example"]


def test_those_who_make_a_certificate_at_once_get_the_same_pair(tmp_path: Path) -> None:
    def make(_: int) -> tuple[bytes, bytes]:
        cert, key = make_self_signed(tmp_path)
        return cert.read_bytes(), key.read_bytes()

    with ThreadPoolExecutor(8) as pool:
        pairs = set(pool.map(make, range(8)))
    assert len(pairs) == 1
    check_key_pair(tmp_path / "cert.pem", tmp_path / "key.pem")


def test_what_cannot_be_the_name_of_a_host_gets_no_certificate(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        make_self_signed(tmp_path, ["bücher.example"])
    assert list(tmp_path.iterdir()) == []


async def restarted(server: Server, config: QuicConfig) -> Server:
    """The server's process was killed, and another one listens on its port."""
    port = server.endpoint.port
    mute(server.endpoint)
    shut(server.endpoint)
    again = Server()
    again.endpoint = await serve("127.0.0.1", port, config, again.make)
    return again


@pytest.mark.parametrize("same_key", [True, False])
async def test_a_client_learns_at_once_that_its_server_was_restarted_with_the_same_key(
    same_key: bool, tmp_path: Path
) -> None:
    first = quic_config(reset_key_file=tmp_path / "one.key", idle_timeout=600)
    second = quic_config(reset_key_file=tmp_path / ("one.key" if same_key else "other.key"))
    server = await start(first)
    client, record = await dial(server, quic_config(idle_timeout=600))
    await echo(record, b"x")
    again = await restarted(server, second)
    record.transport.send(record.transport.open_stream(bidirectional=True), b"anybody there?")
    record.transport.wake()
    await until(lambda: again.endpoint.counters.resets_sent > 0)
    if same_key:
        await until(lambda: bool(record.closed), 30)
        assert record.closed == [
            (0, "the peer has forgotten this connection: it was restarted", False)
        ]
        await asyncio.wait_for(client.wait_closed(), 30)
    else:
        assert not record.closed, "it cannot know the token"
        await client.close()
    await again.endpoint.close()


async def test_a_reset_from_another_address_or_for_another_connection_is_not_believed() -> None:
    server = await start()
    client, record = await dial(server)
    (transport,) = client.transports
    token = reset_token(transport)
    where = server.endpoint.address
    for data, addr in (
        (b"\x40" + bytes(30) + token, ("127.0.0.1", 9)),
        (b"\x40" + bytes(30) + bytes(16), where),
        (b"\x40" + token, where),
    ):
        assert not transport.takes_reset(data, addr, 0.0)
    await echo(record, b"still here")
    assert transport.takes_reset(b"\x40" + bytes(30) + token, where, 0.0)
    await server.endpoint.close()
