"""Bearer tokens as a relay's policy: who holds which right in which scope.

The unit of authorization is the prefix ("kvcs-1", Scope ID) (KVCS "Track Namespace"). A
token of type 0 is looked up by its SHA-256 digest; the file never holds a token itself:

    {"principals": [{"principal": "h1", "tokens": ["<64 hex digits>"],
                     "scopes": {"<Scope ID, 32 hex digits>": ["read", "write"]}}]}

The scope "*" is every scope, and whatever is not under such a prefix needs it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from moqt.session import Session
from moqt.values.codes import RequestErrorCode
from moqt.values.names import TrackNamespace
from moqt.values.tokens import Token
from relay.rights.policy import Action

logger = logging.getLogger("relay")

PREFIX: Final = b"kvcs-1"
SCOPE_ID_OCTETS: Final = 16
TOKEN_TYPE: Final = 0
"""Agreed out of band (MOQT "Authorization Token")."""
EVERY_SCOPE: Final = "*"
MAX_FILE_OCTETS: Final = 16 << 20


class Right(StrEnum):
    READ = "read"
    WRITE = "write"


RIGHTS: Final[Mapping[Action, Right]] = {
    Action.PUBLISH_NAMESPACE: Right.WRITE,
    Action.PUBLISH: Right.WRITE,
    Action.SUBSCRIBE_NAMESPACE: Right.READ,
    Action.SUBSCRIBE_TRACKS: Right.READ,
    Action.SUBSCRIBE: Right.READ,
    Action.FETCH: Right.READ,
    Action.TRACK_STATUS: Right.READ,
}


@dataclass(frozen=True, slots=True)
class Principal:
    """One record of the file."""

    name: str
    digests: tuple[bytes, ...]
    scopes: Mapping[str, frozenset[Right]]

    def may(self, right: Right, scope: str) -> bool:
        return right in self.scopes.get(scope, frozenset()) or right in self.scopes.get(
            EVERY_SCOPE, frozenset()
        )


class AuthFileError(Exception):
    """The file of principals cannot be used; the message says what is wrong and where."""


def load_principals(path: Path) -> tuple[Principal, ...]:
    """Raises AuthFileError."""
    try:
        # a pipe must not hold the caller up, so it is looked at before it is read
        with open(path, "rb", opener=lambda name, how: os.open(name, how | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise AuthFileError(f"{path}: not a regular file")
            if mode & 0o022:
                raise AuthFileError(
                    f"{path}: others than its owner may write it; run: chmod go-w {path}"
                )
            text = file.read(MAX_FILE_OCTETS + 1)
    except OSError as error:
        raise AuthFileError(f"cannot read {path}: {error.strerror or error}") from None
    if len(text) > MAX_FILE_OCTETS:
        raise AuthFileError(f"{path}: larger than {MAX_FILE_OCTETS} octets")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise AuthFileError(f"{path}: is no JSON") from None
    records = value.get("principals") if isinstance(value, dict) else None
    if not isinstance(records, list):
        raise AuthFileError(f'{path}: has no array "principals"')
    found = tuple(_principal(path, at, record) for at, record in enumerate(records))
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise AuthFileError(f"{path}: the principal {twice!r} is given twice")
    digests = [digest for each in found for digest in each.digests]
    if len(set(digests)) < len(digests):
        raise AuthFileError(f"{path}: two principals have the same token")
    return found


def _principal(path: Path, at: int, record: Any) -> Principal:
    where = f"{path}: principals[{at}]"
    if not isinstance(record, dict):
        raise AuthFileError(f"{where} is no object")
    name, scopes = record.get("principal"), record.get("scopes", {})
    tokens = record.get("tokens", [])
    if not isinstance(name, str) or not name:
        raise AuthFileError(f'{where} has no "principal"')
    if not isinstance(tokens, list):
        raise AuthFileError(f'{where}: "tokens" is no array')
    digests = tuple(_digest(token, where) for token in tokens)
    if not isinstance(scopes, dict):
        raise AuthFileError(f'{where} has no object "scopes"')
    granted: dict[str, frozenset[Right]] = {}
    for scope, rights in scopes.items():
        scope_id = _hex(scope)
        if scope != EVERY_SCOPE and (scope_id is None or len(scope_id) != SCOPE_ID_OCTETS):
            raise AuthFileError(f'{where}: a scope is neither "*" nor 32 lower-case hex digits')
        try:
            granted[scope] = frozenset(Right(right) for right in rights)
        except (TypeError, ValueError):
            raise AuthFileError(f'{where}: rights are "read" and "write", in an array') from None
    return Principal(name, digests, granted)


def _digest(text: Any, where: str) -> bytes:
    octets = _hex(text)
    if octets is None or len(octets) != hashlib.sha256().digest_size:
        raise AuthFileError(f"{where}: a token's SHA-256 is not 64 lower-case hex digits")
    return octets


def _hex(text: Any) -> bytes | None:
    if not isinstance(text, str) or text != text.lower():
        return None
    try:
        octets = bytes.fromhex(text)
    except ValueError:
        return None
    return octets if octets.hex() == text else None


class TokenPolicy:
    """A `relay.rights.policy.Policy` that reads its principals from a file, again when it changes.

    A file that cannot be used denies every new request until it can (fail closed).
    """

    def __init__(self, path: Path) -> None:
        """Raises AuthFileError: a relay does not start with a file it cannot use."""
        self.path = path
        self.denied = 0
        self._seen = self._stamp()
        self._principals = load_principals(path)

    def reload(self) -> bool:
        """Look whether the file has changed; call it every now and then.

        True when there are new principals: what is open has to be looked at again
        (`relay.withdrawals`). A file that cannot be used withdraws nothing from what is open.
        """
        stamp = self._stamp()
        if stamp == self._seen and stamp is not None:
            return False
        first_failure = bool(self._principals) or stamp != self._seen
        self._seen = stamp
        try:
            self._principals = load_principals(self.path)
        except AuthFileError as error:
            self._principals = ()
            if first_failure:
                logger.error("%s; new requests are denied until that is mended", error)
            return False
        logger.info("%s: %d principals", self.path, len(self._principals))
        return True

    def _stamp(self) -> tuple[int, ...] | None:
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        # who may write it is no change of its content, but one of ctime
        return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino

    def allow(
        self,
        session: Session,
        action: Action,
        namespace: TrackNamespace,
        tokens: tuple[Token, ...] = (),
    ) -> bool:
        right, scope = RIGHTS[action], _scope(namespace)
        shown = [*tokens, *session.peer_tokens]
        allowed = any(each.may(right, scope) for each in self._principals_of(shown))
        self.denied += not allowed
        return allowed

    def check(self, session: Session, token: Token) -> RequestErrorCode | None:
        """An unknown token gives no right, and is no fault by itself."""
        return None

    def _principals_of(self, tokens: list[Token]) -> list[Principal]:
        digests = [hashlib.sha256(value).digest() for type_, value in tokens if type_ == TOKEN_TYPE]
        return [
            each
            for each in self._principals
            if any(
                hmac.compare_digest(known, digest) for known in each.digests for digest in digests
            )
        ]


def _scope(namespace: TrackNamespace) -> str:
    """The scope a right is needed in; "*" when it is not just one."""
    if len(namespace) > 1 and namespace[0] == PREFIX and len(namespace[1]) == SCOPE_ID_OCTETS:
        return namespace[1].hex()
    return EVERY_SCOPE
