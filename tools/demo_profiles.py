"""`make demo-profiles`: one KV cache by both profiles, through the same relay, side by side.

By the second profile (KVCache over MoQT) the bundled cache goes in chunks of tokens: a consumer
that joins in the middle of production gets it as FP16, octet for octet, another one as Int8. Then
the publisher is killed, and Int8 comes once more, from the relay's cache. By KVCS the same cache
goes in layers, produced within the same time. What each cost is compared, and what the relay
could see of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from kvcs.names.namespace import PublicationNamespace
from kvcs.simple.names import MAX_LITERAL_PROMPT, PromptNamespace
from tools.demo import (
    CACHE,
    COMPAT,
    DATA,
    DEADLINE,
    IDENTITY,
    Child,
    DemoFailed,
    Stage,
    perform,
    tensors_digest,
)

PROMPT_FILE = DATA / "smollm2-survey.prompt.txt"
PROMPT = PROMPT_FILE.read_bytes()
GROUP_TOKENS = 32
PRODUCTION_S = 3.0
"""How long producing the cache takes, by either profile."""
QUICK_PRODUCTION_S = 0.9

Result = dict[str, Any]


def largest_error(out: Path) -> float:
    """The largest difference of a value from the original's, as a part of the largest value of
    its tensor."""
    errors, tensors = [0.0], load_file(out)
    for name, original in load_file(CACHE).items():
        wide = original.astype(np.float32)
        received = tensors[name].astype(np.float32)
        errors.append(float(np.abs(received - wide).max() / np.abs(wide).max()))
    return max(errors)


class Came(NamedTuple):
    """What a consumer wrote, against the original."""

    digest: str
    error: float


def compared(out: Path) -> Came:
    return Came(tensors_digest(out), largest_error(out))


def run(console: Console, stage: Stage, production: float) -> None:
    scope = stage.scope()
    common = stage.relay(console)
    second = ["--profile", "kvcache", *common, "--compat", COMPAT, "--prompt", PROMPT_FILE]
    second += ["--group-tokens", GROUP_TOKENS]
    original = load_file(CACHE)
    tokens, layers = len(original["layers.0.k"]), len(original) // 2
    delay = production * 1000 / (-(-tokens // GROUP_TOKENS) - 1)
    publisher = stage.start(
        *("kvcs-publish", *second, "--kv", CACHE, "--live-delay", delay),
        *("--compression", "FP16", "--compression", "Int8"),
    )
    publisher.wait_for("publishing")

    def consumer(name: str, *arguments: object) -> tuple[Child, Path]:
        out = stage.folder / f"{name}.safetensors"
        asked = (*arguments, "--out", out, "--json", "--timeout", DEADLINE)
        return stage.start("kvcs-subscribe", *asked), out

    asked = [consumer(name, *second, "--compression", name) for name in ("FP16", "Int8")]
    fp16, int8 = (child.result() for child, _ in asked)
    publisher.kill()
    console.print("publisher of the profile kvcache  killed (SIGKILL)")
    late, late_out = consumer("Int8-late", *second, "--compression", "Int8")
    cached = late.result()

    identity = [*common, *scope, *IDENTITY]
    kvcs_publisher = stage.start(
        "kvcs-publish", *identity, "--kv", CACHE, "--live-delay", production * 1000 / (layers - 1)
    )
    seen = kvcs_publisher.wait_for(r"namespace \S+").split()[1]
    layered, layered_out = consumer("kvcs", *identity)
    kvcs = layered.result()

    lossless = tensors_digest(CACHE)
    rows = [
        ("kvcache, FP16, live", fp16, "first_chunk_seconds", compared(asked[0][1])),
        ("kvcache, Int8, live", int8, "first_chunk_seconds", compared(asked[1][1])),
        ("kvcache, Int8, publisher killed", cached, "first_chunk_seconds", compared(late_out)),
        ("kvcs, raw, live", kvcs, "first_layer_seconds", compared(layered_out)),
    ]
    table = Table(title=f"{tokens} tokens of {layers} layers, produced within {production:g} s")
    for heading in ("", "MB", "first chunk or layer", "all", "verified", "against the original"):
        table.add_column(heading, justify="left" if not heading else "right")
    for how, result, first, came in rows:
        table.add_row(
            how,
            f"{result['octets'] / 1e6:.2f}",
            f"{result[first] * 1000:.0f} ms",
            f"{result['seconds'] * 1000:.0f} ms",
            f"{result.get('objects_verified', 0)} Objects",
            "octet for octet" if came.digest == lossless else f"within {came.error:.1%}",
        )
    console.print(table)
    console.print("\nFor all tokens of layer 0, which computing begins with, there are needed:")
    console.print(f"  kvcache  every chunk: {fp16['seconds'] * 1000:.0f} ms")
    console.print(f"  kvcs     its Group:   {kvcs['first_layer_seconds'] * 1000:.0f} ms")
    show_names(console, seen)
    check(fp16, int8, cached, kvcs, [came for *_, came in rows], lossless)


def show_names(console: Console, kvcs_namespace: str) -> None:
    """What any relay on the way reads in the names."""
    model = json.loads(COMPAT.read_text("utf-8"))["model"]
    fields = PromptNamespace(model, PROMPT).fields
    console.print("\nWhat the relay sees of model and prompt, in the namespace:")
    for field in fields:
        text = field.decode("utf-8").replace("\n", " ").replace("\0", "")
        console.print(f"  kvcache  {text[:100]}", highlight=False, markup=False)
    if len(PROMPT) > MAX_LITERAL_PROMPT:
        console.print("           (a prompt as long as this one is named by its SHA-256)")
    tag, *keyed = PublicationNamespace.from_text(kvcs_namespace).fields
    for text in (tag.decode("ascii"), *(field.hex() for field in keyed)):
        console.print(f"  kvcs     {text}", highlight=False, markup=False)


def check(
    fp16: Result, int8: Result, cached: Result, kvcs: Result, came: list[Came], lossless: str
) -> None:
    """Raises DemoFailed for what should be and is not."""
    digests = [each.digest for each in came]
    held = {
        "FP16 and the original are the same": digests[0] == lossless,
        "kvcs and the original are the same": digests[3] == lossless,
        "Int8 is the same live and from the cache": digests[1] == digests[2] != lossless,
        "Int8 is within 1 % of the largest value": came[1].error < 0.01,
        "Int8 has fewer octets": int8["octets"] == cached["octets"] < 0.6 * fp16["octets"],
        "what was produced came before the end of production": (
            fp16["first_chunk_seconds"] < fp16["seconds"]
            and kvcs["first_layer_seconds"] < kvcs["seconds"]
        ),
        "kvcs verified every Object": kvcs["objects_verified"] > 0,
    }
    for what, true in held.items():
        if not true:
            raise DemoFailed(f"this does not hold: {what}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="produce faster")
    production = QUICK_PRODUCTION_S if parser.parse_args().quick else PRODUCTION_S
    return perform("demo-profiles", partial(run, production=production))


if __name__ == "__main__":
    sys.exit(main())
