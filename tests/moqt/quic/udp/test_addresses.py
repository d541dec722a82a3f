"""A server on every address of its host answers from the one that was spoken to."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator

import pytest

from moqt.quic.packets.layout import show_address
from moqt.quic.udp import socket as udp_module
from moqt.quic.udp.socket import UdpSocket
from tests.moqt.probe import without_offload
from tests.moqt.quic.udp.sockets import Server, dial, echo, hang_up, start, until
from tests.moqt.quic_pair import quic_config

pytestmark = pytest.mark.skipif(
    udp_module.IP_PKTINFO is None, reason="this system does not tell where a datagram was sent to"
)

OF_ANOTHER_HOST = socket.inet_aton("203.0.113.9")


async def listen(host: str, **changes: object) -> Server:
    server = await start(quic_config(**changes), host=host)
    if host == "" and server.endpoint.address[0] != "::":
        await server.endpoint.close()
        pytest.skip("no IPv6 here")
    return server


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize(
    ("host", "spoken_to"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.2"),
        ("", "127.0.0.2"),  # an IPv6 socket, and a mapped address
        ("", "::1"),
    ],
)
async def test_a_connection_lives_at_any_address_of_the_host(
    host: str, spoken_to: str, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's socket is connected: what comes from another address never reaches it."""
    if not offload:
        without_offload(monkeypatch)
    server = await listen(host)
    client, record = await dial(server, host=spoken_to)
    await echo(record, os.urandom(300_000))
    await hang_up(client)
    await until(lambda: bool(server.handlers[0].closed))  # and its close was heard
    await server.endpoint.close()


@pytest.mark.parametrize(("host", "spoken_to"), [("0.0.0.0", "127.0.0.2"), ("", "127.0.0.2")])
async def test_closing_and_proving_addresses_leave_from_the_address_spoken_to(
    host: str, spoken_to: str
) -> None:
    """Retry first, CONNECTION_CLOSE last."""
    server = await listen(host, retry_threshold=0)
    client, record = await dial(server, host=spoken_to)
    assert server.endpoint.counters.retries_sent == 1
    await server.endpoint.close(0x10, "maintenance")
    await until(lambda: bool(record.closed))
    assert record.closed == [(0x10, "maintenance", True)]
    await client.wait_closed()


@pytest.fixture
async def everywhere() -> AsyncIterator[Server]:
    server = await listen("", max_connections=1)
    yield server
    await server.endpoint.close()


async def ask(server: Server, packet: bytes, spoken_to: str) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.connect((spoken_to, server.endpoint.port))
        sock.send(packet.ljust(1200, b"\0"))
        async with asyncio.timeout(5):
            return await asyncio.get_running_loop().sock_recv(sock, 2000)


async def test_version_negotiation_leaves_from_the_address_spoken_to(everywhere: Server) -> None:
    packet = b"\xc0\x1a\x2a\x3a\x4a\x04ABCD\x03xyz"
    assert (await ask(everywhere, packet, "127.0.0.3"))[1:5] == bytes(4)


async def test_a_refusal_leaves_from_the_address_spoken_to(everywhere: Server) -> None:
    client, _ = await dial(everywhere, host="127.0.0.2")
    packet = b"\xc3\x00\x00\x00\x01\x08ABCDEFGH\x03xyz\x00\x44\x00"
    answer = await ask(everywhere, packet, "127.0.0.3")
    assert answer[6:9] == b"xyz"
    await hang_up(client)


def everything_and_a_peer() -> tuple[UdpSocket, UdpSocket]:
    receiver = UdpSocket(socket.AF_INET, local=("127.0.0.1", 0))
    return UdpSocket(socket.AF_INET, local=("0.0.0.0", 0)), receiver


def test_an_address_that_the_host_has_lost_costs_its_datagrams_and_no_offload(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sender, receiver = everything_and_a_peer()
    had = sender.gso
    datagrams = [(bytes(1200), (*receiver.address, OF_ANOTHER_HOST)) for _ in range(5)]
    with caplog.at_level(logging.INFO):
        assert sender.send(datagrams) == 5
    assert sender.dropped == 5
    assert sender.gso == had
    assert len([each for each in caplog.records if "reported once" in each.message]) == 1
    sender.close()
    receiver.close()


def test_a_socket_on_one_address_has_nothing_to_tell_of_it() -> None:
    sender, receiver = everything_and_a_peer()
    sender.send([(b"x", receiver.address)])
    ((_, addr),) = receiver.receive()[0]
    assert len(addr) == 2
    sender.close()
    receiver.close()


def test_a_system_that_cannot_tell_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(udp_module, "IP_PKTINFO", None)
    with caplog.at_level(logging.WARNING):
        sender, receiver = everything_and_a_peer()
    (line,) = (each.getMessage() for each in caplog.records)
    assert "does not say which of its addresses" in line
    assert "on a host with several addresses listen on a single one" in line
    receiver.send([(b"x", ("127.0.0.1", sender.address[1]))])
    ((datagrams, addr),) = sender.receive()[0]
    assert datagrams == [b"x"] and addr == receiver.address
    sender.close()
    receiver.close()


def test_addresses_are_shown_as_people_write_them() -> None:
    assert show_address(("192.0.2.1", 443, b"\x7f\0\0\1")) == "192.0.2.1:443"
    assert show_address(("::ffff:192.0.2.1", 443, 0, 0)) == "192.0.2.1:443"
    assert show_address(("2001:db8::1", 443, 0, 0, bytes(16))) == "[2001:db8::1]:443"
