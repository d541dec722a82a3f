"""The trips of Objects and messages are measured, and none grows longer than it may be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT
from tools import trips

MOVES = {"relay-object": 40, "relay-priority": 36, "consumer-object": 14, "put-layer": 148}
"""Moves at most."""


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, int]]:
    """Measured in a process of its own, in which nothing is imported or warmed up before."""
    command = [sys.executable, "-m", "tools.trips", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_trip_is_measured(figures: dict[str, dict[str, int]]):
    assert list(figures) == list(trips.TRIPS)
    for each in figures.values():
        assert each["calls"] > each["moves"] >= each["climbs"]
        assert each["returns"] == each["moves"] - (each["files"] - 1)
        assert each["files"] > 5


@pytest.mark.parametrize("name", MOVES)
def test_a_trip_has_no_more_moves_than_it_may_have(figures: dict[str, dict[str, int]], name: str):
    assert figures[name]["moves"] <= MOVES[name]


def test_the_list_of_a_trip_has_a_line_for_each_call(figures, capsys):
    assert trips.main(["--show", "consumer-object"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == figures["consumer-object"]["calls"]
    assert sum(line[0] in ">^" for line in lines) == figures["consumer-object"]["moves"]
    assert sum(line[0] == "^" for line in lines) == figures["consumer-object"]["climbs"]
    assert lines[0].endswith("session.py:Session.stream_data")


# -- figures and floors, of a house that is made up --------------------------------------

CONTRACTS = """
[tool.importlinter]
[[tool.importlinter.contracts]]
type = "forbidden"
[[tool.importlinter.contracts]]
type = "layers"
containers = ["moqt"]
layers = ["attic", "(left) | right", "cellar"]
"""


@pytest.fixture
def floors(tmp_path: Path) -> Iterator[trips.Floors]:
    (tmp_path / "pyproject.toml").write_text(CONTRACTS)
    yield trips.Floors(tmp_path, {"moqt/old.py": "moqt/attic/new.py"})


@pytest.mark.parametrize(
    ("lower", "upper", "climbs"),
    [
        ("moqt/cellar/a.py", "moqt/attic/b.py", True),
        ("moqt/attic/b.py", "moqt/cellar/a.py", False),
        ("moqt/left/a.py", "moqt/right.py", False),
        ("moqt/right.py", "moqt/left/a.py", False),
        ("moqt/cellar/a.py", "moqt/old.py", True),
        ("moqt/old.py", "moqt/cellar/a.py", False),
    ],
)
def test_a_floor_is_as_high_as_its_contract_says(
    floors: trips.Floors, lower: str, upper: str, climbs: bool
):
    assert floors.climbs(lower, upper) is climbs


def test_without_a_contract_a_file_is_above_what_it_imports(floors: trips.Floors):
    assert floors.climbs("moqt/aio.py", "moqt/client.py")
    assert not floors.climbs("moqt/client.py", "moqt/aio.py")


def test_moves_returns_and_climbs_are_counted_from_call_to_call(floors: trips.Floors):
    files = ("cellar", "cellar", "attic", "cellar", "left", "attic", "attic")
    calls = [trips.Call(f"moqt/{name}/x.py", "f", 0) for name in files]
    # cellar ^ attic, back to cellar, ^ left, ^ back to attic
    assert trips.count(calls, floors) == trips.Figures(7, 3, 4, 2, 3)
