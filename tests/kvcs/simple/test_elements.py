"""Object Payload: a token in each compression."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.simple.elements import decode_tokens, encode_tokens, token_octets
from kvcs.simple.names import Compression
from tests.kvcs.simple.support import FP16, TOKENS, of_type, payloads, random_values, values

ALL = list(Compression)
SCALED = {Compression.FP8: 448, Compression.INT8: 127, Compression.FP4: 6, Compression.INT4: 7}


@pytest.mark.parametrize("compression", ALL)
def test_a_token_is_encoded_as_the_vectors_have_it(compression: Compression) -> None:
    rows = encode_tokens(compression, values(), FP16)
    assert [row.tobytes() for row in rows] == [v for _, v in sorted(payloads(compression).items())]
    assert rows.shape == (TOKENS, token_octets(compression, FP16))


@pytest.mark.parametrize("compression", ALL)
@pytest.mark.parametrize("kv_dtype", ["fp16", "bf16", "fp32", "fp8-e4m3", "int8"])
def test_every_element_type_comes_back_as_near_as_the_compression_holds_it(
    compression: Compression, kv_dtype: str
) -> None:
    descriptor = of_type(kv_dtype, kv_heads=3, head_dim=6)
    cache = random_values(descriptor, 5)
    rows = encode_tokens(compression, cache, descriptor)
    back = decode_tokens(compression, rows, descriptor)
    assert back.dtype == descriptor.dtype and back.shape == cache.shape
    wide = cache.astype(np.float32)
    # half a step of the compression, and what the type of the result rounds
    peak = np.abs(wide).max(axis=-1, keepdims=True)
    step = peak / SCALED.get(compression, 256)
    if compression in (Compression.FP8, Compression.FP4):
        step = peak / (16 if compression is Compression.FP8 else 5)
    if kv_dtype == "fp8-e4m3":
        step = step + peak / 8
    if kv_dtype == "int8":
        step = step + 1
    assert (np.abs(back.astype(np.float32) - wide) <= step).all()


@pytest.mark.parametrize(
    ("compression", "kv_dtype"), [(Compression.FP16, "fp16"), (Compression.BF16, "bf16")]
)
def test_the_same_element_type_comes_back_bit_for_bit(
    compression: Compression, kv_dtype: str
) -> None:
    descriptor = of_type(kv_dtype)
    octets = bytes(range(256)) * 4  # infinities, NaN and subnormals among them
    cache = np.frombuffer(octets, np.uint8).view(descriptor.dtype)
    cache = cache.reshape(-1, descriptor.layers, 2, descriptor.kv_heads, descriptor.head_dim)
    rows = encode_tokens(compression, cache, descriptor)
    back = decode_tokens(compression, rows, descriptor)
    assert back.tobytes() == cache.tobytes() == octets


@pytest.mark.parametrize("compression", [each for each in ALL if each in SCALED])
def test_a_head_of_zeros_has_scale_0(compression: Compression) -> None:
    cache = np.zeros((1, FP16.layers, 2, FP16.kv_heads, FP16.head_dim), FP16.dtype)
    rows = encode_tokens(compression, cache, FP16)
    assert not rows.any()
    assert not decode_tokens(compression, rows, FP16).any()


@pytest.mark.parametrize("compression", [each for each in ALL if each is not Compression.FP16])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_a_compression_cannot_hold_is_refused(compression: Compression, value: float) -> None:
    cache = random_values(FP16, 1)
    cache[0, 1, 1, 0, 2] = value
    with pytest.raises(ValueError, match=f"{compression} cannot hold"):
        encode_tokens(compression, cache, FP16)


def test_a_value_beyond_half_precision_is_refused_and_not_made_infinite() -> None:
    descriptor = of_type("bf16")
    cache = random_values(descriptor, 1)
    cache[0, 0, 0, 0, 0] = 1e6
    with pytest.raises(ValueError, match="FP16 cannot hold"):
        encode_tokens(Compression.FP16, cache, descriptor)


@pytest.mark.parametrize("compression", [Compression.FP4, Compression.INT4])
def test_an_odd_last_element_has_an_octet_of_its_own(compression: Compression) -> None:
    descriptor = of_type("fp32", head_dim=5)
    cache = random_values(descriptor, 2)
    assert token_octets(compression, descriptor) == 2 * 2 * (4 + 3)
    back = decode_tokens(compression, encode_tokens(compression, cache, descriptor), descriptor)
    assert back.shape == cache.shape and (np.sign(back) * np.sign(cache) >= 0).all()


@given(st.sampled_from(ALL), st.data())
def test_any_octets_of_the_right_length_decode(
    compression: Compression, data: st.DataObject
) -> None:
    length = token_octets(compression, FP16)
    octets = data.draw(st.binary(min_size=length, max_size=length))
    for kv_dtype in ("fp16", "int8", "fp8-e5m2"):
        rows = np.frombuffer(octets, np.uint8).reshape(1, -1)
        back = decode_tokens(compression, rows, of_type(kv_dtype))
        assert back.shape == (1, FP16.layers, 2, FP16.kv_heads, FP16.head_dim)
