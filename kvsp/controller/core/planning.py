"""What each member of a Shard Map does to get to the next version
(KVSP "Sequence-Sharded Caches and Resharding").

Token ranges are half-open. Everything here is arithmetic on valid maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvsp.records.sharding import ReshardFetch, ReshardPlan, Shard, ShardMap


@dataclass(slots=True)
class MemberPlan:
    """What one instance retains, fetches (and from whom) and releases, in token order."""

    retain: list[range] = field(default_factory=list)
    fetch: list[ReshardFetch] = field(default_factory=list)
    release: list[range] = field(default_factory=list)

    def to_record(self, old: ShardMap, new: ShardMap, deadline_ms: int) -> ReshardPlan:
        """The plan as it is sent."""
        return ReshardPlan(
            map=new.map,
            from_version=old.version,
            to_version=new.version,
            deadline_ms=deadline_ms,
            retain=tuple(self.retain),
            fetch=tuple(self.fetch),
            release=tuple(self.release),
            compat_id=new.compat_id,
            scope_id=new.scope_id,
            block_tokens=new.block_tokens,
            block_keys=new.block_keys,
        )


def plan_members(old: Sequence[Shard], new: Sequence[Shard]) -> dict[str, MemberPlan]:
    """One plan for each instance in either map.

    What an instance has in both is retained and never fetched; what it newly gets is
    fetched from its old owner; what it had and loses is released. Tokens only the new
    map covers are in no plan: their owner computes them.
    """
    plans: dict[str, MemberPlan] = {shard.instance: MemberPlan() for shard in (*old, *new)}
    bounds = {bound for s in (*old, *new) for bound in (s.tokens.start, s.tokens.stop)}
    for start, stop in pairwise(sorted(bounds)):
        piece = range(start, stop)
        before, after = owner_of(old, start), owner_of(new, start)
        if before is None:
            continue
        if before == after:
            _extend(plans[before].retain, piece)
            continue
        _extend(plans[before].release, piece)
        if after is not None:
            _extend_fetch(plans[after].fetch, piece, before)
    return plans


def owner_of(shards: Sequence[Shard], token: int) -> str | None:
    """The instance that has a token."""
    for shard in shards:
        if token in shard.tokens:
            return shard.instance
    return None


def _extend(ranges: list[range], piece: range) -> None:
    if ranges and ranges[-1].stop == piece.start:
        ranges[-1] = range(ranges[-1].start, piece.stop)
    else:
        ranges.append(piece)


def _extend_fetch(parts: list[ReshardFetch], piece: range, source: str) -> None:
    last = parts[-1] if parts else None
    if last is not None and last.source == source and last.tokens.stop == piece.start:
        parts[-1] = ReshardFetch(range(last.tokens.start, piece.stop), source)
    else:
        parts.append(ReshardFetch(piece, source))
