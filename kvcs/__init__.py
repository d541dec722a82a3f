"""KVCS (KV Cache Streaming): KV caches of language models as MOQT tracks.

`Publication` and `publish` offer the cache of a token prefix, layer by layer;
`Consumer` retrieves it, verified, while it is produced or afterwards.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcs.assembly import (
        ArrayDestination,
        Destination,
        FileDestination,
        Layer,
        MemoryDestination,
        Stats,
    )
    from kvcs.consumer import Consumer
    from kvcs.errors import (
        FileError,
        KvcsError,
        MisuseError,
        NotAuthorized,
        NotFound,
        NothingToPublish,
        PublisherLost,
        RetrievalError,
        RetrievalTimeout,
        VerificationFailed,
    )
    from kvcs.files import KvFile, KvFileWriter, load_descriptor, load_tokens
    from kvcs.namespace import PublicationNamespace
    from kvcs.publisher import Publication, publish
    from kvcs.retrieval import Mode
    from kvcs.sessions import Fallback
    from kvsp.names.errors import DecodeError
    from kvsp.names.identity import Descriptor, Scope, block_keys

_WHERE = {
    "ArrayDestination": "kvcs.assembly",
    "Consumer": "kvcs.consumer",
    "DecodeError": "kvsp.names.errors",
    "Descriptor": "kvsp.names.identity",
    "Destination": "kvcs.assembly",
    "Fallback": "kvcs.sessions",
    "FileDestination": "kvcs.assembly",
    "FileError": "kvcs.errors",
    "KvFile": "kvcs.files",
    "KvFileWriter": "kvcs.files",
    "KvcsError": "kvcs.errors",
    "Layer": "kvcs.assembly",
    "MemoryDestination": "kvcs.assembly",
    "MisuseError": "kvcs.errors",
    "Mode": "kvcs.retrieval",
    "NotAuthorized": "kvcs.errors",
    "NotFound": "kvcs.errors",
    "NothingToPublish": "kvcs.errors",
    "Publication": "kvcs.publisher",
    "PublicationNamespace": "kvcs.namespace",
    "PublisherLost": "kvcs.errors",
    "RetrievalError": "kvcs.errors",
    "RetrievalTimeout": "kvcs.errors",
    "Scope": "kvsp.names.identity",
    "Stats": "kvcs.assembly",
    "VerificationFailed": "kvcs.errors",
    "block_keys": "kvsp.names.identity",
    "load_descriptor": "kvcs.files",
    "load_tokens": "kvcs.files",
    "publish": "kvcs.publisher",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that a program answers signals while the rest is loaded."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


__all__ = [
    "ArrayDestination",
    "Consumer",
    "DecodeError",
    "Descriptor",
    "Destination",
    "Fallback",
    "FileDestination",
    "FileError",
    "KvFile",
    "KvFileWriter",
    "KvcsError",
    "Layer",
    "MemoryDestination",
    "MisuseError",
    "Mode",
    "NotAuthorized",
    "NotFound",
    "NothingToPublish",
    "Publication",
    "PublicationNamespace",
    "PublisherLost",
    "RetrievalError",
    "RetrievalTimeout",
    "Scope",
    "Stats",
    "VerificationFailed",
    "block_keys",
    "load_descriptor",
    "load_tokens",
    "publish",
]
