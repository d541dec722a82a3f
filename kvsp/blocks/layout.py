"""Layout "kvsp-layout-1": tensors and their octets, without a copy (KVSP "KV Block Container").

A tensor is K or V of one layer: `[tokens, kv_heads, head_dim]`, C-contiguous and
little-endian, which is exactly the layout. Consecutive rows of such an array are
consecutive octets, so a block's section is a view, never a copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsp.blocks.tensors import as_array
from kvsp.names.codes import DecodeErrorName
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from kvsp.names.prefix import block_tokens_range, complete_blocks

Tensor = NDArray[Any]

Octets = bytes | bytearray | memoryview
"""Contiguous octets; of a memoryview, the octets in memory whatever its format."""


def is_layout_1(tensor: Tensor) -> bool:
    """Whether an array's octets in memory are those of "kvsp-layout-1"."""
    return tensor.ndim == 3 and tensor.flags.c_contiguous and tensor.dtype == _little(tensor.dtype)


def to_layout_1(tensor: Tensor) -> Tensor:
    """The array itself when it is in "kvsp-layout-1", else a converted copy.

    For arrays that are not C-contiguous or big-endian; values stay the same. A torch tensor on the
    CPU, or whatever has `__dlpack__`, is taken as well. Raises ValueError for an array that has not
    three dimensions.
    """
    tensor = as_array(tensor)
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


def section_tensor(section: Octets, descriptor: Descriptor) -> Tensor:
    """A raw section as `[tokens, kv_heads, head_dim]`: a view, writable when the octets are.

    Raises DecodeError `section-length` for octets that are no whole number of tokens,
    `codec-unsupported` for a descriptor that cannot be read raw.
    """
    octets = memoryview(section).cast("B")
    if len(octets) % descriptor.section_octets(1):
        raise DecodeError(
            DecodeErrorName.SECTION_LENGTH,
            f"{len(octets)} octets are no whole number of tokens of "
            f"{descriptor.section_octets(1)} octets",
        )
    # through uint8, because the element types of ml_dtypes have no buffer format
    elements = np.frombuffer(octets, np.uint8).view(descriptor.dtype)
    return elements.reshape(-1, descriptor.kv_heads, descriptor.head_dim)


def allocate(descriptor: Descriptor, tokens: int) -> Tensor:
    """A zeroed tensor `[tokens, kv_heads, head_dim]` of the descriptor's element type."""
    # zeroed, so that rows that never arrive hold nothing of this process's past
    return np.zeros((tokens, descriptor.kv_heads, descriptor.head_dim), descriptor.dtype)


def _little(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")
