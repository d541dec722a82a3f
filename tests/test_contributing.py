"""CONTRIBUTING.md names what is there, and draws the floors that the linter holds."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.paths import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PLAN = TEXT.partition("```\n")[2].partition("```")[0]


def named() -> list[str]:
    """What stands between backticks or is linked, without the drawing."""
    text = TEXT.replace(PLAN, "")
    links = re.findall(r"\]\(([^)#]+)", text)
    return sorted({*re.findall(r"`([^`\n]+)`", text.replace("```", "")), *links})


PATHS = [
    name
    for name in named()
    if " " not in name and "::" not in name and ("/" in name or name.endswith((".md", ".toml")))
]


@pytest.mark.parametrize("path", PATHS)
def test_every_path_it_names_exists(path: str):
    assert path.startswith(".venv/") or (ROOT / path).exists()


def test_every_target_of_make_it_names_exists():
    targets = {target for name in named() for target in re.findall(r"^make ([a-z0-9 -]+)", name)}
    makefile = (ROOT / "Makefile").read_text()
    for target in " ".join(targets).split():
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert len(targets) > 8


def test_every_module_and_trip_it_runs_exists():
    ran = re.findall(r"python -m ([a-z_.]+) --show ([a-z-]+)", TEXT)
    assert ran
    for module, trip in ran:
        path = ROOT / f"{module.replace('.', '/')}.py"
        assert f'"{trip}"' in path.read_text()


def plan() -> dict[str, list[set[str]]]:
    """The floors of each package, highest first."""
    packages: dict[str, list[set[str]]] = {}
    for text in re.split(r"\n(?=\S)", PLAN.strip()):
        package, _, floors = text.partition(" ")
        packages[package] = [set(re.split(r",\s*", floor.strip())) for floor in floors.split("→")]
    return packages


@pytest.mark.parametrize("package", ["moqt", "kvcs", "kvsp", "relay"])
def test_the_plan_has_the_folders_that_are_there(package: str):
    for name in set().union(*plan()[package]):
        folder = ROOT / package / name
        assert (folder / "__init__.py").exists() or folder.with_suffix(".py").exists(), name
    drawn = set().union(*plan()[package])
    there = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert there <= drawn


def contracts() -> dict[str, list[set[str]]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {
        container: [set(re.findall(r"\w+", layer)) for layer in contract["layers"]]
        for contract in settings["tool"]["importlinter"]["contracts"]
        for container in contract.get("containers", ())
    }


@pytest.mark.parametrize("package", sorted(contracts().keys() & plan().keys()))
def test_the_plan_draws_the_floors_that_the_linter_holds(package: str):
    assert plan()[package] == contracts()[package]
