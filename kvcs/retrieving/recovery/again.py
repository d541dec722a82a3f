"""Trying again what was lost with its session: recovery begins so (KVCS "Verification and
Recovery"), and goes on elsewhere when that brings nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from kvcs.names.errors import PublisherLost
from kvcs.retrieving.retrieval import Retrieval
from moqt.aio import MoqtSession
from moqt.session import SessionState

FIRST_DELAY: Final = 0.1
MOST_DELAY: Final = 1.0
"""Seconds between two tries, twice as many each time; the first one is made at once."""


class Again:
    """One publication at one relay, tried again there for a while after its session was lost."""

    def __init__(
        self,
        within: float,
        dial: Callable[[], asyncio.Task[MoqtSession] | None],
        wait: Callable[[float], Awaitable[None]],
    ) -> None:
        """For `within` seconds after a session was lost; one that had brought nothing new begins
        no other time. `dial` gives the session to the relay, a new one where that is needed, None
        when there is no way; `wait` returns at that time, or when something has happened."""
        self._within = within
        self._dial = dial
        self._wait = wait
        self._until = 0.0
        self._octets = -1
        self._tries = 0

    async def go_on(self, retrieval: Retrieval, patience: float | None) -> Retrieval:
        """The rest of a retrieval that has failed, on a session that is there, to be started; what
        has come is not asked for again. With `patience` there are other ways, so that there is one
        try, of so many seconds at the most.

        Raises why it has failed, when that is not because something was lost, or for too long.
        """
        error, now = retrieval.error, asyncio.get_running_loop().time
        assert error is not None
        if not isinstance(error, PublisherLost):
            raise error
        octets = retrieval.stats.octets
        if retrieval.session.state is SessionState.CLOSED and octets > self._octets:
            self._until, self._octets, self._tries = now() + self._within, octets, 0
        if patience is not None:
            self._until = 0.0 if self._tries else min(self._until, now() + patience)
        while (at := now() + self._delay()) < self._until:
            self._tries += 1
            while now() < at:
                await self._wait(at)
            dialled = self._dial()
            if dialled is None:
                break
            while not dialled.done() and now() < self._until:
                await self._wait(self._until)
            if dialled.done() and dialled.exception() is None:
                return retrieval.again_on(dialled.result().session)
            if patience is not None:
                break
        raise error

    def _delay(self) -> float:
        return min(FIRST_DELAY * 2 ** (self._tries - 1), MOST_DELAY) if self._tries else 0.0
