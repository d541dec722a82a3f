"""What the controller acknowledges is on disk (KVSP "Session Checkpoints and Migration")."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsp.controller.core.effects import Key
from kvsp.controller.journal import Journal
from tests.kvsp.power import SqliteDisk

WRITES = 5


def key(number: int) -> Key:
    return Key("session", f"session {number}")


def expected(count: int) -> dict[Key, Any]:
    """What there is after so many writes: each has a document and removes one of before."""
    return {key(number): {"step": number} for number in range(max(0, count - 2), count)}


def written(folder: Path, disk: SqliteDisk, since: str) -> list[tuple[int, dict[str, bytes]]]:
    """What is left by a power cut before each call to the disk, and after how many writes that
    were acknowledged."""
    left: list[tuple[int, dict[str, bytes]]] = []
    acknowledged = 0
    with disk.watching():
        journal = Journal(folder / "placement.sqlite")
        disk.before_call = lambda: left.append((acknowledged, disk.after_cut(since=since)))
        for number in range(WRITES):
            writes: dict[Key, bytes | None] = {key(number): b'{"step": %d}' % number}
            journal.write(writes | ({key(number - 2): None} if number >= 2 else {}))
            acknowledged = number + 1
            left.append((acknowledged, disk.after_cut(since=since)))
        disk.before_call = lambda: None
        journal.close()
    return left


def documents(folder: Path, files: dict[str, bytes]) -> dict[Key, Any]:
    folder.mkdir()
    for name, octets in files.items():
        (folder / name).write_bytes(octets)
    journal = Journal(folder / "placement.sqlite")
    found = dict(journal.documents())
    journal.close()
    return found


@pytest.mark.parametrize("since", ["none", "all", "torn"])
def test_what_was_acknowledged_is_there_whole_after_a_power_cut_at_any_call(
    tmp_path: Path, since: str
) -> None:
    left = written(tmp_path, SqliteDisk(), since)
    assert len(left) > 3 * WRITES
    for number, (acknowledged, files) in enumerate(left):
        found = documents(tmp_path / str(number), files)
        # the write that was under way counts as a whole or not at all
        assert found in (expected(acknowledged), expected(acknowledged + 1))


def test_a_journal_that_is_not_synced_loses_what_it_acknowledged(tmp_path: Path) -> None:
    left = written(tmp_path, SqliteDisk(syncs=False), "none")
    (acknowledged, files) = left[-1]
    assert acknowledged == WRITES
    assert documents(tmp_path / "after", files) != expected(WRITES)
