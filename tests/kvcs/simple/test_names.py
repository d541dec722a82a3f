"""Naming: three namespace fields, the compression as the Track Name."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from kvcs.simple.names import NAMESPACE_TAG, Compression, PromptNamespace, parse_compression
from moqt.wire.primitives import encode_namespace
from tests.kvcs.simple.support import VECTORS

MODEL = "SmolLM2-135M-Instruct"
PROMPTS = {"Hello": b"Hello", "1024 x 'x'": b"x" * 1024, "1025 x 'x'": b"x" * 1025}


@pytest.mark.parametrize("vector", VECTORS["names"], ids=lambda each: each["prompt"])
def test_a_namespace_is_encoded_as_the_vectors_have_it(vector: dict[str, Any]) -> None:
    octets = encode_namespace(PromptNamespace(MODEL, PROMPTS[vector["prompt"]]).fields)
    assert len(octets) == vector["namespace_octets"]
    assert hashlib.sha256(octets).hexdigest() == vector["namespace_sha256"]
    assert vector["namespace_hex"] in (None, octets.hex())


def test_the_track_names_are_those_of_the_table() -> None:
    names = {each["track"] for each in VECTORS["objects"]}
    assert {each.track_name.decode() for each in Compression} == names
    assert {parse_compression(name) for name in names} == set(Compression)


def test_arithmetic_coding_is_refused_as_the_draft_does_not_define_it() -> None:
    with pytest.raises(ValueError, match="does not say how"):
        parse_compression("AC (5x)")
    for name in ("", "fp16", "FP32"):
        with pytest.raises(ValueError, match="known: FP16, BF16, FP8, Int8, FP4, Int4"):
            parse_compression(name)


@pytest.mark.parametrize(
    ("model", "prompt"),
    [("", b"x"), ("x" * 1025, b"x"), (MODEL, b""), (MODEL, b"\0sha-256:" + b"0" * 64)],
)
def test_a_name_that_cannot_be_is_refused(model: str, prompt: bytes) -> None:
    with pytest.raises(ValueError, match=r"octets|empty|digest"):
        PromptNamespace(model, prompt)


def test_a_prompt_begins_with_the_longest_of_those_that_are_published() -> None:
    ours = PromptNamespace(MODEL, b"You are kind. Hello")
    prefix = (NAMESPACE_TAG, MODEL.encode())
    short, longer = (*prefix, b"You"), (*prefix, b"You are kind. ")
    others = [
        (*prefix, b"You are kind. Hello, world"),
        (*prefix, b"You were"),
        (NAMESPACE_TAG, b"another", b"You"),
        (b"kvcs-1", MODEL.encode(), b"You"),
        prefix,
        (*longer, b"more"),
    ]
    assert ours.best_of([short, *others, longer]) == [longer, short]
    assert ours.best_of([short, ours.fields]) == [ours.fields, short]


def test_of_a_long_prompt_only_the_same_one_is_known_by_its_digest() -> None:
    ours = PromptNamespace(MODEL, b"x" * 2000)
    other = PromptNamespace(MODEL, b"x" * 1500)
    literal = PromptNamespace(MODEL, b"x" * 1000)
    assert ours.best_of([literal.fields, other.fields, ours.fields]) == [
        ours.fields,
        literal.fields,
    ]
