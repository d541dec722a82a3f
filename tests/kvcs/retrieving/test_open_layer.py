"""Layers put together from blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvcs.names.codes import Component
from kvcs.retrieving.open_layer import OpenLayer
from kvsp.blocks.layout import allocate, block_section, octets_of
from kvsp.names.identity import Descriptor
from tests.paths import DATA

VECTORS: dict[str, Any] = json.loads((DATA / "kvsp-vectors.json").read_text("utf-8"))
SEED = VECTORS["compat_id"][0]["descriptor"]
SMALL = Descriptor.parse(
    SEED | {"kv_heads": 2, "head_dim": 3, "block_tokens": 4, "kv_dtype": "fp16", "layers": 2}
)


def parts_of(data: bytes | memoryview, cuts: Sequence[int]) -> list[memoryview]:
    view = memoryview(data)
    return [view[start:stop] for start, stop in pairwise((0, *cuts, len(view)))]


def numbered(tokens: int, dtype: Any = "<f2") -> Any:
    return np.arange(tokens * 6).reshape(tokens, 2, 3).astype(dtype)


def open_layer(blocks: int) -> OpenLayer:
    tokens = blocks * SMALL.block_tokens
    return OpenLayer(SMALL, blocks, k=allocate(SMALL, tokens), v=allocate(SMALL, tokens))


def test_a_layer_is_usable_when_every_block_of_k_and_v_is_there() -> None:
    k, v = numbered(12), -numbered(12)
    layer = open_layer(3)
    for block in (2, 0, 1):
        layer.write(Component.K, block, block_section(k, block, 4))
    assert layer.missing(Component.K) == [] and layer.missing(Component.V) == [0, 1, 2]
    for block in (0, 2):
        assert not layer.complete
        layer.write(Component.V, block, block_section(v, block, 4))
    assert not layer.complete and layer.missing(Component.KV) == [1]
    layer.write(Component.V, 1, block_section(v, 1, 4))
    assert layer.complete
    assert (layer.k == k).all() and (layer.v == v).all()


def test_a_kv_object_is_a_k_section_and_a_v_section() -> None:
    k, v = numbered(8), -numbered(8)
    layer = open_layer(2)
    for block in range(2):
        data = bytes(block_section(k, block, 4)) + bytes(block_section(v, block, 4))
        layer.write(Component.KV, block, data)
    assert layer.complete and (layer.k == k).all() and (layer.v == v).all()


@pytest.mark.parametrize("cuts", [(24,), (48,), (0, 5, 48, 48, 61, 96), range(1, 96)])
def test_data_that_comes_in_parts_is_written_as_if_it_came_whole(cuts: Sequence[int]) -> None:
    k, v = numbered(8), -numbered(8)
    layer, halves = open_layer(2), open_layer(2)
    for block in range(2):
        sections = block_section(k, block, 4), block_section(v, block, 4)
        layer.write(Component.KV, block, *parts_of(b"".join(sections), cuts))
        for half, section in zip((Component.K, Component.V), sections, strict=True):
            halves.write(half, block, *parts_of(section, [cut // 2 for cut in cuts]))
    for written in (layer, halves):
        assert written.complete and (written.k == k).all() and (written.v == v).all()
    with pytest.raises(ValueError, match="octets"):
        open_layer(2).write(Component.KV, 0, *parts_of(bytes(97), cuts))


@pytest.mark.parametrize("half", [Component.K, Component.V])
def test_a_kv_object_of_which_a_half_is_there_changes_nothing(half: Component) -> None:
    layer = open_layer(1)
    layer.write(half, 0, bytes(48))
    with pytest.raises(ValueError, match="written before"):
        layer.write(Component.KV, 0, b"\xff" * 48, b"\xff" * 48)
    assert not layer.k.any() and not layer.v.any()
    other = Component.V if half is Component.K else Component.K
    assert layer.missing(other) == [0] and layer.missing(half) == [] and not layer.complete


def test_a_block_is_written_once_and_whole() -> None:
    layer = open_layer(2)
    data = block_section(numbered(4), 0, 4)
    layer.write(Component.K, 0, data)
    with pytest.raises(ValueError, match="written before"):
        layer.write(Component.K, 0, bytes(len(data)))
    with pytest.raises(ValueError, match="written before"):
        layer.write(Component.KV, 0, bytes(2 * len(data)))
    assert layer.missing(Component.V) == [0, 1]
    for wrong in (b"", bytes(len(data) - 1), bytes(2 * len(data))):
        with pytest.raises(ValueError, match="octets"):
            layer.write(Component.V, 0, wrong)
    for outside in (-1, 2):
        with pytest.raises(IndexError):
            layer.write(Component.K, outside, data)
    assert octets_of(layer.k[:4]) == data


def test_a_layer_is_written_straight_into_the_arrays_given() -> None:
    k, v = allocate(SMALL, 9), allocate(SMALL, 8)
    layer = OpenLayer(SMALL, 2, k=k, v=v)
    layer.write(Component.K, 1, block_section(numbered(8), 1, 4))
    assert (k[4:8] == numbered(8)[4:]).all() and not k[8:].any() and not k[:4].any()
    assert k.dtype == SMALL.dtype and k.shape == (9, 2, 3)


def test_arrays_that_cannot_take_the_layer_are_refused() -> None:
    frozen = allocate(SMALL, 8)
    frozen.flags.writeable = False
    for k in (allocate(SMALL, 7), numbered(8, "<f4"), np.asfortranarray(numbered(8)), frozen):
        with pytest.raises(ValueError):
            OpenLayer(SMALL, 2, k=k, v=allocate(SMALL, 8))
    with pytest.raises(ValueError, match="no layer"):
        open_layer(0)
