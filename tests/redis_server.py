"""A real Valkey or Redis server, which a test has to itself."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """A real server on a socket in `folder`, with nothing in it."""
    path = folder / "socket"
    with _running(folder, "--port", "0", "--unixsocket", str(path)) as process:
        _wait_for(process, socket.AF_UNIX, str(path))
        yield f"unix://{path}"


@contextmanager
def redis_cluster(folder: Path) -> Iterator[str]:
    """A cluster of one real server, on a port of this machine."""
    port, bus = _free_port(), _free_port()
    options = ("--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes")
    with _running(folder, *options, "--cluster-port", str(bus)) as process:
        _wait_for(process, socket.AF_INET, ("127.0.0.1", port))
        import redis

        with closing(redis.Redis(port=port)) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            deadline = time.monotonic() + 20
            while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
                assert time.monotonic() < deadline, "the cluster does not come up"
                time.sleep(0.05)
        yield f"redis+cluster://127.0.0.1:{port}"


@contextmanager
def _running(folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    pytest.importorskip("redis", reason="the extra 'redis' is not installed")
    process = subprocess.Popen(
        [program, *options, "--save", "", "--dir", str(folder)], stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(10)


def _wait_for(
    process: subprocess.Popen[bytes], family: socket.AddressFamily, place: str | tuple[str, int]
) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and process.poll() is None:
        with closing(socket.socket(family)) as attempt:
            if attempt.connect_ex(place) == 0:
                return
        time.sleep(0.02)
    pytest.fail("the server does not start")


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
