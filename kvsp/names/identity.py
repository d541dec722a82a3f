"""Which caches are interchangeable, and what their blocks are called (KVSP 4.1, 4.2)."""

from __future__ import annotations

import difflib
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import rfc8785

from kvsp.names import ijson
from kvsp.names.codes import (
    DIGEST_PREFIX,
    HASH_OCTETS,
    LAYOUT_1,
    MAX_GEOMETRY,
    MAX_MODEL_OCTETS,
    MAX_SCOPE_FILE_OCTETS,
    MAX_SCOPE_KEY_OCTETS,
    MIN_SCOPE_KEY_OCTETS,
    SCOPE_ID_OCTETS,
    DecodeErrorName,
    ElementType,
)
from kvsp.names.content_keys import CONTENT_KEYS, ContentKey, ContentKeys, parse_content_keys
from kvsp.names.errors import DecodeError, FileError, ScopeFileError
from kvsp.names.prefix import complete_blocks
from kvsp.names.private_files import changing, create_private, read_private, replace_private
from kvsp.names.tokens import Tokens, token_octets

if TYPE_CHECKING:
    import numpy as np

_COMPAT_LABEL: Final = b"KVSP-COMPAT-1\x00"
_SCOPE_LABEL: Final = b"KVSP-SCOPE-1\x00"
_BLOCK_LABEL: Final = b"KVSP-BLOCK-1\x00"
_HMAC_BLOCK: Final = 64
_INNER_PAD: Final = bytes(octet ^ 0x36 for octet in range(256))
_OUTER_PAD: Final = bytes(octet ^ 0x5C for octet in range(256))
_ELEMENT_TYPES: Final = {str(element): element for element in ElementType}

_DIGEST = re.compile(r"sha-256:[0-9a-f]{64}")
_HEX = re.compile(r"(?:[0-9a-f]{2})*")
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
_VALUE = re.compile(r"[a-z0-9.+-]{1,64}")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?")


def parse_hex(text: str, octets: int | None = None) -> bytes:
    """Decode `<hexN>`: lower-case hexadecimal, of `octets` octets when that is given.

    Raises DecodeError `bad-hex`. The text may be a secret and is never in the message.
    """
    if not _HEX.fullmatch(text):
        raise DecodeError(DecodeErrorName.BAD_HEX, "not lower-case hexadecimal of whole octets")
    value = bytes.fromhex(text)
    if octets is not None and len(value) != octets:
        raise DecodeError(
            DecodeErrorName.BAD_HEX, f"{len(text)} hexadecimal digits instead of {2 * octets}"
        )
    return value


# --- positional encodings ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Positional:
    """A positional encoding: its name and the parameters that differ from the model's."""

    name: str
    items: tuple[tuple[str, str], ...] = ()

    @property
    def parameters(self) -> dict[str, str]:
        return dict(self.items)

    def __str__(self) -> str:
        return ";".join([self.name, *(f"{key}={value}" for key, value in self.items)])


def parse_positional(text: str) -> Positional:
    """Parse `name *( ";" parameter "=" value )` (KVSP 4.1, "positional").

    Parameter names are unique and ascend; a value that starts like a number is
    written as JCS writes it, so that one configuration has one spelling.
    Raises DecodeError `bad-positional`.
    """
    name, *rest = text.split(";")
    if not _NAME.fullmatch(name):
        raise _bad_positional("the name is a lower-case letter and up to 31 of a-z 0-9 -")
    parameters: dict[str, str] = {}
    previous = ""
    for item in rest:
        key, separator, value = item.partition("=")
        if not separator or not _NAME.fullmatch(key) or not _VALUE.fullmatch(value):
            raise _bad_positional("a parameter is written name=value, without spaces")
        if key <= previous:
            raise _bad_positional("parameter names are unique and in ascending order")
        if value[0] in "0123456789+-" and not _is_canonical_number(value):
            raise _bad_positional(f"the number of {key} is not written as JCS writes it")
        parameters[key] = value
        previous = key
    return Positional(name, tuple(parameters.items()))


def _is_canonical_number(text: str) -> bool:
    if not _JSON_NUMBER.fullmatch(text):
        return False
    try:
        return rfc8785.dumps(float(text)) == text.encode("ascii")
    except rfc8785.CanonicalizationError:  # beyond the range of doubles
        return False


def _bad_positional(detail: str) -> DecodeError:
    return DecodeError(DecodeErrorName.BAD_POSITIONAL, detail)


# --- Compatibility Descriptor --------------------------------------------------------

_INTEGERS: Final = ("layers", "kv_heads", "head_dim", "block_tokens")
_MEMBERS: Final = (
    "model",
    "model_digest",
    "tokenizer_digest",
    "adapters",
    "layers",
    "kv_heads",
    "head_dim",
    "kv_dtype",
    "positional",
    "block_tokens",
    "layout",
)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A Compatibility Descriptor (KVSP 4.1).

    Made by `parse`. Two descriptors are equal when their canonical octets are; members
    this class has no attribute for are kept in those octets, and so in the identity.
    """

    model: str = field(compare=False)
    model_digest: str = field(compare=False)
    tokenizer_digest: str = field(compare=False)
    adapters: tuple[str, ...] = field(compare=False)
    layers: int = field(compare=False)
    kv_heads: int = field(compare=False)
    head_dim: int = field(compare=False)
    kv_dtype: str = field(compare=False)
    positional: Positional = field(compare=False)
    block_tokens: int = field(compare=False)
    layout: str = field(compare=False)
    jcs: bytes = field(repr=False)
    """The canonical JSON octets, unknown members included."""

    compat_id: bytes = field(compare=False, repr=False)
    """The Compatibility ID, 32 octets."""

    @classmethod
    def parse(cls, source: bytes | bytearray | memoryview | str | Mapping[str, Any]) -> Descriptor:
        """Validate a descriptor given as JSON text or as a JSON object.

        Raises DecodeError: `not-i-json`, `duplicate-member`, `not-an-object`, then
        member by member in the order of KVSP 4.1 `missing-member`, `wrong-type`,
        `empty-adapters`, `out-of-range`, `bad-digest`, `bad-positional`.
        """
        if isinstance(source, Mapping):
            # through its own text: copies it, and refuses what is no JSON
            source = ijson.canonical(dict(source))
        tree = ijson.loads(source)
        if not isinstance(tree, dict):
            raise DecodeError(DecodeErrorName.NOT_AN_OBJECT, "a descriptor is a JSON object")
        values = {name: _member(tree, name) for name in _MEMBERS}
        jcs = ijson.canonical(tree)
        compat_id = hashlib.sha256(_COMPAT_LABEL + jcs).digest()
        return cls(jcs=jcs, compat_id=compat_id, **values)

    def to_dict(self) -> dict[str, Any]:
        """A fresh JSON object with every member, known or not."""
        members: dict[str, Any] = ijson.loads(self.jcs)
        return members

    @property
    def element_type(self) -> ElementType:
        """The registered element type.

        Raises DecodeError `codec-unsupported` for a name outside the registry: such a
        descriptor has a Compatibility ID, but nobody here can read its raw sections.
        """
        element = _ELEMENT_TYPES.get(self.kv_dtype)
        if element is None:
            raise DecodeError(
                DecodeErrorName.CODEC_UNSUPPORTED,
                f"'kv_dtype': {self.kv_dtype!r} is no registered element type "
                f"(known: {', '.join(ElementType)})",
            )
        return element

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The numpy dtype of K and V. Raises as `element_type` does."""
        return self.element_type.dtype

    @property
    def element_octets(self) -> int:
        """Octets of one element. Raises as `element_type` does."""
        return self.element_type.octets

    def section_octets(self, tokens: int | None = None) -> int:
        """Octets of one raw K or V section of one layer (KVSP 4.3).

        `tokens` defaults to one block. Raises DecodeError `codec-unsupported` for an
        unregistered element type or a layout other than `kvsp-layout-1`.
        """
        if self.layout != LAYOUT_1:
            raise DecodeError(
                DecodeErrorName.CODEC_UNSUPPORTED, f"'layout': {self.layout!r} is not {LAYOUT_1}"
            )
        count = self.block_tokens if tokens is None else tokens
        return count * self.kv_heads * self.head_dim * self.element_octets


def misspelt_members(descriptor: Descriptor) -> dict[str, str]:
    """Members that nobody here knows, and the known member that each is nearly called and that
    is missing: they are legal, count for the Compatibility ID, and say nothing to anybody."""
    tree = descriptor.to_dict()
    absent = [name for name in _MEMBERS if name not in tree]
    return {near: name for name in absent if (near := _near(tree, name)) is not None}


def _near(tree: Mapping[str, Any], name: str) -> str | None:
    """A member of a name that nobody knows, close enough to be `name` misspelt."""
    unknown = [each for each in tree if each not in _MEMBERS and len(each) < 2 * len(name)]
    return next(iter(difflib.get_close_matches(name, unknown, n=1, cutoff=0.75)), None)


def _member(tree: dict[str, Any], name: str) -> Any:
    if name not in tree:
        if name == "adapters":
            return ()
        near = _near(tree, name)
        meant = "" if near is None else f"; {near!r} may be meant to be it"
        raise DecodeError(DecodeErrorName.MISSING_MEMBER, f"the descriptor has no {name!r}{meant}")
    value = tree[name]
    if name in _INTEGERS:
        return _geometry(name, value)
    if name == "adapters":
        return _adapters(value)
    if not isinstance(value, str):
        raise DecodeError(DecodeErrorName.WRONG_TYPE, f"{name!r} is a string")
    if name == "model" and not 1 <= len(value.encode()) <= MAX_MODEL_OCTETS:
        raise DecodeError(
            DecodeErrorName.OUT_OF_RANGE, f"'model' is 1 to {MAX_MODEL_OCTETS} UTF-8 octets long"
        )
    if name.endswith("_digest"):
        return _digest(name, value)
    return parse_positional(value) if name == "positional" else value


def _geometry(name: str, value: Any) -> int:
    if not ijson.is_integer(value):
        raise DecodeError(DecodeErrorName.WRONG_TYPE, f"{name!r} is an integer")
    if not 1 <= value <= MAX_GEOMETRY:
        raise DecodeError(DecodeErrorName.OUT_OF_RANGE, f"{name!r} is from 1 to {MAX_GEOMETRY}")
    return int(value)


def _adapters(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise DecodeError(DecodeErrorName.WRONG_TYPE, "'adapters' is an array of digest strings")
    if not value:
        raise DecodeError(
            DecodeErrorName.EMPTY_ADAPTERS, "'adapters' is left out when no adapter is applied"
        )
    return tuple(_digest("adapters", item) for item in value)


def _digest(name: str, value: str) -> str:
    if not _DIGEST.fullmatch(value):
        raise DecodeError(
            DecodeErrorName.BAD_DIGEST,
            f"{name!r} is {DIGEST_PREFIX!r} and 64 lower-case hexadecimal digits",
        )
    return value


def model_digest(files: Mapping[str, bytes | os.PathLike[str]]) -> str:
    """The digest of model or adapter weights: `sha-256:` and 64 digits (KVSP 4.1).

    `files` maps each weight file's name (its path below the model's folder, with `/`
    between parts) to its path on this machine or to its octets. Files are hashed one
    after another in ascending order of the UTF-8 octets of their names, whatever the
    order of the mapping. Raises ValueError for no file or a name that is no such path,
    OSError when a file cannot be read.
    """
    if not files:
        raise ValueError("a model has at least one weight file")
    for name in files:
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise ValueError(f"{name!r} is not a path below the model's folder")
    digest = hashlib.sha256()
    for name in sorted(files, key=lambda name: name.encode("utf-8")):
        content = files[name]
        if isinstance(content, bytes):
            digest.update(content)
            continue
        buffer = bytearray(1 << 20)
        view = memoryview(buffer)
        with open(content, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(view[:count])
    return DIGEST_PREFIX + digest.hexdigest()


# --- scopes --------------------------------------------------------------------------


class Scope:
    """A scope: who shares a Scope Key can name, and so share, the same blocks (KVSP 4.2).

    The keys never appear in `repr`, messages or pickles.
    """

    __slots__ = ("_key", "content_keys", "scope_id")

    scope_id: bytes
    """The Scope ID, 16 octets; not a secret."""

    content_keys: ContentKeys
    """What Objects on MOQT are sealed with: the last one, and opened with. None: in clear."""

    def __init__(self, scope_key: bytes, content_keys: ContentKeys = ()) -> None:
        """Raises DecodeError `short-scope-key` below 32 octets, `out-of-range` above 1024."""
        if len(scope_key) < MIN_SCOPE_KEY_OCTETS:
            raise DecodeError(
                DecodeErrorName.SHORT_SCOPE_KEY,
                f"a scope key has at least {MIN_SCOPE_KEY_OCTETS} octets, "
                f"this one has {len(scope_key)}",
            )
        if len(scope_key) > MAX_SCOPE_KEY_OCTETS:
            raise DecodeError(
                DecodeErrorName.OUT_OF_RANGE,
                f"a scope key has at most {MAX_SCOPE_KEY_OCTETS} octets, "
                f"this one has {len(scope_key)}",
            )
        self._key = bytes(scope_key)
        self.content_keys = content_keys
        self.scope_id = hashlib.sha256(_SCOPE_LABEL + self._key).digest()[:SCOPE_ID_OCTETS]

    @classmethod
    def generate(cls, content_keys: ContentKeys = ()) -> Scope:
        """A scope with a fresh random key of 32 octets."""
        return cls(secrets.token_bytes(MIN_SCOPE_KEY_OCTETS), content_keys)

    @classmethod
    def from_json(cls, data: bytes | str, *, sealing: bool = False) -> Scope:
        """Parse the text of a scope file, `{"scope_key": "<hex>", "content_keys": […]}`.

        Members that start with `x-` are for others. Content keys say that caches are to be
        sealed: they are refused, never ignored, unless the caller is `sealing`.

        Raises DecodeError: `not-i-json`, `duplicate-member`, `not-an-object`,
        `missing-member`, `wrong-type`, `bad-hex`, `short-scope-key`, `out-of-range`;
        ScopeFileError for content keys that are wrong, or of no use to the caller, and for a
        member that nobody here knows.
        """
        try:
            tree = ijson.loads(data)
        except DecodeError as error:
            # a broken file may hold the key anywhere, even in a member name
            raise DecodeError(error.name, "the scope file is not one strict JSON object") from None
        if not isinstance(tree, dict):
            raise DecodeError(DecodeErrorName.NOT_AN_OBJECT, "a scope file is a JSON object")
        if "scope_key" not in tree:
            raise DecodeError(DecodeErrorName.MISSING_MEMBER, "there is no 'scope_key'")
        key = tree["scope_key"]
        if not isinstance(key, str):
            raise DecodeError(DecodeErrorName.WRONG_TYPE, "'scope_key' is a hexadecimal string")
        scope = cls(parse_hex(key), parse_content_keys(tree.get(CONTENT_KEYS, [])))
        if scope.content_keys and not sealing:
            raise ScopeFileError(
                f"{CONTENT_KEYS!r}: caches of this scope are to be sealed, and here they would "
                "stand in clear; kvcs-publish and kvcs-subscribe seal and open them, or use a "
                "scope file without content keys"
            )
        known = ("scope_key", CONTENT_KEYS)
        unknown = [name for name in tree if name not in known and not name.startswith("x-")]
        if unknown:
            raise ScopeFileError(
                f"a scope file has 'scope_key' and {CONTENT_KEYS!r}; "
                f"{len(unknown)} other members are unknown: take them out, or start them with x-"
            )
        return scope

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, sealing: bool = False) -> Scope:
        """Read a scope file, which only its owner may be able to read; `sealing` as for
        `from_json`.

        Raises ScopeFileError when it cannot be read, others have any access to it, or it asks
        for more than can be done; DecodeError as `from_json` does, with the file's name in the
        detail.
        """
        try:
            data = read_private(path, MAX_SCOPE_FILE_OCTETS, pipes=True)
        except FileError as error:
            raise ScopeFileError(str(error)) from error
        try:
            return cls.from_json(data, sealing=sealing)
        except DecodeError as error:
            raise error.within(os.fspath(path)) from None
        except ScopeFileError as error:
            raise ScopeFileError(f"{os.fspath(path)}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a new scope file with mode 0600, whole or not at all.

        Raises ScopeFileError when the file exists (it is never overwritten: whoever
        loses a scope key loses every cache named by it) or cannot be written.
        """
        try:
            create_private(path, ijson.canonical(self._tree()) + b"\n")
        except FileError as error:
            raise ScopeFileError(str(error)) from error

    @classmethod
    def rotate(cls, path: str | os.PathLike[str]) -> ContentKey:
        """Add a fresh content key to a scope file, in one step: it is sealed with from now on,
        the others are for reading. Its cipher suite is that of the last one. Whoever else rotates
        is waited for, so that no key is lost.

        Raises what `load` raises, and ScopeFileError when the file cannot be written.
        """
        try:
            with changing(path):
                scope = cls.load(path, sealing=True)
                suites = [each.cipher_suite for each in scope.content_keys[-1:]]
                fresh = ContentKey.generate(scope.content_keys, *suites)
                # what others keep in it stays
                tree = ijson.loads(read_private(path, MAX_SCOPE_FILE_OCTETS))
                tree[CONTENT_KEYS] = [each.to_dict() for each in (*scope.content_keys, fresh)]
                replace_private(path, ijson.canonical(tree) + b"\n")
        except ScopeFileError:
            raise
        except FileError as error:
            raise ScopeFileError(str(error)) from error
        return fresh

    def _tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = {"scope_key": self._key.hex()}
        if self.content_keys:
            tree[CONTENT_KEYS] = [each.to_dict() for each in self.content_keys]
        return tree

    def macs(self, prefix: bytes) -> Callable[[bytes], bytes]:
        """HMAC-SHA-256 under the Scope Key, 32 octets, of `prefix` and what it is called with.

        What is the same for all of them is done once (RFC 2104).
        """
        key = self._key if len(self._key) <= _HMAC_BLOCK else hashlib.sha256(self._key).digest()
        key = key.ljust(_HMAC_BLOCK, b"\x00")
        inner = hashlib.sha256(key.translate(_INNER_PAD) + prefix)
        outer = hashlib.sha256(key.translate(_OUTER_PAD))

        def mac(message: bytes) -> bytes:
            inside, outside = inner.copy(), outer.copy()
            inside.update(message)
            outside.update(inside.digest())
            return outside.digest()

        return mac

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Scope):
            return NotImplemented
        same = hmac.compare_digest(self._key, other._key)
        return same and self.content_keys == other.content_keys

    def __hash__(self) -> int:
        return int.from_bytes(self.scope_id[:7])

    def __repr__(self) -> str:
        return f"Scope(scope_id={self.scope_id.hex()})"

    def __reduce__(self) -> str:
        raise TypeError("a scope is not pickled: its key stays in this process")


# --- Block Keys ----------------------------------------------------------------------


def block_keys(
    scope: Scope,
    identity: Descriptor | bytes,
    tokens: Tokens,
    *,
    block_tokens: int | None = None,
    after: bytes | None = None,
) -> list[bytes]:
    """The Block Keys of all complete blocks of `tokens`, 32 octets each (KVSP 4.2).

    The one function that names blocks. `identity` is the descriptor, or the 32 octets
    of a Compatibility ID together with `block_tokens`, which an ID alone does not tell.
    `after` is the key of the block before the first one, when `tokens` continue a prefix
    that is known by its keys only. Tokens after the last complete block are checked and
    have no key.

    Raises DecodeError `bad-token` (the message gives the position, never the id),
    TypeError without a scope, ValueError for a Compatibility ID of another length or a
    block size missing or not the descriptor's.
    """
    if not isinstance(scope, Scope):
        raise TypeError("block keys are computed within a scope: pass a Scope")
    if isinstance(identity, Descriptor):
        if block_tokens not in (None, identity.block_tokens):
            raise ValueError("block_tokens is not that of the descriptor")
        compat_id, block_tokens = identity.compat_id, identity.block_tokens
    else:
        compat_id = bytes(identity)
        if len(compat_id) != HASH_OCTETS:
            raise ValueError(f"a Compatibility ID has {HASH_OCTETS} octets")
        if block_tokens is None:
            raise ValueError("a Compatibility ID does not tell the block size: pass block_tokens")
    octets = token_octets(tokens)
    mac = scope.macs(_BLOCK_LABEL + compat_id)
    step = 4 * block_tokens
    keys: list[bytes] = []
    key = bytes(HASH_OCTETS) if after is None else after
    if len(key) != HASH_OCTETS:
        raise ValueError(f"a Block Key has {HASH_OCTETS} octets")
    for block in range(complete_blocks(len(octets) // 4, block_tokens)):
        key = mac(key + octets[block * step : (block + 1) * step])
        keys.append(key)
    return keys
