"""Bearer tokens, and the records by which relays and KVSP services know them.

A token is 256 random bits in base64url in a file of mode 0600. A file of
principals, the same for `kvcs-relay --auth` and for `kvsp-server`, holds its SHA-256 digest and the
rights it gives, by Scope ID.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvcs.names.errors import FileError
from kvsp.http.auth import check_principals, read_principals

EVERY_SCOPE: Final = "*"


def write_token(path: Path, token: str) -> None:
    """Write a token file, whole or not at all.

    Raises FileError when the file exists or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "w", encoding="ascii") as file:
                os.fchmod(descriptor, 0o600)
                file.write(token + "\n")
                file.flush()
                os.fsync(descriptor)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from None


def record(
    principal: str,
    digest: str,
    scope: str,
    rights: list[str],
    *,
    roles: Sequence[str] = (),
    uris: Sequence[str] = (),
) -> dict[str, Any]:
    """What has to be known of a token; no secret. Only KVSP services look at roles and URIs."""
    return {
        "principal": principal,
        "uris": list(uris),
        "roles": list(roles),
        "scopes": {scope: rights},
        "tokens": [digest],
    }


def principals_with(path: Path | None, entry: dict[str, Any]) -> bytes:
    """The text of the file of principals (None, or one that is not there: an empty one) with
    `entry` appended. Raises PrincipalsFileError for what a KVSP service would not take."""
    value: dict[str, Any] = {"principals": []}
    where: Path | str = "the record"
    if path is not None and os.path.lexists(path):
        text = read_principals(path)
        check_principals(text, path)
        value, where = json.loads(text), f"{path} with the new record"
    value["principals"].append(entry)
    text = json.dumps(value, indent=2).encode() + b"\n"
    check_principals(text, where)
    return text


def replace_principals(path: Path, text: bytes) -> None:
    """Write the file of principals, whole or not at all. Raises FileError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(descriptor)
            if path.exists():
                os.chmod(temporary, path.stat().st_mode & 0o777)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from None
