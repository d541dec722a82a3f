"""Base URIs, resource identifiers and paths (KVSP "Services and URIs").

Paths are relative to a base URI and start without a slash. Identifiers are octets in
this API and `<hexN>` in paths.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvsp.names import ijson
from kvsp.names.codes import (
    HASH_OCTETS,
    NAMESPACE_FRAGMENT,
    NAMESPACE_TAG,
    SCOPE_ID_OCTETS,
    DecodeErrorName,
)
from kvsp.names.errors import DecodeError
from kvsp.names.identity import parse_hex

_URI = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]{1,2048}")
_BASE64URL = re.compile(r"[A-Za-z0-9_-]*")
_UID = re.compile(r"[A-Za-z0-9_-]{21}[AQgw]")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_HOST = re.compile(r"[a-z0-9._-]+")
_DEFAULT_PORTS = {"https": 443, "http": 80}
_FIELDS = (
    ("tag", len(NAMESPACE_TAG)),
    ("Scope ID", SCOPE_ID_OCTETS),
    ("Compatibility ID", HASH_OCTETS),
    ("Anchor Key", HASH_OCTETS),
    ("Publication ID", 16),
)


class BlockId(NamedTuple):
    """What names a block everywhere: Compatibility ID, Scope ID and Block Key, raw octets."""

    compat_id: bytes
    scope_id: bytes
    block_key: bytes

    @property
    def path(self) -> str:
        """`{compat}/{scope}/{block_key}`, the common part of block and replica paths."""
        return f"{self.compat_id.hex()}/{self.scope_id.hex()}/{self.block_key.hex()}"


# --- URIs ----------------------------------------------------------------------------


def check_base_uri(uri: str, *, http_loopback: bool = False) -> str:
    """Return `uri` when it is a base URI, as it is compared: octet by octet.

    A base URI is absolute, `https`, without user, query and fragment, ends in `/`, has
    its host in lower case, no default port and no dot segments. `http` is taken for a
    loopback host when `http_loopback` is set. Raises DecodeError `bad-uri`.
    """
    scheme = uri.partition(":")[0]
    if scheme not in _DEFAULT_PORTS:
        raise _bad_uri("a base URI starts with https://")
    if not _URI.fullmatch(uri) or "?" in uri or "#" in uri:
        raise _bad_uri("a base URI has no query, no fragment and no characters outside RFC 3986")
    host, port, path = _authority(uri)
    if port == _DEFAULT_PORTS[scheme]:
        raise _bad_uri("a base URI leaves the default port out")
    if not path.endswith("/") or {".", ".."} & set(path.split("/")):
        raise _bad_uri("a base URI ends in / and has no dot segments")
    if scheme == "http" and not (http_loopback and is_loopback(host)):
        raise _bad_uri("http is for loopback hosts, when the operator allows it; use https")
    return uri


def check_moqt_uri(uri: str) -> str:
    """Return `uri` when it is an absolute `moqt` URI of an endpoint, without fragment.

    Raises DecodeError `bad-uri`.
    """
    if not uri.startswith("moqt://") or not _URI.fullmatch(uri) or "#" in uri:
        raise _bad_uri("not an absolute moqt:// URI of an endpoint")
    _authority(uri)
    return uri


def check_holder_uri(uri: str, *, http_loopback: bool = False) -> str:
    """Return `uri` when it can be the `holder` of a record: a base URI or a `moqt` URI.

    Raises DecodeError `bad-uri`.
    """
    if is_moqt(uri):
        return check_moqt_uri(uri)
    return check_base_uri(uri, http_loopback=http_loopback)


def check_source_uri(uri: str, *, http_loopback: bool = False) -> str:
    """Return `uri` when it can be a source of a directive (KVSP "Prefetch Directives").

    A base URI, or `moqt://host/#kvcs:` and a `moqt_namespace` text. Raises DecodeError
    `bad-uri`, or what `namespace_fields` raises.
    """
    if not is_moqt(uri):
        return check_base_uri(uri, http_loopback=http_loopback)
    split_moqt_source(uri)
    return uri


def split_moqt_source(uri: str) -> tuple[str, str]:
    """`moqt://host/#kvcs:<text>` as the endpoint's URI and the `moqt_namespace` text.

    Raises DecodeError `bad-uri`, or what `namespace_fields` raises.
    """
    endpoint, _, fragment = uri.partition("#")
    check_moqt_uri(endpoint)
    if not fragment.startswith(NAMESPACE_FRAGMENT):
        raise _bad_uri(f"a moqt source ends in #{NAMESPACE_FRAGMENT}<moqt_namespace>")
    text = fragment.removeprefix(NAMESPACE_FRAGMENT)
    namespace_fields(text)
    return endpoint, text


def is_moqt(uri: str) -> bool:
    """Whether a holder or source is reached through Media over QUIC Transport."""
    return uri.startswith("moqt:")


def is_loopback(host: str) -> bool:
    """Whether a host (without brackets) is `localhost` or a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _authority(uri: str) -> tuple[str, int | None, str]:
    try:
        parts = urlsplit(uri)
        host, port = parts.hostname or "", parts.port
    except ValueError:  # a port or an IPv6 address that is none
        raise _bad_uri("the host or port is malformed") from None
    literal = parts.netloc.startswith("[")
    # hostname is lower case already: compare with what was written
    written = parts.netloc.partition("]")[0][1:] if literal else parts.netloc.partition(":")[0]
    if "@" in parts.netloc or parts.netloc.endswith(":") or port == 0:
        raise _bad_uri("neither a user nor an empty port or port 0 is allowed")
    if written != host or not (_is_ipv6(host) if literal else _HOST.fullmatch(host)):
        raise _bad_uri("the host is not a lower-case name or address")
    return host, port, parts.path


def _is_ipv6(host: str) -> bool:
    try:
        return "%" not in host and ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def _bad_uri(detail: str) -> DecodeError:
    return DecodeError(DecodeErrorName.BAD_URI, detail)


# --- moqt_namespace ------------------------------------------------------------------


class NamespaceFields(NamedTuple):
    """The five Track Namespace Fields of a `moqt_namespace` text, raw octets."""

    tag: bytes
    scope_id: bytes
    compat_id: bytes
    anchor_key: bytes
    publication_id: bytes


def namespace_fields(text: str) -> NamespaceFields:
    """Read a `moqt_namespace` member (KVSP "Records").

    Raises DecodeError: `bad-base64url` (alphabet, padding, non-zero last bits),
    `truncated`, `trailing-octets`, `bad-namespace`.
    """
    octets = _decode_base64url(text)
    fields: list[bytes] = []
    position = 0
    for name, _ in _FIELDS:
        if position >= len(octets):
            raise DecodeError(DecodeErrorName.TRUNCATED, f"the {name} field is missing")
        end = position + 1 + octets[position]
        if end > len(octets):
            raise DecodeError(DecodeErrorName.TRUNCATED, f"the {name} field runs past the end")
        fields.append(octets[position + 1 : end])
        position = end
    if position != len(octets):
        raise DecodeError(
            DecodeErrorName.TRAILING_OCTETS,
            f"{len(octets) - position} octets follow the five fields",
        )
    if fields[0] != NAMESPACE_TAG:
        raise DecodeError(DecodeErrorName.BAD_NAMESPACE, "the first field is not kvcs-1")
    for (name, length), field in zip(_FIELDS, fields, strict=True):
        if len(field) != length:
            raise DecodeError(
                DecodeErrorName.BAD_NAMESPACE,
                f"the {name} field has {len(field)} octets instead of {length}",
            )
    return NamespaceFields(*fields)


def _decode_base64url(text: str) -> bytes:
    if not _BASE64URL.fullmatch(text):
        raise DecodeError(DecodeErrorName.BAD_BASE64URL, "a character is outside A-Z a-z 0-9 - _")
    if len(text) % 4 == 1:
        raise DecodeError(DecodeErrorName.BAD_BASE64URL, "the last character stands alone")
    octets = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if _encode_base64url(octets) != text:
        raise DecodeError(DecodeErrorName.BAD_BASE64URL, "bits after the last octet are not zero")
    return octets


def _encode_base64url(octets: bytes) -> str:
    return base64.urlsafe_b64encode(octets).rstrip(b"=").decode("ascii")


# --- identifiers ---------------------------------------------------------------------


def uid(octets: bytes) -> str:
    """base64url of the first 16 octets of SHA-256, 22 characters."""
    return _encode_base64url(hashlib.sha256(octets).digest()[:16])


def instance_id(uri: str) -> str:
    """`{instance_id}` of an instance: the uid of its base URI."""
    return uid(uri.encode("utf-8"))


def replica_id(holder: str, codec: int, moqt_namespace: str | None = None) -> str:
    """`{replica_id}` of a replica: the uid of the JCS of its holder, codec and namespace."""
    members: dict[str, Any] = {"codec": codec, "holder": holder}
    if moqt_namespace is not None:
        members["moqt_namespace"] = moqt_namespace
    return uid(ijson.canonical(members))


def check_uid(text: str) -> str:
    """Return `text` when it has the form of a `uid`. Raises DecodeError `bad-base64url`."""
    if not _UID.fullmatch(text):
        raise DecodeError(DecodeErrorName.BAD_BASE64URL, "not the 22 characters of an identifier")
    return text


def check_uuid(text: str) -> str:
    """A UUID (RFC 9562) in lower case; upper case is read. Raises DecodeError `bad-hex`."""
    lower = text.lower()
    if len(text) != 36 or not _UUID.fullmatch(lower):
        raise DecodeError(DecodeErrorName.BAD_HEX, "not a UUID of 36 characters")
    return lower


# --- paths ---------------------------------------------------------------------------


def compat_path(compat_id: bytes) -> str:
    """Path of a descriptor at an index service or a holder."""
    return f"compat/{compat_id.hex()}"


def block_path(block: BlockId) -> str:
    """Path of a block at a holder."""
    return f"blocks/{block.path}"


def verification_path(block: BlockId) -> str:
    """Path at which a holder is told that a block's octets fail verification (ours)."""
    return f"{block_path(block)}/verification"


def replicas_path(block: BlockId) -> str:
    """Path of all replicas of a block at an index service."""
    return f"replicas/{block.path}"


def replica_path(block: BlockId, replica: str) -> str:
    """Path of one replica at an index service; `replica` is a `replica_id`."""
    return f"replicas/{block.path}/{replica}"


def instance_path(uri: str) -> str:
    """Path of the status of the instance with base URI `uri` at a placement controller."""
    return f"instances/{instance_id(uri)}"


def session_path(session: str) -> str:
    return f"sessions/{session}"


def checkpoint_path(session: str) -> str:
    return f"sessions/{session}/checkpoint"


def resume_path(session: str) -> str:
    return f"sessions/{session}/resume"


def lease_path(lease: str) -> str:
    return f"leases/{lease}"


def directive_path(directive: str) -> str:
    return f"prefetch/{directive}"


def parse_block_id(compat: str, scope: str, block_key: str) -> BlockId:
    """Read the three parameters of a block's or replica's path. Raises DecodeError `bad-hex`."""
    return BlockId(
        _path_hex("Compatibility ID", compat, HASH_OCTETS),
        _path_hex("Scope ID", scope, SCOPE_ID_OCTETS),
        _path_hex("Block Key", block_key, HASH_OCTETS),
    )


def parse_compat_id(compat: str) -> bytes:
    """Read the parameter of a descriptor's path. Raises DecodeError `bad-hex`."""
    return _path_hex("Compatibility ID", compat, HASH_OCTETS)


def _path_hex(name: str, text: str, octets: int) -> bytes:
    try:
        return parse_hex(text, octets)
    except DecodeError as error:
        raise error.within(f"the {name} of the path") from None
