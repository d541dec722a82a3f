"""Files that only their owner may read: a bearer token, the key of stateless resets.

What is opened is what is judged: a symbolic link stands for the file it leads to, and a rename
between the look and the reading changes nothing.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from moqt.values.errors import MoqtError


class PrivateFileError(MoqtError):
    """Such a file cannot be used; the message names it and what to do, never its content."""


def read_private(path: str | Path, limit: int, *, pipes: bool = False) -> bytes:
    """The first octets of a regular file, or with `pipes` of a pipe, at most `limit`, that nobody
    but its owner has access to. Raises PrivateFileError, and OSError as `open` does."""
    # a pipe must not hold a server up, so it is looked at before it is read
    waits = pipes and stat.S_ISFIFO(os.stat(path).st_mode)
    how_else = 0 if waits else os.O_NONBLOCK
    with open(path, "rb", opener=lambda name, how: os.open(name, how | how_else)) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode) and not (waits and stat.S_ISFIFO(mode)):
            raise PrivateFileError(f"{path}: not a regular file")
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise PrivateFileError(
                f"{path}: others than its owner have access "
                f"(mode {stat.S_IMODE(mode):04o}); run: chmod 600 {path}"
            )
        return file.read(limit)


def create_private(path: str | Path, data: bytes) -> None:
    """Make a file of mode 0600 that holds `data`: whole, or not at all, whatever happens.

    Raises FileExistsError, as it takes no other's place, and OSError.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(handle, "wb") as file:
            os.fchmod(handle, 0o600)
            file.write(data)
            file.flush()
            os.fsync(handle)
        os.link(temporary, target)  # unlike rename, this fails when there is one
    finally:
        temporary.unlink()
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
