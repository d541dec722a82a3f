"""KVSP "Placement Inputs": estimates at their edges."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.records import spreading
from kvsp.records.costs import (
    assign_sources,
    cost_us,
    fetch_us,
    load_us,
    recompute_us,
    round_up,
    runs,
    wait_us,
)
from kvsp.records.records import Link, ReplicaRecord
from tests.kvsp.records.samples import H1, H2, TARGET, replica


def test_exact_microseconds_are_not_rounded_up_by_the_noise_of_doubles() -> None:
    assert 10 * (3 * 0.1) > 3
    assert round_up(10 * (3 * 0.1)) == 3
    assert round_up(5.000_01) == 6
    assert round_up(0) == 0
    # 30 loads of 0.1 us each and a round trip of 2 us
    blocks = [[replica(H1, 1)]] * 30
    assert fetch_us(TARGET, blocks, [Link(H1, 80, 2)], 1) == 5


def test_what_no_number_can_tell_is_none() -> None:
    assert round_up(math.inf) is None and round_up(math.nan) is None
    assert recompute_us(1, 0) is None and recompute_us(0, 0) == 0
    assert recompute_us(10**9, 5e-324) is None
    assert fetch_us(TARGET, [[replica(H1, 8)]], [Link(H1, 0, 0)], 1) is None
    assert fetch_us(TARGET, [[replica(H1, 8)]], [Link(H1, 5e-324, 0)], 1) is None
    assert fetch_us(TARGET, [[]], [Link(H1, 1, 0)], 1) is None


def test_a_tier_that_cannot_be_read_makes_a_source_unusable() -> None:
    slow = replica(H1, 8, [{"tier": "remote", "layers": [0, 0], "read_mbit_per_s": 0}])
    assert math.isinf(load_us(slow, 1000, 1))
    assert fetch_us(TARGET, [[slow]], [Link(H1, 1000, 0)], 1) is None


def test_a_block_that_the_target_holds_whole_is_resident() -> None:
    links = [Link(H1, 8, 0)]
    whole = replica(TARGET, 100)
    half = replica(TARGET, 100, [{"tier": "device", "layers": [0, 0]}])
    assert fetch_us(TARGET, [[whole, replica(H1, 100)]], links, 2) == 0
    assert fetch_us(TARGET, [[half, replica(H1, 100)]], links, 2) == 100


def test_a_source_holds_every_layer_of_the_block() -> None:
    half = replica(H1, 100, [{"tier": "device", "layers": [0, 0]}])
    links = {holder: Link(holder, 8, 0) for holder in (H1, H2)}
    assert assign_sources([[half]], links, 2) is None
    assignment = assign_sources([[half, replica(H2, 100)]], links, 2)
    assert assignment is not None and assignment[0].holder == H2


def test_a_block_goes_where_it_is_there_soonest() -> None:
    links = {H1: Link(H1, 8, 100), H2: Link(H2, 8, 0)}
    block = [replica(H1, 40), replica(H2, 40)]
    assignment = assign_sources([block] * 5, links, 1)
    assert assignment is not None
    # H2 is at 40, 80, 120 when H1 would be at 140: then 160 against 140
    assert [record.holder for record in assignment] == [H2, H2, H2, H1, H2]


def test_the_cost_is_waiting_and_the_cheaper_way() -> None:
    costs: dict[str, Any] = {"wait": 10, "fetch": 5, "recompute_unmatched": 3, "recompute_all": 20}
    assert cost_us(**costs) == 18
    assert cost_us(**costs | {"recompute_all": 4}) == 14
    assert cost_us(**costs | {"fetch": None}) == 30
    assert cost_us(**costs | {"recompute_all": None}) == 18
    assert cost_us(**costs | {"fetch": None, "recompute_all": None}) is None
    assert cost_us(**costs | {"wait": None}) is None
    assert wait_us(3, 2_000_000) == 6_000_000 and wait_us(0, 1e308) == 0


NUMBERS = st.floats(0, allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3), st.integers(0, 5), NUMBERS)
def test_no_reported_number_crashes_an_estimate(
    rates: list[tuple[float, float]], blocks: int, read: float
) -> None:
    residency = [{"tier": "disk", "layers": [0, 0], "read_mbit_per_s": read}]
    holders = [f"https://h{index}.example/" for index in range(len(rates))]
    links = [Link(holder, *rate) for holder, rate in zip(holders, rates, strict=True)]
    records: list[ReplicaRecord] = [replica(holder, 2**53 - 1, residency) for holder in holders]
    estimate = fetch_us(TARGET, [records] * blocks, links, 1)
    assert estimate is None or 0 <= estimate < 2**53


def one_by_one(
    blocks: list[list[ReplicaRecord]], links: dict[str, Link], layers: int
) -> list[ReplicaRecord] | None:
    """The rule of the draft as it stands: each block to the source that has it first."""
    times: dict[str, float] = {}
    chosen = []
    for replicas in blocks:
        ways = [
            (times.get(r.holder, links[r.holder].rtt_us) + load, r.holder, place)
            for place, r in enumerate(replicas)
            if r.holder in links and r.holds(range(layers), layers)
            if math.isfinite(load := load_us(r, links[r.holder].mbit_per_s, layers))
        ]
        if not ways:
            return None
        own, holder, place = min(ways)
        times[holder] = own
        chosen.append(replicas[place])
    return chosen


HOLDERS = [f"https://h{number}.example/kvsp/" for number in range(4)]
HALF = [{"tier": "device", "layers": [0, 0]}]
TIERS = [
    {"tier": "host", "layers": [0, 0], "read_mbit_per_s": 5},
    {"tier": "disk", "layers": [1, 1], "read_mbit_per_s": 0.7},
]
SLOW = [{"tier": "disk", "layers": [0, 1], "read_mbit_per_s": 0}]


@given(
    st.lists(
        st.tuples(
            st.lists(
                st.tuples(
                    st.sampled_from(HOLDERS),
                    st.sampled_from([64, 4096]),
                    st.sampled_from([None, HALF, SLOW]),
                ),
                max_size=5,
                unique_by=lambda each: each[0],
            ),
            st.integers(1, 4),
        ),
        max_size=4,
    ),
    st.lists(st.tuples(st.sampled_from([0, 8, 64]), st.integers(0, 90)), min_size=3, max_size=4),
)
def test_blocks_taken_in_runs_are_taken_as_one_by_one(
    parts: list[tuple[list[tuple[str, int, Any]], int]], rates: list[tuple[int, int]]
) -> None:
    blocks = [
        [replica(holder, size, residency) for holder, size, residency in replicas]
        for replicas, count in parts
        for _ in range(count)
    ]
    links = {h: Link(h, *rate) for h, rate in zip(HOLDERS, rates, strict=False)}
    assert assign_sources(blocks, links, 2) == one_by_one(blocks, links, 2)


TARGETS = [TARGET, *HOLDERS, *HOLDERS, *(f"https://t{n}.example/kvsp/" for n in range(4))]


@given(
    st.lists(
        st.tuples(
            st.lists(
                st.tuples(
                    st.sampled_from(HOLDERS),
                    st.sampled_from([1, 64, 1001, 4096]),
                    st.sampled_from([None, HALF, SLOW, TIERS]),
                    st.integers(1, 2),
                ),
                max_size=6,
            ),
            st.integers(1, 3),
        ),
        max_size=5,
    ),
    st.lists(
        st.lists(
            st.tuples(
                st.sampled_from(HOLDERS), st.sampled_from([0, 8, 0.3, 64]), st.integers(0, 90)
            ),
            max_size=4,
            unique_by=lambda each: each[0],
        ),
        min_size=len(TARGETS),
        max_size=len(TARGETS),
    ),
)
def test_estimates_of_many_instances_are_those_of_one_after_the_other(
    parts: list[tuple[list[tuple[str, int, Any, int]], int]],
    links: list[list[tuple[str, float, int]]],
) -> None:
    blocks = [
        [replace(replica(h, size, residency), codec=codec) for h, size, residency, codec in one]
        for one, count in parts
        for _ in range(count)
    ]
    found = runs(blocks, 2)
    targets = [
        (target, [Link(*link) for link in own]) for target, own in zip(TARGETS, links, strict=True)
    ]
    assert len(targets) > spreading.FEW
    assert spreading.fetch_us(targets, found, 2) == [
        fetch_us(target, blocks, own, 2) for target, own in targets
    ]


def test_a_block_is_one_step_for_any_number_of_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 instances, 100 blocks and 20 holders, every replica of another size: 100 steps, and not
    100 * 100 * 20 loads."""
    steps, loads = 0, 0
    real = spreading.Spread.step

    def step(*values: Any) -> None:
        nonlocal steps
        steps += 1
        real(*values)

    def load(*values: Any) -> float:
        nonlocal loads
        loads += 1
        return load_us(*values)

    monkeypatch.setattr(spreading.Spread, "step", step)
    monkeypatch.setattr("kvsp.records.costs.load_us", load)
    holders = [f"https://h{number}.example/kvsp/" for number in range(20)]
    blocks = [
        [replica(holder, 1000 + 20 * block + place) for place, holder in enumerate(holders)]
        for block in range(100)
    ]
    links = [Link(holder, 8, 1) for holder in holders]
    for count in (10, 100):
        steps = 0
        targets = [(f"https://t{number}.example/kvsp/", links) for number in range(count)]
        estimates = spreading.fetch_us(targets, runs(blocks, 2), 2)
        assert estimates == [fetch_us(TARGET, blocks, links, 2)] * count
        assert steps == 100
    assert loads == 2 * 100 * 20  # of the one that was estimated by itself


def test_what_a_candidate_costs_to_estimate_does_not_grow_with_blocks_that_are_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads = 0

    def counted(*values: Any) -> float:
        nonlocal loads
        loads += 1
        return load_us(*values)

    monkeypatch.setattr("kvsp.records.costs.load_us", counted)
    records = [replica(holder, 4096) for holder in HOLDERS]
    links = [Link(holder, 8, 1) for holder in HOLDERS]
    for count in (1, 100):
        loads = 0
        assert fetch_us(TARGET, [records] * count, links, 2) is not None
        assert loads == len(HOLDERS)
