"""Streams, credit and closing between two transports in memory."""

from __future__ import annotations

import functools
import logging
import os
import random
import weakref

import numpy as np
import pytest

from moqt.quic.aio import sending as aioquic_connection
from moqt.quic.config import QuicConfig
from moqt.quic.transport import Transport, TransportHandler
from tests.moqt.quic_pair import Pair, Path, Recorder, Side, Simulation, Source, quic_config

MIB = 1 << 20


def open_uni(pair: Pair) -> int:
    stream_id = pair.client.live.open_stream(bidirectional=False)
    assert stream_id is not None
    return stream_id


def transfer(pair: Pair, size: int, limit: float = 120.0) -> bytes:
    """The client sends `size` octets on one stream; they must all arrive, in order."""
    payload = os.urandom(size)
    stream_id = open_uni(pair)
    pair.client.record.on_ready = Source(pair.client.live, stream_id, payload)
    assert pair.run(lambda: stream_id in pair.server.record.finished, limit)
    assert bytes(pair.server.record.data[stream_id]) == payload
    return payload


# ------------------------------------------------------------------------------- transfers


def test_handshake_reports_the_chosen_alpn_to_both_sides() -> None:
    pair = Pair(quic_config(alpn=("moqt-99", "moqt-22")), quic_config(alpn=("moqt-22",)))
    assert pair.client.record.alpn == pair.server.record.alpn == "moqt-22"
    assert pair.client.live.is_client and not pair.server.live.is_client


@pytest.mark.parametrize("size", [1200, 1452, 8952])
def test_transfer_arrives_equal_at_each_datagram_size(size: int) -> None:
    pair = Pair(quic_config(max_datagram_size=size), quic_config(max_datagram_size=size))
    transfer(pair, 4 * MIB)
    assert pair.client.live.unsent == 0


@pytest.mark.parametrize("seed", range(6))
def test_transfer_survives_loss_and_reordering(seed: int) -> None:
    pair = Pair(loss=0.05, reorder=0.2, seed=seed)
    transfer(pair, 4 * MIB)


@pytest.mark.parametrize("seed", range(3))
def test_transfer_survives_heavy_loss_with_cubic(seed: int) -> None:
    config = quic_config(congestion_control_algorithm="cubic", max_datagram_size=1452)
    pair = Pair(config, config, loss=0.15, reorder=0.3, seed=seed)
    transfer(pair, MIB)


def test_lost_flow_control_updates_are_sent_again() -> None:
    """Every second packet that carries MAX_DATA or MAX_STREAM_DATA is lost."""
    config = quic_config(stream_window=64 << 10, session_window=128 << 10)
    pair = Pair(config, config, loss=0.02, reorder=0.05)
    wrote = pair.server.probe.count_credit_frames()
    seen = updates = 0

    def drop(side: Side, data: bytes) -> bool:
        nonlocal seen, updates
        if side is pair.server and len(wrote) > seen:
            seen = len(wrote)
            updates += 1
            return updates % 2 == 1
        return False

    pair.drop = drop
    transfer(pair, 4 * MIB)
    assert updates > 20


def test_many_streams_interleaved_under_loss() -> None:
    pair = Pair(loss=0.03, reorder=0.1, seed=4)
    payloads = {}
    sources = []
    for index in range(40):
        stream_id = open_uni(pair)
        payloads[stream_id] = os.urandom(1 + index * 2711)
        sources.append(Source(pair.client.live, stream_id, payloads[stream_id], 1000))

    def ready() -> None:
        for source in sources:
            source()

    pair.client.record.on_ready = ready
    assert pair.run(lambda: len(pair.server.record.finished) == 40)
    assert {k: bytes(v) for k, v in pair.server.record.data.items()} == payloads
    assert pair.run(lambda: not pair.client.probe.streams)
    assert not pair.server.probe.streams


def test_bidirectional_echo_under_loss() -> None:
    pair = Pair(loss=0.05, reorder=0.1, seed=9)
    server = pair.server.record
    server.on_data = lambda stream, data, fin: pair.server.live.send(stream, data, fin)
    stream_id = pair.client.live.open_stream(bidirectional=True)
    assert stream_id == 0
    payload = os.urandom(300_000)
    pair.client.live.send(stream_id, payload, True)
    assert pair.run(lambda: stream_id in pair.client.record.finished)
    assert bytes(pair.client.record.data[stream_id]) == payload
    assert pair.run(lambda: not pair.client.probe.streams)
    assert pair.run(lambda: not pair.server.probe.streams)


def test_300_streams_through_a_limit_of_128() -> None:
    pair = Pair()
    opened = 0
    refused = 0

    def ready() -> None:
        nonlocal opened, refused
        while opened < 300:
            stream_id = pair.client.live.open_stream(bidirectional=False)
            if stream_id is None:
                refused += 1
                return
            pair.client.live.send(stream_id, b"x" * 1000, True)
            opened += 1

    pair.client.record.on_ready = ready
    assert pair.run(lambda: len(pair.server.record.finished) == 300)
    assert refused > 0
    assert pair.run(lambda: not pair.client.probe.streams)


def test_streams_cannot_be_opened_before_the_handshake() -> None:
    pair = Pair(connect=False)
    assert pair.client.live.open_stream(bidirectional=True) is None
    assert pair.client.live.open_stream(bidirectional=False) is None


def test_data_of_one_batch_comes_in_one_call() -> None:
    pair = Pair(latency=0.001)
    stream_id = open_uni(pair)
    pair.client.live.send(stream_id, bytes(8000), True)
    assert pair.run(lambda: stream_id in pair.server.record.finished)
    assert pair.server.record.calls == 1


def test_a_fin_alone_ends_a_stream() -> None:
    pair = Pair()
    stream_id = open_uni(pair)
    pair.client.live.send(stream_id, b"abc")
    assert pair.run(lambda: bool(pair.server.record.data))
    pair.client.live.send(stream_id, b"", True)
    assert pair.run(lambda: stream_id in pair.server.record.finished)
    empty = open_uni(pair)
    pair.client.live.send(empty, b"", True)
    assert pair.run(lambda: empty in pair.server.record.finished)


def test_payload_is_referenced_not_copied_and_let_go_when_acknowledged() -> None:
    pair = Pair()
    array = np.arange(100_000, dtype=np.uint32)
    expected = array.tobytes()
    gone = weakref.ref(array)
    stream_id = open_uni(pair)
    pair.client.live.send(stream_id, memoryview(array))  # type: ignore[arg-type]
    chunk = pair.client.probe.chunks(stream_id)[0]
    assert chunk.obj is array
    del array, chunk
    assert pair.run(lambda: pair.server.record.received == len(expected))
    assert bytes(pair.server.record.data[stream_id]) == expected
    pair.run(limit=1.0)
    assert gone() is None


def test_a_control_stream_does_not_wait_behind_bulk_data() -> None:
    pair = Pair()
    bulk = open_uni(pair)
    pair.client.live.send(bulk, bytes(MIB), True)
    pair.pump(pair.client)
    control = pair.client.live.open_stream(bidirectional=True)
    assert control is not None
    pair.client.live.send(control, b"now")
    assert pair.run(lambda: bytes(pair.server.record.data.get(control, b"")) == b"now")
    assert bulk not in pair.server.record.finished


@pytest.mark.parametrize("first_flight_is_lost", [False, True])
def test_control_goes_before_requests_and_these_before_objects(first_flight_is_lost: bool) -> None:
    pair = Pair()
    client = pair.client.live
    control = client.open_stream(bidirectional=False, urgent=True)
    request = client.open_stream(bidirectional=True)
    bulk = open_uni(pair)
    assert control is not None and request is not None
    order: list[object] = []
    pair.server.record.on_data = lambda stream, data, fin: order.append(stream)
    pair.server.record.datagram = order.append  # type: ignore[method-assign, assignment]
    if first_flight_is_lost:
        pair.drop = lambda side, data: side is pair.client
        client.send(bulk, bytes(MIB))
        pair.run(limit=0.005)
        pair.drop = None
    client.send(bulk, bytes(MIB))
    client.send_datagram(b"object")
    client.send(request, b"request")
    client.send(control, b"control")
    assert pair.run(lambda: bulk in order and b"object" in order)
    assert order[:4] == [control, request, b"object", bulk]


def test_data_that_nobody_reads_leaves_the_credit_that_messages_need() -> None:
    config = quic_config(stream_window=64 << 10, session_window=64 << 10)
    pair = Pair(config, config)
    client, server = pair.client.live, pair.server
    control = client.open_stream(bidirectional=False, urgent=True)
    request = client.open_stream(bidirectional=True)
    assert control is not None and request is not None
    bulk = [open_uni(pair) for _ in range(16)]
    server.record.on_data = lambda stream, data, fin: (
        server.live.pause_receiving(stream) if stream in bulk else None
    )
    for stream in bulk:
        client.send(stream, bytes(MIB))
    pair.run(limit=2)
    stuck = server.record.received
    assert stuck < 64 << 10
    client.send(request, bytes(1500))
    client.send(control, bytes(1500))
    pair.run(limit=2)
    assert len(server.record.data[request]) == len(server.record.data[control]) == 1500
    assert server.record.received == stuck + 3000


def test_keys_are_updated_before_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aioquic_connection, "KEY_UPDATE_PACKETS", 500)
    pair = Pair(quic_config(max_datagram_size=1200))
    transfer(pair, 4 * MIB)
    assert pair.client.probe.connection.key_updates >= 3
    assert not pair.client.record.closed and not pair.server.record.closed


def test_keys_are_not_updated_again_before_a_packet_under_them_was_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """(RFC 9001 section 6.1)"""
    pair = Pair(quic_config(max_datagram_size=1200))
    transfer(pair, MIB)
    monkeypatch.setattr(aioquic_connection, "KEY_UPDATE_PACKETS", 2)
    pair.drop = lambda side, data: side is pair.server
    payload, stream_id = os.urandom(MIB), open_uni(pair)
    pair.client.record.on_ready = Source(pair.client.live, stream_id, payload)
    pair.run(limit=3.0)
    assert pair.client.probe.connection.key_updates == 1
    pair.drop = None
    assert pair.run(lambda: stream_id in pair.server.record.finished)
    assert bytes(pair.server.record.data[stream_id]) == payload
    assert pair.client.probe.connection.key_updates > 1


# ---------------------------------------------------------------------------- flow control


def test_a_paused_stream_stops_its_sender_at_the_window() -> None:
    """No credit, no octets, and next to no packets while nobody reads."""
    window = 256 << 10
    config = quic_config(stream_window=window, session_window=MIB)
    pair = Pair(config, config)
    payload = os.urandom(2 * MIB)
    stream_id = open_uni(pair)
    server = pair.server.record
    server.on_data = lambda stream, data, fin: pair.server.live.pause_receiving(stream)
    pair.client.record.on_ready = Source(pair.client.live, stream_id, payload)
    pair.run(limit=5.0)
    assert 0 < server.received <= window
    assert pair.client.live.unsent <= Source.BUDGET + 16384

    before = dict(pair.sent)
    pair.run(limit=10.0)
    assert server.received <= window
    assert sum(pair.sent.values()) - sum(before.values()) < 40  # keep-alive, nothing else

    server.on_data = None
    pair.server.live.resume_receiving(stream_id)
    assert pair.run(lambda: stream_id in server.finished)
    assert bytes(server.data[stream_id]) == payload


def test_other_streams_flow_while_one_is_paused() -> None:
    config = quic_config(stream_window=64 << 10, session_window=512 << 10)
    pair = Pair(config, config)
    paused, flowing = open_uni(pair), open_uni(pair)

    def on_data(stream: int, data: bytes, fin: bool) -> None:
        if stream == paused:
            pair.server.live.pause_receiving(stream)

    pair.server.record.on_data = on_data
    payload = os.urandom(MIB)
    first = Source(pair.client.live, paused, payload)
    second = Source(pair.client.live, flowing, payload)

    def ready() -> None:
        second()
        first()

    pair.client.record.on_ready = ready
    assert pair.run(lambda: flowing in pair.server.record.finished)
    assert len(pair.server.record.data[paused]) <= 64 << 10


def test_paused_small_streams_are_bounded_by_the_session_window() -> None:
    """Streams shorter than their window, all paused: the session's window holds them."""
    config = quic_config(stream_window=64 << 10, session_window=256 << 10)
    pair = Pair(config, config)
    server = pair.server.record
    server.on_data = lambda stream, data, fin: pair.server.live.pause_receiving(stream)
    sent = 0

    def ready() -> None:
        nonlocal sent
        while sent < 400 and pair.client.live.unsent < 100_000:
            stream_id = pair.client.live.open_stream(bidirectional=False)
            if stream_id is None:
                return
            pair.client.live.send(stream_id, bytes(10_000), True)
            sent += 1

    pair.client.record.on_ready = ready
    pair.run(limit=5.0)
    assert server.received <= 256 << 10

    server.on_data = None
    for stream_id in list(server.data):
        pair.server.live.resume_receiving(stream_id)
    assert pair.run(lambda: len(server.finished) == 400)


def test_windows_follow_consumption_not_the_highest_offset() -> None:
    """A sparse frame at the edge of the window buys no more window."""
    window = 128 << 10
    config = quic_config(stream_window=window, session_window=MIB)
    pair = Pair(config, config)
    stream_id = open_uni(pair)
    pair.client.live.send(stream_id, b"begin")
    assert pair.run(lambda: pair.server.record.received == 5)
    # A raw client: one octet near the end of the window, again and again.
    pair.client.probe.send_one_octet_at(stream_id, window - 1)
    pair.run(limit=2.0)
    stream = pair.server.probe.streams[stream_id]
    assert stream.receiver.highest_offset == window
    assert stream.max_stream_data_local == window
    assert pair.server.probe.credit.value == MIB
    assert pair.server.record.received == 5


def test_octets_beyond_the_credit_close_the_connection() -> None:
    config = quic_config(stream_window=64 << 10, session_window=64 << 10)
    pair = Pair(config, config)
    pair.client.live.pause_receiving(0)
    stream_id = open_uni(pair)
    pair.client.probe.ignore_credit(stream_id)
    pair.server.record.on_data = lambda s, d, f: pair.server.live.pause_receiving(s)
    pair.client.live.send(stream_id, bytes(200_000))
    assert pair.run(lambda: bool(pair.server.record.closed))
    code, reason, application = pair.server.record.closed[0]
    assert (code, application) == (0x3, False)
    assert "limit" in reason


def test_reset_streams_do_not_starve_the_session() -> None:
    """What a reset skips returns to the session's window (final size, RFC 9000 4.5)."""
    config = quic_config(stream_window=64 << 10, session_window=64 << 10)
    pair = Pair(config, config, loss=0.05, seed=3)
    for _ in range(40):
        stream_id = open_uni(pair)
        pair.client.live.send(stream_id, bytes(40_000))
        pair.pump(pair.client)
        pair.client.live.reset(stream_id, 7)
        assert pair.run(lambda s=stream_id: s in pair.server.record.resets)  # type: ignore[misc]
    assert pair.client.live.unsent == 0
    transfer(pair, 256 << 10)


def test_stopped_streams_do_not_starve_the_session() -> None:
    config = quic_config(stream_window=64 << 10, session_window=64 << 10)
    pair = Pair(config, config, loss=0.05, seed=5)
    server = pair.server.record
    server.on_data = lambda stream, data, fin: pair.server.live.stop_receiving(stream, 9)
    for _ in range(40):
        stream_id = open_uni(pair)
        pair.client.live.send(stream_id, bytes(50_000), True)
        assert pair.run(lambda s=stream_id: s not in pair.client.probe.streams)  # type: ignore[misc]
    server.on_data = None
    transfer(pair, 256 << 10)


def test_what_a_lost_packet_carried_is_not_acknowledged() -> None:
    pair = Pair()
    client, stream_id = pair.client.live, open_uni(pair)
    pair.drop = lambda side, data: side is pair.client
    client.send(stream_id, bytes(1000))
    pair.run(limit=0.02)
    assert client.unsent == 0 and not client.acknowledged(stream_id)
    pair.drop = None
    assert pair.run(lambda: client.acknowledged(stream_id))
    assert len(pair.server.record.data[stream_id]) == 1000


def test_send_room_is_the_streams_credit() -> None:
    window = 64 << 10
    config = quic_config(stream_window=window)
    pair = Pair(config, config)
    client = pair.client.live
    assert client.send_room(3) == 0
    stream_id = open_uni(pair)
    assert client.send_room(stream_id) == window
    client.send(stream_id, bytes(1000))
    assert client.send_room(stream_id) == window - 1000
    pair.server.record.on_data = lambda s, d, f: pair.server.live.pause_receiving(s)
    client.send(stream_id, bytes(window - 1000))
    pair.run(limit=1.0)
    assert client.send_room(stream_id) == 0
    ready = 0

    def on_ready() -> None:
        nonlocal ready
        ready += client.send_room(stream_id) > 0

    pair.client.record.on_ready = on_ready
    pair.server.live.resume_receiving(stream_id)
    assert pair.run(lambda: ready > 0)
    assert client.send_room(stream_id) == window


# ---------------------------------------------------------------------------- everything


@pytest.mark.parametrize("seed", range(12))
def test_anything_may_happen_under_loss(seed: int) -> None:
    """Random streams, resets, stops and pauses: all streams end as their ends were told, all
    credit returns, nothing is left behind."""
    dice = random.Random(seed)
    config = quic_config(
        stream_window=dice.choice([16 << 10, 64 << 10, 256 << 10]),
        session_window=512 << 10,
        max_streams_uni=16,
        max_streams_bidi=8,
        max_datagram_size=dice.choice([1200, 1452, 8952]),
    )
    pair = Pair(config, config, loss=dice.choice([0, 0.02, 0.1]), reorder=0.2, seed=seed)
    sides = (pair.client, pair.server)
    payloads: dict[tuple[str, int], bytes] = {}
    spoiled: set[tuple[str, int]] = set()  # reset by us or stopped by the peer
    opened = dict.fromkeys(("client", "server"), 0)
    paused: list[tuple[Side, int]] = []

    def other(side: Side) -> Side:
        return sides[side is pair.client]

    def give(side: Side, stream_id: int) -> None:
        payload = dice.randbytes(dice.choice([0, 1, 500, 20_000, 200_000]))
        payloads[side.name, stream_id] = payload
        pieces = dice.randint(1, 5)
        step = len(payload) // pieces + 1
        for at in range(0, len(payload), step):
            side.live.send(stream_id, payload[at : at + step])
        side.live.send(stream_id, b"", True)
        if dice.random() < 0.15:
            spoiled.add((side.name, stream_id))
            side.live.reset(stream_id, 1)

    def on_data(side: Side, stream_id: int, data: bytes, fin: bool) -> None:
        if not stream_id & 2 and (side.name, stream_id) not in payloads:
            give(side, stream_id)
        roll = dice.random()
        if roll < 0.1:
            side.live.pause_receiving(stream_id)
            paused.append((side, stream_id))
        elif roll < 0.15:
            spoiled.add((other(side).name, stream_id))
            side.live.stop_receiving(stream_id, 2)

    def on_ready(side: Side) -> None:
        while opened[side.name] < 60 and side.live.unsent < 300_000:
            stream_id = side.live.open_stream(bidirectional=dice.random() < 0.3)
            if stream_id is None:
                return
            opened[side.name] += 1
            give(side, stream_id)

    for side in sides:
        side.record.on_data = functools.partial(on_data, side)
        side.record.on_ready = functools.partial(on_ready, side)

    def settled() -> bool:
        return (
            opened == {"client": 60, "server": 60}
            and not pair.client.probe.streams
            and not pair.server.probe.streams
        )

    for _ in range(400):
        if pair.run(settled, limit=1.0):
            break
        # Streams whose opener was reset before any octet arrived never call on_data: answer.
        for side in sides:
            for stream_id in list(side.probe.streams):
                mine = (stream_id & 1) == (side is pair.server)
                if not stream_id & 2 and not mine and (side.name, stream_id) not in payloads:
                    give(side, stream_id)
        dice.shuffle(paused)
        while paused:
            side, stream_id = paused.pop()
            side.live.resume_receiving(stream_id)
    assert settled()
    while paused:
        side, stream_id = paused.pop()
        side.live.resume_receiving(stream_id)
    for side in sides:
        assert not side.record.closed
        assert side.live.unsent == 0
        assert not side.probe.paused
        assert side.probe.queued == 0
        # Every octet received was credited in the end.
        assert side.probe.connection.consumed == side.probe.credit.used
        for key, payload in payloads.items():
            if key[0] == side.name:
                got = bytes(other(side).record.data.get(key[1], b""))
                if key in spoiled:
                    assert payload.startswith(got)
                else:
                    assert got == payload


# ------------------------------------------------------------------------- reset and stop


def test_reset_reaches_the_peer_with_its_code() -> None:
    pair = Pair()
    stream_id = open_uni(pair)
    pair.client.live.send(stream_id, b"some")
    assert pair.run(lambda: pair.server.record.received == 4)
    pair.client.live.reset(stream_id, 42)
    pair.client.live.reset(stream_id, 43)  # no-op
    pair.client.live.send(stream_id, b"too late")  # no-op
    assert pair.run(lambda: pair.server.record.resets == {stream_id: 42})
    pair.run(limit=1.0)
    assert not pair.client.probe.streams
    assert not pair.server.probe.streams
    pair.client.live.reset(stream_id, 44)  # still a no-op


def test_reset_drops_what_was_not_sent() -> None:
    config = quic_config(stream_window=32 << 10)
    pair = Pair(config, config)
    pair.server.record.on_data = lambda s, d, f: pair.server.live.pause_receiving(s)
    stream_id = open_uni(pair)
    pair.client.live.send(stream_id, bytes(MIB))
    pair.run(limit=2.0)
    assert pair.client.live.unsent > 900_000
    pair.client.live.reset(stream_id, 1)
    assert pair.client.live.unsent == 0
    assert pair.run(lambda: stream_id in pair.server.record.resets)


@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_stop_sending_resets_the_peers_direction(loss: float) -> None:
    pair = Pair(loss=loss, seed=2)
    stream_id = open_uni(pair)
    source = Source(pair.client.live, stream_id, bytes(8 * MIB))
    pair.client.record.on_ready = source
    assert pair.run(lambda: pair.server.record.received > 0)
    pair.server.live.stop_receiving(stream_id, 5)
    pair.server.live.stop_receiving(stream_id, 6)
    received = pair.server.record.received
    assert pair.run(lambda: pair.client.record.stops == {stream_id: 5})
    assert pair.run(lambda: not pair.server.probe.streams)
    assert pair.run(lambda: not pair.client.probe.streams)
    assert pair.server.record.received == received, "no data after stop_receiving"
    assert pair.server.record.resets == {}, "a stopped stream's reset is not news"
    assert pair.client.live.unsent == 0
    pair.client.record.on_ready = None
    transfer(pair, 100_000)


def test_stopping_a_finished_stream_does_nothing() -> None:
    pair = Pair()
    stream_id = open_uni(pair)
    pair.client.live.send(stream_id, b"all", True)
    assert pair.run(lambda: stream_id in pair.server.record.finished)
    pair.server.live.stop_receiving(stream_id, 1)
    pair.client.live.stop_receiving(stream_id, 1)  # not readable at all
    pair.run(limit=1.0)
    assert not pair.client.record.stops and not pair.client.record.closed


def test_sending_after_the_end_is_a_mistake_of_ours() -> None:
    pair = Pair()
    stream_id = open_uni(pair)
    pair.client.live.send(stream_id, b"all", True)
    with pytest.raises(RuntimeError, match="after its end"):
        pair.client.live.send(stream_id, b"more")


# ------------------------------------------------------------------------------ datagrams


def test_datagrams_arrive_and_too_large_ones_are_refused() -> None:
    pair = Pair()
    assert pair.client.live.send_datagram(b"hello")
    fits = pair.client.probe.connection.max_datagram_payload()
    assert pair.client.live.send_datagram(bytes(fits))
    assert not pair.client.live.send_datagram(bytes(fits + 1))
    assert pair.run(lambda: len(pair.server.record.datagrams) == 2)
    assert pair.server.record.datagrams == [b"hello", bytes(fits)]


def test_the_queue_of_datagrams_is_bounded() -> None:
    config = quic_config(max_datagram_queue=10_000)
    pair = Pair(config, config)
    taken = sum(pair.client.live.send_datagram(bytes(1000)) for _ in range(100))
    assert taken == 10
    pair.run(limit=1.0)
    assert len(pair.server.record.datagrams) == 10
    assert pair.client.live.send_datagram(bytes(1000))


# ----------------------------------------------------------------------------------- close


@pytest.mark.parametrize("closer", ["client", "server"])
def test_close_code_and_reason_arrive_once(closer: str) -> None:
    pair = Pair()
    side, other = (pair.client, pair.server) if closer == "client" else (pair.server, pair.client)
    side.live.close(0x1234, "going — bye")
    side.live.close(0x99, "again")
    assert pair.run(lambda: bool(other.record.closed))
    pair.run(limit=5.0)
    assert other.record.closed == [(0x1234, "going — bye", True)]
    assert side.record.closed == [(0x1234, "going — bye", True)]
    assert side.live.terminated and other.live.terminated


REASON = (0x1234, "going — bye", True)


class ClosesAtOnce(Pair):
    """A server that has no use for the connection, or a client once the handshake is complete."""

    def __init__(self, closer: str) -> None:
        self.closer = closer
        super().__init__(connect=False)

    def handler(self, side: Side, transport: Transport) -> Recorder:
        class Closing(Recorder):
            def connection_established(self, alpn: str) -> None:
                super().connection_established(alpn)
                self.transport.close(*REASON[:2])

        side.handler = Recorder(transport)
        if side.name == self.closer == "server":
            transport.close(*REASON[:2])
        elif side.name == self.closer:
            side.handler = Closing(transport)
        return side.handler


@pytest.mark.parametrize("closer", ["client", "server"])
def test_a_close_before_the_handshake_is_confirmed_says_why(closer: str) -> None:
    """Code and reason go in 1-RTT packets alone (RFC 9000 section 10.2.3), so the peer must
    first have what it needs to read them."""
    pair = ClosesAtOnce(closer)
    other = pair.server if closer == "client" else pair.client
    assert pair.run(lambda: other.handler is not None and bool(other.record.closed), limit=1.0)
    assert pair.client.record.closed == pair.server.record.closed == [REASON]
    assert other.record.alpn is not None


def test_a_server_that_closes_while_the_clients_finished_is_under_way_says_why() -> None:
    pair = Pair(connect=False)
    assert pair.run(lambda: pair.client.connected)
    assert not pair.server.connected
    pair.server.live.close(*REASON[:2])
    assert pair.run(lambda: bool(pair.client.record.closed), limit=1.0)
    assert pair.client.record.closed == pair.server.record.closed == [REASON]


def test_an_early_close_ends_a_peer_that_cannot_read_1_rtt_packets_too() -> None:
    pair = ClosesAtOnce("server")
    pair.drop = lambda side, data: side is pair.server and len(data) >= 300  # but the close
    assert pair.run(lambda: bool(pair.client.record.closed), limit=1.0)
    assert pair.client.record.closed == [(0xC, "APPLICATION_ERROR", False)]


def test_data_sent_before_a_close_is_delivered_before_it() -> None:
    pair = Pair()
    stream_id = open_uni(pair)
    pair.client.live.send(stream_id, b"last words", True)
    pair.pump(pair.client)
    pair.client.live.close(0, "")
    assert pair.run(lambda: bool(pair.server.record.closed))
    assert pair.server.record.data[stream_id] == b"last words"


def test_a_lost_close_is_repeated_to_a_peer_that_talks_on() -> None:
    pair = Pair()
    dropped = 0

    def drop(side: Side, data: bytes) -> bool:
        nonlocal dropped
        dropped += side is pair.server
        return side is pair.server and dropped == 1

    stream_id = open_uni(pair)
    pair.client.record.on_ready = Source(pair.client.live, stream_id, bytes(4 * MIB))
    assert pair.run(lambda: pair.server.record.received > 100_000)
    pair.drop = drop
    pair.server.live.close(7, "enough")
    assert pair.run(lambda: bool(pair.client.record.closed), limit=1.0)
    assert pair.client.record.closed == [(7, "enough", True)]
    assert pair.client.live.unsent == 0


def test_a_very_long_reason_is_shortened() -> None:
    pair = Pair()
    pair.client.live.close(1, "é" * 5000)
    assert pair.run(lambda: bool(pair.server.record.closed))
    assert pair.server.record.closed[0][1] == "é" * 256


def test_calls_after_close_do_nothing() -> None:
    pair = Pair()
    stream_id = open_uni(pair)
    client = pair.client.live
    client.close(0, "")
    client.send(stream_id, b"x")
    client.reset(stream_id, 1)
    client.stop_receiving(stream_id, 1)
    client.pause_receiving(stream_id)
    client.resume_receiving(stream_id)
    assert client.open_stream(bidirectional=False) is None
    assert not client.send_datagram(b"x")
    pair.run(limit=5.0)
    client.send(stream_id, b"x")
    client.close(1, "")
    assert client.unsent == 0
    assert pair.client.record.closed == [(0, "", True)]


def test_the_idle_timeout_ends_a_silent_connection() -> None:
    config = quic_config(idle_timeout=2.0)
    pair = Pair(config, config)
    pair.drop = lambda side, data: side is pair.client
    assert pair.run(lambda: bool(pair.server.record.closed), limit=10.0)
    _, reason, application = pair.server.record.closed[0]
    assert not application and "idle" in reason.lower()
    assert pair.server.live.terminated


def test_an_idle_connection_is_kept_alive() -> None:
    """Idle for twice the idle time-out, then a request works."""
    config = quic_config(idle_timeout=2.0)
    pair = Pair(config, config)
    pair.run(limit=6.0)
    assert not pair.client.record.closed
    transfer(pair, 10_000)


def test_keep_alive_can_be_off() -> None:
    config = quic_config(idle_timeout=2.0, keep_alive=0)
    pair = Pair(config, config)
    pair.run(limit=6.0)
    assert pair.client.record.closed and pair.server.record.closed


def test_a_failing_handler_closes_its_connection_with_internal_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = Pair()

    def fail(stream: int, data: bytes, fin: bool) -> None:
        raise KeyError("a bug")

    pair.server.record.on_data = fail
    stream_id = open_uni(pair)
    with caplog.at_level(logging.ERROR):
        pair.client.live.send(stream_id, b"x" * 5000, True)
        assert pair.run(lambda: bool(pair.client.record.closed))
    assert pair.client.record.closed == [(1, "internal error", True)]
    assert pair.server.record.closed == [(1, "internal error", True)]
    assert "a bug" in caplog.text
    assert pair.server.record.calls == 1


def test_a_handler_failing_in_ready_to_send_closes_too(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair()

    def fail() -> None:
        raise ZeroDivisionError

    pair.client.record.on_ready = fail
    pair.run(lambda: bool(pair.server.record.closed), limit=5)
    assert pair.server.record.closed == [(1, "internal error", True)]


def test_no_common_alpn_is_said_in_words() -> None:
    pair = Pair(quic_config(alpn=("other",)), connect=False)
    assert pair.run(lambda: bool(pair.client.record.closed), limit=5.0)
    _, reason, application = pair.client.record.closed[0]
    assert not application and "ALPN" in reason


def test_an_untrusted_certificate_is_said_in_words() -> None:
    pair = Pair(quic_config(cafile=None), connect=False)
    assert pair.run(lambda: bool(pair.client.record.closed), limit=5.0)
    _, reason, application = pair.client.record.closed[0]
    assert not application and "certificate was not accepted" in reason
    assert pair.run(lambda: bool(pair.server.record.closed), limit=5.0)


def test_a_certificate_for_another_name_is_refused() -> None:
    pair = Pair(quic_config(server_name="elsewhere.example"), connect=False)
    assert pair.run(lambda: bool(pair.client.record.closed), limit=5.0)
    assert "certificate was not accepted" in pair.client.record.closed[0][1]


def test_a_handshake_that_gets_no_answer_ends_in_time() -> None:
    pair = Pair(quic_config(handshake_timeout=3.0), connect=False)
    pair.drop = lambda side, data: True
    started = pair.now
    assert pair.run(lambda: bool(pair.client.record.closed), limit=10.0)
    assert pair.now - started <= 3.5
    assert "handshake" in pair.client.record.closed[0][1]


@pytest.mark.parametrize("seed", range(5))
def test_a_packet_that_comes_again_counts_once_wherever_in_its_batch_it_is(seed: int) -> None:
    pair = Pair(quic_config(max_datagram_size=1200), quic_config(max_datagram_size=1200))
    assert pair.run(lambda: pair.client.probe.confirmed)
    client, server = pair.client.live, pair.server.live
    for number in range(8):  # a packet each, as many as the pacer lets go
        assert client.send_datagram(bytes([number]) * 1000)
    packets = [data for data, _ in client.datagrams_to_send(pair.simulation.now)]
    count = len(packets)
    assert count >= 3
    random.Random(seed).shuffle(packets)
    late = packets.pop()
    for batch in ([data for data in packets for _ in range(2)], packets + packets, [late, late]):
        server.receive(batch, pair.client.address, pair.simulation.now)
        server.deliver()
    assert sorted(data[0] for data in pair.server.record.datagrams) == list(range(count))


@pytest.mark.parametrize("sender", ["client", "server"])
def test_the_first_packet_under_new_keys_counts_once_too(sender: str) -> None:
    """It is read by another path than the run of packets that its copy is in."""
    pair = Pair(quic_config(max_datagram_size=1200), quic_config(max_datagram_size=1200))
    assert pair.run(lambda: pair.client.probe.confirmed)
    pair.run(limit=1.0)
    sides = (pair.client, pair.server) if sender == "client" else (pair.server, pair.client)
    near, far = sides
    for number in range(3):
        near.probe.connection.request_key_update()
        assert near.live.send_datagram(bytes([number]))
        packets = [data for data, _ in near.live.datagrams_to_send(pair.simulation.now)]
        assert packets
        for batch in (packets + packets, packets):
            far.live.receive(batch, near.address, pair.simulation.now)
            far.live.deliver()
        pair.run(limit=1.0)  # until the update is acknowledged
    assert far.record.datagrams == [b"\0", b"\1", b"\2"]


def test_a_client_with_nothing_to_send_probes_the_servers_preferred_address() -> None:
    pair = Pair()
    assert pair.run(lambda: pair.client.probe.confirmed)
    pair.run(limit=1.0)
    assert not pair.client.live.datagrams_to_send(pair.now)
    preferred = ("192.0.2.50", 4433)
    pair.client.probe.prefer(preferred)
    assert pair.client.live.packet_size > 1200  # of this path: nothing is known of the other one
    sent = pair.client.live.datagrams_to_send(pair.now)
    assert [(len(data), to) for data, to in sent] == [(1200, preferred)]


def test_garbage_is_ignored() -> None:
    pair = Pair()
    for length in (0, 1, 9, 28, 29, 1200, 1452):
        data = os.urandom(length)
        pair.server.live.receive([data], ("192.0.2.1", 1000), pair.now)
        cid = pair.server.live.local_cid
        pair.server.live.receive(
            [b"\x41" + cid + data, b"\xc1" + data], ("192.0.2.1", 1000), pair.now
        )
    transfer(pair, 100_000)


def test_a_client_that_moves_to_another_port_goes_on() -> None:
    """A NAT rebinding in the middle of a transfer (RFC 9000 section 9)."""
    pair = Pair()
    stream_id = open_uni(pair)
    payload = os.urandom(2 * MIB)
    pair.client.record.on_ready = Source(pair.client.live, stream_id, payload)
    assert pair.run(lambda: pair.server.record.received > 300_000)
    pair.client.address = ("192.0.2.1", 2000)
    assert pair.run(lambda: stream_id in pair.server.record.finished)
    assert bytes(pair.server.record.data[stream_id]) == payload
    assert pair.server.live.remote_address == ("192.0.2.1", 2000)


# ---------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpn": "moqt-22"},
        {"alpn": ()},
        {"max_datagram_size": 1199},
        {"max_datagram_size": 16384},
        {"idle_timeout": 0},
        {"stream_window": 0},
        {"session_window": 1024, "stream_window": 2048},
        {"max_streams_uni": -1},
        {"congestion_control_algorithm": "fast"},
        {"certfile": "x"},
        {"keep_alive": -1},
        {"max_connections": 0},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must|together"):
        QuicConfig(**wrong)  # type: ignore[arg-type]


def test_recorder_is_a_handler() -> None:
    pair = Pair()
    handler: TransportHandler = Recorder(pair.client.live)
    transport: Transport = pair.client.live
    assert handler and transport


class Greeter(Recorder):
    """Says something as soon as there is a connection, and more when it is asked for more."""

    def connection_established(self, alpn: str) -> None:
        super().connection_established(alpn)
        self.say(b"first words")
        self.on_ready = lambda: self.say(b"more")

    def say(self, words: bytes) -> None:
        self.on_ready = None
        stream = self.transport.open_stream(bidirectional=False, urgent=True)
        assert stream is not None
        self.transport.send(stream, words, True)


def test_a_server_says_its_first_words_with_its_handshake_and_no_more_before_that_is_over() -> None:
    simulation = Simulation(path=Path(latency=0.05))
    server = simulation.serve("server", Greeter)
    began = simulation.now
    heard: list[Recorder] = []

    def listens(transport: Transport) -> Recorder:
        heard.append(Recorder(transport))
        return heard[0]

    simulation.connect("client", server, listens, wait=False)
    assert simulation.run(lambda: bool(heard[0].data), limit=1.0)
    assert simulation.now - began == pytest.approx(0.1)
    assert heard[0].data == {3: b"first words"}
    assert simulation.run(lambda: len(heard[0].data) == 2, limit=1.0)
    assert simulation.now - began == pytest.approx(0.2)
