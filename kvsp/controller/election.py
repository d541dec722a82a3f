"""Which of several controllers answers: the one whose term it is.

Each term has a core and a shell of its own, made from what the journal has then, so that
nothing that an earlier term began goes on in it. Without the lease, or when its time is over
by our own clock, too, nothing is answered but 503.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from kvsp.controller.core.controller import Controller
from kvsp.controller.journal import Documents, JournalError
from kvsp.controller.shell import IndexCaller, InstanceCaller, Shell, monotonic_ms
from kvsp.records.problems import Problem

logger = logging.getLogger("kvsp.controller")

T = TypeVar("T")

_ANOTHER = "this controller stands by: another one leads"
_NO_STORE = "this controller stands by: the store of its journal does not answer"


class ATerm(Documents, Protocol):
    """A journal as one leader has it."""

    epoch: int

    def renew(self) -> bool:
        """Whether it is not over. Raises JournalError."""
        ...

    def resign(self) -> None:
        """End it. Raises JournalError."""
        ...


class ALease(Protocol):
    """What controllers that share a journal ask for the lead."""

    lease_ms: int

    def take(self) -> ATerm | int:
        """A term, or the milliseconds until another's ends. Raises JournalError."""
        ...

    def close(self) -> None: ...


class Elected:
    """A controller among several: it leads, or it stands by."""

    def __init__(
        self,
        lease: ALease,
        new_core: Callable[[], Controller],
        instances: InstanceCaller,
        index: IndexCaller,
        *,
        clock_ms: Callable[[], int] = monotonic_ms,
    ) -> None:
        self.failure: str | None = None
        """Why this process never leads again."""
        self._lease = lease
        self._new_core = new_core
        self._instances = instances
        self._index = index
        self._clock_ms = clock_ms
        self._period_s = lease.lease_ms / 3000
        self._shell: Shell | None = None
        self._until_ms = 0
        self._why = _ANOTHER
        # the lease is renewed while the journal is read or written
        self._pool = ThreadPoolExecutor(1, "kvsp-lease")
        self._task: asyncio.Task[None] | None = None

    @property
    def leading(self) -> Shell | None:
        """The shell of the term that has not run out; None while standing by."""
        return self._shell if self._clock_ms() < self._until_ms else None

    @property
    def standing_by(self) -> str:
        """Why it does not lead."""
        return self._why

    def acting(self) -> Shell:
        """The shell that answers. Raises Problem 503 while standing by."""
        if (shell := self.leading) is None:
            raise Problem.http(503, self.failure or self._why, retry_after=1)
        return shell

    async def start(self) -> None:
        """Begin to stand for the lead."""
        self._task = asyncio.create_task(self._stand())
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = "the controller stopped at a fault of its own; its log has more"
            logger.critical("the controller never leads again", exc_info=error)

    async def stop(self) -> None:
        """Write what is left, hand the lead over and let go of everything."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._instances.close()
        await self._index.close()
        await asyncio.to_thread(self._pool.shutdown)
        self._lease.close()

    async def _stand(self) -> None:
        while True:
            wait_s = self._period_s
            began_ms = self._clock_ms()
            try:
                taken = await self._ask(self._lease.take)
            except JournalError as error:
                self._say(_NO_STORE, error)
            else:
                if not isinstance(taken, int):
                    # afterwards another one may have it first: here something is wrong
                    await self._lead(taken, began_ms)
                else:
                    self._say(_ANOTHER)
                    wait_s = min(wait_s, taken / 1000)
            await asyncio.sleep(wait_s)

    def _say(self, why: str, error: JournalError | None = None) -> None:
        """Note why it does not lead; the log has each change once."""
        if self._why != why:
            logger.warning("%s", why if error is None else f"{why}: {error}")
        self._why = why

    async def _lead(self, term: ATerm, began_ms: int) -> None:
        """Lead until the term is over."""
        logger.warning("this controller leads, in term %d", term.epoch)
        shell = Shell(self._new_core(), term, self._instances, self._index, clock_ms=self._clock_ms)
        opening = asyncio.create_task(shell.start())
        self._until_ms = began_ms + self._lease.lease_ms
        lost: str | None = None
        try:
            lost = await self._keep(term, shell, opening)
        finally:
            self._shell = None
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            await shell.end(lost)
            logger.warning("this controller does not lead any more: %s", lost or "it ends")
            await self._resign(term)

    async def _keep(self, term: ATerm, shell: Shell, opening: asyncio.Task[None]) -> str:
        """Renew the lease as long as it can be and `shell` works; why that ended."""
        while shell.failure is None:
            if opening.done():
                await asyncio.sleep(self._period_s)
            else:
                await asyncio.wait([opening], timeout=self._period_s)
            if opening.done() and self._shell is None:
                try:
                    opening.result()
                except JournalError as error:
                    self._why = _NO_STORE
                    return str(error)
                self._shell = shell
            began_ms = self._clock_ms()
            try:
                if not await self._ask(term.renew):
                    return "another one does"
            except JournalError as error:
                if self._clock_ms() >= self._until_ms:
                    self._why = _NO_STORE
                    return str(error)
            else:
                self._until_ms = began_ms + self._lease.lease_ms
        return shell.failure

    async def _resign(self, term: ATerm) -> None:
        try:
            await self._ask(term.resign)
        except JournalError as error:
            # it runs out by itself
            logger.info("the lease is not given back: %s", error)

    async def _ask(self, question: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, question)
