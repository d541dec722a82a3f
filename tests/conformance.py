"""What the conformance tables are held to, whichever draft they are of (docs/*-conformance.md).

A row names code, as `file.py::Class.name` or by its dotted name, and tests, as
`file.py::test_name`. Its state begins with one of `STATES`, followed by `: reason` for every one
but the first. `tools.mutants.rows` reads the tables.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from tests.paths import ROOT
from tools.mutants.rows import Row, located, read_rows

STATES = ("implemented", "partly", "not implemented", "not applicable")
SHOWN = ("implemented", "partly")
"""Those that have code and a test to show for it."""


def rows(table: str) -> list[Row]:
    """Every row of `docs/<table>.md`."""
    return read_rows(ROOT, f"docs/{table}.md")


def faults(table: str) -> str:
    """What is wrong with a table, a line for each; empty when nothing is."""
    return "\n".join(f"{row}: {why}" for row in rows(table) for why in wrong_with(row))


def wrong_with(row: Row) -> Iterator[str]:
    """What is wrong with a row."""
    word, colon, reason = row.state.partition(":")
    if not row.rule:
        yield "no rule"
    if word not in STATES:
        yield f"{row.state!r} is none of {STATES}"
    elif (word == "implemented") == bool(colon and reason.strip()):
        yield f"{word!r} stands {'alone' if word != 'implemented' else 'with a reason'}"
    if word in SHOWN and not (row.where and row.tests):
        yield "it names no code, or no test"
    for reference in row.where:
        place = located(ROOT, reference)
        if why := f"no module {reference}" if place is None else absent(*place):
            yield why
    for reference in row.tests:
        path, _, name = reference.partition("::")
        if why := absent(path, name):
            yield why
        elif not name.rpartition(".")[2].lower().startswith("test"):
            yield f"{reference} is no test"


def absent(path: str, name: str) -> str | None:
    """Why there is no `name` in the file `path`; None when there is, or none is asked for."""
    if not (ROOT / path).is_file():
        return f"no file {path}"
    return f"no {name} in {path}" if name and name not in names(path) else None


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
