"""What the client gives back of the services' answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from kvsp.client.caller import Answer
from kvsp.client.errors import BadAnswerError
from kvsp.names import prefix
from kvsp.names.errors import DecodeError
from kvsp.names.uris import BlockId, check_base_uri
from kvsp.records.records import (
    LookupRequest,
    LookupResponse,
    MatchedBlock,
    ReplicaRecord,
    StoredBlock,
)

WELL_KNOWN: Final = "/.well-known/kvsp"


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How much of a prompt is cached, as the index says; a promise of nothing."""

    keys: tuple[bytes, ...]
    """Block Keys of the blocks a cache can be used for (KVSP 4.2: complete ones)."""

    blocks: tuple[MatchedBlock, ...]
    """The matched leading blocks with their replicas."""

    held: int
    """Leading blocks the caller has already."""

    block_tokens: int

    @property
    def matched(self) -> int:
        return len(self.blocks)

    @property
    def tokens(self) -> int:
        """Tokens covered by the matched blocks."""
        return self.matched * self.block_tokens

    @property
    def to_load(self) -> int:
        """Blocks that are matched and not held; never negative."""
        return prefix.missing(self.matched, self.held)

    @property
    def replicas(self) -> list[tuple[ReplicaRecord, ...]]:
        """The replicas of each block to load, for `Client.get_blocks`."""
        return [block.replicas for block in self.blocks[self.held :]]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a lookup stops where it does; `reason` is None for a full match."""

    matched: int
    block_key: bytes | None
    reason: str | None
    detail: str | None

    @classmethod
    def read(cls, answer: Answer) -> Self:
        """Raises BadAnswerError."""
        tree = json_object(answer)
        try:
            key = tree["block_key"]
            return cls(
                int(tree["matched"]),
                None if key is None else bytes.fromhex(key),
                tree["reason"],
                tree["detail"],
            )
        except (KeyError, TypeError, ValueError):
            raise BadAnswerError(answer.source, "its explanation is malformed") from None


@dataclass(frozen=True, slots=True)
class PutResult:
    """`created` is False when the holder had the block already and keeps its copy."""

    created: bool
    stored: StoredBlock | None


@dataclass(frozen=True, slots=True)
class Published:
    """`created` is False for a refresh; `ttl_ms` is what was granted."""

    ttl_ms: int
    created: bool


@dataclass(frozen=True, slots=True)
class Services:
    """What a host says of its deployment at `/.well-known/kvsp`."""

    services: Mapping[str, str]
    codecs: tuple[int, ...] = ()
    moqt: tuple[str, ...] = ()

    @classmethod
    def read(cls, answer: Answer, *, http_loopback: bool = False) -> Self:
        """Raises BadAnswerError."""
        tree, source = json_object(answer), answer.source
        services = tree.get("services")
        if tree.get("kvsp") != 1 or not isinstance(services, dict):
            raise BadAnswerError(source, "its /.well-known/kvsp is not of KVSP version 1")
        codecs, moqt = (_list(tree.get(name)) for name in ("codecs", "moqt"))
        try:
            for each in services.values():
                check_base_uri(each, http_loopback=http_loopback)
        except (DecodeError, TypeError, AttributeError):
            raise BadAnswerError(source, "its /.well-known/kvsp names no base URIs") from None
        return cls(
            services,
            tuple(each for each in codecs if type(each) is int),
            tuple(each for each in moqt if isinstance(each, str)),
        )


def json_object(answer: Answer) -> dict[str, Any]:
    """The body of an answer as a JSON object. Raises BadAnswerError."""
    tree = answer.json()
    if not isinstance(tree, dict):
        raise BadAnswerError(answer.source, "its answer is no JSON object")
    return tree


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def check_lookup(index: str, request: LookupRequest, found: LookupResponse) -> None:
    """The blocks are the leading ones that were asked for, and their records say the same."""
    asked = (request.compat_id, request.scope_id)
    if found.matched > len(request.block_keys):
        raise BadAnswerError(index, "it matched more blocks than were asked for")
    for key, block in zip(request.block_keys, found.blocks, strict=False):
        if block.block_key != key:
            raise BadAnswerError(index, "its blocks are not the leading ones asked for")
        if any(record.block != BlockId(*asked, key) for record in block.replicas):
            raise BadAnswerError(index, "it answered with a record of another block")
