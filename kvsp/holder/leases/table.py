"""Leases: what must not be evicted, for whom and how long (KVSP "Leases").

Sans-IO: `now` is in seconds of one monotonic clock.
"""

from __future__ import annotations

import heapq
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from kvsp.names.bounds import Count, Whole
from kvsp.names.errors import KvspError
from kvsp.names.uris import BlockId


class LeaseQuotaError(KvspError):
    """A lease would exceed the quota of its client; nothing was granted.

    `retry_after` is in seconds, None when waiting does not help.
    """

    def __init__(self, detail: str, available: int, retry_after: float | None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.available = available
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseQuota:
    """What one client may have under lease; beyond, 429 `kvsp-lease-quota`."""

    octets: Whole = 0
    """Octets, each replica counted once; 0 is a quarter of what the holder can hold."""

    ttl_ms: Count = 60_000
    """Longest TTL of one lease."""

    leases: Count = 4096
    """Leases at once."""

    keys: Count = 262_144
    """Block Keys in all its leases together, the missing ones included."""

    request_keys: Count = 65_536
    """Block Keys in one request; beyond, 413."""


@dataclass(slots=True)
class Lease:
    """A granted lease; `blocks` are the replicas it holds, nothing is added later."""

    lease_id: str
    client: str
    blocks: tuple[BlockId, ...]
    ttl_ms: int
    expires: float
    missing: tuple[BlockId, ...] = ()


@dataclass(slots=True)
class _Account:
    leases: set[str] = field(default_factory=set)
    held: Counter[BlockId] = field(default_factory=Counter)
    octets: int = 0
    keys: int = 0


class LeaseTable:
    """All leases of a holder. An expired lease is gone at the first call after its end."""

    def __init__(
        self,
        quota: LeaseQuota,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
        on_ended: Callable[[str], None] = lambda lease_id: None,
        on_free: Callable[[BlockId], None] = lambda block: None,
    ) -> None:
        """`on_ended` is called with each lease that has ended, however it did, `on_free` with
        each block that no lease covers any more."""
        self.quota = quota
        self.granted = 0
        self.refused = 0
        self._new_id = new_id
        self._on_ended = on_ended
        self._on_free = on_free
        self._leases: dict[str, Lease] = {}
        self._accounts: dict[str, _Account] = {}
        self._sizes: dict[BlockId, int] = {}
        self._octets = 0
        self._holders: dict[BlockId, set[str]] = {}
        self._deadlines: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def octets(self) -> int:
        """Octets under lease, each replica counted once."""
        return self._octets

    def acquire(
        self,
        client: str,
        blocks: Mapping[BlockId, int],
        ttl_ms: int,
        now: float,
        missing: tuple[BlockId, ...] = (),
    ) -> Lease:
        """Lease `blocks` (with their octets) to `client` for exactly `ttl_ms`.

        Raises LeaseQuotaError, and then nothing is granted.
        """
        self.expire(now)
        account = self._accounts.get(client, _Account())
        fresh = {block: size for block, size in blocks.items() if block not in account.held}
        keys = len(blocks) + len(missing)
        self._check(client, account, sum(fresh.values()), keys, ttl_ms, now)
        lease = Lease(self._new_id(), client, tuple(blocks), ttl_ms, now + ttl_ms / 1000, missing)
        self._add(lease, blocks)
        self.granted += 1
        return lease

    def restore(self, lease: Lease, sizes: Mapping[BlockId, int], now: float) -> None:
        """Have a lease of before the restart again, of those blocks that are still here, for
        all of its time. Its quota was asked for then."""
        blocks = {block: sizes[block] for block in lease.blocks if block in sizes}
        if not blocks:
            self._on_ended(lease.lease_id)
            return
        self._add(replace(lease, blocks=tuple(blocks), expires=now + lease.ttl_ms / 1000), blocks)

    def _add(self, lease: Lease, blocks: Mapping[BlockId, int]) -> None:
        account = self._accounts.setdefault(lease.client, _Account())
        self._leases[lease.lease_id] = lease
        account.leases.add(lease.lease_id)
        account.keys += len(lease.blocks) + len(lease.missing)
        for block, size in blocks.items():
            if block not in account.held:
                account.octets += size
            if block not in self._sizes:
                self._sizes[block] = size
                self._octets += size
            account.held[block] += 1
            self._holders.setdefault(block, set()).add(lease.lease_id)
        self._schedule(lease)

    def renew(self, client: str, lease_id: str, ttl_ms: int, now: float) -> Lease | None:
        """Start the time of a lease again; None for one that is not `client`'s or is gone.

        Raises LeaseQuotaError for a TTL above the quota.
        """
        lease = self.get(client, lease_id, now)
        if lease is None:
            return None
        self._check_ttl(client, ttl_ms)
        lease.ttl_ms, lease.expires = ttl_ms, now + ttl_ms / 1000
        self._schedule(lease)
        return lease

    def get(self, client: str, lease_id: str, now: float) -> Lease | None:
        """An unexpired lease of `client`."""
        self.expire(now)
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.client == client else None

    def release(self, client: str, lease_id: str, now: float) -> bool:
        """End a lease; False for one that is not `client`'s or is gone."""
        if self.get(client, lease_id, now) is None:
            return False
        self._remove(lease_id)
        return True

    def is_leased(self, block: BlockId, now: float) -> bool:
        """Whether an unexpired lease covers the block."""
        self.expire(now)
        return block in self._holders

    def remaining_ms(self, block: BlockId, now: float) -> int:
        """Milliseconds until the last lease on the block ends; 0 without one."""
        self.expire(now)
        ends = [self._leases[key].expires for key in self._holders.get(block, ())]
        return max(0, round((max(ends) - now) * 1000)) if ends else 0

    def next_end(self, now: float) -> float | None:
        """Seconds until the next lease ends; None without leases."""
        self.expire(now)
        return self._deadlines[0][0] - now if self._deadlines else None

    def revoke(self, block: BlockId) -> int:
        """End every lease on a block that a fault took away; returns how many."""
        hit = tuple(self._holders.get(block, ()))
        for lease_id in hit:
            self._remove(lease_id)
        return len(hit)

    def expire(self, now: float) -> None:
        """Drop leases whose time is over."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.expires <= now:
                self._remove(lease_id)

    def _check(
        self, client: str, account: _Account, octets: int, keys: int, ttl_ms: int, now: float
    ) -> None:
        self._check_ttl(client, ttl_ms)
        available = self.quota.octets - account.octets
        ends = [self._leases[key].expires for key in account.leases]
        wait = max(0.0, min(ends) - now) if ends else None
        if octets > available:
            self.refused += 1
            raise LeaseQuotaError(
                f"{octets} octets more for {client!r}, who has {available} of "
                f"{self.quota.octets} left; lease fewer blocks or release some",
                available,
                wait if octets <= self.quota.octets else None,
            )
        if len(account.leases) >= self.quota.leases or account.keys + keys > self.quota.keys:
            self.refused += 1
            raise LeaseQuotaError(
                f"{client!r} has {len(account.leases)} leases with {account.keys} keys already; "
                "release some",
                available,
                wait,
            )

    def _check_ttl(self, client: str, ttl_ms: int) -> None:
        if ttl_ms > self.quota.ttl_ms:
            self.refused += 1
            account = self._accounts.get(client, _Account())
            raise LeaseQuotaError(
                f"a lease lasts at most {self.quota.ttl_ms} ms, not {ttl_ms}; renew it instead",
                self.quota.octets - account.octets,
                None,
            )

    def _schedule(self, lease: Lease) -> None:
        heapq.heappush(self._deadlines, (lease.expires, lease.lease_id))
        if len(self._deadlines) > 64 + 4 * len(self._leases):
            # renewals leave their old ends behind
            self._deadlines = [(each.expires, key) for key, each in self._leases.items()]
            heapq.heapify(self._deadlines)

    def _remove(self, lease_id: str) -> None:
        lease = self._leases.pop(lease_id)
        self._on_ended(lease_id)
        account = self._accounts[lease.client]
        account.leases.remove(lease_id)
        account.keys -= len(lease.blocks) + len(lease.missing)
        for block in lease.blocks:
            _decrement(account.held, block)
            if block not in account.held:
                account.octets -= self._sizes[block]
            holders = self._holders[block]
            holders.remove(lease_id)
            if not holders:
                self._octets -= self._sizes.pop(block)
                del self._holders[block]
                self._on_free(block)
        if not account.leases:
            del self._accounts[lease.client]


def _decrement(counts: Counter[BlockId], block: BlockId) -> None:
    counts[block] -= 1
    assert counts[block] >= 0, "a lease was released twice"
    if not counts[block]:
        del counts[block]
