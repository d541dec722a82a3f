"""KV heads of tensor-parallel ranks: every head once, none missing, none at a wrong place."""

from __future__ import annotations

import numpy as np
import pytest

from kvcs.vllm.ranks import assemble, check_heads, heads_of


def parts_of(whole: np.ndarray, ranks: int) -> list[np.ndarray]:
    heads = whole.shape[1]
    spans = [heads_of(rank, ranks, heads) for rank in range(ranks)]
    return [whole[:, span.start : span.stop] for span in spans]


@pytest.mark.parametrize("heads, ranks", [(1, 1), (4, 1), (4, 2), (8, 8), (2, 4), (4, 8), (1, 8)])
def test_what_the_ranks_have_together_is_the_unsharded_cache(heads: int, ranks: int) -> None:
    whole = np.arange(5 * heads * 3).reshape(5, heads, 3)
    parts = parts_of(whole, ranks)
    assert len({part.shape[1] for part in parts}) == 1
    assert np.array_equal(assemble(parts, heads), whole)


def test_a_head_that_no_rank_has_is_missed() -> None:
    whole = np.zeros((5, 4, 3))
    with pytest.raises(ValueError, match="KV heads"):
        assemble(parts_of(whole, 4)[:2], 4)


@pytest.mark.parametrize("heads, ranks", [(3, 2), (4, 3), (2, 3)])
def test_heads_that_are_not_shared_out_evenly_are_refused(heads: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="evenly"):
        heads_of(0, ranks, heads)


def test_a_rank_whose_cache_has_another_number_of_heads_is_refused() -> None:
    assert check_heads(1, 2, 8, 4) == range(4, 8)
    with pytest.raises(ValueError, match="rank 1 of 2 has a cache of 8 KV heads"):
        check_heads(1, 2, 8, 8)
    with pytest.raises(ValueError, match="none of 2"):
        heads_of(2, 2, 8)
