"""Disks that lose what was not synced when the power is cut: for files, and for SQLite's.

`Lossy` stands between kvsp and the files it writes itself. `SqliteDisk` stands below SQLite, as
its file system (a VFS), in this process.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvsp.files import Files


class Killed(BaseException):
    """The process ends here: nothing after it happens, not even cleaning up."""


class Lossy(Files):
    """A disk that has, when the power is cut, what was synced of each file and folder. What
    was not synced of names is there all the same when `names_stay`: a disk may do either."""

    def __init__(self, *, names_stay: bool, at: int = 0) -> None:
        """The power is cut before call number `at`, from 1."""
        self.names_stay = names_stay
        self.at = at
        self.calls = 0
        self.dead = False
        self._data: dict[int, bytes] = {}
        self._names: list[tuple[Path | None, Path, bytes | None]] = []

    def step(self) -> None:
        self.calls += 1
        self.dead = self.dead or self.calls == self.at
        if self.dead:
            raise Killed

    def create(self, path: Path) -> int:
        self.step()
        descriptor = super().create(path)
        self._data[os.fstat(descriptor).st_ino] = b""
        return descriptor

    def write(self, descriptor: int, octets: memoryview) -> int:
        self.step()
        return super().write(descriptor, octets)

    def sync(self, descriptor: int) -> None:
        self.step()
        about = os.fstat(descriptor)
        self._data[about.st_ino] = os.pread(descriptor, about.st_size, 0)

    def rename(self, source: Path, target: Path) -> None:
        self.step()
        before = target.read_bytes() if target.exists() else None
        super().rename(source, target)
        self._names.append((source, target, before))

    def make_folder(self, path: Path) -> None:
        self.step()
        super().make_folder(path)
        self._names.append((None, path, None))

    def unlink(self, path: Path) -> None:
        self.step()
        super().unlink(path)

    def sync_folder(self, path: Path) -> None:
        self.step()
        self._names = [each for each in self._names if each[1].parent != path]

    def cut_power(self, root: Path) -> None:
        for source, target, before in reversed([] if self.names_stay else self._names):
            if source is None:
                shutil.rmtree(target)
            elif target.exists():
                target.rename(source)
                if before is not None:
                    target.write_bytes(before)
        for path in root.rglob("*"):
            if path.is_file() and (data := self._data.get(path.stat().st_ino)) is not None:
                path.write_bytes(data)


class Hasty(Lossy):
    """Leaves out what its user asks for."""

    def __init__(self, leave_out: str, *, names_stay: bool) -> None:
        super().__init__(names_stay=names_stay)
        setattr(self, leave_out, lambda _: None)


class Reversed(Lossy):
    """Gives a file its name before it syncs it, whatever its user asks for."""

    _waiting = -1

    def sync(self, descriptor: int) -> None:
        self._waiting = descriptor

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        waiting, self._waiting = self._waiting, -1
        if waiting >= 0:
            super().sync(waiting)

    def close(self, descriptor: int) -> None:
        if descriptor != self._waiting:
            super().close(descriptor)


# --- SQLite --------------------------------------------------------------------------


class _IoMethods(ctypes.Structure):
    """`sqlite3_io_methods`, version 3."""

    _fields_ = [("version", ctypes.c_int)] + [
        (name, ctypes.c_void_p)
        for name in (
            *("close", "read", "write", "truncate", "sync", "size", "lock", "unlock", "reserved"),
            *("control", "sector", "device", "shm_map", "shm_lock", "shm_barrier", "shm_unmap"),
            *("fetch", "unfetch"),
        )
    ]


class _File(ctypes.Structure):
    _fields_ = [("methods", ctypes.POINTER(_IoMethods))]


class _Vfs(ctypes.Structure):
    """`sqlite3_vfs`, as far as it is needed."""

    _fields_ = [
        ("version", ctypes.c_int),
        ("file_octets", ctypes.c_int),
        ("max_path", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("open", ctypes.c_void_p),
        ("delete", ctypes.c_void_p),
        ("rest", ctypes.c_void_p * 16),
    ]


_OPEN = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,  # a name that lives as long as the file is open: not to be copied
    ctypes.POINTER(_File),
    ctypes.c_int,
    ctypes.c_void_p,
)
_DELETE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int)
_CLOSE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_WRITE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
)
_TRUNCATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
_SYNC = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


@dataclass
class _Stored:
    """One file: what was synced of it, and what was done to it since."""

    synced: bytes = b""
    since: list[tuple[int, bytes | None]] = field(default_factory=list)
    """(offset, octets) of a write, (length, None) of a truncation."""

    def now(self, without: int | None = None) -> bytes:
        """Its octets with everything since, or without the write of that number."""
        data = bytearray(self.synced)
        for number, (at, octets) in enumerate(self.since):
            if number == without:
                continue
            if octets is None:
                del data[at:]
            else:
                data.extend(bytes(max(0, at - len(data))))
                data[at : at + len(octets)] = octets
        return bytes(data)


class SqliteDisk:
    """What SQLite of this process has on disk, from `watching` on."""

    def __init__(self, *, syncs: bool = True) -> None:
        """Without `syncs` the disk forgets that anything was synced."""
        self.syncs = syncs
        self.before_call: Callable[[], None] = lambda: None
        self.files: dict[str, _Stored] = {}
        self._open: dict[int, str] = {}
        self._kept: list[Any] = []

    def after_cut(self, *, since: str) -> dict[str, bytes]:
        """The files that are there after a power cut: of what was not synced `none` came to the
        disk, or `all`, or all but the first write to each file (`torn`)."""
        left = {
            "none": lambda stored: stored.synced,
            "all": lambda stored: stored.now(),
            "torn": lambda stored: stored.now(without=0),
        }[since]
        return {Path(name).name: left(stored) for name, stored in self.files.items()}

    def _opened(self, file: int, name: str | None) -> None:
        self._open[file] = name or f"temporary {file}"
        if name is not None and name not in self.files:
            path = Path(name)
            self.files[name] = _Stored(path.read_bytes() if path.exists() else b"")

    def _of(self, file: int) -> _Stored:
        self.before_call()
        return self.files.setdefault(self._open[file], _Stored())

    @contextmanager
    def watching(self) -> Iterator[SqliteDisk]:
        """Every file that SQLite opens meanwhile is on this disk."""
        library = ctypes.CDLL(_library())
        library.sqlite3_vfs_find.restype = ctypes.POINTER(_Vfs)
        default = library.sqlite3_vfs_find(None)
        ours = _Vfs.from_buffer_copy(default.contents)
        ours.name = b"watched"
        ours.open = ctypes.cast(self._keep(self._make_open(default.contents)), ctypes.c_void_p)
        ours.delete = ctypes.cast(self._keep(self._make_delete(default.contents)), ctypes.c_void_p)
        assert library.sqlite3_vfs_register(ctypes.byref(ours), 1) == 0
        try:
            yield self
        finally:
            library.sqlite3_vfs_register(default, 1)
            library.sqlite3_vfs_unregister(ctypes.byref(ours))

    def _keep(self, callback: Any) -> Any:
        self._kept.append(callback)
        return callback

    def _make_open(self, default: _Vfs) -> Any:
        original = _OPEN(default.open)

        def opened(vfs: int, name: int | None, file: Any, flags: int, out: int) -> int:
            code = original(vfs, name, file, flags, out)
            if code == 0:
                address = ctypes.addressof(file.contents)
                self._opened(address, ctypes.string_at(name).decode() if name else None)
                methods = _IoMethods.from_buffer_copy(file.contents.methods.contents)
                self._watch(methods)
                self._kept.append(methods)
                file.contents.methods = ctypes.pointer(methods)
            return code

        return _OPEN(opened)

    def _make_delete(self, default: _Vfs) -> Any:
        original = _DELETE(default.delete)

        def deleted(vfs: int, name: bytes, sync: int) -> int:
            self.files.pop(name.decode(), None)
            return int(original(vfs, name, sync))

        return _DELETE(deleted)

    def _watch(self, methods: _IoMethods) -> None:
        write, truncate = _WRITE(methods.write), _TRUNCATE(methods.truncate)
        sync, close = _SYNC(methods.sync), _CLOSE(methods.close)

        def written(file: int, octets: int, length: int, at: int) -> int:
            self._of(file).since.append((at, ctypes.string_at(octets, length)))
            return int(write(file, octets, length, at))

        def truncated(file: int, length: int) -> int:
            self._of(file).since.append((length, None))
            return int(truncate(file, length))

        def synced(file: int, flags: int) -> int:
            stored = self._of(file)
            if self.syncs:
                stored.synced, stored.since = stored.now(), []
            return int(sync(file, flags))

        def closed(file: int) -> int:
            self._open.pop(file, None)
            return int(close(file))

        for name, callback in (
            ("write", _WRITE(written)),
            ("truncate", _TRUNCATE(truncated)),
            ("sync", _SYNC(synced)),
            ("close", _CLOSE(closed)),
        ):
            setattr(methods, name, ctypes.cast(self._keep(callback), ctypes.c_void_p))


def _library() -> str:
    """The library that this Python's sqlite3 stands on, when it is one by itself."""
    import sqlite3  # noqa: F401  (loads it)

    try:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "libsqlite3" in line:
                return line.split()[-1]
    except OSError:
        pass
    pytest.skip("SQLite is part of this Python: nothing can stand below it")
