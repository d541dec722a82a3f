"""The object storage tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore", reason="the extra 's3' is not installed")

import obstore
from obstore.store import LocalStore, MemoryStore

from kvsp.holder.tiers.disk import DiskTier
from kvsp.holder.tiers.objects import ObjectTier
from kvsp.holder.tiers.tiers import TierUnavailableError, part_name
from tests.kvsp.holder.support import (
    DISK,
    OCTETS,
    REMOTE,
    World,
    block_id,
    container,
    make_world,
    octets,
)


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "b", mkdir=True)


async def world_on(store: Any, disk: Path | None = None, blocks: int = 2) -> World:
    tiers: list[Any] = [(ObjectTier(store), None)]
    if disk is not None:
        tiers.insert(0, (DiskTier(disk), blocks * OCTETS))
    world = make_world(tiers)
    await world.holder.start()
    return world


def names(store: Any) -> list[str]:
    return sorted(each["path"] for batch in obstore.list(store) for each in batch)


async def test_blocks_live_in_the_object_store_and_survive_a_restart(store: Any) -> None:
    world = await world_on(store)
    assert (await world.put(1)).status == 201
    assert names(store) == [part_name(block_id(1))]
    again = await world_on(store)
    assert (await again.get(1)).body == octets(container(1))
    assert (await again.get(1, "?layers=1-2")).body == octets(container(1).select(range(1, 3)))
    assert (await again.client.request("DELETE", f"blocks/{block_id(1).path}")).status == 204
    assert names(store) == []


async def test_a_full_disk_demotes_to_the_object_store_and_withdraws_nothing(
    store: Any, tmp_path: Path
) -> None:
    world = await world_on(store, tmp_path / "disk")
    for number in range(4):
        assert (await world.put(number)).status == 201
        await world.publisher.step()
    assert world.holder.store.counters.demotions == 2
    assert world.holder.store.used(DISK) == 2 * OCTETS
    assert all(world.index.lists(block_id(number)) for number in range(4))
    record = next(each for each in world.index.records.values() if each.block == block_id(0))
    assert record.residency is not None and record.residency[0].tier == "remote"
    for number in range(4):
        assert (await world.get(number)).body == octets(container(number))
    assert (world.holder.store.read_mbit_per_s(REMOTE) or 0) > 0


async def test_a_block_that_cannot_be_demoted_is_withdrawn_and_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await world_on(MemoryStore(), tmp_path)
    for number in range(2):
        await world.put(number)
    await world.publisher.step()

    async def fail(*_: Any, **__: Any) -> Any:
        raise OSError("no route")

    monkeypatch.setattr("kvsp.holder.tiers.objects.obstore.put_async", fail)
    assert (await world.put(2)).status == 201
    assert not world.index.lists(block_id(0)) and (await world.get(0)).status == 404
    assert world.holder.store.used(REMOTE) == 0
    assert world.holder.store.counters.evictions == {"disk": 1}


async def test_an_object_that_is_gone_or_cut_short_is_404(store: Any) -> None:
    world = await world_on(store)
    await world.put(1)
    await world.put(2)
    obstore.delete(store, part_name(block_id(1)))
    obstore.put(store, part_name(block_id(2)), octets(container(2))[:100])
    for number in (1, 2):
        answer = await world.get(number)
        assert (answer.status, answer.json["reason"]) == (404, "lost")
    assert names(store) == []


async def test_damaged_objects_are_removed_at_start_up(store: Any) -> None:
    world = await world_on(store)
    for number in range(3):
        await world.put(number)
    obstore.put(store, part_name(block_id(1)), b"short")
    obstore.put(store, part_name(block_id(2)), b"garbage" * 100)
    again = await world_on(store)
    assert list(again.holder.store.blocks()) == [block_id(0)]
    assert names(store) == [part_name(block_id(0))]


async def test_a_store_that_fails_is_503_and_tells_no_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = await world_on(MemoryStore())
    await world.put(1)

    async def fail(*_: Any, **__: Any) -> Any:
        raise OSError("https://bucket.example/?X-Amz-Signature=secret")

    for name in ("head_async", "put_async"):
        monkeypatch.setattr(f"kvsp.holder.tiers.objects.obstore.{name}", fail)
    for answer in (await world.get(1), await world.put(2)):
        assert answer.status == 503 and "retry-after" in answer.headers
        assert b"secret" not in answer.body
    assert world.holder.store.used(REMOTE) == OCTETS
    monkeypatch.setattr("kvsp.holder.tiers.objects.obstore.list", lambda *_, **__: _failing())
    with pytest.raises(TierUnavailableError, match="OSError"):
        await ObjectTier(MemoryStore()).start()


async def _failing() -> Any:
    raise OSError("down")
    yield
