"""What an instance's status and caches mean in the CATS metric framework.

The framework has no JSON encoding and leaves raw metrics to each solution; names, form
and normalization are decisions of this project. Pure functions: a placement controller
and an instance show the same numbers by the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvsp.names.codes import InstanceState
from kvsp.records import costs
from kvsp.records.estimates import Candidate, Demand, Found, estimate
from kvsp.records.records import InstanceStatus, ReplicaRecord

FULL_LINK_MBIT_PER_S: Final = 100_000
"""The link that scores 10."""

_BEST: Final = 10
_MEASURED, _ESTIMATED, _NORMALIZED = "directly measured", "estimation", "normalization"


@dataclass(frozen=True, slots=True)
class CachedEntry:
    """A block present at an instance and the time to bring it to its device."""

    block_key: bytes
    size: int
    retrieval_us: int | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "block_key": self.block_key.hex(),
            "size": self.size,
            "retrieval_us": self.retrieval_us,
        }


def cached_entries(instance: str, found: Found) -> list[CachedEntry]:
    """The leading blocks that an instance holds whole, of those that were found."""
    entries = []
    for replicas in found.blocks:
        own = _own(instance, replicas, found.layers)
        if own is None:
            break
        # the tiers alone: there is no link in between
        retrieval_us = costs.round_up(costs.load_us(own, math.inf, found.layers))
        entries.append(CachedEntry(own.block_key, own.size, retrieval_us))
    return entries


def key_entry(replicas: Sequence[ReplicaRecord], instances: Collection[str]) -> dict[str, Any]:
    """A cache key that has replicas, its size, and which of `instances` hold some of it."""
    holders = sorted({replica.holder for replica in replicas} & set(instances))
    return {
        "block_key": replicas[0].block_key.hex(),
        "size": replicas[0].size,
        "instances": holders,
    }


def _own(instance: str, replicas: Sequence[ReplicaRecord], layers: int) -> ReplicaRecord | None:
    for replica in replicas:
        if replica.holder == instance and replica.holds(range(layers), layers):
            return replica
    return None


def metrics(
    status: InstanceStatus,
    *,
    mean_service_us: float = costs.DEFAULT_MEAN_SERVICE_US,
    cached: tuple[int, int] | None = None,
    demand: Demand | None = None,
) -> list[dict[str, Any]]:
    """The metrics of one instance, levels 0 to 2.

    `cached` is the number of resident blocks and their octets, where that is known;
    `demand` are the keys asked for and what was found of them. What cannot be computed
    is left out.
    """
    raw = [
        _metric("kv_utilization", 4, "none", float(status.kv_utilization)),
        _metric("kv_prefill_rate", 4, "none", round(status.prefill_tokens_per_s)),
        _metric("kv_decode_rate", 4, "none", round(status.decode_tokens_per_s)),
        _metric("kv_queue_length", 4, "none", status.queued),
        _metric("kv_running", 4, "none", status.running),
    ]
    if cached is not None:
        raw.insert(0, _metric("kv_cached_blocks", 4, "none", cached[0]))
        raw.insert(1, _metric("kv_cached_octets", 8, "byte", cached[1]))
    saving = 1 - status.kv_utilization
    if demand is not None:
        matched, saving = _for_keys(status, mean_service_us, demand)
        raw += matched
    return raw + _scores(status, saving)


def _for_keys(
    status: InstanceStatus, mean_service_us: float, demand: Demand
) -> tuple[list[dict[str, Any]], float]:
    """The metrics that depend on keys, and the part of the recomputation that is saved."""
    found = demand.found
    blocks = len(cached_entries(status.instance, found))
    choice = estimate(demand, Candidate(status, mean_service_us))
    tokens = blocks * found.block_tokens
    raw = [
        _metric("kv_matched_blocks", 4, "none", blocks),
        _metric("kv_matched_tokens", 4, "none", tokens),
    ]
    everything = None
    if demand.tokens is not None:
        everything = costs.recompute_us(demand.tokens, status.prefill_tokens_per_s)
    for name, value in (("kv_fetch_delay", choice.fetch_us), ("kv_recompute_delay", everything)):
        if value is not None:
            raw.append(_metric(name, 8, "us", value, source=_ESTIMATED))
    if choice.cost_us is None or not everything:
        return raw, 0.0
    return raw, 1 - min(1.0, choice.cost_us / everything)


def _scores(status: InstanceStatus, saving: float) -> list[dict[str, Any]]:
    """Levels 1 and 2: whole numbers from 0, the poorest, to 10."""
    load = status.running + status.queued
    room = 1 - load / (2 * status.batch_size) if status.batch_size else 0.0
    best_link = max((link.mbit_per_s for link in status.links), default=0)
    compute = _score(room)
    communication = _score(best_link / FULL_LINK_MBIT_PER_S)
    service = _score(saving)
    both = 0.4 * compute + 0.2 * communication + 0.4 * service
    whole = _score(both / _BEST) if status.state is InstanceState.ACTIVE else 0
    return [
        _metric("compute_norm", 1, "none", compute, "L1", _NORMALIZED),
        _metric("communication_norm", 1, "none", communication, "L1", _NORMALIZED),
        _metric("service_norm", 1, "none", service, "L1", _NORMALIZED),
        _metric("norm_fi", 1, "none", whole, "L2", _NORMALIZED),
    ]


def _score(part: float) -> int:
    """A part of one as a score, rounded half up."""
    return math.floor(_BEST * min(1.0, max(0.0, part)) + 0.5)


def _metric(
    metric_type: str,
    length: int,
    unit: str,
    value: float,
    level: str = "L0",
    source: str = _MEASURED,
) -> dict[str, Any]:
    made: dict[str, Any] = {
        "metric_type": metric_type,
        "level": level,
        "format": "float" if isinstance(value, float) else "int",
        "length": length,
        "unit": unit,
        "source": [source],
        "statistics": "cur",
        "value": value,
    }
    if isinstance(value, float):
        made["format_std"] = "ieee_754"
    return made
