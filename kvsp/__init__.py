"""KVSP (KV Cache Storage Protocol): KV caches of language models over HTTP.

`Client` looks up, retrieves and stores blocks. The services are `kvsp.index`, `kvsp.holder`,
`kvsp.controller` and `kvsp.instance`; `kvsp.service` puts those of one process together.

Each folder imports only from the ones after it: cli, service, controller and instance, index
and holder, client and http, principals, records, blocks, names. Never `moqt`, `kvcs` or
`relay`. `kvsp.principals`, the one reader of the file of principals, is all that a relay imports.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsp.client.client import Client

_WHERE = {"Client": "kvsp.client.client"}


def __getattr__(name: str) -> Any:
    """Import on first use: most users of this package need no HTTP."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


__all__ = ["Client"]
