"""Carries prefetch directives out, in the background (KVSP "Prefetch Directives")."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvsp.instance.core.agent import Agent
from kvsp.instance.core.directives import CAPACITY, TIMEOUT, Loading
from kvsp.instance.loading import BlockLoader, LoadError
from kvsp.instance.tasks import Tasks
from kvsp.names.uris import BlockId
from kvsp.records.records import PrefetchDirective, PrefetchStatus


class Prefetcher:
    """One task per directive; blocks of a directive one after the other."""

    def __init__(self, agent: Agent, loader: BlockLoader, clock_ms: Callable[[], int]) -> None:
        self._agent = agent
        self._loader = loader
        self._clock_ms = clock_ms
        self._tasks = Tasks()
        self._running: dict[str, asyncio.Task[None]] = {}

    def accept(self, directive: PrefetchDirective) -> None:
        """Begin to load; harmless for a repeated directive. Raises as `Agent.accept_prefetch`."""
        loading = self._agent.accept_prefetch(directive, self._clock_ms())
        if loading is not None:
            name = directive.directive
            task = self._running[name] = self._tasks.start(self._load(loading))
            task.add_done_callback(lambda _: self._running.pop(name, None))

    def status(self, name: str) -> PrefetchStatus:
        """Raises Problem `kvsp-unknown-resource`."""
        now_ms = self._clock_ms()
        return self._agent.directives.get(name, now_ms).status(now_ms)

    def cancel(self, name: str) -> None:
        """Raises Problem `kvsp-unknown-resource`."""
        self._agent.directives.cancel(name, self._clock_ms())
        if (task := self._running.get(name)) is not None:
            task.cancel()

    async def _load(self, loading: Loading) -> None:
        table, directive = self._agent.directives, loading.directive
        reason = TIMEOUT
        user = f"directive {directive.directive}"
        try:
            async with asyncio.timeout((loading.ends_ms - self._clock_ms()) / 1000):
                for wanted in loading.missing:
                    block = BlockId(directive.compat_id, directive.scope_id, wanted.block_key)
                    try:
                        await self._loader.load(
                            block, wanted.sources, user, lease_ms=directive.lease_ms
                        )
                    except LoadError as error:
                        table.failed(loading, wanted.block_key, error.reason)
                        if error.reason == CAPACITY:
                            # the prefix ends here: no later block is of use
                            reason = CAPACITY
                            break
                    else:
                        table.loaded(loading, wanted.block_key)
        except TimeoutError:
            reason = TIMEOUT
        finally:
            table.finish(loading, self._clock_ms(), reason)
            # from now on they stay as others do: as long as there is room
            self._agent.pool.unpin_all(user)

    async def stop(self) -> None:
        await self._tasks.stop()
