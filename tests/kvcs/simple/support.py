"""The vectors of "KVCache over MoQT", and caches to send."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcs.simple.names import Compression
from kvsp.names.identity import Descriptor
from tests.kvsp.support_vectors import geometry
from tests.paths import DATA

VECTORS: dict[str, Any] = json.loads((DATA / "shi-vectors.json").read_text("utf-8"))
CHUNK: int = VECTORS["geometry"]["chunk"]
TOKENS: int = VECTORS["geometry"]["tokens"]


def of_type(kv_dtype: str, **members: Any) -> Descriptor:
    """The geometry of the vectors with another element type."""
    sizes = {name: VECTORS["geometry"][name] for name in ("layers", "kv_heads", "head_dim")}
    return geometry(**(sizes | members), kv_dtype=kv_dtype, block_tokens=16)


FP16 = of_type("fp16")


def payloads(compression: Compression) -> dict[tuple[int, int], bytes]:
    """Every Object of a track of the vectors."""
    return {
        (each["group"], each["object"]): bytes.fromhex(each["payload_hex"])
        for each in VECTORS["objects"]
        if each["track"] == compression
    }


def values() -> NDArray[Any]:
    """The cache of the vectors, which FP16 holds exactly: [tokens, layers, 2, heads, dim]."""
    octets = b"".join(payload for _, payload in sorted(payloads(Compression.FP16).items()))
    return np.frombuffer(octets, "<f2").reshape(TOKENS, FP16.layers, 2, FP16.kv_heads, -1)


def random_values(descriptor: Descriptor, tokens: int, seed: int = 1) -> NDArray[Any]:
    """A cache of normally distributed values, [tokens, layers, 2, heads, dim]."""
    shape = (tokens, descriptor.layers, 2, descriptor.kv_heads, descriptor.head_dim)
    return np.random.default_rng(seed).normal(size=shape).astype(descriptor.dtype)


def layers_of(cache: NDArray[Any]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """K and V of each layer, `[tokens, kv_heads, head_dim]`."""
    return [
        (np.ascontiguousarray(cache[:, layer, 0]), np.ascontiguousarray(cache[:, layer, 1]))
        for layer in range(cache.shape[1])
    ]
