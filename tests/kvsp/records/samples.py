"""A sample of every record."""

from __future__ import annotations

from typing import Any

from kvsp.records import records, sharding
from kvsp.records.members import Record
from kvsp.records.records import (
    KeptAnswer,
    KeptRecords,
    LookupRequest,
    LookupResponse,
    PrefetchDirective,
    ReplicaRecord,
    SessionCheckpoint,
)
from kvsp.records.sharding import ReshardAbort, ReshardCommit, ReshardPlan, ShardMap
from tests.kvsp.support_vectors import VECTORS

H1, H2, II7, II9 = (f"https://{name}.example/kvsp/" for name in ("h1", "h2", "ii7", "ii9"))
TARGET = II7
KEY, KEY2, COMPAT, SCOPE = "ab" * 32, "cd" * 32, "01" * 32, "02" * 16
UUID = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"
REPLICA: dict[str, Any] = VECTORS["replica_record"]["valid"][0]["record"]
CHECKPOINT = {
    "session": UUID,
    "epoch": 1,
    "compat_id": COMPAT,
    "scope_id": SCOPE,
    "prompt_blocks": [KEY, KEY2],
    "prompt_tail": [374, 264],
    "generated": [1296, 315, 279],
    "output_offset": 3,
    "sampler": {
        "method": "top-p",
        "params": {"p": 0.9},
        "seed": 7,
        "step": 3,
        "deterministic": False,
    },
}
CONTEXT = {"compat_id": COMPAT, "scope_id": SCOPE, "block_tokens": 4, "block_keys": [KEY, KEY2]}
SAMPLES: dict[type[Record], dict[str, Any]] = {
    ReplicaRecord: REPLICA,
    records.Residency: {"tier": "device", "layers": [0, 15]},
    records.ReplicaList: {"replicas": [REPLICA]},
    records.TtlAnswer: {"ttl_ms": 1},
    records.StoredBlock: {
        "digest": "sha-256:" + KEY,
        "layer_digests": [KEY],
        "size": 64,
        "codec": 1,
    },
    KeptRecords: {"holder": H1, "ttl_ms": 600_000, "records": [REPLICA]},
    KeptAnswer: {"ttl_ms": 600_000, "records": 2, "results": [{"created": True}]},
    LookupRequest: {
        "scope_id": SCOPE,
        "compat_id": COMPAT,
        "block_keys": [KEY, KEY2],
        "targets": [II7, II9],
    },
    records.MatchedBlock: {"block_key": KEY, "replicas": []},
    records.TargetEstimate: {"target": II7, "fetch_us": None, "recompute_us": 762},
    LookupResponse: {
        "matched": 1,
        "blocks": [{"block_key": KEY, "replicas": [REPLICA]}],
        "targets": [{"target": II7, "fetch_us": 180, "recompute_us": None}],
    },
    records.Link: {"holder": H1, "mbit_per_s": 200000, "rtt_us": 12},
    records.InstanceStatus: {
        "instance": II7,
        "epoch": 12,
        "state": "active",
        "running": 18,
        "queued": 3,
        "batch_size": 32,
        "kv_utilization": 0.71,
        "prefill_tokens_per_s": 42000,
        "decode_tokens_per_s": 3100,
        "links": [{"holder": H1, "mbit_per_s": 200000, "rtt_us": 12}],
        "requested_state": None,
        "ttl_ms": 3000,
    },
    records.StateRequest: {"state": "draining"},
    records.StateReport: {"state": "sleeping", "epoch": 3, "sessions": 0},
    records.DirectiveBlock: {"block_key": KEY, "sources": [H1]},
    PrefetchDirective: {
        "directive": UUID,
        "request_ref": "opaque",
        "scope_id": SCOPE,
        "compat_id": COMPAT,
        "blocks": [{"block_key": KEY, "sources": [H1]}],
        "layer_order": "ascending",
        "deadline_ms": 50,
        "lease_ms": 2000,
    },
    records.FailedBlock: {"block_key": KEY, "reason": "kvsp-lease-quota"},
    records.PrefetchStatus: {
        "directive": UUID,
        "state": "pending",
        "loaded": [KEY],
        "failed": [{"block_key": KEY2, "reason": "timeout"}],
        "remaining_ms": 31,
    },
    records.LeaseRequest: {
        "compat_id": COMPAT,
        "scope_id": SCOPE,
        "block_keys": [KEY],
        "ttl_ms": 2000,
    },
    records.LeaseGrant: {"lease": UUID, "ttl_ms": 2000, "leased": [KEY], "missing": []},
    records.Sampler: CHECKPOINT["sampler"],  # type: ignore[dict-item]
    SessionCheckpoint: CHECKPOINT,
    records.CheckpointDelta: {
        "session": UUID,
        "epoch": 1,
        "after": 3,
        "generated": [1296, 4],
        "output_offset": 5,
        "sampler": CHECKPOINT["sampler"],
    },
    records.SessionProgress: {"session": UUID, "epoch": 2, "output_offset": 3},
    records.Resume: {"epoch": 2, "checkpoint": CHECKPOINT},
    records.OutputToken: {"session": UUID, "epoch": 2, "index": 3, "token": 1296},
    sharding.Shard: {"tokens": [0, 4], "instance": II7},
    ShardMap: {
        "map": "c3f8.e1",
        "version": 4,
        "shards": [{"tokens": [0, 4], "instance": II7}, {"tokens": [4, 11], "instance": II9}],
        **CONTEXT,
    },
    sharding.ReshardFetch: {"tokens": [4, 8], "from": II9},
    ReshardPlan: {
        "map": "c3f8.e1",
        "from": 4,
        "to": 5,
        "deadline_ms": 200,
        "retain": [[0, 4]],
        "fetch": [{"tokens": [4, 8], "from": II9}],
        "release": [],
        **CONTEXT,
    },
    ReshardCommit: {"map": "c3f8.e1", "commit": 5},
    ReshardAbort: {"map": "c3f8.e1", "abort": 5},
    sharding.ReshardAnswer: {"map": "c3f8.e1", "version": 5, "state": "prepared"},
}


def replica(holder: str, size: int, residency: list[Any] | None = None) -> ReplicaRecord:
    tree: dict[str, Any] = {
        "block_key": "00" * 32,
        "compat_id": "00" * 32,
        "scope_id": "00" * 16,
        "holder": holder,
        "codec": 1,
        "size": size,
        "digest": "sha-256:" + "00" * 32,
        "ttl_ms": 1000,
    }
    if residency is not None:
        tree["residency"] = residency
    return ReplicaRecord.from_json(tree)
