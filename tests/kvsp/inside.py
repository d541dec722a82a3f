"""Where tests of kvsp look inside: what no interface of it shows, each named once."""

from __future__ import annotations

import socket
import sqlite3
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from kvsp.client.client import Client
from kvsp.holder.holder import Holder
from kvsp.holder.leases.table import LeaseTable
from kvsp.holder.store import Store
from kvsp.http.server import Server
from kvsp.index.sqlite import SqliteStore
from kvsp.index.store import ReplicaStore
from kvsp.instance.serving import Lookup, SessionRunner


def ask_with(client: Client, caller: Any) -> None:
    """Have a client ask through something else than HTTP."""
    client._open = caller


def idle(client: Client) -> list[Any]:
    """The connections that a client keeps for its next request."""
    return [each[0] for pool in _connector(client)._conns.values() for each in pool]


def in_use(client: Client) -> set[Any]:
    """The connections that requests of a client are using."""
    acquired: set[Any] = _connector(client)._acquired
    return acquired


def _connector(client: Client) -> Any:
    session = client._caller._session
    assert session is not None, "it has asked nothing yet"
    return session.connector


def deadlines_of(table: LeaseTable) -> int:
    """How many ends of leases are noted, those that renewals moved included."""
    return len(table._deadlines)


def rooms_of(store: Store) -> Mapping[Any, Any]:
    """What each tier has of octets in use, promised and about to go."""
    return store._rooms


def locks_of(holder: Holder) -> Mapping[Any, Any]:
    """The blocks that somebody is at."""
    return holder.parts.locks._locks


def socket_of(server: Server) -> socket.socket:
    """What a server that does not serve yet holds open."""
    return server._socket


def wait_for_locks(store: ReplicaStore, ms: int) -> None:
    """Have a SQLite store wait so long, and not seconds, for who has locked its file."""
    assert isinstance(store, SqliteStore)
    store._db.execute(f"PRAGMA busy_timeout = {ms}")


class Failing:
    """A SQLite connection of which a statement fails, once, as on a full disk."""

    def __init__(self, database: Any, statement: str) -> None:
        self._database = database
        self._statement = statement

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def execute(self, statement: str, *values: Any) -> Any:
        if statement == self._statement:
            self._statement = ""
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return self._database.execute(statement, *values)


def fail_once(store: ReplicaStore, statement: str) -> None:
    """Have a statement of a SQLite store fail the next time."""
    assert isinstance(store, SqliteStore)
    store._db = Failing(store._db, statement)  # type: ignore[assignment]


def trace_statements(store: ReplicaStore) -> list[str]:
    """Every statement that a SQLite store executes from now on."""
    assert isinstance(store, SqliteStore)
    statements: list[str] = []
    store._db.set_trace_callback(statements.append)
    return statements


def commands_of(store: ReplicaStore) -> int:
    """How many commands the server of a Redis store has executed, those of scripts included."""
    stats = store._redis.info("commandstats")  # type: ignore[attr-defined]
    return sum(each["calls"] for name, each in stats.items() if name != "cmdstat_info")


def look_up_with(sessions: SessionRunner, lookup: Lookup) -> None:
    """Have an instance ask `lookup` in the place of an index."""
    sessions._lookup = lookup


def homes_of(package: ModuleType) -> Mapping[str, str]:
    """Where a package finds each of its public names at its first use."""
    homes: Mapping[str, str] = package._WHERE
    return homes
