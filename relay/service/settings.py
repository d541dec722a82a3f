"""Settings of a program: a file, over it the environment, over that the command line.

What can be set is what the function behind the command line takes, so that there is one list.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from relay.service.limits import LIMITS, near

LIMITS_TABLE = "limits"

_TOML = {bool: "true or false", int: "a whole number", float: "a number"}
_JSON = {bool: "boolean", int: "integer", float: "number"}


class SettingsError(ValueError):
    """A file of settings that cannot be meant; the message names the file and the key."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: `kind` is bool, int, float, Path or str; an Enum's values are strings, and
    `many` of them may be given."""

    name: str
    kind: type
    choices: tuple[str, ...]
    default: Any
    required: bool
    help: str
    many: bool = False


def settings_of(command: Callable[..., object], without: Iterable[str]) -> dict[str, Setting]:
    """What `command`, a function for Typer, takes by name, but for the names `without`."""
    hints = get_type_hints(command, include_extras=True)
    found: dict[str, Setting] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if name in without:
            continue
        kind, option = get_args(hints[name])
        if get_origin(kind) in (UnionType, Union):
            kind = next(each for each in get_args(kind) if each is not NoneType)
        many = get_origin(kind) is list
        if many:
            (kind,) = get_args(kind)
        required = parameter.default is inspect.Parameter.empty
        choices = tuple(each.value for each in kind) if issubclass(kind, Enum) else ()
        default = None if required else parameter.default
        found[name] = Setting(
            name,
            str if choices else kind,
            choices,
            default.value if isinstance(default, Enum) else default,
            required,
            option.help or "",
            many,
        )
    return found


@dataclass(frozen=True, slots=True)
class File:
    """What a file of settings says: values by name, limits as `NAME=VALUE`."""

    values: Mapping[str, Any]
    limits: tuple[str, ...] = ()


def read(path: Path, settings: Mapping[str, Setting]) -> File:
    """The settings in a TOML file. Paths in it that are relative are beside the file.

    Raises SettingsError with a sentence for a file that is none, an unknown key, or a value that
    is not of the kind of its key.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}") from None
    except RecursionError:
        raise SettingsError(f"{path} is no TOML file for settings: it nests too deeply") from None
    except ValueError as error:  # of TOML, of UTF-8, of numbers with thousands of digits
        raise SettingsError(f"{path} is no TOML file: {error}") from None
    limits = found.pop(LIMITS_TABLE, {})
    if not isinstance(limits, dict):
        raise SettingsError(f"{path}: {LIMITS_TABLE} must be a table, [{LIMITS_TABLE}]")
    values = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        setting = settings.get(name)
        if setting is None:
            raise SettingsError(f"{path}: {key!r} is no setting{near(name, settings)}")
        values[name] = _value(path, key, setting, value)
    for name, value in limits.items():
        if name not in LIMITS:
            raise SettingsError(
                f"{path}: {name!r} in [{LIMITS_TABLE}] is no limit of a relay (docs/limits.md "
                f"lists them){near(name, LIMITS)}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SettingsError(f"{path}: {name} in [{LIMITS_TABLE}] must be a number")
    return File(values, tuple(f"{name}={value}" for name, value in limits.items()))


def _value(path: Path, key: str, setting: Setting, value: object) -> object:
    if setting.many:
        each = value if isinstance(value, list) else [value]
        return [_one(path, key, setting, item) for item in each]
    return _one(path, key, setting, value)


def _one(path: Path, key: str, setting: Setting, value: object) -> object:
    kind = setting.kind
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in _TOML:
        if type(value) is not kind:
            raise SettingsError(f"{path}: {key} must be {_TOML[kind]}, not {value!r}")
        return value
    if not isinstance(value, str):
        raise SettingsError(f"{path}: {key} must be a string, in quotes")
    if "\0" in value:
        raise SettingsError(f"{path}: {key} must not have a null character")
    return str(path.parent / value) if kind is Path else value


def of_environment(prefix: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The limits of PREFIX_LIMIT, which are parted by white space."""
    return tuple(environment.get(f"{prefix}_LIMIT", "").split())


def unknown_variables(
    prefix: str, environment: Mapping[str, str], known: Iterable[str]
) -> list[str]:
    """Variables that look like settings and are none, each with what may have been meant.

    Those that Kubernetes makes for a service that is called as the program are not meant so.
    """
    names = {f"{prefix}_{name.upper()}" for name in known}
    return [
        variable + near(variable, names)
        for variable in sorted(environment)
        if variable.startswith(f"{prefix}_")
        and variable not in names
        and not re.fullmatch(rf"{prefix}_(SERVICE_.*|PORT(_.*)?)", variable)
    ]


def text(
    values: Mapping[str, Any],
    origins: Mapping[str, str],
    limits: Mapping[str, float],
    origins_of_limits: Mapping[str, str],
) -> str:
    """The settings as a file that `read` takes, each with where it comes from."""
    lines = []
    for name, value in values.items():
        if value is None or (isinstance(value, list | tuple) and not value):
            lines.append(f"# {name}: not set")
        else:
            lines.append(f"{name} = {_toml(value)}  # {origins[name]}")
    lines += ["", f"[{LIMITS_TABLE}]"]
    for name, limit in LIMITS.items():
        value = limits.get(name, limit.default)
        origin = origins_of_limits.get(name, "default")
        lines.append(f"# {name}: none" if value is None else f"{name} = {_toml(value)}  # {origin}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, Path):
        value = os.path.abspath(value)
    if isinstance(value, Enum):
        value = value.value
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def schema(
    settings: Mapping[str, Setting], title: str, limits: Mapping[str, str]
) -> dict[str, Any]:
    """The JSON Schema of a file of settings; `limits` says of each limit what it is."""
    properties: dict[str, Any] = {}
    for setting in settings.values():
        entry: dict[str, Any] = {
            "type": _JSON.get(setting.kind, "string"),
            "description": setting.help,
        }
        if setting.many:
            entry |= {"type": [entry["type"], "array"], "items": {"type": entry["type"]}}
        if setting.choices:
            entry["enum"] = list(setting.choices)
        if setting.default is not None:
            entry["default"] = setting.default
        properties[setting.name] = entry
    table = {}
    for name, limit in LIMITS.items():
        kind = "number" if isinstance(limit.default, float) else "integer"
        table[name] = {"type": kind, "minimum": 0, "description": limits[name]}
        if limit.default is not None:
            table[name]["default"] = limit.default
    properties[LIMITS_TABLE] = {
        "type": "object",
        "properties": table,
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "type": "object",
        "properties": properties,
        "required": [setting.name for setting in settings.values() if setting.required],
        "additionalProperties": False,
    }
