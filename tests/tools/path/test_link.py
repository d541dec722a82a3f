"""What becomes of datagrams on a link, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.path.link import FLOWS, Fate, Link, Path

OFFERS = st.lists(st.tuples(st.floats(0, 0.05), st.integers(1, 9000)), min_size=1, max_size=80).map(
    lambda steps: [(sum(gap for gap, _ in steps[: n + 1]), s[1]) for n, s in enumerate(steps)]
)
"""Moments that never go back, and octets."""
CHANCE = st.sampled_from([0.0, 0.1, 0.5, 1.0])
PATHS = st.builds(
    Path,
    latency=st.floats(0, 0.3),
    jitter=st.floats(0, 0.1),
    bandwidth=st.none() | st.floats(1e4, 1e7),
    queue=st.integers(0, 100_000),
    police=st.none() | st.floats(1e4, 1e7),
    police_burst=st.integers(0, 50_000),
    loss=CHANCE,
    burst=CHANCE,
    burst_length=st.floats(1, 20),
    reorder=CHANCE,
    reorder_by=st.none() | st.floats(0, 0.2),
    duplicate=CHANCE,
    mtu=st.integers(1, 10_000),
    blackouts=st.lists(st.tuples(st.floats(0, 1), st.floats(1, 2)), max_size=2).map(tuple),
)


def offered(link: Link, offers: Sequence[tuple[float, int]]) -> list[tuple[float, ...]]:
    return [link.offer(octets, now) for now, octets in offers]


def steady(count: int, octets: int, rate: float) -> list[tuple[float, int]]:
    """Datagrams of one size at `rate` octets a second."""
    return [(n * octets / rate, octets) for n in range(count)]


@given(PATHS, OFFERS, st.integers())
def test_every_datagram_arrives_or_is_counted_and_none_before_the_latency(path, offers, seed):
    link = Link(path, now=0.0, seed=seed)
    arrivals = offered(link, offers)
    assert link.offered == len(offers)
    assert sum(1 for each in arrivals if not each) == link.lost
    assert sum(len(each) for each in arrivals) == link.offered - link.lost + link.duplicated
    assert link.octets == sum(s for (_, s), each in zip(offers, arrivals, strict=True) if each)
    for (now, octets), each in zip(offers, arrivals, strict=True):
        assert all(at >= now + path.latency for at in each)
        assert not each or octets <= path.mtu


@given(PATHS, OFFERS, st.integers())
def test_one_seed_has_one_fate(path, offers, seed):
    first = offered(Link(path, now=0.0, seed=seed), offers)
    assert offered(Link(path, now=0.0, seed=seed), offers) == first


@given(PATHS, PATHS, OFFERS, OFFERS)
def test_without_reordering_nobody_is_overtaken_whatever_changes(path, other, offers, later):
    paths = [replace(each, reorder=0.0, duplicate=0.0) for each in (path, other)]
    link = Link(paths[0], now=0.0)
    arrivals = offered(link, offers)
    link.change(paths[1], offers[-1][0])
    arrivals += offered(link, [(offers[-1][0] + at, octets) for at, octets in later])
    order = [at for each in arrivals for at in each]
    assert order == sorted(order)


@given(PATHS, OFFERS, st.floats(1e4, 1e6))
def test_no_span_of_time_carries_more_than_the_bandwidth_and_a_datagram(path, offers, rate):
    path = replace(path, bandwidth=rate, jitter=0.0, reorder=0.0, duplicate=0.0)
    link = Link(path, now=0.0)
    came = [(at, octets) for now, octets in offers for at in link.offer(octets, now)]
    for begin, (start, first) in enumerate(came):
        octets = 0
        for at, size in came[begin + 1 :]:
            octets += size
            assert octets <= (at - start) * rate * 1.000001 + first


@given(PATHS, OFFERS)
def test_the_queue_never_holds_more_than_it_may(path, offers):
    link = Link(path, now=0.0)
    for now, octets in offers:
        link.offer(octets, now)
        assert link.waiting(now) <= path.queue + 1e-3
    assert link.queue_max <= path.queue


def test_what_does_not_fit_the_queue_is_dropped_and_the_queue_delays_the_rest():
    link = Link(Path(latency=0.1, bandwidth=1000, queue=500), now=0.0)
    arrivals = [link.offer(100, 0.0) for _ in range(6)]
    assert [each[0] for each in arrivals[:5]] == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6])
    assert arrivals[5] == () and link.fate is Fate.QUEUE_FULL
    assert link.waiting(0.25) == pytest.approx(250)
    assert link.queue_max == 500


def test_a_link_that_was_idle_has_saved_nothing():
    link = Link(Path(latency=0.0, bandwidth=1000), now=0.0)
    link.offer(100, 0.0)
    assert [link.offer(100, 50.0)[0] for _ in range(2)] == pytest.approx([50.1, 50.2])


def test_a_bandwidth_that_changes_holds_for_what_waits():
    link = Link(Path(latency=0.0, bandwidth=1000), now=0.0)
    link.offer(1000, 0.0)
    link.change(Path(latency=0.0, bandwidth=100), 0.5)
    assert link.waiting(0.5) == pytest.approx(500)
    assert link.offer(100, 0.5) == pytest.approx((6.5,))


def test_losses_come_as_often_as_they_should():
    link = Link(Path(loss=0.02), now=0.0)
    offered(link, steady(20_000, 1200, 1e6))
    assert 0.015 < link.dropped[Fate.LOST] / link.offered < 0.025


def test_losses_in_bursts_come_in_a_row_and_last_as_long_as_they_should():
    link = Link(Path(burst=0.001, burst_length=20), now=0.0)
    fates = [bool(each) for each in offered(link, steady(200_000, 1200, 1e6))]
    text = "".join(".x"[not each] for each in fates)
    bursts = [len(each) for each in text.split(".") if each]
    assert 120 < len(bursts) < 280
    assert 14 < sum(bursts) / len(bursts) < 26


def test_a_burst_of_losses_is_over_in_its_time_also_when_nobody_sends_in_it():
    path = Path(bandwidth=1e6, burst=0.01, burst_length=20)
    after = []
    for seed in range(200):
        link = Link(path, now=0.0, seed=seed)
        now = 0.0
        while link.offer(1000, now):
            now += 0.001
        after.append(bool(link.offer(1000, now + 0.2)))  # ten times as long as a burst
    assert sum(after) >= 190


def test_a_policer_lets_a_burst_pass_then_its_rate_and_delays_nothing():
    link = Link(Path(latency=0.1, police=10_000, police_burst=5000), now=0.0)
    arrivals = offered(link, steady(1000, 100, 100_000))  # for one second
    assert all(arrivals[:50]) and not all(arrivals[:80])
    assert link.octets == pytest.approx(5000 + 10_000, abs=200)
    assert link.dropped == {Fate.POLICED: 1000 - link.octets // 100}
    assert all(each[0] == pytest.approx(n / 1000 + 0.1) for n, each in enumerate(arrivals) if each)


def test_a_policer_that_was_idle_lets_no_more_pass_than_its_burst():
    link = Link(Path(police=10_000, police_burst=5000), now=0.0)
    assert sum(bool(link.offer(100, 100.0)) for _ in range(100)) == 50


def test_a_policer_that_tells_flows_apart_lets_each_pass_at_its_rate():
    link = Link(Path(police=10_000, police_burst=5000, police_each=True), now=0.0)
    passed = Counter()
    for n in range(1000):
        passed["alone"] += bool(link.offer(100, n / 1000, "alone"))
        passed["beside"] += n >= 500 and bool(link.offer(100, n / 1000, "beside"))
    assert passed["alone"] == pytest.approx(150, abs=2)
    assert passed["beside"] == pytest.approx(100, abs=2)


def test_a_policer_remembers_no_more_flows_than_it_may():
    link = Link(Path(police=10_000, police_burst=100, police_each=True), now=0.0)
    assert all(link.offer(100, 0.0, flow) for flow in range(FLOWS + 1))
    assert not link.offer(100, 0.0, FLOWS)
    assert link.offer(100, 0.0, 0), "that was forgotten"


def test_nothing_passes_in_a_blackout():
    link = Link(Path(latency=0.0, blackouts=((1, 2), (3, 4))), now=50.0)
    passed = [n / 2 for n in range(10) if link.offer(100, 50 + n / 2)]
    assert passed == [0.0, 0.5, 2.0, 2.5, 4.0, 4.5]
    assert link.dropped == {Fate.BLACKOUT: 4}


def test_what_is_longer_than_the_mtu_does_not_pass():
    link = Link(Path(mtu=1300), now=0.0)
    assert link.offer(1300, 0.0) and not link.offer(1301, 0.0)
    assert link.fate is Fate.TOO_LONG


def test_a_reordered_datagram_is_overtaken_by_as_long_as_it_is_late():
    link = Link(Path(latency=0.05, reorder=0.2, reorder_by=0.01), now=0.0)
    arrivals = [each[0] for each in offered(link, steady(1000, 1000, 1e6))]
    late = [at - n / 1000 - 0.05 for n, at in enumerate(arrivals)]
    assert 120 < sum(1 for each in late if each > 1e-9) <= link.reordered < 280
    assert max(late) < 0.01
    assert sorted(arrivals) != arrivals


def test_jitter_makes_other_delays_and_keeps_the_order():
    link = Link(Path(latency=0.05, jitter=0.03), now=0.0)
    arrivals = [each[0] for each in offered(link, steady(2000, 1000, 1e6))]
    late = [at - n / 1000 - 0.05 for n, at in enumerate(arrivals)]
    assert arrivals == sorted(arrivals)
    assert min(late) < 0.005 and 0.025 < max(late) <= 0.03
    assert late[:20] == pytest.approx([late[0]] * 20)  # for 20 ms


def test_flows_that_share_a_link_share_its_bandwidth():
    link = Link(Path(latency=0.0, bandwidth=1000), now=0.0)
    assert [link.offer(100, 0.0)[0] for _ in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"loss": 1.5}, "loss must be between 0 and 1"),
        ({"latency": -1}, "latency must not be negative"),
        ({"bandwidth": 0}, "bandwidth must be more than 0"),
        ({"burst_length": 0.5}, "burst_length must be at least 1"),
        ({"mtu": 0}, "mtu must be at least 1"),
        ({"blackouts": ((2, 1),)}, "a blackout must begin before it ends"),
    ],
)
def test_a_path_that_cannot_be_is_refused_with_a_reason(wrong, says):
    with pytest.raises(ValueError, match=says):
        Path(**wrong)
