"""Parsing units that arrive in pieces, holding only the octets of one unfinished unit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from moqt.wire.vi64 import Buffer, Truncated

T = TypeVar("T")


class Incremental(ABC, Generic[T]):
    """Feeds `_parse` with whole units.

    Octets are held only as far as `_parse` says it needs them, so what is held
    is bounded by what `_parse` accepts as a length, and a unit never takes
    octets of what follows it with it.
    """

    __slots__ = ("_need", "pending")

    def __init__(self) -> None:
        self.pending = bytearray()
        """What has come of a unit whose end has not."""
        self._need = 0

    @property
    def buffered(self) -> int:
        """Octets held of a unit whose end has not come; 0 at a boundary."""
        return len(self.pending)

    @abstractmethod
    def _parse(self, buffer: Buffer, position: int) -> tuple[T, int]:
        """The unit at `position` and the position after it.

        Raises Truncated when more octets are needed, having changed nothing,
        and SessionError as soon as the octets seen cannot become valid.
        """

    def _take(self, data: bytes, position: int) -> tuple[T | None, int]:
        """The next unit that ends in `data[position:]`, or None when all of it is held."""
        pending = self.pending
        if not pending:
            try:
                return self._parse(data, position)
            except Truncated as cut:
                self._hold(data, position, cut.need)
                return None, len(data)
        while True:
            missing = self._need - len(pending)
            part = data[position : position + missing]
            pending += part
            position += len(part)
            if len(part) < missing:
                return None, position
            try:
                unit, _ = self._parse(pending, 0)
            except Truncated as cut:
                self._need = cut.need
                continue
            pending.clear()
            return unit, position

    def _hold(self, data: bytes, position: int, need: int) -> None:
        """Keep `data[position:]`, of a unit that ends at `need` of `data` or later."""
        self.pending += data[position:]
        self._need = need - position
