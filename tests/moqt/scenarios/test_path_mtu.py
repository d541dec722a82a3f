"""Stories of connections that find out what their paths carry, in virtual time."""

from __future__ import annotations

import json

import pytest

from moqt.publisher import Publisher
from moqt.quic.congestion.controller import INITIAL_WINDOW, at_once
from tests.moqt.peers import NAME, Collector, track
from tests.moqt.probe import Probe
from tests.moqt.quic_pair import Pair, Source, quic_config
from tests.moqt.scenarios.support import served, world
from tests.moqt.simulator import Host, Path, Simulation

ROUND_TRIP = 0.1


def on(mtu: int, **more: object) -> Path:
    return Path(latency=ROUND_TRIP / 2, mtu=mtu, **more)  # type: ignore[arg-type]


def sizes(*hosts: Host) -> list[int]:
    """The size of a packet at each host that has one connection."""
    return [host.end.transport.packet_size for host in hosts]


def lost(simulation: Simulation) -> list[int]:
    """Octets of each datagram that did not pass."""
    return [octets for _, _, _, octets, fate in simulation.trace if fate != "sent"]


@pytest.mark.parametrize("alpn", [("moqt-22",), ("h3",)])
@pytest.mark.parametrize(
    ("mtu", "rounds"), [(1200, 0), (1452, 5), (8952, 5), (9000, 5), (16383, 6), (65507, 6)]
)
def test_the_usual_sizes_are_in_use_some_round_trips_after_the_handshake(mtu, rounds, alpn):
    """Also where nothing is sent: after the first four, in which data would have all the room."""
    simulation = Simulation(path=on(mtu))
    server = simulation.serve("publisher", Publisher(), alpn=alpn)
    client = simulation.connect("subscriber", server, wait=False, alpn=alpn)
    assert simulation.run(lambda: bool(server.ends) and server.end.transport.established)
    simulation.advance((rounds + 1) * ROUND_TRIP)  # it is confirmed to the client a trip later
    found = max(size for size in (1200, 1452, 8952, 16383) if size <= mtu)
    assert sizes(client, server) == [found, found]
    for host in (client, server):  # RFC 9002 section 7.2: ten packets, or fewer large ones
        assert Probe(host.end.transport).window >= at_once(INITIAL_WINDOW, found)


def test_a_sender_that_has_always_more_to_send_leaves_room_for_probes():
    pair = Pair(*[quic_config(max_datagram_size=8952)] * 2, latency=ROUND_TRIP / 2, connect=False)
    assert pair.run(lambda: pair.client.handler is not None and pair.client.connected)
    client, began = pair.client.live, pair.now
    stream = client.open_stream(bidirectional=False)
    pair.client.record.on_ready = Source(client, stream, bytes(8 << 20))
    client.wake()
    assert pair.run(lambda: client.packet_size == 8952, limit=1)
    # One round trip until the handshake is confirmed to the client, the first four, one more.
    assert pair.now - began < 6.5 * ROUND_TRIP


@pytest.mark.parametrize("idle", [0, 0.5, 1, 2, 3, 3.9])
def test_a_probe_never_costs_the_first_flight_of_data(idle):
    pair = Pair(latency=ROUND_TRIP / 2, connect=False)
    assert pair.run(lambda: pair.server.handler is not None and pair.server.probe.confirmed)
    server, trace = pair.server.live, pair.simulation.trace
    pair.run(limit=idle * ROUND_TRIP)
    trace.clear()
    stream = server.open_stream(bidirectional=False)
    pair.server.record.on_ready = Source(server, stream, bytes(1 << 20))
    server.wake()
    pair.run(limit=0.09 * ROUND_TRIP)
    flight = [octets for _, source, _, octets, _ in trace if source == "server"]
    assert max(flight) <= 1200 and sum(flight) > 0.99 * at_once(INITIAL_WINDOW, 1200)
    if not idle:  # of the second flight, twice as large, it takes a sixteenth
        pair.run(limit=1.95 * ROUND_TRIP)
        assert max(octets for _, source, _, octets, _ in trace if source == "server") <= 1452
        assert server.packet_size == 1452
    assert pair.run(lambda: server.packet_size == 16383, limit=10 * ROUND_TRIP)


def test_what_a_probe_timeout_sends_again_is_no_probe():
    pair = Pair(latency=ROUND_TRIP / 2, connect=False)
    pair.drop = lambda side, data: len(data) > 1200
    assert pair.run(lambda: pair.client.handler is not None and pair.client.probe.confirmed)
    client, left = pair.client.live, []

    def first_is_lost(side, data):
        if side is pair.client:
            left.append(len(data))
        return len(data) > 1200 or (side is pair.client and len(left) == 1)

    pair.drop = first_is_lost
    stream = client.open_stream(bidirectional=False)
    client.send(stream, b"asked", True)
    assert pair.run(lambda: len(left) > 1, limit=1)
    assert pair.client.probe.probe_timeouts == 1
    assert pair.run(lambda: stream in pair.server.record.finished, limit=ROUND_TRIP * 0.6)


@pytest.mark.parametrize("mtu", [1300, 2000])
def test_an_uncommon_path_is_found_in_both_directions_and_loses_nothing_but_probes(mtu):
    simulation, server, client = served(track(20, 4, size=5000), path=on(mtu))
    got = Collector()
    client.session.fetch(NAME, got)
    assert simulation.run(lambda: len(got.locations) == 80, limit=3)
    simulation.advance(20 * ROUND_TRIP)
    for size in sizes(client, server):
        assert mtu - max(16, mtu // 40) <= size <= mtu
    assert 0 < len(lost(simulation)) <= 40
    assert server.end.transport.counters.paths_narrowed == 0


def test_an_upper_bound_at_either_end_holds_for_both():
    for bounds in ({"server": 1400}, {"client": 1400}):
        simulation = Simulation()
        server = simulation.serve(
            "publisher", Publisher(), max_datagram_size=bounds.get("server", 16383)
        )
        client = simulation.connect(
            "subscriber", server, max_datagram_size=bounds.get("client", 16383)
        )
        simulation.advance(1)
        assert sizes(client, server) == [1400, 1400]
        assert max(octets for _, _, _, octets, _ in simulation.trace) == 1400


def test_an_upper_bound_of_1200_probes_nothing():
    simulation, *_ = world(max_datagram_size=1200)
    simulation.advance(1)
    assert max(octets for _, _, _, octets, _ in simulation.trace) == 1200


def test_the_interface_is_asked_and_nothing_larger_is_sent():
    simulation = Simulation()
    server = simulation.serve("publisher", Publisher())
    client = simulation.connect("subscriber", server, wait=False)
    asked = []

    def limit(address):
        asked.append(address)
        return 1472

    client.end.transport.ask_interface(limit)
    simulation.advance(1)
    assert sizes(client, server) == [1472, 16383]
    assert asked == [server.address]


def test_an_interface_with_less_than_quic_needs_is_not_searched():
    simulation = Simulation()
    server = simulation.serve("publisher", Publisher())
    client = simulation.connect("subscriber", server, wait=False)
    client.end.transport.ask_interface(lambda address: 900)
    simulation.advance(1)
    assert sizes(client) == [1200]


def test_one_server_has_clients_on_narrow_and_wide_paths_each_at_its_own_size():
    simulation = Simulation()
    publisher = Publisher()
    publisher.add_track(track(20, 4, size=5000))
    server = simulation.serve("publisher", publisher)
    paths = {"loopback": 65507, "lan": 1472, "vpn": 1300, "least": 1200}
    clients, got = {}, {}
    for name, mtu in paths.items():
        simulation.paths["publisher", name] = simulation.paths[name, "publisher"] = on(mtu)
        clients[name] = simulation.connect(name, server)
        got[name] = Collector()
        clients[name].session.fetch(NAME, got[name])
    assert simulation.run(lambda: all(len(each.locations) == 80 for each in got.values()), limit=5)
    simulation.advance(20 * ROUND_TRIP)
    found = {
        name: server.ends[client.address].transport.packet_size for name, client in clients.items()
    }
    assert (found["loopback"], found["least"]) == (16383, 1200)
    assert 1452 <= found["lan"] <= 1472
    assert 1284 <= found["vpn"] <= 1300


@pytest.mark.parametrize("alpn", [("moqt-22",), ("h3",)])
@pytest.mark.parametrize(
    ("bound", "mtu"), [(1452, 1300), (8952, 1452), (8952, 1200), (16383, 1400)]
)
def test_a_path_that_shrinks_in_a_transfer_is_noticed_and_searched_again(bound, mtu, alpn, caplog):
    """Small packets still pass, so that no time-out ends the connection."""
    store = track(100, 4, size=5000)
    simulation, server, client = served(store, path=on(65507), alpn=alpn, max_datagram_size=bound)
    simulation.advance(3 * ROUND_TRIP)
    got = Collector()
    client.session.fetch(NAME, got)
    assert simulation.run(lambda: len(got.locations) >= 40)
    assert sizes(server) == [bound]
    simulation.path = on(mtu)
    assert simulation.run(lambda: len(got.locations) == 400, limit=10)
    assert server.end.transport.counters.paths_narrowed == 1
    host, port = client.address
    assert [r.getMessage() for r in caplog.records] == [
        f"[{server.end.transport.connection_id}] {host}:{port}: the path no longer carries packets "
        f"of {bound} octets: the connection "
        "goes on with 1200 and looks for what it does carry"
    ]
    simulation.advance(20 * ROUND_TRIP)
    assert mtu - max(16, mtu // 40) <= sizes(server)[0] <= mtu


def test_a_path_that_grows_is_noticed_after_a_while_by_who_still_sends():
    simulation, server, client = world(path=on(1452))
    simulation.advance(5)
    assert sizes(client, server) == [1452, 1452]
    simulation.path = on(8952)
    simulation.advance(700)  # idle: the PINGs that keep it are enough
    assert sizes(client, server) == [8952, 8952]


@pytest.mark.parametrize("algorithm", ["reno", "cubic"])
def test_a_lost_probe_does_not_shrink_the_congestion_window(algorithm):
    store = track(100, 4, size=5000)
    simulation, server, client = served(
        store, path=on(1300), congestion_control_algorithm=algorithm
    )
    got = Collector()
    client.session.fetch(NAME, got)
    windows = []

    def window():
        windows.append(Probe(server.end.transport).window)
        return len(got.locations) == 400

    assert simulation.run(window, limit=5)
    assert len(lost(simulation)) >= 4
    assert windows == sorted(windows)


def test_probes_and_what_waits_beside_them_stay_within_the_congestion_window():
    store = track(100, 4, size=5000)
    simulation, server, client = served(store, path=on(65507))
    got = Collector()
    client.session.fetch(NAME, got)
    probe = Probe(server.end.transport)

    def within():
        assert probe.in_flight <= probe.window + probe.connection.recovery.reserved
        return len(got.locations) == 400

    assert simulation.run(within, limit=5)
    assert sizes(server) == [16383]


def test_an_address_that_is_not_validated_gets_no_probe_and_three_times_what_came_from_it():
    store = track(100, 4, size=5000)
    simulation, server, client = served(store, path=on(65507))
    simulation.advance(3 * ROUND_TRIP)
    got = Collector()
    client.session.fetch(NAME, got)
    assert simulation.run(lambda: len(got.locations) >= 40)
    assert sizes(server) == [16383]
    simulation.trace.clear()
    moved = ("192.0.2.99", 5555)
    client.seen_as = moved
    peer = server.end.transport
    assert simulation.run(lambda: peer.remote_address == moved, limit=1)
    at = simulation.now
    assert simulation.run(lambda: peer.packet_size > 1200, limit=2)
    assert simulation.run(lambda: len(got.locations) == 400, limit=10)
    # Until a round trip has shown that somebody is there, nothing larger leaves.
    early = [
        (octets, source)
        for time, source, _, octets, _ in simulation.trace
        if at < time < at + ROUND_TRIP
    ]
    assert max(octets for octets, source in early if source == "publisher") <= 1200
    sent = sum(octets for octets, source in early if source == "publisher")
    came = sum(octets for octets, source in early if source == "subscriber")
    assert sent <= 3 * came + 3 * 1200


def test_a_client_that_moves_to_a_narrow_path_proves_its_new_address_with_small_packets():
    store = track(100, 4, size=5000)
    simulation, server, client = served(store, path=on(65507))
    simulation.advance(3 * ROUND_TRIP)
    got = Collector()
    client.session.fetch(NAME, got)
    assert simulation.run(lambda: len(got.locations) >= 40)
    assert sizes(client, server) == [16383, 16383]
    client.seen_as = ("192.0.2.99", 5555)
    simulation.path = on(1300)
    peer = server.end.transport
    assert simulation.run(lambda: peer.remote_address == client.seen_as, limit=1)
    simulation.trace.clear()
    assert simulation.run(lambda: len(got.locations) == 400, limit=10)
    assert peer.remote_address == client.seen_as
    large = [(source, octets) for _, source, _, octets, fate in simulation.trace if fate != "sent"]
    assert {source for source, _ in large} == {"publisher"}  # the client has answered with 1,200
    assert len(large) <= 12  # the probes of the server, who began anew
    assert server.end.transport.counters.paths_narrowed == 0  # it began anew, with 1,200


def test_the_event_log_tells_each_size(tmp_path):
    simulation, *_ = world(path=on(8952), qlog_dir=tmp_path)
    simulation.advance(1)
    (log,) = tmp_path.glob("*_server.sqlog")
    events = [json.loads(line[1:]) for line in log.read_bytes().splitlines()]
    changes = [each["data"] for each in events if each.get("name") == "connectivity:mtu_updated"]
    assert [(each["old"], each["new"]) for each in changes] == [(1200, 1452), (1452, 8952)]
