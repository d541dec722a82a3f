"""Where an Index Service keeps its records: the protocol that every store speaks.

Calls block; the shell makes them from worker threads. Times are milliseconds since the
Unix epoch, so that what a store keeps on disk or in another process expires on time
after a restart. The index is advisory (KVSP "Publishing and Withdrawing Replicas"): a
store may lose the last moments before a crash, holders publish again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from kvsp.names.bounds import Count, Whole
from kvsp.names.errors import KvspError
from kvsp.names.uris import BlockId

KEPT_MS: Final = 1 << 53
"""`expires_ms` of a record that lives as long as its holder is kept alive."""


class StoreError(KvspError):
    """The store cannot be opened or reached; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One replica: where it is filed, until when it counts, and its record as octets.

    `expires_ms` is a Unix time, or `KEPT_MS`; `data` means nothing to the store.
    """

    block: BlockId
    replica_id: str
    holder: str
    expires_ms: int
    data: bytes
    position: int = 0
    """Blocks before it in its prompt, as its holder says."""


class Replica(NamedTuple):
    """What a store gives back: the record's octets and when it expires (Unix time), for one
    that is kept with its holder when that does."""

    expires_ms: int
    data: bytes


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of a store. Where one is full the records that expire first go, of those that live
    with their holder the last blocks of prompts, and are counted as evicted."""

    records_per_scope: Count = 1_000_000
    """Records of one scope."""

    records: Count = 4_000_000
    """Records of all scopes; the largest one loses some."""

    replicas_per_block: Count = 256
    """Records of one block."""

    descriptors: Count = 10_000
    """Compatibility Descriptors; one more is refused with 507."""

    linger_ms: Whole = 60_000
    """How long expired records stay, to explain misses."""


class StoreCounts(NamedTuple):
    """`records` includes expired ones not yet removed; the others only ever rise."""

    records: int
    evicted: int
    expired: int


class Listed(NamedTuple):
    """Block Keys in ascending order; `next` is where the list goes on, None at its end."""

    keys: list[bytes]
    next: bytes | None


def listed(records: Sequence[tuple[bytes, bool]], limit: int) -> Listed:
    """What `ReplicaStore.list_keys` gives back of the records it looked at, each with its
    key and whether it has the Compatibility ID."""
    if not records:
        return Listed([], None)
    last = records[-1][0]
    # the last key may have more records than were looked at, so it is not left out
    keys = dict.fromkeys(key for key, wanted in records if wanted or key == last)
    return Listed(list(keys), last if len(records) >= limit else None)


class StoreFull(KvspError):
    """There is no room for another descriptor."""


class ReplicaStore(Protocol):
    """A store of Replica Records and Compatibility Descriptors.

    `threads` is how many threads may call at once. Every call raises StoreError when the
    store cannot be reached.
    """

    threads: int

    def put(self, entries: Sequence[Entry], now_ms: int, age_ms: int = 0) -> Sequence[bool | None]:
        """File entries, replacing those of the same block and replica; True for new ones.

        None for one that somebody withdrew in the last `age_ms`, since its request began to
        arrive: it is not filed. A store that one process has to itself need not know.
        """
        ...

    def keep_alive(self, holder: str, expires_ms: int, now_ms: int) -> int:
        """Let the kept records of a holder live until then; how many it has."""
        ...

    def get(
        self, scope_id: bytes, compat_id: bytes, keys: Sequence[bytes], now_ms: int
    ) -> list[list[Replica]]:
        """The unexpired replicas of each key, in the order of `keys`."""
        ...

    def list_keys(self, scope_id: bytes, compat_id: bytes, after: bytes, limit: int) -> Listed:
        """The Block Keys above `after` that can have replicas; `get` tells which have.

        Looks at no more than `limit` records of the scope, so that it may find fewer keys,
        or none, and still have a `next`.
        """
        ...

    def delete(self, block: BlockId, replica_id: str, now_ms: int) -> bool:
        """Remove one replica; whether it was there and unexpired."""
        ...

    def delete_holder(self, holder: str, scopes: Collection[bytes] | None) -> int:
        """Remove all replicas of a holder, in the given scopes or in all; how many."""
        ...

    def expire(self, now_ms: int, limit: int) -> int:
        """Remove at most about `limit` records that expired `linger_ms` ago; how many."""
        ...

    def traces(self, scope_id: bytes, block_key: bytes) -> list[tuple[bytes, Replica]]:
        """Every replica of a key under any Compatibility ID, expired ones included."""
        ...

    def has_replicas(self, holder: str, now_ms: int) -> bool:
        """Whether a holder has any unexpired replica."""
        ...

    def put_descriptor(self, compat_id: bytes, text: bytes) -> bool:
        """Keep a descriptor; True when it is new. Raises StoreFull."""
        ...

    def descriptor(self, compat_id: bytes) -> bytes | None:
        """The octets stored for a Compatibility ID."""
        ...

    def counts(self) -> StoreCounts:
        """The store's numbers; with very many scopes `records` may be that of a moment ago."""
        ...

    def close(self) -> None:
        """Let go of the store; it is not used afterwards."""
        ...
