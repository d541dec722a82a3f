"""What the agent needs of an inference engine, and a block in the engine's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvsp.blocks.layout import Octets, Tensor, allocate, octets_of
from kvsp.instance.engines.samplers import SamplerState
from kvsp.names.identity import Descriptor


class KvBlock:
    """K and V of one block in the engine's memory: `[block_tokens, kv_heads, head_dim]`
    for each layer, in layout "kvsp-layout-1".

    Layers are written as they arrive, each once. A complete block does not change and is
    shared by whatever uses it.
    """

    __slots__ = ("_there", "arrays")

    def __init__(self, descriptor: Descriptor) -> None:
        tokens = descriptor.block_tokens
        self.arrays: list[tuple[Tensor, Tensor]] = [
            (allocate(descriptor, tokens), allocate(descriptor, tokens))
            for _ in range(descriptor.layers)
        ]
        self._there = bytearray(descriptor.layers)

    @property
    def complete(self) -> bool:
        return all(self._there)

    @property
    def octets(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self.arrays)

    def write(self, layer: int, k: Octets, v: Octets) -> None:
        """Take the raw octets of a layer. Raises ValueError for one that is there."""
        if self._there[layer]:
            raise ValueError(f"layer {layer} came twice")
        for array, raw in zip(self.arrays[layer], (k, v), strict=True):
            octets_of(array)[:] = memoryview(raw).cast("B")
        self._there[layer] = True

    def fill(self) -> None:
        """All of `arrays` was written otherwise."""
        self._there[:] = bytes([True]) * len(self._there)

    def sections(self) -> list[tuple[memoryview, memoryview]]:
        """The raw K and V sections of each layer, as views."""
        return [(octets_of(k).toreadonly(), octets_of(v).toreadonly()) for k, v in self.arrays]


class Context(Protocol):
    """The KV cache of one sequence in an engine. Used by one thread at a time."""

    @property
    def tokens(self) -> int:
        """How many positions have K and V."""
        ...

    def attach(self, block: KvBlock) -> None:
        """Append a complete block that was loaded. Raises ValueError off a block border."""
        ...

    def prefill(self, tokens: Sequence[int]) -> None:
        """Compute K and V of the next tokens."""
        ...

    def next_token(self, sampler: SamplerState) -> int:
        """Draw the token that follows the last one prefilled, whose own K and V are not
        computed yet. Raises ValueError when nothing was prefilled after the last `attach`."""
        ...

    def block(self, index: int) -> KvBlock:
        """A complete block. Raises IndexError for one that is not complete."""
        ...


class Engine(Protocol):
    """Runs one model."""

    @property
    def descriptor(self) -> Descriptor: ...

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def bit_identical(self) -> bool:
        """Whether every instance of it computes the same octets from the same state."""
        ...

    def context(self) -> Context:
        """An empty context."""
        ...
