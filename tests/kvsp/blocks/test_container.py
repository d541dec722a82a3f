"""Reading containers from any pieces, and codecs at their limits."""

from __future__ import annotations

import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.blocks.codecs import decode_section, encode_section, section_bounds, transcode_section
from kvsp.blocks.container import FIXED, Container, ContainerHeader, ContainerReader, decode
from kvsp.blocks.layout import octets_of, section_tensor
from kvsp.names.codes import Codec, DecodeErrorName, ElementType
from kvsp.names.errors import DecodeError
from tests.kvsp.support_vectors import geometry, name_of, stream

SMALL = geometry(layers=4, kv_heads=2, head_dim=2, kv_dtype="fp16", block_tokens=2)
RAW = SMALL.section_octets()
SECTIONS = [(stream(f"k{n}", RAW), stream(f"v{n}", RAW)) for n in range(4)]
WHOLE = Container.build(SMALL, SECTIONS)
DIGESTS = WHOLE.layer_digests()


def encoded(codec: Codec) -> bytes:
    sections = [
        (encode_section(codec, k, SMALL), encode_section(codec, v, SMALL)) for k, v in SECTIONS
    ]
    return b"".join(Container.build(SMALL, sections, codec=codec))


VALID = [encoded(Codec.RAW), encoded(Codec.X_ZLIB), b"".join(WHOLE.select(range(1, 3)))]


def outcome(pieces: list[bytes], **settings: Any) -> list[Any]:
    """The events of feeding pieces, and the error's name as the last item."""
    reader = ContainerReader(SMALL, **settings)
    events: list[Any] = []
    try:
        for piece in pieces:
            for event in reader.feed(piece):
                events.append(
                    event
                    if isinstance(event, ContainerHeader)
                    else (event.layer, bytes(event.k), bytes(event.v), event.digest)
                )
        reader.close()
    except DecodeError as error:
        events.append(error.name)
    return events


@st.composite
def container_octets(draw: st.DrawFn) -> bytes:
    octets = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(0, 2))):
        octets[draw(st.integers(0, len(octets) - 1))] = draw(st.integers(0, 255))
    return bytes(octets[: draw(st.integers(0, len(octets)))]) + draw(st.binary(max_size=2))


def cut(octets: bytes, borders: list[int]) -> list[bytes]:
    ends = [*sorted(border % (len(octets) + 1) for border in borders), len(octets)]
    return [octets[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(container_octets(), st.lists(st.integers(0, 10_000), max_size=8), st.booleans())
def test_where_the_octets_are_cut_makes_no_difference(
    octets: bytes, borders: list[int], verify: bool
) -> None:
    settings: dict[str, Any] = {"layer_digests": DIGESTS, "codec": 1} if verify else {}
    assert outcome(cut(octets, borders), **settings) == outcome([octets], **settings)
    settings["total_octets"] = len(octets)
    assert outcome(cut(octets, borders), **settings) == outcome([octets], **settings)


@given(st.binary(max_size=200) | container_octets(), st.sampled_from(list(ElementType)))
def test_no_octets_crash_the_reader(octets: bytes, element: ElementType) -> None:
    descriptor = geometry(layers=4, kv_heads=2, head_dim=2, kv_dtype=str(element), block_tokens=2)
    try:
        header, layers = decode(octets, descriptor)
        assert [part.layer for part in layers] == list(header.layers)
        for part in layers:
            assert len(part.decode(header.codec, descriptor)[0]) == descriptor.section_octets()
    except DecodeError as error:
        assert error.name in DecodeErrorName


def test_a_layer_is_given_as_soon_as_its_last_octet_is_there() -> None:
    octets = VALID[0]
    reader = ContainerReader(SMALL, layer_digests=DIGESTS)
    given_at = []
    for position in range(len(octets)):
        for event in reader.feed(octets[position : position + 1]):
            given_at.append((position + 1, getattr(event, "layer", "header")))
    start = len(WHOLE.header.encoded)
    ends = [(start + 2 * RAW * (layer + 1), layer) for layer in range(4)]
    assert given_at == [(start, "header"), *ends]
    assert reader.complete


def test_sections_within_one_feed_are_views_of_it() -> None:
    octets = bytearray(VALID[0])
    _, layers = decode(octets, SMALL)
    assert all(part.k.obj is octets and part.k.readonly for part in layers)


def test_a_container_in_another_codec_is_not_compared_with_the_records_digests() -> None:
    octets = encoded(Codec.X_ZLIB)
    decode(octets, SMALL, layer_digests=DIGESTS, codec=Codec.RAW)
    assert name_of(decode, octets, SMALL, layer_digests=DIGESTS) == "digest-mismatch"


def test_the_repr_digest_covers_the_flags_that_nothing_else_does() -> None:
    octets = bytearray(VALID[0])
    digest = WHOLE.repr_digest()
    decode(octets, SMALL, layer_digests=DIGESTS, repr_digest=digest)
    octets[5] = 1
    decode(octets, SMALL, layer_digests=DIGESTS)
    assert name_of(decode, octets, SMALL, repr_digest=digest) == "digest-mismatch"


def test_a_known_length_is_judged_before_any_section() -> None:
    octets = bytearray(VALID[0])
    octets[-1] ^= 1
    for total, name in ((len(octets) - 1, "truncated"), (len(octets) + 1, "trailing-octets")):
        reader = ContainerReader(SMALL, layer_digests=DIGESTS, total_octets=total)
        assert name_of(reader.feed, octets) == name
        assert reader.header is None


def test_after_an_error_every_call_raises_it() -> None:
    reader = ContainerReader(SMALL)
    assert name_of(reader.feed, b"KVB2") == "bad-magic"
    assert name_of(reader.feed, b"KVB1") == "bad-magic"
    assert name_of(reader.close) == "bad-magic"


def test_a_container_cannot_be_verified_with_digests_of_another_geometry() -> None:
    with pytest.raises(ValueError, match="3 layer digests for 4 layers"):
        ContainerReader(SMALL, layer_digests=DIGESTS[:3])


def test_a_length_field_reserves_nothing() -> None:
    big = (1 << 31) - 1
    descriptor = geometry(layers=big, kv_heads=big, head_dim=big, block_tokens=2)
    claims = ContainerHeader.of(Codec.RAW, 0, 2, [(descriptor.section_octets(),) * 2])
    many = bytearray(claims.encoded)
    many[12:16] = big.to_bytes(4)
    tracemalloc.start()
    try:
        for octets in (claims.encoded, bytes(many)):
            reader = ContainerReader(descriptor, repr_digest=bytes(32))
            reader.feed(octets + bytes(1000))
            assert name_of(reader.close) == "truncated"
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_of_several_faults_of_a_header_the_first_in_the_order_is_named() -> None:
    descriptor = geometry(layers=2, block_tokens=4)
    wrong = bytearray(FIXED.pack(b"KVB2", 2, 0, 9, 3, 0, 5))
    right = FIXED.pack(b"KVB1", 1, 0, 1, 0, 1, 4)
    named = []
    # magic, version, codec, Layer Count, First Layer, Token Count: mended one after the other
    for start, stop in ((0, 4), (4, 5), (6, 8), (12, 16), (8, 12), (16, 20)):
        named.append(name_of(decode, bytes(wrong) + bytes(16), descriptor))
        wrong[start:stop] = right[start:stop]
    named.append(name_of(decode, bytes(wrong) + bytes(16), descriptor))
    assert named == [
        "bad-magic",
        "bad-version",
        "codec-unsupported",
        "zero-layers",
        "layer-range",
        "token-count",
        "section-length",
    ]


def test_the_data_begin_after_20_octets_and_16_for_each_layer() -> None:
    whole = b"".join(WHOLE)
    assert whole[20:36] == 2 * RAW.to_bytes(8)
    assert whole[20 + 16 * 4 :] == b"".join(part for pair in SECTIONS for part in pair)
    assert WHOLE.total_octets == len(whole) == 20 + 4 * (16 + 2 * RAW)


@pytest.mark.parametrize("change", [(-2, 0), (2, 0), (0, -2), (0, 2), (-2, 2)])
def test_a_raw_section_has_the_length_of_the_geometry_k_and_v_alike(
    change: tuple[int, int],
) -> None:
    right = SMALL.block_tokens * SMALL.kv_heads * SMALL.head_dim * 2
    assert right == RAW
    k, v = right + change[0], right + change[1]
    octets = ContainerHeader.of(Codec.RAW, 0, SMALL.block_tokens, [(k, v)]).encoded + bytes(k + v)
    assert name_of(decode, octets, SMALL) == "section-length"


def test_a_geometry_that_nobody_can_read_is_an_unsupported_codec() -> None:
    for other in ({"kv_dtype": "float16"}, {"layout": "x-other"}):
        descriptor = geometry(**other)
        octets = ContainerHeader.of(Codec.RAW, 0, 4, [(8, 8)]).encoded
        assert name_of(decode, octets, descriptor) == "codec-unsupported"


def test_only_layers_that_are_there_are_selected() -> None:
    part = WHOLE.select(range(1, 3))
    assert part.select(range(2, 3)).header.layers == range(2, 3)
    assert part.header.lengths == ((RAW, RAW),) * 2
    for layers in (range(2), range(2, 4), range(1, 1), range(1, 3, 2), range(3, 1)):
        with pytest.raises(ValueError, match="not within"):
            part.select(layers)


def test_what_no_reader_would_take_is_not_built() -> None:
    for sections, first in (([], 0), (SECTIONS, 1), (SECTIONS, -1)):
        with pytest.raises(ValueError, match="not within 4 layers"):
            Container.build(SMALL, sections, first_layer=first)
    short = [(b"", b"")]
    assert name_of(Container.build, SMALL, short) == "section-length"
    long = [(bytes(2 * RAW + 1025), b"")]
    assert name_of(Container.build, SMALL, long, codec=Codec.X_ZLIB) == "section-length"


# --- codecs --------------------------------------------------------------------------


@given(st.binary(min_size=RAW, max_size=RAW), st.sampled_from([c for c in Codec if c.lossless]))
def test_a_lossless_codec_gives_the_raw_octets_back(raw: bytes, codec: Codec) -> None:
    section = encode_section(codec, raw, SMALL)
    assert len(section) in section_bounds(codec, SMALL)
    assert decode_section(codec, section, SMALL) == raw


@given(st.binary(max_size=3 * RAW), st.sampled_from(list(Codec)))
def test_no_section_crashes_a_codec(section: bytes, codec: Codec) -> None:
    try:
        assert len(decode_section(codec, section, SMALL)) == RAW
    except DecodeError as error:
        assert error.name == "section-length"


def test_a_section_is_one_whole_zlib_stream() -> None:
    raw = SECTIONS[0][0]
    good = zlib.compress(raw)
    for bad in (good[:-1], good + b"x", zlib.compress(raw[:-1]), good[:-4] + bytes(4), b""):
        assert name_of(decode_section, Codec.X_ZLIB, bad, SMALL) == "section-length"


def test_a_zlib_bomb_is_not_inflated() -> None:
    bomb = zlib.compress(bytes(50_000_000), 9)
    descriptor = geometry(block_tokens=16)  # whose bound lets the stream through
    assert len(bomb) in section_bounds(Codec.X_ZLIB, descriptor)
    tracemalloc.start()
    try:
        assert name_of(decode_section, Codec.X_ZLIB, bomb, descriptor) == "section-length"
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("element", list(ElementType))
@pytest.mark.filterwarnings("error")
def test_q8_is_within_half_a_step_for_every_element_type(element: ElementType) -> None:
    descriptor = geometry(layers=1, kv_heads=3, head_dim=8, kv_dtype=str(element), block_tokens=5)
    values = np.random.default_rng(7).normal(0, 20, (5, 3, 8)).astype(element.dtype)
    section = encode_section(Codec.X_Q8, octets_of(values), descriptor)
    assert len(section) == 5 * 3 * (4 + 8)
    raw = decode_section(Codec.X_Q8, section, descriptor)
    exact = values.astype(np.float64)
    back = section_tensor(raw, descriptor).astype(np.float64)
    step = np.abs(exact).max(axis=2, keepdims=True) / 127
    # half a step of the scale, then the nearest element of the type
    spacing = {1: 0.25, 2: 0.01, 4: 1e-6}[element.octets] * np.abs(exact) + step * 0.01
    if element is ElementType.INT8:
        spacing = 0.51
    assert (np.abs(back - exact) <= step / 2 + spacing).all()


@pytest.mark.filterwarnings("error")
def test_q8_of_zeros_and_of_the_least_numbers_is_zero_or_near() -> None:
    descriptor = geometry(layers=1, kv_heads=1, head_dim=4, kv_dtype="fp32", block_tokens=3)
    least = np.float32(1.4e-45)
    values = np.array([[0, 0, 0, 0], [least, 0, 0, 0], [190 * least, -3e-45, 0, 0]], "<f4")
    section = encode_section(Codec.X_Q8, octets_of(values.reshape(3, 1, 4)), descriptor)
    back = section_tensor(decode_section(Codec.X_Q8, section, descriptor), descriptor)
    assert (back[0] == 0).all() and (back[1] == 0).all()
    assert 0 < back[2, 0, 0] <= 190 * least


@pytest.mark.filterwarnings("error")
def test_q8_refuses_what_it_cannot_hold_and_reads_any_scale() -> None:
    descriptor = geometry(layers=1, kv_heads=1, head_dim=4, kv_dtype="fp16", block_tokens=1)
    for bad in (np.inf, np.nan):
        values = np.array([[[1, bad, 0, 0]]], "<f2")
        assert name_of(encode_section, Codec.X_Q8, octets_of(values), descriptor) == (
            "codec-unsupported"
        )
    for element in ElementType:
        other = geometry(layers=1, kv_heads=1, head_dim=4, kv_dtype=str(element), block_tokens=1)
        for scale in (np.inf, np.nan, 3e38, -1.0):
            section = np.float32(scale).astype("<f4").tobytes() + bytes([0, 1, 127, 128])
            assert len(decode_section(Codec.X_Q8, section, other)) == other.section_octets()


def test_a_codec_that_would_exceed_its_bound_is_refused() -> None:
    descriptor = geometry(kv_heads=8, head_dim=1, kv_dtype="int8", block_tokens=64)
    raw = bytes([1]) * descriptor.section_octets()
    assert name_of(encode_section, Codec.X_Q8, raw, descriptor) == "codec-unsupported"


def test_transcoding_goes_through_the_raw_section() -> None:
    raw = SECTIONS[0][0]
    deflated = transcode_section(Codec.RAW, Codec.X_ZLIB, raw, SMALL)
    assert transcode_section(Codec.X_ZLIB, Codec.RAW, deflated, SMALL) == raw
    assert transcode_section(Codec.X_ZLIB, Codec.X_ZLIB, deflated, SMALL) == deflated
