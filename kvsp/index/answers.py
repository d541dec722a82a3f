"""What an Index Service answers, and why a lookup stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from kvsp.index.store import Replica
from kvsp.index.stored import answer_form, brief_record
from kvsp.records.records import ReplicaRecord, TargetEstimate


class Published(NamedTuple):
    """`created` is False for a refresh; `ttl_ms` is what was granted."""

    created: bool
    ttl_ms: int


class MissReason(StrEnum):
    """Why a lookup stops at a key."""

    UNKNOWN_KEY = "unknown-key"
    OTHER_COMPAT = "other-compat"
    EXPIRED = "expired"
    UNAUTHORIZED = "unauthorized"
    HOLDER_DOWN = "holder-down"
    LAYERS_MISSING = "layers-missing"


_ADVICE = {
    MissReason.UNKNOWN_KEY: "no holder has published this block; was it computed in this scope?",
    MissReason.OTHER_COMPAT: "the block is published under another Compatibility ID; compare "
    "the descriptors",
    MissReason.EXPIRED: "its records expired; do holders refresh them before their TTL ends?",
    MissReason.UNAUTHORIZED: "the principal has no read access to this scope",
    MissReason.HOLDER_DOWN: "every holder of the block stopped reporting its status",
    MissReason.LAYERS_MISSING: "the replicas together do not hold every layer",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """How far a lookup gets, and why it stops at `block_key`; both None for a full match."""

    matched: int
    block_key: bytes | None = None
    reason: MissReason | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "matched": self.matched,
            "block_key": None if self.block_key is None else self.block_key.hex(),
            "reason": self.reason,
            "detail": None if self.reason is None else _ADVICE[self.reason],
        }


@dataclass(frozen=True, slots=True)
class Lookup:
    """The answer to a lookup: the matched keys with the stored form of their replicas."""

    keys: Sequence[bytes]
    replicas: Sequence[Sequence[Replica]]
    now_ms: int
    targets: Sequence[TargetEstimate] | None = None

    def to_json(self) -> bytes:
        """The `LookupResponse`, spliced from records as they were stored."""
        tree: dict[str, Any] = {
            "matched": len(self.keys),
            "blocks": [
                {
                    "block_key": key.hex(),
                    "replicas": [answer_form(r, self.now_ms) for r in replicas],
                }
                for key, replicas in zip(self.keys, self.replicas, strict=True)
            ],
        }
        if self.targets is not None:
            tree["targets"] = [estimate.to_dict() for estimate in self.targets]
        return msgspec.json.encode(tree)

    def records(self) -> list[list[ReplicaRecord]]:
        """The replicas of each matched key, without their layer digests."""
        return [[brief_record(r, self.now_ms) for r in replicas] for replicas in self.replicas]


@dataclass(frozen=True, slots=True)
class KeyList:
    """A part of the list of Block Keys, with the stored form of their replicas."""

    keys: Sequence[bytes]
    replicas: Sequence[Sequence[Replica]]
    now_ms: int
    next: bytes | None

    def records(self) -> list[list[ReplicaRecord]]:
        """The replicas of each key, without their layer digests."""
        return [[brief_record(r, self.now_ms) for r in replicas] for replicas in self.replicas]

    def to_json(self) -> bytes:
        """`{"blocks": […], "next": …}` with records that lack their layer digests."""
        blocks = [
            {"block_key": key.hex(), "replicas": [record.to_dict() for record in records]}
            for key, records in zip(self.keys, self.records(), strict=True)
        ]
        following = None if self.next is None else self.next.hex()
        return msgspec.json.encode({"blocks": blocks, "next": following})
