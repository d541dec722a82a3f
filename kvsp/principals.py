"""Who is known, and who may do what: the file of principals (KVSP "Security").

One file serves KVSP services and relays, and this is its only reader and writer. It holds
the digest of a token, never the token itself:

    {"principals": [{"principal": "h1", "tokens": ["<SHA-256, 64 hex digits>"],
                     "scopes": {"<Scope ID, 32 hex digits>": ["read", "write"]},
                     "models": {"<name>": ["read"]},
                     "uris": ["https://h1.example/kvsp/"], "roles": ["holder"],
                     "publishes_for": ["https://h2.example/kvsp/"]}]}

Only "principal" has to be there. The scope "*" is every scope, and every model; "models" are
those of relays' second profile, whose caches are in no scope. A name, a token and a URI
among `uris` belong to one principal each. A member that is not known is ignored: it gives no
right. What is doubtful in any other way makes the whole file unusable, for every program.

Nothing of HTTP or MOQT is imported here: how a token is shown is the programs' business.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from kvsp.names import ijson
from kvsp.names.codes import SCOPE_ID_OCTETS
from kvsp.names.errors import DecodeError, FileError, KvspError
from kvsp.names.identity import parse_hex
from kvsp.names.private_files import create_private, read_private
from kvsp.records.problems import Problem, ProblemName


class Right(StrEnum):
    """What a principal may do in a scope."""

    READ = "read"
    WRITE = "write"


READ: Final = Right.READ
WRITE: Final = Right.WRITE
RIGHTS: Final = frozenset(Right)
ROLES: Final = frozenset({"index", "holder", "instance", "placement", "operator", "cats", "relay"})
EVERY_SCOPE: Final = "*"
EVERY_URI: Final = "*"
"""Stands for any URI; only the loopback developer has it, no file can say it."""

MAX_FILE_OCTETS: Final = 4 << 20
"""Of a file of principals; it bounds the tokens too, of 67 octets each at least."""
MAX_PRINCIPALS: Final = 4096
"""In one file: every token that is shown is compared with all of theirs."""
MAX_TOKEN_FILE_OCTETS: Final = 4096
TOKEN_OCTETS: Final = 32
"""Random octets of a new token."""

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{1,1000}=*")
_SAID: Final = 200
"""Characters of a wrong value that a message repeats."""
_DIGEST_OCTETS: Final = hashlib.sha256().digest_size


class PrincipalsFileError(KvspError):
    """The file of principals cannot be read, others may write it, or it is malformed.

    The message names the file and the entry that is at fault, and no digest.
    """


# --- principals ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Principal:
    """One authenticated client and what it may do.

    `uris` are the base URIs it is, `publishes_for` holder URIs it may publish for,
    `scopes` maps a Scope ID (hex16) or `*` to rights, `models` the name of a model in the
    second profile of KV caches over MOQT.
    """

    name: str
    roles: frozenset[str] = frozenset()
    uris: frozenset[str] = frozenset()
    publishes_for: frozenset[str] = frozenset()
    scopes: Mapping[str, frozenset[Right]] = field(default_factory=dict)
    models: Mapping[str, frozenset[Right]] = field(default_factory=dict)

    def may(self, scope_id: bytes | None, right: Right) -> bool:
        """Whether it has `right` in the scope; None is every scope at once."""
        keys = (EVERY_SCOPE,) if scope_id is None else (scope_id.hex(), EVERY_SCOPE)
        return any(right in self.scopes.get(key, ()) for key in keys)

    def may_of_model(self, model: str, right: Right) -> bool:
        """Whether it has `right` for the prompts of a model, or in every scope."""
        return right in self.models.get(model, ()) or self.may(None, right)

    def has_role(self, *roles: str) -> bool:
        """Whether it has at least one of `roles`."""
        return not self.roles.isdisjoint(roles)

    def is_holder(self, holder: str) -> bool:
        """Whether it is the holder of that URI or publishes on its behalf."""
        return self.is_one_of(holder) or holder in self.publishes_for

    def is_one_of(self, uri: str) -> bool:
        """Whether it is the holder or instance of that URI."""
        return uri in self.uris or EVERY_URI in self.uris

    def require(self, scope_id: bytes, right: Right) -> None:
        """Raises Problem `kvsp-forbidden` without the right.

        Called before anything is looked up, so that the answer is the same whether or
        not the thing exists.
        """
        if not self.may(scope_id, right):
            raise forbidden(f"{self.name!r} has no {right} access to this scope")

    def require_any_scope(self, right: Right) -> None:
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


class Principals:
    """Everybody a file names, found by what a client shows."""

    __slots__ = ("_by_digest", "_by_uri", "_everybody")

    def __init__(self, entries: Iterable[tuple[Principal, Iterable[bytes]]] = ()) -> None:
        """Each principal comes with the digests of its tokens."""
        known = [(who, tuple(digests)) for who, digests in entries]
        self._everybody = tuple(who for who, _ in known)
        self._by_digest = {digest: who for who, digests in known for digest in digests}
        self._by_uri = {uri: who for who in self._everybody for uri in who.uris}

    def __len__(self) -> int:
        return len(self._everybody)

    def __iter__(self) -> Iterator[Principal]:
        return iter(self._everybody)

    def by_token(self, token: bytes) -> Principal | None:
        """Whose token it is, at one look however many there are. Its time may tell something
        of digests; who shows a token cannot choose its digest, so nothing of the tokens."""
        return self._by_digest.get(token_digest(token))

    def by_uri(self, uri: str) -> Principal | None:
        """Who is the holder or instance of that URI, which a client certificate proves."""
        return self._by_uri.get(uri)


# --- tokens --------------------------------------------------------------------------


def new_token() -> str:
    """A fresh bearer token of 256 random bits, base64url. A secret: show it once."""
    return secrets.token_urlsafe(TOKEN_OCTETS)


def token_digest(token: str | bytes) -> bytes:
    """The SHA-256 of a token, which is all a server stores of it."""
    return hashlib.sha256(token.encode("ascii") if isinstance(token, str) else token).digest()


def load_token(path: str | os.PathLike[str]) -> str:
    """The bearer token in a file that only its owner may read.

    Raises FileError naming the file, never the token.
    """
    token = read_private(path, MAX_TOKEN_FILE_OCTETS).decode("ascii", "replace").strip()
    if not _TOKEN.fullmatch(token):
        raise FileError(f"{path}: not one bearer token on one line")
    return token


def save_token(path: str | os.PathLike[str], token: str) -> None:
    """Write a new token file of mode 0600, whole or not at all.

    Raises FileError when the file exists or cannot be written.
    """
    create_private(path, token.encode("ascii") + b"\n")


# --- reading -------------------------------------------------------------------------


def load_principals(path: str | os.PathLike[str]) -> Principals:
    """Read a file of principals, which nobody but its owner may write; others may read it,
    for it holds no secret. Raises PrincipalsFileError."""
    return parse_principals(_read(path), path)


def principals_version(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """What differs after a change of the file or of who may write it; empty for one that is
    not there. Ask before reading: a change meanwhile is then seen the next time."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def parse_principals(data: bytes, path: str | os.PathLike[str]) -> Principals:
    """The principals of a file's text. Raises PrincipalsFileError, which says `path`."""
    try:
        tree = ijson.loads(data)
    except DecodeError as error:
        raise PrincipalsFileError(
            f"{path}: is no JSON as RFC 7493 has it: {error.detail}"
        ) from None
    entries = tree.get("principals") if isinstance(tree, dict) else None
    if not isinstance(entries, list):
        raise PrincipalsFileError(f'{path}: has no array "principals"')
    if len(entries) > MAX_PRINCIPALS:
        raise PrincipalsFileError(f"{path}: has more than {MAX_PRINCIPALS} principals")
    known = [_entry(entry, f"{path}: principals[{at}]") for at, entry in enumerate(entries)]
    _check_unique(known, path)
    return Principals(known)


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return read_private(path, MAX_FILE_OCTETS, others_may_read=True)
    except FileError as error:
        raise PrincipalsFileError(str(error)) from error


def _entry(entry: Any, where: str) -> tuple[Principal, list[bytes]]:
    if not isinstance(entry, dict):
        raise PrincipalsFileError(f"{where} is no object")
    name = entry.get("principal")
    if not isinstance(name, str) or not name:
        raise PrincipalsFileError(f'{where} has no "principal", which is its name')
    tokens = _strings(entry.get("tokens", []), "tokens", where)
    scopes = entry.get("scopes", {})
    if not isinstance(scopes, dict):
        raise PrincipalsFileError(f'{where} has no object "scopes"')
    models = entry.get("models", {})
    if not isinstance(models, dict) or "" in models:
        raise PrincipalsFileError(f'{where}: "models" is no object of names of models')
    roles = frozenset(_strings(entry.get("roles", []), "roles", where))
    if unknown := roles - ROLES:
        known = ", ".join(sorted(ROLES))
        raise PrincipalsFileError(f"{where}: the role {min(unknown)[:_SAID]!r} is none of {known}")
    uris, publishes_for = (
        frozenset(_strings(entry.get(member, []), member, where))
        for member in ("uris", "publishes_for")
    )
    if any("://" not in uri for uri in uris | publishes_for):
        raise PrincipalsFileError(f'{where}: "uris" and "publishes_for" hold absolute URIs')
    principal = Principal(
        name=name,
        roles=roles,
        uris=uris,
        publishes_for=publishes_for,
        scopes={_scope(key, where): _rights(scopes[key], where) for key in scopes},
        models={name: _rights(models[name], where) for name in models},
    )
    return principal, [_digest(token, where) for token in tokens]


def _digest(text: str, where: str) -> bytes:
    try:
        return parse_hex(text, _DIGEST_OCTETS)
    except DecodeError:
        # it may be the token itself, put there by mistake
        raise PrincipalsFileError(
            f"{where}: a token's SHA-256 is not {2 * _DIGEST_OCTETS} lower-case hex digits"
        ) from None


def _scope(key: str, where: str) -> str:
    if key != EVERY_SCOPE:
        try:
            parse_hex(key, SCOPE_ID_OCTETS)
        except DecodeError:
            raise PrincipalsFileError(
                f'{where}: a scope is neither "{EVERY_SCOPE}" nor '
                f"{2 * SCOPE_ID_OCTETS} lower-case hex digits"
            ) from None
    return key


def _rights(values: Any, where: str) -> frozenset[Right]:
    # a list, not what can be iterated: the members of an object are no rights
    if not isinstance(values, list) or any(value not in tuple(Right) for value in values):
        raise PrincipalsFileError(f'{where}: rights are "read" and "write", in an array')
    return frozenset(map(Right, values))


def _strings(values: Any, member: str, where: str) -> list[str]:
    if not isinstance(values, list):
        raise PrincipalsFileError(f'{where}: "{member}" is no array')
    if not all(isinstance(value, str) for value in values):
        raise PrincipalsFileError(f'{where}: "{member}" holds what is no string')
    return values


def _check_unique(known: list[tuple[Principal, list[bytes]]], path: str | os.PathLike[str]) -> None:
    """A name, a URI or a token that two have, or a token that one has twice."""
    first: dict[tuple[str, str | bytes], int] = {}
    for at, (who, digests) in enumerate(known):
        keys: list[tuple[str, str | bytes]] = [
            ("principal", who.name),
            *(("URI", uri) for uri in sorted(who.uris)),
            *(("token", digest) for digest in digests),
        ]
        for kind, value in keys:
            if (kind, value) in first:
                what = "same token" if isinstance(value, bytes) else f"{kind} {value[:_SAID]!r}"
                raise PrincipalsFileError(
                    f"{path}: principals[{at}]: the {what} is given twice, "
                    f"first in principals[{first[kind, value]}]"
                )
            first[kind, value] = at


# --- writing -------------------------------------------------------------------------


def principal_entry(principal: Principal, tokens: Iterable[str] = ()) -> dict[str, Any]:
    """The JSON object of a file for `principal`, with the digests of `tokens`: no secret."""
    entry: dict[str, Any] = {
        "principal": principal.name,
        "uris": sorted(principal.uris),
        "roles": sorted(principal.roles),
        "publishes_for": sorted(principal.publishes_for),
        "scopes": {key: sorted(rights) for key, rights in principal.scopes.items()},
        "models": {name: sorted(rights) for name, rights in principal.models.items()},
        "tokens": sorted(token_digest(token).hex() for token in tokens),
    }
    for member in ("publishes_for", "models"):
        if not entry[member]:
            del entry[member]
    return entry


def principals_with(path: Path | None, entry: Mapping[str, Any]) -> bytes:
    """The text of a file of principals (None, or one that is not there: an empty one) with
    `entry` appended; write it with `replace_private`.

    Raises PrincipalsFileError for what no program would take.
    """
    tree: dict[str, Any] = {"principals": []}
    where: Path | str = "the record"
    if path is not None and os.path.lexists(path):
        data = _read(path)
        parse_principals(data, path)
        tree, where = ijson.loads(data), f"{path} with the new record"
    tree["principals"].append(entry)
    text = json.dumps(tree, indent=2).encode() + b"\n"
    parse_principals(text, where)
    return text
