"""`python -m tools.bench_mesh`: how often an Object crosses a mesh of relays that find each other.

A real Valkey or Redis server, three relays that know nothing of each other but the server, a
publisher at the first one, and `--consumers` at the other two, which all want everything. Prints
one JSON object: how often an Object left the publisher, and how often it went to each other relay
that has consumers.

    python -m tools.bench_mesh --consumers 20
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import moqt
from relay.service.self_signed import self_signed_certificate
from tests.e2e.support import Relay, relay
from tests.redis_server import redis_server

NAMESPACE = (b"bench", b"mesh")
TRACKS, OBJECTS, OCTETS = 8, 64, 16 << 10
RELAYS = 3
FROM_0 = moqt.LocationFilter.absolute_start(0)


def payload(track: int, number: int) -> bytes:
    return hashlib.sha256(b"%d/%d" % (track, number)).digest() * (OCTETS // 32)


class Meshed:
    """Relays of a mesh, started as processes that share a certificate."""

    def __init__(self, folder: Path, stack: ExitStack, directory: str | None) -> None:
        """Without a `directory` they are told of each other."""
        self._folder, self._stack = folder, stack
        self.cafile = self_signed_certificate(folder / "tls", "127.0.0.1").cert
        self._options: tuple[str | Path, ...] = ("--self-signed", folder / "tls")
        if directory is not None:
            self._options += ("--directory", directory, "--mesh-cafile", self.cafile)

    def start(self, name: str, *options: str | Path) -> Relay:
        running = self._stack.enter_context(
            relay(self._folder / name, *self._options, *options, self_signed=False)
        )
        running.cafile = self.cafile
        return running


async def published(session: moqt.MoqtSession) -> None:
    """Publish everything on `session`."""
    for track in range(TRACKS):
        store = session.publish_track(NAMESPACE, b"%d" % track)
        for number in range(OBJECTS):
            store.append(0, number, payload(track, number))
        store.finish_subgroup(0, 0)
        store.mark_end(moqt.Location(1, 0), moqt.ObjectStatus.END_OF_TRACK)
        store.finish(moqt.PublishDoneCode.TRACK_ENDED)
    await session.publish_namespace(NAMESPACE)


async def consume(url: str, cafile: Path) -> int:
    """Get everything; raises AssertionError for anything that is not as it was published."""
    count = 0
    async with moqt.connect(url, cafile=cafile) as session:
        for track in range(TRACKS):
            subscription = await session.subscribe(NAMESPACE, b"%d" % track, fill=FROM_0)
            async for each in subscription:
                if each.payload:
                    assert bytes(each.payload) == payload(track, each.location.object)
                    count += 1
    assert count == TRACKS * OBJECTS, f"{count} of {TRACKS * OBJECTS} Objects"
    return count


async def transfer(relays: list[Relay], consumers: int) -> float:
    """Seconds until all consumers have everything."""
    async with moqt.connect(relays[0].url, cafile=relays[0].cafile) as publisher:
        await published(publisher)
        await asyncio.sleep(1)  # until the directory has been told
        began = time.monotonic()
        others = relays[1:]
        async with asyncio.timeout(120):
            await asyncio.gather(
                *(
                    consume(others[number % len(others)].url, relays[0].cafile)
                    for number in range(consumers)
                )
            )
        return time.monotonic() - began


def bench(folder: Path, consumers: int) -> dict[str, Any]:
    """The figures."""
    with ExitStack() as stack:
        directory = stack.enter_context(redis_server(folder))
        mesh = Meshed(folder, stack, directory)
        relays = [mesh.start(f"relay{number}") for number in range(RELAYS)]
        seconds = asyncio.run(transfer(relays, consumers))
        objects = TRACKS * OBJECTS
        return {
            "relays": RELAYS,
            "consumers": consumers,
            "objects": objects,
            "from_publisher": relays[0].metric("objects_in_total") / objects,
            "to_each_other_relay": relays[0].metric("objects_out_total") / objects / (RELAYS - 1),
            "to_consumers": sum(each.metric("objects_out_total") for each in relays[1:]) / objects,
            "seconds": round(seconds, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--consumers", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(bench(Path(folder), options.consumers)))


if __name__ == "__main__":
    main()
