"""The epoch of an instance, which rises with every start (KVSP "Instance Status")."""

from __future__ import annotations

import time
from pathlib import Path

from kvsp.files import write_durably
from kvsp.names.codes import MAX_EPOCH
from kvsp.names.errors import FileError

_NAME = "epoch"


class Epochs:
    """Start times in ms since the Unix epoch; with a folder they also only ever rise when
    the clock goes back."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = None if folder is None else folder / _NAME
        self._last = 0

    def next(self, above: int = 0, now_ms: int | None = None) -> int:
        """A higher epoch than any before, and than `above`; durable when this returns.

        Raises FileError when the file cannot be read or written.
        """
        clock_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
        last = max(self._last, self._read(), above)
        self._last = min(max(clock_ms, last + 1), MAX_EPOCH)
        self._write()
        return self._last

    def _read(self) -> int:
        if self._path is None:
            return 0
        try:
            text = self._path.read_text("ascii").strip()
        except FileNotFoundError:
            return 0
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(f"{self._path}: {error}") from None
        if not text.isdigit() or int(text) > MAX_EPOCH:
            raise FileError(
                f"{self._path}: not an epoch; write a number above any the placement controller "
                "has seen, or remove the file"
            )
        return int(text)

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_durably(self._path, f"{self._last}\n".encode("ascii"))
        except OSError as error:
            raise FileError(f"{self._path}: {error.strerror or error}") from None
