"""What serving a request at an instance is expected to take (KVSP "Placement Inputs")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvsp.records import costs, spreading
from kvsp.records.records import InstanceStatus, ReplicaRecord


@dataclass(frozen=True)
class Found:
    """What the Index Service knows: replicas of the leading blocks, and their geometry.

    `layers` and `block_tokens` are 0 when the descriptor is not known.
    """

    blocks: Sequence[Sequence[ReplicaRecord]] = ()
    layers: int = 0
    block_tokens: int = 0

    @cached_property
    def runs(self) -> list[costs.Run]:
        """The blocks as runs, found once for every candidate."""
        return costs.runs(self.blocks, self.layers)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An active instance that serves the Compatibility ID, and its mean service time."""

    status: InstanceStatus
    mean_service_us: float


@dataclass(frozen=True, slots=True)
class Demand:
    """A request: its prompt's length and what the Index Service found of it.

    `tokens` is None when it is not known.
    """

    tokens: int | None
    found: Found


@dataclass(frozen=True, slots=True)
class Choice:
    """An instance and what serving there is expected to take, in microseconds.

    None is what cannot be computed. `use_cache` tells whether fetching is cheaper than
    recomputing everything.
    """

    instance: str
    cost_us: int | None
    fetch_us: int | None
    use_cache: bool


def estimate(demand: Demand, candidate: Candidate) -> Choice:
    """What serving the demand at one candidate takes (KVSP "Placement Inputs")."""
    (choice,) = estimates(demand, [candidate])
    return choice


def estimates(demand: Demand, candidates: Sequence[Candidate]) -> list[Choice]:
    """What serving the demand takes at each candidate."""
    found = demand.found
    fetches: list[int | None] = [None] * len(candidates)
    if found.layers:
        targets = [(each.status.instance, each.status.links) for each in candidates]
        fetches = spreading.fetch_us(targets, found.runs, found.layers)
    return [_choice(demand, each, fetch) for each, fetch in zip(candidates, fetches, strict=True)]


def _choice(demand: Demand, candidate: Candidate, fetch: int | None) -> Choice:
    status, found = candidate.status, demand.found
    rate = status.prefill_tokens_per_s
    everything = unmatched = None
    if demand.tokens is not None:
        everything = costs.recompute_us(demand.tokens, rate)
        left = max(demand.tokens - len(found.blocks) * found.block_tokens, 0)
        unmatched = costs.recompute_us(left, rate)
    wait = costs.wait_us(status.queued, candidate.mean_service_us)
    cost = costs.cost_us(
        wait=wait, fetch=fetch, recompute_unmatched=unmatched, recompute_all=everything
    )
    cheaper = everything is None or (
        fetch is not None and unmatched is not None and fetch + unmatched <= everything
    )
    return Choice(
        status.instance, cost, fetch, bool(found.blocks) and fetch is not None and cheaper
    )
