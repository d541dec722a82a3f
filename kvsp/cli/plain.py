"""Command lines that speak plainly: a flag's help as it is typed, what is wrong with the options
in one sentence, the versions of everything that matters.

Newer typer versions show the type of each option, `<bool>` for a flag, which reads as if
`--json true` could be written.
"""

from __future__ import annotations

import difflib
import os
import platform
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup

from kvsp.cli.common import ExitCode, note

_OPTION_ERROR: Final = cast(type[Exception], typer.BadParameter.__mro__[2])
"""ClickException, of whichever click this typer stands on: newer ones bring their own."""

_WORDS: Final = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"Value error, (.*)", r"\1"),
        (r".* is not in the range ([^<>=]+)<=x<=(.+)", r"it is from \1 to \2"),
        (
            r"(?:.* range x>=|Input .* greater than or equal to )(.+)",
            r"it is at least \1",
        ),
        (
            r"(?:.* range x<=|Input .* less than or equal to )(.+)",
            r"it is at most \1",
        ),
        (r".*\bvalid (?:integer|int)\b.*", "a whole number is needed"),
        (r".*\bvalid (?:number|float)\b.*", "a number is needed"),
        (r"Option '?([^' ]+)'? requires an argument", r"\1 needs a value"),
        (r"Option '?([^' ]+)'? does not take a value", r"\1 takes no value"),
        (r"Got unexpected extra argument\S* \((.*)\)", r"there is no use for \1"),
        (r"No such command '(.*?)'\W*(?:Did you mean .*?'(.*?)'.*)?", r"there is no command \1"),
    )
)
"""What the libraries below say of options, and how it is said here."""


def _plain(parameters: list[Any]) -> list[Any]:
    for each in parameters:
        if getattr(each, "is_flag", False) and each.metavar is None:
            each.metavar = ""
    return parameters


class PlainCommand(TyperCommand):
    """For `cls` of a command, and of a Typer with one command only."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """For `cls` of a Typer with several commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))


def versions(program: str, *more: str) -> str:
    """A program's name and version, those of what it stands on, and what `more` there is to say."""
    parts = [f"Python {platform.python_version()}", f"aioquic {_version('aioquic')}", *more]
    return f"{program} {_version('kvcs')} ({', '.join(parts)})"


def _version(distribution: str) -> str:
    from importlib import metadata  # it takes long, and few ask

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # run from a checkout
        return "(not installed)"


def version_option(*more: Callable[[], str]) -> Any:
    """`--version`, which shows the versions and what `more` there is to say, and exits."""

    def show(ctx: typer.Context, wanted: bool) -> None:
        if wanted:
            program = ctx.find_root().info_name or ""
            print(versions(program, *(each() for each in more)), flush=True)
            raise typer.Exit

    return typer.Option(
        "--version", is_eager=True, callback=show, help="Show the versions and exit."
    )


Version = Annotated[bool, version_option()]


def run_app(app: typer.Typer, program: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line to its exit; what is wrong with it is one sentence and exit code 2."""
    try:
        code = app(arguments, prog_name=program, standalone_mode=False)
        sys.stdout.flush()
    except _OPTION_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            cast(Any, error).show()
        else:
            ctx = getattr(error, "ctx", None)
            command = program if ctx is None else ctx.command_path
            note(program, f"{_printable(_sentence(error))} (see {command} --help)")
        sys.exit(ExitCode.USAGE)
    except (typer.Abort, KeyboardInterrupt):
        note(program, "interrupted")
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        # What is wrong with files is said where they are used: this is where the output goes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still to be written goes nowhere
        if not isinstance(error, BrokenPipeError):
            note(program, f"{error.filename or 'standard output'}: {error.strerror or error}")
        sys.exit(ExitCode.FAILED)
    sys.exit(code if isinstance(code, int) else ExitCode.DONE)


def _sentence(error: Any) -> str:
    """What is wrong with the command line."""
    kinds = {each.__name__ for each in type(error).__mro__}
    if "NoSuchOption" in kinds:
        name = str(error.option_name)
        options = [] if error.ctx is None else _options(error.ctx.command.params)
        return f"there is no option {name}{_nearest(name, options)}"
    if "MissingParameter" in kinds:
        return f"{_name(error)} is missing"
    if "BadParameter" in kinds and error.param is not None:
        return f"{_name(error)}: {_in_words(error.message)}"
    text = _in_words(str(error.format_message()))
    commands = getattr(getattr(error.ctx, "command", None), "commands", {})
    return text + (_nearest(text.rpartition(" ")[2], list(commands)) if commands else "")


def _name(error: Any) -> str:
    """The option or argument that an error is about, as it is typed."""
    param = error.param
    if param is None:
        return "an option or argument"
    if getattr(param, "param_type_name", "") == "option":
        return str(max(param.opts, key=len))
    return str(param.metavar or param.name)


def _options(parameters: Sequence[Any]) -> list[str]:
    return [
        name
        for each in parameters
        for name in (*each.opts, *each.secondary_opts)
        if name.startswith("--")
    ]


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def _in_words(text: str) -> str:
    """What a library says, as it is said here."""
    text = text.strip().rstrip(".")
    for pattern, words in _WORDS:
        match = pattern.fullmatch(text)
        if match is not None:
            return match.expand(words)
    return text


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
