"""A page of an engine has its place among the blocks of KVSP, and nobody else's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.pages.naming import Order, PageForm, PagePlace
from kvcs.pages.settings import PagesError
from kvsp.blocks.container import Container
from kvsp.names.identity import Descriptor, Scope, block_keys
from tests.kvcs.pages.services import FORM, MODEL

SCOPE = Scope(bytes(range(32)))


def place(form: PageForm = FORM, scope: Scope = SCOPE, **model: object) -> PagePlace:
    return PagePlace(scope, Descriptor.parse(MODEL | model), form)


@given(
    order=st.sampled_from(Order),
    layers=st.integers(1, 5),
    tokens=st.integers(1, 9),
    heads=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
def test_what_is_written_after_it_was_cut_into_sections_is_the_page(
    order: Order, layers: int, tokens: int, heads: int, seed: int
) -> None:
    form = replace(FORM, order=order, layers=layers, page_tokens=tokens, kv_heads=heads)
    there = place(form, layers=layers, kv_heads=heads)
    page = np.random.default_rng(seed).bytes(there.octets)
    assert len(page) == 2 * layers * tokens * heads * 4 * 2
    back = bytearray(there.octets)
    for layer, (k, v) in enumerate(there.sections(page)):
        there.write(back, layer, k, v)
    assert bytes(back) == page


@pytest.mark.parametrize("order", Order)
def test_the_sections_are_k_and_v_of_each_layer_as_layout_1_has_them(order: Order) -> None:
    tensor = np.random.default_rng(1).random((2, 3, 8, 2, 4)).astype("<f2")
    page = tensor if order is Order.LAYERS else tensor.swapaxes(1, 2)
    there = place(replace(FORM, order=order))
    sections = there.sections(page.tobytes())
    for layer, (k, v) in enumerate(sections):
        assert bytes(k) == tensor[0, layer].tobytes()
        assert bytes(v) == tensor[1, layer].tobytes()
    assert Container.build(there.descriptor, sections).header.layers == range(3)


def test_the_descriptor_says_of_a_page_what_is_true_of_it() -> None:
    told = place().descriptor.to_dict()
    assert told == MODEL | {"block_tokens": 8, "x-block-keys": "engine sha-256"}
    half = place(replace(FORM, kv_heads=1, rank=1, ranks=2)).descriptor.to_dict()
    assert half["kv_heads"] == 1
    assert half["x-heads"] == "rank 1 of 2"


def test_a_page_has_another_name_than_every_block_and_every_other_page() -> None:
    tokens = list(range(8))
    described = place().descriptor
    keys = {
        place().key("a"),
        place().key("b"),
        place(scope=Scope(bytes(32))).key("a"),
        place(replace(FORM, named_by="engine md5")).key("a"),
        place(replace(FORM, page_tokens=16)).key("a"),
        place(replace(FORM, kv_heads=1, rank=0, ranks=2)).key("a"),
        place(replace(FORM, kv_heads=1, rank=1, ranks=2)).key("a"),
        place(model_digest="sha-256:" + 64 * "3").key("a"),
        *block_keys(SCOPE, described, tokens),
    }
    assert len(keys) == 9
    assert {len(key) for key in keys} == {32}
    plain = Descriptor.parse(MODEL | {"block_tokens": 8})
    assert described.compat_id != plain.compat_id, "no look-up by tokens ever asks for it"


def test_the_layout_in_the_engines_memory_is_no_part_of_the_name() -> None:
    assert place(replace(FORM, order=Order.TOKENS)).key("a") == place().key("a")


@pytest.mark.parametrize(
    "members, said",
    [
        ({"layers": 4}, "layers is 4 in the engine and 3 in the descriptor"),
        ({"kv_heads": 1}, "kv_heads is 1 in the engine and 2 in the descriptor"),
        ({"head_dim": 8}, "head_dim is 8 in the engine and 4 in the descriptor"),
        ({"dtype": "torch.bfloat16"}, "kv_dtype is bf16 in the engine and fp16 in the descriptor"),
        ({"dtype": "torch.uint8"}, "elements of uint8; known are float16"),
        ({"kv_heads": 1, "ranks": 4, "head_dim": 8}, "head_dim is 8"),
        ({"kv_heads": 1, "ranks": 3}, "2 KV heads are not shared out evenly among 3 ranks"),
    ],
)
def test_an_engine_that_is_not_of_the_described_model_is_refused(members, said: str) -> None:
    with pytest.raises(PagesError, match=said):
        place(replace(FORM, **members))
