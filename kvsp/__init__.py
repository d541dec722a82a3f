"""KVSP (KV Cache Storage Protocol): KV caches of language models over HTTP.

`Client` looks up, retrieves and stores blocks; the services are below `kvsp.index`,
`kvsp.holder` and `kvsp.controller`.
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
