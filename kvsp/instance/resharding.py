"""Carries reshard plans out (KVSP "Sequence-Sharded Caches and Resharding")."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvsp.instance.callers import PlacementCaller, PlacementRefusedError, PlacementUnavailableError
from kvsp.instance.core.agent import Agent
from kvsp.instance.core.directives import TIMEOUT
from kvsp.instance.core.moves import MemberState
from kvsp.instance.core.shards import Member, blocks_of, fetches
from kvsp.instance.engines.engine import KvBlock
from kvsp.instance.loading.fetchers import LoadError
from kvsp.instance.loading.loader import BlockLoader
from kvsp.instance.loading.sources import Wanted
from kvsp.instance.tasks import Tasks
from kvsp.names.codes import ReshardState
from kvsp.names.uris import BlockId
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.sharding import ReshardAbort, ReshardAnswer, ReshardCommit, ReshardPlan


class Resharder:
    """Loads for plans, and keeps, releases or discards as commits and aborts say."""

    def __init__(self, agent: Agent, loader: BlockLoader, clock_ms: Callable[[], int]) -> None:
        self._agent = agent
        self._loader = loader
        self._clock_ms = clock_ms
        self._tasks = Tasks()

    async def handle(self, request: ReshardPlan | ReshardCommit | ReshardAbort) -> ReshardAnswer:
        """Answer POST reshard.

        Raises Problem `kvsp-map-version`, `kvsp-reshard-failed`, `kvsp-incompatible`.
        """
        shards = self._agent.shards
        if isinstance(request, ReshardPlan):
            return await self._prepare(request)
        if isinstance(request, ReshardCommit):
            answer, released = shards.commit(request.map, request.commit)
            self._let_go(request.map, released)
            self._publish(request.map)
            return answer
        answer, discarded = shards.abort(request.map, request.abort)
        self._give_up(request.map, discarded)
        return answer

    async def _prepare(self, plan: ReshardPlan) -> ReshardAnswer:
        member = self._agent.accept_plan(plan, self._clock_ms())
        if member.state is MemberState.PREPARED:
            return member.answer(plan.to_version, ReshardState.PREPARED)
        done = False
        try:
            ends_ms = self._clock_ms() + plan.deadline_ms
            await self._keep(member, plan)
            await self._fetch(member, plan, (ends_ms - self._clock_ms()) / 1000)
            done = True
        finally:
            if not done and member.plan is plan:
                self._give_up(plan.map, self._agent.shards.failed(member))
        return self._agent.shards.loaded(member)

    async def _keep(self, member: Member, plan: ReshardPlan) -> None:
        """Hold on to what is retained and, for the others until the commit, released."""
        failures = await self._load(
            plan, [Wanted(block) for block in sorted(member.held)], plan.deadline_ms / 1000
        )
        for block in sorted(blocks_of(plan, plan.retain)):
            if block in failures:
                at = plan.fetch[0].tokens if plan.fetch else range(0)
                raise _failed(at, failures[block])

    async def _fetch(self, member: Member, plan: ReshardPlan, seconds: float) -> None:
        parts = fetches(plan)
        fresh = {part.block for part in parts if part.block not in self._agent.pool}

        def there(block: BlockId) -> None:
            if member.plan is plan:
                (member.fetched if block in fresh else member.borrowed).add(block)
            elif block in fresh:  # aborted meanwhile
                self._let_go(plan.map, {block} - _used(member))
            else:
                self._unpin(plan.map, {block} - _used(member))

        wanted = [Wanted(part.block, (part.source,)) for part in parts]
        failures = await self._load(plan, wanted, seconds, there)
        if member.plan is not plan:
            raise Problem(ProblemName.MAP_VERSION, "the plan was aborted", version=member.version)
        for part in parts:
            if part.block in failures:
                raise _failed(part.tokens, failures[part.block])

    async def _load(
        self,
        plan: ReshardPlan,
        wanted: Sequence[Wanted],
        seconds: float,
        there: Callable[[BlockId], None] = lambda block: None,
    ) -> dict[BlockId, LoadError]:
        """Load blocks for a plan; why those that are not there are not."""
        failures: dict[BlockId, LoadError] = {}

        def came(block: BlockId, outcome: KvBlock | LoadError) -> None:
            if isinstance(outcome, LoadError):
                failures[block] = outcome
            else:
                there(block)

        await self._loader.load(
            wanted,
            _owner(plan.map),
            came,
            seconds=seconds,
            lease_ms=plan.deadline_ms,
            publish=False,
        )
        return failures

    def _give_up(self, name: str, fetched: Iterable[BlockId]) -> None:
        """Version v stays: what came for v+1 goes, and what was here before is as it was."""
        member = self._agent.shards.get(name)
        borrowed, member.borrowed = member.borrowed - member.held, set()
        self._unpin(name, borrowed)
        self._let_go(name, fetched)

    def _unpin(self, name: str, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            self._agent.pool.unpin(block, _owner(name))

    def _let_go(self, name: str, blocks: Iterable[BlockId]) -> None:
        """Give the memory of blocks back now, and their replicas after the withdrawal."""
        gone = list(blocks)
        self._unpin(name, gone)
        if gone:
            self._tasks.start(self._forget(gone))

    async def _forget(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            await self._loader.forget(block)

    def _publish(self, name: str) -> None:
        self._tasks.start(self._store(sorted(self._agent.shards.get(name).held)))

    async def _store(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            if (held := self._agent.pool.get(block)) is not None:
                await self._loader.store(block, held)

    async def settle(self, placement: PlacementCaller) -> None:
        """Ask what became of plans that neither a commit nor an abort followed."""
        for name in self._agent.shards.unsettled(self._clock_ms()):
            try:
                version = await placement.map_version(name)
            except (PlacementRefusedError, PlacementUnavailableError):
                continue
            self._give_up(name, self._agent.shards.settle(name, version))

    async def stop(self) -> None:
        await self._tasks.stop()


def _owner(name: str) -> str:
    return f"map {name}"


def _used(member: Member) -> set[BlockId]:
    return member.held | member.fetched | member.borrowed


def _failed(tokens: range, error: LoadError) -> Problem:
    why = "the deadline has passed" if error.reason == TIMEOUT else str(error)
    return Problem(
        ProblemName.RESHARD_FAILED,
        f"tokens {tokens.start} to {tokens.stop} could not be loaded ({why}); the member keeps "
        "its version",
        tokens=[tokens.start, tokens.stop],
    )
