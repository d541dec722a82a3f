"""Secure objects: payloads that relays can neither read nor alter (MOQ secure objects).

The key of a track is derived from a content key and the Full Track Name, the nonce from the
Location; Publisher Priority and immutable properties are authenticated with the payload. Derived
once per track and key, never per Object. What is sealed is the KVCS payload or the manifest.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR, GCM
from cryptography.hazmat.primitives.hashes import SHA256, SHA512, HashAlgorithm
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from kvcs.names.errors import KvcsError
from kvcs.trust.pieces import PIECE, in_one
from kvsp.blocks.layout import Octets
from kvsp.names.codes import CipherSuite, DecodeErrorName
from kvsp.names.content_keys import ContentKey, ContentKeys
from kvsp.names.errors import DecodeError
from moqt.values.codes import DEFAULT_PRIORITY, PropertyType
from moqt.values.errors import SessionError
from moqt.values.messages import Properties, property_value
from moqt.values.names import FullTrackName
from moqt.wire.primitives import encode_namespace, encode_octets, iter_key_values
from moqt.wire.vi64 import Truncated, decode_vi64, encode_vi64

KEY_ID: Final = 0x02
"""The property Secure Object Key ID, inside IMMUTABLE_PROPERTIES."""

OVERHEAD_OCTETS: Final = 16 + 9
"""Octets by which a sealed payload is longer at the most: its tag and its length."""

MAX_OBJECT_ID: Final = (1 << 32) - 1
MAX_SEALED_BLOCKS: Final = 1 << 34
"""Blocks of 16 octets sealed with one key of a track, 256 GiB."""

_SECRET_LABEL: Final = b"MOQ 1.0 Secure Objects Secret key "
_SALT_LABEL: Final = b"MOQ 1.0 Secret salt "
_NONCE: Final = 12
_GCM_TAG: Final = 16
_PLACE: Final = struct.Struct(">QI")
_ENCRYPTED_PROPERTIES: Final = b"\x00\x0a"
_KNOWN_PROPERTIES: Final = 64
"""Spellings of Object Properties that are remembered; a publication has one per key."""


class Aead(Protocol):
    """Authenticated encryption under one key."""

    def encrypt(self, nonce: bytes, data: Octets, associated_data: bytes) -> Octets: ...

    def decrypt(self, nonce: bytes, data: Octets, associated_data: bytes) -> Octets:
        """Raises InvalidTag."""
        ...


class Gcm:
    """AES-GCM, of what is long a piece at a time, so that other threads have their turn."""

    def __init__(self, key: bytes) -> None:
        self._whole = AESGCM(key)
        self._cipher = AES(key)

    def encrypt(self, nonce: bytes, data: Octets, associated_data: bytes) -> Octets:
        if len(data) <= PIECE:
            return self._whole.encrypt(nonce, data, associated_data)
        crypt = Cipher(self._cipher, GCM(nonce)).encryptor()
        crypt.authenticate_additional_data(associated_data)
        sealed = _in_pieces(crypt, data, len(data) + _GCM_TAG)
        crypt.finalize()
        sealed[len(data) :] = crypt.tag
        return sealed

    def decrypt(self, nonce: bytes, data: Octets, associated_data: bytes) -> Octets:
        if len(data) <= PIECE:
            return self._whole.decrypt(nonce, data, associated_data)
        view = memoryview(data).cast("B")
        crypt = Cipher(self._cipher, GCM(nonce, bytes(view[-_GCM_TAG:]))).decryptor()
        crypt.authenticate_additional_data(associated_data)
        opened = _in_pieces(crypt, view[:-_GCM_TAG], len(view) - _GCM_TAG)
        crypt.finalize()  # before that nothing is what was sealed
        return opened


def _in_pieces(crypt: CipherContext, data: Octets, octets: int) -> bytearray:
    """What a cipher makes of `data`, at the beginning of so many octets."""
    made, view = bytearray(octets), memoryview(data)
    with memoryview(made) as out:
        for at in range(0, len(view), PIECE):
            crypt.update_into(view[at : at + PIECE], out[at:])
    return made


class CtrHmac:
    """AES-CTR with HMAC-SHA-256 (RFC 9605, 4.5.1): 16 octets encrypt, 32 authenticate."""

    def __init__(self, key: bytes, tag_octets: int) -> None:
        self._cipher = AES(key[:16])
        self._hmac = key[16:]
        self._tag = tag_octets

    def encrypt(self, nonce: bytes, data: Octets, associated_data: bytes) -> bytes:
        sealed = self._crypt(nonce, data)
        return sealed + self._authenticator(nonce, sealed, associated_data)

    def decrypt(self, nonce: bytes, data: Octets, associated_data: bytes) -> bytes:
        view = memoryview(data)
        if len(view) < self._tag:
            raise InvalidTag
        sealed, tag = view[: -self._tag], view[-self._tag :]
        if not hmac.compare_digest(self._authenticator(nonce, sealed, associated_data), tag):
            raise InvalidTag
        return self._crypt(nonce, sealed)

    def _crypt(self, nonce: bytes, data: Octets) -> bytes:
        crypt = Cipher(self._cipher, CTR(nonce + bytes(4))).encryptor()
        return crypt.update(data) + crypt.finalize()

    def _authenticator(self, nonce: bytes, sealed: Octets, associated: bytes) -> bytes:
        lengths = struct.pack(">QQQ", len(associated), len(sealed), self._tag)
        mac = hmac.new(self._hmac, lengths + nonce + associated, "sha256")
        mac.update(sealed)
        return mac.digest()[: self._tag]


class _Suite(NamedTuple):
    digest: HashAlgorithm
    key_octets: int
    tag_octets: int
    gcm: bool


_SUITES: Final = {
    CipherSuite.AES_128_CTR_HMAC_SHA256_80: _Suite(SHA256(), 48, 10, False),
    CipherSuite.AES_128_CTR_HMAC_SHA256_64: _Suite(SHA256(), 48, 8, False),
    CipherSuite.AES_128_CTR_HMAC_SHA256_32: _Suite(SHA256(), 48, 4, False),
    CipherSuite.AES_128_GCM_SHA256_128: _Suite(SHA256(), 16, 16, True),
    CipherSuite.AES_256_GCM_SHA512_128: _Suite(SHA512(), 32, 16, True),
}


class TrackKey:
    """What one content key makes for one track: key and salt, never shown."""

    __slots__ = ("_aead", "_salt")

    def __init__(self, base_key: bytes, suite: CipherSuite, key_id: int, name: FullTrackName):
        key, salt = derive(base_key, suite, key_id, name)
        self._salt = int.from_bytes(salt)
        form = _SUITES[suite]
        self._aead: Aead = Gcm(key) if form.gcm else CtrHmac(key, form.tag_octets)

    def seal(self, place: bytes, associated_data: bytes, plaintext: Octets) -> Octets:
        return self._aead.encrypt(self._nonce(place), plaintext, associated_data)

    def open(self, place: bytes, associated_data: bytes, sealed: Octets) -> Octets:
        """Raises DecodeError `auth-failed`, whatever the reason."""
        try:
            return self._aead.decrypt(self._nonce(place), sealed, associated_data)
        except (InvalidTag, ValueError):
            raise DecodeError(
                DecodeErrorName.AUTH_FAILED,
                "it was altered on its way, or sealed with another key of that id",
            ) from None

    def _nonce(self, place: bytes) -> bytes:
        return (int.from_bytes(place) ^ self._salt).to_bytes(_NONCE)


class TrackSealer:
    """Seals the Objects of one track with one content key.

    A Location is sealed once: two payloads under one nonce would give both away. Whoever
    seals again what failed to be published takes another publication.
    """

    def __init__(self, key: ContentKey, name: FullTrackName) -> None:
        self._immutable = encode_vi64(KEY_ID) + encode_vi64(key.key_id)
        self.properties = encode_vi64(PropertyType.IMMUTABLE_PROPERTIES) + encode_octets(
            self._immutable
        )
        """The Object Properties of every sealed Object, as Key-Value-Pairs."""
        self._key = TrackKey(key.key, key.cipher_suite, key.key_id, name)
        self._left = MAX_SEALED_BLOCKS

    def seal(self, group: int, object_id: int, priority: int, parts: Iterable[Octets]) -> Octets:
        """The payload in `parts`, sealed for its place. Raises ValueError for an Object ID above
        2^32-1, KvcsError when the key has sealed all that it may."""
        if object_id > MAX_OBJECT_ID:
            raise ValueError(f"Object {object_id}: the largest one that can be sealed is 2^32-1")
        views = [memoryview(part).cast("B") for part in parts]
        length = sum(map(len, views))
        self._left -= length // 16 + 1
        if self._left < 0:
            raise KvcsError(
                "the content key has sealed as much of this track as it may, 256 GiB: publish in "
                "several segments"
            )
        place = _PLACE.pack(group, object_id)
        pieces: list[Octets] = [encode_vi64(length), *views]
        plaintext = in_one(pieces)
        return self._key.seal(place, place + bytes([priority]) + self._immutable, plaintext)


class TrackOpener:
    """Opens the sealed Objects of one track, whichever of the keys it was sealed with."""

    def __init__(self, keys: ContentKeys, name: FullTrackName) -> None:
        self._keys = {key.key_id: key for key in keys}
        self._name = name
        self._made: dict[int, TrackKey] = {}
        self._read: dict[bytes, tuple[bytes, TrackKey]] = {}
        self.default_priority = DEFAULT_PRIORITY
        """Publisher Priority of Objects that do not say theirs."""

    def track_properties(self, properties: Properties) -> None:
        """The Track Properties, which have that priority where it is another one."""
        value = property_value(properties, PropertyType.DEFAULT_PUBLISHER_PRIORITY)
        if isinstance(value, int):
            self.default_priority = value

    def open(
        self,
        group: int,
        object_id: int,
        priority: int | None,
        properties: bytes,
        parts: Sequence[Octets],
    ) -> memoryview:
        """The payload that was sealed.

        Raises DecodeError `no-key-id`, `unknown-key-id`, `object-id-range`, `auth-failed`,
        `truncated` or `bad-properties`. Such an Object is treated as missing.
        """
        found = self._read.get(properties)
        if found is None:
            found = self._key_of(properties)
            if len(self._read) >= _KNOWN_PROPERTIES:
                self._read.clear()
            self._read[properties] = found
        immutable, key = found
        if object_id > MAX_OBJECT_ID:
            raise DecodeError(
                DecodeErrorName.OBJECT_ID_RANGE, f"Object {object_id} is above 2^32-1"
            )
        if priority is None:
            priority = self.default_priority
        place = _PLACE.pack(group, object_id)
        sealed = in_one(parts)
        return payload_of(key.open(place, place + bytes([priority]) + immutable, sealed))

    def _key_of(self, properties: bytes) -> tuple[bytes, TrackKey]:
        immutable = _immutable(properties)
        key_id = None if immutable is None else _key_id(immutable)
        if immutable is None or key_id is None:
            raise DecodeError(
                DecodeErrorName.NO_KEY_ID,
                "it is not sealed, and this scope has content keys: only what is sealed is taken",
            )
        if key_id not in self._keys:
            raise unknown_key(key_id, self._keys)
        made = self._made.get(key_id)
        if made is None:
            key = self._keys[key_id]
            made = self._made[key_id] = TrackKey(key.key, key.cipher_suite, key_id, self._name)
        return immutable, made


def sealed_with(properties: bytes) -> int | None:
    """The Key ID that Object Properties name; None for an Object that is not sealed."""
    immutable = _immutable(properties)
    return None if immutable is None else _key_id(immutable)


def unknown_key(key_id: int, known: Iterable[int]) -> DecodeError:
    """An Object is sealed with a key that is not there."""
    names = ", ".join(map(str, sorted(known)))
    have = f"the scope file has {names}" if names else "the scope file has no content keys"
    return DecodeError(
        DecodeErrorName.UNKNOWN_KEY_ID,
        f"it is sealed with content key {key_id}, and {have}: take the file that the members of "
        "the scope have now",
    )


def derive(
    base_key: bytes, suite: CipherSuite, key_id: int, name: FullTrackName
) -> tuple[bytes, bytes]:
    """`moq_key` and `moq_salt` of a track."""
    form = _SUITES[suite]
    suffix = (
        encode_namespace(name.namespace)
        + encode_octets(name.name)
        + suite.to_bytes(2)
        + key_id.to_bytes(8)
    )
    # HKDF-Extract with an empty salt, which is a string of zeros (RFC 5869, 2.2)
    secret = hmac.digest(bytes(form.digest.digest_size), base_key, form.digest.name)
    key = HKDFExpand(form.digest, form.key_octets, _SECRET_LABEL + suffix).derive(secret)
    salt = HKDFExpand(form.digest, _NONCE, _SALT_LABEL + suffix).derive(secret)
    return key, salt


def payload_of(plaintext: Octets) -> memoryview:
    """The payload in the plaintext of an Object; its encrypted properties are passed over.

    Raises DecodeError `truncated` or `bad-properties`.
    """
    view = memoryview(plaintext)
    try:
        length, at = decode_vi64(view, 0)
    except Truncated:
        raise DecodeError(DecodeErrorName.TRUNCATED, "the sealed length is cut") from None
    if length > len(view) - at:
        raise DecodeError(
            DecodeErrorName.TRUNCATED,
            f"{length} octets are said to be sealed, {len(view) - at} are",
        )
    payload, rest = view[at : at + length], bytes(view[at + length :])
    if rest:
        _check_list(rest)
    return payload


def _check_list(rest: bytes) -> None:
    """What may follow the payload: an Encrypted Properties List, and nothing after it."""
    try:
        length, at = decode_vi64(rest, len(_ENCRYPTED_PROPERTIES))
    except Truncated:
        length, at = -1, 0
    if not rest.startswith(_ENCRYPTED_PROPERTIES) or length != len(rest) - at:
        raise DecodeError(
            DecodeErrorName.BAD_PROPERTIES, "what follows the payload is no list of properties"
        )


def _immutable(properties: bytes) -> bytes | None:
    value = _value_of(PropertyType.IMMUTABLE_PROPERTIES, properties)
    return value if isinstance(value, bytes) else None


def _key_id(immutable: bytes) -> int | None:
    value = _value_of(KEY_ID, immutable)
    return value if isinstance(value, int) else None


def _value_of(type_: int, pairs: bytes) -> int | bytes | None:
    try:
        return next((value for each, value in iter_key_values(pairs) if each == type_), None)
    except SessionError:
        return None  # a decoder has read them before: what is no pair is no key either
