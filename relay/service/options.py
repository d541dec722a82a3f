"""What the text of an option means, and where the value of a setting comes from."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import typer

from relay.service.checks import Usage
from relay.service.settings import File, Setting, SettingsError, of_environment, read

S = TypeVar("S")
T = TypeVar("T")

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power, _letter: 1024**_power}


def parse_size(text: str) -> int:
    """Octets from `512MiB`, `1GB`, `65536`. Raises ValueError with a sentence."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write for example 512MiB, 1GiB or 65536")
    octets = float(match.group(1)) * unit  # infinite, if there are hundreds of digits
    if not 1 <= octets < 1 << 60:
        raise ValueError(f"{text!r} is not a positive size below 1024 PiB")
    return int(octets)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port from `127.0.0.1:4443`, `[::1]:4443`, `host:0`. Raises ValueError."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:]+)):(\d{1,5})", text)
    if match is None or int(match.group(3)) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT; write for example 127.0.0.1:4443")
    return match.group(1) or match.group(2), int(match.group(3))


class Sources:
    """Where the settings of a run come from: what is wrong with one is told with that."""

    def __init__(self, prefix: str, settings: Callable[[], Mapping[str, Setting]]) -> None:
        """`prefix` is that of the variables; `settings` are asked for when they are needed."""
        self._prefix, self._settings = prefix, settings
        self._context: typer.Context | None = None
        self._path: Path | None = None
        self._file = File({})

    def read(self, context: typer.Context, path: Path | None) -> None:
        """Raises Usage for a file that cannot be meant."""
        self._context, self._path = context, path
        if path is None:
            return
        try:
            self._file = read(path, self._settings())
        except SettingsError as error:
            raise Usage(f"--config: {error}") from None
        context.default_map = dict(self._file.values)

    def of(self, name: str) -> str:
        """Where a setting comes from."""
        assert self._context is not None
        source = self._context.get_parameter_source(name)
        variable = f"{self._prefix}_{name.upper()}"
        return {
            "COMMANDLINE": "command line",
            "ENVIRONMENT": variable if variable in os.environ else "the environment",
            "DEFAULT_MAP": str(self._path),
        }.get(source.name if source is not None else "", "default")

    def limits(self, given: Sequence[str]) -> list[tuple[str, str]]:
        """Every limit that is set, and where; later ones are above earlier ones."""
        prefix = self._prefix
        return [
            *((limit, str(self._path)) for limit in self._file.limits),
            *((limit, f"{prefix}_LIMIT") for limit in of_environment(prefix, os.environ)),
            *((limit, "command line") for limit in given),
        ]

    def told(self, message: str) -> str:
        """A sentence on an option, with where its value stands if it is not the command line."""
        for option in re.findall(r"--[a-z][a-z-]*", message):
            name = option[2:].replace("-", "_")
            if self._context is not None and name in self._settings():
                origin = self.of(name)
                if origin not in ("command line", "default"):
                    return f"{message} ({option} is set by {origin})"
        return message


def usage(parse: Callable[[S], T], text: S, option: str) -> T:
    """What `text` means to `parse`. Raises Usage, which names the option, for its ValueError."""
    try:
        return parse(text)
    except ValueError as error:
        raise Usage(f"{option}: {error}") from None
