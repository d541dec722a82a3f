"""Large JSON texts, read in pieces: between two of them other threads have their turn.

The C scanner of `json` holds the interpreter's lock from the first octet of a text to its last,
a second for a text of some MiB, and nobody else runs. Here it gets windows of the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

WINDOW: Final = 64 << 10
"""Characters that are scanned at once: less than a millisecond."""

Made = Callable[[list[tuple[str, Any]]], Any]
"""An object of its members in order."""

_SPACE: Final = " \t\n\r"
_CUT: Final = 3
"""As much of a number, `e+1`, can be cut off so that what is left is one, too."""


def parse(text: str, decoder: json.JSONDecoder, made: Made = dict) -> Any:
    """What `decoder.decode(text)` gives; `made` is its hook for pairs, which may be called
    for an object more than once. Raises json.JSONDecodeError, RecursionError."""
    reader = _Reader(text, decoder, made)
    value, end = reader.value(reader.skip(0))
    if (end := reader.skip(end)) != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


class _Reader:
    """Reads values from one text; each method gives what it read and where that ended."""

    def __init__(self, text: str, decoder: json.JSONDecoder, made: Made) -> None:
        self._text = text
        self._made = made
        self._decoder = decoder
        self._window = ""
        self._start = 0

    def skip(self, at: int) -> int:
        """The next character that is no white space."""
        text = self._text
        while at < len(text) and text[at] in _SPACE:
            at += 1
        return at

    def value(self, at: int) -> tuple[Any, int]:
        """The value that begins at `at`."""
        found = self._small(at)
        if found is not None:
            return found
        text = self._text
        if text.startswith("[", at):
            return self._array(at + 1)
        if text.startswith("{", at):
            return self._object(at + 1)
        value, end = self._decoder.raw_decode(text, at)
        return value, end

    def _small(self, at: int) -> tuple[Any, int] | None:
        """A value that ends within a window; None for a larger one, or none."""
        if not self._start <= at < self._start + len(self._window):
            self._move(at)
        found = self._scanned(at)
        if found is None and at != self._start:
            self._move(at)
            found = self._scanned(at)
        return found

    def _scanned(self, at: int) -> tuple[Any, int] | None:
        window, start = self._window, self._start
        try:
            value, end = self._decoder.raw_decode(window, at - start)
        except json.JSONDecodeError:
            return None
        if end > len(window) - _CUT and start + len(window) < len(self._text):
            return None  # a number may go on
        return value, start + end

    def _move(self, at: int) -> None:
        self._start, self._window = at, self._text[at : at + WINDOW]

    def _array(self, at: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        at = self.skip(at)
        if self._text.startswith("]", at):
            return items, at + 1
        batches_from = at
        while True:
            if at >= batches_from:
                batches_from = at + WINDOW
                while (batch := self._batch(at)) is not None:
                    found, at, last = batch
                    items += found
                    if last:
                        return items, at
                    batches_from = at + WINDOW
            item, at = self.value(at)
            items.append(item)
            at = self.skip(at)
            if self._text.startswith("]", at):
                return items, at + 1
            at = self._after(",", "Expecting ',' delimiter", at)

    def _batch(self, at: int) -> tuple[list[Any], int, bool] | None:
        """Items up to the last comma in the window, where the next one begins, and whether
        the array ended before; None when that comma is none of this array."""
        window = self._text[at : at + WINDOW]
        cut = window.rfind(",")
        if cut < 0:
            return None
        try:
            items, end = self._decoder.raw_decode(f"[{window[:cut]}]")
        except json.JSONDecodeError:
            return None
        if not items:
            return None
        if end == cut + 2:
            return items, self.skip(at + cut + 1), False
        return items, at + end - 1, True

    def _object(self, at: int) -> tuple[Any, int]:
        pairs: list[tuple[str, Any]] = []
        at = self.skip(at)
        ended = self._text.startswith("}", at)
        while not ended:
            if not self._text.startswith('"', at):
                fault = "Expecting property name enclosed in double quotes"
                raise json.JSONDecodeError(fault, self._text, at)
            name, at = self._decoder.raw_decode(self._text, at)
            at = self._after(":", "Expecting ':' delimiter", self.skip(at))
            value, at = self.value(at)
            pairs.append((name, value))
            at = self.skip(at)
            if not (ended := self._text.startswith("}", at)):
                at = self._after(",", "Expecting ',' delimiter", at)
        return self._made(pairs), at + 1

    def _after(self, mark: str, fault: str, at: int) -> int:
        if not self._text.startswith(mark, at):
            raise json.JSONDecodeError(fault, self._text, at)
        return self.skip(at + 1)
