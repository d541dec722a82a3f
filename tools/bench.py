"""`make bench`: what moving a KV cache costs, as ratios inside one run.

For each upper bound of the datagram size: raw UDP, stock aioquic, our endpoint with raw streams,
then KVCS with every check: direct, through a relay, and from the relay's cache to four consumers.
All with Objects of 32 KiB on loopback, each side in a process of its own. MB are 10^6
octets; CPU seconds are those of all processes together, per 10^9 octets delivered. KVCS counts
from the consumer's start, raw streams from their first octet: with few megabytes, discovery and
manifest (15 ms) weigh much. 512 MB are the cache of some 3,900 tokens of an 8 billion parameter
model.

    python -m tools.bench
    python -m tools.bench --sizes 1452 --megabytes 256 --repeat 3 --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import moqt
from kvcs.names.errors import RetrievalError
from kvcs.publishing.announcing import publish
from kvcs.publishing.publication import Publication
from kvcs.retrieving.consumer import Consumer
from kvcs.retrieving.destinations import ArrayDestination
from kvsp.names.identity import Descriptor, Scope
from moqt.quic.certificates import make_self_signed
from tools import bench_raw

SIZES = (1200, 1452, 8952)
LAYERS = 32
OBJECT = 32 << 10
HEAD = 16 * 128 * 2
"""Octets of one head of a block."""
CONSUMERS = 4
ROOT = Path(__file__).resolve().parent.parent
SCOPE = Scope(bytes(range(32)))
ROWS = (
    ("udp", "raw UDP"),
    ("stock", "stock aioquic streams"),
    ("ours", "our endpoint, raw streams"),
    ("direct", "KVCS publisher to consumer"),
    ("relay", "KVCS through the relay"),
    ("cache", f"KVCS, relay cache to {CONSUMERS}"),
)


def geometry(options: argparse.Namespace) -> tuple[Descriptor, list[int]]:
    """A model of so many layers, blocks of 16 tokens in Objects of that size, and tokens for the
    volume."""
    blocks = max(1, options.megabytes * 1_000_000 // (2 * options.layers * options.object))
    descriptor = Descriptor.parse(
        {
            "model": "bench",
            "model_digest": "sha-256:" + "00" * 32,
            "tokenizer_digest": "sha-256:" + "00" * 32,
            "layers": options.layers,
            "kv_heads": options.object // HEAD,
            "head_dim": 128,
            "kv_dtype": "bf16",
            "positional": "rope",
            "block_tokens": 16,
            "layout": "kvsp-layout-1",
        }
    )
    return descriptor, list(range(blocks * 16))


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def cpu_of(pid: int) -> float:
    """CPU seconds that a process has had, seen from outside."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak() -> int:
    """Octets of memory of this process at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ------------------------------------------------------------------------------- the processes


async def role_publish(options: argparse.Namespace) -> None:
    """Serve a complete publication: as a server (`--url` absent) or through a relay."""
    descriptor, tokens = geometry(options)
    publication = Publication(SCOPE, descriptor, tokens)
    shape = (len(tokens), descriptor.kv_heads, descriptor.head_dim)
    rng = np.random.default_rng(1)
    count = max(2, bench_raw.POOL // (len(tokens) // 16 * options.object))
    pool = [
        rng.integers(0, 1 << 16, shape, dtype=np.uint16).view(descriptor.dtype)
        for _ in range(min(count, 2 * descriptor.layers))
    ]
    for index in range(descriptor.layers):
        publication.put_layer(index, pool[2 * index % len(pool)], pool[(2 * index + 1) % len(pool)])
    quic = moqt.QuicConfig(
        certfile=options.certs / "cert.pem",
        keyfile=options.certs / "key.pem",
        cafile=options.certs / "cert.pem",
        max_datagram_size=options.size,
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if options.url:
        session = await moqt.connect(options.url, quic=quic)
        await publish(session, publication)
        print("ready", flush=True)
        before = cpu()
        await stop.wait()
        session.close()
    else:
        publisher = moqt.Publisher()
        for store in publication.tracks:
            publisher.add_track(store)
        server = await moqt.serve("127.0.0.1", 0, quic=quic, handler=publisher)
        print(f"ready moqt://127.0.0.1:{server.port}", flush=True)
        before = cpu()
        await stop.wait()
        await server.close()
    print(json.dumps({"cpu": cpu() - before, "peak": peak()}), flush=True)


async def role_consume(options: argparse.Namespace) -> None:
    descriptor, tokens = geometry(options)
    quic = moqt.QuicConfig(cafile=options.certs / "cert.pem", max_datagram_size=options.size)
    # an engine has its cache memory before it asks: the first touch of pages is not timed
    shape = (len(tokens), descriptor.kv_heads, descriptor.head_dim)
    arrays = {
        layer: (np.ones(shape, descriptor.dtype), np.ones(shape, descriptor.dtype))
        for layer in range(descriptor.layers)
    }
    async with moqt.connect(options.url, quic=quic) as session:
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        before, start = cpu(), time.perf_counter()
        async with Consumer(
            session,
            SCOPE,
            descriptor,
            tokens,
            timeout=options.limit,
            destination=ArrayDestination(arrays),
            others=[moqt.connect(options.url, quic=quic) for _ in range(options.connections - 1)],
        ) as consumer:
            failed = ""
            try:
                await consumer.retrieve()
            except RetrievalError as error:
                failed = str(error) or type(error).__name__
        print(
            json.dumps(
                {
                    "octets": consumer.stats.octets,
                    "seconds": time.perf_counter() - start,
                    "cpu": cpu() - before,
                    "peak": peak(),
                    "first_layer": consumer.stats.first_layer_seconds,
                    "layers": consumer.stats.layers,
                    "failed": failed,
                }
            ),
            flush=True,
        )


class Role:
    """One process of a run, spoken to through its standard streams."""

    def __init__(self, command: Sequence[str | Path]) -> None:
        environment = dict(os.environ, PYTHONPATH=str(ROOT))
        self.popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def line(self) -> str:
        assert self.popen.stdout is not None
        text = self.popen.stdout.readline()
        if not text:
            raise RuntimeError(f"{self.popen.args} ended with {self.popen.wait()}")
        return text.strip()

    def go(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()

    def cpu(self) -> float:
        """CPU seconds so far, from outside."""
        return cpu_of(self.popen.pid)

    def resident(self) -> int:
        """Octets of memory now."""
        return self._status("VmRSS")

    def peak(self) -> int:
        """Octets of memory at most."""
        return self._status("VmHWM")

    def _status(self, field: str) -> int:
        status = Path(f"/proc/{self.popen.pid}/status").read_text()
        match = re.search(rf"{field}:\s+(\d+)", status)
        return int(match.group(1)) * 1024 if match else 0

    def stop(self) -> str:
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.communicate(timeout=30)[0]


@contextmanager
def running(command: Sequence[str | Path]) -> Iterator[Role]:
    """A process, which is ended in the end."""
    started = Role(command)
    try:
        yield started
    finally:
        started.popen.kill()
        started.popen.wait()


def role(options: argparse.Namespace, name: str, url: str = "") -> AbstractContextManager[Role]:
    command = [sys.executable, "-m", "tools.bench", "--role", name, "--url", url]
    command += ["--sizes", str(options.size), "--megabytes", str(options.megabytes)]
    command += ["--certs", str(options.certs), "--limit", str(options.limit)]
    command += ["--connections", str(options.connections)]
    command += ["--layers", str(options.layers), "--object", str(options.object)]
    return running(command)


def add_relay_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--relay-limit",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a --limit of the relay; may be repeated",
    )


@contextmanager
def relay(options: argparse.Namespace) -> Iterator[tuple[Role, str]]:
    command = [str(Path(sys.executable).parent / "kvcs-relay"), "--listen", "127.0.0.1:0"]
    command += ["--cert", str(options.certs / "cert.pem"), "--key", str(options.certs / "key.pem")]
    command += ["--cache-memory", "2GiB", "--mtu", str(options.size)]
    for limit in options.relay_limit:
        command += ["--limit", limit]
    with running(command) as started:
        match = re.search(r"moqt://[^\s,]+", started.line())
        assert match is not None
        yield started, match.group()


# ------------------------------------------------------------------------------------ the runs


def consume(options: argparse.Namespace, url: str, count: int) -> list[dict[str, Any]]:
    """`count` consumers at once, started together; they have left the relay when this returns."""
    with ExitStack() as stack:
        roles = [stack.enter_context(role(options, "consume", url)) for _ in range(count)]
        for consumer in roles:
            consumer.line()
        for consumer in roles:
            consumer.go()
        found = [json.loads(consumer.line()) for consumer in roles]
        for consumer in roles:
            consumer.popen.wait(30)
        return found


def add_shape(parser: argparse.ArgumentParser) -> None:
    """What the processes of a run are told of the cache that they move."""
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model (32)")
    parser.add_argument("--object", type=int, default=OBJECT, help="octets of an Object (32768)")
    parser.add_argument("--connections", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--certs", type=Path, help=argparse.SUPPRESS)


def result(runs: list[dict[str, Any]], **cpus: float) -> dict[str, float]:
    """What consumers and the processes before them, named with their CPU seconds, have shown."""
    octets = sum(run["octets"] for run in runs)
    cpus["consumers"] = sum(run["cpu"] for run in runs)
    for run in runs:
        if run["failed"]:
            raise RuntimeError(f"a consumer ended after {run['octets']:,} octets: {run['failed']}")
    return {
        "mb_s": octets / max(run["seconds"] for run in runs) / 1e6,
        "cpu_s_per_gb": sum(cpus.values()) / octets * 1e9,
        "first_layer_ms": 1000 * max(run["first_layer"] for run in runs),
        "first_layer_share": max(run["first_layer"] / run["seconds"] for run in runs),
        "consumer_peak_mib": max(run["peak"] for run in runs) / 2**20,
        **{f"{name}_cpu_s_per_gb": each / octets * 1e9 for name, each in cpus.items()},
    }


def run_direct(options: argparse.Namespace) -> dict[str, float]:
    with role(options, "publish") as publisher:
        url = publisher.line().split()[1]
        runs = consume(options, url, 1)
        told = json.loads(publisher.stop())
        return result(runs, publisher=told["cpu"]) | {"publisher_peak_mib": told["peak"] / 2**20}


def run_relay(
    options: argparse.Namespace, consumers: int = CONSUMERS
) -> tuple[dict[str, float], dict[str, float]]:
    """Through the relay with nothing cached, then from its cache with the publisher gone."""
    with relay(options) as (server, url):
        base = server.resident()
        with role(options, "publish", url) as publisher:
            publisher.line()
            start = server.cpu()
            runs = consume(options, url, 1)
            relay_cpu = server.cpu() - start
            told = json.loads(publisher.stop())
            cold = result(runs, relay=relay_cpu, publisher=told["cpu"])
            cold["publisher_peak_mib"] = told["peak"] / 2**20
        start = server.cpu()
        runs = consume(options, url, consumers)
        warm = result(runs, relay=server.cpu() - start)
        cached = runs[0]["octets"]
        warm["relay_base_mib"] = base / 2**20
        warm["relay_rss_mib"] = server.resident() / 2**20
        warm["cached_mib"] = cached / 2**20
        return cold, warm


def keep(kind: str, folder: Path, told: Mapping[str, Any]) -> Path:
    """Leave the results of a `kind` of run in `folder`, under the time. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{kind}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    file.write_text(json.dumps(told, indent=2) + "\n")
    return file


def bench(options: argparse.Namespace) -> dict[str, Any]:
    """Every row at every size; medians of `--repeat` runs."""
    table: dict[str, Any] = {}
    for size in options.sizes:
        options.size = size
        runs: dict[str, list[dict[str, float]]] = {kind: [] for kind, _ in ROWS}
        for _ in range(options.repeat):
            for kind in ("udp", "stock", "ours"):
                runs[kind].append(bench_raw.measure(kind, size, options.megabytes))
            runs["direct"].append(run_direct(options))
            cold, warm = run_relay(options)
            runs["relay"].append(cold)
            runs["cache"].append(warm)
        table[str(size)] = {
            kind: {
                name: round(statistics.median(run[name] for run in rows), 2)
                for name in rows[0]
                if isinstance(rows[0][name], int | float)
            }
            for kind, rows in runs.items()
        }
        if not options.json:
            show(size, table[str(size)])
    return table


def show(size: int, rows: dict[str, dict[str, float]]) -> None:
    stock, ours = rows["stock"]["mb_s"], rows["ours"]["mb_s"]
    print(f"\ndatagrams of {size:,} octets")
    print(f"  {'':28}{'MB/s':>8}{'CPU s/GB':>10}{'vs stock':>10}{'vs ours':>9}")
    for kind, title in ROWS:
        row = rows[kind]
        print(
            f"  {title:28}{row['mb_s']:>8.1f}{row['cpu_s_per_gb']:>10.2f}"
            f"{row['mb_s'] / stock:>9.2f}x{row['mb_s'] / ours:>8.2f}x"
        )
    cache = rows["cache"]
    limit = cache["cached_mib"] * 1.15 + 80
    print(
        f"  relay: {cache['relay_rss_mib']:.0f} MiB resident with {cache['cached_mib']:.0f} MiB "
        f"cached ({cache['relay_base_mib']:.0f} MiB when empty; goal at most {limit:.0f} MiB)"
    )
    print(
        f"  goals: ours at least {'3.0x' if size > 8000 else '1.3x'} stock at "
        f"{'8,952' if size > 8000 else '1,452'} ({ours / stock:.2f}x), "
        f"direct at least 0.80x ours ({rows['direct']['mb_s'] / ours:.2f}x)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="datagram sizes")
    parser.add_argument("--megabytes", type=int, default=512, help="payload of each run")
    parser.add_argument("--repeat", type=int, default=1, help="runs, of which medians are shown")
    parser.add_argument("--json", action="store_true", help="one JSON object, for machines")
    add_relay_limit(parser)
    parser.add_argument("--role", choices=("publish", "consume"), help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=600, help=argparse.SUPPRESS)
    add_shape(parser)
    options = parser.parse_args()
    options.sizes = [int(size) for size in options.sizes.split(",")]
    if options.role:
        options.size = options.sizes[0]
        asyncio.run({"publish": role_publish, "consume": role_consume}[options.role](options))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.certs = Path(folder)
        make_self_signed(options.certs)
        table = bench(options)
    if options.json:
        print(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()
