"""A tiny random Llama, and a client that keeps what it is given: no relay, no thread."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvcs.client.counters import Ended
from kvcs.client.loading import CacheLost, Load
from kvcs.retrieving.layers import Layer
from kvsp.names.identity import Descriptor

BLOCK = 16
LAYERS = 3


def tiny_config(**changes) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.4,  # so that logits are far enough apart
        **changes,
    )


def tiny_model(dtype=torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config()).to(dtype).eval()


def descriptor(kv_dtype: str = "fp32", **changes) -> Descriptor:
    return Descriptor.parse(
        {
            "model": "tiny",
            "model_digest": "sha-256:" + "11" * 32,
            "tokenizer_digest": "sha-256:" + "22" * 32,
            "layers": LAYERS,
            "kv_heads": 2,
            "head_dim": 8,
            "kv_dtype": kv_dtype,
            "positional": "rope",
            "block_tokens": BLOCK,
            "layout": "kvsp-layout-1",
            **changes,
        }
    )


def prompt(tokens: int) -> torch.Tensor:
    return torch.randint(0, 256, (1, tokens), generator=torch.Generator().manual_seed(tokens))


class FakeSave:
    def __init__(self, tokens) -> None:
        self.tokens, self.layers, self.failed = tokens, [], None

    def put_layer(self, layer, k, v) -> bool:
        assert layer == len(self.layers)
        self.layers.append((k, v))
        return True

    def abort(self, why) -> None:
        self.failed = why


class FakeClient:
    """Finds what was published with it, and gives as much of it as it is told."""

    def __init__(self, described: Descriptor) -> None:
        self.descriptor = described
        self.saves: list[FakeSave] = []
        self.loads: list[Load] = []
        self.directory = SimpleNamespace(longest=self._longest)
        self.gives, self.confirms = LAYERS, True

    def publish(self, tokens) -> FakeSave:
        self.saves.append(FakeSave(list(tokens)))
        return self.saves[-1]

    def _longest(self, tokens):
        most = (len(tokens) - 1) // BLOCK
        for save in self.saves:
            blocks = min(len(save.tokens) // BLOCK, most)
            if blocks and save.layers and save.tokens == list(tokens)[: len(save.tokens)]:
                return SimpleNamespace(blocks=blocks, save=save)
        return None

    def load(self, found, blocks=None) -> Load:
        blocks = range(found.blocks) if blocks is None else blocks
        load = Load(self.descriptor, blocks, None, lambda _: None, 10.0)
        self.loads.append(load)
        rows = blocks.stop * BLOCK
        for index, tensors in enumerate(found.save.layers[: self.gives]):
            arrays = load.arrays(index, rows)
            for array, tensor in zip(arrays, tensors, strict=True):
                array[:] = tensor[:rows]
            load.came(Layer(index, *arrays, b""), blocks.start)
        if self.gives == LAYERS and self.confirms:
            load.end(Ended.LOADED, None, blocks)
        else:
            lost = CacheLost("nothing came for 0.5 s", blocks)
            load.end(Ended.STALLED, lost, range(blocks.start, blocks.start))
        return load
