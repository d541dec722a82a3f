"""Codec x-zstd: one zstd frame (RFC 8878) of a section whose octets were shuffled.

Frames that are compared with are put together here by hand, from the RFC.
"""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvsp.blocks.codecs import decode_section, encode_section
from kvsp.blocks.layout import octets_of
from kvsp.names.codes import Codec
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from tests.kvsp.support_vectors import geometry, name_of, stream

MAGIC = bytes.fromhex("28b52ffd")
SMALL = geometry(layers=4, kv_heads=2, head_dim=2, kv_dtype="fp16", block_tokens=2)
RAW = stream("zstd", SMALL.section_octets())
SHUFFLED = RAW[0::2] + RAW[1::2]


def block(data: bytes, *, last: bool = True) -> bytes:
    """A Raw_Block."""
    return struct.pack("<I", len(data) << 3 | last)[:3] + data


def frame(data: bytes, claimed: int | None = None) -> bytes:
    """A frame of a single segment whose Frame_Content_Size has one octet."""
    return MAGIC + bytes([0x20, len(data) if claimed is None else claimed]) + block(data)


def windowed(window_log: int) -> bytes:
    """A frame with a Window_Descriptor, and a content size of four octets."""
    descriptor = bytes([0x80, window_log - 10 << 3])
    return MAGIC + descriptor + struct.pack("<I", len(RAW)) + block(SHUFFLED)


def refusal(section: bytes, descriptor: Descriptor = SMALL) -> str:
    return name_of(decode_section, Codec.X_ZSTD, section, descriptor)


def test_a_section_is_a_frame_of_the_first_octets_then_the_second_ones() -> None:
    assert decode_section(Codec.X_ZSTD, frame(SHUFFLED), SMALL) == RAW
    assert zstandard.decompress(encode_section(Codec.X_ZSTD, RAW, SMALL)) == SHUFFLED


def test_elements_of_one_octet_stay_in_their_order() -> None:
    descriptor = geometry(layers=1, kv_heads=2, head_dim=2, kv_dtype="int8", block_tokens=2)
    raw = bytes(range(8))
    assert decode_section(Codec.X_ZSTD, frame(raw), descriptor) == raw


def test_elements_of_four_octets_are_shuffled_octet_by_octet() -> None:
    descriptor = geometry(layers=1, kv_heads=1, head_dim=2, kv_dtype="fp32", block_tokens=1)
    assert decode_section(Codec.X_ZSTD, frame(bytes.fromhex("0004010502060307")), descriptor) == (
        bytes(range(8))
    )


def test_the_frame_says_its_content_size_and_no_window_beyond_it() -> None:
    descriptor = geometry(layers=1, kv_heads=8, head_dim=128, kv_dtype="bf16", block_tokens=2048)
    for raw in (RAW * 262_144, bytes(descriptor.section_octets())):
        section = encode_section(Codec.X_ZSTD, raw, descriptor)
        said = zstandard.get_frame_parameters(section)
        assert said.content_size == len(raw) and said.window_size <= len(raw)
        assert said.dict_id == 0
        assert decode_section(Codec.X_ZSTD, section, descriptor) == raw


def test_a_window_is_no_larger_than_the_section_or_the_least_there_is() -> None:
    assert decode_section(Codec.X_ZSTD, windowed(10), SMALL) == RAW
    for window_log in (11, 27, 31):
        assert refusal(windowed(window_log)) == "section-length"


@pytest.mark.parametrize(
    "section",
    [
        b"",
        MAGIC,
        frame(SHUFFLED)[:-1],
        frame(SHUFFLED) + b"x",
        frame(SHUFFLED) + frame(b""),
        frame(SHUFFLED[:-1]),
        frame(SHUFFLED, claimed=len(RAW) + 1),
        frame(SHUFFLED + b"x", claimed=len(RAW)),
        frame(SHUFFLED[:-1], claimed=len(RAW)),
        MAGIC + bytes([0x00, 0x00]) + block(SHUFFLED),  # no content size
        MAGIC + bytes([0x21, 7, len(RAW)]) + block(SHUFFLED),  # dictionary 7
        b"\x50\x2a\x4d\x18" + struct.pack("<I", len(RAW)) + RAW,  # a skippable frame
        b"\x50\x2a\x4d\x18" + struct.pack("<I", 0) + frame(SHUFFLED),
    ],
)
def test_anything_but_one_whole_frame_of_the_raw_length_is_refused(section: bytes) -> None:
    assert refusal(section) == "section-length"


def test_a_bomb_is_refused_by_what_it_says_before_anything_is_inflated() -> None:
    huge = MAGIC + bytes([0xE0]) + struct.pack("<Q", 1 << 60) + block(b"")
    assert refusal(huge) == "section-length"
    assert refusal(zstandard.compress(bytes(50_000_000))) == "section-length"
    # a small window, and room for the whole content all the same
    small = zstandard.ZstdCompressionParameters(window_log=10, write_content_size=True)
    frame = zstandard.ZstdCompressor(compression_params=small).compress(bytes(1 << 26))
    tracemalloc.start()
    try:
        assert refusal(frame) == "section-length"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_bomb_that_says_too_little_is_inflated_no_further_than_that() -> None:
    # 128 KiB from each RLE_Block of four octets
    repeated = struct.pack("<I", 131_072 << 3 | 2)[:3] + b"\0"
    bomb = MAGIC + bytes([0x20, len(RAW)]) + repeated * 400 + block(b"")
    assert refusal(bomb) == "section-length"


@given(st.binary(min_size=len(RAW), max_size=len(RAW)), st.data())
def test_a_changed_frame_gives_a_raw_section_or_is_refused(raw: bytes, data: st.DataObject) -> None:
    section = bytearray(encode_section(Codec.X_ZSTD, raw, SMALL))
    at = data.draw(st.integers(0, len(section) - 1))
    section[at] = data.draw(st.integers(0, 255))
    try:
        assert len(decode_section(Codec.X_ZSTD, section, SMALL)) == len(RAW)
    except DecodeError as error:
        assert error.name == "section-length"


def test_shuffled_bfloat16_takes_less_room_than_as_it_is() -> None:
    descriptor = geometry(layers=1, kv_heads=8, head_dim=64, kv_dtype="bf16", block_tokens=16)
    values = np.random.default_rng(7).normal(size=(16, 8, 64)).astype(descriptor.dtype)
    raw = octets_of(values)
    assert len(encode_section(Codec.X_ZSTD, raw, descriptor)) < len(zstandard.compress(raw))
