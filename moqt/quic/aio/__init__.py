"""The aioquic adapter: `Transport` over aioquic's connection, made fit for bulk transfer.

`transport` and `context` are what an endpoint uses. Below them aioquic's connection is
subclassed in steps: `sending`, `path_mtu`, `receiving`, `credit`, over `streams`, `reassembly`,
`recovery`. Sans-IO: no socket, clock or asyncio. May import `packets`, `mtu`, the modules of
`moqt.quic` that stand alone and `moqt.values`; never `udp`, `accept` or `webtransport`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Later(ModuleType):
    """A module that is imported when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


def _import_tls() -> None:
    """Import aioquic's TLS without what only a client's handshake needs, and that takes a tenth of
    the time that a relay needs to start."""
    names = "service_identity"
    if names in sys.modules:
        return
    sys.modules[names] = _Later(names)
    try:
        import_module("aioquic.tls")
    finally:
        del sys.modules[names]


_import_tls()
