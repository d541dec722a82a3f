"""Files that only their owner may read, or only their owner may write: one rule for all of them.

What is opened is what is judged: a symbolic link stands for the file it leads to (secrets are
mounted as links), and a rename between the look and the reading changes nothing. Who the owner
is, is not asked: the file was named by whoever started the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from kvsp.names.errors import FileError

_OTHERS_ACCESS: Final = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH

CHANGE_SECONDS: Final = 10.0
"""Longest wait for others who change files in the same folder."""

_LOOK_AGAIN: Final = 0.02


def open_input(path: str | os.PathLike[str]) -> BinaryIO:
    """A file or a pipe to read from, as a shell's `<(…)` makes one.

    A pipe is waited for: its writer may take its time. Raises FileError, without the name,
    for what is neither, OSError for what cannot be opened.
    """
    # what it is, is asked first: opening a device, or a pipe nobody writes, may do or wait
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISDIR(mode)):
        raise FileError("neither a file nor a pipe")
    file = open(path, "rb")  # noqa: SIM115  (the caller closes it)
    if stat.S_IFMT(os.fstat(file.fileno()).st_mode) != stat.S_IFMT(mode):
        file.close()
        raise FileError("it was exchanged while it was opened")
    return file


def read_private(
    path: str | os.PathLike[str],
    limit: int,
    *,
    others_may_read: bool = False,
    pipes: bool = False,
) -> bytes:
    """The octets of a regular file, or with `pipes` of a pipe, at most `limit`, that nobody but
    its owner may write and, unless `others_may_read`, read.

    Raises FileError, which names the file and what to run, never its content.
    """
    try:
        # a pipe must not hold a server up, so it is looked at before it is read
        waits = pipes and stat.S_ISFIFO(os.stat(path).st_mode)
        how_else = 0 if waits else os.O_NONBLOCK
        with open(path, "rb", opener=lambda name, how: os.open(name, how | how_else)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode) and not (waits and stat.S_ISFIFO(mode)):
                raise FileError(f"{path}: not a regular file")
            if others_may_read and mode & _OTHERS_WRITE:
                raise FileError(
                    f"{path}: others than its owner may write it; run: chmod go-w {path}"
                )
            if not others_may_read and mode & _OTHERS_ACCESS:
                raise FileError(
                    f"{path}: others than its owner have access "
                    f"(mode {stat.S_IMODE(mode):04o}); run: chmod 600 {path}"
                )
            data = file.read(limit + 1)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    if len(data) > limit:
        raise FileError(f"{path}: larger than {limit} octets")
    return data


def create_private(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a new file of mode 0600, whole or not at all.

    Raises FileError when it exists, which is never overwritten, or cannot be written.
    """
    target = Path(path)
    try:
        temporary = _written(target, data)
        try:
            # unlike rename, link fails when the target exists
            os.link(temporary, target)
        finally:
            temporary.unlink()
        try:
            _sync_folder(target)
        except OSError:
            target.unlink()
            raise
    except FileExistsError:
        raise FileError(
            f"{target}: exists already and is not overwritten; choose another name"
        ) from None
    except OSError as error:
        raise FileError(f"{target}: {error.strerror or error}") from error


def replace_private(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file in the place of `path`, whole or not at all, with the mode that one has
    (0600 where there is none). Raises FileError."""
    target = Path(path)
    try:
        temporary = _written(target, data)
        try:
            if target.exists():
                os.chmod(temporary, stat.S_IMODE(target.stat().st_mode) & 0o777)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"{target}: {error.strerror or error}") from error


@contextlib.contextmanager
def changing(path: str | os.PathLike[str], within: float = CHANGE_SECONDS) -> Iterator[None]:
    """Read a file and write it anew, while nobody else who does so in its folder is at it.

    Raises FileError when others are for `within` seconds, or there is no such folder.
    """
    folder = Path(os.path.realpath(path)).parent
    deadline = time.monotonic() + within
    # the file itself is exchanged, and with it whatever lock was on it
    with contextlib.ExitStack() as stack:
        try:
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, held)
            while not _locked(held):
                if time.monotonic() >= deadline:
                    raise FileError(
                        f"{path}: another process has been changing files in its folder for "
                        f"{within:g} s; try again when that has ended"
                    )
                time.sleep(_LOOK_AGAIN)
        except OSError as error:
            raise FileError(f"{path}: {error.strerror or error}") from error
        yield


def _locked(folder: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def beside(target: Path) -> Path:
    """A name beside `target` that is nobody's, for what is to take its place; it is as long as
    names are allowed to be when `target`'s is."""
    ending = f".{secrets.token_hex(8)}.tmp"
    room = len(os.fsencode(target.name)) - len(ending) - 1
    shown = os.fsencode(target.name)[: max(room, 32)]
    return target.with_name(f".{os.fsdecode(shown)}{ending}")


def _written(target: Path, data: bytes) -> Path:
    """A file beside `target` that holds `data` on the disk."""
    temporary = beside(target)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        temporary.unlink()
        raise
    return temporary


def _sync_folder(target: Path) -> None:
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
