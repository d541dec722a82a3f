"""Content keys: what the Objects of a scope are sealed with (KVCS "Confidentiality").

They stand in the scope file beside the Scope Key and are independent of it: who may compute
names need not be able to read caches.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvsp.names import ijson
from kvsp.names.codes import MAX_SAFE_INTEGER, CipherSuite
from kvsp.names.errors import ScopeFileError

CONTENT_KEYS: Final = "content_keys"
"""The member of a scope file."""

KEY_OCTETS: Final = 32
"""Octets of a content key, the `track_base_key` of every track of the scope."""

LATER_KEY_ID: Final = 1 << 32
"""The Key ID of the second key. A relay that knows nothing of secure objects reads the Key ID,
property 0x02, as a delivery timeout in milliseconds: 0 is none, these are 50 days and more."""

_MEMBERS: Final = {"key_id", "cipher_suite", "key"}
_SUITES: Final = tuple(suite for suite in CipherSuite if suite.allowed)


@dataclass(frozen=True, slots=True)
class ContentKey:
    """One key of a scope, as its file lists it. The key never appears in `repr`."""

    key_id: int
    cipher_suite: CipherSuite
    key: bytes = field(repr=False)
    """32 octets."""

    @classmethod
    def generate(
        cls,
        known: Sequence[ContentKey] = (),
        cipher_suite: CipherSuite = CipherSuite.AES_128_GCM_SHA256_128,
    ) -> ContentKey:
        """A fresh random key, with the Key ID that comes after those `known`."""
        last = max((each.key_id for each in known), default=-1)
        key_id = 0 if last < 0 else max(LATER_KEY_ID, last + 1)
        return cls(key_id, cipher_suite, secrets.token_bytes(KEY_OCTETS))

    @classmethod
    def parse(cls, tree: Any, where: str) -> ContentKey:
        """Read one element of `content_keys`. Raises ScopeFileError, which holds no key."""
        if not isinstance(tree, dict) or set(tree) != _MEMBERS:
            raise ScopeFileError(f"{where} has the members key_id, cipher_suite and key")
        key_id, suite, key = tree["key_id"], tree["cipher_suite"], tree["key"]
        if not ijson.is_integer(key_id) or not 0 <= key_id <= MAX_SAFE_INTEGER:
            raise ScopeFileError(f"{where}: key_id is an integer from 0 to 2^53-1")
        if not ijson.is_integer(suite) or suite not in _SUITES:
            known = ", ".join(f"{each.value} ({each.name})" for each in _SUITES)
            raise ScopeFileError(f"{where}: cipher_suite is one of {known}")
        if not isinstance(key, str) or len(key) != 2 * KEY_OCTETS or set(key) - set(_DIGITS):
            raise ScopeFileError(f"{where}: key is {2 * KEY_OCTETS} lower-case hexadecimal digits")
        return cls(int(key_id), CipherSuite(suite), bytes.fromhex(key))

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the file: it holds the key."""
        return {"key_id": self.key_id, "cipher_suite": self.cipher_suite, "key": self.key.hex()}


ContentKeys = tuple[ContentKey, ...]
"""The keys of a scope: all are for reading, the last one is sealed with."""

_DIGITS: Final = "0123456789abcdef"


def parse_content_keys(tree: Any) -> ContentKeys:
    """Read the member `content_keys`. Raises ScopeFileError, which holds no key."""
    if not isinstance(tree, list):
        raise ScopeFileError(f"{CONTENT_KEYS!r} is an array of keys")
    keys = tuple(
        ContentKey.parse(each, f"{CONTENT_KEYS}[{index}]") for index, each in enumerate(tree)
    )
    if len({each.key_id for each in keys}) != len(keys):
        raise ScopeFileError(f"{CONTENT_KEYS!r}: a key_id stands twice")
    return keys
