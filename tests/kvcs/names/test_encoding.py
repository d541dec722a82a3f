"""Object Payload: Data of every codec, of K, of V and of both jointly."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.names.codes import Component
from kvcs.names.encoding import (
    EncodedForm,
    Encoding,
    decode_data,
    digest_as_data,
    encode_data,
    max_data_octets,
    payload_form,
)
from kvcs.names.payload import PayloadForm, data_digest, encode_header
from kvcs.names.tracks import DataTrack
from kvsp.blocks.codecs import encode_section
from kvsp.blocks.layout import octets_of
from kvsp.names.codes import Codec
from kvsp.names.errors import DecodeError
from tests.kvsp.support_vectors import geometry, name_of

DESCRIPTOR = geometry(layers=2, kv_heads=2, head_dim=4, kv_dtype="fp16", block_tokens=4)
RANDOM = np.random.default_rng(3)
K, V = (bytes(octets_of(RANDOM.normal(size=(4, 2, 4)).astype(DESCRIPTOR.dtype))) for _ in range(2))
EVERY = [Encoding(codec, joint) for codec in Codec for joint in (False, True)]


def joined(component: Component, codec: Codec, k: bytes = K, v: bytes = V) -> memoryview:
    return memoryview(b"".join(encode_data(component, codec, k, v, DESCRIPTOR)))


def track(component: Component, codec: Codec) -> DataTrack:
    return DataTrack(component, codec.label, 0)


def test_an_encoding_is_named_by_its_codec_and_kv_before_it_when_joint() -> None:
    assert Encoding.parse("x-zstd") == Encoding(Codec.X_ZSTD)
    assert Encoding.parse("kv.raw") == Encoding(Codec.RAW, joint=True)
    for text in ("", "kv.", "k.raw", "zstd", "kv.kv.raw"):
        with pytest.raises(ValueError, match="is none of raw, x-zlib, x-q8, x-zstd"):
            Encoding.parse(text)


@pytest.mark.parametrize("encoding", EVERY, ids=str)
def test_data_decodes_to_the_sections_it_was_made_of(encoding: Encoding) -> None:
    sections = []
    for component in encoding.components:
        data = joined(component, encoding.codec)
        assert len(data) <= max_data_octets(DESCRIPTOR, track(component, encoding.codec))
        sections += decode_data(component, encoding.codec, data, DESCRIPTOR)
    if encoding.codec.lossless:
        assert [bytes(each) for each in sections] == [K, V]
    else:
        for section, raw in zip(sections, (K, V), strict=True):
            given_, due = (np.frombuffer(each, "<f2").astype(float) for each in (section, raw))
            assert np.abs(given_ - due).max() <= np.abs(due).max() / 127


def test_raw_kv_is_the_k_section_then_the_v_section() -> None:
    assert joined(Component.KV, Codec.RAW) == K + V


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.RAW])
def test_any_other_kv_is_the_length_of_k_then_both_sections(codec: Codec) -> None:
    k, v = (bytes(encode_section(codec, each, DESCRIPTOR)) for each in (K, V))
    assert joined(Component.KV, codec) == struct.pack(">I", len(k)) + k + v


@pytest.mark.parametrize("codec", list(Codec))
def test_joint_data_that_is_not_exactly_two_sections_is_refused(codec: Codec) -> None:
    good = bytes(joined(Component.KV, codec))
    bad = [b"", good[:3], good[:-1], good + b"x", K]
    if codec is not Codec.RAW:
        (length,) = struct.unpack_from(">I", good)
        for wrong in (0, length - 1, length + 1, len(good), 2**32 - 1):
            bad.append(struct.pack(">I", wrong) + good[4:])
    for data in bad:
        arguments = (Component.KV, codec, memoryview(data), DESCRIPTOR)
        assert name_of(decode_data, *arguments) == "section-length"


@given(st.binary(max_size=300), st.sampled_from(EVERY))
def test_no_data_crashes_the_decoder(data: bytes, encoding: Encoding) -> None:
    for component in encoding.components:
        try:
            sections = decode_data(component, encoding.codec, memoryview(data), DESCRIPTOR)
        except DecodeError as error:
            assert error.name == "section-length"
        else:
            assert {len(each) for each in sections} == {DESCRIPTOR.section_octets()}


def payload(component: Component, codec: Codec, data: bytes) -> bytes:
    header = encode_header(
        component=component,
        layer=1,
        block=2,
        token_start=(5 + 2) * 4,
        token_count=4,
        codec=codec,
        data_length=len(data),
        data_digest=data_digest(data),
    )
    return header + data


@pytest.mark.parametrize("encoding", EVERY, ids=str)
def test_a_payload_is_verified_as_it_came_and_then_decoded(encoding: Encoding) -> None:
    for component in encoding.components:
        data = bytes(joined(component, encoding.codec))
        form = payload_form(DESCRIPTOR, track(component, encoding.codec), 5)
        assert isinstance(form, PayloadForm if encoding.codec is Codec.RAW else EncodedForm)
        octets = payload(component, encoding.codec, data)
        for parts in ([octets], [octets[:70], octets[70:90], octets[90:]]):
            sections, digest = form.check(parts, 1, 2)
            assert digest == data_digest(data)
            due = decode_data(component, encoding.codec, memoryview(data), DESCRIPTOR)
            assert b"".join(sections) == b"".join(due)
        assert name_of(form.check, [octets[:-1] + bytes([octets[-1] ^ 1])], 1, 2) == (
            "digest-mismatch"
        )
        if encoding.codec is not Codec.RAW:
            whole = payload(component, encoding.codec, data + b"x")
            assert name_of(form.check, [whole], 1, 2) == "section-length"


@pytest.mark.parametrize("encoding", EVERY, ids=str)
def test_sections_are_of_a_production_when_their_data_would_have_its_digest(
    encoding: Encoding,
) -> None:
    for component in encoding.components:
        of = track(component, encoding.codec)
        digest = data_digest(joined(component, encoding.codec))
        assert digest_as_data(of, K, V, DESCRIPTOR) == digest
        assert digest_as_data(of, V, K, DESCRIPTOR) != digest


def test_what_a_codec_cannot_hold_has_the_digest_of_nothing() -> None:
    infinite = bytes.fromhex("007c") * (len(K) // 2)
    digest = digest_as_data(track(Component.K, Codec.X_Q8), infinite, V, DESCRIPTOR)
    assert digest == bytes(32)
