"""What BBR makes of a path, told in virtual time: rates, queues and shares have bounds.

Rates are goodput: 4 % of a packet of 1,200 octets is not data.
"""

from __future__ import annotations

import random

import pytest

from moqt.quic.congestion.careful_resume import PathMemory
from tests.moqt.quic.links import Flow, Path, compete, transfer

RATE = 1.25e6
"""Octets a second of the bottleneck."""
BDP = 125_000
"""At a round trip of 100 ms."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    """BBR draws when to probe: the same each time."""
    random.seed(1)


def path(**changes: object) -> Path:
    settings: dict[str, object] = {"latency": 0.05, "bandwidth": RATE, "queue": 4 * BDP}
    return Path(**settings | changes)  # type: ignore[arg-type]


def share(flow: Flow, begin: float, end: float) -> float:
    """Of the bottleneck's rate that arrived as data."""
    return flow.goodput_between(begin, end) / RATE


def test_a_path_of_100_ms_is_full_after_twelve_round_trips() -> None:
    flow = transfer(None, path(), congestion="bbr", until=4)
    assert share(flow, 1.2, 4) >= 0.9
    assert flow.declared_lost == 0


def test_the_queue_stays_below_one_and_a_half_times_what_the_path_holds() -> None:
    flow = transfer(None, path(queue=20 * BDP), congestion="bbr", until=8)
    assert flow.queue_max <= 1.5 * BDP
    assert share(flow, 2, 8) >= 0.9


@pytest.mark.parametrize(("loss", "least"), [(0.001, 0.9), (0.01, 0.88), (0.02, 0.85), (0.03, 0.8)])
def test_losses_at_random_cost_little_more_than_what_they_take(loss: float, least: float) -> None:
    flow = transfer(None, path(loss=loss), congestion="bbr", until=8)
    assert share(flow, 2, 8) >= least


def test_20_mb_a_second_over_100_ms_with_1_percent_loss_are_filled_without_a_long_queue() -> None:
    bottleneck = path(bandwidth=20e6, queue=8_000_000, loss=0.01)
    flow = transfer(None, bottleneck, congestion="bbr", until=4)
    assert flow.goodput_between(1.5, 4) >= 0.85 * 20e6
    assert flow.queue_max <= 1.5 * 2_000_000


def test_a_buffer_of_a_fifth_of_the_path_is_enough() -> None:
    flow = transfer(None, path(queue=BDP // 5), congestion="bbr", until=8)
    assert share(flow, 2, 8) >= 0.85


def test_packets_that_overtake_each_other_are_no_losses() -> None:
    flow = transfer(None, path(reorder=1, reorder_by=0.01), congestion="bbr", until=6)
    assert share(flow, 2, 6) >= 0.9
    assert flow.spurious <= 20


def test_a_policer_is_kept_to_and_loses_little() -> None:
    policed = path(bandwidth=4 * RATE, police=RATE, police_burst=100_000)
    flow = transfer(None, policed, congestion="bbr", until=9)
    assert share(flow, 3, 9) >= 0.85
    sent = flow.received / 1150
    assert flow.up.lost <= 0.15 * sent


def test_a_round_trip_that_grows_tenfold_is_learned_in_fifteen_seconds_and_back_at_once() -> None:
    short, long = path(latency=0.01), path(latency=0.1)
    flow = transfer(None, short, congestion="bbr", until=27, changes={2.0: long, 22.0: short})
    assert share(flow, 18, 22) >= 0.8
    assert share(flow, 23.5, 27) >= 0.85


def test_after_two_seconds_without_a_path_the_rate_is_back_within_a_second() -> None:
    flow = transfer(None, path(blackouts=((3, 5),)), congestion="bbr", until=9)
    assert share(flow, 6.5, 9) >= 0.85


@pytest.mark.parametrize(("begin", "seconds"), [(0.3, 1), (0.45, 1), (0.45, 2)])
def test_an_outage_in_startup_does_not_end_it(begin: float, seconds: float) -> None:
    dark = path(bandwidth=4 * RATE, queue=8 * BDP, blackouts=((begin, begin + seconds),))
    flow = transfer(None, dark, congestion="bbr", until=begin + seconds + 2.5)
    assert share(flow, begin + seconds + 2, begin + seconds + 2.5) >= 0.85 * 4


def test_after_a_pause_the_rate_is_back_in_a_round_trip_without_a_burst() -> None:
    flow = transfer(None, path(), congestion="bbr", until=9, pauses=((3, 6),))
    assert share(flow, 6.3, 8.5) >= 0.85
    queues = [each.queue for each in flow.history if 6 <= each.time <= 6.3]
    assert max(queues) <= BDP / 2


def test_an_application_that_has_little_to_say_teaches_nothing_wrong() -> None:
    flow = transfer(None, path(), congestion="bbr", until=12, rate=RATE / 8, pauses=())
    assert flow.queue_max <= BDP / 4
    assert flow.declared_lost == 0
    # Ten times the rate of the application, and the window has stayed in proportion.
    assert max(each.window for each in flow.history) <= 4 * BDP
    assert share(flow, 2, 12) >= 0.12


def test_two_flows_share_a_path_fairly() -> None:
    first, second = compete(
        Flow(congestion="bbr"),
        Flow(congestion="bbr", start=1.0),
        up=path(latency=0.02, queue=BDP),
        until=20,
    )
    rates = [each.goodput_between(6, 19) for each in (first, second)]
    assert sum(rates) ** 2 / (2 * sum(rate * rate for rate in rates)) >= 0.8
    assert sum(rates) >= 0.85 * RATE


@pytest.mark.parametrize("queue", [1, 4], ids="{}-bdp".format)
def test_beside_cubic_each_gets_between_a_quarter_and_three_quarters(queue: int) -> None:
    ours, cubic = compete(
        Flow(congestion="bbr"),
        Flow(congestion="cubic", start=1.0),
        up=path(latency=0.02, queue=queue * 50_000),
        until=20,
    )
    mine, other = ours.goodput_between(5, 18), cubic.goodput_between(5, 18)
    assert 0.25 <= mine / (mine + other) <= 0.75
    assert mine + other >= 0.85 * RATE


@pytest.mark.parametrize("algorithm", ["cubic", "reno"])
def test_the_others_fill_a_path_without_losses_too(algorithm: str) -> None:
    flow = transfer(None, path(queue=2 * BDP), congestion=algorithm, until=8)
    assert share(flow, 2, 8) >= 0.85


@pytest.mark.parametrize("algorithm", ["cubic", "reno"])
def test_a_window_that_may_leave_at_once_and_is_filled_grows(algorithm: str) -> None:
    lossy = path(latency=0.15, blackouts=((0.5, 0.62),))
    flow = transfer(None, lossy, congestion=algorithm, until=9)
    assert max(each.window for each in flow.history[:40]) < 20_000
    assert flow.history[-1].window >= 35_000


@pytest.mark.parametrize("algorithm", ["bbr", "cubic", "reno"])
def test_a_round_trip_of_reordering_does_not_stop_any(algorithm: str) -> None:
    flow = transfer(None, path(reorder=0.3, reorder_by=0.02), congestion=algorithm, until=6)
    assert share(flow, 2, 6) >= 0.6


# ---- careful resume: a transfer after another one to the same address

LAYER = 4_000_000
"""Octets of a cache's first layer."""


def after_another(
    algorithm: str, rate: float, later: Path, *, known_to: PathMemory | None = None
) -> Flow:
    """The second of two transfers over a path of `rate` that is `later` by then.

    `known_to`: what the second one's process remembers, if that is another.
    """
    known = PathMemory()
    octets = int(3 * rate)
    _, second = compete(
        Flow(congestion=algorithm, octets=octets, known=known),
        Flow(
            congestion=algorithm,
            octets=LAYER,
            known=known if known_to is None else known_to,
            start=6,
        ),
        up=path(bandwidth=rate, queue=int(rate / 10)),
        changes={5.9: later},
        until=24,
    )
    assert second.seconds is not None
    return second


@pytest.mark.parametrize("algorithm", ["bbr", "cubic", "reno"])
def test_the_first_layer_of_a_second_transfer_comes_at_near_full_speed(algorithm: str) -> None:
    rate = 50e6
    later = path(bandwidth=rate, queue=int(rate / 10))
    again = after_another(algorithm, rate, later)
    # The handshake is confirmed after two round trips; then half of the path's 50 MB/s.
    assert again.seconds is not None and again.seconds <= 0.5
    assert again.declared_lost == 0
    anew = after_another(algorithm, rate, later, known_to=PathMemory())
    assert anew.seconds is not None and anew.seconds >= 0.9


@pytest.mark.parametrize("algorithm", ["bbr", "cubic", "reno"])
def test_a_path_that_has_become_ten_times_narrower_is_retreated_from(algorithm: str) -> None:
    later = path(bandwidth=RATE, queue=BDP)
    again = after_another(algorithm, 10 * RATE, later)
    # Half of what the path held was sent at once, five times what it holds now, and as much as
    # it holds until that was noticed: no more is lost, the first search for its end included.
    assert sum(again.lost_notes) <= 7 * BDP
    assert again.goodput >= 0.7 * RATE
