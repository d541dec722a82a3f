"""KVSP "Instance Status and Lifecycle" at the placement controller."""

from __future__ import annotations

import pytest

from kvsp.controller.core.effects import SendPrefetch, SendState
from kvsp.controller.core.moves import INSTANCE_MOVES, InstanceEvent
from kvsp.controller.core.requests import PlaceRequest
from kvsp.names.codes import InstanceState
from kvsp.records.estimates import Found
from kvsp.records.moves import IllegalMove, move
from kvsp.records.problems import Problem, ProblemName
from tests.kvsp.controller.support import COMPAT, KEYS, NOW, SCOPE, A, B, C, Desk, refused, replica

ACTIVE, DRAINING = InstanceState.ACTIVE, InstanceState.DRAINING
SLEEPING, FAILED = InstanceState.SLEEPING, InstanceState.FAILED
REQUEST = PlaceRequest(SCOPE, COMPAT, KEYS[:2], tokens=40)
FOUND = Found([[replica(0)], [replica(1)]], layers=32, block_tokens=16)


def state(desk: Desk, uri: str = A) -> InstanceState:
    known = desk.core.instances.get(uri)
    assert known is not None
    return known.state


def test_the_pc_considers_an_instance_failed_when_its_record_expires() -> None:
    desk = Desk()
    assert desk.status() is ACTIVE
    desk.pass_time(2900)
    assert state(desk) is ACTIVE
    desk.pass_time(100)
    assert state(desk) is FAILED


def test_an_instance_that_reports_within_its_ttl_stays() -> None:
    desk = Desk()
    desk.status()
    desk.pass_time(30_000, A)
    assert state(desk) is ACTIVE


@pytest.mark.parametrize(("ttl_ms", "lasts_ms"), [(1, 300), (299, 300), (60_001, 60_000)])
def test_a_status_lasts_no_less_than_300_ms_and_no_more_than_60_s(
    ttl_ms: int, lasts_ms: int
) -> None:
    desk = Desk()
    desk.status(ttl_ms=ttl_ms)
    desk.pass_time(lasts_ms - 100)
    assert state(desk) is ACTIVE
    desk.pass_time(100)
    assert state(desk) is FAILED


def test_the_pc_must_discard_records_with_a_lower_epoch_than_the_highest_seen() -> None:
    desk = Desk()
    desk.status(epoch=12)
    with refused(ProblemName.STALE_EPOCH) as caught:
        desk.status(epoch=11, queued=9)
    assert caught.value.members == {"epoch": 12}
    assert desk.core.instances.epoch_of(A) == 12


def test_a_failed_instance_reports_again_only_with_a_higher_epoch() -> None:
    desk = Desk()
    desk.status()
    desk.pass_time(3000)
    with refused(ProblemName.INSTANCE_FAILED):
        desk.status()
    assert state(desk) is FAILED
    assert desk.status(epoch=2) is ACTIVE


def test_an_instance_can_say_that_it_failed() -> None:
    desk = Desk()
    desk.status()
    assert desk.status(state=FAILED) is FAILED
    with refused(ProblemName.INSTANCE_FAILED):
        desk.status()


def test_a_wish_to_sleep_is_granted_when_enough_instances_stay() -> None:
    desk = Desk()
    desk.status(A)
    assert desk.status(A, requested_state=SLEEPING) is ACTIVE  # the only one
    desk.status(B)
    assert desk.status(A, requested_state=SLEEPING) is DRAINING
    assert desk.status(B, requested_state=SLEEPING) is ACTIVE  # now the only one
    assert state(desk, A) is DRAINING


def test_a_draining_instance_that_is_empty_enters_sleeping_and_reports_it() -> None:
    desk = Desk()
    desk.status(A)
    desk.do(desk.core.set_state, A, DRAINING)
    assert desk.status(A) is DRAINING
    assert desk.status(A, state=DRAINING) is DRAINING
    assert desk.status(A, state=SLEEPING) is SLEEPING


def test_a_sleeping_instance_becomes_active_only_on_a_state_change_from_the_pc() -> None:
    desk = Desk()
    desk.status(A)
    desk.do(desk.core.set_state, A, DRAINING)
    desk.status(A, state=SLEEPING)
    assert desk.status(A, state=ACTIVE) is SLEEPING
    assert state(desk) is not ACTIVE
    desk.status(A, state=SLEEPING)
    desk.do(desk.core.set_state, A, ACTIVE)
    assert desk.take(SendState)[-1].state is ACTIVE
    assert state(desk) is SLEEPING  # it has not said so yet
    assert desk.status(A, state=ACTIVE) is ACTIVE
    assert state(desk) is ACTIVE


@pytest.mark.parametrize("where", [DRAINING, SLEEPING, FAILED])
def test_the_pc_must_not_assign_requests_or_send_directives_to_an_instance_not_active(
    where: InstanceState,
) -> None:
    desk = Desk()
    desk.status(A)
    if where is FAILED:
        desk.pass_time(3000)
    else:
        desk.do(desk.core.set_state, A, DRAINING)
        if where is SLEEPING:
            desk.status(A, state=SLEEPING)
    assert state(desk) is where
    with pytest.raises(Problem) as caught:
        desk.do(desk.core.place, REQUEST, FOUND, desk.now)
    assert caught.value.status == 503
    assert desk.take(SendPrefetch) == []


def test_a_request_nobody_can_take_wakes_an_instance_that_serves_it() -> None:
    desk = Desk()
    for uri, compat in ((A, bytes(32)), (B, COMPAT)):
        desk.status(uri, compat_ids=(compat,))
        desk.do(desk.core.set_state, uri, DRAINING)
        desk.status(uri, compat_ids=(compat,), state=SLEEPING)
    desk.take(SendState)
    with pytest.raises(Problem):
        desk.do(desk.core.place, REQUEST, FOUND, desk.now)
    (sent,) = desk.take(SendState)
    assert (sent.instance, sent.state) == (B, ACTIVE)


def test_states_are_set_by_request_only_where_the_lifecycle_allows_it() -> None:
    desk = Desk()
    desk.status(A)
    for wrong in (SLEEPING, FAILED):
        with refused(ProblemName.INVALID_TRANSITION):
            desk.do(desk.core.set_state, A, wrong)
    with refused(ProblemName.UNKNOWN_RESOURCE):
        desk.do(desk.core.set_state, B, ACTIVE)
    for wanted in (ACTIVE, DRAINING, DRAINING, ACTIVE):
        assert desk.do(desk.core.set_state, A, wanted) is wanted
    desk.pass_time(3000)
    with refused(ProblemName.INVALID_TRANSITION):
        desk.do(desk.core.set_state, A, ACTIVE)


def test_nothing_leads_out_of_failed_within_an_epoch() -> None:
    for event in InstanceEvent:
        with pytest.raises(IllegalMove):
            move(INSTANCE_MOVES, FAILED, event)


def test_a_controller_that_restarts_knows_epochs_and_gives_time_to_report() -> None:
    desk = Desk()
    desk.status(A, epoch=5)
    desk.status(B, epoch=7)
    desk.do(desk.core.set_state, B, DRAINING)
    desk.status(C)
    desk.pass_time(3000, A, B)
    desk.restart()
    assert [state(desk, uri) for uri in (A, B, C)] == [ACTIVE, DRAINING, FAILED]
    with refused(ProblemName.STALE_EPOCH):
        desk.status(A, epoch=4)
    desk.pass_time(9900)
    assert state(desk) is ACTIVE
    desk.pass_time(200)
    assert state(desk) is FAILED


def test_a_full_table_forgets_failed_instances_and_refuses_others() -> None:
    desk = Desk(instances=2)
    desk.status(A)
    desk.pass_time(3000)
    desk.status(B)
    desk.status(C)
    assert desk.core.instances.get(A) is None
    with pytest.raises(Problem) as caught:
        desk.status(A, epoch=2)
    assert caught.value.status == 503
    assert len(desk.documents) == 2


def test_refreshes_that_change_nothing_are_not_written() -> None:
    desk = Desk()
    desk.status()
    desk.documents.clear()
    desk.status(queued=4)
    assert desk.documents == {}
    assert desk.core.next_due() == NOW + 3000
