"""Several processes on one port: each packet comes to the one whose connection it is of."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from moqt.quic.udp.endpoint import connect, serve
from moqt.quic.udp.sharing import SharedPort
from tests.moqt.quic.udp.network import Network
from tests.moqt.quic.udp.sockets import Server, echo, hang_up, until
from tests.moqt.quic_pair import Recorder, quic_config


def shares(count: int, host: str = "127.0.0.1") -> list[SharedPort]:
    """What each of so many processes gets of one port."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(count)]
    for pair in pairs:
        for each in pair:
            each.setblocking(False)
    port, found = 0, []
    for number, (inbox, _) in enumerate(pairs):
        udp = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        udp.bind((host, port))
        port = udp.getsockname()[1]
        found.append(SharedPort(number, udp, inbox, [outbox for _, outbox in pairs]))
    return found


@asynccontextmanager
async def serving(count: int) -> AsyncIterator[list[Server]]:
    made, parts = [], shares(count)
    for each in parts:
        server = Server()
        server.endpoint = await serve(None, 0, quic_config(), server.make, shared=each)
        made.append(server)
    yield made
    for server in made:
        await server.endpoint.close()
    for each in parts:
        each.close()


async def test_a_connection_goes_on_when_its_address_changes_to_one_of_another_process() -> None:
    async with serving(2) as servers:
        assert len({each.endpoint.port for each in servers}) == 1
        network = Network(("127.0.0.1", servers[0].endpoint.port))
        made: list[Recorder] = []

        def make(transport) -> Recorder:
            made.append(Recorder(transport))
            return made[-1]

        config = quic_config(max_datagram_size=1200)
        client = await connect("127.0.0.1", network.port, config, make, within=20)
        (own,) = [each for each in servers if each.handlers]
        (other,) = [each for each in servers if not each.handlers]
        for _ in range(200):
            await echo(made[0], os.urandom(20_000))
            if other.endpoint.counters.datagrams_handed_over:
                break
            network.rebind()
        await echo(made[0], os.urandom(200_000))
        assert other.endpoint.counters.datagrams_handed_over
        assert own.endpoint.counters.path_changes
        assert not other.handlers and not made[0].closed
        await hang_up(client)
        await until(lambda: bool(own.handlers[0].closed))
        network.close()


async def test_the_connection_ids_of_a_process_begin_with_its_number() -> None:
    async with serving(3) as servers:
        port, clients = servers[0].endpoint.port, []
        for _ in range(12):
            client = await connect("127.0.0.1", port, quic_config(), Recorder, within=20)
            clients.append(client)
        for number, server in enumerate(servers):
            for transport in server.endpoint.transports:
                assert transport.local_cid[0] == number
        assert sum(len(each.handlers) for each in servers) == 12
        for client in clients:
            await hang_up(client)


@pytest.mark.parametrize("addr", [("192.0.2.1", 1), ("::1", 9, 0, 0), ("192.0.2.1", 7, b"\0\1\0.")])
def test_what_is_handed_over_arrives_with_its_address(addr) -> None:
    first, second = shares(2)
    packet = bytes([0x40, 1]) + os.urandom(40)
    assert first.hand_over(packet, addr)
    assert second.handed() == [(packet, addr)]
    assert second.handed() == []
    first.close()
    second.close()


def test_initial_packets_and_those_for_no_process_are_taken_where_they_arrive() -> None:
    first, second = shares(2)
    cid = bytes([1]) + bytes(7)
    initial = bytes([0xC0, 0, 0, 0, 1, 8]) + cid + bytes([8]) + bytes(1200)
    handshake = bytes([0xE0, 0, 0, 0, 1, 8]) + cid + bytes([8]) + bytes(100)
    version_2 = bytes([0xD0, 0x6B, 0x33, 0x43, 0xCF, 8]) + cid + bytes([8]) + bytes(1200)
    negotiation = bytes([0xC0, 0, 0, 0, 0, 8]) + cid + bytes([8]) + bytes(8)
    for taken in (initial, version_2, negotiation, bytes([0x40, 2]) + bytes(40), b"@\1", b""):
        assert not first.hand_over(taken, ("192.0.2.1", 1))
    assert not first.hand_over(bytes([0x40, 0]) + bytes(40), ("192.0.2.1", 1)), "its own"
    assert first.hand_over(handshake, ("192.0.2.1", 1))
    assert second.handed() == [(handshake, ("192.0.2.1", 1))]
    first.close()
    second.close()


def test_a_process_that_is_behind_loses_what_is_handed_over_and_keeps_nobody() -> None:
    first, second = shares(2)
    packet = bytes([0x40, 1]) + bytes(1400)
    for _ in range(100_000):
        assert first.hand_over(packet, ("192.0.2.1", 1))
    assert 0 < len(second.handed()) < 100_000
    first.close()
    second.close()
