"""What a retrieval that was cut short leaves for the next one (KVCS "Verification and Recovery").

Beside the file to be written stand two others until it is whole: `OUT.resume`, the KV file in the
making, and `OUT.resume-log`, which says of each Object in it that it was verified, with its
digest. What the log says is compared with the octets before it is believed, so that neither a
process that was killed nor a machine that lost its power leaves anything wrong.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

from kvcs.names.codes import Component
from kvcs.names.namespace import PublicationNamespace
from kvcs.names.payload import data_digest
from kvcs.names.tracks import DataTrack
from kvsp.blocks.kv_files import KvFileWriter
from kvsp.blocks.layout import Tensor, block_section
from kvsp.holder.uninterrupted import uninterrupted
from kvsp.names.errors import FileError
from kvsp.names.identity import Descriptor

_VERSION: Final = 1
_RECORD: Final = struct.Struct(">IIIB32s32s")
"""CRC-32 of the Track Name, layer, block, component, Data Digest, SHA-256 of the raw Data."""

_MAX_HEADER: Final = 4096
_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Origin:
    """The publication that Objects are of; members are hexadecimal."""

    publication: str
    anchor_key: str
    deterministic: bool

    @classmethod
    def of(cls, namespace: PublicationNamespace, deterministic: bool) -> Origin:
        return cls(namespace.publication_id.hex(), namespace.anchor_key.hex(), deterministic)

    def goes_with(self, other: Origin) -> bool:
        """Whether Objects of both may be combined: of the same one, or of deterministic ones."""
        same = self.anchor_key == other.anchor_key
        return same and (
            self.publication == other.publication or (self.deterministic and other.deterministic)
        )


class ResumeFile:
    """A KV file that is written as `FileDestination` does, and gone on with after an interruption.

    `load` first, which reads and hashes what there is (not on an event loop); then it is the
    destination of a retrieval, and `commit` gives the file its name and removes what stood
    beside it. Closed without, what was verified is kept.
    """

    said: str | None = None
    """What is to be said of what was found."""

    def __init__(
        self,
        path: str | Path,
        descriptor: Descriptor,
        *,
        scope_id: bytes,
        layers: range,
        most_tokens: int,
    ) -> None:
        """`layers` and at most `most_tokens` tokens are to be written."""
        self._path = Path(os.path.realpath(path))
        self._descriptor = descriptor
        self._scope_id = scope_id.hex()
        self._layers = layers
        self._most = most_tokens
        name = self._path.name
        if len(os.fsencode(name)) + len(".resume-log") > os.pathconf(
            self._path.parent, "PC_NAME_MAX"
        ):
            name = f".{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}"
        self.partial = self._path.with_name(f"{name}.resume")
        self.log = self._path.with_name(f"{name}.resume-log")
        self._log: int | None = None
        self._writer: KvFileWriter | None = None
        self._tokens = 0
        self._origin: Origin | None = None
        self._held: dict[tuple[int, int, int], bytes] = {}
        self._taken_up = False
        """Whether what is written from `begin` on is noted."""
        self._overwritten = False
        """Whether something was written and not noted: what is held may be there no more."""
        self._noted = False

    @property
    def publication(self) -> bytes | None:
        """The Publication ID of what is held."""
        return bytes.fromhex(self._origin.publication) if self._origin and self._held else None

    def load(self) -> None:
        """Take up what an earlier retrieval left. Raises FileError when the files cannot be made,
        or another process writes them."""
        self._log = self._locked()
        data = os.pread(self._log, os.fstat(self._log).st_size, 0)
        if not data:
            return
        try:
            self._read(data)
        except (ValueError, KeyError, TypeError, RecursionError, FileError) as error:
            why = f"its log has no {error}" if isinstance(error, KeyError) else error
            self.said = f"{self.partial}: {why}; everything is retrieved anew"
            self._void()

    # -- a destination -------------------------------------------------------------------

    def begin(self, tokens: int, layers: range) -> None:
        """Raises FileError when there is no room for the file."""
        self._taken_up = False
        if self._writer is not None and tokens == self._tokens and layers == self._layers:
            return
        if self._held:
            self.said = (
                f"{self.partial}: it is of {self._tokens} tokens, now {tokens} are to be had; "
                "everything is retrieved anew"
            )
        self._void()
        self._tokens, self._layers = tokens, layers
        self._writer = self._open()

    def arrays(self, layer: int) -> tuple[Tensor, Tensor]:
        if self._writer is None:
            raise ValueError("the file was not begun")
        self._overwritten |= not self._taken_up
        return self._writer.k(layer), self._writer.v(layer)

    def take_up(self, origin: Origin) -> Mapping[tuple[int, int, int], bytes]:
        """The Data Digests of the Objects held that may be combined with those of `origin`, by
        `key_of`; Objects of it are noted from now on."""
        self._taken_up = True
        if self._origin is not None and self._origin.goes_with(origin):
            return {} if self._overwritten else self._held
        if self._held:
            self.said = (
                f"{self.partial}: it is of publication {self._origin and self._origin.publication}"
                f", now {origin.publication} is to be had; everything is retrieved anew"
            )
        self._held = {}
        self._origin = origin
        header = {
            "kvcs_resume": _VERSION,
            "scope_id": self._scope_id,
            "compat_id": self._descriptor.compat_id.hex(),
            "tokens": self._tokens,
            "first_layer": self._layers.start,
            "last_layer": self._layers.stop - 1,
            **asdict(origin),
        }
        assert self._log is not None
        os.ftruncate(self._log, 0)
        os.lseek(self._log, 0, os.SEEK_SET)
        os.write(self._log, json.dumps(header).encode("ascii") + b"\n")
        return self._held

    def note(self, track: DataTrack, layer: int, block: int, digest: bytes, raw: bytes) -> None:
        """An Object was verified and written: its Data Digest, and the SHA-256 of its raw Data."""
        assert self._log is not None
        key = key_of(track, layer, block)
        os.write(self._log, _RECORD.pack(*key, track.component, digest, raw))
        self._held.pop(key, None)  # what was there is so no more
        self._noted = True

    def commit(self, tokens: int | None = None) -> None:
        """Give the file its name, and remove what stood beside it; `tokens` are those it was
        begun for. Raises FileError, ValueError when nothing was written."""
        if self._writer is None:
            raise ValueError("the file was not begun")
        self._writer.commit()
        self._writer = None
        self.log.unlink(missing_ok=True)
        self._close()

    async def acommit(self, tokens: int | None = None) -> None:
        """`commit` beside the event loop: the disk takes seconds for some GB. Once begun it is
        carried to its end, also when the task is cancelled. Raises as `commit`."""
        await uninterrupted(self.commit, tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Keep what was verified, unless there is nothing or it was committed."""
        if self._log is None:
            return
        if not self._noted and not self._held:
            self._void()
            self.log.unlink(missing_ok=True)
        self._close()

    # -- inside --------------------------------------------------------------------------

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.abort()
            self._writer = None
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _void(self) -> None:
        """Forget what is held."""
        if self._writer is not None:
            self._writer.abort()
            self._writer = None
        self.partial.unlink(missing_ok=True)
        self._held, self._origin, self._noted = {}, None, False
        self._overwritten = False

    def _open(self) -> KvFileWriter:
        return KvFileWriter(
            self._path,
            self._descriptor,
            tokens=self._tokens,
            layers=self._layers,
            partial=self.partial,
        )

    def _locked(self) -> int:
        """The log, which no other process has."""
        while True:
            try:
                log = os.open(
                    self.log, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
            except OSError as error:
                raise FileError(f"{self.log}: {error.strerror or error}") from error
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # whoever had it may have been done, and have removed it
                if os.path.samestat(os.fstat(log), os.stat(self.log)):
                    return log
            except FileNotFoundError:
                pass
            except OSError:
                os.close(log)
                raise FileError(
                    f"{self.log}: another process retrieves into {self._path.name}"
                ) from None
            os.close(log)

    def _read(self, data: bytes) -> None:
        """Raises ValueError, KeyError or TypeError saying why nothing is of use."""
        for path in (self.log, self.partial):
            _check_ours(path)
        line, newline, records = data.partition(b"\n")
        if not newline or len(line) > _MAX_HEADER:
            raise ValueError("what stands in its log is not whole")
        header = json.loads(line)
        if not isinstance(header, dict) or header.get("kvcs_resume") != _VERSION:
            raise ValueError("its log is of no version known here")
        mine = (self._scope_id, self._descriptor.compat_id.hex())
        layers = range(int(header["first_layer"]), int(header["last_layer"]) + 1)
        if (header["scope_id"], header["compat_id"]) != mine or layers != self._layers:
            raise ValueError("it is of another scope, descriptor or other layers")
        tokens = int(header["tokens"])
        if not 0 < tokens <= self._most or tokens % self._descriptor.block_tokens:
            raise ValueError(f"it is of {tokens} tokens, which are not these")
        self._tokens = tokens
        self._origin = Origin(
            str(header["publication"]), str(header["anchor_key"]), header["deterministic"] is True
        )
        section = self._descriptor.section_octets(tokens)
        if self.partial.stat().st_size < 2 * len(layers) * section:
            raise ValueError("it is not whole")
        self._writer = self._open()
        torn = len(records) % _RECORD.size
        for values in _RECORD.iter_unpack(records[: len(records) - torn]):
            self._judge(*values)
        if self._log is not None:
            os.lseek(self._log, len(data) - torn, os.SEEK_SET)
            os.ftruncate(self._log, len(data) - torn)

    def _judge(
        self, name: int, layer: int, block: int, component: int, digest: bytes, raw: bytes
    ) -> None:
        """Believe a record when the octets are what it says."""
        rows = self._descriptor.block_tokens
        if layer not in self._layers or block >= self._tokens // rows:
            return
        if component not in tuple(Component) or self._writer is None:
            return
        parts = [
            block_section(tensor, block, rows)
            for half, tensor in (
                (Component.K, self._writer.k(layer)),
                (Component.V, self._writer.v(layer)),
            )
            if component in (half, Component.KV)
        ]
        if data_digest(*parts) == raw:
            self._held[name, layer, block] = digest


def key_of(track: DataTrack, layer: int, block: int) -> tuple[int, int, int]:
    """What an Object is called here; `block` counts from the first of the prefix."""
    return zlib.crc32(track.name), layer, block


def _check_ours(path: Path) -> None:
    """Raises ValueError for a file that others may have written."""
    with contextlib.suppress(FileNotFoundError):
        held = os.stat(path, follow_symlinks=False)
        if not stat.S_ISREG(held.st_mode) or held.st_uid != os.geteuid() or held.st_mode & _OTHERS:
            raise ValueError("others may have written it")
        return
    raise ValueError("there is none beside its log")
