"""The object storage tier (S3 and the like) behind `obstore`; needs the extra `s3`.

An object has the form of a disk tier's file. Storage behind a network: `remote`.
"""

from __future__ import annotations

import asyncio
import tempfile
from typing import IO, Final

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore

from kvsp.blocks.layout import Octets
from kvsp.holder.store import BlockInfo, Part
from kvsp.holder.tiers.tiers import (
    TAIL_OCTETS,
    PartLostError,
    PartReader,
    PartWriter,
    TierUnavailableError,
    block_of,
    parse_trailer,
    part_name,
    trailer,
    trailer_octets,
)
from kvsp.holder.uninterrupted import uninterrupted
from kvsp.names.codes import Tier
from kvsp.names.uris import BlockId

_SPOOL_OCTETS: Final = 8 << 20
_INSPECTIONS: Final = 16


class ObjectTier:
    """Parts as objects of one store (a bucket, or a prefix of it) of one holder."""

    tier = Tier.REMOTE
    lasts = True

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.removed = 0
        """Damaged objects removed at start-up."""

    async def start(self) -> list[tuple[BlockId, BlockInfo, Part]]:
        limit = asyncio.Semaphore(_INSPECTIONS)
        found: list[tuple[BlockId, BlockInfo, Part]] = []
        try:
            async for batch in obstore.list(self._store, prefix="blocks"):
                inspected = await asyncio.gather(
                    *(self._inspect(each["path"], each["size"], limit) for each in batch)
                )
                found += [each for each in inspected if each is not None]
        except (BaseError, OSError) as error:
            raise _unavailable(error) from error
        return found

    async def create(self) -> PartWriter:
        return _ObjectWriter(self._store)

    async def open(self, block: BlockId, part: Part) -> PartReader:
        name = part_name(block)
        try:
            about = await obstore.head_async(self._store, name)
        except FileNotFoundError:
            raise PartLostError("the object is not there") from None
        except (BaseError, OSError) as error:
            raise _unavailable(error) from error
        if about["size"] < part.octets:
            raise PartLostError("the object was cut short")
        return _ObjectReader(self._store, name)

    async def delete(self, block: BlockId) -> None:
        try:
            await obstore.delete_async(self._store, part_name(block))
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise _unavailable(error) from error

    async def quarantine(self, block: BlockId) -> bool:
        """Deletes it: a copy that is kept would be paid for."""
        await self.delete(block)
        return False

    async def free(self) -> int | None:
        return None

    async def _inspect(
        self, name: str, octets: int, limit: asyncio.Semaphore
    ) -> tuple[BlockId, BlockInfo, Part] | None:
        block = block_of(name)
        if block is None:
            return None
        async with limit:
            try:
                if octets < TAIL_OCTETS:
                    raise PartLostError("the object is too short")
                tail = await self._get(name, octets - TAIL_OCTETS, TAIL_OCTETS)
                length = trailer_octets(tail)
                if length > octets - TAIL_OCTETS:
                    raise PartLostError("the object is too short")
                text = await self._get(name, octets - TAIL_OCTETS - length, length)
                info, part = parse_trailer(text, tail, octets)
            except PartLostError:
                self.removed += 1
                await self.delete(block)
                return None
        return block, info, part

    async def _get(self, name: str, start: int, length: int) -> bytes:
        return bytes(await obstore.get_range_async(self._store, name, start=start, length=length))


class _ObjectReader:
    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self._name = name

    async def read(self, offset: int, octets: int) -> Octets:
        try:
            data = await obstore.get_range_async(
                self._store, self._name, start=offset, length=octets
            )
        except FileNotFoundError:
            raise PartLostError("the object is not there") from None
        except (BaseError, OSError) as error:
            raise _unavailable(error) from error
        view = memoryview(data)
        if len(view) != octets:
            raise PartLostError("the object was cut short")
        return view

    def close(self) -> None:
        """Nothing is held open."""


class _ObjectWriter:
    """Spools to an unnamed file: an object appears whole, when all its octets are known."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(_SPOOL_OCTETS)  # noqa: SIM115

    async def write(self, octets: Octets) -> None:
        try:
            await uninterrupted(self._file.write, octets)
        except OSError as error:
            raise TierUnavailableError(
                f"the temporary file of an upload: {error.strerror or error}"
            ) from error

    async def commit(self, block: BlockId, info: BlockInfo, part: Part) -> None:
        await self.write(trailer(info, part))
        self._file.seek(0)
        try:
            await obstore.put_async(self._store, part_name(block), self._file)
        except (BaseError, OSError) as error:
            raise _unavailable(error) from error

    async def abort(self) -> None:
        self._file.close()


def _unavailable(error: Exception) -> TierUnavailableError:
    # the library's message can hold a signed address
    return TierUnavailableError(f"the object store failed ({type(error).__name__})")
