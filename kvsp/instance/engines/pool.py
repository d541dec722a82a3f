"""The blocks in an engine's memory: bounded, pinned by whatever uses them (sans-IO)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

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
        self._blocks: OrderedDict[BlockId, KvBlock] = OrderedDict()
        self._pins: dict[BlockId, set[str]] = {}
        self._owned: dict[str, set[BlockId]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._blocks

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._blocks)

    @property
    def utilization(self) -> float:
        """The part of the budget in use, 0 to 1."""
        return min(1.0, (self.used + self.reserved) / self.budget) if self.budget else 1.0

    def get(self, block: BlockId) -> KvBlock | None:
        """The block, which counts as used now."""
        found = self._blocks.get(block)
        if found is not None:
            self._blocks.move_to_end(block)
        return found

    def reserve(self, octets: int) -> None:
        """Set room aside for a block that is about to come. Raises CapacityError."""
        victims: list[BlockId] = []
        free = self.budget - self.used - self.reserved
        for block, held in self._blocks.items():
            if free >= octets:
                break
            if block not in self._pins:
                victims.append(block)
                free += held.octets
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
            self.used += held.octets
        return known

    def pin(self, block: BlockId, owner: str) -> None:
        """Keep a block until `owner` lets go. Raises KeyError for one that is not here."""
        if block not in self._blocks:
            raise KeyError(block)
        self._pins.setdefault(block, set()).add(owner)
        self._owned.setdefault(owner, set()).add(block)

    def unpin(self, block: BlockId, owner: str) -> None:
        """`owner` lets go of a block; harmless when it does not hold it."""
        owners = self._pins.get(block)
        if owners is None or owner not in owners:
            return
        owners.discard(owner)
        if not owners:
            del self._pins[block]
        self._owned[owner].discard(block)
        if not self._owned[owner]:
            del self._owned[owner]

    def unpin_all(self, owner: str) -> None:
        """`owner` lets go of everything."""
        for block in list(self._owned.get(owner, ())):
            self.unpin(block, owner)

    def discard(self, block: BlockId) -> bool:
        """Drop a block unless somebody pins it; whether it is gone."""
        if block in self._pins:
            return False
        if block in self._blocks:
            self._remove(block)
        return True

    def _remove(self, block: BlockId) -> None:
        self.used -= self._blocks.pop(block).octets
