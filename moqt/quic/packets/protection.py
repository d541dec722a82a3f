"""Protection of many 1-RTT packets at once (RFC 9001 section 5), with their STREAM frames.

`Keys` is the interface of what protects; `PythonKeys` does it with `cryptography`, the C extension
`moqt.quic._packets` with OpenSSL itself. Both give the same octets.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any, Protocol

from aioquic.quic.crypto import CryptoContext, derive_key_iv_hp
from aioquic.quic.packet import decode_packet_number
from aioquic.tls import CipherSuite
from cryptography.exceptions import InvalidTag

from moqt.quic.packets.layout import PN_LENGTH, SAMPLE_LENGTH, stream_header

log = logging.getLogger(__name__)

Frame = tuple[bytes, int, int, int, bool, list[memoryview]]
"""A STREAM frame to send: the octets of the Stream ID, those that the Offset is to have (0, 4 or
8), Offset, Length, FIN and the data."""

Group = tuple[int, list[Frame] | bytes]
"""So many packets: one with these frames, or with frames as they are, four octets at least; or
several that divide a single frame evenly."""

Event = tuple[int, int, bytes, bool] | tuple[bytes, bool]
"""Stream ID, Offset, data and FIN of STREAM frames that follow one on another; or what a packet has
from its first other (or broken) frame on, and whether STREAM frames were before that in it."""

Run = tuple[int, int, int, int, list[Event]]
"""Packets with successive numbers: the first and the one after the last, the first octet of the
last, how many have STREAM frames, and what they hold."""

RESERVED_BITS = 0x18
KEY_PHASE = 0x04
SUITES = {
    CipherSuite.AES_128_GCM_SHA256: 0,
    CipherSuite.AES_256_GCM_SHA384: 1,
    CipherSuite.CHACHA20_POLY1305_SHA256: 2,
}
"""How the C extension calls the cipher suites."""


class Keys(Protocol):
    """The keys of one direction and one key phase."""

    def seal(self, prefix: bytes, number: int, groups: list[Group]) -> list[bytes]:
        """The packets of `groups`, numbered from `number` on.

        `prefix` is their first octet and the connection ID; packet numbers have two octets.
        """

    def open(
        self,
        datagrams: list[bytes],
        index: int,
        cid: bytes,
        phase: int,
        expected: int,
        largest: int,
    ) -> tuple[int, list[Run]]:
        """Read the 1-RTT packets to `cid` that stand in a row from `index` on.

        `expected` is the number expected next and `largest` the largest that came, or -1. Returns
        the index of the first datagram that is not read, be it that it is for another ID, has no
        short header, is too short or has another key `phase`. What cannot be opened is passed
        over. A packet that is no newer than `largest`, or than one before it here, is a run of
        its own: it may have been there already. So is one with reserved bits, of which no frame
        is read, and none after it.
        """


class PythonKeys:
    """`Keys` on `cryptography`, as aioquic uses it."""

    def __init__(self, context: CryptoContext) -> None:
        aead: Any = context.aead
        self._hp = context.hp
        self._iv: int = aead._iv
        self._encrypt = aead._aead.encrypt
        self._decrypt = aead._aead.decrypt

    def seal(self, prefix: bytes, number: int, groups: list[Group]) -> list[bytes]:
        iv, encrypt = self._iv, self._encrypt
        headers: list[bytes] = []
        sealed: list[bytes] = []
        samples: list[bytes] = []
        at = 4 - PN_LENGTH
        for count, frames in groups:
            for payload in _payloads(count, frames):
                header = prefix + (number & 0xFFFF).to_bytes(PN_LENGTH, "big")
                cipher = encrypt((iv ^ number).to_bytes(12, "big"), payload, header)
                headers.append(header)
                sealed.append(cipher)
                samples.append(cipher[at : at + SAMPLE_LENGTH])
                number += 1
        masks = header_masks(self._hp, samples)
        first, cid = prefix[0], prefix[1:]
        datagrams = []
        at = 0
        for header, cipher in zip(headers, sealed, strict=True):
            datagrams.append(
                b"%c%b%c%c%b"
                % (
                    first ^ (masks[at] & 0x1F),
                    cid,
                    header[-2] ^ masks[at + 1],
                    header[-1] ^ masks[at + 2],
                    cipher,
                )
            )
            at += SAMPLE_LENGTH
        return datagrams

    def open(
        self,
        datagrams: list[bytes],
        index: int,
        cid: bytes,
        phase: int,
        expected: int,
        largest: int,
    ) -> tuple[int, list[Run]]:
        cid_end = 1 + len(cid)
        sample_at = cid_end + 4
        sample_end = sample_at + SAMPLE_LENGTH
        stop, count = index, len(datagrams)
        samples = []
        while stop < count:
            data = datagrams[stop]
            if len(data) < sample_end or data[0] & 0xC0 != 0x40 or data[1:cid_end] != cid:
                break
            samples.append(data[sample_at:sample_end])
            stop += 1
        if not samples:
            return index, []

        masks = header_masks(self._hp, samples)
        iv, decrypt = self._iv, self._decrypt
        phase *= KEY_PHASE
        base = index
        runs: list[list[Any]] = []
        following = -1  # the number that goes on with the last run
        while index < stop:
            data = datagrams[index]
            offset = (index - base) * SAMPLE_LENGTH
            first = data[0] ^ (masks[offset] & 0x1F)
            if first & KEY_PHASE != phase:
                break
            if first & 0x03 == 1:
                head = cid_end + 2
                truncated = (data[cid_end] ^ masks[offset + 1]) << 8 | (
                    data[cid_end + 1] ^ masks[offset + 2]
                )
                if truncated == expected & 0xFFFF:
                    number = expected
                else:
                    number = decode_packet_number(truncated, 16, expected)
                header = b"%c%b%c%c" % (first, cid, truncated >> 8, truncated & 0xFF)
            else:
                length = (first & 0x03) + 1
                head = cid_end + length
                octets = bytes(data[cid_end + i] ^ masks[offset + 1 + i] for i in range(length))
                number = decode_packet_number(int.from_bytes(octets, "big"), 8 * length, expected)
                header = b"%c%b%b" % (first, cid, octets)
            index += 1
            try:
                plain = decrypt((iv ^ number).to_bytes(12, "big"), data[head:], header)
            except InvalidTag:
                continue
            if first & RESERVED_BITS:
                runs.append([number, number + 1, first, 0, []])
                break
            if number >= expected:
                expected = number + 1
            if number == following:
                run = runs[-1]
                run[1] = following = number + 1
                run[2] = first
            else:
                run = [number, number + 1, first, 0, []]
                runs.append(run)
                following = number + 1 if number > largest else -1
            if number > largest:
                largest = number
            run[3] += _read_frames(plain, run[4])
        return index, [(*run[:4], list(map(_joined, run[4]))) for run in runs]


class KeysOfDirection:
    """Gives the `Keys` that an aioquic context has now, which key updates change."""

    def __init__(self, native: Any, *, sealing: bool) -> None:
        """`native` is the C extension, or None for Python."""
        self._native = native
        self._sealing = sealing
        self._hp = b""
        self._aead: Any = None
        self._keys: Keys

    def begin(self, context: CryptoContext) -> None:
        """The handshake has given `context` its keys."""
        if self._native is not None:
            # Key updates leave header protection as it is (RFC 9001 section 6.1).
            self._hp = self._derive(context)[2]

    def of(self, context: CryptoContext) -> Keys:
        """The keys in use."""
        if context.aead is not self._aead:
            self._keys = self._make(context)
            self._aead = context.aead
        return self._keys

    def _make(self, context: CryptoContext) -> Keys:
        if self._native is None:
            return PythonKeys(context)
        key, iv, _ = self._derive(context)
        suite = context.cipher_suite
        assert suite is not None
        try:
            keys: Keys = self._native.Keys(SUITES[suite], key, iv, self._hp, self._sealing)
        except RuntimeError as error:  # the system's OpenSSL may be without some
            _tell(suite.name, str(error))
            self._native = None
            return PythonKeys(context)
        return keys

    @staticmethod
    def _derive(context: CryptoContext) -> tuple[bytes, bytes, bytes]:
        suite, secret, version = context.cipher_suite, context.secret, context.version
        assert suite is not None and secret is not None and version is not None
        return derive_key_iv_hp(cipher_suite=suite, secret=secret, version=version)


@functools.cache
def _tell(suite: str, fault: str) -> None:
    """Once, and not for each connection: peers choose the cipher suite."""
    log.warning("packets of %s are protected in Python: %s", suite, fault)


def header_masks(hp: Any, samples: list[bytes]) -> bytes:
    """Header-protection masks for several packets, 16 octets apart."""
    if hp._is_chacha20:
        return b"".join(hp._mask(sample) + bytes(SAMPLE_LENGTH - 5) for sample in samples)
    masks: bytes = hp._encryptor.update(b"".join(samples))
    return masks


def _payloads(count: int, frames: list[Frame] | bytes) -> Iterator[bytes]:
    """What is in each packet of a group."""
    if isinstance(frames, bytes):
        yield frames
        return
    if count == 1:
        parts: list[bytes | memoryview] = []
        for stream_id, width, start, length, fin, pieces in frames:
            parts.append(stream_header(stream_id, width, start, length, fin))
            parts += pieces
        yield b"".join(parts)
        return
    ((stream_id, width, start, length, fin, pieces),) = frames
    data = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
    each = length // count
    for at in range(0, length, each):
        end = at + each
        header = stream_header(stream_id, width, start + at, each, fin and end == length)
        yield b"".join((header, data[at:end]))


def _read_frames(plain: bytes, events: list[Any]) -> bool:
    """Read a packet's frames behind `events`; whether STREAM frames are among them.

    STREAM frames are `[stream_id, offset, parts, fin, end]` until they are `_joined`.
    """
    pos, end = 0, len(plain)
    found = False
    frame = 0
    try:
        while pos < end:
            frame = pos
            kind = plain[pos]
            if kind & 0xF8 != 0x08:
                events.append((plain[pos:] if pos else plain, found))
                return found
            pos += 1
            stream_id = plain[pos]
            if stream_id < 0x40:
                pos += 1
            else:
                stream_id, pos = _varint(plain, pos)
            offset = 0
            if kind & 4:
                offset, pos = _varint(plain, pos)
            if kind & 2:
                length, pos = _varint(plain, pos)
                stop = pos + length
                if stop > end:
                    raise IndexError
            else:
                stop = end
            if pos > end:
                raise IndexError
            found = True
            last: Any = events[-1] if events else ()
            if len(last) == 5 and last[0] == stream_id and last[4] == offset and not last[3]:
                last[2].append(plain[pos:stop])
                last[3] = bool(kind & 1)
                last[4] = offset + stop - pos
            else:
                events.append(
                    [stream_id, offset, [plain[pos:stop]], bool(kind & 1), offset + stop - pos]
                )
            pos = stop
    except IndexError:
        events.append((plain[frame:], found))  # aioquic finds the fault, too, and says it
    if not end:
        events.append((plain, False))
    return found


def _joined(event: Any) -> Event:
    if len(event) == 2:
        other: Event = event
        return other
    stream_id, offset, parts, fin, _ = event
    return stream_id, offset, parts[0] if len(parts) == 1 else b"".join(parts), fin


def _varint(octets: bytes, pos: int) -> tuple[int, int]:
    """The integer at `pos` and the position after it, which may lie beyond the end."""
    first = octets[pos]
    if first < 0x40:
        return first, pos + 1
    if first < 0x80:
        return (first & 0x3F) << 8 | octets[pos + 1], pos + 2
    if first < 0xC0:
        return int.from_bytes(octets[pos : pos + 4], "big") & 0x3FFFFFFF, pos + 4
    return int.from_bytes(octets[pos : pos + 8], "big") & 0x3FFFFFFFFFFFFFFF, pos + 8
