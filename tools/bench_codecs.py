"""`python -m tools.bench_codecs`: what each codec saves, and what it costs.

On the bundled cache (SmolLM2-135M, fp16) and on the same values as bfloat16, block by block: the
octets of all sections against raw, and MB of raw sections that one core encodes and decodes in a
second. Ratios are the same on any machine, speeds compare codecs within one run. For a lossy
codec: the largest error of a value, as a part of the largest value of its token and head.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from kvsp.blocks.codecs import decode_section, encode_section
from kvsp.blocks.kv_files import KvFile, load_descriptor
from kvsp.blocks.layout import Tensor, block_section, section_tensor
from kvsp.names.codes import Codec, ElementType
from kvsp.names.identity import Descriptor
from tools.demo import CACHE, COMPAT


class Figures(NamedTuple):
    """Of one codec on one element type."""

    ratio: float
    """Raw octets for each encoded one."""
    encode: float
    """MB of raw sections per second."""
    decode: float
    error: float
    """0 for a lossless one."""


def tensors(element: ElementType) -> tuple[Descriptor, list[Tensor]]:
    """The bundled cache in an element type."""
    descriptor = load_descriptor(COMPAT)
    with KvFile.open(CACHE, descriptor) as file:
        held = [
            np.array(each)
            for layer in range(descriptor.layers)
            for each in (file.k(layer), file.v(layer))
        ]
    members = json.loads(COMPAT.read_text("utf-8")) | {"kv_dtype": element.value}
    other = Descriptor.parse(members)
    return other, [each.astype(np.float32).astype(other.dtype) for each in held]


def measure(
    codec: Codec,
    descriptor: Descriptor,
    cache: list[Tensor],
    clock: Callable[[], float] = time.process_time,
) -> Figures:
    """Every block of every layer, encoded and decoded."""
    rows = descriptor.block_tokens
    raw = [block_section(each, block, rows) for each in cache for block in range(len(each) // rows)]
    megabytes = sum(map(len, raw)) / 1e6
    began = clock()
    encoded = [encode_section(codec, each, descriptor) for each in raw]
    between = clock()
    decoded = [decode_section(codec, each, descriptor) for each in encoded]
    ended = clock()
    error = 0.0
    for before, after in zip(raw, decoded, strict=True):
        if codec.lossless:
            assert before == after, f"{codec.label} is said to be lossless"
            continue
        wide, back = (
            section_tensor(each, descriptor).astype(np.float32) for each in (before, after)
        )
        peak = np.abs(wide).max(axis=2, keepdims=True)
        error = max(error, float((np.abs(back - wide) / np.maximum(peak, 1e-30)).max()))
    tick = 1e-9
    return Figures(
        megabytes * 1e6 / sum(map(len, encoded)),
        megabytes / max(between - began, tick),
        megabytes / max(ended - between, tick),
        error,
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    table = Table(title="blocks of 16 tokens, one core")
    for heading in ("codec", "elements", "ratio", "encode MB/s", "decode MB/s", "largest error"):
        table.add_column(heading, justify="left" if heading == "codec" else "right")
    for element in (ElementType.FP16, ElementType.BF16):
        descriptor, cache = tensors(element)
        for codec in Codec:
            figures = measure(codec, descriptor, cache)
            speeds = (f"{figures.encode:.0f}", f"{figures.decode:.0f}")
            if codec is Codec.RAW:
                speeds = ("", "")
            error = "none" if codec.lossless else f"{figures.error:.2%}"
            table.add_row(codec.label, element.value, f"{figures.ratio:.2f}x", *speeds, error)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
