"""Work that a cancellation waits for: what has begun is done whole before anybody is told.

A request whose client goes away is cancelled in the middle; a part that is being written,
moved or deleted must not be.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def uninterrupted(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run a call in a thread; a cancellation waits for its end.

    So no thread still uses a file that the cancelled task goes on to close.
    """
    return await to_the_end(asyncio.to_thread(call, *args, **kwargs))


async def to_the_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Await `work`; a cancellation is raised when `work` has ended."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # it goes with the cancelled task
        raise
