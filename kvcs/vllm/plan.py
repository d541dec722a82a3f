"""What the scheduler's side tells the workers for a step, and what they tell back.

Plain values: with several workers vLLM sends them to other processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvcs.vllm.outcomes import Outcome


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A request whose pages are to be filled from a publication."""

    request: str
    found: Any
    """The publication, as `client.directory.longest` gave it."""
    tokens: range
    """Positions to be filled, whole pages: those before are here already."""
    page_ids: tuple[int, ...]
    """The request's pages from its first, up to the last one that is filled."""
    layerwise: bool
    """Whether this step's forward pass uses them, layer by layer."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Blocks of a request that this step completes."""

    request: str
    tokens: tuple[int, ...]
    """Those of all complete blocks of the prompt."""
    blocks: range
    page_ids: tuple[int, ...]
    """The request's pages from its first, up to the last one that has a token of `blocks`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step."""

    step: int = 0
    heard: int = 0
    """The last step whose report the scheduler's side knew when it made this plan."""
    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    aborted: tuple[str, ...] = ()
    """Requests whose publication will not become whole."""
    idle: bool = False
    """Nothing is computed in this step: whoever waits leaves the interpreter to the network."""
    awaited: bool = False
    """Whether a look-up or a first layer is out, where nothing is computed."""


@dataclass(slots=True)
class Report:
    """What one worker has to tell after a step; `merged` with those of the others."""

    step: int
    outcomes: dict[str, tuple[Outcome, str, int, int]] = field(default_factory=dict)
    """By request whose load has ended: outcome, why, tokens, octets."""
    rates: list[tuple[int, float]] = field(default_factory=list)
    """Octets and seconds of loads from publications that were whole."""

    def merged(self, other: Report) -> Report:
        """Both. A load that failed on one rank has failed."""
        outcomes = dict(other.outcomes)
        for request, outcome in self.outcomes.items():
            if outcome[0] is not Outcome.HIT or request not in outcomes:
                outcomes[request] = outcome
        return Report(max(self.step, other.step), outcomes, [*self.rates, *other.rates])
