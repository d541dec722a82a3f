"""The tests' own floor plan: they mirror the packages, no test is another's helper, and what
looks inside the packages does so in a few places."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGES = ("moqt", "kvcs", "kvsp", "relay", "interop", "tools", "examples")
NOT_MIRRORED = {
    "tests/moqt/scenarios": "whole sessions on simulated paths",
}
"""Folders of tests that stand for no folder of a package."""
WITHOUT_TESTS = {
    "interop/cases": "run against other implementations, by `make interop`",
    "moqt/wire/draft22": "tested through the codec, by its vectors",
}
"""Folders of packages whose tests stand elsewhere."""

INSIDE = {
    "tests/kvcs/inside.py",
    "tests/kvsp/inside.py",
    "tests/moqt/inside.py",
    "tests/moqt/probe.py",
    "tests/relay/inside.py",
}
"""The helpers that may touch private members of what they test, each under a name that says
what it is. A test that wants another asks first whether an interface should show it."""
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def is_test_module(path: Path) -> bool:
    return path.name.startswith("test_")


def collected(path: Path) -> list[str]:
    """What pytest would collect, as text: functions, and classes whether defined or assigned."""
    return re.findall(r"^(?:async def |def |class |)((?:test_|Test)\w*)", path.read_text(), re.M)


def folders(*roots: str) -> set[str]:
    """Every folder under `roots` that holds code."""
    return {
        path.parent.relative_to(ROOT).as_posix()
        for path in modules(*roots)
        if path.stat().st_size and path.name != "__init__.py"
    }


@pytest.mark.parametrize("folder", ["tests", *PACKAGES])
def test_no_test_module_is_imported(folder: str) -> None:
    """Neither by an import statement nor by a program that a test writes and runs."""
    named = re.compile(r"\btests(\.\w+)*(\.| import [\w, ]*\b)test_\w+")
    for path in modules(folder):
        assert not (found := named.search(path.read_text("utf-8"))), f"{path}: {found.group()}"
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}:{node.lineno}: a relative import"
                names = [f"{node.module}.{each.name}" for each in node.names]
                assert not [n for n in names if re.match(r"tests\..*\btest_", n)], path


@pytest.mark.parametrize("package", sorted({*PACKAGES} - {"tools"}))
def test_no_package_imports_from_the_tests(package: str) -> None:
    """The tools do: benchmarks and the fuzzer stand on the tests' helpers."""
    for path in modules(package):
        assert not re.search(r"^\s*(from|import) tests\b", path.read_text("utf-8"), re.M), path


def test_every_folder_of_tests_mirrors_a_folder_of_a_package() -> None:
    ours = {each for each in folders("tests") if each.split("/")[1:2] != ["e2e"]} - {"tests"}
    missing = {each for each in ours if not (ROOT / each.removeprefix("tests/")).is_dir()}
    assert missing == set(NOT_MIRRORED)


def test_every_folder_of_a_package_has_its_tests_or_a_reason() -> None:
    without = {each for each in folders(*PACKAGES) if f"tests/{each}" not in folders("tests")}
    assert without == set(WITHOUT_TESTS)


def test_helpers_hold_no_tests_and_test_modules_hold_some() -> None:
    for path in modules("tests"):
        if is_test_module(path):
            assert collected(path), f"{path} holds no test: a helper with the name of a test"
        else:
            assert not collected(path), f"{path} holds tests that nothing collects"


MAX_LINES = 600
MAX_FILES = 13


def test_no_file_of_the_packages_is_long_and_no_folder_crowded() -> None:
    paths = modules("moqt", "kvcs", "kvsp", "relay")
    lines = {path: path.read_text("utf-8").count("\n") for path in paths}
    assert not {path: count for path, count in lines.items() if count > MAX_LINES}
    files = Counter(path.parent for path in paths)
    assert not {folder: count for folder, count in files.items() if count > MAX_FILES}


@pytest.mark.parametrize("package", ["moqt", "kvcs", "kvsp", "relay"])
def test_every_folder_says_what_is_in_it_and_what_it_may_import(package: str) -> None:
    for path in (ROOT / package).rglob("__init__.py"):
        assert len((ast.get_docstring(tree(path)) or "").split()) >= 15, path


def is_private(name: str) -> bool:
    return re.match("_[A-Za-z]", name) is not None and name not in OF_NAMED_TUPLES


def own_names(path: Path) -> set[str]:
    """The private members that the classes of this file have."""
    own = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    own.add(each.name)
                elif isinstance(each, (ast.Assign, ast.AnnAssign)):
                    targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                    own |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return own


def looks_inside(path: Path) -> list[str]:
    """Where a file touches a private member of something that is not its own."""
    own, found = own_names(path), []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):
            names = [
                each.value.rpartition(".")[2]
                for each in node.args
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            ]
        else:
            continue
        found += [f"{path}:{node.lineno}: {n}" for n in names if is_private(n) and n not in own]
    return found


def test_private_members_are_touched_in_a_few_helpers_only() -> None:
    looking = {path: looks_inside(path) for path in modules("tests")}
    allowed = {ROOT / each for each in INSIDE}
    assert not [line for path, lines in looking.items() if path not in allowed for line in lines]
    assert not [path for path in allowed if not looking[path]], "looks inside no more: not listed"
