"""A path that ceases to carry large packets (RFC 8899 "Black Hole Detection")."""

from __future__ import annotations

import pytest

from moqt.quic.mtu.black_hole import PACKETS, ROUNDS, BlackHole
from tests.moqt.quic_pair import Pair, Source, quic_config
from tests.moqt.simulator import Path

SIZE = 1452


def rounds(hole: BlackHole, count: int, *, packets: int = 3, size: int = SIZE, at: int = 1) -> bool:
    """As many round trips in which so many packets are lost; what the last one says."""
    return [hole.lost([(now, size)] * packets, now + 0.5, SIZE) for now in range(at, at + count)][
        -1
    ]


def test_large_packets_lost_in_two_round_trips_are_a_black_hole() -> None:
    assert not rounds(BlackHole(), ROUNDS - 1)
    assert rounds(BlackHole(), ROUNDS)


def test_few_packets_prove_nothing() -> None:
    hole = BlackHole()
    assert not rounds(hole, PACKETS - 1, packets=1)
    assert rounds(hole, 1, packets=1, at=PACKETS)


def test_what_one_round_trip_lost_counts_once_however_many_acknowledgements_tell_of_it() -> None:
    hole = BlackHole()
    assert not any(hole.lost([(1.0, SIZE)] * 5, now, SIZE) for now in (1.5, 1.6, 1.7, 1.8))


def test_packets_larger_than_those_of_now_are_of_another_time() -> None:
    assert not rounds(BlackHole(), 50, size=SIZE + 1)


def test_packets_that_every_path_must_carry_are_no_evidence() -> None:
    assert not rounds(BlackHole(), 50, size=1200)


def test_a_packet_as_large_that_arrives_disproves_it_and_a_smaller_one_does_not() -> None:
    for size, proven in ((SIZE, False), (SIZE - 1, True)):
        hole = BlackHole()
        rounds(hole, ROUNDS - 1)
        hole.acknowledged([40, size])
        assert hole.suspected is proven
        assert rounds(hole, 1, at=ROUNDS) is proven


def bulk(pair: Pair, octets: int = 1 << 20) -> int:
    stream_id = pair.client.live.open_stream(bidirectional=False)
    assert stream_id is not None
    pair.client.record.on_ready = Source(pair.client.live, stream_id, bytes(octets))
    return stream_id


def large_pair() -> Pair:
    config = quic_config(max_datagram_size=SIZE)
    pair = Pair(config, config)
    assert pair.run(lambda: pair.client.live.packet_size == SIZE)
    return pair


def test_all_that_was_lost_comes_in_packets_that_fit() -> None:
    pair = large_pair()
    stream = bulk(pair)
    pair.run(limit=0.05)
    pair.drop = lambda side, data: len(data) > 1300
    assert pair.run(lambda: stream in pair.server.record.finished, limit=10)
    assert len(pair.server.record.data[stream]) == 1 << 20
    client = pair.client.live
    assert client.counters.paths_narrowed == 1
    assert pair.server.live.counters.paths_narrowed == 0  # it sends nothing large


@pytest.mark.parametrize("algorithm", ["reno", "cubic"])
def test_the_window_grows_again_as_on_a_new_path(algorithm: str) -> None:
    config = quic_config(max_datagram_size=SIZE, congestion_control_algorithm=algorithm)
    pair = Pair(config, config)
    assert pair.run(lambda: pair.client.live.packet_size == SIZE)
    bulk(pair, 8 << 20)
    pair.drop = lambda side, data: len(data) > 1300
    assert pair.run(lambda: pair.client.live.counters.paths_narrowed == 1, limit=10)
    before = pair.server.record.received
    pair.run(limit=0.2)  # ten round trips
    assert pair.server.record.received - before > 500_000


def test_datagrams_that_no_longer_fit_are_dropped_and_smaller_ones_pass() -> None:
    pair = large_pair()
    client = pair.client.live
    bulk(pair)
    pair.drop = lambda side, data: len(data) > 1300
    while client.send_datagram(bytes(1400)):  # more than the window takes
        pass
    assert pair.run(lambda: client.counters.paths_narrowed == 1, limit=10)
    assert not client.send_datagram(bytes(1400))
    assert client.send_datagram(bytes(1150))
    assert pair.run(lambda: pair.server.record.datagrams == [bytes(1150)], limit=1)
    assert pair.client.probe.connection.datagram_backlog == 0


@pytest.mark.parametrize("seed", range(4))
def test_loss_by_chance_is_no_black_hole(seed: int) -> None:
    pair = large_pair()
    pair.simulation.random.seed(seed)
    pair.simulation.path = Path(loss=0.3)
    stream = bulk(pair, 100_000)
    assert pair.run(lambda: stream in pair.server.record.finished, limit=200)
    assert pair.client.live.counters.paths_narrowed == 0


def test_an_outage_is_no_black_hole() -> None:
    pair = large_pair()
    stream = bulk(pair)
    pair.run(limit=0.05)
    pair.drop = lambda side, data: True
    pair.run(limit=10)
    pair.drop = None
    assert pair.run(lambda: stream in pair.server.record.finished)
    assert pair.client.live.counters.paths_narrowed == 0


def test_an_outage_in_the_middle_of_the_search_leaves_it_its_result() -> None:
    config = quic_config(max_datagram_size=8952)
    pair = Pair(config, config)
    pair.drop = lambda side, data: True
    stream = bulk(pair)
    pair.run(limit=5)
    pair.drop = None
    assert pair.run(lambda: stream in pair.server.record.finished)
    # who has nothing to send has no window for a large probe after an outage, nor a use for it
    back = pair.server.live.open_stream(bidirectional=False)
    assert back is not None
    pair.server.live.send(back, bytes(1_000_000), True)
    assert pair.run(lambda: back in pair.client.record.finished)
    pair.run(limit=5)
    assert (pair.client.live.packet_size, pair.server.live.packet_size) == (8952, 8952)
