"""A deterministic engine for tests and demonstrations: whole-number attention in numpy.

K and V of a position depend on every position before it through attention over the cache
itself, so a wrong, missing or misplaced block changes the text. All numbers are integers
below 251, which bf16 holds exactly: the same state gives the same octets everywhere.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvsp.instance.engines.engine import KvBlock
from kvsp.instance.engines.samplers import SamplerState
from kvsp.names.codes import DIGEST_PREFIX, LAYOUT_1
from kvsp.names.identity import Descriptor
from kvsp.names.prefix import block_tokens_range

_PRIME: Final = 251
_SHARPNESS: Final = 8.0
"""Logits are from 0 to this: flat enough for a sampler to have a choice."""

Ints = NDArray[np.int64]


def toy_descriptor(
    *, layers: int = 4, kv_heads: int = 2, head_dim: int = 8, block_tokens: int = 4, seed: int = 0
) -> Descriptor:
    """The Compatibility Descriptor of a toy model; `seed` stands for its weights."""

    def digest(text: str) -> str:
        return DIGEST_PREFIX + hashlib.sha256(text.encode("ascii")).hexdigest()

    return Descriptor.parse(
        {
            "model": "kvsp-toy",
            "model_digest": digest(f"kvsp-toy {seed}"),
            "tokenizer_digest": digest("kvsp-toy integers"),
            "layers": layers,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "kv_dtype": "bf16",
            "positional": "none",
            "block_tokens": block_tokens,
            "layout": LAYOUT_1,
        }
    )


class ToyEngine:
    """The toy model with the weights that belong to a seed."""

    bit_identical = True

    def __init__(
        self, *, vocabulary: int = 256, seed: int = 0, delay_ms: float = 0, **geometry: int
    ) -> None:
        """`geometry` are the parameters of `toy_descriptor`; `delay_ms` is what each token
        takes longer, as in a real model."""
        self.delay_s = delay_ms / 1000
        self.descriptor = toy_descriptor(seed=seed, **geometry)
        self.vocabulary = vocabulary
        width = self.descriptor.kv_heads * self.descriptor.head_dim
        random = np.random.default_rng([seed, 0x6B767370])

        def weights(*shape: int) -> Ints:
            return random.integers(0, _PRIME, shape, dtype=np.int64)

        self.width = width
        self.embedding = weights(vocabulary, width)
        self.layers = [
            {name: weights(width, width) for name in ("q", "k", "v", "o")}
            for _ in range(self.descriptor.layers)
        ]
        self.output = weights(vocabulary, width)

    def context(self) -> ToyContext:
        return ToyContext(self)


class ToyContext:
    """One sequence."""

    def __init__(self, engine: ToyEngine) -> None:
        self._engine = engine
        self._blocks: list[KvBlock] = []
        self._rows = 0
        self._k, self._v = self._cache(16), self._cache(16)
        self._hidden: Ints | None = None

    def _cache(self, rows: int) -> Ints:
        engine = self._engine
        return np.zeros((engine.descriptor.layers, rows, engine.width), np.int64)

    @property
    def tokens(self) -> int:
        return self._rows

    def attach(self, block: KvBlock) -> None:
        size = self._engine.descriptor.block_tokens
        if self._rows % size or not block.complete:
            raise ValueError("only a complete block is attached, on a border of blocks")
        self._make_room(size)
        for layer, (k, v) in enumerate(block.arrays):
            rows = slice(self._rows, self._rows + size)
            self._k[layer, rows] = k.reshape(size, -1).astype(np.int64)
            self._v[layer, rows] = v.reshape(size, -1).astype(np.int64)
        self._rows += size
        self._blocks.append(block)
        self._hidden = None

    def prefill(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._compute(token)

    def _compute(self, token: int) -> None:
        if self._engine.delay_s:
            time.sleep(self._engine.delay_s)
        self._make_room(1)
        row = self._rows
        x: Any = self._engine.embedding[token % self._engine.vocabulary]
        for layer, weights in enumerate(self._engine.layers):
            keys, values = self._k[layer, :row], self._v[layer, :row]
            shares = (keys @ (weights["q"] @ x % _PRIME) + np.arange(1, row + 1)) % _PRIME
            seen = shares @ values % _PRIME
            self._k[layer, row] = (weights["k"] @ x + seen) % _PRIME
            self._v[layer, row] = (weights["v"] @ x + 3 * seen + 1) % _PRIME
            x = (x + weights["o"] @ self._v[layer, row] + seen) % _PRIME
        self._rows += 1
        self._hidden = x
        size = self._engine.descriptor.block_tokens
        if self._rows % size == 0:
            self._blocks.append(self._made(self._rows // size - 1))

    def _made(self, index: int) -> KvBlock:
        descriptor = self._engine.descriptor
        block = KvBlock(descriptor)
        rows = block_tokens_range(index, descriptor.block_tokens)
        for layer, (k, v) in enumerate(block.arrays):
            k[:] = self._k[layer, rows.start : rows.stop].reshape(k.shape).astype(k.dtype)
            v[:] = self._v[layer, rows.start : rows.stop].reshape(v.shape).astype(v.dtype)
        block.fill()
        return block

    def _make_room(self, rows: int) -> None:
        if self._rows + rows > self._k.shape[1]:
            grown = 2 * (self._rows + rows)
            for name in ("_k", "_v"):
                larger = self._cache(grown)
                larger[:, : self._rows] = getattr(self, name)[:, : self._rows]
                setattr(self, name, larger)

    def next_token(self, sampler: SamplerState) -> int:
        if self._hidden is None:
            raise ValueError("at least one token is computed before one is drawn")
        scores = self._engine.output @ self._hidden % _PRIME
        return sampler.draw(scores.astype(np.float64) * (_SHARPNESS / _PRIME))

    def block(self, index: int) -> KvBlock:
        return self._blocks[index]
