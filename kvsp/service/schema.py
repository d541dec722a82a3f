"""Which settings there are, by the names that files, the environment and messages use."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from kvsp.service.settings import Settings

PREFIX: Final = "KVSP_"
_NOT_SETTINGS: Final = frozenset({"http_loopback"})
"""Members of tables that follow from others: `dev` says it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: `name` is `table.member`, `kind` the type of its value with its bounds."""

    name: str
    kind: Any
    default: Any
    table: type
    """The class whose member it is."""

    @property
    def table_name(self) -> str:
        """The table it stands in; empty for the one without a name."""
        return self.name.rpartition(".")[0]

    @property
    def member(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def variable(self) -> str:
        """The variable of the environment that sets it."""
        return PREFIX + self.name.replace(".", "_").upper()

    def of(self, settings: Settings) -> Any:
        """Its value."""
        return attrgetter(self.name)(settings)

    @property
    def plain(self) -> Any:
        """The type of a value that is not None, without bounds."""
        return _plain(self.kind)

    @property
    def is_list(self) -> bool:
        return get_origin(self.plain) is tuple

    @property
    def item(self) -> Any:
        """The type of a value, or of each in a list."""
        return _plain(get_args(self.plain)[0]) if self.is_list else self.plain

    @property
    def is_path(self) -> bool:
        """Whether it names files or folders."""
        return self.item is Path

    @property
    def is_octets(self) -> bool:
        """Whether it is a number of octets, which may be written with a unit."""
        return self.plain is int and "octets" in self.member.split("_")


def _plain(kind: Any) -> Any:
    while True:
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        elif get_origin(kind) in (Union, types.UnionType):
            (kind,) = (each for each in get_args(kind) if each is not type(None))
        else:
            return kind


@cache
def settings() -> Mapping[str, Setting]:
    """Every setting by its name, in the order of the tables."""
    return {each.name: each for each in _walk(Settings, "")}


@cache
def tables() -> Mapping[str, type]:
    """The class of each table by its name; the whole file is the one without a name."""
    return dict(_tables(Settings, ""))


def members(table: type) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """The members of a table that are settings or tables, with their types."""
    hints = get_type_hints(table, include_extras=True)
    for member in dataclasses.fields(table):
        if member.name not in _NOT_SETTINGS:
            yield member, hints[member.name]


def is_table(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _walk(table: type, prefix: str) -> Iterator[Setting]:
    inner = []
    for member, kind in members(table):
        if is_table(kind):
            inner.append((member.name, kind))
        else:
            yield Setting(prefix + member.name, kind, member.default, table)
    for name, kind in inner:
        yield from _walk(kind, f"{prefix}{name}.")


def _tables(table: type, name: str) -> Iterator[tuple[str, type]]:
    yield name, table
    for member, kind in members(table):
        if is_table(kind):
            yield from _tables(kind, f"{name}.{member.name}".lstrip("."))
