"""The threads that wait for the disk, so that the event loop does not."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Final, TypeVar

from relay.disk.files import Found
from relay.disk.reads import READERS
from relay.disk.tier import DiskTier

logger = logging.getLogger("relay")

T = TypeVar("T")

LOAD_SECONDS: Final = 30.0
"""How long the start waits for what is on the disk to be looked at; it goes on behind that."""
LEAVE_SECONDS: Final = 5.0
"""How long the end waits for what is still to be written."""
ADDED_AT_ONCE: Final = 1000


class DiskUnreadable(Exception):
    """The folder cannot be read; the message says which, and why."""


class Threads:
    """A `relay.disk.reads.Worker`: its threads end with the process, whatever they wait for."""

    def __init__(self) -> None:
        self._writer = _Pool(1, "disk-writer")
        self._others = _Pool(READERS, "disk-reader")

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, call)

    def submit(
        self,
        job: Callable[[], T],
        done: Callable[[T], None],
        failed: Callable[[Exception], None],
        *,
        writes: bool = False,
    ) -> None:
        loop = asyncio.get_running_loop()

        def run() -> None:
            try:
                result = job()
            except Exception as error:  # noqa: BLE001  (whoever asked is told)
                _tell(loop, partial(failed, error))
            else:
                _tell(loop, partial(done, result))

        (self._writer if writes else self._others).put(run)


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        logger.debug("the relay has ended before the disk answered")


class _Pool:
    """Some threads, started when there is something to do."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._started = 0

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if self._started < self._count:
            self._started += 1
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._jobs.get()()


async def load(tier: DiskTier) -> None:
    """Look at what is on the disk, and have it served. Raises OSError for a folder that cannot be
    read."""
    looked: asyncio.Future[tuple[list[Found], int]] = asyncio.get_running_loop().create_future()
    tier.worker.submit(tier.folder.scan, looked.set_result, looked.set_exception)
    found, bad = await looked
    tier.found([], bad)
    for begin in range(0, len(found), ADDED_AT_ONCE):
        tier.found(found[begin : begin + ADDED_AT_ONCE], 0)
        await asyncio.sleep(0)
    tier.reading = False
    logger.info("%d tracks, %d octets, are on the disk", tier.tracks, tier.octets)


async def loaded(tier: DiskTier) -> asyncio.Task[None]:
    """`load`, which goes on behind this when it takes long. Raises DiskUnreadable."""
    loading = asyncio.create_task(load(tier))
    await asyncio.wait({loading}, timeout=LOAD_SECONDS)
    if loading.done():
        try:
            loading.result()
        except OSError as error:
            raise DiskUnreadable(f"{tier.folder.path}: {error.strerror or error}") from error
    else:
        logger.warning("the disk tier is still being looked at: what it has is found by and by")
    return loading


async def written(tier: DiskTier) -> None:
    """Finish what is on its way to the disk, as long as that may take."""
    clock = asyncio.get_running_loop()
    deadline = clock.time() + LEAVE_SECONDS
    for last in (False, True):
        if last:
            for writing in tuple(tier.open):
                writing.finish()
        while tier.busy and clock.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
