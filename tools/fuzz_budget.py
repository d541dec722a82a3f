"""What an input may cost: calls and memory for each octet of it, whatever the machine's load.

Calls of Python functions stand for time. Work inside one call of C does not count, only the time
limit of `tools.fuzz` sees it.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(frozen=True, slots=True)
class Budget:
    """What a target may take for an input: so much in any case, so much more for each octet."""

    calls: int = 20_000
    calls_per_octet: int = 40
    memory: int = 1 << 20
    """Octets at the highest point, beyond what there was before."""
    memory_per_octet: int = 400


def overspent(run: Callable[[], object], octets: int, budget: Budget) -> str | None:
    """Run it, and again, to count: what an input of so many octets took too much of, in words;
    None when it kept within `budget`. It is stopped when it has made too many calls."""
    calls = _calls(run, allowed := budget.calls + budget.calls_per_octet * octets)
    if calls > allowed:
        return f"cost: more than {allowed} calls for {octets} octets"
    memory = _memory(run)
    allowed = budget.memory + budget.memory_per_octet * octets
    if memory > allowed:
        return f"cost: {memory} octets of memory for {octets} of input, {allowed} are allowed"
    return None


class _TooMany(BaseException):
    """Nothing on the way may take it for an ordinary error."""


def _calls(run: Callable[[], object], allowed: int) -> int:
    """How many calls of Python functions `run` makes, up to one more than is allowed."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        if event == "call":
            calls += 1
            if calls > allowed:
                raise _TooMany

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    except _TooMany:
        pass
    finally:
        sys.setprofile(before)
    return calls


def _memory(run: Callable[[], object]) -> int:
    gc.collect()
    traced = tracemalloc.is_tracing()
    if not traced:
        tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not traced:
            tracemalloc.stop()
