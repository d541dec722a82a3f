"""An instance at work: loading, generating, checkpoints, resuming, resharding."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvsp.holder.app import HolderService
from kvsp.holder.descriptors import Descriptors
from kvsp.holder.records.publishing import RecordPublisher
from kvsp.instance.callers import PlacementRefusedError
from kvsp.instance.core.moves import MemberState, ServingState
from kvsp.instance.engines.toy import ToyEngine
from kvsp.instance.loading.fetchers import UNREACHABLE, LoadError
from kvsp.instance.loading.loader import BlockLoader
from kvsp.instance.loading.sources import Wanted
from kvsp.names.codes import DirectiveState, InstanceState
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.records import CheckpointDelta, ReplicaRecord, Resume, SessionCheckpoint
from kvsp.records.sharding import ReshardAbort, ReshardCommit, ReshardFetch
from tests.kvsp.holder.support import Clock, MemoryIndex
from tests.kvsp.inside import look_up_with
from tests.kvsp.instance.support import (
    BASE,
    ENGINE,
    HOLDER,
    PROMPT,
    SESSION,
    TOP_P,
    block_id,
    checkpoint,
    computed,
    directive,
    keys,
    make_instance,
    plan,
    running,
    start_request,
    text,
    until,
)

OTHER = "00000000-0000-4000-8000-000000000000"


def found(*places, holder=HOLDER):
    """What the index would say: these leading blocks at a holder."""
    return [
        [
            ReplicaRecord(
                block_key=keys()[place],
                compat_id=block_id(keys()[place]).compat_id,
                scope_id=block_id(keys()[place]).scope_id,
                holder=holder,
                codec=1,
                size=1,
                digest=bytes(32),
                ttl_ms=1,
            )
        ]
        for place in places
    ]


async def finished(instance, made):
    await until(lambda: status(instance, made).state is not DirectiveState.PENDING)
    return status(instance, made)


def status(instance, made):
    return instance.shell.prefetcher.status(made.directive)


# --- prefetch ------------------------------------------------------------------------


async def test_a_directive_loads_blocks_in_its_order_and_makes_them_replicas():
    async with running() as instance:
        made = directive(keys())
        await instance.shell.prefetcher.accept(made)
        await instance.shell.prefetcher.accept(made)
        answer = await finished(instance, made)
        assert (answer.state, answer.loaded, answer.failed) == (
            DirectiveState.COMPLETE,
            tuple(keys()),
            (),
        )
        assert instance.source.asked == keys()
        for key, block in computed().items():
            held = instance.agent.pool.get(block_id(key))
            assert held.sections() == block.sections()
            assert instance.holder.record(block_id(key), 1000).holder == BASE


async def test_each_block_that_fails_has_its_own_reason_and_the_rest_goes_on():
    async with running() as instance:
        instance.source.reasons = {keys()[0]: "kvsp-lease-quota"}
        made = directive([keys()[0], bytes(32), keys()[2]])
        await instance.shell.prefetcher.accept(made)
        answer = await finished(instance, made)
        assert (answer.state, answer.loaded) == (DirectiveState.PARTIAL, (keys()[2],))
        assert [failed.reason for failed in answer.failed] == [
            "kvsp-lease-quota",
            "kvsp-unknown-resource",
        ]
        assert instance.agent.pool.reserved == 0


async def test_when_memory_is_too_small_the_status_is_partial_for_capacity():
    async with running(pool_blocks=2) as instance:
        made = directive(keys())
        await instance.shell.prefetcher.accept(made)
        answer = await finished(instance, made)
        assert (answer.state, answer.loaded) == (DirectiveState.PARTIAL, tuple(keys()[:2]))
        assert [failed.reason for failed in answer.failed] == ["capacity"]


async def test_at_the_deadline_loading_stops_and_gives_its_memory_back():
    async with running() as instance:
        instance.source.hanging = {keys()[1]}
        made = directive(keys(), deadline_ms=300)
        await instance.shell.prefetcher.accept(made)
        answer = await finished(instance, made)
        # the one that hangs holds up no other
        assert (answer.state, answer.loaded) == (DirectiveState.PARTIAL, (keys()[0], keys()[2]))
        assert [(each.block_key, each.reason) for each in answer.failed] == [(keys()[1], "timeout")]
        assert instance.agent.pool.reserved == 0
        assert block_id(keys()[1]) not in instance.agent.pool


async def test_a_directive_where_nothing_came_has_failed_and_lists_nothing_as_loaded():
    async with running() as instance:
        instance.source.blocks = {}
        made = directive(keys())
        await instance.shell.prefetcher.accept(made)
        answer = await finished(instance, made)
        assert (answer.state, answer.loaded, len(answer.failed)) == (DirectiveState.FAILED, (), 3)


async def test_a_cancelled_directive_is_forgotten_and_loads_no_more():
    async with running() as instance:
        instance.source.hanging = {keys()[0]}
        made = directive(keys())
        await instance.shell.prefetcher.accept(made)
        await until(lambda: instance.source.asked)
        await instance.shell.prefetcher.cancel(made.directive)
        with pytest.raises(Problem):
            status(instance, made)
        await until(lambda: instance.agent.pool.reserved == 0)
        asked = len(instance.source.asked)
        await asyncio.sleep(0.02)
        assert len(instance.source.asked) == asked <= len(keys())


async def test_a_store_that_is_full_costs_the_replica_and_is_counted():
    async with running(store_octets=1) as instance:
        made = directive(keys())
        await instance.shell.prefetcher.accept(made)
        assert (await finished(instance, made)).state is DirectiveState.COMPLETE
        assert instance.shell.loader.counters["stores_rejected"] == 3


async def test_a_source_that_did_not_answer_is_asked_after_the_others_for_a_while():
    clock = Clock()

    class Sources:
        def __init__(self):
            self.asked = []
            self.dead = {"https://dead.example/kvsp/"}

        def takes(self, source):
            return True

        async def fetch(self, source, block, descriptor, lease_ms, write):
            self.asked.append(source)
            if source in self.dead:
                raise LoadError(UNREACHABLE)
            for layer, (k, v) in enumerate(computed()[block.block_key].sections()):
                write(layer, k, v)

    instance, sources = make_instance(), Sources()
    loader = BlockLoader(
        ENGINE.descriptor,
        instance.agent.pool,
        instance.holder,
        [sources],
        base_uri=BASE,
        client=instance.shell.client,
        clock=clock,
    )
    (dead,) = sources.dead

    async def load(place, *names):
        came = {}
        wanted = [Wanted(block_id(keys()[place]), names)]
        await loader.load(wanted, "a", came.__setitem__, publish=False)
        assert not isinstance(came[block_id(keys()[place])], LoadError)

    await load(0, dead, HOLDER)
    await load(1, dead, HOLDER)
    assert sources.asked == [dead, HOLDER, HOLDER]
    clock.now += 60
    await load(2, dead, HOLDER)
    assert sources.asked[3:] == [dead, HOLDER]
    # it is still asked where there is no other
    instance.agent.pool.unpin_all("a")
    instance.agent.pool.discard(block_id(keys()[0]))
    sources.dead.clear()
    await load(0, dead)
    assert sources.asked[5:] == [dead]


async def test_loading_that_hangs_holds_up_neither_other_loads_nor_generation():
    async with running() as instance:
        instance.source.hanging = {keys()[0]}
        stuck = directive(keys()[:1])
        await instance.shell.prefetcher.accept(stuck)
        other = directive(keys()[1:])
        await instance.shell.prefetcher.accept(other)
        instance.shell.sessions.start_session(SESSION, start_request())
        assert await instance.tokens() == text(8)
        assert (await finished(instance, other)).state is DirectiveState.COMPLETE
        assert status(instance, stuck).state is DirectiveState.PENDING


# --- sessions ------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [start_request().sampler, TOP_P])
async def test_a_session_gives_the_text_of_its_engine_and_ends_at_the_controller(sampler):
    async with running() as instance:
        assert instance.shell.sessions.start_session(SESSION, start_request(20, sampler))
        assert not instance.shell.sessions.start_session(SESSION, start_request(20, sampler))
        assert await instance.tokens() == text(20, sampler)
        await until(lambda: instance.placement.ended == [SESSION])
        assert instance.placement.recorded[SESSION] == tuple(text(20, sampler))
        # a front end that lost its connection reads again
        assert await instance.tokens(start=15) == text(20, sampler)[15:]
        # K and V of the last token were never computed
        stored = keys([*PROMPT, *text(20, sampler)[:-1]])
        await until(lambda: len(instance.holder.store) == len(stored))
        assert {block.block_key for block in instance.holder.store.blocks()} == set(stored)


class Watched(ToyEngine):
    """Notes the threads that use its contexts, which are whole between two calls only."""

    def __init__(self):
        super().__init__()
        self.threads = set()

    def context(self):
        return Spy(super().context(), self.threads)


class Spy:
    def __init__(self, context, threads):
        self._context, self._threads = context, threads

    def __getattr__(self, name):
        if name != "tokens":
            return lambda *given: self._noted(getattr(self._context, name), *given)
        return self._noted(lambda: self._context.tokens)

    def _noted(self, function, *given):
        self._threads.add(threading.current_thread().name)
        return function(*given)


async def test_a_context_is_used_by_the_engines_thread_alone():
    engine = Watched()
    async with running(engine=engine) as instance:
        knows(instance, 0, 1)
        instance.shell.sessions.start_session(SESSION, start_request(20, TOP_P))
        assert await instance.tokens() == text(20, TOP_P)
        stored = keys([*PROMPT, *text(20, TOP_P)[:-1]])
        await until(lambda: len(instance.holder.store) == len(stored))
        assert {name.rpartition("_")[0] for name in engine.threads} == {"kvsp-engine"}


async def test_a_token_is_not_released_before_an_acknowledged_checkpoint_covers_it():
    async with running() as instance:
        instance.placement.acknowledging.clear()
        instance.shell.sessions.start_session(SESSION, start_request(200, TOP_P))
        serving = instance.agent.sessions.get(SESSION)
        await until(lambda: serving.gate.full and instance.placement.checkpoints)
        assert (serving.released, len(serving.generated)) == (0, 64)
        instance.placement.acknowledging.set()
        async with contextlib.aclosing(instance.shell.sessions.tokens(SESSION, 0, 30)) as tokens:
            async for token in tokens:
                covered = max(sent.output_offset for sent in instance.placement.checkpoints)
                assert token.index < covered
        assert serving.generated == text(200, TOP_P)


async def test_a_greedy_token_is_released_although_no_checkpoint_was_acknowledged():
    async with running() as instance:
        instance.placement.acknowledging.clear()
        instance.shell.sessions.start_session(SESSION, start_request(8))
        tokens = instance.shell.sessions.tokens(SESSION, 0, 30)
        async with contextlib.aclosing(tokens) as arriving:
            got = [await anext(arriving) for _ in range(8)]
        assert [token.token for token in got] == text(8)
        instance.placement.acknowledging.set()


async def test_a_session_whose_acknowledgement_hangs_does_not_stop_another():
    async with running() as instance:
        instance.placement.acknowledging.clear()
        instance.shell.sessions.start_session(SESSION, start_request(500, TOP_P))
        stuck = instance.agent.sessions.get(SESSION)
        await until(lambda: stuck.gate.full)
        instance.shell.sessions.start_session(OTHER, start_request(8))
        other = instance.agent.sessions.get(OTHER)
        await until(lambda: other.released == 8)
        assert stuck.released == 0
        instance.placement.acknowledging.set()


@pytest.mark.parametrize(
    "name", [ProblemName.STALE_EPOCH, ProblemName.UNKNOWN_EPOCH, ProblemName.UNKNOWN_RESOURCE]
)
async def test_a_session_that_another_instance_has_is_dropped_at_once(name):
    async with running() as instance:
        await until(lambda: instance.placement.statuses)
        instance.placement.refusals.append(PlacementRefusedError(name, 409, "", 2))
        instance.shell.sessions.start_session(SESSION, start_request(400, TOP_P))
        serving = instance.agent.sessions.get(SESSION)
        assert await instance.tokens() == []
        assert serving.state is ServingState.DROPPED
        with pytest.raises(Problem):
            instance.agent.sessions.get(SESSION)


async def test_checkpoints_go_on_when_the_controller_was_away():
    async with running() as instance:
        instance.placement.away = True
        instance.shell.sessions.start_session(SESSION, start_request(8, TOP_P))
        await until(lambda: len(instance.placement.checkpoints) >= 2)
        instance.placement.away = False
        assert await instance.tokens() == text(8, TOP_P)


async def test_after_the_first_checkpoint_only_what_is_new_is_sent():
    async with running() as instance:
        instance.shell.sessions.start_session(SESSION, start_request(200, TOP_P))
        assert await instance.tokens() == text(200, TOP_P)
        first, *others = instance.placement.checkpoints
        assert isinstance(first, SessionCheckpoint)
        assert others and all(isinstance(each, CheckpointDelta) for each in others)
        assert max(len(each.generated) for each in others) <= 64
        assert instance.placement.recorded[SESSION] == tuple(text(200, TOP_P))


async def test_a_controller_that_lost_what_it_acknowledged_gets_a_whole_checkpoint_again():
    async with running() as instance:
        instance.shell.sessions.start_session(SESSION, start_request(200, TOP_P))
        await until(lambda: instance.placement.recorded)
        instance.placement.recorded.clear()
        conflict = PlacementRefusedError(ProblemName.CHECKPOINT_CONFLICT, 409, "")
        instance.placement.refusals.append(conflict)
        assert await instance.tokens() == text(200, TOP_P)
        assert sum(isinstance(e, SessionCheckpoint) for e in instance.placement.checkpoints) == 2
        assert instance.placement.recorded[SESSION] == tuple(text(200, TOP_P))


async def test_a_controller_that_knows_no_more_than_kvsp_gets_whole_checkpoints():
    async with running() as instance:
        instance.placement.whole_only = True
        instance.shell.sessions.start_session(SESSION, start_request(200, TOP_P))
        assert await instance.tokens() == text(200, TOP_P)
        sent = [isinstance(each, CheckpointDelta) for each in instance.placement.checkpoints]
        assert sent[1] and not any(sent[2:])


async def test_an_index_that_restarted_empty_gets_the_instances_own_records_back():
    index, clock = MemoryIndex(descriptors=[]), Clock()
    publisher = RecordPublisher(index, clock=clock)
    async with running(records=publisher) as instance:
        HolderService(instance.holder, publisher, Descriptors([ENGINE.descriptor]))
        instance.shell.sessions.start_session(SESSION, start_request())
        await instance.tokens()
        stored = [*PROMPT, *text(8)[:-1]]
        await until(lambda: len(instance.holder.store) == len(keys(stored)))
        await publisher.step()
        assert all(index.lists(block_id(key)) for key in keys(stored))
        index.restart_empty()
        clock.now += 300
        await publisher.step()
        assert all(index.lists(block_id(key)) for key in keys(stored))
        assert index.descriptors[0] == ENGINE.descriptor


async def test_a_reader_that_stops_reading_holds_up_neither_its_session_nor_another():
    async with running() as instance:
        for name in (SESSION, OTHER):
            instance.shell.sessions.start_session(name, start_request(100, TOP_P))
        stuck = instance.shell.sessions.tokens(SESSION, 0, 30)
        async with contextlib.aclosing(stuck):
            await anext(stuck)
            for name in (SESSION, OTHER):
                assert await instance.tokens(name) == text(100, TOP_P)
            assert instance.agent.sessions.get(SESSION).settled


async def test_output_can_be_ended_by_the_front_end():
    async with running() as instance:
        instance.shell.sessions.start_session(SESSION, start_request(100_000))
        serving = instance.agent.sessions.get(SESSION)
        await until(lambda: len(serving.generated) > 5)
        instance.shell.sessions.end_output(SESSION)
        got = await instance.tokens()
        assert got == text(len(got))
        assert serving.state is ServingState.FINISHED


# --- resume --------------------------------------------------------------------------


def knows(instance, *places):
    """Have the index of an instance know some leading blocks."""

    async def lookup(blocks):
        return found(*places)

    look_up_with(instance.shell.sessions, lookup)


async def test_a_resumed_session_goes_on_from_the_published_blocks_without_the_prompt():
    async with running() as instance:
        knows(instance, 0, 1, 2)
        resume = Resume(2, checkpoint(5, count=20))
        answer = await instance.shell.sessions.resume_session(resume)
        assert (answer.epoch, answer.output_offset) == (2, 5)
        assert await instance.tokens() == text(20)
        assert instance.source.asked == keys()
        # readiness is a checkpoint under the new epoch
        assert instance.placement.checkpoints[0].epoch == 2
        assert instance.placement.checkpoints[0].output_offset >= 5
        assert {each.epoch for each in instance.placement.checkpoints} == {2}


async def test_a_resume_is_answered_before_anything_is_loaded():
    async with running() as instance:
        knows(instance, 0, 1, 2)
        instance.source.hanging = {keys()[0]}
        resume = Resume(2, checkpoint(5))
        first = await instance.shell.sessions.resume_session(resume)
        assert await instance.shell.sessions.resume_session(resume) == first
        assert instance.agent.sessions.get(SESSION).state is ServingState.LOADING
        assert instance.placement.checkpoints == []


async def test_prompt_blocks_that_nobody_has_make_a_resume_fail_by_name():
    async with running() as instance:
        knows(instance, 0)
        with pytest.raises(Problem) as caught:
            await instance.shell.sessions.resume_session(Resume(2, checkpoint(5)))
        assert caught.value.name is ProblemName.CACHE_MISS
        assert caught.value.members["block_keys"] == [key.hex() for key in keys()[1:]]
        assert instance.agent.sessions.find(SESSION) is None


async def test_with_the_prompt_in_the_checkpoint_a_lost_block_is_computed_again():
    async with running() as instance:
        knows(instance, 0)
        resume = Resume(2, checkpoint(5, count=12, prompt_tokens=PROMPT))
        await instance.shell.sessions.resume_session(resume)
        assert await instance.tokens() == text(12)


async def test_a_block_that_turns_out_to_be_lost_breaks_the_session_and_not_the_instance():
    async with running() as instance:
        knows(instance, 0, 1, 2)
        instance.source.blocks.pop(keys()[1])
        await instance.shell.sessions.resume_session(Resume(2, checkpoint(5)))
        serving = instance.agent.sessions.get(SESSION)
        # tokens the checkpoint covers are shown all the same
        assert await instance.tokens() == text(5)
        await until(lambda: serving.state is ServingState.BROKEN)
        instance.shell.sessions.start_session(OTHER, start_request(4))
        assert await instance.tokens(OTHER) == text(4)


# --- status --------------------------------------------------------------------------


async def test_a_failed_instance_drops_its_sessions_and_reports_under_a_higher_epoch():
    async with running(status_ttl_ms=300) as instance:
        await until(lambda: instance.placement.statuses)
        instance.shell.sessions.start_session(SESSION, start_request(100_000))
        serving = instance.agent.sessions.get(SESSION)
        await until(lambda: len(instance.placement.checkpoints) > 1)
        failed = PlacementRefusedError(ProblemName.INSTANCE_FAILED, 409, "", 7)
        real, taken = instance.placement.report, []

        async def report(status):
            taken.append(status.epoch)
            if len(taken) == 1:
                raise failed
            return await real(status)

        instance.placement.report = report
        instance.shell.reporter.hurry()
        await until(lambda: len(taken) >= 2)
        assert taken[0] == 7
        assert taken[1] > 7
        assert serving.state is ServingState.DROPPED


async def test_a_status_is_sent_at_an_interval_of_at_most_a_third_of_its_ttl(monkeypatch):
    waits = []

    def at_once(seconds):
        waits.append(seconds)
        return asyncio.timeout(0)

    clock = SimpleNamespace(Event=asyncio.Event, to_thread=asyncio.to_thread, timeout=at_once)
    monkeypatch.setattr("kvsp.instance.reporting.asyncio", clock)
    async with running(status_ttl_ms=3000) as instance:
        await until(lambda: len(instance.placement.statuses) > 3)
        assert instance.placement.statuses[0].ttl_ms == 3000
    assert waits and max(waits) <= 1.0


async def test_the_answer_to_a_status_is_obeyed_and_reported():
    async with running() as instance:
        instance.placement.wanted = InstanceState.DRAINING
        await until(
            lambda: (
                instance.placement.statuses
                and instance.placement.statuses[-1].state is InstanceState.SLEEPING
            )
        )


# --- resharding ----------------------------------------------------------------------


async def with_own(instance, count):
    made = directive(keys()[:count])
    await instance.shell.prefetcher.accept(made)
    await finished(instance, made)
    instance.source.asked.clear()


async def test_retained_ranges_are_the_very_objects_before_and_after_and_never_fetched():
    async with running() as instance:
        await with_own(instance, 1)
        own = instance.agent.pool.get(block_id(keys()[0]))
        steps = plan(release=())
        answer = await instance.shell.resharder.handle(steps)
        assert answer.state == "prepared"
        assert instance.source.asked == [keys()[1]]
        assert instance.agent.pool.get(block_id(keys()[0])) is own
        await instance.shell.resharder.handle(ReshardCommit("m", 2))
        assert instance.agent.pool.get(block_id(keys()[0])) is own
        assert own.arrays[0][0] is instance.agent.pool.get(block_id(keys()[0])).arrays[0][0]


async def test_what_is_released_stays_until_the_commit_and_goes_then():
    async with running() as instance:
        await with_own(instance, 3)
        leaving = block_id(keys()[2])
        await instance.shell.resharder.handle(plan(fetch=()))
        for _ in range(100):  # whatever was begun meanwhile has its turns
            await asyncio.sleep(0)
        assert leaving in instance.agent.pool
        assert not instance.agent.pool.discard(leaving)
        await instance.shell.resharder.handle(ReshardCommit("m", 2))
        await until(lambda: leaving not in instance.agent.pool)
        await until(lambda: leaving not in instance.holder.store)
        assert block_id(keys()[0]) in instance.agent.pool


async def test_an_abort_discards_what_was_fetched_and_nothing_else():
    async with running() as instance:
        await with_own(instance, 1)
        await instance.shell.resharder.handle(plan(release=()))
        assert block_id(keys()[1]) in instance.agent.pool
        answer = await instance.shell.resharder.handle(ReshardAbort("m", 2))
        assert answer.state == "aborted"
        await until(lambda: block_id(keys()[1]) not in instance.agent.pool)
        assert block_id(keys()[0]) in instance.agent.pool


@pytest.mark.parametrize("own", [3, 2], ids=["abort", "fail"])
async def test_what_was_here_for_another_reason_is_let_go_of_when_a_plan_is_not_carried_out(own):
    """It stays in memory, and may make room for others again."""
    async with running() as instance:
        await with_own(instance, own)
        instance.source.hanging = {keys()[2]}
        fetch = (ReshardFetch(range(4, 12), HOLDER),)
        steps = replace(plan(release=()), fetch=fetch, deadline_ms=100)
        with contextlib.suppress(Problem):
            await instance.shell.resharder.handle(steps)
            assert not instance.agent.pool.discard(block_id(keys()[1]))
        await instance.shell.resharder.handle(ReshardAbort("m", 2))
        assert block_id(keys()[1]) in instance.agent.pool
        assert instance.agent.pool.discard(block_id(keys()[1]))
        assert not instance.agent.pool.discard(block_id(keys()[0]))


@pytest.mark.parametrize("fault", ["missing", "deadline"])
async def test_a_plan_that_cannot_be_loaded_fails_and_keeps_the_version(fault):
    async with running() as instance:
        await with_own(instance, 1)
        if fault == "missing":
            instance.source.blocks.pop(keys()[2])
        else:
            instance.source.hanging = {keys()[2]}
        fetch = (ReshardFetch(range(4, 12), HOLDER),)
        steps = replace(plan(release=()), fetch=fetch, deadline_ms=100)
        with pytest.raises(Problem) as caught:
            await instance.shell.resharder.handle(steps)
        assert caught.value.name is ProblemName.RESHARD_FAILED
        assert caught.value.members == {"tokens": [4, 12]}
        member = instance.agent.shards.get("m")
        assert (member.version, member.state) == (1, MemberState.STABLE)
        # the block that had come is discarded as well
        await until(lambda: len(instance.agent.pool) == 1)
        assert instance.agent.pool.reserved == 0
        answer = await instance.shell.resharder.handle(ReshardAbort("m", 2))
        assert answer.state == "aborted"


async def test_a_plan_is_acknowledged_when_everything_is_loaded_and_not_before():
    async with running() as instance:
        await with_own(instance, 1)
        gate, fetch, began = asyncio.Event(), instance.source.fetch, []

        async def late(*values):
            began.append(values)
            await gate.wait()
            await fetch(*values)

        instance.source.fetch = late
        steps = replace(plan(release=()), deadline_ms=60_000)
        loading = asyncio.create_task(instance.shell.resharder.handle(steps))
        await until(lambda: began)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not loading.done()
        gate.set()
        answer = await loading
        assert answer.state == "prepared"
        assert all(block_id(key) in instance.agent.pool for key in keys()[1:2])


async def test_an_abort_during_the_load_ends_it():
    async with running() as instance:
        await with_own(instance, 1)
        instance.source.hanging = {keys()[1]}
        loading = asyncio.create_task(
            instance.shell.resharder.handle(replace(plan(release=()), deadline_ms=200))
        )
        await until(lambda: instance.source.asked)
        await instance.shell.resharder.handle(ReshardAbort("m", 2))
        with pytest.raises(Problem):
            await loading
        assert instance.agent.shards.get("m").state is MemberState.STABLE
        assert len(instance.agent.pool) == 1


async def test_a_retained_range_that_is_not_here_is_not_acknowledged():
    async with running() as instance:
        with pytest.raises(Problem) as caught:
            await instance.shell.resharder.handle(plan(fetch=(), release=()))
        assert caught.value.name is ProblemName.RESHARD_FAILED


async def test_a_prepared_plan_is_settled_by_what_the_controller_has():
    async with running(status_ttl_ms=300) as instance:
        await with_own(instance, 1)
        await instance.shell.resharder.handle(replace(plan(release=()), deadline_ms=20))
        instance.placement.versions["m"] = 2
        member = instance.agent.shards.get("m")
        await until(lambda: member.version == 2)
        assert member.state is MemberState.STABLE


# --- cancellation --------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(0, 24, 2))
async def test_stopping_at_any_moment_leaves_no_task_and_no_reserved_memory(steps):
    async with running() as instance:
        knows(instance, 0, 1, 2)
        await instance.shell.prefetcher.accept(directive(keys()))
        resuming = asyncio.create_task(
            instance.shell.sessions.resume_session(Resume(2, checkpoint(5, count=50)))
        )
        for _ in range(steps):
            await asyncio.sleep(0)
        resuming.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await resuming
    assert instance.agent.pool.reserved == 0
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left
