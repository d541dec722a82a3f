"""The stores of roles that an engine elsewhere keeps: Redis for the index and the journal of
controllers, objects for blocks.

That the extra of each is installed is asked before, by `checking.check_files`.
"""

from __future__ import annotations

import tomllib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kvsp.http.app import is_loopback
from kvsp.names.private_files import read_private
from kvsp.service.checking import secret_in
from kvsp.service.settings import (
    IndexTable,
    JournalTable,
    ObjectsTable,
    RedisServerTable,
    SettingsError,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from kvsp.controller.shared_journal import SharedJournal
    from kvsp.index.store import ReplicaStore
    from kvsp.redis_client import Reach

_CREDENTIALS_OCTETS: Final = 64 << 10


def replica_store(table: IndexTable, file: str, late_s: float) -> ReplicaStore:
    """The store of the index: `file` of SQLite when no other is set. No request takes longer
    than `late_s` to arrive.

    Raises FileError for a secret, StoreError when it cannot be reached.
    """
    redis = table.redis
    if redis.url is None:
        from kvsp.index.sqlite import SqliteStore

        return SqliteStore(file, table.store, cache_octets=table.cache_octets)
    from kvsp.index.redis import RedisStore

    return RedisStore(
        redis.url,
        table.store,
        prefix=redis.prefix,
        threads=redis.threads,
        late_ms=int(1000 * late_s) + 1,
        **_reach(redis),
    )


def shared_journal(table: JournalTable) -> SharedJournal:
    """The journal of several controllers.

    Raises FileError for a secret, JournalError when it cannot be reached.
    """
    from kvsp.controller.shared_journal import SharedJournal

    assert table.url is not None
    return SharedJournal(
        table.url,
        prefix=table.prefix,
        lease_ms=table.lease_ms,
        replicas=table.replicas,
        **_reach(table),
    )


def _reach(table: RedisServerTable) -> Reach:
    """Raises FileError for the password."""
    return {
        "timeout_s": table.timeout_s,
        "username": table.username,
        "password": None if table.password_file is None else secret_in(table.password_file),
        "cafile": table.cafile,
    }


def object_store(table: ObjectsTable) -> ObjectStore:
    """The object store of a holder. Raises SettingsError, FileError for the credentials."""
    assert table.url is not None
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    endpoint = table.endpoint
    plain = endpoint is not None and endpoint.startswith("http://")
    if plain and not _is_local(endpoint):
        raise SettingsError("holder.objects.endpoint: http is for this machine; use https")
    config: dict[str, Any] = {
        name: value
        for name, value in (("endpoint", endpoint), ("region", table.region))
        if value is not None
    }
    if table.credentials_file is not None:
        config |= _credentials(table)
    how: dict[str, Any] = {"mkdir": True}
    if not table.url.startswith("file:"):
        how = {
            "config": config,
            "client_options": {"allow_http": plain, "timeout": f"{table.request_s * 1000:.0f}ms"},
            "retry_config": {"retry_timeout": timedelta(seconds=table.request_s)},
        }
    elif config:
        raise SettingsError("holder.objects: a file:// store has no endpoint and no credentials")
    try:
        return from_url(table.url, **how)
    except (BaseError, ValueError, TypeError) as error:
        # what the library says may hold a secret
        raise SettingsError(
            f"holder.objects: no store can be made of these settings ({type(error).__name__}); "
            "look at url, endpoint, region and credentials_file"
        ) from None


def _is_local(endpoint: str | None) -> bool:
    host = urlsplit(endpoint or "").hostname or ""
    return host == "localhost" or is_loopback(host)


def _credentials(table: ObjectsTable) -> dict[str, str]:
    path = table.credentials_file
    assert path is not None
    try:
        tree = tomllib.loads(read_private(path, _CREDENTIALS_OCTETS).decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise SettingsError(f"{path}: not a TOML file") from None
    if not all(isinstance(value, str) for value in tree.values()):
        raise SettingsError(f'{path}: write lines like access_key_id = "…"')
    return tree
