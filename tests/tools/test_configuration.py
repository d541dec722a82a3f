"""The page of settings is what the settings themselves say, and each of them does something."""

from __future__ import annotations

import ast

from kvsp.service.schema import settings, tables
from tests.paths import ROOT
from tools.configuration import PAGE, page


def test_the_page_of_settings_is_the_one_that_the_settings_make() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


def test_every_setting_and_every_table_is_on_the_page() -> None:
    text = PAGE.read_text()
    for name in filter(None, tables()):
        assert f"\n## `[{name}]`\n" in text
    assert text.count("\n| `") == len(settings()) > 120


def test_every_class_of_limits_is_a_table_of_settings() -> None:
    limits = {
        node.name
        for path in (ROOT / "kvsp").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Limits", "Quota"))
    }
    classes = {each for setting in settings().values() for each in setting.table.__mro__}
    assert len(limits) > 5 and not limits - {each.__name__ for each in classes}


def test_every_setting_is_read_by_something() -> None:
    """By what its table is given to: the table's own class says it, and that is no use."""
    read: set[str] = set()
    for path in (ROOT / "kvsp").rglob("*.py"):
        if path.name in ("settings.py", "limits.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    assert not {each.name for each in settings().values() if each.member not in read}
