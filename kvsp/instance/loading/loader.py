"""The blocks that an instance loads, keeps and publishes: one load of a block at a time, room for
it before it comes, the own store before any source."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Final

from kvsp.blocks.container import Container, ContainerReader, LayerSections
from kvsp.client.client import Client
from kvsp.client.errors import ClientError
from kvsp.holder.holder import BusyError, CodecUnavailableError, Holder
from kvsp.holder.parts import LeasedError
from kvsp.holder.rooms import NoRoomError
from kvsp.holder.store import BlockExistsError, MissError
from kvsp.holder.tiers.tiers import PartLostError, TierFullError, TierUnavailableError
from kvsp.instance.core.directives import CAPACITY, TIMEOUT
from kvsp.instance.engines.engine import KvBlock
from kvsp.instance.engines.pool import BlockPool, CapacityError
from kvsp.instance.loading.fetchers import Fetcher, LoadError
from kvsp.instance.loading.sources import Sources, Wanted
from kvsp.names.codes import Codec
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from kvsp.names.uris import BlockId
from kvsp.records.problems import ProblemName

logger = logging.getLogger("kvsp.instance")

_STORED_AT_ONCE: Final = 4
"""Blocks that came and are being stored at once; a store refuses what is too much."""

Came = Callable[[BlockId, KvBlock | LoadError], None]
"""Told once of each block: it is there, or why it cannot be had."""


class BlockLoader:
    """Loads, keeps and publishes blocks of one descriptor."""

    def __init__(
        self,
        descriptor: Descriptor,
        pool: BlockPool,
        holder: Holder,
        fetchers: Sequence[Fetcher],
        *,
        base_uri: str,
        client: Client,
        export_to: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`holder` is the instance's own store, `client` reaches the index and holders, and
        `fetchers` other sources. `export_to` are holders that get computed blocks too, so that
        these survive the instance."""
        self.descriptor = descriptor
        self.pool = pool
        self.holder = holder
        self.counters: Counter[str] = Counter()
        """`fetched`, `local`, `stores_rejected`, `exported`, `exports_failed`, and failed
        loads by reason."""
        self._client = client
        self._export_to = tuple(export_to)
        self.sources = Sources(client, descriptor, fetchers, base_uri, self.block_octets, clock)
        self._loading: dict[BlockId, asyncio.Future[None]] = {}
        """One load of a block at a time: the second finds what the first one brought."""
        self._storing = asyncio.Semaphore(_STORED_AT_ONCE)
        self._stores: set[asyncio.Task[None]] = set()
        self._said: set[str] = set()

    @property
    def block_octets(self) -> int:
        """Octets of one block in the engine's memory."""
        return 2 * self.descriptor.layers * self.descriptor.section_octets()

    async def load(
        self,
        wanted: Sequence[Wanted],
        user: str,
        came: Came,
        *,
        seconds: float | None = None,
        lease_ms: int = 5000,
        publish: bool = True,
    ) -> None:
        """Have blocks, all of one scope, in the engine's memory, pinned for `user`: from the
        own store, else from their sources, many at once, the first ones first. With `publish`
        they become replicas of this instance, too.

        After `seconds` what is not there has failed for `timeout`, whatever sources do.
        """
        left = {each.block: each for each in wanted}
        now = asyncio.get_running_loop().time
        ends = None if seconds is None else now() + seconds

        def ended(block: BlockId, outcome: KvBlock | LoadError) -> None:
            if left.pop(block, None) is not None:
                if isinstance(outcome, LoadError):
                    self.counters[f"failed_{outcome.reason}"] += 1
                came(block, outcome)

        while left and (ends is None or now() < ends):
            mine, others = self._take(left, user, ended)
            if mine:
                await _Load(self, mine, user, ended, ends, lease_ms, publish).run()
            elif others:
                await asyncio.wait(
                    others,
                    timeout=None if ends is None else ends - now(),
                    return_when=asyncio.FIRST_COMPLETED,
                )
        for block in list(left):
            ended(block, LoadError(TIMEOUT))

    def _take(
        self, left: Mapping[BlockId, Wanted], user: str, ended: Came
    ) -> tuple[list[Wanted], list[asyncio.Future[None]]]:
        """What is to be loaded, with room reserved for it, and who loads the others."""
        absent: list[Wanted] = []
        others: list[asyncio.Future[None]] = []
        for block, each in list(left.items()):
            if (found := self.pool.get(block)) is not None:
                self.pool.pin(block, user)
                ended(block, found)
            elif (loading := self._loading.get(block)) is not None:
                others.append(loading)
            elif not each.sources and block not in self.holder.store:
                error = LoadError(str(ProblemName.UNKNOWN_RESOURCE), "no source is named")
                ended(block, error)
            else:
                absent.append(each)
        mine: list[Wanted] = []
        for place, each in enumerate(absent):
            try:
                self.pool.reserve(self.block_octets)
            except CapacityError as error:
                # the prefix ends here: no later block is of use
                for late in absent[place:]:
                    ended(late.block, LoadError(CAPACITY, str(error)))
                break
            self._loading[each.block] = asyncio.get_running_loop().create_future()
            mine.append(each)
        return mine, others

    # --- of one load ------------------------------------------------------------------

    def arrived(self, block: BlockId, made: KvBlock, user: str) -> KvBlock:
        """A block that `load` took came whole; the one that is in memory now, pinned."""
        held = self.pool.add(block, made, self.block_octets)
        self.pool.pin(block, user)
        self._loading.pop(block).set_result(None)
        return held

    def lost(self, block: BlockId) -> None:
        """A block that `load` took does not come: the next may try."""
        self.pool.release(self.block_octets)
        self._loading.pop(block).set_result(None)

    def store_soon(self, block: BlockId, held: KvBlock, prior: bytes | None) -> asyncio.Task[None]:
        """Store a block that came, a few at a time; whoever loaded it need not wait."""
        task = asyncio.create_task(self._store_in_turn(block, held, prior))
        self._stores.add(task)
        task.add_done_callback(self._stored)
        return task

    async def _store_in_turn(self, block: BlockId, held: KvBlock, prior: bytes | None) -> None:
        async with self._storing:
            await self.store(block, held, prior)

    def _stored(self, task: asyncio.Task[None]) -> None:
        self._stores.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a block that was loaded is not stored", exc_info=error)

    async def stop(self) -> None:
        """End what is still being stored."""
        stores = list(self._stores)
        for task in stores:
            task.cancel()
        await asyncio.gather(*stores, return_exceptions=True)

    async def read_own(self, block: BlockId) -> KvBlock | None:
        """The block from this instance's store, None when it is not (whole) there."""
        if block not in self.holder.store:
            return None
        try:
            body = await self.holder.open(block, None, Codec.RAW, self._describe)
        except (MissError, CodecUnavailableError, DecodeError, TierUnavailableError, BusyError):
            return None
        made, reader = KvBlock(self.descriptor), ContainerReader(self.descriptor)
        try:
            async with contextlib.aclosing(body.chunks()) as chunks:
                async for chunk in chunks:
                    for event in reader.feed(chunk):
                        if isinstance(event, LayerSections):
                            made.write(event.layer, event.k, event.v)
            reader.close()
        except PartLostError as error:
            await self.holder.part_lost(block, error)
            return None
        except (DecodeError, TierUnavailableError):
            return None
        finally:
            body.close()
        return made if made.complete else None

    async def _describe(self, _compat_id: bytes) -> Descriptor:
        return self.descriptor

    # --- publishing ------------------------------------------------------------------

    async def computed(self, block: BlockId, made: KvBlock, prior: bytes | None = None) -> None:
        """The engine computed a block, `prior` is the key of the one before it: keep it, publish
        it, and hand it to other holders."""
        if block not in self.pool:
            with contextlib.suppress(CapacityError):  # it stays in its context, and is stored
                self.pool.reserve(made.octets)
                self.pool.add(block, made, made.octets)
        await self.store(block, made, prior)
        for holder in self._export_to:
            await self._export(holder, block, made, prior)

    async def store(self, block: BlockId, made: KvBlock, prior: bytes | None = None) -> None:
        """Put a block into the instance's own store, which publishes it. A store that is
        full costs the replica, not the session."""
        if block in self.holder.store:
            return
        container = Container.build(self.descriptor, made.sections())
        try:
            async with contextlib.aclosing(_octets(container)) as octets:
                await self.holder.put(block, self.descriptor, octets, prior=prior)
        except BlockExistsError:
            return
        except (NoRoomError, BusyError):
            self._rejected(CAPACITY)
        except (TierFullError, TierUnavailableError) as error:
            self._rejected(type(error).__name__)

    def _rejected(self, reason: str) -> None:
        self.counters["stores_rejected"] += 1
        self._say_once(f"own-{reason}", "blocks are not kept in the instance's store: %s", reason)

    async def _export(
        self, holder: str, block: BlockId, made: KvBlock, prior: bytes | None
    ) -> None:
        container = Container.build(self.descriptor, made.sections())
        try:
            await self._client.put(holder, block, container, prior=prior)
            self.counters["exported"] += 1
        except ClientError as error:
            self.counters["exports_failed"] += 1
            self._say_once(f"export-{holder}", "blocks are not stored elsewhere: %s", str(error))

    def _say_once(self, what: str, text: str, value: str) -> None:
        """Log the first of many; the counters have them all."""
        if what not in self._said:
            self._said.add(what)
            logger.warning(text, value)

    async def forget(self, block: BlockId) -> None:
        """Drop a block from the engine's memory and the own store, unless it is in use."""
        if not self.pool.discard(block):
            return
        with contextlib.suppress(MissError, LeasedError, TierUnavailableError):
            await self.holder.delete(block)


class _Load:
    """One load of blocks that nobody else loads; room for them is reserved."""

    def __init__(
        self,
        loader: BlockLoader,
        wanted: Sequence[Wanted],
        user: str,
        ended: Came,
        ends: float | None,
        lease_ms: int,
        publish: bool,
    ) -> None:
        self._loader = loader
        self._left = {each.block: each for each in wanted}
        self._priors = {each.block: each.prior for each in wanted}
        self._user = user
        self._ended = ended
        self._ends = ends
        self._lease_ms = lease_ms
        self._publish = publish
        self._stores: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Each block has ended afterwards, unless the time is over before."""
        try:
            await self._local()
            if self._left and self._remaining() != 0.0:
                await self._retrieve(list(self._left.values()))
            if self._stores:
                await asyncio.wait(self._stores, timeout=self._remaining())
        finally:
            for block in self._left:
                self._loader.lost(block)

    def _remaining(self) -> float | None:
        if self._ends is None:
            return None
        return max(0.0, self._ends - asyncio.get_running_loop().time())

    async def _local(self) -> None:
        loader = self._loader
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._ends):
                for block, each in list(self._left.items()):
                    made = await loader.read_own(block)
                    if made is not None:
                        loader.counters["local"] += 1
                        self._there(block, made)
                    elif not each.sources:
                        self._failed(block, LoadError(str(ProblemName.UNKNOWN_RESOURCE)))

    async def _retrieve(self, wanted: Sequence[Wanted]) -> None:
        failures = await self._loader.sources.retrieve(
            wanted, self._came, self._lease_ms, self._remaining()
        )
        for block, error in failures.items():
            self._failed(block, error)

    def _came(self, block: BlockId, made: KvBlock) -> None:
        self._loader.counters["fetched"] += 1
        self._there(block, made)

    def _there(self, block: BlockId, made: KvBlock) -> None:
        del self._left[block]
        held = self._loader.arrived(block, made, self._user)
        if self._publish:
            self._stores.add(self._loader.store_soon(block, held, self._priors[block]))
        self._ended(block, held)

    def _failed(self, block: BlockId, error: LoadError) -> None:
        del self._left[block]
        self._loader.lost(block)
        self._ended(block, error)


async def _octets(container: Container) -> AsyncGenerator[bytes, None]:
    for part in container:
        yield bytes(part)
