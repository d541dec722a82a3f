"""KVSP "Publishing and Withdrawing Replicas", as a holder does it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvsp.holder.holder import Holder, HolderSettings
from kvsp.holder.records.index import IndexRefusedError, IndexUnavailableError
from kvsp.holder.records.publishing import RecordPublisher
from kvsp.holder.records.table import Published, RecordTable
from kvsp.holder.tiers.disk import DiskTier
from kvsp.holder.tiers.tiers import MemoryTier, part_name
from kvsp.records.records import ReplicaRecord
from tests.kvsp.holder.support import (
    DESCRIPTOR,
    OCTETS,
    Clock,
    MemoryIndex,
    World,
    block_id,
    container,
    make_world,
    octets,
)
from tests.kvsp.support_http import BASE, running


@pytest.fixture
async def world() -> World:
    made = make_world([(MemoryTier(), 3 * OCTETS)])
    for number in range(3):
        await made.put(number)
    return made


async def chunks(data: bytes) -> AsyncIterator[bytes]:
    yield data


def puts(index: MemoryIndex) -> int:
    return sum(method == "PUT" for method, _ in index.calls)


async def test_a_holder_publishes_each_replica_it_is_willing_to_serve(world: World) -> None:
    await world.publisher.step()
    assert all(world.index.lists(block_id(number)) for number in range(3))
    (record,) = [each for each in world.index.records.values() if each.block == block_id(1)]
    # what is published is a valid record of that block
    read = ReplicaRecord.from_json(record.to_json(), descriptor=DESCRIPTOR)
    assert read == record and read.holder == "https://h1.example/kvsp/"
    assert read.residency is not None and read.residency[0].tier == "host"
    # what is served by layer range is verified by layer
    assert read.layer_digests == tuple(container(1).layer_digests())


async def test_holders_refresh_records_before_expiry(world: World) -> None:
    world.index.ttl_ms = 10_000
    await world.publisher.step()
    assert puts(world.index) == 3
    world.clock.now += 3.9
    await world.publisher.step()
    assert puts(world.index) == 3
    world.clock.now += 1.0  # before half of the TTL is over
    await world.publisher.step()
    assert puts(world.index) == 6


async def test_a_holder_must_withdraw_a_record_before_evicting_the_replica(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.publisher.step()
    order: list[str] = []
    withdraw, delete = world.index.withdraw, MemoryTier.delete

    async def noted_withdraw(path: str) -> None:
        assert block_id(0) in world.holder.store, "it was gone before the index knew"
        order.append("withdraw")
        await withdraw(path)

    async def noted_delete(self: Any, *what: Any) -> None:
        order.append("evict")
        await delete(self, *what)

    monkeypatch.setattr(world.index, "withdraw", noted_withdraw)
    monkeypatch.setattr(MemoryTier, "delete", noted_delete)
    assert (await world.put(7)).status == 201
    assert order == ["withdraw", "evict"]
    assert not world.index.lists(block_id(0))


async def test_a_block_about_to_go_is_not_leased(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.publisher.step()
    began, go_on = asyncio.Event(), asyncio.Event()
    withdraw = world.index.withdraw

    async def slow(path: str) -> None:
        began.set()
        await go_on.wait()
        await withdraw(path)

    monkeypatch.setattr(world.index, "withdraw", slow)
    store = asyncio.ensure_future(world.put(7))
    await began.wait()
    assert (await world.lease(0)).status == 404
    assert (await world.get(0)).status == 200
    go_on.set()
    assert (await store).status == 201
    assert (await world.get(0)).status == 404


async def test_while_the_index_is_away_the_holder_stores_serves_and_evicts(
    world: World,
) -> None:
    await world.publisher.step()
    world.index.up = False
    assert (await world.put(7)).status == 201
    assert (await world.get(7)).status == 200
    assert (await world.get(0)).status == 404
    await world.publisher.step()
    assert world.publisher.unavailable and world.publisher.pending_withdrawals == 1
    anybody = world.client.as_(None)
    assert (await anybody.get("/healthz")).status == 200
    assert (await anybody.get("/readyz")).json["status"] == "degraded"
    world.index.up = True
    world.clock.now += 60
    await world.publisher.step()
    assert not world.index.lists(block_id(0)), "the withdrawal was repeated"
    assert world.index.lists(block_id(7))
    assert not world.publisher.unavailable


async def test_after_a_failed_refresh_every_record_is_published_again(world: World) -> None:
    await world.publisher.step()
    world.index.up = False
    world.holder.records.changed(block_id(1))
    await world.publisher.step()
    world.index.records.clear()
    world.index.up = True
    world.clock.now += 60
    await world.publisher.step()
    assert all(world.index.lists(block_id(number)) for number in range(3))


async def test_an_index_that_restarted_empty_gets_every_record_at_the_first_refresh(
    world: World,
) -> None:
    await world.publisher.step()
    world.index.records.clear()
    world.holder.records.changed(block_id(2))
    await world.publisher.step()
    assert all(world.index.lists(block_id(number)) for number in range(3))
    assert puts(world.index) == 6


async def test_an_index_that_lost_the_descriptors_too_gets_them_and_every_record_at_once(
    world: World,
) -> None:
    await world.publisher.step()
    world.index.restart_empty()
    world.clock.now += 0.5 * 600
    await world.publisher.step()
    assert world.index.descriptors[0] == DESCRIPTOR
    assert all(world.index.lists(block_id(number)) for number in range(3))
    assert world.publisher.refusals == 0 and not world.publisher.unavailable


async def test_the_first_refresh_after_the_loss_brings_all_records_back_not_its_own_alone(
    world: World,
) -> None:
    await world.publisher.step()
    world.index.restart_empty()
    world.holder.records.changed(block_id(2))
    await world.publisher.step()
    assert all(world.index.lists(block_id(number)) for number in range(3))
    assert len(world.index.descriptors) == 1


async def test_an_index_that_goes_away_between_descriptor_and_record_is_asked_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.publisher.step()
    world.index.restart_empty()

    async def gone(descriptor: Any) -> None:
        raise IndexUnavailableError("down")

    with monkeypatch.context() as patch:
        patch.setattr(world.index, "put_descriptor", gone)
        world.holder.records.changed(block_id(2))
        await world.publisher.step()
    assert world.publisher.unavailable
    world.clock.now += 1
    await world.publisher.step()
    assert all(world.index.lists(block_id(number)) for number in range(3))


async def test_a_record_whose_descriptor_nobody_has_is_refused_and_tried_much_later() -> None:
    index, clock = MemoryIndex(descriptors=[]), Clock()
    publisher = RecordPublisher(index, clock=clock)
    holder = Holder(
        [(MemoryTier(), 3 * OCTETS)], HolderSettings(base_uri=BASE), records=publisher, clock=clock
    )
    await holder.put(block_id(1), DESCRIPTOR, chunks(octets(container(1))))
    await publisher.step()
    assert publisher.refusals == 1
    next_due = publisher.table.next_due()
    assert next_due is not None and next_due >= clock.now + 100


async def test_waits_grow_while_the_index_is_away() -> None:
    table = RecordTable()
    table.changed(block_id(1), 0.0)
    now, delays = 0.0, []
    for _ in range(9):
        assert table.due(now, 8) == [block_id(1)]
        table.failed(block_id(1), now)
        assert table.due(now, 8) == []
        due = table.next_due()
        assert due is not None
        delays.append(due - now)
        now = due
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_an_index_that_was_away_is_asked_again_within_the_ttl_of_the_records() -> None:
    """However long it was away: what is held is to be found within one TTL."""
    table, now = RecordTable(ttl_s=6.0), 0.0
    for _ in range(20):
        table.failed(None, now)
        assert not table.may_ask(now)
        assert table.may_ask(now + 6.0 / 2)
        now += 6.0 / 2


async def test_a_change_while_a_record_is_on_its_way_is_published_after_it() -> None:
    table = RecordTable()
    table.changed(block_id(1), 0.0)
    assert table.due(0.0, 8) == [block_id(1)]
    table.changed(block_id(1), 0.1)
    table.published(block_id(1), "p", Published(1000, created=True), 0.2)
    assert table.due(0.2, 8) == [block_id(1)]
    assert table.due(0.2, 8) == []


async def test_a_refused_record_is_tried_again_much_later(world: World) -> None:
    async def refuse(record: ReplicaRecord) -> Published:
        raise IndexRefusedError("status 403, kvsp-forbidden")

    world.index.publish = refuse  # type: ignore[method-assign]
    await world.publisher.step()
    assert world.publisher.refusals == 3 and not world.publisher.unavailable
    world.clock.now += 100
    await world.publisher.step()
    assert world.publisher.refusals == 3
    world.clock.now += 300
    await world.publisher.step()
    assert world.publisher.refusals == 6


def hold_up_publishing(world: World) -> tuple[asyncio.Event, asyncio.Event]:
    """The index takes the record of block 0 only after the second event; the first one tells
    that it was asked to."""
    began, go_on = asyncio.Event(), asyncio.Event()
    publish = world.index.publish

    async def slow(record: ReplicaRecord) -> Published:
        if record.block == block_id(0):
            began.set()
            await go_on.wait()
        return await publish(record)

    world.index.publish = slow  # type: ignore[method-assign]
    return began, go_on


async def test_a_withdrawal_never_loses_to_a_publication_under_way(world: World) -> None:
    began, go_on = hold_up_publishing(world)
    step = asyncio.ensure_future(world.publisher.step())
    await began.wait()
    withdrawal = asyncio.ensure_future(world.publisher.withdraw(block_id(0)))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(step, withdrawal)
    assert not world.index.lists(block_id(0)) and world.index.lists(block_id(1))


async def test_a_publication_that_comes_after_its_withdrawal_is_withdrawn_again(
    world: World,
) -> None:
    """The index took so long over it that nobody waited: it does not come to stay."""
    began, go_on = hold_up_publishing(world)
    step = asyncio.ensure_future(world.publisher.step())
    await began.wait()
    assert (await world.client.request("DELETE", f"blocks/{block_id(0).path}")).status == 204
    assert not step.done() and not world.index.lists(block_id(0))
    go_on.set()
    await step
    assert world.index.lists(block_id(0))
    await world.publisher.step()
    assert not world.index.lists(block_id(0)) and world.publisher.pending_withdrawals == 0
    assert world.index.lists(block_id(1))
    # a block that is stored anew meanwhile keeps its record
    go_on.clear()
    began.clear()
    await world.put(0)
    step = asyncio.ensure_future(world.publisher.step())
    await began.wait()
    await world.client.request("DELETE", f"blocks/{block_id(0).path}")
    await world.put(0)
    go_on.set()
    await step
    await world.publisher.step()
    await world.publisher.step()
    assert world.index.lists(block_id(0))


async def test_a_descriptor_that_comes_after_the_block_went_brings_no_record(
    world: World,
) -> None:
    world.index.descriptors.clear()
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def describe(_compat_id: bytes) -> Any:
        asked.set()
        await go_on.wait()
        return DESCRIPTOR

    world.publisher.describe(describe)
    step = asyncio.ensure_future(world.publisher.step())
    await asked.wait()
    for number in range(3):
        await world.client.request("DELETE", f"blocks/{block_id(number).path}")
    go_on.set()
    await step
    assert world.index.records == {}


async def test_draining_withdraws_every_record_and_publishes_none(world: World) -> None:
    async with running(world.app) as app:
        await world.publisher.step()
        await app.drain()
        assert world.index.records == {}
        await world.put(9)
        await world.publisher.step()
        assert world.index.records == {}
        assert (await world.get(1)).status == 200


async def test_the_service_publishes_by_itself(world: World) -> None:
    told = asyncio.Event()
    publish = world.index.publish

    async def noted(record: ReplicaRecord) -> Published:
        answer = await publish(record)
        if record.block == block_id(8):
            told.set()
        return answer

    world.index.publish = noted  # type: ignore[method-assign]
    async with running(world.app):
        await world.put(8)
        async with asyncio.timeout(10):
            await told.wait()


async def test_a_fault_in_publishing_one_record_is_logged_and_does_not_stop_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    index, clock = MemoryIndex(), Clock()
    publisher = RecordPublisher(index, clock=clock)

    def broken(block: Any, ttl_ms: int) -> None:
        raise RuntimeError("broken")

    publisher.attach(broken)
    publisher.changed(block_id(1))
    await publisher.step()
    assert "broken" in caplog.text
    assert publisher.table.next_due() == clock.now + 0.5


async def test_a_lost_file_withdraws_the_record_at_once(tmp_path: Path) -> None:
    world = make_world([(DiskTier(tmp_path), 3 * OCTETS)])
    await world.holder.start()
    await world.put(1)
    await world.publisher.step()
    (tmp_path / part_name(block_id(1))).unlink()
    await world.get(1)
    assert ("DELETE", next(path for _, path in world.index.calls)) == world.index.calls[-1]


async def test_churn_in_a_full_holder_keeps_hitting_and_bounds_every_table() -> None:
    world = make_world([(MemoryTier(), 8 * OCTETS)])
    holder: Holder = world.holder
    for round_ in range(60):
        for hot in range(4):
            if (await world.get(hot)).status == 404:
                await world.put(hot)
        await world.put(1000 + round_)
        await world.publisher.step()
    misses = sum(holder.store.counters.misses.values())
    assert sum(holder.store.counters.hits.values()) >= 59 * 4 and misses <= 4
    assert len(holder.store) == 8 == len(world.publisher.table) == len(world.index.records)


def test_attempts_that_fail_together_count_as_one_failure() -> None:
    table = RecordTable()
    for number in range(8):
        table.changed(block_id(number), 1000.0)
    blocks = table.due(1000.0, 8)
    assert len(blocks) == 8
    for block in blocks:
        table.failed(block, 1000.01)
    # half a second, as after one; not the 30 s of the eighth in a row
    assert table.next_due() == pytest.approx(1000.51)
