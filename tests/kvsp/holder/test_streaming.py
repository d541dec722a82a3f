"""Large blocks, slow and vanishing clients, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvsp.blocks.container import ContainerHeader, decode
from kvsp.holder.tiers.disk import DiskTier
from kvsp.http.limits import HttpLimits
from kvsp.names.codes import Codec
from kvsp.names.identity import Descriptor
from kvsp.names.uris import BlockId
from tests.kvsp.holder.support import (
    DESCRIPTOR,
    DISK,
    OCTETS,
    SCOPE,
    World,
    block_id,
    container,
    make_world,
    octets,
)
from tests.kvsp.support_server import serving
from tests.kvsp.support_vectors import geometry

MIB = 1 << 20
BIG = geometry(layers=64, kv_heads=8, head_dim=128, block_tokens=256)  # 64 MiB, 1 MiB a layer
MEDIUM = geometry(layers=24, kv_heads=8, head_dim=128, block_tokens=256)
"""Larger than what the sockets of one connection hold."""

HEADERS = {
    "authorization": "Bearer writer",
    "content-type": "application/kvsp-block",
    "if-none-match": "*",
}
READING = {"authorization": "Bearer writer"}


def header_of(descriptor: Descriptor) -> ContainerHeader:
    lengths = [(descriptor.section_octets(),) * 2] * descriptor.layers
    return ContainerHeader.of(Codec.RAW, 0, descriptor.block_tokens, lengths)


def big_header() -> ContainerHeader:
    return header_of(BIG)


async def big_block() -> AsyncIterator[bytes]:
    yield big_header().encoded
    piece = bytes(range(256)) * 256
    for _ in range(big_header().data_octets // len(piece)):
        yield piece


async def world_on(root: Path, **limits: Any) -> World:
    world = make_world([(DiskTier(root), 256 * MIB)], limits=HttpLimits(**limits))
    world.index.descriptors += [BIG, MEDIUM]
    return world


def descriptors_open() -> int:
    return len(os.listdir("/proc/self/fd"))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def left_behind(root: Path) -> list[Path]:
    return list((root / "incoming").iterdir())


async def test_a_large_block_is_never_in_memory_as_a_whole_either_way(tmp_path: Path) -> None:
    world = await world_on(tmp_path)
    block = BlockId(BIG.compat_id, SCOPE, bytes(32))
    async with serving(world.app) as server, aiohttp.ClientSession() as session:
        url = f"{server.url}/kvsp/blocks/{block.path}"
        gc.collect()
        tracemalloc.start()
        try:
            async with session.put(url, data=big_block(), headers=HEADERS) as answer:
                assert answer.status == 201, await answer.text()
            digest = hashlib.sha256()
            async with session.get(url, headers=READING) as answer:
                assert answer.status == 200
                assert answer.content_length == big_header().total_octets
                async for chunk in answer.content.iter_chunked(64 << 10):
                    digest.update(chunk)
            async with session.get(url + "?layers=1-60", headers=READING) as answer:
                assert answer.status == 200
                async for _ in answer.content.iter_chunked(64 << 10):
                    pass
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        expected = hashlib.sha256()
        async for piece in big_block():
            expected.update(piece)
        assert digest.digest() == expected.digest()
    assert peak < 16 * MIB, f"{peak / MIB:.1f} MiB for a block of 64"


@pytest.mark.parametrize("query", ["", "?layers=0-22", "?codec=61441"])
async def test_a_reader_that_stops_reading_is_cut_off_and_costs_nothing_more(
    tmp_path: Path, query: str
) -> None:
    world = await world_on(tmp_path, stall_s=0.1)
    block = BlockId(MEDIUM.compat_id, SCOPE, bytes(32))

    async def incompressible() -> AsyncIterator[bytes]:
        yield header_of(MEDIUM).encoded
        for _ in range(MEDIUM.layers):
            yield os.urandom(MIB)

    await world.holder.start()
    await world.holder.put(block, MEDIUM, incompressible())
    async with serving(world.app) as server:
        before = descriptors_open()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1000)
        path = f"/kvsp/blocks/{block.path}{query}"
        writer.write(
            f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer writer\r\n\r\n".encode()
        )
        await reader.readuntil(b"\r\n")
        writer.transport.pause_reading()
        await until(lambda: not server.server_state.tasks)
        assert not server.server_state.connections
        writer.transport.abort()
        await until(lambda: descriptors_open() <= before)
        # others are served meanwhile and afterwards
        async with aiohttp.ClientSession() as session:
            url = f"{server.url}/kvsp/blocks/{block.path}?layers=3-3"
            async with session.get(url, headers=READING) as answer:
                assert answer.status == 200
                decode(await answer.read(), MEDIUM)


async def start_upload(server: Any, data: bytes, length: int = OCTETS) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    fields = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
    path = f"/kvsp/blocks/{block_id(1).path}"
    writer.write(
        f"PUT {path} HTTP/1.1\r\nhost: x\r\n{fields}content-length: {length}\r\n\r\n".encode()
    )
    writer.write(data)
    await writer.drain()
    return reader, writer


async def test_an_uploader_that_stalls_is_408_and_leaves_nothing_behind(tmp_path: Path) -> None:
    world = await world_on(tmp_path, stall_s=0.1)
    async with serving(world.app) as server:
        reader, writer = await start_upload(server, octets(container(1))[:-1])
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        assert left_behind(tmp_path) == [] and world.holder.store.used(DISK) == 0
        writer.close()


@pytest.mark.parametrize("sent", [0, 50, 200, OCTETS - 1])
async def test_an_uploader_that_goes_away_leaves_nothing_behind(tmp_path: Path, sent: int) -> None:
    world = await world_on(tmp_path)
    async with serving(world.app) as server:
        _, writer = await start_upload(server, octets(container(1))[:sent])
        await until(lambda: bool(server.server_state.tasks))
        writer.transport.abort()
        await until(lambda: not server.server_state.tasks)
        assert left_behind(tmp_path) == [] and world.holder.store.used(DISK) == 0
        assert block_id(1) not in world.holder.store


async def test_a_reader_that_goes_away_ends_the_reading(tmp_path: Path) -> None:
    world = await world_on(tmp_path)
    block = BlockId(BIG.compat_id, SCOPE, bytes(32))
    await world.holder.start()
    await world.holder.put(block, BIG, big_block())
    async with serving(world.app) as server:
        before = descriptors_open()
        read = world.holder.store.counters.octets_read["disk"]
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            request = f"GET /kvsp/blocks/{block.path} HTTP/1.1\r\nhost: x\r\n"
            client.sendall(f"{request}authorization: Bearer writer\r\n\r\n".encode())
            await until(lambda: world.holder.store.counters.octets_read["disk"] > read)
        await until(lambda: not server.server_state.tasks)
        assert world.holder.store.counters.octets_read["disk"] - read < 32 * MIB
        await until(lambda: descriptors_open() <= before)


async def test_an_upload_that_is_refused_early_gets_its_answer(tmp_path: Path) -> None:
    world = await world_on(tmp_path)
    block = BlockId(BIG.compat_id, SCOPE, bytes(32))
    await world.holder.start()
    await world.holder.put(block, BIG, big_block())
    async with serving(world.app) as server, aiohttp.ClientSession(headers=HEADERS) as session:
        url = f"{server.url}/kvsp/blocks/{block.path}"
        async with session.put(url, data=big_block(), expect100=True) as answer:
            assert answer.status == 412
        _, writer = answer_of = await start_upload(server, b"x" * 100_000, 10**9)
        status = await answer_of[0].readline()
        assert status.startswith((b"HTTP/1.1 422 ", b"HTTP/1.1 413 "))
        writer.close()


@pytest.mark.parametrize("await_point", range(1, 12))
async def test_a_store_cancelled_at_any_await_leaves_the_block_whole_or_absent(
    tmp_path: Path, await_point: int
) -> None:
    world = make_world([(DiskTier(tmp_path), 2 * OCTETS)])
    await world.holder.start()
    await world.put(5)
    await world.put(6)

    async def chunks() -> AsyncIterator[bytes]:
        yield octets(container(1))

    task = asyncio.ensure_future(world.holder.put(block_id(1), DESCRIPTOR, chunks()))
    for _ in range(await_point * 2):
        await asyncio.sleep(0)
    task.cancel()
    stored = not isinstance(
        (await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError
    )
    await world.holder.stop()
    held = block_id(1) in world.holder.store
    assert held or not stored
    assert left_behind(tmp_path) == []
    again = make_world([(DiskTier(tmp_path, verify_digests=True), 10 * OCTETS)])
    await again.holder.start()
    assert set(again.holder.store.blocks()) == set(world.holder.store.blocks())
    assert world.holder.store.used(DISK) == again.holder.store.used(DISK)
