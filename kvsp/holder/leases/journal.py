"""Leases outlive the process, as the blocks do that they cover: one SQLite file.

A lease is on disk before it is granted. After a restart each one has its whole time again,
so that it never ends early, whatever became of the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from kvsp.holder.leases.table import Lease
from kvsp.holder.uninterrupted import uninterrupted
from kvsp.names.codes import HASH_OCTETS, SCOPE_ID_OCTETS
from kvsp.names.errors import KvspError
from kvsp.names.uris import BlockId

logger = logging.getLogger("kvsp.holder")

_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE leases (
  id TEXT PRIMARY KEY, client TEXT NOT NULL, ttl_ms INTEGER NOT NULL,
  blocks BLOB NOT NULL, missing BLOB NOT NULL
)
"""
_BLOCK_OCTETS: Final = HASH_OCTETS + SCOPE_ID_OCTETS + HASH_OCTETS


class LeaseJournalError(KvspError):
    """A lease cannot be kept now; the message says why."""


class LeaseFile:
    """The leases in a file. Calls block; one thread at a time."""

    def __init__(self, path: Path) -> None:
        """A damaged file is set aside. Raises LeaseJournalError."""
        self._path = path
        try:
            self._db = self._opened()
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in (
                sqlite3.SQLITE_CORRUPT,
                sqlite3.SQLITE_NOTADB,
            ):
                raise LeaseJournalError(f"{path}: {error}") from error
            logger.warning(
                "%s is damaged (%s): it is %s.damaged now, and leases of before have ended",
                path,
                error,
                path,
            )
            try:
                for name in ("", "-journal"):
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(f"{path}{name}", f"{path}.damaged{name}")
                self._db = self._opened()
            except (OSError, sqlite3.Error) as again:
                raise LeaseJournalError(f"{path}: {again}") from again

    def _opened(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        try:
            # a log would need room to be opened, which a full disk has not
            db.execute("PRAGMA journal_mode = PERSIST")
            db.execute("PRAGMA synchronous = FULL")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                db.executescript(f"BEGIN;{_SCHEMA};PRAGMA user_version = {_VERSION};COMMIT;")
            elif version != _VERSION:
                raise sqlite3.OperationalError(f"written by another version ({version})")
            db.execute("SELECT count(*), sum(length(blocks)) FROM leases").fetchone()
        except BaseException:
            db.close()
            raise
        return db

    def load(self) -> list[Lease]:
        """Every lease that was kept; when it expires is not known. Raises LeaseJournalError."""
        try:
            rows = self._db.execute("SELECT id, client, blocks, ttl_ms, missing FROM leases")
            return [
                Lease(lease_id, client, _blocks(blocks), ttl_ms, 0.0, _blocks(missing))
                for lease_id, client, blocks, ttl_ms, missing in rows
            ]
        except sqlite3.Error as error:
            raise LeaseJournalError(f"{self._path}: {error}") from error

    def write(self, kept: Iterable[Lease], ended: Iterable[str]) -> None:
        """Keep some leases and forget others, all or nothing, on disk when it returns.
        Raises LeaseJournalError."""
        db = self._db
        try:
            db.execute("BEGIN IMMEDIATE")
            try:
                db.executemany("DELETE FROM leases WHERE id = ?", [(each,) for each in ended])
                db.executemany(
                    "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)",
                    [
                        (
                            each.lease_id,
                            each.client,
                            each.ttl_ms,
                            _octets(each.blocks),
                            _octets(each.missing),
                        )
                        for each in kept
                    ],
                )
                db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise LeaseJournalError(f"{self._path}: {error}") from error

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()


def leased_blocks(path: Path) -> set[BlockId]:
    """The blocks of the leases in a file that nobody has open; none when it cannot be read."""
    if not path.exists():
        return set()
    try:
        file = LeaseFile(path)
    except LeaseJournalError:
        return set()
    with contextlib.closing(file), contextlib.suppress(LeaseJournalError):
        return {block for lease in file.load() for block in lease.blocks}
    return set()


class LeaseJournal:
    """Writes leases as they come: those that come together in one go."""

    def __init__(self, path: Path | None) -> None:
        """`path` None keeps nothing: the blocks do not outlive the process either."""
        self._path = path
        self._file: LeaseFile | None = None
        self._kept: dict[str, Lease] = {}
        self._ended: set[str] = set()
        self._filed: set[str] = set()
        """What is in the file, or on its way there."""
        self._writing: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def start(self) -> list[Lease]:
        """The leases of before. One that cannot be used is none, which the log tells."""
        if self._path is None or self._file is not None:
            return []
        try:
            self._file = await uninterrupted(LeaseFile, self._path)
            leases = await uninterrupted(self._file.load)
        except LeaseJournalError as error:
            logger.warning("leases do not outlive this process: %s", error)
            return []
        self._filed.update(lease.lease_id for lease in leases)
        return leases

    async def keep(self, lease: Lease) -> None:
        """Have a lease on disk. Raises LeaseJournalError."""
        if self._file is None:
            return
        self._kept[lease.lease_id] = lease
        await asyncio.shield(self._written())

    def ended(self, lease_id: str) -> None:
        """Forget a lease, some time."""
        if self._file is None:
            return
        self._kept.pop(lease_id, None)
        if lease_id in self._filed:
            self._ended.add(lease_id)

    def _written(self) -> asyncio.Task[None]:
        """The write that takes what is to be written now."""
        if self._next is None:
            self._next = asyncio.create_task(self._write_next(self._writing))
            self._next.add_done_callback(_seen)
        return self._next

    async def _write_next(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._writing, self._next = self._next, None
        kept, self._kept = self._kept, {}
        ended, self._ended = self._ended, set()
        new = kept.keys() - self._filed
        self._filed |= new
        assert self._file is not None
        try:
            await uninterrupted(self._file.write, tuple(kept.values()), tuple(ended))
        except LeaseJournalError:
            self._filed -= new
            self._ended = (self._ended | ended) - new
            raise
        self._filed -= ended

    async def stop(self) -> None:
        """Write what has ended, and close."""
        if self._file is None:
            return
        if self._ended or self._next is not None or self._writing is not None:
            with contextlib.suppress(LeaseJournalError):
                await self._written()
        file, self._file = self._file, None
        await uninterrupted(file.close)


def _seen(task: asyncio.Task[None]) -> None:
    """Whoever waited for a write heard of its failure; if nobody did, nobody was promised it."""
    if not task.cancelled():
        task.exception()


def _octets(blocks: Sequence[BlockId]) -> bytes:
    return b"".join(part for block in blocks for part in block)


def _blocks(octets: bytes) -> tuple[BlockId, ...]:
    return tuple(
        BlockId(
            octets[at : at + HASH_OCTETS],
            octets[at + HASH_OCTETS : at + HASH_OCTETS + SCOPE_ID_OCTETS],
            octets[at + HASH_OCTETS + SCOPE_ID_OCTETS : at + _BLOCK_OCTETS],
        )
        for at in range(0, len(octets), _BLOCK_OCTETS)
    )
