"""What sockets know of the size of datagrams, and what becomes of those that are too large."""

from __future__ import annotations

import errno
import logging
import socket
import sys

import pytest

from moqt.quic.udp import socket as module
from moqt.quic.udp.socket import DONT_FRAGMENT, UdpSocket
from tests.moqt.probe import packet_size
from tests.moqt.quic.udp.sockets import dial, hang_up, start, until
from tests.moqt.quic_pair import quic_config

LOOPBACK_MTU = 65535  # 65536 over IPv6


@pytest.mark.parametrize(
    ("family", "remote", "overhead"),
    [
        (socket.AF_INET, ("127.0.0.1", 9), 28),
        (socket.AF_INET6, ("::1", 9, 0, 0), 48),
        (socket.AF_INET6, ("::ffff:127.0.0.1", 9, 0, 0), 28),
    ],
)
@pytest.mark.parametrize("connected", [True, False])
def test_the_interface_tells_what_it_takes(
    family: int, remote: tuple[object, ...], overhead: int, connected: bool
) -> None:
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    any_address = ("127.0.0.1", 0) if family == socket.AF_INET else ("::", 0)
    udp = UdpSocket(family, **({"remote": remote} if connected else {"local": any_address}))
    limit = udp.payload_limit(remote)
    assert limit is not None
    assert LOOPBACK_MTU <= limit + overhead <= LOOPBACK_MTU + 1
    udp.close()


def test_a_system_that_does_not_tell_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IP_MTU", 9999)
    udp = UdpSocket(socket.AF_INET, remote=("127.0.0.1", 9))
    assert udp.payload_limit(("127.0.0.1", 9)) is None
    udp.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("options", [{}, {sys.platform: ((0, 9999, 1), (41, 9999, 1))}])
def test_where_datagrams_would_be_fragmented_none_is_larger_than_every_path_carries(
    family: int, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DONT_FRAGMENT", options)
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    udp = UdpSocket(family, remote=(host, 9))
    assert udp.payload_limit((host, 9)) == 1200
    udp.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_kernel_does_not_fragment_what_we_send(family: int) -> None:
    udp = UdpSocket(family, local=("127.0.0.1" if family == socket.AF_INET else "::1", 0))
    for level, option, value in DONT_FRAGMENT[sys.platform]:
        if family == socket.AF_INET6 or level == socket.IPPROTO_IP:
            assert udp.sock.getsockopt(level, option) == value
    udp.close()


@pytest.mark.parametrize(("octets", "level"), [(1200, logging.WARNING), (1201, logging.INFO)])
def test_only_an_interface_with_less_than_quic_needs_is_worth_a_warning(
    octets: int, level: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Narrow(socket.socket):
        def send(self, data: object, flags: int = 0) -> int:
            raise OSError(errno.EMSGSIZE, "Message too long")

    monkeypatch.setattr(socket, "socket", Narrow)
    caplog.set_level(logging.INFO)
    udp = UdpSocket(socket.AF_INET, remote=("127.0.0.1", 9))
    for _ in range(3):
        assert udp.send([(bytes(octets), ("127.0.0.1", 9))]) == 1
    assert udp.dropped == 3
    ((_, logged, text),) = caplog.record_tuples
    assert logged == level and str(octets) in text
    udp.close()


async def test_a_connection_over_loopback_soon_has_the_largest_packets_both_ways() -> None:
    server = await start()
    client, _ = await dial(server)
    await until(lambda: packet_size(client) == 16383)
    await until(lambda: packet_size(server.endpoint) == 16383)
    await hang_up(client)
    await server.endpoint.close()


async def test_what_the_interface_takes_is_the_most_that_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(UdpSocket, "payload_limit", lambda *_: 1380)
    server = await start(quic_config(max_datagram_size=8952))
    client, _ = await dial(server)
    await until(lambda: packet_size(client) == packet_size(server.endpoint) == 1380)
    await hang_up(client)
    await server.endpoint.close()
