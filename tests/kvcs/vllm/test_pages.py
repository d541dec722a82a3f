"""An engine's pages and our blocks: every K and V goes to its place and comes back from there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.vllm.pages import (
    Pages,
    UnknownPagesError,
    blocks_computed,
    blocks_to_load,
    layer_number,
    most_to_load,
    to_load,
)

SHAPES = {
    "packed": lambda count, page, heads, dim: (count, heads, page, 2 * dim),
    "halves": lambda count, page, heads, dim: (2, count, page, heads, dim),
    "paired": lambda count, page, heads, dim: (count, 2, page, heads, dim),
}


@pytest.mark.parametrize("form", SHAPES)
def test_the_form_of_a_cache_is_told_by_its_shape(form: str) -> None:
    shape = SHAPES[form](9, 16, 3, 8)
    assert Pages.of(shape, page=16, heads=3, head_dim=8) == Pages(form, 16, 3, 8, 9)


@pytest.mark.parametrize(
    "shape", [(9, 16, 576), (9, 16, 3, 16), (9, 3, 16, 8), (3, 9, 16, 3, 8), (9, 2, 16, 3, 4)]
)
def test_pages_of_an_unknown_shape_are_refused_with_what_would_do(shape) -> None:
    with pytest.raises(UnknownPagesError, match=r"is not known.*attention-backend"):
        Pages.of(shape, page=16, heads=3, head_dim=8)


def test_a_shape_that_could_be_two_forms_is_refused_rather_than_guessed() -> None:
    with pytest.raises(UnknownPagesError, match="two ways"):
        Pages.of((2, 2, 16, 3, 8), page=16, heads=3, head_dim=8)


def test_k_and_v_of_a_packed_page_lie_beside_each_other_in_the_last_dimension() -> None:
    pages = Pages("packed", page=2, heads=1, head_dim=3, count=2)
    cache = np.arange(2 * 1 * 2 * 6).reshape(2, 1, 2, 6)
    k, v = pages.gather(cache, [1, 0], range(4))
    assert k[:, 0].tolist() == [[12, 13, 14], [18, 19, 20], [0, 1, 2], [6, 7, 8]]
    assert v[:, 0].tolist() == [[15, 16, 17], [21, 22, 23], [3, 4, 5], [9, 10, 11]]


@given(
    form=st.sampled_from(sorted(SHAPES)),
    page=st.sampled_from([1, 3, 16, 32]),
    heads=st.integers(1, 4),
    dim=st.integers(1, 8),
    first=st.integers(0, 4),
    count=st.integers(1, 6),
    data=st.data(),
)
def test_gather_after_scatter_is_identity_and_other_pages_stay(
    form, page, heads, dim, first, count, data
) -> None:
    total = first + count + 3
    pages = Pages(form, page, heads, dim, total)
    cache = np.full(SHAPES[form](total, page, heads, dim), -1.0, "float32")
    ids = data.draw(st.permutations(range(total)))[: first + count]
    tokens = range(first * page, (first + count) * page)
    rows = np.arange(len(tokens) * heads * dim, dtype="float32").reshape(-1, heads, dim)
    pages.scatter(cache, ids, tokens, rows, rows + 0.5)
    k, v = pages.gather(cache, ids, tokens)
    assert np.array_equal(k, rows) and np.array_equal(v, rows + 0.5)
    untouched = sorted(set(range(total)) - set(ids[first:]))
    for view in pages.views(cache):
        assert (view[untouched] == -1).all()
    before = cache.copy()
    pages.scatter(cache, ids, tokens, k, v)  # and scatter after gather
    assert np.array_equal(cache, before)


@given(page=st.sampled_from([4, 16, 48]), start=st.integers(0, 90), length=st.integers(1, 60))
def test_any_tokens_can_be_gathered_whatever_pages_they_begin_in(page, start, length) -> None:
    stop = start + length
    count = -(-stop // page)
    pages = Pages("paired", page, 1, 1, count)
    cache = np.zeros((count, 2, page, 1, 1), "int64")
    cache[:, 0] = np.arange(count * page).reshape(count, page, 1, 1)
    k, _ = pages.gather(cache, list(range(count)), range(start, stop))
    assert k.reshape(-1).tolist() == list(range(start, stop))


def test_pages_are_written_whole_or_not_at_all() -> None:
    pages = Pages("paired", 4, 1, 1, 4)
    cache = np.zeros((4, 2, 4, 1, 1))
    rows = np.ones((4, 1, 1))
    with pytest.raises(ValueError, match="not whole pages"):
        pages.scatter(cache, [0, 1, 2], range(2, 6), rows, rows)
    with pytest.raises(ValueError, match="has 1 pages"):
        pages.scatter(cache, [0], range(4, 8), rows, rows)
    assert not cache.any()


@pytest.mark.parametrize(
    "name, number", [("model.layers.7.self_attn.attn", 7), ("transformer.h.11.attn", 11)]
)
def test_a_layer_is_told_by_the_number_in_its_name(name: str, number: int) -> None:
    assert layer_number(name) == number


@pytest.mark.parametrize("name", ["attn", "model.layers.1.experts.2.attn"])
def test_a_layer_whose_number_is_not_plain_is_refused(name: str) -> None:
    with pytest.raises(UnknownPagesError, match="cannot be told"):
        layer_number(name)


@pytest.mark.parametrize(
    "prompt, page, most",
    [(0, 16, 0), (1, 16, 0), (16, 16, 0), (17, 16, 16), (64, 16, 48), (65, 16, 64), (128, 128, 0)],
)
def test_one_token_at_least_is_left_to_compute(prompt: int, page: int, most: int) -> None:
    assert most_to_load(prompt, page) == most


@given(
    prompt=st.integers(0, 1000),
    published=st.integers(0, 1000),
    page=st.sampled_from([16, 32, 128]),
    block=st.sampled_from([16, 64]),
)
def test_what_is_loaded_is_whole_pages_of_what_is_published(prompt, published, page, block) -> None:
    published = published // block * block
    tokens = to_load(prompt, published, page)
    assert tokens % page == 0 and 0 <= tokens <= published and tokens < max(prompt, 1)
    blocks = blocks_to_load(range(tokens), block)
    assert blocks.stop * block >= tokens and (not blocks or (blocks.stop - 1) * block < tokens)
    assert blocks.stop * block <= published


@given(steps=st.lists(st.integers(1, 90), max_size=8), block=st.sampled_from([16, 64]))
def test_chunks_of_any_length_give_every_complete_block_once(steps, block) -> None:
    done, computed, given_blocks = 0, 0, []
    for step in steps:
        computed += step
        blocks = blocks_computed(done, computed, block)
        given_blocks += blocks
        done = max(done, blocks.stop)
    assert given_blocks == list(range(computed // block))
