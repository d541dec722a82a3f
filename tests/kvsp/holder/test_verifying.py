"""Rot on the disk: it is found by scrubbing, by promotion and by clients, and costs one block."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvsp.holder.reading import Sections
from kvsp.holder.tiers.disk import DiskTier
from kvsp.holder.tiers.scrubbing import Scrubber
from kvsp.holder.tiers.tiers import MemoryTier, part_name
from tests.kvsp.holder.support import (
    DISK,
    OCTETS,
    World,
    block_id,
    container,
    make_world,
    octets,
)


def rot(root: Path, number: int) -> None:
    """Flip a bit of a block's sections."""
    path = root / part_name(block_id(number))
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)


async def world_on(root: Path, **settings: Any) -> World:
    world = make_world([(DiskTier(root), 10 * OCTETS)], **settings)
    await world.holder.start()
    for number in (1, 2, 3):
        assert (await world.put(number)).status == 201
    await world.publisher.step()
    return world


async def doubted(world: World, number: int, who: str = "reader") -> Any:
    path = f"blocks/{block_id(number).path}/verification"
    return await world.client.as_(who).request("POST", path)


async def test_a_holder_that_is_told_of_a_failed_verification_withdraws_what_is_damaged(
    tmp_path: Path,
) -> None:
    world = await world_on(tmp_path)
    assert (await doubted(world, 1)).status == 204
    rot(tmp_path, 2)
    assert (await world.get(2)).status == 200  # its digest would tell the client
    answer = await doubted(world, 2)
    assert (answer.status, answer.json["reason"]) == (404, "lost")
    assert not world.index.lists(block_id(2)) and world.index.lists(block_id(1))
    assert (await world.get(2)).status == 404
    counters = world.holder.store.counters
    assert counters.verified == {"sound": 1, "lost": 1} and counters.quarantined == 1
    # a PUT repairs it
    assert (await world.put(2)).status == 201
    assert (await world.get(2)).body == octets(container(2))
    await world.publisher.step()
    assert world.index.lists(block_id(2))
    assert (await doubted(world, 9)).status == 404


async def test_only_who_may_read_a_block_may_doubt_it(tmp_path: Path) -> None:
    world = await world_on(tmp_path)
    assert (await doubted(world, 1, "tenant")).problem == "kvsp-forbidden"
    assert world.holder.store.counters.octets_verified == 0


async def test_doubts_cost_one_reading_of_a_block_in_a_while_and_one_block_at_a_time_of_each_client(
    tmp_path: Path,
) -> None:
    world = await world_on(tmp_path)
    for _ in range(5):
        assert (await doubted(world, 1)).status == 204
    assert world.holder.store.counters.octets_verified == OCTETS
    world.clock.now += world.holder.settings.verified_s
    assert (await doubted(world, 1)).status == 204
    assert world.holder.store.counters.octets_verified == 2 * OCTETS
    first = asyncio.ensure_future(world.holder.doubted(block_id(2), client="reader"))
    await asyncio.sleep(0)
    answer = await doubted(world, 3)
    assert (answer.status, "retry-after" in answer.headers) == (429, True)
    # the others have their own share, and wait for their turn
    assert (await doubted(world, 3, "writer")).status == 204
    assert await first
    assert world.holder.store.counters.reads_refused == 1


async def test_clients_that_doubt_at_once_wait_for_each_other_and_read_a_block_once(
    tmp_path: Path,
) -> None:
    world = await world_on(tmp_path, checks=1)
    asking = [world.holder.doubted(block_id(2), client=f"tenant {each}") for each in range(5)]
    assert await asyncio.gather(*asking) == [True] * 5
    assert world.holder.store.counters.octets_verified == OCTETS


async def test_a_head_of_new_layers_is_read_for_one_at_a_time_of_a_client_and_then_known(
    tmp_path: Path,
) -> None:
    world = await world_on(tmp_path)
    path = f"blocks/{block_id(1).path}?layers="
    held = asyncio.Event()

    async def slow(_: Sections) -> bytes:
        await held.wait()
        return b"d" * 32

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sections, "digest", slow)
        first = asyncio.ensure_future(world.client.request("HEAD", path + "0-0"))
        await asyncio.sleep(0.05)
        second = await world.client.request("HEAD", path + "1-1")
        assert (second.status, "retry-after" in second.headers) == (429, True)
        held.set()
        assert (await first).status == 200
    before = dict(world.holder.store.counters.octets_read)
    again = await world.client.request("HEAD", path + "0-0")
    assert (again.status, again.headers["etag"]) == (200, f'"{(b"d" * 32).hex()}"')
    # what a GET shows needs no reading for a HEAD
    got = await world.get(1, "?layers=2-3")
    read = dict(world.holder.store.counters.octets_read)
    shown = await world.client.request("HEAD", path + "2-3")
    assert shown.headers["repr-digest"] == got.headers["repr-digest"]
    assert read != before and read == dict(world.holder.store.counters.octets_read)


async def test_damage_found_while_promoting_is_a_loss(tmp_path: Path) -> None:
    world = make_world([(MemoryTier(), 4 * OCTETS), (DiskTier(tmp_path), 10 * OCTETS)])
    await world.holder.start()
    await world.put(1)
    rot(tmp_path, 1)
    for _ in range(2):
        await world.get(1)
        await world.holder.stop()
    assert (await world.get(1)).status == 404
    assert world.holder.store.counters.lost == world.holder.store.counters.quarantined == 1


class Sleeps:
    """Nobody waits; how long it would have been is noted. Ends the run at the `rounds`-th pause."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.seconds = 0.0

    async def __call__(self, seconds: float) -> None:
        await asyncio.sleep(0)
        if seconds == 10.0:
            self.rounds -= 1
            if not self.rounds:
                raise asyncio.CancelledError
        else:
            self.seconds += seconds


async def test_the_scrubber_finds_rot_that_nobody_asked_for_and_keeps_its_rate(
    tmp_path: Path,
) -> None:
    world = await world_on(tmp_path)
    rot(tmp_path, 3)
    sleeps = Sleeps(2)
    scrubber = Scrubber(world.holder.store, DISK, world.holder.parts.verify, 1000.0, sleeps)
    with pytest.raises(asyncio.CancelledError):
        await scrubber.run()
    assert scrubber.rounds == 2
    # three blocks in the first round, two in the second, at 1,000 octets per second
    assert sleeps.seconds == pytest.approx(5 * OCTETS / 1000)
    assert list(world.holder.store.blocks()) == [block_id(1), block_id(2)]
    assert not world.index.lists(block_id(3))
    assert world.holder.store.counters.verified == {"sound": 4, "lost": 1}


async def test_a_holder_scrubs_by_itself_when_it_has_a_rate(tmp_path: Path) -> None:
    await world_on(tmp_path)
    rot(tmp_path, 1)
    again = make_world([(DiskTier(tmp_path), 10 * OCTETS)], scrub_octets_per_s=1e9)
    await again.holder.start()
    async with asyncio.timeout(30):
        while not again.holder.scrubber.rounds:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await again.holder.stop()
    assert block_id(1) not in again.holder.store and len(again.holder.store) == 2
