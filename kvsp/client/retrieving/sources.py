"""What a retrieval knows of a holder, and of one replica of one block at it (sans-IO)."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, NamedTuple

from kvsp.client.limits import ClientLimits
from kvsp.client.policy import Fault
from kvsp.names.codes import Codec
from kvsp.names.uris import BlockId
from kvsp.records import costs
from kvsp.records.records import Link, ReplicaRecord

DEFAULT_MBIT_PER_S: Final = 1000.0
DEFAULT_RTT_US: Final = 1000.0
_CODECS: Final = {int(each): each for each in Codec}
_NEWEST: Final = 0.3
"""Weight of the newest measurement of a rate."""


@dataclass(frozen=True, slots=True)
class NamedReplica:
    """A replica that somebody names without its Replica Record: a whole block, of which
    nothing proves a layer before the end of the answer."""

    block: BlockId
    holder: str
    """A holder URI, or what another way takes as a source."""

    size: int
    """Octets of the block, about."""

    codec: int = Codec.RAW

    layer_digests: ClassVar[None] = None
    residency: ClassVar[None] = None

    def held_layers(self, layers: int) -> list[range]:
        """All: whoever names it says no less."""
        return [range(layers)]


Replica = ReplicaRecord | NamedReplica


@dataclass(slots=True, eq=False)
class Candidate:
    """One replica of one block: what it holds as far as is known, and why not to use it."""

    record: Replica
    source: Source
    codec: int
    held: list[range]
    layers: int
    fault: Fault | None = None
    attempts: int = 0

    @property
    def usable(self) -> bool:
        return self.fault is None and self.source.fault is None

    @property
    def by_layer(self) -> bool:
        """Whether layers can be asked for; else only the block as a whole."""
        return self.record.layer_digests is not None

    @property
    def early(self) -> bool:
        """Whether each layer can be verified as it comes, by the record."""
        return self.by_layer and self.codec == self.record.codec

    def part(self, run: range) -> range:
        """How much of a run of layers is held, from its first layer on; maybe nothing."""
        for held in self.held:
            if run.start in held:
                return range(run.start, min(run.stop, held.stop))
        return range(run.start, run.start)

    def octets(self, part: range) -> int:
        """About how many octets a request for these layers brings."""
        count = len(part) if self.by_layer else self.layers
        return max(1, self.record.size * count // self.layers)

    def load_us(self, part: range) -> float:
        """Time to load these layers by KVSP "Placement Inputs", in microseconds."""
        record, rate = self.record, self.source.mbit_per_s
        if isinstance(record, NamedReplica):
            return costs.transfer_us(self.octets(part), rate)
        if record.residency is None or not self.by_layer or len(part) == self.layers:
            share = len(part) / self.layers if self.by_layer else 1.0
            return share * costs.load_us(record, rate, self.layers)
        residency = tuple(
            replace(entry, layers=common)
            for entry in record.residency
            if (common := _common(entry.layers, part))
        )
        return costs.load_us(replace(record, residency=residency), rate, self.layers)


class Task(NamedTuple):
    """Layers of a block that are to be asked for at one replica."""

    block: int
    layers: range
    candidate: Candidate
    order: tuple[int, int]
    """The lowest is asked for first."""


@dataclass(slots=True, eq=False)
class Source:
    """A holder: its estimated rate, what waits for it, and how it behaved."""

    holder: str
    mbit_per_s: float = DEFAULT_MBIT_PER_S
    rtt_us: float = DEFAULT_RTT_US
    ready_at: float = 0.0
    """When it may be asked again, in seconds of the caller's clock."""

    fault: Fault | None = None
    """Why it is not used any more."""

    measured_rate: bool = False
    measured_rtt: bool = False

    strikes: int = 0
    lost: int = 0
    """Requests that brought nothing before they were given up, since the last layer came."""

    waits: int = 0
    bad: int = 0
    active: int = 0
    outstanding: int = 0
    """Octets asked for."""

    queued: int = 0
    """Octets that wait to be asked for."""

    _queue: list[Task] = field(default_factory=list)
    """The next task last."""

    @classmethod
    def of(cls, holder: str, link: Link | None) -> Source:
        if link is None:
            return cls(holder)
        rate = max(link.mbit_per_s, 1e-3)
        return cls(holder, rate, link.rtt_us, measured_rate=True, measured_rtt=True)

    def free(self, limits: ClientLimits, now: float) -> bool:
        """Whether another request may go to it now."""
        usable = self.fault is None and self.ready_at <= now
        return usable and self.active < limits.requests_per_source

    def finish_us(self, own_us: float, now: float) -> float:
        """When a request that takes `own_us` by itself would end, from now."""
        pause = max(0.0, self.ready_at - now) * 1e6
        backlog = 8 * (self.outstanding + self.queued) / self.mbit_per_s
        return pause + self.rtt_us + backlog + own_us

    def measured(self, octets: int, seconds: float) -> None:
        """Take a transfer into the estimate of the rate."""
        if seconds > 0:
            # what went on beside it shared the link
            rate = 8 * octets * max(1, self.active) / (seconds * 1e6)
            self.mbit_per_s += _NEWEST * (rate - self.mbit_per_s)
            self.measured_rate = True

    def answered(self, seconds: float) -> None:
        """Take the time of a small request into the round trip."""
        us = seconds * 1e6
        self.rtt_us = min(self.rtt_us, us) if self.measured_rtt else us
        self.measured_rtt = True

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def head(self) -> Task | None:
        return self._queue[-1] if self._queue else None

    def push(self, task: Task) -> None:
        bisect.insort(self._queue, task, key=lambda each: (-each.order[0], -each.order[1]))
        self.queued += task.candidate.octets(task.layers)

    def pop(self, index: int = -1) -> Task:
        task = self._queue.pop(index)
        self.queued -= task.candidate.octets(task.layers)
        return task

    def last(self, count: int) -> list[Task]:
        """The tasks that would come last, the very last first: at these indexes from 0."""
        return self._queue[:count]

    def take_all(self) -> list[Task]:
        tasks, self._queue, self.queued = self._queue, [], 0
        return tasks


def candidate_of(
    record: Replica,
    source: Source,
    layers: int,
    codec: int | None,
    allow_lossy: bool,
    takes: Callable[[str], bool],
) -> Candidate:
    """What a replica offers to a retrieval; with `fault` set when it cannot be used.

    `codec` is the one asked for; None asks for the replica's own. `takes` says whether there
    is a way to a holder.
    """
    asked = record.codec if codec is None else codec
    candidate = Candidate(record, source, asked, record.held_layers(layers), layers)
    digests = record.layer_digests
    if not takes(record.holder):
        candidate.fault = Fault.NO_REPLICA
    elif asked not in _CODECS or (codec is None and not (allow_lossy or _CODECS[asked].lossless)):
        candidate.fault = Fault.CODEC
    elif digests is not None and len(digests) != layers:
        candidate.fault = Fault.VERIFICATION
    elif not candidate.by_layer and candidate.part(range(layers)) != range(layers):
        candidate.fault = Fault.NO_REPLICA
    return candidate


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def common_ranges(one: list[range], other: list[range]) -> list[range]:
    """What two lists of ascending disjoint ranges have in common."""
    return [part for a in one for b in other if (part := _common(a, b))]
