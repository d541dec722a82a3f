"""KVCS "Manifest Track": parsing, consistency, progress, and what a consumer asks it."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.names.codes import MAX_MANIFEST_FRAME_OCTETS, MAX_MANIFEST_OCTETS, Component
from kvcs.names.errors import KvcsError
from kvcs.names.manifest import (
    Manifest,
    SegmentEntry,
    keys_digest,
    selections,
)
from kvcs.names.manifest_builder import ManifestBuilder, check_progress, leaves_out, with_digests_of
from kvcs.names.manifest_text import ManifestReader, max_octets
from kvcs.names.namespace import PublicationNamespace
from kvcs.names.tracks import DataTrack, parse_track_name
from kvsp.names import ijson
from kvsp.names.codes import Codec
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor, Scope, block_keys
from tests.paths import DATA

VECTORS: dict[str, Any] = json.loads((DATA / "kvcs-vectors.json").read_text("utf-8"))
VECTOR = VECTORS["manifest"]
TREE: dict[str, Any] = VECTOR["manifest"]
SCOPE = Scope(bytes.fromhex(VECTOR["scope_key"]))
COMPAT = Descriptor.parse(TREE["compat"])
KEYS = block_keys(SCOPE, COMPAT, VECTOR["tokens"])
NAMESPACE = PublicationNamespace(
    SCOPE.scope_id, COMPAT.compat_id, KEYS[1], bytes.fromhex(VECTOR["publication_id"])
)
K0, V0 = DataTrack(Component.K, "raw", 0), DataTrack(Component.V, "raw", 0)
K1, V1 = DataTrack(Component.K, "raw", 1), DataTrack(Component.V, "raw", 1)
PAIR = ((Component.K, Codec.RAW), (Component.V, Codec.RAW))


def parse(tree: Any, namespace: PublicationNamespace | None = NAMESPACE) -> Manifest:
    return Manifest.parse(json.dumps(tree).encode(), namespace)


def changed(path: str, value: Any) -> dict[str, Any]:
    """The vector's manifest with one member replaced, or removed when value is `...`."""
    tree: Any = copy.deepcopy(TREE)
    *way, last = (int(step) if step.isdigit() else step for step in path.split("/"))
    target = tree
    for step in way:
        target = target[step]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return dict(tree)


def name_of(call: Any, *args: Any) -> str:
    with pytest.raises(DecodeError) as caught:
        call(*args)
    return caught.value.name


def offered(*tracks: str) -> Manifest:
    tree = copy.deepcopy(TREE)
    tree["segments"] = tree["segments"][:1]
    tree["segments"][0]["tracks"] = list(tracks)
    del tree["segments"][0]["object_digests"]
    return parse(tree)


def test_the_vectors_namespace_and_keys_follow_from_its_tokens() -> None:
    assert NAMESPACE.encoded.hex() == VECTOR["namespace_hex"]
    assert [key.hex() for key in KEYS] == VECTOR["block_keys"]
    assert COMPAT.compat_id.hex() == VECTOR["compat_id"]


def test_a_manifest_is_read_and_written_in_canonical_form() -> None:
    manifest = parse(TREE)
    octets = manifest.to_json()
    assert hashlib.sha256(octets).hexdigest() == VECTOR["jcs_sha256"]
    assert octets == ijson.canonical(TREE)
    assert Manifest.parse(octets, NAMESPACE) == manifest
    assert manifest.check_keys(KEYS, NAMESPACE.anchor_key) == manifest.blocks == 3


@pytest.mark.parametrize("vector", VECTORS["manifest_invalid"], ids=lambda v: v["id"])
def test_a_malformed_manifest_has_one_error(vector: dict[str, Any]) -> None:
    def consume() -> None:
        manifest = parse(vector["manifest"])
        manifest.check_keys(KEYS, NAMESPACE.anchor_key)

    assert name_of(consume) == vector["error"]


@pytest.mark.parametrize("vector", VECTORS["manifest_accepted"], ids=lambda v: v["id"])
def test_unknown_members_and_missing_digests_are_accepted(vector: dict[str, Any]) -> None:
    manifest = parse(vector["manifest"])
    assert manifest.check_keys(KEYS, NAMESPACE.anchor_key) == 3
    assert Manifest.parse(manifest.to_json(), NAMESPACE) == manifest


@pytest.mark.parametrize(
    ("path", "value", "error"),
    [
        ("segments/0/tracks", ..., "missing-member"),
        ("segments", {}, "wrong-type"),
        ("segments/0", 1, "wrong-type"),
        ("kvcs", "1", "wrong-type"),
        ("kvcs", True, "wrong-type"),
        ("deterministic", 0, "wrong-type"),
        ("compat", [], "wrong-type"),
        ("publication", None, "wrong-type"),
        ("segments/0/blocks", 1.5, "wrong-type"),
        ("segments/0/tracks", "k.raw.s0", "wrong-type"),
        ("segments/0/object_digests", None, "wrong-type"),
        ("segments/0/object_digests/k.raw.s0", {}, "wrong-type"),
        ("segments/0/object_digests/k.raw.s0", [["00" * 32, 1]], "wrong-type"),
        ("publication", "00" * 15, "bad-hex"),
        ("scope_id", "00" * 17, "bad-hex"),
        ("segments/0/object_digests/k.raw.s0", [["00" * 32, "AA" * 32]], "bad-hex"),
        ("segments/0/object_digests/k.raw.s0", [["0" * 63, "0" * 65]], "bad-hex"),
        ("segments/0/object_digests/k.raw.s0", [["0" * 62 + "\n0", "0" * 64]], "bad-hex"),
        ("segments/0/tracks/0", "manifest", "bad-track-name"),
        ("segments/0/object_digests/K", [], "bad-track-name"),
        ("compat/layers", 0, "out-of-range"),
        ("compat/model", ..., "missing-member"),
        ("publication", "00" * 16, "bad-manifest"),
        ("scope_id", "00" * 16, "bad-manifest"),
        ("segments/0/object_digests/v.raw.s0", ..., "bad-manifest"),
        ("segments/0/object_digests/kv.raw.s0", [], "bad-manifest"),
        ("segments/0/tracks", ["k.raw.s0", "v.raw.s0", "k.raw.s0"], "bad-manifest"),
        ("segments/0/tracks", ["k.raw.s0", "v.x-zlib.s0"], "bad-manifest"),
        ("segments/0/tracks", [], "bad-manifest"),
        ("segments/1/blocks", 2**53 - 1, "bad-manifest"),
        ("segments/1/blocks", -1, "bad-manifest"),
        ("segments/1/segment", 2, "bad-manifest"),
    ],
)
def test_every_rule_of_the_manifest_has_its_error(path: str, value: Any, error: str) -> None:
    assert name_of(parse, changed(path, value)) == error


def test_a_segment_lists_tracks_of_its_own() -> None:
    assert offered("k.raw.s0", "v.raw.s0").segments[0].tracks == (K0, V0)
    assert name_of(offered, "k.raw.s1", "v.raw.s1") == "bad-manifest"
    assert name_of(offered, "k.raw.s0", "v.raw.s0", "kv.raw.s1") == "bad-manifest"


def test_faults_are_named_in_the_order_of_the_specification() -> None:
    assert name_of(Manifest.parse, b"[]") == "not-an-object"
    assert name_of(Manifest.parse, b"\xff") == "not-i-json"
    assert name_of(Manifest.parse, b'{"kvcs":1,"kvcs":1}') == "duplicate-member"
    tree = changed("segments/1/complete", ...)
    tree["kvcs"] = "2"
    assert name_of(parse, tree) == "missing-member"
    tree["segments"][1]["complete"] = True
    assert name_of(parse, tree) == "wrong-type"
    tree["kvcs"] = 2
    tree["segments"][0]["block_keys_sha256"] = ""
    assert name_of(parse, tree) == "bad-version"
    tree["kvcs"] = 1
    tree["segments"][0]["tracks"] = ["x"]
    assert name_of(parse, tree) == "bad-hex"
    tree["segments"][0]["block_keys_sha256"] = "00" * 32
    tree["compat"]["model"] = ""
    assert name_of(parse, tree) == "bad-track-name"
    tree["segments"][0]["tracks"] = ["k.raw.s0"]
    assert name_of(parse, tree) == "out-of-range"
    tree["compat"]["model"] = "other"
    assert name_of(parse, tree) == "compat-mismatch"


def test_a_manifest_has_at_most_a_mebibyte_beside_its_digests() -> None:
    text = json.dumps(TREE).encode()
    digests = sum(
        len(json.dumps(group)[1:-1])
        for entry in TREE["segments"]
        for groups in entry["object_digests"].values()
        for group in groups
    )
    padded = text + b" " * (MAX_MANIFEST_FRAME_OCTETS - len(text))
    assert Manifest.parse(padded, NAMESPACE) == parse(TREE)
    assert name_of(Manifest.parse, padded + b" " * digests) == "bad-manifest"


def test_a_manifest_has_no_more_octets_than_the_objects_it_may_list_need() -> None:
    text = json.dumps(TREE).encode()
    for limit, fits in ((len(text), True), (len(text) - 1, False)):
        reader = ManifestReader(limit)
        reader.feed(text)
        if fits:
            assert Manifest.parse(reader, NAMESPACE) == parse(TREE)
        else:
            assert name_of(Manifest.parse, reader) == "bad-manifest"
    assert max_octets(0) == 64 << 10
    assert max_octets(100_000) == (64 << 10) + 96 * 100_000
    assert max_octets(10_000_000) == MAX_MANIFEST_OCTETS == 256 << 20


@pytest.mark.parametrize("where", ["segments/0/tracks", "segments/0/object_digests", "segments"])
def test_more_tracks_than_can_be_meant_are_refused_unread(where: str, monkeypatch) -> None:
    read = 0

    def counted(name: Any) -> Any:
        nonlocal read
        read += 1
        return parse_track_name(name)

    monkeypatch.setattr("kvcs.names.manifest.parse_track_name", counted)
    values = {
        "segments/0/tracks": [f"kv.x-{n}.s0" for n in range(5000)],
        "segments/0/object_digests": {f"kv.x-{n}.s0": [] for n in range(5000)},
        "segments": TREE["segments"][:1] * 3000,
    }
    if where == "segments":
        values[where] = [entry | {"object_digests": {}} for entry in values[where]]
    assert name_of(parse, changed(where, values[where])) == "bad-manifest"
    assert read == 0


def test_publication_and_scope_are_compared_when_present() -> None:
    tree = TREE | {"publication": VECTOR["publication_id"], "scope_id": SCOPE.scope_id.hex()}
    manifest = parse(tree)
    assert manifest.to_json() == ijson.canonical(tree)
    other = PublicationNamespace.create(*NAMESPACE.fields[1:4])
    assert name_of(parse, tree, other) == "bad-manifest"
    parse(TREE, other)
    parse(tree, None)


@pytest.mark.parametrize("change", [{"kv_dtype": "bf16"}, {"positional": "rope;base=5"}])
def test_a_publication_of_another_descriptor_of_the_same_size_is_refused(
    change: dict[str, Any],
) -> None:
    other = Descriptor.parse(TREE["compat"] | change)
    assert other.section_octets() == COMPAT.section_octets()
    assert name_of(parse, TREE | {"compat": other.to_dict()}) == "compat-mismatch"


# --- keys ----------------------------------------------------------------------------


def test_a_segment_of_other_tokens_is_refused() -> None:
    manifest = parse(TREE)
    other = block_keys(SCOPE, COMPAT, [11, 12, 13, 99, 15, 16])
    assert name_of(manifest.check_keys, other, KEYS[1]) == "keys-mismatch"
    assert name_of(manifest.check_keys, KEYS, KEYS[0]) == "keys-mismatch"
    assert name_of(manifest.check_keys, KEYS, KEYS[2]) == "keys-mismatch"
    assert name_of(manifest.check_keys, KEYS[:1], KEYS[0]) == "keys-mismatch"


def test_the_anchor_key_of_the_namespace_is_that_of_segment_0() -> None:
    # a manifest of our tokens under the namespace of others
    assert name_of(parse(TREE).check_keys, KEYS, bytes(32)) == "keys-mismatch"


def test_later_segments_count_as_far_as_they_continue_with_the_consumers_tokens() -> None:
    manifest = parse(TREE)
    assert manifest.check_keys(KEYS[:2], KEYS[1]) == 2
    other_tail = block_keys(SCOPE, COMPAT, [11, 12, 13, 14, 99, 16])
    assert manifest.check_keys(other_tail, KEYS[1]) == 2


def test_nothing_is_confirmed_of_a_segment_longer_than_the_prompt() -> None:
    assert parse(TREE).check_keys(KEYS[:1], KEYS[1]) == 0
    assert parse(TREE).check_keys([], KEYS[1]) == 0


# --- digests and tracks --------------------------------------------------------------


def test_every_listed_object_has_its_digest() -> None:
    manifest = parse(TREE)
    for entry in TREE["segments"]:
        for name, groups in entry["object_digests"].items():
            track = next(t for t in (K0, V0, K1, V1) if str(t) == name)
            for group, digests in enumerate(groups):
                assert manifest.is_listed(track, group)
                for object_id, digest in enumerate(digests):
                    found = manifest.expected_digest(track, group, object_id)
                    assert found is not None and found.hex() == digest
                assert manifest.expected_digest(track, group, len(digests)) is None
            assert not manifest.is_listed(track, len(groups))
    assert manifest.is_segment_complete(0)
    assert not manifest.is_segment_complete(1)
    assert not manifest.is_segment_complete(2)
    assert not manifest.is_segment_complete(-1)


def test_what_is_not_listed_has_no_digest() -> None:
    manifest = parse(TREE)
    assert manifest.expected_digest(V1, 0, 0) is None
    assert manifest.expected_digest(K0, -1, 0) is None
    assert manifest.expected_digest(K0, 0, -1) is None
    assert manifest.expected_digest(K0, 2, 0) is None
    assert manifest.expected_digest(DataTrack(Component.KV, "raw", 0), 0, 0) is None
    assert manifest.expected_digest(DataTrack(Component.K, "raw", 9), 0, 0) is None
    without = parse(VECTORS["manifest_accepted"][1]["manifest"])
    assert without.expected_digest(K0, 0, 0) is None and not without.is_listed(K0, 0)


@pytest.mark.parametrize(
    ("tracks", "chosen"),
    [
        ("kv.raw.s0 kv.x-zlib.s0 v.raw.s0 k.raw.s0", "k.raw.s0 v.raw.s0"),
        ("kv.x-zlib.s0 k.x-zlib.s0 v.x-zlib.s0 kv.raw.s0", "kv.raw.s0"),
        ("k.x-zlib.s0 kv.x-zlib.s0 v.x-zlib.s0", "k.x-zlib.s0 v.x-zlib.s0"),
        ("k.raw.s0 kv.x-zlib.s0 k.x-zlib.s0 v.x-zlib.s0", "kv.x-zlib.s0"),
        ("kv.x-q8.s0 kv.x-unknown.s0 kv.x-zlib.s0", "kv.x-zlib.s0"),
    ],
)
def test_tracks_are_chosen_raw_first_then_lossless_in_the_order_listed(
    tracks: str, chosen: str
) -> None:
    manifest = offered(*tracks.split())
    for allow_lossy in (False, True):
        selected = manifest.select_tracks(0, allow_lossy=allow_lossy)
        assert " ".join(map(str, selected)) == chosen


def test_a_lossy_codec_is_chosen_only_when_it_is_allowed() -> None:
    manifest = offered("kv.x-q8.s0", "kv.x-unknown.s0")
    assert name_of(manifest.select_tracks, 0) == "codec-unsupported"
    assert [str(t) for t in manifest.select_tracks(0, allow_lossy=True)] == ["kv.x-q8.s0"]
    with pytest.raises(DecodeError):
        manifest.select_tracks(0, codecs={Codec.RAW}, allow_lossy=True)
    with pytest.raises(LookupError):
        manifest.select_tracks(1)


def test_the_choice_among_many_tracks_compares_each_with_a_few_others(monkeypatch) -> None:
    """A manifest has room for a million names, and any writer of a scope may fill it."""
    halves = (Component.K, Component.V)
    tracks = [DataTrack(half, f"x-{n}", 0) for n in range(300) for half in halves]
    compared = 0
    equal = DataTrack.__eq__

    def counted(self: DataTrack, other: object) -> bool:
        nonlocal compared
        compared += 1
        return equal(self, other)

    monkeypatch.setattr(DataTrack, "__eq__", counted)
    assert len(selections(tracks)) == 300
    assert len(selections(tracks[::2])) == 0
    assert compared <= 10 * len(tracks)


def test_an_error_names_encodings_and_the_first_of_many_only() -> None:
    tracks = tuple(DataTrack(Component.KV, f"x-{n}", 0) for n in range(1000))
    entry = SegmentEntry(0, 0, 1, bytes(32), tracks, complete=False, object_digests=None)
    assert entry.offered.startswith("kv.x-0, kv.x-1, ")
    assert entry.offered.endswith(", 992 more") and len(entry.offered) < 200
    names = ("k.raw.s0", "v.raw.s0", "kv.x-q8.s0", "k.x-new.s0", "v.x-new.s0")
    tracks = tuple(map(parse_track_name, names))
    entry = replace(entry, tracks=tracks, other_tracks=("latent.raw.s0",))
    assert entry.offered == "raw, kv.x-q8 (lossy), x-new, latent.raw.s0"


def test_tracks_of_components_that_are_not_known_are_passed_over_and_no_fault() -> None:
    manifest = offered("latent.raw.s0", "k.raw.s0", "v.raw.s0")
    assert manifest.segments[0].tracks == (K0, V0)
    assert manifest.segments[0].other_tracks == ("latent.raw.s0",)
    assert Manifest.parse(manifest.to_json(), NAMESPACE) == manifest
    alone = offered("latent.raw.s0")
    assert name_of(alone.select_tracks, 0) == "codec-unsupported"
    for name in ("latent.raw", "LATENT.raw.s0", "latent.raw.s01", "latent..s0"):
        assert name_of(offered, name, "k.raw.s0", "v.raw.s0") == "bad-track-name"


# --- progress ------------------------------------------------------------------------


def test_a_later_version_may_add() -> None:
    last = parse(TREE)
    first = parse(changed("segments/0/complete", False))
    check_progress(first, last)
    check_progress(last, last)
    earlier = copy.deepcopy(TREE)
    earlier["segments"] = earlier["segments"][:1]
    earlier["segments"][0]["object_digests"]["k.raw.s0"].pop()
    earlier["segments"][0]["complete"] = False
    check_progress(parse(earlier), last)
    check_progress(parse(VECTORS["manifest_accepted"][1]["manifest"]), last)
    check_progress(last, parse(TREE | {"publication": VECTOR["publication_id"]}))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("segments/1", ...),
        ("segments/0/complete", False),
        ("segments/1/blocks", 2),
        ("segments/1/block_keys_sha256", "00" * 32),
        ("segments/1/object_digests", ...),
        ("segments/0/object_digests/k.raw.s0/0/0", "00" * 32),
        ("segments/1/object_digests/k.raw.s1", []),
        ("deterministic", True),
        ("compat/model", "other"),
    ],
)
def test_a_later_version_removes_and_changes_nothing(path: str, value: Any) -> None:
    tree = changed(path, value)
    if path == "segments/1/blocks":
        del tree["segments"][1]["object_digests"]
    assert name_of(check_progress, parse(TREE), parse(tree, None)) == "bad-manifest"


def test_a_later_version_may_leave_out_the_digests_of_a_segment_that_is_complete() -> None:
    before, after = parse(TREE), parse(changed("segments/0/object_digests", ...))
    assert before.segments[0].complete and after.segments[0].object_digests is None
    check_progress(before, after)
    assert leaves_out(after.segments[0], COMPAT.layers)
    assert not leaves_out(before.segments[0], COMPAT.layers)
    assert not leaves_out(before.segments[1], COMPAT.layers), "what is not complete is not known"
    assert with_digests_of(before, after) == before
    assert with_digests_of(after, before) == before
    some = changed("segments/0/complete", False)
    some["segments"][0]["object_digests"]["k.raw.s0"].pop()
    partly = with_digests_of(parse(some), after)
    assert leaves_out(partly.segments[0], COMPAT.layers)
    check_progress(before, partly)
    assert with_digests_of(before, partly) == before
    wrong = changed("segments/0/object_digests/k.raw.s0/0/0", "00" * 32)
    assert name_of(check_progress, parse(wrong), partly) == "bad-manifest"


def test_a_later_version_removes_no_track_and_no_publication() -> None:
    both = offered("k.raw.s0", "v.raw.s0", "kv.x-zlib.s0")
    assert name_of(check_progress, both, offered("k.raw.s0", "v.raw.s0")) == "bad-manifest"
    check_progress(offered("k.raw.s0", "v.raw.s0"), both)
    named = parse(TREE | {"publication": VECTOR["publication_id"]})
    assert name_of(check_progress, named, parse(TREE)) == "bad-manifest"


# --- publishing ----------------------------------------------------------------------


def test_a_publisher_builds_the_manifest_of_the_vector() -> None:
    source = parse(TREE)
    builder = ManifestBuilder(COMPAT, NAMESPACE)
    assert builder.add_segment(KEYS[:2], PAIR) == 0
    versions = [builder.build()]
    for entry in source.segments:
        if entry.segment:
            assert builder.add_segment(KEYS[2:], PAIR) == 1
        assert entry.object_digests is not None
        for track, groups in entry.object_digests.items():
            for group, octets in enumerate(groups):
                digests = [octets[at : at + 32] for at in range(0, len(octets), 32)]
                builder.add_group(track, group, digests)
                versions.append(builder.build())
        if entry.complete:
            builder.complete(entry.segment)
            versions.append(builder.build())
    for previous, following in pairwise(versions):
        check_progress(previous, following)
    tree = TREE | {"publication": VECTOR["publication_id"], "scope_id": SCOPE.scope_id.hex()}
    assert builder.build() == parse(tree)
    assert builder.build().to_json() == ijson.canonical(tree)


def test_a_publisher_cannot_list_what_is_not_there() -> None:
    with pytest.raises(ValueError, match="Compatibility ID"):
        ManifestBuilder(Descriptor.parse(TREE["compat"] | {"model": "x"}), NAMESPACE)
    builder = ManifestBuilder(COMPAT, NAMESPACE)
    assert name_of(builder.build) == "bad-manifest"
    for keys, tracks in (([], PAIR), (KEYS, PAIR), (KEYS[:2], PAIR[:1]), (KEYS[:2], PAIR * 2)):
        with pytest.raises(ValueError):
            builder.add_segment(keys, tracks)
    with pytest.raises(LookupError):
        builder.add_group(K0, 0, [bytes(32)] * 2)
    with pytest.raises(ValueError):
        builder.complete(0)
    builder.add_segment(KEYS[:2], PAIR)
    with pytest.raises(LookupError):
        builder.add_group(DataTrack(Component.KV, "raw", 0), 0, [bytes(32)] * 2)
    for group, digests in ((1, [bytes(32)] * 2), (0, [bytes(32)]), (0, [bytes(31)] * 2)):
        with pytest.raises(ValueError):
            builder.add_group(K0, group, digests)
    for group in range(2):
        builder.add_group(K0, group, [bytes(32)] * 2)
    with pytest.raises(ValueError, match=r"v\.raw\.s0"):
        builder.complete(0)
    with pytest.raises(ValueError):
        builder.add_group(K0, 2, [bytes(32)] * 2)


def test_a_manifest_too_large_to_be_read_is_not_written(monkeypatch) -> None:
    builder = ManifestBuilder(COMPAT, NAMESPACE)
    builder.add_segment(KEYS[:2], PAIR)
    octets = b"".join(builder.version())
    builder = ManifestBuilder(COMPAT, NAMESPACE, max_octets=len(octets))
    builder.add_segment(KEYS[:2], PAIR)
    assert b"".join(builder.version()) == octets
    builder.add_group(K0, 0, [bytes(32)] * 2)
    with pytest.raises(KvcsError, match=f"{len(octets)} are allowed; publish larger blocks"):
        builder.version()
    monkeypatch.setattr("kvcs.names.manifest_text.MAX_MANIFEST_FRAME_OCTETS", 400)
    with pytest.raises(KvcsError, match="publish fewer segments"):
        builder.build().to_json()


def test_a_version_takes_the_text_of_groups_from_the_version_before() -> None:
    builder = ManifestBuilder(COMPAT, NAMESPACE)
    builder.add_segment(KEYS[:2], PAIR)
    builder.add_group(K0, 0, [bytes(32), bytes([7] * 32)])
    builder.add_group(V0, 0, [bytes(32)] * 2)
    first = builder.version()
    builder.add_group(K0, 1, [bytes([9] * 32)] * 2)
    second = builder.version()
    assert b"".join(second) == builder.build().to_json()
    shared = {id(piece) for piece in first} & {id(piece) for piece in second}
    assert len(shared) == 2


def test_keys_are_hashed_in_one_string() -> None:
    assert keys_digest(KEYS[:2]).hex() == TREE["segments"][0]["block_keys_sha256"]
    assert keys_digest([]) == hashlib.sha256(b"").digest()


# --- any octets ----------------------------------------------------------------------

PATHS = [
    "kvcs", "compat", "layers", "block_tokens", "deterministic", "segments", "segments/0",
    "segments/0/segment", "segments/0/first_block", "segments/0/blocks",
    "segments/0/block_keys_sha256", "segments/0/tracks", "segments/0/tracks/0",
    "segments/0/complete", "segments/0/object_digests", "segments/0/object_digests/k.raw.s0",
    "segments/0/object_digests/k.raw.s0/0", "segments/0/object_digests/k.raw.s0/0/0",
    "compat/layers", "compat/model", "publication", "scope_id",
]  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**53 - 1) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(st.sampled_from(PATHS), ANYTHING)
def test_no_value_of_any_member_crashes_the_manifest_reader(path: str, value: Any) -> None:
    try:
        manifest = parse(changed(path, value))
    except DecodeError:
        return
    assert Manifest.parse(manifest.to_json(), NAMESPACE) == manifest


@given(st.binary(max_size=60))
def test_no_octets_crash_the_manifest_reader(octets: bytes) -> None:
    with pytest.raises(DecodeError):
        Manifest.parse(octets)
