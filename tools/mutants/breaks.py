"""The lists of breaks, and how one is made in a copy of the tree.

A list is a TOML file beside this one. Its tables stand under a row's section title:

    table = "docs/moqt-conformance.md"

    [["Track Alias"]]
    row = "Subscriptions to one track may share"  # how the rule begins, of one row of the section
    file = "moqt/receiving/aliases.py"            # not needed if one file of the row has `old`
    old = "if other is not track:"                # stands in the file exactly once
    new = "if True:"
    nth = 2                                       # which, where `old` stands there more often
    also = [{file = "...", old = "...", new = "..."}]  # further places, where one is not enough

    [["Track Alias"]]
    row = "..."
    none = "why no break can be made"

A row may have several breaks: its tests must notice each.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.mutants.rows import Row, code_files, read_rows

HERE = Path(__file__).parent
EDIT = {"file", "old", "new", "nth"}


class ListError(Exception):
    """A list of breaks cannot be read: the text says which entry and why."""


class Stale(Exception):
    """A break no longer applies to the code as it is now."""


@dataclass(frozen=True, slots=True)
class Edit:
    file: str
    old: str
    new: str
    nth: int = 0
    """Which occurrence, from 1; 0: there is exactly one."""

    def applied(self, text: str) -> str:
        """`text` with the break made. Raises `Stale`."""
        parts = text.split(self.old)
        found = len(parts) - 1
        if found < self.nth if self.nth else found != 1:
            wanted = f"at least {self.nth}" if self.nth else "once"
            raise Stale(f"{self.old!r} stands {found} times in {self.file}, wanted {wanted}")
        at = self.nth or 1
        broken = self.old.join(parts[:at]) + self.new + self.old.join(parts[at:])
        if broken == text:
            raise Stale(f"{self.old!r} is replaced by itself in {self.file}")
        if self.file.endswith(".py"):
            try:
                compile(broken, self.file, "exec")
            except SyntaxError as error:
                raise Stale(f"{self.file} is no Python with {self.new!r}: {error}") from None
        return broken


@dataclass(frozen=True, slots=True)
class Break:
    row: Row
    edits: tuple[Edit, ...]
    none: str = ""
    """Why the row has no break."""

    def files(self, root: Path) -> dict[str, str]:
        """The broken text of every file that it changes. Raises `Stale`."""
        texts: dict[str, str] = {}
        for edit in self.edits:
            path = root / edit.file
            if edit.file not in texts and not path.is_file():
                raise Stale(f"there is no file {edit.file}")
            text = texts.get(edit.file)
            texts[edit.file] = edit.applied(path.read_text("utf-8") if text is None else text)
        return texts


@dataclass(slots=True)
class Lists:
    """All that is known of the tables: their rows, the breaks of each, and what is wrong."""

    rows: list[Row]
    breaks: list[Break]
    wrong: list[str]
    """Entries that belong to no row, or to several."""

    def of(self, row: Row) -> list[Break]:
        return [each for each in self.breaks if each.row is row]


def read_lists(root: Path, paths: Iterable[Path] | None = None) -> Lists:
    """Reads the lists at `paths`, by default all of tools/mutants, for the tree at `root`.

    Raises `ListError` for an entry that is not as described above.
    """
    folder = root / "tools" / "mutants"
    chosen = sorted(folder.glob("*.toml")) if paths is None else list(paths)
    lists = Lists([], [], [])
    tables: dict[str, list[Row]] = {}
    for path in chosen:
        try:
            content = tomllib.loads(path.read_text("utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise ListError(f"{path.name} is no TOML: {error}") from None
        table = content.pop("table", None)
        if not isinstance(table, str):
            raise ListError(f"{path.name} names no table")
        if table not in tables:
            tables[table] = read_rows(root, table)
            lists.rows += tables[table]
        for section, entries in content.items():
            for entry in entries:
                _add(lists, root, tables[table], f"{path.name} [{section}]", section, entry)
    return lists


def _add(
    lists: Lists, root: Path, rows: list[Row], place: str, section: str, entry: Mapping[str, Any]
) -> None:
    text = entry.get("row")
    if not isinstance(text, str) or not text:
        raise ListError(f"{place}: an entry without `row`")
    place = f"{place} {text!r}"
    mine = [row for row in rows if section in row.sections]
    found = [row for row in mine if row.rule == text]
    found = found or [row for row in mine if row.rule.startswith(text)]
    if len(found) != 1:
        lists.wrong.append(f"{place}: {len(found) or 'no'} rows begin so")
        return
    row = found[0]
    if "none" in entry:
        if {*entry} != {"row", "none"} or not entry["none"].strip():
            raise ListError(f"{place}: `none` says why, and stands alone")
        lists.breaks.append(Break(row, (), entry["none"].strip()))
        return
    first = {key: value for key, value in entry.items() if key not in ("row", "also")}
    edits = tuple(_edit(root, row, place, each) for each in (first, *entry.get("also", ())))
    lists.breaks.append(Break(row, edits))


def _edit(root: Path, row: Row, place: str, entry: Mapping[str, Any]) -> Edit:
    if unknown := {*entry} - EDIT:
        raise ListError(f"{place}: {', '.join(sorted(unknown))} is not known here")
    old, new = entry.get("old"), entry.get("new")
    if not isinstance(old, str) or not isinstance(new, str) or not old:
        raise ListError(f"{place}: `old` and `new` are texts, and `old` is not empty")
    nth = entry.get("nth", 0)
    file = entry.get("file") or _only_file(root, row, old) or ""
    return Edit(file, old, new, nth)


def _only_file(root: Path, row: Row, old: str) -> str | None:
    """The one file of the row in which `old` stands, the first one of the row if none does."""
    files = list(dict.fromkeys(path for path, _ in code_files(root, row)))
    holding = [
        each for each in files if (root / each).is_file() and old in (root / each).read_text()
    ]
    return holding[0] if len(holding) == 1 else next(iter(files), None)
