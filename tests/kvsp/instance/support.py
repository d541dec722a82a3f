"""An instance with a toy engine, whose placement controller and holders are in memory."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvsp.client.client import Client
from kvsp.holder.holder import Holder, HolderSettings, Records
from kvsp.holder.records.index import NoIndex
from kvsp.holder.tiers.tiers import MemoryTier
from kvsp.instance.callers import PlacementRefusedError, PlacementUnavailableError
from kvsp.instance.core.agent import Agent
from kvsp.instance.core.limits import InstanceLimits
from kvsp.instance.core.sessions import StartSession
from kvsp.instance.engines.engine import Engine, KvBlock
from kvsp.instance.engines.samplers import SamplerState
from kvsp.instance.engines.toy import ToyEngine
from kvsp.instance.epochs import Epochs
from kvsp.instance.loading.fetchers import LoadError, WriteLayer
from kvsp.instance.shell import InstanceShell
from kvsp.names.codes import InstanceState
from kvsp.names.identity import Descriptor, Scope, block_keys
from kvsp.names.uris import BlockId
from kvsp.records.problems import ProblemName
from kvsp.records.records import (
    CheckpointDelta,
    DirectiveBlock,
    InstanceStatus,
    PrefetchDirective,
    Sampler,
    SessionCheckpoint,
    SessionProgress,
)
from kvsp.records.sharding import ReshardFetch, ReshardPlan
from tests.kvsp.inside import ask_with

BASE = "https://ii1.example/kvsp/"
HOLDER = "https://h1.example/kvsp/"
SCOPE = Scope(bytes(range(32)))
ENGINE = ToyEngine()
SIZE = ENGINE.descriptor.block_tokens
OCTETS = 2 * ENGINE.descriptor.layers * ENGINE.descriptor.section_octets()
SESSION = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"
GREEDY = Sampler("greedy", {}, 0, 0, True)
TOP_P = Sampler("top-p", {"p": 0.9}, 7, 0, False)
PROMPT = tuple((13 * number + 1) % 256 for number in range(14))


def block_id(key: bytes) -> BlockId:
    return BlockId(ENGINE.descriptor.compat_id, SCOPE.scope_id, key)


def keys(tokens: Sequence[int] = PROMPT) -> list[bytes]:
    return block_keys(SCOPE, ENGINE.descriptor, tokens)


def computed(tokens: Sequence[int] = PROMPT) -> dict[bytes, KvBlock]:
    """The blocks of a prompt."""
    context = ENGINE.context()
    context.prefill(tokens)
    return {key: context.block(place) for place, key in enumerate(keys(tokens))}


def text(count: int, sampler: Sampler = GREEDY, prompt: Sequence[int] = PROMPT) -> list[int]:
    """What an undisturbed run gives."""
    context, state = ENGINE.context(), SamplerState.of(sampler)
    context.prefill(prompt)
    made: list[int] = []
    for _ in range(count):
        made.append(context.next_token(state))
        context.prefill(made[-1:])
    return made


def start_request(
    count: int = 8, sampler: Sampler = GREEDY, prompt: Sequence[int] = PROMPT, epoch: int = 1
) -> StartSession:
    descriptor = ENGINE.descriptor
    return StartSession(descriptor.compat_id, SCOPE.scope_id, tuple(prompt), count, sampler, epoch)


def checkpoint(offset: int, *, epoch: int = 1, count: int = 8, **changes: Any) -> SessionCheckpoint:
    """A session of PROMPT after `offset` greedy tokens, as its first instance left it."""
    complete = len(PROMPT) // SIZE
    members: dict[str, Any] = {
        "session": SESSION,
        "epoch": epoch,
        "compat_id": ENGINE.descriptor.compat_id,
        "scope_id": SCOPE.scope_id,
        "prompt_blocks": tuple(keys()[:complete]),
        "prompt_tail": PROMPT[complete * SIZE :],
        "generated": tuple(text(offset)),
        "output_offset": offset,
        "sampler": Sampler("greedy", {}, 0, offset, True),
        "max_tokens": count,
    }
    return SessionCheckpoint(**{**members, **changes})


def directive(wanted: Sequence[bytes], *, deadline_ms: int = 60_000) -> PrefetchDirective:
    return PrefetchDirective(
        directive=str(uuid.uuid4()),
        scope_id=SCOPE.scope_id,
        compat_id=ENGINE.descriptor.compat_id,
        blocks=tuple(DirectiveBlock(key, (HOLDER,)) for key in wanted),
        deadline_ms=deadline_ms,
        lease_ms=1000,
    )


class Placement:
    """A placement controller that answers what a test wants, and remembers."""

    def __init__(self) -> None:
        self.statuses: list[InstanceStatus] = []
        self.checkpoints: list[SessionCheckpoint | CheckpointDelta] = []
        self.recorded: dict[str, tuple[int, ...]] = {}
        """The output tokens of each session, as checkpoints told them."""

        self.whole_only = False
        self.ended: list[str] = []
        self.wanted = InstanceState.ACTIVE
        self.refusals: list[PlacementRefusedError] = []
        self.away = False
        self.acknowledging = asyncio.Event()
        self.acknowledging.set()
        self.versions: dict[str, int | None] = {}

    async def report(self, status: InstanceStatus) -> InstanceState:
        if self.away:
            raise PlacementUnavailableError("away")
        self.statuses.append(status)
        if self.refusals:
            raise self.refusals.pop()
        return self.wanted

    async def checkpoint(self, checkpoint: SessionCheckpoint | CheckpointDelta) -> SessionProgress:
        self.checkpoints.append(checkpoint)
        await self.acknowledging.wait()
        if self.refusals:
            raise self.refusals.pop()
        if self.away:
            raise PlacementUnavailableError("away")
        if isinstance(checkpoint, CheckpointDelta):
            if self.whole_only:
                raise PlacementRefusedError(None, 405, "PUT only")
            before = self.recorded[checkpoint.session]
            assert checkpoint.after <= len(before)
            self.recorded[checkpoint.session] = before[: checkpoint.after] + checkpoint.generated
        else:
            self.recorded[checkpoint.session] = checkpoint.generated
        return SessionProgress(checkpoint.session, checkpoint.epoch, checkpoint.output_offset)

    async def end_session(self, session: str) -> None:
        self.ended.append(session)

    async def map_version(self, name: str) -> int | None:
        return self.versions.get(name)

    async def close(self) -> None: ...


@dataclass
class Source:
    """A holder of blocks, reached without a network."""

    blocks: dict[bytes, KvBlock] = field(default_factory=computed)
    reasons: dict[bytes, str] = field(default_factory=dict)
    hanging: set[bytes] = field(default_factory=set)
    asked: list[bytes] = field(default_factory=list)

    def takes(self, source: str) -> bool:
        return source.startswith("https://")

    async def fetch(
        self, source: str, block: BlockId, descriptor: Descriptor, lease_ms: int, write: WriteLayer
    ) -> None:
        self.asked.append(block.block_key)
        if block.block_key in self.hanging:
            write(0, *self.blocks[block.block_key].sections()[0])
            await asyncio.Event().wait()
        if (reason := self.reasons.get(block.block_key)) is not None:
            raise LoadError(reason)
        held = self.blocks.get(block.block_key)
        if held is None:
            raise LoadError(str(ProblemName.UNKNOWN_RESOURCE))
        for layer, (k, v) in enumerate(held.sections()):
            write(layer, k, v)


class NoNetwork:
    """In the place of a client's connections."""

    async def close(self) -> None: ...


@dataclass
class Instance:
    shell: InstanceShell
    agent: Agent
    holder: Holder
    placement: Placement
    source: Source

    async def tokens(self, session: str = SESSION, start: int = 0) -> list[int]:
        """All output of a session, once it has ended."""
        found = []
        async for token in self.shell.sessions.tokens(session, start, 30):
            found.append(token.token)
        return found


def make_instance(
    *,
    pool_blocks: int = 64,
    store_octets: int = 1 << 20,
    records: Records | None = None,
    engine: Engine = ENGINE,
    directives: Path | None = None,
    **limits: Any,
) -> Instance:
    """An instance that is not started."""
    agent = Agent(
        BASE,
        ENGINE.descriptor,
        [SCOPE],
        epoch=7,
        bit_identical=True,
        limits=InstanceLimits(pool_octets=pool_blocks * OCTETS, **limits),
    )
    holder = Holder(
        [(MemoryTier(), store_octets)], HolderSettings(base_uri=BASE), records=records or NoIndex()
    )
    placement, source = Placement(), Source()
    client = Client()
    ask_with(client, NoNetwork())  # until it is started
    shell = InstanceShell(
        agent,
        engine,
        holder,
        client,
        placement,
        Epochs(),
        fetchers=[source],
        directives=directives,
    )
    return Instance(shell, agent, holder, placement, source)


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Instance]:
    """An instance at work."""
    made = make_instance(**options)
    await made.shell.start()
    try:
        yield made
    finally:
        await made.shell.stop()


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until something holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  (the condition is not ours to signal)
            await asyncio.sleep(0.001)


def plan(version=1, *, retain=((0, 4),), fetch=((4, 8),), release=((8, 12),), **changes):
    made = ReshardPlan(
        map="m",
        from_version=version,
        to_version=version + 1,
        deadline_ms=1000,
        retain=tuple(range(*each) for each in retain),
        fetch=tuple(ReshardFetch(range(*each), HOLDER) for each in fetch),
        release=tuple(range(*each) for each in release),
        compat_id=ENGINE.descriptor.compat_id,
        scope_id=SCOPE.scope_id,
        block_tokens=SIZE,
        block_keys=tuple(keys()),
    )
    return replace(made, **changes)
