"""The stores of the index, each test once per store."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvsp.index.sqlite import SqliteStore
from kvsp.index.store import ReplicaStore, StoreLimits

MakeStore = Callable[..., ReplicaStore]


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server for this test session alone."""
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """A real server on a socket in `folder`, with nothing in it."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    pytest.importorskip("redis", reason="the extra 'redis' is not installed")
    path = folder / "socket"
    process = subprocess.Popen(
        [program, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    )
    try:
        _wait_for(path, process)
        yield f"unix://{path}"
    finally:
        process.terminate()
        process.wait(10)


def _wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and process.poll() is None:
        with closing(socket.socket(socket.AF_UNIX)) as attempt:
            if attempt.connect_ex(str(path)) == 0:
                return
        time.sleep(0.02)
    pytest.fail("the server of the index store does not start")


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
