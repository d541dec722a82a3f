"""An event loop in a daemon thread, for callers that have none."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from kvcs.names.errors import MisuseError

_T = TypeVar("_T")


class LoopThread:
    """A running event loop, as long as the process lives and `stop` is not called.

    A process that was forked has no such thread: there everything raises MisuseError.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def here(self) -> bool:
        """Whether the thread is one of this process, which it is not after a fork."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises MisuseError in a forked process, and after `stop`."""
        if not self.here:
            raise MisuseError(
                f"this Client was made by process {self._pid}, before a fork: its thread and its "
                "sessions are there. Make a Client in the process that uses it, after the fork"
            )
        if self._stopped:
            raise _closed()

    def soon(self, call: Callable[..., None], *args: Any) -> None:
        """Call it on the loop, after all that was so called before. Raises MisuseError."""
        self.check()
        try:
            self.loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # `stop` was called in another thread meanwhile
            raise _closed() from None

    def begin(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine on the loop. Raises MisuseError."""
        try:
            self.check()
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except MisuseError:
            work.close()
            raise
        except RuntimeError:  # as in `soon`
            work.close()
            raise _closed() from None

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]], within: float) -> None:
        """Run `last`, then end the loop and its thread, in `within` seconds at the most; harmless
        when repeated, and after a fork."""
        if self._stopped or not self.here:
            return
        self._stopped = True
        self.loop.call_soon_threadsafe(self._end, last)
        self._thread.join(within)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def _end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def ending() -> None:
            try:
                await last()
            finally:
                others = asyncio.all_tasks() - {asyncio.current_task()}
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)
                self.loop.call_soon(self.loop.stop)

        self._ending = self.loop.create_task(ending())


def _closed() -> MisuseError:
    return MisuseError("this Client was closed: make another one")
