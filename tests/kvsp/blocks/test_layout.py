"""Layout "kvsp-layout-1" as views of arrays."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsp.blocks.layout import block_section, check_tensor, is_layout_1, octets_of, to_layout_1
from kvsp.names.codes import ElementType
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from tests.paths import DATA

VECTORS: dict[str, Any] = json.loads((DATA / "kvsp-vectors.json").read_text("utf-8"))
SEED = VECTORS["compat_id"][0]["descriptor"]
SMALL = Descriptor.parse(
    SEED | {"kv_heads": 2, "head_dim": 3, "block_tokens": 4, "kv_dtype": "fp16", "layers": 2}
)


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
