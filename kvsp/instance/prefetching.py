"""Carries prefetch directives out, in the background (KVSP "Prefetch Directives")."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from kvsp.holder.uninterrupted import to_the_end
from kvsp.instance.core.agent import Agent
from kvsp.instance.core.directives import TIMEOUT, Loading
from kvsp.instance.engines.engine import KvBlock
from kvsp.instance.kept_directives import KeptDirective, KeptDirectives
from kvsp.instance.loading.fetchers import LoadError
from kvsp.instance.loading.loader import BlockLoader
from kvsp.instance.loading.sources import Wanted
from kvsp.instance.tasks import Tasks, logger
from kvsp.locks import Locks
from kvsp.names.uris import BlockId
from kvsp.records.problems import Problem
from kvsp.records.records import PrefetchDirective, PrefetchStatus

_FULL_RETRY_S = 30.0


def unix_ms() -> int:
    return time.time_ns() // 1_000_000


class Prefetcher:
    """One task per directive."""

    def __init__(
        self,
        agent: Agent,
        loader: BlockLoader,
        clock_ms: Callable[[], int],
        kept: KeptDirectives | None = None,
        unix_ms: Callable[[], int] = unix_ms,
    ) -> None:
        """`kept` has the directives of before, and gets those that come."""
        self._agent = agent
        self._loader = loader
        self._clock_ms = clock_ms
        self._unix_ms = unix_ms
        self._kept = kept or KeptDirectives(None)
        self._tasks = Tasks()
        self._locks = Locks[str]()
        self._running: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Go on with the directives of before."""
        table, now = self._agent.directives, self._unix_ms()
        kept_ms = self._agent.limits.directive_kept_ms
        for each in await self._kept.load():
            directive = each.directive
            # a clock that was set back makes no deadline longer
            remaining = min(each.ends_ms - now, directive.deadline_ms)
            over = remaining <= 0 and (each.finished_ms or each.ends_ms) + kept_ms < now
            if over or directive.compat_id != self._agent.descriptor.compat_id:
                await self._forget(directive.directive)
                continue
            loading = table.restore(directive, remaining, self._clock_ms(), each.status)
            if loading is not None:
                self._begin(loading)

    async def accept(self, directive: PrefetchDirective) -> None:
        """Begin to load; harmless for a repeated directive. It is on disk when this returns.

        Raises as `Agent.accept_prefetch`, and Problem 503 when it cannot be kept.
        """
        await to_the_end(self._accept(directive))

    async def _accept(self, directive: PrefetchDirective) -> None:
        name = directive.directive
        async with self._locks.of(name):
            loading = self._agent.accept_prefetch(directive, self._clock_ms())
            self._forget_old()
            if loading is None:
                return
            ends_ms = self._unix_ms() + directive.deadline_ms
            try:
                await self._kept.keep(KeptDirective(directive, ends_ms, None, 0))
            except OSError as error:
                self._agent.directives.cancel(name, self._clock_ms())
                logger.error("a directive cannot be kept: %s", error)
                raise Problem.http(
                    503,
                    "the instance cannot keep a directive now; its log says why",
                    retry_after=_FULL_RETRY_S,
                ) from error
            self._begin(loading)

    def _begin(self, loading: Loading) -> None:
        name = loading.directive.directive
        task = self._running[name] = self._tasks.start(self._run(loading))
        task.add_done_callback(partial(self._over, name))

    def _over(self, name: str, task: asyncio.Task[None]) -> None:
        if self._running.get(name) is task:  # not the next one of that name
            del self._running[name]

    def status(self, name: str) -> PrefetchStatus:
        """Raises Problem `kvsp-unknown-resource`."""
        now_ms = self._clock_ms()
        try:
            return self._agent.directives.get(name, now_ms).status(now_ms)
        finally:
            self._forget_old()

    async def cancel(self, name: str) -> None:
        """Raises Problem `kvsp-unknown-resource`."""
        await to_the_end(self._cancel(name))

    async def _cancel(self, name: str) -> None:
        async with self._locks.of(name):
            self._agent.directives.cancel(name, self._clock_ms())
            if (task := self._running.get(name)) is not None:
                task.cancel()
            await self._forget(name)

    def _forget_old(self) -> None:
        for name in self._agent.directives.take_forgotten():
            self._tasks.start(self._forget_one(name))

    async def _forget_one(self, name: str) -> None:
        async with self._locks.of(name):  # its outcome may just be on the way to the disk
            if self._agent.directives.find(name) is None:
                await self._forget(name)

    async def _forget(self, name: str) -> None:
        try:
            await self._kept.forget(name)
        except OSError as error:
            logger.warning("a directive is carried out again after a restart: %s", error)

    async def _run(self, loading: Loading) -> None:
        await self._load(loading)
        directive = loading.directive
        async with self._locks.of(directive.directive):
            if self._agent.directives.find(directive.directive) is not loading:
                return
            now_ms, status = self._unix_ms(), loading.status(self._clock_ms())
            ends_ms = now_ms + max(0, loading.ends_ms - self._clock_ms())
            try:
                await self._kept.keep(KeptDirective(directive, ends_ms, status, now_ms))
            except OSError as error:
                logger.warning("the outcome of a directive is not kept: %s", error)

    async def _load(self, loading: Loading) -> None:
        table, directive = self._agent.directives, loading.directive
        user = f"directive {directive.directive}"

        def came(block: BlockId, outcome: KvBlock | LoadError) -> None:
            if isinstance(outcome, LoadError):
                table.failed(loading, block.block_key, outcome.reason)
            else:
                table.loaded(loading, block.block_key)

        wanted: list[Wanted] = []
        for each in loading.missing:
            block = BlockId(directive.compat_id, directive.scope_id, each.block_key)
            # they are of one prompt, in its order
            prior = wanted[-1].block.block_key if wanted else None
            wanted.append(Wanted(block, each.sources, prior))
        over = True
        try:
            await self._loader.load(
                wanted,
                user,
                came,
                seconds=(loading.ends_ms - self._clock_ms()) / 1000,
                lease_ms=directive.lease_ms,
            )
        except asyncio.CancelledError:
            over = False  # the next process goes on with it
            raise
        finally:
            if over:
                table.finish(loading, self._clock_ms(), TIMEOUT)
            # from now on they stay as others do: as long as there is room
            self._agent.pool.unpin_all(user)

    async def stop(self) -> None:
        await self._tasks.stop()
