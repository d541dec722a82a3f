"""The core of an instance: states, epochs, directives, sessions and shard maps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvsp.instance.core.agent import Agent
from kvsp.instance.core.limits import InstanceLimits
from kvsp.instance.core.moves import MemberState, ServingState
from kvsp.instance.epochs import Epochs
from kvsp.names.codes import DirectiveState, InstanceState, ReshardState
from kvsp.names.errors import FileError
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.records import Resume, Sampler, SessionProgress
from tests.kvsp.instance.support import (
    BASE,
    ENGINE,
    GREEDY,
    PROMPT,
    SCOPE,
    SESSION,
    SIZE,
    TOP_P,
    checkpoint,
    directive,
    keys,
    plan,
    start_request,
)

ACTIVE, DRAINING, SLEEPING = (
    InstanceState.ACTIVE,
    InstanceState.DRAINING,
    InstanceState.SLEEPING,
)


def make_agent(**limits) -> Agent:
    return Agent(
        BASE,
        ENGINE.descriptor,
        [SCOPE],
        epoch=7,
        bit_identical=True,
        limits=InstanceLimits(**limits),
    )


def refused(name, function, *values):
    with pytest.raises(Problem) as caught:
        function(*values)
    assert caught.value.name is name
    return caught.value


# --- lifecycle -----------------------------------------------------------------------


def test_a_draining_instance_without_sessions_sleeps_and_wakes_only_by_request():
    agent = make_agent()
    assert agent.set_state(DRAINING, 0).state is SLEEPING
    refused(ProblemName.INVALID_TRANSITION, agent.set_state, DRAINING, 0)
    assert agent.set_state(SLEEPING, 0).state is SLEEPING
    assert agent.set_state(ACTIVE, 0).state is ACTIVE
    for never in (SLEEPING, InstanceState.FAILED):
        refused(ProblemName.INVALID_TRANSITION, agent.set_state, never, 0)


def test_a_draining_instance_completes_its_sessions_and_takes_nothing_new():
    agent = make_agent()
    serving = agent.start_session(SESSION, start_request())
    assert agent.set_state(DRAINING, 0).state is DRAINING
    refused(ProblemName.NOT_ACTIVE, agent.accept_prefetch, directive(keys()), 0)
    other = "00000000-0000-4000-8000-000000000000"
    refused(ProblemName.NOT_ACTIVE, agent.start_session, other, start_request())
    resume = Resume(2, replace(checkpoint(3), session=other))
    problem = refused(ProblemName.NOT_ACTIVE, agent.resume_session, resume)
    assert problem.members == {"state": "draining"}
    agent.sessions.finish(serving, 5)
    agent.settle_down(5)
    assert agent.state is SLEEPING


def test_an_idle_instance_asks_to_sleep_after_its_time():
    agent = make_agent(sleep_after_ms=1000)
    assert agent.status((), 0).requested_state is None
    assert agent.status((), 999).requested_state is None
    assert agent.status((), 1000).requested_state is SLEEPING
    agent.start_session(SESSION, start_request())
    assert agent.status((), 5000).requested_state is None


def test_the_answered_state_is_obeyed_and_one_that_cannot_be_is_left():
    agent = make_agent()
    agent.obey(DRAINING, 0)
    assert agent.state is SLEEPING
    agent.obey(DRAINING, 0)
    assert agent.state is SLEEPING
    agent.obey(InstanceState.FAILED, 0)
    assert agent.state is SLEEPING
    agent.obey(ACTIVE, 0)
    assert agent.state is ACTIVE


def test_a_status_tells_what_runs_and_what_waits():
    agent = make_agent(status_ttl_ms=900)
    serving = agent.start_session(SESSION, start_request())
    status = agent.status((), 0)
    assert (status.running, status.queued, status.ttl_ms, status.epoch) == (0, 1, 900, 7)
    agent.sessions.loaded(serving)
    status = agent.status((), 0)
    assert (status.running, status.queued) == (1, 0)
    assert status.compat_ids == (ENGINE.descriptor.compat_id,)


def test_a_new_epoch_drops_every_session():
    agent = make_agent()
    serving = agent.start_session(SESSION, start_request())
    assert agent.begin_epoch(8) == [serving]
    assert serving.state is ServingState.DROPPED
    assert (agent.epoch, agent.sessions.live) == (8, 0)
    with pytest.raises(ValueError, match="does not follow"):
        agent.begin_epoch(8)


def test_epochs_rise_although_the_clock_goes_back(tmp_path):
    first = Epochs(tmp_path).next(now_ms=1000)
    second = Epochs(tmp_path).next(now_ms=10)
    assert (first, second) == (1000, 1001)
    assert Epochs(tmp_path).next(above=5000, now_ms=2000) == 5001
    assert Epochs().next(now_ms=77) == 77
    (tmp_path / "epoch").write_text("soon")
    with pytest.raises(FileError, match="not an epoch"):
        Epochs(tmp_path).next()


# --- directives ----------------------------------------------------------------------


def test_a_directive_tells_what_arrived_and_not_what_was_promised():
    agent, made = make_agent(), directive(keys(), deadline_ms=50)
    loading = agent.accept_prefetch(made, 100)
    assert loading.status(100).loaded == ()
    assert loading.status(120).remaining_ms == 30
    agent.directives.loaded(loading, keys()[1])
    agent.directives.failed(loading, keys()[0], "kvsp-lease-quota")
    agent.directives.finish(loading, 150)
    status = loading.status(150)
    assert (status.state, status.remaining_ms) == (DirectiveState.PARTIAL, 0)
    assert status.loaded == (keys()[1],)
    assert [(f.block_key, f.reason) for f in status.failed] == [
        (keys()[0], "kvsp-lease-quota"),
        (keys()[2], "timeout"),
    ]
    # what comes too late changes nothing
    agent.directives.loaded(loading, keys()[2])
    assert loading.status(151) == status


@pytest.mark.parametrize(
    ("arrived", "state"), [(0, DirectiveState.FAILED), (3, DirectiveState.COMPLETE)]
)
def test_a_directive_with_nothing_failed_and_one_with_everything_completes(arrived, state):
    agent = make_agent()
    loading = agent.accept_prefetch(directive(keys()), 0)
    for key in keys()[:arrived]:
        agent.directives.loaded(loading, key)
    agent.directives.finish(loading, 1)
    assert loading.state is state


def test_a_directive_is_idempotent_by_its_identifier_and_conflicts_with_another_body():
    agent, made = make_agent(), directive(keys())
    assert agent.accept_prefetch(made, 0) is not None
    assert agent.accept_prefetch(made, 1) is None
    other = replace(made, lease_ms=2000)
    refused(ProblemName.DIRECTIVE_CONFLICT, agent.accept_prefetch, other, 1)


def test_what_a_directive_refers_to_is_of_no_meaning_to_the_instance():
    made = replace(directive(keys()), request_ref="anything at all \u2026")
    agent = make_agent()
    assert agent.accept_prefetch(made, 0).missing == list(made.blocks)
    # it is part of the body all the same: with another one it is another directive
    assert agent.accept_prefetch(made, 0) is None
    other = replace(made, request_ref=None)
    refused(ProblemName.DIRECTIVE_CONFLICT, agent.accept_prefetch, other, 0)


def test_directives_are_bounded_and_stay_readable_for_a_minute():
    agent = make_agent(directives=2, blocks=3)
    first, second, third = (directive(keys()) for _ in range(3))
    loading = agent.accept_prefetch(first, 0)
    agent.accept_prefetch(second, 0)
    assert refused(None, agent.accept_prefetch, third, 0).status == 503
    agent.directives.finish(loading, 10)
    assert agent.accept_prefetch(third, 10) is not None
    assert agent.directives.get(first.directive, 60_010) is loading
    refused(ProblemName.UNKNOWN_RESOURCE, agent.directives.get, first.directive, 60_011)
    large = directive([*keys(), bytes(32)])
    assert refused(ProblemName.TOO_LARGE, agent.accept_prefetch, large, 0).members["limit"] == 3


def test_a_directive_of_another_model_is_refused():
    made = replace(directive(keys()), compat_id=bytes(32))
    refused(ProblemName.INCOMPATIBLE, make_agent().accept_prefetch, made, 0)


# --- sessions ------------------------------------------------------------------------


def begun(agent, **options):
    serving = agent.start_session(SESSION, start_request(**options))
    agent.sessions.loaded(serving)
    return serving


def test_tokens_of_a_sampler_that_is_not_deterministic_wait_for_the_acknowledgement():
    agent = make_agent()
    serving = begun(agent, sampler=TOP_P)
    agent.sessions.produce(serving, 11, 0)
    agent.sessions.produce(serving, 12, 0)
    assert serving.output(0) == []
    assert serving.checkpoint_due(64)
    sent = serving.checkpoint()
    agent.sessions.produce(serving, 13, 0)
    assert not serving.checkpoint_due(64)
    serving.acknowledge(sent, SessionProgress(SESSION, 1, 2))
    assert [(t.index, t.token, t.epoch) for t in serving.output(0)] == [(0, 11, 1), (1, 12, 1)]
    assert serving.output(1) == serving.output(0)[1:]
    # an acknowledgement of another epoch releases nothing
    serving.acknowledge(serving.checkpoint(), SessionProgress(SESSION, 2, 3))
    assert serving.released == 2


def test_a_session_that_waits_for_an_acknowledgement_generates_no_further_than_its_limit():
    agent = make_agent(checkpoint_tokens=3)
    serving = begun(agent, sampler=TOP_P, count=100)
    for token in range(3):
        assert serving.can_generate
        agent.sessions.produce(serving, token, 0)
    assert not serving.can_generate
    sent = serving.checkpoint()
    serving.acknowledge(sent, SessionProgress(SESSION, 1, 3))
    assert serving.can_generate


def test_a_deterministic_session_publishes_a_checkpoint_when_a_block_completes():
    agent = make_agent()
    serving = begun(agent, count=100)
    due = []
    for token in range(12):
        if serving.checkpoint_due(64):
            due.append(len(serving.generated))
            sent = serving.checkpoint()
            serving.acknowledge(sent, SessionProgress(SESSION, 1, sent.output_offset))
        agent.sessions.produce(serving, token, 0)
    # 14 prompt tokens: the blocks end at 16, 20 and 24; a token's K and V come with the next
    assert due == [0, 3, 7, 11]
    assert serving.released == 12


def test_at_least_every_64_tokens_a_checkpoint_is_due_whatever_the_block_size():
    agent = make_agent()
    serving = begun(agent, count=1000)
    sent = serving.checkpoint()
    serving.acknowledge(sent, SessionProgress(SESSION, 1, 0))
    serving.checkpointed_blocks = 1 << 30  # as if no block ever ended
    for token in range(64):
        assert not serving.checkpoint_due(64)
        agent.sessions.produce(serving, token % 7, 0)
    assert serving.checkpoint_due(64)


def test_the_first_checkpoint_waits_for_output_when_no_prompt_token_can_be_computed_again():
    agent = make_agent()
    serving = begun(agent, prompt=PROMPT[: 3 * SIZE])
    assert serving.prompt_tail == ()
    assert not serving.checkpoint_due(64)
    agent.sessions.produce(serving, 5, 0)
    assert serving.checkpoint_due(64)
    nothing = checkpoint(0, prompt_tail=())
    problem = refused(ProblemName.CACHE_MISS, make_agent().resume_session, Resume(2, nothing))
    assert problem.members["block_keys"] == [keys()[2].hex()]


def test_the_sampler_of_a_checkpoint_has_drawn_as_many_samples_as_there_are_tokens():
    agent = make_agent()
    serving = begun(agent, sampler=TOP_P)
    for token in range(5):
        agent.sessions.produce(serving, token, 0)
    made = serving.checkpoint()
    assert (made.sampler.step, made.output_offset, len(made.generated)) == (5, 5, 5)
    assert made.prompt_tokens is None


def test_keys_of_a_session_are_those_of_all_its_tokens_however_it_grew():
    agent = make_agent()
    serving = begun(agent, count=40)
    for token in range(30):
        agent.sessions.produce(serving, token, 0)
        assert list(serving.all_keys()) == keys([*PROMPT, *range(token + 1)])


@pytest.mark.parametrize(
    ("sampler", "bit_identical", "deterministic"),
    [(GREEDY, True, True), (GREEDY, False, False), (TOP_P, True, False), (TOP_P, False, False)],
)
def test_a_sampler_is_deterministic_only_where_every_instance_makes_the_same_tokens(
    sampler, bit_identical, deterministic
):
    agent = Agent(BASE, ENGINE.descriptor, [SCOPE], epoch=7, bit_identical=bit_identical)
    # whatever who asks for the session says
    claimed = replace(sampler, deterministic=not deterministic)
    serving = begun(agent, sampler=claimed)
    agent.sessions.produce(serving, 5, 0)
    assert serving.checkpoint().sampler.deterministic is deterministic
    assert serving.released == deterministic


def test_a_resumed_session_goes_on_with_the_next_index_under_the_new_epoch():
    agent = make_agent()
    serving = agent.resume_session(Resume(2, checkpoint(4, count=20)))
    agent.sessions.loaded(serving)
    agent.sessions.produce(serving, 77, 0)
    assert [(each.index, each.epoch, each.token) for each in serving.output(4)] == [(4, 2, 77)]
    made = serving.checkpoint()
    assert (made.epoch, made.output_offset, made.generated[4]) == (2, 5, 77)
    assert made.sampler.step == 5


@pytest.mark.parametrize("keep", [False, True])
def test_a_prompt_is_in_checkpoints_only_where_it_may_be(keep):
    agent = Agent(BASE, ENGINE.descriptor, [SCOPE], epoch=7, bit_identical=True, keep_prompts=keep)
    serving = begun(agent)
    agent.sessions.produce(serving, 5, 0)
    assert serving.checkpoint().prompt_tokens == (tuple(PROMPT) if keep else None)


def test_a_resume_is_idempotent_by_epoch_and_a_lower_one_is_stale():
    agent = make_agent()
    serving = agent.resume_session(Resume(3, checkpoint(4)))
    assert (serving.epoch, serving.released, serving.generated) == (
        3,
        4,
        list(checkpoint(4).generated),
    )
    assert agent.resume_session(Resume(3, checkpoint(4))) is None
    problem = refused(ProblemName.STALE_EPOCH, agent.resume_session, Resume(2, checkpoint(4)))
    assert problem.members == {"epoch": 3}
    higher = agent.resume_session(Resume(4, checkpoint(5)))
    assert higher is not serving
    assert serving.state is ServingState.DROPPED
    # the dropped one takes no token any more
    agent.sessions.produce(serving, 1, 0)
    assert len(serving.generated) == 4


def test_a_resumed_session_names_its_blocks_without_the_prompt():
    serving = make_agent().resume_session(Resume(2, checkpoint(8)))
    assert list(serving.all_keys()) == keys([*PROMPT, *checkpoint(8).generated])
    assert serving.known_tokens(16) == list(checkpoint(8).generated[2:])
    with pytest.raises(ValueError, match="not known"):
        serving.known_tokens(8)


def test_what_cannot_be_continued_is_refused_with_its_name():
    agent = make_agent()
    unknown = checkpoint(3, sampler=Sampler("beam", {}, 0, 3, False))
    problem = refused(ProblemName.SAMPLER_UNSUPPORTED, agent.resume_session, Resume(2, unknown))
    assert problem.members == {"method": "beam"}
    other = checkpoint(3, compat_id=bytes(32))
    refused(ProblemName.INCOMPATIBLE, agent.resume_session, Resume(2, other))
    foreign = checkpoint(3, scope_id=bytes(16))
    refused(ProblemName.FORBIDDEN, agent.resume_session, Resume(2, foreign))
    inexact = Agent(BASE, ENGINE.descriptor, [SCOPE], epoch=1, bit_identical=False)
    exact = Resume(2, checkpoint(3))
    refused(ProblemName.SAMPLER_UNSUPPORTED, inexact.resume_session, exact)


def test_sessions_are_bounded_and_forgotten_after_their_time():
    agent = make_agent(sessions=1, context_tokens=30)
    serving = begun(agent)
    other = "00000000-0000-4000-8000-000000000000"
    assert refused(None, agent.start_session, other, start_request()).status == 503
    agent.sessions.finish(serving, 100)
    assert agent.start_session(other, start_request()) is not None
    assert agent.sessions.forget(60_100) == []
    assert agent.sessions.forget(60_101) == [serving]
    refused(ProblemName.TOO_LARGE, agent.start_session, SESSION, start_request(count=17))


def test_no_token_is_in_the_repr_of_a_session():
    agent = make_agent()
    serving = begun(agent, prompt=[200_000_001] * 5)
    agent.sessions.produce(serving, 200_000_001, 0)
    assert "200000001" not in repr(serving) + repr(start_request(prompt=[200_000_001]))


# --- shard maps ----------------------------------------------------------------------


def test_ranges_are_released_only_after_the_commit():
    shards = make_agent().shards
    member = shards.plan(plan(), 0)
    assert member.state is MemberState.LOADING
    assert shards.loaded(member).state is ReshardState.PREPARED
    assert member.version == 1
    answer, released = shards.commit("m", 2)
    assert (answer.version, answer.state) == (2, ReshardState.COMMITTED)
    assert [block.block_key for block in released] == [keys()[2]]
    assert {block.block_key for block in member.held} == set(keys()[:2])
    # repeats are harmless
    assert shards.commit("m", 2) == (answer, set())


def test_an_abort_discards_what_was_fetched_and_keeps_the_rest():
    agent = make_agent()
    member = agent.accept_plan(plan(), 0)
    held = set(member.held)
    fetched = {next(iter(held))._replace(block_key=keys()[1])}
    member.fetched |= fetched
    agent.shards.loaded(member)
    answer, discarded = agent.shards.abort("m", 2)
    assert (answer.state, discarded, member.held) == (ReshardState.ABORTED, fetched, held)
    assert agent.shards.abort("m", 2) == (answer, set())
    assert member.version == 1
    assert agent.accept_plan(plan(), 0).state is MemberState.LOADING


def test_steps_that_do_not_follow_are_refused_with_the_current_version():
    agent = make_agent()
    for step in (agent.shards.commit, agent.shards.abort):
        refused(ProblemName.MAP_VERSION, step, "m", 2)
    member = agent.accept_plan(plan(4), 0)
    refused(ProblemName.MAP_VERSION, agent.shards.commit, "m", 5)
    agent.shards.loaded(member)
    assert agent.accept_plan(plan(4), 1) is member
    problem = refused(ProblemName.MAP_VERSION, agent.accept_plan, plan(5), 1)
    assert problem.members == {"version": 4}
    refused(ProblemName.MAP_VERSION, agent.shards.commit, "m", 6)
    agent.shards.commit("m", 5)
    refused(ProblemName.MAP_VERSION, agent.accept_plan, plan(4), 2)
    incompatible = plan(5, block_tokens=2 * SIZE)
    refused(ProblemName.INCOMPATIBLE, agent.accept_plan, incompatible, 2)


@pytest.mark.parametrize(("authoritative", "version"), [(2, 2), (1, 1), (None, 1)])
def test_a_member_that_prepared_and_heard_nothing_settles_by_the_authoritative_map(
    authoritative, version
):
    shards = make_agent().shards
    member = shards.plan(plan(), 0)
    shards.loaded(member)
    assert shards.unsettled(1000) == []
    assert shards.unsettled(1001) == ["m"]
    shards.settle("m", authoritative)
    assert (member.version, member.state) == (version, MemberState.STABLE)
    assert shards.unsettled(5000) == []
