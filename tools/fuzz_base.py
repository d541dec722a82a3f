"""What `tools.fuzz` feeds: cases, and the targets that are held to something.

A case is a list of steps. A step is `(where, octets)`: the place is a word the target
understands, for a plain decoder "" (the octets are the next part of one input).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moqt.wire.codec import codec_for
from tests.moqt.memory import ALPN
from tools.fuzz_budget import Budget

Step = tuple[str, bytes]
Case = list[Step]

CODEC = codec_for(ALPN)
DATA = Path(__file__).parents[1] / "tests" / "data"
DRAFT = json.loads((DATA / "moqt-22-vectors.json").read_text("utf-8"))
KVCS = json.loads((DATA / "kvcs-vectors.json").read_text("utf-8"))


def vectors(*kinds: str) -> list[bytes]:
    """The octets of the draft's vectors of these kinds, malformed ones too."""
    cases = (*DRAFT["vectors"], *DRAFT["malformed"])
    return [bytes.fromhex(case["hex"]) for case in cases if case.get("kind") in kinds]


class Target(ABC):
    """One thing to feed. `run` raises whatever must not happen; a refusal is no finding."""

    name: str
    budget = Budget()
    """What an input may cost."""
    places: tuple[str, ...] = ("",)
    """Where a step may be moved to by a mutation."""

    @abstractmethod
    def corpus(self) -> list[Case]: ...

    @abstractmethod
    def run(self, case: Case) -> None: ...

    def moved(self, where: str, choose: Callable[[Any], Any]) -> str:
        """Another place for a step that is at `where`; `choose` picks one of a sequence."""
        place: str = choose(self.places)
        return place
