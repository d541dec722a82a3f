"""KVSP "KV Block Container": every container and codec of the vectors."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from kvsp.blocks.codecs import decode_section, encode_section
from kvsp.blocks.container import (
    Container,
    ContainerReader,
    decode,
    layer_digest,
    layers_parameter,
    parse_codec,
    parse_layers,
    parse_repr_digest,
    repr_digest_field,
)
from kvsp.blocks.layout import octets_of, section_tensor
from kvsp.names.codes import Codec
from kvsp.records.records import replica_digest
from tests.kvsp.support_vectors import VECTORS, by_id, geometry, name_of, stream

INVALID = VECTORS["container_invalid"]
MISMATCH = VECTORS["container_digest_mismatch"]
CODECS = {vector["id"]: vector for vector in VECTORS["codecs"]}


def replica(vector: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    """K and V of all layers of the replica a container vector is a part of."""
    octets = vector["section_octets"]
    label = vector["data_rule"].split('"')[1].split("/")[0]
    return [
        (stream(f"{label}/k/{layer}", octets), stream(f"{label}/v/{layer}", octets))
        for layer in range(vector["geometry"]["layers"])
    ]


def octets_in(vector: dict[str, Any]) -> bytes:
    first, count = vector["first_layer"], vector["layer_count"]
    parts = [bytes.fromhex(vector["header_hex"])]
    parts += [bytes.fromhex(vector["table_entry_hex"])] * count
    for k, v in replica(vector)[first : first + count]:
        parts += [k, v]
    return b"".join(parts)


@pytest.mark.parametrize("vector", VECTORS["containers"], ids=by_id)
def test_a_container_is_written_as_the_vectors_have_it(vector: dict[str, Any]) -> None:
    descriptor = geometry(**vector["geometry"])
    whole = Container.build(descriptor, replica(vector))
    first = vector["first_layer"]
    part = whole.select(range(first, first + vector["layer_count"]))
    octets = b"".join(part)
    assert part.total_octets == len(octets) == vector["container_octets"]
    if "container_hex" in vector and vector["id"] != "flags-set":
        assert octets.hex() == vector["container_hex"]
    if vector["id"] != "flags-set":  # which no sender writes
        assert octets == octets_in(vector)
        assert repr_digest_field(part.repr_digest()) == vector["repr_digest"]
        assert part.repr_digest().hex() == vector["container_sha256"]
    assert whole.header.data_octets == vector["replica_size"]
    digests = whole.layer_digests()
    if "layer_digests" in vector:
        assert [digest.hex() for digest in digests] == vector["layer_digests"]
    else:
        ends = [digests[0].hex(), digests[-1].hex()]
        assert ends == vector["layer_digests_first_last"]
    assert "sha-256:" + replica_digest(digests).hex() == vector["replica_digest"]


@pytest.mark.parametrize("vector", VECTORS["containers"], ids=by_id)
def test_a_container_is_read_layer_by_layer_and_verified(vector: dict[str, Any]) -> None:
    descriptor = geometry(**vector["geometry"])
    sections = replica(vector)
    digests = [layer_digest(k, v) for k, v in sections]
    octets = octets_in(vector)
    header, layers = decode(
        octets,
        descriptor,
        layer_digests=digests,
        repr_digest=parse_repr_digest(vector["repr_digest"]),
    )
    assert header.flags == bytes.fromhex(vector["header_hex"])[5]
    assert (header.codec, header.token_count) == (vector["codec"], vector["token_count"])
    assert [part.layer for part in layers] == list(header.layers)
    assert header.first_layer == vector["first_layer"]
    for part in layers:
        assert (part.k, part.v) == sections[part.layer]
        assert part.digest == digests[part.layer]


@pytest.mark.parametrize("vector", INVALID["cases"], ids=by_id)
def test_a_malformed_container_has_one_error(vector: dict[str, Any]) -> None:
    descriptor = geometry(**INVALID["geometry"])
    octets = bytes.fromhex(vector["hex"])
    assert name_of(decode, octets, descriptor) == vector["error"]

    def octet_by_octet() -> None:
        reader = ContainerReader(descriptor)
        for index in range(len(octets)):
            reader.feed(octets[index : index + 1])
        reader.close()

    assert name_of(octet_by_octet) == vector["error"]


def test_the_original_of_the_malformed_containers_is_well_formed() -> None:
    octets = bytes.fromhex(INVALID["valid_hex"])
    header, layers = decode(octets, geometry(**INVALID["geometry"]))
    assert header.layers == range(1, 3) and len(layers) == 2


def test_a_flipped_octet_fails_the_digest_of_its_layer_alone() -> None:
    descriptor = geometry(**MISMATCH["geometry"])
    octets = bytes.fromhex(MISMATCH["hex"])
    expected = {int(layer): digest for layer, digest in MISMATCH["layer_digests"].items()}
    _, layers = decode(octets, descriptor)
    failed = [part.layer for part in layers if part.digest.hex() != expected[part.layer]]
    assert failed == MISMATCH["failed_layers"]
    digests = [bytes.fromhex(expected.get(layer, "00" * 32)) for layer in range(descriptor.layers)]
    assert name_of(decode, octets, descriptor, layer_digests=digests) == "digest-mismatch"


# --- codecs --------------------------------------------------------------------------


def test_a_zlib_section_inflates_to_its_raw_section() -> None:
    vector = CODECS["x-zlib"]
    descriptor = geometry(**vector["geometry"])
    octets = bytes.fromhex(vector["container_hex"])
    header, (layer,) = decode(octets, descriptor)
    k, v = layer.decode(header.codec, descriptor)
    assert (k.hex(), v.hex()) == (vector["raw_k_hex"], vector["raw_v_hex"])
    assert layer.digest.hex() == vector["layer_digest"]
    for raw in (k, v):
        assert (
            decode_section(Codec.X_ZLIB, encode_section(Codec.X_ZLIB, raw, descriptor), descriptor)
            == raw
        )


def test_inflating_stops_one_octet_past_the_raw_length() -> None:
    vector = CODECS["x-zlib-bomb"]
    descriptor = geometry(**CODECS["x-zlib"]["geometry"])
    assert descriptor.section_octets() == vector["raw_octets"]
    section = bytes.fromhex(vector["section_hex"])
    assert name_of(decode_section, Codec.X_ZLIB, section, descriptor) == vector["error"]


def test_q8_scales_by_the_largest_value_of_a_token_and_head() -> None:
    vector = CODECS["x-q8"]
    descriptor = geometry(**vector["geometry"], layers=1, kv_dtype="fp32")
    values = np.array(vector["values"], "<f4").reshape(1, 1, 4)
    section = encode_section(Codec.X_Q8, octets_of(values), descriptor)
    assert section.hex() == vector["section_hex"]
    raw = decode_section(Codec.X_Q8, section, descriptor)
    expected = np.array(vector["dequantized"], "<f4")
    assert (section_tensor(raw, descriptor).ravel() == expected).all()


# --- query parameters ----------------------------------------------------------------

LAYERS = VECTORS["layers_parameter"]


@pytest.mark.parametrize("vector", LAYERS["valid"], ids=by_id)
def test_layers_a_b_is_an_inclusive_range(vector: dict[str, Any]) -> None:
    layers = parse_layers(vector["text"])
    assert [layers[0], layers[-1]] == vector["range"]
    assert layers.stop <= LAYERS["layers"]
    assert layers_parameter(layers) == vector["text"]


@pytest.mark.parametrize("vector", LAYERS["unavailable"], ids=by_id)
def test_layers_that_do_not_exist_are_well_formed(vector: dict[str, Any]) -> None:
    assert parse_layers(vector["text"]).stop > LAYERS["layers"]


@pytest.mark.parametrize("vector", LAYERS["malformed"], ids=by_id)
def test_a_malformed_layers_parameter_is_refused(vector: dict[str, Any]) -> None:
    assert name_of(parse_layers, vector["text"]) == "layer-range"


@pytest.mark.parametrize("text", ["", "-1", "01", "65536", "1.0", "0x1", " 1", "1\n", "²"])
def test_a_malformed_codec_parameter_is_refused(text: str) -> None:
    assert name_of(parse_codec, text) == "out-of-range"


def test_a_codec_parameter_is_decimal_whether_known_or_not() -> None:
    assert [parse_codec(text) for text in ("1", "61441", "7", "0")] == [1, 61441, 7, 0]


def test_repr_digest_is_read_among_other_algorithms() -> None:
    digest = bytes(range(32))
    mine = repr_digest_field(digest)
    assert parse_repr_digest(mine) == digest
    assert parse_repr_digest(f"sha-512=:AAAA:, {mine};x=1, unixsum=:AAA=:") == digest
    assert parse_repr_digest("sha-512=:AAAA:") is None
    assert parse_repr_digest("") is None
    short = base64.b64encode(digest[:31]).decode()
    for text in (f"sha-256=:{short}:", "sha-256=::", "sha-256=:A:", "sha-256=x", "sha-256=:!:"):
        assert name_of(parse_repr_digest, text) == "bad-digest"
