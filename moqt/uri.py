"""`moqt://` URIs (MOQT "MOQT URI Scheme") and the `https://` ones of WebTransport."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit

from moqt.values.errors import MisuseError

DEFAULT_PORT = 443

# RFC 3986: path-abempty [ "?" query ], and authority without an empty host.
_PATH = re.compile(rb"(?:/(?:[\w.~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*)?"
                   rb"(?:\?(?:[\w.~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*)?")  # fmt: skip
_AUTHORITY = re.compile(rb"(?:(?:[\w.~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})*@)?"
                        rb"(?:\[[\w.~!$&'()*+,;=:-]+\]|(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+)"
                        rb"(?::[0-9]*)?")  # fmt: skip


def is_path(octets: bytes) -> bool:
    """Whether it is a path with its query, as a client may name it (MOQT "PATH")."""
    return _PATH.fullmatch(octets) is not None


def is_authority(octets: bytes) -> bool:
    """Whether it is an authority, as a client may name it (MOQT "AUTHORITY")."""
    return _AUTHORITY.fullmatch(octets) is not None


class MoqtUri(NamedTuple):
    host: str
    port: int
    path: str
    """path-abempty with the query, as the PATH option carries it."""
    authority: str
    fragment: str
    webtransport: bool = False
    """Whether the scheme was https: MOQT over WebTransport."""


def parse_uri(text: str) -> MoqtUri:
    """Raises MisuseError with what is wrong with `text`."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise MisuseError(f"{text!r} is not a URI: {error}") from None
    if parts.scheme not in ("moqt", "https"):
        raise MisuseError(f"{text!r} must begin with moqt:// or https://")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise MisuseError(f"{text!r} has characters a URI must percent-encode")
    if not parts.hostname:
        raise MisuseError(f"{text!r} names no host")
    if parts.username is not None:
        raise MisuseError("a moqt URI carries no user name")
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    return MoqtUri(
        parts.hostname,
        port or DEFAULT_PORT,
        path,
        parts.netloc,
        parts.fragment,
        parts.scheme == "https",
    )


def for_transport(uri: str, *, webtransport: bool) -> str:
    """`uri` with the scheme of that transport; one that has another kind of scheme as it is."""
    scheme, colon, rest = uri.partition("://")
    if not colon or scheme not in ("moqt", "https"):
        return uri
    return f"{'https' if webtransport else 'moqt'}://{rest}"
