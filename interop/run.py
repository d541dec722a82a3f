"""`python -m interop.run` (`make interop`): every client against every relay.

Installs the peers, runs the matrix, writes interop/results/. Exit status 1 when a case
failed that is not a known departure of a peer's relay. A peer that cannot be had is a skip.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from interop.browser.chromium import browser_version, find_browser
from interop.client import own_version
from interop.clients import Client, aiomoqt_client, chromium, kvcs_programs, our_client
from interop.outcomes import Departures, Outcome, Run, judge, load_departures
from interop.peers import AIOMOQT, Unavailable, install
from interop.processes import ProgramFailed
from interop.relays import Starter, aiomoqt_relay, our_relay
from interop.report import write
from interop.tap import Point

RESULTS = Path(__file__).with_name("results")
SCHEMES = {"quic": "moqt", "webtransport": "https"}
CLIENTS: dict[str, Client] = {
    "kvcs": our_client,
    "aiomoqt": aiomoqt_client,
    "kvcs-programs": kvcs_programs,
    "chromium": chromium,
}
RELAYS: dict[str, Starter] = {"kvcs": our_relay, "aiomoqt": aiomoqt_relay}


@dataclass(frozen=True, slots=True)
class Combination:
    client: str
    relay: str
    transport: str

    @property
    def needs_peer(self) -> bool:
        return AIOMOQT.package in (self.client, self.relay)


MATRIX = (
    Combination("kvcs", "kvcs", "quic"),
    Combination("kvcs", "kvcs", "webtransport"),
    Combination("kvcs", "aiomoqt", "quic"),
    Combination("kvcs", "aiomoqt", "webtransport"),
    Combination("aiomoqt", "kvcs", "quic"),
    Combination("aiomoqt", "kvcs", "webtransport"),
    Combination("kvcs-programs", "kvcs", "quic"),
    Combination("kvcs-programs", "aiomoqt", "quic"),
    Combination("chromium", "kvcs", "webtransport"),
    # The peer against itself: what the environment itself gives.
    Combination("aiomoqt", "aiomoqt", "quic"),
    Combination("aiomoqt", "aiomoqt", "webtransport"),
)


def perform(combination: Combination, missing: str | None) -> list[Point]:
    """The test points of one combination; `missing` is why the peer cannot be had, if so."""
    if missing is not None and combination.needs_peer:
        return [Point("all", True, missing)]
    with tempfile.TemporaryDirectory(prefix="interop-") as name:
        folder = Path(name)
        try:
            with RELAYS[combination.relay](folder) as relay:
                scheme = SCHEMES[combination.transport]
                points = CLIENTS[combination.client](relay, scheme, folder)
                if not relay.program.running:
                    points.append(
                        Point("relay-alive", False, None, {"message": relay.program.last_words})
                    )
        except ProgramFailed as error:
            points = [Point("all", False, None, {"message": str(error)})]
        return [_without(point, str(folder)) for point in points]


def _without(point: Point, folder: str) -> Point:
    """The point without names of this machine's folders."""
    said = {
        key: value.replace(folder, "") if isinstance(value, str) else value
        for key, value in point.diagnostics.items()
    }
    return Point(point.name, point.ok, point.skip, said)


def versions() -> dict[str, str]:
    python = ".".join(map(str, sys.version_info[:3]))
    return {
        "kvcs": own_version(),
        "Python": python,
        "aioquic": version("aioquic"),
        AIOMOQT.package: AIOMOQT.version,
        "Chromium": _browser(),
    }


def _browser() -> str:
    try:
        return browser_version(find_browser())
    except Unavailable:
        return "absent"


def run_matrix(matrix: Sequence[Combination], departures: Departures) -> list[Run]:
    missing: str | None = None
    try:
        install(AIOMOQT)
    except Unavailable as why:
        missing = str(why)
    runs = []
    for each in matrix:
        points = perform(each, missing)
        results = judge(points, each.client, each.relay, departures)
        run = Run(each.client, each.relay, each.transport, results)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in run.counts.items())
        print(f"{run.title}: {counts}", flush=True)
        for result in run.results:
            if result.outcome in (Outcome.FAIL, Outcome.SURPRISE, Outcome.SKIP):
                print(f"  {result.point.name}: {result.cell}", flush=True)
        runs.append(run)
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="interop.run", description=__doc__)
    parser.add_argument("--client", choices=CLIENTS, help="only this client")
    parser.add_argument("--relay", choices=RELAYS, help="only this relay")
    parser.add_argument("--transport", choices=SCHEMES, help="only this transport")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the results go")
    chosen = parser.parse_args(arguments)
    matrix = [
        each
        for each in MATRIX
        if chosen.client in (None, each.client)
        and chosen.relay in (None, each.relay)
        and chosen.transport in (None, each.transport)
    ]
    # As an exception, so that every program that was started is ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    runs = run_matrix(matrix, load_departures())
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    write(chosen.results, runs, versions(), date)
    return 1 if any(run.counts[Outcome.FAIL] for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
