"""What is done with the files of the disk tier, in whatever thread: every call here may block.

A file that is being written has a name of its own (`.part`) and gets its last one when all of it,
index and trailer included, is on the disk: what is found under that name after a crash is whole,
or was damaged since.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import time
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from pathlib import Path
from typing import Final, NamedTuple

from moqt.track.stored import Buffer, StoredObject, buffer_length
from moqt.values.names import FullTrackName, Location, location_after, location_before
from moqt.wire.objects import ObjectHeader
from relay.disk.records import (
    END,
    MAGIC,
    MAX_SUMMARY,
    ROW,
    TRAILER,
    Damaged,
    Kept,
    Summary,
    decode_summary,
    encode_summary,
    head_of,
    read_record,
)

LOCK: Final = "lock"
SUFFIX: Final = ".track"
PART: Final = ".part"
MAX_BUFFERS: Final = 512
"""Buffers of one system call; POSIX lets at least 16 through, Linux 1,024."""

_Row = tuple[Location, int, int, int]
"""Where an Object is: its Location, the descriptor of its file, the record's offset and octets."""


class InUse(Exception):
    """Another process has the folder; the message is a sentence."""


def file_name(scope: str, name: FullTrackName) -> str:
    """One for each track, of which nothing can be read off."""
    told = hashlib.sha256()
    for part in (scope.encode(), *name.namespace, name.name):
        told.update(len(part).to_bytes(8, "little") + part)
    return told.hexdigest()[:40]


@dataclass(slots=True, eq=False)
class Sealed:
    """A file that was finished."""

    path: Path
    number: int
    octets: int
    """Of the file."""
    index: int
    """Where its index begins."""
    rows: int
    index_crc: int
    checked: bool = False
    """The index has its checksum."""


class Found(NamedTuple):
    """A file that was there at the start."""

    summary: Summary
    sealed: Sealed
    used: float
    """When it was written or read last, in seconds of the epoch."""


class Read(NamedTuple):
    """What of a range was read: `objects` are all there are up to `until`."""

    objects: list[Kept]
    until: Location


class Folder:
    """The folder of one relay."""

    def __init__(self, path: Path) -> None:
        """Make it, unless it is there, and take it. Raises OSError, and InUse."""
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise InUse(f"{path} is in use by another relay: each needs a folder of its own") from (
                None
            )

    def close(self) -> None:
        """Another may take it."""
        os.close(self._lock)

    def part(self, scope: str, name: FullTrackName, number: int) -> Part:
        """A file to be written; of two of one track the one with the larger `number` counts."""
        of = f"{file_name(scope, name)}.{number}"
        return Part(self.path / f"{of}{PART}", self.path / f"{of}{SUFFIX}", number)

    def scan(self) -> tuple[list[Found], int]:
        """What is there, the least recently used first, and how many files are of no use. What is
        damaged is removed, as is what was not finished; what cannot be read is left."""
        found: list[Found] = []
        bad = 0
        with os.scandir(self.path) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.name.endswith(PART):
                    remove(path)
                elif entry.name.endswith(SUFFIX):
                    try:
                        found.append(_look(path))
                    except Damaged:
                        bad += 1
                        remove(path)
                    except OSError:
                        bad += 1
        return sorted(found, key=lambda each: each.used), bad


@dataclass(slots=True, eq=False)
class Part:
    """A file that is being written, by one thread at a time."""

    path: Path
    target: Path
    number: int
    octets: int = 0
    """Written so far."""
    _order: array[int] = field(default_factory=lambda: array("Q"))

    def write(self, objects: Sequence[tuple[StoredObject, float]]) -> None:
        """Append Objects, each with when it came. Raises OSError: the file is of no use then."""
        buffers: list[Buffer] = []
        at = self.octets
        if not at:
            buffers.append(MAGIC)
            at = len(MAGIC)
        for stored, arrived in objects:
            group, number = stored.location
            header = ObjectHeader(
                group, number, stored.subgroup, None, stored.properties, stored.length
            )
            parts = list(stored.parts)
            head = head_of(header, stored.priority, arrived, parts)
            size = len(head) + stored.length
            self._order.extend((group, number, at, size))
            buffers += [head, *parts]
            at += size
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = os.open(self.path, flags, 0o600)
        try:
            write_all(descriptor, buffers)
        finally:
            os.close(descriptor)
        self.octets = at

    def seal(self, summary: Summary) -> Sealed:
        """Nothing more is to be written: give it its name. Raises OSError."""
        rows = sorted(zip(*[iter(self._order)] * 4, strict=True))
        index = b"".join(ROW.pack(*row) for row in rows)
        text = encode_summary(summary)
        crc = zlib.crc32(index)
        begin = self.octets or len(MAGIC)
        trailer = TRAILER.pack(begin, len(index), crc, len(text), zlib.crc32(text), END)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            first: list[Buffer] = [] if self.octets else [MAGIC]
            write_all(descriptor, [*first, index, text, trailer])
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        touch(self.path)
        os.replace(self.path, self.target)
        _sync_folder(self.target.parent)
        octets = begin + len(index) + len(text) + len(trailer)
        self._order = array("Q")  # whoever has written it may stay for longer
        return Sealed(self.target, self.number, octets, begin, len(rows), crc, checked=True)

    def remove(self) -> None:
        remove(self.path)


def write_all(descriptor: int, buffers: Sequence[Buffer]) -> None:
    """Every octet, however little each call takes. Raises OSError."""
    for begin in range(0, len(buffers), MAX_BUFFERS):
        waiting = [each for each in buffers[begin : begin + MAX_BUFFERS] if buffer_length(each)]
        while waiting:
            written = os.writev(descriptor, waiting)
            while waiting and written >= buffer_length(waiting[0]):
                written -= buffer_length(waiting.pop(0))
            if waiting and written:
                waiting[0] = memoryview(waiting[0]).cast("B")[written:]


def remove(path: Path) -> None:
    """It is of no use, and need not be there."""
    with contextlib.suppress(OSError):
        path.unlink()


def read_range(files: Sequence[Sealed], start: Location, end: Location, octets: int) -> Read:
    """The Objects of [start, end] in these files, in order, up to about so many octets, one at
    least.

    Raises Damaged for a file that is not what was written, OSError for one that cannot be read.
    """
    with contextlib.ExitStack() as opened:
        each = [_rows_from(opened, sealed, start) for sealed in files]
        objects: list[Kept] = []
        for at, descriptor, offset, size in merge(*each):
            if at > end:
                break
            if objects and objects[-1].header.location == at:
                continue
            if objects and octets <= 0:
                return Read(objects, location_before(at))
            octets -= size
            objects.append(read_record(os.pread(descriptor, size, offset), at))
        return Read(objects, end)


def read_last(files: Sequence[Sealed], at: Location) -> Read:
    """The last Object at `at` or before it, if there is one. Raises as `read_range`."""
    with contextlib.ExitStack() as opened:
        held: list[_Row] = []
        for sealed in files:
            descriptor = _open(opened, sealed)
            row = _first_row(descriptor, sealed, location_after(at))
            if row:
                held.append(next(_rows(descriptor, sealed, row - 1)))
        if not held:
            return Read([], at)
        found, descriptor, offset, size = max(held)
        return Read([read_record(os.pread(descriptor, size, offset), found)], found)


def _open(opened: contextlib.ExitStack, sealed: Sealed) -> int:
    descriptor = os.open(sealed.path, os.O_RDONLY)
    opened.callback(os.close, descriptor)
    _check_index(descriptor, sealed)
    return descriptor


def _rows_from(opened: contextlib.ExitStack, sealed: Sealed, start: Location) -> Iterator[_Row]:
    descriptor = _open(opened, sealed)
    return _rows(descriptor, sealed, _first_row(descriptor, sealed, start))


def touch(path: Path) -> None:
    """It is used: after a restart it is not the first to go. The kernel's own clock of files stands
    still for some milliseconds, in which many may be written."""
    now = time.time_ns()
    with contextlib.suppress(OSError):
        os.utime(path, ns=(now, now))


def _check_index(descriptor: int, sealed: Sealed) -> None:
    if sealed.checked:
        return
    crc, at, left = 0, sealed.index, sealed.rows * ROW.size
    while left:
        part = os.pread(descriptor, min(left, 1 << 20), at)
        if not part:
            raise Damaged("the index is cut off")
        crc, at, left = zlib.crc32(part, crc), at + len(part), left - len(part)
    if crc != sealed.index_crc:
        raise Damaged("the index does not have its checksum")
    sealed.checked = True


def _first_row(descriptor: int, sealed: Sealed, start: Location) -> int:
    """The first row at `start` or behind it."""
    low, high = 0, sealed.rows
    while low < high:
        middle = (low + high) // 2
        row = os.pread(descriptor, 16, sealed.index + middle * ROW.size)
        if len(row) < 16:
            raise Damaged("the index is cut off")
        if struct.unpack("<QQ", row) < start:
            low = middle + 1
        else:
            high = middle
    return low


def _rows(descriptor: int, sealed: Sealed, first: int) -> Iterator[_Row]:
    while first < sealed.rows:
        count = min(sealed.rows - first, 256)
        octets = os.pread(descriptor, count * ROW.size, sealed.index + first * ROW.size)
        if len(octets) < count * ROW.size:
            raise Damaged("the index is cut off")
        for group, number, offset, size in ROW.iter_unpack(octets):
            if offset + size > sealed.index:
                raise Damaged("the index names a record that is not there")
            yield Location(group, number), descriptor, offset, size
        first += count


def _look(path: Path) -> Found:
    """What a file says it is. Raises Damaged, OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        state = os.fstat(descriptor)
        tail = os.pread(descriptor, 4096, max(0, state.st_size - 4096))
        if len(tail) < TRAILER.size:
            raise Damaged("it is too short")
        index, length, index_crc, summary_length, crc, end = TRAILER.unpack(tail[-TRAILER.size :])
        size = index + length + summary_length + TRAILER.size
        if end != END or size != state.st_size or length % ROW.size:
            raise Damaged("it has no trailer that is right")
        if summary_length > MAX_SUMMARY:
            raise Damaged("its summary is too long")
        text = os.pread(descriptor, summary_length, index + length)
        if zlib.crc32(text) != crc:
            raise Damaged("its summary does not have its checksum")
    finally:
        os.close(descriptor)
    summary = decode_summary(text)
    of, _, number = path.stem.partition(".")
    if of != file_name(summary.scope, summary.name) or not number.isdecimal():
        raise Damaged("it has the name of another track")
    sealed = Sealed(path, int(number), state.st_size, index, length // ROW.size, index_crc)
    return Found(summary, sealed, state.st_mtime)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
