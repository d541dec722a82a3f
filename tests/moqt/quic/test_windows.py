"""Receive windows: they follow what comes, and all of a process together have a bound."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from moqt.quic.counters import Wait
from moqt.quic.windows import (
    FIRST_WINDOW,
    INITIAL_SESSION_WINDOW,
    NO_MARK,
    Arrivals,
    SessionWindow,
    WindowMemory,
    grown,
)
from tests.moqt.quic.links import Flow, Path, compete, transfer
from tests.moqt.quic_pair import Pair, quic_config, write_frames

MIB = 1 << 20
TRIP = 0.1


def session(memory: WindowMemory, origin: str = "192.0.2.1", **settings: int) -> SessionWindow:
    most = {"most": 64 * MIB, "memory_most": 1024 * MIB} | settings
    window = SessionWindow(memory, origin, **most)
    window.begin()
    return window


def fill(window: SessionWindow, rounds: int = 12) -> None:
    """The peer sends and the application takes all that is granted, each round trip."""
    consumed, now = 0, 100.0
    for _ in range(rounds):
        for _ in range(4):
            limit = consumed + window.octets
            consumed += -(-window.octets // 4)
            now += TRIP / 5
            window.used(limit, consumed, TRIP, now)


# -------------------------------------------------------------------------- how one grows


def test_a_window_holds_four_round_trips_of_what_comes() -> None:
    window, mark, now = 1000, NO_MARK, 100.0
    window, mark = grown(window, 1000, mark, 250, TRIP, now)
    assert window == 1000, "a first quarter says nothing of how fast it was used up"
    window, mark = grown(window, 1250, mark, 500, TRIP, now + TRIP / 4)
    window, mark = grown(window, 1500, mark, 1000, TRIP, now + TRIP / 2)
    assert window == 4 * (1000 - 250)


def test_a_quarter_of_a_window_in_each_round_trip_leaves_it_as_it_is() -> None:
    window, mark, now, consumed = 1000, NO_MARK, 100.0, 0
    for _ in range(100):
        limit = consumed + window
        consumed += 250
        now += 1.01 * TRIP
        window, mark = grown(window, limit, mark, consumed, TRIP, now)
    assert window == 1000


def test_a_window_also_grows_by_what_comes_at_once_when_a_lost_packet_has_come() -> None:
    window, _ = grown(1000, 1000, NO_MARK, 1000, TRIP, 100.0)
    assert window == 4 * 750


def test_what_comes_is_counted_by_round_trips_and_forgotten_when_nothing_came_for_one() -> None:
    arrivals = Arrivals()
    arrivals.next_trip(0, TRIP, 100.0)
    assert arrivals.of_a_trip(300) == 300
    arrivals.next_trip(1000, TRIP, 100.0 + TRIP)
    assert arrivals.of_a_trip(1200) == 1000, "the one before, until this one has brought more"
    assert arrivals.of_a_trip(2500) == 1500
    arrivals.next_trip(2600, TRIP, 100.0 + 5 * TRIP)
    assert arrivals.of_a_trip(2600) == 0


@pytest.mark.parametrize(("loss", "least"), [(0.001, 0.9), (0.01, 0.75)])
def test_what_is_lost_makes_no_sender_wait_for_credit(loss: float, least: float) -> None:
    """A gigabit a second over 100 ms: while a packet is sent anew, nothing is consumed."""

    def goodput(loss: float) -> float:
        path = Path(latency=0.05, bandwidth=125e6, queue=12_500_000, loss=loss)
        return transfer(67_000_000, path, first_flight=4 * MIB).goodput

    assert goodput(loss) > least * goodput(0.0)


# -------------------------------------------------------------------------- who may have how much


def test_a_thousand_connections_that_fill_their_windows_stay_within_the_memory_of_the_process() -> (
    None
):
    memory = WindowMemory()
    windows = [session(memory, f"192.0.{number % 40}.1") for number in range(1000)]
    for window in windows:
        fill(window)
    assert sum(each.octets for each in windows) <= 1024 * MIB + 1000 * FIRST_WINDOW
    assert min(each.octets for each in windows) >= FIRST_WINDOW
    assert memory.denied > 0
    for window in windows:
        window.close()
    assert memory.octets == 0


def test_connections_of_one_address_leave_half_of_the_memory_to_another() -> None:
    memory = WindowMemory()
    for _ in range(256):
        fill(session(memory))
    assert memory.octets <= 512 * MIB
    other = session(memory, "198.51.100.1")
    assert other.octets == INITIAL_SESSION_WINDOW
    fill(other)
    assert other.octets == 64 * MIB


def test_a_thousand_connections_that_send_nothing_leave_half_of_the_memory_to_one_that_does() -> (
    None
):
    memory = WindowMemory()
    for number in range(1000):
        session(memory, f"192.0.{number % 250}.{number // 250}")
    assert memory.octets <= 512 * MIB + INITIAL_SESSION_WINDOW
    assert memory.denied == 0
    busy = session(memory, "198.51.100.1")
    fill(busy)
    assert busy.octets == 64 * MIB


def test_the_log_says_once_which_setting_keeps_a_window_small(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = WindowMemory()
    with caplog.at_level(logging.WARNING, "moqt.quic.windows"):
        for _ in range(3):
            fill(session(memory, most=4 * MIB))
    (record,) = caplog.records
    assert "session_window=4194304" in record.getMessage()


def test_a_connection_has_its_window_after_the_handshake_and_gives_it_back_at_the_end() -> None:
    pair = Pair()
    assert pair.server.probe.credit.value == INITIAL_SESSION_WINDOW
    context = pair.server.host.context
    assert context is not None
    assert context.memory.octets == INITIAL_SESSION_WINDOW - FIRST_WINDOW
    pair.client.live.close(0, "")
    pair.run(limit=1.0)
    assert context.memory.octets == 0


# -------------------------------------------------------------------------- paused streams

STREAMS = {"stream_window": MIB // 2, "session_window": MIB}


def test_of_a_window_that_n_paused_streams_have_filled_an_n_plus_first_part_is_left() -> None:
    window = session(WindowMemory())
    lendable = 64 * MIB * 7 / 8
    for paused in range(25):
        lent = window.lend(0, 64 * MIB, 64 * MIB)
        assert lent == pytest.approx(lendable / ((paused + 1) * (paused + 2)), rel=0.01)
        window.pause(lent, lent)
    assert window.octets == 64 * MIB


def test_for_paused_streams_alone_a_window_grows_to_half_of_what_it_may_have() -> None:
    window = session(WindowMemory())
    for number in range(1, 8):
        window.pause(0, 4 * MIB)
        assert window.octets == min(16 + 4 * number, 32) * MIB


def test_streams_that_flow_have_equal_parts_of_half_of_a_window() -> None:
    window = session(WindowMemory(), most=16 * MIB)
    lent = [0] * 7
    for _ in range(30):
        for number, had in enumerate(lent):
            lent[number] = window.lend(had, 8 * MIB, 32 * MIB)
    assert lent == pytest.approx([MIB] * 7, rel=0.01)
    assert window.octets == 16 * MIB


def test_a_stream_begins_with_an_eighth_of_what_its_session_may_have_at_most() -> None:
    assert session(WindowMemory(), most=4 * MIB).of_fresh_stream(32 * MIB) == 4 * MIB // 8
    poor = SessionWindow(WindowMemory(), "192.0.2.1", 64 * MIB, 0)
    assert poor.of_fresh_stream(32 * MIB) == FIRST_WINDOW // 8
    rich = SessionWindow(WindowMemory(), "192.0.2.1", 64 * MIB, 1024 * MIB)
    assert rich.of_fresh_stream(32 * MIB) == 8 * MIB


@pytest.mark.parametrize(
    ("paused", "taken"), [(1, 0), (2, 0), (7, 0), (2, 150_000), (7, 150_000), (40, 150_000)]
)
def test_streams_that_are_paused_do_not_starve_one_that_is_read(paused: int, taken: int) -> None:
    config = quic_config(**STREAMS)
    pair = Pair(config, config)
    client, server = pair.client.live, pair.server
    streams = [client.open_stream(bidirectional=False) for _ in range(paused)]

    def on_data(stream: int, data: bytes, fin: bool) -> None:
        if stream in streams and len(server.record.data[stream]) >= taken:
            server.live.pause_receiving(stream)

    server.record.on_data = on_data
    for stream in streams:
        assert stream is not None
        client.send(stream, bytes(MIB), True)
    pair.run(limit=20)
    held = server.record.received
    assert len(server.probe.paused) == paused
    read = client.open_stream(bidirectional=False)
    assert read is not None
    client.send(read, bytes(MIB // 2), True)
    assert pair.run(lambda: read in server.record.finished, limit=20)
    assert server.record.received == held + MIB // 2
    assert held <= paused * (taken + 20_000) + MIB
    server.record.on_data = None
    for stream in streams:
        assert stream is not None
        server.live.resume_receiving(stream)
    assert pair.run(lambda: len(server.record.finished) == paused + 1)
    assert server.probe.lent == 0


@pytest.mark.parametrize("end", ["resume", "stop", "reset"])
def test_what_a_paused_stream_was_lent_comes_back_however_it_ends(end: str) -> None:
    config = quic_config(**STREAMS)
    pair = Pair(config, config)
    client, server = pair.client.live, pair.server
    server.record.on_data = lambda stream, data, fin: server.live.pause_receiving(stream)
    for _ in range(20):
        stream = client.open_stream(bidirectional=False)
        assert stream is not None
        client.send(stream, bytes(100_000), end == "resume")
        pair.run(limit=1.0)
        assert server.probe.lent >= 100_000
        if end == "reset":
            client.reset(stream, 1)
            pair.run(limit=1.0)
            assert server.probe.lent == 100_000
        if end == "stop":
            server.live.stop_receiving(stream, 1)
        else:
            server.live.resume_receiving(stream)
        pair.run(limit=1.0)
        assert server.probe.lent == 0
        assert not server.probe.streams


def test_what_a_paused_stream_brought_before_its_reset_is_billed_until_it_is_read() -> None:
    config = quic_config(stream_window=64 << 10, session_window=256 << 10)
    pair = Pair(config, config)
    client, server = pair.client.live, pair.server
    server.record.on_data = lambda stream, data, fin: server.live.pause_receiving(stream)
    streams = []
    for _ in range(40):
        stream = client.open_stream(bidirectional=False)
        assert stream is not None
        streams.append(stream)
        client.send(stream, bytes(30_000))
        pair.run(limit=0.5)
        client.reset(stream, 7)
        pair.run(limit=0.5)
    assert server.record.received <= 256 << 10
    assert server.record.resets[streams[0]] == 7, "the handler is told at once"
    server.record.on_data = None
    for stream in streams:
        server.live.resume_receiving(stream)
    pair.run(limit=1.0)
    read = client.open_stream(bidirectional=False)
    assert read is not None
    client.send(read, bytes(MIB), True)
    assert pair.run(lambda: read in server.record.finished)
    assert server.probe.lent == 0
    credit = server.probe.credit
    assert credit.value - credit.used >= 256 << 9, "what the resets skipped has come back, too"


@pytest.mark.parametrize("end", ["FIN", "reset"])
def test_streams_that_ended_and_were_not_read_are_among_those_a_peer_may_have_open(
    end: str,
) -> None:
    config = quic_config(max_streams_uni=16, max_open_streams_uni=16)
    pair = Pair(config, config)
    client, server = pair.client.live, pair.server
    server.record.on_data = lambda stream, data, fin: server.live.pause_receiving(stream)
    opened = []
    for _ in range(100):
        stream = client.open_stream(bidirectional=False)
        if stream is not None:
            opened.append(stream)
            client.send(stream, b"x", end == "FIN")
            pair.run(limit=0.2)
            if end == "reset":
                client.reset(stream, 1)
        pair.run(limit=0.2)
    assert len(opened) == 16
    for stream in opened:
        server.live.resume_receiving(stream)
    pair.run(limit=1.0)
    assert client.open_stream(bidirectional=False) is not None
    assert not server.probe.streams


@pytest.mark.parametrize("stream", [0, 2], ids=["bidirectional", "unidirectional"])
@pytest.mark.parametrize("together", [True, False], ids=["one packet", "two packets"])
def test_a_reset_behind_the_end_of_a_paused_stream_takes_nothing_off_the_account(
    stream: int, together: bool
) -> None:
    pair = Pair()
    server = pair.server
    server.record.on_data = lambda stream, data, fin: server.live.pause_receiving(stream)
    end = bytes([0x0B, stream, 0x43, 0xE8]) + bytes(1000)
    reset = bytes([0x04, stream, 1, 0x43, 0xE8])
    for frames in (end + reset,) if together else (end, reset):
        write_frames(pair, frames)
        pair.run(limit=1.0)
    assert server.probe.lent == 1000
    server.live.resume_receiving(stream)
    assert server.probe.lent == 0


# -------------------------------------------------------------------------- what it is for


def path(**changes: object) -> Path:
    settings: dict[str, object] = {"latency": 0.05, "bandwidth": 125e6, "queue": 12_500_000}
    return Path(**settings | changes)  # type: ignore[arg-type]


def test_a_gigabit_a_second_over_100_ms_is_filled_by_one_stream() -> None:
    random.seed(1)
    flow = transfer(None, path(), until=3)
    assert flow.goodput_between(1.9, 3) >= 0.9 * 125e6
    assert waited(flow, Wait.FLOW_CONTROL) <= 0.4, "but while STARTUP overshoots"


def waited(flow: Flow, wait: Wait) -> float:
    """Seconds that a flow's sender waited for something."""
    return flow.sender.transport.waits.seconds[wait]


@pytest.mark.parametrize(
    ("settings", "wait"),
    [
        ({"stream_window": 64 << 10}, Wait.FLOW_CONTROL),
        ({"session_window": 64 << 10, "stream_window": 64 << 10}, Wait.FLOW_CONTROL),
        ({"congestion": "bbr"}, Wait.PACING),
        ({"congestion": "reno", "max_datagram_size": 1200}, Wait.CONGESTION_WINDOW),
        ({"rate": 1e5}, Wait.APPLICATION),
    ],
    ids=["stream's credit", "session's credit", "pacing", "window", "application"],
)
def test_a_sender_says_what_it_waits_for(settings: dict[str, Any], wait: Wait) -> None:
    random.seed(1)
    flow = transfer(None, path(bandwidth=1.25e6, queue=1_000_000), until=5, **settings)
    seconds = flow.sender.transport.waits.seconds
    assert sum(seconds.values()) == pytest.approx(5, abs=0.1)
    assert max(seconds, key=lambda each: seconds[each]) is wait


def test_a_writer_that_keeps_to_the_credit_of_a_stream_waits_for_it_too() -> None:
    pair = Pair(server=quic_config(stream_window=64 << 10, session_window=128 << 10))
    client = pair.client.live
    stream = client.open_stream(bidirectional=False)
    assert stream is not None

    def write() -> None:
        client.send(stream, bytes(client.send_room(stream)))

    pair.server.record.on_data = lambda *_: pair.server.live.pause_receiving(stream)
    pair.client.record.on_ready = write
    pair.run(limit=1.0)
    before = client.waits.seconds[Wait.FLOW_CONTROL]
    pair.run(limit=20.0)
    assert client.waits.seconds[Wait.FLOW_CONTROL] - before >= 9


def test_a_lost_packet_among_ten_thousand_small_ones_under_way_is_waited_for() -> None:
    random.seed(1)
    # With 1,200 octets in each, ten thousand wait for it in the receiver.
    lossy = path(blackouts=((1.9, 1.9005),))
    flow = transfer(None, lossy, until=2.6, max_datagram_size=1200)
    assert flow.declared_lost > 0
    assert flow.goodput_between(2.1, 2.6) >= 0.8 * 125e6


def test_a_receiver_short_of_memory_slows_its_senders_and_loses_nothing() -> None:
    random.seed(1)
    flows = compete(
        *(Flow(octets=3_000_000, quic={"window_memory": 0}) for _ in range(2)),
        up=path(),
        until=20,
    )
    for flow in flows:
        assert flow.received == 3_000_000
        assert flow.seconds is not None and flow.seconds >= 3_000_000 / FIRST_WINDOW * TRIP


def test_windows_that_are_set_stay_as_they_are_set() -> None:
    config = quic_config(stream_window=64 << 10, session_window=128 << 10)
    pair = Pair(server=config)
    assert pair.server.probe.credit.value == 128 << 10
