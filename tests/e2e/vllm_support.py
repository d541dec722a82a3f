"""Engines of `tests.kvcs.vllm` at a real relay."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from kvcs import Scope
from tests.e2e.support import Cache
from tests.kvcs.vllm import base
from tests.kvcs.vllm.engine import Engine, own_token
from tests.kvcs.vllm.stories import DIM, HEADS, LAYERS, cache_of, descriptor_of

BLOCK = 16
TOKENS = [(n * n + 3 * n) % 1000 for n in range(150)]
SHARED = len(TOKENS) // BLOCK * BLOCK
"""Tokens of them in whole blocks, all of which can be loaded."""


@contextlib.contextmanager
def engines_at(hub: Any, monkeypatch: Any, folder: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines, by role, with a scope and a descriptor in `folder`; shuts them down."""
    connector = base.install(monkeypatch)
    Scope.generate().save(folder / "scope.json")
    compat = folder / "compat.json"
    compat.write_text(json.dumps(descriptor_of(BLOCK).to_dict()))
    made = []

    def make(role: str, budget: int = 10_000, pages: int = 64, **settings) -> Engine:
        extra = {
            "relay": hub.url,
            "cafile": str(hub.cafile),
            "scope_key_file": str(folder / "scope.json"),
            "descriptor": str(compat),
            "block_tokens": BLOCK,
            "min_tokens": BLOCK,
            "lookup_timeout": 5.0,
            "stall": 5.0,
            **settings,
        }
        shape = {"layers": LAYERS, "heads": HEADS, "dim": DIM}
        config = base.vllm_config(extra=extra, role=role, budget=budget, **shape)
        engine = Engine(connector, config, roles=base.KVConnectorRole, pages=pages, **shape)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        with contextlib.suppress(AssertionError):
            engine.close()


def answer(engine: Engine, name: str, tokens=TOKENS):
    """The engine's answer, which is the one it would have computed; its request."""
    request = engine.add(name, tokens)
    engine.run(steps=20_000)
    assert request.token == own_token(tokens)
    return request


def is_offered(engine: Engine, tokens=TOKENS) -> bool:
    found = engine.scheduler.shared.client.directory.longest(tokens)
    return found is not None


def computed_elsewhere(folder: Path) -> Cache:
    """What an engine would have published of `TOKENS`, as files of a producer of its own."""
    there = folder / "elsewhere"
    there.mkdir()
    tensors = {
        f"layers.{layer}.{part}": half[:SHARED]
        for layer, halves in enumerate(cache_of(TOKENS))
        for part, half in zip("kv", halves, strict=True)
    }
    cache = Cache(
        there, descriptor_of(BLOCK).to_dict(), TOKENS[:SHARED], folder / "scope.json", tensors
    )
    cache.compat.write_text(json.dumps(cache.descriptor))
    cache.tokens_file.write_text(json.dumps(cache.tokens))
    save_file(tensors, cache.kv)
    return cache
