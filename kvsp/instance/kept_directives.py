"""Prefetch directives outlive the process: one file each, there before it is accepted.

What was loaded went with the engine's memory, so a directive whose time is not over is carried
out again, from its beginning; of one that is over the outcome can still be read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from kvsp.files import FILES, Files, remove_durably, write_durably
from kvsp.holder.uninterrupted import uninterrupted
from kvsp.names.errors import DecodeError
from kvsp.records.records import PrefetchDirective, PrefetchStatus

logger = logging.getLogger("kvsp.instance")

_SUFFIX: Final = ".json"
_UNREADABLE: Final = (ValueError, KeyError, TypeError, DecodeError, msgspec.MsgspecError)
"""What a file that is not ours raises; the errors of old msgspecs are no ValueErrors."""


class KeptDirective(NamedTuple):
    """A directive of before. Times are Unix times in ms, by the clock of the machine."""

    directive: PrefetchDirective
    ends_ms: int
    status: PrefetchStatus | None
    """Its outcome, once it had one, and when that was."""

    finished_ms: int


class KeptDirectives:
    """Directives in the files of a folder, or nowhere without one."""

    def __init__(
        self, folder: Path | None, *, http_loopback: bool = False, files: Files = FILES
    ) -> None:
        """`http_loopback` allows what `Record.from_json` says."""
        self._folder = folder
        self._loopback = http_loopback
        self._files = files

    async def load(self) -> list[KeptDirective]:
        """What was kept. A file that cannot be used is set aside, which the log tells."""
        return await uninterrupted(lambda: list(self._load()))

    async def keep(self, kept: KeptDirective) -> None:
        """Have a directive, or its outcome, on disk. Raises OSError."""
        if self._folder is not None:
            await uninterrupted(self._write, self._folder, kept)

    async def forget(self, name: str) -> None:
        """Have it on disk no more. Raises OSError."""
        if self._folder is not None:
            await uninterrupted(remove_durably, self._path(self._folder, name), self._files)

    def _path(self, folder: Path, name: str) -> Path:
        return folder / f"{name}{_SUFFIX}"

    def _write(self, folder: Path, kept: KeptDirective) -> None:
        if not folder.exists():
            self._files.make_folder(folder)
            self._files.sync_folder(folder.parent)
        tree: dict[str, Any] = {"directive": kept.directive.to_dict(), "ends_ms": kept.ends_ms}
        if kept.status is not None:
            tree |= {"status": kept.status.to_dict(), "finished_ms": kept.finished_ms}
        path = self._path(folder, kept.directive.directive)
        write_durably(path, msgspec.json.encode(tree), self._files)

    def _load(self) -> Iterator[KeptDirective]:
        if self._folder is None or not self._folder.exists():
            return
        for path in sorted(self._folder.iterdir()):
            if path.name.startswith("."):  # a crash came before it got its name
                self._files.unlink(path)
            elif path.suffix == _SUFFIX:
                try:
                    yield self._read(path)
                except (OSError, *_UNREADABLE) as error:
                    logger.warning(
                        "%s: %s; it is %s.damaged now, and its directive forgotten",
                        path,
                        error,
                        path,
                    )
                    os.replace(path, f"{path}.damaged")

    def _read(self, path: Path) -> KeptDirective:
        tree = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        status = tree.get("status")
        return KeptDirective(
            PrefetchDirective.from_json(tree["directive"], http_loopback=self._loopback),
            int(tree["ends_ms"]),
            None if status is None else PrefetchStatus.from_json(status),
            int(tree.get("finished_ms", 0)),
        )
