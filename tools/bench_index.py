"""How an Index Service does with many records: memory, insert rate, lookup latency.

    python -m tools.bench_index --records 1000000
    python -m tools.bench_index --records 1000000 --redis redis://127.0.0.1:6379/

Prints one JSON object. Latencies are those of a lookup of 512 keys that all match, its
answer's JSON included; RSS is that of this process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvsp.index.service import IndexService
from kvsp.index.sqlite import SqliteStore
from kvsp.index.store import Entry, ReplicaStore, StoreLimits
from kvsp.index.stored import stored_form
from kvsp.names.identity import Descriptor
from kvsp.principals import EVERY_SCOPE, Principal
from kvsp.records.records import LookupRequest, ReplicaRecord, replica_digest

SCOPE = bytes(16)
HOLDERS = [f"https://h{number}.example/kvsp/" for number in range(16)]
KEYS_PER_LOOKUP = 512
BATCH = 2000
READER = Principal("bench", scopes={EVERY_SCOPE: frozenset({"read"})})


def descriptor(layers: int) -> Descriptor:
    return Descriptor.parse(
        {
            "model": "bench",
            "model_digest": "sha-256:" + "1" * 64,
            "tokenizer_digest": "sha-256:" + "2" * 64,
            "layers": layers,
            "kv_heads": 8,
            "head_dim": 128,
            "kv_dtype": "bf16",
            "positional": "rope",
            "block_tokens": 16,
            "layout": "kvsp-layout-1",
        }
    )


def key(number: int) -> bytes:
    """A Block Key as random as real ones, and the same in every run."""
    return (number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "big") * 4


def fill(store: ReplicaStore, geometry: Descriptor, records: int) -> float:
    """Insert records; the seconds it took, the making of the records not counted."""
    digests = tuple(bytes([layer]) * 32 for layer in range(geometry.layers))
    made = ReplicaRecord(
        block_key=bytes(32),
        compat_id=geometry.compat_id,
        scope_id=SCOPE,
        holder=HOLDERS[0],
        codec=1,
        size=2 * geometry.layers * geometry.section_octets(),
        digest=replica_digest(digests),
        ttl_ms=3_600_000,
        layer_digests=digests,
    )
    seconds = 0.0
    for first in range(0, records, BATCH):
        now_ms = time.time_ns() // 1_000_000
        entries = []
        for number in range(first, min(first + BATCH, records)):
            one = replace(made, block_key=key(number), holder=HOLDERS[number % len(HOLDERS)])
            data = stored_form(one, geometry)
            expires_ms = now_ms + one.ttl_ms
            entries.append(Entry(one.block, one.replica_id, one.holder, expires_ms, data))
        started = time.perf_counter()
        store.put(entries, now_ms)
        seconds += time.perf_counter() - started
    return seconds


def look_up(service: IndexService, geometry: Descriptor, records: int) -> list[float]:
    """Milliseconds of lookups spread over all records."""
    milliseconds = []
    for turn in range(100):
        first = turn * max(records - KEYS_PER_LOOKUP, 1) // 100
        keys = tuple(key(n) for n in range(first, min(first + KEYS_PER_LOOKUP, records)))
        request = LookupRequest(SCOPE, geometry.compat_id, keys)
        started = time.perf_counter()
        answer = service.lookup(READER, request, time.time_ns() // 1_000_000)
        answer.to_json()
        milliseconds.append(1000 * (time.perf_counter() - started))
        assert len(answer.keys) == len(keys)
    return milliseconds


def bench(records: int, layers: int, redis_url: str | None, folder: Path) -> dict[str, Any]:
    """Fill a store, look up in it, and expire it."""
    geometry = descriptor(layers)
    limits = StoreLimits(records_per_scope=records, records=records)
    store: ReplicaStore
    if redis_url is None:
        store = SqliteStore(folder / "index.db", limits)
    else:
        from kvsp.index.redis import RedisStore

        store = RedisStore(redis_url, limits, prefix=f"bench-{os.getpid()}")
    before = _rss_mib()
    service = IndexService(store)
    service.put_descriptor(geometry.compat_id, geometry.jcs)
    seconds = fill(store, geometry, records)
    latencies = look_up(service, geometry, records)
    stored = store.counts().records
    started = time.perf_counter()
    removed = store.delete_holder(HOLDERS[0], None)
    withdrawal = time.perf_counter() - started
    result = {
        "store": "sqlite" if redis_url is None else "redis",
        "records": stored,
        "layers": layers,
        "inserts_per_s": round(records / seconds),
        "lookup_keys": KEYS_PER_LOOKUP,
        "lookup_ms_p50": round(statistics.median(latencies), 2),
        "lookup_ms_p99": round(sorted(latencies)[-2], 2),
        "holder_withdrawn_per_s": round(removed / withdrawal),
        "rss_mib_before": round(before),
        "rss_mib_after": round(_rss_mib()),
        "file_mib": round(sum(f.stat().st_size for f in folder.iterdir()) / 2**20),
    }
    if redis_url is not None:
        for holder in HOLDERS:
            store.delete_holder(holder, None)
    store.close()
    return result


def _rss_mib() -> float:
    """The peak so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--redis", metavar="URL", help="measure this server instead of SQLite")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = bench(arguments.records, arguments.layers, arguments.redis, Path(folder))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
