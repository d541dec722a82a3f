"""How long an event loop was held: the longest time in which it looked at no socket.

    with asyncio.Runner(loop_factory=watched_loop) as runner:
        runner.run(main())

and, within, `longest_hold()`, or `longest_work()`, which leaves out what other processes and
threads took of that time.
"""

from __future__ import annotations

import asyncio
import selectors
from time import perf_counter, thread_time
from weakref import WeakKeyDictionary


class _Watch(selectors.DefaultSelector):
    """Takes the time of each turn of its loop: from its return to its next call."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = self.longest_work = 0.0
        self._woke, self._began = perf_counter(), thread_time()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        held, worked = perf_counter() - self._woke, thread_time() - self._began
        if held > self.longest:
            self.longest = held
        if worked > self.longest_work:
            self.longest_work = worked
        try:
            return super().select(timeout)
        finally:
            self._woke, self._began = perf_counter(), thread_time()


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch] = WeakKeyDictionary()


def watched_loop() -> asyncio.AbstractEventLoop:
    """A new event loop whose turns are timed; two readings of two clocks for each."""
    watch = _Watch()
    loop = asyncio.SelectorEventLoop(watch)
    _watches[loop] = watch
    return loop


def longest_hold() -> float | None:
    """Seconds of the running loop's longest turn that is over, since it began or `forget_holds`;
    None for a loop that is not watched."""
    watch = _watches.get(asyncio.get_running_loop())
    return None if watch is None else watch.longest


def longest_work() -> float | None:
    """Seconds of CPU that the running loop's thread took in a turn, at the most, likewise: on a
    busy machine what is done in a turn, and not how long it took."""
    watch = _watches.get(asyncio.get_running_loop())
    return None if watch is None else watch.longest_work


def forget_holds() -> None:
    """Begin anew, with the next turn of the running loop: what was held before does not count,
    such as the reading of files before there was a session."""
    loop = asyncio.get_running_loop()
    watch = _watches.get(loop)
    if watch is not None:
        loop.call_soon(_forget, watch)


def _forget(watch: _Watch) -> None:
    watch.longest = watch.longest_work = 0.0
