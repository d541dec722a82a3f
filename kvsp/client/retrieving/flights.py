"""What the planner tells its caller, and what it keeps of an open request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeVar

from kvsp.client.policy import Fault
from kvsp.client.retrieving.sources import Candidate, Replica

T = TypeVar("T")


class Fetch(NamedTuple):
    """A request to make: layers of a block at a replica, in a codec."""

    number: int
    block: int
    layers: range
    """What to ask for; all layers where a holder serves whole blocks only."""

    candidate: Candidate

    @property
    def record(self) -> Replica:
        return self.candidate.record


class Cancel(NamedTuple):
    """A request that nobody needs any more."""

    number: int


class Arrived(NamedTuple):
    """Layers of a block and the holder they came from."""

    block: int
    layers: range
    source: str


class Missing(NamedTuple):
    """Layers of a block that did not come, and why."""

    block: int
    layers: range
    reason: Fault


class State(IntEnum):
    UNWANTED = 0
    QUEUED = 1
    ASKED = 2
    ARRIVED = 3
    MISSING = 4


@dataclass(slots=True)
class Flight:
    fetch: Fetch
    needed: Sequence[int]
    """The layers it was made for."""
    started: float
    expected: float
    """Seconds it was estimated to take."""
    octets: int
    hedged: bool = False
    brought: bool = False
    """Whether a layer came of it."""


def runs_of(values: Mapping[int, T]) -> Iterator[tuple[range, T]]:
    """Ascending ranges of consecutive keys with equal values."""
    run: range | None = None
    value: T | None = None
    for key in sorted(values):
        if run is not None and key == run.stop and values[key] == value:
            run = range(run.start, key + 1)
            continue
        if run is not None and value is not None:
            yield run, value
        run, value = range(key, key + 1), values[key]
    if run is not None and value is not None:
        yield run, value
