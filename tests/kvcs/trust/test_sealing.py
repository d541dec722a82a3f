"""Secure objects, held against the vectors of the page and of the working group's draft."""

from __future__ import annotations

import json
import os

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from kvcs.names.errors import KvcsError
from kvcs.trust import sealing
from kvcs.trust.pieces import PIECE
from kvcs.trust.sealing import (
    CtrHmac,
    Gcm,
    TrackKey,
    TrackOpener,
    TrackSealer,
    derive,
    payload_of,
)
from kvsp.names.codes import CipherSuite
from kvsp.names.content_keys import ContentKey
from kvsp.names.errors import DecodeError
from moqt.values.names import FullTrackName
from moqt.wire.primitives import Reader
from tests.paths import ROOT

VECTORS = json.loads((ROOT / "tests" / "data" / "kvcs-vectors.json").read_text())
OURS = {each["id"]: each for each in VECTORS["secure_objects"]["vectors"]}
UPSTREAM = VECTORS["secure_objects_upstream"]
FRESH = ContentKey(0, CipherSuite.AES_128_GCM_SHA256_128, bytes(range(32)))
NAME = FullTrackName((b"kvcs-1", b"scope"), b"k.raw.s0")


def octets(text: str) -> bytes:
    return bytes.fromhex(text)


def name_of(vector) -> FullTrackName:
    reader = Reader(octets(vector["full_track_name_hex"]), "vector")
    namespace = reader.namespace()
    name = FullTrackName(namespace, reader.octets())
    reader.finish()
    return name


def key_of(vector, **changes) -> ContentKey:
    vector = {**vector, **changes}
    return ContentKey(
        vector["key_id"], CipherSuite(vector["cipher_suite"]), octets(vector["track_base_key"])
    )


def opened(vector, keys=None, name=None, **changes) -> bytes:
    """What an opener makes of a vector's Object, some of it changed."""
    come = {**vector, **changes}
    properties = come.get("properties", octets(vector["object_properties_on_wire_hex"])[1:])
    opener = TrackOpener((key_of(vector),) if keys is None else keys, name or name_of(vector))
    parts = [come.get("sealed", octets(vector["ciphertext_hex"]))]
    return bytes(
        opener.open(
            come["group_id"], come["object_id"], come["publisher_priority"], properties, parts
        )
    )


WHOLE = [each for each in OURS.values() if "ciphertext_hex" in each]


@pytest.mark.parametrize("vector", WHOLE, ids=lambda each: each["id"])
def test_an_object_is_sealed_and_opened_as_the_vectors_have_it(vector) -> None:
    key, salt = derive(
        octets(vector["track_base_key"]),
        CipherSuite(vector["cipher_suite"]),
        vector["key_id"],
        name_of(vector),
    )
    assert (key.hex(), salt.hex()) == (vector["moq_key"], vector["moq_salt"])
    sealer = TrackSealer(key_of(vector), name_of(vector))
    properties = octets(vector["object_properties_on_wire_hex"])
    assert bytes([len(sealer.properties)]) + sealer.properties == properties
    payload = octets(vector["payload_hex"])
    sealed = sealer.seal(
        vector["group_id"],
        vector["object_id"],
        vector["publisher_priority"],
        [payload[:70], payload[70:]],
    )
    assert sealed.hex() == vector["ciphertext_hex"]
    assert opened(vector) == payload


@pytest.mark.parametrize("vector", UPSTREAM["vectors"], ids=lambda each: str(each["cipher_suite"]))
def test_keys_and_ciphers_are_those_of_the_drafts_own_vectors(vector) -> None:
    common = {**UPSTREAM["common"], **vector}
    suite = CipherSuite(common["cipher_suite"])
    name = FullTrackName(
        tuple(field.encode() for field in common["namespace"]), common["track_name"].encode()
    )
    base_key = octets(common["track_base_key"])
    key, salt = derive(base_key, suite, common["key_id"], name)
    assert (key.hex(), salt.hex()) == (common["moq_key"], common["moq_salt"])
    place = common["group_id"].to_bytes(8) + common["object_id"].to_bytes(4)
    made = TrackKey(base_key, suite, common["key_id"], name)
    plaintext = octets(common["plaintext"])
    sealed = made.seal(place, octets(common["aad"]), plaintext)
    if common["recomputed"] == "matches":
        assert sealed.hex() == common["ciphertext"]
    else:  # its tag is not that of RFC 9605
        assert sealed[: len(plaintext)].hex() == common["ciphertext"][: 2 * len(plaintext)]
    assert made.open(place, octets(common["aad"]), sealed) == plaintext
    assert bytes(payload_of(plaintext)) == b"hello from moq"


def test_aes_ctr_with_hmac_is_that_of_rfc_9605() -> None:
    vector = UPSTREAM["rfc9605_ctr_hmac"]
    cipher = CtrHmac(octets(vector["key"]), 10)
    nonce, aad = octets(vector["nonce"]), octets(vector["aad"])
    sealed = cipher.encrypt(nonce, octets(vector["plaintext"]), aad)
    assert sealed.hex() == vector["suite_1_ciphertext"]
    assert cipher.decrypt(nonce, sealed, aad) == octets(vector["plaintext"])


BASE = OURS["gcm-128"]
SEALED = octets(BASE["ciphertext_hex"])
MUST_FAIL = {
    "wrong-priority": {"publisher_priority": 1},
    "wrong-object": {"object_id": 2},
    "wrong-group": {"group_id": 1},
    "wrong-key-id": {
        "properties": b"\x0b\x02\x02\x02",
        "keys": (key_of(BASE), key_of(BASE, key_id=2)),
    },
    "wrong-track": {"name": name_of(OURS["other-track"])},
    "wrong-suite": {"keys": (key_of(BASE, cipher_suite=5),)},
    "bit-flip": {"sealed": SEALED[:-1] + bytes([SEALED[-1] ^ 1])},
    "tag-cut": {"sealed": SEALED[:-1]},
}


@pytest.mark.parametrize("case", VECTORS["secure_objects"]["must_fail"], ids=lambda e: e["id"])
def test_what_was_altered_or_moved_is_not_opened(case) -> None:
    with pytest.raises(DecodeError) as caught:
        opened(BASE, **MUST_FAIL[case["id"]])
    assert caught.value.name == case["error"]


@pytest.mark.parametrize("suite", CipherSuite)
@pytest.mark.parametrize("cut", [0, 3, -1])
def test_a_payload_that_is_cut_is_not_opened_in_any_suite(suite, cut) -> None:
    made = TrackKey(bytes(32), suite, 0, NAME)
    sealed = made.seal(bytes(12), b"", b"plain")
    with pytest.raises(DecodeError, match="auth-failed"):
        made.open(bytes(12), b"", sealed[:cut])


DISCARDED = {
    "object-id-2-32": {"object_id": 1 << 32},
    "no-key-id": {"properties": b"\x0b\x00"},
    "unknown-key-id": {"properties": b"\x0b\x02\x02\x09"},
    "plaintext-length-too-long": "05616263",
    "plaintext-rest-not-list": "036162630032",
}


@pytest.mark.parametrize("case", VECTORS["secure_objects"]["discard"], ids=lambda e: e["id"])
def test_what_cannot_be_a_sealed_object_is_discarded(case) -> None:
    changes = DISCARDED[case["id"]]
    if isinstance(changes, str):
        assert changes == case["plaintext_hex"]
        key = TrackKey(octets(BASE["track_base_key"]), CipherSuite(4), 0, name_of(BASE))
        place = octets("000000000000000000000001")
        changes = {"sealed": key.seal(place, place + octets("000200"), octets(changes))}
    with pytest.raises(DecodeError) as caught:
        opened(BASE, **changes)
    assert caught.value.name == case["error"]


@pytest.mark.parametrize("properties", [b"", b"\x02\x00", b"\x0b\x05\x02", b"\x0b\x01\x02"])
def test_a_key_id_outside_of_the_immutable_properties_does_not_count(properties) -> None:
    with pytest.raises(DecodeError, match="no-key-id"):
        opened(BASE, properties=properties)
    assert sealing.sealed_with(properties) is None


def test_the_error_about_an_unknown_key_says_which_ones_there_are() -> None:
    with pytest.raises(DecodeError, match=r"content key 9, and the scope file has 0, 4294967296"):
        keys = (key_of(BASE), key_of(BASE, key_id=1 << 32))
        opened(BASE, keys, properties=b"\x0b\x02\x02\x09")


def test_an_encrypted_properties_list_is_passed_over() -> None:
    assert bytes(payload_of(b"\x01x\x00\x0a\x02zz")) == b"x"
    for rest in (b"\x00\x0a", b"\x00\x0a\x03zz", b"\x00\x0a\x01zz", b"\x0a\x02zz"):
        with pytest.raises(DecodeError, match="bad-properties"):
            payload_of(b"\x01x" + rest)
    with pytest.raises(DecodeError, match="truncated"):
        payload_of(b"")


def test_a_key_seals_no_more_than_it_may(monkeypatch) -> None:
    monkeypatch.setattr(sealing, "MAX_SEALED_BLOCKS", 3)
    sealer = TrackSealer(FRESH, NAME)
    sealer.seal(0, 0, 0, [bytes(32)])
    with pytest.raises(KvcsError, match="several segments"):
        sealer.seal(0, 1, 0, [bytes(1)])
    with pytest.raises(ValueError, match="largest one"):
        sealer.seal(0, 1 << 32, 0, [])


def test_an_object_that_does_not_say_its_priority_has_the_tracks() -> None:
    sealer, opener = TrackSealer(FRESH, NAME), TrackOpener((FRESH,), NAME)
    assert bytes(opener.open(1, 2, None, sealer.properties, [sealer.seal(1, 2, 128, [b"x"])])) == (
        b"x"
    )
    opener.default_priority = 7
    assert bytes(opener.open(1, 3, None, sealer.properties, [sealer.seal(1, 3, 7, [b"y"])])) == b"y"


@given(st.binary(max_size=40), st.binary(max_size=60), st.integers(0, 1 << 33))
def test_no_octets_crash_the_opener(properties, payload, object_id) -> None:
    with pytest.raises(DecodeError):
        TrackOpener((FRESH,), NAME).open(0, object_id, 0, properties, [payload])


@pytest.mark.parametrize("octets", [PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5])
def test_what_is_long_is_sealed_and_opened_in_pieces_and_is_the_same(octets: int) -> None:
    key, nonce, data = bytes(range(16)), bytes(12), os.urandom(octets)
    sealed = Gcm(key).encrypt(nonce, data, b"with")
    assert sealed == AESGCM(key).encrypt(nonce, data, b"with")
    assert Gcm(key).decrypt(nonce, sealed, b"with") == data
    for wrong in (sealed[:-1] + bytes([sealed[-1] ^ 1]), bytes([sealed[0] ^ 1]) + sealed[1:]):
        with pytest.raises(InvalidTag):
            Gcm(key).decrypt(nonce, wrong, b"with")
