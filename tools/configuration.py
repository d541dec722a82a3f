"""Writes docs/configuration.md from the settings themselves, so that it cannot go stale.

Example: python -m tools.configuration
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from kvsp.service.schema import PREFIX, Setting, settings, tables
from tools.limits import sentences

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

HEAD = f"""# Configuration of `kvsp-server`

Every setting. A file (`--config FILE`, TOML) has them in tables, as below; a variable of the
environment goes before the file, a flag before both. The variable of `holder.disk_mib` is
`{PREFIX}HOLDER_DISK_MIB`, and so on: `{PREFIX}`, the name in capitals, `_` for each dot; lists are
separated by commas, and one that is empty says nothing. A name that is no setting is refused with
the nearest one that is (in the environment a warning: orchestrators make variables of their own).

A relative path in the file is meant from the file's folder, in a variable or a flag from the
working directory. Octets may be written with a unit: `"64MiB"`. Names end in their unit: `_s`
seconds, `_ms` milliseconds, `_us` microseconds, `_mib` MiB. No setting is a secret: secrets are in
files that only their owner may read, and the settings name those.

`kvsp-server --check-config` says whether a start could work, `--print-config` shows every setting
as it is and where it came from, as a file. This page is written by `make docs`.
"""


def page() -> str:
    """The whole page. Raises KeyError for a setting that says nothing of itself."""
    parts = [HEAD]
    for name, table in tables().items():
        inside = [each for each in settings().values() if each.table_name == name]
        title = f"`[{name}]`" if name else "Before the first table"
        parts.append(f"\n## {title}\n\n{about(table)}\n\n")
        parts.append("| setting | default | what it is |\n|---|---|---|\n")
        parts += [_row(each) for each in inside]
    return "".join(parts)


def about(table: type) -> str:
    """What a table says of itself, on one line."""
    return " ".join((inspect.getdoc(table) or "").split())


def said(setting: Setting) -> str:
    """What is written under a setting, in its class or the one that has it from."""
    for each in setting.table.__mro__:
        if each is not object and (text := sentences(each).get(setting.member)):
            return text
    raise KeyError(f"{setting.name} says nothing of itself")


def _row(setting: Setting) -> str:
    bounds = _bounds(setting.kind)
    return (
        f"| `{setting.member}` | {_default(setting)} | {said(setting)}"
        f"{f' ({bounds})' if bounds else ''} |\n"
    )


def _default(setting: Setting) -> str:
    value = setting.default
    if value is None or value == ():
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if setting.is_octets and value >= 1024:
        for unit, octets in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value % octets == 0:
                return f"{value // octets} {unit}"
    return f"`{value}`" if isinstance(value, str) else f"{value:_}"


def _bounds(kind: Any) -> str:
    """The bounds of a number, or the words there are."""
    if get_origin(kind) is Literal:
        return " or ".join(f"`{each}`" for each in get_args(kind))
    least = most = None
    while get_origin(kind) is not None:
        for meta in get_args(kind)[1:] if get_origin(kind) is Annotated else ():
            if isinstance(meta, msgspec.Meta):
                least, most = meta.ge, meta.le
        kind = get_args(kind)[0]
    if most is not None:
        return f"{least} to {most}"
    return f"at least {least}" if least not in (None, 0, 1) else ""


if __name__ == "__main__":
    PAGE.write_text(page())
