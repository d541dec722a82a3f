"""However a block goes, the index hears of it first (KVSP "Publishing and Withdrawing Replicas",
"Leases")."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvsp.holder.store import Part
from kvsp.holder.tiers.disk import DiskTier
from kvsp.holder.tiers.tiers import MemoryTier, TierStorage, part_name
from kvsp.names.uris import BlockId
from tests.kvsp.holder.support import OCTETS, MemoryIndex, World, block_id, make_world


class Order:
    """What happens to block 0, in the order it happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, index: MemoryIndex, tier: type) -> None:
        self.happened: list[str] = []
        withdraw = index.withdraw

        async def withdrawn(path: str) -> None:
            if block_id(0).block_key.hex() in path:
                self.happened.append("withdrawn")
            await withdraw(path)

        monkeypatch.setattr(index, "withdraw", withdrawn)
        for name in ("delete", "quarantine"):
            monkeypatch.setattr(tier, name, self.noting(getattr(tier, name)))

    def noting(self, method: Any) -> Any:
        async def noted(tier: TierStorage, block: BlockId, part: Part) -> Any:
            if block == block_id(0):
                self.happened.append("gone")
            return await method(tier, block, part)

        return noted


async def make_room(world: World, root: Path) -> None:
    for number in range(1, 6):
        assert (await world.put(number)).status == 201


async def delete(world: World, root: Path) -> None:
    path = f"blocks/{block_id(0).path}"
    assert (await world.client.request("DELETE", path)).status == 204


async def find_damaged(world: World, root: Path) -> None:
    path = root / part_name(block_id(0))
    path.write_bytes(path.read_bytes()[:200])
    assert (await world.get(0)).status == 404


async def doubt(world: World, root: Path) -> None:
    path = root / part_name(block_id(0))
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)
    answer = await world.client.request("POST", f"blocks/{block_id(0).path}/verification")
    assert answer.status == 404


Leave = Callable[[World, Path], Awaitable[None]]


@pytest.mark.parametrize(
    ("tier", "leave"),
    [
        (MemoryTier, make_room),
        (DiskTier, make_room),
        (MemoryTier, delete),
        (DiskTier, delete),
        (DiskTier, find_damaged),
        (DiskTier, doubt),
    ],
)
@pytest.mark.parametrize("many", [False, True])
async def test_a_record_is_withdrawn_before_what_it_names_is_gone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tier: type,
    leave: Leave,
    many: bool,
) -> None:
    storage: TierStorage = DiskTier(tmp_path) if tier is DiskTier else MemoryTier()
    world = make_world([(storage, 3 * OCTETS)], many=many)
    await world.holder.start()
    assert (await world.put(0)).status == 201
    await world.publisher.step()
    assert world.index.lists(block_id(0))
    order = Order(monkeypatch, world.index, tier)
    await leave(world, tmp_path)
    assert order.happened == ["withdrawn", "gone"]
    assert not world.index.lists(block_id(0))


async def test_a_block_that_moves_to_another_tier_is_not_withdrawn(
    tmp_path: Path,
) -> None:
    world = make_world([(MemoryTier(), 4 * OCTETS), (DiskTier(tmp_path), 20 * OCTETS)])
    await world.holder.start()
    for number in range(6):
        assert (await world.put(number)).status == 201
        for _ in range(2):
            assert (await world.get(number)).status == 200
        await world.holder.stop()
    await world.publisher.step()
    assert world.holder.store.counters.promotions == 6
    assert not [call for call in world.index.calls if call[0] == "DELETE"]
    assert all(world.index.lists(block_id(number)) for number in range(6))
