"""Bearer tokens, and the records by which relays and KVSP services know them.

A token is 256 random bits in base64url in a file of mode 0600. A file of
principals, the same for `kvcs-relay --auth` and for `kvsp-server`, holds its SHA-256 digest and the
rights it gives, by Scope ID.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvcs.errors import FileError

EVERY_SCOPE: Final = "*"
TOKEN_OCTETS: Final = 32


def make_token(path: Path) -> str:
    """Write a fresh token to `path`; returns its SHA-256 digest in hexadecimal.

    Raises FileError when the file exists or cannot be written.
    """
    token = secrets.token_urlsafe(TOKEN_OCTETS)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o600)
            file.write(token + "\n")
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from None
    return hashlib.sha256(token.encode()).hexdigest()


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


def check_principals(path: Path) -> dict[str, Any]:
    """The content of a file of principals, an empty one if there is none. Raises FileError."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {"principals": []}
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from None
    except ValueError:
        raise FileError(f"{path}: is no JSON") from None
    if not isinstance(value, dict) or not isinstance(value.get("principals"), list):
        raise FileError(f'{path}: has no array "principals"')
    return value


def add_principal(path: Path, entry: dict[str, Any]) -> None:
    """Append `entry` to the file of principals, whole or not at all. Raises FileError."""
    value = check_principals(path)
    value["principals"].append(entry)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(value, file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(descriptor)
            if path.exists():
                os.chmod(temporary, path.stat().st_mode & 0o777)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from None
