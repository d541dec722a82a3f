"""The object storage tier (S3 and the like) behind `obstore`; needs the extra `s3`.

Several holders may have one store. An object has the form of a disk tier's file, and the digest
of its container in its name: what one holder stores never takes the place of what another serves.
Beside an object stands a reference, an empty object, of each holder that has the block. Who lets a
block go removes its own reference, and the object when there is no other. A holder that refers to
an object in the moment in which the last other one lets it go may lose it: a miss, as by any fault.

Storage behind a network: `remote`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from typing import IO, Any, Final

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import ObjectStore

from kvsp.blocks.layout import Octets
from kvsp.holder.store import BlockInfo, Part
from kvsp.holder.tiers.circuit import Circuit
from kvsp.holder.tiers.sharing import Key, Listed
from kvsp.holder.tiers.tiers import (
    PIECE,
    SUFFIX,
    TAIL_OCTETS,
    PartLostError,
    PartReader,
    PartWriter,
    Span,
    TierUnavailableError,
    block_of,
    parse_trailer,
    part_name,
    trailer,
    trailer_octets,
)
from kvsp.holder.uninterrupted import uninterrupted
from kvsp.names.codes import HASH_OCTETS, Tier
from kvsp.names.errors import DecodeError
from kvsp.names.identity import parse_hex
from kvsp.names.uris import BlockId, uid

logger = logging.getLogger("kvsp.holder")

_SPOOL_OCTETS: Final = 8 << 20
_INSPECTIONS: Final = 16
_END_OCTETS: Final = 32 << 10
"""Of an object that are read for its trailer, which is seldom longer."""

_AT_ONCE: Final = 32 << 20

_REFERENCE: Final = ".ref"
_LET_GO: Final = 65_536
"""Objects remembered that this holder let go: it does not take them over again."""

_NOT_THERE: Final = (FileNotFoundError, NotFoundError)


class ObjectTier:
    """Parts as objects of one store (a bucket, or a prefix of it), which holders may share."""

    tier = Tier.REMOTE
    lasts = True

    def __init__(
        self,
        store: ObjectStore,
        holder: str,
        *,
        at_once: int = _AT_ONCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`holder` is the base URI of this one. An object of up to `at_once` octets is sent in
        one request, from memory, and only if it is not there; a larger one in parts, after
        asking whether it is."""
        self.removed = 0
        """Damaged objects that were removed."""

        self._store = store
        self._at_once = at_once
        self._name = uid(holder.encode())
        self._circuit = Circuit(clock)
        self._let_go: OrderedDict[Key, None] = OrderedDict()
        self._writing: set[Key] = set()
        self._written: set[Key] = set()
        """What was written since the store was listed, or before that was done."""

    @property
    def unavailable(self) -> bool:
        return self._circuit.is_open

    async def start(self) -> list[tuple[BlockId, BlockInfo, Part]]:
        """What this holder has there, the oldest first; nothing of a store that does not answer:
        `kvsp.holder.tiers.sharing` finds it later. Raises TierUnavailableError for one that
        lets nobody in."""
        try:
            listed = await self.listed()
        except TierUnavailableError as error:
            if isinstance(error.__cause__, PermissionDeniedError | UnauthenticatedError):
                raise
            logger.warning("what is in %s is not known yet: %s", self.tier, error)
            return []
        ours = sorted((each for each in listed.values() if each.is_ours), key=_age)
        limit = asyncio.Semaphore(_INSPECTIONS)

        async def one(each: Listed) -> tuple[BlockInfo, Part] | None:
            async with limit:
                return await self.inspect(each)

        inspected = await asyncio.gather(*map(one, ours))
        return [
            (each.block, *found)
            for each, found in zip(ours, inspected, strict=True)
            if found is not None
        ]

    async def create(self) -> PartWriter:
        return _ObjectWriter(self)

    async def open(self, block: BlockId, part: Part, span: Span | None = None) -> PartReader:
        reader = _ObjectReader(self, object_name(block, part.container_digest), part.octets)
        await reader.go_to(*(span or (0, part.octets)))
        return reader

    async def delete(self, block: BlockId, part: Part) -> None:
        key = (block, part.container_digest)
        self._let_go[key] = None
        self._let_go.move_to_end(key)
        while len(self._let_go) > _LET_GO:
            self._let_go.popitem(last=False)
        await self._remove(self._reference(*key))
        name = object_name(*key)
        with self.asking():
            async for batch in obstore.list(self._store, prefix=name.rpartition("/")[0]):
                for each in batch:
                    found = _parse(each["path"])
                    if found is not None and found[0] == key and found[1]:
                        return
        await self._remove(name)

    async def quarantine(self, block: BlockId, part: Part) -> bool:
        """Deletes it: nobody can use it, and a copy that is kept would be paid for."""
        await self._remove(object_name(block, part.container_digest))
        await self._remove(self._reference(block, part.container_digest))
        return False

    async def free(self) -> int | None:
        return None

    # --- what others have there ------------------------------------------------------

    async def listed(self) -> dict[Key, Listed]:
        self._written = set(self._writing)
        objects: dict[Key, tuple[int, datetime]] = {}
        ours: set[Key] = set()
        with self.asking():
            async for batch in obstore.list(self._store, prefix="blocks"):
                for each in batch:
                    if (found := _parse(each["path"])) is None:
                        continue
                    key, holder = found
                    if not holder:
                        objects[key] = (each["size"], each["last_modified"])
                    elif holder == self._name:
                        ours.add(key)
        for key in ours - objects.keys() - self._written:
            await self._remove(self._reference(*key))  # its object is gone
        return {key: Listed(*key, *about, key in ours) for key, about in objects.items()}

    async def inspect(self, listed: Listed) -> tuple[BlockInfo, Part] | None:
        name = object_name(listed.block, listed.digest)
        octets = listed.octets
        try:
            start = max(0, octets - _END_OCTETS)
            end = await self._get(name, start, octets)
            tail = end[-TAIL_OCTETS:]
            length = trailer_octets(tail)
            if length > octets - TAIL_OCTETS:
                raise PartLostError("the object is too short")
            if length > len(end) - TAIL_OCTETS:
                start = octets - TAIL_OCTETS - length
                end = await self._get(name, start, octets)
            info, part = parse_trailer(end[-TAIL_OCTETS - length : -TAIL_OCTETS], tail, octets)
            if part.container_digest != listed.digest:
                raise PartLostError("the object is not the one of its name")
        except _NOT_THERE:
            return None
        except PartLostError as error:
            self.removed += 1
            logger.warning("%s: %s; removed", name, error)
            await self._remove(name)
            await self._remove(self._reference(listed.block, listed.digest))
            return None
        return info, part

    def was_let_go(self, listed: Listed) -> bool:
        return (listed.block, listed.digest) in self._let_go

    async def refer(self, block: BlockId, part: Part) -> bool:
        key = (block, part.container_digest)
        if key in self._let_go:
            return False
        with self.asking():
            await obstore.put_async(self._store, self._reference(*key), b"")
        return True

    # --- for readers and writers -----------------------------------------------------

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """One request. Raises TierUnavailableError; lets through that there is no such object,
        or is one already."""
        if (wait_s := self._circuit.wait_s()) > 0:
            raise TierUnavailableError(
                f"the object store does not work; it is asked again in {wait_s:.0f} s",
                retry_after_s=wait_s,
            )
        try:
            yield
        except (*_NOT_THERE, AlreadyExistsError):
            self._answered()
            raise
        except (BaseError, OSError) as error:
            # the library's message can hold a signed address
            text = f"the object store failed ({type(error).__name__})"
            if self._circuit.failed():
                logger.warning("%s several times: it is asked now and then from now on", text)
            raise TierUnavailableError(text) from error
        else:
            self._answered()

    def _answered(self) -> None:
        if self._circuit.worked():
            logger.warning("the object store works again")

    async def ask_for(self, name: str, start: int, stop: int) -> Any:
        """A range of an object as obstore's result. Raises PartLostError, TierUnavailableError."""
        try:
            with self.asking():
                return await obstore.get_async(self._store, name, options={"range": (start, stop)})
        except _NOT_THERE:
            raise PartLostError("the object is not there") from None

    async def store(self, file: IO[bytes], block: BlockId, part: Part) -> None:
        """Put a whole object there, unless it is. Raises TierUnavailableError."""
        key = (block, part.container_digest)
        name = object_name(*key)
        self._writing.add(key)
        self._written.add(key)
        try:
            # first, so that nobody takes the object for one that no holder has
            with self.asking():
                await obstore.put_async(self._store, self._reference(*key), b"")
            octets = await uninterrupted(file.seek, 0, 2)
            await uninterrupted(file.seek, 0)
            if octets <= self._at_once:
                with contextlib.suppress(AlreadyExistsError), self.asking():
                    await obstore.put_async(self._store, name, file, mode="create")
            elif not await self._is_there(name):
                with self.asking():
                    await obstore.put_async(self._store, name, file)
        finally:
            self._writing.discard(key)
        self._let_go.pop(key, None)

    async def _is_there(self, name: str) -> bool:
        try:
            with self.asking():
                await obstore.head_async(self._store, name)
        except _NOT_THERE:
            return False
        return True

    async def _get(self, name: str, start: int, stop: int) -> bytes:
        with self.asking():
            return bytes(await obstore.get_range_async(self._store, name, start=start, end=stop))

    async def _remove(self, name: str) -> None:
        with contextlib.suppress(*_NOT_THERE), self.asking():
            await obstore.delete_async(self._store, name)

    def _reference(self, block: BlockId, digest: bytes) -> str:
        return object_name(block, digest).removesuffix(SUFFIX) + f".{self._name}{_REFERENCE}"


class _ObjectReader:
    """One request for all that is read in order; another one where it breaks off."""

    def __init__(self, tier: ObjectTier, name: str, octets: int) -> None:
        self._tier = tier
        self._name = name
        self._octets = octets
        self._stream: AsyncIterator[Any] | None = None
        self._at = self._stop = 0
        self._rest = memoryview(b"")

    async def go_to(self, start: int, stop: int) -> None:
        """Have a range come. Raises PartLostError, TierUnavailableError."""
        result = await self._tier.ask_for(self._name, start, stop)
        if result.meta["size"] < self._octets:
            raise PartLostError("the object was cut short")
        self._stream = aiter(result.stream(PIECE))
        self._at, self._stop, self._rest = start, stop, memoryview(b"")

    async def read(self, offset: int, octets: int) -> Octets:
        if offset != self._at or offset + octets > self._stop:
            await self.go_to(offset, offset + octets)
        parts: list[memoryview] = []
        wanted = octets
        while wanted:
            if not self._rest:
                await self._more()
            taken = self._rest[:wanted]
            self._rest = self._rest[len(taken) :]
            self._at += len(taken)
            wanted -= len(taken)
            parts.append(taken)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _more(self) -> None:
        if (arrived := await self._next()) is None:
            # it broke off: by the time that a request may take, or a connection that ended
            await self.go_to(self._at, self._stop)
            if (arrived := await self._next()) is None:
                raise TierUnavailableError("the object store's answer breaks off")
        self._rest = arrived

    async def _next(self) -> memoryview | None:
        """The next octets; None when no more come."""
        assert self._stream is not None
        try:
            return memoryview(await anext(self._stream)).cast("B") or None
        except (StopAsyncIteration, BaseError, OSError):
            return None

    def close(self) -> None:
        self._stream, self._rest = None, memoryview(b"")


class _ObjectWriter:
    """Spools to an unnamed file: an object appears whole, when all its octets are known."""

    def __init__(self, tier: ObjectTier) -> None:
        self._tier = tier
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
        await self._tier.store(self._file, block, part)

    async def abort(self) -> None:
        self._file.close()


# --- names ---------------------------------------------------------------------------


def object_name(block: BlockId, digest: bytes) -> str:
    """The name of the object with the container of this digest."""
    return f"{part_name(block).removesuffix(SUFFIX)}/{digest.hex()}{SUFFIX}"


def _parse(name: str) -> tuple[Key, str] | None:
    """What an object's name says, with the name of the holder that refers to it, or nothing for
    the object itself; None for a name of something else."""
    folder, _, file = name.rpartition("/")
    digest, _, kind = file.partition(".")
    block = block_of(folder + SUFFIX)
    if block is None:
        return None
    try:
        key = (block, parse_hex(digest, HASH_OCTETS))
    except DecodeError:
        return None
    if "." + kind == SUFFIX:
        return key, ""
    holder = kind.removesuffix(_REFERENCE)
    return (key, holder) if holder and holder != kind else None


def _age(listed: Listed) -> datetime:
    return listed.modified
