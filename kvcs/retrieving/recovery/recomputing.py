"""The last way: the layers are computed anew (KVCS "Verification and Recovery")."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

from kvcs.finding.relays import Fallback, Recompute
from kvcs.names.errors import MisuseError, RetrievalError
from kvcs.retrieving.layers import Layer, LayerBuffer
from kvsp.blocks.layout import block_section, check_tensor
from kvsp.blocks.tensors import as_array

RECOMPUTED: Final = "recomputed"
"""The source of what was computed anew."""


async def or_recomputed(
    retrieved: AsyncGenerator[Layer, None],
    fallback: Fallback | None,
    anew: Callable[[RetrievalError], tuple[LayerBuffer, int]],
) -> AsyncGenerator[Layer, None]:
    """What is `retrieved`, or, when that fails and it can be, everything computed anew into what
    `anew` gives: a buffer, and how many blocks. Raises what `retrieved` raises."""
    try:
        async with aclosing(retrieved) as run:
            async for layer in run:
                yield layer
        return
    except RetrievalError as error:
        if fallback is None or fallback.recompute is None:
            raise
        buffer, blocks = anew(error)
        if not blocks:
            raise
    async with aclosing(recomputed(fallback.recompute, buffer, blocks)) as run:
        async for layer in run:
            yield layer


async def recomputed(
    recompute: Recompute, buffer: LayerBuffer, blocks: int
) -> AsyncGenerator[Layer, None]:
    """The layers of `buffer`, of `blocks` blocks, as `recompute` gives them.

    Raises MisuseError when it gives something else than what it was asked for.
    """
    rows = buffer.descriptor.block_tokens
    buffer.begin([range(blocks)])
    async for index, k, v in recompute(buffer.layers, blocks * rows):
        arrays = []
        for name, tensor in (("k", k), ("v", v)):
            try:
                arrays.append(array := as_array(tensor))
                check_tensor(array, buffer.descriptor)
            except ValueError as error:
                raise MisuseError(f"recompute: layer {index}: {name}: {error}") from None
            if len(array) < blocks * rows:
                raise MisuseError(f"recompute: layer {index}: {name} has {len(array)} tokens")
        for block in range(blocks):
            k_section, v_section = (block_section(array, block, rows) for array in arrays)
            buffer.block_received(block, index, k_section, v_section, RECOMPUTED)
        while buffer.ready:
            yield buffer.ready.popleft()
    if not buffer.whole:
        raise MisuseError("recompute did not give every layer that it was asked for")
