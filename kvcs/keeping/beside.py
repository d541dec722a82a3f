"""Work of a disk beside an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def to_its_end(work: Callable[[], None]) -> None:
    """Run `work` in a thread: the disk takes seconds for some GB, and the event loop goes on.

    Once begun it is carried to its end, also when the task is cancelled. Raises what it raises.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
