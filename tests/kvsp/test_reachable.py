"""Built means reachable: every class of kvsp is used by a program, not by tests alone."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.paths import ROOT

PACKAGES = ("kvsp", "kvcs", "moqt", "relay")
EXCEPTIONS = {
    "kvsp.names.codes.PositionalEncoding": "the registry: another name is valid, and hashed alike",
    "kvsp.records.release.FrontEnd": "what a front end keeps; no program here is one",
}
"""Classes that no program uses, and why they are there all the same."""

Name = tuple[str, str]
"""A module and a name at its top."""


def modules() -> dict[str, ast.Module]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = tree(path)
    return found


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def runs(node: ast.AST) -> Iterator[ast.AST]:
    """What is in a tree and happens: of annotations those of members, which records and settings
    are read by."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        if isinstance(node, ast.ClassDef) and name == "body":
            for each in node.body:
                if isinstance(each, ast.AnnAssign):
                    yield from ast.walk(each.annotation)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING":
                continue
            if isinstance(each, ast.AST):
                yield from runs(each)


class Uses:
    """Which names of the packages each piece at the top of a module uses."""

    def __init__(self) -> None:
        self.trees = modules()
        self.edges: dict[Name, set[Name]] = defaultdict(set)
        self.exports: dict[Name, Name] = {}
        for module, body in self.trees.items():
            self._imports(module, body)
        for module, body in self.trees.items():
            for node in body.body:
                self._piece(module, node)

    def _imports(self, module: str, body: ast.Module) -> None:
        for node in ast.walk(body):
            if isinstance(node, ast.ImportFrom) and node.module:
                for each in node.names:
                    whole = f"{node.module}.{each.name}"
                    target = (whole, "") if whole in self.trees else (node.module, each.name)
                    self.exports[module, each.asname or each.name] = target

    def _piece(self, module: str, node: ast.stmt) -> None:
        named = isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        piece = (module, node.name if named else "")
        if named:
            self.edges[piece].add((module, ""))
            if node.decorator_list and not isinstance(node, ast.ClassDef):
                self.edges[module, ""].add(piece)  # a decorator may register it
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    self.edges[module, target.id].add((module, ""))
        for each in runs(node):
            if isinstance(each, ast.Name):
                self.edges[piece].add((module, each.id))
            elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
                of = self.exports.get((module, each.value.id))
                if of is not None and of[1] == "":
                    self.edges[piece].add((of[0], each.attr))

    def reached(self, *begin: Name) -> set[Name]:
        seen: set[Name] = set()
        to_do = list(begin)
        while to_do:
            name = to_do.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in self.exports:
                to_do.append(self.exports[name])
            to_do += self.edges.get(name, ())
        return seen


def programs() -> list[Name]:
    """What the scripts and entry points of the package begin with, and what `start` imports."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = list(project["scripts"].values())
    for group in project["entry-points"].values():
        named += group.values()
    found = [tuple(each.split(":")) for each in named]
    for module in {module for module, _ in found}:
        for node in ast.walk(tree(ROOT / (module.replace(".", "/") + ".py"))):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and (ROOT / (text.replace(".", "/") + ".py")).exists():
                found.append((text, "main"))
    return [(module, name) for module, name in found]


def is_protocol(node: ast.ClassDef) -> bool:
    return any("Protocol" in ast.unparse(base) for base in node.bases)


def test_every_public_class_of_kvsp_is_reached_by_a_program() -> None:
    uses = Uses()
    reached = uses.reached(*programs())
    assert ("kvsp.service.server", "Assembly") in reached
    assert ("kvsp.client.client", "Client") in reached
    missing = {
        f"{module}.{node.name}"
        for module, body in uses.trees.items()
        if module.split(".")[0] == "kvsp"
        for node in body.body
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and not is_protocol(node)
        and (module, node.name) not in reached
    }
    assert missing == set(EXCEPTIONS)


def test_what_only_annotations_name_is_not_reached() -> None:
    piece = ast.parse("def f(a: Seen) -> Told:\n    b: Kept = made()\n    return Used(b)\n")
    names = {node.id for node in runs(piece) if isinstance(node, ast.Name)}
    assert names == {"b", "made", "Used"}
