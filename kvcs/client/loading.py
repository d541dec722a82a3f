"""A cache while it is loaded: what engine threads wait for, and the client's thread fills."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from kvcs.client.counters import Ended
from kvcs.names.errors import KvcsError, MisuseError
from kvcs.retrieving.layers import Layer
from kvsp.blocks.layout import Tensor, allocate
from kvsp.names.identity import Descriptor

OnBlock: TypeAlias = Callable[[int, int, Tensor, Tensor], None]
"""Called with layer, block, and K and V of it, `[block_tokens, kv_heads, head_dim]`."""


class CacheLost(KvcsError):
    """A cache that was being loaded cannot be had: compute its tokens. `lost` are the blocks."""

    def __init__(self, text: str, lost: range) -> None:
        super().__init__(text)
        self.lost = lost


class Load:
    """Blocks of one publication while they come, made by `Client.load`.

    Layers are usable in order. What is handed over was verified: each Object against the digest
    it carries, and against the manifest as soon as that lists it, which for the last layers of a
    cache in production is just before `finished`. Wait for that (`wait`) before a token that was
    computed with it leaves the engine. Safe in any thread.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        blocks: range,
        on_block: OnBlock | None,
        stop: Callable[[Load], None],
        timeout: float,
    ) -> None:
        """`stop` is called, in whatever thread, when nothing more is wanted."""
        self.timeout = timeout
        """Seconds after which it has ended at the latest, since it was begun."""
        self.blocks = blocks
        """The blocks asked for."""
        self.error: Exception | None = None
        """Why it has failed; None while it has not."""
        self.outcome: Ended | None = None
        """How it has ended; None before."""
        self.published = 0
        """Leading blocks of the prompt that the publication has, as its manifest said last."""
        self.producing = True
        """Whether the publication was still computed when its manifest came first."""
        self.seconds = 0.0
        """From its beginning to its end; known once it is `over`."""
        self.there = range(blocks.start, blocks.start)
        """The blocks that came whole, in every layer: known once it is `over`. Of a load that has
        failed only an `on_block` has any."""
        self._descriptor = descriptor
        self._on_block = on_block
        self._stop = stop
        self._changed = threading.Condition()
        self._began = time.monotonic()
        self._layers = 0
        """Leading layers of which every block is there."""
        self._arrays: dict[int, tuple[Tensor, Tensor]] = {}

    # -- for the engine ------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Tokens of the blocks asked for."""
        return len(self.blocks) * self._descriptor.block_tokens

    @property
    def layers(self) -> int:
        """How many leading layers are there."""
        return self._layers

    @property
    def over(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.outcome is not None

    @property
    def finished(self) -> bool:
        """Whether all of it came and the manifest says nothing else."""
        return self.outcome is Ended.LOADED

    @property
    def lost(self) -> range:
        """The blocks that are not there, of those asked for; all of them before the end."""
        return range(self.there.stop, self.blocks.stop)

    def wait_layer(self, layer: int, within: float) -> bool:
        """Whether every block of `layer` is there, within so many seconds: False as soon as it
        is known that it will not be (`error` says why), or when the time is over."""
        return self._wait(lambda: self._layers > layer or self.over, within) and (
            self._layers > layer and self.error is None
        )

    def wait(self, within: float) -> bool:
        """Whether it has `finished`, within so many seconds."""
        return self._wait(lambda: self.over, within) and self.finished

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer that is there, `[tokens, kv_heads, head_dim]`, row 0 being that of
        the first block asked for: the arrays that were received into. Raises MisuseError with an
        `on_block`, which was given them instead, and for one that is not there; CacheLost when the
        load has failed."""
        if self._on_block is not None:
            raise MisuseError("this load was made with on_block: it keeps no layers")
        with self._changed:
            if self.error is not None:
                raise self.failure()
            if layer >= self._layers:
                raise MisuseError(f"layer {layer} is not there: wait for it with wait_layer")
            k, v = self._arrays[layer]
        rows = self._descriptor.block_tokens
        span = slice(self.blocks.start * rows, self.blocks.stop * rows)
        return k[span], v[span]

    def cancel(self) -> None:
        """Nothing more is wanted. When it returns, `on_block` is not called any more; harmless
        when repeated, and after the end."""
        if self.end(Ended.CANCELLED, CacheLost("the load was cancelled", self.blocks)):
            self._stop(self)

    def failure(self) -> CacheLost:
        """What to raise when it cannot be waited for any longer: why it has failed."""
        lost = CacheLost(str(self.error or f"it has not come within {self.timeout:g} s"), self.lost)
        lost.__cause__ = self.error
        return lost

    # -- on the client's thread ----------------------------------------------------------

    def arrays(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """What to receive a layer into, `[tokens, kv_heads, head_dim]`."""
        arrays = allocate(self._descriptor, tokens), allocate(self._descriptor, tokens)
        if self._on_block is None:
            self._arrays[layer] = arrays
        return arrays

    def told(self, published: int, *, producing: bool) -> None:
        """The manifest has said how much there is."""
        self.producing &= producing or self.published > 0
        self.published = published

    def came(self, layer: Layer, first: int) -> None:
        """A layer of one segment came, from block `first` on, and is verified. Raises what
        `on_block` raises."""
        rows = self._descriptor.block_tokens
        start = layer.first_token // rows
        stop = start + len(layer.k) // rows
        if self._on_block is not None:
            for block in range(max(first, start), stop):
                at = slice((block - start) * rows, (block - start + 1) * rows)
                with self._changed:  # one block at a time: who cancels waits for no more
                    if self.over:
                        return
                    self._on_block(layer.index, block, layer.k[at], layer.v[at])
        if stop >= self.blocks.stop:
            with self._changed:
                self._layers = layer.index + 1
                self._changed.notify_all()

    def end(self, outcome: Ended, error: Exception | None, there: range | None = None) -> bool:
        """It is over, with the blocks that are `there`, if any; whether it was not before."""
        with self._changed:
            if self.over:
                return False
            self.seconds = time.monotonic() - self._began
            if error is not None:
                self._arrays.clear()
                if self._on_block is None:  # nobody has what came: `layer` gives nothing any more
                    there = None
            self.outcome, self.error, self.there = outcome, error, there or self.there
            self._changed.notify_all()
            return True

    # -- inside --------------------------------------------------------------------------

    def _wait(self, condition: Callable[[], bool], within: float) -> bool:
        deadline = time.monotonic() + within
        with self._changed:
            while not condition():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True
