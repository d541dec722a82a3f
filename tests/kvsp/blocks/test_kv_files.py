"""KV files, token files and descriptor files: checked before use, written whole."""

from __future__ import annotations

import gc
import io
import json
import os
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from kvcs.names.payload import data_digest
from kvsp.blocks.kv_files import KvFile, KvFileWriter, load_descriptor, load_tokens, parse_header
from kvsp.blocks.layout import block_section
from kvsp.names.codes import ElementType
from kvsp.names.errors import DecodeError, FileError
from kvsp.names.identity import Descriptor, Scope, block_keys
from kvsp.names.prefix import complete_blocks
from tests.paths import ROOT

SAMPLE = ROOT / "tools/data/smollm2-survey.safetensors"
VECTORS: dict[str, Any] = json.loads((ROOT / "tests/data/kvsp-vectors.json").read_text("utf-8"))
SEED = VECTORS["compat_id"][0]["descriptor"]
GEOMETRY = {"layers": 2, "kv_heads": 2, "head_dim": 3, "block_tokens": 4, "kv_dtype": "fp16"}
SMALL = Descriptor.parse(SEED | GEOMETRY)
SHAPE = (5, 2, 3)
SECTION = 5 * 2 * 3 * 2


def tensors(**changes: Any) -> dict[str, Any]:
    """The four tensors of a good header, one after another, with entries replaced."""
    names = ["layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v"]
    made: dict[str, Any] = {}
    for index, name in enumerate(names):
        made[name] = {
            "dtype": "F16",
            "shape": list(SHAPE),
            "data_offsets": [index * SECTION, (index + 1) * SECTION],
        }
    for name, change in changes.items():
        made["layers." + name.replace("_", ".")] |= change
    return made


def renamed(name: str | None) -> dict[str, Any]:
    """A good header but for its last tensor, which has another name or is left out."""
    made = tensors()
    last = made.pop("layers.1.v")
    return made if name is None else made | {name: last}


def file_octets(header: Any, data: bytes = bytes(4 * SECTION)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def written(path: Path, octets: bytes) -> Path:
    path.write_bytes(octets)
    return path


def refusal(path: Path, descriptor: Descriptor = SMALL, **kwargs: Any) -> str:
    with pytest.raises(FileError) as caught:
        KvFile.open(path, descriptor, **kwargs)
    assert str(path) in str(caught.value)
    return str(caught.value)


def write(path: Path, descriptor: Descriptor, tokens: int = 5) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    shape = (tokens, descriptor.kv_heads, descriptor.head_dim)
    rng = np.random.default_rng(7)
    with KvFileWriter(path, descriptor, tokens=tokens, metadata={"kvcs": "1"}) as out:
        for layer in reversed(out.layers):
            for part, target in (("k", out.k(layer)), ("v", out.v(layer))):
                arrays[f"layers.{layer}.{part}"] = rng.integers(-9, 9, shape).astype(target.dtype)
                target[:] = arrays[f"layers.{layer}.{part}"]
        out.commit()
    return arrays


# --- the sample ----------------------------------------------------------------------


def test_the_sample_cache_has_the_keys_and_digests_of_the_vectors() -> None:
    sample = VECTORS["sample_data"]
    descriptor = load_descriptor(ROOT / "tools/data/smollm2-survey.compat.json")
    assert descriptor.compat_id.hex() == sample["compat_id"]
    tokens = load_tokens(ROOT / "tools/data/smollm2-survey.tokens.json")
    scope = Scope(bytes.fromhex(sample["scope_key"]))
    assert scope.scope_id.hex() == sample["scope_id"]
    keys = block_keys(scope, descriptor, tokens)
    with KvFile.open(SAMPLE, descriptor) as file:
        assert file.tokens == len(tokens) == 160
        assert complete_blocks(file.tokens, descriptor.block_tokens) == 10 == len(keys)
        for vector in sample["blocks"]:
            block = vector["block"]
            assert keys[block].hex() == vector["block_key"]
            digests = []
            octets = 0
            for layer in file.layers:
                k, v = (
                    block_section(tensor, block, descriptor.block_tokens)
                    for tensor in (file.k(layer), file.v(layer))
                )
                assert len(k) == len(v) == descriptor.section_octets()
                digests.append(data_digest(k, v))
                octets += len(k) + len(v)
            assert octets == vector["replica_size"]
            if "layer_digests" in vector:
                assert [digest.hex() for digest in digests] == vector["layer_digests"]
            assert "sha-256:" + data_digest(*digests).hex() == vector["replica_digest"]


def test_the_sample_cache_reads_the_same_through_the_safetensors_package() -> None:
    descriptor = load_descriptor(ROOT / "tools/data/smollm2-survey.compat.json")
    official = safetensors.numpy.load_file(SAMPLE)
    with KvFile.open(SAMPLE, descriptor) as file:
        for layer in file.layers:
            assert (file.k(layer) == official[f"layers.{layer}.k"]).all()
            assert (file.v(layer) == official[f"layers.{layer}.v"]).all()


# --- reading -------------------------------------------------------------------------


def test_tensors_are_read_only_views_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "kv", file_octets(tensors(), bytes(range(240))))
    with KvFile.open(path, SMALL) as file:
        k = file.k(1)
        assert k.shape == SHAPE and k.dtype == np.dtype("<f2") and not k.flags.writeable
        assert isinstance(k.base, np.ndarray) or k.base is not None
        assert k.tobytes() == bytes(range(120, 180))
        with pytest.raises(LookupError):
            file.k(2)
    assert k.tobytes() == bytes(range(120, 180))
    with pytest.raises(LookupError, match="closed"):
        file.k(1)


def test_a_part_of_the_layers_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    header = {"layers.1.k": tensors()["layers.0.k"], "layers.1.v": tensors()["layers.0.v"]}
    path = written(tmp_path / "kv", file_octets(header, bytes(2 * SECTION)))
    with KvFile.open(path, SMALL, layers=range(1, 2)) as file:
        assert file.layers == range(1, 2)
        file.v(1)
    assert "layers.0.k" in refusal(path)
    with pytest.raises(ValueError, match="range"):
        KvFile.open(path, SMALL, layers=range(1, 3))


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (tensors(**{"1_v": {"dtype": "BF16"}}), "'layers.1.v' has elements of 'BF16'"),
        (tensors(**{"1_k": {"shape": [5, 3, 2]}}), "'layers.1.k' has shape"),
        (tensors(**{"1_k": {"shape": [30]}}), "'layers.1.k' has shape"),
        (tensors(**{"1_k": {"shape": [4, 2, 3]}}), "'layers.1.k' has 4 tokens"),
        (tensors(**{"0_k": {"shape": [6, 2, 3]}}), "'layers.0.k' has 60 octets"),
        (tensors(**{"0_k": {"shape": [0, 2, 3]}}), "'layers.0.k' has 0 tokens"),
        (tensors(**{"0_k": {"shape": [2**40, 2, 3]}}), "'layers.0.k' has 60 octets"),
        (tensors(**{"0_v": {"data_offsets": [59, 120]}}), "'layers.0.v' overlaps"),
        (tensors(**{"0_v": {"data_offsets": [61, 120]}}), "before tensor 'layers.0.v'"),
        (tensors(**{"1_v": {"data_offsets": [180, 241]}}), "truncated"),
        (tensors(**{"1_v": {"data_offsets": [180, 239]}}), "follow the last tensor"),
        (tensors(**{"0_k": {"data_offsets": [60, 0]}}), "ends before it starts"),
        (tensors(**{"0_k": {"data_offsets": [0, -60]}}), "data_offsets"),
        (tensors(**{"0_k": {"data_offsets": [0]}}), "data_offsets"),
        (tensors(**{"0_k": {"data_offsets": [0.0, 60]}}), "data_offsets"),
        (tensors(**{"0_k": {"shape": [True, 2, 3]}}), "shape"),
        (tensors(**{"0_k": {"dtype": 1}}), "dtype"),
        (tensors() | {"layers.1.v": []}, "'layers.1.v' has no description"),
        (tensors() | {"__metadata__": {"a": 1}}, "metadata"),
        (tensors() | {"__metadata__": []}, "metadata"),
        (renamed("layers.2.v"), "'layers.2.v'"),
        (renamed("layers.01.v"), "layers.01.v"),
        (renamed(None), "follow the last"),
        ({}, "240 octets"),
        (b"[]", "not a JSON object"),
        (b"{", "not JSON"),
        (b'{"a":{},"a":{}}', "not JSON"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_of_the_descriptor_is_refused_in_one_sentence(
    tmp_path: Path, header: Any, sentence: str
) -> None:
    assert sentence in refusal(written(tmp_path / "kv", file_octets(header)))


def test_missing_and_extra_layers_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "kv", file_octets(tensors()))
    more = Descriptor.parse(SMALL.to_dict() | {"layers": 3})
    fewer = Descriptor.parse(SMALL.to_dict() | {"layers": 1})
    assert "'layers.2.k' is missing" in refusal(path, more)
    assert "'layers.1.k' is of no layer from 0 to 0" in refusal(path, fewer)


def test_bf16_octets_are_never_read_as_fp16(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    other = Descriptor.parse(SMALL.to_dict() | {"kv_dtype": "bf16"})
    write(path, other)
    assert path.stat().st_size  # the same size, another type
    assert "'BF16'" in refusal(path) and "fp16" in refusal(path)


@pytest.mark.parametrize("kept", [0, 7, 8, 20, -1, -SECTION])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = written(tmp_path / "kv", file_octets(tensors())[:kept])
    assert "truncated" in refusal(path) or "too short" in refusal(path)


@pytest.mark.parametrize("length", [100_000_001, 2**63, 2**64 - 1])
def test_a_header_of_any_claimed_length_is_not_read(tmp_path: Path, length: int) -> None:
    path = written(tmp_path / "kv", struct.pack("<Q", length) + bytes(64))
    assert "not a safetensors file" in refusal(path)


def test_every_input_may_come_through_a_pipe(tmp_path: Path) -> None:
    octets = file_octets(tensors())
    inputs = {"kv": octets, "tokens": b"[1, 2, 3]", "compat": SMALL.jcs}
    writers = []
    for name, data in inputs.items():
        os.mkfifo(tmp_path / name)
        writers.append(threading.Thread(target=(tmp_path / name).write_bytes, args=(data,)))
        writers[-1].start()
    with KvFile.open(tmp_path / "kv", SMALL) as through:
        whole = written(tmp_path / "whole", octets)
        with KvFile.open(whole, SMALL) as straight:
            for layer in straight.layers:
                assert through.k(layer).tobytes() == straight.k(layer).tobytes()
                assert through.v(layer).tobytes() == straight.v(layer).tobytes()
    assert load_tokens(tmp_path / "tokens") == [1, 2, 3]
    assert load_descriptor(tmp_path / "compat") == SMALL
    for writer in writers:
        writer.join()


def test_a_truncated_file_is_refused_although_it_came_through_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    data = file_octets(tensors())[:-1]
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(data,))
    writer.start()
    assert "truncated" in refusal(tmp_path / "pipe")
    writer.join()


def test_the_longest_name_of_the_file_system_can_be_written(tmp_path: Path) -> None:
    longest = os.pathconf(tmp_path, "PC_NAME_MAX")
    for name in ("x" * longest, "\N{GREEK SMALL LETTER ALPHA}" * (longest // 2)):
        with KvFileWriter(tmp_path / name, SMALL, tokens=4) as out:
            out.commit()
    assert sorted(map(len, map(os.fsencode, os.listdir(tmp_path)))) == [longest // 2 * 2, longest]


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    assert "neither a file nor a pipe" in refusal(Path("/dev/null"))
    opened = len(os.listdir("/proc/self/fd"))
    assert "Is a directory" in refusal(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == opened
    assert "No such file" in refusal(tmp_path / "absent")


def test_a_descriptor_nobody_can_read_raw_opens_no_file(tmp_path: Path) -> None:
    path = written(tmp_path / "kv", file_octets(tensors()))
    for change in ({"kv_dtype": "float16"}, {"layout": "x-other"}):
        with pytest.raises(DecodeError, match="codec-unsupported"):
            KvFile.open(path, Descriptor.parse(SMALL.to_dict() | change))


@given(st.binary(max_size=200), st.integers(0, 300))
def test_no_octets_crash_the_header_reader(octets: bytes, size: int) -> None:
    length = struct.pack("<Q", len(octets))
    for data in (octets, length + octets, length + b'{"a":' + octets):
        try:
            parse_header(data, size)
        except FileError:
            continue


@given(
    st.dictionaries(
        st.sampled_from(["dtype", "shape", "data_offsets", "x"]),
        st.lists(st.integers(-1, 2**53 - 1), max_size=3) | st.text(max_size=3) | st.none(),
    )
)
def test_no_tensor_description_crashes_the_header_reader(change: dict[str, Any]) -> None:
    octets = file_octets(tensors(**{"0_v": change}))
    try:
        header = parse_header(octets, len(octets))
    except FileError:
        return
    assert all(0 <= t.start <= t.stop <= 4 * SECTION for t in header.tensors.values())


# --- writing -------------------------------------------------------------------------


@pytest.mark.parametrize("element", ElementType)
def test_the_safetensors_package_reads_what_is_written(
    tmp_path: Path, element: ElementType
) -> None:
    descriptor = Descriptor.parse(SMALL.to_dict() | {"kv_dtype": element.value})
    path = tmp_path / "out.safetensors"
    arrays = write(path, descriptor)
    with KvFile.open(path, descriptor) as file:
        assert file.metadata == {"kvcs": "1"}
        for layer in file.layers:
            assert file.k(layer).tobytes() == arrays[f"layers.{layer}.k"].tobytes()
            assert file.v(layer).tobytes() == arrays[f"layers.{layer}.v"].tobytes()
            assert file.k(layer).flags.aligned
    # the package's numpy front end knows no fp8 everywhere, its core knows every type
    official = dict(safetensors.deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
    assert set(official) == set(arrays)
    for name, array in arrays.items():
        assert bytes(official[name]["data"]) == array.tobytes()
        assert official[name]["shape"] == list(array.shape)


def test_what_the_safetensors_package_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kv.safetensors"
    arrays = write(tmp_path / "own", SMALL)
    safetensors.numpy.save_file(arrays, path, metadata={"a": "b"})
    with KvFile.open(path, SMALL) as file:
        assert file.metadata == {"a": "b"}
        assert (file.v(1) == arrays["layers.1.v"]).all()


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with KvFileWriter(path, SMALL, tokens=5) as out:
        out.k(0)[:] = 1
        assert not path.exists()
        (temporary,) = tmp_path.iterdir()
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        early = out.v(1)
        out.commit()
        assert not early.flags.writeable
        with pytest.raises(ValueError):
            out.commit()
        with pytest.raises(LookupError):
            out.k(0)
    assert list(tmp_path.iterdir()) == [path]
    with KvFile.open(path, SMALL) as file:
        assert (file.k(0) == 1).all() and not file.v(1).any()


def test_an_exception_or_an_abort_leaves_nothing_behind(tmp_path: Path) -> None:
    path = written(tmp_path / "out", b"earlier")
    with pytest.raises(RuntimeError), KvFileWriter(path, SMALL, tokens=5) as out:
        out.k(0)[:] = 1
        raise RuntimeError
    out = KvFileWriter(path, SMALL, tokens=5)
    out.abort()
    out.abort()
    with pytest.raises(ValueError):
        out.commit()
    with KvFileWriter(path, SMALL, tokens=5):
        pass
    out = KvFileWriter(path, SMALL, tokens=5)
    del out
    gc.collect()
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"earlier"


def test_the_end_of_the_process_leaves_nothing_behind(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from kvsp.blocks.kv_files import *; from kvsp.names.identity import Descriptor\n"
        "out = KvFileWriter(sys.argv[1], Descriptor.parse(sys.argv[2]), tokens=5)\n"
    )
    arguments = [str(tmp_path / "out"), SMALL.jcs.decode()]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, cwd=ROOT)
    assert not list(tmp_path.iterdir())


def test_a_commit_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "out"
    out = KvFileWriter(path, SMALL, tokens=5)
    path.mkdir()
    with pytest.raises(FileError, match="out"):
        out.commit()
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileError, match="absent"):
        KvFileWriter(tmp_path / "absent" / "out", SMALL, tokens=5)


def test_a_range_of_layers_is_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with KvFileWriter(path, SMALL, tokens=5, layers=range(1, 2)) as out:
        out.k(1)[:] = 3
        with pytest.raises(LookupError):
            out.k(0)
        out.commit()
    with KvFile.open(path, SMALL, layers=range(1, 2)) as file:
        assert (file.k(1) == 3).all()
    assert set(safetensors.numpy.load_file(path)) == {"layers.1.k", "layers.1.v"}
    for layers in (range(0), range(2, 3), range(-1, 1), range(0, 2, 2)):
        with pytest.raises(ValueError):
            KvFileWriter(path, SMALL, tokens=5, layers=layers)
    with pytest.raises(ValueError):
        KvFileWriter(path, SMALL, tokens=0)


# --- token and descriptor files ------------------------------------------------------


def test_tokens_are_a_json_array_in_a_file_or_on_standard_input(tmp_path: Path) -> None:
    path = written(tmp_path / "tokens.json", b"[0, 1, 4294967295]\n")
    assert load_tokens(path) == [0, 1, 4294967295]
    assert load_tokens("-", stdin=io.BytesIO(b"[]")) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"7777":1,"7777":2}',
        "[7777,",
        "[7777,-1]",
        "[7777,1.5]",
        '[7777,"7777"]',
        "[7777,true]",
        "[7777,4294967296]",
        "[7777, 77777777777777777777]",
        "7777",
        "[7777 7777]",
    ],
)
def test_a_bad_tokens_file_is_refused_without_showing_a_token(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "tokens.json", text.encode())
    with pytest.raises(FileError) as caught:
        load_tokens(path)
    assert str(path) in str(caught.value) and "777" not in str(caught.value)
    with pytest.raises(FileError, match="standard input"):
        load_tokens("-", stdin=io.BytesIO(text.encode()))


def test_a_bad_descriptor_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="absent"):
        load_descriptor(tmp_path / "absent")
    path = written(tmp_path / "compat.json", json.dumps(SEED | {"layers": 0}).encode())
    with pytest.raises(DecodeError, match=r"out-of-range: .*compat\.json: 'layers'"):
        load_descriptor(path)
    path.write_text(json.dumps(SEED))
    assert load_descriptor(path) == Descriptor.parse(SEED)
