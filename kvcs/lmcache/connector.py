"""`KvcsConnector`: the shell that LMCache calls, on LMCache's own event loop.

Called by LMCache 0.5; `make test-engines` holds the signatures against the one that is installed.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from lmcache.v1.token_database import ChunkedTokenDatabase

from kvcs.lmcache.form import form_of, settings_of
from kvcs.pages.counters import Doing, Outcome
from kvcs.pages.settings import PagesError
from kvcs.pages.store import PageStore

logger = logging.getLogger("kvcs.lmcache")


class KvcsAdapter(ConnectorAdapter):
    """What LMCache makes a connector with, for the plugin `kvcs`."""

    def __init__(self) -> None:
        super().__init__("plugin://kvcs")

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        """Raises IrrecoverableException for a configuration that cannot work, with the reason."""
        config, metadata = context.config, context.metadata
        if config is None or metadata is None:
            raise IrrecoverableException("kvcs: LMCache gives neither its configuration nor shapes")
        try:
            settings, form = settings_of(config), form_of(config, metadata)
            _check_hash(config.pre_caching_hash_algorithm)
            store = PageStore(settings, form)
        except PagesError as error:
            raise IrrecoverableException(f"kvcs: {error}") from None
        return KvcsConnector(config, metadata, context.local_cpu_backend, store)


def _check_hash(algorithm: str) -> None:
    """Raises PagesError when LMCache does not find the algorithm, which vLLM has: then it takes
    Python's own, and says so in its log alone."""
    looked_up = ChunkedTokenDatabase.__new__(ChunkedTokenDatabase)  # its `__init__` does more
    if looked_up._get_vllm_hash_func(algorithm) is builtins.hash:
        raise PagesError(
            f"LMCache does not find {algorithm} (pre_caching_hash_algorithm) in vLLM, and would "
            "name chunks by Python's own hash, by which anybody can make two prompts of one name: "
            "install a vLLM that has it"
        )


class KvcsConnector(RemoteConnector):
    """Chunks at holders of KVSP. No method raises for what a service or the network does."""

    def __init__(self, config: Any, metadata: Any, local_cpu_backend: Any, store: PageStore):
        super().__init__(config, metadata)
        self._local = local_cpu_backend
        self._store = store

    async def exists(self, key: Any) -> bool:
        """Whether some holder has the chunk."""
        return await self._leading([key]) == 1

    def exists_sync(self, key: Any) -> bool:
        """The same, for a thread that may wait."""
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """How many leading chunks some holder has: one request for all of them."""
        return self._store.wait(self._store.exists(_names(keys)))

    async def batched_async_contains(
        self, lookup_id: str, keys: Sequence[Any], pin: bool = False
    ) -> int:
        """The same, awaited. Nothing is pinned: a chunk that goes meanwhile is computed."""
        return await self._leading(keys)

    async def get(self, key: Any) -> Any:
        """The chunk in memory of LMCache's, every layer verified; None when it is not to be had."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Sequence[Any]) -> list[Any]:
        """Chunks, up to the first one that is not to be had; None for all after it."""
        got: list[Any] = [None] * len(keys)
        octets = self._store.place.octets
        step = max(1, self._store.settings.pending_octets // octets)
        try:
            for start in range(0, len(keys), step):
                names = _names(keys[start : start + step])
                # not LMCache's memory: who gives up waiting may use that for something else
                pages = [bytearray(octets) for _ in names]
                whole = await asyncio.wrap_future(self._store.get(names, pages))
                for number, page in enumerate(pages[:whole]):
                    chunk = self._allocate()
                    if chunk is None:
                        return got
                    got[start + number] = chunk
                    np.frombuffer(chunk.byte_array, np.uint8)[:] = np.frombuffer(page, np.uint8)
                if whole < len(names):
                    break
        except asyncio.CancelledError:
            for chunk in filter(None, got):
                chunk.ref_count_down()
            raise
        return got

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> list[Any]:
        """The leading chunks that are to be had."""
        return [chunk for chunk in await self.batched_get(keys) if chunk is not None]

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Store a chunk."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """Store the full chunks; one that is not full is left out, and counted."""
        full = [
            (key, chunk)
            for key, chunk in zip(keys, memory_objs, strict=True)
            if self._is_full(chunk)
        ]
        if left := len(keys) - len(full):
            self._store.counters.add(Doing.PUT, Outcome.FORM, left)
        if full:
            pages = [np.frombuffer(chunk.byte_array, np.uint8) for _, chunk in full]
            stored = self._store.put(_names([key for key, _ in full]), pages)
            await asyncio.wrap_future(stored)

    async def list(self) -> list[str]:
        """Nothing: holders do not list what others share."""
        return []

    def remove_sync(self, key: Any) -> bool:
        """False: others may use it. Holders let go by themselves what is not used."""
        return False

    async def close(self) -> None:
        """End what is under way, within two seconds."""
        await asyncio.to_thread(self._store.close)

    async def _leading(self, keys: Sequence[Any]) -> int:
        return await asyncio.wrap_future(self._store.exists(_names(keys)))

    def _allocate(self) -> Any:
        """Memory for a full chunk; None, counted, when LMCache has none or another size of it."""
        chunk = self._local.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
        if chunk is not None and len(chunk.byte_array) != self._store.place.octets:
            self._store.counters.add(Doing.GET, Outcome.FORM)
            chunk.ref_count_down()
            return None
        return chunk

    def _is_full(self, chunk: Any) -> bool:
        form = (chunk.get_memory_format(), chunk.get_shapes(), chunk.get_dtypes())
        return form == (self.meta_fmt, self.meta_shapes, self.meta_dtypes)


def _names(keys: Sequence[Any]) -> list[str]:
    return [key.to_string() for key in keys]
