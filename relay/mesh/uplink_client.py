"""The connection to an upstream relay: made, watched, and made again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from moqt.aio import MoqtSession
from moqt.backoff import Backoff
from moqt.redirects import Churn
from moqt.values.errors import MoqtError, SessionClosed
from relay.mesh.uplink import Uplink

logger = logging.getLogger("relay")

Connect = Callable[[str], Awaitable[MoqtSession]]
"""Makes an established session to a URL; raises MoqtError."""

MAX_MOVES = 4
"""GOAWAYs followed at once in a minute; beyond, with growing delays."""


class UplinkClient:
    """Keeps one session to `url`, or to where GOAWAY has sent it.

    Delays between tries grow, and become short again only after a session that lived for a
    while: one that is accepted and ended at once does not count.
    """

    def __init__(
        self,
        uplink: Uplink,
        url: str,
        connect: Connect,
        *,
        backoff: Backoff | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._uplink = uplink
        self._url = url
        self._connect = connect
        self._backoff = backoff or Backoff()
        self._sleep = sleep
        self._moves = Churn(MAX_MOVES, 60.0)
        self._leaving: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        url = self._url
        try:
            while True:
                began, lived = loop.time(), 0.0
                try:
                    session = await self._connect(url)
                except MoqtError as error:
                    logger.warning("upstream %s: %s", url, error)
                    url = self._url
                else:
                    moved = await self._use(session)
                    lived = loop.time() - began
                    if moved is not None:
                        url = moved or url
                        if self._moves.allow(loop.time()):
                            continue
                        logger.warning("upstream moves too often, next to %s", url)
                    else:
                        url = self._url
                await self._sleep(self._backoff.next(lived))
        finally:
            for task in self._leaving:
                task.cancel()
            if self._uplink.session is not None:
                self._uplink.session.close()

    async def _use(self, session: MoqtSession) -> str | None:
        """Until the session ends (None) or is to be moved from (the URI, "" for the same)."""
        self._uplink.attach(session.session)
        logger.info("connected upstream")
        try:
            goaway = await session.wait_goaway()
        except SessionClosed as closed:
            self._uplink.detach(session.session)
            logger.warning("upstream has gone: %s", closed)
            return None
        task = asyncio.create_task(self._leave(session))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return goaway.uri

    async def _leave(self, session: MoqtSession) -> None:
        """Close it once its subscriptions have moved, or when the peer does."""
        uplink = self._uplink
        while uplink.session is session.session and session.closed is None:
            await asyncio.wait({asyncio.ensure_future(session.wait_closed())}, timeout=0.1)
        if session.closed is None:
            session.drain()
        await session.wait_closed()
        uplink.detach(session.session)
