"""Which block goes next when a tier needs room: the core without I/O.

The one used longest ago; of a prompt its end before its beginning, because the beginning is of
use without the end and the end is not without the beginning; and first of all what has lost the
beginning that was here. Every step takes constant time, whatever is held.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kvsp.names.codes import Tier
from kvsp.names.uris import BlockId

_SHARE: Final = 8
"""A use of a block counts for those before it in its prompt, too, but for each of them once in so
many uses as this part of all blocks: so a use moves no more than about as many of them, however
long prompts are."""


@dataclass(slots=True)
class _Block:
    above: BlockId | None
    """The block before it in its prompt, as whoever stored it said."""

    tiers: set[Tier] = field(default_factory=set)
    """Where it is in the queue."""

    parked: set[Tier] = field(default_factory=set)
    """Where it is not, because it is leased."""

    used: bool = False
    """Since it is not there."""

    round: int = -1


class _Queue:
    """Blocks in a line, any of which can be put before another."""

    def __init__(self) -> None:
        # None stands for both ends
        self._next: dict[BlockId | None, BlockId | None] = {None: None}
        self._previous: dict[BlockId | None, BlockId | None] = {None: None}

    def __contains__(self, block: BlockId | None) -> bool:
        return block is not None and block in self._next

    @property
    def first(self) -> BlockId | None:
        return self._next[None]

    def insert(self, block: BlockId, before: BlockId | None) -> None:
        """Put a block before another one, or at the end."""
        previous = self._previous[before]
        self._next[previous] = self._previous[before] = block
        self._next[block], self._previous[block] = before, previous

    def remove(self, block: BlockId) -> None:
        after, previous = self._next.pop(block), self._previous.pop(block)
        self._next[previous], self._previous[after] = after, previous


class EvictionOrder:
    """The blocks of a holder in the order in which they go, by tier."""

    def __init__(self, tiers: Iterable[Tier]) -> None:
        self.visits = 0
        """Blocks that were moved or looked at, in all."""

        self._queues = {tier: _Queue() for tier in tiers}
        self._blocks: dict[BlockId, _Block] = {}
        self._below: dict[BlockId, set[BlockId]] = {}
        """The blocks that say that they come after this one, which need not be here."""

        self._parked: set[BlockId] = set()
        self._round = 0
        self._left = 0
        """Uses until the next round."""

    def add(self, block: BlockId, above: BlockId | None) -> None:
        """A block is new; `above` is the one before it in its prompt, if that is known."""
        self._blocks[block] = _Block(above)
        if above is not None:
            self._below.setdefault(above, set()).add(block)

    def forget(self, block: BlockId) -> None:
        """A block is in no tier any more: what came after it is of no use without it."""
        gone = self._blocks.pop(block)
        if gone.above is not None and (siblings := self._below.get(gone.above)) is not None:
            siblings.discard(block)
            if not siblings:
                del self._below[gone.above]
        self._parked.discard(block)
        for child in self._below.pop(block, ()):
            self._blocks[child].above = None
            self.orphan(child)

    def orphan(self, block: BlockId) -> None:
        """What comes before a block was here and is not any more: it is the next that goes."""
        self.visits += 1
        for tier in self._blocks[block].tiers:
            self._to_the_front(block, tier)

    def place(self, block: BlockId, tier: Tier) -> None:
        """A block is in a tier, and was used just now."""
        self._blocks[block].parked.add(tier)
        self._requeue(block)
        self.use(block)

    def demote(self, block: BlockId, tier: Tier) -> None:
        """A block that has to leave another tier is in this one: it was not used, and goes before
        the block before it in its prompt, but after what came here sooner."""
        known, queue = self._blocks[block], self._queues[tier]
        known.tiers.add(tier)
        queue.insert(block, known.above if known.above in queue else None)
        self.visits += 1

    def take(self, block: BlockId, tier: Tier) -> None:
        """A block leaves a tier, or is about to: it is not in that line. Harmless when it has
        been taken."""
        known = self._blocks[block]
        if tier in known.tiers:
            known.tiers.remove(tier)
            self._queues[tier].remove(block)
        known.parked.discard(tier)
        if not known.parked:
            self._parked.discard(block)

    def put_back(self, block: BlockId, tier: Tier) -> None:
        """A block does not leave after all: it is the next that would."""
        known, queue = self._blocks[block], self._queues[tier]
        if tier not in known.tiers:
            known.tiers.add(tier)
            queue.insert(block, queue.first)

    def use(self, block: BlockId) -> None:
        """A block was used, and with it those before it in its prompt."""
        self._left -= 1
        if self._left <= 0:
            self._round += 1
            self._left = len(self._blocks) // _SHARE
        now, path, at = self._round, [block], self._blocks[block]
        at.round = now
        while at.above is not None and (above := self._blocks.get(at.above)) is not None:
            if above.round == now:  # also where blocks say that they come after each other
                break
            above.round = now
            path.append(at.above)
            at = above
        for each in reversed(path):
            known = self._blocks[each]
            self.visits += 1
            known.used = bool(known.parked)
            for tier in known.tiers:
                queue = self._queues[tier]
                queue.remove(each)
                queue.insert(each, known.above if known.above in queue else None)

    def first(self, tier: Tier) -> BlockId | None:
        """The block that goes next."""
        self.visits += 1
        return self._queues[tier].first

    def park(self, block: BlockId, tier: Tier) -> None:
        """A block is leased: it is not in that line until `free`."""
        known = self._blocks[block]
        known.tiers.remove(tier)
        self._queues[tier].remove(block)
        known.parked.add(tier)
        known.used &= block in self._parked
        self._parked.add(block)

    @property
    def parked(self) -> BlockId | None:
        """A block that waits for the end of its leases, if one does."""
        return next(iter(self._parked), None)

    def free(self, block: BlockId) -> None:
        """A block is leased no more: it is the next that goes, as it was before, unless it was
        used meanwhile or there are blocks that come after it."""
        if block not in self._parked:
            return
        known = self._blocks[block]
        waiting, used = set(known.parked), known.used
        self._requeue(block)
        if used or block in self._below:
            self.use(block)
        else:
            for tier in waiting:
                self._to_the_front(block, tier)

    def _to_the_front(self, block: BlockId, tier: Tier) -> None:
        queue = self._queues[tier]
        queue.remove(block)
        queue.insert(block, queue.first)

    def _requeue(self, block: BlockId) -> None:
        known = self._blocks[block]
        self._parked.discard(block)
        for tier in known.parked:
            known.tiers.add(tier)
            self._queues[tier].insert(block, None)
        known.parked.clear()
