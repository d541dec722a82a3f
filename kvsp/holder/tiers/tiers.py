"""Where octets are kept: what a tier does, its file form, and the host memory tier."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import AsyncGenerator
from typing import Any, Final, Protocol

import msgspec

from kvsp.blocks.container import ENTRY, ContainerHeader
from kvsp.blocks.layout import Octets
from kvsp.holder.store import BlockInfo, Part
from kvsp.holder.uninterrupted import uninterrupted
from kvsp.names import ijson
from kvsp.names.codes import HASH_OCTETS, SCOPE_ID_OCTETS, Codec, Tier
from kvsp.names.errors import DecodeError, KvspError
from kvsp.names.identity import parse_hex
from kvsp.names.uris import BlockId

PIECE: Final = 1 << 20
"""Octets read or written at once; also what one transfer holds in memory."""

_TAIL: Final = struct.Struct(">I32s4s")
_TAIL_MAGIC: Final = b"KVH1"
TAIL_OCTETS: Final = _TAIL.size
MAX_TRAILER_OCTETS: Final = 64 << 20
SUFFIX: Final = ".kvb"


class PartLostError(KvspError):
    """A stored part is gone or damaged: a fault, or somebody deleted its file."""

    tier: Tier | None = None
    part: Part | None = None
    """Which part of which tier it was, once that is known."""


class TierFullError(KvspError):
    """The medium of a tier is full although its budget is not.

    `file` when it is this one file that may not grow: then it is no use to remove others.
    """

    def __init__(self, detail: str, *, file: bool = False) -> None:
        super().__init__(detail)
        self.file = file


class TierUnavailableError(KvspError):
    """The medium of a tier does not work now. `retry_after_s`: when it may, if that is known."""

    def __init__(self, detail: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


Span = tuple[int, int]
"""The first octet of a container and the one behind the last."""


class PartReader(Protocol):
    """Reads a part's container; stays valid while the part is deleted."""

    async def read(self, offset: int, octets: int) -> Octets:
        """Exactly those octets. Raises PartLostError, TierUnavailableError."""
        ...

    def close(self) -> None: ...


class PartWriter(Protocol):
    """Writes a container; nothing of it is seen before `commit`.

    What raised TierFullError may be called again with the same arguments: nothing of it
    has counted.
    """

    async def write(self, octets: Octets) -> None:
        """Raises TierFullError, TierUnavailableError."""
        ...

    async def commit(self, block: BlockId, info: BlockInfo, part: Part) -> None:
        """Make the part visible, whole and durable. Raises as `write`."""
        ...

    async def abort(self) -> None:
        """Leave nothing behind; harmless after `commit`."""
        ...


class TierStorage(Protocol):
    """One tier's medium."""

    tier: Tier
    lasts: bool
    """Whether what is stored there outlives the process."""

    async def start(self) -> list[tuple[BlockId, BlockInfo, Part]]:
        """The parts that are there, the oldest first, after a probe.

        Raises TierUnavailableError.
        """
        ...

    async def create(self) -> PartWriter: ...

    async def open(self, block: BlockId, part: Part, span: Span | None = None) -> PartReader:
        """`span` is what will be read, all when None. Raises PartLostError,
        TierUnavailableError."""
        ...

    async def delete(self, block: BlockId, part: Part) -> None:
        """Delete a part; harmless when it is not there. Raises TierUnavailableError."""
        ...

    async def quarantine(self, block: BlockId, part: Part) -> bool:
        """Take a part that cannot be relied on out of the way; True when it was kept for
        somebody to look at. Raises TierUnavailableError."""
        ...

    async def free(self) -> int | None:
        """Octets that the medium has room for beside what is there; None when that is not
        known, or not bounded by anything but the budget. Never raises."""
        ...


# --- the form of a stored part: container, trailer, tail -----------------------------


def part_name(block: BlockId) -> str:
    """The relative name of a part's file or object."""
    key = block.block_key.hex()
    return f"blocks/{block.compat_id.hex()}/{block.scope_id.hex()}/{key[:2]}/{key}{SUFFIX}"


def block_of(name: str) -> BlockId | None:
    """The block of a relative name; None for a name that `part_name` never gives."""
    parts = name.split("/")
    if len(parts) != 5 or not parts[4].endswith(SUFFIX):
        return None
    try:
        block = BlockId(
            parse_hex(parts[1], HASH_OCTETS),
            parse_hex(parts[2], SCOPE_ID_OCTETS),
            parse_hex(parts[4].removesuffix(SUFFIX), HASH_OCTETS),
        )
    except DecodeError:
        return None
    return block if part_name(block) == name else None


def trailer(info: BlockInfo, part: Part) -> bytes:
    """What follows the container in a file: everything `parse_trailer` gives back."""
    tree: dict[str, Any] = {
        "codec": int(info.codec),
        "size": info.size,
        "layer_digests": b"".join(info.layer_digests).hex(),
        "first_layer": part.layers.start,
        "token_count": part.header.token_count,
        "table": part.header.table.hex(),
        "container_digest": part.container_digest.hex(),
    }
    if info.prior is not None:
        tree |= {"prior": info.prior.hex(), "position": info.position}
    text = ijson.canonical(tree)
    return text + _TAIL.pack(len(text), hashlib.sha256(text).digest(), _TAIL_MAGIC)


def trailer_octets(tail: bytes) -> int:
    """Octets of the trailer's text, from the last `TAIL_OCTETS`. Raises PartLostError."""
    if len(tail) != TAIL_OCTETS:
        raise PartLostError("the file is too short")
    octets, _, magic = _TAIL.unpack(tail)
    if magic != _TAIL_MAGIC or octets > MAX_TRAILER_OCTETS:
        raise PartLostError("the file does not end as a stored block does")
    return int(octets)


def parse_trailer(text: bytes, tail: bytes, octets: int) -> tuple[BlockInfo, Part]:
    """The part of a file of `octets` octets. Raises PartLostError when it is damaged."""
    length, digest, _ = _TAIL.unpack(tail)
    if len(text) != length or hashlib.sha256(text).digest() != digest:
        raise PartLostError("the trailer is damaged")
    try:
        info, part = _read_trailer(_decoder.decode(text))
    except (msgspec.MsgspecError, ValueError):
        raise PartLostError("the trailer is not of this version") from None
    if octets != part.octets + length + TAIL_OCTETS:
        raise PartLostError("the file has another length than its trailer says")
    return info, part


class _Trailer(msgspec.Struct):
    """The text of a trailer, which its digest vouches for; a start reads very many."""

    codec: int
    size: int
    layer_digests: str
    first_layer: int
    token_count: int
    table: str
    container_digest: str
    prior: str | None = None
    position: int = 0


_decoder = msgspec.json.Decoder(_Trailer)


def _read_trailer(text: _Trailer) -> tuple[BlockInfo, Part]:
    digests = bytes.fromhex(text.layer_digests)
    layer_digests = tuple(
        digests[at : at + HASH_OCTETS] for at in range(0, len(digests), HASH_OCTETS)
    )
    info = BlockInfo(
        codec=Codec(text.codec),
        size=text.size,
        digest=hashlib.sha256(digests).digest(),
        layer_digests=layer_digests,
        prior=None if text.prior is None else bytes.fromhex(text.prior),
        position=text.position,
    )
    header = header_of(info.codec, text.first_layer, text.token_count, bytes.fromhex(text.table))
    return info, Part(header, bytes.fromhex(text.container_digest))


def header_of(codec: Codec, first_layer: int, token_count: int, table: bytes) -> ContainerHeader:
    """The header of a container with this table. Raises ValueError for no whole table."""
    if len(table) % ENTRY.size:
        raise ValueError(f"{len(table)} octets are no table")
    return ContainerHeader.of(codec, first_layer, token_count, ENTRY.iter_unpack(table))


# --- host memory ---------------------------------------------------------------------


class _HostPart:
    """A container in pieces of at most `PIECE` octets, so that growing copies nothing."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._last = bytearray()

    async def write(self, octets: Octets) -> None:
        view = memoryview(octets).cast("B")
        while view:
            taken = view[: PIECE - len(self._last)]
            self._last += taken
            view = view[len(taken) :]
            if len(self._last) == PIECE:
                self._seal()

    def _seal(self) -> None:
        self._pieces.append(bytes(self._last))
        self._last = bytearray()

    def finish(self) -> None:
        if self._last:
            self._seal()

    async def read(self, offset: int, octets: int) -> Octets:
        first, start = divmod(offset, PIECE)
        if start + octets <= PIECE:
            return memoryview(self._pieces[first])[start : start + octets]
        last = (offset + octets - 1) // PIECE
        whole = b"".join(self._pieces[first : last + 1])
        return memoryview(whole)[start : start + octets]

    def close(self) -> None:
        """Nothing to give back: the pieces live as long as somebody reads them."""


class MemoryTier:
    """Parts in this process's memory; they do not outlive it."""

    lasts = False

    def __init__(self, tier: Tier = Tier.HOST) -> None:
        """`tier` is what records call it."""
        self.tier = tier
        self._parts: dict[BlockId, _HostPart] = {}

    async def start(self) -> list[tuple[BlockId, BlockInfo, Part]]:
        return []

    async def create(self) -> PartWriter:
        return _HostWriter(self._parts)

    async def open(self, block: BlockId, part: Part, span: Span | None = None) -> PartReader:
        held = self._parts.get(block)
        if held is None:
            raise PartLostError("the part is not in memory")
        return held

    async def delete(self, block: BlockId, part: Part) -> None:
        self._parts.pop(block, None)

    async def quarantine(self, block: BlockId, part: Part) -> bool:
        await self.delete(block, part)
        return False

    async def free(self) -> int | None:
        return None


class _HostWriter:
    def __init__(self, parts: dict[BlockId, _HostPart]) -> None:
        self._parts = parts
        self._part = _HostPart()

    async def write(self, octets: Octets) -> None:
        await self._part.write(octets)

    async def commit(self, block: BlockId, info: BlockInfo, part: Part) -> None:
        self._part.finish()
        self._parts[block] = self._part

    async def abort(self) -> None:
        self._part = _HostPart()


async def pieces(reader: PartReader, offset: int, octets: int) -> AsyncGenerator[Octets, None]:
    """A range of a part in pieces of at most `PIECE` octets. Raises as `PartReader.read`."""
    end = offset + octets
    while offset < end:
        # cut where pieces in memory end, which makes them views
        size = min(PIECE - offset % PIECE, end - offset)
        yield await reader.read(offset, size)
        offset += size


async def verified_pieces(reader: PartReader, part: Part) -> AsyncGenerator[Octets, None]:
    """All of a part, in pieces of at most `PIECE` octets; its digest is checked at the end.

    Raises PartLostError when it does not match, and as `PartReader.read`.
    """
    digest = hashlib.sha256()
    async for piece in pieces(reader, 0, part.octets):
        await uninterrupted(digest.update, piece)
        yield piece
    if digest.digest() != part.container_digest:
        raise PartLostError("the container's digest does not match")
