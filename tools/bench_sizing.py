"""What a relay takes: memory for each cached octet, session and request, CPU for what it sends.

Example: python -m tools.bench_sizing

Real processes on loopback; the figures of docs/operations.md ("Sizing") come from here. Memory is
that of the relay's process, CPU time is that of its process by itself, so a busy machine changes
little.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
import urllib.request
from pathlib import Path

import moqt
from tests.e2e.support import relay

SESSIONS = 200
REQUESTS = 2_000
LARGE, SMALL = 64 << 10, 1 << 10
OCTETS = 128 << 20
READERS = 4


class Numbers:
    """The relay's metrics, taken anew."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __call__(self, name: str) -> float:
        await asyncio.sleep(1.2)  # the relay takes its numbers every half second
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(self._url).read().decode())
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    async def memory(self) -> float:
        return await self("process_resident_memory_bytes")


async def cached(
    connect: moqt.MoqtSession, reader: moqt.MoqtSession, name: bytes, size: int
) -> int:
    """Have the relay cache one track; returns its Objects."""
    count = min(OCTETS // size, 16_384)
    store = connect.publish_track((b"sizing",), name)
    for number in range(count):
        store.append(0, number, bytes(size))
    store.finish_subgroup(0, 0)
    store.finish(moqt.PublishDoneCode.TRACK_ENDED)
    async for _ in await reader.fetch((b"sizing",), name):
        pass
    return count


async def main(url: str, cafile: Path, numbers: Numbers) -> None:
    begun = await numbers.memory()
    print(f"at rest                {begun / 2**20:8.1f} MiB")
    async with (
        moqt.connect(url, cafile=cafile) as publisher,
        moqt.connect(url, cafile=cafile) as reader,
    ):
        await publisher.publish_namespace((b"sizing",))
        for name, size in ((b"small", SMALL), (b"large", LARGE)):
            before = await numbers.memory()
            count = await cached(publisher, reader, name, size)
            after = await numbers.memory()
            print(f"an Object of {size:6} B  {(after - before) / count:8.0f} B in memory")
        async with contextlib.AsyncExitStack() as stack:
            readers = [
                await stack.enter_async_context(moqt.connect(url, cafile=cafile))
                for _ in range(READERS)
            ]
            cpu, sent = (
                await numbers("process_cpu_seconds_total"),
                await numbers("kvcs_relay_out_bytes_total"),
            )

            async def read(session: moqt.MoqtSession) -> None:
                async for _ in await session.fetch((b"sizing",), b"large"):
                    pass

            await asyncio.gather(*map(read, readers))
            cpu = await numbers("process_cpu_seconds_total") - cpu
            sent = await numbers("kvcs_relay_out_bytes_total") - sent
            print(f"from memory            {cpu / sent * 1e9:8.2f} s of CPU a GB")
    at_rest = await numbers.memory()
    async with contextlib.AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(moqt.connect(url, cafile=cafile))
            for _ in range(SESSIONS)
        ]
        with_sessions = await numbers.memory()
        print(f"a session              {(with_sessions - at_rest) / SESSIONS / 1024:8.1f} KiB")
        for number in range(REQUESTS):
            await sessions[number % 100].subscribe_namespace((b"sizing", str(number).encode()))
        with_requests = await numbers.memory()
        print(
            f"a listing              {(with_requests - with_sessions) / REQUESTS / 1024:8.1f} KiB"
        )


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as folder,
        relay(Path(folder), "--cache-memory", "2GiB") as running,
    ):
        asyncio.run(main(running.url, running.cafile, Numbers(running.metrics_url)))
