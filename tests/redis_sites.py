"""Real Valkey or Redis servers that stand for each other: a cluster, and a pair with a Sentinel."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

DEADLINE = 60.0
NAME = "journal"


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


@dataclass
class Site:
    """Servers of one folder, by their ports."""

    folder: Path
    url: str = ""
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, port: int, *options: str) -> None:
        program = shutil.which("valkey-server") or shutil.which("redis-server")
        if program is None:
            pytest.skip("neither valkey-server nor redis-server is installed")
        pytest.importorskip("redis", reason="the extra 'redis' is not installed")
        folder = self.folder / str(port)
        folder.mkdir(parents=True, exist_ok=True)
        own = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "")
        self.running[port] = subprocess.Popen(
            [program, *_first(options), *own, *options[len(_first(options)) :]],
            stdout=subprocess.DEVNULL,
        )

    def ask(self, port: int, *command: Any) -> Any:
        """The answer of one server, once it is there."""
        import redis

        with closing(redis.Redis(port=port, socket_timeout=5)) as client:
            for _ in until(f"port {port} answers"):
                try:
                    client.ping()
                except (redis.ConnectionError, redis.BusyLoadingError):
                    continue
                return client.execute_command(*command)  # type: ignore[no-untyped-call]

    def signal(self, port: int, number: signal.Signals) -> None:
        os.kill(self.running[port].pid, number)
        if number is signal.SIGKILL:
            self.running[port].wait()

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


def _first(options: tuple[str, ...]) -> tuple[str, ...]:
    """A file of settings stands before everything else."""
    return options[:1] if options and not options[0].startswith("--") else ()


def until(what: str) -> Iterator[None]:
    """Turns of a loop that waits for something."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        yield
        time.sleep(0.05)
    pytest.fail(f"not within {DEADLINE:g} s: {what}")


@contextmanager
def cluster(folder: Path) -> Iterator[Site]:
    """A cluster of three servers, each with a third of the slots."""
    site = Site(folder / "cluster")
    ports = free_ports(6)
    nodes, buses = ports[:3], ports[3:]
    try:
        for port, bus in zip(nodes, buses, strict=True):
            site.start(port, "--cluster-enabled", "yes", "--cluster-port", str(bus))
        bounds = (0, 5461, 10923, 16384)
        for port, first, end in zip(nodes, bounds, bounds[1:], strict=False):
            site.ask(port, "CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        for port, bus in zip(nodes[1:], buses[1:], strict=True):
            site.ask(nodes[0], "CLUSTER", "MEET", "127.0.0.1", port, bus)
        for _ in until("the cluster is whole"):
            states = [site.ask(port, "CLUSTER", "INFO") for port in nodes]
            if all(
                b"cluster_state:ok" in each and b"cluster_known_nodes:3" in each for each in states
            ):
                break
        site.url = f"redis+cluster://127.0.0.1:{nodes[0]}"
        yield site
    finally:
        site.end()


@contextmanager
def watched(folder: Path) -> Iterator[tuple[Site, int, int]]:
    """A server and its replica, and a Sentinel that promotes it: the site and both ports."""
    site = Site(folder / "watched")
    first, second, sentinel = free_ports(3)
    try:
        site.start(first)
        site.start(second, "--replicaof", "127.0.0.1", str(first))
        for _ in until("the replica has all"):
            if site.ask(second, "INFO", "replication").get("master_link_status") == "up":
                break
        settings = folder / "sentinel.conf"
        settings.write_text(
            f"sentinel monitor {NAME} 127.0.0.1 {first} 1\n"
            f"sentinel down-after-milliseconds {NAME} 1000\n"
            f"sentinel failover-timeout {NAME} 5000\n"
        )
        site.start(sentinel, str(settings), "--sentinel")
        for _ in until("the Sentinel knows the replica"):
            try:
                found = site.ask(sentinel, "SENTINEL", "REPLICAS", NAME)
            except Exception:  # noqa: BLE001  (it has not read its file yet)
                continue
            if found:
                break
        site.url = f"redis+sentinel://127.0.0.1:{sentinel}/{NAME}"
        yield site, first, second
    finally:
        site.end()
