"""Peers that do not play by the rules: what they can make us hold is bounded and counted."""

from __future__ import annotations

import itertools
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.quic.aio.context import QuicContext
from moqt.quic.aio.reassembly import PIECE_OVERHEAD, StreamReceiver
from moqt.quic.aio.transport import AioquicTransport
from moqt.quic.packets.layout import origin_of
from moqt.quic.packets.retry import parse_long_header
from moqt.quic.udp.endpoint import QuicConnectError, connect
from moqt.quic.webtransport.h3 import encode_varint
from tests.moqt.probe import origins, pieces, take_initial
from tests.moqt.quic.udp.sockets import dial, echo, hang_up, start, until
from tests.moqt.quic_pair import (
    CLIENT,
    SERVER,
    Pair,
    Recorder,
    Source,
    quic_config,
    write_frames,
)

MIB = 1 << 20


def stream_frame(stream_id: int, offset: int, data: bytes) -> bytes:
    return b"\x0e" + b"".join(map(encode_varint, (stream_id, offset, len(data)))) + data


# ------------------------------------------------------------------------------- reassembly


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_frames_in_any_order_and_with_any_overlap_give_the_stream(seed: int, size: int) -> None:
    rng = random.Random(seed)
    payload = rng.randbytes(size)
    frames = []
    at = 0
    while at < size:
        stop = min(size, at + rng.randint(1, 8))
        frames.append((max(0, at - rng.randint(0, 6)), min(size, stop + rng.randint(0, 6))))
        at = stop
    frames += rng.choices(frames, k=3)
    rng.shuffle(frames)
    receiver = StreamReceiver(0, True)
    got = b""
    for begin, stop in frames:
        taken = receiver.take(begin, payload[begin:stop], stop == size)
        if taken is not None:
            got += taken[0]
            assert taken[1] == (len(got) == size)
        spans = [(first, first + len(piece)) for first, piece in pieces(receiver)]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert receiver.held == sum(b - a + PIECE_OVERHEAD for a, b in spans)
    assert got == payload
    assert receiver.held == 0 and receiver.is_finished


def test_sparse_frames_cost_what_was_sent_and_not_the_window() -> None:
    """One octet at the end of 128 KiB on each of 100 streams: credit, but no memory, is used."""
    pair = Pair(server=quic_config())
    for index in range(100):
        write_frames(pair, stream_frame(2 + 4 * index, MIB // 8 - 1, b"x"))
    pair.run(limit=1.0)
    assert pair.server.probe.out_of_order == 100
    assert pair.server.live.held == 100 * (1 + PIECE_OVERHEAD)
    assert not pair.server.record.closed
    assert pair.server.probe.credit.value == 16 * MIB  # and no more credit came of it


def test_a_stream_of_crumbs_closes_the_connection() -> None:
    pair = Pair(server=quic_config(max_pieces=100))
    offsets = itertools.count(2, 2)
    while not pair.server.record.closed:
        write_frames(pair, b"".join(stream_frame(2, next(offsets), b"x") for _ in range(2)))
        pair.run(limit=0.02)
    assert next(offsets) < 2 * 110
    ((code, reason, application),) = pair.server.record.closed
    assert (code, application) == (1, False)
    assert "out of order" in reason
    assert pair.server.live.counters.connections_over_budget == 1
    assert pair.server.probe.out_of_order == 0


def test_what_all_streams_hold_out_of_order_is_bounded() -> None:
    pair = Pair(server=quic_config(max_reassembly=50_000))
    streams = itertools.count(2, 4)
    while not pair.server.record.closed:
        write_frames(pair, stream_frame(next(streams), 1, bytes(1000)))
        pair.run(limit=0.02)
        assert pair.server.probe.out_of_order <= 50_000
    assert "out of order" in pair.server.record.closed[0][1]


def test_reset_and_stopped_streams_let_go_what_waited() -> None:
    pair = Pair()
    for stream_id in (2, 6):
        write_frames(pair, stream_frame(stream_id, 100, bytes(500)))
    pair.run(limit=0.1)
    assert pair.server.probe.out_of_order == 1000
    pair.server.live.stop_receiving(2, 1)
    write_frames(pair, b"\x04" + b"".join(map(encode_varint, (6, 0, 700))))
    pair.run(limit=0.1)
    assert pair.server.probe.out_of_order == 0 and pair.server.live.held == 0


def test_a_reader_that_never_reads_holds_no_more_than_its_window() -> None:
    """The peer ignores the pause and sends all that credit allows, out of order and in order."""
    config = quic_config(stream_window=64 << 10, session_window=256 << 10)
    pair = Pair(server=config)
    server = pair.server.record
    server.on_data = lambda stream, data, fin: pair.server.live.pause_receiving(stream)
    for stream in range(20):
        for offset in range(0, 12_000, 1000):
            write_frames(pair, stream_frame(2 + 4 * stream, offset, bytes(1000)))
    pair.run(limit=2.0)
    assert server.received + pair.server.probe.out_of_order <= 256 << 10
    assert not server.closed
    write_frames(pair, stream_frame(2, 70_000, b"beyond its credit"))
    pair.run(limit=1.0)
    assert server.closed[0][0] == 3  # FLOW_CONTROL_ERROR


# ------------------------------------------------------------------------------ handshakes


def first_flight(now: float = 100.0) -> tuple[AioquicTransport, Recorder, list[bytes]]:
    made: list[Recorder] = []

    def make(transport: AioquicTransport) -> Recorder:
        made.append(Recorder(transport))
        return made[-1]

    context = QuicContext(quic_config(), is_client=True)
    client = context.connect(SERVER, make, server_name="localhost", now=now)
    return client, made[0], [data for data, _ in client.datagrams_to_send(now)]


def test_a_client_that_must_prove_its_address_does_so_with_a_retry_token() -> None:
    context = QuicContext(quic_config(), is_client=False)
    client, record, flight = first_flight()
    retry = context.unsolicited(flight[0], now=100.0, addr=CLIENT, prove=True)
    assert isinstance(retry, bytes) and len(retry) < len(flight[0])
    client.receive([retry], SERVER, 100.01)
    again = [data for data, _ in client.datagrams_to_send(100.01)]
    server = context.unsolicited(again[0], now=100.02, addr=CLIENT, prove=True)
    assert isinstance(server, AioquicTransport)
    server.attach(Recorder(server))
    now = 100.02
    for _ in range(20):
        server.receive(again, CLIENT, now)
        client.receive([data for data, _ in server.datagrams_to_send(now)], SERVER, now)
        again = [data for data, _ in client.datagrams_to_send(now)]
        now += 0.01
    assert record.alpn == "moqt-22" and not record.closed
    assert client.in_flight == 0  # nobody waits for the Initial that the Retry answered


@pytest.mark.parametrize(
    "change", ["another address", "too late", "another server", "another connection id"]
)
def test_a_token_proves_one_address_for_a_moment(change: str) -> None:
    context = QuicContext(quic_config(), is_client=False)
    client, _, flight = first_flight()
    retry = context.unsolicited(flight[0], now=100.0, addr=CLIENT, prove=True)
    assert isinstance(retry, bytes)
    client.receive([retry], SERVER, 100.01)
    initial = client.datagrams_to_send(100.01)[0][0]
    addr, now = CLIENT, 100.02
    if change == "another address":
        addr = ("192.0.2.77", 1000)
    elif change == "too late":
        now = 200.0
    elif change == "another server":
        context = QuicContext(quic_config(), is_client=False)
    else:
        initial = initial[:6] + bytes([initial[6] ^ 1]) + initial[7:]
    answer = context.unsolicited(initial, now=now, addr=addr, prove=True)
    assert isinstance(answer, bytes)  # asked again, and nothing was kept


@given(st.binary(max_size=80))
def test_garbage_in_place_of_a_token_is_no_proof(garbage: bytes) -> None:
    context = QuicContext(quic_config(), is_client=False)
    head = b"\xc3\x00\x00\x00\x01\x08ABCDEFGH\x03xyz"
    initial = (head + garbage).ljust(1200, b"\0")
    assert parse_long_header(initial) == (1, 0, b"ABCDEFGH", b"xyz")
    assert isinstance(context.unsolicited(initial, now=1.0, addr=CLIENT, prove=True), bytes)


async def test_handshakes_under_way_are_bounded_by_retries() -> None:
    server = await start(quic_config(retry_threshold=5))
    for port in range(40):  # forged addresses: nobody ever answers
        take_initial(server.endpoint, first_flight()[2][0], ("192.0.2.1", 1000 + port))
    assert server.endpoint.half_open == server.endpoint.connections == 5
    assert server.endpoint.counters.retries_sent == 35
    client, record = await dial(server)  # an honest client takes a round trip more
    await echo(record, b"hello")
    assert server.endpoint.counters.retries_sent == 36
    await hang_up(client)
    await server.endpoint.close()


async def test_connections_of_one_address_are_bounded() -> None:
    server = await start(quic_config(max_connections_per_address=2))
    first, record = await dial(server)
    second, _ = await dial(server)
    assert server.endpoint.counters.retries_sent == 1  # half of the limit must be proven
    with pytest.raises(QuicConnectError, match="no room"):
        await connect("127.0.0.1", server.endpoint.port, quic_config(), Recorder, within=5)
    take_initial(server.endpoint, first_flight()[2][0], ("192.0.2.9", 7))
    assert server.endpoint.connections == 3  # others still come in
    assert server.endpoint.counters.connections_refused > 0
    await echo(record, b"unharmed")
    await hang_up(second)
    await until(lambda: server.endpoint.connections == 2)
    third, _ = await dial(server)
    for client in (first, third):
        await hang_up(client)
    await server.endpoint.close()
    assert not origins(server.endpoint)


@pytest.mark.parametrize(
    "addr, origin",
    [
        (("192.0.2.1", 9), "192.0.2.1"),
        (("::ffff:192.0.2.1", 9, 0, 0), "192.0.2.1"),
        (("2001:db8:1:2::1", 9, 0, 0), "20010db800010002"),
        (("2001:db8:1:2:ffff::7", 9, 0, 0), "20010db800010002"),
        (("fe80::1%lo", 9, 0, 1), "fe80000000000000"),
        (("nonsense", 9), "nonsense"),
    ],
)
def test_an_address_is_an_ipv4_address_or_a_64_of_ipv6(
    addr: tuple[object, ...], origin: str
) -> None:
    assert origin_of(addr) == origin


# -------------------------------------------------------------------------------- migration


def test_a_client_whose_address_changes_goes_on_from_the_new_one() -> None:
    pair = Pair()
    payload = os.urandom(MIB)
    stream_id = pair.client.live.open_stream(bidirectional=False)
    assert stream_id is not None
    pair.client.record.on_ready = Source(pair.client.live, stream_id, payload)
    assert pair.run(lambda: pair.server.record.received > 100_000)
    pair.client.address = ("198.51.100.7", 2000)
    assert pair.run(lambda: stream_id in pair.server.record.finished)
    assert bytes(pair.server.record.data[stream_id]) == payload
    assert pair.server.live.remote_address == ("198.51.100.7", 2000)
    assert pair.server.live.counters.path_changes == 1


@pytest.mark.parametrize(
    ("address", "same"), [((CLIENT[0], 2000), True), (("198.51.100.7", 1), False)]
)
def test_the_path_to_another_host_is_a_new_one_and_that_to_another_port_is_not(
    address: tuple[str, int], same: bool
) -> None:
    pair = Pair()
    stream_id = pair.server.live.open_stream(bidirectional=False)
    assert stream_id is not None
    payload = os.urandom(MIB)
    pair.server.record.on_ready = Source(pair.server.live, stream_id, payload)
    assert pair.run(lambda: pair.client.record.received > 300_000)
    recovery = pair.server.probe.connection.recovery
    before = recovery.controller
    pair.client.address = address
    assert pair.run(lambda: stream_id in pair.client.record.finished)
    assert bytes(pair.client.record.data[stream_id]) == payload
    assert pair.server.live.remote_address == address
    assert (recovery.controller is before) is same
    pair.run(limit=1)
    assert recovery.bytes_in_flight == 0


def test_packets_nobody_authenticated_do_not_move_a_connection() -> None:
    pair = Pair()
    for index in range(50):
        forged = b"\x41" + pair.server.live.local_cid + os.urandom(100)
        pair.server.live.receive([forged], ("203.0.113.5", index), pair.now)
    assert pair.server.live.remote_address == CLIENT
    assert pair.server.live.counters.path_changes == 0
    assert pair.server.probe.paths == 1


def test_addresses_a_client_hops_over_are_not_all_remembered() -> None:
    pair = Pair()
    for port in range(200):
        pair.client.address = ("198.51.100.7", port)
        write_frames(pair, b"\x01" + bytes(30))  # PING
        pair.run(limit=0.03)
    assert pair.server.probe.paths < 20
    assert not pair.server.record.closed
