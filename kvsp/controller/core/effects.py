"""What the controller core wants done, and what it is told about it.

The core has no socket and no disk. Each call leaves `Effects` behind: documents to make
durable first, then commands to carry out. The shell answers each command with one
`report`; a report that never comes is the core's to notice, by its own deadlines.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvsp.controller.core.limits import ControllerLimits
from kvsp.names.codes import InstanceState
from kvsp.records.estimates import Found
from kvsp.records.records import ReplicaRecord


class Key(NamedTuple):
    """Names a durable document: what it is (`instance`, `session`, `map`) and which."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Something to be sent to `instance` (a base URI) within `timeout_ms`."""

    number: int
    instance: str
    timeout_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendState(Command):
    """`PUT state` (KVSP "Instance Status and Lifecycle")."""

    state: InstanceState


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPrefetch(Command):
    """`POST prefetch` with a directive (KVSP "Prefetch Directives")."""

    directive: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrefetch(Command):
    """`GET prefetch/{directive}`: how far a directive came."""

    directive: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendResume(Command):
    """`POST sessions/{session}/resume` (KVSP "Session Checkpoints and Migration")."""

    session: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReshard(Command):
    """`POST reshard` with a plan, a commit or an abort (KVSP "Resharding")."""

    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindReplicas(Command):
    """Ask the Index Service for the blocks of a session; `instance` is empty."""

    scope_id: bytes
    compat_id: bytes
    block_keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """A command was answered with success."""

    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """A command was answered with a problem; `name` is the part of its type after `#`."""

    name: str | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No answer came; whether the command was carried out is not known."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class KeyPage:
    """A part of the Block Keys the Index Service knows, ascending: the replicas of each,
    and the key after which the list goes on, None at its end."""

    blocks: Sequence[Sequence[ReplicaRecord]]
    next: bytes | None


Report = Done | Refused | Unreachable | Found


@dataclass(slots=True)
class Effects:
    """`writes` are made durable before anything else is seen; None deletes a document."""

    writes: dict[Key, bytes | None] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)


class Timers:
    """At most one deadline per key; setting it again moves it (sans-IO: `now` in ms)."""

    def __init__(self) -> None:
        self._due: dict[Key, int] = {}
        self._heap: list[tuple[int, Key]] = []

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, key: Key) -> bool:
        return key in self._due

    def set(self, key: Key, due_ms: int) -> None:
        self._due[key] = due_ms
        heapq.heappush(self._heap, (due_ms, key))
        if len(self._heap) > 64 + 4 * len(self._due):
            self._heap = [(due, key) for key, due in self._due.items()]
            heapq.heapify(self._heap)

    def cancel(self, key: Key) -> None:
        self._due.pop(key, None)

    def next_due(self) -> int | None:
        """The earliest deadline, None without any."""
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self, now_ms: int) -> Key | None:
        """Take one key whose deadline has come."""
        due = self.next_due()
        if due is None or due > now_ms:
            return None
        key = heapq.heappop(self._heap)[1]
        del self._due[key]
        return key


C = TypeVar("C", bound=Command)


class Ledger:
    """What the parts of one controller share: effects, deadlines, and whose command is whose."""

    def __init__(self, limits: ControllerLimits) -> None:
        self.limits = limits
        self.timers = Timers()
        self.counters: Counter[str] = Counter()
        self._effects = Effects()
        self._askers: dict[int, Key] = {}
        self._last = 0

    def write(self, key: Key, document: Mapping[str, Any] | None) -> None:
        """Have a document made durable, or deleted."""
        text = None if document is None else msgspec.json.encode(document)
        self._effects.writes[key] = text

    def send(self, asker: Key, command: Callable[..., C], **members: Any) -> C:
        """Issue a command; its report goes to `asker`."""
        self._last += 1
        made = command(number=self._last, **members)
        self._askers[self._last] = asker
        self._effects.commands.append(made)
        return made

    def settle(self, number: int) -> Key | None:
        """Whose command this was; None when its report is not awaited (any more)."""
        return self._askers.pop(number, None)

    @property
    def outstanding(self) -> int:
        """Commands whose report is awaited."""
        return len(self._askers)

    def take(self) -> Effects:
        """Everything since the last call."""
        effects, self._effects = self._effects, Effects()
        return effects
