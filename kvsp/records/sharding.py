"""Shard maps and reshard requests (KVSP "Sequence-Sharded Caches and Resharding").

Token ranges are half-open, here and in JSON. A map and a plan carry the Block Keys of the
whole context, so that a member fetches a range as blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from kvsp.names import ijson
from kvsp.names.codes import MAX_DIRECTIVE_MS, MAX_GEOMETRY, DecodeErrorName, ReshardState
from kvsp.names.errors import DecodeError
from kvsp.names.prefix import complete_blocks
from kvsp.records.members import (
    BASE_URI,
    HEX16,
    HEX32,
    TOKEN_RANGE,
    Named,
    Reading,
    Record,
    Source,
    array,
    integer,
    one_of,
    record,
    string,
)

_VERSION: Final = integer()
_KEYS: Final = array(HEX32)
_MAP: Final = string(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Shard(Record):
    """A token range and the instance that has it."""

    tokens: Annotated[range, TOKEN_RANGE]
    instance: Annotated[str, BASE_URI]


@dataclass(frozen=True, slots=True)
class ShardMap(Record):
    """A Shard Map (KVSP "Sequence-Sharded Caches and Resharding").

    Ranges start at 0 and follow each other; all ends but the last are on block borders.
    """

    map: Annotated[str, _MAP]
    version: Annotated[int, _VERSION]
    shards: Annotated[tuple[Shard, ...], array(record(Shard), least=1)]
    compat_id: Annotated[bytes, HEX32]
    scope_id: Annotated[bytes, HEX16]
    block_tokens: Annotated[int, integer(1, MAX_GEOMETRY)]
    block_keys: Annotated[tuple[bytes, ...], _KEYS]

    def check(self, reading: Reading, pointer: str) -> None:
        end = 0
        for index, shard in enumerate(self.shards):
            if shard.tokens.start != end or shard.tokens.start % self.block_tokens:
                detail = f"must start at {end}, on a border of blocks"
                at = f"{pointer}/shards/{index}/tokens"
                reading.fault(DecodeErrorName.OUT_OF_RANGE, at, detail)
            end = shard.tokens.stop
        if len(self.block_keys) != complete_blocks(end, self.block_tokens):
            detail = f"{end} tokens have {complete_blocks(end, self.block_tokens)} complete blocks"
            reading.fault(DecodeErrorName.OUT_OF_RANGE, pointer + "/block_keys", detail)


@dataclass(frozen=True, slots=True)
class ReshardFetch(Record):
    """A token range to load from another member."""

    tokens: Annotated[range, TOKEN_RANGE]
    source: Annotated[str, BASE_URI, Named("from")]


@dataclass(frozen=True, slots=True)
class ReshardPlan(Record):
    """What one member keeps, loads and, after the commit, releases."""

    map: Annotated[str, _MAP]
    from_version: Annotated[int, _VERSION, Named("from")]
    to_version: Annotated[int, _VERSION, Named("to")]
    deadline_ms: Annotated[int, integer(1, MAX_DIRECTIVE_MS)]
    retain: Annotated[tuple[range, ...], array(TOKEN_RANGE)]
    fetch: Annotated[tuple[ReshardFetch, ...], array(record(ReshardFetch))]
    release: Annotated[tuple[range, ...], array(TOKEN_RANGE)]
    compat_id: Annotated[bytes, HEX32]
    scope_id: Annotated[bytes, HEX16]
    block_tokens: Annotated[int, integer(1, MAX_GEOMETRY)]
    block_keys: Annotated[tuple[bytes, ...], _KEYS]

    def check(self, reading: Reading, pointer: str) -> None:
        if self.to_version != self.from_version + 1:
            detail = f"must follow version {self.from_version}"
            reading.fault(DecodeErrorName.OUT_OF_RANGE, pointer + "/to", detail)
        named = {
            "retain": self.retain,
            "fetch": [part.tokens for part in self.fetch],
            "release": self.release,
        }
        for name, ranges in named.items():
            for index, tokens in enumerate(ranges):
                if tokens.start % self.block_tokens:
                    at = f"{pointer}/{name}/{index}" + ("/tokens" if name == "fetch" else "")
                    detail = "must start on a border of blocks"
                    reading.fault(DecodeErrorName.OUT_OF_RANGE, at, detail)


@dataclass(frozen=True, slots=True)
class ReshardCommit(Record):
    """Version `commit` is authoritative from now on."""

    map: Annotated[str, _MAP]
    commit: Annotated[int, _VERSION]


@dataclass(frozen=True, slots=True)
class ReshardAbort(Record):
    """Version `abort` will not be; what was fetched for it is discarded."""

    map: Annotated[str, _MAP]
    abort: Annotated[int, _VERSION]


@dataclass(frozen=True, slots=True)
class ReshardAnswer(Record):
    """A member's answer to a plan, a commit or an abort."""

    map: Annotated[str, _MAP]
    version: Annotated[int, _VERSION]
    state: Annotated[ReshardState, one_of(ReshardState)]


def parse_reshard(
    source: Source, *, http_loopback: bool = False
) -> ReshardPlan | ReshardCommit | ReshardAbort:
    """Read the body of POST reshard: a commit or abort by its member, else a plan.

    Raises DecodeError as `Record.from_json`; `wrong-type` for a commit that is an abort.
    """
    tree = source if isinstance(source, Mapping) else ijson.loads(source)
    if not isinstance(tree, Mapping):
        raise DecodeError(DecodeErrorName.NOT_AN_OBJECT, "a reshard request is a JSON object")
    if "commit" in tree and "abort" in tree:
        raise DecodeError(DecodeErrorName.WRONG_TYPE, "both commit and abort are given", "/abort")
    kind: type[ReshardPlan] | type[ReshardCommit] | type[ReshardAbort] = ReshardPlan
    if "commit" in tree:
        kind = ReshardCommit
    elif "abort" in tree:
        kind = ReshardAbort
    return kind.from_json(tree, http_loopback=http_loopback)
