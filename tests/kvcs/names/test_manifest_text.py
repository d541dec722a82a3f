"""The text of a manifest, read piece by piece: the same as read at once, whatever the pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.names import manifest_text
from kvcs.names.codes import MAX_MANIFEST_FRAME_OCTETS, MAX_SEGMENTS
from kvcs.names.manifest_text import ManifestReader, group_text, with_strings
from kvsp.names import ijson
from kvsp.names.errors import DecodeError
from tests.kvcs.inside import looks_at_manifests

DIGEST = "0123456789abcdef" * 4


def read(text: bytes, cuts: list[int] | None = None) -> Any:
    """What the reader has for a text, cut at these places; or the name of its error."""
    reader = ManifestReader()
    at = [0, *sorted(cut % (len(text) + 1) for cut in cuts or []), len(text)]
    for start, stop in pairwise(at):
        reader.feed(text[start:stop])
    try:
        return with_strings(reader.tree())
    except DecodeError as error:
        return error.name


def at_once(text: bytes) -> Any:
    try:
        return ijson.loads(text)
    except DecodeError as error:
        return error.name


TREES = st.recursive(
    st.sampled_from([DIGEST, DIGEST[:-1], DIGEST.upper(), DIGEST + "0", "", '"[', 1, None, "\\"]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(st.just(DIGEST), max_size=5)
        | st.lists(st.lists(st.just(DIGEST), max_size=2), max_size=3)
        | st.dictionaries(st.sampled_from([DIGEST, "a", '["', "tracks"]), inner, max_size=3)
    ),
    max_leaves=12,
)
SEPARATORS = st.sampled_from([(",", ":"), (", ", ": "), (" , ", ":"), (",\n\t", ":")])
CUTS = st.lists(st.integers(0, 1 << 16), max_size=8)


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    """Short texts are looked at in as many steps as long ones."""
    monkeypatch.setattr(manifest_text, "LEAST", 1)


@given(TREES, SEPARATORS, CUTS)
def test_a_text_in_pieces_has_the_value_it_has_at_once(tree, separators, cuts) -> None:
    text = json.dumps(tree, separators=separators).encode()
    assert read(text, cuts) == tree


@given(TREES, SEPARATORS, CUTS, st.integers(0, 1 << 16), st.sampled_from([*'"[],:{}\\ 0', ""]))
def test_a_text_in_pieces_is_refused_when_it_would_be_at_once(
    tree, separators, cuts, place, octet
) -> None:
    text = json.dumps(tree, separators=separators).encode()
    place %= len(text)
    text = text[:place] + octet.encode() + text[place + 1 :]
    assert read(text, cuts) == at_once(text)


@pytest.mark.parametrize(
    "text",
    [
        f'["{DIGEST}","{DIGEST}",]',
        f'["{DIGEST}" "{DIGEST}"]',
        f'{{"a":1,"{DIGEST}","b":2}}',
        f'["x["{DIGEST}"]',
        f'["{DIGEST}","{DIGEST}"',
        f'["{DIGEST}",',
        f'[,"{DIGEST}"]',
        f'{{"a":["{DIGEST}"],["{DIGEST}"]}}',
        f'["{DIGEST}"],["{DIGEST}"]',
        f'[["{DIGEST}"] , ["{DIGEST}"],[1,"{DIGEST}"],["{DIGEST}",2]]',
        f'[["{DIGEST}"],["x"],["{DIGEST}"],[],["{DIGEST}"],[["{DIGEST}"]]]',
        f'[["{DIGEST}"],["{DIGEST}"',
        f'[["{DIGEST}"],[',
        f'[["{DIGEST}"],',
        f'[["{DIGEST}"]',
        f'[["{DIGEST}",["{DIGEST}"],["{DIGEST}"],"{DIGEST}"]]',
        f'["{DIGEST}\\u0030"]',
        f'["\\u0030{DIGEST[1:]}","{DIGEST}"]',
        f'{{"a":["{DIGEST}"],"a":["{DIGEST}"]}}',
    ],
)
def test_digests_do_not_hide_what_is_wrong_around_them(text: str) -> None:
    for cut in range(len(text)):
        assert read(text.encode(), [cut]) == at_once(text.encode()), cut


def test_digests_that_follow_each_other_are_one_item() -> None:
    reader = ManifestReader()
    octets = bytes(range(32)) * 3
    text = group_text(octets)
    reader.feed(b'{"a":[' + b",".join([text] * 3) + b"]}")
    assert reader.tree() == {"a": [[octets], [octets], [octets]]}


def test_the_groups_of_many_short_segments_leave_room_for_the_rest() -> None:
    """1,024 segments of a block each, of 80 layers: 163,840 groups."""
    reader = ManifestReader()
    groups = b",".join([group_text(bytes(32))] * 80)
    segment = b'{"k.raw.s0":[' + groups + b'],"v.raw.s0":[' + groups + b"]}"
    reader.feed(b"[" + b",".join([segment] * 1024) + b"]")
    tree = reader.tree()
    assert len(tree) == 1024
    assert tree[-1] == {f"{each}.raw.s0": [[bytes(32)]] * 80 for each in "kv"}


def test_a_text_of_many_small_parts_is_looked_at_a_few_times_only(monkeypatch) -> None:
    """A string, or white space, that does not end costs no more than its length."""
    monkeypatch.setattr(manifest_text, "LEAST", 4096)
    looks = looks_at_manifests(monkeypatch)
    for text in (b'{"a":"', b'["' + DIGEST.encode() + b'"', b'["' + DIGEST.encode() + b'",'):
        looks.clear()
        reader = ManifestReader()
        reader.feed(text)
        for _ in range(20_000):
            reader.feed(b" ")
        assert 0 < sum(looks) <= 4 * 20_000


@pytest.mark.parametrize("text", [b'{"a":"', b"[[[[", b"[1,1,", b" ", b'["x","y","z",'])
def test_what_is_no_digest_is_kept_up_to_a_limit(text: bytes) -> None:
    reader = ManifestReader()
    for _ in range(64):
        reader.feed(text * (MAX_MANIFEST_FRAME_OCTETS // 16 // len(text)))
    with pytest.raises(DecodeError) as caught:
        reader.tree()
    assert caught.value.name == "bad-manifest"


def test_who_reads_more_segments_reads_the_text_that_they_need() -> None:
    text = json.dumps({"padding": "x" * (MAX_MANIFEST_FRAME_OCTETS + (256 << 10))}).encode()
    for segments, fits in ((MAX_SEGMENTS, False), (MAX_SEGMENTS + 300, True)):
        reader = ManifestReader(max_segments=segments)
        reader.feed(text)
        if fits:
            assert reader.tree() == json.loads(text)
        else:
            with pytest.raises(DecodeError, match="beside its digests"):
                reader.tree()
