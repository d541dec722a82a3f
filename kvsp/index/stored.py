"""The form in which an index keeps a Replica Record, and what is read of it again.

A record is written once as the JSON of later answers: a lookup of hundreds of keys puts
texts together and decodes nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvsp.index.store import Replica
from kvsp.names.identity import Descriptor
from kvsp.records.members import encode_json
from kvsp.records.records import ReplicaRecord, Residency, covers

_WHOLE, _PARTIAL = b"w", b"p"
"""First octet of stored data: whether the replica has every layer. The record follows."""


def is_whole(replica: Replica) -> bool:
    """Whether the replica has every layer."""
    return replica.data[:1] == _WHOLE


def stored_form(record: ReplicaRecord, descriptor: Descriptor) -> bytes:
    """The record's JSON without its TTL, after an octet that tells whether it is whole."""
    tree = record.to_dict()
    del tree["ttl_ms"]
    whole = covers([record], descriptor.layers)
    return (_WHOLE if whole else _PARTIAL) + encode_json(tree)


def answer_form(replica: Replica, now_ms: int) -> msgspec.Raw:
    """The record's JSON with the TTL that remains."""
    remaining = max(replica.expires_ms - now_ms, 1)
    return msgspec.Raw(replica.data[1:-1] + b',"ttl_ms":%d}' % remaining)


class _Stored(msgspec.Struct):
    """What is needed of a stored record to estimate and to order."""

    block_key: str
    compat_id: str
    scope_id: str
    holder: str
    codec: int
    size: int
    digest: str
    residency: list[dict[str, Any]] | None = None
    moqt_namespace: str | None = None


_decoder = msgspec.json.Decoder(_Stored)


def brief_record(replica: Replica, now_ms: int) -> ReplicaRecord:
    """A stored record without its layer digests, which nothing here needs."""
    stored = _decoder.decode(replica.data[1:])
    residency = stored.residency and tuple(
        Residency(
            entry["tier"],
            range(entry["layers"][0], entry["layers"][1] + 1),
            entry.get("read_mbit_per_s"),
        )
        for entry in stored.residency
    )
    return ReplicaRecord(
        block_key=bytes.fromhex(stored.block_key),
        compat_id=bytes.fromhex(stored.compat_id),
        scope_id=bytes.fromhex(stored.scope_id),
        holder=stored.holder,
        codec=stored.codec,
        size=stored.size,
        digest=bytes.fromhex(stored.digest.rpartition(":")[2]),
        ttl_ms=max(replica.expires_ms - now_ms, 1),
        residency=residency or None,
        moqt_namespace=stored.moqt_namespace,
    )


class _Order(msgspec.Struct):
    holder: str
    codec: int
    moqt_namespace: str = ""


_order_decoder = msgspec.json.Decoder(_Order)


def order_of(replica: Replica) -> tuple[str, int, str]:
    """What answers are sorted by: holder, codec, and the namespace of MOQT replicas."""
    stored = _order_decoder.decode(replica.data[1:])
    return stored.holder, stored.codec, stored.moqt_namespace
