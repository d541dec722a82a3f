"""The system calls by which files are made to last, and a small file that is whole or as before.

A name and what is under it are durable when the file was synced before it got the name, and
the folder of the name after that.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


class Files:
    """The system calls on files, one method each (tests end them half-way)."""

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def read(self, descriptor: int, octets: int, offset: int) -> bytes:
        return os.pread(descriptor, octets, offset)

    def create(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, descriptor: int, octets: memoryview) -> int:
        return os.write(descriptor, octets)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)


FILES = Files()


def write_durably(path: Path, octets: bytes, files: Files = FILES) -> None:
    """Have a file with these octets when this returns, whatever happens after; until then the
    one of before, or none. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = files.create(temporary)
    try:
        try:
            view = memoryview(octets)
            while view:
                view = view[files.write(descriptor, view) :]
            files.sync(descriptor)
        finally:
            files.close(descriptor)
        files.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            files.unlink(temporary)
        raise
    files.sync_folder(path.parent)


def remove_durably(path: Path, files: Files = FILES) -> None:
    """Have no such file any more, whatever happens after. Raises OSError."""
    files.unlink(path)
    files.sync_folder(path.parent)
