"""An event loop without threads and time: which of the waiting calls is next, a seed decides.

What the code under test gives to a thread (`asyncio.to_thread`) waits until the loop picks it;
time passes only when nothing else can. One seed is one order of steps, the same in every run.
"""

from __future__ import annotations

import asyncio
import random
from asyncio.base_events import BaseEventLoop
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
_PICK_WHILE_BUSY = 0.3
"""How often a waiting call is made although tasks could go on."""


class SeededLoop(BaseEventLoop):
    """Picks the next waiting call by its seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.steps = 0
        self._now = 0.0
        self._waiting: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._selector = self

    def time(self) -> float:
        return self._now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        future = self.create_future()
        self._waiting.append((lambda: func(*args), future))
        return future

    def select(self, timeout: float | None) -> list[Any]:
        """Called by the base class once per round, when it would wait for sockets."""
        busy = timeout == 0
        if self._waiting and (not busy or self.random.random() < _PICK_WHILE_BUSY):
            self._make(self._waiting.pop(self.random.randrange(len(self._waiting))))
        elif not busy:
            if timeout is None:
                raise RuntimeError("every task waits for something that nobody will do")
            self._now += timeout
        return []

    def _make(self, waiting: tuple[Callable[[], Any], asyncio.Future[Any]]) -> None:
        call, future = waiting
        self.steps += 1
        try:
            result = call()
        except Exception as error:  # noqa: BLE001  (whoever waits for it gets it)
            if not future.cancelled():
                future.set_exception(error)
        else:
            if not future.cancelled():
                future.set_result(result)

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no sockets."""

    def _write_to_self(self) -> None:
        """There are no other threads."""


async def pause() -> None:
    """Let others go first, for as long as the seed says."""
    await asyncio.get_running_loop().run_in_executor(None, lambda: None)


def run(seed: int, main: Callable[[random.Random], Coroutine[Any, Any, _T]]) -> _T:
    """Run `main` to its end in the order of `seed`; it gets the seed's random numbers.

    A callback or task that failed unseen fails the run.
    """
    loop = SeededLoop(seed)
    unseen: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unseen.append(context))
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(main(loop.random))
    assert not unseen, unseen
    return result
