"""Who may do what: principals, bearer tokens, client certificates (KVSP "Security").

Every doubt denies: a principals file that cannot be read lets nobody in.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from kvsp.names import ijson
from kvsp.names.codes import SCOPE_ID_OCTETS
from kvsp.names.errors import DecodeError, KvspError
from kvsp.names.identity import parse_hex
from kvsp.names.uris import check_base_uri
from kvsp.records.problems import Problem, ProblemName

logger = logging.getLogger("kvsp.http")

READ: Final = "read"
WRITE: Final = "write"
EVERY_SCOPE: Final = "*"
EVERY_URI: Final = "*"
"""Stands for any URI; only the loopback developer has it, no file can say it."""

ROLES: Final = frozenset({"index", "holder", "instance", "placement", "operator", "cats"})
TOKEN_OCTETS: Final = 32
MAX_FILE_OCTETS: Final = 4 << 20
MAX_PRINCIPALS: Final = 4096
_BEARER = re.compile(r"bearer +([A-Za-z0-9._~+/-]+=*) *", re.IGNORECASE)
_MAX_CREDENTIAL: Final = 1024
_RIGHTS: Final = frozenset({READ, WRITE})


class PrincipalsFileError(KvspError):
    """The principals file cannot be read, others may write it, or it is malformed."""


@dataclass(frozen=True, slots=True)
class Principal:
    """One authenticated client and what it may do.

    `uris` are the base URIs it is, `publishes_for` holder URIs it may publish for,
    `scopes` maps a Scope ID (hex16) or `*` to `read` and `write`.
    """

    name: str
    roles: frozenset[str] = frozenset()
    uris: frozenset[str] = frozenset()
    publishes_for: frozenset[str] = frozenset()
    scopes: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def may(self, scope_id: bytes, right: str) -> bool:
        """Whether it has `right` (`read`, `write`) in the scope."""
        return any(right in self.scopes.get(key, ()) for key in (scope_id.hex(), EVERY_SCOPE))

    def has_role(self, *roles: str) -> bool:
        """Whether it has at least one of `roles`."""
        return not self.roles.isdisjoint(roles)

    def is_holder(self, holder: str) -> bool:
        """Whether it is the holder of that URI or publishes on its behalf."""
        return self.is_one_of(holder) or holder in self.publishes_for

    def is_one_of(self, uri: str) -> bool:
        """Whether it is the holder or instance of that URI."""
        return uri in self.uris or EVERY_URI in self.uris

    def require(self, scope_id: bytes, right: str) -> None:
        """Raises Problem `kvsp-forbidden` without the right.

        Called before anything is looked up, so that the answer is the same whether or
        not the thing exists.
        """
        if not self.may(scope_id, right):
            raise forbidden(f"{self.name!r} has no {right} access to this scope")

    def require_any_scope(self, right: str) -> None:
        """Raises Problem `kvsp-forbidden` unless it has `right` in some scope."""
        if not any(right in rights for rights in self.scopes.values()):
            raise forbidden(f"{self.name!r} has {right} access to no scope")

    def require_role(self, *roles: str) -> None:
        """Raises Problem `kvsp-forbidden` unless it has one of `roles`."""
        if not self.has_role(*roles):
            raise forbidden(f"{self.name!r} has not the role {' or '.join(roles)}")

    def require_uri(self, uri: str) -> None:
        """Raises Problem `kvsp-forbidden` unless it is the instance of that URI."""
        if not self.is_one_of(uri):
            raise forbidden(f"{self.name!r} does not speak for the URI in the request")

    def require_holder(self, holder: str) -> None:
        """Raises Problem `kvsp-forbidden` unless it publishes for the holder."""
        if not self.is_holder(holder):
            raise forbidden(f"{self.name!r} does not publish for the holder in the record")


def forbidden(detail: str) -> Problem:
    """`kvsp-forbidden`: authenticated and not allowed."""
    return Problem(ProblemName.FORBIDDEN, detail)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a request shows of its sender: a header, the certificate's URI names, an address."""

    authorization: str | None = None
    certificate_uris: tuple[str, ...] = ()
    loopback: bool = False


class Authenticator(Protocol):
    """Finds the principal of a request."""

    def authenticate(self, credentials: Credentials) -> Principal:
        """Raises Problem: 401 for a missing or bad credential, 503 when none can be judged."""
        ...


DEVELOPER: Final = Principal(
    name="loopback",
    roles=ROLES,
    uris=frozenset({EVERY_URI}),
    scopes={EVERY_SCOPE: _RIGHTS},
)
"""Who everybody on this machine is when that is switched on."""


class LoopbackOnly:
    """Development: requests from this machine need no credential, others get none accepted.

    A service may say who it is by `developer_token`: it then speaks for that URI alone, so
    that several services on one machine are told apart. Behind a proxy on the same machine
    every client looks local: never combine the two.
    """

    def authenticate(self, credentials: Credentials) -> Principal:
        if not credentials.loopback:
            raise unauthorized("this server answers clients on its own machine only")
        uri = _developer_uri(credentials.authorization or "")
        # less than anybody here has without saying anything, so it need not be proved
        return DEVELOPER if uri is None else replace(DEVELOPER, name=uri, uris=frozenset({uri}))


def developer_token(uri: str) -> str:
    """What the service at a base URI shows as bearer token to a `LoopbackOnly` one: its
    name, which is no secret."""
    return base64.urlsafe_b64encode(uri.encode()).decode()


def _developer_uri(authorization: str) -> str | None:
    match = _BEARER.fullmatch(authorization[: _MAX_CREDENTIAL + 1])
    if match is None:
        return None
    try:
        uri = base64.b64decode(match[1], altchars=b"-_", validate=True).decode()
        return check_base_uri(uri, http_loopback=True)
    except (ValueError, DecodeError):
        return None


class PrincipalsFile:
    """Bearer tokens and certificate names from one JSON file, read again when it changes.

    The file is `{"principals": [{"principal": "h1", "uris": [...], "roles": [...],
    "publishes_for": [...], "scopes": {"<hex16>": ["read", "write"]},
    "tokens": ["<SHA-256 of a token, hex32>"]}]}`. A client certificate is the principal
    that has one of its URI names among `uris`. With `loopback_developer`, a request from
    this machine without any credential is the developer's. While the file cannot be used
    nobody else is let in, and the log says once why.
    """

    def __init__(self, path: str | os.PathLike[str], *, loopback_developer: bool = False) -> None:
        """Raises PrincipalsFileError when the file cannot be used now."""
        self.path = os.fspath(path)
        self._loopback_developer = loopback_developer
        self._version: tuple[int, ...] = ()
        self._refused: tuple[tuple[int, ...], str] | None = None
        self._by_digest: list[tuple[bytes, Principal]] = []
        self._by_uri: dict[str, Principal] = {}
        self._reload()

    def authenticate(self, credentials: Credentials) -> Principal:
        if credentials.authorization is None and not credentials.certificate_uris:
            if self._loopback_developer and credentials.loopback:
                return DEVELOPER
            raise unauthorized("a bearer token or a client certificate is needed")
        try:
            self._reload()
        except PrincipalsFileError as error:
            self._say(str(error))
            raise Problem.http(
                503, "the server cannot judge credentials now", retry_after=5
            ) from error
        if credentials.authorization is not None:
            return self._token(credentials.authorization)
        for uri in credentials.certificate_uris:
            if (principal := self._by_uri.get(uri)) is not None:
                return principal
        raise unauthorized("the client certificate names no known principal", invalid=True)

    def _token(self, authorization: str) -> Principal:
        match = _BEARER.fullmatch(authorization[: _MAX_CREDENTIAL + 1])
        if len(authorization) > _MAX_CREDENTIAL or match is None:
            raise unauthorized("the Authorization field is no bearer token", invalid=True)
        digest = token_digest(match[1])
        found: Principal | None = None
        for known, principal in self._by_digest:
            # no early exit: the time taken tells nothing about the tokens
            if hmac.compare_digest(known, digest):
                found = principal
        if found is None:
            raise unauthorized("the bearer token is not known", invalid=True)
        return found

    def _reload(self) -> None:
        version = _version(self.path)
        if version and version == self._version:
            return
        self._version = ()
        self._by_digest, self._by_uri = [], {}
        entries = check_principals(read_principals(self.path), self.path)
        self._by_digest = [(digest, who) for who, digests in entries for digest in digests]
        self._by_uri = {uri: who for who, _ in entries for uri in who.uris}
        self._version = version
        if self._refused is not None:
            self._refused = None
            logger.info("%s can be used again", self.path)

    def _say(self, reason: str) -> None:
        """Log why the file cannot be used, once until it changes."""
        refused = (_version(self.path), reason)
        if refused != self._refused:
            self._refused = refused
            logger.error("%s; requests are refused with 503 until that is mended", reason)


def _version(path: str) -> tuple[int, ...]:
    """What differs after a change of the file; empty for one that is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def read_principals(path: str | os.PathLike[str]) -> bytes:
    """The text of a principals file. Raises PrincipalsFileError."""
    try:
        # a pipe must not hold the caller up, so it is looked at before it is read
        with open(path, "rb", opener=lambda name, how: os.open(name, how | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise PrincipalsFileError(f"{path}: not a regular file")
            if mode & 0o022:
                raise PrincipalsFileError(
                    f"{path}: others than its owner may write it; run: chmod go-w {path}"
                )
            return file.read(MAX_FILE_OCTETS + 1)
    except OSError as error:
        raise PrincipalsFileError(f"{path}: {error.strerror or error}") from error


def check_principals(
    data: bytes, path: str | os.PathLike[str]
) -> list[tuple[Principal, list[bytes]]]:
    """The principals of the text of the file `path`. Raises PrincipalsFileError."""
    if len(data) > MAX_FILE_OCTETS:
        raise PrincipalsFileError(f"{path}: larger than {MAX_FILE_OCTETS} octets")
    try:
        return parse_principals(data)
    except (DecodeError, ValueError) as error:
        raise PrincipalsFileError(f"{path}: {error}") from None


def parse_principals(data: bytes) -> list[tuple[Principal, list[bytes]]]:
    """The principals of a file's text, each with the SHA-256 digests of its tokens.

    Raises DecodeError for what is no strict JSON, ValueError (with the place) otherwise.
    """
    tree = ijson.loads(data)
    entries = tree.get("principals") if isinstance(tree, dict) else None
    if not isinstance(entries, list) or len(entries) > MAX_PRINCIPALS:
        raise ValueError(f"'principals' is a list of at most {MAX_PRINCIPALS} objects")
    parsed = [_principal(entry, f"principals/{place}") for place, entry in enumerate(entries)]
    for what, values in (
        ("principal", [who.name for who, _ in parsed]),
        ("URI", [uri for who, _ in parsed for uri in who.uris]),
        ("token digest", [digest.hex() for _, digests in parsed for digest in digests]),
    ):
        if len(set(values)) != len(values):
            twice = next(value for value in values if values.count(value) > 1)
            raise ValueError(f"the {what} {twice!r} is given twice")
    return parsed


def _principal(entry: Any, where: str) -> tuple[Principal, list[bytes]]:
    if not isinstance(entry, dict) or not isinstance(entry.get("principal"), str):
        raise ValueError(f"{where} is an object with the string 'principal'")
    roles = _strings(entry, "roles", where)
    if unknown := roles - ROLES:
        raise ValueError(f"{where}/roles: {min(unknown)!r} is none of {', '.join(sorted(ROLES))}")
    scopes = entry.get("scopes", {})
    if not isinstance(scopes, dict):
        raise ValueError(f"{where}/scopes is an object")
    digests = [parse_hex(text, 32) for text in sorted(_strings(entry, "tokens", where))]
    uris, publishes_for = (_strings(entry, name, where) for name in ("uris", "publishes_for"))
    if any("://" not in uri for uri in uris | publishes_for):
        raise ValueError(f"{where}: 'uris' and 'publishes_for' hold absolute URIs")
    principal = Principal(
        name=entry["principal"],
        roles=roles,
        uris=uris,
        publishes_for=publishes_for,
        scopes={_scope(key, where): _rights(scopes, key, where) for key in scopes},
    )
    return principal, digests


def _scope(key: str, where: str) -> str:
    if key != EVERY_SCOPE:
        try:
            parse_hex(key, SCOPE_ID_OCTETS)
        except DecodeError as error:
            raise ValueError(f"{where}/scopes: {error.detail}") from None
    return key


def _rights(scopes: dict[str, Any], key: str, where: str) -> frozenset[str]:
    rights = _strings(scopes, key, f"{where}/scopes")
    if not rights <= _RIGHTS:
        raise ValueError(f"{where}/scopes: rights are 'read' and 'write'")
    return rights


def _strings(entry: dict[str, Any], name: str, where: str) -> frozenset[str]:
    values = entry.get(name, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{where}/{name} is a list of strings")
    return frozenset(values)


def unauthorized(detail: str, *, invalid: bool = False) -> Problem:
    """401 with the challenge of RFC 6750; `invalid` when a credential was given."""
    challenge = 'Bearer realm="kvsp"' + (', error="invalid_token"' if invalid else "")
    return Problem.http(401, detail, headers={"WWW-Authenticate": challenge})


def new_token() -> str:
    """A fresh bearer token of 256 random bits, base64url. A secret: show it once."""
    return secrets.token_urlsafe(TOKEN_OCTETS)


def token_digest(token: str) -> bytes:
    """The SHA-256 of a token, which is all a server stores of it."""
    return hashlib.sha256(token.encode("ascii")).digest()


def principal_entry(principal: Principal, tokens: Iterable[str] = ()) -> dict[str, Any]:
    """The JSON object of a principals file for `principal`, with the digests of `tokens`."""
    return {
        "principal": principal.name,
        "roles": sorted(principal.roles),
        "uris": sorted(principal.uris),
        "publishes_for": sorted(principal.publishes_for),
        "scopes": {key: sorted(rights) for key, rights in principal.scopes.items()},
        "tokens": sorted(token_digest(token).hex() for token in tokens),
    }
