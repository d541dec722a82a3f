"""The sessions that a retrieval opens itself, and closes."""

from __future__ import annotations

import asyncio

from kvcs.finding.relays import Fallback, Sessions

RELAYS = [f"moqt://r{n}.example" for n in range(5)]


class NeverClosed:
    """A session whose other end does not answer to its close."""

    def __init__(self, closing: list) -> None:
        self.closing = closing

    def close(self) -> None:
        self.closing.append(self)

    async def wait_closed(self) -> None:
        await asyncio.Event().wait()


async def test_relays_that_do_not_let_go_are_waited_for_all_at_once() -> None:
    closing: list[NeverClosed] = []
    sessions = {url: NeverClosed(closing) for url in RELAYS}

    async def connect(url):
        return sessions[url]

    ways = Sessions(None, Fallback(None, relay=RELAYS[0], connect=connect), lambda: None)
    for url in (None, *RELAYS[1:]):
        await ways.dial(url)
    ending = asyncio.create_task(ways.close())
    for _ in range(5):
        await asyncio.sleep(0)
    assert set(closing) == set(sessions.values()) and not ending.done()
    await ending
