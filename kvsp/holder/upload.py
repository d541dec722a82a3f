"""One block on its way in: checked, digested and written as it comes (KVSP "Block Retrieval
and Storage"). At most one layer and two pieces are in memory.

A piece is checked, digested and written at the same time, while the next one arrives. Each octet is
in two digests, its layer's and the container's, which is also the one that the client may send."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final

from kvsp.blocks.container import ContainerHeader, ContainerReader
from kvsp.holder.store import BlockInfo, Part
from kvsp.holder.tiers.tiers import PIECE, PartWriter
from kvsp.holder.uninterrupted import to_the_end, uninterrupted
from kvsp.names.codes import Codec, DecodeErrorName
from kvsp.names.errors import DecodeError, KvspError
from kvsp.names.identity import Descriptor
from kvsp.records.records import replica_digest

MAX_CONTAINER_OCTETS: Final = 2 << 30


class ContainerTooLargeError(KvspError):
    """The container's own table says more octets than a PUT may carry."""


class Upload:
    """Feeds a container to a checker and, once its size is known, to a writer.

    `make_room` gets the octets of the whole container and returns a writer for it.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        make_room: Callable[[int], Awaitable[PartWriter]],
        *,
        repr_digest: bytes | None = None,
        limit: int = MAX_CONTAINER_OCTETS,
    ) -> None:
        self._descriptor = descriptor
        self._make_room = make_room
        self._limit = limit
        self._reader = ContainerReader(descriptor)
        self._repr_digest = repr_digest
        self._layer_digests: list[bytes] = []
        self._digest = hashlib.sha256()
        self._sent: Any = None
        """The digest of what was sent, where that is not what is stored: it had flags."""

        self._head = bytearray()
        self._left = 0
        """Octets that are still to come, once the header was read."""

        self._step: asyncio.Task[None] | None = None
        self.writer: PartWriter | None = None

    async def receive(self, chunks: AsyncIterator[bytes]) -> tuple[BlockInfo, Part]:
        """Take the whole body and say what it holds; it is written, not yet visible.

        Raises DecodeError, ContainerTooLargeError, what `make_room` and the writer raise.
        """
        batch = bytearray()
        try:
            async for chunk in chunks:
                batch += chunk
                # what is no container of this geometry is refused at once
                if len(batch) >= PIECE or self._reader.header is None:
                    await self._take(bytes(batch))
                    batch.clear()
            await self._take(bytes(batch))
            await self._taken()
        finally:
            if self._step is not None:  # then nobody uses the writer any more
                await to_the_end(_ended(self._step))
        self._reader.close()
        header = self._reader.header
        assert header is not None
        digest = self._digest.digest()
        self._compare(digest if self._sent is None else self._sent.digest())
        digests = tuple(self._layer_digests)
        info = BlockInfo(header.codec, header.data_octets, replica_digest(digests), digests)
        return info, Part(header._replace(flags=0), digest)

    async def _take(self, data: bytes) -> None:
        """Have a piece checked, digested and written while the next one is read."""
        if self._reader.header is not None:
            await self._taken()
            self._step = asyncio.create_task(self._keep(data))
            return
        await uninterrupted(self._check, data)
        self._head += data
        if (header := self._reader.header) is None:
            return
        self._check_whole(header)
        self.writer = await self._make_room(header.total_octets)
        sent, stored = bytes(self._head), header.encoded
        self._head.clear()
        if self._repr_digest is not None and header.flags:
            self._sent = hashlib.sha256(sent[: len(stored)])
        self._left = header.data_octets
        # flags that were sent are not kept
        await _together(uninterrupted(self._digest.update, stored), self.writer.write(stored))
        await self._store(sent[len(stored) :])

    async def _taken(self) -> None:
        """Wait for the piece before. Raises what was wrong with it."""
        if self._step is not None:
            step, self._step = self._step, None
            await step

    async def _keep(self, data: bytes) -> None:
        await _together(uninterrupted(self._check, data), self._store(data))

    async def _store(self, data: bytes) -> None:
        assert self.writer is not None
        data = data[: self._left]  # more is an error, which the check finds
        self._left -= len(data)
        if not data:
            return
        work = [uninterrupted(self._digest.update, data), self.writer.write(data)]
        if self._sent is not None:
            work.append(uninterrupted(self._sent.update, data))
        await _together(*work)

    def _compare(self, digest: bytes) -> None:
        if self._repr_digest is not None and not hmac.compare_digest(digest, self._repr_digest):
            raise DecodeError(
                DecodeErrorName.DIGEST_MISMATCH, "the container is not what its digest covers"
            )

    def _check(self, data: bytes) -> None:
        for event in self._reader.feed(data):
            if isinstance(event, ContainerHeader):
                continue
            header = self._reader.header
            if header is not None and header.codec is not Codec.RAW:
                event.decode(header.codec, self._descriptor)
            self._layer_digests.append(event.digest)

    def _check_whole(self, header: ContainerHeader) -> None:
        if header.total_octets > self._limit:
            raise ContainerTooLargeError(f"a container has at most {self._limit} octets")
        if header.layers != range(self._descriptor.layers):
            raise DecodeError(
                DecodeErrorName.LAYER_RANGE,
                f"a stored block has all {self._descriptor.layers} layers, "
                f"this one {len(header.layers)} from layer {header.first_layer}",
            )


async def _together(*work: Coroutine[Any, Any, None]) -> None:
    """Do all at once, and end when all have ended. Raises what the first one raised, if it did, or
    else the next one."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def _ended(task: asyncio.Task[None]) -> None:
    """Wait for the end of what nobody asks the result of any more."""
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()
