"""The bench of engines measures what it says, and says what is reached."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.paths import ROOT
from tools.bench_llm import Row, rows


def test_a_goal_is_reached_by_the_median_and_not_by_a_single_round() -> None:
    row = Row("a", 1.05, "x", values=[0.9, 1.0, 9.0])
    assert row.reached
    assert row.told()["median"] == 1.0
    row.values.append(1.2)
    row.values.append(1.3)
    assert not row.reached
    assert Row("b", 5.0, "x", at_least=True, values=[4.9, 5.1, 5.2]).reached
    assert not Row("b", 5.0, "x", at_least=True, values=[4.9]).reached


def test_every_row_has_a_goal_of_its_own() -> None:
    assert len({row.name for row in rows().values()}) == len(rows()) == 9
    assert all(row.goal > 0 and row.unit in ("x", "s") for row in rows().values())


@pytest.mark.timeout(200)
def test_a_run_of_engines_without_a_model_gives_every_row_and_keeps_it(tmp_path) -> None:
    options = ("--fake", "--rounds", "1", "--tokens", "100", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench_llm", *options, "--keep", tmp_path / "results"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert [len(row["values"]) for row in told["rows"]] == [1] * 9
    (kept,) = (tmp_path / "results").glob("llm-*.json")
    assert json.loads(kept.read_text()) == told
