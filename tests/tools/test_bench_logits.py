"""What a codec changes of logits is measured as it says, with no model."""

from __future__ import annotations

import numpy as np
import pytest

from kvsp.names.codes import Codec, ElementType
from tools.bench_logits import change, crossed, descriptor_of


def test_what_is_the_same_has_not_changed() -> None:
    logits = np.random.default_rng(0).normal(size=(5, 7))
    assert change(logits, logits)[:2] == (0, 0) and change(logits, logits)[3:] == (0, 0, 0)
    # a shift of all changes no distribution
    shifted = change(logits, logits + 2)
    assert shifted.largest == pytest.approx(2) and shifted.kl_largest == pytest.approx(0, abs=1e-12)


def test_kl_is_that_of_the_distributions_and_the_likeliest_token_is_counted() -> None:
    before = np.log([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])
    after = np.log([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]])
    found = change(before, after)
    assert found.kl_largest == pytest.approx(0.25 * np.log(2))
    assert found.kl_mean == pytest.approx(found.kl_largest / 2)
    assert found.other_tokens == 0.5


@pytest.mark.parametrize("codec", Codec)
def test_what_crosses_is_the_same_but_for_lossy_codecs(codec: Codec) -> None:
    described = descriptor_of((2, 3, 8), ElementType.FP16)
    tensor = np.random.default_rng(0).normal(size=(32, 3, 8)).astype(np.float32)
    held = tensor.astype(np.float16).astype(np.float32)
    back = crossed(tensor, codec, described)
    assert back.shape == tensor.shape
    if codec.lossless:
        assert (back == held).all()
    else:
        assert 0 < np.abs(back - held).max() < 0.02 * np.abs(held).max()
