"""Transfers over virtual links do what the links say: the ground on which stories stand."""

from __future__ import annotations

import pytest

from tests.moqt.quic.links import Flow, Path, compete, random_path, transfer

NARROW = Path(latency=0.02, bandwidth=1_000_000, queue=60_000)


def test_a_transfer_fills_a_link_with_a_queue_of_a_round_trip_and_no_more_than_that():
    flow = transfer(3_000_000, NARROW)
    assert flow.seconds is not None and flow.received == 3_000_000
    assert 0.7e6 < flow.goodput <= 1e6
    assert 0 < flow.queue_max <= NARROW.queue
    assert min(flow.rtts[5:]) >= 0.04 and max(flow.rtts) < 0.04 + 0.06 + 0.01


def test_one_seed_has_one_story_and_another_another():
    lossy = Path(latency=0.02, bandwidth=1_000_000, loss=0.02)

    def story(seed):
        flow = transfer(300_000, lossy, seed=seed)
        return flow.seconds, flow.declared_lost

    assert story(1) == story(1)
    assert len({story(seed) for seed in range(4)}) > 1


def test_what_was_lost_is_declared_lost_and_what_was_late_arrives_twice():
    lost = transfer(500_000, Path(latency=0.02, loss=0.02))
    assert lost.declared_lost >= 1 and lost.spurious == 0
    late = transfer(500_000, Path(latency=0.02, reorder=0.05, reorder_by=0.02), until=20)
    assert late.spurious > 0 and late.up.lost == 0


def test_two_flows_share_one_bottleneck():
    first, second = compete(
        Flow(congestion="reno"), Flow(congestion="cubic", start=1.0), up=NARROW, until=6
    )
    assert second.began == pytest.approx(first.began + 1.0, abs=0.1)
    assert first.up is second.up and first.received and second.received
    assert first.received + second.received <= 6 * NARROW.bandwidth
    alone = first.goodput_between(0.3, 1.0)
    assert first.goodput_between(1.5, 6.0) < alone


def test_a_path_changes_while_it_is_used():
    slower = Path(latency=0.02, bandwidth=300_000, queue=60_000)
    flow = transfer(None, NARROW, until=6, changes={3.0: slower})
    assert flow.seconds is None
    assert flow.goodput_between(1.5, 3.0) > 0.7e6
    assert flow.goodput_between(4.0, 6.0) < 0.32e6


def test_an_application_says_no_more_than_its_rate_and_nothing_in_its_pauses():
    flow = transfer(None, NARROW, until=6, rate=200_000, pauses=((2, 4),))
    assert flow.goodput_between(0.5, 2.0) == pytest.approx(200_000, rel=0.1)
    assert flow.goodput_between(2.5, 3.9) == 0
    assert flow.received == pytest.approx(800_000, rel=0.05)


@pytest.mark.parametrize("seed", range(40))
def test_a_short_transfer_comes_to_its_end_on_any_path(seed):
    path = random_path(seed)
    flow = transfer(60_000, path, path, seed=seed)
    assert flow.received == 60_000 and flow.seconds is not None, path


def test_a_slow_event_loop_sees_the_network_only_when_it_wakes():
    flow = transfer(30_000, Path(latency=0.02), tick=0.05)
    assert flow.seconds is not None
    assert flow.seconds / 0.05 == pytest.approx(round(flow.seconds / 0.05))
    assert flow.seconds >= 4 * 0.05  # each way of the handshake, and of the data, is a tick
