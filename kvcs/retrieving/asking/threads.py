"""Reading what is long beside an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def in_thread(read: Callable[[], _T], told: Callable[[_T], None]) -> None:
    """Call `read` in a thread, and `told` with what it returned on the running event loop."""

    def done(future: asyncio.Future[_T]) -> None:
        if not future.cancelled():
            told(future.result())

    asyncio.get_running_loop().run_in_executor(None, read).add_done_callback(done)
