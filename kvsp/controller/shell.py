"""Runs a controller core: journal, clock, and commands to instances over HTTP.

Every call keeps one order: the core decides, its writes become durable, then the answer
goes out and its commands are sent. Calls that come close together share one write to
the journal. When the journal fails, nothing is answered any more but 503: what the core
decided since is not known to survive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from kvsp.controller.core.controller import Controller
from kvsp.controller.core.effects import (
    Command,
    Effects,
    FindReplicas,
    Key,
    KeyPage,
    ReadPrefetch,
    Report,
    SendPrefetch,
    SendReshard,
    SendResume,
    SendState,
    Unreachable,
)
from kvsp.controller.journal import Documents, JournalError, TermOverError
from kvsp.names.uris import directive_path, resume_path
from kvsp.records.estimates import Found
from kvsp.records.problems import Problem
from kvsp.records.records import InstanceStatus

logger = logging.getLogger("kvsp.controller")

T = TypeVar("T")
_COMMANDS_PER_INSTANCE = 32


class InstanceCaller(Protocol):
    """Sends one request to an instance; never raises for what the network or peer does."""

    async def send(
        self,
        method: str,
        instance: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
    ) -> Report:
        """`Done`, `Refused` or `Unreachable`."""
        ...

    async def close(self) -> None: ...


class IndexCaller(Protocol):
    """The Index Service as the controller uses it."""

    async def find(
        self, scope_id: bytes, compat_id: bytes, block_keys: tuple[bytes, ...]
    ) -> Found | Unreachable:
        """The replicas of the leading keys; never raises."""
        ...

    async def list_keys(
        self, scope_id: bytes, compat_id: bytes, after: bytes, limit: int | None
    ) -> KeyPage | Unreachable:
        """The Block Keys above `after`; never raises."""
        ...

    async def note_status(self, status: InstanceStatus) -> None:
        """Pass a status on, for estimates; a failure costs only those."""
        ...

    async def close(self) -> None: ...


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class _Batch:
    """Effects that become durable together."""

    def __init__(self) -> None:
        self.writes: dict[Key, bytes | None] = {}
        self.commands: list[Command] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Shell:
    """Runs a core and keeps its journal; nobody else does either."""

    def __init__(
        self,
        core: Controller,
        journal: Documents,
        instances: InstanceCaller,
        index: IndexCaller,
        *,
        clock_ms: Callable[[], int] = monotonic_ms,
    ) -> None:
        self.core = core
        self.index = index
        self.clock_ms = clock_ms
        self.failure: str | None = None
        """Why nothing is answered any more, as clients are told."""
        self._journal = journal
        self._instances = instances
        self._pool = ThreadPoolExecutor(1, "kvsp-journal")
        self._next: _Batch | None = None
        self._running: _Batch | None = None
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lanes: dict[str, asyncio.Semaphore] = {}

    @property
    def leading(self) -> Shell | None:
        """Itself: without others there is nobody to lead instead."""
        return self

    standing_by = ""

    def acting(self) -> Shell:
        """Itself."""
        return self

    # --- calls -----------------------------------------------------------------------

    async def call(self, function: Callable[..., T], *values: Any) -> T:
        """Call the core; returns or raises its Problem when everything before is durable.

        Raises Problem 503 when the journal or the controller itself failed.
        """
        self._check()
        try:
            return function(*values)
        finally:
            self._keep(self.core.take())
            await self._durable()

    def _check(self) -> None:
        if self.failure is not None:
            raise Problem.http(503, self.failure, retry_after=10)

    def _keep(self, effects: Effects) -> None:
        """Have effects made durable and carried out; does not wait."""
        if effects.writes or effects.commands:
            if self._next is None:
                self._next = _Batch()
                if self._running is None:
                    self._start(self._commit())
            self._next.writes |= effects.writes
            self._next.commands += effects.commands
        self._wake.set()

    async def _durable(self) -> None:
        # an answer may tell of what an earlier call decided, so it waits for that too
        batch = self._next or self._running
        if batch is not None:
            await asyncio.shield(batch.done)
        self._check()

    async def _commit(self) -> None:
        while (batch := self._next) is not None:
            self._next, self._running = None, batch
            try:
                await self._make_durable(batch)
            except BaseException as error:
                self.failure = _why(error)
                raise
            finally:
                self._running = None
                batch.done.set_result(None)

    async def _make_durable(self, batch: _Batch) -> None:
        if batch.writes and self.failure is None:
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self._pool, self._journal.write, batch.writes)
            except JournalError as error:
                self.failure = _why(error)
                logger.critical("%s; nothing is answered any more", error)
        if self.failure is None:
            for command in batch.commands:
                self._start(self._carry_out(command))

    # --- commands --------------------------------------------------------------------

    async def _carry_out(self, command: Command) -> None:
        report: Report
        try:
            async with asyncio.timeout(command.timeout_ms / 1000):
                async with self._lane(command.instance):
                    report = await self._send(command)
        except TimeoutError:
            report = Unreachable("timeout")
        self.core.report(command.number, report, self.clock_ms())
        self._keep(self.core.take())

    def _lane(self, instance: str) -> asyncio.Semaphore:
        """Commands at once to one instance: one that hangs holds up nobody else."""
        if len(self._lanes) > 2 * self.core.limits.instances:
            self._lanes.clear()
        return self._lanes.setdefault(instance, asyncio.Semaphore(_COMMANDS_PER_INSTANCE))

    async def _send(self, command: Command) -> Report:
        if isinstance(command, FindReplicas):
            return await self.index.find(command.scope_id, command.compat_id, command.block_keys)
        method, path, body = _request(command)
        timeout_s = command.timeout_ms / 1000
        return await self._instances.send(method, command.instance, path, body, timeout_s)

    # --- life ------------------------------------------------------------------------

    async def start(self) -> None:
        """Take up the journal and begin to keep deadlines. Raises JournalError."""
        loop = asyncio.get_running_loop()
        documents = await loop.run_in_executor(self._pool, lambda: list(self._journal.documents()))
        self.core.restore(documents, self.clock_ms())
        self._keep(self.core.take())
        self._start(self._keep_deadlines())

    async def _keep_deadlines(self) -> None:
        while True:
            self._wake.clear()
            due_ms = self.core.next_due()
            wait_s = None if due_ms is None else max(due_ms - self.clock_ms(), 0) / 1000
            if wait_s != 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()
                        continue
            self.core.tick(self.clock_ms())
            self._keep(self.core.take())
            await asyncio.sleep(0)

    def pass_on(self, status: InstanceStatus) -> None:
        """Tell the index of a status, without waiting."""
        if len(self._tasks) < 4 * self.core.limits.instances:
            self._start(self.index.note_status(status))

    def _start(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = _why(error)
            logger.critical("the controller stops answering", exc_info=error)

    async def end(self, failure: str | None = None) -> None:
        """Write what is left, and drop commands under way; with a `failure` write nothing."""
        self.failure = failure or self.failure
        while (batch := self._next or self._running) is not None:
            await asyncio.shield(batch.done)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._pool.shutdown)
        self._journal.close()

    async def stop(self) -> None:
        """`end`, and let go of everything."""
        await self.end()
        await self._instances.close()
        await self.index.close()


def _why(error: BaseException) -> str:
    """What clients are told of a failure; the log has the rest."""
    if isinstance(error, TermOverError):
        return str(error)
    if isinstance(error, JournalError):
        return "the controller cannot write its journal"
    return "the controller stopped at a fault of its own; its log has more"


def _request(command: Command) -> tuple[str, str, Mapping[str, Any] | None]:
    """Method, path below the instance's base URI, and body of a command."""
    if isinstance(command, SendState):
        return "PUT", "state", {"state": command.state}
    if isinstance(command, SendPrefetch):
        return "POST", "prefetch", command.directive
    if isinstance(command, ReadPrefetch):
        return "GET", directive_path(command.directive), None
    if isinstance(command, SendResume):
        return "POST", resume_path(command.session), command.body
    if isinstance(command, SendReshard):
        return "POST", "reshard", command.body
    raise TypeError(f"no request for {type(command).__name__}")
