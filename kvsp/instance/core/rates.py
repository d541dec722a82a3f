"""How fast the engine is, measured (sans-IO)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_NEWEST: Final = 0.2
"""Weight of the newest measurement."""


@dataclass(slots=True)
class Rate:
    """A moving average of tokens per second; `per_s` starts as a guess."""

    per_s: float
    measured: bool = False

    def observe(self, tokens: int, seconds: float) -> None:
        """`tokens` took `seconds`."""
        if tokens <= 0 or seconds <= 0:
            return
        now = tokens / seconds
        self.per_s = now if not self.measured else self.per_s + _NEWEST * (now - self.per_s)
        self.measured = True


@dataclass(slots=True)
class Rates:
    """What a status record tells of an engine."""

    prefill: Rate = field(default_factory=lambda: Rate(1000.0))
    decode: Rate = field(default_factory=lambda: Rate(100.0))
    service_us: float | None = None
    """Mean time from a session's beginning to its end."""

    def served(self, seconds: float) -> None:
        """A session ended after `seconds`."""
        us = seconds * 1e6
        before = us if self.service_us is None else self.service_us
        self.service_us = before + _NEWEST * (us - before)
