"""Where layers are written: a file that the disk takes is not waited for by the event loop."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from kvcs.retrieving.destinations import FileDestination
from kvsp.blocks.kv_files import KvFile
from kvsp.names.errors import FileError
from tests.kvcs.support import BLOCK, DESCRIPTOR


@pytest.fixture
def slow_disk(monkeypatch):
    """A disk that writes when it is told to."""
    begun, go_on = threading.Event(), threading.Event()
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        begun.set()
        assert go_on.wait(20)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    return begun, go_on


def begun_file(path) -> FileDestination:
    destination = FileDestination(path, DESCRIPTOR)
    destination.begin(BLOCK, range(1))
    for tensor in destination.arrays(0):
        tensor[:] = 1
    return destination


async def test_the_event_loop_goes_on_while_a_file_is_written_to_the_disk(slow_disk, tmp_path):
    begun, go_on = slow_disk
    with begun_file(tmp_path / "out") as destination:
        committing = asyncio.create_task(destination.acommit())
        assert await asyncio.to_thread(begun.wait, 20)
        assert not committing.done() and not (tmp_path / "out").exists()
        go_on.set()
        await committing
    with KvFile.open(tmp_path / "out", DESCRIPTOR, layers=range(1)) as written:
        assert written.tokens == BLOCK and (written.k(0) == 1).all()


@pytest.mark.parametrize("times", [1, 2])
async def test_a_file_that_is_being_written_when_the_task_is_cancelled_is_whole(
    times, slow_disk, tmp_path
):
    begun, go_on = slow_disk

    async def write() -> None:
        with begun_file(tmp_path / "out") as destination:
            await destination.acommit()

    writing = asyncio.create_task(write())
    assert await asyncio.to_thread(begun.wait, 20)
    for _ in range(times):
        writing.cancel()
        await asyncio.sleep(0.001)
        assert not writing.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    KvFile.open(tmp_path / "out", DESCRIPTOR, layers=range(1)).close()


async def test_what_the_disk_refuses_is_raised(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with begun_file(tmp_path / "out") as destination:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(FileError, match="No space left"):
            await destination.acommit()
    assert not list(tmp_path.iterdir())
