"""A transformers model on the CPU; needs the extra `torch`.

For models with full attention and one K and V of equal shape per layer. K is kept after
the rotation, as the model caches it. Greedy text is the same with and without loaded
blocks; octets can differ in the last bit, so it does not call itself bit-identical.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from kvsp.instance.engines.engine import KvBlock
from kvsp.instance.engines.samplers import SamplerState
from kvsp.names.codes import DIGEST_PREFIX, LAYOUT_1
from kvsp.names.errors import FileError
from kvsp.names.identity import Descriptor, model_digest
from kvsp.names.prefix import block_tokens_range, complete_blocks


def make_tiny_model(folder: Path, *, seed: int = 0) -> None:
    """Write a tiny Llama with random weights of a fixed seed: a real model for tests."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        # larger than usual, so that logits are far enough apart
        initializer_range=0.4,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}\n", encoding="ascii")


def describe(folder: Path, block_tokens: int) -> Descriptor:
    """The Compatibility Descriptor of a model folder. Raises FileError."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        weights = sorted(folder.glob("*.safetensors"))
        tokenizer = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
        digest = model_digest({path.name: path for path in weights})
    except (OSError, ValueError) as error:
        raise FileError(f"{folder}: not a folder with a model: {error}") from None
    if config.get("sliding_window"):
        raise FileError(f"{folder}: sliding-window attention has no contiguous prefix to share")
    heads = config["num_attention_heads"]
    return Descriptor.parse(
        {
            "model": str(config.get("_name_or_path") or config["model_type"]),
            "model_digest": digest,
            "tokenizer_digest": DIGEST_PREFIX + tokenizer,
            "layers": config["num_hidden_layers"],
            "kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
            "kv_dtype": "fp32",
            "positional": "rope",
            "block_tokens": block_tokens,
            "layout": LAYOUT_1,
        }
    )


class TorchEngine:
    """One model from a folder, in 32-bit floating point."""

    bit_identical = False

    def __init__(self, folder: Path, *, block_tokens: int = 16) -> None:
        """Raises FileError for a folder without a usable model."""
        self.descriptor = describe(folder, block_tokens)
        model: Any = AutoModelForCausalLM.from_pretrained(
            # weights in pickles are not read
            folder,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
        )
        self.model: Any = model.eval()
        self.vocabulary: int = self.model.config.vocab_size
        named = inspect.signature(self.model.forward).parameters
        # the parameter has another name in later versions
        self.cache_name = "past_key_values" if "past_key_values" in named else "cache"

    def context(self) -> TorchContext:
        return TorchContext(self)


class TorchContext:
    """One sequence."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._cache = DynamicCache()
        self._blocks: list[KvBlock] = []
        self._logits: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return int(self._cache.get_seq_length())

    def attach(self, block: KvBlock) -> None:
        if self.tokens % self._engine.descriptor.block_tokens or not block.complete:
            raise ValueError("only a complete block is attached, on a border of blocks")
        for layer, (k, v) in enumerate(block.arrays):
            # [tokens, heads, dim] here, [batch, heads, tokens, dim] there
            self._cache.update(_to_model(k), _to_model(v), layer)
        self._blocks.append(block)
        self._logits = None

    def prefill(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        start = self.tokens
        with torch.inference_mode():
            answer = self._engine.model(
                input_ids=torch.tensor([list(tokens)]),
                position_ids=torch.arange(start, start + len(tokens))[None],
                use_cache=True,
                **{self._engine.cache_name: self._cache},
            )
        self._logits = answer.logits[0, -1]

    def next_token(self, sampler: SamplerState) -> int:
        if self._logits is None:
            raise ValueError("at least one token is computed before one is drawn")
        return sampler.draw(self._logits.numpy().astype(np.float64))

    def block(self, index: int) -> KvBlock:
        descriptor = self._engine.descriptor
        while len(self._blocks) < complete_blocks(self.tokens, descriptor.block_tokens):
            self._blocks.append(self._made(len(self._blocks)))
        return self._blocks[index]

    def _made(self, index: int) -> KvBlock:
        descriptor = self._engine.descriptor
        block = KvBlock(descriptor)
        rows = block_tokens_range(index, descriptor.block_tokens)
        for layer, (k, v) in enumerate(block.arrays):
            keys, values = _layer(self._cache, layer)
            k[:] = _from_model(keys, rows)
            v[:] = _from_model(values, rows)
        block.fill()
        return block


def _layer(cache: DynamicCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    held: Any = cache.layers[layer]
    return held.keys, held.values


def _to_model(array: Any) -> torch.Tensor:
    return torch.from_numpy(array).permute(1, 0, 2)[None].contiguous()


def _from_model(tensor: torch.Tensor, rows: range) -> Any:
    return tensor[0, :, rows.start : rows.stop].permute(1, 0, 2).contiguous().numpy()
