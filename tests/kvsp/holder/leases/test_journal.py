"""Leases are as lasting as the blocks they cover."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvsp.holder.leases.journal import (
    LeaseFile,
    LeaseJournal,
    LeaseJournalError,
    leased_blocks,
)
from kvsp.holder.leases.table import Lease, LeaseQuota
from kvsp.holder.tiers.disk import DiskTier, remove_oldest
from kvsp.holder.tiers.tiers import part_name
from tests.kvsp.holder.support import DISK, OCTETS, World, block_id, make_world
from tests.kvsp.power import SqliteDisk


async def world_on(root: Path, budget: int = 4 * OCTETS, **settings: Any) -> World:
    world = make_world(
        [(DiskTier(root / "blocks"), budget)],
        lease_file=root / "leases.sqlite",
        quota=LeaseQuota(octets=10 * OCTETS),
        **settings,
    )
    await world.holder.start()
    return world


@pytest.mark.parametrize("ends_well", [False, True])
async def test_a_leased_block_is_not_evicted_within_its_lease_although_the_holder_restarts(
    tmp_path: Path, ends_well: bool
) -> None:
    world = await world_on(tmp_path)
    for number in range(4):
        assert (await world.put(number)).status == 201
    lease = (await world.lease(0, 1, 9, ttl_ms=30_000)).json["lease"]
    if ends_well:
        await world.service.stop()
    again = await world_on(tmp_path)
    for number in (5, 6, 7):
        assert (await again.put(number)).status == 201
    assert {block_id(0), block_id(1)} < {*again.holder.store.blocks()}
    assert (await again.client.request("DELETE", f"blocks/{block_id(0).path}")).status == 409
    shown = await again.client.get(f"leases/{lease}")
    assert shown.status == 200 and len(shown.json["leased"]) == 2
    assert shown.json["missing"] == [block_id(9).block_key.hex()]
    # it is its client's, and can be renewed and released
    assert (await again.client.as_("reader").get(f"leases/{lease}")).status == 404
    renewed = await again.client.request("PUT", f"leases/{lease}", json_body={"ttl_ms": 20_000})
    assert renewed.status == 200
    again.clock.now += 21
    assert (await again.put(8)).status == 201
    assert (await again.put(10)).status == 201
    assert block_id(0) not in again.holder.store
    await again.service.stop()
    assert len((await world_on(tmp_path)).holder.leases) == 0


async def test_leases_count_towards_the_quota_after_a_restart(tmp_path: Path) -> None:
    world = await world_on(tmp_path)
    await world.put(0)
    quota = world.holder.leases.quota
    assert (await world.lease(0, ttl_ms=5000)).status == 201
    octets = world.holder.leases.octets
    again = await world_on(tmp_path)
    assert again.holder.leases.octets == octets > 0
    refused = await again.lease(0, ttl_ms=quota.ttl_ms + 1)
    assert refused.json["available_octets"] == quota.octets - octets


async def test_a_smaller_budget_at_the_next_start_costs_no_leased_block(tmp_path: Path) -> None:
    world = await world_on(tmp_path)
    for number in range(4):
        await world.put(number)
    await world.lease(0, 1, ttl_ms=5000)
    again = await world_on(tmp_path, budget=OCTETS)
    assert {*again.holder.store.blocks()} == {block_id(0), block_id(1)}
    again.clock.now += 6
    assert (await again.put(5)).status == 201
    assert {*again.holder.store.blocks()} == {block_id(5)}
    assert again.holder.store.used(DISK) == OCTETS


async def test_a_lease_whose_blocks_are_gone_is_gone(tmp_path: Path) -> None:
    world = await world_on(tmp_path)
    await world.put(0)
    lease = (await world.lease(0, ttl_ms=5000)).json["lease"]
    for path in (tmp_path / "blocks").rglob("*.kvb"):
        path.unlink()
    again = await world_on(tmp_path)
    assert (await again.client.get(f"leases/{lease}")).status == 404
    assert len(again.holder.leases) == 0


async def test_a_lease_that_cannot_be_kept_is_not_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await world_on(tmp_path)
    await world.put(0)

    def full(self: LeaseFile, kept: Iterable[Lease], ended: Iterable[str]) -> None:
        raise LeaseJournalError("the disk is full")

    monkeypatch.setattr(LeaseFile, "write", full)
    answer = await world.lease(0)
    assert (answer.status, "retry-after" in answer.headers) == (503, True)
    assert len(world.holder.leases) == 0
    monkeypatch.undo()
    assert (await world.lease(0)).status == 201


async def test_leases_that_were_never_kept_are_not_to_be_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks on while the disk is full leaves nothing behind in memory."""
    world = await world_on(tmp_path)
    await world.put(0)
    granted = (await world.lease(0)).json["lease"]
    forgotten: list[list[str]] = []
    write = LeaseFile.write

    def full(self: LeaseFile, kept: Iterable[Lease], ended: Iterable[str]) -> None:
        raise LeaseJournalError("the disk is full")

    def noted(self: LeaseFile, kept: Iterable[Lease], ended: Iterable[str]) -> None:
        forgotten.append(list(ended))
        write(self, kept, ended)

    monkeypatch.setattr(LeaseFile, "write", full)
    for _ in range(20):
        assert (await world.lease(0)).status == 503
    world.holder.leases.revoke(block_id(0))
    assert (await world.lease(0)).status == 503
    monkeypatch.setattr(LeaseFile, "write", noted)
    assert (await world.lease(0)).status == 201
    assert forgotten == [[granted]]


async def test_a_lease_is_on_disk_before_it_is_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await world_on(tmp_path)
    await world.put(0)
    kept: list[str] = []
    write = LeaseFile.write

    def noted(self: LeaseFile, leases: Iterable[Lease], ended: Iterable[str]) -> None:
        leases = tuple(leases)
        write(self, leases, ended)
        kept.extend(each.lease_id for each in leases)

    monkeypatch.setattr(LeaseFile, "write", noted)
    granted = (await world.lease(0)).json["lease"]
    assert kept == [granted]
    with sqlite3.connect(tmp_path / "leases.sqlite") as file:
        assert [row[0] for row in file.execute("SELECT id FROM leases")] == [granted]


async def test_leases_that_come_together_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = LeaseJournal(tmp_path / "leases.sqlite")
    assert await journal.start() == []
    writes: list[int] = []
    write = LeaseFile.write

    def counted(self: LeaseFile, leases: Iterable[Lease], ended: Iterable[str]) -> None:
        leases = tuple(leases)
        writes.append(len(leases))
        write(self, leases, ended)

    monkeypatch.setattr(LeaseFile, "write", counted)
    leases = [Lease(str(n), "a", (block_id(n),), 1000, 0.0, (block_id(0),)) for n in range(200)]
    await asyncio.gather(*(journal.keep(lease) for lease in leases))
    assert sum(writes) == 200 and len(writes) <= 3
    for lease in leases[:150]:
        journal.ended(lease.lease_id)
    await journal.stop()
    again = LeaseJournal(tmp_path / "leases.sqlite")
    assert sorted(await again.start(), key=lambda each: int(each.lease_id)) == leases[150:]
    await again.stop()


@pytest.mark.parametrize("size", [100, 40_000])
async def test_a_damaged_file_of_leases_is_set_aside(tmp_path: Path, size: int) -> None:
    world = await world_on(tmp_path)
    await world.put(0)
    await world.lease(0, ttl_ms=5000)
    await world.service.stop()
    (tmp_path / "leases.sqlite").write_bytes(b"rotten octets!" * (size // 14))
    again = await world_on(tmp_path)
    assert (tmp_path / "leases.sqlite.damaged").exists()
    assert block_id(0) in again.holder.store
    assert (await again.lease(0)).status == 201


async def test_what_is_leased_is_spared_when_a_full_disk_is_cleared_for_the_start(
    tmp_path: Path,
) -> None:
    world = await world_on(tmp_path)
    for number in range(4):
        await world.put(number)
        os.utime(tmp_path / "blocks" / part_name(block_id(number)), (number, number))
    await world.lease(0, ttl_ms=5000)
    await world.service.stop()
    leased = leased_blocks(tmp_path / "leases.sqlite")
    assert leased == {block_id(0)}
    assert remove_oldest(tmp_path / "blocks", OCTETS, leased) == 1
    again = await world_on(tmp_path)
    assert list(again.holder.store.blocks()) == [block_id(0), block_id(2), block_id(3)]
    assert leased_blocks(tmp_path / "none") == set()


async def test_a_holder_without_a_file_grants_leases_that_end_with_it() -> None:
    world = make_world()
    await world.holder.start()
    await world.put(0)
    assert (await world.lease(0)).status == 201
    await world.service.stop()


def lease(number: int) -> Lease:
    return Lease(f"lease {number}", "client", (block_id(number),), 1000, 0.0)


@pytest.mark.parametrize(
    ("since", "syncs"), [("none", True), ("all", True), ("torn", True), ("none", False)]
)
def test_a_lease_that_was_granted_is_kept_whenever_the_power_is_cut(
    tmp_path: Path, since: str, syncs: bool
) -> None:
    disk, left = SqliteDisk(syncs=syncs), []
    granted = 0
    with disk.watching():
        file = LeaseFile(tmp_path / "leases.sqlite")
        disk.before_call = lambda: left.append((granted, disk.after_cut(since=since)))
        for number in range(4):
            file.write([lease(number)], [f"lease {number - 2}"])
            granted = number + 1
            left.append((granted, disk.after_cut(since=since)))
        disk.before_call = lambda: None
        file.close()
    wrong = 0
    for number, (count, files) in enumerate(left):
        (folder := tmp_path / str(number)).mkdir()
        for name, octets in files.items():
            (folder / name).write_bytes(octets)
        found = leased_blocks(folder / "leases.sqlite")
        wrong += found not in [
            {block_id(each) for each in range(max(0, end - 2), end)} for end in (count, count + 1)
        ]
    assert len(left) > 12
    # without a sync none would be: that is what tells that the cuts do something
    assert (wrong > 0) is not syncs
