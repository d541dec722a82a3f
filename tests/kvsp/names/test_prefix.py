"""Prefix arithmetic: counts of blocks are one function's, and never negative."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp.names.prefix import (
    block_tokens_range,
    blocks_covering,
    blocks_within,
    complete_blocks,
    missing,
    usable_blocks,
)

SIZES = st.integers(1, 64)
COUNTS = st.integers(0, 4096)


@pytest.mark.parametrize(
    ("tokens", "complete", "usable"),
    [(0, 0, 0), (1, 0, 0), (15, 0, 0), (16, 1, 0), (17, 1, 1), (32, 2, 1), (33, 2, 2)],
)
def test_a_full_hit_leaves_at_least_one_token_to_compute(
    tokens: int, complete: int, usable: int
) -> None:
    assert complete_blocks(tokens, 16) == complete
    assert usable_blocks(tokens, 16) == usable


@given(COUNTS, SIZES)
def test_what_is_usable_is_complete_and_at_most_one_block_less(tokens: int, size: int) -> None:
    usable = usable_blocks(tokens, size)
    assert complete_blocks(tokens, size) - 1 <= usable <= complete_blocks(tokens, size)
    assert usable * size <= max(tokens - 1, 0)
    if tokens and tokens % size == 0:
        assert usable * size == tokens - size


@given(COUNTS, COUNTS)
def test_what_is_missing_is_never_negative(wanted: int, held: int) -> None:
    assert missing(wanted, held) == (wanted - held if wanted > held else 0)


def test_a_longer_local_hit_leaves_nothing_to_load() -> None:
    assert missing(complete_blocks(128, 16), complete_blocks(192, 16)) == 0


@given(st.integers(0, 200), st.integers(0, 200), SIZES)
def test_blocks_of_a_token_range_are_those_that_hold_or_fill_it(
    start: int, length: int, size: int
) -> None:
    tokens = range(start, start + length)
    covering = blocks_covering(tokens, size)
    within = blocks_within(tokens, size)
    assert set(within) <= set(covering)
    blocks = range((start + length) // size + 2)
    assert list(covering) == [b for b in blocks if set(block_tokens_range(b, size)) & set(tokens)]
    assert list(within) == [b for b in blocks if set(block_tokens_range(b, size)) <= set(tokens)]


def test_negative_counts_and_empty_blocks_are_refused() -> None:
    for call in (
        lambda: complete_blocks(-1, 4),
        lambda: complete_blocks(4, 0),
        lambda: usable_blocks(-1, 4),
        lambda: usable_blocks(4, -4),
        lambda: missing(-1, 0),
        lambda: missing(0, -64),
        lambda: block_tokens_range(-1, 4),
        lambda: block_tokens_range(1, 0),
        lambda: blocks_covering(range(-1, 4), 4),
        lambda: blocks_covering(range(0, 8, 2), 4),
        lambda: blocks_within(range(0, 8, 2), 4),
    ):
        with pytest.raises(ValueError):
            call()
