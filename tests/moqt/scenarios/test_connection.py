"""Stories of one connection on a spoiled path, told in virtual time."""

from __future__ import annotations

import json

import pytest

from moqt.publisher import Publisher
from moqt.session import SessionConfig, SessionHandler, SessionState
from moqt.values.codes import SessionErrorCode
from moqt.values.messages import LocationFilter, Parameters
from tests.moqt.memory import assert_clean
from tests.moqt.peers import NAME, Collector, track
from tests.moqt.scenarios.support import HOSTILE, served, world
from tests.moqt.simulator import Path, Simulation


def test_one_seed_has_one_trace():
    def story(seed: int):
        simulation, _, client = served(track(20, 4, size=900), seed, path=HOSTILE)
        got = Collector()
        client.session.fetch(NAME, got)
        simulation.advance(20)
        assert len(got.locations) == 80
        return simulation.trace

    first = story(7)
    assert story(7) == first
    assert story(8) != first


@pytest.mark.parametrize("seed", range(12))
def test_a_session_comes_about_where_every_fifth_datagram_is_lost(seed):
    simulation, server, client = world(seed, path=Path(latency=0.05, loss=0.2))
    assert client.session.state is server.session.state is SessionState.ESTABLISHED
    assert simulation.now - 100 < 10  # the adapter's handshake time-out


def test_two_idle_hours_cost_a_bounded_number_of_datagrams():
    simulation, server, client = world()
    before = simulation.sent.total()
    simulation.advance(7200)
    assert client.session.state is server.session.state is SessionState.ESTABLISHED
    # each side may ask, and answer, every third of the idle time-out of 30 s
    assert simulation.sent.total() - before <= 4 * 7200 / 10


def test_a_peer_that_dies_is_given_up_after_the_idle_time_out():
    simulation, server, client = world(idle_timeout=30.0)
    got = Collector()
    server.session.handler.add_track(track(1, 1, ended=False))
    client.session.subscribe(NAME, got)
    simulation.advance(1)
    server.die()
    died = simulation.now
    assert simulation.run(lambda: client.session.closed is not None, limit=100)
    # the PING after a third of the idle time-out starts it once more (RFC 9000 section 10.1)
    assert 29 <= simulation.now - died <= 41
    assert client.session.closed.transport
    assert got.failed is not None
    assert_clean(client.session)


def test_a_server_that_is_not_there_is_reported_when_the_handshake_takes_too_long():
    simulation = Simulation()
    server = simulation.serve("publisher", Publisher())
    server.die()
    client = simulation.connect("subscriber", server, wait=False, handshake_timeout=7.0)
    assert simulation.run(lambda: client.session.closed is not None)
    assert simulation.now - 100 == pytest.approx(7.0)
    assert "handshake" in client.session.closed.reason


def test_a_peer_that_never_says_setup_is_given_up_in_time():
    class Mute:
        def __init__(self, transport): ...
        def __getattr__(self, name):
            return lambda *arguments: None

    simulation = Simulation()
    server = simulation.serve("mute", Mute)
    client = simulation.connect(
        "subscriber", server, wait=False, config=SessionConfig(setup_timeout=5.0)
    )
    assert simulation.run(lambda: client.session.closed is not None)
    assert client.session.closed.code == SessionErrorCode.CONTROL_MESSAGE_TIMEOUT
    assert 5 <= simulation.now - 100 <= 6.5


def test_a_goaway_drains_what_runs_and_refuses_what_comes():
    store = track(50, 2, size=2000)
    slow = Path(latency=0.02, bandwidth=100_000)
    simulation, server, client = served(store, path=slow)
    running, late = Collector(), Collector()
    client.session.fetch(NAME, running)
    simulation.advance(0.5)
    assert running.locations and not running.streams
    server.session.send_goaway(timeout_ms=20_000)
    assert simulation.run(lambda: client.session.goaway is not None, limit=3)
    assert not running.streams
    client.session.fetch(NAME, late)
    assert simulation.run(lambda: bool(running.streams))
    assert len(running.locations) == 100
    assert late.failed.code == 0x6  # GOING_AWAY
    client.session.close()
    simulation.advance(1)
    assert server.session.closed.code == SessionErrorCode.NO_ERROR
    assert_clean(server.session)


@pytest.mark.parametrize("alpn", [("moqt-22",), ("h3",)])
def test_a_goaway_overtakes_the_objects_that_wait_for_a_full_link(alpn):
    bandwidth = 100_000
    path = Path(latency=0.02, bandwidth=bandwidth, queue=16 << 10, mtu=1452)
    simulation, server, client = served(track(50, 2, size=20_000), path=path, alpn=alpn)
    for _ in range(10):  # a stream's turn is short where there is but one
        client.session.fetch(NAME, Collector())
    simulation.advance(2)
    assert server.end.transport.unsent > bandwidth  # more than a second's worth
    server.session.send_goaway()
    assert simulation.run(lambda: client.session.goaway is not None, limit=0.5)
    assert server.end.transport.unsent > bandwidth


def test_a_peer_that_stays_after_goaway_is_closed_with_goaway_timeout():
    store = track(1, 1, ended=False)
    simulation, server, client = served(store)
    client.session.subscribe(NAME, Collector())
    simulation.advance(0.1)
    server.session.send_goaway(timeout_ms=5000)
    assert simulation.run(lambda: client.session.closed is not None)
    assert client.session.closed.code == SessionErrorCode.GOAWAY_TIMEOUT
    assert 5 <= simulation.now - 100 <= 6.5


def test_requests_cancelled_while_everything_is_in_flight_leave_nothing():
    store = track(40, 4, size=1500, ended=False)
    path = Path(latency=0.05, bandwidth=150_000, loss=0.05, reorder=0.2)
    simulation, server, client = served(store, 5, path=path)
    everything = Parameters(
        location_filter=LocationFilter.absolute_start(0),
        fill_parameters=Parameters(location_filter=LocationFilter.absolute_start(0)),
    )
    for wait in (0.0, 0.01, 0.04, 0.06, 0.11, 0.3, 0.8, 1.5):
        requests = [
            client.session.subscribe(NAME, Collector(), everything),
            client.session.fetch(NAME, Collector()),
            client.session.publish_namespace((b"a",), on_ended=lambda error: None),
        ]
        half_closed = client.session.subscribe(NAME, Collector(), everything)
        half_closed.stream.finish()
        simulation.advance(wait)
        for request in (*requests, half_closed):
            request.cancel()
        simulation.advance(wait / 3)
    # what was with QUIC already comes, waits for its alias, and is dropped
    simulation.advance(20)
    assert client.session.state is server.session.state is SessionState.ESTABLISHED
    assert_clean(client.session)
    assert_clean(server.session)
    assert client.end.transport.unsent == server.end.transport.unsent == 0


def test_a_session_closed_by_the_peer_while_packets_are_in_flight_ends_every_request():
    store = track(40, 4, size=1500)
    simulation, server, client = served(store, path=Path(latency=0.05, bandwidth=100_000))
    got = [Collector() for _ in range(4)]
    for collector in got:
        client.session.fetch(NAME, collector)
    simulation.advance(1)
    server.session.close(SessionErrorCode.NO_ERROR, "enough")
    simulation.advance(5)
    assert client.session.closed.reason == "enough"
    assert all(collector.failed is not None for collector in got)
    assert_clean(client.session)
    assert_clean(server.session)


def test_a_close_that_is_lost_is_made_up_for_by_the_idle_time_out():
    simulation, server, client = world(keep_alive=0, idle_timeout=20.0)
    simulation.drop = lambda sender, _: sender == "publisher"
    server.session.close(SessionErrorCode.NO_ERROR, "nobody hears it")
    assert simulation.run(lambda: client.session.closed is not None)
    assert client.session.closed.transport
    assert 19 <= simulation.now - 100 <= 21


def test_a_thousand_seconds_in_which_nothing_happens_take_few_steps():
    """What keeps a test of long spans fast: time jumps from one event to the next."""
    simulation, _, _ = world()
    steps = 0
    flush = simulation.flush

    def counted() -> None:
        nonlocal steps
        steps += 1
        flush()

    simulation.flush = counted
    simulation.advance(1000)
    assert steps < 3000


class Refusing(SessionHandler):
    """The defaults of a handler: it answers every request, with NOT_SUPPORTED."""


def test_every_request_is_answered_when_each_datagram_is_repeated_and_late():
    path = Path(latency=0.2, reorder=0.8, duplicate=0.9)
    simulation, server, client = world(3, path=path, handler=Refusing())
    refused: list[object] = []
    for _ in range(20):
        request = client.session.fetch(NAME, Collector())
        request.on_answer = refused.append
        simulation.advance(0.1)
    simulation.advance(5)
    assert len(refused) == 20 and all(refused)
    assert_clean(client.session)
    assert_clean(server.session)


def test_the_event_log_of_a_connection_has_the_events_of_quic_and_of_moqt_in_their_order(tmp_path):
    simulation, _, client = served(track(2, 2), path=HOSTILE, qlog_dir=tmp_path)
    client.session.fetch(NAME, Collector())
    simulation.advance(2)
    client.session.close()
    simulation.advance(60)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    for file in files:
        records = [json.loads(text) for text in file.read_bytes().split(b"\x1e")[1:]]
        events = records[1:]
        times = [event["time"] for event in events]
        assert times == sorted(times) and times[0] >= 0 and times[-1] < 62_000
        names = {event["name"].partition(":")[0] for event in events}
        assert {"moqt", "transport"} <= names
        client_side = "client" in file.name
        counted = [e["name"] for e in events if e["name"].startswith("moqt:fetch_object")]
        assert counted == ["moqt:fetch_object_" + ("parsed" if client_side else "created")] * 4
