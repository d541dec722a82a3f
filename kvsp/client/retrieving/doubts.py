"""Holders are told when octets of theirs fail verification, so that they look at their copy.

An extension of ours: `POST blocks/…/verification`. A holder that does not know it answers 404
or 405, and nothing comes of it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvsp.client.caller import Caller
from kvsp.client.errors import ClientError
from kvsp.names.uris import BlockId, verification_path

logger = logging.getLogger("kvsp.client")

_AT_ONCE: Final = 8


class Doubts:
    """Tells holders in the background; a failure to do so is nobody's."""

    def __init__(self, caller: Caller, seconds: float) -> None:
        """`seconds` bounds one request, and how long `close` waits for all."""
        self._caller = caller
        self._seconds = seconds
        self._telling: dict[tuple[str, BlockId], asyncio.Task[None]] = {}

    def tell(self, holder: str, block: BlockId) -> None:
        """Tell a holder once at a time; more than a few at once are left out."""
        key = holder, block
        if key not in self._telling and len(self._telling) < _AT_ONCE:
            task = asyncio.create_task(self._tell(holder, block))
            self._telling[key] = task
            task.add_done_callback(lambda _: self._telling.pop(key, None))

    async def _tell(self, holder: str, block: BlockId) -> None:
        try:
            await self._caller.ask(
                "POST",
                holder,
                verification_path(block),
                expected=(204, 404, 405),
                seconds=self._seconds,
            )
        except ClientError as error:
            logger.debug("a holder was not told of octets that fail verification: %s", error)

    async def close(self) -> None:
        """Let what is under way arrive."""
        tasks = list(self._telling.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
