"""Where the layers of a cache are written: new arrays, the caller's arrays, or a KV file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

from kvcs.keeping.resume_file import Origin
from kvcs.names.tracks import DataTrack
from kvsp.blocks.kv_files import KvFileWriter
from kvsp.blocks.layout import Tensor, allocate
from kvsp.blocks.tensors import as_array
from kvsp.holder.uninterrupted import uninterrupted
from kvsp.names.identity import Descriptor


class Destination(Protocol):
    """Where the layers of a cache are written, each Object once, at its place."""

    def begin(self, tokens: int, layers: range) -> None:
        """`layers` of `tokens` tokens will be written; what was written before is void."""

    def arrays(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of `layer` to fill, `[tokens or more, kv_heads, head_dim]`, writable."""
        ...


@runtime_checkable
class Resumable(Destination, Protocol):
    """A destination that has Objects of an earlier retrieval, and notes those of this one."""

    @property
    def publication(self) -> bytes | None:
        """The Publication ID of what is held."""
        ...

    def take_up(self, origin: Origin) -> Mapping[tuple[int, int, int], bytes]:
        """The Data Digests of the Objects held that may be combined with those of `origin`, by
        `key_of`; Objects of it are noted from now on. Called after `begin`."""
        ...

    def note(self, track: DataTrack, layer: int, block: int, digest: bytes, raw: bytes) -> None:
        """An Object was verified and written: its Data Digest, and the SHA-256 of its raw Data."""


class MemoryDestination:
    """New arrays for every layer; held no longer than the application holds them."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor
        self._tokens = 0

    def begin(self, tokens: int, layers: range) -> None:
        self._tokens = tokens

    def arrays(self, layer: int) -> tuple[Tensor, Tensor]:
        return allocate(self._descriptor, self._tokens), allocate(self._descriptor, self._tokens)


class ArrayDestination:
    """The caller's arrays, by layer, or torch tensors on the CPU; they may have more rows than the
    cache has tokens."""

    def __init__(self, arrays: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Raises ValueError for what is no array, and cannot be had as one."""
        self._arrays = {layer: (as_array(k), as_array(v)) for layer, (k, v) in arrays.items()}

    def begin(self, tokens: int, layers: range) -> None:
        missing = [layer for layer in layers if layer not in self._arrays]
        if missing:
            raise ValueError(f"there are no arrays for layer {missing[0]}")

    def arrays(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._arrays[layer]


class FileDestination:
    """A KV file, written through its memory map; it appears only with `commit`.

    with FileDestination("out.safetensors", descriptor) as out: ...; out.commit()
    """

    def __init__(self, path: str | Path, descriptor: Descriptor) -> None:
        self._path = Path(path)
        self._descriptor = descriptor
        self._writer: KvFileWriter | None = None

    def begin(self, tokens: int, layers: range) -> None:
        """Raises FileError when there is no room for the file."""
        self.abort()
        self._writer = KvFileWriter(self._path, self._descriptor, tokens=tokens, layers=layers)

    def arrays(self, layer: int) -> tuple[Tensor, Tensor]:
        writer = self._begun()
        return writer.k(layer), writer.v(layer)

    @property
    def tokens(self) -> int:
        """Tokens that there is room for; 0 when nothing was begun."""
        return self._writer.tokens if self._writer is not None else 0

    def save(self, tokens: int) -> None:
        """Give the name to a copy of the first `tokens` tokens, and go on: what is written into
        the arrays meanwhile does no harm. Raises FileError, ValueError when nothing was begun."""
        writer = self._begun()
        with KvFileWriter(
            self._path, self._descriptor, tokens=tokens, layers=writer.layers
        ) as copy:
            for layer in writer.layers:
                copy.k(layer)[:] = writer.k(layer)[:tokens]
                copy.v(layer)[:] = writer.v(layer)[:tokens]
            copy.commit()

    def commit(self, tokens: int | None = None) -> None:
        """Give the file its name: with `tokens` one of the first so many, when it was begun for
        more. Raises FileError, ValueError when nothing was written."""
        writer = self._begun()
        if tokens is None or tokens == writer.tokens:
            writer.commit()
            self._writer = None
        else:
            self.save(tokens)
            self.abort()

    def _begun(self) -> KvFileWriter:
        if self._writer is None:
            raise ValueError("the file was not begun")
        return self._writer

    async def acommit(self, tokens: int | None = None) -> None:
        """`commit` beside the event loop: the disk takes seconds for some GB. Once begun it is
        carried to its end, also when the task is cancelled. Raises as `commit`."""
        await uninterrupted(self.commit, tokens)

    def abort(self) -> None:
        """Remove what was written; harmless after `commit`."""
        if self._writer is not None:
            self._writer.abort()
            self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()
