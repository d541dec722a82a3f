"""Encodings side by side, with the programs as a user starts them, through a relay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.e2e.support import Cache, finite_cache, readable, relay


@pytest.fixture
def finite(tmp_path: Path) -> Cache:
    return finite_cache(tmp_path / "finite")


def test_a_consumer_takes_the_encoding_that_it_asks_for(finite: Cache, tmp_path: Path) -> None:
    with relay(tmp_path) as hub:
        offered = [word for name in ("raw", "x-q8", "kv.x-zstd") for word in ("--codec", name)]
        hub.publish(finite, *offered).wait_for("publishing")
        octets = {}
        for name, options, codec in (
            ("any", [], "raw"),
            ("zstd", ["--codec", "x-zlib", "--codec", "x-zstd"], "x-zstd"),
            ("q8", ["--codec", "x-q8", "--lossy"], "x-q8"),
        ):
            out = tmp_path / f"{name}.safetensors"
            before = hub.metric("cache_bytes")
            said = hub.subscribe(finite, out, "--json", *options, name=name).finish(0).json()
            assert said["codecs"] == [codec] and said["objects_confirmed"]
            octets[codec] = hub.metric("cache_bytes") - before
            if codec != "x-q8":
                finite.check(out)
                continue
            received = load_file(out)
            for part, tensor in finite.tensors.items():
                wide = tensor.astype(float)
                error = np.abs(received[part].astype(float) - wide).max()
                assert 0 < error <= np.abs(wide).max() / 200
        assert octets["x-q8"] < octets["raw"]
        alone = hub.subscribe(finite, tmp_path / "x", "--codec", "x-zlib", name="zlib").finish(1)
        assert "is offered only as raw, x-q8 (lossy), kv.x-zstd" in readable(alone)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--codec", "x-q8"], "it is lossy; --lossy allows that"),
        (["--codec", "zstd"], "'zstd' is none of raw, x-zlib, x-q8, x-zstd"),
    ],
)
def test_a_wrong_codec_is_a_plain_sentence(
    cache: Cache, tmp_path: Path, options: list[str], said: str
) -> None:
    with relay(tmp_path) as hub:
        assert said in readable(hub.subscribe(cache, tmp_path / "x", *options).finish(2))


def test_a_publisher_says_what_is_no_codec_and_what_the_index_needs(
    cache: Cache, tmp_path: Path
) -> None:
    with relay(tmp_path) as hub:
        wrong = hub.publish(cache, "--codec", "kv.zip", name="wrong").finish(2)
        assert "'kv.zip' is none of raw" in readable(wrong, "kvcs-publish")
        options = ("--codec", "x-zstd", "--kvsp", "https://index.example/kvsp/")
        lacking = hub.publish(cache, *options, name="lacking").finish(2)
        assert "add --codec raw" in readable(lacking, "kvcs-publish")
