"""The conformance table says nothing of code or tests that are not there.

A row of docs/moqt-conformance.md is

    | Rule | `module.py::Class.method`, ... | `tests/file.py::test_name`, ... | state |

with `-` for none, a `\\|` inside a cell, and a state that begins with one of `STATES`, followed by
`: reason` for every one but the first.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.paths import ROOT

STATES = ("implemented", "partly", "not implemented", "not applicable")


class Row(NamedTuple):
    place: str
    rule: str
    where: str
    tests: str
    state: str


def tables() -> list[Path]:
    return [ROOT / "docs" / "moqt-conformance.md"]


def cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", inner)]


def is_heading(columns: list[str]) -> bool:
    return columns[0] == "Rule" or set("".join(columns)) <= set("-: ")


def rows(path: Path) -> list[Row]:
    """Every row of a table of rules; a line with another number of cells is a mistake."""
    found = []
    in_rules = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.startswith("|"):
            in_rules = False
            continue
        columns = cells(line)
        if columns[0] == "Rule":
            in_rules = True
        if not in_rules or is_heading(columns):
            continue
        assert len(columns) == 4, f"{path.name}:{number} has {len(columns)} cells: {line}"
        found.append(Row(f"{path.name}:{number}", *columns))
    return found


ROWS = [row for path in tables() for row in rows(path)]


@cache
def names(path: str) -> frozenset[str]:
    """What a module defines: its own names, and `Class.name` for what its classes define."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(prefix + name)
                    collect_attributes(node, prefix)
                case ast.ClassDef(name=name):
                    found.add(prefix + name)
                    collect(node.body, f"{prefix}{name}.")
                case ast.Assign(targets=targets):
                    found.update(prefix + t.id for t in targets if isinstance(t, ast.Name))
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(prefix + name)

    def collect_attributes(function: ast.FunctionDef | ast.AsyncFunctionDef, prefix: str) -> None:
        if prefix:
            found.update(
                prefix + node.attr
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            )

    collect(ast.parse((ROOT / path).read_text()).body, "")
    return frozenset(found)


def references(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def fault(reference: str) -> str | None:
    """Why `file` or `file::name` names nothing."""
    path, _, name = reference.partition("::")
    if not (ROOT / path).is_file():
        return f"no file {path}"
    if name and name not in names(path):
        return f"no {name} in {path}"
    return None


@pytest.mark.parametrize("path", tables(), ids=lambda path: path.name)
def test_a_table_has_rows(path: Path) -> None:
    assert rows(path)


def test_every_row_has_a_rule_and_a_state_with_its_reason() -> None:
    wrong = []
    for row in ROWS:
        state, colon, reason = row.state.partition(":")
        if not row.rule or state not in STATES:
            wrong.append(f"{row.place}: {row.state!r} is none of {STATES}")
        elif (state == "implemented") == bool(colon and reason.strip()):
            wrong.append(f"{row.place}: {state!r} stands {'alone' if colon else 'with a reason'}")
    assert not wrong, "\n".join(wrong)


def test_every_module_and_name_in_the_table_exists() -> None:
    wrong = [
        f"{row.place}: {why}"
        for row in ROWS
        for reference in references(row.where)
        if (why := fault(reference))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_test_in_the_table_exists() -> None:
    wrong = []
    for row in ROWS:
        for reference in references(row.tests):
            name = reference.partition("::")[2]
            why = fault(reference)
            if why is None and not name.rpartition(".")[2].lower().startswith("test"):
                why = f"{reference} is no test"
            if why:
                wrong.append(f"{row.place}: {why}")
    assert not wrong, "\n".join(wrong)


def test_what_is_implemented_says_where_and_has_a_test() -> None:
    wrong = [
        f"{row.place}: {row.rule}"
        for row in ROWS
        if row.state == "implemented" and not (references(row.where) and references(row.tests))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_reference_to_what_is_not_there_is_noticed() -> None:
    here = "tests/moqt/test_conformance_table.py"
    assert fault(here) is fault(f"{here}::Row.rule") is fault(f"{here}::STATES") is None
    assert fault(f"{here}::Row.other") and fault("moqt/none.py")
    assert cells(r"| a \| b | c |") == [r"a \| b", "c"]
