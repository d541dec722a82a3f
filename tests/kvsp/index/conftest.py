"""The stores of the index, each test once per store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsp.index.sqlite import SqliteStore
from kvsp.index.store import ReplicaStore, StoreLimits
from tests.redis_server import redis_server

MakeStore = Callable[..., ReplicaStore]


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server for this test session alone."""
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(params=["sqlite", "redis"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeStore]:
    """Opens the same store each time it is called within one test."""
    stores: list[ReplicaStore] = []

    def make(**limits: int) -> ReplicaStore:
        store: ReplicaStore
        if request.param == "sqlite":
            store = SqliteStore(tmp_path / "index.db", StoreLimits(**limits))
        else:
            from kvsp.index.redis import RedisStore

            url = request.getfixturevalue("redis_url")
            store = RedisStore(url, StoreLimits(**limits), prefix=tmp_path.name)
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()
