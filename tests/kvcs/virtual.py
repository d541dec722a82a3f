"""Time that passes only when nothing is left to do: waits cost nothing, every run is the same."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

from tests.kvcs.support import Link

LEAST_PAUSE, MOST_PAUSE = 0.0005, 0.05
"""Seconds after which two sessions are looked at again, the longer the more often nothing moved."""


class _Clock(selectors.SelectSelector):
    """Passes the time that it was to wait."""

    passed = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing is left that could ever happen"
            self.passed += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while there is something to do."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.passed


def run(story: Coroutine[Any, Any, Any]) -> None:
    """Run a story in a time of its own; no thread may be waited for in it."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(story)


class VirtualLink(Link):
    """A `Link` for a virtual time: it rests when nothing moves."""

    def step(self) -> bool:
        before = self._sent()
        super().step()
        return self._sent() != before

    async def _pump(self) -> None:
        pause = LEAST_PAUSE
        while True:
            pause = LEAST_PAUSE if self.step() else min(2 * pause, MOST_PAUSE)
            await asyncio.sleep(pause)

    def _sent(self) -> int:
        """Octets sent either way, and streams."""
        ends = self.pair.client_transport, self.pair.server_transport
        return sum(len(end.out) + sum(each.written for each in end.out.values()) for end in ends)
