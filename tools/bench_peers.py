"""`make bench-peers`: we beside another MOQT stack, on one machine, in one run.

Columns, one after the other in each round: kvcs with the C extension for packets, kvcs in Python
alone, and aiomoqt, which is installed into an environment of its own (`python -m interop.peers`;
where it cannot be had, its column stays empty and says so). kvcs delivers KV caches with every
check made; aiomoqt counts octets of Objects of the same size that nobody checks. From our relay's
cache, with the publisher gone, each consumer has a whole cache; aiomoqt's relay has one live track
and forwards it to as many subscribers. MB are 10^6 octets; of several, what all had together.

The results are left in bench/results (--keep FOLDER), and `--against FILE` compares with a run of
before: exit status 1 when a figure is worse by more than --tolerance.

    python -m tools.bench_peers
    python -m tools.bench_peers --quick --against bench/results/peers-20300101T000000Z.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from interop.peers import AIOMOQT
from interop.processes import LOOPBACK, READY_SECONDS, Program, ProgramFailed, free_port
from moqt.quic import backend
from moqt.quic.certificates import make_self_signed
from tools import bench, bench_tracks

SMALL = 4 << 10
DEEP = 300
MANY = 16
RESULTS = Path("bench/results")
TITLES = {
    "direct": "direct",
    "relay": "relay to one",
    "cache": f"relay to {bench.CONSUMERS}",
    "cache_many": f"relay to {MANY}",
    "small_direct": "4 KiB Objects, direct",
    "small_relay": "4 KiB Objects, relay to one",
    "deep": f"{DEEP} layers, relay to one",
    "tracks": f"{bench_tracks.TRACKS:,} tracks, relay to one",
    "tracks_cached": f"{bench_tracks.TRACKS:,} tracks, cached",
}
COLUMNS = ("native", "python", "aiomoqt")
PYTHON = f"Python {platform.python_version()}"
Figures = dict[str, float]

GOALS: tuple[tuple[str, str, float], ...] = (
    ("direct", "x aiomoqt", 1.8),
    ("relay", "x aiomoqt", 1.6),
    ("cache", "x aiomoqt", 2.0),
    ("direct", "cpu_s_per_gb", -4.3),
    ("relay", "cpu_s_per_gb", -9.0),
    ("cache", "cpu_s_per_gb", -4.5),
    ("relay", "first_layer_share", -(1 / bench.LAYERS + 0.08)),
)
"""Row, figure of the native column, and the least that will do (the most, below 0)."""
LOWER_IS_BETTER = ("cpu_s_per_gb", "first_layer_ms", "first_layer_share", "peak_mib", "rss_mib")


# ------------------------------------------------------------------------------------ ours


@contextmanager
def packets_by(name: str) -> Iterator[None]:
    """The processes started meanwhile protect packets so."""
    before = os.environ.get("KVCS_QUIC_BACKEND")
    os.environ["KVCS_QUIC_BACKEND"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["KVCS_QUIC_BACKEND"]
        else:
            os.environ["KVCS_QUIC_BACKEND"] = before


def shaped(options: argparse.Namespace, **members: int) -> argparse.Namespace:
    return argparse.Namespace(**(vars(options) | members))


def run_ours(name: str, options: argparse.Namespace) -> dict[str, Figures]:
    rows = options.rows
    found: dict[str, Figures] = {}
    few = options.megabytes // 4 or 1
    small = shaped(options, object=SMALL, megabytes=few)
    with packets_by(name):
        if "direct" in rows:
            found["direct"] = bench.run_direct(options)
        if "relay" in rows or "cache" in rows:
            found["relay"], found["cache"] = bench.run_relay(options)
        if "cache_many" in rows:
            _, found["cache_many"] = bench.run_relay(shaped(options, megabytes=few), MANY)
        if "small_direct" in rows:
            found["small_direct"] = bench.run_direct(small)
        if "small_relay" in rows:
            found["small_relay"], _ = bench.run_relay(small, 1)
        if "deep" in rows:
            found["deep"], _ = bench.run_relay(shaped(options, layers=DEEP), 1)
        if "tracks" in rows or "tracks_cached" in rows:
            found["tracks"], found["tracks_cached"] = bench_tracks.measure(options)
    return {row: found[row] for row in rows if row in found}


# --------------------------------------------------------------------------------- aiomoqt


SHAPES = {
    "direct": (bench.OBJECT, 0),
    "relay": (bench.OBJECT, 1),
    "cache": (bench.OBJECT, bench.CONSUMERS),
    "cache_many": (bench.OBJECT, MANY),
    "small_direct": (SMALL, 0),
    "small_relay": (SMALL, 1),
}
"""Of aiomoqt's rows: octets of an Object, and subscribers of its relay, 0 for none between."""


def started(
    stack: ExitStack, options: argparse.Namespace, name: str, ready: str, *command: str | Path
) -> Program:
    """One of aiomoqt's programs, once it has said `ready`. Raises ProgramFailed."""
    line = [options.aiomoqt / "bin" / name, "--draft", "22", *command]
    program = Program(f"aiomoqt-{name}", line, options.certs, {"PYTHONUNBUFFERED": "1"})
    stack.enter_context(program)
    end = time.monotonic() + READY_SECONDS
    while re.search(ready, program.output + program.log.read_text(errors="replace")) is None:
        if time.monotonic() > end or not program.running:
            raise ProgramFailed(f"{program.name} is not ready: {program.last_words}")
        time.sleep(0.05)
    return program


def start_up(options: argparse.Namespace) -> float:
    """CPU seconds that a subscriber of aiomoqt takes to be there at all."""
    before = cpu_of_the_ended()
    command = [options.aiomoqt / "bin" / "moq-sub-bench", "--help"]
    with Program("aiomoqt-help", command, options.certs) as program:
        program.wait(60)
    return cpu_of_the_ended() - before


def cpu_of_the_ended() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_aiomoqt(options: argparse.Namespace, row: str) -> Figures:
    """Its publisher and its subscribers, with the congestion control that they choose by
    themselves and no bound on what they queue: bounds cost them most of their speed. The CPU time
    that subscribers take to start is left out. Raises ProgramFailed."""
    size, subscribers = SHAPES[row]
    port = free_port()
    url = f"moqt://{LOOPBACK}:{port}"
    pace = ["-s", str(size), "-g", "128", "-P", "4", "--pub-ns", "-T", "track"]
    pace += ["--max-inflight-bytes", "0", "--max-queued-bytes", "0"]
    server: list[str | Path] = ["--cert", options.certs / "cert.pem"]
    server += ["--key", options.certs / "key.pem", "--bind", LOOPBACK]
    with ExitStack() as stack:
        if subscribers:
            relay = ("--quic", "--port", str(port), *server)
            patient = ("-k", "-t", str(options.seconds + 60), "--no-stats", url)
            before = [
                started(stack, options, "moq-interop-relay", "Listening", *relay),
                started(stack, options, "moq-pub-bench", "Published", *pace, *patient),
            ]
        else:
            alone = ("-Q", "-p", str(port), *pace, *server)
            before = [started(stack, options, "moq-pub-server", "ready on", *alone)]
        command = [options.aiomoqt / "bin" / "moq-sub-bench", "-k", "--draft", "22"]
        command += ["-T", "track", "-t", str(options.seconds), "--no-stats", url]
        idle, began = start_up(options), sum(bench.cpu_of(program.pid) for program in before)
        ended = cpu_of_the_ended()
        clients = [
            stack.enter_context(Program(f"aiomoqt-subscriber-{each}", command, options.certs))
            for each in range(max(subscribers, 1))
        ]
        rate = octets = 0.0
        for client in clients:
            client.wait(options.seconds + 60)
            active = client.wait_for(r"\(([\d.]+)s active", 1)
            came = int(client.wait_for(r"Bytes:\s+([\d,]+)", 1)[1].replace(",", ""))
            rate += came / float(active[1])
            octets += came
        if not octets:
            raise ProgramFailed("aiomoqt: nothing came")
        used = sum(bench.cpu_of(program.pid) for program in before) - began
        used += cpu_of_the_ended() - ended - idle * len(clients)
        return {"mb_s": rate / 1e6, "cpu_s_per_gb": used / octets * 1e9}


# ------------------------------------------------------------------------------- the table


def middle(runs: list[Figures]) -> Figures:
    """The medians of all rounds, and how far the rates of the rounds lie apart."""
    rates = [run["mb_s"] for run in runs]
    found = {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
    return found | {"spread": round((max(rates) - min(rates)) / statistics.median(rates), 3)}


def measure(options: argparse.Namespace) -> dict[str, dict[str, Figures]]:
    """Rows of columns; what cannot be had is left out and told."""
    runs: dict[str, dict[str, list[Figures]]] = {}

    def note(row: str, column: str, figures: Figures) -> None:
        runs.setdefault(row, {}).setdefault(column, []).append(figures)

    for number in range(options.repeat):
        for column in options.columns:
            print(f"round {number + 1} of {options.repeat}: {column}", file=sys.stderr)
            if column != "aiomoqt":
                for row, figures in run_ours(column, options).items():
                    note(row, column, figures)
                continue
            for row in (each for each in options.rows if each in SHAPES):
                try:
                    note(row, column, run_aiomoqt(options, row))
                except ProgramFailed as error:
                    print(f"aiomoqt, {TITLES[row]}: {error}", file=sys.stderr)
    return {
        row: {column: middle(found) for column, found in runs[row].items()} for row in options.rows
    }


def reached(rows: Mapping[str, Mapping[str, Figures]]) -> list[dict[str, Any]]:
    """Of each goal whether it is reached: None where nothing was measured that tells."""
    told = []
    for row, name, least in GOALS:
        ours, theirs = (rows.get(row, {}).get(column) for column in ("native", "aiomoqt"))
        found = None
        if ours is not None and name != "x aiomoqt":
            found = ours[name]
        elif ours is not None and theirs is not None:
            found = ours["mb_s"] / theirs["mb_s"]
        good = None if found is None else found <= -least if least < 0 else found >= least
        bound = f"{'at most' if least < 0 else 'at least'} {abs(least):.3g}"
        told.append(
            {
                "row": row,
                "goal": f"{bound} {name}",
                "found": found and round(found, 3),
                "reached": good,
            }
        )
    return told


def worse(
    now: Mapping[str, Mapping[str, Figures]],
    then: Mapping[str, Mapping[str, Figures]],
    tolerance: float,
) -> list[str]:
    """Each of our figures that is worse than before by more than `tolerance` of it."""
    told = []
    for row, columns in now.items():
        for column in ("native", "python"):
            before = then.get(row, {}).get(column, {})
            for name, value in columns.get(column, {}).items():
                lower = name.endswith(LOWER_IS_BETTER)
                if not before.get(name) or not (lower or name == "mb_s"):
                    continue
                change = value / before[name] - 1
                if (change if lower else -change) > tolerance:
                    told.append(
                        f"{TITLES[row]}, {column}: {name} {value:g}, before {before[name]:g}"
                        f" ({change:+.0%})"
                    )
    return told


def show(options: argparse.Namespace, told: Mapping[str, Any]) -> None:
    print(f"{told['machine']}; {options.megabytes} MB, datagrams of {options.size:,} octets")
    print(
        f"{'MB/s (CPU s/GB)':30}" + "".join(f"{column:>18}" for column in COLUMNS) + "   x aiomoqt"
    )
    for row, columns in told["rows"].items():
        cells = [
            f"{columns[each]['mb_s']:.0f} ({columns[each]['cpu_s_per_gb']:.1f})"
            if each in columns
            else "-"
            for each in COLUMNS
        ]
        ratio = "-"
        if "native" in columns and "aiomoqt" in columns:
            ratio = f"{columns['native']['mb_s'] / columns['aiomoqt']['mb_s']:.2f}"
        print(f"{TITLES[row]:30}" + "".join(f"{cell:>18}" for cell in cells) + f"{ratio:>12}")
    said = {True: "reached", False: "NOT REACHED", None: "not measured"}
    print("goals")
    for goal in told["goals"]:
        found = "" if goal["found"] is None else f" ({goal['found']:g})"
        print(f"  {TITLES[goal['row']]:28}{goal['goal']:34}{said[goal['reached']]}{found}")


def columns_here(options: argparse.Namespace) -> list[str]:
    """The columns asked for that can be had; says of the others why not."""
    here = []
    for column in options.columns:
        if column == "aiomoqt" and not (options.aiomoqt / "bin" / "moq-pub-server").exists():
            print(
                f"{AIOMOQT.package} {AIOMOQT.version} is not in {options.aiomoqt}: its column stays"
                " empty (python -m interop.peers installs it)",
                file=sys.stderr,
            )
        elif column == "native" and backend.native() is None:
            print(
                "the C extension is not built: its column stays empty (make native)",
                file=sys.stderr,
            )
        else:
            here.append(column)
    return here


def chosen(text: str, of: Iterable[str], parser: argparse.ArgumentParser) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in of]:
        parser.error(f"no such thing: {', '.join(unknown)} (there are {', '.join(of)})")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(TITLES), help="which rows")
    parser.add_argument("--columns", default=",".join(COLUMNS), help="who is measured")
    parser.add_argument("--size", type=int, default=1452, help="datagram size")
    parser.add_argument("--megabytes", type=int, help="payload of each run of ours (512)")
    parser.add_argument("--seconds", type=int, help="of each run of aiomoqt (6)")
    parser.add_argument("--repeat", type=int, help="rounds, of which medians are shown (3)")
    parser.add_argument("--quick", action="store_true", help="one round of 64 MB and 2 s")
    parser.add_argument(
        "--aiomoqt", type=Path, default=AIOMOQT.folder, help="where it is installed"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for machines")
    parser.add_argument(
        "--keep", type=Path, default=RESULTS, metavar="FOLDER", help="for the results"
    )
    parser.add_argument("--against", type=Path, metavar="FILE", help="results of before")
    parser.add_argument("--tolerance", type=float, default=0.1, help="of a figure (0.1)")
    parser.set_defaults(
        relay_limit=[], limit=600.0, connections=1, layers=bench.LAYERS, object=bench.OBJECT
    )
    options = parser.parse_args()
    options.rows = chosen(options.rows, TITLES, parser)
    options.columns = chosen(options.columns, COLUMNS, parser)
    options.columns = columns_here(options)
    options.megabytes = options.megabytes or (64 if options.quick else 512)
    options.seconds = options.seconds or (2 if options.quick else 6)
    options.repeat = options.repeat or (1 if options.quick else 3)
    then = None if options.against is None else json.loads(options.against.read_text())
    with tempfile.TemporaryDirectory() as folder:
        options.certs = Path(folder)
        make_self_signed(options.certs)
        rows = measure(options)
    told = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {PYTHON}",
        "megabytes": options.megabytes,
        "datagram": options.size,
        "repeat": options.repeat,
        "rows": rows,
        "goals": reached(rows),
    }
    if options.json:
        print(json.dumps(told, indent=2))
    else:
        show(options, told)
    print(f"kept in {bench.keep('peers', options.keep, told)}", file=sys.stderr)
    found = [] if then is None else worse(rows, then["rows"], options.tolerance)
    for line in found:
        print(f"worse: {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
