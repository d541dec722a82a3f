"""A file of principals and the tokens of those in it."""

from __future__ import annotations

import hashlib
import json
import os

from moqt.values.codes import AliasType
from moqt.values.messages import AuthorizationToken, Parameters
from moqt.values.names import FullTrackName

SCOPE, OTHER = bytes(range(16)), bytes(16)
NAMESPACE = (b"kvcs-1", SCOPE, b"compat", b"anchor", b"publication")
NAME = FullTrackName(NAMESPACE, b"manifest")
READER, WRITER, STRANGER, OPERATOR = (
    f"{who}-{'0123456789' * 3}".encode() for who in ("reader", "writer", "stranger", "operator")
)


def entry(token, scope, rights, **more):
    digest = hashlib.sha256(token).hexdigest()
    return {
        "principal": token.decode(),
        "tokens": [digest],
        "scopes": {scope: rights},
        **more,
    }


RECORDS = [
    entry(READER, SCOPE.hex(), ["read"], uris=["https://h1.example/kvsp/"], roles=["holder"]),
    entry(WRITER, SCOPE.hex(), ["write"]),
    entry(STRANGER, OTHER.hex(), ["read", "write"]),
    entry(OPERATOR, "*", ["read"]),
]


def write(path, records):
    """Replace the file the way `kvcs-keygen` does, so that its inode differs."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"principals": records}))
    os.replace(fresh, path)


def show(token):
    return AuthorizationToken(AliasType.USE_VALUE, None, 0, token)


def parameters(token):
    return Parameters(authorization_tokens=() if token is None else (show(token),))
