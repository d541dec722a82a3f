"""Where a placement controller keeps what must survive it: one SQLite file, or another's.

A document per instance, session and shard map. A write is on disk when `write` returns
(KVSP "Session Checkpoints and Migration": a checkpoint is acknowledged after that).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec

from kvsp.controller.core.effects import Key
from kvsp.names.errors import KvspError

_VERSION = 1


class JournalError(KvspError):
    """The journal cannot be opened, read or written; the message says what to do."""


class TermOverError(JournalError):
    """Another controller leads since: nothing was written."""


class Documents(Protocol):
    """A journal as the shell uses it. Each raises JournalError."""

    def write(self, writes: Mapping[Key, bytes | None]) -> None:
        """Make writes durable, all or none; None deletes."""
        ...

    def documents(self) -> Iterator[tuple[Key, dict[str, Any]]]:
        """Everything that was written."""
        ...

    def close(self) -> None: ...


class Journal:
    """Documents by key. Used by one thread at a time, by one process at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """`:memory:` gives a journal that dies with the process. Raises JournalError."""
        self._path = os.fspath(path)
        try:
            # nobody else may use the file, so there is nothing to wait for
            self._db = sqlite3.connect(
                self._path, timeout=0, check_same_thread=False, isolation_level=None
            )
            self._open()
        except sqlite3.Error as error:
            raise JournalError(
                f"{self._path}: {error}; it holds the epochs of sessions: restore it from a "
                "backup, or remove it and restart every instance"
            ) from error

    def _open(self) -> None:
        db = self._db
        # a second controller on the same file would give out epochs twice
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"written by another version ({version})")
        db.execute("BEGIN EXCLUSIVE")
        db.execute(
            "CREATE TABLE IF NOT EXISTS documents"
            " (kind TEXT, name TEXT, text BLOB NOT NULL, PRIMARY KEY (kind, name))"
        )
        db.execute(f"PRAGMA user_version = {_VERSION}")
        db.execute("COMMIT")

    def write(self, writes: Mapping[Key, bytes | None]) -> None:
        """Make writes durable, all or none; None deletes. Raises JournalError."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for (kind, name), text in writes.items():
                    self._write(kind, name, text)
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise JournalError(f"{self._path}: {error}") from error

    def _write(self, kind: str, name: str, text: bytes | None) -> None:
        if text is None:
            self._db.execute("DELETE FROM documents WHERE kind = ? AND name = ?", (kind, name))
        else:
            self._db.execute(
                "INSERT INTO documents VALUES (?, ?, ?)"
                " ON CONFLICT (kind, name) DO UPDATE SET text = excluded.text",
                (kind, name, text),
            )

    def documents(self) -> Iterator[tuple[Key, dict[str, Any]]]:
        """Everything that was written. Raises JournalError."""
        try:
            rows = self._db.execute("SELECT kind, name, text FROM documents")
            for kind, name, text in rows:
                yield Key(kind, name), msgspec.json.decode(text)
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise JournalError(f"{self._path}: {error}") from error

    def close(self) -> None:
        self._db.close()
