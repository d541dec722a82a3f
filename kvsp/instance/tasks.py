"""Background work of one owner: bounded by what starts it, ended with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger("kvsp.instance")


class Tasks:
    """Tasks that are cancelled together; one that fails is logged."""

    def __init__(self) -> None:
        self._all: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._all)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._all.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._all.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("background work of the instance failed", exc_info=error)

    async def stop(self) -> None:
        """Cancel everything and wait for it."""
        tasks = list(self._all)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
