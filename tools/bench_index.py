"""How an Index Service does with many records: memory, insert rate, lookup latency.

    python -m tools.bench_index --records 1000000
    python -m tools.bench_index --records 1000000 --redis redis://127.0.0.1:6379/
    python -m tools.bench_index --kept 2000000 --layers 2

Prints one JSON object. Latencies are those of a lookup of 512 keys that all match, its
answer's JSON included; RSS is that of this process. With `--kept`, so many records of 100
holders are kept alive: the share of one core is the CPU time of their keep-alives over HTTP,
as often as they are due, and of the index's own sweeps, by the time that passes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvsp.http.app import App
from kvsp.http.limits import HttpLimits
from kvsp.index.app import IndexApp
from kvsp.index.service import IndexLimits, IndexService
from kvsp.index.sqlite import SqliteStore
from kvsp.index.store import KEPT_MS, Entry, ReplicaStore, StoreLimits
from kvsp.index.stored import stored_form
from kvsp.names.identity import Descriptor
from kvsp.principals import EVERY_SCOPE, Principal
from kvsp.records.records import KeptAnswer, LookupRequest, ReplicaRecord, replica_digest
from tests.kvsp.support_http import Client, Principals, running

SCOPE = bytes(16)
HOLDERS = [f"https://h{number}.example/kvsp/" for number in range(16)]
KEYS_PER_LOOKUP = 512
BATCH = 2000
KEEPERS = [f"https://h{number}.example/kvsp/" for number in range(100)]
KEPT_TTL_MS = 600_000
KEPT_AFTER = 0.4
"""The part of its TTL after which a holder keeps its records alive again."""

SWEEP_S = 1.0
PUBLISHED = 256
"""Records in one request of a holder."""

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


def replica(geometry: Descriptor) -> ReplicaRecord:
    """A record, to be made others of."""
    digests = tuple(bytes([layer]) * 32 for layer in range(geometry.layers))
    return ReplicaRecord(
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


def fill(
    store: ReplicaStore,
    geometry: Descriptor,
    records: int,
    holders: Sequence[str] = HOLDERS,
    *,
    kept: bool = False,
) -> float:
    """Insert records; the seconds it took, the making of the records not counted."""
    made, seconds = replica(geometry), 0.0
    block, no_key = made.block, made.block_key.hex().encode()
    # one of each holder is made, the others have another key in it
    of_holder = [replace(made, holder=holder) for holder in holders]
    forms = [(one.holder, one.replica_id, stored_form(one, geometry)) for one in of_holder]
    for first in range(0, records, BATCH):
        now_ms = time.time_ns() // 1_000_000
        entries = []
        for number in range(first, min(first + BATCH, records)):
            holder, replica_id, form = forms[number % len(forms)]
            data = form.replace(no_key, key(number).hex().encode(), 1)
            expires_ms = KEPT_MS if kept else now_ms + made.ttl_ms
            filed = block._replace(block_key=key(number))
            entries.append(Entry(filed, replica_id, holder, expires_ms, data))
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


class Kept:
    """An index that keeps records of many holders, behind HTTP, at a time of its own."""

    def __init__(self, records: int, layers: int, folder: Path) -> None:
        self.now_ms = time.time_ns() // 1_000_000
        self.geometry = descriptor(layers)
        limits = StoreLimits(records_per_scope=2 * records, records=2 * records)
        store = SqliteStore(folder / "kept.db", limits)
        self.service = IndexService(store, limits=IndexLimits(records=PUBLISHED))
        self.service.put_descriptor(self.geometry.compat_id, self.geometry.jcs)
        fill(store, self.geometry, records, KEEPERS, kept=True)
        self.index = IndexApp(self.service, sweep_s=3600, clock_ms=lambda: self.now_ms)
        rights = {EVERY_SCOPE: frozenset({"read", "write"})}
        who = Principal("bench", uris=frozenset(KEEPERS), scopes=rights)
        self.app = App(
            [self.index],
            base_uri="https://is.example/kvsp/",
            authenticator=Principals(who),
            limits=HttpLimits(requests_per_s=1e9, burst=1e9),
        )
        self.client = Client(self.app, "bench")

    async def keep(self, holder: str, records: Sequence[ReplicaRecord] = ()) -> KeptAnswer:
        """One request of a holder."""
        body = {
            "holder": holder,
            "ttl_ms": KEPT_TTL_MS,
            "records": [each.to_dict() for each in records],
        }
        answer = await self.client.request("POST", "replicas", json_body=body)
        assert answer.status == 200, answer.body
        return KeptAnswer.from_json(answer.body)

    async def published_per_s(self, first: int) -> float:
        """New records that a core takes in a second, HTTP and JSON included."""
        made, seconds, rounds = replica(self.geometry), 0.0, 8
        for turn in range(rounds):
            numbers = range(first + turn * PUBLISHED, first + (turn + 1) * PUBLISHED)
            each = [replace(made, block_key=key(n), holder=KEEPERS[0]) for n in numbers]
            started = time.process_time()
            answer = await self.keep(KEEPERS[0], each)
            seconds += time.process_time() - started
            assert all(result == {"created": True} for result in answer.results)
        return rounds * PUBLISHED / seconds

    async def kept_alive(self, records: int) -> tuple[float, float]:
        """CPU seconds of a keep-alive and of a sweep, over three TTLs in which every record is
        found at the end of each."""
        keeping = sweeping = 0.0
        rounds = round(3 / KEPT_AFTER)
        for _ in range(rounds):
            started = time.process_time()
            total = sum([(await self.keep(holder)).records for holder in KEEPERS])
            keeping += time.process_time() - started
            assert total >= records
            self.now_ms += round(KEPT_AFTER * KEPT_TTL_MS)
            started = time.process_time()
            await self.index.run(self.index.sweep)
            sweeping += time.process_time() - started
            keys = tuple(key(n) for n in range(0, records, max(1, records // KEYS_PER_LOOKUP)))
            request = LookupRequest(SCOPE, self.geometry.compat_id, keys)
            assert len(self.service.lookup(READER, request, self.now_ms).keys) == len(keys)
        return keeping / rounds / len(KEEPERS), sweeping / rounds


async def bench_kept(records: int, layers: int, folder: Path) -> dict[str, Any]:
    """Keep records of 100 holders alive; the share of one core that it takes."""
    made = Kept(records, layers, folder)
    async with running(made.app):
        keep_s, sweep_s = await made.kept_alive(records)
        published = await made.published_per_s(records)
    per_second = keep_s * len(KEEPERS) / (KEPT_AFTER * KEPT_TTL_MS / 1000) + sweep_s / SWEEP_S
    return {
        "kept_records": records,
        "holders": len(KEEPERS),
        "layers": layers,
        "ttl_s": KEPT_TTL_MS // 1000,
        "keep_alive_ms": round(1000 * keep_s, 3),
        "sweep_ms": round(1000 * sweep_s, 3),
        "core_share_percent": round(100 * per_second, 3),
        "published_per_cpu_s": round(published),
        "rss_mib": round(_rss_mib()),
    }


def _rss_mib() -> float:
    """The peak so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kept", type=int, metavar="RECORDS", help="keep so many alive instead")
    parser.add_argument("--redis", metavar="URL", help="measure this server instead of SQLite")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.kept:
            result = asyncio.run(bench_kept(arguments.kept, arguments.layers, Path(folder)))
        else:
            result = bench(arguments.records, arguments.layers, arguments.redis, Path(folder))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
