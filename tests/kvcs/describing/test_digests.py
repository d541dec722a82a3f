"""Digests of weights, kept."""

from __future__ import annotations

import json
import os
import time

import pytest

from kvcs.describing import digests
from kvcs.describing.digests import MOST, weights_digest
from kvsp.names.identity import model_digest


@pytest.fixture
def weights(tmp_path):
    """Files that were changed an hour ago."""
    files = {}
    for name in ("a.safetensors", "b.safetensors"):
        files[name] = tmp_path / name
        files[name].write_bytes(name.encode() * 100)
        os.utime(files[name], (time.time() - 3600,) * 2)
    return files


@pytest.fixture
def hashed(monkeypatch):
    """How often weights were read."""
    times = []

    def counted(files):
        times.append(len(files))
        return model_digest(files)

    monkeypatch.setattr(digests, "model_digest", counted)
    return times


def test_the_same_files_are_read_once(weights, hashed, tmp_path):
    kept = tmp_path / "cache" / "digests.json"
    first = weights_digest(weights, kept)
    assert weights_digest(weights, kept) == first == model_digest(weights)
    assert len(hashed) == 1


@pytest.mark.parametrize("change", ["content", "time", "name", "fewer"])
def test_others_are_read_again(change, weights, hashed, tmp_path):
    kept = tmp_path / "digests.json"
    weights_digest(weights, kept)
    path = weights["b.safetensors"]
    if change == "content":
        path.write_bytes(b"other")
        os.utime(path, (time.time() - 1800,) * 2)
    elif change == "time":
        os.utime(path, (time.time() - 60,) * 2)
    elif change == "name":
        weights["c.safetensors"] = weights.pop("b.safetensors")
    else:
        del weights["b.safetensors"]
    assert weights_digest(weights, kept) == model_digest(weights)
    assert len(hashed) == 2


def test_a_file_that_was_just_changed_is_not_trusted_to_stay_so(weights, hashed, tmp_path):
    weights["a.safetensors"].write_bytes(b"fresh")
    for _ in range(2):
        weights_digest(weights, tmp_path / "digests.json")
    assert len(hashed) == 2


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"a": 1}'])
def test_what_is_kept_in_no_readable_form_is_as_good_as_nothing(content, weights, tmp_path):
    kept = tmp_path / "digests.json"
    kept.write_bytes(content)
    assert weights_digest(weights, kept) == model_digest(weights)
    assert model_digest(weights) in json.loads(kept.read_bytes()).values()


def test_the_oldest_go_first(weights, tmp_path):
    kept = tmp_path / "digests.json"
    kept.write_text(json.dumps({str(number): "x" for number in range(MOST)}))
    weights_digest(weights, kept)
    left = list(json.loads(kept.read_bytes()))
    assert len(left) == MOST and left[0] == "1"


def test_nothing_is_kept_where_that_is_not_wanted_or_not_possible(weights, tmp_path):
    assert weights_digest(weights, None) == model_digest(weights)
    (tmp_path / "file").write_text("")
    assert weights_digest(weights, tmp_path / "file" / "digests.json") == model_digest(weights)
