"""Whether a transfer pays: the measured rate of prefill against that of transfers.

A transfer pays when prefill's tokens/s, times the octets of a token, stay below the transfer's
octets/s. Both are measured here, as they run; until both are known every load is tried. Sans-IO:
time is a parameter, in seconds.
"""

from __future__ import annotations

from typing import Final

FORGOTTEN_AFTER: Final = 60.0
"""Seconds after which a measured transfer rate counts no more, so that a closed gate is tried
again: the network may have become better."""

WEIGHT: Final = 0.3
"""Of a new measurement against all before."""

LEAST_TOKENS: Final = 32
"""A step that computes fewer tokens of prompts says nothing of the rate."""


class CostGate:
    """Compares what loading costs with what computing costs."""

    def __init__(self, octets_per_token: int) -> None:
        self.octets_per_token = octets_per_token
        self.prefill: float | None = None
        """Tokens per second of this engine."""
        self.transfer: float | None = None
        """Octets per second of loads from publications that were whole."""
        self._measured = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed `tokens` of prompts in so many seconds, without waiting for a load."""
        if tokens >= LEAST_TOKENS and seconds > 0:
            self.prefill = _mean(self.prefill, tokens / seconds)

    def loaded(self, octets: int, seconds: float, now: float) -> None:
        """A load from a publication that was whole brought `octets` in so many seconds."""
        if octets > 0 and seconds > 0:
            self.transfer = _mean(self.transfer, octets / seconds)
            self._measured = now

    def seconds_to_load(self, tokens: int, now: float) -> float | None:
        """What a transfer of so many tokens is expected to take; None when that is not known."""
        if self.transfer is None or now - self._measured > FORGOTTEN_AFTER:
            return None
        return tokens * self.octets_per_token / self.transfer

    def seconds_to_compute(self, tokens: int) -> float | None:
        """What computing so many tokens is expected to take; None when that is not known."""
        return None if self.prefill is None else tokens / self.prefill

    def refuses(self, tokens: int, now: float) -> str | None:
        """Why so many tokens are not to be loaded; None when they are."""
        load, compute = self.seconds_to_load(tokens, now), self.seconds_to_compute(tokens)
        if load is None or compute is None or load <= compute:
            return None
        return (
            f"{tokens} tokens would take {load:.3f} s to load and {compute:.3f} s to compute "
            f"({self.prefill:.0f} tokens/s, {self.transfer or 0:.3g} octets/s)"
        )


def _mean(known: float | None, new: float) -> float:
    return new if known is None else known + WEIGHT * (new - known)
