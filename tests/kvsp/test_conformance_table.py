"""Every module and test that `docs/kvsp-conformance.md` names is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.paths import ROOT

DOCUMENT = ROOT / "docs" / "kvsp-conformance.md"
STATES = {"implemented", "partly", "not implemented", "not applicable"}
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in DOCUMENT.read_text("utf-8").splitlines()
    if line.startswith("|") and not line.startswith(("| | ", "|---"))
]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@cache
def definitions(path: Path) -> frozenset[str]:
    """Dotted names of the classes and functions of a file."""
    found: set[str] = set()

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    walk(node.body, f"{prefix}{node.name}.")

    walk(ast.parse(path.read_text("utf-8")).body, "")
    return frozenset(found)


def exists(name: str) -> bool:
    """Whether a dotted name is a module of the project, or something in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        folder = ROOT.joinpath(*parts[:length])
        for path in (folder.with_suffix(".py"), folder / "__init__.py"):
            if path.is_file():
                rest = ".".join(parts[length:])
                return not rest or rest in definitions(path)
    return False


def test_the_table_has_rows_of_five_cells() -> None:
    assert len(ROWS) > 100
    assert all(len(row) == 5 and row[1] for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1][:60])
def test_a_row_has_a_state_and_names_what_is_there(row: list[str]) -> None:
    _, _, where, tests, state = row
    word, _, why = state.partition(": ")
    assert word in STATES
    # what is not whole says what is missing; what is done names code and a test
    assert why or word == "implemented"
    assert word in ("not implemented", "not applicable") or (names(where) and names(tests))
    for name in names(where):
        assert exists(name), name
    for name in names(tests):
        path, _, test = name.partition("::")
        assert (ROOT / path).is_file(), name
        assert test.startswith("test_") and test in definitions(ROOT / path), name
