"""Which packets have come, and which come again (RFC 9000 section 12.3)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moqt.quic.packets.received import REMEMBERED, ReceivedPackets
from tests.moqt.quic.links import Path, transfer


@given(runs=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=40))
def test_a_packet_is_there_once_it_has_come_and_not_before(runs: list[tuple[int, int]]) -> None:
    packets, come = ReceivedPackets(), set[int]()
    for start, count in runs:
        packets.add_run(start, start + count)
        come.update(range(start, start + count))
        assert {number for number in range(80) if number in packets} == come


def test_what_is_older_than_the_newest_by_more_than_is_remembered_counts_as_there() -> None:
    packets = ReceivedPackets()
    for number in range(1, 5 * REMEMBERED, 2):
        packets.add(number)
    newest = 5 * REMEMBERED - 1
    assert newest in packets and newest + 1 not in packets
    assert newest - 1 not in packets and newest - REMEMBERED + 1 not in packets
    assert 0 in packets
    packets.add(1 << 60)
    assert (1 << 60) - 1 not in packets and newest - 1 in packets


def test_packets_that_hundreds_of_others_overtake_arrive() -> None:
    path = Path(latency=0.02, bandwidth=20e6, queue=4_000_000, reorder=0.05, reorder_by=0.03)
    flow = transfer(None, path, congestion="bbr", until=2)
    lost = flow.sender.connection.recovery
    assert flow.received > 10_000_000
    assert lost.spurious_losses >= 0.9 * lost.lost_packets - 20
