"""Requests of ours to a placement controller: where a request goes, what a group is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from kvsp.names.codes import MAX_DIRECTIVE_MS
from kvsp.records.members import BOOLEAN, HEX16, HEX32, UUID, Record, array, integer, string


@dataclass(frozen=True, slots=True)
class PlaceRequest(Record):
    """Where should a request go? (KVSP "Placement Inputs" leaves the question's form open.)

    `tokens` is the length of the prompt; without it only its complete blocks count. With
    `session` the session is assigned to the answer. `prefetch` false sends no directive.
    """

    scope_id: Annotated[bytes, HEX16]
    compat_id: Annotated[bytes, HEX32]
    block_keys: Annotated[tuple[bytes, ...], array(HEX32)]
    tokens: Annotated[int | None, integer()] = None
    session: Annotated[str | None, UUID] = None
    request_ref: Annotated[str | None, string()] = None
    prefetch: Annotated[bool, BOOLEAN] = True
    deadline_ms: Annotated[int | None, integer(1, MAX_DIRECTIVE_MS)] = None
    lease_ms: Annotated[int | None, integer(1, MAX_DIRECTIVE_MS)] = None


@dataclass(frozen=True, slots=True)
class Placement:
    """The answer: an instance, what to expect there, and what was started.

    `epoch` is that of the session, None without one; `directive` that of the prefetch.
    """

    instance: str
    cost_us: int | None
    fetch_us: int | None
    matched: int
    epoch: int | None
    directive: str | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "instance": self.instance,
            "cost_us": self.cost_us,
            "fetch_us": self.fetch_us,
            "matched": self.matched,
            "epoch": self.epoch,
            "directive": self.directive,
        }
