"""What a retrieval that was cut short leaves beside its output, and what of it is believed."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from kvcs.keeping.resume_file import Origin, ResumeFile, key_of
from kvcs.names.codes import Component
from kvcs.names.payload import data_digest
from kvcs.names.tracks import DataTrack
from kvsp.blocks.kv_files import KvFile
from kvsp.blocks.layout import block_section
from kvsp.names.errors import FileError
from tests.kvcs.support import BLOCK, BLOCKS, DESCRIPTOR, LAYERS, SCOPE, TOKENS, descriptor, kv

CACHE = kv()
K, V = (DataTrack(each, "raw", 0) for each in (Component.K, Component.V))
AT = [(layer, block) for layer in range(LAYERS) for block in range(BLOCKS)]
ORIGIN = Origin("01" * 16, "02" * 32, False)


def resume_file(path: Path, **changes) -> ResumeFile:
    settings = {
        "descriptor": DESCRIPTOR,
        "scope_id": SCOPE.scope_id,
        "layers": range(LAYERS),
        "most_tokens": len(TOKENS),
    } | changes
    return ResumeFile(path / "out", **settings)


def write(file: ResumeFile, *objects: tuple[int, int]) -> None:
    """K and V of (layer, block), as a retrieval writes them."""
    for layer, block in objects:
        for track, source, target in zip((K, V), CACHE[layer], file.arrays(layer), strict=True):
            at = slice(block * BLOCK, (block + 1) * BLOCK)
            target[at] = source[at]
            digest = data_digest(block_section(source, block, BLOCK))
            file.note(track, layer, block, digest, digest)


def left(path: Path, *objects: tuple[int, int], origin: Origin = ORIGIN) -> None:
    """What a retrieval of these (layer, block) left."""
    with resume_file(path) as file:
        file.load()
        file.begin(len(TOKENS), range(LAYERS))
        assert not file.take_up(origin)
        write(file, *objects)


def taken(path: Path, origin: Origin = ORIGIN, **changes) -> tuple[set, str | None]:
    """The (layer, block) that are taken up whole, and what is said."""
    with resume_file(path, **changes) as file:
        file.load()
        file.begin(len(TOKENS), changes.get("layers", range(LAYERS)))
        held = file.take_up(origin)
        both = {at for at in AT if key_of(K, *at) in held and key_of(V, *at) in held}
        for layer, block in both:
            for got, wanted in zip(file.arrays(layer), CACHE[layer], strict=True):
                at = slice(block * BLOCK, (block + 1) * BLOCK)
                assert got[at].tobytes() == wanted[at].tobytes()
        return both, file.said


def test_what_was_noted_is_there_the_next_time(tmp_path):
    left(tmp_path, (0, 0), (0, 1), (5, BLOCKS - 1))
    assert taken(tmp_path) == ({(0, 0), (0, 1), (5, BLOCKS - 1)}, None)


def test_at_success_the_file_has_its_name_and_nothing_stands_beside_it(tmp_path):
    left(tmp_path, (0, 0))
    with resume_file(tmp_path) as file:
        file.load()
        file.begin(len(TOKENS), range(LAYERS))
        file.take_up(ORIGIN)
        write(file, *AT)
        file.commit()
    assert os.listdir(tmp_path) == ["out"]
    with KvFile.open(tmp_path / "out", DESCRIPTOR) as written:
        assert written.k(3).tobytes() == CACHE[3][0].tobytes()


def test_a_retrieval_that_brought_nothing_leaves_nothing(tmp_path):
    left(tmp_path)
    assert os.listdir(tmp_path) == []


def test_an_object_whose_octets_are_not_what_the_log_says_is_not_believed(tmp_path):
    left(tmp_path, (0, 0), (0, 1))
    partial = tmp_path / "out.resume"
    data = bytearray(partial.read_bytes())
    place = data.index(CACHE[0][0][BLOCK : 2 * BLOCK].tobytes())
    data[place] ^= 1
    partial.write_bytes(data)
    assert taken(tmp_path)[0] == {(0, 0)}


@pytest.mark.parametrize("cut", range(1, 77))
def test_a_torn_record_is_no_record(tmp_path, cut):
    left(tmp_path, (0, 0), (0, 1))
    log = tmp_path / "out.resume-log"
    log.write_bytes(log.read_bytes()[:-cut])
    assert taken(tmp_path) == ({(0, 0)}, None)
    left_again = log.read_bytes()
    left_over = len(left_again.partition(b"\n")[2]) % 77
    assert left_over == 0


def broken(path: Path, how: str) -> None:
    log, partial = path / "out.resume-log", path / "out.resume"
    data = log.read_bytes()
    match how:
        case "no file":
            partial.unlink()
        case "short file":
            os.truncate(partial, 100)
        case "others' file":
            partial.chmod(0o622)
        case "others' log":
            log.chmod(0o622)
        case "a link":
            partial.rename(path / "elsewhere")
            partial.symlink_to(path / "elsewhere")
        case "torn header":
            log.write_bytes(data[:40])
        case "no JSON":
            log.write_bytes(b"\xff" + data)
        case "other version":
            log.write_bytes(data.replace(b'"kvcs_resume": 1', b'"kvcs_resume": 2'))
        case "missing member":
            log.write_bytes(data.replace(b'"tokens"', b'"nekots"'))
        case "too many tokens":
            header, _, records = data.partition(b"\n")
            changed = json.loads(header) | {"tokens": 4 * 10**12}
            log.write_bytes(json.dumps(changed).encode() + b"\n" + records)
        case "deep":
            log.write_bytes(b"[" * 3000 + data)


@pytest.mark.parametrize(
    "how",
    [
        "no file",
        "short file",
        "others' file",
        "others' log",
        "a link",
        "torn header",
        "no JSON",
        "other version",
        "missing member",
        "too many tokens",
        "deep",
    ],
)
def test_files_that_are_torn_or_not_ours_are_a_miss_and_that_is_said(tmp_path, how):
    left(tmp_path, (0, 0))
    broken(tmp_path, how)
    held, said = taken(tmp_path)
    assert held == set()
    assert said is not None and "out.resume" in said and "anew" in said


def test_files_of_another_scope_descriptor_or_other_layers_are_a_miss(tmp_path):
    for changes in (
        {"scope_id": bytes(16)},
        {"descriptor": descriptor(model="another")},
        {"layers": range(2, LAYERS)},
        {"most_tokens": len(TOKENS) - BLOCK},
    ):
        left(tmp_path, (0, 0))
        held, said = taken(tmp_path, **changes)
        assert held == set()
        assert said is not None and "anew" in said


@pytest.mark.parametrize(
    ("changes", "deterministic", "combined"),
    [
        ({}, False, True),
        ({"publication": "03" * 16}, False, False),
        ({"publication": "03" * 16}, True, True),
        ({"publication": "03" * 16, "deterministic": True}, False, False),
        ({"anchor_key": "03" * 32}, True, False),
        ({"publication": "03" * 16, "deterministic": False}, True, False),
    ],
)
def test_only_the_same_publication_or_deterministic_ones_are_combined(
    tmp_path, changes, deterministic, combined
):
    first = dataclasses.replace(ORIGIN, deterministic=deterministic)
    left(tmp_path, (0, 0), origin=first)
    held, said = taken(tmp_path, dataclasses.replace(first, **changes))
    assert held == ({(0, 0)} if combined else set())
    assert (said is None) == combined


def test_a_publication_of_another_length_is_a_miss_and_that_is_said(tmp_path):
    left(tmp_path, (0, 0))
    with resume_file(tmp_path) as file:
        file.load()
        file.begin(len(TOKENS) - BLOCK, range(LAYERS))
        assert not file.take_up(ORIGIN)
        assert file.said is not None and "anew" in file.said


def test_two_processes_do_not_write_the_same_file(tmp_path):
    with resume_file(tmp_path) as first:
        first.load()
        with resume_file(tmp_path) as second, pytest.raises(FileError, match="another process"):
            second.load()
        first.begin(len(TOKENS), range(LAYERS))
        first.take_up(ORIGIN)
        write(first, (0, 0))
    assert taken(tmp_path)[0] == {(0, 0)}


def test_the_longest_name_has_its_files_beside_it_too(tmp_path):
    name = "x" * os.pathconf(tmp_path, "PC_NAME_MAX")
    file = ResumeFile(
        tmp_path / name, DESCRIPTOR, scope_id=SCOPE.scope_id, layers=range(LAYERS), most_tokens=20
    )
    with file:
        file.load()
        file.begin(len(TOKENS), range(LAYERS))
        file.take_up(ORIGIN)
        write(file, (0, 0))
        assert len(os.listdir(tmp_path)) == 2
        file.commit()
    assert os.listdir(tmp_path) == [name]


def test_what_is_written_again_is_not_taken_up_again(tmp_path):
    left(tmp_path, (0, 0), (0, 1))
    with resume_file(tmp_path) as file:
        file.load()
        file.begin(len(TOKENS), range(LAYERS))
        assert key_of(K, 0, 0) in file.take_up(ORIGIN)
        write(file, (0, 0))
        file.begin(len(TOKENS), range(LAYERS))
        assert set(file.take_up(ORIGIN)) == {key_of(K, 0, 1), key_of(V, 0, 1)}
        file.begin(len(TOKENS), range(LAYERS))
        file.arrays(0)  # whoever writes without taking up notes nothing
        file.begin(len(TOKENS), range(LAYERS))
        assert not file.take_up(ORIGIN)
    assert taken(tmp_path)[0] == {(0, 0), (0, 1)}
