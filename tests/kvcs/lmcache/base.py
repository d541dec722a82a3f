"""Stand-ins for the parts of LMCache 0.5 that a remote connector meets: the same names, parameters
and order; `make test-engines` holds them against the LMCache that is installed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.kvcs import stand_ins

SHAPE = (3, 2, 8, 2, 4)
"""Of a chunk: layers, K and V, tokens, heads, dim."""
FORM = "2LTD"


class IrrecoverableException(Exception):
    pass


class RemoteConnector:
    def __init__(self, config, metadata):
        self.meta_shapes = metadata.get_shapes()
        self.meta_dtypes = [metadata.kv_dtype]
        self.meta_fmt = FORM

    def support_ping(self):
        return False

    async def batched_get_non_blocking(self, lookup_id, keys):
        raise NotImplementedError

    def support_batched_get(self):
        return False

    def support_batched_put(self):
        return False

    def support_batched_contains(self):
        return False

    def support_batched_async_contains(self):
        return True

    def support_batched_get_non_blocking(self):
        return True

    async def exists(self, key):
        raise NotImplementedError

    def exists_sync(self, key):
        raise NotImplementedError

    async def get(self, key):
        raise NotImplementedError

    async def put(self, key, memory_obj):
        raise NotImplementedError

    async def list(self):
        raise NotImplementedError

    async def close(self):
        raise NotImplementedError

    async def batched_get(self, keys):
        raise NotImplementedError

    async def batched_put(self, keys, memory_objs):
        raise NotImplementedError

    async def batched_async_contains(self, lookup_id, keys, pin=False):
        raise NotImplementedError

    def remove_sync(self, key):
        raise NotImplementedError

    def batched_contains(self, keys):
        raise NotImplementedError


class ConnectorContext:
    def __init__(self, url, loop, local_cpu_backend, config, metadata, plugin_name=None):
        self.url, self.loop, self.local_cpu_backend = url, loop, local_cpu_backend
        self.config, self.metadata, self.plugin_name = config, metadata, plugin_name


class ConnectorAdapter:
    def __init__(self, schema=""):
        self.schema = schema

    def can_parse(self, url):
        return self.schema != "" and url.startswith(self.schema)

    def create_connector(self, context):
        raise NotImplementedError


class ChunkedTokenDatabase:
    def _get_vllm_hash_func(self, hash_algorithm):
        return hash if hash_algorithm == "sha256_of_nobody" else repr


MODULES = {
    "lmcache.v1.exceptions": [IrrecoverableException],
    "lmcache.v1.storage_backend.connector": [ConnectorAdapter, ConnectorContext],
    "lmcache.v1.storage_backend.connector.base_connector": [RemoteConnector],
    "lmcache.v1.token_database": [ChunkedTokenDatabase],
}


def install(monkeypatch: Any) -> None:
    """Let them be imported by LMCache's names, in this test alone."""
    stand_ins.install(monkeypatch, MODULES, "kvcs.lmcache.connector")


# --- what LMCache hands in ---------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    chunk_hash: int
    model_name: str = "m"

    def to_string(self) -> str:
        return f"{self.model_name}@1@0@{self.chunk_hash:x}@bfloat16"


class Chunk:
    """A chunk in LMCache's memory; `references` are counted as LMCache does."""

    def __init__(self, octets: bytearray, tokens: int = SHAPE[2]) -> None:
        self.octets, self.tokens, self.references = octets, tokens, 1

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.octets)

    def get_shapes(self) -> list[tuple[int, ...]]:
        return [(2, SHAPE[0], self.tokens, SHAPE[3] * SHAPE[4])]

    def get_dtypes(self) -> list[str]:
        return ["torch.bfloat16"]

    def get_memory_format(self) -> str:
        return FORM

    def ref_count_down(self) -> None:
        self.references -= 1


OCTETS = int(np.prod(SHAPE)) * 2


class Memory:
    """LMCache's memory: chunks that were given out, as long as there is room."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.given: list[Chunk] = []
        self.room = room

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any) -> Chunk | None:
        if len(self.given) >= self.room:
            return None
        self.given.append(Chunk(bytearray(OCTETS)))
        return self.given[-1]


@dataclass
class Config:
    extra_config: dict[str, Any] | None
    use_layerwise: bool = False
    remote_serde: str = "naive"
    pre_caching_hash_algorithm: str = "sha256_cbor"


@dataclass
class Metadata:
    kv_shape: tuple[int, ...] = SHAPE
    kv_dtype: str = "torch.bfloat16"
    use_mla: bool = False
    world_size: int = 1
    worker_id: int = 0
    groups: int = field(default=1)

    def get_shapes(self) -> list[tuple[int, ...]]:
        layers, two, tokens, heads, dim = self.kv_shape
        return [(two, layers, tokens, heads * dim)] * self.groups


def context(settings: Any, memory: Memory | None = None, **members: Any) -> ConnectorContext:
    """What an adapter is given; `members` of the configuration or the metadata are other ones."""
    ours = {name: members.pop(name) for name in list(members) if name in Config.__annotations__}
    return ConnectorContext(
        "plugin://kvcs",
        asyncio.new_event_loop(),
        memory or Memory(),
        SimpleNamespace(**vars(Config(**{"extra_config": {"kvcs": settings}} | ours))),
        Metadata(**members),
        "kvcs",
    )
