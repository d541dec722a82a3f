"""Engines with the connector, in one world of publications."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np

from kvsp.names.identity import Descriptor
from tests.kvcs.vllm import base
from tests.kvcs.vllm.client import MemoryClient, World
from tests.kvcs.vllm.engine import Engine, kv_of

DIGEST = "sha-256:" + "11" * 32
LAYERS, HEADS, DIM = 3, 2, 4


def descriptor_of(block_tokens: int) -> Descriptor:
    """That of the engines' model."""
    return Descriptor.parse(
        {
            "model": "toy",
            "model_digest": DIGEST,
            "tokenizer_digest": DIGEST,
            "layers": LAYERS,
            "kv_heads": HEADS,
            "head_dim": DIM,
            "kv_dtype": "fp32",
            "positional": "rope",
            "block_tokens": block_tokens,
            "layout": "kvsp-layout-1",
        }
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens of a prompt; those of one seed begin alike."""
    return [(seed * 7919 + n * n + 3 * n) % 1000 for n in range(length)]


def cache_of(tokens: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """K and V of each layer."""
    return [kv_of(tokens, layer, HEADS, DIM, "float32") for layer in range(LAYERS)]


@dataclass
class Stage:
    """Makes engines; `monkeypatch` gives them clients of one world instead of real ones."""

    monkeypatch: object
    block: int = 16
    world: World = field(init=False)
    clients: list[MemoryClient] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world = World(self.block, LAYERS)
        self.connector = base.install(self.monkeypatch)

    def engine(self, *, page=16, form="packed", role="kv_both", extra=None, **engine) -> Engine:
        settings = {
            "relay": f"moqt://{len(self.engines)}",  # each its own client, as in its own process
            "scope_key_file": "none",
            "block_tokens": self.block,
            "min_tokens": 0,
            **(extra or {}),
        }
        config = base.vllm_config(
            extra=settings,
            page=page,
            layers=LAYERS,
            heads=HEADS,
            dim=DIM,
            role=role,
            budget=engine.pop("budget", 10_000),
        )
        module = sys.modules["kvcs.vllm.connector"]
        descriptor = descriptor_of(self.block)
        client = MemoryClient(self.world, descriptor)
        self.monkeypatch.setattr(module, "client_of", lambda settings, descriptor: client)
        self.monkeypatch.setattr(module, "model_descriptor", lambda settings, config: descriptor)
        made = Engine(
            self.connector,
            config,
            roles=base.KVConnectorRole,
            form=form,
            layers=LAYERS,
            heads=HEADS,
            dim=DIM,
            **engine,
        )
        self.clients.append(client)
        self.engines.append(made)
        made.client = client
        return made

    def published(self, tokens, role="kv_producer") -> Engine:
        """An engine that has computed these tokens and published them."""
        engine = self.engine(role=role, pages=256)
        engine.add("producer", tokens)
        engine.run()
        return engine
