"""Private files: who may read and write them, and that they are written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvsp.names.errors import FileError
from kvsp.names.private_files import changing, create_private, read_private, replace_private


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("others", [0o040, 0o020, 0o010, 0o004, 0o002, 0o001])
def test_others_have_no_access_and_may_only_read_where_that_is_said(
    others: int, tmp_path: Path
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"octets")
    path.chmod(0o600 | others)
    with pytest.raises(FileError, match=rf"mode {0o600 | others:04o}\); run: chmod 600 {path}"):
        read_private(path, 6)
    if others & 0o022:
        with pytest.raises(FileError, match=f"may write it; run: chmod go-w {path}"):
            read_private(path, 6, others_may_read=True)
    else:
        assert read_private(path, 6, others_may_read=True) == b"octets"


def test_a_link_is_judged_by_what_it_leads_to(tmp_path: Path) -> None:
    path, link = tmp_path / "f", tmp_path / "link"
    path.write_bytes(b"octets")
    link.symlink_to("f")
    path.chmod(0o600)
    assert read_private(link, 6) == b"octets"
    path.chmod(0o604)
    with pytest.raises(FileError, match=f"chmod 600 {link}"):
        read_private(link, 6)


def test_a_file_is_not_larger_than_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "f"
    create_private(path, b"octets")
    assert read_private(path, 6) == b"octets"
    with pytest.raises(FileError, match=f"{path}: larger than 5 octets"):
        read_private(path, 5)


def test_what_is_no_file_is_refused_without_waiting_and_leaves_nothing_open(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    opened = len(os.listdir("/proc/self/fd"))
    for name, words in (
        ("pipe", "not a regular file"),
        (".", "Is a directory"),
        ("absent", "No such file"),
    ):
        for _ in range(3):
            with pytest.raises(FileError, match=words):
                read_private(tmp_path / name, 9)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_new_file_is_for_its_owner_only_and_never_takes_the_place_of_another(
    tmp_path: Path,
) -> None:
    path = tmp_path / "f"
    old = os.umask(0)
    try:
        create_private(path, b"dear")
    finally:
        os.umask(old)
    assert mode(path) == 0o600
    with pytest.raises(FileError, match="exists already"):
        create_private(path, b"other")
    (tmp_path / "link").symlink_to("absent")
    with pytest.raises(FileError, match="exists already"):
        create_private(tmp_path / "link", b"other")
    assert path.read_bytes() == b"dear"
    assert {each.name for each in tmp_path.iterdir()} == {"f", "link"}


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "f"
    replace_private(path, b"one")
    assert mode(path) == 0o600
    path.chmod(0o644)
    with path.open("rb") as reader:
        replace_private(path, b"another")
        assert reader.read() == b"one", "who reads meanwhile reads the old one"
    assert path.read_bytes() == b"another" and mode(path) == 0o644
    assert [each.name for each in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize(
    ("write", "fails"),
    [
        *((create_private, call) for call in ("fchmod", "fsync", "link")),
        *((replace_private, call) for call in ("fchmod", "fsync", "replace")),
    ],
)
def test_nothing_is_left_of_a_file_that_cannot_be_written(
    write, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(FileError, match=f"{tmp_path / 'f'}: No space left"):
        write(tmp_path / "f", b"octets")
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileError, match="No such file"):
        write(tmp_path / "absent" / "f", b"octets")


def test_nothing_is_left_when_the_folder_cannot_be_written_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def broken(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(5, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(FileError, match="Input/output error"):
        create_private(tmp_path / "f", b"octets")
    assert not list(tmp_path.iterdir())


def test_who_changes_files_of_a_folder_waits_for_others_and_not_forever(tmp_path: Path) -> None:
    others = r"b: another process has been changing .* for 0\.1 s"
    with (
        changing(tmp_path / "a"),
        pytest.raises(FileError, match=others),
        changing(tmp_path / "b", within=0.1),
    ):
        raise AssertionError("both are at it")
    with changing(tmp_path / "b", within=0):
        pass
    no_folder = pytest.raises(FileError, match=r"none/c: No such file")
    with no_folder, changing(tmp_path / "none" / "c"):
        raise AssertionError("there is no such folder")


def test_a_lock_says_nothing_of_what_fails_while_it_is_held(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk"), changing(tmp_path / "a"):
        raise OSError("disk")
