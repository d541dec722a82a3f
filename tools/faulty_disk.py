"""`kvcs-relay` with a disk that does what a file says: `python -m tools.faulty_disk OPTIONS`.

The environment variable FAULTY_DISK names the file. It says `full` (nothing can be written), `torn`
(half of it is, then the device fails), `unreadable` (what is read fails) or `hung` (no call comes
back until it says something else); anything else, or nothing: the disk is as it should be.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import relay.disk.files
from moqt.track.stored import Buffer
from relay.service.entry import main

VARIABLE: Final = "FAULTY_DISK"
STATES: Final = ("full", "torn", "unreadable", "hung")
LOOK_SECONDS: Final = 0.02


class FaultyDisk:
    """`os`, for files of the disk tier."""

    def __init__(self, said: Callable[[], str]) -> None:
        self._said = said

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _state(self) -> str:
        while (state := self._said()) == "hung":
            time.sleep(LOOK_SECONDS)
        return state

    def writev(self, descriptor: int, buffers: Sequence[Buffer]) -> int:
        state = self._state()
        if state == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if state == "torn":
            octets = b"".join(buffers)
            os.write(descriptor, octets[: len(octets) // 2])
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.writev(descriptor, buffers)

    def pread(self, descriptor: int, octets: int, at: int) -> bytes:
        if self._state() == "unreadable":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.pread(descriptor, octets, at)

    def fdatasync(self, descriptor: int) -> None:
        self._state()
        os.fdatasync(descriptor)


def _of_file(path: Path) -> Callable[[], str]:
    def said() -> str:
        try:
            return path.read_text().strip()
        except FileNotFoundError:
            return ""

    return said


if __name__ == "__main__":
    disk = FaultyDisk(_of_file(Path(os.environ[VARIABLE])))
    setattr(relay.disk.files, "os", disk)  # noqa: B010  (a module is no place for another type)
    main()
