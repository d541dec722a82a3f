"""Producer keys: who may sign the manifests of a scope (KVCS "Manifest Track").

A producer keeps its private key in a file of its own, `{"kid", "alg", "x", "d"}` (and "y" for
P-256), all hexadecimal. Its public half stands in the producers file that the members of the
scope have: `{"keys": [{"kid", "alg", "x"}, …]}`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.utils import (
    Prehashed,
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.hashes import SHA256

from kvcs.names.payload import data_digest
from kvcs.trust.pieces import in_one
from kvsp.blocks.layout import Octets
from kvsp.names import ijson
from kvsp.names.codes import DecodeErrorName
from kvsp.names.errors import DecodeError, FileError
from kvsp.names.private_files import create_private, read_private

MAX_KID_OCTETS: Final = 64
MAX_PRODUCERS: Final = 10_000
MAX_FILE_OCTETS: Final = 4 << 20
_COORDINATE: Final = 32
_KID: Final = 8
_HASHED: Final = ec.ECDSA(Prehashed(SHA256()))
"""What is signed is hashed before: that lets other threads run, and needs no copy of it."""

_PublicKey: TypeAlias = Ed25519PublicKey | ec.EllipticCurvePublicKey
_PrivateKey: TypeAlias = Ed25519PrivateKey | ec.EllipticCurvePrivateKey


class Algorithm(IntEnum):
    """COSE algorithms of producer keys (RFC 9053, 2)."""

    ES256 = -7
    """ECDSA with SHA-256, on P-256."""
    EDDSA = -8
    """EdDSA, with Ed25519."""

    @property
    def label(self) -> str:
        """As people write it."""
        return "ES256" if self is Algorithm.ES256 else "EdDSA"


class ProducerKey:
    """The private key of one producer. It never appears in `repr`, messages or pickles."""

    __slots__ = ("_key", "algorithm", "kid", "public")

    def __init__(self, key: _PrivateKey, kid: bytes | None = None) -> None:
        """`kid` is derived from the public key unless it is given.

        Raises ValueError for a `kid` of no or too many octets, or another curve than P-256.
        """
        self._key = key
        self.public = _members(key.public_key())
        self.algorithm = Algorithm(self.public["alg"])
        made = hashlib.sha256(bytes.fromhex(self.public["x"] + self.public.get("y", ""))).digest()
        self.kid = made[:_KID] if kid is None else kid
        if not 1 <= len(self.kid) <= MAX_KID_OCTETS:
            raise ValueError(f"a kid has 1 to {MAX_KID_OCTETS} octets")
        self.public = {"kid": self.kid.hex(), **self.public}

    @classmethod
    def generate(
        cls, algorithm: Algorithm = Algorithm.EDDSA, kid: bytes | None = None
    ) -> ProducerKey:
        """A fresh random key."""
        if algorithm is Algorithm.EDDSA:
            return cls(Ed25519PrivateKey.generate(), kid)
        return cls(ec.generate_private_key(ec.SECP256R1()), kid)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, pipes: bool = False) -> ProducerKey:
        """Read a key file, or with `pipes` a pipe, which only its owner may be able to read.

        Raises FileError, which names the file and never shows what is in it.
        """
        tree = _read(path, read_private(path, MAX_FILE_OCTETS, pipes=pipes))
        try:
            kid, public = _public(tree, private=True)
            secret = _octets(tree, "d", _COORDINATE)
            key = _private(Algorithm(tree["alg"]), secret)
            if _members(key.public_key()) != _members(public):
                raise ValueError("'d' is not the private key of 'x' and 'y'")
        except ValueError as error:
            raise FileError(f"{os.fspath(path)}: not a producer's key: {error}") from None
        return cls(key, kid)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a new file of mode 0600, whole or not at all. Raises FileError, also when it
        exists."""
        if isinstance(self._key, Ed25519PrivateKey):
            secret = self._key.private_bytes_raw()
        else:
            secret = self._key.private_numbers().private_value.to_bytes(_COORDINATE)
        create_private(path, ijson.canonical({**self.public, "d": secret.hex()}) + b"\n")

    def sign(self, data: Sequence[Octets]) -> bytes:
        """The signature over `data`, in pieces, 64 octets."""
        if isinstance(self._key, Ed25519PrivateKey):
            return self._key.sign(in_one(data))
        r, s = decode_dss_signature(self._key.sign(data_digest(*data), _HASHED))
        return r.to_bytes(_COORDINATE) + s.to_bytes(_COORDINATE)

    def __repr__(self) -> str:
        return f"ProducerKey(kid={self.kid.hex()}, {self.algorithm.label})"

    def __reduce__(self) -> str:
        raise TypeError("a producer's key is not pickled: it stays in this process")


class Producers:
    """The public keys of the producers that a consumer accepts, by `kid`."""

    def __init__(self, keys: Iterable[Mapping[str, Any]]) -> None:
        """`keys` are as in the file. Raises ValueError, which says which one is wrong."""
        self._keys: dict[bytes, _PublicKey] = {}
        for index, tree in enumerate(keys):
            try:
                kid, key = _public(tree)
                if kid in self._keys:
                    raise ValueError("its kid stands twice")
            except ValueError as error:
                raise ValueError(f"keys[{index}]: {error}") from None
            self._keys[kid] = key
        if not 0 < len(self._keys) <= MAX_PRODUCERS:
            raise ValueError(f"'keys' lists 1 to {MAX_PRODUCERS} producers")

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, pipes: bool = False) -> Producers:
        """Read a producers file, or with `pipes` a pipe, which nobody but its owner may be able to
        write.

        Raises FileError, which names the file and what is wrong in it.
        """
        listed = _listed(path, pipes=pipes)
        try:
            return cls(listed)
        except ValueError as error:
            raise FileError(f"{os.fspath(path)}: not a file of producers: {error}") from None

    def __len__(self) -> int:
        return len(self._keys)

    def verify(self, kid: bytes | None, alg: int, data: Sequence[Octets], signature: bytes) -> None:
        """Raises DecodeError `unknown-producer` or `bad-signature` unless `signature` over
        `data`, in pieces, is by the key `kid`."""
        if kid is None:
            raise DecodeError(DecodeErrorName.UNKNOWN_PRODUCER, "it does not say who signed it")
        key = self._keys.get(kid)
        if key is None:
            raise DecodeError(
                DecodeErrorName.UNKNOWN_PRODUCER,
                f"it is signed by {kid[:MAX_KID_OCTETS].hex() or 'nobody'}, "
                "which is none of the producers that are accepted",
            )
        due = Algorithm.EDDSA if isinstance(key, Ed25519PublicKey) else Algorithm.ES256
        if alg != due:
            raise _bad_signature(f"its algorithm is {alg}, that of producer {kid.hex()} is {due}")
        if len(signature) != 2 * _COORDINATE:
            raise _bad_signature(f"it has {len(signature)} octets instead of {2 * _COORDINATE}")
        try:
            if isinstance(key, Ed25519PublicKey):
                key.verify(signature, in_one(data))
            else:
                r, s = (
                    int.from_bytes(half)
                    for half in (signature[:_COORDINATE], signature[_COORDINATE:])
                )
                key.verify(encode_dss_signature(r, s), data_digest(*data), _HASHED)
        except InvalidSignature:
            raise _bad_signature(f"it is not that of producer {kid.hex()}") from None


def with_producer(path: str | os.PathLike[str], key: ProducerKey) -> bytes:
    """The text of a producers file with one more key in it; the file may be missing.

    Raises FileError when it is no such file, or has the `kid` already.
    """
    listed = _listed(path) if os.path.exists(path) else []
    try:
        Producers([*listed, key.public])
    except ValueError as error:
        raise FileError(f"{os.fspath(path)}: {error}") from None
    return ijson.canonical({"keys": [*listed, key.public]}) + b"\n"


def _read(path: str | os.PathLike[str], data: bytes) -> Any:
    try:
        return ijson.loads(data)
    except DecodeError:
        # what is broken may hold a key anywhere
        raise FileError(f"{os.fspath(path)}: not one strict JSON object") from None


def _listed(path: str | os.PathLike[str], *, pipes: bool = False) -> list[Any]:
    """What a producers file lists, not looked at. Raises FileError."""
    data = read_private(path, MAX_FILE_OCTETS, others_may_read=True, pipes=pipes)
    tree = _read(path, data)
    if not isinstance(tree, dict) or set(tree) != {"keys"} or not isinstance(tree["keys"], list):
        raise FileError(
            f"{os.fspath(path)}: not a file of producers: it is an object with the array 'keys'"
        )
    return tree["keys"]


def _public(tree: Any, *, private: bool = False) -> tuple[bytes, _PublicKey]:
    """Raises ValueError, which shows nothing that may be secret."""
    if not isinstance(tree, dict):
        raise ValueError("a key is an object")
    alg = tree.get("alg")
    if not ijson.is_integer(alg) or alg not in tuple(Algorithm):
        raise ValueError("'alg' is -8 (EdDSA) or -7 (ES256)")
    algorithm = Algorithm(alg)
    due = {"kid", "alg", "x"} | ({"y"} if algorithm is Algorithm.ES256 else set())
    if private:
        due.add("d")
    elif "d" in tree:
        raise ValueError("it holds a private key, 'd', which belongs to its producer alone")
    if set(tree) != due:
        raise ValueError(f"a key for {algorithm.label} has the members {', '.join(sorted(due))}")
    kid = _octets(tree, "kid")
    if not 1 <= len(kid) <= MAX_KID_OCTETS:
        raise ValueError(f"'kid' has 1 to {MAX_KID_OCTETS} octets")
    x = _octets(tree, "x", _COORDINATE)
    if algorithm is Algorithm.EDDSA:
        return kid, Ed25519PublicKey.from_public_bytes(x)
    y = _octets(tree, "y", _COORDINATE)
    try:
        numbers = ec.EllipticCurvePublicNumbers(
            int.from_bytes(x), int.from_bytes(y), ec.SECP256R1()
        )
        return kid, numbers.public_key()
    except ValueError:
        raise ValueError("'x' and 'y' are no point of P-256") from None


def _private(algorithm: Algorithm, secret: bytes) -> _PrivateKey:
    if algorithm is Algorithm.EDDSA:
        return Ed25519PrivateKey.from_private_bytes(secret)
    try:
        return ec.derive_private_key(int.from_bytes(secret), ec.SECP256R1())
    except ValueError:
        raise ValueError("'d' is no private key of P-256") from None


def _members(key: _PublicKey) -> dict[str, Any]:
    if isinstance(key, Ed25519PublicKey):
        return {"alg": int(Algorithm.EDDSA), "x": key.public_bytes_raw().hex()}
    if not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("a producer's key is on P-256, or an Ed25519 key")
    numbers = key.public_numbers()
    return {
        "alg": int(Algorithm.ES256),
        "x": numbers.x.to_bytes(_COORDINATE).hex(),
        "y": numbers.y.to_bytes(_COORDINATE).hex(),
    }


def _octets(tree: Mapping[str, Any], name: str, octets: int | None = None) -> bytes:
    text = tree[name]
    size = "" if octets is None else f"{2 * octets} "
    wrong = f"{name!r} is {size}lower-case hexadecimal digits"
    if not isinstance(text, str) or len(text) % 2 or set(text) - set("0123456789abcdef"):
        raise ValueError(wrong)
    if octets is not None and len(text) != 2 * octets:
        raise ValueError(wrong)
    return bytes.fromhex(text)


def _bad_signature(detail: str) -> DecodeError:
    return DecodeError(DecodeErrorName.BAD_SIGNATURE, f"the signature is wrong: {detail}")
