"""An index service, the records it keeps and who asks it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvsp.index.service import IndexService
from kvsp.names.codes import InstanceState
from kvsp.names.identity import Descriptor, Scope, block_keys
from kvsp.principals import Principal
from kvsp.records.records import InstanceStatus, Link, LookupRequest, ReplicaRecord, replica_digest

DESCRIPTOR = Descriptor.parse(
    {
        "model": "example-model",
        "model_digest": "sha-256:" + "1" * 64,
        "tokenizer_digest": "sha-256:" + "2" * 64,
        "layers": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "kv_dtype": "bf16",
        "positional": "rope",
        "block_tokens": 16,
        "layout": "kvsp-layout-1",
    }
)
SCOPE, OTHER_SCOPE = Scope(bytes(32)), Scope(bytes([1]) * 32)
H1, H2, II7 = (f"https://{name}.example/kvsp/" for name in ("h1", "h2", "ii7"))
KEYS = block_keys(SCOPE, DESCRIPTOR, range(80))
NOW = 1_900_000_000_000


def principal(
    *uris: str, scope: Scope = SCOPE, rights: str = "read write", **more: Any
) -> Principal:
    return Principal(
        name="test",
        uris=frozenset(uris),
        scopes={scope.scope_id.hex(): frozenset(rights.split())},
        **more,
    )


HOLDER, CLIENT = principal(H1), principal(rights="read")


def record(number: int = 0, holder: str = H1, **changes: Any) -> ReplicaRecord:
    digests = tuple(bytes([number, layer]) * 16 for layer in range(32))
    made = ReplicaRecord(
        block_key=KEYS[number],
        compat_id=DESCRIPTOR.compat_id,
        scope_id=SCOPE.scope_id,
        holder=holder,
        codec=1,
        size=2_097_152,
        digest=bytes(32),
        ttl_ms=600_000,
        layer_digests=digests,
    )
    made = replace(made, **changes)
    if made.layer_digests is None or "digest" in changes:
        return made
    return replace(made, digest=replica_digest(made.layer_digests))


def publish(
    service: IndexService, made: ReplicaRecord, who: Principal = HOLDER, now: int = NOW
) -> Any:
    return service.publish(who, made.block, made.replica_id, made.to_dict(), now)


def request(count: int = 5, *targets: str) -> LookupRequest:
    return LookupRequest(SCOPE.scope_id, DESCRIPTOR.compat_id, tuple(KEYS[:count]), targets or None)


def status(*links: Link, **changes: Any) -> InstanceStatus:
    made = InstanceStatus(
        instance=II7,
        epoch=1,
        state=InstanceState.ACTIVE,
        running=0,
        queued=0,
        batch_size=32,
        kv_utilization=0.5,
        prefill_tokens_per_s=42_000,
        decode_tokens_per_s=3100,
        ttl_ms=3000,
        links=links,
    )
    return replace(made, **changes)
