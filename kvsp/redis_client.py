"""How a Valkey or Redis server is reached (extra `redis`): the index and the journal ask one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict


class Reach(TypedDict, total=False):
    """How to reach a server, besides its URL."""

    timeout_s: float
    """How long it may take to connect, and to answer; 5 s when not given."""

    username: str | None
    password: str | None
    cafile: Path | None
    """Who signed its certificate, when no public authority did."""


def options(how: Reach) -> dict[str, Any]:
    """The same for a client of redis-py."""
    timeout_s, cafile = how.get("timeout_s", 5.0), how.get("cafile")
    return {
        "username": how.get("username"),
        "password": how.get("password"),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        **({} if cafile is None else {"ssl_ca_certs": str(cafile)}),
    }
