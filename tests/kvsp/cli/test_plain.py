"""Command lines that speak plainly."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import version
from typing import Annotated

import pytest
import typer

from kvsp.cli.plain import PlainCommand, PlainGroup, Version, run_app
from moqt.quic.backend import Backend, chosen
from tests.paths import ROOT

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
PROGRAMS = {name: "{} import {} as main".format(*at.split(":")) for name, at in SCRIPTS.items()}
"""As pyproject.toml has them."""
OVER_QUIC = ("kvcs-relay", "kvcs-publish", "kvcs-subscribe", "kvcs-doctor", "kvcs-explain")

one = typer.Typer()


@one.command(cls=PlainCommand)
def _one(
    url: Annotated[str, typer.Argument(metavar="URL")],
    count: Annotated[int, typer.Option(min=2, max=9)] = 3,
    ratio: Annotated[float, typer.Option(min=0.5)] = 1,
    most: Annotated[int, typer.Option(max=9)] = 3,
    flag: Annotated[bool, typer.Option("--flag")] = False,
    needed: Annotated[str, typer.Option()] = ...,  # type: ignore[assignment]
    version: Version = False,
) -> None:
    raise typer.Exit(7)


many = typer.Typer(cls=PlainGroup)
many.command("get", cls=PlainCommand)(_one)
many.command("put", cls=PlainCommand)(_one)


def run(app: typer.Typer, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        run_app(app, "it", arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "URL is missing"),
        (["u"], "--needed is missing"),
        (["u", "--neded", "x"], "there is no option --neded; did you mean --needed?"),
        (["u", "--zzz"], "there is no option --zzz"),
        (["u", "--count"], "--count needs a value"),
        (["u", "--flag=1"], "--flag takes no value"),
        (["u", "--needed", "x", "v"], "there is no use for v"),
        (["u", "--needed", "x", "--count", "many"], "--count: a whole number is needed"),
        (["u", "--needed", "x", "--ratio", "many"], "--ratio: a number is needed"),
        (["u", "--needed", "x", "--ratio", "0.1"], "--ratio: it is at least 0.5"),
        (["u", "--needed", "x", "--most", "10"], "--most: it is at most 9"),
        (["u", "--needed", "x", "--\x1b[31m"], r"there is no option --\x1b[31m"),
    ],
)
def test_what_is_wrong_with_the_options_is_one_plain_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(one, *arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"it: {sentence} (see it --help)\n"


def test_a_command_that_is_none_is_told_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(many, "gett") == 2
    assert capsys.readouterr().err == (
        "it: there is no command gett; did you mean get? (see it --help)\n"
    )
    assert run(many, "get", "u", "--neded") == 2
    assert "(see it get --help)" in capsys.readouterr().err


def test_the_exit_code_of_a_command_is_the_programs() -> None:
    assert run(one, "u", "--needed", "x") == 7


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_says_its_version_and_what_it_stands_on(program: str) -> None:
    code = f"import sys; from {PROGRAMS[program]}; sys.argv = [{program!r}, '--version']; main()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    python = ".".join(map(str, sys.version_info[:3]))
    backend = f", QUIC backend {chosen(Backend.AUTO)}" if program in OVER_QUIC else ""
    assert ran.stdout == (
        f"{program} {version('kvcs')} (Python {python}, aioquic {version('aioquic')}{backend})\n"
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_program_answers_a_wrong_option_with_a_box(program: str) -> None:
    code = f"import sys; from {PROGRAMS[program]}; sys.argv = [{program!r}, '--zzz']; main()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert ran.stderr.startswith(f"{program}: ")
    assert "--zzz" in ran.stderr


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("kvcs-inspect", ["--help"]),
        ("kvsp-server", ["--help"]),
        ("kvcs-keygen", ["--help"]),
        ("kvcs-relay", ["--help"]),
        ("kvcs-publish", ["--help"]),
        ("kvcs-subscribe", ["--version"]),
        ("kvcs-describe", ["--help"]),
        ("kvcs-doctor", ["--version"]),
        ("kvsp", ["--help"]),
    ],
)
def test_output_that_cannot_be_written_is_a_sentence_and_exit_code_1(program, options) -> None:
    code = f"import sys; sys.argv[0] = {program!r}; from {PROGRAMS[program]}; main()"
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-c", code, *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert run.stderr == f"{program}: standard output: No space left on device\n"
    assert run.returncode == 1
