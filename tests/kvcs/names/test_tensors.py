"""Layout "kvsp-layout-1" as views of arrays, and layers put together from blocks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcs.names.codes import Component
from kvcs.names.tensors import (
    LayerAssembly,
    allocate,
    block_section,
    check_tensor,
    is_layout_1,
    octets_of,
    to_layout_1,
)
from kvsp.names.codes import ElementType
from kvsp.names.errors import DecodeError
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


@pytest.mark.parametrize("vector", VECTORS["elements"], ids=lambda v: v["kv_dtype"])
def test_elements_are_stored_little_endian(vector: dict[str, Any]) -> None:
    element = ElementType(vector["kv_dtype"])
    assert element.octets == vector["octets"]
    values = np.array([float(value) for value in vector["values"]])
    tensor = values.astype(element.dtype).reshape(-1, 1, 1)
    assert octets_of(tensor).tobytes().hex() == vector["hex"]
    back = np.frombuffer(bytes.fromhex(vector["hex"]), element.dtype).astype(float)
    for value, expected in zip(back, values, strict=True):
        assert value == expected or (math.isnan(value) and math.isnan(expected))


def test_the_token_index_varies_slowest_and_the_dimension_fastest() -> None:
    vector, fp16 = VECTORS["layout"]
    t, h, d = np.indices((vector["token_count"], vector["kv_heads"], vector["head_dim"]))
    k = (100 * t + 10 * h + d).astype("i1")
    assert block_section(k, 0, 2).hex() == vector["k_hex"]
    assert block_section(-k, 0, 2).hex() == vector["v_hex"]
    halves = np.array(fp16["k_values"], "<f2").reshape(2, 1, 2)
    assert block_section(halves, 0, 2).hex() == fp16["k_hex"]


@pytest.mark.parametrize("element", ElementType)
def test_a_block_section_is_a_view_of_its_rows(element: ElementType) -> None:
    tensor = numbered(10, element.dtype)
    for block in range(2):
        section = block_section(tensor, block, 4)
        assert section.readonly and section.contiguous and section.format == "B"
        assert np.shares_memory(np.frombuffer(section, np.uint8), tensor)
        assert section == tensor[block * 4 : block * 4 + 4].tobytes()


def test_rows_of_a_read_only_map_are_views_too(tmp_path: Path) -> None:
    numbered(8).tofile(tmp_path / "rows")
    tensor = np.memmap(tmp_path / "rows", "<f2", "r", shape=(8, 2, 3))
    section = block_section(tensor, 1, 4)
    assert section == numbered(8)[4:].tobytes()
    assert np.shares_memory(np.frombuffer(section, np.uint8), tensor)


def test_an_incomplete_block_has_no_section() -> None:
    for block in (2, 3, 10**12):
        with pytest.raises(IndexError):
            block_section(numbered(11), block, 4)
    with pytest.raises(ValueError):
        block_section(numbered(11), -1, 4)


def test_other_memory_is_converted_only_when_asked() -> None:
    plain = numbered(8)
    for tensor in (plain.astype(">f2"), np.asfortranarray(plain), plain[::-1], plain[:, ::-1]):
        assert not is_layout_1(tensor)
        with pytest.raises(ValueError, match="to_layout_1"):
            block_section(tensor, 0, 4)
        with pytest.raises(ValueError, match="to_layout_1"):
            check_tensor(tensor, SMALL)
        converted = to_layout_1(tensor)
        assert is_layout_1(converted) and (converted == tensor).all()
        check_tensor(converted, SMALL)
    assert to_layout_1(plain) is plain
    for flat in (plain.reshape(-1), plain.reshape(8, 6)):
        with pytest.raises(ValueError):
            to_layout_1(flat)
        with pytest.raises(ValueError):
            block_section(flat, 0, 4)
    with pytest.raises(ValueError):
        octets_of(plain[:, ::-1])


def test_a_tensor_of_another_geometry_is_refused_before_data_flows() -> None:
    check_tensor(numbered(8), SMALL)
    with pytest.raises(ValueError, match="fp16"):
        check_tensor(numbered(8, ElementType.BF16.dtype), SMALL)
    with pytest.raises(ValueError, match="shape"):
        check_tensor(numbered(8).reshape(8, 3, 2), SMALL)
    with pytest.raises(DecodeError, match="codec-unsupported"):
        check_tensor(numbered(8), Descriptor.parse(SMALL.to_dict() | {"kv_dtype": "float16"}))


def test_a_layer_is_usable_when_every_block_of_k_and_v_is_there() -> None:
    k, v = numbered(12), -numbered(12)
    layer = LayerAssembly(SMALL, 3)
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
    layer = LayerAssembly(SMALL, 2)
    for block in range(2):
        data = bytes(block_section(k, block, 4)) + bytes(block_section(v, block, 4))
        layer.write(Component.KV, block, data)
    assert layer.complete and (layer.k == k).all() and (layer.v == v).all()


@pytest.mark.parametrize("cuts", [(24,), (48,), (0, 5, 48, 48, 61, 96), range(1, 96)])
def test_data_that_comes_in_parts_is_written_as_if_it_came_whole(cuts: Sequence[int]) -> None:
    k, v = numbered(8), -numbered(8)
    layer, halves = LayerAssembly(SMALL, 2), LayerAssembly(SMALL, 2)
    for block in range(2):
        sections = block_section(k, block, 4), block_section(v, block, 4)
        layer.write(Component.KV, block, *parts_of(b"".join(sections), cuts))
        for half, section in zip((Component.K, Component.V), sections, strict=True):
            halves.write(half, block, *parts_of(section, [cut // 2 for cut in cuts]))
    for written in (layer, halves):
        assert written.complete and (written.k == k).all() and (written.v == v).all()
    with pytest.raises(ValueError, match="octets"):
        LayerAssembly(SMALL, 2).write(Component.KV, 0, *parts_of(bytes(97), cuts))


@pytest.mark.parametrize("half", [Component.K, Component.V])
def test_a_kv_object_of_which_a_half_is_there_changes_nothing(half: Component) -> None:
    layer = LayerAssembly(SMALL, 1)
    layer.write(half, 0, bytes(48))
    with pytest.raises(ValueError, match="written before"):
        layer.write(Component.KV, 0, b"\xff" * 48, b"\xff" * 48)
    assert not layer.k.any() and not layer.v.any()
    other = Component.V if half is Component.K else Component.K
    assert layer.missing(other) == [0] and layer.missing(half) == [] and not layer.complete


def test_a_block_is_written_once_and_whole() -> None:
    layer = LayerAssembly(SMALL, 2)
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
    layer = LayerAssembly(SMALL, 2, k=k, v=v)
    layer.write(Component.K, 1, block_section(numbered(8), 1, 4))
    assert (k[4:8] == numbered(8)[4:]).all() and not k[8:].any() and not k[:4].any()
    assert k.dtype == SMALL.dtype and k.shape == (9, 2, 3)


def test_arrays_that_cannot_take_the_layer_are_refused() -> None:
    frozen = allocate(SMALL, 8)
    frozen.flags.writeable = False
    for k in (allocate(SMALL, 7), numbered(8, "<f4"), np.asfortranarray(numbered(8)), frozen):
        with pytest.raises(ValueError):
            LayerAssembly(SMALL, 2, k=k)
    with pytest.raises(ValueError):
        LayerAssembly(SMALL, 0)
