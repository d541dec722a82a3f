"""KVCS (KV Cache Streaming): KV caches of language models as MOQT tracks.

`Publication` and `publish` offer the cache of a token prefix, layer by layer;
`Consumer` retrieves it, verified, while it is produced or afterwards. `Client` does both for an
inference engine, which has no event loop and waits for nobody.

The floors, each importing downward only: programs → torch, vllm → client, describing → retrieving,
simple → finding, publishing → keeping, trust → names. `finding` and `publishing` stand side by
side and never import each other.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcs.client.arriving import Found
    from kvcs.client.client import Client
    from kvcs.client.loading import CacheLost, Load
    from kvcs.client.saving import Save
    from kvcs.client.settings import ClientSettings
    from kvcs.finding.candidates import DiscoveryMode
    from kvcs.finding.listing import Directory
    from kvcs.finding.relays import Fallback
    from kvcs.keeping.failures import Failures
    from kvcs.keeping.resume_file import ResumeFile
    from kvcs.names.encoding import Encoding
    from kvcs.names.errors import (
        KvcsError,
        MisuseError,
        NotAuthorized,
        NotFound,
        NothingToPublish,
        PublisherLost,
        RetrievalError,
        RetrievalTimeout,
        UnknownKey,
        Unsupported,
        VerificationFailed,
    )
    from kvcs.names.namespace import PublicationNamespace
    from kvcs.publishing.announcing import publish
    from kvcs.publishing.publication import Publication
    from kvcs.publishing.stepwise import aextend, afinish, aput_layer
    from kvcs.retrieving.consumer import Consumer
    from kvcs.retrieving.destinations import (
        ArrayDestination,
        Destination,
        FileDestination,
        MemoryDestination,
    )
    from kvcs.retrieving.layers import Layer
    from kvcs.retrieving.stats import Mode, Stats
    from kvcs.trust.producers import ProducerKey, Producers
    from kvsp.blocks.kv_files import KvFile, KvFileWriter, load_descriptor, load_tokens
    from kvsp.blocks.layout import to_layout_1
    from kvsp.blocks.tensors import to_torch
    from kvsp.names.codes import Codec
    from kvsp.names.errors import DecodeError, FileError
    from kvsp.names.identity import Descriptor, Scope, block_keys

_WHERE = {
    "ArrayDestination": "kvcs.retrieving.destinations",
    "CacheLost": "kvcs.client.loading",
    "Client": "kvcs.client.client",
    "ClientSettings": "kvcs.client.settings",
    "Consumer": "kvcs.retrieving.consumer",
    "Codec": "kvsp.names.codes",
    "DecodeError": "kvsp.names.errors",
    "Encoding": "kvcs.names.encoding",
    "Descriptor": "kvsp.names.identity",
    "Destination": "kvcs.retrieving.destinations",
    "Directory": "kvcs.finding.listing",
    "DiscoveryMode": "kvcs.finding.candidates",
    "Failures": "kvcs.keeping.failures",
    "Fallback": "kvcs.finding.relays",
    "FileDestination": "kvcs.retrieving.destinations",
    "FileError": "kvsp.names.errors",
    "Found": "kvcs.client.arriving",
    "KvFile": "kvsp.blocks.kv_files",
    "KvFileWriter": "kvsp.blocks.kv_files",
    "KvcsError": "kvcs.names.errors",
    "Layer": "kvcs.retrieving.layers",
    "Load": "kvcs.client.loading",
    "MemoryDestination": "kvcs.retrieving.destinations",
    "MisuseError": "kvcs.names.errors",
    "Mode": "kvcs.retrieving.stats",
    "NotAuthorized": "kvcs.names.errors",
    "NotFound": "kvcs.names.errors",
    "NothingToPublish": "kvcs.names.errors",
    "ProducerKey": "kvcs.trust.producers",
    "Producers": "kvcs.trust.producers",
    "Publication": "kvcs.publishing.publication",
    "PublicationNamespace": "kvcs.names.namespace",
    "PublisherLost": "kvcs.names.errors",
    "ResumeFile": "kvcs.keeping.resume_file",
    "RetrievalError": "kvcs.names.errors",
    "RetrievalTimeout": "kvcs.names.errors",
    "Save": "kvcs.client.saving",
    "Scope": "kvsp.names.identity",
    "Stats": "kvcs.retrieving.stats",
    "UnknownKey": "kvcs.names.errors",
    "Unsupported": "kvcs.names.errors",
    "VerificationFailed": "kvcs.names.errors",
    "aextend": "kvcs.publishing.stepwise",
    "afinish": "kvcs.publishing.stepwise",
    "aput_layer": "kvcs.publishing.stepwise",
    "block_keys": "kvsp.names.identity",
    "load_descriptor": "kvsp.blocks.kv_files",
    "load_tokens": "kvsp.blocks.kv_files",
    "publish": "kvcs.publishing.announcing",
    "to_layout_1": "kvsp.blocks.layout",
    "to_torch": "kvsp.blocks.tensors",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that a program answers signals while the rest is loaded."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


__all__ = [
    "ArrayDestination",
    "CacheLost",
    "Client",
    "ClientSettings",
    "Codec",
    "Consumer",
    "DecodeError",
    "Descriptor",
    "Destination",
    "Directory",
    "DiscoveryMode",
    "Encoding",
    "Failures",
    "Fallback",
    "FileDestination",
    "FileError",
    "Found",
    "KvFile",
    "KvFileWriter",
    "KvcsError",
    "Layer",
    "Load",
    "MemoryDestination",
    "MisuseError",
    "Mode",
    "NotAuthorized",
    "NotFound",
    "NothingToPublish",
    "ProducerKey",
    "Producers",
    "Publication",
    "PublicationNamespace",
    "PublisherLost",
    "ResumeFile",
    "RetrievalError",
    "RetrievalTimeout",
    "Save",
    "Scope",
    "Stats",
    "UnknownKey",
    "Unsupported",
    "VerificationFailed",
    "aextend",
    "afinish",
    "aput_layer",
    "block_keys",
    "load_descriptor",
    "load_tokens",
    "publish",
    "to_layout_1",
    "to_torch",
]
