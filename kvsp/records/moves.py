"""Moves of states as tables: one table each, an illegal move is an error."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from kvsp.names.errors import KvspError

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class IllegalMove(KvspError):
    """An event that a state does not allow."""


def move(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """The next state. Raises IllegalMove when the table has no such move."""
    following = table.get((state, event))
    if following is None:
        raise IllegalMove(f"{state.value} does not allow {event.value}")
    return following
