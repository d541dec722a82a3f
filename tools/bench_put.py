"""How fast a holder takes blocks to disk, beside a plain server that only digests them.

    python -m tools.bench_put
    python -m tools.bench_put --blocks 40 --mib 64

Both are processes of their own with one client each, which sends the same blocks in turn, so that
what else the machine does falls on both alike: `kvsp-server` with index and holder, on disk, and
uvicorn with the least application that takes a PUT and its SHA-256. Prints a JSON object: octets a
second and CPU time per GB of each server, medians over the blocks, and their ratio.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvsp.blocks.container import Container, repr_digest_field
from kvsp.instance.engines.toy import toy_descriptor
from kvsp.names.identity import Descriptor
from kvsp.names.uris import BlockId, block_path, compat_path

SECONDS = 60.0
FIELDS = {"Content-Type": "application/kvsp-block", "If-None-Match": "*"}


async def plain(scope: Any, receive: Any, send: Any) -> None:
    """The least that takes a PUT and its SHA-256."""
    if scope["type"] != "http":
        return
    digest = hashlib.sha256()
    while True:
        message = await receive()
        digest.update(message.get("body", b""))
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": digest.hexdigest().encode()})


class Running:
    """A server process and a connection to it."""

    def __init__(self, *command: str | Path) -> None:
        self.port = free_port()
        listen = [each.replace("PORT", str(self.port)) for each in map(str, command)]
        self.process = subprocess.Popen(listen, stdout=subprocess.DEVNULL)
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        self.rates: list[float] = []
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                self.connection.connect()
                return
            except OSError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise
                time.sleep(0.05)

    def put(self, path: str, body: bytes, fields: dict[str, str]) -> float:
        """Seconds for it."""
        started = time.perf_counter()
        self.connection.request("PUT", path, body, fields)
        answer = self.connection.getresponse()
        text = answer.read()
        if answer.status not in (200, 201):
            raise RuntimeError(f"{path}: status {answer.status}: {text.decode()[:200]}")
        return time.perf_counter() - started

    def cpu_s(self) -> float:
        """CPU seconds that it has taken."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def descriptor_of(mib: int) -> Descriptor:
    """Of blocks of so many MiB, 1 MiB a layer."""
    return toy_descriptor(layers=mib, kv_heads=8, head_dim=128, block_tokens=256)


def containers(descriptor: Descriptor, count: int) -> Iterator[bytes]:
    octets = descriptor.section_octets()
    for _ in range(count):
        section = secrets.token_bytes(octets)
        made = Container.build(descriptor, [(section, section)] * descriptor.layers)
        yield b"".join(bytes(part) for part in made)


@contextmanager
def both(folder: Path) -> Iterator[tuple[Running, Running]]:
    here = Path(sys.executable).parent
    plain_server = Running(
        *(here / "uvicorn", "tools.bench_put:plain", "--host", "127.0.0.1", "--port", "PORT"),
        *("--lifespan", "off", "--log-level", "warning"),
    )
    try:
        holder = Running(
            *(here / "kvsp-server", "--dev", "--roles", "index,holder"),
            *("--listen", "127.0.0.1:PORT", "--data-dir", folder / "data"),
        )
        try:
            yield plain_server, holder
        finally:
            holder.process.kill()
            holder.process.wait()
    finally:
        plain_server.process.kill()
        plain_server.process.wait()


def measure(blocks: int, mib: int, folder: Path) -> dict[str, float]:
    """Octets a second of each server, and CPU seconds per GB."""
    descriptor = descriptor_of(mib)
    with both(folder) as (plain_server, holder):
        base = "/kvsp/"
        holder.put(
            base + compat_path(descriptor.compat_id),
            descriptor.jcs,
            {"Content-Type": "application/kvsp+json"},
        )
        started = [server.cpu_s() for server in (plain_server, holder)]
        sent = 0
        for body in containers(descriptor, blocks):
            block = BlockId(descriptor.compat_id, bytes(16), secrets.token_bytes(32))
            path = base + block_path(block)
            digest = repr_digest_field(hashlib.sha256(body).digest())
            for server in (plain_server, holder):
                took = server.put(path, body, FIELDS | {"Repr-Digest": digest})
                server.rates.append(len(body) / took)
            sent += len(body)
        rates = [statistics.median(server.rates) / 1e6 for server in (plain_server, holder)]
        ended = [server.cpu_s() for server in (plain_server, holder)]
    cpu = [(after - before) * 1e9 / sent for before, after in zip(started, ended, strict=True)]
    return {
        "plain_mb_per_s": round(rates[0], 1),
        "holder_mb_per_s": round(rates[1], 1),
        "ratio": round(rates[1] / rates[0], 2),
        "plain_cpu_s_per_gb": round(cpu[0], 2),
        "holder_cpu_s_per_gb": round(cpu[1], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=30, help="blocks sent to each (30)")
    parser.add_argument("--mib", type=int, default=32, help="MiB of a block (32)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        result = measure(options.blocks, options.mib, Path(folder))
    print(json.dumps({"blocks": options.blocks, "mib": options.mib, **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
