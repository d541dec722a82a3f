"""The files of producers: what is private stays private, and each fault is a sentence."""

from __future__ import annotations

import json
import pickle
import stat

import pytest

from kvcs.trust.producers import Algorithm, ProducerKey, Producers, with_producer
from kvsp.names.errors import FileError

ES, ED = (ProducerKey.generate(each).public for each in (Algorithm.ES256, Algorithm.EDDSA))


@pytest.mark.parametrize("algorithm", Algorithm)
def test_a_key_is_kept_for_its_owner_alone_and_read_again(algorithm, tmp_path) -> None:
    key = ProducerKey.generate(algorithm)
    key.save(tmp_path / "key.json")
    assert stat.S_IMODE((tmp_path / "key.json").stat().st_mode) == 0o600
    again = ProducerKey.load(tmp_path / "key.json")
    assert again.public == key.public and again.algorithm is algorithm
    Producers([key.public]).verify(key.kid, algorithm, [b"data"], again.sign([b"da", b"ta"]))
    secret = json.loads((tmp_path / "key.json").read_text())["d"]
    assert secret not in repr(key) and "d" not in key.public
    with pytest.raises(TypeError):
        pickle.dumps(key)
    with pytest.raises(FileError, match="exists already"):
        key.save(tmp_path / "key.json")
    (tmp_path / "key.json").chmod(0o640)
    with pytest.raises(FileError, match="chmod 600"):
        ProducerKey.load(tmp_path / "key.json")


BROKEN_PRIVATE = {
    "no object": (lambda tree: [tree], "a key is an object"),
    "no d": (lambda tree: {k: v for k, v in tree.items() if k != "d"}, "has the members"),
    "short d": (lambda tree: {**tree, "d": tree["d"][2:]}, "'d' is 64"),
    "d of another key": (lambda tree: {**tree, "d": "11" * 32}, "not the private key"),
    "unknown alg": (lambda tree: {**tree, "alg": -257}, "'alg' is -8"),
    "no kid": (lambda tree: {**tree, "kid": ""}, "1 to 64 octets"),
    "misspelt": (lambda tree: {**tree, "kld": "00"}, "has the members"),
}


@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize("case", BROKEN_PRIVATE)
def test_a_broken_key_file_is_named_and_its_secret_never_shown(case, algorithm, tmp_path) -> None:
    path = tmp_path / "key.json"
    ProducerKey.generate(algorithm).save(path)
    tree = json.loads(path.read_text())
    change, message = BROKEN_PRIVATE[case]
    path.write_text(json.dumps(change(tree)))
    with pytest.raises(FileError, match=message) as caught:
        ProducerKey.load(path)
    assert str(path) in str(caught.value) and tree["d"][2:] not in str(caught.value)


def test_a_key_file_that_is_no_json_is_not_shown(tmp_path) -> None:
    path = tmp_path / "key.json"
    path.touch(0o600)
    path.write_text('{"d": "secret"')
    with pytest.raises(FileError, match="one strict JSON object") as caught:
        ProducerKey.load(path)
    assert "secret" not in str(caught.value)


BROKEN_LIST = {
    "no list": ({}, "the array 'keys'"),
    "another member": ({"keys": [ED], "key": 1}, "the array 'keys'"),
    "nobody": ({"keys": []}, "1 to 10000 producers"),
    "a private key": ({"keys": [{**ED, "d": "00" * 32}]}, r"keys\[0\]: it holds a private key"),
    "twice": ({"keys": [ED, {**ES, "kid": ED["kid"]}]}, r"keys\[1\]: its kid stands twice"),
    "no point": ({"keys": [{**ES, "x": "11" * 32}]}, "no point of P-256"),
    "no y": ({"keys": [{k: v for k, v in ES.items() if k != "y"}]}, "has the members"),
    "upper case": ({"keys": [{**ED, "kid": "AB"}]}, "lower-case"),
    "alg of text": ({"keys": [{**ED, "alg": "EdDSA"}]}, "'alg' is -8"),
}


@pytest.mark.parametrize("case", BROKEN_LIST)
def test_a_broken_producers_file_is_named_with_its_fault(case, tmp_path) -> None:
    tree, message = BROKEN_LIST[case]
    path = tmp_path / "producers.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(FileError, match=message) as caught:
        Producers.load(path)
    assert str(path) in str(caught.value)


def test_a_producers_file_that_others_may_write_is_not_read(tmp_path) -> None:
    path = tmp_path / "producers.json"
    path.write_text(json.dumps({"keys": [ED, ES]}))
    assert len(Producers.load(path)) == 2
    path.chmod(0o666)
    with pytest.raises(FileError, match="chmod go-w"):
        Producers.load(path)


def test_a_producer_is_added_to_a_file_once(tmp_path) -> None:
    path, key = tmp_path / "producers.json", ProducerKey.generate()
    path.write_bytes(with_producer(path, key))
    path.write_bytes(with_producer(path, ProducerKey.generate(Algorithm.ES256, b"other")))
    assert len(Producers.load(path)) == 2
    with pytest.raises(FileError, match="stands twice"):
        with_producer(path, key)
