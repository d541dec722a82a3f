"""Samplers whose state fits into a checkpoint (KVSP "Session Checkpoints and Migration").

A sample depends on the logits, the seed and the step alone, so an instance that takes over
a session continues with the same sample.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvsp.names.errors import KvspError
from kvsp.records.records import Sampler

Logits = NDArray[np.float64]


class SamplerUnsupportedError(KvspError):
    """This instance cannot continue with that sampler; `method` names it."""

    def __init__(self, method: str, detail: str) -> None:
        super().__init__(f"sampler {method!r}: {detail}")
        self.method = method
        self.detail = detail


@dataclass(slots=True)
class SamplerState:
    """A sampler under way; `step` counts the samples drawn."""

    method: str
    params: Mapping[str, Any]
    seed: int
    step: int
    deterministic: bool

    @classmethod
    def of(cls, record: Sampler) -> SamplerState:
        """Restore a sampler. Raises SamplerUnsupportedError for an unknown method or
        parameters it does not have."""
        allowed = _PARAMETERS.get(record.method)
        if allowed is None:
            raise SamplerUnsupportedError(record.method, f"known are {', '.join(_PARAMETERS)}")
        for name, value in record.params.items():
            if name not in allowed:
                raise SamplerUnsupportedError(record.method, f"no parameter {name!r} is known")
            if type(value) not in (int, float) or not allowed[name](value):
                raise SamplerUnsupportedError(record.method, f"{name!r} is out of its range")
        if record.method in ("top-p", "top-k") and record.method[-1] not in record.params:
            raise SamplerUnsupportedError(record.method, f"needs {record.method[-1]!r}")
        return cls(
            record.method, dict(record.params), record.seed, record.step, record.deterministic
        )

    def record(self) -> Sampler:
        """The state as a checkpoint has it."""
        return Sampler(self.method, dict(self.params), self.seed, self.step, self.deterministic)

    def draw(self, logits: Logits) -> int:
        """The next token; ties go to the lower id."""
        step, self.step = self.step, self.step + 1
        if self.method == "greedy":
            return int(np.argmax(logits))
        scaled = logits / self.params.get("temperature", 1)
        weights = np.exp(scaled - scaled.max())
        order = np.argsort(-weights, kind="stable")
        shares = weights[order] / weights.sum()
        kept = shares[: self._kept(shares)]
        cumulated = np.cumsum(kept)
        point = _uniform(self.seed, step) * cumulated[-1]
        place = min(int(np.searchsorted(cumulated, point, side="right")), len(kept) - 1)
        return int(order[place])

    def _kept(self, shares: Logits) -> int:
        if self.method == "top-k":
            return int(self.params["k"])
        if self.method == "top-p":
            reached = np.searchsorted(np.cumsum(shares), self.params["p"], side="left")
            return int(reached) + 1
        return len(shares)


def _positive(value: float) -> bool:
    return 0 < value < math.inf


_PARAMETERS: Final[Mapping[str, Mapping[str, Callable[[Any], bool]]]] = {
    "greedy": {},
    "top-p": {"p": lambda value: 0 < value <= 1, "temperature": _positive},
    "top-k": {"k": lambda value: type(value) is int and value >= 1, "temperature": _positive},
    "temperature": {"temperature": _positive},
}
"""The methods, and what each parameter may be."""


def _uniform(seed: int, step: int) -> float:
    """A number in [0, 1) that depends on seed and step alone."""
    digest = hashlib.sha256(f"{seed} {step}".encode("ascii")).digest()
    return int.from_bytes(digest[:8]) / 2.0**64
