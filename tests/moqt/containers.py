"""Every container that hangs on an object of ours, by class and attribute, and its size."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

OURS = ("moqt.", "relay.")
_CONTAINERS = (dict, list, set, deque, bytearray)


def sizes(*roots: object) -> Counter[str]:
    """Entries of `Class.attribute`, over all objects that can be reached from `roots` through
    objects of moqt and relay. What a container contains counts for it, at any depth."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    todo: list[Any] = list(roots)
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        for name, value in _attributes(each):
            for inner in _contents(value, seen):
                if isinstance(inner, _CONTAINERS):
                    found[f"{type(each).__name__}.{name}"] += len(inner)
                else:
                    todo.append(inner)
    return found


def _attributes(each: object) -> Iterator[tuple[str, Any]]:
    if not type(each).__module__.startswith(OURS):
        return
    names = [n for kind in type(each).__mro__ for n in getattr(kind, "__slots__", ())]
    for name in {*names, *getattr(each, "__dict__", ())}:
        if not name.startswith("__"):
            yield name, getattr(each, name, None)


def _contents(value: object, seen: set[int]) -> Iterator[Any]:
    """`value` if it is a container or an object of ours, and what is in it."""
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, _CONTAINERS):
            if id(each) in seen:
                continue
            seen.add(id(each))
            yield each
            if isinstance(each, dict):
                todo += [*each.keys(), *each.values()]
            elif not isinstance(each, bytearray):
                todo += each
        elif isinstance(each, tuple):
            todo += each
        elif type(each).__module__.startswith(OURS):
            yield each
