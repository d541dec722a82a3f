"""From test points to outcomes: what counts as passed, and whose fault a failure is."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from interop.tap import Point

EXPECTED = Path(__file__).with_name("expected.toml")


class Outcome(StrEnum):
    """How one case went, as the table shows it."""

    PASS = "pass"
    FAIL = "FAIL"
    SKIP = "skip"
    PEER = "peer"
    """The peer's relay departs from the draft, as the list of departures says."""
    SURPRISE = "unexpected pass"
    """It is on that list and passes."""


@dataclass(frozen=True, slots=True)
class Departure:
    """One entry of the list."""

    client: str
    """Whose case it is: two clients may give different cases one name."""
    relay: str
    case: str
    reason: str
    section: str


@dataclass(frozen=True, slots=True)
class Result:
    point: Point
    outcome: Outcome
    note: str = ""

    @property
    def cell(self) -> str:
        return f"{self.outcome}: {self.note}" if self.note else str(self.outcome)


@dataclass(frozen=True, slots=True)
class Run:
    """One client against one relay over one transport."""

    client: str
    relay: str
    transport: str
    results: tuple[Result, ...]

    @property
    def title(self) -> str:
        return f"{self.client} × {self.relay}, {self.transport}"

    @property
    def slug(self) -> str:
        return f"{self.client}--{self.relay}--{self.transport}"

    @property
    def counts(self) -> Counter[Outcome]:
        return Counter(result.outcome for result in self.results)


Departures = dict[tuple[str, str, str], Departure]
"""By client, relay and case."""


def load_departures(path: Path = EXPECTED) -> Departures:
    """The list. Raises ValueError for an entry that gives no reason."""
    found: Departures = {}
    for entry in tomllib.loads(path.read_text())["departure"]:
        departure = Departure(**entry)
        key = (departure.client, departure.relay, departure.case)
        if not departure.reason or not departure.section:
            raise ValueError(f"{path.name}: {key} lacks its reason or its section")
        if key in found:
            raise ValueError(f"{path.name}: {key} is there twice")
        found[key] = departure
    return found


def judge(
    points: Iterable[Point], client: str, relay: str, departures: Departures
) -> tuple[Result, ...]:
    """The outcome of every point of a run of `client` against `relay`."""
    return tuple(_judge(point, departures.get((client, relay, point.name))) for point in points)


def _judge(point: Point, departure: Departure | None) -> Result:
    if point.skip is not None:
        return Result(point, Outcome.SKIP, point.skip)
    if departure is not None:
        note = f"{departure.reason} ({departure.section})"
        return Result(point, Outcome.SURPRISE if point.ok else Outcome.PEER, note)
    return Result(point, Outcome.PASS if point.ok else Outcome.FAIL, _why(point))


def _why(point: Point) -> str:
    """What a failed point says of itself, short."""
    if point.ok:
        return ""
    said = point.diagnostics
    if "expected" in said:
        return f"expected {said['expected']}, received {said.get('received', 'nothing')}"
    return str(said.get("message", said.get("received", "")))
