"""State machines as tables: what may follow what, in one place per machine."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import TypeVar

from moqt.values.errors import MisuseError

S = TypeVar("S", bound=IntEnum)


def move(table: Mapping[S, frozenset[S]], at: S, to: S) -> S:
    """`to`, when `table` lets it follow `at`. Raises MisuseError when it does not."""
    if to not in table[at]:
        raise MisuseError(f"{type(at).__name__} cannot go from {at.name} to {to.name}")
    return to
