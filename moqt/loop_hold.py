"""How long an event loop was held: the longest time in which it looked at no socket.

    with asyncio.Runner(loop_factory=watched_loop) as runner:
        runner.run(main())

and, within, `longest_hold()`.
"""

from __future__ import annotations

import asyncio
import selectors
from time import perf_counter
from weakref import WeakKeyDictionary


class _Watch(selectors.DefaultSelector):
    """Takes the time of each turn of its loop: from its return to its next call."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0.0
        self._woke = perf_counter()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        held = perf_counter() - self._woke
        if held > self.longest:
            self.longest = held
        try:
            return super().select(timeout)
        finally:
            self._woke = perf_counter()


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch] = WeakKeyDictionary()


def watched_loop() -> asyncio.AbstractEventLoop:
    """A new event loop whose turns are timed; two readings of a clock for each."""
    watch = _Watch()
    loop = asyncio.SelectorEventLoop(watch)
    _watches[loop] = watch
    return loop


def longest_hold() -> float | None:
    """Seconds of the running loop's longest turn that is over, since it began or `forget_holds`;
    None for a loop that is not watched."""
    watch = _watches.get(asyncio.get_running_loop())
    return None if watch is None else watch.longest


def forget_holds() -> None:
    """Begin anew, with the next turn of the running loop: what was held before does not count,
    such as the reading of files before there was a session."""
    loop = asyncio.get_running_loop()
    watch = _watches.get(loop)
    if watch is not None:
        loop.call_soon(_forget, watch)


def _forget(watch: _Watch) -> None:
    watch.longest = 0.0
