"""Every needed layer is fetched exactly once or reported missing, whatever fails (sans-IO)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.client.limits import ClientLimits
from kvsp.client.policy import Fault
from kvsp.client.retrieving.flights import Cancel, Fetch
from kvsp.client.retrieving.planner import Planner
from kvsp.names.codes import Codec
from kvsp.records.records import Link, ReplicaRecord, Residency, replica_digest

LAYERS = 6
HOLDERS = [f"https://h{number}.example/kvsp/" for number in range(4)]
LIMITS = ClientLimits(requests=5, requests_per_source=2, piece_octets=2000, octets_in_flight=9000)
DIGESTS = tuple(bytes([layer]) * 32 for layer in range(LAYERS))


def record(holder, *held, block=0, by_layer=True, codec=1, **more):
    residency = tuple(Residency("host", layers) for layers in held) or None
    return ReplicaRecord(
        block_key=block.to_bytes(32),
        compat_id=bytes(32),
        scope_id=bytes(16),
        holder=holder,
        codec=codec,
        size=600 * LAYERS,
        digest=replica_digest(DIGESTS),
        ttl_ms=1000,
        layer_digests=DIGESTS if by_layer else None,
        residency=residency,
        **more,
    )


def whole(*blocks, **options):
    """A planner for all layers of blocks, each given as the list of its replicas."""
    options.setdefault("limits", LIMITS)
    return Planner(blocks, [[range(LAYERS)] for _ in blocks], LAYERS, **options)


def fetches(actions):
    return [action for action in actions if isinstance(action, Fetch)]


def deliver(planner, fetch, now=0.0):
    for layer in fetch.layers:
        planner.arrived(fetch.number, layer)
    planner.finished(fetch.number, now, 100)


def drain(planner, now=0.0):
    while todo := fetches(planner.poll(now)):
        for fetch in todo:
            deliver(planner, fetch, now)
    return planner


ranges = st.tuples(st.integers(0, LAYERS - 1), st.integers(1, LAYERS)).map(
    lambda pair: range(pair[0], min(LAYERS, pair[0] + pair[1]))
)
replicas = st.builds(
    lambda holder, held, by_layer, codec: record(
        HOLDERS[holder], *([held] if held and by_layer else []), by_layer=by_layer, codec=codec
    ),
    st.integers(0, 3),
    st.none() | ranges,
    st.sampled_from([True, True, True, False]),
    st.sampled_from([1, 1, 1, Codec.X_Q8, 77]),
)


@given(st.data())
def test_every_needed_layer_arrives_exactly_once_or_is_missing_with_its_reason(data):
    blocks = data.draw(st.lists(st.lists(replicas, max_size=3), min_size=1, max_size=4))
    wanted = [[data.draw(ranges)] for _ in blocks]
    planner = Planner(blocks, wanted, LAYERS, limits=LIMITS)
    open_, accepted, failed, now = {}, Counter(), set(), 0.0
    for _ in range(2000):
        for action in planner.poll(now):
            if isinstance(action, Cancel):
                open_.pop(action.number)
                continue
            assert action.number not in open_
            offered = action.record.held_layers(LAYERS)
            assert all(any(layer in held for held in offered) for layer in action.layers)
            assert action.candidate.by_layer or action.layers == range(LAYERS)
            open_[action.number] = [action, list(action.layers)]
        assert len(open_) <= 2 * LIMITS.requests
        assert now or len(open_) <= LIMITS.requests
        assert planner.octets_in_flight <= LIMITS.octets_in_flight
        per_source = Counter(fetch.record.holder for fetch, _ in open_.values())
        assert all(number <= LIMITS.requests_per_source for number in per_source.values())
        if planner.done:
            break
        if not open_:
            later = planner.next_time(now)
            assert later is not None, "nothing is asked for and nothing is waited for"
            now = later
            continue
        number = data.draw(st.sampled_from(sorted(open_)))
        fetch, left = open_[number]
        what = data.draw(st.sampled_from(["layer", "layer", "rest", "time", *Fault]))
        if what == "time":
            now += data.draw(st.floats(0.01, 5))
        elif what == "layer" and left:
            layer = left.pop(0)
            accepted[fetch.block, layer] += planner.arrived(number, layer)
        elif what in ("layer", "rest"):
            for layer in left:
                accepted[fetch.block, layer] += planner.arrived(number, layer)
            planner.finished(number, now, 100)
            del open_[number]
        else:
            failed.add((fetch.block, fetch.record))
            available = data.draw(st.none() | st.lists(ranges, max_size=1))
            wait = data.draw(st.sampled_from([None, 1, 30]))
            planner.failed(number, Fault(what), now, retry_after=wait, available=available)
            del open_[number]
    else:
        pytest.fail("the retrieval does not end")
    needed = {(b, layer) for b, runs in enumerate(wanted) for run in runs for layer in run}
    arrived = [(a.block, layer) for a in planner.arrivals() for layer in a.layers]
    missing = [(m.block, layer) for m in planner.missing() for layer in m.layers]
    assert sorted(arrived + missing) == sorted(needed)
    assert sorted(arrived) == sorted(key for key, times in accepted.items() if times)
    assert set(accepted.values()) <= {0, 1}
    assert planner.octets_in_flight == 0


@given(st.data())
def test_without_failures_everything_that_some_replica_holds_arrives(data):
    usable = st.builds(lambda h, held: record(HOLDERS[h], held), st.integers(0, 3), ranges)
    blocks = data.draw(st.lists(st.lists(usable, max_size=3), min_size=1, max_size=4))
    planner = drain(whole(*blocks))
    assert planner.done
    for block, offered in enumerate(blocks):
        held = {layer for each in offered for run in each.held_layers(LAYERS) for layer in run}
        came = {layer for a in planner.arrivals() if a.block == block for layer in a.layers}
        assert came == held
    assert {gap.reason for gap in planner.missing()} <= {Fault.NO_REPLICA}


def test_a_block_is_split_over_holders_of_different_layers():
    planner = drain(whole([record(HOLDERS[0], range(2)), record(HOLDERS[1], range(2, 6))]))
    assert [(tuple(a.layers), a.source) for a in planner.arrivals()] == [
        ((0, 1), HOLDERS[0]),
        ((2, 3, 4, 5), HOLDERS[1]),
    ]


def test_blocks_go_to_the_source_where_they_are_there_soonest_by_the_placement_inputs():
    links = {HOLDERS[0]: Link(HOLDERS[0], 100, 10), HOLDERS[1]: Link(HOLDERS[1], 10_000, 10)}
    blocks = [[record(HOLDERS[0]), record(HOLDERS[1])]]
    (first, *_) = fetches(whole(*blocks, links=links).poll(0.0))
    assert first.record.holder == HOLDERS[1]


def test_the_rate_of_a_tier_counts_for_the_layers_it_holds():
    slow = replace(record(HOLDERS[0]), residency=(Residency("disk", range(LAYERS), 1.0),))
    (first, *_) = fetches(whole([slow, record(HOLDERS[1])]).poll(0.0))
    assert first.record.holder == HOLDERS[1]


def test_a_404_is_a_miss_and_the_next_replica_is_asked():
    planner = whole([record(HOLDERS[0]), record(HOLDERS[1])])
    for fetch in fetches(planner.poll(0.0)):
        if fetch.record.holder == HOLDERS[0]:
            planner.failed(fetch.number, Fault.NOT_HELD, 0.0)
        else:
            deliver(planner, fetch)
    drain(planner)
    assert {a.source for a in planner.arrivals()} == {HOLDERS[1]}
    assert planner.missing() == []


def test_available_layers_of_a_refusal_are_asked_for_there_and_the_others_elsewhere():
    # one piece, so that all six layers are asked for at once
    planner = whole([record(HOLDERS[0])], limits=ClientLimits())
    (fetch,) = fetches(planner.poll(0.0))
    planner.failed(fetch.number, Fault.NOT_HELD, 0.0, available=[range(3)])
    drain(planner)
    assert [(a.layers, a.source) for a in planner.arrivals()] == [(range(3), HOLDERS[0])]
    assert [(m.layers, m.reason) for m in planner.missing()] == [(range(3, 6), Fault.NOT_HELD)]


def test_a_source_that_asks_to_wait_is_asked_again_after_that_time_only():
    planner = whole([record(HOLDERS[0])])
    for fetch in fetches(planner.poll(0.0)):
        planner.failed(fetch.number, Fault.BUSY, 0.0, retry_after=2)
    assert planner.poll(1.9) == []
    assert planner.next_time(1.9) == 2.0
    drain(planner, 2.0)
    assert planner.missing() == []


def test_a_source_with_bad_answers_is_dropped_and_counted():
    blocks = [[record(HOLDERS[0], block=number)] for number in range(9)]
    planner = whole(*blocks)
    while todo := fetches(planner.poll(0.0)):
        for fetch in todo:
            planner.failed(fetch.number, Fault.VERIFICATION, 0.0)
    assert planner.done
    assert {gap.reason for gap in planner.missing()} == {Fault.VERIFICATION}
    assert planner.sources[HOLDERS[0]].bad <= LIMITS.bad_answers + LIMITS.requests_per_source
    assert planner.counters["requests"] < 9


def test_an_idle_source_takes_work_from_the_queue_of_a_stuck_one():
    fast = {HOLDERS[0]: Link(HOLDERS[0], 100_000, 1), HOLDERS[1]: Link(HOLDERS[1], 50_000, 1)}
    blocks = [[record(HOLDERS[0], block=n), record(HOLDERS[1], block=n)] for n in range(8)]
    planner = whole(*blocks, links=fast)
    stuck, now = set(), 0.0
    for _ in range(200):
        for fetch in fetches(planner.poll(now)):
            if fetch.record.holder == HOLDERS[0]:
                stuck.add(fetch.number)
            else:
                deliver(planner, fetch, now)
        if planner.done:
            break
        now = planner.next_time(now) or now + 1
    assert planner.done and planner.missing() == []
    assert {a.source for a in planner.arrivals()} == {HOLDERS[1]}
    assert planner.counters["stolen"] and planner.counters["hedges"] == len(stuck)


def test_the_loser_of_a_hedge_is_cancelled_and_its_layers_are_not_used_twice():
    planner = whole([record(HOLDERS[0]), record(HOLDERS[1])], limits=ClientLimits())
    (slow,) = fetches(planner.poll(0.0))
    assert planner.arrived(slow.number, 0)
    (hedge,) = fetches(planner.poll(60.0))
    assert hedge.record.holder != slow.record.holder
    assert hedge.layers == range(1, LAYERS)
    deliver(planner, hedge, 61.0)
    assert Cancel(slow.number) in planner.poll(61.0)
    assert not planner.arrived(slow.number, 1)
    assert planner.done


def test_at_the_deadline_what_did_not_come_is_missing_for_timeout():
    planner = whole([record(HOLDERS[0])], limits=ClientLimits())
    (fetch,) = fetches(planner.poll(0.0))
    planner.arrived(fetch.number, 0)
    planner.give_up(Fault.TIMEOUT)
    assert planner.poll(0.0) == [Cancel(fetch.number)]
    assert [(m.layers, m.reason) for m in planner.missing()] == [(range(1, 6), Fault.TIMEOUT)]
    assert planner.done


def test_blocks_beyond_the_budget_are_missing_for_capacity_and_form_no_hole():
    blocks = [[record(HOLDERS[0], block=number)] for number in range(4)]
    planner = drain(whole(*blocks, budget_octets=2 * 600 * LAYERS))
    assert [(m.block, m.reason) for m in planner.missing()] == [
        (2, Fault.CAPACITY),
        (3, Fault.CAPACITY),
    ]


def test_lower_layers_of_all_blocks_come_first():
    blocks = [[record(HOLDERS[0], block=number)] for number in range(3)]
    planner = whole(*blocks, limits=replace(LIMITS, piece_octets=600, requests_per_source=99))
    order = [(fetch.layers.start, fetch.block) for fetch in fetches(planner.poll(0.0))]
    assert order == sorted(order) and {start for start, _ in order[:3]} == {0}


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (record("moqt://relay.example/", moqt_namespace="x"), Fault.NO_REPLICA),
        (record(HOLDERS[0], codec=77), Fault.CODEC),
        (record(HOLDERS[0], codec=int(Codec.X_Q8)), Fault.CODEC),
        (replace(record(HOLDERS[0]), layer_digests=DIGESTS[:2]), Fault.VERIFICATION),
    ],
)
def test_a_replica_that_cannot_be_used_gives_the_reason(made, reason):
    planner = whole([made])
    assert planner.done
    assert {gap.reason for gap in planner.missing()} == {reason}


def test_a_lossy_replica_is_used_only_when_it_is_allowed():
    planner = drain(whole([record(HOLDERS[0], codec=int(Codec.X_Q8))], allow_lossy=True))
    assert planner.missing() == []
