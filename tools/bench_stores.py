"""Beside kvcs, what else moves KV caches between machines: NIXL over UCX/TCP, and a Redis server.

As `python -m tools.bench` measures kvcs: on loopback, Objects of 32 KiB, each side in a process of
its own, CPU seconds of all of them per 10^9 octets. They are no equals, and the table says so. kvcs
is encrypted (TLS 1.3), every Object is compared with its digest, and a consumer needs no more than
the prompt. NIXL and Redis move octets in the clear that nobody checks, to who knows their address
or their key already.

    python -m tools.bench_stores
    python -m tools.bench_stores --megabytes 256 --json

NIXL and the client of Redis are installed into an environment of their own (.venv-stores); the
server is what `valkey-server` or `redis-server` of this machine is. What is not there has no row,
and a line says why.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from moqt.quic.certificates import make_self_signed
from tools import bench
from tools.environments import stores
from tools.environments.own import ROOT, Environment

SIZE = 1452
"""Octets of a datagram of kvcs."""
Figures = dict[str, float]

ROWS = {
    "kvcs": ("KVCS, publisher to consumer", "TLS 1.3, every Object verified"),
    "nixl": ("NIXL over UCX/TCP", "in the clear, nothing verified"),
    "redis": ("Redis", "in the clear, nothing verified, from its memory"),
}


class NotHereError(RuntimeError):
    """What is to be measured cannot be had."""


def role(python: Path, name: str, options: argparse.Namespace, *more: str) -> list[str | Path]:
    size = ["--octets", str(options.octets), "--object", str(options.object)]
    return [python, "-m", "tools.stores_roles", name, *size, *more]


def ready(process: bench.Role) -> str:
    """What it says with that; libraries may have said something before."""
    while not (line := process.line()).startswith("ready"):
        pass
    return line.removeprefix("ready").strip()


def told(process: bench.Role) -> dict[str, Any]:
    while not (line := process.line()).startswith("{"):
        pass
    answer: dict[str, Any] = json.loads(line)
    return answer


def figures(taken: dict[str, Any], other: float) -> Figures:
    """MB/s and CPU seconds; `other` are those of who gave."""
    if taken["failed"]:
        raise RuntimeError(taken["failed"])
    octets = taken["octets"]
    return {
        "mb_s": octets / taken["seconds"] / 1e6,
        "cpu_s_per_gb": (taken["cpu"] + other) / octets * 1e9,
    }


def run_kvcs(options: argparse.Namespace, python: Path) -> Figures:
    found = bench.run_direct(options)
    return {name: found[name] for name in ("mb_s", "cpu_s_per_gb")}


def run_nixl(options: argparse.Namespace, python: Path) -> Figures:
    with (
        bench.running(role(python, "nixl-give", options)) as giver,
        bench.running(role(python, "nixl-take", options)) as taker,
    ):
        where = ready(giver)
        ready(taker)
        assert taker.popen.stdin is not None
        taker.popen.stdin.write(f"{where}\n")
        taker.popen.stdin.flush()
        taken = told(taker)
        giver.go()
        return figures(taken, told(giver)["cpu"])


def run_redis(options: argparse.Namespace, python: Path) -> Figures:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port, server = stack.enter_context(redis_server(folder))
        command = role(python, "redis-give", options, "--port", str(port))
        ready(stack.enter_context(bench.running(command)))
        command = role(python, "redis-take", options, "--port", str(port))
        taker = stack.enter_context(bench.running(command))
        ready(taker)
        before = bench.cpu_of(server)
        taker.go()
        return figures(told(taker), bench.cpu_of(server) - before)


@contextmanager
def redis_server(folder: Path) -> Iterator[tuple[int, int]]:
    """A server that keeps nothing on disk; its port and process."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        raise NotHereError("neither valkey-server nor redis-server is installed")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder))
    process = subprocess.Popen([program, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "Ready to accept connections" in line:
                break
        else:
            raise NotHereError(f"{program} does not start")
        yield port, process.pid
    finally:
        process.kill()
        process.communicate()


RUNS: dict[str, Callable[[argparse.Namespace, Path], Figures]] = {
    "kvcs": run_kvcs,
    "nixl": run_nixl,
    "redis": run_redis,
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every row that can be had, medians of `--repeat` runs; why there are no others."""
    environment, runs, missing = Environment("stores", options.environment), {}, {}
    try:
        environment.make(stores.install)
    except subprocess.CalledProcessError as error:
        missing = dict.fromkeys(("nixl", "redis"), f"its client cannot be installed: {error}")
    for name, run in RUNS.items():
        if name in missing:
            continue
        try:
            runs[name] = [run(options, environment.python) for _ in range(options.repeat)]
        except NotHereError as error:
            missing[name] = str(error)
    return {
        "bench": "stores",
        "octets": options.octets,
        "rows": {
            name: {each: round(median(run[each] for run in many), 2) for each in many[0]}
            for name, many in runs.items()
        },
        "missing": missing,
    }


def show(found: dict[str, Any]) -> None:
    print(f"\n{found['octets'] / 1e6:,.0f} MB; they do not do the same:")
    for name, row in found["rows"].items():
        title, terms = ROWS[name]
        print(f"  {title:28}{row['mb_s']:>8.1f} MB/s{row['cpu_s_per_gb']:>8.2f} CPU s/GB  {terms}")
    for name, why in found["missing"].items():
        print(f"  {ROWS[name][0]:28}not measured: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=512, help="payload of each run")
    parser.add_argument("--repeat", type=int, default=1, help="runs, of which medians are shown")
    parser.add_argument("--json", action="store_true", help="one JSON object, for machines")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-stores")
    parser.add_argument("--limit", type=float, default=600, help=argparse.SUPPRESS)
    bench.add_shape(parser)
    options = parser.parse_args()
    options.size, options.url = SIZE, ""
    _, tokens = bench.geometry(options)
    options.octets = 2 * options.layers * options.object * (len(tokens) // 16)
    with tempfile.TemporaryDirectory() as folder:
        options.certs = Path(folder)
        make_self_signed(options.certs)
        found = measure(options)
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        show(found)


if __name__ == "__main__":
    main()
