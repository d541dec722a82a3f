"""Why a prompt was loaded or not: one word for each request, counted, and one line of log."""

from __future__ import annotations

import logging
from collections import Counter
from enum import StrEnum

logger = logging.getLogger("vllm.kvcs")


class Outcome(StrEnum):
    """What became of a request's prompt; the label of the metric."""

    HIT = "hit"
    """Tokens were loaded, every one verified."""
    MISS = "miss"
    """Nothing of it is published, or no more than the engine has itself."""
    TOO_SHORT = "too_short"
    """Fewer tokens than `min_tokens` would have come."""
    SLOWER = "slower"
    """Computing is faster here than the transfer would be."""
    STALLED = "stalled"
    """Nothing came in time: the producer or the relay is slow, stuck or gone."""
    VERIFICATION = "verification"
    """What came is not what the publication must hold."""
    REFUSED = "refused"
    """The request has what no name of a cache covers (LoRA, images, a salt, ...), or the relay
    refuses us."""
    BUSY = "busy"
    """As many loads as allowed are under way."""


class Outcomes:
    """Counts outcomes and octets, and says of each request why."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Since `take` was called last: requests by outcome, and `octets` and `tokens` loaded."""

    def note(
        self, request: str, outcome: Outcome, why: str, *, tokens: int = 0, octets: int = 0
    ) -> None:
        """Tell what became of a request; `why` completes the sentence."""
        self.counts[outcome] += 1
        self.counts["tokens"] += tokens
        self.counts["octets"] += octets
        level = logging.INFO
        if outcome in (Outcome.STALLED, Outcome.VERIFICATION):
            level = logging.WARNING
        elif outcome in (Outcome.MISS, Outcome.TOO_SHORT):
            level = logging.DEBUG
        logger.log(level, "kvcs: request %s: %s: %s", request, outcome, why)

    def take(self) -> dict[str, int]:
        """What was counted since the last call; empty when nothing was."""
        counts, self.counts = self.counts, Counter()
        return {name: count for name, count in counts.items() if count}
