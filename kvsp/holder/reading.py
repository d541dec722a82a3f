"""What a GET sends: the octets of some layers from wherever they are, and their digest."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import struct
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from kvsp.blocks.codecs import transcode_section
from kvsp.blocks.container import ContainerHeader
from kvsp.blocks.layout import Octets
from kvsp.holder.store import Found, Part, Segment
from kvsp.holder.tiers.tiers import (
    PIECE,
    PartLostError,
    PartReader,
    Span,
    header_of,
    pieces,
)
from kvsp.holder.uninterrupted import uninterrupted
from kvsp.names.codes import Codec, Tier
from kvsp.names.identity import Descriptor


def span_of(found: Found, tier: Tier) -> Span:
    """The octets that are read of the part of a tier, up to the first that are not."""
    segments = [each for each in found.segments if each.tier is tier]
    start = stop = segments[0].offset
    for each in segments:
        if each.offset == stop:
            stop += each.octets
    return start, stop


class Body(Protocol):
    """A container to be sent."""

    @property
    def header(self) -> ContainerHeader: ...

    @property
    def digest(self) -> bytes:
        """SHA-256 of the container, 32 octets."""
        ...

    def chunks(self) -> AsyncGenerator[Octets, None]:
        """The container, in pieces of about 1 MiB."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Sections:
    """The sections of consecutive layers, from one or more tiers."""

    header: ContainerHeader
    segments: tuple[Segment, ...]
    parts: Mapping[Tier, Part]
    readers: Mapping[Tier, PartReader]
    on_read: Callable[[Tier, int, float], None]

    async def octets(self) -> AsyncGenerator[Octets, None]:
        """All sections in order. Raises PartLostError, TierUnavailableError."""
        loop = asyncio.get_running_loop()
        for segment in self.segments:
            reader = self.readers[segment.tier]
            started = loop.time()
            try:
                arriving = pieces(reader, segment.offset, segment.octets)
                async with contextlib.aclosing(arriving):
                    async for piece in arriving:
                        octets = len(memoryview(piece).cast("B"))
                        self.on_read(segment.tier, octets, loop.time() - started)
                        yield piece
                        started = loop.time()
            except PartLostError as error:
                error.tier, error.part = segment.tier, self.parts[segment.tier]
                raise

    async def digest(self) -> bytes:
        """SHA-256 of the container of these sections; reads them once."""
        digest = hashlib.sha256(self.header.encoded)
        async for piece in self.octets():
            await uninterrupted(digest.update, piece)
        return digest.digest()

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()


@dataclass(frozen=True, slots=True)
class StoredBody:
    """Sections as they are stored."""

    sections: Sections
    digest: bytes

    @property
    def header(self) -> ContainerHeader:
        return self.sections.header

    async def chunks(self) -> AsyncGenerator[Octets, None]:
        yield self.header.encoded
        async with contextlib.aclosing(self.sections.octets()) as arriving:
            async for piece in arriving:
                yield piece

    def close(self) -> None:
        self.sections.close()


@dataclass(frozen=True, slots=True)
class TranscodedBody:
    """Sections in another codec, in an unnamed temporary file."""

    header: ContainerHeader
    digest: bytes
    file: IO[bytes]

    async def chunks(self) -> AsyncGenerator[Octets, None]:
        yield self.header.encoded
        await uninterrupted(self.file.seek, 0)
        while piece := await uninterrupted(self.file.read, PIECE):
            yield piece

    def close(self) -> None:
        self.file.close()


async def transcode(
    sections: Sections, target: Codec, descriptor: Descriptor, folder: Path | None
) -> TranscodedBody:
    """Sections in codec `target` (KVSP "Block Retrieval and Storage"), one in memory at a time.

    Raises DecodeError when a section cannot be transcoded, what reading raises, OSError
    when there is no room for the temporary file in `folder`.
    """
    source = sections.header
    with contextlib.ExitStack() as opened:
        # entered in the thread: a file that a cancelled task never sees is closed, too
        file = await uninterrupted(_scratch_file, folder, opened)
        lengths: list[int] = []
        sizes = (length for pair in source.lengths for length in pair)
        async for section in _cut(sections.octets(), sizes):
            coded = await uninterrupted(
                transcode_section, source.codec, target, section, descriptor
            )
            await uninterrupted(file.write, coded)
            lengths.append(len(coded))
        header = header_of(
            target,
            source.first_layer,
            source.token_count,
            struct.pack(f">{len(lengths)}Q", *lengths),
        )
        digest = await uninterrupted(_digest, header, file)
        opened.pop_all()
        return TranscodedBody(header, digest, file)


def _scratch_file(folder: Path | None, opened: contextlib.ExitStack) -> IO[bytes]:
    return opened.enter_context(tempfile.TemporaryFile(dir=folder))


async def _cut(stream: AsyncIterator[Octets], sizes: Iterable[int]) -> AsyncIterator[bytearray]:
    rest = memoryview(b"")
    for size in sizes:
        section = bytearray()
        while len(section) < size:
            if not rest:
                rest = memoryview(await anext(stream)).cast("B")
            taken = rest[: size - len(section)]
            section += taken
            rest = rest[len(taken) :]
        yield section


def _digest(header: ContainerHeader, file: IO[bytes]) -> bytes:
    digest = hashlib.sha256(header.encoded)
    file.seek(0)
    while piece := file.read(PIECE):
        digest.update(piece)
    return digest.digest()
