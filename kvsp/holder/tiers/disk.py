"""The disk tier: one file per block, there as a whole or not at all.

A part is written to a temporary name, synced, renamed and its folder synced. Whatever
a crash leaves behind is found and removed at the next start. Reads keep working on a
file that is evicted meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from kvsp.blocks.layout import Octets
from kvsp.holder.store import BlockInfo, Part
from kvsp.holder.tiers.tiers import (
    PIECE,
    TAIL_OCTETS,
    PartLostError,
    PartReader,
    PartWriter,
    TierFullError,
    TierUnavailableError,
    block_of,
    parse_trailer,
    part_name,
    trailer,
    trailer_octets,
)
from kvsp.holder.uninterrupted import uninterrupted
from kvsp.names.codes import Tier
from kvsp.names.uris import BlockId

_P = ParamSpec("_P")
_T = TypeVar("_T")
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_INCOMING: Final = "incoming"


class Files:
    """The system calls that change the disk, one method each (tests end them half-way)."""

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


class DiskTier:
    """Parts in files below a folder that belongs to one holder process."""

    tier = Tier.DISK

    def __init__(
        self, root: Path, *, files: Files | None = None, verify_digests: bool = False
    ) -> None:
        """`verify_digests` reads every file at start-up instead of its ends only."""
        self.root = root
        self.removed = 0
        """Files a crash left behind, or damaged ones, removed at start-up."""

        self._files = files or Files()
        self._verify_digests = verify_digests

    async def start(self) -> list[tuple[BlockId, BlockInfo, Part]]:
        try:
            return await uninterrupted(self._start)
        except OSError as error:
            # who starts it has to know which file it is; whoever asks for a block has not
            where = error.filename or self.root
            raise TierUnavailableError(f"{where}: {error.strerror or error}") from error

    async def create(self) -> PartWriter:
        return _DiskWriter(self, self.root / _INCOMING / secrets.token_hex(16))

    async def open(self, block: BlockId, part: Part) -> PartReader:
        reader = _DiskReader()
        try:
            await _in_thread(reader.open, self.root / part_name(block), part.octets)
        except BaseException:
            reader.close()
            raise
        return reader

    async def delete(self, block: BlockId) -> None:
        path = self.root / part_name(block)
        await _in_thread(self._files.unlink, path)
        # an eviction that a crash undoes is found again at start-up: no need to sync

    def _start(self) -> list[tuple[BlockId, BlockInfo, Part]]:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in (_INCOMING, "blocks"):
            (self.root / name).mkdir(mode=0o700, exist_ok=True)
        self._claim()
        for path in (self.root / _INCOMING).iterdir():
            self._remove(path)
        self._probe()
        return list(self._scan())

    def _claim(self) -> None:
        """Keep other processes out for as long as this one lives."""
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise TierUnavailableError(f"{self.root} belongs to another process") from None

    def _probe(self) -> None:
        path = self.root / _INCOMING / "probe"
        descriptor = self._files.create(path)
        try:
            self._files.write(descriptor, memoryview(b"probe"))
            self._files.sync(descriptor)
        finally:
            os.close(descriptor)
            self._files.unlink(path)

    def _scan(self) -> Iterator[tuple[BlockId, BlockInfo, Part]]:
        found: list[tuple[float, Path, BlockId]] = []
        for path in (self.root / "blocks").rglob("*"):
            if path.is_dir() and not path.is_symlink():
                continue
            block = block_of(path.relative_to(self.root).as_posix())
            if block is None or path.is_symlink():
                self._remove(path)
            else:
                found.append((path.stat().st_mtime, path, block))
        for _, path, block in sorted(found):
            try:
                info, part = self._inspect(path)
            except PartLostError:
                self._remove(path)
            else:
                yield block, info, part

    def _inspect(self, path: Path) -> tuple[BlockInfo, Part]:
        with path.open("rb") as file:
            octets = file.seek(0, os.SEEK_END)
            if octets < TAIL_OCTETS:
                raise PartLostError("the file is too short")
            file.seek(octets - TAIL_OCTETS)
            tail = file.read(TAIL_OCTETS)
            length = trailer_octets(tail)
            if length > octets - TAIL_OCTETS:
                raise PartLostError("the file is too short")
            file.seek(octets - TAIL_OCTETS - length)
            info, part = parse_trailer(file.read(length), tail, octets)
            file.seek(0)
            header = part.header.encoded
            if file.read(len(header)) != header:
                raise PartLostError("the container's header is damaged")
            if self._verify_digests:
                _check_digest(file.fileno(), part)
        return info, part

    def _remove(self, path: Path) -> None:
        self._files.unlink(path)
        self.removed += 1

    def publish(self, temporary: Path, block: BlockId) -> None:
        """Give a synced file its name, durably."""
        target = self.root / part_name(block)
        missing = [folder for folder in target.parents if not folder.exists()]
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self._files.make_folder(folder)
            self._files.sync_folder(folder.parent)
        self._files.rename(temporary, target)
        self._files.sync_folder(target.parent)


class _DiskReader:
    def __init__(self) -> None:
        self._descriptor = -1

    def open(self, path: Path, octets: int) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise PartLostError("the file is not there") from None
        if os.fstat(self._descriptor).st_size < octets:
            raise PartLostError("the file was cut short")

    async def read(self, offset: int, octets: int) -> Octets:
        data = await _in_thread(_pread, self._descriptor, octets, offset)
        if len(data) != octets:
            raise PartLostError("the file was cut short")
        return data

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _DiskWriter:
    """The descriptor is made, used and given up in threads that nothing interrupts."""

    def __init__(self, disk: DiskTier, path: Path) -> None:
        self._disk = disk
        self._files = disk._files
        self._path = path
        self._descriptor = -1

    async def write(self, octets: Octets) -> None:
        await _in_thread(self._write, octets)

    async def commit(self, block: BlockId, info: BlockInfo, part: Part) -> None:
        await _in_thread(self._commit, block, trailer(info, part))

    async def abort(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            await _in_thread(self._abort, descriptor)

    def _write(self, octets: Octets) -> None:
        if self._descriptor < 0:
            self._descriptor = self._files.create(self._path)
        view = memoryview(octets).cast("B")
        while view:
            view = view[self._files.write(self._descriptor, view) :]

    def _commit(self, block: BlockId, tail: bytes) -> None:
        self._write(tail)
        self._files.sync(self._descriptor)
        self._disk.publish(self._path, block)
        os.close(self._descriptor)
        self._descriptor = -1

    def _abort(self, descriptor: int) -> None:
        os.close(descriptor)
        self._files.unlink(self._path)


def _pread(descriptor: int, octets: int, offset: int) -> bytes:
    return os.pread(descriptor, octets, offset)


def _check_digest(descriptor: int, part: Part) -> None:
    digest = hashlib.sha256()
    for offset in range(0, part.octets, PIECE):
        digest.update(os.pread(descriptor, min(PIECE, part.octets - offset), offset))
    if digest.digest() != part.container_digest:
        raise PartLostError("the container's digest does not match")


async def _in_thread(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    try:
        return await uninterrupted(call, *args, **kwargs)
    except OSError as error:
        if error.errno in _FULL:
            raise TierFullError("the disk is full") from error
        raise TierUnavailableError(f"the disk: {error.strerror or error}") from error
