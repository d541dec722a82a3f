"""Layers put together from blocks.

Tensors and their octets are `kvsp.blocks.layout`'s; this module gives those names on.
"""

from __future__ import annotations

from kvcs.names.codes import Component
from kvsp.blocks.layout import (
    Octets,
    Tensor,
    allocate,
    block_section,
    check_tensor,
    is_layout_1,
    octets_of,
    to_layout_1,
)
from kvsp.names.identity import Descriptor

__all__ = [
    "LayerAssembly",
    "Tensor",
    "allocate",
    "block_section",
    "check_tensor",
    "is_layout_1",
    "octets_of",
    "to_layout_1",
]


class LayerAssembly:
    """K and V of one layer, filled block by block, every block exactly once.

    A layer is usable when every block of both tensors is there.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        blocks: int,
        *,
        k: Tensor | None = None,
        v: Tensor | None = None,
    ) -> None:
        """`k` and `v` are arrays to fill, `[blocks * block_tokens or more, …]`; by default
        new ones. Raises ValueError when they do not fit the descriptor, are too short or
        read-only, and for less than one block.
        """
        if blocks < 1:
            raise ValueError(f"a layer of {blocks} blocks is no layer")
        tokens = blocks * descriptor.block_tokens
        self.k = allocate(descriptor, tokens) if k is None else k
        self.v = allocate(descriptor, tokens) if v is None else v
        self.blocks = blocks
        self._section = descriptor.section_octets()
        self._views: dict[Component, memoryview] = {}
        self._written: dict[Component, bytearray] = {}
        for component, tensor in ((Component.K, self.k), (Component.V, self.v)):
            check_tensor(tensor, descriptor)
            if tensor.shape[0] < tokens:
                raise ValueError(f"{tensor.shape[0]} rows cannot hold {tokens} tokens")
            if not tensor.flags.writeable:
                raise ValueError("the array to fill is read-only")
            self._views[component] = octets_of(tensor)
            self._written[component] = bytearray(blocks)
        self._left = 2 * blocks

    def write(self, component: Component, block: int, *data: Octets) -> None:
        """Put the raw Data of one Object at its place; `kv` is a K then a V section.

        `data` is one buffer or several that follow each other. `block` counts from the
        assembly's first row. Raises ValueError for Data of another length or a block that
        was written before, IndexError for a block outside.
        """
        parts = [memoryview(part).cast("B") for part in data]
        length = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        section = self._section
        due = 2 * section if component is Component.KV else section
        if length != due:
            raise ValueError(f"{length} octets instead of {due} for {component.label} of a block")
        if not 0 <= block < self.blocks:
            raise IndexError(f"block {block} is outside the {self.blocks} blocks of this layer")
        if component is Component.KV:
            whole = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
            self._claim(Component.V, block)
            self._put(Component.K, block, [whole[:section]])
            self._put(Component.V, block, [whole[section:]])
        else:
            self._put(component, block, parts)

    def _claim(self, half: Component, block: int) -> None:
        if self._written[half][block]:
            raise ValueError(f"block {block} of {half.label} was written before")

    def _put(self, half: Component, block: int, parts: list[memoryview]) -> None:
        self._claim(half, block)
        view, start = self._views[half], block * self._section
        for part in parts:
            stop = start + len(part)
            view[start:stop] = part
            start = stop
        self._written[half][block] = 1
        self._left -= 1

    @property
    def complete(self) -> bool:
        """Whether every block of K and of V is there."""
        return not self._left

    def missing(self, component: Component) -> list[int]:
        """The blocks still to be written: of K, of V, or of either for `kv`."""
        halves = (Component.K, Component.V) if component is Component.KV else (component,)
        return [
            block
            for block in range(self.blocks)
            if not all(self._written[half][block] for half in halves)
        ]
