"""One lock for each thing that somebody is at, and none for the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)


class Locks(Generic[_K]):
    """What is kept is in proportion to who holds a lock or waits for one."""

    def __init__(self) -> None:
        self._locks: dict[_K, tuple[asyncio.Lock, int]] = {}

    @contextlib.asynccontextmanager
    async def of(self, key: _K) -> AsyncIterator[None]:
        """Have `key` alone; waits for those who came before."""
        lock, users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(key)
            if users > 1:
                self._locks[key] = (lock, users - 1)
