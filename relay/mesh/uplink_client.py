"""The connection to an upstream relay: made, watched, and made again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from moqt.aio import MoqtSession
from moqt.backoff import Backoff
from moqt.quic.config import QuicConfig
from moqt.quic.transport import connection_of
from moqt.redirects import Churn
from moqt.session import Session
from moqt.values.config import SessionConfig
from moqt.values.errors import MoqtError, SessionClosed

logger = logging.getLogger("relay")

Connect = Callable[[str], Awaitable[MoqtSession]]
"""Makes an established session to a URL; raises MoqtError."""

MAX_MOVES = 4
"""GOAWAYs followed at once in a minute; beyond, with growing delays."""

MOST_SECONDS = 5.0
"""Between two tries to connect: a relay that is back is found within that."""

STAYING_SECONDS = 1.0
"""Before who says GOAWAY without a new URI is dialled again: it is still leaving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """A relay behind which this one stands."""

    url: str
    quic: QuicConfig
    session: SessionConfig = field(default_factory=SessionConfig)
    announce: bool = False
    """Announce there what is published here."""


class Uses(Protocol):
    """Who uses the session."""

    @property
    def session(self) -> Session | None:
        """The one that is used now."""

    def attach(self, session: Session) -> None:
        """A session is established; an older one may still be there."""

    def leave(self, session: Session) -> None:
        """The peer is going away (GOAWAY)."""

    def detach(self, session: Session) -> None:
        """The session has ended."""


class UplinkClient:
    """Keeps one session to `url`, or to where GOAWAY has sent it.

    Delays between tries grow, and become short again only after a session that lived for a
    while: one that is accepted and ended at once does not count.
    """

    def __init__(
        self,
        uplink: Uses,
        url: str,
        connect: Connect,
        *,
        backoff: Backoff | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._uplink = uplink
        self._url = url
        self._connect = connect
        self._backoff = backoff or Backoff(most=MOST_SECONDS)
        self._sleep = sleep
        self._lost = False
        """The log has heard that there is no session."""
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
                    self._lost = True
                    logger.warning("upstream %s: %s", url, error)
                    url = self._url
                else:
                    moved = await self._use(session)
                    lived = loop.time() - began
                    if moved is not None:
                        if self._moves.allow(loop.time()):
                            if not moved:
                                await self._sleep(STAYING_SECONDS)
                            url = moved or url
                            continue
                        url = moved or url
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
        name = connection_of(session.session.transport)
        logger.log(
            logging.WARNING if self._lost else logging.INFO,
            "%s: upstream %s: connected%s",
            name,
            self._url,
            " again" if self._lost else "",
        )
        self._lost = False
        try:
            goaway = await session.wait_goaway()
        except SessionClosed as closed:
            self._uplink.detach(session.session)
            self._lost = True
            logger.warning("%s: upstream %s has gone: %s", name, self._url, closed)
            return None
        self._uplink.leave(session.session)
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
