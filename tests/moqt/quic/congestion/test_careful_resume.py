"""Careful resume: what a path held is known to one connection to its address, for a while."""

from __future__ import annotations

import pytest

from moqt.quic.congestion.careful_resume import LEAST, LEAST_TRIP, MOST_PATHS, PathMemory, Saved
from tests.moqt.probe import Probe
from tests.moqt.quic_pair import Pair, quic_config
from tests.moqt.simulator import Path

HELD = Saved(1_000_000, 0.1, 100.0)


def test_half_of_what_was_held_may_be_under_way_at_once() -> None:
    assert HELD.jump(0.1) == 500_000


@pytest.mark.parametrize("trip", [0.049, 1.01])
def test_a_round_trip_of_another_length_is_another_path(trip: float) -> None:
    assert HELD.jump(trip) == 0


def test_a_path_is_remembered_for_its_address_alone() -> None:
    paths = PathMemory()
    paths.keep("192.0.2.1", HELD)
    assert paths.claim("192.0.2.2", 101.0, 600.0) is None
    assert paths.claim("192.0.2.1", 101.0, 600.0) == HELD


def test_of_several_connections_at_a_time_one_resumes() -> None:
    paths = PathMemory()
    paths.keep("192.0.2.1", HELD)
    assert paths.claim("192.0.2.1", 101.0, 600.0) == HELD
    assert paths.claim("192.0.2.1", 101.0, 600.0) is None


def test_what_is_old_is_not_told() -> None:
    paths = PathMemory()
    paths.keep("192.0.2.1", HELD)
    assert paths.claim("192.0.2.1", 701.0, 600.0) is None


def test_so_many_addresses_are_remembered_and_no_path_that_is_filled_at_once() -> None:
    paths = PathMemory()
    paths.keep("192.0.2.1", Saved(LEAST - 1, 0.1, 100.0))
    paths.keep("192.0.2.1", Saved(1_000_000, LEAST_TRIP / 2, 100.0))
    assert len(paths) == 0
    for number in range(MOST_PATHS + 10):
        paths.keep(str(number), HELD)
    assert len(paths) == MOST_PATHS
    assert paths.claim("0", 101.0, 600.0) is None
    assert paths.claim(str(MOST_PATHS), 101.0, 600.0) is not None


def after_a_transfer(**quic: object) -> PathMemory:
    """What a server remembers that has sent 2 MB to a client, which then left."""
    pair = Pair(server=quic_config(**quic), latency=0.05)
    pair.simulation.path = Path(latency=0.05, bandwidth=2e6, queue=200_000)
    server = pair.server.live
    stream = server.open_stream(bidirectional=False)
    assert stream is not None
    server.send(stream, bytes(2_000_000), True)
    pair.run(lambda: stream in pair.client.record.finished, limit=60.0)
    pair.client.live.close(0, "")
    pair.run(limit=1.0)
    context = pair.server.host.context
    assert context is not None
    return context.paths


def test_a_server_remembers_what_the_path_to_its_client_held() -> None:
    paths = after_a_transfer()
    saved = paths.claim("192.0.2.2", 130.0, 600.0)
    assert saved is not None and len(paths) == 0
    assert saved.octets == pytest.approx(200_000, rel=0.1)
    assert saved.trip == pytest.approx(0.1, rel=0.1)


def test_a_process_that_is_not_to_remember_paths_does_not() -> None:
    assert len(after_a_transfer(remember_paths=0.0)) == 0


@pytest.mark.parametrize("algorithm", ["bbr", "cubic", "reno"])
def test_a_first_flight_that_the_path_does_not_hold_is_taken_back(algorithm: str) -> None:
    """A queue of 50 kB before 2 MB/s is sent 2 MB at once: half of what arrived is what is left."""
    pair = Pair(server=quic_config(first_flight=2_000_000, congestion_control_algorithm=algorithm))
    pair.simulation.path = Path(latency=0.05, bandwidth=2e6, queue=50_000)
    pair.run(limit=1.0)
    server = pair.server.live
    probe = Probe(server)
    assert 2_000_000 <= probe.window < 2_010_000
    stream = server.open_stream(bidirectional=False)
    assert stream is not None
    server.send(stream, bytes(3_000_000), True)
    pair.run(limit=0.8)
    assert probe.window < 400_000
    pair.run(lambda: stream in pair.client.record.finished, limit=20.0)


def test_a_short_path_is_filled_at_once_anyway() -> None:
    pair = Pair(server=quic_config(first_flight=2_000_000), latency=LEAST_TRIP / 4)
    pair.run(limit=1.0)
    assert Probe(pair.server.live).window < 100_000
