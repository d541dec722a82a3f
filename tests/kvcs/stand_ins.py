"""Stand-ins for the parts of an engine that a connector meets: put in the engine's place where it
is not installed, and held against it where it is."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

Modules = Mapping[str, Sequence[type]]
"""What is imported of an engine, by module."""


def install(monkeypatch: Any, modules: Modules, connector: str) -> None:
    """Let them be imported by the engine's names, in this test alone; the module `connector`, which
    is made of them, is made anew."""
    for path, classes in modules.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in sys.modules or depth == len(parts):
                module = ModuleType(name)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, name, module)
        for each in classes:
            setattr(sys.modules[path], each.__name__, each)
    monkeypatch.delitem(sys.modules, connector, raising=False)


def each_of(modules: Modules) -> pytest.MarkDecorator:
    """A test for each, of `path` and `stand_in`."""
    return pytest.mark.parametrize(
        "path, stand_in",
        [(path, each) for path, classes in modules.items() for each in classes],
        ids=lambda each: getattr(each, "__name__", None),
    )


def is_like(path: str, stand_in: type) -> None:
    """It has no method, class method or property that the real one does not have just so."""
    real = getattr(import_module(path), stand_in.__name__)
    for name, each in vars(stand_in).items():
        if name.startswith("__") and name != "__init__":
            continue
        if inspect.isfunction(each) or isinstance(each, classmethod | property):
            theirs = inspect.getattr_static(real, name)
            assert type(theirs) is type(each), name
            if not isinstance(each, property):
                _same_call(stand_in, real, name)


def takes_every_call(ours: type, theirs: type) -> None:
    """All that the engine's base class asks for is there, with the same parameters."""
    assert not inspect.isabstract(ours)
    for name in vars(ours):
        real = inspect.getattr_static(theirs, name, None)
        if not name.startswith("_") and inspect.isfunction(real):
            _same_call(ours, theirs, name)


def _same_call(ours: type, theirs: type, name: str) -> None:
    here, there = getattr(ours, name), getattr(theirs, name)
    assert list(inspect.signature(here).parameters) == list(inspect.signature(there).parameters), (
        name
    )
    assert inspect.iscoroutinefunction(here) == inspect.iscoroutinefunction(there), name
