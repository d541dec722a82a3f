"""Who sends a request: its Authorization field or client certificate, and the principal
that is meant (KVSP "Security").

Every doubt denies: a principals file that cannot be read lets nobody in.
"""

from __future__ import annotations

import base64
import logging
import os
import re
from dataclasses import dataclass, replace
from typing import Final, Protocol

from kvsp.names.errors import DecodeError
from kvsp.names.uris import check_base_uri
from kvsp.principals import (
    EVERY_SCOPE,
    EVERY_URI,
    RIGHTS,
    ROLES,
    Principal,
    Principals,
    PrincipalsFileError,
    load_principals,
    principals_version,
)
from kvsp.records.problems import Problem

logger = logging.getLogger("kvsp.http")

_BEARER = re.compile(r"bearer +([A-Za-z0-9._~+/-]+=*) *", re.IGNORECASE)
_MAX_CREDENTIAL: Final = 1024


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
    scopes={EVERY_SCOPE: RIGHTS},
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
    """Bearer tokens and certificate names from a file of principals, read again when it changes.

    A client certificate is the principal that has one of its URI names among `uris`. With
    `loopback_developer`, a request from this machine without any credential is the
    developer's. While the file cannot be used nobody else is let in, and the log says once why.
    """

    def __init__(self, path: str | os.PathLike[str], *, loopback_developer: bool = False) -> None:
        """Raises PrincipalsFileError when the file cannot be used now."""
        self.path = os.fspath(path)
        self._loopback_developer = loopback_developer
        self._version: tuple[int, ...] = ()
        self._refused: tuple[tuple[int, ...], str] | None = None
        self._principals = Principals()
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
            if (principal := self._principals.by_uri(uri)) is not None:
                return principal
        raise unauthorized("the client certificate names no known principal", invalid=True)

    def _token(self, authorization: str) -> Principal:
        match = _BEARER.fullmatch(authorization[: _MAX_CREDENTIAL + 1])
        if len(authorization) > _MAX_CREDENTIAL or match is None:
            raise unauthorized("the Authorization field is no bearer token", invalid=True)
        found = self._principals.by_token(match[1].encode("ascii"))
        if found is None:
            raise unauthorized("the bearer token is not known", invalid=True)
        return found

    def _reload(self) -> None:
        version = principals_version(self.path)
        if version and version == self._version:
            return
        self._version = ()
        self._principals = Principals()
        self._principals = load_principals(self.path)
        self._version = version
        if self._refused is not None:
            self._refused = None
            logger.info("%s can be used again", self.path)

    def _say(self, reason: str) -> None:
        """Log why the file cannot be used, once until it changes."""
        refused = (principals_version(self.path), reason)
        if refused != self._refused:
            self._refused = refused
            logger.error("%s; requests are refused with 503 until that is mended", reason)


def unauthorized(detail: str, *, invalid: bool = False) -> Problem:
    """401 with the challenge of RFC 6750; `invalid` when a credential was given."""
    challenge = 'Bearer realm="kvsp"' + (', error="invalid_token"' if invalid else "")
    return Problem.http(401, detail, headers={"WWW-Authenticate": challenge})
