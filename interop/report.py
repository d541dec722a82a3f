"""Results as files: a TAP document for every run, and one Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from interop import tap
from interop.outcomes import Outcome, Run
from interop.tap import Point

MAX_CELL = 160
NOTED = (Outcome.FAIL, Outcome.PEER, Outcome.SKIP, Outcome.SURPRISE)


def write(folder: Path, runs: Sequence[Run], versions: Mapping[str, str], date: str) -> None:
    """Replace what is in `folder` by the results of `runs`."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.tap"):
        old.unlink()
    comments = [f"{name} {version}" for name, version in versions.items()]
    for run in runs:
        text = tap.document(_points(run), [run.title, f"Date: {date}", *comments])
        (folder / f"{run.slug}.tap").write_text(text)
    (folder / "README.md").write_text(markdown(runs, versions, date))


def _points(run: Run) -> list[Point]:
    """The run's points; a departure of the peer says so, and stays a failure."""
    return [
        replace(result.point, diagnostics={**result.point.diagnostics, "peer": result.note})
        if result.outcome in (Outcome.PEER, Outcome.SURPRISE)
        else result.point
        for result in run.results
    ]


def markdown(runs: Sequence[Run], versions: Mapping[str, str], date: str) -> str:
    """Counts, one table of cases for each client, and a note for all that did not pass."""
    lines = ["# Interoperability results", ""]
    lines.append(f"Made by `make interop` on {date}, draft-22, on loopback, with ")
    lines[-1] += ", ".join(f"{name} {version}" for name, version in versions.items()) + "."
    lines.append("*peer* is a departure of the peer's relay from the draft and counts as no pass.")
    lines += [
        "",
        "| run | pass | fail | peer | skip | unexpected pass |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    order = (Outcome.PASS, Outcome.FAIL, Outcome.PEER, Outcome.SKIP, Outcome.SURPRISE)
    for run in runs:
        numbers = " | ".join(str(run.counts[outcome]) for outcome in order)
        lines.append(f"| {run.title} | {numbers} |")
    for client in dict.fromkeys(run.client for run in runs):
        lines += _table(client, [run for run in runs if run.client == client])
    return "\n".join([*lines, *_notes(runs)]) + "\n"


def _table(client: str, runs: Sequence[Run]) -> list[str]:
    cells: dict[str, dict[str, str]] = {}
    for run in runs:
        for result in run.results:
            cells.setdefault(result.point.name, {})[run.slug] = str(result.outcome)
    columns = [f"{run.relay}, {run.transport}" for run in runs]
    lines = ["", f"## {client}", "", f"| case | {' | '.join(columns)} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for name, row in cells.items():
        lines.append(f"| {name} | {' | '.join(row.get(run.slug, '') for run in runs)} |")
    return lines


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = [
        f"- {run.title}, `{result.point.name}`: {_short(result.cell)}"
        for run in runs
        for result in run.results
        if result.outcome in NOTED
    ]
    return ["", "## What did not pass, and why", "", *notes] if notes else []


def _short(text: str) -> str:
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= MAX_CELL else line[: MAX_CELL - 3] + "..."
