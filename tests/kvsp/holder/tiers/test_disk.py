"""The disk tier: a block is there as a whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsp.files import Files
from kvsp.holder.tiers.disk import DiskTier
from kvsp.holder.tiers.tiers import MemoryTier, TierUnavailableError, part_name
from tests.kvsp.holder.support import (
    DESCRIPTOR,
    DISK,
    OCTETS,
    World,
    block_id,
    container,
    cut,
    info_and_part,
    make_world,
    octets,
)
from tests.kvsp.power import Hasty, Killed, Lossy, Reversed
from tests.paths import ROOT


class Mortal(Files):
    """Dies at its `at`-th call, before it or, with `during`, half-way through a write."""

    def __init__(self, at: int, *, during: bool = False) -> None:
        self.at = at
        self.during = during
        self.calls = 0
        self.dead = False

    def _step(self) -> bool:
        if self.dead:
            raise Killed
        self.calls += 1
        if self.calls == self.at:
            self.dead = True
            return True
        return False

    def write(self, descriptor: int, octets: memoryview) -> int:
        if self._step():
            if self.during:
                os.write(descriptor, octets[: len(octets) // 2])
            raise Killed
        return super().write(descriptor, octets)


def _mortal(name: str) -> Any:
    def method(self: Mortal, *args: Any) -> Any:
        if self._step():
            raise Killed
        return getattr(Files, name)(self, *args)

    return method


for _name in ("create", "sync", "rename", "make_folder", "unlink", "sync_folder"):
    setattr(Mortal, _name, _mortal(_name))


async def world_on(root: Path, files: Files | None = None, **more: Any) -> World:
    world = make_world([(DiskTier(root, files=files, **more), 10 * OCTETS)])
    await world.holder.start()
    return world


def files_below(root: Path) -> list[str]:
    """All files of the tier but its lock."""
    files = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return sorted(set(files) - {"lock"})


async def test_blocks_survive_a_restart(tmp_path: Path) -> None:
    world = await world_on(tmp_path)
    await world.put(1)
    await world.put(2)
    again = await world_on(tmp_path, verify_digests=True)
    assert (await again.get(2)).body == octets(container(2))
    assert (await again.get(1, "?layers=1-1")).body == octets(container(1).select(range(1, 2)))
    assert again.holder.store.used(DISK) == 2 * OCTETS
    assert (await again.put(1)).status == 412
    await again.publisher.step()
    assert again.index.lists(block_id(1)) and again.index.lists(block_id(2))


def quarantined(root: Path) -> list[str]:
    """The files that were damaged."""
    return [name for name in files_below(root) if name.startswith("quarantine/")]


async def _kill_at(root: Path, at: int, during: bool) -> bool:
    """Store block 2 beside block 1, dying at a step; whether it died at all."""
    files = Mortal(0, during=during)
    world = await world_on(root, files)
    assert (await world.put(1)).status == 201
    files.calls, files.at = 0, at
    try:
        await world.put(2)
    except Killed:
        return True
    return False


@pytest.mark.parametrize("during", [False, True])
async def test_a_crash_at_any_step_leaves_a_block_whole_or_absent(
    tmp_path: Path, during: bool
) -> None:
    outcomes: list[bool] = []
    for at in range(1, 40):
        root = tmp_path / str(at)
        died = await _kill_at(root, at, during)
        after = await world_on(root, verify_digests=True)
        there = block_id(2) in after.holder.store
        outcomes.append(there)
        assert (await after.get(1)).body == octets(container(1))
        if there:
            assert (await after.get(2)).body == octets(container(2))
        else:
            assert (await after.put(2)).status == 201
        names = {part_name(block_id(number)) for number in (1, 2)}
        assert set(files_below(root)) == names
        if not died:
            break
    else:
        pytest.fail("the store never got to its end")
    assert outcomes[0] is False and outcomes[-1] is True
    assert outcomes == sorted(outcomes)
    assert len(outcomes) >= 8


@pytest.mark.parametrize("names_stay", [False, True])
async def test_a_block_that_was_acknowledged_is_there_whole_after_a_power_cut(
    tmp_path: Path, names_stay: bool
) -> None:
    files, root = Lossy(names_stay=names_stay), tmp_path / "holder" / "blocks"
    world = await world_on(root, files)
    for number in range(4):
        assert (await world.put(number)).status == 201
    files.cut_power(tmp_path)
    disk = DiskTier(root, verify_digests=True)
    after = make_world([(disk, 10 * OCTETS)])
    await after.holder.start()
    for number in range(4):
        assert (await after.get(number)).body == octets(container(number))
    assert disk.damaged == disk.removed == 0


@pytest.mark.parametrize(
    ("leave_out", "names_stay"), [("sync", False), ("sync", True), ("sync_folder", False)]
)
async def test_the_power_cut_of_these_tests_takes_what_was_not_synced(
    tmp_path: Path, leave_out: str, names_stay: bool
) -> None:
    files = Hasty(leave_out, names_stay=names_stay)
    world = await world_on(tmp_path, files)
    assert (await world.put(1)).status == 201
    files.cut_power(tmp_path)
    assert block_id(1) not in (await world_on(tmp_path, verify_digests=True)).holder.store


async def _cut_at_each_step(root: Path, kind: type[Lossy], names_stay: bool) -> list[int]:
    """Store block 2 beside block 1 and cut the power before each call in turn; how many files
    were damaged each time. What was acknowledged is there, whole, in any case."""
    damaged: list[int] = []
    for at in range(1, 60):
        below = root / str(at)
        files = kind(names_stay=names_stay)
        world = await world_on(below, files)
        assert (await world.put(1)).status == 201
        files.calls, files.at = 0, at
        acknowledged = False
        with contextlib.suppress(Killed):
            acknowledged = (await world.put(2)).status == 201
        files.cut_power(below)
        disk = DiskTier(below, verify_digests=True)
        after = make_world([(disk, 10 * OCTETS)])
        await after.holder.start()
        assert (await after.get(1)).body == octets(container(1))
        assert not acknowledged or (await after.get(2)).body == octets(container(2))
        damaged.append(disk.damaged)
        if acknowledged:
            assert len(damaged) >= 7
            return damaged
    pytest.fail("the store never got to its end")


@pytest.mark.parametrize("names_stay", [False, True])
async def test_a_power_cut_at_any_step_leaves_no_half_of_a_block_under_its_name(
    tmp_path: Path, names_stay: bool
) -> None:
    assert set(await _cut_at_each_step(tmp_path, Lossy, names_stay)) == {0}


async def test_a_file_that_got_its_name_before_it_was_synced_would_be_noticed(
    tmp_path: Path,
) -> None:
    assert 1 in await _cut_at_each_step(tmp_path, Reversed, True)


WRITER = """
import asyncio, sys
from pathlib import Path
from kvsp.holder.tiers.disk import DiskTier
from tests.kvsp.holder.support import *

async def main():
    world = make_world([(DiskTier(Path(sys.argv[1])), 1 << 30)])
    await world.holder.start()
    print("ready", flush=True)
    number = 0
    while True:
        answer = await world.put(number)
        assert answer.status == 201, answer
        print(number, flush=True)
        number += 1

asyncio.run(main())
"""


async def test_kill_9_loses_no_block_that_was_acknowledged(tmp_path: Path) -> None:
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        acknowledged = -1
        for line in process.stdout:
            if line.strip() == "30":
                break
        with pytest.raises(TierUnavailableError, match="another process"):
            await DiskTier(tmp_path).start()
        os.kill(process.pid, signal.SIGKILL)
        for line in ("30", *process.stdout):
            acknowledged = int(line)
    finally:
        process.kill()
        process.wait(10)
        process.stdout and process.stdout.close()
    world = make_world([(DiskTier(tmp_path, verify_digests=True), 1 << 30)])
    await world.holder.start()
    assert len(world.holder.store) >= acknowledged + 1 >= 31
    for number in range(acknowledged + 1):
        assert (await world.get(number)).body == octets(container(number))
    assert not list((tmp_path / "incoming").iterdir())


Damage = Callable[[Path], Any]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"garbage" * 100),
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: os.truncate(path, 60),
        lambda path: path.open("ab").write(b"x"),
        lambda path: path.write_bytes(b"XXXX" + path.read_bytes()[4:]),
        lambda path: path.write_bytes(path.read_bytes()[:-80] + b"!" + path.read_bytes()[-79:]),
        lambda path: path.write_bytes(path.read_bytes()[1:]),
    ],
)
async def test_damaged_files_are_quarantined_and_what_a_crash_left_removed_at_start_up(
    tmp_path: Path, damage: Damage
) -> None:
    world = await world_on(tmp_path)
    await world.put(1)
    await world.put(2)
    damage(tmp_path / part_name(block_id(1)))
    (tmp_path / "incoming" / "left").write_bytes(b"half")
    (tmp_path / "blocks" / "notes.txt").write_text("x")
    again = await world_on(tmp_path)
    (kept,) = quarantined(tmp_path)
    assert files_below(tmp_path) == sorted([part_name(block_id(2)), kept])
    assert (await again.get(1)).status == 404
    assert (await again.get(2)).status == 200


async def test_a_flipped_bit_is_found_when_digests_are_verified(tmp_path: Path) -> None:
    world = await world_on(tmp_path)
    await world.put(1)
    path = tmp_path / part_name(block_id(1))
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)
    assert block_id(1) in (await world_on(tmp_path)).holder.store
    assert block_id(1) not in (await world_on(tmp_path, verify_digests=True)).holder.store


async def test_what_no_longer_fits_the_budget_is_removed_at_start_up(tmp_path: Path) -> None:
    world = await world_on(tmp_path)
    for number in range(3):
        await world.put(number)
        os.utime(tmp_path / part_name(block_id(number)), (number, number))
    small = make_world([(DiskTier(tmp_path), 2 * OCTETS)])
    await small.holder.start()
    assert list(small.holder.store.blocks()) == [block_id(1), block_id(2)]
    assert len(files_below(tmp_path)) == 2


class Unreadable(Files):
    """A disk on which some files, `names` below its root, cannot be opened."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.names: set[str] = set()

    def open(self, path: Path) -> int:
        if any(path.as_posix().endswith(name) for name in self.names):
            raise OSError(self.error, os.strerror(self.error))
        return super().open(path)


class Full(Files):
    """A disk with room for `octets` more; what is removed below `root` makes room."""

    def __init__(self, octets: int, error: int = errno.ENOSPC) -> None:
        self.octets = octets
        self.error = error
        self.root: Path | None = None

    def unlink(self, path: Path) -> None:
        if self.root is not None and path.exists():
            self.octets += path.stat().st_size
        super().unlink(path)

    def write(self, descriptor: int, octets: memoryview) -> int:
        written = super().write(descriptor, octets[: max(0, self.octets)] or b"")  # type: ignore[arg-type]
        self.octets -= written
        if len(octets) and not written:
            raise OSError(self.error, os.strerror(self.error))
        return written


@pytest.mark.parametrize("room", [0, 100, OCTETS - 1, OCTETS + 10])
@pytest.mark.parametrize(
    ("error", "status", "problem"),
    [
        (errno.ENOSPC, 507, "kvsp-storage-full"),
        (errno.EDQUOT, 507, "kvsp-storage-full"),
        (errno.EIO, 503, "about:blank"),
        (errno.EROFS, 503, "about:blank"),
    ],
)
async def test_a_full_or_broken_disk_is_507_or_503_with_retry_after_and_nothing_stays(
    tmp_path: Path, room: int, error: int, status: int, problem: str
) -> None:
    files = Full(1 << 20, error)
    world = await world_on(tmp_path, files)
    files.octets = room
    path = f"blocks/{block_id(1).path}"
    headers = {"content-type": "application/kvsp-block", "if-none-match": "*"}
    answer = await world.client.request("PUT", path, cut(octets(container(1)), 100), headers)
    assert (answer.status, answer.problem) == (status, problem)
    assert int(answer.headers["retry-after"]) >= 1
    assert files_below(tmp_path) == [] and world.holder.store.used(DISK) == 0
    files.octets = 1 << 20
    assert (await world.put(1)).status == 201


async def test_a_disk_that_is_full_before_its_budget_loses_the_oldest_and_goes_on_storing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Full(1 << 20)
    world = await world_on(tmp_path, files)
    trailers = 700
    files.octets = 3 * (OCTETS + trailers)
    files.root = tmp_path
    for number in range(8):
        assert (await world.put(number)).status == 201
        assert (await world.get(number)).status == 200
    store = world.holder.store
    assert {*store.blocks()} < {block_id(number) for number in range(4, 8)}
    assert store.counters.shrunk[DISK] >= 1 and store.counters.stores_rejected == {}
    limit = store.limit(DISK)
    assert limit is not None and limit < 4 * OCTETS and store.budget(DISK) == 10 * OCTETS
    warnings = [each for each in caplog.records if "full before its budget" in each.message]
    assert [each.levelname for each in warnings].count("WARNING") == 1
    # room comes back: the budget is whole again after some time
    files.octets = 1 << 30
    for number in range(8, 60):
        world.clock.now += 11
        assert (await world.put(number)).status == 201
    assert store.limit(DISK) == 10 * OCTETS and len(store) == 10
    assert "has room for its whole budget again" in caplog.text


async def test_a_full_disk_starts_serves_what_is_there_and_takes_new_blocks(
    tmp_path: Path,
) -> None:
    world = await world_on(tmp_path)
    for number in range(3):
        assert (await world.put(number)).status == 201
    files = Full(0)
    files.root = tmp_path
    again = await world_on(tmp_path, files)
    for number in range(3):
        assert (await again.get(number)).body == octets(container(number))
    assert (await again.put(3)).status == 201
    assert len(again.holder.store) < 4 and block_id(3) in again.holder.store


async def test_a_disk_that_is_smaller_than_the_budget_is_not_filled_to_the_brim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = os.statvfs(tmp_path)
    values = list(about)
    values[0], values[1], values[4] = 1, 1, 2 * OCTETS + 10  # f_bsize, f_frsize, f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    world = await world_on(tmp_path)
    assert world.holder.store.limit(DISK) == 2 * OCTETS + 10
    for number in range(4):
        assert (await world.put(number)).status == 201
    assert len(world.holder.store) == 2


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.EISDIR])
async def test_a_file_that_cannot_be_read_is_a_miss_and_its_record_withdrawn(
    tmp_path: Path, error: int
) -> None:
    files = Unreadable(error)
    world = await world_on(tmp_path, files)
    for number in (1, 2):
        await world.put(number)
    await world.publisher.step()
    files.names = {part_name(block_id(1))}
    answer = await world.get(1)
    assert (answer.status, answer.json["reason"]) == (404, "lost")
    assert not world.index.lists(block_id(1)) and world.index.lists(block_id(2))
    assert world.holder.store.counters.lost == world.holder.store.counters.quarantined == 1
    assert (await world.get(2)).status == 200
    files.names = set()
    assert (await world.put(1)).status == 201
    assert (await world.get(1)).body == octets(container(1))


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.EISDIR])
async def test_a_file_that_cannot_be_read_stops_no_start(tmp_path: Path, error: int) -> None:
    world = await world_on(tmp_path)
    for number in (1, 2):
        await world.put(number)
    files = Unreadable(error)
    files.names = {part_name(block_id(1))}
    disk = DiskTier(tmp_path, files=files)
    again = make_world([(disk, 10 * OCTETS)])
    await again.holder.start()
    assert list(again.holder.store.blocks()) == [block_id(2)]
    assert disk.damaged == 1 and len(quarantined(tmp_path)) == 1


async def test_too_few_descriptors_are_no_fault_of_the_file(tmp_path: Path) -> None:
    files = Unreadable(errno.EMFILE)
    world = await world_on(tmp_path, files)
    await world.put(1)
    files.names = {part_name(block_id(1))}
    answer = await world.get(1)
    assert (answer.status, "retry-after" in answer.headers) == (503, True)
    files.names = set()
    assert (await world.get(1)).status == 200


async def test_the_quarantine_keeps_the_newest_and_no_more_than_its_octets(tmp_path: Path) -> None:
    world = await world_on(tmp_path, quarantine_octets=3 * OCTETS)
    names = []
    for number in range(6):
        await world.put(number)
        os.truncate(tmp_path / part_name(block_id(number)), OCTETS - 1)
        assert (await world.get(number)).status == 404
        names.append(block_id(number).block_key.hex())
    kept = {Path(name).name.partition(".")[0] for name in quarantined(tmp_path)}
    assert kept == set(names[3:])
    small = await world_on(tmp_path / "small", quarantine_octets=0)
    await small.put(1)
    os.truncate(tmp_path / "small" / part_name(block_id(1)), OCTETS - 1)
    assert (await small.get(1)).status == 404
    assert files_below(tmp_path / "small") == []


async def test_a_file_that_leaves_the_quarantine_meanwhile_keeps_no_other_out_of_it(
    tmp_path: Path,
) -> None:
    """What stays among the blocks would be served again after a restart."""
    world = await world_on(tmp_path)
    await world.put(1)
    os.truncate(tmp_path / part_name(block_id(1)), OCTETS - 1)
    (tmp_path / "quarantine").mkdir()
    (tmp_path / "quarantine" / "listed").symlink_to(tmp_path / "gone")
    assert (await world.get(1)).status == 404
    assert world.holder.store.counters.quarantined == 1
    assert not (tmp_path / part_name(block_id(1))).exists()


async def test_a_damaged_block_that_cannot_be_quarantined_is_removed(tmp_path: Path) -> None:
    world = await world_on(tmp_path)
    await world.put(1)
    os.truncate(tmp_path / part_name(block_id(1)), OCTETS - 1)
    (tmp_path / "quarantine").write_bytes(b"in the way")
    assert (await world.get(1)).status == 404
    assert world.holder.store.counters.quarantined == 0
    assert not (tmp_path / part_name(block_id(1))).exists()


async def test_a_holder_that_loses_leased_data_to_a_fault_must_withdraw_the_record_first(
    tmp_path: Path,
) -> None:
    world = await world_on(tmp_path)
    await world.put(1)
    await world.publisher.step()
    lease = (await world.lease(1)).json["lease"]
    (tmp_path / part_name(block_id(1))).unlink()
    answer = await world.get(1)
    assert (answer.status, answer.json["reason"]) == (404, "lost")
    assert not world.index.lists(block_id(1))
    assert (await world.client.get(f"leases/{lease}")).status == 404
    assert world.holder.store.counters.lost == 1 and world.holder.store.used(DISK) == 0
    assert (await world.put(1)).status == 201


async def test_a_file_cut_short_under_the_holder_is_404_too(tmp_path: Path) -> None:
    world = await world_on(tmp_path)
    for number, size in ((1, 100), (2, 0)):
        await world.put(number)
        os.truncate(tmp_path / part_name(block_id(number)), size)
        assert (await world.get(number)).status == 404
    assert files_below(tmp_path) == quarantined(tmp_path)
    assert world.holder.store.counters.quarantined == 2


async def test_a_read_that_began_ends_well_although_the_block_is_evicted(tmp_path: Path) -> None:
    world = await world_on(tmp_path)
    await world.put(1)
    body = await world.holder.open(block_id(1))
    await world.holder.delete(block_id(1))
    assert b"".join([bytes(chunk) async for chunk in body.chunks()]) == octets(container(1))
    body.close()
    assert files_below(tmp_path) == []


async def test_a_folder_that_cannot_be_listed_is_not_taken_for_one_without_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await world_on(tmp_path)
    await world.put(1)
    folder, scandir = (tmp_path / part_name(block_id(1))).parent, os.scandir

    def listed(path: Any) -> Any:
        if Path(path) == folder:
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", listed)
    again = make_world([(DiskTier(tmp_path), 10 * OCTETS)])
    with pytest.raises(TierUnavailableError, match=f"{folder.name}: Too many open files"):
        await again.holder.start()


async def test_a_folder_that_cannot_be_written_is_a_clear_error_at_start_up(
    tmp_path: Path,
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(TierUnavailableError, match="Not a directory"):
        await world_on(blocked / "below")
    with pytest.raises(TierUnavailableError, match="Read-only"):
        await world_on(tmp_path / "ro", Full(0, errno.EROFS))


async def test_a_block_read_twice_is_promoted_to_memory_and_demoted_for_another(
    tmp_path: Path,
) -> None:
    world = make_world([(MemoryTier(), 4 * OCTETS), (DiskTier(tmp_path), 10 * OCTETS)])
    await world.holder.start()
    for number in range(6):
        await world.put(number)
        for _ in range(2):
            assert (await world.get(number)).status == 200
            await world.holder.stop()
    store = world.holder.store
    assert store.counters.promotions == 6
    assert store.used("host") == 4 * OCTETS and len(store) == 6  # type: ignore[arg-type]
    assert store.counters.evictions == {"host": 2}
    record = world.holder.record(block_id(5), 1000)
    assert record is not None and record.residency is not None
    assert [(entry.tier, entry.layers) for entry in record.residency] == [("host", range(4))]
    record = world.holder.record(block_id(0), 1000)
    assert record is not None and record.residency is not None
    assert record.residency[0].tier == "disk"
    assert (record.residency[0].read_mbit_per_s or 0) > 0
    for number in range(6):
        assert (await world.get(number)).body == octets(container(number))
    assert not [call for call in world.index.calls if call[0] == "DELETE"]


async def test_damage_found_while_promoting_never_reaches_memory(tmp_path: Path) -> None:
    world = make_world([(MemoryTier(), 4 * OCTETS), (DiskTier(tmp_path), 10 * OCTETS)])
    await world.holder.start()
    await world.put(1)
    path = tmp_path / part_name(block_id(1))
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)
    for _ in range(3):
        await world.get(1)
        await world.holder.stop()
    assert world.holder.store.used("host") == 0  # type: ignore[arg-type]


async def test_a_descriptor_is_used_again_after_a_restart_without_the_index(
    tmp_path: Path,
) -> None:
    from kvsp.holder.descriptors import Descriptors

    asked: list[bytes] = []

    async def ask(compat_id: bytes) -> Any:
        asked.append(compat_id)
        return DESCRIPTOR

    for _ in range(2):
        assert await Descriptors(folder=tmp_path, ask=ask).get(DESCRIPTOR.compat_id) == DESCRIPTOR
    assert len(asked) == 1
    (path,) = tmp_path.iterdir()  # noqa: ASYNC240
    path.write_bytes(b"{}")
    assert await Descriptors(folder=tmp_path, ask=ask).get(DESCRIPTOR.compat_id) == DESCRIPTOR
    assert await Descriptors([DESCRIPTOR]).get(DESCRIPTOR.compat_id) == DESCRIPTOR
    assert await Descriptors().get(DESCRIPTOR.compat_id) is None


def test_a_trailer_says_everything_that_is_known_of_a_part() -> None:
    from kvsp.holder.tiers.tiers import TAIL_OCTETS, parse_trailer, trailer

    info, _ = info_and_part(container(1))
    _, part = info_and_part(container(1).select(range(1, 3)))
    text = trailer(info, part)
    read = parse_trailer(text[:-TAIL_OCTETS], text[-TAIL_OCTETS:], part.octets + len(text))
    assert read == (info, part)
