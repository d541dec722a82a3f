"""KVSP 4.1 and 4.2: descriptors, Compatibility IDs, scopes and Block Keys."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import hmac
import inspect
import json
import os
import pickle
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.names import ijson
from kvsp.names.codes import CipherSuite, Codec, DecodeErrorName, ElementType
from kvsp.names.content_keys import ContentKey
from kvsp.names.errors import DecodeError, ScopeFileError
from kvsp.names.identity import (
    Descriptor,
    Scope,
    block_keys,
    model_digest,
    parse_positional,
)
from kvsp.names.prefix import complete_blocks
from kvsp.names.tokens import token_list, token_octets
from tests.paths import ROOT

VECTORS: dict[str, Any] = json.loads((ROOT / "tests/data/kvsp-vectors.json").read_text("utf-8"))
SEED_SCOPE = Scope(bytes(range(32)))
SEED = VECTORS["compat_id"][0]["descriptor"]

ABOUT = {"title", "generated", "about", "conventions"}
HERE = {
    "jcs",
    "jcs_invalid",
    "model_digest",
    "compat_id",
    "compat_id_invalid",
    "positional",
    "scope_id",
    "scope_id_invalid",
    "block_keys",
    "tokens_invalid",
    "elements",  # with layout, in tests/kvsp/blocks/test_layout.py
    "layout",
    "sample_data",  # in tests/kvsp/blocks/test_kv_files.py
    "containers",  # from here in test_vectors_container.py
    "container_invalid",
    "container_digest_mismatch",
    "codecs",
    "layers_parameter",
    "resource_ids",  # and these in test_vectors_records.py
    "replica_record",
    "placement",
}


def ids(entries: list[dict[str, Any]]) -> list[str]:
    return [entry.get("id", str(index)) for index, entry in enumerate(entries)]


def name_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(DecodeError) as caught:
        call(*args, **kwargs)
    return caught.value.name


def vector_tokens(vector: dict[str, Any]) -> list[int]:
    if "tokens" in vector:
        return list(vector["tokens"])
    if vector["id"] == "smollm2-survey":
        return list(json.loads((ROOT / "tools/data/smollm2-survey.tokens.json").read_text()))
    # "thousand-tokens": the rule is given in words in its note
    return [
        int.from_bytes(hashlib.sha256(f"token-{i}".encode()).digest()[:4]) % 128256
        for i in range(vector["token_count"])
    ]


def test_every_group_of_the_vectors_is_tested() -> None:
    assert set(VECTORS) == HERE | ABOUT


def test_every_error_of_the_vectors_has_its_name_in_the_table() -> None:
    names: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("error"), str):
                names.add(value["error"])
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(VECTORS)
    walk(json.loads((ROOT / "tests/data/kvcs-vectors.json").read_text("utf-8")))
    assert names <= set(DecodeErrorName)


def test_codec_numbers_and_names_are_those_of_the_vectors() -> None:
    for vector in VECTORS["codecs"]:
        codec = Codec(vector["value"])
        assert vector["id"].startswith(codec.label)
        assert Codec.from_label(codec.label) is codec
    assert Codec.from_label("zstd") is None
    assert [codec for codec in Codec if not codec.lossless] == [Codec.X_Q8]


# --- I-JSON and JCS ------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS["jcs"], ids=ids(VECTORS["jcs"]))
def test_canonical_json_is_that_of_three_other_canonicalizers(vector: dict[str, Any]) -> None:
    octets = ijson.canonical(ijson.loads(vector["json_text"]))
    assert octets.hex() == vector["canonical_hex"]
    assert octets.decode() == vector["canonical_text"]
    assert hashlib.sha256(octets).hexdigest() == vector["sha256"]


@pytest.mark.parametrize("vector", VECTORS["jcs_invalid"], ids=ids(VECTORS["jcs_invalid"]))
def test_json_that_is_not_i_json_is_refused_by_name(vector: dict[str, Any]) -> None:
    source = vector.get("json_text") or bytes.fromhex(vector["json_hex"])
    assert name_of(ijson.loads, source) == vector["error"]
    assert name_of(Descriptor.parse, source) == vector["error"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1,]",
        "{} {}",
        "\ufeff{}",
        '["\\ud800"]',
        '["\\udc00\\ud800"]',
        '{"\\udfff":1}',
        '{"a":{"b":["\\ud800"]}}',
        "\ud800",
        "1e400",
        "-Infinity",
        "9007199254740992",
        "100000000000000000000.0",
        "9" * 5000,
        "[" * 65 + "]" * 65,
        "[" * 100_000,
        '{"a":1,"a":NaN}',
        '{"a":["\\ud800"],"a":1}',
        '["\t"]',
    ],
)
def test_what_i_json_forbids_is_not_i_json(text: str) -> None:
    assert name_of(ijson.loads, text) == "not-i-json"


def test_an_integer_of_thousands_of_digits_is_refused_wherever_it_stands() -> None:
    for spaces in range(0, 1100, 11):
        text = '{"a":' + " " * spaces + "9" * 4400 + "}"
        assert name_of(ijson.loads, text) == "not-i-json"


def test_nesting_up_to_the_limit_is_read() -> None:
    assert ijson.loads("[" * 64 + "]" * 64) is not None


def test_a_surrogate_pair_is_one_character() -> None:
    assert ijson.loads('["\\ud83d\\ude00"]') == ["\U0001f600"]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)


@given(JSON_VALUES)
def test_canonical_json_is_read_back_as_the_same_value(value: Any) -> None:
    octets = ijson.canonical(value)
    assert ijson.loads(octets) == value
    assert ijson.canonical(ijson.loads(octets)) == octets


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_that_was_read_can_be_read_again_in_canonical_form(number: float) -> None:
    try:
        value = ijson.loads(repr(number))
    except DecodeError as error:
        assert error.name == "not-i-json" and 2**53 <= abs(number) < 1e21
        return
    assert ijson.loads(ijson.canonical(value)) == number


@given(st.binary(max_size=64) | st.text(max_size=64))
def test_no_octets_crash_the_json_reader(data: bytes | str) -> None:
    try:
        ijson.canonical(ijson.loads(data))
    except DecodeError as error:
        assert error.name in ("not-i-json", "duplicate-member")


def test_values_json_cannot_hold_have_no_canonical_form() -> None:
    for value in (float("nan"), 2**53, {1: 2}, object(), {"a": b""}, "\ud800"):
        assert name_of(ijson.canonical, value) == "not-i-json"


# --- descriptors ---------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS["compat_id"], ids=ids(VECTORS["compat_id"]))
def test_the_compatibility_id_is_the_digest_of_the_canonical_descriptor(
    vector: dict[str, Any],
) -> None:
    sources = [vector["jcs_text"], vector["jcs_text"].encode()]
    sources += [vector[key] for key in ("json_text", "descriptor") if key in vector]
    for source in sources:
        descriptor = Descriptor.parse(source)
        assert descriptor.jcs.hex() == vector["jcs_hex"]
        assert descriptor.compat_id.hex() == vector["compat_id"]
        assert descriptor == Descriptor.parse(vector["jcs_text"])


def test_the_compatibility_id_covers_members_that_nobody_here_knows() -> None:
    plain, more = Descriptor.parse(SEED), Descriptor.parse(SEED | {"x-rope-scale": 2})
    assert b"x-rope-scale" in more.jcs and more.compat_id != plain.compat_id
    assert more.layers == plain.layers


def test_the_compatibility_id_printed_in_the_seed_is_reproduced() -> None:
    compat_id = Descriptor.parse(SEED).compat_id.hex()
    assert compat_id.startswith("5ed5c2f2") and compat_id.endswith("ee0f")


@pytest.mark.parametrize(
    "vector", VECTORS["compat_id_invalid"], ids=ids(VECTORS["compat_id_invalid"])
)
def test_a_malformed_descriptor_has_one_error(vector: dict[str, Any]) -> None:
    if "json_text" in vector:
        assert name_of(Descriptor.parse, vector["json_text"]) == vector["error"]
        return
    text = json.dumps(vector["descriptor"])
    assert name_of(Descriptor.parse, text) == vector["error"]
    if isinstance(vector["descriptor"], dict):
        assert name_of(Descriptor.parse, vector["descriptor"]) == vector["error"]


def test_members_are_judged_in_the_order_of_the_specification() -> None:
    assert name_of(Descriptor.parse, SEED | {"layers": 0, "model": 7}) == "wrong-type"
    assert name_of(Descriptor.parse, SEED | {"layers": 0, "positional": "?"}) == "out-of-range"
    without = {name: value for name, value in SEED.items() if name != "layout"}
    assert name_of(Descriptor.parse, without | {"positional": "?"}) == "bad-positional"


def test_a_model_name_of_1024_octets_is_the_longest() -> None:
    assert Descriptor.parse(SEED | {"model": "é" * 512}).model == "é" * 512
    assert name_of(Descriptor.parse, SEED | {"model": "é" * 512 + "e"}) == "out-of-range"


CHANGES: dict[str, Any] = {
    "model": "other",
    "model_digest": "sha-256:" + "0" * 64,
    "tokenizer_digest": "sha-256:" + "0" * 64,
    "adapters": ["sha-256:" + "0" * 64],
    "layers": 31,
    "kv_heads": 4,
    "head_dim": 64,
    "kv_dtype": "fp16",
    "positional": "rope;base=500000",
    "block_tokens": 16,
    "layout": "x-other",
    "x-unknown": 0,
}


@pytest.mark.parametrize("member", CHANGES)
def test_changing_any_member_changes_the_compatibility_id(member: str) -> None:
    assert member in CHANGES and set(SEED) <= set(CHANGES)
    changed = Descriptor.parse(SEED | {member: CHANGES[member]})
    assert changed.compat_id != Descriptor.parse(SEED).compat_id
    assert changed != Descriptor.parse(SEED)
    keys = block_keys(SEED_SCOPE, Descriptor.parse(SEED), range(64))
    assert not set(keys) & set(block_keys(SEED_SCOPE, changed, range(64)))


def test_two_adapters_make_two_identities_and_their_order_counts() -> None:
    one, two = ("sha-256:" + digit * 64 for digit in "12")
    made = [
        Descriptor.parse(SEED | {"adapters": adapters}).compat_id
        for adapters in ([one], [two], [one, two], [two, one])
    ]
    assert len({*made, Descriptor.parse(SEED).compat_id}) == 5


def test_a_descriptor_tells_the_octets_of_a_section() -> None:
    descriptor = Descriptor.parse(SEED)
    assert (descriptor.element_octets, descriptor.element_type) == (2, ElementType.BF16)
    assert descriptor.section_octets() == 4 * 8 * 128 * 2 == 8192
    assert descriptor.section_octets(1) == 2048
    assert descriptor.positional == parse_positional("rope")
    assert descriptor.to_dict() == SEED
    assert pickle.loads(pickle.dumps(descriptor)) == descriptor


@pytest.mark.parametrize("change", [{"kv_dtype": "bfloat16"}, {"layout": "x-mine"}])
def test_an_unregistered_type_or_layout_has_an_identity_but_no_raw_sections(
    change: dict[str, str],
) -> None:
    descriptor = Descriptor.parse(SEED | change)
    assert len(descriptor.compat_id) == 32
    assert name_of(descriptor.section_octets) == "codec-unsupported"


def test_a_descriptor_keeps_no_part_of_the_object_it_was_made_of() -> None:
    source = SEED | {"x-list": [1]}
    descriptor = Descriptor.parse(source)
    source["x-list"].append(2)
    descriptor.to_dict()["x-list"].append(3)
    assert descriptor.to_dict()["x-list"] == [1]


# --- positional encodings ------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS["positional"]["valid"], ids=lambda v: v["text"])
def test_a_positional_encoding_has_a_name_and_parameters(vector: dict[str, Any]) -> None:
    positional = parse_positional(vector["text"])
    assert positional.name == vector["name"]
    assert positional.parameters == vector["parameters"]
    assert str(positional) == vector["text"]


@pytest.mark.parametrize("vector", VECTORS["positional"]["invalid"], ids=lambda v: v["note"])
def test_a_malformed_positional_encoding_is_refused(vector: dict[str, Any]) -> None:
    assert name_of(parse_positional, vector["text"]) == vector["error"]


@pytest.mark.parametrize(
    "value", ["+5", "-", "-0", "1e999", "1.0", "0x10", "1e5", "9007199254740993", ".5x"]
)
def test_a_number_is_written_as_jcs_writes_it(value: str) -> None:
    if value == ".5x":  # does not start like a number, so it is a word
        parse_positional(f"rope;base={value}")
        return
    assert name_of(parse_positional, f"rope;base={value}") == "bad-positional"
    parse_positional("rope;a=-0.5;b=1e-7;c=1e+21")


def test_a_positional_text_ends_where_it_ends() -> None:
    for text in ("rope\n", "rope;base=1\n", "r" * 33, "rope;b=" + "a" * 65):
        assert name_of(parse_positional, text) == "bad-positional"


# --- model digests -------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS["model_digest"], ids=ids(VECTORS["model_digest"]))
def test_a_model_digest_runs_over_the_files_in_octet_order_of_their_names(
    vector: dict[str, Any], tmp_path: Path
) -> None:
    octets = {file["name"]: bytes.fromhex(file["hex"]) for file in vector["files"]}
    assert model_digest(octets) == vector["model_digest"]
    paths: dict[str, bytes | os.PathLike[str]] = {}
    for index, (name, content) in enumerate(octets.items()):
        paths[name] = tmp_path / str(index)
        (tmp_path / str(index)).write_bytes(content)
    assert model_digest(paths) == vector["model_digest"]


@pytest.mark.parametrize("name", ["", "./a", "/a", "a/../b", "a//b"])
def test_a_weight_file_is_named_by_its_path_below_the_folder(name: str) -> None:
    with pytest.raises(ValueError):
        model_digest({name: b""})
    with pytest.raises(ValueError):
        model_digest({})


# --- scopes --------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS["scope_id"], ids=ids(VECTORS["scope_id"]))
def test_the_scope_id_is_the_start_of_the_digest_of_the_scope_key(vector: dict[str, Any]) -> None:
    scope = Scope(bytes.fromhex(vector["scope_key"]))
    assert scope.scope_id.hex() == vector["scope_id"]


def test_the_scope_id_printed_in_the_seed_is_reproduced() -> None:
    assert SEED_SCOPE.scope_id.hex() == "6d1c6481cd428737da312c089db3832a"


@pytest.mark.parametrize(
    "vector", VECTORS["scope_id_invalid"], ids=ids(VECTORS["scope_id_invalid"])
)
def test_an_empty_or_short_scope_key_is_refused(vector: dict[str, Any]) -> None:
    assert name_of(Scope, bytes.fromhex(vector["scope_key"])) == vector["error"]
    text = json.dumps({"scope_key": vector["scope_key"]})
    assert name_of(Scope.from_json, text) == vector["error"]


def test_a_scope_key_has_at_most_1024_octets() -> None:
    Scope(bytes(1024))
    assert name_of(Scope, bytes(1025)) == "out-of-range"


def test_a_scope_never_shows_its_key() -> None:
    key = bytes(range(100, 132))
    scope = Scope(key)
    for text in (repr(scope), str(scope), f"{scope}", str([scope])):
        assert key.hex() not in text and repr(key) not in text and scope.scope_id.hex() in text
    with pytest.raises(TypeError):
        pickle.dumps(scope)
    assert scope == Scope(key) and scope != Scope(bytes(32)) and scope != key
    assert {scope, Scope(key)} == {scope}


def test_a_scope_file_is_made_for_its_owner_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "scope.json"
    scope = Scope.generate()
    old = os.umask(0o777)
    try:
        scope.save(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Scope.load(path) == scope != Scope.generate()
    assert [file.name for file in tmp_path.iterdir()] == ["scope.json"]


def test_a_scope_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "scope.json"
    path.write_bytes(b"something dear")
    with pytest.raises(ScopeFileError, match="exists already"):
        Scope.generate().save(path)
    assert path.read_bytes() == b"something dear"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o601])
def test_a_scope_file_others_have_access_to_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "scope.json"
    Scope.generate().save(path)
    path.chmod(mode)
    with pytest.raises(ScopeFileError, match="chmod 600"):
        Scope.load(path)


def test_a_scope_file_may_be_a_pipe_that_is_its_owners_alone(tmp_path: Path) -> None:
    scope = Scope.generate()
    scope.save(tmp_path / "scope.json")
    os.mkfifo(tmp_path / "pipe", 0o600)
    writer = threading.Thread(
        target=(tmp_path / "pipe").write_bytes, args=((tmp_path / "scope.json").read_bytes(),)
    )
    writer.start()
    assert Scope.load(tmp_path / "pipe").scope_id == scope.scope_id
    writer.join()
    (tmp_path / "pipe").chmod(0o644)
    held = os.open(tmp_path / "pipe", os.O_RDWR)
    with pytest.raises(ScopeFileError, match="chmod 600"):
        Scope.load(tmp_path / "pipe")
    os.close(held)


def test_a_scope_file_that_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    for name in (".", "absent"):
        with pytest.raises(ScopeFileError, match=name):
            Scope.load(tmp_path / name)
    (tmp_path / "large").touch(0o600)
    os.truncate(tmp_path / "large", 2 << 20)
    with pytest.raises(ScopeFileError, match="larger"):
        Scope.load(tmp_path / "large")
    with pytest.raises(ScopeFileError, match="absent"):
        Scope.generate().save(tmp_path / "absent" / "scope.json")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "not-i-json"),
        ("[]", "not-an-object"),
        ("{}", "missing-member"),
        ('{"scope_key":1}', "wrong-type"),
        ('{"scope_key":null}', "wrong-type"),
        ('{"scope_key":"' + "AB" * 32 + '"}', "bad-hex"),
        ('{"scope_key":"' + "a" * 65 + '"}', "bad-hex"),
        ('{"scope_key":"' + "ab" * 31 + '"}', "short-scope-key"),
        ('{"scope_key":"' + "ab" * 1025 + '"}', "out-of-range"),
        ('{"scope_key":"' + "ab" * 32 + '","scope_key":""}', "duplicate-member"),
    ],
)
def test_a_malformed_scope_file_has_one_error_that_names_the_file_and_no_key(
    tmp_path: Path, text: str, error: str
) -> None:
    path = tmp_path / "scope.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(DecodeError) as caught:
        Scope.load(path)
    assert caught.value.name == error
    assert str(path) in str(caught.value) and "abab" not in str(caught.value).lower()


def test_members_of_a_scope_file_that_start_with_x_are_for_others() -> None:
    text = json.dumps({"scope_key": bytes(range(32)).hex(), "content_keys": [], "x-name": "ours"})
    assert Scope.from_json(text) == SEED_SCOPE


KEY = {"key_id": 0, "cipher_suite": 4, "key": "cd" * 32}
WRONG_KEYS = {
    "no array": None,
    "no object": ["cd" * 32],
    "another member": [{**KEY, "kid": 1}],
    "a member lacks": [{"key_id": 0, "key": "cd" * 32}],
    "a negative id": [{**KEY, "key_id": -1}],
    "an id of text": [{**KEY, "key_id": "0"}],
    "a suite whose tag is too short": [{**KEY, "cipher_suite": 3}],
    "an unknown suite": [{**KEY, "cipher_suite": 0xF000}],
    "a suite that is a Boolean": [{**KEY, "cipher_suite": True}],
    "a short key": [{**KEY, "key": "cd" * 16}],
    "upper case": [{**KEY, "key": "CD" * 32}],
    "an id twice": [KEY, {**KEY, "key": "ce" * 32}],
}


@pytest.mark.parametrize("sealing", [False, True])
@pytest.mark.parametrize("case", WRONG_KEYS)
def test_content_keys_that_are_wrong_are_refused_and_never_shown(
    tmp_path: Path, case: str, sealing: bool
) -> None:
    path = scope_file(tmp_path, content_keys=WRONG_KEYS[case])
    with pytest.raises(ScopeFileError, match="content_keys") as caught:
        Scope.load(path, sealing=sealing)
    assert str(path) in str(caught.value) and not re.search("(?i)abab|cdcd", str(caught.value))


@pytest.mark.parametrize(
    "members", [{"content_keys": [KEY]}, {"content_key": "00"}, {"seal": True}]
)
def test_a_scope_file_that_asks_for_protection_we_lack_is_refused_and_never_ignored(
    tmp_path: Path, members: dict[str, Any]
) -> None:
    path = scope_file(tmp_path, **members)
    with pytest.raises(ScopeFileError, match="content_keys") as caught:
        Scope.load(path)
    assert str(path) in str(caught.value) and not re.search("abab|cdcd", str(caught.value))


def test_content_keys_are_read_by_who_seals_and_never_shown(tmp_path: Path) -> None:
    scope = Scope.load(scope_file(tmp_path, content_keys=[KEY]), sealing=True)
    assert scope.content_keys == (
        ContentKey(0, CipherSuite.AES_128_GCM_SHA256_128, bytes.fromhex("cd" * 32)),
    )
    assert scope != Scope(bytes.fromhex("ab" * 32))
    assert "cd" * 32 not in repr(scope.content_keys) + repr(scope)
    scope.save(tmp_path / "copy.json")
    assert Scope.load(tmp_path / "copy.json", sealing=True) == scope


def test_rotation_adds_a_key_and_keeps_all_else(tmp_path: Path) -> None:
    path = scope_file(tmp_path, **{"x-name": "ours"})
    ids = [Scope.rotate(path).key_id for _ in range(3)]
    assert ids == [0, 1 << 32, (1 << 32) + 1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    tree = json.loads(path.read_text())
    assert tree["x-name"] == "ours" and tree["scope_key"] == "ab" * 32
    keys = Scope.load(path, sealing=True).content_keys
    assert [key.key_id for key in keys] == ids and len({key.key for key in keys}) == 3
    tree["content_keys"].append({**KEY, "key_id": 300, "cipher_suite": 5})
    path.write_text(json.dumps(tree))
    assert Scope.rotate(path).key_id == (1 << 32) + 2
    last = Scope.load(path, sealing=True).content_keys[-1]
    assert last.cipher_suite is CipherSuite.AES_256_GCM_SHA512_128


def test_a_file_that_cannot_be_rotated_is_as_it_was(tmp_path: Path) -> None:
    path = scope_file(tmp_path, content_keys=[{**KEY, "cipher_suite": 9}])
    before = path.read_bytes()
    with pytest.raises(ScopeFileError):
        Scope.rotate(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def scope_file(folder: Path, **members: Any) -> Path:
    path = folder / "scope.json"
    path.write_text(json.dumps({"scope_key": "ab" * 32, **members}))
    path.chmod(0o600)
    return path


@given(st.binary(max_size=80))
def test_no_octets_crash_the_scope_file_reader(data: bytes) -> None:
    for text in (data, b'{"scope_key":"' + data + b'"}'):
        with contextlib.suppress(DecodeError):
            Scope.from_json(text)


@given(st.binary(min_size=32, max_size=200), st.binary(max_size=99), st.binary(max_size=200))
def test_the_macs_of_a_scope_are_hmacs_under_its_key(
    key: bytes, prefix: bytes, message: bytes
) -> None:
    mac = Scope(key).macs(prefix)
    for each in (message, b""):
        assert mac(each) == hmac.digest(key, prefix + each, "sha256")


# --- Block Keys ----------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS["block_keys"], ids=ids(VECTORS["block_keys"]))
def test_block_keys_are_the_keyed_hash_chain_of_the_specification(vector: dict[str, Any]) -> None:
    tokens = vector_tokens(vector)
    scope = Scope(bytes.fromhex(vector["scope_key"]))
    keys = block_keys(
        scope,
        bytes.fromhex(vector["compat_id"]),
        tokens,
        block_tokens=vector["block_tokens"],
    )
    assert len(keys) == vector["blocks"] == complete_blocks(len(tokens), vector["block_tokens"])
    assert hashlib.sha256(b"".join(keys)).hexdigest() == vector["block_keys_sha256"]
    if "block_keys" in vector:
        assert [key.hex() for key in keys] == vector["block_keys"]
    else:
        assert (keys[0].hex(), keys[-1].hex()) == (vector["first_key"], vector["last_key"])


@pytest.mark.parametrize("vector", VECTORS["tokens_invalid"], ids=lambda v: str(v["tokens"][0]))
def test_token_ids_are_integers_of_32_bits(vector: dict[str, Any]) -> None:
    name = name_of(block_keys, SEED_SCOPE, Descriptor.parse(SEED), vector["tokens"])
    assert name == vector["error"]


def test_a_bad_token_is_named_by_its_position_and_never_shown() -> None:
    tokens: Any
    for tokens in ([0, 0, 987654321987], np.array([0, 0, 987654321987])):
        with pytest.raises(DecodeError) as caught:
            block_keys(SEED_SCOPE, Descriptor.parse(SEED), tokens)
        assert caught.value.name == "bad-token"
        assert "position 2" in str(caught.value) and "987654" not in str(caught.value)


def test_token_arrays_are_one_dimensional_integers() -> None:
    for tokens in (np.zeros(8), np.zeros((2, 4), int), np.zeros(8, bool), np.array(["1"])):
        assert name_of(block_keys, SEED_SCOPE, Descriptor.parse(SEED), tokens) == "bad-token"
    assert block_keys(SEED_SCOPE, Descriptor.parse(SEED), np.array([])) == []


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9))
def test_the_writer_and_the_reader_compute_the_same_keys(tokens: list[int], size: int) -> None:
    descriptor = Descriptor.parse(SEED | {"block_tokens": size})
    writer = block_keys(SEED_SCOPE, descriptor, np.array(tokens, np.uint32))
    reader = block_keys(Scope(bytes(range(32))), descriptor.compat_id, tokens, block_tokens=size)
    assert writer == reader
    for kind in (np.int64, np.uint64):
        assert block_keys(SEED_SCOPE, descriptor, np.array(tokens, kind)) == writer
    assert block_keys(SEED_SCOPE, descriptor, list(np.array(tokens, np.uint32))) == writer
    # a key names its whole prefix
    for blocks in range(len(writer) + 1):
        assert block_keys(SEED_SCOPE, descriptor, tokens[: blocks * size]) == writer[:blocks]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (3, 0), (4, 1), (5, 1)])
def test_only_complete_blocks_have_keys(tokens: int, blocks: int) -> None:
    assert len(block_keys(SEED_SCOPE, Descriptor.parse(SEED), range(tokens))) == blocks


def test_another_scope_shares_no_key_and_the_same_scope_shares_all() -> None:
    descriptor = Descriptor.parse(SEED)
    keys = block_keys(SEED_SCOPE, descriptor, range(400))
    assert block_keys(Scope(bytes(range(32))), descriptor, range(400)) == keys
    assert not set(keys) & set(block_keys(Scope(bytes(32)), descriptor, range(400)))


def test_keys_cannot_be_computed_without_a_scope() -> None:
    parameters = inspect.signature(block_keys).parameters
    assert next(iter(parameters)) == "scope"
    assert parameters["scope"].default is inspect.Parameter.empty
    for wrong in (None, bytes(32), "scope", SEED_SCOPE.scope_id):
        with pytest.raises(TypeError, match="scope"):
            block_keys(wrong, Descriptor.parse(SEED), range(8))  # type: ignore[arg-type]


def test_a_compatibility_id_needs_its_block_size() -> None:
    descriptor = Descriptor.parse(SEED)
    with pytest.raises(ValueError, match="block_tokens"):
        block_keys(SEED_SCOPE, descriptor.compat_id, range(8))
    with pytest.raises(ValueError, match="descriptor"):
        block_keys(SEED_SCOPE, descriptor, range(8), block_tokens=16)
    with pytest.raises(ValueError, match="32 octets"):
        block_keys(SEED_SCOPE, bytes(16), range(8), block_tokens=4)
    with pytest.raises(ValueError):
        block_keys(SEED_SCOPE, descriptor.compat_id, range(8), block_tokens=0)


def test_keys_are_the_same_in_processes_with_different_hash_seeds() -> None:
    program = (
        "from kvsp.names.identity import *\n"
        "import sys\n"
        "scope = Scope(bytes(range(32)))\n"
        "keys = block_keys(scope, Descriptor.parse(sys.argv[1]), range(100))\n"
        "print(scope.scope_id.hex(), *(key.hex() for key in keys))\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program, json.dumps(SEED)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4294967295")
    }
    assert len(outputs) == 1 and len(outputs.pop().split()) == 26


def test_no_name_depends_on_the_hash_function_of_the_process() -> None:
    files = [path for package in ("kvsp", "kvcs") for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 5
    for path in files:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            used = isinstance(node, ast.Name) and node.id == "hash"
            assert not used, f"{path.name}:{getattr(node, 'lineno', 0)} uses the builtin hash"


def test_token_ids_are_integers_of_whatever_kind_and_nothing_else() -> None:
    ids = [0, 7, 2**32 - 1]
    octets = b"".join(each.to_bytes(4) for each in ids)
    for tokens in (
        ids,
        tuple(ids),
        np.array(ids),
        np.array(ids, dtype=np.uint32),
        [np.int64(each) for each in ids],
        [np.array(each) for each in ids],
        [0, np.uint8(7), np.array(2**32 - 1)],
    ):
        assert token_octets(tokens) == octets and token_list(tokens) == ids
    assert token_octets([]) == token_octets(np.array([])) == b""
    for wrong in (True, 1.0, np.bool_(True), np.float32(1), np.array(True), np.array([1]), "1", -1):
        with pytest.raises(DecodeError, match="position 1 is not an integer from 0 to"):
            token_octets([1, wrong])
    for wrong in (np.array([True]), np.array([1.0]), np.array([[1]])):
        with pytest.raises(DecodeError, match="a one-dimensional array of integers"):
            token_octets(wrong)
