"""Entries of a store of the index."""

from __future__ import annotations

import time

from kvsp.index.store import Entry
from kvsp.names.uris import BlockId

NOW = int(time.time() * 1000)
H1, H2 = "https://h1.example/kvsp/", "https://h2.example/kvsp/"


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def entry(
    number: int = 0,
    *,
    holder: str = H1,
    ttl_ms: int = 10_000,
    scope: int = 0,
    compat: int = 0,
    data: bytes = b"",
) -> Entry:
    block = BlockId(bytes([compat]) * 32, bytes([scope]) * 16, key(number))
    replica_id = holder[8:24]
    return Entry(block, replica_id, holder, NOW + ttl_ms, data or holder.encode())
