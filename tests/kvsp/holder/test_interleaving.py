"""Reading, storing, evicting and deleting at once: whatever comes first, nobody gets wrong octets
and nothing is left over. Each seed is one order of steps (`tests.kvsp.scheduler`)."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvsp.blocks.container import Container
from kvsp.holder.tiers.disk import DiskTier, Files
from kvsp.holder.tiers.tiers import MemoryTier, part_name
from kvsp.names.codes import Codec
from kvsp.records.records import ReplicaRecord
from tests.kvsp.holder.support import (
    DESCRIPTOR,
    DISK,
    HOST,
    OCTETS,
    MemoryIndex,
    World,
    block_id,
    container,
    make_world,
    octets,
)
from tests.kvsp.inside import locks_of, rooms_of
from tests.kvsp.scheduler import pause, run

SEEDS = 120
PER_TEST = 20
BLOCKS = 6
WORKERS = 6
REQUESTS = 10
CODECS = (Codec.RAW, Codec.X_ZLIB)
STORE = {"content-type": "application/kvsp-block", "if-none-match": "*"}
KNOWN = {200, 201, 204, 404, 409, 412, 429, 503, 507}


class Quick(Files):
    """A disk that loses nothing here, so that nothing is waited for."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


class Failing(Quick):
    """A disk that is full before the budget of its tier is, and at times cannot be read."""

    def __init__(self, root: Path, numbers: random.Random) -> None:
        self.root = root
        self.numbers = numbers

    def write(self, descriptor: int, octets: memoryview) -> int:
        there = sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())
        room = min(len(octets), max(0, 3 * OCTETS + 4000 - there))
        if octets and not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, octets[:room])

    def read(self, descriptor: int, octets: int, offset: int) -> bytes:
        if self.numbers.random() < 0.03:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(descriptor, octets, offset)


class SlowIndex(MemoryIndex):
    """An index whose answers, and what it does, come when the seed says."""

    async def publish(self, record: ReplicaRecord) -> Any:
        await pause()
        answer = await super().publish(record)
        await pause()
        return answer

    async def withdraw(self, path: str) -> None:
        await pause()
        await super().withdraw(path)


@cache
def made(number: int, codec: Codec) -> Container:
    return container(number, codec)


@cache
def selected(number: int, codec: Codec, layers: tuple[int, int]) -> bytes:
    return octets(made(number, codec).select(range(layers[0], layers[1] + 1)))


class Load:
    """Workers that ask one holder for random things, and what must hold of every answer."""

    def __init__(
        self, world: World, root: Path, numbers: random.Random, *, failing: bool = False
    ) -> None:
        self.failing = failing
        self.world = world
        self.root = root
        self.numbers = numbers
        self.statuses: Counter[tuple[str, int]] = Counter()

    async def worker(self) -> None:
        for _ in range(REQUESTS):
            work = asyncio.ensure_future(self.request())
            if self.numbers.random() < 0.15:
                for _ in range(self.numbers.randrange(12)):
                    await pause()
                work.cancel()
            await asyncio.wait([work])
            if not work.cancelled():
                work.result()

    async def request(self) -> None:
        kind = self.numbers.choices(
            (self.get, self.put, self.delete, self.lease, self.lose), (14, 8, 1, 1, 1)
        )[0]
        await kind(self.numbers.randrange(BLOCKS))

    async def get(self, number: int) -> None:
        layers = self.numbers.choice([None, None, (0, 3), (1, 2), (3, 3)])
        codec = self.numbers.choice([None, None, *CODECS])
        chosen = []
        if layers is not None:
            chosen.append(f"layers={layers[0]}-{layers[1]}")
        if codec is not None:
            chosen.append(f"codec={int(codec)}")
        query = "?" + "&".join(chosen) if chosen else ""
        answer = await self.asked("GET", number, query)
        if answer.status == 200:
            right = {
                selected(number, each, layers or (0, 3))
                for each in (CODECS if codec is None else (codec,))
            }
            assert answer.body in right, f"wrong octets for block {number}{query}"

    async def put(self, number: int) -> None:
        data = octets(made(number, self.numbers.choice(CODECS)))
        await self.asked("PUT", number, "", data)

    async def delete(self, number: int) -> None:
        await self.asked("DELETE", number, "")

    async def lease(self, number: int) -> None:
        answer = await self.world.lease(number, (number + 1) % BLOCKS, ttl_ms=1000)
        self.statuses["LEASE", answer.status] += 1
        assert answer.status in KNOWN - {200}, answer
        await pause()
        self.world.clock.now += 0.4

    async def lose(self, number: int) -> None:
        """Somebody removes a file of the disk tier."""
        (self.root / part_name(block_id(number))).unlink(missing_ok=True)

    async def asked(self, method: str, number: int, query: str, data: bytes | None = None) -> Any:
        headers = STORE if method == "PUT" else None
        path = f"blocks/{block_id(number).path}{query}"
        answer = await self.world.client.request(method, path, data, headers)
        if answer.status == 200 and len(answer.body) != int(answer.headers["content-length"]):
            answer.status = 0  # it was broken off, which the client sees
        assert answer.status in KNOWN or (self.failing and not answer.status), (
            method,
            number,
            query,
            answer,
        )
        self.statuses[method, answer.status] += 1
        return answer


def left_over(world: World, root: Path) -> None:
    """Nothing is promised, about to go, open or half there; the books say what is stored."""
    store, rooms = world.holder.store, rooms_of(world.holder.store)
    for tier in (HOST, DISK):
        parts = {
            block: entry.parts[tier]
            for block in store.blocks()
            if (entry := store.entry(block)) is not None and tier in entry.parts
        }
        assert rooms[tier].reserved == 0 and rooms[tier].leaving == 0, tier
        assert rooms[tier].used == sum(part.octets for part in parts.values()), tier
        if tier is DISK:
            there = {path.relative_to(root).as_posix() for path in root.rglob("*.kvb")}
            extra = there - {part_name(block) for block in parts}
            assert not extra, f"files that nobody counts: {extra}"
    assert not list((root / "incoming").iterdir())
    assert not locks_of(world.holder)
    held = {block for block in store.blocks() if world.holder.record(block, 1) is not None}
    assert {record.block for record in world.index.records.values()} == held
    for entry in map(store.entry, store.blocks()):
        assert entry is not None and entry.parts and not entry.leaving


async def test_what_is_stored_while_a_block_is_opened_is_not_taken_for_what_was_there(
    tmp_path: Path,
) -> None:
    disk = DiskTier(tmp_path, files=Quick())
    world = make_world([(disk, 4 * OCTETS)])
    await world.holder.start()
    path = f"blocks/{block_id(0).path}"

    async def store(codec: Codec) -> None:
        answer = await world.client.request("PUT", path, octets(made(0, codec)), STORE)
        assert answer.status == 201

    await store(Codec.X_ZLIB)
    opened = disk.open

    async def late(*values: Any) -> Any:
        disk.open = opened  # type: ignore[method-assign]
        await world.holder.delete(block_id(0))
        await store(Codec.RAW)
        return await opened(*values)

    disk.open = late  # type: ignore[method-assign]
    assert (await world.client.get(path)).body == octets(made(0, Codec.RAW))
    await world.holder.stop()


def descriptors_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def interleave(seed: int, root: Path, failing: bool) -> Counter[tuple[str, int]]:
    async def main(numbers: random.Random) -> Counter[tuple[str, int]]:
        files = Failing(root, numbers) if failing else Quick()
        disk = DiskTier(root, files=files, quarantine_octets=0)
        tiers = [(MemoryTier(), 4 * OCTETS), (disk, 4 * OCTETS)]
        world = make_world(tiers, index=SlowIndex())
        world.publisher.describe(_descriptor)
        await world.holder.start()
        await world.publisher.start()
        load = Load(world, root, numbers, failing=failing)
        for number in range(BLOCKS):  # the first ones are in memory alone in the end
            await world.put(number)
            for _ in range(3 if number < 4 else 0):
                await world.get(number)
                await world.holder.stop()
        gc.collect()  # what other tests have left closes its descriptors now
        before = descriptors_open()
        await asyncio.gather(*(load.worker() for _ in range(WORKERS)))
        await world.holder.stop()
        for _ in range(10):  # the index hears the rest
            world.clock.now += 4
            await asyncio.sleep(4)
        await world.publisher.stop()
        assert descriptors_open() == before
        left_over(world, root)
        moves = world.holder.store.counters
        return load.statuses + Counter(
            {("promoted", 0): moves.promotions, ("demoted", 0): moves.demotions}
        )

    return run(seed, main)


async def _descriptor(_compat: bytes) -> Any:
    return DESCRIPTOR


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_requests_in_any_order_get_right_octets_or_a_miss_and_leave_nothing_over(
    first: int, failing: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # a body that is broken off is logged as an error
    caplog.set_level(logging.CRITICAL if failing else logging.ERROR)
    statuses: Counter[tuple[str, int]] = Counter()
    for seed in range(first, first + PER_TEST):
        try:
            statuses += interleave(seed, tmp_path / str(seed), failing)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert not caplog.records, caplog.text
    # the seeds meet what they are for
    for seen in (("GET", 200), ("GET", 404), ("PUT", 201), ("PUT", 412), ("DELETE", 204)):
        assert statuses[seen], statuses
    assert statuses["promoted", 0] and statuses["demoted", 0], statuses


async def test_what_was_stored_in_the_place_of_a_block_is_not_served_as_that_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between finding a block and opening its file another codec of it takes its name."""
    world = make_world([(DiskTier(tmp_path), 4 * OCTETS)])
    await world.holder.start()
    await world.put(1)
    path, opened = f"blocks/{block_id(1).path}", DiskTier.open
    replacements = [octets(made(1, Codec.X_ZLIB))]

    async def late(self: DiskTier, *which: Any) -> Any:
        while replacements:
            data = replacements.pop()
            assert (await world.client.request("DELETE", path)).status == 204
            assert (await world.client.request("PUT", path, data, STORE)).status == 201
        return await opened(self, *which)

    monkeypatch.setattr(DiskTier, "open", late)
    answer = await world.client.get(path)
    assert (answer.status, answer.body) == (200, octets(made(1, Codec.X_ZLIB)))
    assert world.holder.store.counters.lost == 0
