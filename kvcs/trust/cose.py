"""Signed manifests: the COSE_Sign1 message of the track "manifest.cose" (RFC 9052, 4.2).

Reading is strict, because whoever reads has not seen a signature yet: definite lengths, no tags
but the message's own, no label twice, and nothing after the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import cbor2

from kvcs.trust.producers import ProducerKey, Producers
from kvsp.blocks.layout import Octets
from kvsp.names.codes import DecodeErrorName
from kvsp.names.errors import DecodeError

_ALG: Final = 1
_CRIT: Final = 2
_KID: Final = 4
"""The header parameters "alg", "crit" and "kid" (RFC 9052, 3.1)."""

_TAG: Final = 0xD2
"""Tag 18, COSE_Sign1."""

_ARRAY_OF_FOUR: Final = 0x84

_MAX_DEPTH: Final = 4
"""Arrays and maps inside each other that headers may have."""

_MAX_ITEMS: Final = 64
"""Elements that an array or a map of a header may have."""


class Signed(NamedTuple):
    """A message that has the form of a COSE_Sign1, its signature not verified."""

    alg: int
    kid: bytes | None
    protected: bytes
    payload: memoryview
    signature: bytes


def sign(payload: Sequence[Octets], key: ProducerKey) -> list[Octets]:
    """A COSE_Sign1 message, tag 18, that carries a payload, both in pieces: those of the payload
    are passed on as they are, since a copy of 88 MB would hold up every thread."""
    protected = cbor2.dumps({_ALG: int(key.algorithm)})
    signature = key.sign(_to_be_signed(protected, payload))
    head = bytes([_TAG, _ARRAY_OF_FOUR]) + cbor2.dumps(protected) + cbor2.dumps({_KID: key.kid})
    return [head + _head(2, _octets(payload)), *payload, cbor2.dumps(signature)]


def read(message: Octets) -> Signed:
    """Take a message apart; tag 18 may be left out. Raises DecodeError `bad-cose`."""
    reader = _Reader(message)
    if reader.peek() == _TAG:
        reader.take(1)
    if reader.take(1)[0] != _ARRAY_OF_FOUR:
        raise _bad("it is not an array of four, with tag 18 or none")
    protected = bytes(reader.octets("the protected header"))
    unprotected = reader.header("the unprotected header")
    payload = reader.octets("the payload")
    signature = bytes(reader.octets("the signature"))
    reader.finish()
    inner = _Reader(protected)
    header = inner.header("the protected header")
    inner.finish()
    if twice := set(header) & set(unprotected):
        raise _bad(f"parameter {min(map(str, twice))} stands in both headers")
    if _CRIT in header or _CRIT in unprotected:
        raise _bad("'crit' asks for what is not known here")
    alg = header.get(_ALG)
    if not isinstance(alg, int):
        raise _bad("there is no integer 'alg' in the protected header")
    kid = header.get(_KID, unprotected.get(_KID))
    if kid is not None and not isinstance(kid, bytes):
        raise _bad("'kid' is no byte string")
    return Signed(alg, kid, protected, payload, signature)


def open_message(message: Octets, producers: Producers | None) -> memoryview:
    """The payload of a message that one of `producers` has signed.

    With None everybody may have signed it, and no signature is verified. Raises DecodeError
    `bad-cose`, `unknown-producer` or `bad-signature`.
    """
    signed = read(message)
    if producers is not None:
        producers.verify(
            signed.kid,
            signed.alg,
            _to_be_signed(signed.protected, [signed.payload]),
            signed.signature,
        )
    return signed.payload


def _to_be_signed(protected: bytes, payload: Sequence[Octets]) -> list[Octets]:
    """The Sig_structure (RFC 9052, 4.4), with an empty external_aad, in pieces."""
    # the payload last: put behind its head instead of copied into CBOR once more
    head = cbor2.dumps(["Signature1", protected, b""])[1:]
    return [b"\x84" + head + _head(2, _octets(payload)), *payload]


def _octets(parts: Sequence[Octets]) -> int:
    return sum(memoryview(part).nbytes for part in parts)


def _head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes([major << 5 | value])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 1 << 8 * size:
            return bytes([major << 5 | code]) + value.to_bytes(size)
    raise ValueError(f"{value} is no length")


class _Reader:
    """CBOR as headers need it: integers, strings, arrays, maps, false, true and null."""

    def __init__(self, data: Octets) -> None:
        self._data = memoryview(data).cast("B")
        self._at = 0

    def peek(self) -> int | None:
        return self._data[self._at] if self._at < len(self._data) else None

    def take(self, size: int) -> memoryview:
        if size > len(self._data) - self._at:
            raise _bad("it ends too early")
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken

    def finish(self) -> None:
        if self._at != len(self._data):
            raise _bad(f"{len(self._data) - self._at} octets are too many")

    def octets(self, what: str) -> memoryview:
        major, value = self._next()
        if major != 2:
            raise _bad(f"{what} is no byte string")
        return self.take(value)

    def header(self, what: str) -> dict[Any, Any]:
        if self._at == len(self._data):
            return {}  # an empty protected header is a string of no octets
        found = self._item(0)
        if not isinstance(found, dict):
            raise _bad(f"{what} is no map")
        return found

    def _next(self) -> tuple[int, int]:
        first = self.take(1)[0]
        major, value = first >> 5, first & 31
        if value < 24:
            return major, value
        if value > 27:
            raise _bad("a length is not told")
        return major, int.from_bytes(self.take(1 << value - 24))

    def _item(self, depth: int) -> Any:
        major, value = self._next()
        match major:
            case 0:
                return value
            case 1:
                return -1 - value
            case 2:
                return bytes(self.take(value))
            case 3:
                try:
                    return bytes(self.take(value)).decode()
                except UnicodeDecodeError:
                    raise _bad("a text is not UTF-8") from None
            case 4 | 5:
                if depth >= _MAX_DEPTH or value > _MAX_ITEMS:
                    raise _bad("a header is too deep or too long")
                if major == 4:
                    return [self._item(depth + 1) for _ in range(value)]
                return self._map(value, depth + 1)
            case 7 if value in (20, 21, 22):
                return {20: False, 21: True, 22: None}[value]
        raise _bad("a header holds what no parameter known here can be")

    def _map(self, count: int, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for _ in range(count):
            label = self._item(depth)
            if isinstance(label, bool) or not isinstance(label, int | str):
                raise _bad("a label is neither an integer nor a text")
            if label in found:
                raise _bad(f"parameter {label!r:.40} stands twice")
            found[label] = self._item(depth)
        return found


def _bad(detail: str) -> DecodeError:
    return DecodeError(DecodeErrorName.BAD_COSE, f"the COSE_Sign1 message is wrong: {detail}")
