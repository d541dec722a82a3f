"""`KvcsStorage`: the shell that SGLang's HiCache calls, on its own threads.

Called by SGLang 0.5; `make test-engines` holds the signatures against the one that is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvcs.pages.counters import Doing, Outcome
from kvcs.pages.settings import PagesError
from kvcs.pages.store import PageStore
from kvcs.sglang.form import form_of, settings_of
from kvsp.blocks.tensors import as_array


class KvcsStorage(HiCacheStorage):
    """Pages at holders of KVSP. Once SGLang has begun, nothing raises."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Raises PagesError for settings that cannot work."""
        self._config = storage_config
        self._settings = settings_of(storage_config)
        self._store: PageStore | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn what pages are. Raises PagesError for pages that cannot be kept."""
        super().register_mem_pool_host(mem_pool_host)
        if self._store is not None:
            self._store.close()
        self._store = PageStore(self._settings, form_of(self._config, mem_pool_host))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Raises PagesError: what a hybrid model keeps besides K and V has no place in a block."""
        raise PagesError(
            f"SGLang: the model has a second pool of pages ({host_pool_name}); only those of "
            "which K and V of every layer are all can be kept by holders of KVSP"
        )

    def exists(self, key: str) -> bool:
        """Whether some holder has the page."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many leading pages some holder has: one request for all of them."""
        return 0 if self._store is None else self._store.wait(self._store.exists(keys))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """The page, every layer verified, in `target_location`, a flat tensor; else None."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Pages in their targets, up to the first one that is not to be had; None after it."""
        nothing = [None] * len(keys)
        store, targets = self._store, target_locations
        if store is None or targets is None or len(targets) != len(keys):
            return nothing
        pages = self._pages(Doing.GET, targets)
        if pages is None:
            return nothing
        whole = store.wait(store.get(keys, pages))
        return [*targets[:whole], *nothing[whole:]]

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store a page, a flat tensor; False when that was not done, for whatever reason."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages; False when one of them is not stored."""
        if self._store is None or values is None or len(values) != len(keys):
            return False
        pages = self._pages(Doing.PUT, values)
        if pages is None:
            return False
        return self._store.wait(self._store.put(keys, pages)) == len(keys)

    def close(self) -> None:
        """End what is under way, within two seconds."""
        if self._store is not None:
            self._store.close()

    def _pages(self, doing: Doing, tensors: Sequence[Any]) -> list[NDArray[np.uint8]] | None:
        """The octets of flat tensors; None, counted, when one is no page of this pool."""
        assert self._store is not None
        try:
            pages = [as_array(each).reshape(-1).view(np.uint8) for each in tensors]
        except ValueError:
            pages = []
        octets = self._store.place.octets
        if len(pages) == len(tensors) and all(page.nbytes == octets for page in pages):
            return pages
        self._store.counters.add(doing, Outcome.FORM, len(tensors))
        return None
