"""The data directory of one process: made, tried and claimed at the start; gone again when the
start fails."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from kvsp.http.server import CannotStartError
from kvsp.service.settings import SettingsError


class DataFolder:
    """A folder that belongs to this process for as long as it lives."""

    def __init__(self, path: Path) -> None:
        """Raises SettingsError when it cannot be used, CannotStartError while another process
        has it."""
        self.path = path
        self._made = [each for each in (path, *path.parents) if not each.exists()]
        self._lock = -1
        self._ours = False
        """Whether no other process can have it."""

        try:
            self.full = self._is_full()
            self._claim()
        except BaseException:
            self.undo()
            raise

    def _is_full(self) -> bool:
        """Make it, and write to it now rather than when the first block comes."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path) as probe:
                probe.write(b"probe")
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return True
            raise SettingsError(
                f"{self.path}: cannot be written ({error.strerror or error}); name another "
                "folder with --data-dir"
            ) from None
        return False

    def _claim(self) -> None:
        """Keep other processes out: two would take each other's blocks, records and epochs."""
        path = self.path / "lock"
        try:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._ours = True
        except BlockingIOError:
            raise CannotStartError(
                f"{self.path}: another process uses this data directory; stop it, or name another "
                "folder with --data-dir"
            ) from None
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror or error}") from None

    def undo(self) -> None:
        """The start has failed: leave behind what was there before, and no more."""
        for folder in self._made:
            if folder == self.path and self._ours:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):  # somebody else uses it by now
                    folder.rmdir()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            self._ours = False
