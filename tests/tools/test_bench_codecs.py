"""What the measurement of codecs measures."""

from __future__ import annotations

import itertools

import pytest

from kvsp.names.codes import Codec, ElementType
from tools.bench_codecs import measure, tensors


@pytest.mark.parametrize("element", [ElementType.FP16, ElementType.BF16])
def test_the_bundled_cache_gets_smaller_in_the_order_that_the_readme_says(
    element: ElementType,
) -> None:
    descriptor, cache = tensors(element)
    assert descriptor.dtype == cache[0].dtype and len(cache) == 2 * descriptor.layers
    ticks = itertools.count()
    figures = {codec: measure(codec, descriptor, cache[:4], lambda: next(ticks)) for codec in Codec}
    ratios = {codec: each.ratio for codec, each in figures.items()}
    assert ratios[Codec.RAW] == 1.0 < ratios[Codec.X_ZSTD] < ratios[Codec.X_Q8]
    assert 1.8 < ratios[Codec.X_Q8] < 2
    megabytes = sum(each.nbytes for each in cache[:4]) / 1e6
    assert [each.encode for each in figures.values()] == pytest.approx([megabytes] * len(Codec))
    assert all((each.error == 0) is codec.lossless for codec, each in figures.items())
    # half a step of 127, and what the element type rounds
    assert figures[Codec.X_Q8].error < 1 / 254 + 1 / 128
