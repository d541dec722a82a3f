"""The envelope of "manifest.cose", held against the vectors and another implementation."""

from __future__ import annotations

import hashlib
import json

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycose.keys import EC2Key, OKPKey
from pycose.messages import Sign1Message

from kvcs.trust.cose import open_message, read, sign
from kvcs.trust.producers import Algorithm, ProducerKey, Producers
from kvsp.names import ijson
from kvsp.names.errors import DecodeError
from tests.paths import ROOT

DATA = json.loads((ROOT / "tests" / "data" / "kvcs-vectors.json").read_text())
VECTORS = {each["id"]: each for each in DATA["manifest_cose"]["vectors"]}
MANIFEST = ijson.canonical(DATA["manifest"]["manifest"])
SMALL = bytes.fromhex(DATA["manifest_cose"]["small"]["hex"])
LISTED = [
    {
        "kid": VECTORS["ES256"]["kid_hex"],
        "alg": -7,
        "x": VECTORS["ES256"]["public_x_hex"],
        "y": VECTORS["ES256"]["public_y_hex"],
    },
    {"kid": VECTORS["EdDSA"]["kid_hex"], "alg": -8, "x": VECTORS["EdDSA"]["public_hex"]},
]
PRODUCERS = Producers(LISTED)
SECRETS = {"ES256": "private_d_hex", "EdDSA": "private_hex"}


def vector_key(vector_id: str, tmp_path) -> ProducerKey:
    public = next(each for each in LISTED if each["kid"] == VECTORS[vector_id]["kid_hex"])
    path = tmp_path / "key.json"
    path.touch(0o600)
    path.write_text(json.dumps({**public, "d": VECTORS[vector_id][SECRETS[vector_id]]}))
    return ProducerKey.load(path)


def signed(payload: bytes, key: ProducerKey) -> bytes:
    """A message, its payload in two pieces."""
    return b"".join(sign([payload[:5], payload[5:]], key))


@pytest.mark.parametrize("vector", VECTORS.values(), ids=VECTORS)
def test_a_signed_manifest_of_the_vectors_is_opened(vector) -> None:
    head = bytes.fromhex(vector["cose_sign1_hex_head"])
    signature = bytes.fromhex(vector["signature_hex"])
    length = b"\x59" + len(MANIFEST).to_bytes(2)
    message = head.partition(length)[0] + length + MANIFEST + b"\x58\x40" + signature
    assert len(message) == vector["cose_sign1_octets"]
    assert hashlib.sha256(message).hexdigest() == vector["cose_sign1_sha256"]
    assert open_message(message, PRODUCERS) == MANIFEST
    assert read(message).protected.hex() == vector["protected_hex"]


def test_an_eddsa_signature_is_the_one_of_the_vectors(tmp_path) -> None:
    message = signed(MANIFEST, vector_key("EdDSA", tmp_path))
    assert hashlib.sha256(message).hexdigest() == VECTORS["EdDSA"]["cose_sign1_sha256"]


@pytest.mark.parametrize("vector_id", VECTORS)
def test_what_is_signed_is_opened_by_its_key_alone(vector_id, tmp_path) -> None:
    key = vector_key(vector_id, tmp_path)
    message = signed(b"payload", key)
    assert message[0] == 0xD2
    assert open_message(message, PRODUCERS) == b"payload"
    other = ProducerKey.generate(key.algorithm, key.kid)
    with pytest.raises(DecodeError, match="bad-signature"):
        open_message(message, Producers([other.public]))
    with pytest.raises(DecodeError, match="unknown-producer"):
        open_message(message, Producers([ProducerKey.generate(key.algorithm).public]))


@pytest.mark.parametrize("vector_id", VECTORS)
def test_pycose_verifies_what_we_sign_and_we_what_pycose_signs(vector_id, tmp_path) -> None:
    key, vector = vector_key(vector_id, tmp_path), VECTORS[vector_id]
    secret = bytes.fromhex(vector[SECRETS[vector_id]])
    if vector_id == "ES256":
        x, y = (bytes.fromhex(vector[f"public_{each}_hex"]) for each in "xy")
        theirs = EC2Key(crv="P_256", x=x, y=y, d=secret)
    else:
        theirs = OKPKey(crv="ED25519", x=bytes.fromhex(vector["public_hex"]), d=secret)
    message = Sign1Message.decode(signed(MANIFEST, key))
    message.key = theirs
    assert message.payload == MANIFEST and message.verify_signature()
    made = Sign1Message(
        phdr={1: vector["alg"]}, uhdr={4: bytes.fromhex(vector["kid_hex"])}, payload=MANIFEST
    )
    made.key = theirs
    assert open_message(made.encode(), PRODUCERS) == MANIFEST
    assert open_message(made.encode(tag=False), PRODUCERS) == MANIFEST


@pytest.mark.parametrize("case", DATA["manifest_cose"]["invalid"], ids=lambda each: each["id"])
def test_a_message_that_is_wrong_is_refused_with_its_one_name(case) -> None:
    message = bytes.fromhex(case["hex"])
    if case["error"] is None:
        assert open_message(message, PRODUCERS) == b'{"kvcs":1}'
        return
    with pytest.raises(DecodeError) as caught:
        open_message(message, PRODUCERS)
    assert caught.value.name == case["error"]


def remade(protected, unprotected, *, signature=bytes(64), payload=b"{}", tag=True) -> bytes:
    header = protected if isinstance(protected, bytes) else cbor2.dumps(protected)
    message = [header, unprotected, payload, signature]
    return cbor2.dumps(cbor2.CBORTag(18, message) if tag else message)


BAD_FORM = {
    "crit in the protected header": remade({1: -8, 2: [1]}, {4: b"k"}),
    "crit in the unprotected header": remade({1: -8}, {4: b"k", 2: [1]}),
    "alg in both headers": remade({1: -8}, {4: b"k", 1: -8}),
    "alg of text": remade({1: "EdDSA"}, {4: b"k"}),
    "kid in both headers": remade({1: -8, 4: b"k"}, {4: b"k"}),
    "kid of text": remade({1: -8}, {4: "k"}),
    "an empty protected header": remade(b"", {4: b"k"}),
    "a protected header that is no map": remade(cbor2.dumps([1]), {4: b"k"}),
    "octets after the protected map": remade(cbor2.dumps({1: -8}) + b"\x00", {4: b"k"}),
    "alg twice": remade(b"\xa2\x01\x27\x01\x26", {4: b"k"}),
    "an indefinite map": remade(b"\xbf\x01\x27\xff", {4: b"k"}),
    "a tag in a header": remade({1: -8}, {4: b"k", 9: cbor2.CBORTag(35, "(a+)+$")}),
    "a float in a header": remade({1: -8}, {4: b"k", 9: 1.5}),
    "a label of octets": remade({1: -8}, {4: b"k", b"x": 1}),
    "a deep header": remade({1: -8}, {4: b"k", 9: [[[[[[1]]]]]]}),
    "a payload of text": remade({1: -8}, {4: b"k"}, payload="{}"),
    "a signature of text": remade({1: -8}, {4: b"k"}, signature="x"),
    "a nested tag": b"\xd2" + remade({1: -8}, {4: b"k"}),
    "three elements": cbor2.dumps([b"", {}, b""]),
    "a length beyond the end": SMALL[:-64],
    "nothing": b"",
}


@pytest.mark.parametrize("case", BAD_FORM)
@pytest.mark.parametrize("producers", [PRODUCERS, None], ids=["producers", "anybody"])
def test_a_message_of_another_form_is_bad_cose_whoever_is_accepted(case, producers) -> None:
    with pytest.raises(DecodeError, match="bad-cose"):
        open_message(BAD_FORM[case], producers)


def test_headers_that_nobody_here_knows_are_passed_over() -> None:
    message = remade({1: -8, -70001: [True, None, "x"]}, {4: b"k", "a": {1: b""}}, tag=False)
    assert open_message(message, None) == b"{}"


@pytest.mark.parametrize("octets", [0, 63, 65])
def test_a_signature_has_64_octets(octets) -> None:
    for listed in LISTED:
        message = remade(
            {1: listed["alg"]}, {4: bytes.fromhex(listed["kid"])}, signature=bytes(octets)
        )
        with pytest.raises(DecodeError, match=f"bad-signature.*{octets} octets"):
            open_message(message, PRODUCERS)


@pytest.mark.parametrize("algorithm", Algorithm)
def test_the_algorithm_is_that_of_the_producers_key(algorithm) -> None:
    key = ProducerKey.generate(algorithm)
    (other,) = set(Algorithm) - {algorithm}
    for said, right in ((algorithm, True), (other, False)):
        protected = cbor2.dumps({1: int(said)})
        signature = key.sign([cbor2.dumps(["Signature1", protected, b"", b"{}"])])
        message = remade(protected, {4: key.kid}, signature=signature)
        if right:
            assert open_message(message, Producers([key.public])) == b"{}"
            continue
        with pytest.raises(DecodeError, match=r"bad-signature.*its algorithm is"):
            open_message(message, Producers([key.public]))


def test_who_requires_nobody_takes_the_payload_whoever_signed_it() -> None:
    message = signed(b"{}", ProducerKey.generate(Algorithm.ES256))
    assert open_message(message, None) == b"{}"


@given(st.data())
def test_no_octets_crash_the_reader(data) -> None:
    base = bytearray(SMALL)
    for _ in range(data.draw(st.integers(1, 4))):
        base[data.draw(st.integers(0, len(base) - 1))] = data.draw(st.integers(0, 255))
    for message in (bytes(base), data.draw(st.binary(max_size=60))):
        try:
            opened = open_message(message, PRODUCERS)
        except DecodeError:
            continue
        assert opened == read(SMALL).payload  # a header that is not signed may change


def test_a_payload_of_every_size_of_length_is_signed() -> None:
    key = ProducerKey.generate()
    for size in (0, 23, 24, 255, 256, 65535, 65536):
        payload = bytes(size)
        assert open_message(signed(payload, key), Producers([key.public])) == payload


@pytest.mark.parametrize("algorithm", Algorithm)
def test_a_long_payload_is_passed_on_in_its_pieces_and_opened_the_same(algorithm) -> None:
    key = ProducerKey.generate(algorithm)
    pieces = [bytes([n]) * (700 << 10) for n in range(4)]
    head, *same, _ = sign(pieces, key)
    assert all(one is other for one, other in zip(same, pieces, strict=True)) and len(head) < 99
    message = b"".join(sign(pieces, key))
    assert open_message(message, Producers([key.public])) == b"".join(pieces)
    with pytest.raises(DecodeError, match="bad-signature"):
        open_message(message[:-99] + b"x" + message[-98:], Producers([key.public]))
