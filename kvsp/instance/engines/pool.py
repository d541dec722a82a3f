"""The blocks in an engine's memory: bounded, pinned by whatever uses them (sans-IO)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from kvsp.instance.engines.engine import KvBlock
from kvsp.names.errors import KvspError
from kvsp.names.uris import BlockId


class CapacityError(KvspError):
    """Everything in the engine's memory is in use."""


class BlockPool:
    """Blocks by identity. What nobody pins goes when room is needed, the one used longest
    ago first; a full pool refuses with CapacityError."""

    def __init__(self, budget_octets: int) -> None:
        self.budget = budget_octets
        self.used = 0
        self.reserved = 0
        self.counters: Counter[str] = Counter()
        """`evicted`, `rejected`."""
        self.watch: Callable[[BlockId, int], None] = lambda block, by: None
        """Called with each block that has come, and 1, or has gone, and -1."""
        self._blocks: dict[BlockId, KvBlock] = {}
        self._free: OrderedDict[BlockId, None] = OrderedDict()
        """Those that nobody pins, the one used longest ago first."""

        self._pins: dict[BlockId, set[str]] = {}
        self._pinned_by: dict[str, dict[BlockId, None]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._blocks

    @property
    def utilization(self) -> float:
        """The part of the budget in use, 0 to 1."""
        return min(1.0, (self.used + self.reserved) / self.budget) if self.budget else 1.0

    def get(self, block: BlockId) -> KvBlock | None:
        """The block, which counts as used now."""
        found = self._blocks.get(block)
        if block in self._free:
            self._free.move_to_end(block)
        return found

    def reserve(self, octets: int) -> None:
        """Set room aside for a block that is about to come. Raises CapacityError."""
        victims: list[BlockId] = []
        free = self.budget - self.used - self.reserved
        for block in self._free:
            if free >= octets:
                break
            victims.append(block)
            free += self._blocks[block].octets
        if free < octets:
            self.counters["rejected"] += 1
            raise CapacityError("every block in the engine's memory is in use")
        for block in victims:
            self._remove(block)
            self.counters["evicted"] += 1
        self.reserved += octets

    def release(self, octets: int) -> None:
        """Give room back that was set aside."""
        self.reserved -= octets

    def add(self, block: BlockId, held: KvBlock, reserved: int) -> KvBlock:
        """Put a complete block into the room that is reserved for it; the one that is in the
        pool afterwards, which is an older one when there was one."""
        self.release(reserved)
        known = self._blocks.get(block)
        if known is None:
            self._blocks[block] = known = held
            self._free[block] = None
            self.used += held.octets
            self.watch(block, 1)
        return known

    def pin(self, block: BlockId, user: str) -> None:
        """Keep a block until `user` lets go. Raises KeyError for one that is not here."""
        if block not in self._blocks:
            raise KeyError(block)
        self._free.pop(block, None)
        self._pins.setdefault(block, set()).add(user)
        self._pinned_by.setdefault(user, {})[block] = None

    def unpin(self, block: BlockId, user: str) -> None:
        """`user` lets go of a block; harmless when it does not hold it."""
        users = self._pins.get(block)
        if users is None or user not in users:
            return
        users.discard(user)
        if not users:
            del self._pins[block]
            self._free[block] = None
        del self._pinned_by[user][block]
        if not self._pinned_by[user]:
            del self._pinned_by[user]

    def unpin_all(self, user: str) -> None:
        """`user` lets go of everything: the end of its prompt goes before the beginning, which
        is of use without it."""
        for block in reversed(list(self._pinned_by.get(user, ()))):
            self.unpin(block, user)

    def discard(self, block: BlockId) -> bool:
        """Drop a block unless somebody pins it; whether it is gone."""
        if block in self._pins:
            return False
        if block in self._blocks:
            self._remove(block)
        return True

    def _remove(self, block: BlockId) -> None:
        del self._free[block]
        self.used -= self._blocks.pop(block).octets
        self.watch(block, -1)
