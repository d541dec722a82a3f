"""An engine of `tools.llm_engine`'s kind without a model: what `tools.bench_llm --fake` runs.

It speaks the same lines and takes the same arguments. A layer takes a fixed time; K and V are made
of the tokens, and what it answers of all K and V that it has, so that a wrong cache gives another
answer. What it publishes and loads goes through a real `kvcs.Client`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvcs import Client
from kvsp.names.identity import Descriptor

LAYERS = 6
LAYER_SECONDS = 0.05
BLOCK_TOKENS = 16
MODEL = Descriptor.parse(
    {
        "model": "kvcs/fake",
        "model_digest": "sha-256:" + 64 * "0",
        "tokenizer_digest": "sha-256:" + 64 * "0",
        "layers": LAYERS,
        "kv_heads": 1,
        "head_dim": 8,
        "kv_dtype": "fp32",
        "positional": "none",
        "block_tokens": BLOCK_TOKENS,
        "layout": "kvsp-layout-1",
    }
)


class Fake:
    """Computes, publishes and loads."""

    def __init__(self, extra: dict[str, Any], role: str) -> None:
        self._client = Client(
            extra["relay"],
            cafile=extra["cafile"],
            scope_keys=extra["scope_key_file"],
            descriptor=MODEL,
        )
        self._trace = Path(extra["trace"])
        self._publishes = role != "kv_consumer"
        self._loads = role != "kv_producer"
        self._known: dict[tuple[int, ...], list[int]] = {}

    def forget(self) -> dict[str, Any]:
        """Forget earlier prompts."""
        self._known.clear()
        return {"forgotten": True}

    def ask(self, tokens: list[int], count: int, salt: str | None) -> dict[str, Any]:
        """What follows a prompt, and when the first token of it came."""
        began, shared = time.time(), salt is None
        answer = self._known.get(tuple(tokens)) if shared else None
        if answer is None:
            made = self._load(tokens) if shared and self._loads else None
            if made is None:
                made = self._compute(tokens, shared and self._publishes)
            answer = [(made + place) % 49_152 for place in range(count)]
        if shared:
            self._known[tuple(tokens)] = answer
        return {"tokens": answer, "began": began, "first": time.time()}

    def _compute(self, tokens: list[int], publishes: bool) -> int:
        save = self._client.publish(tokens) if publishes else None
        made = 0
        for layer in range(LAYERS):
            time.sleep(LAYER_SECONDS)
            k, v = _layer(tokens, layer)
            made += int(k.sum()) + int(v.sum())
            if save is not None:
                save.put_layer(layer, k, v)
                self._tell("computed", layer)
        return made

    def _load(self, tokens: list[int]) -> int | None:
        """The same with what somebody else computes; None when that fails."""
        found = self._client.directory.longest(tokens)
        if found is None:
            return None
        load, made = self._client.load(found), 0
        for layer in range(LAYERS):
            if not load.wait_layer(layer, within=load.timeout):
                return None
            time.sleep(LAYER_SECONDS * (1 - load.tokens / len(tokens)))
            self._tell("used", layer)
            for came, own in zip(load.layer(layer), _layer(tokens, layer), strict=True):
                made += int(came.sum()) + int(own[load.tokens :].sum())
        return made if load.wait(within=load.timeout) else None

    def _tell(self, event: str, layer: int) -> None:
        with self._trace.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": time.time(), "event": event, "layer": layer}) + "\n")


def _layer(tokens: list[int], layer: int) -> tuple[Any, Any]:
    """K and V of a layer, of small whole numbers, which are exact as floats."""
    k = np.repeat(np.asarray(tokens, np.float32)[:, None] % 251 + layer, 8, axis=1)
    return k[:, None], k[:, None] + 1


def main() -> None:
    """Answer every line, until there is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("extra")
    parser.add_argument("--role", default="kv_both")
    options, _ = parser.parse_known_args()
    engine = Fake(json.loads(options.extra), options.role)
    sys.stdout.write('{"ready": true}\n')
    sys.stdout.flush()
    for line in sys.stdin:
        wanted = json.loads(line)
        if wanted.get("forget"):
            answer = engine.forget()
        else:
            answer = engine.ask(wanted["tokens"], wanted["count"], wanted.get("salt"))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
