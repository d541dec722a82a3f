"""Publications as Track Namespaces, and their text forms (KVCS "Track Namespace")."""

from __future__ import annotations

import base64
import re
import secrets
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvcs.names.codes import (
    NAMESPACE_FIELD_OCTETS,
    NAMESPACE_TAG,
    PUBLICATION_ID_OCTETS,
    URI_FRAGMENT_TYPE,
)
from kvsp.names.codes import DecodeErrorName
from kvsp.names.errors import DecodeError
from kvsp.names.uris import namespace_fields
from moqt.values.names import TrackNamespace

_URI_CHARACTERS = re.compile(r"[!-~]+")
_FIELD_NAMES = ("tag", "Scope ID", "Compatibility ID", "Anchor Key", "Publication ID")


@dataclass(frozen=True, slots=True)
class PublicationNamespace:
    """The full Track Namespace of one publication; every field is raw octets.

    Raises DecodeError `bad-namespace` for a field of another length.
    """

    scope_id: bytes
    compat_id: bytes
    anchor_key: bytes
    publication_id: bytes

    def __post_init__(self) -> None:
        _check_fields(self.fields)

    @classmethod
    def create(cls, scope_id: bytes, compat_id: bytes, anchor_key: bytes) -> PublicationNamespace:
        """A namespace for a new publication: its Publication ID is random."""
        return cls(scope_id, compat_id, anchor_key, secrets.token_bytes(PUBLICATION_ID_OCTETS))

    @classmethod
    def from_fields(cls, fields: TrackNamespace) -> PublicationNamespace:
        """Read the five Track Namespace Fields. Raises DecodeError `bad-namespace`."""
        if len(fields) != len(NAMESPACE_FIELD_OCTETS):
            raise _bad_namespace(f"a publication has 5 namespace fields, not {len(fields)}")
        _check_fields(fields)
        return cls(*fields[1:])

    @classmethod
    def from_text(cls, text: str) -> PublicationNamespace:
        """Read a `moqt_namespace` member (KVSP 4.4).

        Raises DecodeError: `bad-base64url` (alphabet, padding, non-zero last bits),
        `truncated`, `trailing-octets`, `bad-namespace`.
        """
        return cls(*namespace_fields(text)[1:])

    @property
    def fields(self) -> TrackNamespace:
        """The five Track Namespace Fields."""
        return (
            NAMESPACE_TAG,
            self.scope_id,
            self.compat_id,
            self.anchor_key,
            self.publication_id,
        )

    @property
    def encoded(self) -> bytes:
        """The 108 octets of the MOQT encoding: field count, then each field with its length."""
        return encode_fields(self.fields)

    @property
    def text(self) -> str:
        """The `moqt_namespace` form: base64url without padding, no field count."""
        return base64.urlsafe_b64encode(self.encoded[1:]).rstrip(b"=").decode("ascii")

    def __str__(self) -> str:
        return self.text


def scope_prefix(scope_id: bytes) -> TrackNamespace:
    """All publications of a scope: two fields, the unit of authorization."""
    return _prefix(NAMESPACE_TAG, scope_id)


def compat_prefix(scope_id: bytes, compat_id: bytes) -> TrackNamespace:
    """All publications of a scope for one Compatibility ID: three fields."""
    return _prefix(NAMESPACE_TAG, scope_id, compat_id)


def anchor_prefix(scope_id: bytes, compat_id: bytes, anchor_key: bytes) -> TrackNamespace:
    """All publications of one token prefix: four fields, for discovery."""
    return _prefix(NAMESPACE_TAG, scope_id, compat_id, anchor_key)


def encode_fields(fields: TrackNamespace) -> bytes:
    """The MOQT encoding of a KVCS namespace or prefix.

    All its lengths are below 64, so that each is one octet in every MOQT draft.
    Raises ValueError for a longer field.
    """
    if any(len(field) >= 64 for field in fields):
        raise ValueError("a KVCS namespace field has fewer than 64 octets")
    return bytes([len(fields)]) + b"".join(bytes([len(field)]) + field for field in fields)


def publication_uri(endpoint: str, namespace: PublicationNamespace) -> str:
    """The `moqt` URI of a publication: the endpoint's, with the namespace as fragment.

    Raises DecodeError `bad-uri` when `endpoint` is no `moqt` URI or has a fragment.
    """
    _check_endpoint(endpoint)
    return f"{endpoint}#{URI_FRAGMENT_TYPE}{namespace.text}"


def parse_publication_uri(uri: str) -> tuple[str, PublicationNamespace]:
    """Split `moqt://host/#kvcs:<text>` into the endpoint's URI and the namespace.

    Raises DecodeError `bad-uri`, or what `PublicationNamespace.from_text` raises.
    """
    endpoint, separator, fragment = uri.partition("#")
    _check_endpoint(endpoint)
    if not separator or not fragment.startswith(URI_FRAGMENT_TYPE):
        raise DecodeError(
            DecodeErrorName.BAD_URI, f"a publication's URI ends in #{URI_FRAGMENT_TYPE}<namespace>"
        )
    return endpoint, PublicationNamespace.from_text(fragment.removeprefix(URI_FRAGMENT_TYPE))


def _check_endpoint(uri: str) -> None:
    try:
        # urlsplit drops control characters instead of refusing them
        parts = urlsplit(uri) if _URI_CHARACTERS.fullmatch(uri) else None
        valid = (
            parts is not None
            and uri.startswith("moqt://")
            and bool(parts.hostname)
            and parts.username is None
            and parts.port != 0
            and "#" not in uri
        )
    except ValueError:  # a port or an IPv6 address that is none
        valid = False
    if not valid:
        raise DecodeError(DecodeErrorName.BAD_URI, "not an absolute moqt:// URI of an endpoint")


def _prefix(*fields: bytes) -> TrackNamespace:
    _check_fields(fields)
    return fields


def _check_fields(fields: TrackNamespace) -> None:
    if fields[0] != NAMESPACE_TAG:
        raise _bad_namespace("the first field is not kvcs-1")
    for name, octets, value in zip(_FIELD_NAMES, NAMESPACE_FIELD_OCTETS, fields, strict=False):
        if len(value) != octets:
            raise _bad_namespace(f"the {name} field has {len(value)} octets instead of {octets}")


def _bad_namespace(detail: str) -> DecodeError:
    return DecodeError(DecodeErrorName.BAD_NAMESPACE, detail)
