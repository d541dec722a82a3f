"""What is run in an environment of its own is run in the versions that were tested."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.paths import ROOT
from tools.environments import own
from tools.environments.own import Environment

FOLDER = Path(own.__file__).parent
NAMES = sorted(each.stem for each in FOLDER.glob("*.py") if each.stem not in ("__init__", "own"))


def versions(name: str) -> dict[str, str]:
    lines = (FOLDER / f"{name}.txt").read_text("utf-8").splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", each) for each in lines)
    pairs = (line.split("==") for line in lines)
    return {canonicalize_name(package): version for package, version in pairs}


class Told(Environment):
    """One that installs nothing and says what it was asked for."""

    def __init__(self, name: str, folder: Path, *, newest: bool = False) -> None:
        super().__init__(name, folder, newest=newest)
        self.asked: list[tuple[str, ...]] = []

    def run(self, *arguments: str) -> str:
        self.asked.append(arguments)
        return "a==1+cpu\nb==2\n" if "freeze" in arguments else ""


@pytest.mark.parametrize("name", NAMES)
def test_everything_that_is_asked_for_has_a_tested_version_that_it_allows(name, tmp_path) -> None:
    environment, listed = Told(name, tmp_path), versions(name)
    import_module(f"tools.environments.{name}").install(environment)
    pip = [each for each in environment.asked if each[:2] == ("-m", "pip")]
    assert pip
    for arguments in pip:
        assert arguments[arguments.index("--constraint") + 1] == str(environment.versions)
        for wanted in arguments[arguments.index("--constraint") + 2 :]:
            if wanted.startswith("-") or str(ROOT) in wanted:
                continue
            asked = Requirement(wanted)
            assert asked.specifier.contains(listed[canonicalize_name(asked.name)]), wanted


@pytest.mark.parametrize("name", NAMES)
def test_every_environment_is_made_by_a_target_and_removed_by_clean(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    folders = re.findall(r"^(\w+_ENV) \?= (\.venv-[\w-]+)$", makefile, re.M)
    ((variable, folder),) = (each for each in folders if each[1] == f".venv-{name}")
    assert f" $({variable})\n" in makefile, "a program is given it"
    assert f"$({variable})" in makefile.partition("\nclean:")[2]
    assert f"{folder}/" in (ROOT / ".gitignore").read_text("utf-8").splitlines()


def test_one_is_made_once_and_again_when_what_is_wanted_has_changed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(own.venv, "create", lambda folder, **_: Path(folder).mkdir(exist_ok=True))
    made = []

    def install(environment: Environment) -> None:
        made.append(environment)

    for _ in range(2):
        environment = Told("none", tmp_path / "there")
        environment.versions = tmp_path / "versions.txt"
        environment.versions.write_text("a==1\n")
        environment.make(install)
    assert len(made) == 1
    environment.versions.write_text("a==2\n")
    environment.make(install)
    assert len(made) == 2


def test_the_newest_versions_are_written_down_without_what_says_where_they_are_from(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(own.venv, "create", lambda folder, **_: Path(folder).mkdir(exist_ok=True))
    environment = Told("none", tmp_path / "there", newest=True)
    environment.versions = tmp_path / "versions.txt"
    environment.make(lambda each: each.install("a"))
    assert environment.versions.read_text() == "a==1\nb==2\n"
    assert ("-m", "pip", "install", "--quiet", "a") in environment.asked


def test_what_is_run_in_one_sees_nothing_of_the_checkout(tmp_path) -> None:
    environment = Environment("none", tmp_path)
    environment.python = Path(sys.executable)
    assert environment.run("-c", "import sys; print(sys.flags.isolated)") == "1\n"
