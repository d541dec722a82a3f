"""`make bench-paths`: what networks cost, with a UDP proxy for the network, in one run.

For each path: a KV cache through our relay to a consumer behind the path, every check made
(publisher and relay are on this side of it); raw QUIC streams of ours; and, where it is installed,
aiomoqt's publisher server to its subscriber, without a relay and without checks, for as long as our
retrieval took, and at least 3 s. MB are 10^6 octets of payload. Connections stand before the clock
starts, but for aiomoqt's subscriber. What is not done within --seconds counts with what came until
then.

aiomoqt is looked for where `python -m interop.peers` installs it, or in --aiomoqt FOLDER. Last,
it is told goal by goal what is reached; `--json` prints rows and goals as one JSON object, `--keep`
leaves the same in bench/results (or the FOLDER named), with the time in its name.

    python -m tools.bench_paths
    python -m tools.bench_paths --quick --paths "100 ms;lte" --repeat 3 --keep
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path as FilePath
from typing import Any

from interop.peers import AIOMOQT
from interop.processes import LOOPBACK, Program, ProgramFailed, free_port
from moqt.quic.certificates import make_self_signed
from tools import bench, bench_raw
from tools.path.link import Link, Path
from tools.path.profiles import PROFILES
from tools.path.proxy import Proxy, Route

LONG = 0.05
"""Seconds one way of the paths of 100 ms."""
POLICED = Path(latency=0.025, police=5e6, police_burst=256 << 10, police_each=True)
"""Each flow has 5 MB/s of its own."""
NARROW = Path(latency=LONG, bandwidth=20e6, queue=4_000_000, loss=0.01)
PATHS: dict[str, tuple[Path, Path]] = {
    "no delay": (Path(latency=0.0),) * 2,
    "100 ms": (Path(latency=LONG),) * 2,
    "100 ms, 0.1 %": (Path(latency=LONG, loss=0.001),) * 2,
    "100 ms, 1 %": (Path(latency=LONG, loss=0.01),) * 2,
    "20 ms, 2 %": (Path(latency=0.01, loss=0.02),) * 2,
    "20 ms, reordering": (Path(latency=0.01, reorder=0.3, reorder_by=0.01),) * 2,
    "20 MB/s, 100 ms, 1 %": (NARROW,) * 2,
    "5 MB/s a flow": (POLICED,) * 2,
    "5 MB/s a flow, by 4": (POLICED,) * 2,
    **PROFILES,
}
"""Up from the consumer and down to it."""
CONNECTIONS = {"5 MB/s a flow, by 4": 4}
"""Of our consumer, where it has more than one; the other columns have one."""
COLUMNS = ("kvcs", "raw", "aiomoqt")
RESULTS = FilePath("bench/results")


def _at_most(row: dict[str, Any], name: str) -> float | None:
    found: float | None = row["kvcs"].get(name)
    return None if found is None else -found


def _beside_aiomoqt(row: dict[str, Any]) -> float | None:
    theirs = row.get("aiomoqt", {}).get("mb_s")
    return row["kvcs"]["mb_s"] / theirs if theirs else None


GOALS: tuple[tuple[str, str, float, Callable[[dict[str, Any]], float | None]], ...] = (
    ("100 ms", "MB/s", 40, lambda row: float(row["kvcs"]["mb_s"])),
    ("100 ms", "x aiomoqt", 1, _beside_aiomoqt),
    ("100 ms", "s to the first layer", -0.6, lambda row: _at_most(row, "first_layer")),
    ("100 ms", "s the second time", -0.35, lambda row: _at_most(row, "first_layer_again")),
    ("100 ms, 0.1 %", "MB/s", 40, lambda row: float(row["kvcs"]["mb_s"])),
    ("100 ms, 0.1 %", "x aiomoqt", 1, _beside_aiomoqt),
    ("100 ms, 1 %", "x aiomoqt", 1.3, _beside_aiomoqt),
    ("20 MB/s, 100 ms, 1 %", "of the rate", 0.85, lambda row: row.get("filled")),
    ("20 MB/s, 100 ms, 1 %", "BDP queued", -1.5, lambda row: _at_most(row, "queue_bdp")),
    ("5 MB/s a flow, by 4", "MB/s", 15, lambda row: float(row["kvcs"]["mb_s"])),
)
"""Of which path, what, the least that will do (the most, below 0), and what a row has of it."""
LEAST_PEER_SECONDS = 3
BUSY = 0.01
"""Seconds: with a proxy that was later than that, the host was too busy for the figures."""


@contextmanager
def through(port: int, up: Path, down: Path, seed: int) -> Iterator[tuple[Proxy, Route]]:
    """A proxy before `port`, whose clients are at the upper end of `up`."""
    proxy = Proxy()
    route = proxy.add((LOOPBACK, 0), (LOOPBACK, port), up, down, seed=seed)
    with proxy:
        yield proxy, route


def told(proxy: Proxy, link: Link) -> dict[str, Any]:
    """What is to be said of a run's network: `link` carried the data."""
    (statistics_of,) = proxy.statistics()
    bandwidth, latency = link.path.bandwidth, link.path.latency
    found: dict[str, Any] = {
        "dropped": link.lost,
        "late_max_ms": statistics_of["late_max_ms"],
        "lost_by_host": sum(statistics_of["proxy_dropped"].values()),
    }
    if bandwidth is not None and latency:
        found["queue_bdp"] = link.queue_max / (bandwidth * 2 * latency)
    return found


def run_kvcs(options: argparse.Namespace, up: Path, down: Path, seed: int) -> dict[str, Any]:
    """Through a relay that has nothing cached; then, unless --once, its cache to the same site."""
    with bench.relay(options) as (_, url), bench.role(options, "publish", url) as publisher:
        publisher.line()
        with through(int(url.rpartition(":")[2]), up, down, seed) as (proxy, route):
            far = f"moqt://{LOOPBACK}:{route.address[1]}"
            (run,) = bench.consume(options, far, 1)
            found = {
                "mb_s": run["octets"] / run["seconds"] / 1e6,
                "seconds": run["seconds"],
                "layers": run["layers"],
                "first_layer": run["first_layer"],
                **told(proxy, route.down),
            }
            if not options.once and not run["failed"]:
                (again,) = bench.consume(options, far, 1)
                found["first_layer_again"] = again["first_layer"]
    if run["failed"]:
        found["failed"] = f"{run['layers']} of {bench.LAYERS} layers: {run['failed']}"
    return found


def run_raw(options: argparse.Namespace, up: Path, down: Path, seed: int) -> dict[str, Any]:
    """Here the sender is the client: the data goes up, over the path that leads down."""
    with ExitStack() as stack:
        proxies: list[tuple[Proxy, Route]] = []

        def via(port: int) -> int:
            proxies.append(stack.enter_context(through(port, down, up, seed)))
            return int(proxies[0][1].address[1])

        try:
            run = bench_raw.measure(
                "ours", options.size, options.megabytes, via=via, limit=options.limit
            )
            found = {"mb_s": run["mb_s"]}
        except subprocess.TimeoutExpired:
            octets = proxies[0][1].up.octets
            found = {
                "mb_s": octets / options.limit / 1e6,
                "failed": f"not done in {options.limit:g} s",
            }
        proxy, route = proxies[0]
        return found | told(proxy, route.up)


def run_aiomoqt(
    options: argparse.Namespace, up: Path, down: Path, seed: int, seconds: float
) -> dict[str, Any]:
    """Its publisher server and subscriber, with the congestion control that it chooses by default
    (of BBR's kind) and no bound on what it queues: bounds cost it most of its speed."""
    programs, port = options.aiomoqt / "bin", free_port()
    server: list[str | FilePath] = [programs / "moq-pub-server", "--bind", LOOPBACK, "-Q"]
    server += ["-p", str(port), "--draft", "22", "-T", "track"]
    server += ["-s", str(bench.OBJECT), "-g", "128", "-P", "4"]
    server += ["--max-inflight-bytes", "0", "--max-queued-bytes", "0"]
    server += ["--cert", options.certs / "cert.pem", "--key", options.certs / "key.pem"]
    lasts = round(min(max(seconds, LEAST_PEER_SECONDS), options.limit))
    with Program("aiomoqt-publisher", server, options.certs) as publisher:
        publisher.wait_for("ready on")
        with through(port, up, down, seed) as (proxy, route):
            client: list[str | FilePath] = [programs / "moq-sub-bench", "-k", "--draft", "22"]
            client += ["-T", "track", "-t", str(lasts), "--no-stats"]
            client.append(f"moqt://{LOOPBACK}:{route.address[1]}")
            with Program("aiomoqt-subscriber", client, options.certs) as subscriber:
                subscriber.wait(lasts + 60)
                active = subscriber.wait_for(r"\(([\d.]+)s active", 1)
                octets = subscriber.wait_for(r"Bytes:\s+([\d,]+)", 1)
            return {
                "mb_s": int(octets[1].replace(",", "")) / float(active[1]) / 1e6,
                **told(proxy, route.down),
            }


def attempt(run: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """A figure that cannot be had is told, and the others are measured."""
    try:
        return run(*arguments)
    except (RuntimeError, ProgramFailed, OSError) as error:
        return {"mb_s": 0.0, "failed": str(error)}


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run in the middle by its rate, with the medians of all figures."""
    found = sorted(runs, key=lambda run: float(run["mb_s"]))[len(runs) // 2]
    figures = {name for name, value in found.items() if isinstance(value, int | float)}
    return found | {
        name: statistics.median(run[name] for run in runs if run.get(name) is not None)
        for name in figures
    }


def reached(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each goal whether it is reached: None where nothing was measured that tells."""
    by_path = {row["path"]: row for row in rows}
    told = []
    for path, what, least, figure in GOALS:
        found = figure(by_path[path]) if path in by_path else None
        told.append(
            {
                "path": path,
                "goal": f"{'at most' if least < 0 else 'at least'} {abs(least):g} {what}",
                "found": None if found is None else round(abs(found), 3),
                "reached": None if found is None else found >= least,
            }
        )
    return told


def show_goals(goals: list[dict[str, Any]]) -> None:
    said = {True: "reached", False: "NOT REACHED", None: "not measured"}
    print("\ngoals")
    for goal in goals:
        found = "" if goal["found"] is None else f" ({goal['found']:g})"
        print(f"  {goal['path']:22}{goal['goal']:34}{said[goal['reached']]}{found}")
    known = [goal["reached"] for goal in goals if goal["reached"] is not None]
    print(f"  {sum(known)} of {len(known)} that were measured are reached, {len(goals)} there are")


def measure(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """One row: the medians of `--repeat` runs of each column, one after the other."""
    up, down = PATHS[name]
    options.connections = CONNECTIONS.get(name, 1)
    runs: dict[str, list[dict[str, Any]]] = {column: [] for column in COLUMNS}
    for seed in range(1, options.repeat + 1):
        kvcs = attempt(run_kvcs, options, up, down, seed)
        runs["kvcs"].append(kvcs)
        if "raw" in options.columns:
            runs["raw"].append(attempt(run_raw, options, up, down, seed))
        if "aiomoqt" in options.columns and options.aiomoqt is not None:
            lasts = kvcs.get("seconds", 0.0)
            runs["aiomoqt"].append(attempt(run_aiomoqt, options, up, down, seed, lasts))
    row: dict[str, Any] = {"path": name}
    for column, found in runs.items():
        if found:
            row[column] = middle(found)
    if down.bandwidth is not None:
        row["filled"] = row["kvcs"]["mb_s"] * 1e6 / down.bandwidth
    return row


def ratio(row: dict[str, Any], of: str) -> str:
    theirs = row.get(of, {}).get("mb_s")
    return f"{row['kvcs']['mb_s'] / theirs:.2f}x" if theirs else "-"


def show(row: dict[str, Any]) -> None:
    kvcs = row["kvcs"]
    cells = [f"{row[column]['mb_s']:.1f}" if column in row else "-" for column in COLUMNS]
    first, again = kvcs.get("first_layer"), kvcs.get("first_layer_again")
    cells += [ratio(row, "aiomoqt"), ratio(row, "raw")]
    cells += ["-" if each is None else f"{each:.2f} s" for each in (first, again)]
    cells.append(f"{row['filled']:.0%}" if "filled" in row else "-")
    cells.append(f"{kvcs['queue_bdp']:.2f}" if "queue_bdp" in kvcs else "-")
    print(f"{row['path']:22}" + "".join(f"{cell:>11}" for cell in cells), flush=True)
    for column in COLUMNS:
        run = row.get(column, {})
        if "failed" in run:
            print(f"    {column}: {run['failed']}")
        if run.get("lost_by_host") or run.get("late_max_ms", 0) > 1000 * BUSY:
            print(
                f"    {column}: the host was busy: the proxy was up to {run['late_max_ms']:.0f} ms "
                f"late and its sockets lost {run['lost_by_host']} datagrams"
            )


def find_aiomoqt(folder: FilePath | None) -> FilePath | None:
    found = folder or AIOMOQT.folder
    return found if (found / "bin" / "moq-pub-server").exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--paths", default=";".join(PATHS), help="which rows, by ';'")
    parser.add_argument("--size", type=int, default=1452, help="datagram size")
    parser.add_argument("--megabytes", type=int, help="payload of each run (134)")
    parser.add_argument("--seconds", type=float, help="that a run may take (90)")
    parser.add_argument("--repeat", type=int, default=1, help="runs, of which medians are shown")
    parser.add_argument("--once", action="store_true", help="no second retrieval for each path")
    parser.add_argument("--columns", default=",".join(COLUMNS), help="what is run beside kvcs")
    bench.add_relay_limit(parser)
    parser.add_argument("--quick", action="store_true", help="16 MB, 20 seconds a run")
    parser.add_argument("--aiomoqt", type=FilePath, help="the environment aiomoqt is installed in")
    parser.add_argument("--json", action="store_true", help="one JSON object, for machines")
    parser.add_argument(
        "--keep",
        type=FilePath,
        nargs="?",
        const=RESULTS,
        metavar="FOLDER",
        help="keep the results there (bench/results)",
    )
    options = parser.parse_args()
    options.columns = [name.strip() for name in options.columns.split(",")]
    if unknown := [name for name in options.columns if name not in COLUMNS]:
        parser.error(f"no such column: {', '.join(unknown)} (there are {', '.join(COLUMNS)})")
    names = [name.strip() for name in options.paths.split(";") if name.strip()]
    if unknown := [name for name in names if name not in PATHS]:
        parser.error(f"no such path: {'; '.join(unknown)} (there are {'; '.join(PATHS)})")
    options.layers, options.object = bench.LAYERS, bench.OBJECT
    options.megabytes = options.megabytes or (16 if options.quick else 134)
    options.limit = options.seconds or (20.0 if options.quick else 90.0)
    if options.aiomoqt is not None and find_aiomoqt(options.aiomoqt) is None:
        parser.error(f"no aiomoqt in {options.aiomoqt} (bin/moq-pub-server is not there)")
    options.aiomoqt = find_aiomoqt(options.aiomoqt)
    if options.aiomoqt is None and "aiomoqt" in options.columns:
        print(
            f"{AIOMOQT.package} {AIOMOQT.version} is not installed: its column stays empty "
            "(python -m interop.peers installs it)",
            file=sys.stderr,
        )
    titles = ("kvcs MB/s", "raw MB/s", "aiomoqt", "vs aiomoqt", "vs raw", "1st layer", "again")
    titles += ("of rate", "queue BDP")
    if not options.json:
        print(f"{options.megabytes} MB, datagrams of {options.size:,} octets")
        print(f"{'':22}" + "".join(f"{title:>11}" for title in titles), flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        options.certs = FilePath(folder)
        make_self_signed(options.certs)
        for name in names:
            rows.append(measure(options, name))
            if not options.json:
                show(rows[-1])
    told = {
        "megabytes": options.megabytes,
        "datagram": options.size,
        "repeat": options.repeat,
        "relay_limits": options.relay_limit,
        "rows": rows,
        "goals": reached(rows),
    }
    if options.json:
        print(json.dumps(told, indent=2))
    else:
        show_goals(told["goals"])
    if options.keep is not None:
        print(f"kept in {bench.keep('paths', options.keep, told)}", file=sys.stderr)


if __name__ == "__main__":
    main()
