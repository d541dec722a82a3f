"""Records and a controller whose commands are answered by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import pytest

from kvsp.controller.core.controller import Controller
from kvsp.controller.core.effects import Command, Key
from kvsp.controller.core.limits import ControllerLimits
from kvsp.names.codes import InstanceState
from kvsp.principals import Principal
from kvsp.records.problems import Problem, ProblemName
from kvsp.records.records import (
    CheckpointDelta,
    InstanceStatus,
    Link,
    ReplicaRecord,
    Sampler,
    SessionCheckpoint,
)
from kvsp.records.sharding import Shard, ShardMap

A, B, C, D = (f"https://ii{name}.example/kvsp/" for name in "abcd")
H1 = "https://h1.example/kvsp/"
COMPAT, SCOPE = bytes([1]) * 32, bytes([2]) * 16
SESSION = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"
KEYS = tuple(bytes([number]) * 32 for number in range(8))
NOW = 1_000_000
K = TypeVar("K", bound=Command)


def status(instance: str = A, **changes: Any) -> InstanceStatus:
    made = InstanceStatus(
        instance=instance,
        epoch=1,
        state=InstanceState.ACTIVE,
        running=0,
        queued=0,
        batch_size=32,
        kv_utilization=0.5,
        prefill_tokens_per_s=42_000,
        decode_tokens_per_s=3100,
        ttl_ms=3000,
        links=(Link(H1, 200_000, 12),),
    )
    return replace(made, **changes)


def checkpoint(offset: int = 3, *, epoch: int = 1, **changes: Any) -> SessionCheckpoint:
    made = SessionCheckpoint(
        session=SESSION,
        epoch=epoch,
        compat_id=COMPAT,
        scope_id=SCOPE,
        prompt_blocks=KEYS[:2],
        prompt_tail=(374, 264),
        generated=tuple(range(1000, 1000 + offset)),
        output_offset=offset,
        sampler=Sampler("top-p", {"p": 0.9}, 7, offset, False),
    )
    return replace(made, **changes)


def delta(after: int, offset: int, **changes: Any) -> CheckpointDelta:
    whole = checkpoint(offset)
    made = CheckpointDelta(
        SESSION, whole.epoch, after, whole.generated[after:], offset, whole.sampler
    )
    return replace(made, **changes)


def instance(uri: str) -> Principal:
    return Principal(uri, roles=frozenset({"instance"}), uris=frozenset({uri}))


def replica(number: int, holder: str = H1) -> ReplicaRecord:
    return ReplicaRecord(
        block_key=KEYS[number],
        compat_id=COMPAT,
        scope_id=SCOPE,
        holder=holder,
        codec=1,
        size=2_097_152,
        digest=bytes(32),
        ttl_ms=1000,
    )


def shard_map(version: int, *ends: tuple[int, str], name: str = "m") -> ShardMap:
    shards, start = [], 0
    for stop, uri in ends:
        shards.append(Shard(range(start, stop), uri))
        start = stop
    keys = tuple(number.to_bytes(32, "big") for number in range(start // 16))
    return ShardMap(name, version, tuple(shards), COMPAT, SCOPE, 16, keys)


def refused(name: ProblemName) -> Any:
    return pytest.raises(Problem, match=name.value)


class Desk:
    """A controller, what it wrote, and the commands nobody has answered."""

    def __init__(self, **limits: int) -> None:
        self.now = NOW
        self.documents: dict[Key, bytes] = {}
        self.commands: list[Command] = []
        self._limits = ControllerLimits(**limits)
        self.core = Controller(self._limits)

    def settle(self) -> None:
        """Make the effects durable and note the commands."""
        effects = self.core.take()
        for key, text in effects.writes.items():
            if text is None:
                self.documents.pop(key, None)
            else:
                self.documents[key] = text
        self.commands += effects.commands

    def do(self, call: Callable[..., Any], *values: Any) -> Any:
        try:
            return call(*values)
        finally:
            self.settle()

    def status(self, instance: str = A, **changes: Any) -> InstanceState:
        state: InstanceState = self.do(self.core.take_status, status(instance, **changes), self.now)
        return state

    def checkpoint(self, offset: int = 3, *, by: str = A, **changes: Any) -> Any:
        made = checkpoint(offset, **changes)
        return self.do(self.core.checkpoint, instance(by), made, self.now)

    def extend(self, after: int, offset: int, *, by: str = A, **changes: Any) -> Any:
        """What the checkpoint at `offset` adds to the one at `after`."""
        return self.do(self.core.extend_checkpoint, instance(by), delta(after, offset, **changes))

    def pass_time(self, ms: int, *reporting: str) -> None:
        """Let time pass in small steps; `reporting` instances keep sending their status."""
        end = self.now + ms
        while self.now < end:
            self.now = min(self.now + 100, end)
            for uri in reporting:
                known = self.core.instances.get(uri)
                assert known is not None
                self.do(self.core.take_status, known.status, self.now)
            self.do(self.core.tick, self.now)

    def take(self, kind: type[K]) -> list[K]:
        """The commands of one kind, which are not shown again."""
        found = [command for command in self.commands if isinstance(command, kind)]
        self.commands = [command for command in self.commands if not isinstance(command, kind)]
        return found

    def report(self, command: Command, report: Any) -> None:
        self.do(self.core.report, command.number, report, self.now)

    def restart(self) -> None:
        """The controller's process ends and another takes up its documents."""
        self.commands = []
        self.core = Controller(self._limits)
        documents = [(key, msgspec.json.decode(text)) for key, text in self.documents.items()]
        self.do(self.core.restore, documents, self.now)
