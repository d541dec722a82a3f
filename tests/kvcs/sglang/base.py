"""Stand-ins for the parts of SGLang 0.5 that a storage backend meets: the same names, parameters
and order; `make test-engines` holds them against the SGLang that is installed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.kvcs import stand_ins


class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        raise NotImplementedError

    def get(self, key, target_location=None, target_sizes=None):
        raise NotImplementedError

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        raise NotImplementedError

    def set(self, key, value=None, target_location=None, target_sizes=None):
        raise NotImplementedError

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
        raise NotImplementedError

    def exists(self, key):
        raise NotImplementedError

    def batch_exists(self, keys, extra_info=None):
        raise NotImplementedError

    def clear(self):
        return None

    def get_stats(self):
        return None


MODULES = {"sglang.srt.mem_cache.hicache_storage": [HiCacheStorage]}


def install(monkeypatch: Any) -> None:
    """Let them be imported by SGLang's names, in this test alone."""
    stand_ins.install(monkeypatch, MODULES, "kvcs.sglang.storage")


# --- what SGLang hands in ----------------------------------------------------------------


@dataclass
class Config:
    """`HiCacheStorageConfig`, the members that are read."""

    extra_config: dict[str, Any] | None
    tp_rank: int = 0
    tp_size: int = 1
    pp_size: int = 1
    attn_cp_size: int = 1
    dcp_size: int = 1
    is_mla_model: bool = False


class Pool:
    """SGLang's host pool: K and V of tokens, in one of its layouts; the names are those of
    `MHATokenToKVPoolHost`."""

    layer_num, head_num, head_dim, page_size = 3, 2, 4, 8
    dtype = np.dtype(np.float16)

    def __init__(self, layout: str = "layer_first", pages: int = 8) -> None:
        self.layout = layout
        layers, tokens = self.layer_num, pages * self.page_size
        shape = {
            "layer_first": (2, layers, tokens, self.head_num, self.head_dim),
            "page_first": (2, tokens, layers, self.head_num, self.head_dim),
            "page_first_direct": (2, pages, layers, self.page_size, self.head_num, self.head_dim),
            "page_head": (2, pages, self.head_num, self.page_size, layers, self.head_dim),
        }[layout]
        self.kv_buffer = np.zeros(shape, self.dtype)

    def put(self, index: int, page: np.ndarray) -> None:
        """Fill a page, `[2, layers, tokens, heads, dim]`."""
        if self.layout == "layer_first":
            self.kv_buffer[:, :, index : index + self.page_size] = page
        elif self.layout == "page_first":
            self.kv_buffer[:, index : index + self.page_size] = page.swapaxes(1, 2)
        else:
            self.kv_buffer[:, index // self.page_size] = page

    def page(self, index: int) -> np.ndarray:
        """A page, `[2, layers, tokens, heads, dim]`."""
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, index : index + self.page_size]
        if self.layout == "page_first":
            return self.kv_buffer[:, index : index + self.page_size].swapaxes(1, 2)
        return self.kv_buffer[:, index // self.page_size]

    def get_data_page(self, index, flat=True):
        if self.layout == "layer_first":
            page = self.kv_buffer[:, :, index : index + self.page_size]
        elif self.layout == "page_first":
            page = self.kv_buffer[:, index : index + self.page_size]
        else:
            page = self.kv_buffer[:, index // self.page_size : index // self.page_size + 1]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self):
        return np.zeros(2 * self.layer_num * self.page_size * self.head_num * self.head_dim, "f2")

    def set_from_flat_data_page(self, index, data_page):
        layers, tokens, row = self.layer_num, self.page_size, (self.head_num, self.head_dim)
        if self.layout == "page_first":
            self.put(index, data_page.reshape(2, tokens, layers, *row).swapaxes(1, 2))
        else:
            self.put(index, data_page.reshape(2, layers, tokens, *row))


def chain(tokens: list[int], page: int = Pool.page_size) -> list[str]:
    """The names of the pages of a prompt, each a hash of all tokens up to its end."""
    names, last = [], b""
    for start in range(0, len(tokens) // page * page, page):
        octets = b"".join(each.to_bytes(4, "little") for each in tokens[start : start + page])
        last = hashlib.sha256(last + octets).digest()
        names.append(last.hex())
    return names
