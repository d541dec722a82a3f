"""Ways to relays and holders: what a consumer is given, and the sessions it opens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from moqt.aio import MoqtSession
from moqt.session import Session, SessionState

if TYPE_CHECKING:  # HTTP is loaded by those who use it
    from kvsp.blocks.layout import Tensor
    from kvsp.client import Client

DEFAULT_AFTER: Final = 2.0
"""Seconds after which what MOQT has not brought is late, and taken over HTTP."""

DEFAULT_AGAIN: Final = 5.0
"""Seconds for which a relay is tried again whose session was lost."""

_CLOSE_SECONDS: Final = 1.0

Connect = Callable[[str], Awaitable[MoqtSession]]
"""Opens a session to a relay, given its URL. Raises MoqtError."""


Recompute = Callable[[range, int], AsyncIterator[tuple[int, "Tensor", "Tensor"]]]
"""Computes layers of a prefix of so many tokens anew."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """How a consumer reaches holders over HTTP, and relays it was not given a session to.

    `client` is open and has an index service, None for no holders. What no MOQT path has brought
    `after` seconds after it was due is taken from holders. With `relay` and `connect` the
    consumer opens its session itself, so that it need not wait for a relay that does not answer;
    `connect` is also used for `relays`, which are asked one after another when those before have
    nothing more or do not answer, and for relays that only the index service names. A relay whose
    session is lost is tried again first: for `again_within` seconds, or once when there are others.

    When nothing of that gives the cache, at the latest `recompute_within` seconds after the
    beginning, what recomputing takes, it is recomputed: `recompute(layers, tokens)` gives (layer,
    k, v) of each of `layers`, in order, k and v `[tokens or more, kv_heads, head_dim]`.
    """

    client: Client | None = None
    after: float = DEFAULT_AFTER
    relay: str | None = None
    connect: Connect | None = None
    relays: Sequence[str] = ()
    recompute: Recompute | None = None
    recompute_within: float | None = None
    again_within: float = DEFAULT_AGAIN


class Sessions:
    """The sessions of one retrieval: the one it was given, and those it opens itself."""

    relays: tuple[str, ...] = ()
    """Further relays that may be asked, in order."""

    _own: str | None = None

    def __init__(
        self,
        given: MoqtSession | None,
        fallback: Fallback | None,
        changed: Callable[[], None],
        others: Sequence[Awaitable[MoqtSession]] = (),
    ) -> None:
        """`others` open further connections to our own relay, once that is dialled.

        Raises ValueError when there is no way to any relay.
        """
        self._given = given
        self._relay = fallback.relay if fallback is not None else None
        self._own = None if self._relay is None else self._relay.rstrip("/")
        self._connect = fallback.connect if fallback is not None else None
        self._changed = changed
        relays = fallback.relays if fallback is not None else ()
        self.relays = tuple(url for url in dict.fromkeys(relays) if self.reaches(url))
        self._dialled: dict[str | None, asyncio.Task[MoqtSession]] = {}
        self._lost: list[asyncio.Task[MoqtSession]] = []
        self._others = others
        self._further: list[asyncio.Task[MoqtSession]] = []
        if given is None and (self._relay is None or self._connect is None):
            raise ValueError("without a session the consumer needs a fallback that connects")

    def reaches(self, url: str | None) -> bool:
        """Whether a relay can be asked that is not our own."""
        return url is None or (self._connect is not None and url.rstrip("/") != self._own)

    def dial(self, url: str | None) -> asyncio.Task[MoqtSession]:
        """The session to a relay, None for our own; one is opened for each, once."""
        task = self._dialled.get(url)
        if task is None:
            task = self._dialled[url] = self._begun(self._open(url))
        if url is None and not self._further:
            self._further = [self._begun(other) for other in self._others]
        return task

    def dial_again(self, url: str | None) -> asyncio.Task[MoqtSession] | None:
        """The session to a relay, another one when that was lost or could not be opened; None when
        there is no way to open one."""
        target, task = self._relay if url is None else url, self._dialled.get(url)
        if target is None or self._connect is None:
            return None
        if task is not None:
            opened = _opened(task)
            if not task.done() or (opened and opened.session.state is not SessionState.CLOSED):
                return task
            self._lost.append(task)
        task = self._dialled[url] = self._begun(self._connected(target))
        return task

    def further(self) -> list[Session]:
        """The further sessions to our own relay that there are by now."""
        return [each.session for each in filter(None, map(_opened, self._further))]

    def _begun(self, opening: Awaitable[MoqtSession]) -> asyncio.Task[MoqtSession]:
        task = asyncio.ensure_future(opening)
        task.add_done_callback(lambda _: self._changed())
        return task

    async def _open(self, url: str | None) -> MoqtSession:
        if url is None and self._given is not None:
            await self._given.wait_established()
            return self._given
        target = self._relay if url is None else url
        assert target is not None
        return await self._connected(target)

    async def _connected(self, target: str) -> MoqtSession:
        assert self._connect is not None
        return await self._connect(target)

    def name(self, url: str | None) -> str | None:
        """What a relay is called, None for our own; None when that has no name."""
        return self._own if url is None else url.rstrip("/")

    @property
    def there(self) -> bool:
        """Whether there is a session to our own relay, or opening one has failed."""
        task = self._dialled.get(None)
        return task is not None and task.done()

    @property
    def failure(self) -> str | None:
        """Why there is no session to our own relay, when opening one has failed."""
        task = self._dialled.get(None)
        return None if task is None else _failure(task)

    @property
    def further_failure(self) -> str | None:
        """Why a further session could not be opened."""
        return next(filter(None, map(_failure, self._further)), None)

    async def close(self) -> None:
        """Close the sessions that were opened here."""
        tasks = [*self._dialled.values(), *self._lost, *self._further]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        ours = [
            session for session in filter(None, map(_opened, tasks)) if session is not self._given
        ]
        for session in ours:
            session.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.gather(*(session.wait_closed() for session in ours))


def _opened(task: asyncio.Task[MoqtSession]) -> MoqtSession | None:
    """The session that was opened; None when there is none so far, or opening it has failed."""
    over = task.done() and not task.cancelled() and task.exception() is None
    return task.result() if over else None


def _failure(task: asyncio.Task[MoqtSession]) -> str | None:
    """Why opening a session has failed; None when it has not."""
    if not task.done() or task.cancelled():
        return None
    error = task.exception()
    return None if error is None else str(error) or type(error).__name__
