"""What is long is read beside the event loop."""

from __future__ import annotations

import asyncio
import threading

from kvcs.retrieving.asking.threads import in_thread


async def test_it_is_read_in_another_thread_and_told_in_this_one() -> None:
    told: asyncio.Future = asyncio.get_running_loop().create_future()

    def tell(where: int) -> None:
        told.set_result((where, threading.get_ident()))

    in_thread(threading.get_ident, tell)
    where, here = await told
    assert where != here == threading.get_ident()
