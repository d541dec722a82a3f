"""An inference instance at work: its core, engine, stores and links."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvsp.client.client import Client
from kvsp.client.errors import ClientError
from kvsp.holder.holder import Holder
from kvsp.instance.callers import PlacementCaller
from kvsp.instance.core.agent import Agent
from kvsp.instance.core.inventory import Inventory
from kvsp.instance.engines.engine import Engine
from kvsp.instance.epochs import Epochs
from kvsp.instance.kept_directives import KeptDirectives
from kvsp.instance.loading.fetchers import Fetcher
from kvsp.instance.loading.loader import BlockLoader
from kvsp.instance.prefetching import Prefetcher
from kvsp.instance.reporting import Reporter
from kvsp.instance.resharding import Resharder
from kvsp.instance.serving import SessionRunner
from kvsp.instance.tasks import Tasks, logger
from kvsp.names.uris import BlockId
from kvsp.records.records import InstanceStatus, Link, ReplicaRecord

_DESCRIPTOR_AGAIN_S = 30.0


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class InstanceShell:
    """Starts, connects and stops the parts of one instance."""

    def __init__(
        self,
        agent: Agent,
        engine: Engine,
        holder: Holder,
        client: Client,
        placement: PlacementCaller,
        epochs: Epochs,
        *,
        fetchers: Sequence[Fetcher] = (),
        export_to: Sequence[str] = (),
        links: Sequence[Link] = (),
        directives: Path | None = None,
        clock_ms: Callable[[], int] = monotonic_ms,
    ) -> None:
        """`holder` is the instance's own store, `client` reaches the index and holders.
        `fetchers` come before HTTP; `links` are known before any is measured. The folder
        `directives` keeps those beyond the process."""
        self.agent = agent
        self.engine = engine
        self.clock_ms = clock_ms
        self.client = client
        self.placement = placement
        self.inventory = Inventory()
        agent.pool.watch = holder.store.watch = self.inventory.change
        self._given_links = tuple(links)
        self.loader = BlockLoader(
            engine.descriptor,
            agent.pool,
            holder,
            fetchers,
            base_uri=agent.base_uri,
            client=client,
            export_to=export_to,
        )
        self.sessions = SessionRunner(
            agent,
            engine,
            self.loader,
            placement,
            self._find if client.index is not None else None,
            clock_ms,
        )
        kept = KeptDirectives(directives, http_loopback=agent.limits.http_loopback)
        self.prefetcher = Prefetcher(agent, self.loader, clock_ms, kept)
        self.resharder = Resharder(agent, self.loader, clock_ms)
        self.reporter = Reporter(
            agent,
            placement,
            epochs,
            lambda: self.links,
            clock_ms,
            dropped=self.sessions.drop_all,
            reported=self._reported,
        )
        self._tasks = Tasks()

    @property
    def links(self) -> list[Link]:
        """What is known of the links to holders; what was measured comes first."""
        known = {link.holder: link for link in (*self._given_links, *self.client.links)}
        return list(known.values())

    def status(self) -> InstanceStatus:
        """The status as it is now."""
        return self.agent.status(self.links, self.clock_ms())

    async def start(self) -> None:
        await self.client.__aenter__()
        await self.sessions.start()
        await self.prefetcher.start()
        self._tasks.start(self._keep_descriptor())
        self._tasks.start(self.reporter.run())

    async def drain(self) -> None:
        """Take nothing new, tell so, and complete the sessions that are here."""
        self.agent.end(self.clock_ms())
        self.reporter.hurry()
        await self.sessions.idle()

    async def stop(self) -> None:
        for part in (self._tasks, self.prefetcher, self.resharder, self.sessions, self.loader):
            await part.stop()
        await self.placement.close()
        await self.client.close()

    async def _reported(self) -> None:
        self.sessions.forget_old()
        await self.resharder.settle(self.placement)

    async def _find(self, blocks: Sequence[BlockId]) -> list[list[ReplicaRecord]]:
        compat_id, scope_id, _ = blocks[0]
        keys = [block.block_key for block in blocks]
        found = await self.client.lookup(
            scope_id, compat_id, keys, descriptor=self.engine.descriptor
        )
        return [list(matched.replicas) for matched in found.blocks]

    async def _keep_descriptor(self) -> None:
        """Have the index know the descriptor before anything is published: holders that get
        exported blocks ask there for it."""
        if self.client.index is None:
            return
        known = False
        while True:
            try:
                await self.client.put_descriptor(self.engine.descriptor)
                known = True
            except ClientError as error:
                if known:
                    logger.warning("the index did not take the descriptor: %s", error)
                known = False
            await asyncio.sleep(_DESCRIPTOR_AGAIN_S if known else 1.0)
