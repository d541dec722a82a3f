"""The KV Block Container "KVB1": reader and writer (KVSP "KV Block Container").

The reader takes octets as they come and gives each layer as soon as it is whole, in
memory bounded by that layer. The writer hands out a header and the sections themselves.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn

from kvsp.blocks.codecs import decode_section, known_codec, section_bounds
from kvsp.blocks.layout import Octets
from kvsp.names.codes import (
    CONTAINER_MAGIC,
    CONTAINER_VERSION,
    HASH_OCTETS,
    MAX_CODEC,
    Codec,
    DecodeErrorName,
)
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor

FIXED: Final = struct.Struct(">4sBBHIII")
"""Magic, version, flags, codec, first layer, number of layers, tokens."""
ENTRY: Final = struct.Struct(">QQ")
"""K Length and V Length of a layer."""
FIXED_OCTETS: Final = FIXED.size
ENTRY_OCTETS: Final = ENTRY.size

_LAYERS = re.compile(r"(0|[1-9][0-9]{0,9})-(0|[1-9][0-9]{0,9})")
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,9}")
_SHA256_MEMBER = re.compile(r"(?:^|,)[ \t]*sha-256[ \t]*=[ \t]*:([A-Za-z0-9+/=]*):[ \t]*(?=$|[,;])")


class ContainerHeader(NamedTuple):
    """The checked header and table of a container."""

    flags: int
    codec: Codec
    first_layer: int
    token_count: int
    table: bytes
    """The table as sent: 16 octets per layer, in ascending layer order."""

    data_octets: int
    """Octets of all sections; for a whole block, `size` of its Replica Record."""

    @classmethod
    def of(
        cls,
        codec: Codec,
        first_layer: int,
        token_count: int,
        lengths: Iterable[tuple[int, int]],
    ) -> ContainerHeader:
        """The header of consecutive layers with these K and V lengths, which are not checked."""
        table = b"".join(ENTRY.pack(k, v) for k, v in lengths)
        return cls(0, codec, first_layer, token_count, table, _sum_lengths(table))

    @property
    def layers(self) -> range:
        """The layers the container holds."""
        return range(self.first_layer, self.first_layer + len(self.table) // ENTRY_OCTETS)

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """K Length and V Length of each layer in octets, read from the table."""
        return tuple(ENTRY.iter_unpack(self.table))

    @property
    def total_octets(self) -> int:
        """Octets of the whole container."""
        return FIXED_OCTETS + len(self.table) + self.data_octets

    @property
    def encoded(self) -> bytes:
        """The fixed part and the table. Flags are sent as zero."""
        fixed = FIXED.pack(
            CONTAINER_MAGIC,
            CONTAINER_VERSION,
            0,
            self.codec,
            self.first_layer,
            len(self.layers),
            self.token_count,
        )
        return fixed + self.table

    def select(self, layers: range) -> ContainerHeader:
        """The header of a container of some of these layers.

        Raises ValueError for an empty range or layers that are not all here.
        """
        held = self.layers
        if not layers or layers.step != 1 or layers[0] not in held or layers[-1] not in held:
            raise ValueError(f"layers {layers} are not within {held}")
        start = (layers.start - held.start) * ENTRY_OCTETS
        table = self.table[start : start + len(layers) * ENTRY_OCTETS]
        size = _sum_lengths(table)
        return self._replace(flags=0, first_layer=layers.start, table=table, data_octets=size)


class LayerSections(NamedTuple):
    """One whole layer of a container, as encoded by the container's codec."""

    layer: int
    k: memoryview
    v: memoryview
    digest: bytes
    """The layer digest, 32 octets."""

    def decode(self, codec: Codec, descriptor: Descriptor) -> tuple[memoryview, memoryview]:
        """The raw K and V octets. Raises DecodeError `section-length`."""
        return (
            decode_section(codec, self.k, descriptor),
            decode_section(codec, self.v, descriptor),
        )


Event = ContainerHeader | LayerSections


# --- digests -------------------------------------------------------------------------


def layer_digest(k: Octets, v: Octets) -> bytes:
    """SHA-256 of a layer's K section followed by its V section, as encoded; 32 octets."""
    digest = hashlib.sha256(k)
    digest.update(v)
    return digest.digest()


def repr_digest_field(digest: bytes) -> str:
    """The value of a Repr-Digest field (RFC 9530) for a SHA-256 digest."""
    return f"sha-256=:{base64.b64encode(digest).decode('ascii')}:"


def parse_repr_digest(value: str) -> bytes | None:
    """The SHA-256 digest of a Repr-Digest field; None when it names other algorithms only.

    Raises DecodeError `bad-digest` for a sha-256 member that is not 32 octets.
    """
    if not (found := _SHA256_MEMBER.findall(value)):
        if "sha-256=" in value:
            raise DecodeError(DecodeErrorName.BAD_DIGEST, "Repr-Digest is sha-256=:<base64>:")
        return None
    try:
        digest = base64.b64decode(found[-1], validate=True)
    except binascii.Error:
        digest = b""
    if len(digest) != HASH_OCTETS:
        raise DecodeError(DecodeErrorName.BAD_DIGEST, "sha-256 of Repr-Digest has not 32 octets")
    return digest


# --- query parameters ----------------------------------------------------------------


def parse_layers(text: str) -> range:
    """The layers of a `layers=a-b` query parameter (inclusive there, a range here).

    Whether those layers exist or are held is the holder's to say. Raises DecodeError
    `layer-range` when malformed.
    """
    match = _LAYERS.fullmatch(text)
    first, last = map(int, match.groups()) if match else (1, 0)
    if not first <= last < 1 << 32:
        raise DecodeError(
            DecodeErrorName.LAYER_RANGE, "layers=a-b has two decimal layer numbers with a <= b"
        )
    return range(first, last + 1)


def parse_codec(text: str) -> int:
    """The registry value of a `codec=n` query parameter, known here or not.

    Raises DecodeError `out-of-range` when malformed or beyond 16 bits.
    """
    if not _DECIMAL.fullmatch(text) or int(text) > MAX_CODEC:
        raise DecodeError(DecodeErrorName.OUT_OF_RANGE, f"codec=n is decimal, at most {MAX_CODEC}")
    return int(text)


def layers_parameter(layers: range) -> str:
    """The `layers=a-b` value for a range of layers."""
    return f"{layers.start}-{layers.stop - 1}"


# --- writing -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Container:
    """A container to be sent: its header and, by reference, its sections.

    Iterating gives the header's octets and then K and V of each layer as views.
    """

    header: ContainerHeader
    sections: tuple[tuple[memoryview, memoryview], ...]

    @classmethod
    def build(
        cls,
        descriptor: Descriptor,
        sections: Sequence[tuple[Octets, Octets]],
        *,
        codec: Codec = Codec.RAW,
        first_layer: int = 0,
    ) -> Container:
        """A container of consecutive layers of one block, `(K, V)` per layer, as encoded.

        Raises ValueError for no layer or layers beyond the descriptor's, DecodeError
        `section-length` for a section of a length the codec does not allow.
        """
        views = tuple((memoryview(k).cast("B"), memoryview(v).cast("B")) for k, v in sections)
        if not views or not 0 <= first_layer <= descriptor.layers - len(views):
            raise ValueError(
                f"{len(views)} layers from {first_layer} are not within {descriptor.layers} layers"
            )
        header = ContainerHeader.of(
            codec, first_layer, descriptor.block_tokens, [(len(k), len(v)) for k, v in views]
        )
        _check_table(header.table, codec, descriptor, first_layer)
        return cls(header, views)

    @property
    def total_octets(self) -> int:
        """Octets of the whole container, known before any is sent."""
        return self.header.total_octets

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield self.header.encoded
        for k, v in self.sections:
            yield k
            yield v

    def select(self, layers: range) -> Container:
        """The container of some of these layers, over the same sections.

        Raises ValueError for an empty range or layers that are not all here.
        """
        header = self.header.select(layers)
        start = layers.start - self.header.first_layer
        return Container(header, self.sections[start : start + len(layers)])

    def layer_digests(self) -> list[bytes]:
        """The layer digest of each layer that is here."""
        return [layer_digest(k, v) for k, v in self.sections]

    def repr_digest(self) -> bytes:
        """SHA-256 of the container as sent, 32 octets (RFC 9530 Repr-Digest)."""
        digest = hashlib.sha256()
        for part in self:
            digest.update(part)
        return digest.digest()


# --- reading -------------------------------------------------------------------------


class ContainerReader:
    """Reads a container from octets as they arrive and checks it (kvsp-gaps "Decode errors").

    `feed` gives a ContainerHeader and then LayerSections in ascending order; `close`
    says that there is no more. Octets that were fed are kept by reference while a layer
    is put together and must not change; a section within one feed is a view of it.
    Nothing is reserved because a length field asks for it. After an error every
    further call raises the same error.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        *,
        layer_digests: Sequence[bytes] | None = None,
        codec: int | None = None,
        repr_digest: bytes | None = None,
        total_octets: int | None = None,
    ) -> None:
        """`layer_digests` are those of the Replica Record, layer 0 first, and `codec` is
        that record's: a container in another codec is not compared with them. `repr_digest`
        (32 octets) is compared with the digest of all octets by `close`. `total_octets`,
        when known ahead (Content-Length), makes `truncated` and `trailing-octets` known as
        soon as the table is read, before any section is looked at. Raises ValueError unless
        there is one layer digest for each layer of the descriptor.
        """
        if layer_digests is not None and len(layer_digests) != descriptor.layers:
            raise ValueError(f"{len(layer_digests)} layer digests for {descriptor.layers} layers")
        self._descriptor = descriptor
        self._layer_digests = layer_digests
        self._digests_codec = codec
        self._expected_repr = repr_digest
        self._total = total_octets
        self._repr = None if repr_digest is None else hashlib.sha256()
        self._head = bytearray()
        self._fixed: tuple[int, Codec, int, int] | None = None
        self._header: ContainerHeader | None = None
        self._layer = 0
        self._sections: list[memoryview] = []
        self._part = bytearray()
        self._failure: DecodeError | None = None

    @property
    def header(self) -> ContainerHeader | None:
        """The header, once it was read."""
        return self._header

    @property
    def complete(self) -> bool:
        """Whether every layer was given."""
        return self._header is not None and self._layer == len(self._header.layers)

    def feed(self, data: Octets) -> list[Event]:
        """Take the next octets and return what they complete.

        Raises DecodeError; when an error follows events within `data`, these are returned
        and the next call raises, so that a cut of the octets makes no difference.
        """
        if self._failure is not None:
            raise self._failure
        view = memoryview(data).cast("B")
        if self._repr is not None:
            self._repr.update(view)
        events: list[Event] = []
        try:
            if self._header is None:
                view = self._read_header(view)
                if self._header is not None:
                    events.append(self._header)
            if self._header is not None:
                self._read_layers(self._header, view, events)
        except DecodeError as error:
            self._failure = error
            if not events:
                raise
        return events

    def close(self) -> None:
        """There are no more octets. Raises DecodeError `truncated`, `digest-mismatch`."""
        if self._failure is not None:
            raise self._failure
        try:
            if not self.complete:
                self._fail_truncated()
            if self._repr is not None and self._expected_repr is not None:
                _compare(self._repr.digest(), self._expected_repr, "the container")
        except DecodeError as error:
            self._failure = error
            raise

    def _read_header(self, view: memoryview) -> memoryview:
        """Take what is missing of the fixed part and the table; returns the octets after it."""
        view = self._fill_head(view, FIXED_OCTETS)
        magic = bytes(self._head[: len(CONTAINER_MAGIC)])
        if len(magic) == len(CONTAINER_MAGIC) and magic != CONTAINER_MAGIC:
            _fail(DecodeErrorName.BAD_MAGIC, "the container does not start with KVB1")
        if len(self._head) < FIXED_OCTETS:
            return view
        if self._fixed is None:
            self._fixed = _check_fixed(self._head, self._descriptor)
        flags, codec, first_layer, layer_count = self._fixed
        end = FIXED_OCTETS + ENTRY_OCTETS * layer_count
        view = self._fill_head(view, end)
        if len(self._head) < end:
            return view
        table = bytes(memoryview(self._head)[FIXED_OCTETS:])
        _check_table(table, codec, self._descriptor, first_layer)
        header = ContainerHeader(
            flags,
            codec,
            first_layer,
            self._descriptor.block_tokens,
            table,
            _sum_lengths(table),
        )
        if self._total is not None:
            _check_total(self._total, header)
        self._header = header
        self._head.clear()
        return view

    def _fill_head(self, view: memoryview, end: int) -> memoryview:
        wanted = max(end - len(self._head), 0)
        self._head += view[:wanted]
        return view[wanted:]

    def _read_layers(self, header: ContainerHeader, view: memoryview, events: list[Event]) -> None:
        while self._layer < len(header.layers):
            lengths = _entry(header.table, self._layer)
            while len(self._sections) < len(lengths):
                missing = lengths[len(self._sections)] - len(self._part)
                if len(view) < missing:
                    # octets are joined as they come: the length field reserves nothing
                    self._part += view
                    return
                self._sections.append(self._take_section(view[:missing]))
                view = view[missing:]
            events.append(self._finish_layer(header))
        if view:
            _fail(DecodeErrorName.TRAILING_OCTETS, f"{len(view)} octets follow the last layer")

    def _take_section(self, end: memoryview) -> memoryview:
        if not self._part:
            return end.toreadonly()
        self._part += end
        section = memoryview(self._part).toreadonly()
        self._part = bytearray()
        return section

    def _finish_layer(self, header: ContainerHeader) -> LayerSections:
        layer = header.first_layer + self._layer
        k, v = self._sections
        digest = layer_digest(k, v)
        if self._layer_digests is not None and self._digests_codec in (None, header.codec):
            _compare(digest, self._layer_digests[layer], f"layer {layer}")
        self._sections = []
        self._layer += 1
        return LayerSections(layer, k, v, digest)

    def _fail_truncated(self) -> NoReturn:
        header = self._header
        if header is None:
            _fail(DecodeErrorName.TRUNCATED, f"ends after {len(self._head)} octets of its header")
        layer = header.first_layer + self._layer
        _fail(DecodeErrorName.TRUNCATED, f"ends before layer {layer} is whole")


def decode(
    data: Octets,
    descriptor: Descriptor,
    *,
    layer_digests: Sequence[bytes] | None = None,
    codec: int | None = None,
    repr_digest: bytes | None = None,
) -> tuple[ContainerHeader, list[LayerSections]]:
    """Read a container that is there as a whole; sections are views of `data`.

    Parameters and errors are those of `ContainerReader`, each check in its order.
    """
    view = memoryview(data).cast("B")
    reader = ContainerReader(
        descriptor,
        layer_digests=layer_digests,
        codec=codec,
        repr_digest=repr_digest,
        total_octets=len(view),
    )
    header, *layers = reader.feed(view) or (None,)
    reader.close()
    assert isinstance(header, ContainerHeader)
    return header, [layer for layer in layers if isinstance(layer, LayerSections)]


def _check_fixed(octets: Octets, descriptor: Descriptor) -> tuple[int, Codec, int, int]:
    """Flags, codec, First Layer and Layer Count of a fixed part whose magic is right."""
    _, version, flags, value, first_layer, layer_count, token_count = FIXED.unpack_from(octets)
    if version != CONTAINER_VERSION:
        _fail(DecodeErrorName.BAD_VERSION, f"version {version} instead of {CONTAINER_VERSION}")
    codec = known_codec(value)
    descriptor.section_octets()  # refuses a geometry nobody here can read
    if layer_count == 0:
        _fail(DecodeErrorName.ZERO_LAYERS, "Layer Count is 0")
    if first_layer + layer_count > descriptor.layers:
        _fail(
            DecodeErrorName.LAYER_RANGE,
            f"{layer_count} layers from {first_layer} are beyond {descriptor.layers} layers",
        )
    if token_count != descriptor.block_tokens:
        _fail(
            DecodeErrorName.TOKEN_COUNT,
            f"Token Count is {token_count} where {descriptor.block_tokens} is due",
        )
    return flags, codec, first_layer, layer_count


def _entry(table: bytes, index: int) -> tuple[int, int]:
    k, v = ENTRY.unpack_from(table, index * ENTRY_OCTETS)
    return k, v


def _sum_lengths(table: bytes) -> int:
    return sum(k + v for k, v in ENTRY.iter_unpack(table))


def _check_table(table: bytes, codec: Codec, descriptor: Descriptor, first_layer: int) -> None:
    bounds = section_bounds(codec, descriptor)
    for layer, (k, v) in enumerate(ENTRY.iter_unpack(table), first_layer):
        if k not in bounds or v not in bounds:
            allowed = f"{bounds[-1]}" if len(bounds) == 1 else f"at most {bounds[-1]}"
            _fail(
                DecodeErrorName.SECTION_LENGTH,
                f"K and V of layer {layer} have {k} and {v} octets where {codec.label} "
                f"has {allowed}",
            )


def _check_total(total: int, header: ContainerHeader) -> None:
    if total < header.total_octets:
        _fail(DecodeErrorName.TRUNCATED, f"{total} octets instead of {header.total_octets}")
    if total > header.total_octets:
        _fail(DecodeErrorName.TRAILING_OCTETS, f"{total} octets instead of {header.total_octets}")


def _compare(digest: bytes, expected: bytes, what: str) -> None:
    if not hmac.compare_digest(digest, expected):
        _fail(DecodeErrorName.DIGEST_MISMATCH, f"{what} is not what its digest covers")


def _fail(name: DecodeErrorName, detail: str) -> NoReturn:
    raise DecodeError(name, detail)
