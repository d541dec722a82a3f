"""Commands whose help shows a flag as it is typed.

Newer typer versions show the type of each option, `<bool>` for a flag, which reads as if
`--json true` could be written.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


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
