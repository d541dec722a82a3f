"""Which instance gets a request (KVSP "Placement Inputs"): a policy that can be replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvsp.records.estimates import Candidate, Choice, Demand, estimates


class PlacementPolicy(Protocol):
    """Chooses among candidates; None when none is acceptable."""

    def choose(self, demand: Demand, candidates: Sequence[Candidate]) -> Choice | None:
        """Pure: the same inputs give the same choice."""
        ...


class LowestCost:
    """The draft's policy: the lowest cost wins.

    What cannot be computed counts as infinite; ties go to the lower kv_utilization, then
    to the lower URI. With `max_cost_us`, a higher cost is not acceptable.
    """

    def __init__(self, max_cost_us: int | None = None) -> None:
        self.max_cost_us = max_cost_us

    def choose(self, demand: Demand, candidates: Sequence[Candidate]) -> Choice | None:
        """The candidate of lowest cost."""
        best: tuple[tuple[float, float, str], Choice] | None = None
        for candidate, choice in zip(candidates, estimates(demand, candidates), strict=True):
            cost = float("inf") if choice.cost_us is None else choice.cost_us
            if self.max_cost_us is not None and cost > self.max_cost_us:
                continue
            rank = (cost, candidate.status.kv_utilization, choice.instance)
            if best is None or rank < best[0]:
                best = rank, choice
        return None if best is None else best[1]
