"""Stored blocks are read again now and then: rot is found before somebody asks for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from kvsp.holder.store import Store
from kvsp.holder.tiers.tiers import TierUnavailableError
from kvsp.names.codes import Tier
from kvsp.names.uris import BlockId

logger = logging.getLogger("kvsp.holder")

_PAUSE_S: Final = 10.0
"""Between one round and the next, and after a medium did not work."""

Pace = Callable[[int], Awaitable[None]]
"""Called with the octets of each piece that was read; returns when the next may be."""


class Scrubber:
    """Verifies the blocks of one tier, one after the other, at a rate."""

    def __init__(
        self,
        store: Store,
        tier: Tier,
        verify: Callable[[BlockId, Tier, Pace], Awaitable[object]],
        octets_per_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`verify` reads one copy and sees to what is wrong with it."""
        self.rounds = 0
        """Times that every block has been verified."""

        self._store = store
        self._tier = tier
        self._verify = verify
        self._octets_per_s = octets_per_s
        self._sleep = sleep

    async def run(self) -> None:
        """Go round for ever."""
        while True:
            try:
                await self._round()
            except TierUnavailableError as error:
                logger.warning("blocks in %s are not verified now: %s", self._tier, error)
            await self._sleep(_PAUSE_S)

    async def _round(self) -> None:
        for block in self._store.blocks():
            await self._verify(block, self._tier, self._pace)
        self.rounds += 1

    async def _pace(self, octets: int) -> None:
        await self._sleep(octets / self._octets_per_s)
