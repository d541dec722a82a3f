"""The default store of an Index Service: one SQLite file, nothing else to run.

Write-ahead logging keeps the file whole through any crash; the last moments before a
power failure may be lost. Memory is bounded by SQLite's page cache, whatever the number
of records.
"""

from __future__ import annotations

import heapq
import logging
import os
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

from kvsp.index.store import (
    KEPT_MS,
    Entry,
    Listed,
    Replica,
    StoreCounts,
    StoreError,
    StoreFull,
    StoreLimits,
    listed,
)
from kvsp.names.uris import BlockId

logger = logging.getLogger("kvsp.index")

_VERSION = 3
_SCHEMA = """
CREATE TABLE scopes (id INTEGER PRIMARY KEY, scope_id BLOB NOT NULL UNIQUE);
CREATE TABLE compats (id INTEGER PRIMARY KEY, compat_id BLOB NOT NULL UNIQUE);
CREATE TABLE holders (
  id INTEGER PRIMARY KEY, uri TEXT NOT NULL UNIQUE, alive_ms INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS descriptors (compat_id BLOB PRIMARY KEY, text BLOB NOT NULL);
CREATE TABLE replicas (
  id INTEGER PRIMARY KEY, scope INTEGER NOT NULL, block_key BLOB NOT NULL,
  compat INTEGER NOT NULL, replica_id TEXT NOT NULL, holder INTEGER NOT NULL,
  expires_ms INTEGER NOT NULL, position INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE UNIQUE INDEX by_block ON replicas (scope, block_key, compat, replica_id);
CREATE INDEX by_expiry ON replicas (scope, expires_ms, position DESC);
CREATE INDEX by_holder ON replicas (holder, scope, expires_ms);
"""
_BY_END = f"CREATE INDEX by_end ON replicas (expires_ms) WHERE expires_ms < {KEPT_MS}"
"""Of all scopes; records that are kept end with their holder."""
_OF_BEFORE = "".join(
    f"DROP TABLE IF EXISTS {table};" for table in ("scopes", "compats", "holders", "replicas")
)
"""Records of an older version come again from their holders; descriptors stay."""
_KEYS_PER_QUERY = 512
_ROWS_PER_DELETE = 4096
_SLACK = 1000
"""When all scopes together are full, one of so many records goes at once: looking for the largest
scope costs as much as there are scopes."""
_INTERNED = 65_536


class SqliteStore:
    """A ReplicaStore in a SQLite file (`:memory:` for a store that dies with the process).

    Used by one thread at a time. Raises StoreError when the file cannot be used.
    """

    threads = 1

    def __init__(
        self,
        path: str | os.PathLike[str],
        limits: StoreLimits | None = None,
        *,
        cache_octets: int = 64 << 20,
    ) -> None:
        self.limits = limits or StoreLimits()
        self._path = os.fspath(path)
        self.damaged = 0
        """Times that the file was damaged, was set aside and the store began anew."""

        self._totals = {"records": 0, "evicted": 0, "expired": 0}
        self._ids: dict[tuple[str, bytes | str], int] = {}
        self._cache_octets = cache_octets
        self._counts: Counter[int] = Counter()
        """Records by scope."""

        self._kept: Counter[int] = Counter()
        """Records that are kept with their holder, by that."""

        self._alive: dict[int, int] = {}
        """Until when the kept records of each holder live."""

        self._ends: list[tuple[int, int]] = []
        """The same as a heap, some of them ends of before."""

        self._changes: list[tuple[dict[Any, int], Any, int | None]] = []
        """What a transaction changed of these, and what was there before: to be taken back with
        it."""

        try:
            self._open(self._path)
        except sqlite3.Error as error:
            if self._path != ":memory:" and _is_damage(error):
                self._start_empty(error)
            elif _code(error) == sqlite3.SQLITE_FULL:
                logger.warning(
                    "%s: %s; the index is kept in memory until the next start", self._path, error
                )
                self._open(":memory:")
            else:
                raise StoreError(
                    f"{self._path}: {error}; the index is rebuilt by its holders, so the file "
                    "can be removed"
                ) from error

    def _start_empty(self, error: sqlite3.Error) -> None:
        """Set a damaged file aside; holders publish again. Raises StoreError."""
        self._db.close()
        self.damaged += 1
        aside = f"{self._path}.damaged"
        logger.warning(
            "%s is damaged (%s): it is %s now, and the index starts empty; its holders publish "
            "again within the time to live of their records",
            self._path,
            error,
            aside,
        )
        try:
            for name in ("", "-wal", "-shm"):
                with suppress(FileNotFoundError):
                    os.replace(self._path + name, aside + name)
            self._ids.clear()
            self._open(self._path)
        except (OSError, sqlite3.Error) as again:
            raise StoreError(
                f"{self._path}: damaged, and {again}; remove the file, the index is rebuilt by "
                "its holders"
            ) from again

    def _open(self, path: str) -> None:
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            self._prepare(self._cache_octets)
            rows = self._db.execute("SELECT scope, count(*) FROM replicas GROUP BY scope")
            self._counts = Counter(dict(rows.fetchall()))
            rows = self._db.execute(
                "SELECT holder, count(*) FROM replicas INDEXED BY by_holder"
                " WHERE expires_ms = ? GROUP BY holder",
                (KEPT_MS,),
            )
            self._kept = Counter(dict(rows.fetchall()))
            rows = self._db.execute("SELECT id, alive_ms FROM holders WHERE alive_ms > 0")
            # of one that was never kept alive, as after a crash before that, there are some, too
            self._alive = dict.fromkeys(self._kept, 0) | dict(rows.fetchall())
            self._ends = _heap(self._alive)
            self._totals["records"] = self._counts.total()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, cache_octets: int) -> None:
        db = self._db
        # three records of 32 layers fit a page of 8 KiB, one would fit the usual 4 KiB
        db.execute("PRAGMA page_size = 8192")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA cache_size = -{max(cache_octets >> 10, 256)}")
        db.execute(f"PRAGMA journal_size_limit = {64 << 20}")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version < _VERSION:
            made = f"{_SCHEMA}{_BY_END};PRAGMA user_version = {_VERSION};"
            db.executescript(f"BEGIN;{_OF_BEFORE}{made}COMMIT;")
        elif version != _VERSION:
            raise sqlite3.DatabaseError(f"written by another version ({version})")
        # names that no record uses any more are not kept from run to run
        db.execute("DELETE FROM holders WHERE id NOT IN (SELECT holder FROM replicas)")
        db.execute("DELETE FROM scopes WHERE id NOT IN (SELECT scope FROM replicas)")

    def put(self, entries: Sequence[Entry], now_ms: int, age_ms: int = 0) -> Sequence[bool | None]:
        # nobody else has the file, and who asks knows of its own withdrawals
        with self._transaction():
            fresh = [self._put(entry, now_ms) for entry in entries]
            for scope in {self._id("scopes", "scope_id", e.block.scope_id) for e in entries}:
                self._evict(scope, self._counts[scope] - self.limits.records_per_scope)
            while (excess := self._totals["records"] - self.limits.records) > 0:
                largest = max(self._counts, key=lambda scope: self._counts[scope])
                excess = max(excess, self.limits.records // _SLACK)
                self._evict(largest, min(excess, _ROWS_PER_DELETE))
        return fresh

    def _put(self, entry: Entry, now_ms: int) -> bool:
        block = entry.block
        scope = self._id("scopes", "scope_id", block.scope_id)
        compat = self._id("compats", "compat_id", block.compat_id)
        holder = self._id("holders", "uri", entry.holder)
        if entry.expires_ms == KEPT_MS and holder not in self._alive:
            self._set(self._alive, holder, now_ms)
            heapq.heappush(self._ends, (now_ms, holder))
        found = self._db.execute(
            "SELECT id, expires_ms, holder FROM replicas"
            " WHERE scope = ? AND block_key = ? AND compat = ? AND replica_id = ?",
            (scope, block.block_key, compat, entry.replica_id),
        ).fetchone()
        if found is not None:
            self._db.execute(
                "UPDATE replicas SET holder = ?, expires_ms = ?, position = ?, data = ?"
                " WHERE id = ?",
                (holder, entry.expires_ms, entry.position, entry.data, found[0]),
            )
            self._count_kept(found[2], found[1], -1)
            self._count_kept(holder, entry.expires_ms, 1)
            return self._ends_ms(found[2], found[1]) <= now_ms
        self._make_room(scope, block.block_key, compat)
        self._db.execute(
            "INSERT INTO replicas (scope, block_key, compat, replica_id, holder, expires_ms,"
            " position, data) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                scope,
                block.block_key,
                compat,
                entry.replica_id,
                holder,
                entry.expires_ms,
                entry.position,
                entry.data,
            ),
        )
        self._count_records(scope, 1)
        self._count_kept(holder, entry.expires_ms, 1)
        return True

    def _ends_ms(self, holder: int, expires_ms: int) -> int:
        """When a record of a holder expires."""
        return self._alive.get(holder, 0) if expires_ms == KEPT_MS else expires_ms

    def _count_kept(self, holder: int, expires_ms: int, change: int) -> None:
        if expires_ms == KEPT_MS:
            self._count(self._kept, holder, change)

    def _count_records(self, scope: int, change: int) -> None:
        self._count(self._counts, scope, change)
        self._add("records", change)

    def _add(self, name: str, change: int) -> None:
        self._set(self._totals, name, self._totals[name] + change)

    def _count(self, counter: Counter[int], key: int, change: int) -> None:
        self._set(counter, key, counter[key] + change or None)

    def _set(self, numbers: dict[Any, int], key: Any, value: int | None) -> None:
        """Have a number, None for none, until the transaction is taken back."""
        self._changes.append((numbers, key, numbers.get(key)))
        _put_number(numbers, key, value)

    def keep_alive(self, holder: str, expires_ms: int, now_ms: int) -> int:
        number = self._id("holders", "uri", holder, create=False)
        if not self._kept[number]:
            return 0
        with self._transaction():
            self._db.execute("UPDATE holders SET alive_ms = ? WHERE id = ?", (expires_ms, number))
            if expires_ms < self._alive.get(number, KEPT_MS):
                heapq.heappush(self._ends, (expires_ms, number))
            self._set(self._alive, number, expires_ms)
        return self._kept[number]

    def _make_room(self, scope: int, block_key: bytes, compat: int) -> None:
        """Keep one block below its number of replicas, losing the first to expire."""
        where = "scope = ? AND block_key = ? AND compat = ?"
        block = (scope, block_key, compat)
        (count,) = self._db.execute(
            f"SELECT count(*) FROM replicas WHERE {where}", block
        ).fetchone()
        if count >= self.limits.replicas_per_block:
            removed = self._delete(
                f"id IN (SELECT id FROM replicas WHERE {where} ORDER BY expires_ms LIMIT ?)",
                (*block, count - self.limits.replicas_per_block + 1),
            )
            self._add("evicted", removed)

    def _evict(self, scope: int, excess: int) -> None:
        """Those that end first go; of those that are kept, the last blocks of prompts: the first
        ones are of use without them."""
        if excess > 0:
            removed = self._delete(
                "id IN (SELECT id FROM replicas INDEXED BY by_expiry WHERE scope = ?"
                " ORDER BY expires_ms, position DESC LIMIT ?)",
                (scope, excess),
            )
            self._add("evicted", removed)

    def get(
        self, scope_id: bytes, compat_id: bytes, keys: Sequence[bytes], now_ms: int
    ) -> list[list[Replica]]:
        found: dict[bytes, list[Replica]] = {}
        scope = self._id("scopes", "scope_id", scope_id, create=False)
        compat = self._id("compats", "compat_id", compat_id, create=False)
        for first in range(0, len(keys), _KEYS_PER_QUERY):
            part = keys[first : first + _KEYS_PER_QUERY]
            marks = ",".join("?" * len(part))
            with self._errors():
                rows = self._db.execute(
                    # left alone, the planner takes the index by expiry and reads the scope
                    "SELECT block_key, holder, expires_ms, data FROM replicas INDEXED BY by_block"
                    f" WHERE scope = ? AND block_key IN ({marks}) AND compat = ?"
                    " AND expires_ms > ?",
                    (scope, *part, compat, now_ms),
                )
                for key, holder, expires_ms, data in rows:
                    if (ends_ms := self._ends_ms(holder, expires_ms)) > now_ms:
                        found.setdefault(key, []).append(Replica(ends_ms, data))
        return [found.get(key, []) for key in keys]

    def list_keys(self, scope_id: bytes, compat_id: bytes, after: bytes, limit: int) -> Listed:
        scope = self._id("scopes", "scope_id", scope_id, create=False)
        compat = self._id("compats", "compat_id", compat_id, create=False)
        with self._errors():
            rows = self._db.execute(
                "SELECT block_key, compat = ? FROM replicas INDEXED BY by_block"
                " WHERE scope = ? AND block_key > ? ORDER BY block_key LIMIT ?",
                (compat, scope, after, limit),
            ).fetchall()
        return listed([(key, bool(wanted)) for key, wanted in rows], limit)

    def delete(self, block: BlockId, replica_id: str, now_ms: int) -> bool:
        where = "scope = ? AND block_key = ? AND compat = ? AND replica_id = ?"
        key = (
            self._id("scopes", "scope_id", block.scope_id, create=False),
            block.block_key,
            self._id("compats", "compat_id", block.compat_id, create=False),
            replica_id,
        )
        with self._transaction():
            row = self._db.execute(
                f"SELECT holder, expires_ms FROM replicas WHERE {where}", key
            ).fetchone()
            self._delete(where, key)
        return row is not None and self._ends_ms(*row) > now_ms

    def delete_holder(self, holder: str, scopes: Collection[bytes] | None) -> int:
        number = self._id("holders", "uri", holder, create=False)
        if scopes is None:
            return self._delete_slices("holder = ?", (number,))
        return sum(
            self._delete_slices(
                "holder = ? AND scope = ?",
                (number, self._id("scopes", "scope_id", scope, create=False)),
            )
            for scope in scopes
        )

    def _delete_slices(self, where: str, values: tuple[int, ...]) -> int:
        """Delete in transactions of bounded size, so that the log stays small."""
        total = 0
        while True:
            with self._transaction():
                removed = self._delete(
                    f"id IN (SELECT id FROM replicas WHERE {where} LIMIT ?)",
                    (*values, _ROWS_PER_DELETE),
                )
            total += removed
            if removed < _ROWS_PER_DELETE:
                return total

    def expire(self, now_ms: int, limit: int) -> int:
        removed, ended_ms = 0, now_ms - self.limits.linger_ms
        with self._transaction():
            removed += self._delete(
                "id IN (SELECT id FROM replicas INDEXED BY by_end"
                f" WHERE expires_ms <= ? AND expires_ms < {KEPT_MS} LIMIT ?)",
                (ended_ms, limit),
            )
            while removed < limit and (holder := self._ended_holder(ended_ms)) is not None:
                removed += self._delete(
                    "id IN (SELECT id FROM replicas WHERE holder = ? AND expires_ms = ? LIMIT ?)",
                    (holder, KEPT_MS, limit - removed),
                )
                if not self._kept[holder]:
                    self._set(self._alive, holder, None)
            self._add("expired", removed)
        return removed

    def _ended_holder(self, ended_ms: int) -> int | None:
        """A holder that was last kept alive until then."""
        while self._ends and self._ends[0][0] <= ended_ms:
            holder = self._ends[0][1]
            alive_ms = self._alive.get(holder)
            if alive_ms is None:
                heapq.heappop(self._ends)
            elif alive_ms <= ended_ms:
                return holder
            else:
                heapq.heapreplace(self._ends, (alive_ms, holder))
        return None

    def traces(self, scope_id: bytes, block_key: bytes) -> list[tuple[bytes, Replica]]:
        scope = self._id("scopes", "scope_id", scope_id, create=False)
        with self._errors():
            rows = self._db.execute(
                "SELECT compat_id, holder, expires_ms, data FROM replicas"
                " JOIN compats ON compats.id = replicas.compat"
                " WHERE scope = ? AND block_key = ?",
                (scope, block_key),
            )
            return [
                (compat, Replica(self._ends_ms(holder, expires_ms), data))
                for compat, holder, expires_ms, data in rows
            ]

    def has_replicas(self, holder: str, now_ms: int) -> bool:
        number = self._id("holders", "uri", holder, create=False)
        if self._kept[number] and self._alive.get(number, 0) > now_ms:
            return True
        with self._errors():
            row = self._db.execute(
                "SELECT 1 FROM replicas WHERE holder = ? AND expires_ms > ? AND expires_ms < ?"
                " LIMIT 1",
                (number, now_ms, KEPT_MS),
            ).fetchone()
        return row is not None

    def put_descriptor(self, compat_id: bytes, text: bytes) -> bool:
        if self.descriptor(compat_id) is not None:
            return False
        with self._transaction():
            (count,) = self._db.execute("SELECT count(*) FROM descriptors").fetchone()
            if count >= self.limits.descriptors:
                raise StoreFull(f"{count} Compatibility Descriptors are stored, which is the limit")
            self._db.execute("INSERT INTO descriptors VALUES (?, ?)", (compat_id, text))
        return True

    def descriptor(self, compat_id: bytes) -> bytes | None:
        with self._errors():
            row = self._db.execute(
                "SELECT text FROM descriptors WHERE compat_id = ?", (compat_id,)
            ).fetchone()
        return None if row is None else bytes(row[0])

    def counts(self) -> StoreCounts:
        return StoreCounts(**self._totals)

    def close(self) -> None:
        self._db.close()

    def _id(self, table: str, column: str, name: bytes | str, *, create: bool = True) -> int:
        """The row that stands for a long name; -1 when there is none and none is made."""
        known = self._ids.get((table, name))
        if known is not None:
            return known
        with self._errors():
            select = f"SELECT id FROM {table} WHERE {column} = ?"
            row = self._db.execute(select, (name,)).fetchone()
            if row is None:
                if not create:
                    return -1
                insert = f"INSERT INTO {table} ({column}) VALUES (?) RETURNING id"
                row = self._db.execute(insert, (name,)).fetchone()
        if len(self._ids) >= _INTERNED:
            self._ids.clear()
        self._ids[table, name] = row[0]
        return int(row[0])

    def _delete(self, where: str, values: tuple[object, ...]) -> int:
        """Delete rows inside a transaction and keep the counts of their scopes."""
        removed = 0
        with closing(
            self._db.execute(
                f"DELETE FROM replicas WHERE {where} RETURNING scope, holder, expires_ms", values
            )
        ) as rows:
            for scope, holder, expires_ms in rows:
                removed += 1
                self._count_records(scope, -1)
                self._count_kept(holder, expires_ms, -1)
        return removed

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._changes.clear()
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                # nothing of it is filed, also when it is the COMMIT that failed
                with suppress(sqlite3.Error):  # a damaged file may have ended it
                    self._db.execute("ROLLBACK")
                for numbers, key, before in reversed(self._changes):
                    _put_number(numbers, key, before)
                self._ends = _heap(self._alive)
                self._ids.clear()
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if _is_damage(error) and self._path != ":memory:":
                self._start_empty(error)
                raise StoreError(
                    f"{self._path} was damaged; the index has started empty"
                ) from error
            raise StoreError(f"{self._path}: {error}") from error


def _put_number(numbers: dict[Any, int], key: Any, value: int | None) -> None:
    if value is None:
        numbers.pop(key, None)
    else:
        numbers[key] = value


def _heap(alive: dict[int, int]) -> list[tuple[int, int]]:
    ends = [(ends_ms, holder) for holder, ends_ms in alive.items()]
    heapq.heapify(ends)
    return ends


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; 0 for an error that is not SQLite's."""
    code: int = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether the file itself is at fault, and will be the next time."""
    return _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
