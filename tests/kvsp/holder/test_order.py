"""Which block goes next: the end of a prompt before its beginning, at the cost of a few steps."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.holder.order import EvictionOrder
from kvsp.holder.store import Store
from kvsp.holder.tiers.disk import DiskTier
from kvsp.holder.tiers.tiers import MemoryTier
from kvsp.names.uris import BlockId
from tests.kvsp.holder.support import (
    DISK,
    HOST,
    OCTETS,
    World,
    block_id,
    container,
    info_and_part,
    make_world,
    put_block,
)

INFO, PART = info_and_part(container(0))
FIELD = "kvsp-prior-block"


def key(number: int) -> bytes:
    return block_id(number).block_key


async def put_prompt(world: World, numbers: range) -> None:
    """Store the blocks of a prompt, each of which tells which one it follows."""
    for number in numbers:
        more = {FIELD: key(number - 1).hex()} if number > numbers.start else {}
        assert (await put_block(world.client, number, **more)).status == 201


def held(world: World, numbers: range) -> list[int]:
    return [number for number in numbers if block_id(number) in world.holder.store]


async def test_with_room_for_all_but_one_block_of_a_prompt_the_last_one_goes() -> None:
    world = make_world([(MemoryTier(), 16 * OCTETS)])
    await put_prompt(world, range(100, 116))
    await world.put(1)
    assert held(world, range(100, 117)) == list(range(100, 115))
    # blocks of which nobody says so go by age alone
    plain = make_world([(MemoryTier(), 16 * OCTETS)])
    for number in range(100, 117):
        await plain.put(number)
    assert held(plain, range(100, 117)) == list(range(101, 117))


async def test_a_prompt_longer_than_the_room_keeps_its_beginning() -> None:
    world = make_world([(MemoryTier(), 16 * OCTETS)])
    await put_prompt(world, range(100, 117))
    assert held(world, range(100, 117)) == [*range(100, 115), 116]
    # what is stored just now stays; the hole is where the end began
    await world.put(1)
    assert held(world, range(100, 117)) == list(range(100, 115))


async def test_reading_the_end_of_a_prompt_keeps_its_beginning_too() -> None:
    world = make_world([(MemoryTier(), 8 * OCTETS)])
    await put_prompt(world, range(100, 104))
    for number in range(4):
        await world.put(number)
    assert (await world.get(103)).status == 200
    for number in range(10, 13):
        await world.put(number)
    assert held(world, range(100, 104)) == [100, 101, 102, 103]
    assert held(world, range(4)) == [3]


async def test_what_lost_its_beginning_goes_first() -> None:
    world = make_world([(MemoryTier(), 8 * OCTETS)])
    await world.put(1)
    await put_prompt(world, range(100, 106))
    await world.put(2)
    assert (await world.client.request("DELETE", f"blocks/{block_id(102).path}")).status == 204
    for number in (3, 4, 5):
        await world.put(number)
    assert held(world, range(100, 106)) == [100, 101, 105]
    await world.put(6)
    # the oldest block of all is still there
    assert held(world, range(100, 106)) == [100, 101]
    assert held(world, range(7)) == [1, 2, 3, 4, 5, 6]


async def test_a_faster_tier_keeps_the_beginning_as_well(tmp_path: Path) -> None:
    world = make_world([(MemoryTier(), 16 * OCTETS), (DiskTier(tmp_path), 64 * OCTETS)])
    await world.holder.start()
    await put_prompt(world, range(100, 120))
    for _ in range(2):
        for number in range(100, 120):
            await world.get(number)
            await world.holder.stop()  # waits for promotions
    in_memory = [
        number
        for number in range(100, 120)
        if HOST in world.holder.store.entry(block_id(number)).parts
    ]
    assert in_memory[:10] == list(range(100, 110))


def test_what_goes_to_a_slower_tier_was_not_used_and_nothing_before_it_either() -> None:
    store = Store({HOST: 20 * PART.octets, DISK: 40 * PART.octets}, lambda block, now: False)
    for name in ("old", "new"):
        above = None
        for block in chain(10, name):
            room, _ = store.reserve(HOST, PART.octets, 0.0)
            store.commit(block, room, replace(INFO, prior=above), PART)
            above = block.block_key
    gone: list[BlockId] = []
    for number in range(10):
        room, (step,) = store.reserve(HOST, PART.octets, 0.0)
        assert step.demotion is not None
        store.moved(step.block, step.demotion, step.part)
        store.dropped(step)
        gone.append(step.block)
        store.commit(chain(1, f"single {number}")[0], room, INFO, PART)
    assert gone == chain(10, "old")[::-1]
    # and it goes on from there in the same order
    _, steps = store.reserve(DISK, 33 * PART.octets, 0.0)
    assert [step.block for step in steps] == gone[:3]


@pytest.mark.parametrize("read", [True, False])
def test_a_block_is_the_next_after_its_lease_unless_it_was_read_under_it(read: bool) -> None:
    covered: set[BlockId] = set()
    store = Store({DISK: 4 * PART.octets}, lambda block, now: block in covered)
    for block in (blocks := chain(4, "leased")):
        store.commit(block, store.reserve(DISK, PART.octets, 0.0)[0], INFO, PART)
    covered.add(blocks[0])
    room, (step,) = store.reserve(DISK, PART.octets, 0.0)
    assert step.block == blocks[1]
    store.dropped(step)
    store.commit(chain(1, "new")[0], room, INFO, PART)
    if read:
        store.find(blocks[0])
    covered.clear()
    store.freed(blocks[0])
    _, (step,) = store.reserve(DISK, PART.octets, 0.0)
    assert step.block == blocks[2 if read else 0]


async def test_the_chain_is_known_after_a_restart(tmp_path: Path) -> None:
    world = make_world([(DiskTier(tmp_path), 16 * OCTETS)])
    await world.holder.start()
    await put_prompt(world, range(100, 116))
    assert [world.holder.record(block_id(number), 1).position for number in (100, 101, 115)] == [
        None,
        1,
        15,
    ]
    await world.holder.close()
    again = make_world([(DiskTier(tmp_path), 16 * OCTETS)])
    await again.holder.start()
    await again.put(1)
    assert held(again, range(100, 116)) == list(range(100, 115))


async def test_a_prior_block_that_is_no_key_is_refused() -> None:
    world = make_world()
    answer = await put_block(world.client, 1, **{FIELD: "abc"})
    assert (answer.status, answer.problem) == (400, "kvsp-invalid-request")
    # one that says that it follows itself follows none
    assert (await put_block(world.client, 1, **{FIELD: key(1).hex()})).status == 201
    assert (await world.get(1)).status == 200


async def test_blocks_that_say_that_they_follow_each_other_are_blocks_as_others() -> None:
    world = make_world([(MemoryTier(), 4 * OCTETS)])
    for number, prior in ((0, 1), (1, 2), (2, 0)):
        await put_block(world.client, number, **{FIELD: key(prior).hex()})
    for number in range(3, 12):
        await world.put(number)
        await world.get(number - 1)
    assert len(world.holder.store) == 4


# --- what it costs -------------------------------------------------------------------


def chain(count: int, name: str) -> list[BlockId]:
    return [
        block_id(0)._replace(block_key=hashlib.sha256(f"{name} {each}".encode()).digest())
        for each in range(count)
    ]


def filled(blocks: int, covered: set[BlockId]) -> tuple[Store, list[BlockId]]:
    """A store full of prompts of fifty blocks."""
    store = Store({DISK: blocks * PART.octets}, lambda block, now: block in covered)
    kept: list[BlockId] = []
    for number in range(blocks // 50):
        above = None
        for block in chain(50, f"prompt {number}"):
            room, _ = store.reserve(DISK, PART.octets, 0.0)
            store.commit(block, room, replace(INFO, prior=above), PART)
            above = block.block_key
            kept.append(block)
    return store, kept


def visits_for_room(blocks: int, share: float) -> int:
    """Blocks visited to make room a hundred times; those leased were met before."""
    covered: set[BlockId] = set()
    store, kept = filled(blocks, covered)
    covered.update(kept[: int(share * blocks)])
    before = 0
    for number in range(200):
        if number == 100:
            before = store.order.visits
        room, steps = store.reserve(DISK, PART.octets, 0.0)
        for step in steps:
            assert step.block not in covered
            store.dropped(step)
        store.commit(chain(1, f"new {number}")[0], room, INFO, PART)
    return store.order.visits - before


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_making_room_costs_the_same_whatever_is_held_or_leased(share: float) -> None:
    assert visits_for_room(500, share) == visits_for_room(20_000, share) <= 300


@pytest.mark.parametrize("blocks", [500, 20_000])
def test_a_use_costs_a_few_steps_however_much_is_held(blocks: int) -> None:
    store, kept = filled(blocks, set())
    numbers, before = random.Random(blocks), store.order.visits
    for _ in range(blocks):
        store.find(numbers.choice(kept))
    assert store.order.visits - before <= 10 * blocks


@given(st.data())
def test_whatever_happens_every_block_is_in_the_line_of_each_of_its_tiers_once(
    data: st.DataObject,
) -> None:
    order = EvictionOrder([HOST, DISK])
    model: dict[BlockId, set[object]] = {}
    parked: set[BlockId] = set()
    blocks = [block_id(number) for number in range(6)]
    for _ in range(40):
        block = data.draw(st.sampled_from(blocks))
        tier = data.draw(st.sampled_from([HOST, DISK]))
        what = data.draw(
            st.sampled_from(["place", "place", "demote", "use", "take", "park", "free", "back"])
        )
        if block not in model:
            order.add(block, data.draw(st.sampled_from([None, *blocks])))
            model[block] = set()
        if what == "place" and tier not in model[block]:
            order.place(block, tier)
            model[block].add(tier)
            parked.discard(block)
        elif what == "demote" and tier not in model[block]:
            order.demote(block, tier)
            model[block].add(tier)
        elif what == "use":
            order.use(block)
        elif what == "take":
            order.take(block, tier)
            model[block].discard(tier)
            if not model[block]:
                order.forget(block)
                del model[block]
                parked.discard(block)
        elif what == "back" and tier not in model[block]:
            order.put_back(block, tier)
            model[block].add(tier)
        elif what == "free":
            order.free(block)
            parked.discard(block)
        elif what == "park" and tier in model[block] and block not in parked:
            model_tiers = model[block]
            if len(model_tiers) == 1:
                order.park(block, tier)
                parked.add(block)
    for block in parked:
        order.free(block)
    for tier in (HOST, DISK):
        there = {block for block, tiers in model.items() if tier in tiers}
        while (block := order.first(tier)) is not None:
            there.remove(block)
            order.take(block, tier)
        assert not there
