"""The data directory of one process, and what a failed start leaves of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvsp.http.server import CannotStartError
from kvsp.service.data_folder import DataFolder

CLAIM = """
import sys
from pathlib import Path
from kvsp.service.data_folder import DataFolder
folder = DataFolder(Path(sys.argv[1]))
(folder.path / "blocks").mkdir()
print("claimed", flush=True)
sys.stdin.read()
"""


def test_who_comes_second_removes_nothing_of_who_made_the_folder_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, mkdir = tmp_path / "some" / "data", Path.mkdir
    others: list[subprocess.Popen[str]] = []

    def after_another(folder: Path, *how: Any, **more: Any) -> None:
        if not others:
            begin_another()
        mkdir(folder, *how, **more)

    def begin_another() -> None:
        other = subprocess.Popen(
            [sys.executable, "-c", CLAIM, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        others.append(other)
        assert other.stdout is not None and other.stdout.readline() == "claimed\n"

    monkeypatch.setattr(Path, "mkdir", after_another)
    try:
        with pytest.raises(CannotStartError, match="another process uses this data directory"):
            DataFolder(path)
        assert sorted(each.name for each in path.iterdir()) == ["blocks", "lock"]
    finally:
        for other in others:
            other.communicate()


def test_a_start_that_fails_leaves_no_folder_that_was_not_there(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "some" / "data")
    (folder.path / "blocks").mkdir()
    folder.undo()
    assert list(tmp_path.iterdir()) == []
