"""HTTP/3 as far as WebTransport needs it (RFC 9114; QPACK without a dynamic table, RFC 9204).

Octets in, frames out; no connection in here. aioquic's own HTTP/3 layer buffers whole frames
and feeds its connection itself, which would bypass our flow control by consumption.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from enum import IntEnum
from typing import Protocol

import pylsqpack

Headers = list[tuple[bytes, bytes]]

MAX_FRAME = 16 << 10
"""The longest frame, and the longest list of header fields, that is read at once."""


class H3Code(IntEnum):
    """Error codes (RFC 9114 section 8.1; QPACK's; those of WebTransport over HTTP/3)."""

    DATAGRAM_ERROR = 0x33
    NO_ERROR = 0x100
    GENERAL_PROTOCOL_ERROR = 0x101
    INTERNAL_ERROR = 0x102
    STREAM_CREATION_ERROR = 0x103
    CLOSED_CRITICAL_STREAM = 0x104
    FRAME_UNEXPECTED = 0x105
    FRAME_ERROR = 0x106
    EXCESSIVE_LOAD = 0x107
    ID_ERROR = 0x108
    SETTINGS_ERROR = 0x109
    MISSING_SETTINGS = 0x10A
    REQUEST_REJECTED = 0x10B
    REQUEST_CANCELLED = 0x10C
    REQUEST_INCOMPLETE = 0x10D
    MESSAGE_ERROR = 0x10E
    CONNECT_ERROR = 0x10F
    VERSION_FALLBACK = 0x110
    QPACK_DECOMPRESSION_FAILED = 0x200
    QPACK_ENCODER_STREAM_ERROR = 0x201
    QPACK_DECODER_STREAM_ERROR = 0x202
    WT_SESSION_GONE = 0x170D7B68
    WT_BUFFERED_STREAM_REJECTED = 0x3994BD84


class FrameType(IntEnum):
    DATA = 0x00
    HEADERS = 0x01
    SETTINGS = 0x04
    PUSH_PROMISE = 0x05
    GOAWAY = 0x07
    WT_STREAM = 0x41
    """Not a frame: the rest of a bidirectional stream belongs to a WebTransport session."""


RESERVED_FRAMES = frozenset({0x02, 0x06, 0x08, 0x09})
RESERVED_SETTINGS = frozenset({0x00, 0x02, 0x03, 0x04, 0x05})
FIELD_OVERHEAD = 32
"""What a header field counts beyond its octets (RFC 9114 section 4.2.2)."""


class StreamType(IntEnum):
    CONTROL = 0x00
    PUSH = 0x01
    QPACK_ENCODER = 0x02
    QPACK_DECODER = 0x03
    WT_STREAM = 0x54


class Setting(IntEnum):
    QPACK_MAX_TABLE_CAPACITY = 0x01
    MAX_FIELD_SECTION_SIZE = 0x06
    QPACK_BLOCKED_STREAMS = 0x07
    ENABLE_CONNECT_PROTOCOL = 0x08
    H3_DATAGRAM = 0x33
    H3_DATAGRAM_DRAFT04 = 0xFFD277
    ENABLE_WEBTRANSPORT = 0x2B603742
    """WebTransport over HTTP/3, drafts 2 to 6."""
    WEBTRANSPORT_MAX_SESSIONS = 0xC671706A
    """Drafts 7 to 12."""
    WT_MAX_SESSIONS = 0x14E9CD29
    """Drafts 13 and 14."""
    WT_ENABLED = 0x2C7CF000
    """From draft 15 on."""


WEBTRANSPORT_SETTINGS = frozenset(
    {
        Setting.ENABLE_WEBTRANSPORT,
        Setting.WEBTRANSPORT_MAX_SESSIONS,
        Setting.WT_MAX_SESSIONS,
        Setting.WT_ENABLED,
    }
)


_BOOLEAN_SETTINGS = frozenset({Setting.ENABLE_CONNECT_PROTOCOL, Setting.H3_DATAGRAM})


class Capsule(IntEnum):
    CLOSE_SESSION = 0x2843
    DRAIN_SESSION = 0x78AE


class H3Error(Exception):
    """The peer broke HTTP/3's rules: the connection ends with `code`."""

    def __init__(self, code: H3Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def encode_varint(value: int) -> bytes:
    """QUIC's variable-length integer (RFC 9000 section 16)."""
    for size, prefix in ((1, 0), (2, 1), (4, 2), (8, 3)):
        if value < 1 << (8 * size - 2):
            return (value | prefix << (8 * size - 2)).to_bytes(size, "big")
    raise ValueError(f"{value} does not fit a variable-length integer")


def read_varint(data: bytes | bytearray, at: int = 0) -> tuple[int, int] | None:
    """`(value, position after it)`, None when octets are missing."""
    if at >= len(data):
        return None
    size = 1 << (data[at] >> 6)
    if at + size > len(data):
        return None
    value = int.from_bytes(data[at : at + size], "big") & ((1 << (8 * size - 2)) - 1)
    return value, at + size


def encode_frame(kind: int, payload: bytes) -> bytes:
    return encode_varint(kind) + encode_varint(len(payload)) + payload


def encode_settings(settings: Iterable[tuple[int, int]]) -> bytes:
    body = b"".join(encode_varint(name) + encode_varint(value) for name, value in settings)
    return encode_frame(FrameType.SETTINGS, body)


def decode_settings(payload: bytes) -> dict[int, int]:
    """The settings known here; raises H3Error for those that may not be."""
    settings: dict[int, int] = {}
    at = 0
    while at < len(payload):
        name = read_varint(payload, at)
        value = read_varint(payload, name[1]) if name is not None else None
        if name is None or value is None:
            raise H3Error(H3Code.FRAME_ERROR, "the SETTINGS frame is cut off")
        if name[0] in RESERVED_SETTINGS or name[0] in settings:
            raise H3Error(H3Code.SETTINGS_ERROR, f"setting {name[0]:#x} is reserved or repeated")
        if name[0] in _BOOLEAN_SETTINGS and value[0] > 1:
            raise H3Error(H3Code.SETTINGS_ERROR, f"setting {name[0]:#x} is neither 0 nor 1")
        settings[name[0]], at = value
    return {name: settings[name] for name in Setting if name in settings}


def decode_goaway(payload: bytes) -> int:
    """The id a GOAWAY frame carries (RFC 9114 section 7.2.6)."""
    value = read_varint(payload)
    if value is None or value[1] != len(payload):
        raise H3Error(H3Code.FRAME_ERROR, "a GOAWAY is not one integer")
    return value[0]


class TypeLengthReader:
    """Frames or capsules, which are both type, length and value, from octets as they come.

    Values of `whole` types are collected, up to `limit` octets; those of `parts` types are
    handed on as they come; all others are skipped without being kept.
    """

    def __init__(
        self, whole: Collection[int], parts: Collection[int] = (), *, limit: int = MAX_FRAME
    ) -> None:
        self._whole, self._parts, self._limit = frozenset(whole), frozenset(parts), limit
        self._buffer = bytearray()
        self._kind: int | None = None
        self._left = 0

    @property
    def inside(self) -> bool:
        """Whether a value, or the header before it, is cut off here."""
        return self._kind is not None or bool(self._buffer)

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The `(type, value)` pairs that `data` completes; a part's value may be a piece.

        Raises H3Error for a value of a `whole` type that is too long, and for HTTP/2's types.
        """
        found: list[tuple[int, bytes]] = []
        self._buffer += data
        buffer = self._buffer
        at = 0
        while True:
            if self._kind is None:
                header = self._header(at)
                if header is None:
                    break
                self._kind, self._left, at = header
            available = min(self._left, len(buffer) - at)
            if self._kind in self._whole:
                if available < self._left:
                    break
                found.append((self._kind, bytes(buffer[at : at + available])))
            elif self._kind in self._parts and available:
                found.append((self._kind, bytes(buffer[at : at + available])))
            at += available
            self._left -= available
            if self._left:
                break
            self._kind = None
        del buffer[:at]
        return found

    def _header(self, at: int) -> tuple[int, int, int] | None:
        kind = read_varint(self._buffer, at)
        length = read_varint(self._buffer, kind[1]) if kind is not None else None
        if kind is None or length is None:
            return None
        if kind[0] in self._whole and length[0] > self._limit:
            raise H3Error(
                H3Code.EXCESSIVE_LOAD,
                f"{length[0]} octets of type {kind[0]:#x}, at most {self._limit} are read",
            )
        return kind[0], length[0], length[1]


class _Encoder(Protocol):
    def encode(self, stream_id: int, headers: Headers) -> tuple[bytes, bytes]: ...

    def feed_decoder(self, data: bytes) -> None: ...


class HeaderCodec:
    """QPACK with the static table only: no state between requests, nothing can block."""

    def __init__(self) -> None:
        self._encoder: _Encoder = pylsqpack.Encoder()
        self._decoder = pylsqpack.Decoder(0, 0)

    def encode(self, stream_id: int, headers: Headers) -> bytes:
        _, section = self._encoder.encode(stream_id, headers)
        return encode_frame(FrameType.HEADERS, section)

    def decode(self, stream_id: int, section: bytes) -> Headers:
        try:
            _, headers = self._decoder.feed_header(stream_id, section)
        except (pylsqpack.DecompressionFailed, pylsqpack.StreamBlocked, ValueError):
            raise H3Error(
                H3Code.QPACK_DECOMPRESSION_FAILED, "the header fields cannot be decoded"
            ) from None
        size = sum(len(name) + len(value) + FIELD_OVERHEAD for name, value in headers)
        if size > MAX_FRAME:
            raise H3Error(
                H3Code.EXCESSIVE_LOAD,
                f"{size} octets of header fields, at most {MAX_FRAME} are read",
            )
        return list(headers)

    def encoder_stream(self, data: bytes) -> None:
        """Instructions of the peer's encoder: a table of no size takes none but its size."""
        try:
            self._decoder.feed_encoder(data)
        except pylsqpack.EncoderStreamError:
            raise H3Error(H3Code.QPACK_ENCODER_STREAM_ERROR, "there is no dynamic table") from None

    def decoder_stream(self, data: bytes) -> None:
        """Instructions of the peer's decoder: nothing of ours awaits its acknowledgment."""
        try:
            self._encoder.feed_decoder(data)
        except pylsqpack.DecoderStreamError:
            raise H3Error(
                H3Code.QPACK_DECODER_STREAM_ERROR, "nothing was put in the dynamic table"
            ) from None


def field(headers: Headers, name: bytes) -> str | None:
    """The value of a header field, several lines joined; None when it is absent."""
    values = [value for key, value in headers if key == name]
    return b", ".join(values).decode("latin-1") if values else None


_PARAMETERS = r"""(?:;[ ]*[a-z*][a-z0-9_\-.*]*(?:=(?:"(?:[^"\\]|\\["\\])*"|[^;,"\s]+))?)*"""
_MEMBER = re.compile(
    r"""[ \t]*(?:"((?:[ !#-\[\]-~]|\\["\\])*)"|([A-Za-z*][!#$%&'*+\-.^_`|~:/0-9A-Za-z]*))"""
    + _PARAMETERS
    + r"[ \t]*"
)


def parse_strings(value: str) -> list[str]:
    """A structured field that is a List of Strings (RFC 9651); [] when it is anything else.

    Tokens are taken as well: earlier drafts of WebTransport had them. Parameters are ignored.
    """
    found: list[str] = []
    at = 0
    while True:
        match = _MEMBER.match(value, at)
        if match is None:
            return []
        quoted, token = match.groups()
        found.append(token if quoted is None else re.sub(r"\\(.)", r"\1", quoted))
        at = match.end()
        if at == len(value):
            return found
        if value[at] != ",":
            return []
        at += 1


def format_strings(values: Iterable[str]) -> str:
    """A List of Strings; the values are protocol names, which are printable ASCII."""
    return ", ".join('"' + re.sub(r'(["\\])', r"\\\1", value) + '"' for value in values)
