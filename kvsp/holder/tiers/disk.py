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
import logging
import os
import secrets
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from kvsp.blocks.layout import Octets
from kvsp.files import Files
from kvsp.holder.store import BlockInfo, Part
from kvsp.holder.tiers.tiers import (
    PIECE,
    SUFFIX,
    TAIL_OCTETS,
    PartLostError,
    PartReader,
    PartWriter,
    Span,
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

logger = logging.getLogger("kvsp.holder")

_P = ParamSpec("_P")
_T = TypeVar("_T")
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_THE_FILE: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENODEV, errno.ENXIO}
)
"""Why a file cannot be read now that may be as good as ever."""

_INCOMING: Final = "incoming"
_QUARANTINE: Final = "quarantine"
DEFAULT_QUARANTINE_OCTETS: Final = 256 << 20


class DiskTier:
    """Parts in files below a folder that belongs to one holder process."""

    tier = Tier.DISK
    lasts = True

    def __init__(
        self,
        root: Path,
        *,
        files: Files | None = None,
        verify_digests: bool = False,
        quarantine_octets: int = DEFAULT_QUARANTINE_OCTETS,
    ) -> None:
        """`verify_digests` reads every file at start-up instead of its ends only. Damaged
        files of up to `quarantine_octets` in all are kept, the newest ones."""
        self.root = root
        self.removed = 0
        """Files a crash left behind, removed at start-up."""

        self.damaged = 0
        """Damaged or unreadable files found at start-up, and taken out of the way."""

        self._files = files or Files()
        self._verify_digests = verify_digests
        self._quarantine_octets = quarantine_octets

    async def start(self) -> list[tuple[BlockId, BlockInfo, Part]]:
        try:
            return await uninterrupted(self._start)
        except OSError as error:
            # who starts it has to know which file it is; whoever asks for a block has not
            where = error.filename or self.root
            raise TierUnavailableError(f"{where}: {error.strerror or error}") from error

    async def create(self) -> PartWriter:
        return _DiskWriter(self, self.root / _INCOMING / secrets.token_hex(16))

    async def open(self, block: BlockId, part: Part, span: Span | None = None) -> PartReader:
        reader = _DiskReader(self._files)
        try:
            await _in_thread(reader.open, self.root / part_name(block), part.octets)
        except BaseException:
            reader.close()
            raise
        return reader

    async def delete(self, block: BlockId, part: Part) -> None:
        path = self.root / part_name(block)
        await _in_thread(self._files.unlink, path)
        # an eviction that a crash undoes is found again at start-up: no need to sync

    async def quarantine(self, block: BlockId, part: Part) -> bool:
        return await _in_thread(self._set_aside, self.root / part_name(block))

    async def free(self) -> int | None:
        try:
            about = await uninterrupted(os.statvfs, self.root)
        except OSError:
            return None
        return about.f_bavail * about.f_frsize

    def _start(self) -> list[tuple[BlockId, BlockInfo, Part]]:
        for name in (_INCOMING, "blocks"):
            self._make_folder(self.root / name)
        self._claim()
        for path in (self.root / _INCOMING).iterdir():
            self._remove(path)
        try:
            self._probe()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            logger.warning("%s is full: what is there is served, the oldest of it goes", self.root)
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
        found: list[tuple[float, str, BlockId]] = []
        # names alone, without a Path for each: a start sees all of them
        below = len(os.path.join(self.root, ""))
        for folder, folders, files in os.walk(self.root / "blocks", onerror=_unlisted):
            for name in folders:
                if os.path.islink(os.path.join(folder, name)):
                    self._remove(Path(folder, name))
            for name in files:
                place = os.path.join(folder, name)
                block = block_of(place[below:])
                if block is None or os.path.islink(place):
                    self._remove(Path(place))
                else:
                    found.append((_modified(place), place, block))
        for _, name, block in sorted(found):
            path = Path(name)
            try:
                info, part = self._inspect(path)
            except (PartLostError, OSError) as error:
                if isinstance(error, OSError) and error.errno in _NOT_THE_FILE:
                    raise
                self._put_away(path, error)
            else:
                yield block, info, part

    def _inspect(self, path: Path) -> tuple[BlockInfo, Part]:
        descriptor = self._files.open(path)
        try:
            octets = os.fstat(descriptor).st_size
            if octets < TAIL_OCTETS:
                raise PartLostError("the file is too short")
            tail = self._files.read(descriptor, TAIL_OCTETS, octets - TAIL_OCTETS)
            length = trailer_octets(tail)
            if length > octets - TAIL_OCTETS:
                raise PartLostError("the file is too short")
            text = self._files.read(descriptor, length, octets - TAIL_OCTETS - length)
            info, part = parse_trailer(text, tail, octets)
            header = part.header.encoded
            if self._files.read(descriptor, len(header), 0) != header:
                raise PartLostError("the container's header is damaged")
            if self._verify_digests:
                self._check_digest(descriptor, part)
        finally:
            os.close(descriptor)
        return info, part

    def _check_digest(self, descriptor: int, part: Part) -> None:
        digest = hashlib.sha256()
        for offset in range(0, part.octets, PIECE):
            digest.update(self._files.read(descriptor, min(PIECE, part.octets - offset), offset))
        if digest.digest() != part.container_digest:
            raise PartLostError("the container's digest does not match")

    def _put_away(self, path: Path, error: Exception) -> None:
        """One block's fault stays one block's: the others are served."""
        self.damaged += 1
        try:
            kept = self._set_aside(path)
        except OSError as refused:
            logger.warning("%s: %s; it stays, and is not served: %s", path, error, refused)
        else:
            logger.warning("%s: %s; %s", path, error, f"in {_QUARANTINE}" if kept else "removed")

    def _set_aside(self, path: Path) -> bool:
        """Move a damaged file to the quarantine, which loses its oldest ones for it."""
        folder = self.root / _QUARANTINE
        try:
            octets = path.lstat().st_size
        except FileNotFoundError:
            return False
        if octets > self._quarantine_octets or path.is_dir():
            if path.is_dir():
                raise OSError(errno.EISDIR, "it is a folder")
            self._files.unlink(path)
            return False
        folder.mkdir(mode=0o700, exist_ok=True)
        kept = []
        for each in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another thread made room, too
                kept.append((each.stat(), each))
        kept.sort(key=_age)
        total = octets + sum(about.st_size for about, _ in kept)
        for about, each in kept:
            if total > self._quarantine_octets:
                self._files.unlink(each)
                total -= about.st_size
        self._files.rename(path, folder / f"{path.stem}.{secrets.token_hex(4)}")
        return True

    def _remove(self, path: Path) -> None:
        self._files.unlink(path)
        self.removed += 1

    def _make_folder(self, path: Path) -> None:
        """Have a folder, durably."""
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self._files.make_folder(folder)
            self._files.sync_folder(folder.parent)

    def publish(self, temporary: Path, block: BlockId) -> None:
        """Give a synced file its name, durably."""
        target = self.root / part_name(block)
        self._make_folder(target.parent)
        self._files.rename(temporary, target)
        try:
            self._files.sync_folder(target.parent)
        except OSError:
            # it may be undone by a crash: then it was never there, and is tried again
            self._files.rename(target, temporary)
            raise


class _DiskReader:
    def __init__(self, files: Files) -> None:
        self._files = files
        self._descriptor = -1

    def open(self, path: Path, octets: int) -> None:
        try:
            self._descriptor = self._files.open(path)
        except FileNotFoundError:
            raise PartLostError("the file is not there") from None
        except OSError as error:
            raise _unreadable(error) from error
        if os.fstat(self._descriptor).st_size < octets:
            raise PartLostError("the file was cut short")

    async def read(self, offset: int, octets: int) -> Octets:
        return await _in_thread(self._read, offset, octets)

    def _read(self, offset: int, octets: int) -> bytes:
        try:
            data = self._files.read(self._descriptor, octets, offset)
        except OSError as error:
            raise _unreadable(error) from error
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
        self._octets = 0
        """What was written whole; a write that failed half-way is done again from here."""

    async def write(self, octets: Octets) -> None:
        await _in_thread(self._write_whole, octets)

    async def commit(self, block: BlockId, info: BlockInfo, part: Part) -> None:
        await _in_thread(self._commit, block, trailer(info, part))

    async def abort(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            await _in_thread(self._abort, descriptor)

    def _write_whole(self, octets: Octets) -> None:
        self._write(octets)
        self._octets += len(memoryview(octets).cast("B"))

    def _write(self, octets: Octets) -> None:
        if self._descriptor < 0:
            self._descriptor = self._files.create(self._path)
        os.lseek(self._descriptor, self._octets, os.SEEK_SET)
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


def remove_oldest(root: Path, octets: int, spared: Collection[BlockId] = ()) -> int:
    """Remove the oldest blocks below the folder of a tier that nobody has open, `octets` of
    them at least if there are so many that are not `spared`; how many blocks."""
    removed = 0
    found = (
        (_modified(path), path)
        for path in (root / "blocks").rglob(f"*{SUFFIX}")
        if block_of(path.relative_to(root).as_posix()) not in spared
    )
    for _, path in sorted(found):
        if octets <= 0:
            break
        with contextlib.suppress(OSError):
            size = path.lstat().st_size
            path.unlink()
            octets -= size
            removed += 1
    return removed


def _unreadable(error: OSError) -> PartLostError | TierUnavailableError:
    """One file cannot be read: that is its own fault, unless it would befall any."""
    text = error.strerror or str(error)
    if error.errno in _NOT_THE_FILE:
        return TierUnavailableError(f"the disk: {text}")
    return PartLostError(f"the file cannot be read: {text}")


def _unlisted(error: OSError) -> None:
    """A folder that cannot be read is not one without blocks: a start without them would have the
    index forget them all."""
    raise error


def _modified(path: str | os.PathLike[str]) -> float:
    """When a file was written; long ago for one that does not say."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _age(kept: tuple[os.stat_result, Path]) -> int:
    return kept[0].st_mtime_ns


async def _in_thread(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    try:
        return await uninterrupted(call, *args, **kwargs)
    except OSError as error:
        if error.errno in _FULL:
            raise TierFullError("the disk is full") from error
        if error.errno == errno.EFBIG:
            raise TierFullError("the file system takes no file so large", file=True) from error
        raise TierUnavailableError(f"the disk: {error.strerror or error}") from error
