"""Where settings come from: a TOML file, over it the environment, over that the flags.

Nothing is taken that is not known: a misspelt name is refused with the nearest right one.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from kvsp.service.schema import PREFIX, Setting, is_table, members, settings, tables
from kvsp.service.settings import Settings, SettingsError, check_settings

logger = logging.getLogger("kvsp.server")

T = TypeVar("T")
_UNITS: Final = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE: Final = re.compile(r"([0-9]{1,15})\s*([A-Za-z]*)")
_TRUTH: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_FLAGS: Final = "the flags"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and where each that is not a default came from, in words."""

    settings: Settings
    origins: Mapping[str, str]


def read_settings(
    path: Path | None, flags: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Loaded:
    """Settings from a file, an environment and flags, the later ones before the earlier.

    `flags` are members of the file, nested alike; None is a flag that was not given. Paths in
    the file are relative to its folder, others to the working directory. Raises SettingsError.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, found in (
        (str(path), {} if path is None else _of_file(path)),
        ("", _of_environment({} if environment is None else environment)),
        (_FLAGS, _leaves(_given(flags), "", _FLAGS)),
    ):
        for name, value in found.items():
            setting = settings()[name]
            where = origin or setting.variable
            values[name] = _converted(setting, value, where)
            origins[name] = where
    made = _made(Settings, "", values)
    check_settings(made)
    return Loaded(made, origins)


def _made(table: type[T], prefix: str, values: Mapping[str, Any]) -> T:
    given: dict[str, Any] = {}
    for member, kind in members(table):
        name = prefix + member.name
        if is_table(kind):
            given[member.name] = _made(kind, f"{name}.", values)
        elif name in values:
            given[member.name] = values[name]
    return table(**given)


# --- the three sources ---------------------------------------------------------------


def _of_file(path: Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}") from None
    except RecursionError:
        raise SettingsError(f"{path}: no TOML file of settings: it nests too deeply") from None
    except ValueError as error:  # of TOML, of UTF-8, of numbers with thousands of digits
        raise SettingsError(f"{path}: no TOML file: {error}") from None
    found = _leaves(tree, "", str(path))
    for name, value in found.items():
        if settings()[name].is_path:
            found[name] = _below(path.parent, value)
    return found


def _below(folder: Path, value: Any) -> Any:
    """Paths of a file, as they are from its folder; what is no path is refused later."""
    if isinstance(value, list):
        return [_below(folder, each) for each in value]
    return str(folder / value) if isinstance(value, str) else value


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that were given."""
    return {
        name: _given(value) if isinstance(value, Mapping) else value
        for name, value in flags.items()
        if value is not None
    }


def _leaves(tree: Mapping[str, Any], table: str, where: str) -> dict[str, Any]:
    """The values of a tree by the names of their settings. Raises SettingsError."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{table}.{key}".lstrip(".")
        if name in settings():
            found[name] = value
        elif name not in tables():
            raise SettingsError(f"{where}: {name} is no setting{_nearest(name)}")
        elif not isinstance(value, Mapping):
            raise SettingsError(f"{where}: {name} is a table: write [{name}]")
        else:
            found |= _leaves(value, name, where)
    return found


def _nearest(name: str) -> str:
    """What was meant, if that can be told: the same word elsewhere, or one that is alike."""
    known = [*settings(), *tables()]
    last = name.rpartition(".")[2]
    same = [each for each in known if each.rpartition(".")[2] == last]
    near = same or difflib.get_close_matches(name, known, 1, 0.6)
    if not near:
        near = [
            each
            for each in known
            if difflib.get_close_matches(last, [each.rpartition(".")[2]], 1, 0.75)
        ]
    return f"; did you mean {near[0]}?" if near else " (docs/configuration.md lists them)"


def _of_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """What variables say; one that is empty says nothing."""
    by_variable = {each.variable: each for each in settings().values()}
    found: dict[str, Any] = {}
    for variable, text in environment.items():
        setting = by_variable.get(variable)
        if setting is not None:
            if text:
                found[setting.name] = _parsed(setting, text)
        elif variable.startswith(PREFIX):
            # no error: orchestrators make variables of the names of their services
            near = difflib.get_close_matches(variable, by_variable, 1, 0.75)
            hint = f"; did you mean {near[0]}?" if near else ""
            logger.warning("%s in the environment is no setting%s", variable, hint)
    return found


def _parsed(setting: Setting, text: str) -> Any:
    """The value that a text stands for; one that stands for none is refused later."""
    if setting.is_list:
        if setting.item in (str, Path):
            return [each.strip() for each in text.split(",")]
        try:
            return tomllib.loads(f"list = {text}")["list"]
        except tomllib.TOMLDecodeError:
            raise SettingsError(
                f"{setting.variable}: {setting.name} is a list as in TOML"
            ) from None
    if setting.plain is bool:
        return _TRUTH.get(text.strip().lower(), text)
    if setting.plain in (int, float):
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(text)
    return text


# --- values --------------------------------------------------------------------------


def _converted(setting: Setting, value: Any, where: str) -> Any:
    """The value of a setting. Raises SettingsError that names it and its source."""
    if setting.is_octets and isinstance(value, str):
        value = _octets(value)
    if setting.name == "peers.placement" and isinstance(value, str):
        value = [value]  # it was one before there could be several
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{where}: {setting.name}: a finite number is needed")
    try:
        return msgspec.convert(value, setting.kind, dec_hook=_path)
    except msgspec.ValidationError as error:
        said = str(error).replace("`", "")
        unit = ', or a text such as "64MiB"' if setting.is_octets else ""
        raise SettingsError(
            f"{where}: {setting.name}: {said[:1].lower()}{said[1:]}{unit}"
        ) from None


def _octets(text: str) -> int | str:
    """A size with its unit, in octets; a text that is none as it is."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        return text
    return int(match[1]) * _UNITS[match[2].upper()]


def _path(kind: type, value: Any) -> Any:
    """A path is text in the file."""
    if kind is Path and isinstance(value, str | os.PathLike) and "\0" not in str(value):
        return Path(value)
    raise ValueError(f"expected {'a path, in quotes' if kind is Path else kind.__name__}")


# --- and back ------------------------------------------------------------------------


def as_toml(loaded: Loaded) -> str:
    """A file of all settings as they are, each that is not a default with where it came from.
    Read again it gives the same settings."""
    lines: list[str] = []
    for name in tables():
        if lines:
            lines.append("")
        if name:
            lines.append(f"[{name}]")
        lines += [_shown(each, loaded) for each in settings().values() if each.table_name == name]
    return "\n".join(lines) + "\n"


def _shown(setting: Setting, loaded: Loaded) -> str:
    value = setting.of(loaded.settings)
    if value is None:
        return f"# {setting.member} is not set"
    origin = loaded.origins.get(setting.name)
    return f"{setting.member} = {_toml(value)}" + (f"  # {origin}" if origin else "")


def _toml(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, Path):
        return _toml(os.path.abspath(value))
    if isinstance(value, msgspec.Struct):
        pairs = msgspec.structs.asdict(value).items()
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in pairs) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        # JSON's strings are TOML's but for this one character
        return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
