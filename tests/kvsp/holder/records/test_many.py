"""Many records at once, and one request that keeps all of them alive."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvsp.holder.records.index import (
    IndexRefusedError,
    IndexUnavailableError,
    Kept,
    OvertakenError,
    TooManyError,
)
from kvsp.holder.records.publishing import RecordPublisher
from kvsp.holder.tiers.tiers import MemoryTier
from tests.kvsp.holder.support import (
    DESCRIPTOR,
    OCTETS,
    MemoryIndex,
    World,
    block_id,
    make_world,
)
from tests.kvsp.support_http import BASE, running


async def world_with(blocks: int, index: MemoryIndex | None = None, most: int = 256) -> World:
    world = make_world([(MemoryTier(), 40 * OCTETS)], many=True, index=index, most=most)
    for number in range(blocks):
        assert (await world.put(number)).status == 201
    return world


def listed(world: World) -> set[int]:
    return {number for number in range(40) if world.index.lists(block_id(number))}


def asked(world: World) -> list[tuple[str, str]]:
    calls, world.index.calls = world.index.calls, []
    return calls


def held_back(world: World, after_s: float = 0) -> tuple[asyncio.Event, asyncio.Event]:
    """Have requests with many records wait: that one has begun, and what lets them go on."""
    began, go_on = asyncio.Event(), asyncio.Event()
    keep = world.index.keep

    async def slow(*values: Any) -> Kept:
        began.set()
        await go_on.wait()
        await asyncio.sleep(after_s)
        return await keep(*values)

    world.index.keep = slow  # type: ignore[method-assign]
    return began, go_on


async def test_all_that_is_due_goes_in_one_request_and_what_was_there_before_is_gone() -> None:
    index = MemoryIndex()
    before = await world_with(3, index)
    await before.publisher.step()
    # the process is killed, and its memory with it
    after = await world_with(0, index)
    asked(after)
    await after.publisher.step()
    assert asked(after) == [("DELETE", BASE)] and listed(after) == set()
    for number in (5, 6, 7):
        await after.put(number)
    await after.publisher.step()
    assert asked(after) == [("POST", "3")] and listed(after) == {5, 6, 7}


async def test_one_request_keeps_every_record_alive_before_half_of_the_ttl_is_over() -> None:
    world = await world_with(20)
    await world.publisher.step()
    asked(world)
    for _ in range(3):
        due = world.publisher.table.next_due()
        assert due is not None and due < world.clock.now + 300
        world.clock.now = due
        await world.publisher.step()
    assert asked(world) == [("POST", "0")] * 3
    assert world.publisher.remaining_s(block_id(1)) == 600
    assert (await world.get(1)).headers["cache-control"].endswith("max-age=600")


async def test_an_index_that_started_empty_gets_everything_again_at_the_next_keep_alive() -> None:
    world = await world_with(5)
    await world.publisher.step()
    world.index.restart_empty()
    world.clock.now += 0.45 * 600
    await world.publisher.step()
    world.clock.now += 1
    await world.publisher.step()
    assert listed(world) == set(range(5))
    assert world.index.descriptors == [DESCRIPTOR] and world.publisher.refusals == 0


async def test_records_that_the_index_should_not_have_are_withdrawn_with_all_and_come_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = await world_with(4)
    await world.publisher.step()
    stray = next(iter(world.index.records.values()))
    world.index.records["stray"] = stray
    world.index.kept.add("stray")
    world.clock.now += 0.45 * 600
    await world.publisher.step()
    assert "5 records of this holder instead of 4" in caplog.text
    await world.publisher.step()
    assert "stray" not in world.index.records and listed(world) == set(range(4))


async def test_an_eviction_withdraws_its_record_before_it_goes_and_is_kept_no_more() -> None:
    world = await world_with(3)
    await world.publisher.step()
    asked(world)
    await world.client.request("DELETE", f"blocks/{block_id(1).path}")
    ((method, path),) = asked(world)
    assert method == "DELETE" and block_id(1).block_key.hex() in path
    world.clock.now += 0.45 * 600
    await world.publisher.step()
    assert asked(world) == [("POST", "0")] and listed(world) == {0, 2}


async def test_a_withdrawal_that_did_not_arrive_is_repeated_as_long_as_the_holder_is_kept() -> None:
    """A record that is kept does not end by itself."""
    world = await world_with(3)
    await world.publisher.step()
    world.index.up = False
    await world.client.request("DELETE", f"blocks/{block_id(1).path}")
    world.clock.now += 100_000
    await world.publisher.step()
    assert world.publisher.pending_withdrawals == 1
    world.index.up = True
    world.clock.now += 60
    await world.publisher.step()
    await world.publisher.step()
    assert listed(world) == {0, 2} and world.publisher.pending_withdrawals == 0


async def test_more_withdrawals_than_are_remembered_end_in_a_new_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvsp.holder.records.publishing.PENDING_WITHDRAWALS", 2)
    world = await world_with(6)
    await world.publisher.step()
    world.index.up = False
    for number in range(4):
        await world.client.request("DELETE", f"blocks/{block_id(number).path}")
    world.index.up = True
    asked(world)
    world.clock.now += 60
    await world.publisher.step()
    assert asked(world)[0] == ("DELETE", BASE)
    assert listed(world) == {4, 5} and world.publisher.pending_withdrawals == 0


async def test_draining_is_one_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = await world_with(30)
    async with running(world.app) as app:
        await world.publisher.step()
        asked(world)
        await app.drain()
        assert asked(world) == [("DELETE", BASE)] and listed(world) == set()
        world.clock.now += 1000
        await world.publisher.step()
        assert asked(world) == []
    assert world.publisher.withdrawn == 30


async def test_a_drain_waits_for_the_publication_that_is_under_way() -> None:
    world = await world_with(2)
    began, go_on = held_back(world)
    step = asyncio.ensure_future(world.publisher.step())
    await began.wait()
    drain = asyncio.ensure_future(world.publisher.drain())
    await asyncio.sleep(0.01)
    go_on.set()
    await asyncio.gather(step, drain)
    assert listed(world) == set()


async def test_once_a_drain_has_begun_nothing_more_is_published_or_kept_alive() -> None:
    """What came after the withdrawal of all would be there as long as the holder's TTL."""
    world = await world_with(6, most=2)
    began, go_on = held_back(world, after_s=0.02)
    step = asyncio.ensure_future(world.publisher.step())
    await began.wait()
    drain = asyncio.ensure_future(world.publisher.drain())
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(step, drain)
    assert asked(world)[1:] == [("POST", "2"), ("DELETE", BASE)] and listed(world) == set()


async def test_a_drain_that_the_index_did_not_hear_of_keeps_nothing_alive() -> None:
    world = await world_with(2)
    await world.publisher.step()
    world.index.up = False
    await world.publisher.drain()
    world.index.up = True
    asked(world)
    world.clock.now += 0.45 * 600
    await world.publisher.step()
    assert asked(world) == []


async def test_an_index_that_takes_records_one_by_one_gets_them_so() -> None:
    index = MemoryIndex(takes_many=False)
    world = await world_with(4, index)
    await world.publisher.step()
    assert [method for method, _ in asked(world)] == ["DELETE", *["PUT"] * 4]
    assert listed(world) == set(range(4)) and world.publisher.refusals == 0
    world.clock.now += 0.45 * 600
    await world.publisher.step()
    assert [method for method, _ in asked(world)] == ["PUT"] * 4
    await world.publisher.drain()
    assert listed(world) == set()


async def test_nothing_is_published_before_what_is_stale_is_withdrawn() -> None:
    world = await world_with(3)
    world.index.up = False
    await world.publisher.step()
    assert world.publisher.unavailable and world.publisher.failures == 1
    world.index.up = True
    world.clock.now += 0.1
    await world.publisher.step()
    assert asked(world) == []  # not yet: it waits longer each time
    world.clock.now += 1
    await world.publisher.step()
    assert asked(world) == [("DELETE", BASE), ("POST", "3")] and not world.publisher.unavailable


async def test_a_record_that_is_refused_costs_the_others_nothing() -> None:
    world = await world_with(3)
    keep = world.index.keep

    async def refusing(holder: str, ttl_ms: int, records: Any) -> Kept:
        kept = await keep(holder, ttl_ms, records[1:])
        return kept._replace(results=[IndexRefusedError("kvsp-forbidden: no"), *kept.results])

    world.index.keep = refusing  # type: ignore[method-assign]
    await world.publisher.step()
    assert len(listed(world)) == 2 and world.publisher.refusals == 1
    assert world.publisher.table.unpublished == 1


async def test_a_holder_that_cannot_keep_up_says_so_in_readiness_metric_and_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = await world_with(3, most=1)
    await world.publisher.step()
    ready = await world.client.get("/readyz")
    assert ready.json == {"status": "ready", "reasons": []}
    for number in range(3, 9):
        await world.put(number)
    keep = world.index.keep

    async def slow(*values: Any) -> Kept:
        world.clock.now += 7
        return await keep(*values)

    world.index.keep = slow  # type: ignore[method-assign]
    step = asyncio.ensure_future(world.publisher.step())
    while "too slowly" not in caplog.text:  # noqa: ASYNC110
        await asyncio.sleep(0)
    ready = await world.client.get("/readyz")
    metrics = await world.client.as_("operator").get("/metrics")
    await step
    (reason,) = ready.json["reasons"]
    assert ready.json["status"] == "degraded" and "are not to be found" in reason
    late = [line for line in metrics.body.decode().splitlines() if "late_seconds " in line]
    assert float(late[-1].split()[-1]) >= 10
    assert b"kvsp_holder_records_unpublished " in metrics.body
    assert caplog.text.count("too slowly") == 1
    assert "the records are at the index service again" in caplog.text
    assert (await world.client.get("/readyz")).json["status"] == "ready"


async def test_a_holder_whose_records_the_index_loses_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = await world_with(6)
    world.index.room = 4
    await world.publisher.step()
    world.clock.now += 0.45 * 600
    await world.publisher.step()
    assert world.publisher.missing == 2
    ready = await world.client.get("/readyz")
    assert "does not have 2 of 6 records" in ready.json["reasons"][0]
    assert caplog.text.count("does not have 2 of 6 records") == 1
    world.index.room = None
    for _ in range(2):
        world.clock.now += 0.45 * 600
        await world.publisher.step()
    assert world.publisher.missing == 0 and listed(world) == set(range(6))


async def test_a_request_has_a_bounded_number_of_octets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsp.holder.records.publishing.MANY_OCTETS", 1)
    world = await world_with(3)
    await world.publisher.step()
    assert asked(world) == [("DELETE", BASE), *[("POST", "1")] * 3]
    assert listed(world) == {0, 1, 2}


async def test_a_publisher_without_many_withdraws_nothing_at_the_start() -> None:
    index = MemoryIndex()
    publisher = RecordPublisher(index)
    publisher.attach(lambda block, ttl_ms: None)
    await publisher.step()
    assert index.calls == []


@pytest.mark.parametrize(("limit", "sizes"), [(3, [16, 3, 3]), (None, [16, 8, 4, 2, 2])])
async def test_an_index_that_takes_fewer_records_at_once_gets_fewer_and_all_of_them(
    limit: int | None, sizes: list[int]
) -> None:
    world = await world_with(16)
    keep, sent = world.index.keep, list[int]()

    async def narrow(holder: str, ttl_ms: int, records: Any) -> Kept:
        sent.append(len(records))
        if len(records) > 3:
            raise TooManyError("kvsp-too-large: the list of records is over 3", limit)
        return await keep(holder, ttl_ms, records)

    world.index.keep = narrow  # type: ignore[method-assign]
    await world.publisher.step()
    assert listed(world) == set(range(16)) and world.publisher.refusals == 0
    assert sent[: len(sizes)] == sizes
    # it is remembered
    before = len(sent)
    for number in range(16, 24):
        await world.put(number)
    await world.publisher.step()
    assert set(sent[before:]) <= {1, 2, 3} and listed(world) == set(range(24))
    # and tried again after a while: the limit may have been raised
    world.index.keep = keep  # type: ignore[method-assign]
    sizes_then = list[int]()

    async def wide(holder: str, ttl_ms: int, records: Any) -> Kept:
        sizes_then.append(len(records))
        return await keep(holder, ttl_ms, records)

    world.index.keep = wide  # type: ignore[method-assign]
    world.clock.now += 600
    for number in range(24, 34):
        await world.put(number)
    await world.publisher.step()
    assert max(sizes_then) == 10 and listed(world) == set(range(34))


async def test_one_record_that_is_too_large_for_the_index_costs_the_others_nothing() -> None:
    world = await world_with(4)
    keep = world.index.keep
    large = block_id(2).block_key.hex().encode()

    async def narrow(holder: str, ttl_ms: int, records: Any) -> Kept:
        if any(large in record for record in records):
            raise TooManyError("kvsp-too-large")
        return await keep(holder, ttl_ms, records)

    world.index.keep = narrow  # type: ignore[method-assign]
    await world.publisher.step()
    assert listed(world) == {0, 1, 3} and world.publisher.refusals == 1


async def test_a_record_that_its_own_withdrawal_overtook_is_published_again_at_once() -> None:
    world = await world_with(2)
    keep = world.index.keep

    async def overtaken(holder: str, ttl_ms: int, records: Any) -> Kept:
        kept = await keep(holder, ttl_ms, records[1:])
        world.index.keep = keep  # type: ignore[method-assign]
        return kept._replace(results=[OvertakenError("withdrawn on its way"), *kept.results])

    world.index.keep = overtaken  # type: ignore[method-assign]
    await world.publisher.step()
    assert len(listed(world)) == 1 and world.publisher.refusals == 0
    world.clock.now += 0.5
    await world.publisher.step()
    assert listed(world) == {0, 1}


async def test_a_record_whose_answer_was_lost_is_withdrawn_when_its_block_goes() -> None:
    """The index may have it: it would stay as long as the holder is kept alive."""
    world = await world_with(2)
    keep = world.index.keep

    async def lost(*values: Any) -> Kept:
        await keep(*values)
        raise IndexUnavailableError("no answer in time")

    world.index.keep = lost  # type: ignore[method-assign]
    await world.publisher.step()
    world.index.keep = keep  # type: ignore[method-assign]
    assert listed(world) == {0, 1}
    await world.client.request("DELETE", f"blocks/{block_id(1).path}")
    world.clock.now += 60
    await world.publisher.step()
    await world.publisher.step()
    assert listed(world) == {0} and world.publisher.pending_withdrawals == 0


async def test_an_index_that_hangs_is_waited_for_once_and_not_by_every_store() -> None:
    world = await world_with(40)
    await world.publisher.step()
    withdraw, asked_for = world.index.withdraw, list[str]()

    async def hung(path: str) -> None:
        asked_for.append(path)
        await asyncio.Event().wait()

    world.index.withdraw = hung  # type: ignore[method-assign]
    for number in range(40, 60):
        assert (await world.put(number)).status == 201
    assert len(asked_for) == 1 and world.publisher.pending_withdrawals == 20
    world.index.withdraw = withdraw  # type: ignore[method-assign]
    world.clock.now += 1
    await world.publisher.step()
    assert listed(world) == set(range(20, 40)) and world.publisher.pending_withdrawals == 0
