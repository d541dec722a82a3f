"""KVSP "Sequence-Sharded Caches and Resharding" at the placement controller."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.controller.core.effects import Done, Refused, SendReshard, Unreachable
from kvsp.controller.core.moves import MapState
from kvsp.controller.core.planning import owner_of, plan_members
from kvsp.names.codes import InstanceState
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.sharding import ReshardCommit, ReshardFetch, ReshardPlan, Shard, parse_reshard
from tests.kvsp.controller.support import A, B, C, D, Desk, refused, shard_map

V4 = shard_map(4, (32768, A), (65536, B), (98304, C))
V5 = shard_map(5, (49152, A), (98304, D))


def shards(*ends: tuple[int, str]) -> tuple[Shard, ...]:
    return shard_map(1, *ends).shards


def moving(**limits: int) -> Desk:
    """A desk that has sent the plans from V4 to V5, deadline 200 ms."""
    desk = Desk(**limits)
    for uri in (A, B, C, D):
        desk.status(uri, ttl_ms=60_000)
    assert desk.do(desk.core.put_map, V4, 200, desk.now)
    assert not desk.do(desk.core.put_map, V5, 200, desk.now)
    return desk


def answer(desk: Desk, state: str, *, version: int = 5, without: str = "") -> None:
    """Every member but one answers its last command."""
    for command in desk.take(SendReshard):
        if command.instance != without:
            body = {"map": "m", "version": version, "state": state}
            desk.report(command, Done(body))


def current(desk: Desk) -> Any:
    return desk.core.maps.get("m")


# --- plans ---------------------------------------------------------------------------


def test_a_range_at_the_same_instance_in_both_versions_must_be_retained_and_not_fetched() -> None:
    plans = plan_members(V4.shards, V5.shards)
    assert plans[A].retain == [range(32768)]
    assert plans[A].fetch == [ReshardFetch(range(32768, 49152), B)]
    assert plans[A].release == []
    assert plans[B].release == [range(32768, 65536)]
    assert plans[D].fetch == [
        ReshardFetch(range(49152, 65536), B),
        ReshardFetch(range(65536, 98304), C),
    ]
    assert plans[C].release == [range(65536, 98304)]


def test_tokens_only_the_new_version_covers_are_fetched_from_nobody() -> None:
    plans = plan_members(shards((70, A)), shards((64, A), (128, B)))
    assert plans[A].retain == [range(64)]
    assert plans[A].release == [range(64, 70)]
    assert plans[B].fetch == [ReshardFetch(range(64, 70), A)]


@st.composite
def splits(draw: st.DrawFn) -> tuple[Shard, ...]:
    ends = sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=5)))
    return shards(*[(16 * end, draw(st.sampled_from([A, B, C, D]))) for end in ends])


@given(splits(), splits())
def test_every_token_is_retained_fetched_from_its_owner_or_new(
    old: tuple[Shard, ...], new: tuple[Shard, ...]
) -> None:
    plans = plan_members(old, new)
    assert set(plans) == {shard.instance for shard in (*old, *new)}
    for token in range(0, 200, 8):
        before, after = owner_of(old, token), owner_of(new, token)
        for uri, plan in plans.items():
            retained = any(token in part for part in plan.retain)
            fetched = [part.source for part in plan.fetch if token in part.tokens]
            released = any(token in part for part in plan.release)
            assert retained == (uri == before == after)
            assert fetched == ([before] if uri == after != before and before else [])
            assert released == (uri == before != after)


# --- the procedure -------------------------------------------------------------------


def test_the_pc_sends_each_instance_in_either_version_a_plan() -> None:
    desk = moving()
    sent = {command.instance: command for command in desk.take(SendReshard)}
    assert set(sent) == {A, B, C, D}
    plan = ReshardPlan.from_json(sent[A].body)
    assert (plan.from_version, plan.to_version, plan.deadline_ms) == (4, 5, 200)
    assert (plan.block_tokens, plan.block_keys) == (16, V5.block_keys)


def test_version_v_remains_authoritative_until_all_instances_have_acknowledged() -> None:
    desk = moving()
    plans = desk.take(SendReshard)
    for command in plans:
        assert current(desk).current == V4
        assert desk.take(SendReshard) == []
        desk.report(command, Done({"map": "m", "version": 5, "state": "prepared"}))
    assert current(desk).current == V5
    commits = desk.take(SendReshard)
    assert {command.instance for command in commits} == {A, B, C, D}
    assert all(parse_reshard(command.body) == ReshardCommit("m", 5) for command in commits)


def test_after_all_have_committed_the_next_version_can_be_planned() -> None:
    desk = moving()
    answer(desk, "prepared")
    with refused(ProblemName.MAP_VERSION):
        desk.do(desk.core.put_map, shard_map(6, (98304, A)), 200, desk.now)
    answer(desk, "committed")
    assert current(desk).state is MapState.STABLE
    assert not desk.do(desk.core.put_map, shard_map(6, (98304, A)), 200, desk.now)


def aborted(desk: Desk) -> bool:
    sent = desk.take(SendReshard)
    return (
        current(desk).current == V4
        and {command.instance for command in sent} == {A, B, C, D}
        and all(command.body == {"map": "m", "abort": 5} for command in sent)
    )


def test_if_any_instance_fails_to_acknowledge_within_the_deadline_the_pc_sends_abort() -> None:
    desk = moving()
    answer(desk, "prepared", without=C)
    desk.pass_time(100)
    assert desk.take(SendReshard) == []
    desk.pass_time(100)
    assert aborted(desk)


@pytest.mark.parametrize(
    "reply",
    [
        Refused("kvsp-reshard-failed"),
        Refused("kvsp-map-version"),
        Unreachable(),
        Done({"map": "m", "version": 4, "state": "prepared"}),
        Done({"map": "m", "version": 5, "state": "committed"}),
    ],
    ids=repr,
)
def test_any_other_answer_than_prepared_aborts(reply: Any) -> None:
    desk = moving()
    plans = desk.take(SendReshard)
    desk.report(plans[1], reply)
    assert aborted(desk)


def test_a_member_that_fails_or_restarts_before_it_acknowledged_aborts() -> None:
    desk = moving()
    desk.take(SendReshard)
    desk.status(B, epoch=2)
    assert aborted(desk)


def test_an_acknowledgement_after_the_abort_is_void() -> None:
    desk = moving()
    plans = desk.take(SendReshard)
    desk.pass_time(200)
    for command in plans:
        desk.report(command, Done({"map": "m", "version": 5, "state": "prepared"}))
    assert aborted(desk)


def test_commits_are_repeated_until_every_member_answered() -> None:
    desk = moving(reshard_retry_ms=1000)
    answer(desk, "prepared")
    for command in desk.take(SendReshard):
        if command.instance == A:
            desk.report(command, Unreachable())
        elif command.instance == B:
            desk.report(command, Refused(None, "503"))
        else:
            desk.report(command, Done({"map": "m", "version": 5, "state": "committed"}))
    desk.pass_time(1000)
    again = desk.take(SendReshard)
    assert [command.instance for command in again] == [A, B]
    desk.report(again[0], Refused("kvsp-map-version"))  # it restarted: nothing to commit there
    desk.report(again[1], Done())
    assert current(desk).state is MapState.STABLE


def test_a_member_that_fails_does_not_hold_up_the_commit() -> None:
    desk = moving()
    answer(desk, "prepared")
    answer(desk, "committed", without=D)
    assert current(desk).state is MapState.COMMITTING
    desk.status(D, state=InstanceState.FAILED)
    assert current(desk).state is MapState.STABLE
    assert current(desk).current == V5


def test_after_an_abort_the_same_version_can_be_planned_again() -> None:
    desk = moving()
    desk.take(SendReshard)
    desk.pass_time(200)
    answer(desk, "aborted")
    assert not desk.do(desk.core.put_map, V5, 200, desk.now)
    answer(desk, "prepared")
    answer(desk, "committed")
    assert current(desk).current == V5


# --- what is refused -----------------------------------------------------------------


@pytest.mark.parametrize("version", [3, 4, 6])
def test_only_the_next_version_can_be_planned(version: int) -> None:
    desk = Desk()
    desk.status(A)
    desk.do(desk.core.put_map, shard_map(4, (64, A)), 200, desk.now)
    with refused(ProblemName.MAP_VERSION) as caught:
        desk.do(desk.core.put_map, shard_map(version, (64, A)), 200, desk.now)
    assert caught.value.members == {"version": 4}


def test_members_of_the_next_version_are_active_and_the_others_live() -> None:
    desk = Desk()
    for uri in (A, B, C):
        desk.status(uri)
    desk.do(desk.core.put_map, shard_map(1, (64, A), (128, B)), 200, desk.now)
    with refused(ProblemName.NOT_ACTIVE):
        desk.do(desk.core.put_map, shard_map(2, (128, D)), 200, desk.now)
    desk.do(desk.core.set_state, C, InstanceState.DRAINING)
    with refused(ProblemName.NOT_ACTIVE):
        desk.do(desk.core.put_map, shard_map(2, (128, C)), 200, desk.now)
    desk.status(B, state=InstanceState.FAILED)
    with refused(ProblemName.NOT_ACTIVE):
        desk.do(desk.core.put_map, shard_map(2, (128, A)), 200, desk.now)


def test_a_map_stays_a_map_of_the_same_context() -> None:
    desk = Desk()
    desk.status(A)
    desk.do(desk.core.put_map, shard_map(1, (64, A)), 200, desk.now)
    with refused(ProblemName.INVALID_REQUEST):
        desk.do(desk.core.put_map, shard_map(2, (48, A)), 200, desk.now)
    assert not desk.do(desk.core.put_map, shard_map(2, (128, A)), 200, desk.now)


def test_maps_are_bounded_and_deleted_when_stable() -> None:
    desk = moving(maps=1)
    with pytest.raises(Problem) as caught:
        desk.do(desk.core.put_map, shard_map(1, (64, A), name="n"), 200, desk.now)
    assert caught.value.status == 503
    with refused(ProblemName.MAP_VERSION):
        desk.do(desk.core.maps.delete, "m")
    answer(desk, "prepared")
    answer(desk, "committed")
    desk.do(desk.core.maps.delete, "m")
    with refused(ProblemName.UNKNOWN_RESOURCE):
        current(desk)
    assert not any(key.kind == "map" for key in desk.documents)


# --- restarts ------------------------------------------------------------------------


def test_a_controller_that_restarts_before_the_decision_aborts() -> None:
    desk = moving()
    answer(desk, "prepared", without=C)
    desk.restart()
    assert aborted(desk)


def test_a_controller_that_restarts_after_the_decision_commits() -> None:
    desk = moving()
    answer(desk, "prepared")
    desk.restart()
    assert current(desk).current == V5
    commits = desk.take(SendReshard)
    assert [command.body for command in commits] == [{"map": "m", "commit": 5}] * 4
    for command in commits:
        desk.report(command, Done())
    assert current(desk).state is MapState.STABLE


def test_a_controller_that_restarts_while_aborting_goes_on_aborting() -> None:
    desk = moving()
    desk.take(SendReshard)
    desk.pass_time(200)
    desk.restart()
    assert aborted(desk)
