"""What a client still does for others after its caller has gone on: short, bounded, its failures
nobody's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from kvsp.names.errors import KvspError

logger = logging.getLogger("kvsp.client")


class Behind:
    """Errands in the background, ended with the client. Who starts them bounds their number."""

    def __init__(self, seconds: float) -> None:
        """`seconds` bounds one errand, and how long `close` waits for all."""
        self._seconds = seconds
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, errand: Coroutine[Any, Any, None]) -> None:
        """Run an errand."""
        task = asyncio.create_task(self._run(errand))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, errand: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await errand
        except (KvspError, TimeoutError) as error:  # also of a source that is no base URI
            logger.debug("a service was not told: %s", error)

    async def close(self) -> None:
        """Let what is under way arrive."""
        tasks = list(self._tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
