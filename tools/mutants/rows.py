"""Reads the rows of a conformance table: what a rule says, which code and tests it names.

Two forms are read: `| Rule | Where | Tests | State |`, and the same with a first column that has no
heading, for a keyword or a number. Names of code are `file.py::name`, or dotted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

COLUMNS = {
    "": "mark",
    "rule": "rule",
    "obligation": "rule",
    "decision": "rule",
    "where": "where",
    "tests": "tests",
    "test": "tests",
    "state": "state",
}
"""A column's heading, in lower case, and what it is for."""


class TableError(Exception):
    """A line of the table is not a row."""


@dataclass(frozen=True, slots=True)
class Row:
    place: str
    """`docs/name.md:line`"""
    sections: tuple[str, ...]
    """The headings above the row, the outermost first."""
    rule: str
    where: tuple[str, ...]
    tests: tuple[str, ...]
    state: str
    mark: str = ""
    """What the first column says, where it has no heading: MUST, or a number."""

    @property
    def section(self) -> str:
        return self.sections[-1] if self.sections else ""

    @property
    def reason(self) -> str:
        """Why no break is expected: what is not done here cannot be broken. Empty otherwise."""
        word, _, why = self.state.partition(":")
        return why.strip() if word in ("not implemented", "not applicable") else ""

    def __str__(self) -> str:
        return f"{self.place} [{self.section}] {self.rule}"


def read_rows(root: Path, table: str) -> list[Row]:
    """Every row of the tables of rules in `table`, a path below `root`.

    Raises `TableError` for a row with another number of cells than its heading.
    """
    rows: list[Row] = []
    headings: dict[int, str] = {}
    columns: list[str | None] | None = None
    for number, line in enumerate((root / table).read_text("utf-8").splitlines(), 1):
        if heading := re.match(r"(#+) +(.+)", line):
            level = len(heading[1])
            headings = {n: text for n, text in headings.items() if n < level}
            headings[level] = heading[2].strip()
        if not line.startswith("|"):
            columns = None
            continue
        cells = _cells(line)
        if columns is None:
            columns = [COLUMNS.get(cell.lower()) for cell in cells]
            continue
        if set("".join(cells)) <= set("-: ") or not {"rule", "tests", "state"} <= {*columns}:
            continue
        place = f"{table}:{number}"
        if len(cells) != len(columns):
            raise TableError(f"{place} has {len(cells)} cells, its heading {len(columns)}")
        named = {name: cell for name, cell in zip(columns, cells, strict=True) if name}
        rows.append(
            Row(
                place,
                tuple(text for _, text in sorted(headings.items())),
                named["rule"],
                tuple(_references(named.get("where", ""))),
                tuple(_references(named["tests"])),
                named["state"],
                named.get("mark", ""),
            )
        )
    return rows


def code_files(root: Path, row: Row) -> list[tuple[str, str]]:
    """The files that `row` names and the name in each, `""` for a whole module."""
    return [found for each in row.where if (found := located(root, each))]


def located(root: Path, reference: str) -> tuple[str, str] | None:
    """The file that a name of code is in, and its name there; None when there is no such module."""
    path, _, name = reference.partition("::")
    if "/" in path:
        return path, name
    parts = reference.split(".")
    for length in range(len(parts), 0, -1):
        module = "/".join(parts[:length])
        for path in (f"{module}.py", f"{module}/__init__.py"):
            if (root / path).is_file():
                return path, ".".join(parts[length:])
    return None


def _cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", inner)]


def _references(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)
