"""kvcs-inspect: what it makes of everything that this project writes, and of anything else."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from kvcs.names.namespace import publication_uri
from kvcs.programs.inspect import EXAMPLES, UnknownKindError, describe
from kvcs.trust.cose import sign
from kvcs.trust.producers import ProducerKey, Producers
from kvsp.blocks.container import Container
from kvsp.blocks.layout import block_section
from tests.kvcs.support import BLOCK, BLOCKS, DESCRIPTOR, LAYERS, TOKENS, kv, produced
from tests.paths import ROOT

CACHE = kv()
PUBLICATION = produced(cache=CACHE)
SAMPLE = ROOT / "tools" / "data"


def payloads(track: int) -> list[bytes]:
    return [bytes(each.payload) for each in PUBLICATION.tracks[track].objects() if not each.status]


def container() -> bytes:
    sections = [(block_section(k, 2, BLOCK), block_section(v, 2, BLOCK)) for k, v in CACHE]
    return b"".join(map(bytes, Container.build(DESCRIPTOR, sections)))


def tensors() -> bytes:
    return save(
        {
            f"layers.{layer}.{part}": tensor.view("uint8").reshape(len(TOKENS), -1)
            for layer, pair in enumerate(CACHE)
            for part, tensor in zip("kv", pair, strict=True)
        }
    )


PRODUCER = ProducerKey.generate()
ACCEPTED = Producers([PRODUCER.public])

GOOD = {
    "Object payload": payloads(2)[7],
    "manifest": payloads(0)[-1],
    "signed manifest": b"".join(sign([payloads(0)[-1]], PRODUCER)),
    "namespace": PUBLICATION.namespace.encoded,
    "block container": container(),
    "safetensors file": tensors(),
}


def seen(data: bytes, *context) -> dict:
    return describe(memoryview(data), *context)


@pytest.mark.parametrize("kind", GOOD)
def test_each_kind_is_recognized_and_nothing_is_wrong_with_it(kind):
    result = seen(GOOD[kind])
    assert (result["kind"], result["faults"]) == (kind, [])
    assert result["octets"] == len(GOOD[kind])


def test_an_object_is_shown_with_its_place():
    result = seen(GOOD["Object payload"])
    assert (result["component"], result["codec"]) == ("v", "raw")
    assert (result["layer"], result["block"]) == divmod(7, BLOCKS)
    assert result["first_token"] == 2 * BLOCK and result["tokens"] == BLOCK


def test_a_manifest_is_shown_with_its_segments():
    result = seen(GOOD["manifest"])
    assert result["publication"] == PUBLICATION.namespace.publication_id.hex()
    assert result["compat_id"] == DESCRIPTOR.compat_id.hex()
    (segment,) = result["segments"]
    assert segment["complete"] and segment["blocks"] == BLOCKS
    assert segment["tracks"] == {"k.raw.s0": LAYERS, "v.raw.s0": LAYERS}


def test_a_signed_manifest_is_shown_and_verified_only_when_producers_are_named():
    signed = GOOD["signed manifest"]
    found = seen(signed)
    assert found["signed_by"] == PRODUCER.kid.hex() and found["algorithm"] == "EdDSA"
    assert found["blocks"] == BLOCKS and found["signature"].startswith("not verified")
    assert seen(signed, None, ACCEPTED)["signature"] == "verified"
    assert seen(signed[1:], None, ACCEPTED)["signature"] == "verified", "tag 18 may be left out"
    other = Producers([ProducerKey.generate().public])
    found = seen(signed, None, other)
    assert "unknown-producer" in found["faults"][0] and found["blocks"] == BLOCKS
    assert "signature" not in found
    found = seen(signed[:-1] + bytes([signed[-1] ^ 1]), None, ACCEPTED)
    assert "bad-signature" in found["faults"][0] and "signature" not in found


@pytest.mark.parametrize("form", ["octets", "text", "line", "uri"])
def test_a_namespace_is_read_in_every_form(form):
    namespace = PUBLICATION.namespace
    data = {
        "octets": namespace.encoded,
        "text": namespace.text.encode(),
        "line": namespace.text.encode() + b"\n",
        "uri": publication_uri("moqt://r.example/", namespace).encode(),
    }[form]
    result = seen(data)
    assert result["faults"] == []
    assert result["anchor_key"] == namespace.anchor_key.hex()
    assert result["text"] == namespace.text


def test_a_container_is_compared_with_its_descriptor():
    result = seen(GOOD["block container"], DESCRIPTOR)
    assert result["faults"] == []
    assert result["compat_id"] == DESCRIPTOR.compat_id.hex()
    assert [each["layer"] for each in result["sections"]] == list(range(LAYERS))
    tokens = bytearray(GOOD["block container"])
    tokens[19] += 1
    assert seen(bytes(tokens))["faults"] == []
    assert "Token Count" in seen(bytes(tokens), DESCRIPTOR)["faults"][0]


@pytest.mark.parametrize("kind", GOOD)
def test_what_is_cut_off_is_said(kind):
    if kind == "namespace":
        with pytest.raises(UnknownKindError):
            seen(PUBLICATION.namespace.text.encode()[:-1])
    assert seen(GOOD[kind][:-1])["faults"]


@pytest.mark.parametrize("kind", ["Object payload"])
def test_data_that_is_not_what_its_digest_covers_is_said(kind):
    data = GOOD[kind][:-1] + bytes([GOOD[kind][-1] ^ 1])
    assert "digest" in seen(data)["faults"][0]


@pytest.mark.parametrize("kind", GOOD)
@given(data=st.data())
def test_no_octets_make_it_fail(kind, data):
    """Random ones, the beginning of a good one with random ones, and a good one with a changed
    octet."""
    good = GOOD[kind]
    cut = data.draw(st.integers(0, min(len(good), 200)))
    octets = bytearray(good[:cut] + data.draw(st.binary(max_size=300)))
    if octets and data.draw(st.booleans()):
        octets = bytearray(good)
        octets[data.draw(st.integers(0, min(len(good), 400) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        result = seen(bytes(octets), *([DESCRIPTOR] if data.draw(st.booleans()) else []))
    except UnknownKindError:
        return
    json.dumps(result)
    assert result["kind"] in GOOD


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "kvcs.programs.inspect", *map(str, arguments)],
        capture_output=True,
        check=False,
        **options,
    )


def test_the_program_prints_a_line_for_each_thing_and_its_exit_code_is_the_verdict(tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(GOOD["Object payload"])
    bad.write_bytes(GOOD["Object payload"][:-1])
    ran = run(good)
    assert ran.returncode == 0 and b"\n  component: v\n" in ran.stdout
    ran = run(bad)
    assert ran.returncode == 5 and b"NOT AS IT SHOULD BE: truncated" in ran.stdout
    ran = run("--json", "-", input=good.read_bytes())
    assert ran.returncode == 0 and json.loads(ran.stdout)["ok"] is True
    assert json.loads(run("--json", bad).stdout)["ok"] is False


@pytest.mark.parametrize(
    ("name", "words"),
    [("none", "No such file"), (".", "Is a directory"), ("text", "neither an Object")],
)
def test_what_cannot_be_read_or_told_is_one_sentence_and_exit_code_2(tmp_path, name, words):
    (tmp_path / "text").write_text("hello")
    ran = run(name, cwd=tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.decode().startswith(f"kvcs-inspect: {name}: ") and words in str(ran.stderr)
    assert ran.stderr.count(b"\n") == 1


def test_the_examples_of_its_help_work_as_typed(tmp_path):
    (tmp_path / "cache.safetensors").write_bytes(GOOD["safetensors file"])
    (tmp_path / "manifest.json").write_bytes(GOOD["manifest"])
    (tmp_path / "block.kvb").write_bytes(GOOD["block container"])
    (tmp_path / "compat.json").write_bytes(DESCRIPTOR.jcs)
    (tmp_path / "manifest.cose").write_bytes(GOOD["signed manifest"])
    (tmp_path / "producers.json").write_text(json.dumps({"keys": [PRODUCER.public]}))
    help_text = run("--help").stdout.decode()
    commands = re.findall(r"kvcs-inspect .*", EXAMPLES)
    assert len(commands) == 4
    for command in commands:
        assert command in help_text
        line = command.replace("kvcs-inspect", f"{sys.executable} -m kvcs.programs.inspect")
        subprocess.run(line, shell=True, check=True, cwd=tmp_path, capture_output=True)
