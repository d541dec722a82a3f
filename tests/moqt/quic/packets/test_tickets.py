"""Session tickets: the second handshake with a server is short, and stands for the first."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.tls import CipherSuite, SessionTicket
from cryptography import x509

from moqt.quic.aio.transport import AioquicTransport
from moqt.quic.certificates import make_self_signed
from moqt.quic.config import QuicConfig
from moqt.quic.packets.tickets import (
    MAX_OF_SERVER,
    MAX_SERVERS,
    MAX_TICKET,
    GivenTickets,
    HeldTickets,
)
from moqt.quic.udp.endpoint import QuicConnectError, serve
from tests.moqt.probe import early_data, offering_early_data, tickets_of_process
from tests.moqt.quic.udp.sockets import Echo, Server, dial, echo, hang_up, start, until
from tests.moqt.quic_pair import quic_config


@pytest.fixture(autouse=True)
def nothing_held(monkeypatch: pytest.MonkeyPatch) -> HeldTickets:
    return tickets_of_process(monkeypatch)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = await start()
    yield made
    await made.endpoint.close()


async def visit(server: Server, config: QuicConfig | None = None) -> bool:
    """Connect, say something, leave: whether that took no certificate."""
    before = server.endpoint.counters.handshakes_resumed
    client, record = await dial(server, config)
    await echo(record, b"hello")
    certificate = record.transport.peer_certificate
    assert certificate is not None and certificate.not_valid_after_utc > datetime.now(UTC)
    await hang_up(client)
    return server.endpoint.counters.handshakes_resumed > before


async def test_who_comes_again_shakes_hands_with_a_ticket_and_sees_the_same_certificate(
    server: Server,
) -> None:
    assert [await visit(server) for _ in range(3)] == [False, True, True]
    assert server.endpoint.session_tickets == 1  # each is good for one handshake


async def test_connections_at_once_need_a_ticket_each(server: Server) -> None:
    await visit(server)
    clients = await asyncio.gather(*(dial(server) for _ in range(3)))
    assert server.endpoint.counters.handshakes_resumed == 1
    for client, _ in clients:
        await hang_up(client)


async def test_a_server_that_gives_none_and_a_client_that_wants_none_use_certificates() -> None:
    server = await start(quic_config(max_session_tickets=0))
    assert [await visit(server) for _ in range(2)] == [False, False]
    await server.endpoint.close()
    server = await start()
    without = quic_config(max_session_tickets=0)
    assert [await visit(server, without) for _ in range(2)] == [False, False]
    await server.endpoint.close()


async def test_a_server_that_was_started_again_is_judged_by_its_certificate() -> None:
    first = await start()
    await visit(first)
    port = first.endpoint.port
    await first.endpoint.close()
    second = Server()
    second.endpoint = await serve("127.0.0.1", port, quic_config(), second.make)
    assert [await visit(second) for _ in range(2)] == [False, True]
    await second.endpoint.close()


async def test_another_certificate_of_the_server_is_shown_to_who_was_there_before(
    server: Server,
) -> None:
    await visit(server)
    server.endpoint.reload_certificate()
    assert [await visit(server) for _ in range(2)] == [False, True]


async def test_a_handshake_that_began_before_that_gives_no_ticket_for_what_comes_after_it(
    server: Server,
) -> None:
    await server.endpoint.close()

    def made(transport: AioquicTransport) -> Echo:
        # its first packet was read, and its ticket is still to be given
        server.endpoint.reload_certificate()
        return server.make(transport)

    server.endpoint = await serve("127.0.0.1", 0, quic_config(), made)
    assert [await visit(server) for _ in range(2)] == [False, False]
    assert server.endpoint.session_tickets == 0


async def test_a_ticket_stands_for_no_other_judgement_than_the_one_it_came_of(
    server: Server, tmp_path: Path
) -> None:
    mine = quic_config()
    assert not await visit(server, quic_config(verify=False))
    assert not await visit(server, mine)  # what was not verified stands for nothing
    assert await visit(server, mine)
    other = tmp_path / "ca.pem"
    shutil.copy(mine.cafile or "", other)
    assert not await visit(server, quic_config(cafile=other))
    shutil.copy(make_self_signed(tmp_path / "stranger")[0], other)
    with pytest.raises(QuicConnectError):  # the file has other authorities now
        await visit(server, quic_config(cafile=other))
    with pytest.raises(QuicConnectError):
        await visit(server, quic_config(server_name="elsewhere.example"))


async def test_a_ticket_stands_for_its_certificate_when_the_address_has_to_be_proven(
    nothing_held: HeldTickets,
) -> None:
    server = await start(quic_config(retry_threshold=0))
    assert [await visit(server) for _ in range(2)] == [False, True]
    assert server.endpoint.counters.retries_sent == 2
    await server.endpoint.close()


async def test_early_data_is_offered_by_nobody_and_taken_from_nobody(
    server: Server, nothing_held: HeldTickets, monkeypatch: pytest.MonkeyPatch
) -> None:
    await visit(server)
    with offering_early_data(monkeypatch) as offered:
        client, record = await dial(server)
        await echo(record, os.urandom(10_000))
        assert offered == [True] and early_data(server.handlers[-1].transport) == (False, False)
        await until(lambda: server.endpoint.counters.handshakes_resumed == 1)
        await hang_up(client)


# -- what is kept --------------------------------------------------------------------------


def ticket(number: int, **changes: object) -> SessionTicket:
    now = datetime.now(UTC)
    fields: dict[str, object] = {
        "age_add": 0,
        "cipher_suite": CipherSuite.AES_128_GCM_SHA256,
        "not_valid_after": now + timedelta(days=1),
        "not_valid_before": now - timedelta(seconds=1),
        "resumption_secret": bytes(32),
        "server_name": "localhost",
        "ticket": number.to_bytes(4, "big"),
        "max_early_data_size": 0xFFFFFFFF,
        "other_extensions": [(57, b"parameters")],
    }
    return SessionTicket(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_server_keeps_so_many_tickets_and_forgets_the_oldest() -> None:
    given = GivenTickets(3)
    for number in range(5):
        given.keep(ticket(number))
    assert len(given) == 3
    assert [given.take(ticket(n).ticket) is not None for n in range(5)] == [False] * 2 + [True] * 3
    assert given.take(ticket(4).ticket) is None and len(given) == 0


def test_a_process_keeps_so_many_tickets_of_so_many_servers() -> None:
    held = HeldTickets()
    for server in range(MAX_SERVERS + 5):
        held.keep(server, ticket(server), None)
    assert len(held) == MAX_SERVERS and held.take(0) is None
    for number in range(MAX_OF_SERVER + 5):
        held.keep("one", ticket(number), None)
    taken = []
    while (found := held.take("one")) is not None:
        taken.append(int.from_bytes(found.ticket.ticket, "big"))
    assert taken == list(range(MAX_OF_SERVER + 4, 4, -1))  # the newest first


def test_a_ticket_for_which_a_client_hello_has_no_room_is_not_kept() -> None:
    held = HeldTickets()
    held.keep("server", ticket(1, ticket=bytes(MAX_TICKET + 1)), None)
    assert held.take("server") is None
    held.keep("server", ticket(1, ticket=bytes(MAX_TICKET)), None)
    found = held.take("server")
    assert found is not None
    configuration = QuicConfiguration(is_client=True, server_name="localhost")
    configuration.session_ticket = found.ticket
    QuicConnection(configuration=configuration).connect(("127.0.0.1", 4433), 0.0)


def test_a_ticket_is_kept_for_seven_days_whatever_its_server_says() -> None:
    held, given = HeldTickets(), ticket(1, not_valid_after=datetime.now(UTC) + timedelta(days=99))
    held.keep("server", given, None)
    found = held.take("server")
    assert found is not None
    assert found.ticket.not_valid_after - given.not_valid_before == timedelta(days=7)


def test_a_ticket_allows_no_early_data_and_is_valid_no_longer_than_its_certificate(
    tmp_path: Path,
) -> None:
    cert, _ = make_self_signed(tmp_path, validity=timedelta(hours=3))
    shown = x509.load_pem_x509_certificate(cert.read_bytes())
    held = HeldTickets()
    held.keep("server", ticket(1), shown)
    found = held.take("server")
    assert found is not None and found.certificate is shown
    assert found.ticket.not_valid_after == shown.not_valid_after_utc
    assert found.ticket.max_early_data_size is None and not found.ticket.other_extensions
    held.keep("server", ticket(2, not_valid_after=datetime.now(UTC) - timedelta(1)), shown)
    assert held.take("server") is None
