"""KVSP "Session Checkpoints and Migration" at the placement controller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvsp.controller.core.effects import Done, FindReplicas, Key, Refused, SendResume, Unreachable
from kvsp.controller.core.moves import SessionState
from kvsp.names.codes import InstanceState
from kvsp.principals import Principal
from kvsp.records.estimates import Found
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.records import Resume, Sampler
from tests.kvsp.controller.support import (
    KEYS,
    SESSION,
    A,
    B,
    C,
    Desk,
    checkpoint,
    delta,
    instance,
    refused,
    replica,
)

OTHER = "7f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"


def running(*others: str, **limits: int) -> Desk:
    """A desk with a session at A that has a checkpoint, and other active instances."""
    desk = Desk(**limits)
    for uri in (A, *others):
        desk.status(uri)
    desk.checkpoint()
    return desk


def failed(*others: str, **limits: int) -> Desk:
    """The same, after A failed."""
    desk = running(*others, **limits)
    desk.pass_time(3000, *others)
    return desk


def find(desk: Desk, found: Any = Found()) -> SendResume:  # noqa: B008
    """Answer the lookup and take the resume that follows."""
    (lookup,) = desk.take(FindReplicas)
    desk.report(lookup, found)
    (resume,) = desk.take(SendResume)
    return resume


def session(desk: Desk) -> Any:
    return desk.core.sessions.get(SESSION)


# --- checkpoints ---------------------------------------------------------------------


def test_the_first_checkpoint_of_an_unknown_session_with_epoch_1_creates_it() -> None:
    desk = running()
    assert session(desk).instance == A
    assert desk.core.sessions.recorded(SESSION) == checkpoint()


def test_the_answer_says_what_is_recorded_and_it_is_durable_by_then() -> None:
    desk = Desk()
    desk.status()
    answer = desk.core.checkpoint(instance(A), checkpoint(), desk.now)
    assert answer.to_dict() == {"session": SESSION, "epoch": 1, "output_offset": 3}
    assert ("session", SESSION) in desk.core.take().writes


def test_only_a_reporting_instance_starts_a_session() -> None:
    desk = Desk()
    with refused(ProblemName.FORBIDDEN):
        desk.checkpoint()
    desk.status(A)
    desk.status(B)
    both = Principal("both", uris=frozenset({A, B}))
    with refused(ProblemName.FORBIDDEN):
        desk.do(desk.core.checkpoint, both, checkpoint(), desk.now)


def test_the_pc_records_the_checkpoint_with_the_highest_output_offset() -> None:
    desk = running()
    assert desk.checkpoint(9).output_offset == 9
    assert desk.checkpoint(5).output_offset == 9
    assert desk.core.sessions.recorded(SESSION).output_offset == 9


def test_the_pc_must_reject_a_checkpoint_with_a_lower_epoch() -> None:
    desk = failed(B)
    with refused(ProblemName.STALE_EPOCH) as caught:
        desk.checkpoint(9)
    assert caught.value.members == {"epoch": 2}
    with refused(ProblemName.STALE_EPOCH):
        Desk().checkpoint(epoch=0)


def test_an_epoch_the_pc_never_gave_out_is_unknown() -> None:
    desk = running()
    with refused(ProblemName.UNKNOWN_EPOCH):
        desk.checkpoint(9, epoch=2)
    with refused(ProblemName.UNKNOWN_EPOCH):
        desk.checkpoint(session=OTHER, epoch=2)


def test_an_epoch_that_waits_for_an_instance_is_nobodys() -> None:
    desk = failed()
    desk.status(C)
    with refused(ProblemName.UNKNOWN_EPOCH):
        desk.checkpoint(9, epoch=2, by=C)


def test_the_same_epoch_and_offset_with_other_content_is_a_conflict() -> None:
    desk = running()
    assert desk.checkpoint() == desk.checkpoint()
    with refused(ProblemName.CHECKPOINT_CONFLICT):
        desk.checkpoint(sampler=Sampler("top-p", {"p": 0.9}, 8, 3, False))


@pytest.mark.parametrize(
    "changes",
    [
        {"generated": (1000, 1001, 7, 1003)},
        {"prompt_tail": (1,)},
        {"prompt_blocks": KEYS[:1]},
        {"compat_id": bytes(32)},
        {"scope_id": bytes(16)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_was_acknowledged_does_not_change(changes: dict[str, Any]) -> None:
    desk = running()
    with refused(ProblemName.CHECKPOINT_CONFLICT):
        desk.checkpoint(4, **changes)
    assert desk.core.sessions.recorded(SESSION) == checkpoint()


def test_only_the_instance_the_session_is_assigned_to_publishes_its_checkpoints() -> None:
    desk = running(B)
    with refused(ProblemName.FORBIDDEN):
        desk.checkpoint(9, by=B)


def test_what_a_checkpoint_adds_is_recorded_as_if_it_had_come_whole() -> None:
    desk = running()
    assert desk.extend(3, 9).to_dict() == {"session": SESSION, "epoch": 1, "output_offset": 9}
    assert desk.core.sessions.recorded(SESSION) == checkpoint(9)
    # one whose answer was lost comes again, and with more
    assert desk.extend(3, 9).output_offset == 9
    assert desk.extend(3, 700).output_offset == 700
    assert desk.extend(9, 20).output_offset == 700
    assert desk.core.sessions.recorded(SESSION) == checkpoint(700)
    octets = desk.core.sessions.checkpoint_octets
    desk.restart()
    assert desk.core.sessions.recorded(SESSION) == checkpoint(700)
    assert desk.core.sessions.checkpoint_octets == octets
    assert desk.extend(700, 701).output_offset == 701
    desk.do(desk.core.end_session, SESSION, desk.now)
    assert [key.kind for key in desk.documents] == ["instance", "session"]
    assert desk.core.sessions.checkpoint_octets == 0


@pytest.mark.parametrize(
    ("after", "offset", "changes"),
    [
        (4, 9, {}),  # the tokens before are not recorded
        (2, 4, {"generated": (7, 1003)}),
        (3, 3, {"sampler": Sampler("top-p", {"p": 0.9}, 8, 3, False)}),
    ],
)
def test_what_does_not_continue_the_recorded_checkpoint_is_a_conflict(
    after: int, offset: int, changes: dict[str, Any]
) -> None:
    desk = running(B)
    with refused(ProblemName.CHECKPOINT_CONFLICT):
        desk.extend(after, offset, **changes)
    with refused(ProblemName.FORBIDDEN):
        desk.extend(3, 4, by=B)
    assert desk.core.sessions.recorded(SESSION) == checkpoint()


def test_what_a_checkpoint_adds_is_of_the_sessions_epoch() -> None:
    desk = failed(B)
    with refused(ProblemName.STALE_EPOCH):
        desk.extend(3, 9)
    with refused(ProblemName.CHECKPOINT_CONFLICT):
        Desk().extend(3, 9)
    find(desk)
    assert desk.extend(3, 9, epoch=2, by=B).epoch == 2
    assert session(desk).state is SessionState.RUNNING


def octets_of_a_checkpoint(offset: int, prompt: int) -> tuple[int, int]:
    """Octets written to the journal, and sent, for 16 more tokens after `offset`."""
    desk = Desk()
    desk.status()
    keys = tuple(number.to_bytes(32) for number in range(prompt))
    desk.checkpoint(offset, prompt_blocks=keys)
    desk.core.extend_checkpoint(instance(A), delta(offset, offset + 16))
    written = sum(len(text or b"") for text in desk.core.take().writes.values())
    return written, len(delta(offset, offset + 16).to_json())


def test_a_checkpoint_costs_the_same_at_20000_tokens_as_at_100() -> None:
    early = octets_of_a_checkpoint(100, 2)
    for offset in (20_000, 20_223, 20_224, 20_479):
        written, sent = octets_of_a_checkpoint(offset, 2000)
        # at most the two last pieces of 256 tokens, whatever came before
        assert written <= early[0] + 2 * 256 * len("20000,")
        assert sent <= early[1] + 16 * len("00")


def test_a_journal_with_whole_checkpoints_is_taken_over() -> None:
    desk = running()
    whole = msgspec.json.encode(
        msgspec.json.decode(desk.documents[Key("session", SESSION)])
        | {"checkpoint": checkpoint(9).to_dict()}
    )
    desk.documents = {
        key: text for key, text in desk.documents.items() if key.kind == "instance"
    } | {Key("session", SESSION): whole}
    for _ in range(2):  # and is in pieces from then on
        desk.restart()
        assert desk.core.sessions.recorded(SESSION) == checkpoint(9)
    assert {"prompt", "output"} <= {key.kind for key in desk.documents}


def test_token_ids_are_in_no_repr_and_no_refusal() -> None:
    desk = running()
    assert "1001" not in repr(session(desk)) + repr(desk.core.sessions.recorded(SESSION))
    with pytest.raises(Problem) as caught:
        desk.checkpoint(4, generated=(1000, 1001, 4_000_007, 1003))
    assert "1001" not in str(caught.value.document())


# --- moving --------------------------------------------------------------------------


def test_when_the_instance_fails_another_gets_the_latest_checkpoint_and_the_next_epoch() -> None:
    desk = running(B)
    desk.checkpoint(9)
    desk.pass_time(3000, B)
    resume = find(desk)
    body = Resume.from_json(resume.body)
    assert (resume.instance, body.epoch) == (B, 2)
    assert body.checkpoint == checkpoint(9)
    desk.report(resume, Done({"session": SESSION, "epoch": 2, "output_offset": 9}))
    assert session(desk).state is SessionState.RUNNING
    assert desk.checkpoint(12, epoch=2, by=B).to_dict() == {
        "session": SESSION,
        "epoch": 2,
        "output_offset": 12,
    }


def test_the_new_instance_is_chosen_by_placement_with_the_blocks_that_are_found() -> None:
    desk = running(B, C)
    desk.status(B, links=())
    desk.pass_time(3000, B, C)
    found = Found([[replica(0)], [replica(1)]], 32, 16)
    assert find(desk, found).instance == C


def test_a_failing_lookup_does_not_hold_the_session_up() -> None:
    desk = failed(B)
    assert find(desk, Unreachable()).instance == B
    late = failed(B)
    late.pass_time(1000, B)
    assert [resume.instance for resume in late.take(SendResume)] == [B]


def test_readiness_is_a_checkpoint_under_the_new_epoch_even_with_the_same_offset() -> None:
    desk = failed(B)
    resume = find(desk)
    assert desk.checkpoint(epoch=2, by=B).epoch == 2
    assert session(desk).state is SessionState.RUNNING
    desk.report(resume, Unreachable())  # its answer got lost: too late to matter
    assert session(desk).state is SessionState.RUNNING
    assert desk.core.sessions.recorded(SESSION).epoch == 2


def test_an_instance_that_restarted_before_it_was_missed_loses_its_sessions() -> None:
    desk = running(B)
    desk.status(A, epoch=2)
    with refused(ProblemName.STALE_EPOCH):
        desk.checkpoint(9)
    assert find(desk).instance in (A, B)


@pytest.mark.parametrize(
    "answer",
    [Refused("kvsp-incompatible"), Refused("kvsp-cache-miss"), Unreachable(), Done({"epoch": 1})],
    ids=repr,
)
def test_a_resume_that_fails_goes_to_another_instance_under_another_epoch(answer: Any) -> None:
    desk = failed(B, C)
    first = find(desk)
    desk.report(first, answer)
    second = find(desk)
    assert {first.instance, second.instance} == {B, C}
    assert (first.body["epoch"], second.body["epoch"]) == (2, 3)
    with refused(ProblemName.STALE_EPOCH):
        desk.checkpoint(9, epoch=2, by=first.instance)


def test_a_resume_that_is_never_answered_is_given_to_another_instance() -> None:
    desk = failed(B, C, resume_ms=2000)
    first = find(desk)
    desk.pass_time(2000, B, C)
    second = find(desk)
    assert second.instance != first.instance
    desk.report(first, Done({"epoch": 2}))  # late, and void
    assert session(desk).instance == second.instance


def test_an_instance_that_fails_while_resuming_is_fenced_too() -> None:
    desk = failed(B, C)
    first = find(desk)
    left = C if first.instance == B else B
    desk.pass_time(3000, left)
    assert find(desk).instance == left
    assert session(desk).epoch == 3


def test_a_session_waits_for_an_instance_and_is_lost_when_none_comes() -> None:
    desk = failed(retry_ms=500, give_up_ms=4000)
    (lookup,) = desk.take(FindReplicas)
    desk.report(lookup, Found())
    desk.pass_time(1000)
    assert session(desk).state is SessionState.WAITING
    desk.pass_time(9000)
    assert session(desk).state is SessionState.LOST
    assert desk.core.sessions.checkpoint_octets == 0
    assert desk.core.next_due() is None


def test_a_waiting_session_goes_to_the_instance_that_comes() -> None:
    desk = failed(retry_ms=500)
    (lookup,) = desk.take(FindReplicas)
    desk.report(lookup, Found())
    desk.status(C)
    desk.pass_time(500, C)
    assert find(desk).instance == C


def test_a_draining_instance_must_complete_its_sessions_and_gets_no_new_ones() -> None:
    desk = running(B, C)
    desk.do(desk.core.set_state, A, InstanceState.DRAINING)
    desk.do(desk.core.set_state, B, InstanceState.DRAINING)
    assert desk.checkpoint(9).output_offset == 9
    desk.pass_time(3000, B, C)
    assert find(desk).instance == C


def test_a_session_without_a_checkpoint_is_lost_with_its_instance() -> None:
    desk = running()
    desk.do(desk.core.sessions.assign, OTHER, A, bytes(32), bytes(16), desk.now)
    desk.pass_time(3000)
    assert desk.core.sessions.get(OTHER).state is SessionState.LOST


# --- ends and bounds -----------------------------------------------------------------


def test_an_ended_session_takes_no_checkpoint() -> None:
    desk = running()
    desk.do(desk.core.end_session, SESSION, desk.now)
    with refused(ProblemName.UNKNOWN_RESOURCE):
        desk.checkpoint(9)
    with refused(ProblemName.UNKNOWN_RESOURCE):
        desk.do(desk.core.end_session, SESSION, desk.now)
    assert desk.core.sessions.checkpoint_octets == 0


def test_ending_a_session_that_moves_stops_the_move() -> None:
    desk = failed(B)
    resume = find(desk)
    desk.do(desk.core.end_session, SESSION, desk.now)
    desk.report(resume, Done({"epoch": 2}))
    assert session(desk).state is SessionState.FINISHED
    assert desk.core.ledger.outstanding == 0


def test_full_of_sessions_the_oldest_finished_goes_first() -> None:
    desk = running(sessions=2)
    desk.checkpoint(session=OTHER)
    third = OTHER.replace("7", "8", 1)
    with pytest.raises(Problem) as caught:
        desk.checkpoint(session=third)
    assert caught.value.status == 503
    for each in (OTHER, SESSION):
        desk.do(desk.core.end_session, each, desk.now)
    desk.checkpoint(session=third)
    assert desk.core.sessions.find(OTHER) is None
    assert session(desk).state is SessionState.FINISHED
    assert sum(key.kind == "session" for key in desk.documents) == 2


def test_checkpoints_have_a_bound_together() -> None:
    desk = running(checkpoint_octets=1000)
    with pytest.raises(Problem) as caught:
        desk.checkpoint(500)
    assert caught.value.status == 503
    assert desk.core.sessions.recorded(SESSION) == checkpoint()


# --- restarts ------------------------------------------------------------------------


def test_a_controller_that_restarts_knows_sessions_and_epochs() -> None:
    desk = running(B)
    desk.checkpoint(9)
    desk.restart()
    assert desk.core.sessions.recorded(SESSION) == checkpoint(9)
    assert desk.checkpoint(12).output_offset == 12


def test_a_controller_that_restarts_while_resuming_asks_the_same_instance_again() -> None:
    desk = failed(B)
    first = find(desk)
    desk.restart()
    (again,) = desk.take(SendResume)
    assert (again.instance, again.body) == (first.instance, first.body)


def test_a_controller_that_restarts_while_waiting_goes_on_looking() -> None:
    desk = failed()
    desk.restart()
    assert session(desk).state is SessionState.WAITING
    with refused(ProblemName.STALE_EPOCH):
        desk.checkpoint(9)
    desk.status(C)
    assert find(desk).instance == C


def test_a_session_whose_instance_restarted_unseen_is_fenced_on_restart() -> None:
    desk = running(B)
    stale = dict(desk.documents)
    desk.status(A, epoch=2)
    # the session's fence was lost with the process, the instance's new epoch was not
    desk.documents.update({key: text for key, text in stale.items() if key.kind == "session"})
    desk.restart()
    assert session(desk).epoch == 2
    assert replace(session(desk), command=0).state is SessionState.WAITING
