"""QUIC peers that mean harm: frames and packets by hand against one connection."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable

import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.tls import SessionTicket

from moqt.quic.aio.context import QuicContext
from moqt.quic.aio.transport import AioquicTransport
from moqt.quic.webtransport.h3 import encode_varint
from tests.moqt.probe import Probe, initial_with_cid
from tests.moqt.quic_pair import (
    CLIENT,
    SERVER,
    Pair,
    Source,
    certificate,
    quic_config,
    write_frames,
)

PROTOCOL_VIOLATION = 0xA


def frame(kind: int, *values: int, tail: bytes = b"") -> bytes:
    return b"".join(map(encode_varint, (kind, *values))) + tail


def transfer(pair: Pair, size: int = 300_000) -> None:
    payload = os.urandom(size)
    stream_id = pair.client.live.open_stream(bidirectional=False)
    assert stream_id is not None
    pair.client.record.on_ready = Source(pair.client.live, stream_id, payload)
    assert pair.run(lambda: stream_id in pair.server.record.finished, 30)
    assert bytes(pair.server.record.data[stream_id]) == payload
    pair.client.record.on_ready = None


# --------------------------------------------------------------------------- broken rules


@pytest.mark.parametrize("largest", [1 << 20, (1 << 62) - 1])
def test_an_ack_of_a_packet_that_was_not_sent_ends_the_connection(largest: int) -> None:
    pair = Pair()
    write_frames(pair, frame(0x02, largest, 0, 0, 0))
    pair.run(limit=1)
    ((code, reason, application),) = pair.server.record.closed
    assert (code, application) == (PROTOCOL_VIOLATION, False)
    assert "not sent" in reason


@pytest.mark.parametrize(
    "octets, code",
    [
        (frame(0x1E, tail=bytes(8)), PROTOCOL_VIOLATION),  # HANDSHAKE_DONE
        (frame(0x07, 4, tail=b"abcd"), PROTOCOL_VIOLATION),  # NEW_TOKEN
        (frame(0x18, 5, 9, tail=b"\x08" + bytes(24)), PROTOCOL_VIOLATION),  # retires what is new
        (frame(0x19, 1 << 40), PROTOCOL_VIOLATION),  # retires what was never issued
        (frame(0x02, 0, 0, 0, 5), 0x7),  # acknowledges negative numbers
        (frame(0x06, 1 << 40, 1, tail=b"x"), 0xD),  # CRYPTO far beyond what is kept
        (frame(0x0A, 1 << 30, 1, tail=b"x"), 0x4),  # a stream beyond the limit
        (frame(0x05, 2, 0), 0x5),  # STOP_SENDING for a stream the peer only receives on
        (frame(0x04, 2, 0, 1 << 40), 0x3),  # a final size beyond the credit
        (frame(0x12, (1 << 60) + 1), 0x7),  # more streams than there can be
        (b"\x3f" + bytes(8), 0x7),  # a frame nobody knows
        (b"\x40\x06", None),
    ],
)
def test_a_frame_that_breaks_a_rule_ends_this_connection_and_fails_nothing(
    octets: bytes, code: int | None
) -> None:
    pair = Pair()
    write_frames(pair, octets)
    pair.run(limit=1)
    ((got, reason, application),) = pair.server.record.closed
    assert not application and reason and got != 1
    assert code is None or got == code
    assert pair.run(lambda: pair.client.live.terminated and pair.server.live.terminated, 10)


# ----------------------------------------------------------------------------------- floods


def _new_cids(n: int) -> bytes:
    return b"".join(
        frame(0x18, 8 * n + k, 8 * n + k, tail=b"\x08" + os.urandom(24)) for k in range(8)
    )


@pytest.mark.parametrize(
    "octets",
    [
        lambda n: frame(0x01) * 500,
        lambda n: frame(0x1A, tail=os.urandom(8)) * 60,
        lambda n: frame(0x1B, tail=os.urandom(8)) * 60,
        lambda n: frame(0x10, n + (1 << 30)) + frame(0x12, 128 + n) + frame(0x11, 0, n),
        lambda n: frame(0x14, n) + frame(0x15, 2, n) + frame(0x16, n) + frame(0x17, n),
        lambda n: frame(0x31, 1000, tail=bytes(1000)),
        lambda n: frame(0x02, 0, 0, 0, 0) * 100,
        lambda n: b"".join(frame(0x04, 2 + 4 * k, n, 0) for k in range(100)),
        lambda n: b"".join(frame(0x05, 4 * k, n) for k in range(100)),
    ],
    ids=["ping", "challenge", "response", "credit", "blocked", "datagram", "ack", "reset", "stop"],
)
def test_a_flood_of_frames_that_are_allowed_leaves_nothing_behind(
    octets: Callable[[int], bytes],
) -> None:
    pair = Pair(server=quic_config(max_streams_uni=100, max_streams_bidi=100))
    server = pair.server.record
    server.datagram = lambda data: None  # type: ignore[method-assign,assignment]

    for _ in range(100):
        assert pair.client.live.open_stream(bidirectional=True) is not None

    def flood(start: int) -> None:
        for n in range(start, start + 60):
            write_frames(pair, octets(n))
            pair.run(limit=0.02)

    flood(100)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    flood(160)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 200_000  # the clients' own packets in flight are in it
    probe = pair.server.probe
    assert len(probe.streams) <= 200 and probe.events == 0
    assert probe.frames_queued <= 200


def test_connection_ids_issued_in_great_numbers_are_not_all_kept() -> None:
    pair = Pair()
    for n in range(1, 60):
        write_frames(pair, _new_cids(n))
        pair.run(limit=0.02)
    available, retiring = pair.server.probe.cids_of_peer
    assert available <= 8
    assert retiring <= 100


def test_connection_ids_retired_for_ever_do_not_pile_up_in_the_routes() -> None:
    pair = Pair()
    pair.drop = lambda side, data: side is pair.server  # who would object to so many ids
    routed: set[bytes] = {pair.server.live.local_cid}
    pair.server.live.on_cid_issued = routed.add
    pair.server.live.on_cid_retired = routed.discard
    current = pair.server.probe.own_cids
    for number in range(1, 200):
        if number in current or number < pair.server.probe.next_own_cid:
            write_frames(pair, frame(0x19, number))
            pair.run(limit=0.02)
    assert len(routed) <= 16 and len(pair.server.probe.own_cids) <= 8
    assert not pair.server.record.closed


# --------------------------------------------------------------- packets for no connection


def initial(cid_length: int) -> bytes:
    return initial_with_cid(cid_length, SERVER)


@pytest.mark.parametrize("length, taken", [(0, False), (7, False), (8, True), (20, True)])
def test_a_client_makes_up_a_connection_id_of_8_octets_at_least(length: int, taken: bool) -> None:
    context = QuicContext(quic_config(), is_client=False)
    answer = context.unsolicited(initial(length), now=100.0, addr=CLIENT)
    assert isinstance(answer, AioquicTransport) is taken


def test_a_first_packet_that_is_shorter_than_it_says_costs_no_word_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = QuicContext(quic_config(), is_client=False)
    head = b"\xc3\x00\x00\x00\x01" + b"\x08" + bytes(8) + b"\x08" + bytes(8) + b"\x00"
    packet = head + encode_varint(1182) + bytes(1200 - len(head) - 2)
    server = context.unsolicited(packet, now=100.0, addr=CLIENT)
    assert isinstance(server, AioquicTransport)
    server.receive([packet], CLIENT, 100.0)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("first", [0x40, 0x7F, 0xC0 | 0x10, 0xC0 | 0x20])
def test_a_packet_for_a_connection_that_is_gone_is_not_answered(first: int) -> None:
    """No stateless reset: nothing an attacker could have reflected or looped."""
    context = QuicContext(quic_config(), is_client=False)
    packet = bytes([first]) + initial(8)[1:]
    assert context.unsolicited(packet, now=100.0, addr=CLIENT) is None


def test_answers_are_never_longer_than_what_they_answer() -> None:
    context = QuicContext(quic_config(max_datagram_size=8952), is_client=False)
    first = initial(8)
    unknown = first[:1] + b"\x1a\x2a\x3a\x4a" + first[5:]
    for data, options in ((unknown, {}), (first, {"full": True}), (first, {"prove": True})):
        answer = context.unsolicited(data, now=100.0, addr=CLIENT, **options)  # type: ignore[arg-type]
        assert isinstance(answer, bytes) and len(answer) <= len(data)


# -------------------------------------------------------------------- what must keep working


def test_both_sides_update_their_keys_again_and_again_during_a_transfer() -> None:
    config = quic_config(max_datagram_size=1200)
    pair = Pair(config, config, loss=0.02, reorder=0.1, seed=7)
    rounds = iter(range(1000))

    def more(stream: int, data: bytes, fin: bool) -> None:
        if next(rounds) % 20 == 0:
            for side in (pair.client, pair.server):
                if not side.probe.updating_keys:
                    side.probe.connection.request_key_update()

    pair.server.record.on_data = more
    transfer(pair, 12 << 20)
    assert next(rounds) > 40
    assert not pair.client.record.closed and not pair.server.record.closed


def test_a_session_ticket_allows_no_early_data_so_that_there_is_no_0_rtt_to_replay() -> None:
    cert, _ = certificate()
    tickets: list[SessionTicket] = []
    configuration = QuicConfiguration(
        is_client=True, alpn_protocols=["moqt-22"], server_name="localhost", cafile=str(cert)
    )
    client = QuicConnection(configuration=configuration, session_ticket_handler=tickets.append)
    client.connect(SERVER, now=100.0)
    context = QuicContext(quic_config(), is_client=False)
    first = client.datagrams_to_send(now=100.0)
    server = context.unsolicited(first[0][0], now=100.0, addr=CLIENT)
    assert isinstance(server, AioquicTransport)
    now = 100.0
    for _ in range(20):
        now += 0.01
        server.receive([data for data, _ in first], CLIENT, now)
        for data, _ in server.datagrams_to_send(now):
            client.receive_datagram(data, SERVER, now)
        first = client.datagrams_to_send(now)
    assert server.established and [each.max_early_data_size for each in tickets] == [None]
    assert not Probe(server).connection.tls.early_data_accepted


def test_a_path_short_of_what_quic_begins_with_fails_the_handshake_with_a_hint() -> None:
    """Its first packets have 1,200 octets, so no connection hangs in the middle of a fetch."""
    pair = Pair(connect=False)
    pair.drop = lambda side, data: len(data) > 1199
    assert pair.run(lambda: bool(pair.client.record.closed), 20)
    ((_, reason, _),) = pair.client.record.closed
    assert "less than the 1200 octets" in reason and "MTU" in reason


def test_a_transfer_goes_on_over_a_change_of_the_clients_port_in_its_middle() -> None:
    config = quic_config(max_datagram_size=1452)
    pair = Pair(config, config)
    rounds = iter(range(10_000))

    def move(stream: int, data: bytes, fin: bool) -> None:
        if next(rounds) in (20, 60):
            host, port = pair.client.address
            pair.client.address = (host, port + 1)

    pair.server.record.on_data = move
    transfer(pair, 1 << 20)
    assert pair.server.live.remote_address == (CLIENT[0], CLIENT[1] + 2)
    assert pair.server.probe.paths <= 8
