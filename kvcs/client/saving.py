"""One prompt's cache as an engine computes it: handed over layer by layer, never waited for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvcs.client.counters import Dropped
from kvcs.names.errors import KvcsError, MisuseError
from kvcs.publishing.publication import Publication
from kvcs.publishing.stepwise import aextend, afinish, aput_layer
from kvsp.blocks.layout import Tensor, check_tensor
from kvsp.blocks.tensors import as_array
from kvsp.names.errors import KvspError
from kvsp.names.identity import Descriptor
from kvsp.names.prefix import complete_blocks

logger = logging.getLogger("kvcs.client")


class SaveHost(Protocol):
    """What a Save needs of its Client."""

    def soon(self, call: Callable[..., None], *args: object) -> None:
        """Call it on the loop, after all that was so called before."""

    def reserve(self, octets: int) -> bool:
        """Whether so many more octets may wait to be hashed; in whatever thread."""
        ...

    def release(self, octets: int) -> None:
        """They wait no longer."""

    def offer(self, save: Save, publication: Publication) -> None:
        """Announce it to every relay."""

    def progressed(self, save: Save) -> None:
        """A layer was put."""

    def let_go(self, save: Save, reason: Dropped, why: str) -> None:
        """It is offered no more."""


class _Chunk(NamedTuple):
    first_block: int
    blocks: int
    layer: int
    k: Tensor
    v: Tensor

    @property
    def octets(self) -> int:
        return self.k.nbytes + self.v.nbytes


class Save:
    """The publication of a prompt's complete blocks, made by `Client.publish`.

    Give `put_layer` every layer in order; of a prefill in chunks give `put_chunk` every layer of
    one chunk before the next. Each returns at once: True, or False when the publication was
    dropped meanwhile (`failed` says why), which is no fault of the caller. Arrays are
    kept by reference and must not change any more. Safe in any thread, one caller at a time.
    """

    def __init__(
        self,
        host: SaveHost,
        descriptor: Descriptor,
        make: Callable[[], Publication],
        tokens: list[int],
        first_blocks: int,
    ) -> None:
        """`make` makes the publication, of the first `first_blocks` blocks."""
        self.blocks = complete_blocks(len(tokens), descriptor.block_tokens)
        """Complete blocks of the prompt: what is published, all in all."""
        self.failed: str | None = None
        """Why it is not, or no longer, offered; None while it is."""
        self.publication: Publication | None = None
        """What is served, once it was made on the client's thread."""
        self.complete = False
        """Whether every layer was put, and the publication has ended."""
        self._host = host
        self._descriptor = descriptor
        self._make = make
        self._tokens = tokens
        self._first_blocks = first_blocks
        self._lock = threading.Lock()
        self._due = (0, 0)
        """The first block and the layer that are to be given next."""
        self._span = first_blocks
        """Blocks of the chunk that is given now."""
        self._waiting: deque[_Chunk] = deque()
        self._given = asyncio.Event()
        """Of the loop: something waits."""

    @property
    def octets(self) -> int:
        """Octets of K and V of all layers of its blocks."""
        return 2 * self._descriptor.layers * self.blocks * self._descriptor.section_octets()

    def put_layer(self, layer: int, k: Tensor, v: Tensor) -> bool:
        """A layer of the whole prompt: `k` and `v` are `[tokens, kv_heads, head_dim]`, arrays or
        torch tensors on the CPU, C-contiguous, in the descriptor's element type; rows after the
        last complete block are left out. Raises MisuseError for another layer than the next one,
        and for an array that does not fit."""
        return self.put_chunk(0, layer, k, v)

    def put_chunk(self, first_block: int, layer: int, k: Tensor, v: Tensor) -> bool:
        """A layer of the chunk that begins at block `first_block`; row 0 is that block's first.

        The first chunk has the tokens that `publish(first_chunk=…)` has said, each later one as
        many blocks as its layer 0 fills. Raises MisuseError as `put_layer`.
        """
        with self._lock:
            if self.failed is not None:
                return False
            chunk = self._checked(first_block, layer, k, v)
            room = self._host.reserve(chunk.octets)
            if room:
                last = layer + 1 == self._descriptor.layers
                self._span = chunk.blocks
                self._due = (first_block + chunk.blocks, 0) if last else (first_block, layer + 1)
        if not room:
            self._drop(Dropped.PENDING, "layers come faster than they can be hashed")
            return False
        self._host.soon(self._take, chunk)
        return True

    def abort(self, why: str = "the application has aborted it") -> None:
        """Offer it no more; harmless when repeated. Who retrieves it is told at once."""
        self._drop(Dropped.ABORTED, why)

    # -- on the loop ---------------------------------------------------------------------

    async def run(self) -> None:
        """Make the publication, offer it, and put what is given, until it is whole."""
        try:
            publication = await asyncio.to_thread(self._make)
            if self.failed is not None:
                publication.abandon(self.failed)
                return
            self.publication = publication
            self._host.offer(self, publication)
            while not self.complete:
                while not self._waiting:
                    if self.failed is not None:
                        return
                    self._given.clear()
                    await self._given.wait()
                await self._put(publication, self._waiting.popleft())
        except (KvcsError, KvspError, ValueError) as error:
            if self.failed is None:  # else it was dropped meanwhile, which is why
                self._drop(Dropped.FAILED, str(error))

    def end(self, why: str) -> None:
        """It was dropped: tell those who retrieve it, and let go of what waits."""
        self.failed = self.failed or why
        while self._waiting:
            self._host.release(self._waiting.popleft().octets)
        self._given.set()
        if self.publication is not None:
            self.publication.abandon(why)

    async def _put(self, publication: Publication, chunk: _Chunk) -> None:
        try:
            rows = self._descriptor.block_tokens
            if chunk.first_block and chunk.layer == 0:
                span = slice(chunk.first_block * rows, (chunk.first_block + chunk.blocks) * rows)
                await aextend(publication, self._tokens[span])
            await aput_layer(publication, chunk.layer, chunk.k, chunk.v)
        finally:
            self._host.release(chunk.octets)
        whole = chunk.first_block + chunk.blocks == self.blocks
        if whole and chunk.layer + 1 == self._descriptor.layers:
            if self._first_blocks < self.blocks:
                await afinish(publication)
            self.complete = True
        self._host.progressed(self)

    def _take(self, chunk: _Chunk) -> None:
        if self.failed is not None:
            self._host.release(chunk.octets)
            return
        self._waiting.append(chunk)
        self._given.set()

    # -- inside --------------------------------------------------------------------------

    def _drop(self, reason: Dropped, why: str) -> None:
        with self._lock:
            if self.failed is not None:
                return
            self.failed = why
        with contextlib.suppress(MisuseError):  # after `close` nothing is offered any more
            self._host.soon(self._host.let_go, self, reason, why)

    def _checked(self, first_block: int, layer: int, k: Tensor, v: Tensor) -> _Chunk:
        where = f"layer {layer} of the chunk at block {first_block}"
        if (first_block, layer) != self._due:
            due = f"layer {self._due[1]} of the chunk at block {self._due[0]} is"
            if self._due[0] >= self.blocks:
                due = "nothing more is"
            raise MisuseError(f"{where}: {due} due")
        arrays = []
        for name, tensor in (("k", k), ("v", v)):
            try:
                array = as_array(tensor)
                check_tensor(array, self._descriptor)
            except ValueError as error:
                raise MisuseError(f"{where}: {name}: {error}") from None
            arrays.append(array)
        rows = self._descriptor.block_tokens
        blocks = complete_blocks(min(map(len, arrays)), rows)
        if layer == 0 and first_block:
            span = min(blocks, self.blocks - first_block)
        else:
            span = self._span
        if not span or blocks < span:
            raise MisuseError(
                f"{where}: {min(map(len, arrays))} tokens, and {max(span, 1) * rows} are needed: "
                f"a chunk has complete blocks of {rows} tokens, in every layer as many"
            )
        return _Chunk(first_block, span, layer, arrays[0], arrays[1])
