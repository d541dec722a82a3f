"""KVCS "Object Payload": the header, and every check of a received Object."""

from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.names.codes import PAYLOAD_HEADER_OCTETS, Component
from kvcs.names.payload import check_payload, data_digest, decode_header, encode_header
from kvcs.names.tracks import DataTrack, parse_track_name
from kvsp.names.errors import DecodeError
from tests.paths import DATA

VECTORS: dict[str, Any] = json.loads((DATA / "kvcs-vectors.json").read_text("utf-8"))
INVALID = VECTORS["payload_invalid"]
PAYLOADS = {vector["id"]: vector for vector in VECTORS["payloads"]}


def stream(label: str, length: int) -> bytes:
    parts = (
        hashlib.sha256(label.encode() + struct.pack(">I", i)).digest()
        for i in range(length // 32 + 1)
    )
    return b"".join(parts)[:length]


def payload_of(vector: dict[str, Any]) -> bytes:
    if "payload_hex" in vector:
        return bytes.fromhex(vector["payload_hex"])
    return bytes.fromhex(vector["header_hex"]) + stream("seed-geometry/k/5", 8192)


def context_of(vector: dict[str, Any]) -> dict[str, Any]:
    return {
        "component": Component(vector["component"]),
        "layer": vector["layer"],
        "block": vector["block_index"],
        "first_block": vector["token_start"] // vector["token_count"] - vector["block_index"],
        "block_tokens": vector["token_count"],
        "codec": vector["codec"],
        "raw_octets": vector["data_length"],
    }


def invalid_context() -> dict[str, Any]:
    given_context = INVALID["context"]
    track = parse_track_name(given_context["track"])
    assert isinstance(track, DataTrack)
    return {
        "component": track.component,
        "layer": given_context["group"],
        "block": given_context["object"],
        "first_block": given_context["first_block"],
        "block_tokens": given_context["block_tokens"],
        "codec": given_context["codec"],
        "raw_octets": given_context["raw_octets"],
    }


VALID = bytes.fromhex(INVALID["valid_hex"])
CONTEXT = invalid_context()


def name_of(payload: Any, **changes: Any) -> str:
    with pytest.raises(DecodeError) as caught:
        check_payload(payload, **(CONTEXT | changes))
    return caught.value.name


def test_components_have_the_numbers_of_the_registry() -> None:
    assert {each.label: int(each) for each in Component} == {"k": 1, "v": 2, "kv": 3}


@pytest.mark.parametrize("vector", VECTORS["payloads"], ids=lambda v: v["id"])
def test_a_header_is_the_68_octets_of_the_vector(vector: dict[str, Any]) -> None:
    header = encode_header(
        component=Component(vector["component"]),
        layer=vector["layer"],
        block=vector["block_index"],
        token_start=vector["token_start"],
        token_count=vector["token_count"],
        codec=vector["codec"],
        data_length=vector["data_length"],
        data_digest=bytes.fromhex(vector["data_digest"]),
    )
    expected = bytearray.fromhex(vector["header_hex"])
    assert len(header) == PAYLOAD_HEADER_OCTETS == 68
    decoded = decode_header(payload_of(vector))
    assert decoded.flags == vector.get("flags", 0)
    assert decoded.reserved == vector.get("reserved", 0)
    expected[6:8] = expected[30:32] = bytes(2)  # a sender writes zero
    assert header == expected
    assert decoded.token_start == vector["token_start"]
    assert decoded.data_digest.hex() == vector["data_digest"]


@pytest.mark.parametrize(
    "vector",
    [v for v in VECTORS["payloads"] if v["id"] != "largest-fields"],
    ids=lambda v: v["id"],
)
def test_an_object_in_its_place_is_accepted(vector: dict[str, Any]) -> None:
    payload = payload_of(vector)
    data = check_payload(payload, **context_of(vector))
    assert data == payload[68:]
    assert hashlib.sha256(data).hexdigest() == vector["data_digest"]
    if "payload_sha256" in vector:
        assert hashlib.sha256(payload).hexdigest() == vector["payload_sha256"]


def test_the_example_printed_in_the_seed_is_reproduced() -> None:
    payload = payload_of(PAYLOADS["seed"])
    assert payload[68:] == bytes(range(16))
    assert payload[36:68].hex().startswith("be45cb2605bf36be")


def test_k_then_v_and_the_kv_object_have_the_layer_digest_of_kvsp() -> None:
    k, v, kv = (payload_of(PAYLOADS[name])[68:] for name in ("k-object", "v-object", "kv-object"))
    expected = VECTORS["layer_digest"]["layer_digest"]
    assert data_digest(k, v).hex() == data_digest(kv).hex() == expected
    assert PAYLOADS["kv-object"]["data_digest"] == expected


@pytest.mark.parametrize("vector", INVALID["cases"], ids=lambda v: v["id"])
def test_an_object_that_fails_a_check_has_one_error(vector: dict[str, Any]) -> None:
    payload = bytes.fromhex(vector["hex"])
    assert check_payload(VALID, **CONTEXT) == VALID[68:]
    assert name_of(payload) == vector["error"]
    # in parts it fails in the same way
    for cut in (0, 3, 40, 68, 80):
        assert name_of([payload[:cut], payload[cut:]]) == vector["error"]


@pytest.mark.parametrize("wrong", ["layer", "block", "first_block", "block_tokens"])
def test_an_object_belongs_to_its_place_only(wrong: str) -> None:
    names = {"layer": "layer-mismatch", "block": "block-mismatch"}
    assert name_of(VALID, **{wrong: CONTEXT[wrong] + 1}) == names.get(wrong, "token-start")


@pytest.mark.parametrize("place", ["layer", "block"])
def test_a_location_that_no_header_can_name_is_a_mismatch_and_not_a_crash(place: str) -> None:
    # MOQT has Group and Object IDs of 64 bits, the header fields of 32
    for value in (1 << 32, (1 << 64) - 1):
        assert name_of(VALID, **{place: value}) == f"{place}-mismatch"


def test_the_first_fault_is_the_one_that_is_named() -> None:
    assert name_of(b"KVO") == "truncated"
    assert name_of(b"KVB1") == "bad-magic"
    assert name_of(b"KVO1") == "truncated"
    assert name_of([]) == "truncated"
    everything_wrong = b"KVO1" + b"\x02" + bytes(63)
    assert name_of(everything_wrong) == "bad-version"
    assert name_of(VALID, component=Component.V, layer=9, codec=2) == "component-mismatch"
    assert name_of(VALID[:-1], raw_octets=31, codec=1) == "truncated"
    flipped = VALID[:-1] + bytes([VALID[-1] ^ 1])
    assert name_of(flipped, raw_octets=31) == "section-length"


def test_the_digest_a_manifest_lists_is_compared_too() -> None:
    digest = hashlib.sha256(VALID[68:]).digest()
    assert check_payload(VALID, **CONTEXT, expected_digest=digest) == VALID[68:]
    assert name_of(VALID, expected_digest=bytes(32)) == "digest-mismatch"


def test_data_of_another_codec_may_have_any_length() -> None:
    vector = PAYLOADS["empty-data"]
    context = context_of(vector) | {"raw_octets": 4096}
    assert len(check_payload(payload_of(vector), **context)) == 0


def test_data_in_one_buffer_is_returned_without_copying_it() -> None:
    buffer = np.frombuffer(VALID, np.uint8).copy()
    for payload in (buffer.data, [buffer.data], [buffer.data[:68], buffer.data[68:]]):
        data = check_payload(payload, **CONTEXT)
        assert np.shares_memory(np.frombuffer(data, np.uint8), buffer)
    large = bytes(16 << 20)
    header = encode_header(
        component=Component.K,
        layer=0,
        block=0,
        token_start=0,
        token_count=1,
        codec=1,
        data_length=len(large),
        data_digest=data_digest(large),
    )
    payload_in_parts: list[bytes | bytearray | memoryview] = [header, memoryview(large)]
    tracemalloc.start()
    try:
        check_payload(
            payload_in_parts,
            component=Component.K,
            layer=0,
            block=0,
            first_block=0,
            block_tokens=1,
            codec=1,
            raw_octets=len(large),
        )
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.lists(st.integers(0, len(VALID)), max_size=6))
def test_a_payload_in_any_parts_is_the_same_payload(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(VALID)]
    parts = [VALID[a:b] for a, b in pairwise(edges)]
    assert check_payload(parts, **CONTEXT) == VALID[68:]


@given(st.binary(max_size=140), st.integers(0, 100))
def test_no_octets_crash_the_payload_check(octets: bytes, kept: int) -> None:
    for payload in (octets, VALID[:kept] + octets):
        try:
            assert check_payload(payload, **CONTEXT) == VALID[68:]
        except DecodeError:
            continue


@given(
    st.sampled_from(Component),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**16),
    st.integers(1, 2**16),
    st.binary(max_size=64),
)
def test_what_a_publisher_writes_a_consumer_accepts(
    component: Component, layer: int, block: int, first: int, tokens: int, data: bytes
) -> None:
    header = encode_header(
        component=component,
        layer=layer,
        block=block,
        token_start=(first + block) * tokens,
        token_count=tokens,
        codec=1,
        data_length=len(data),
        data_digest=data_digest(data),
    )
    checked = check_payload(
        [header, data],
        component=component,
        layer=layer,
        block=block,
        first_block=first,
        block_tokens=tokens,
        codec=1,
        raw_octets=len(data),
        expected_digest=hashlib.sha256(data).digest(),
    )
    assert checked == data


@pytest.mark.parametrize(
    "change", [{"layer": 2**32}, {"block": -1}, {"codec": 2**16}, {"data_digest": b""}]
)
def test_a_header_field_out_of_range_is_the_publishers_mistake(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "component": Component.K,
        "layer": 0,
        "block": 0,
        "token_start": 0,
        "token_count": 1,
        "codec": 1,
        "data_length": 0,
        "data_digest": bytes(32),
    }
    encode_header(**fields)
    with pytest.raises(ValueError):
        encode_header(**(fields | change))
