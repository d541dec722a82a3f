"""A token's payload in each compression ("Compression of KVCache", Object Payload).

Of all layers, ascending: K then V, head by head, `head_dim` elements, little-endian. In Int8,
FP8, FP4 and Int4 a binary32 scale stands before the elements of each head, and in the last two
each octet holds two elements, the first in its low half. The draft leaves all of that open:
these are decisions.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvcs.simple.names import Compression
from kvsp.names.identity import Descriptor

_SCALE_OCTETS: Final = 4


class _Scaled(NamedTuple):
    """How elements of a scaled compression are held."""

    largest: float
    """What the largest value of a head becomes."""
    bits: int
    dtype: np.dtype[Any] | None = None
    """None for integers."""


_PLAIN: Final = {
    Compression.FP16: np.dtype("<f2"),
    Compression.BF16: np.dtype(ml_dtypes.bfloat16).newbyteorder("<"),
}
_SCALED: Final = {
    Compression.FP8: _Scaled(448.0, 8, np.dtype(ml_dtypes.float8_e4m3fn)),
    Compression.INT8: _Scaled(127.0, 8),
    Compression.FP4: _Scaled(6.0, 4, np.dtype(ml_dtypes.float4_e2m1fn)),
    Compression.INT4: _Scaled(7.0, 4),
}

Octets = NDArray[np.uint8]


def token_octets(compression: Compression, descriptor: Descriptor) -> int:
    """Octets of the payload of one token."""
    return 2 * descriptor.layers * descriptor.kv_heads * _head_octets(compression, descriptor)


def encode_tokens(compression: Compression, values: NDArray[Any], descriptor: Descriptor) -> Octets:
    """The payloads of some tokens, `[tokens, octets]`.

    `values` is `[tokens, layers, 2, kv_heads, head_dim]`, K before V, of the descriptor's element
    type. Raises ValueError for values that the compression cannot hold: infinities, NaN and what
    is too large, except where nothing is converted.
    """
    heads = values.reshape(values.shape[0], -1, descriptor.head_dim)
    plain = _PLAIN.get(compression)
    if plain is not None:
        held = heads
        if heads.dtype != plain:
            with np.errstate(over="ignore"):
                held = _finite(heads.astype(plain), compression)
        return np.ascontiguousarray(held).view(np.uint8).reshape(values.shape[0], -1)
    form = _SCALED[compression]
    wide = _finite(heads.astype(np.float32), compression)
    scale = np.abs(wide).max(axis=2, keepdims=True) / np.float32(form.largest)
    quotient = np.divide(wide, scale, out=np.zeros_like(wide), where=scale > 0)
    # a scale that is subnormal is too coarse to hold the quotient within its limits
    quotient = np.clip(quotient, -form.largest, form.largest)
    codes = (
        np.rint(quotient).astype(np.int8).view(np.uint8)
        if form.dtype is None
        else quotient.astype(form.dtype).view(np.uint8)
    )
    rows = np.concatenate(
        (scale.astype("<f4").view(np.uint8), codes if form.bits == 8 else _in_halves(codes)), axis=2
    )
    return rows.reshape(values.shape[0], -1)


def decode_tokens(
    compression: Compression, payloads: Octets, descriptor: Descriptor
) -> NDArray[Any]:
    """What `encode_tokens` was given, as near as the compression holds it.

    `payloads` is `[tokens, token_octets]`. A scale is the publisher's: one that is too large, or
    no number, makes elements that are none, and is no error.
    """
    tokens = payloads.shape[0]
    shape = (tokens, descriptor.layers, 2, descriptor.kv_heads, descriptor.head_dim)
    plain = _PLAIN.get(compression)
    if plain is not None:
        elements = np.ascontiguousarray(payloads).view(plain)
        return _as_type(elements, descriptor).reshape(shape)
    form = _SCALED[compression]
    rows = payloads.reshape(tokens, -1, _head_octets(compression, descriptor))
    scale = np.ascontiguousarray(rows[..., :_SCALE_OCTETS]).view("<f4")
    held = np.ascontiguousarray(rows[..., _SCALE_OCTETS:])
    codes = held if form.bits == 8 else _of_halves(held)[..., : descriptor.head_dim]
    if form.dtype is not None:
        quotient = codes.view(form.dtype).astype(np.float32)
    elif form.bits == 8:
        quotient = codes.view(np.int8).astype(np.float32)
    else:
        quotient = ((codes ^ 8).astype(np.int8) - 8).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return _as_type(scale * quotient, descriptor).reshape(shape)


def _head_octets(compression: Compression, descriptor: Descriptor) -> int:
    plain = _PLAIN.get(compression)
    if plain is not None:
        return descriptor.head_dim * int(plain.itemsize)
    halves = descriptor.head_dim * _SCALED[compression].bits // 4
    return _SCALE_OCTETS + (halves + 1) // 2


def _finite(values: NDArray[Any], compression: Compression) -> NDArray[Any]:
    if not np.isfinite(values).all():
        raise ValueError(f"{compression} cannot hold every value of this cache")
    return values


def _as_type(values: NDArray[Any], descriptor: Descriptor) -> NDArray[Any]:
    dtype = descriptor.dtype
    if dtype.kind != "i":
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(dtype, copy=False)
    limits = np.iinfo(np.int8)
    rounded = np.rint(np.nan_to_num(values.astype(np.float32)))
    return np.clip(rounded, limits.min, limits.max).astype(dtype)


def _in_halves(codes: Octets) -> Octets:
    """Two elements to an octet, the first in its low half; an odd last one stands alone."""
    if codes.shape[2] % 2:
        codes = np.pad(codes, ((0, 0), (0, 0), (0, 1)))
    low, high = codes[..., ::2] & np.uint8(15), codes[..., 1::2] << np.uint8(4)
    return (low | high).astype(np.uint8, copy=False)


def _of_halves(held: Octets) -> Octets:
    return np.stack((held & 15, held >> 4), axis=3).reshape(*held.shape[:2], -1)
