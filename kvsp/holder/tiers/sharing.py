"""What other holders stored in a medium that this one shares with them is served here, too.

The medium is looked through now and then: blocks that are not held are taken over, as far as
there is room without anything leaving, and blocks whose octets somebody removed are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Final, NamedTuple, Protocol, runtime_checkable

from kvsp.holder.store import BlockInfo, Part, Store
from kvsp.holder.tiers.tiers import PartLostError, PartReader, TierUnavailableError
from kvsp.names.codes import Tier
from kvsp.names.uris import BlockId

logger = logging.getLogger("kvsp.holder")

Adopt = Callable[[BlockId, Tier, BlockInfo, Part], Awaitable[None]]
Lost = Callable[[BlockId, PartLostError], Awaitable[None]]

_AGAIN_S: Final = 10.0
"""After a medium did not work it is looked through sooner."""

_AT_ONCE: Final = 16
"""Blocks that are taken over at a time."""

Key = tuple[BlockId, bytes]
"""A block, and the digest of a container of it."""


class Listed(NamedTuple):
    """What there is in the medium."""

    block: BlockId
    digest: bytes
    octets: int
    modified: datetime
    is_ours: bool
    """Whether this holder refers to it."""


@runtime_checkable
class SharedStorage(Protocol):
    """A medium that holders share. What asks it raises TierUnavailableError."""

    tier: Tier

    @property
    def unavailable(self) -> bool:
        """Whether it counts as one that does not work now."""
        ...

    async def listed(self) -> dict[Key, Listed]:
        """All that is there."""
        ...

    async def inspect(self, listed: Listed) -> tuple[BlockInfo, Part] | None:
        """What it holds; None for what is gone, or was damaged and is removed."""
        ...

    def was_let_go(self, listed: Listed) -> bool:
        """Whether this holder has let it go before: it is not taken over again."""
        ...

    async def refer(self, block: BlockId, part: Part) -> bool:
        """Have it stay for this holder, too; False when this one has let it go before."""
        ...

    async def open(self, block: BlockId, part: Part) -> PartReader:
        """Raises PartLostError, too, for what is gone."""
        ...


class Sharing:
    """Keeps the table of a holder and a store that several have together alike."""

    def __init__(
        self,
        store: Store,
        medium: SharedStorage,
        adopt: Adopt,
        lost: Lost,
        every_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`adopt` takes a part over that is there, `lost` is told of one that is not."""
        self._store = store
        self._medium = medium
        self._adopt = adopt
        self._lost = lost
        self._every_s = every_s
        self._sleep = sleep

    async def run(self) -> None:
        """Look at it for ever."""
        while True:
            wait_s = self._every_s
            try:
                await self.look()
            except TierUnavailableError as error:
                logger.info("%s is not looked through now: %s", self._medium.tier, error)
                wait_s = min(wait_s, _AGAIN_S)
            await self._sleep(wait_s)

    async def look(self) -> None:
        """Look through the medium once. Raises TierUnavailableError."""
        tier = self._medium.tier
        entries = {block: self._store.entry(block) for block in self._store.blocks()}
        before = {
            block: part
            for block, entry in entries.items()
            if entry is not None and (part := entry.parts.get(tier)) is not None
        }
        listed = await self._medium.listed()
        for block, part in before.items():
            is_there = (block, part.container_digest) in listed
            if not is_there and self._store.holds(block, tier, part):
                await self._look_for(block, part)
        # this holder's own first: where two are of one block, it is the one that was served
        news = [each for each in listed.values() if each.block not in self._store]
        news.sort(key=lambda each: (not each.is_ours, each.modified))
        for start in range(0, len(news), _AT_ONCE):
            await asyncio.gather(*map(self._take_over, news[start : start + _AT_ONCE]))

    async def _look_for(self, block: BlockId, part: Part) -> None:
        try:
            with contextlib.closing(await self._medium.open(block, part)):
                return
        except PartLostError as error:
            error.tier, error.part = self._medium.tier, part
            await self._lost(block, error)

    async def _take_over(self, listed: Listed) -> None:
        tier, block = self._medium.tier, listed.block
        if self._medium.was_let_go(listed) or block in self._store:
            return
        if self._store.lacks(tier, listed.octets):
            return
        found = await self._medium.inspect(listed)
        if found is not None:
            await self._adopt(block, tier, *found)
