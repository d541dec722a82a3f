"""Which interpreters the tests run on, and what is said of those that are not there."""

from __future__ import annotations

import sys

import pytest

from tools import pythons


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The environments tests were run in; nothing is run."""
    names: list[str] = []

    def run(name: str, *_: object, **__: object) -> bool:
        names.append(name)
        return name != "3.12"

    monkeypatch.setattr(pythons, "run", run)
    monkeypatch.setattr(pythons, "find", lambda version: None if version == "3.13" else "python")
    return names


@pytest.mark.parametrize(
    ("arguments", "run", "code"),
    [
        ([], ["3.11", "3.12", "3.14"], 1),
        (["3.11", "3.13"], ["3.11"], 0),
        (["--first", "3.13", "3.14", "3.11"], ["3.14"], 0),
        (["--lowest"], ["lowest"], 0),
        (["--first", "3.13"], [], 0),
    ],
)
def test_every_python_that_is_here_is_tried_and_the_others_are_named(
    arguments: list[str],
    run: list[str],
    code: int,
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["pythons", *arguments])
    assert pythons.main() == code
    assert ran == run
    said = capsys.readouterr().out
    assert ("no such Python here: 3.13" in said) == (arguments != ["--lowest"])


def test_the_python_that_runs_is_found_by_its_version() -> None:
    here = "{}.{}".format(*sys.version_info)
    assert pythons.find(here) is not None
    assert pythons.find("3.99") is None


def test_what_a_brief_run_leaves_out_is_there() -> None:
    assert all((pythons.ROOT / each).exists() for each in pythons.ALIKE)
