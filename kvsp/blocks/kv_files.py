"""KV files (safetensors), and files of token ids and of descriptors.

A KV file holds `layers.{l}.k` and `layers.{l}.v`, each `[tokens, kv_heads, head_dim]`,
and nothing else. The header is read here, not by a library, so that every offset is
checked before anything is mapped, and so that layers can be written while they arrive.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import shutil
import stat
import struct
import sys
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self, cast

import numpy as np

from kvsp.blocks.layout import Tensor
from kvsp.names import ijson
from kvsp.names.codes import ElementType
from kvsp.names.errors import DecodeError, FileError
from kvsp.names.identity import Descriptor, misspelt_members
from kvsp.names.private_files import beside, open_input
from kvsp.names.tokens import check_tokens

MAX_HEADER_OCTETS = 100_000_000
"""The limit of the safetensors format."""

MAX_TOKENS_FILE_OCTETS = 256 << 20
MAX_DESCRIPTOR_FILE_OCTETS = 8 << 20

_SAFETENSORS_TYPES: Final = {
    ElementType.FP16: "F16",
    ElementType.BF16: "BF16",
    ElementType.FP32: "F32",
    ElementType.FP8_E4M3: "F8_E4M3",
    ElementType.FP8_E5M2: "F8_E5M2",
    ElementType.INT8: "I8",
}
_LENGTH = struct.Struct("<Q")
_TENSOR_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,9})\.(k|v)")
_ALIGNMENT = 8
_METADATA = "__metadata__"
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors header; `start` and `stop` count from the data's start."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """A safetensors header: its tensors, its metadata, and where the data starts."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_start: int


def parse_header(octets: bytes | memoryview, file_octets: int) -> Header:
    """Read the header at the start of a safetensors file of `file_octets` octets.

    `octets` holds at least the header. Every tensor must lie inside the file, and
    together they cover the data without gap or overlap.
    Raises FileError with a sentence that does not name the file.
    """
    if len(octets) < _LENGTH.size or file_octets < _LENGTH.size:
        raise FileError("too short for a safetensors file")
    (length,) = _LENGTH.unpack_from(octets)
    if length > MAX_HEADER_OCTETS:
        raise FileError(
            f"not a safetensors file: the header would have {length} octets, "
            f"{MAX_HEADER_OCTETS} are allowed"
        )
    data_start = _LENGTH.size + length
    if data_start > file_octets or data_start > len(octets):
        raise FileError(
            f"truncated: the header ends at octet {data_start}, the file at {file_octets}"
        )
    try:
        tree = ijson.loads(bytes(octets[_LENGTH.size : data_start]))
    except DecodeError as error:
        raise FileError(f"the safetensors header is not JSON: {error.detail}") from None
    if not isinstance(tree, dict):
        raise FileError("the safetensors header is not a JSON object")
    metadata = tree.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FileError("the metadata is not an object of strings")
    tensors = {name: _entry(name, entry) for name, entry in tree.items()}
    _check_offsets(tensors, file_octets - data_start)
    return Header(tensors, metadata, data_start)


def _entry(name: str, entry: Any) -> TensorEntry:
    where = f"tensor {name[:80]!r}"
    if not isinstance(entry, dict):
        raise FileError(f"{where} has no description")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str):
        raise FileError(f"{where} has no dtype")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise FileError(f"{where} has a shape that is no list of counts")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise FileError(f"{where} has data_offsets that are no pair of counts")
    if offsets[0] > offsets[1]:
        raise FileError(f"{where} ends before it starts (data_offsets {offsets})")
    return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check_offsets(tensors: Mapping[str, TensorEntry], data_octets: int) -> None:
    position = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.stop > data_octets:
            raise FileError(
                f"truncated: tensor {name[:80]!r} ends at octet {entry.stop} of the data, "
                f"the file holds {data_octets}"
            )
        if entry.start < position:
            raise FileError(f"tensor {name[:80]!r} overlaps the one before it")
        if entry.start > position:
            raise FileError(f"nothing describes the octets before tensor {name[:80]!r}")
        position = entry.stop
    if position != data_octets:
        raise FileError(f"{data_octets - position} octets follow the last tensor")


class _Tensors:
    """The tensors of a KV file, while it is open."""

    path: Path
    _tensors: dict[str, Tensor]

    def _tensor(self, layer: int, component: str) -> Tensor:
        try:
            return self._tensors[f"layers.{layer}.{component}"]
        except KeyError:
            raise LookupError(
                f"{self.path}: layer {layer} is not here, or the file is closed"
            ) from None


class KvFile(_Tensors):
    """A KV file opened for reading: its tensors are read-only views of the mapped file.

    The views stay valid after `close`, as long as something refers to them.
    """

    def __init__(
        self,
        path: Path,
        tokens: int,
        layers: range,
        metadata: Mapping[str, str],
        tensors: Mapping[str, Tensor],
    ) -> None:
        self.path = path
        self.tokens = tokens
        self.layers = layers
        self.metadata = metadata
        self._tensors = dict(tensors)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        descriptor: Descriptor,
        *,
        layers: range | None = None,
    ) -> KvFile:
        """Map a KV file and check it against `descriptor` before any tensor is touched.

        `layers` is the range the file must hold, all of the descriptor's by default. What
        comes through a pipe is kept in a file without a name, and read to its end first.
        Raises FileError naming the file, and the tensor at fault: not a safetensors
        file, truncated, offsets that overlap, a layer missing or extra, another shape or
        element type; DecodeError `codec-unsupported` for a descriptor nobody can read raw.
        """
        wanted = _check_layers(descriptor, layers)
        target = Path(path)
        try:
            with _open_mappable(target) as file:
                size = os.fstat(file.fileno()).st_size
                start = file.read(_LENGTH.size)
                length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
                start += file.read(min(length, MAX_HEADER_OCTETS, size))
                header = parse_header(start, size)
                tokens = _check_header(header, descriptor, wanted)
                mapped = np.memmap(file, dtype=np.uint8, mode="r")
        except OSError as error:
            raise FileError(f"{target}: {error.strerror or error}") from error
        except FileError as error:
            raise FileError(f"{target}: {error}") from None
        tensors = {
            name: _view(mapped, header.data_start + entry.start, entry.shape, descriptor)
            for name, entry in header.tensors.items()
        }
        return cls(target, tokens, wanted, header.metadata, tensors)

    def k(self, layer: int) -> Tensor:
        """K of a layer, `[tokens, kv_heads, head_dim]`. Raises LookupError if it is not here."""
        return self._tensor(layer, "k")

    def v(self, layer: int) -> Tensor:
        """V of a layer, `[tokens, kv_heads, head_dim]`. Raises LookupError if it is not here."""
        return self._tensor(layer, "v")

    def close(self) -> None:
        """Let go of the file; views handed out keep their part of it alive."""
        self._tensors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class KvFileWriter(_Tensors):
    """A KV file written in any order, and seen by others only when it is whole.

    The tensors are views of a memory-mapped temporary file beside the target, which
    only its owner may read. `commit` gives it its name in one step; leaving the `with`
    block without it, an exception, or the end of the process removes it.

        with KvFileWriter("out.safetensors", descriptor, tokens=160) as out:
            out.k(0)[:] = ...
            out.commit()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        descriptor: Descriptor,
        *,
        tokens: int,
        layers: range | None = None,
        metadata: Mapping[str, str] | None = None,
        partial: Path | None = None,
    ) -> None:
        """Reserve the whole file. `layers` is the range it holds, all by default. `partial` is
        the temporary file: what is in it stays, also after `abort`.

        `metadata` is readable by whoever reads the file: no secrets. Raises FileError
        when the file cannot be made (no space, no folder), ValueError for no tokens or a
        range outside the descriptor, DecodeError `codec-unsupported`.
        """
        # behind a link lies the file that is meant; a device is never replaced by a file
        self.path = Path(os.path.realpath(path))
        if self.path.exists() and not self.path.is_file():
            raise FileError(f"{self.path}: is not a regular file")
        self.tokens = tokens
        self.layers = _check_layers(descriptor, layers)
        if tokens < 1:
            raise ValueError("a KV file holds at least one token")
        shape = (tokens, descriptor.kv_heads, descriptor.head_dim)
        section = descriptor.section_octets(tokens)
        names = [f"layers.{layer}.{part}" for layer in self.layers for part in ("k", "v")]
        header = _encode_header(
            names, _SAFETENSORS_TYPES[descriptor.element_type], shape, section, metadata or {}
        )
        size = len(header) + section * len(names)
        temporary = beside(self.path) if partial is None else partial
        how = os.O_EXCL if partial is None else os.O_NOFOLLOW
        try:
            self._file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | how, 0o600)
        except OSError as error:
            raise FileError(f"{self.path}: {error.strerror or error}") from error
        self._temporary = temporary
        # also at the end of the process, for writers that nobody closed
        self._remove = weakref.finalize(
            self, _discard, self._file, temporary if partial is None else None
        )
        try:
            _reserve(self._file, size)
            self._map = mmap.mmap(self._file, size)
        except OSError as error:
            self.abort()
            raise FileError(f"{self.path}: {error.strerror or error}") from error
        self._map[: len(header)] = header
        octets = np.frombuffer(self._map, dtype=np.uint8)
        self._tensors = {
            name: _view(octets, len(header) + index * section, shape, descriptor)
            for index, name in enumerate(names)
        }

    def k(self, layer: int) -> Tensor:
        """K of a layer to write into. Raises LookupError outside `layers` and when closed."""
        return self._tensor(layer, "k")

    def v(self, layer: int) -> Tensor:
        """V of a layer to write into. Raises LookupError outside `layers` and when closed."""
        return self._tensor(layer, "v")

    def commit(self) -> None:
        """Make the file durable and give it its name, replacing a file of that name.

        The tensors become read-only. Raises FileError when the file cannot be written
        (the temporary file is removed), ValueError after `commit` or `abort`.
        """
        if not self._remove.alive:
            raise ValueError("the file was committed or aborted before")
        for tensor in self._tensors.values():
            tensor.flags.writeable = False
        self._tensors.clear()
        try:
            # Linux writes what the map holds, too, and other threads run meanwhile: with
            # `flush`, which other systems need, none does, but then it finds nothing to write.
            os.fsync(self._file)
            self._map.flush()
            os.replace(self._temporary, self.path)
        except OSError as error:
            self.abort()
            raise FileError(f"{self.path}: {error.strerror or error}") from error
        self._remove.detach()
        os.close(self._file)
        _sync_folder(self.path.parent)

    def abort(self) -> None:
        """Remove what was written; harmless after `commit` or another `abort`."""
        self._tensors = {}
        self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()


def load_tokens(path: str | os.PathLike[str], *, stdin: BinaryIO | None = None) -> list[int]:
    """Read a JSON array of token ids; `-` is standard input.

    Raises FileError naming the file, never a token id.
    """
    name = os.fspath(path)
    label = "standard input" if name == "-" else name
    if name == "-":
        data = (stdin or sys.stdin.buffer).read(MAX_TOKENS_FILE_OCTETS + 1)
        if len(data) > MAX_TOKENS_FILE_OCTETS:
            raise FileError(f"{label}: larger than {MAX_TOKENS_FILE_OCTETS} octets")
    else:
        data = _read(Path(name), MAX_TOKENS_FILE_OCTETS)
    try:
        tokens = ijson.loads(data)
    except DecodeError as error:
        # a duplicate member's name is all the detail could give away, and it is no use here
        detail = "not a JSON array" if error.name == "duplicate-member" else error.detail
        raise FileError(f"{label}: not a JSON array of token ids: {detail}") from None
    if not isinstance(tokens, list):
        raise FileError(f"{label}: not a JSON array of token ids")
    try:
        check_tokens(tokens)
    except DecodeError as error:
        raise FileError(f"{label}: {error.detail}") from None
    return tokens


def load_descriptor(path: str | os.PathLike[str]) -> Descriptor:
    """Read a Compatibility Descriptor file.

    Raises FileError when it cannot be read, or has a member that is a misspelt known one;
    DecodeError as `Descriptor.parse` does with the file's name in the detail.
    """
    data = _read(Path(path), MAX_DESCRIPTOR_FILE_OCTETS)
    try:
        descriptor = Descriptor.parse(data)
    except DecodeError as error:
        raise error.within(os.fspath(path)) from None
    for found, meant in misspelt_members(descriptor).items():
        raise FileError(
            f"{os.fspath(path)}: {found!r} is no member of a descriptor; {meant!r} is one"
        )
    return descriptor


# --- helpers -------------------------------------------------------------------------


def _check_layers(descriptor: Descriptor, layers: range | None) -> range:
    descriptor.section_octets()
    if layers is None:
        return range(descriptor.layers)
    if layers.step != 1 or not layers or layers.start < 0 or layers.stop > descriptor.layers:
        raise ValueError(f"{layers} is no range of layers within 0 to {descriptor.layers - 1}")
    return layers


def _check_header(header: Header, descriptor: Descriptor, layers: range) -> int:
    """Compare a header with a descriptor and return the number of tokens."""
    for name in header.tensors:
        match = _TENSOR_NAME.fullmatch(name)
        if match is None:
            raise FileError(f"tensor {name[:80]!r} is neither layers.<l>.k nor layers.<l>.v")
        if int(match.group(1)) not in layers:
            raise FileError(
                f"tensor {name!r} is of no layer from {layers.start} to {layers.stop - 1}"
            )
    dtype = _SAFETENSORS_TYPES[descriptor.element_type]
    tokens: int | None = None
    for layer in layers:
        for part in ("k", "v"):
            name = f"layers.{layer}.{part}"
            entry = header.tensors.get(name)
            if entry is None:
                raise FileError(f"tensor {name!r} is missing")
            if entry.dtype != dtype:
                raise FileError(
                    f"tensor {name!r} has elements of {entry.dtype[:32]!r}, "
                    f"{descriptor.kv_dtype} is {dtype!r}"
                )
            wanted = (descriptor.kv_heads, descriptor.head_dim)
            if len(entry.shape) != 3 or entry.shape[1:] != wanted:
                raise FileError(
                    f"tensor {name!r} has shape {list(entry.shape)} "
                    f"instead of [tokens, {wanted[0]}, {wanted[1]}]"
                )
            if tokens is None:
                tokens = entry.shape[0]
            if entry.shape[0] != tokens or not tokens:
                raise FileError(
                    f"tensor {name!r} has {entry.shape[0]} tokens, not {tokens or 'any'}"
                )
            if entry.stop - entry.start != descriptor.section_octets(tokens):
                raise FileError(
                    f"tensor {name!r} has {entry.stop - entry.start} octets, "
                    f"its shape needs {descriptor.section_octets(tokens)}"
                )
    assert tokens is not None
    return tokens


def _encode_header(
    names: list[str],
    dtype: str,
    shape: tuple[int, ...],
    section: int,
    metadata: Mapping[str, str],
) -> bytes:
    tree: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    for index, name in enumerate(names):
        offsets = [index * section, (index + 1) * section]
        tree[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(tree, separators=(",", ":")).encode("ascii")
    # readers take trailing spaces; they align the data
    text += b" " * (-(len(text) + _LENGTH.size) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def _view(octets: Tensor, start: int, shape: tuple[int, ...], descriptor: Descriptor) -> Tensor:
    section = octets[start : start + descriptor.section_octets(shape[0])]
    return np.asarray(section.view(descriptor.dtype).reshape(shape))


def _open_mappable(path: Path) -> BinaryIO:
    file = open_input(path)
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    kept = tempfile.TemporaryFile()  # noqa: SIM115  (the caller's `with` closes it)
    with file:
        shutil.copyfileobj(file, kept, 1 << 20)
    kept.seek(0)
    return cast(BinaryIO, kept)


def _read(path: Path, limit: int) -> bytes:
    try:
        with open_input(path) as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    except FileError as error:
        raise FileError(f"{path}: {error}") from None
    if len(data) > limit:
        raise FileError(f"{path}: larger than {limit} octets")
    return data


def _reserve(descriptor: int, size: int) -> None:
    # space is taken now: a full disk met later, through the map, would kill the process
    try:
        os.posix_fallocate(descriptor, 0, size)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _CANNOT_RESERVE:
            raise
        os.ftruncate(descriptor, size)


def _discard(descriptor: int, temporary: Path | None) -> None:
    os.close(descriptor)
    if temporary is not None:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    # the rename is done; that it survives a power cut is more than some systems promise
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
