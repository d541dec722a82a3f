"""Prefix arithmetic: tokens and complete blocks.

The one module that turns token counts into block counts, so that what is written,
looked up, fetched and matched can never differ by a block. Counts of tokens and
blocks are never negative; ranges are half-open.
"""

from __future__ import annotations


def complete_blocks(tokens: int, block_tokens: int) -> int:
    """How many blocks of `block_tokens` tokens `tokens` tokens fill (KVSP 4.2).

    Only complete blocks have keys: 0 for a prompt shorter than a block.
    Raises ValueError for a negative count or a block size below 1.
    """
    _check(tokens=tokens)
    if block_tokens < 1:
        raise ValueError(f"a block of {block_tokens} tokens is no block")
    return tokens // block_tokens


def usable_blocks(tokens: int, block_tokens: int) -> int:
    """How many cached blocks a prompt of `tokens` tokens can use.

    At least one token must remain to be computed, because the engine needs its
    logits: a prompt of exactly n blocks uses n-1 of them.
    """
    _check(tokens=tokens)
    return complete_blocks(max(tokens - 1, 0), block_tokens)


def missing(wanted: int, held: int) -> int:
    """How much of `wanted` is still to be loaded when `held` is there; never negative."""
    _check(wanted=wanted, held=held)
    return max(wanted - held, 0)


def block_tokens_range(block: int, block_tokens: int) -> range:
    """The absolute token positions of block `block`."""
    _check(block=block)
    complete_blocks(0, block_tokens)
    return range(block * block_tokens, (block + 1) * block_tokens)


def blocks_covering(tokens: range, block_tokens: int) -> range:
    """The blocks that hold any token of the range `tokens`."""
    _check(start=tokens.start)
    if tokens.step != 1:
        raise ValueError("a token range has step 1")
    if not tokens:
        return range(0)
    first = complete_blocks(tokens.start, block_tokens)
    return range(first, complete_blocks(tokens.stop - 1, block_tokens) + 1)


def blocks_within(tokens: range, block_tokens: int) -> range:
    """The blocks that lie wholly inside the range `tokens`."""
    _check(start=tokens.start)
    if tokens.step != 1:
        raise ValueError("a token range has step 1")
    first = -(-tokens.start // block_tokens)
    return range(first, max(first, complete_blocks(max(tokens.stop, 0), block_tokens)))


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if count < 0:
            raise ValueError(f"{name} is {count}; counts and positions are never negative")
