"""How a K or V section is encoded: the "KVSP Codecs" registry, section by section.

A section is encoded from, and decoded to, its raw octets (layout "kvsp-layout-1").
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final

import numpy as np
import zstandard

from kvsp.blocks.layout import Octets, octets_of, section_tensor
from kvsp.names.codes import Codec, DecodeErrorName
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor

_Q8_MAX = 127
_SCALE_OCTETS = 4

_ZSTD_LEVEL: Final = 3
_ZSTD_LEAST_WINDOW: Final = 1024
"""No frame can say a smaller window, unless it is a single segment (RFC 8878 3.1.1.1.2)."""


def known_codec(value: int) -> Codec:
    """The codec of a registry value. Raises DecodeError `codec-unsupported`."""
    try:
        return Codec(value)
    except ValueError:
        raise DecodeError(
            DecodeErrorName.CODEC_UNSUPPORTED,
            f"codec {value} is not known (known: {', '.join(str(int(codec)) for codec in Codec)})",
        ) from None


def section_bounds(codec: Codec, descriptor: Descriptor) -> range:
    """The lengths a section of one block may have in octets.

    Exactly the raw length for `raw`; up to twice that and 1,024 for every other codec.
    Raises DecodeError `codec-unsupported` for a descriptor that cannot be read raw.
    """
    raw = descriptor.section_octets()
    if codec is Codec.RAW:
        return range(raw, raw + 1)
    return range(2 * raw + 1024 + 1)


def encode_section(codec: Codec, raw: Octets, descriptor: Descriptor) -> memoryview:
    """The section of one block from its raw octets; for `raw` those octets themselves.

    Raises DecodeError `section-length` for octets that are not one raw section,
    `codec-unsupported` when the codec cannot hold them: `x-q8` holds finite numbers
    only, and no codec may exceed `section_bounds`.
    """
    octets = memoryview(raw).cast("B")
    _check_raw(len(octets), descriptor)
    if codec is Codec.RAW:
        return octets
    section = _ENCODERS[codec](octets, descriptor)
    if len(section) not in section_bounds(codec, descriptor):
        raise DecodeError(
            DecodeErrorName.CODEC_UNSUPPORTED,
            f"{codec.label} makes {len(section)} octets of {len(octets)}, more than it may",
        )
    return section


def decode_section(codec: Codec, section: Octets, descriptor: Descriptor) -> memoryview:
    """The raw octets of one block's section; for `raw` the section itself.

    Takes no more memory than raw sections do, whatever the section says: nothing is inflated
    further than one octet past the raw length. A lossy codec gives the nearest element of the
    descriptor's type. Raises DecodeError `section-length` when
    the section does not decode to exactly the raw length, `codec-unsupported` for a
    descriptor that cannot be read raw.
    """
    octets = memoryview(section).cast("B")
    if codec is Codec.RAW:
        _check_raw(len(octets), descriptor)
        return octets
    return _DECODERS[codec](octets, descriptor)


def transcode_section(
    source: Codec, target: Codec, section: Octets, descriptor: Descriptor
) -> memoryview:
    """A section in another codec (KVSP "Block Retrieval and Storage": a holder MAY transcode).

    The section itself when both codecs are one. Raises as `decode_section` and
    `encode_section` do.
    """
    if source is target:
        return memoryview(section).cast("B")
    return encode_section(target, decode_section(source, section, descriptor), descriptor)


def _check_raw(length: int, descriptor: Descriptor) -> None:
    raw = descriptor.section_octets()
    if length != raw:
        raise _wrong_length(f"{length} octets where a raw section has {raw}")


def _wrong_length(detail: str) -> DecodeError:
    return DecodeError(DecodeErrorName.SECTION_LENGTH, detail)


# --- x-zlib --------------------------------------------------------------------------


def _deflate(raw: memoryview, descriptor: Descriptor) -> memoryview:
    return memoryview(zlib.compress(raw, 1))


def _inflate(section: memoryview, descriptor: Descriptor) -> memoryview:
    raw_octets = descriptor.section_octets()
    stream = zlib.decompressobj()
    try:
        # one octet more is asked for, to tell the right length from a longer one
        raw = stream.decompress(section, raw_octets + 1)
    except zlib.error:
        raise _wrong_length(f"no zlib stream of {raw_octets} octets") from None
    if len(raw) > raw_octets:
        raise _wrong_length(f"inflates to more than the {raw_octets} octets of a raw section")
    if len(raw) < raw_octets or not stream.eof:
        raise _wrong_length(f"the zlib stream ends after {len(raw)} of {raw_octets} octets")
    if stream.unused_data:
        raise _wrong_length("octets follow the zlib stream")
    return memoryview(raw)


# --- x-zstd --------------------------------------------------------------------------
# one frame (RFC 8878) of the shuffled section: the first octets of all elements, then the
# second ones, and so on. The frame says its content size and needs no dictionary; its window
# is no larger than the raw section.


def _pack(raw: memoryview, descriptor: Descriptor) -> memoryview:
    elements = np.frombuffer(raw, np.uint8).reshape(-1, descriptor.dtype.itemsize)
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True)
    return memoryview(compressor.compress(octets_of(np.ascontiguousarray(elements.T))))


def _unpack(section: memoryview, descriptor: Descriptor) -> memoryview:
    raw_octets = descriptor.section_octets()
    if section[:4] != zstandard.FRAME_HEADER:  # a skippable frame has another one
        raise _wrong_length("no zstd frame")
    # what the frame says is looked at before anything is allocated for it
    try:
        frame = zstandard.get_frame_parameters(section)
        if frame.content_size != raw_octets:
            raise _wrong_length(f"the zstd frame is not one of {raw_octets} octets")
        if frame.window_size > max(raw_octets, _ZSTD_LEAST_WINDOW):
            raise _wrong_length(f"the zstd frame wants a window of {frame.window_size} octets")
        if frame.dict_id:
            raise _wrong_length("the zstd frame wants a dictionary")
        shuffled = zstandard.ZstdDecompressor().decompress(section, allow_extra_data=False)
    except zstandard.ZstdError:
        raise _wrong_length(f"no zstd frame of {raw_octets} octets and nothing else") from None
    if len(shuffled) != raw_octets:
        raise _wrong_length(f"the zstd frame ends after {len(shuffled)} of {raw_octets} octets")
    elements = np.frombuffer(shuffled, np.uint8).reshape(descriptor.dtype.itemsize, -1)
    return octets_of(np.ascontiguousarray(elements.T))


# --- x-q8 ----------------------------------------------------------------------------
# per token and head: a scale (fp32, little-endian), then head_dim int8; value = scale * q


def _quantize(raw: memoryview, descriptor: Descriptor) -> memoryview:
    values = section_tensor(raw, descriptor).astype(np.float32)
    peak = np.abs(values).max(axis=2, keepdims=True)
    if not np.isfinite(peak).all():
        raise DecodeError(
            DecodeErrorName.CODEC_UNSUPPORTED,
            "x-q8 holds finite numbers only; use a lossless codec",
        )
    scale = peak / np.float32(_Q8_MAX)
    # a scale of 0 (all zero, or below the least fp32) stands for zeros
    quotient = np.divide(values, scale, out=np.zeros_like(values), where=scale > 0)
    tokens, heads, dim = values.shape
    rows = np.empty((tokens, heads, _SCALE_OCTETS + dim), np.uint8)
    rows[..., :_SCALE_OCTETS] = scale.astype("<f4").view(np.uint8)
    # a subnormal scale is coarse enough for a quotient beyond 127
    q = np.clip(np.rint(quotient), -_Q8_MAX, _Q8_MAX).astype(np.int8)
    rows[..., _SCALE_OCTETS:] = q.view(np.uint8)
    return octets_of(rows)


def _dequantize(section: memoryview, descriptor: Descriptor) -> memoryview:
    heads, dim, dtype = descriptor.kv_heads, descriptor.head_dim, descriptor.dtype
    descriptor.section_octets()  # refuses another layout
    expected = descriptor.block_tokens * heads * (_SCALE_OCTETS + dim)
    if len(section) != expected:
        raise _wrong_length(f"{len(section)} octets where a section of x-q8 has {expected}")
    rows = np.frombuffer(section, np.uint8).reshape(-1, heads, _SCALE_OCTETS + dim)
    scale = np.ascontiguousarray(rows[..., :_SCALE_OCTETS]).view("<f4")
    q = np.ascontiguousarray(rows[..., _SCALE_OCTETS:]).view(np.int8)
    # a scale is the producer's: one that overflows gives infinities or NaN, no error
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        values = scale * q.astype(np.float32)
        if dtype.kind == "i":
            limits = np.iinfo(np.int8)
            values = np.clip(np.rint(np.nan_to_num(values)), limits.min, limits.max)
        return octets_of(values.astype(dtype))


_Recode = Callable[[memoryview, Descriptor], memoryview]

_ENCODERS: Final[dict[Codec, _Recode]] = {
    Codec.X_ZLIB: _deflate,
    Codec.X_Q8: _quantize,
    Codec.X_ZSTD: _pack,
}
_DECODERS: Final[dict[Codec, _Recode]] = {
    Codec.X_ZLIB: _inflate,
    Codec.X_Q8: _dequantize,
    Codec.X_ZSTD: _unpack,
}
