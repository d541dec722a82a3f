"""One block on its way in: checked, digested and written as it comes (KVSP "Block Retrieval
and Storage"). At most one layer and one piece are in memory."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from kvsp.blocks.container import ContainerHeader, ContainerReader
from kvsp.holder.store import BlockInfo, Part
from kvsp.holder.tiers.tiers import PIECE, PartWriter
from kvsp.holder.uninterrupted import uninterrupted
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
        self._reader = ContainerReader(descriptor, repr_digest=repr_digest)
        self._layer_digests: list[bytes] = []
        self._digest = hashlib.sha256()
        self._taken = 0
        self.writer: PartWriter | None = None

    async def receive(self, chunks: AsyncIterator[bytes]) -> tuple[BlockInfo, Part]:
        """Take the whole body and say what it holds; it is written, not yet visible.

        Raises DecodeError, ContainerTooLargeError, what `make_room` and the writer raise.
        """
        batch = bytearray()
        async for chunk in chunks:
            batch += chunk
            # what is no container of this geometry is refused at once
            if len(batch) >= PIECE or self._reader.header is None:
                await self._take(bytes(batch))
                batch.clear()
        await self._take(bytes(batch))
        self._reader.close()
        header = self._reader.header
        assert header is not None
        digests = tuple(self._layer_digests)
        info = BlockInfo(header.codec, header.data_octets, replica_digest(digests), digests)
        return info, Part(header._replace(flags=0), self._digest.digest())

    async def _take(self, data: bytes) -> None:
        before = self._reader.header
        await uninterrupted(self._check, data)
        header = self._reader.header
        start = self._taken
        self._taken += len(data)
        if header is None:
            return
        if before is None:
            self._check_whole(header)
            self.writer = await self._make_room(header.total_octets)
            await self._write(header.encoded)  # flags that were sent are not kept
            data = data[len(header.encoded) - start :]
        await self._write(data)

    async def _write(self, data: bytes) -> None:
        assert self.writer is not None
        if data:
            await uninterrupted(self._digest.update, data)
            await self.writer.write(data)

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
