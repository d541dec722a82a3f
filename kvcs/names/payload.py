"""The Object payload: 68 octets of header, then Data (KVCS "Object Payload")."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvcs.names.codes import PAYLOAD_HEADER_OCTETS, PAYLOAD_MAGIC, PAYLOAD_VERSION, Component
from kvsp.blocks.layout import Octets
from kvsp.names.codes import Codec, DecodeErrorName
from kvsp.names.errors import DecodeError

_FIELDS = struct.Struct(">IBBHIIQIHHI")
_HEADER = struct.Struct(_FIELDS.format + "32s")
assert _HEADER.size == PAYLOAD_HEADER_OCTETS
_MAGIC_OCTETS = PAYLOAD_MAGIC.to_bytes(4)


class PayloadHeader(NamedTuple):
    """The fields of a payload header, in their order; Magic and Version are as specified."""

    component: int
    flags: int
    layer: int
    block_index: int
    token_start: int
    token_count: int
    codec: int
    reserved: int
    data_length: int
    data_digest: bytes


def data_digest(*data: Octets) -> bytes:
    """SHA-256 over buffers, one after another, without joining or copying them."""
    digest = hashlib.sha256(data[0]) if data else hashlib.sha256()
    for part in data[1:]:
        digest.update(part)
    return digest.digest()


def encode_header(
    *,
    component: Component,
    layer: int,
    block: int,
    token_start: int,
    token_count: int,
    codec: int,
    data_length: int,
    data_digest: bytes,
) -> bytes:
    """The 68 header octets of an Object; Flags and Reserved are zero.

    `block` is the index in the segment (the Object ID), `token_start` the absolute
    position of its first token. Raises ValueError for a field out of its range.
    """
    if len(data_digest) != 32:
        raise ValueError("the Data Digest has 32 octets")
    try:
        return _HEADER.pack(
            PAYLOAD_MAGIC,
            PAYLOAD_VERSION,
            component,
            0,
            layer,
            block,
            token_start,
            token_count,
            codec,
            0,
            data_length,
            data_digest,
        )
    except struct.error as error:
        raise ValueError(f"a payload header field is out of range: {error}") from None


def decode_header(payload: Octets) -> PayloadHeader:
    """Read the header alone, for tools: nothing is compared with where the Object stands.

    Raises DecodeError `truncated`, `bad-magic`, `bad-version`.
    """
    view = memoryview(payload).cast("B")
    # the magic is judged as soon as it is there, so that a short wrong payload is "wrong"
    if len(view) < 4:
        raise DecodeError(DecodeErrorName.TRUNCATED, f"{len(view)} octets hold no magic")
    if view[:4] != _MAGIC_OCTETS:
        raise DecodeError(DecodeErrorName.BAD_MAGIC, "the payload does not start with KVO1")
    if len(view) < PAYLOAD_HEADER_OCTETS:
        raise DecodeError(
            DecodeErrorName.TRUNCATED,
            f"{len(view)} octets, but the header has {PAYLOAD_HEADER_OCTETS}",
        )
    _, version, *fields = _HEADER.unpack_from(view)
    if version != PAYLOAD_VERSION:
        raise DecodeError(DecodeErrorName.BAD_VERSION, f"version {version} instead of 1")
    return PayloadHeader(*fields)


class PayloadForm(NamedTuple):
    """What is the same in the payload of every Object of one track: see `check_payload`."""

    component: int
    codec: int
    first_block: int
    block_tokens: int
    raw_octets: int

    def check(
        self,
        parts: Sequence[Octets],
        layer: int,
        block: int,
        expected_digest: bytes | None = None,
    ) -> tuple[list[memoryview], bytes]:
        """`check_payload` of a payload in `parts`; returns the parts of its Data, and its digest.

        Nothing is copied or joined, but a header cut by the border of two parts.
        """
        head, rest = _split(parts)
        if not self._is_due(head, rest, layer, block):
            self._check_header(head, rest, layer, block)
        data = [head[PAYLOAD_HEADER_OCTETS:], *rest]
        digest = data_digest(*data)
        if head[_FIELDS.size : PAYLOAD_HEADER_OCTETS] != digest:
            raise DecodeError(DecodeErrorName.DIGEST_MISMATCH, "Data is not what its digest covers")
        if expected_digest is not None and digest != expected_digest:
            raise DecodeError(
                DecodeErrorName.DIGEST_MISMATCH, "the digest is not the one the manifest lists"
            )
        return data, digest

    def _is_due(self, head: memoryview, rest: Sequence[memoryview], layer: int, block: int) -> bool:
        """Whether header and length are exactly those that are due, as nearly always: one
        comparison tells."""
        component, codec, first_block, block_tokens, raw_octets = self
        if codec != Codec.RAW:
            return False
        try:
            due = _FIELDS.pack(
                PAYLOAD_MAGIC,
                PAYLOAD_VERSION,
                component,
                0,
                layer,
                block,
                (first_block + block) * block_tokens,
                block_tokens,
                codec,
                0,
                raw_octets,
            )
        except struct.error:  # no header can say that
            return False
        length = len(head) + sum(map(len, rest))
        return length == PAYLOAD_HEADER_OCTETS + raw_octets and head[: _FIELDS.size] == due

    def _check_header(
        self, head: memoryview, rest: Sequence[memoryview], layer: int, block: int
    ) -> None:
        """Raises DecodeError, first fault first, for a header that is not acceptable."""
        component, codec, first_block, block_tokens, raw_octets = self
        header = decode_header(head)
        if header.component != component:
            raise _mismatch(
                DecodeErrorName.COMPONENT_MISMATCH, "Component", header.component, component
            )
        if header.layer != layer:
            raise _mismatch(DecodeErrorName.LAYER_MISMATCH, "Layer", header.layer, layer)
        if header.block_index != block:
            raise _mismatch(
                DecodeErrorName.BLOCK_MISMATCH, "Block Index", header.block_index, block
            )
        token_start = (first_block + block) * block_tokens
        if header.token_start != token_start:
            raise _mismatch(
                DecodeErrorName.TOKEN_START, "Token Start", header.token_start, token_start
            )
        if header.token_count != block_tokens:
            raise _mismatch(
                DecodeErrorName.TOKEN_COUNT, "Token Count", header.token_count, block_tokens
            )
        if header.codec != codec:
            raise _mismatch(DecodeErrorName.CODEC_MISMATCH, "Codec", header.codec, codec)
        data = head[PAYLOAD_HEADER_OCTETS:]
        length = len(data) + sum(map(len, rest))
        if length < header.data_length:
            raise _mismatch(DecodeErrorName.TRUNCATED, "Data Length", header.data_length, length)
        if length > header.data_length:
            raise _mismatch(
                DecodeErrorName.TRAILING_OCTETS, "Data Length", header.data_length, length
            )
        if codec == Codec.RAW and length != raw_octets:
            raise _mismatch(DecodeErrorName.SECTION_LENGTH, "Data Length", length, raw_octets)


def check_payload(
    payload: Octets | Sequence[Octets],
    *,
    component: Component,
    layer: int,
    block: int,
    first_block: int,
    block_tokens: int,
    codec: int,
    raw_octets: int,
    expected_digest: bytes | None = None,
) -> memoryview:
    """Verify a received Object and return its Data.

    `payload` is the whole payload, in one buffer or in several. `component`, `codec`
    (a registry value) and `first_block` are those of the track's segment, `layer` is
    the Group ID, `block` the Object ID. `raw_octets` is the length Data has under codec
    raw (both sections for `kv`). `expected_digest`, 32 octets from a manifest, is
    compared with the Data as well. Data that lies within one buffer is returned as a view
    of it, nothing is copied; only Data spread over several buffers is joined.

    Raises DecodeError, first fault first: `truncated`, `bad-magic`, `truncated`,
    `bad-version`, `component-mismatch`, `layer-mismatch`, `block-mismatch`,
    `token-start`, `token-count`, `codec-mismatch`, `truncated` or `trailing-octets`,
    `section-length`, `digest-mismatch`. Such an Object is treated as missing.
    """
    parts = [payload] if isinstance(payload, bytes | bytearray | memoryview) else payload
    form = PayloadForm(component, codec, first_block, block_tokens, raw_octets)
    data, _ = form.check(parts, layer, block, expected_digest)
    filled = [piece for piece in data if len(piece)]
    if len(filled) > 1:
        return memoryview(b"".join(filled))
    return filled[0] if filled else data[0]


def _split(parts: Sequence[Octets]) -> tuple[memoryview, list[memoryview]]:
    """A first view that holds the whole header (when there is one), and the other views."""
    views = [memoryview(part).cast("B") for part in parts]
    head = views.pop(0) if views else memoryview(b"")
    if len(head) >= PAYLOAD_HEADER_OCTETS:
        return head, views
    # a header cut by buffer borders: join up to its end and no further
    header = bytearray(head)
    while views and len(header) < PAYLOAD_HEADER_OCTETS:
        missing = PAYLOAD_HEADER_OCTETS - len(header)
        header += views[0][:missing]
        views[0] = views[0][missing:]
        if not views[0]:
            views.pop(0)
    return memoryview(header), views


def _mismatch(name: DecodeErrorName, field: str, found: int, expected: int) -> DecodeError:
    return DecodeError(name, f"{field} is {found} where {expected} is due")
