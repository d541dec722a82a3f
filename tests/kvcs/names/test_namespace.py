"""KVCS "Track Namespace" and "Track Names", and their text forms."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.names.codes import Component, ManifestTrack
from kvcs.names.namespace import (
    PublicationNamespace,
    anchor_prefix,
    compat_prefix,
    encode_fields,
    parse_publication_uri,
    publication_uri,
    scope_prefix,
)
from kvcs.names.tracks import DataTrack, parse_track_name, publisher_priority
from kvsp.names.codes import Codec
from kvsp.names.errors import DecodeError
from moqt.values.names import is_prefix
from tests.paths import DATA

VECTORS: dict[str, Any] = json.loads((DATA / "kvcs-vectors.json").read_text("utf-8"))

# groups of the vector file that other issues bring to life
LATER = {"manifest_cose", "secure_objects", "secure_objects_upstream"}
ABOUT = {"title", "generated", "about", "conventions"}
HERE = {
    "namespace",
    "namespace_prefixes",
    "moqt_namespace_member",
    "namespace_invalid",
    "track_names",
    "publisher_priority",
    "layer_digest",  # these three in test_payload.py
    "payloads",
    "payload_invalid",
    "manifest",  # these three in test_manifest.py
    "manifest_invalid",
    "manifest_accepted",
}
FIELDS = ("scope_id", "compat_id", "anchor_key", "publication_id")


def namespace_of(vector: dict[str, Any]) -> PublicationNamespace:
    return PublicationNamespace(**{name: bytes.fromhex(vector[name]) for name in FIELDS})


SEED = namespace_of(VECTORS["namespace"][0])


def name_of(call: Any, *args: Any) -> str:
    with pytest.raises(DecodeError) as caught:
        call(*args)
    return caught.value.name


def test_every_group_of_the_vectors_is_tested_or_listed_for_later() -> None:
    assert set(VECTORS) == HERE | LATER | ABOUT


@pytest.mark.parametrize("vector", VECTORS["namespace"], ids=lambda v: v["id"])
def test_a_publication_is_five_fields_of_raw_octets(vector: dict[str, Any]) -> None:
    namespace = namespace_of(vector)
    assert namespace.encoded.hex() == vector["encoded_hex"]
    assert len(namespace.encoded) == vector["octets"] == 108
    assert namespace.text == vector["moqt_namespace"]
    assert PublicationNamespace.from_text(vector["moqt_namespace"]) == namespace
    assert PublicationNamespace.from_fields(namespace.fields) == namespace


def test_the_namespace_printed_in_the_seed_is_reproduced() -> None:
    assert SEED.encoded[:8] == bytes.fromhex("05066b7663732d31")
    assert SEED.scope_id.hex() == "6d1c6481cd428737da312c089db3832a"
    assert SEED.encoded.endswith(bytes.fromhex("100123456789abcdef0123456789abcdef"))


def test_prefixes_have_two_three_or_four_fields() -> None:
    made = (
        scope_prefix(SEED.scope_id),
        compat_prefix(SEED.scope_id, SEED.compat_id),
        anchor_prefix(SEED.scope_id, SEED.compat_id, SEED.anchor_key),
    )
    for prefix, vector in zip(made, VECTORS["namespace_prefixes"], strict=True):
        assert len(prefix) == vector["fields"]
        assert encode_fields(prefix).hex() == vector["encoded_hex"]
        assert is_prefix(prefix, SEED.fields)


@pytest.mark.parametrize("vector", VECTORS["moqt_namespace_member"]["valid"])
def test_the_text_form_is_the_fields_with_one_octet_lengths(vector: dict[str, Any]) -> None:
    namespace = PublicationNamespace.from_text(vector["text"])
    assert namespace.encoded[1:].hex() == vector["octets_hex"]
    assert len(namespace.text) == 143


@pytest.mark.parametrize("vector", VECTORS["moqt_namespace_member"]["invalid"])
def test_a_malformed_text_form_has_one_error(vector: dict[str, Any]) -> None:
    assert name_of(PublicationNamespace.from_text, vector["text"]) == vector["error"]


@pytest.mark.parametrize("vector", VECTORS["namespace_invalid"], ids=lambda v: v["id"])
def test_other_fields_are_no_publication(vector: dict[str, Any]) -> None:
    fields = tuple(bytes.fromhex(field) for field in vector["fields_hex"])
    assert name_of(PublicationNamespace.from_fields, fields) == vector["error"]


def test_a_field_of_another_length_makes_no_namespace_and_no_prefix() -> None:
    assert name_of(PublicationNamespace, b"", bytes(32), bytes(32), bytes(16)) == "bad-namespace"
    assert name_of(scope_prefix, bytes(15)) == "bad-namespace"
    assert name_of(compat_prefix, bytes(16), bytes(31)) == "bad-namespace"
    assert name_of(anchor_prefix, bytes(16), bytes(32), b"") == "bad-namespace"
    assert name_of(PublicationNamespace.from_fields, ()) == "bad-namespace"
    with pytest.raises(ValueError):
        encode_fields((bytes(64),))


def test_every_production_has_its_own_publication_id() -> None:
    made = {PublicationNamespace.create(*SEED.fields[1:4]).publication_id for _ in range(8)}
    assert len(made) == 8


@given(st.tuples(*(st.binary(min_size=n, max_size=n) for n in (16, 32, 32, 16))))
def test_namespaces_survive_every_form(fields: tuple[bytes, bytes, bytes, bytes]) -> None:
    namespace = PublicationNamespace(*fields)
    assert PublicationNamespace.from_text(namespace.text) == namespace
    assert PublicationNamespace.from_fields(namespace.fields) == namespace
    uri = publication_uri("moqt://relay.example/", namespace)
    assert parse_publication_uri(uri) == ("moqt://relay.example/", namespace)


@given(st.text(max_size=160) | st.text("ABCDEFabcdef0123456789-_", max_size=160))
def test_no_text_crashes_the_namespace_and_uri_readers(text: str) -> None:
    for call in (PublicationNamespace.from_text, parse_publication_uri, parse_track_name):
        try:
            call(text)
        except DecodeError:
            continue


def test_a_publication_has_a_moqt_uri_with_its_namespace_as_fragment() -> None:
    uri = publication_uri("moqt://relay.example:4443/live?x=1", SEED)
    assert uri == f"moqt://relay.example:4443/live?x=1#kvcs:{SEED.text}"
    assert parse_publication_uri(uri) == ("moqt://relay.example:4443/live?x=1", SEED)
    assert parse_publication_uri(f"moqt://[::1]:4443/#kvcs:{SEED}")[0] == "moqt://[::1]:4443/"


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "moqt://relay.example/",
        "moqt://relay.example/#",
        "moqt://relay.example/#other:AA",
        "moqt:///#kvcs:AA",
        "https://relay.example/#kvcs:AA",
        "MOQT://relay.example/#kvcs:AA",
        "moqt://relay.example:99999/#kvcs:AA",
        "moqt://relay.example:0/#kvcs:AA",
        "moqt://[::1/#kvcs:AA",
        "moqt://user@relay.example/#kvcs:AA",
        "moqt://relay.\texample/#kvcs:AA",
        "moqt://relay.exämple/#kvcs:AA",
    ],
)
def test_what_is_no_publication_uri_is_refused(uri: str) -> None:
    assert name_of(parse_publication_uri, uri) == "bad-uri"


def test_the_namespace_of_a_uri_has_the_errors_of_its_text() -> None:
    assert name_of(parse_publication_uri, "moqt://relay.example/#kvcs:") == "truncated"
    assert name_of(parse_publication_uri, "moqt://relay.example/#kvcs:a#b") == "bad-base64url"
    assert name_of(publication_uri, "moqt://relay.example/#x", SEED) == "bad-uri"


# --- Track Names ---------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS["track_names"]["valid"], ids=lambda v: v["name"])
def test_a_track_name_tells_component_codec_and_segment(vector: dict[str, Any]) -> None:
    octets = bytes.fromhex(vector["name_hex"])
    track = parse_track_name(octets)
    assert parse_track_name(vector["name"]) == track
    assert str(track) == vector["name"]
    if "component" in vector:
        assert isinstance(track, DataTrack)
        assert track.name == octets
        assert track.component.label == vector["component"]
        assert (track.codec, track.segment) == (vector["codec"], vector["segment"])
    else:
        assert isinstance(track, ManifestTrack)


@pytest.mark.parametrize("vector", VECTORS["track_names"]["invalid"], ids=lambda v: v["name_hex"])
def test_any_other_track_name_is_refused(vector: dict[str, Any]) -> None:
    assert name_of(parse_track_name, bytes.fromhex(vector["name_hex"])) == vector["error"]
    if "name" in vector:
        assert name_of(parse_track_name, vector["name"]) == vector["error"]


@given(
    st.sampled_from(Component),
    st.from_regex(r"[a-z0-9-]{1,32}", fullmatch=True),
    st.integers(0, 2**32 - 1),
)
def test_track_names_are_read_as_they_were_written(
    component: Component, codec: str, segment: int
) -> None:
    track = DataTrack(component, codec, segment)
    assert parse_track_name(track.name) == track


def test_parts_that_make_no_track_name_are_refused() -> None:
    assert name_of(DataTrack, Component.K, "RAW", 0) == "bad-track-name"
    assert name_of(DataTrack, Component.K, "raw", 2**32) == "bad-track-name"
    assert name_of(DataTrack, Component.K, "raw", -1) == "bad-track-name"
    assert DataTrack(Component.K, "raw", 0).known_codec is Codec.RAW
    assert DataTrack(Component.K, "zstd", 0).known_codec is None


@pytest.mark.parametrize("vector", VECTORS["publisher_priority"])
def test_earlier_layers_have_the_higher_priority(vector: dict[str, int]) -> None:
    assert publisher_priority(vector["group"], vector["layers"]) == vector["priority"]


def test_a_group_outside_the_model_has_no_priority() -> None:
    for group in (-1, 32):
        with pytest.raises(ValueError):
            publisher_priority(group, 32)
