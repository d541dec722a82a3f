"""KVCS (KV Cache Streaming): KV caches of language models as MOQT tracks.

`Publication` and `publish` offer the cache of a token prefix, layer by layer;
`Consumer` retrieves it, verified, while it is produced or afterwards.
"""

from __future__ import annotations

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
from kvsp.errors import DecodeError
from kvsp.identity import Descriptor, Scope, block_keys

__all__ = [
    "ArrayDestination",
    "Consumer",
    "DecodeError",
    "Descriptor",
    "Destination",
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
