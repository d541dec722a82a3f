"""Block sections as views of layer tensors, and layers put together from blocks.

A tensor here is K or V of one layer: `[tokens, kv_heads, head_dim]`, C-contiguous,
little-endian, which is exactly layout "kvsp-layout-1" (KVSP 4.3). Consecutive rows of
such an array are consecutive octets, so a block's section is a view, never a copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcs.codes import Component
from kvsp.identity import Descriptor
from kvsp.prefix import block_tokens_range, complete_blocks

Tensor = NDArray[Any]


def is_layout_1(tensor: Tensor) -> bool:
    """Whether an array's octets in memory are those of "kvsp-layout-1"."""
    return tensor.ndim == 3 and tensor.flags.c_contiguous and tensor.dtype == _little(tensor.dtype)


def to_layout_1(tensor: Tensor) -> Tensor:
    """The array itself when it is in "kvsp-layout-1", else a converted copy.

    For arrays that are not C-contiguous or big-endian; values stay the same. Raises
    ValueError for an array that has not three dimensions.
    """
    if tensor.ndim != 3:
        raise ValueError(
            f"K and V of a layer are [tokens, kv_heads, head_dim], not {tensor.ndim}-dimensional"
        )
    if is_layout_1(tensor):
        return tensor
    return np.ascontiguousarray(tensor, dtype=_little(tensor.dtype))


def check_tensor(tensor: Tensor, descriptor: Descriptor) -> None:
    """Check that an array is K or V of a layer under `descriptor`, without converting it.

    Raises ValueError naming what differs: shape, element type, byte order or memory
    order; DecodeError `codec-unsupported` for a descriptor that cannot be read raw.
    """
    descriptor.section_octets()
    wanted = (descriptor.kv_heads, descriptor.head_dim)
    if tensor.ndim != 3 or tensor.shape[1:] != wanted:
        raise ValueError(
            f"shape {list(tensor.shape)} instead of [tokens, {wanted[0]}, {wanted[1]}]"
        )
    if tensor.dtype != descriptor.dtype:
        if tensor.dtype.newbyteorder() == descriptor.dtype:
            raise ValueError("the elements are big-endian; convert them with to_layout_1")
        raise ValueError(
            f"elements of {tensor.dtype} instead of {descriptor.kv_dtype} ({descriptor.dtype})"
        )
    if not tensor.flags.c_contiguous:
        raise ValueError("the array is not C-contiguous; convert it with to_layout_1")


def octets_of(tensor: Tensor) -> memoryview:
    """All octets of a C-contiguous array as one flat view, writable when the array is.

    Raises ValueError for an array that is not C-contiguous.
    """
    if not tensor.flags.c_contiguous:
        raise ValueError("the array is not C-contiguous")
    # numpy cannot export bfloat16 or fp8 elements as a buffer, their octets it can
    return tensor.reshape(-1).view(np.uint8).data


def block_section(tensor: Tensor, block: int, block_tokens: int) -> memoryview:
    """The raw section of block `block` of a tensor: a read-only view, nothing is copied.

    `block` counts from the tensor's first row. Raises ValueError for an array that is
    not in "kvsp-layout-1", IndexError for a block that is not complete in it.
    """
    if not is_layout_1(tensor):
        raise ValueError(
            "not a C-contiguous little-endian [tokens, kv_heads, head_dim] array; "
            "convert it with to_layout_1"
        )
    rows = block_tokens_range(block, block_tokens)
    if block >= complete_blocks(tensor.shape[0], block_tokens):
        raise IndexError(
            f"block {block} of {block_tokens} tokens is not complete in {tensor.shape[0]} tokens"
        )
    return octets_of(tensor[rows.start : rows.stop]).toreadonly()


def allocate(descriptor: Descriptor, tokens: int) -> Tensor:
    """A zeroed tensor `[tokens, kv_heads, head_dim]` of the descriptor's element type."""
    # zeroed, so that rows that never arrive hold nothing of this process's past
    return np.zeros((tokens, descriptor.kv_heads, descriptor.head_dim), descriptor.dtype)


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
        self._left: dict[Component, int] = {}
        for component, tensor in ((Component.K, self.k), (Component.V, self.v)):
            check_tensor(tensor, descriptor)
            if tensor.shape[0] < tokens:
                raise ValueError(f"{tensor.shape[0]} rows cannot hold {tokens} tokens")
            if not tensor.flags.writeable:
                raise ValueError("the array to fill is read-only")
            self._views[component] = octets_of(tensor)
            self._written[component] = bytearray(blocks)
            self._left[component] = blocks

    def write(self, component: Component, block: int, data: bytes | bytearray | memoryview) -> None:
        """Put the raw Data of one Object at its place; `kv` is a K then a V section.

        `block` counts from the assembly's first row. Raises ValueError for Data of
        another length or a block that was written before, IndexError for a block outside.
        """
        view = memoryview(data).cast("B")
        halves = (Component.K, Component.V) if component is Component.KV else (component,)
        if len(view) != len(halves) * self._section:
            raise ValueError(
                f"{len(view)} octets instead of {len(halves) * self._section} "
                f"for {component.label} of a block"
            )
        if not 0 <= block < self.blocks:
            raise IndexError(f"block {block} is outside the {self.blocks} blocks of this layer")
        for half in halves:
            if self._written[half][block]:
                raise ValueError(f"block {block} of {half.label} was written before")
        start = block * self._section
        for index, half in enumerate(halves):
            self._views[half][start : start + self._section] = view[
                index * self._section : (index + 1) * self._section
            ]
            self._written[half][block] = 1
            self._left[half] -= 1

    @property
    def complete(self) -> bool:
        """Whether every block of K and of V is there."""
        return not any(self._left.values())

    def missing(self, component: Component) -> list[int]:
        """The blocks still to be written: of K, of V, or of either for `kv`."""
        halves = (Component.K, Component.V) if component is Component.KV else (component,)
        return [
            block
            for block in range(self.blocks)
            if not all(self._written[half][block] for half in halves)
        ]


def _little(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")
