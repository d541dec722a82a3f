"""A member's part in Shard Maps (KVSP "Sequence-Sharded Caches and Resharding"; sans-IO).

Version v is authoritative until the commit. What is retained is not touched: its blocks
stay the very objects they are. What is released goes only after the commit, and an abort
gives back what was fetched for v+1 and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvsp.instance.core.limits import InstanceLimits
from kvsp.instance.core.moves import MEMBER_MOVES, MemberEvent, MemberState
from kvsp.names.codes import ReshardState
from kvsp.names.prefix import blocks_within
from kvsp.names.uris import BlockId
from kvsp.records.moves import move
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.sharding import ReshardAnswer, ReshardPlan


class ShardFetch(NamedTuple):
    """A block to be loaded, from which member; an empty source stands for this instance."""

    block: BlockId
    source: str
    tokens: range


@dataclass(slots=True)
class Member:
    """One map at this instance. `held` are the blocks of version `version`."""

    map: str
    version: int
    state: MemberState = MemberState.STABLE
    plan: ReshardPlan | None = None
    ends_ms: int = 0
    held: set[BlockId] = field(default_factory=set)
    fetched: set[BlockId] = field(default_factory=set)
    """Blocks that came for the plan and were not here before."""

    borrowed: set[BlockId] = field(default_factory=set)
    """Blocks of the plan that were here before, for another reason."""
    answers: dict[int, ReshardState] = field(default_factory=dict)
    """What the last steps ended in, by version, for repeats."""

    def answer(self, version: int, state: ReshardState) -> ReshardAnswer:
        return ReshardAnswer(self.map, version, state)


class ShardTable:
    """Every map this instance is, or was asked to become, a member of."""

    def __init__(self, limits: InstanceLimits) -> None:
        self._limits = limits
        self._all: dict[str, Member] = {}
        self.counters: Counter[str] = Counter()
        """`prepared`, `committed`, `aborted`, `failed`."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._all.values())

    def get(self, name: str) -> Member:
        """Raises Problem `kvsp-unknown-resource`."""
        member = self._all.get(name)
        if member is None:
            raise Problem(ProblemName.UNKNOWN_RESOURCE, "this instance is no member of the map")
        return member

    def plan(self, plan: ReshardPlan, now_ms: int) -> Member:
        """Take a plan: LOADING when its blocks are to be loaded now, PREPARED for a repeat.

        Of a map that is not known here, `from` is believed. Raises Problem
        `kvsp-map-version`, 503 when the table is full or the plan is being loaded already.
        """
        member = self._all.get(plan.map)
        if member is None:
            if len(self._all) >= self._limits.maps:
                raise Problem.http(503, "as many maps as may be are known here", retry_after=10)
            member = self._all[plan.map] = Member(plan.map, plan.from_version)
        if member.plan is not None and member.plan == plan:
            if member.state is MemberState.LOADING:
                raise Problem.http(503, "the plan is being loaded", retry_after=1)
            return member
        if plan.from_version != member.version or member.state is not MemberState.STABLE:
            raise _version(member, "the plan does not follow it")
        member.state = move(MEMBER_MOVES, member.state, MemberEvent.PLAN)
        member.plan, member.ends_ms = plan, now_ms + plan.deadline_ms
        # both are version v's: others may fetch what is released after the commit
        member.held |= blocks_of(plan, plan.retain) | blocks_of(plan, plan.release)
        member.fetched, member.borrowed = set(), set()
        return member

    def loaded(self, member: Member) -> ReshardAnswer:
        """Everything of the plan is there."""
        assert member.plan is not None
        member.state = move(MEMBER_MOVES, member.state, MemberEvent.LOADED)
        self.counters["prepared"] += 1
        return member.answer(member.plan.to_version, ReshardState.PREPARED)

    def failed(self, member: Member) -> set[BlockId]:
        """The plan cannot be loaded: version v stays. What is to be discarded."""
        if member.state is not MemberState.LOADING:
            return set()
        member.state = move(MEMBER_MOVES, member.state, MemberEvent.FAIL)
        self.counters["failed"] += 1
        return self._discard(member)

    def commit(self, name: str, version: int) -> tuple[ReshardAnswer, set[BlockId]]:
        """Version `version` is authoritative: the answer, and the blocks to be released.

        Raises Problem `kvsp-map-version` unless it was prepared, or committed already.
        """
        member = self._known(name, version)
        if member.answers.get(version) is ReshardState.COMMITTED:
            return member.answer(version, ReshardState.COMMITTED), set()
        if member.state is not MemberState.PREPARED or _target(member) != version:
            raise _version(member, "no such version was prepared")
        plan = member.plan
        assert plan is not None
        member.state = move(MEMBER_MOVES, member.state, MemberEvent.COMMIT)
        kept = blocks_of(plan, (*plan.retain, *(part.tokens for part in plan.fetch)))
        released = member.held - kept
        member.held, member.fetched, member.borrowed = kept, set(), set()
        member.version, member.plan = version, None
        member.answers = {version: ReshardState.COMMITTED}
        self.counters["committed"] += 1
        return member.answer(version, ReshardState.COMMITTED), released

    def abort(self, name: str, version: int) -> tuple[ReshardAnswer, set[BlockId]]:
        """Version `version` will not be: the answer, and the blocks to be discarded.

        Raises Problem `kvsp-map-version` unless it was planned or aborted.
        """
        member = self._known(name, version)
        if member.state is MemberState.STABLE or _target(member) != version:
            if member.answers.get(version) is ReshardState.ABORTED:
                return member.answer(version, ReshardState.ABORTED), set()
            raise _version(member, "no such version was planned")
        member.state = move(MEMBER_MOVES, member.state, MemberEvent.ABORT)
        self.counters["aborted"] += 1
        discarded = self._discard(member)
        member.answers[version] = ReshardState.ABORTED
        return member.answer(version, ReshardState.ABORTED), discarded

    def settle(self, name: str, version: int | None) -> set[BlockId]:
        """What the placement controller says is authoritative, None for an unknown map:
        a member that prepared and heard nothing commits or aborts. The blocks to let go."""
        member = self._all.get(name)
        if member is None or member.state is not MemberState.PREPARED:
            return set()
        target = _target(member)
        return (self.commit if version == target else self.abort)(name, target)[1]

    def unsettled(self, now_ms: int) -> list[str]:
        """The maps whose plan's deadline is over and that heard neither commit nor abort."""
        return [
            member.map
            for member in self._all.values()
            if member.state is MemberState.PREPARED and member.ends_ms < now_ms
        ]

    def _discard(self, member: Member) -> set[BlockId]:
        plan = member.plan
        assert plan is not None
        # a plan that failed by itself is still aborted by the controller
        member.answers[plan.to_version] = ReshardState.ABORTED
        discarded, member.fetched = member.fetched - member.held, set()
        member.plan = None
        return discarded

    def _known(self, name: str, version: int) -> Member:
        member = self._all.get(name)
        if member is None:
            raise Problem(
                ProblemName.MAP_VERSION,
                f"this instance knows no plan for version {version} of the map",
                version=0,
            )
        return member


def fetches(plan: ReshardPlan) -> list[ShardFetch]:
    """The complete blocks of a plan that are to be loaded, in token order.

    Tokens after the last complete block are no block's; their owner computes them.
    """
    return [
        ShardFetch(_block(plan, index), part.source, part.tokens)
        for part in plan.fetch
        for index in _indexes(plan, part.tokens)
    ]


def blocks_of(plan: ReshardPlan, ranges: Iterable[range]) -> set[BlockId]:
    """The complete blocks within token ranges of a plan."""
    return {_block(plan, index) for tokens in ranges for index in _indexes(plan, tokens)}


def _indexes(plan: ReshardPlan, tokens: range) -> range:
    within = blocks_within(tokens, plan.block_tokens)
    return range(min(within.start, len(plan.block_keys)), min(within.stop, len(plan.block_keys)))


def _block(plan: ReshardPlan, index: int) -> BlockId:
    return BlockId(plan.compat_id, plan.scope_id, plan.block_keys[index])


def _target(member: Member) -> int:
    return -1 if member.plan is None else member.plan.to_version


def _version(member: Member, why: str) -> Problem:
    return Problem(
        ProblemName.MAP_VERSION,
        f"the map is at version {member.version} here and {why}",
        version=member.version,
    )
