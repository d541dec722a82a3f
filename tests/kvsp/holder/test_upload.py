"""One block on its way in: what is done with each octet, and what at the same time."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from kvsp.blocks.container import Container
from kvsp.holder.store import BlockInfo, Part
from kvsp.holder.tiers.tiers import PIECE
from kvsp.holder.upload import Upload
from kvsp.names.codes import DecodeErrorName
from kvsp.names.errors import DecodeError
from tests.kvsp.holder.support import DESCRIPTOR, cut, octets
from tests.kvsp.holder.support import container as small_container
from tests.kvsp.support_vectors import geometry

LARGE = geometry(layers=4, kv_heads=8, head_dim=128, block_tokens=256)  # 4 MiB, 1 MiB a layer


class Written:
    """A writer that keeps what it gets."""

    def __init__(self) -> None:
        self.octets = bytearray()
        self.ended = False

    async def write(self, data: Any) -> None:
        assert not self.ended
        self.octets += data

    async def commit(self, block: Any, info: BlockInfo, part: Part) -> None:
        raise AssertionError("nobody said so")

    async def abort(self) -> None:
        self.ended = True


def large() -> Container:
    section = bytes(LARGE.section_octets())
    return Container.build(LARGE, [(section, section)] * LARGE.layers)


def into(writer: Any) -> Callable[[int], Awaitable[Any]]:
    async def make_room(_octets: int) -> Any:
        return writer

    return make_room


async def arriving(data: bytes, size: int = 65_536) -> AsyncIterator[bytes]:
    for piece in cut(data, size):
        yield piece


@pytest.mark.parametrize("flags", [b"\0", b"\7"])
async def test_an_octet_is_in_its_layers_digest_and_in_one_more(
    monkeypatch: pytest.MonkeyPatch, flags: bytes
) -> None:
    """Also where the client sends the digest of the whole, unless the whole is stored otherwise
    than it was sent."""
    digested = 0
    sha256 = hashlib.sha256

    class Counting:
        def __init__(self, data: Any = b"") -> None:
            self._hash = sha256()
            self.update(data)

        def update(self, data: Any) -> None:
            nonlocal digested
            digested += len(memoryview(data).cast("B"))
            self._hash.update(data)

        def digest(self) -> bytes:
            return self._hash.digest()

    sent = bytearray(octets(large()))
    sent[5:6] = flags
    digest = sha256(sent).digest()
    writer = Written()
    monkeypatch.setattr("hashlib.sha256", Counting)
    upload = Upload(LARGE, into(writer), repr_digest=digest)
    _, part = await upload.receive(arriving(bytes(sent)))
    monkeypatch.undo()
    passes = 2 if flags == b"\0" else 3
    assert passes * (len(sent) - 1024) < digested < passes * (len(sent) + 1024)
    assert writer.octets == octets(large())
    assert part.container_digest == sha256(writer.octets).digest()


@pytest.mark.parametrize("flags", [b"\0", b"\7"])
async def test_a_digest_of_the_client_that_is_not_the_containers_is_a_mismatch(
    flags: bytes,
) -> None:
    sent = bytearray(octets(small_container(1)))
    sent[5:6] = flags
    upload = Upload(DESCRIPTOR, into(Written()), repr_digest=hashlib.sha256(b"").digest())
    with pytest.raises(DecodeError) as failure:
        await upload.receive(arriving(bytes(sent), 7))
    assert failure.value.name is DecodeErrorName.DIGEST_MISMATCH


async def test_a_piece_is_digested_and_written_while_the_next_one_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each waits for the other two to have begun: none can come before or after them."""
    sent = octets(large())
    header = len(large().header.encoded)
    writing, asked = threading.Event(), asyncio.Event()
    sha256 = hashlib.sha256

    class Waiting:
        def __init__(self, data: Any = b"") -> None:
            self._hash = sha256(data)

        def update(self, data: Any) -> None:
            if len(data) >= PIECE:
                assert writing.wait(60)
            self._hash.update(data)

        def digest(self) -> bytes:
            return self._hash.digest()

    class Slow(Written):
        async def write(self, data: Any) -> None:
            if len(data) >= PIECE:
                writing.set()
                async with asyncio.timeout(60):
                    await asked.wait()
            await super().write(data)

    async def chunks() -> AsyncIterator[bytes]:
        yield sent[:header]
        yield sent[header : header + PIECE]
        asked.set()
        yield sent[header + PIECE :]

    monkeypatch.setattr("hashlib.sha256", Waiting)
    writer = Slow()
    async with asyncio.timeout(100):
        await Upload(LARGE, into(writer)).receive(chunks())
    assert writer.octets == sent


async def test_nothing_is_written_any_more_when_an_upload_has_ended() -> None:
    """Whatever ended it: octets that stay away, octets that are wrong, or its task."""
    sent = octets(large())
    began, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Written):
        async def write(self, data: Any) -> None:
            if len(data) >= PIECE:
                began.set()
                await go_on.wait()
            await super().write(data)

    async def broken() -> AsyncIterator[bytes]:
        yield sent[:1000]
        yield sent[1000 : 1000 + PIECE]
        await began.wait()
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        raise ConnectionResetError

    writer = Slow()
    with pytest.raises(ConnectionResetError):
        await Upload(LARGE, into(writer)).receive(broken())
    await writer.abort()
    assert go_on.is_set()


async def test_more_octets_than_the_header_says_are_refused_and_not_written() -> None:
    sent = octets(large())
    writer = Written()
    with pytest.raises(DecodeError) as failure:
        await Upload(LARGE, into(writer)).receive(arriving(sent + bytes(3 * PIECE)))
    assert failure.value.name is DecodeErrorName.TRAILING_OCTETS
    assert writer.octets == sent[: len(writer.octets)]
