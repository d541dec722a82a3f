"""The toy engine, samplers and the blocks in an engine's memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsp.instance.engines.engine import KvBlock
from kvsp.instance.engines.pool import BlockPool, CapacityError
from kvsp.instance.engines.samplers import SamplerState, SamplerUnsupportedError
from kvsp.names.identity import block_keys
from kvsp.records.records import Sampler
from tests.kvsp.instance.support import (
    ENGINE,
    GREEDY,
    OCTETS,
    PROMPT,
    SCOPE,
    SIZE,
    TOP_P,
    block_id,
    computed,
    keys,
    text,
)


def continued(blocks, prompt=PROMPT, count=12, sampler=GREEDY):
    """Output when the leading blocks are loaded instead of computed."""
    context, state = ENGINE.context(), SamplerState.of(sampler)
    for block in blocks:
        context.attach(block)
    context.prefill(prompt[context.tokens :])
    made = []
    for _ in range(count):
        made.append(context.next_token(state))
        context.prefill(made[-1:])
    return made


@pytest.mark.parametrize("loaded", range(len(PROMPT) // SIZE + 1))
def test_output_is_the_same_however_many_blocks_were_loaded(loaded):
    blocks = list(computed().values())[:loaded]
    assert continued(blocks) == text(12)


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("component", [0, 1])
def test_one_wrong_element_of_any_layer_changes_the_output(layer, component):
    blocks = list(computed().values())
    array = blocks[1].arrays[layer][component]
    array[2, 1, 3] = (int(array[2, 1, 3]) + 1) % 251
    assert continued(blocks) != text(12)


def test_a_block_of_another_prefix_changes_the_output():
    other = computed([*PROMPT[:3], 99, *PROMPT[4:]])
    blocks = list(computed().values())
    assert continued([blocks[0], list(other.values())[1], blocks[2]]) != text(12)


def test_a_context_names_the_very_block_that_was_attached():
    context = ENGINE.context()
    first = next(iter(computed().values()))
    context.attach(first)
    assert context.block(0) is first
    context.prefill([1])
    with pytest.raises(ValueError, match="border"):
        context.attach(first)
    with pytest.raises(IndexError):
        context.block(1)


def test_no_token_is_drawn_before_one_was_computed():
    context = ENGINE.context()
    context.attach(next(iter(computed().values())))
    with pytest.raises(ValueError, match="at least one token"):
        context.next_token(SamplerState.of(GREEDY))


def test_each_layer_of_a_block_is_written_once_in_any_order():
    block = KvBlock(ENGINE.descriptor)
    sections = next(iter(computed().values())).sections()
    for layer in (2, 0, 3):
        block.write(layer, *sections[layer])
    assert not block.complete
    with pytest.raises(ValueError, match="layer 2 came twice"):
        block.write(2, *sections[1])
    block.write(1, *sections[1])
    assert block.complete
    assert block.sections() == sections


# --- samplers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampler",
    [TOP_P, Sampler("top-k", {"k": 5}, 3, 0, False), Sampler("temperature", {}, 9, 0, False)],
)
def test_a_restored_sampler_goes_on_with_the_same_sample(sampler):
    logits = np.random.default_rng(1).normal(size=(20, 50)) * 2
    whole = SamplerState.of(sampler)
    expected = [whole.draw(row) for row in logits]
    first = SamplerState.of(sampler)
    drawn = [first.draw(row) for row in logits[:8]]
    assert first.record().step == 8
    second = SamplerState.of(first.record())
    assert drawn + [second.draw(row) for row in logits[8:]] == expected
    assert len(set(expected)) > 3


@given(st.integers(0, 2**53), st.integers(0, 1000), st.floats(0.01, 1.0))
@settings(max_examples=50, deadline=None)
def test_top_p_draws_from_the_smallest_set_that_reaches_p(seed, step, p):
    logits = np.log(np.array([0.4, 0.1, 0.3, 0.2]))
    token = SamplerState.of(Sampler("top-p", {"p": p}, seed, step, False)).draw(logits)
    allowed = {0} if p <= 0.4 else {0, 2} if p <= 0.7 else {0, 2, 3} if p <= 0.9 else {0, 1, 2, 3}
    assert token in allowed or abs(p - sum((0.4, 0.3, 0.2)[: len(allowed)])) < 1e-9


def test_a_sampler_draws_by_its_parameters_and_at_temperature_1_without_one():
    logits = np.log(np.array([0.05, 0.4, 0.25, 0.3]))

    def drawn(method, params):
        return [
            SamplerState.of(Sampler(method, params, seed, 0, False)).draw(logits)
            for seed in range(400)
        ]

    assert set(drawn("greedy", {})) == {1}
    assert set(drawn("top-k", {"k": 1})) == {1} and set(drawn("top-k", {"k": 2})) == {1, 3}
    assert set(drawn("temperature", {})) == {0, 1, 2, 3}
    for method, params in (("temperature", {}), ("top-k", {"k": 4}), ("top-p", {"p": 1.0})):
        assert drawn(method, params) == drawn(method, params | {"temperature": 1})
        assert drawn(method, params) != drawn(method, params | {"temperature": 3})
        assert set(drawn(method, params | {"temperature": 0.01})) == {1}


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler("beam", {}, 0, 0, False),
        Sampler("top-p", {}, 0, 0, False),
        Sampler("top-p", {"p": 0}, 0, 0, False),
        Sampler("top-k", {"k": 1.5}, 0, 0, False),
        Sampler("top-k", {"k": True}, 0, 0, False),
        Sampler("greedy", {"bias": 1}, 0, 0, False),
        Sampler("temperature", {"temperature": 0}, 0, 0, False),
    ],
)
def test_a_sampler_that_cannot_be_restored_is_refused(sampler):
    with pytest.raises(SamplerUnsupportedError) as caught:
        SamplerState.of(sampler)
    assert caught.value.method == sampler.method


# --- the pool ------------------------------------------------------------------------


def filled(pool, count):
    made = list(computed(range(4 * count)).items())
    for key, block in made:
        pool.reserve(OCTETS)
        pool.add(block_id(key), block, OCTETS)
    return [block_id(key) for key, _ in made]


def test_the_pool_evicts_what_was_used_longest_ago_and_never_what_is_pinned():
    pool = BlockPool(3 * OCTETS)
    first, second, third = filled(pool, 3)
    pool.pin(first, "session")
    pool.get(second)
    pool.reserve(OCTETS)
    assert (first in pool, second in pool, third in pool) == (True, True, False)
    assert pool.used + pool.reserved == 3 * OCTETS
    pool.release(OCTETS)
    pool.pin(second, "session")
    pool.reserve(OCTETS)
    with pytest.raises(CapacityError):
        pool.reserve(OCTETS)
    assert pool.counters == {"evicted": 1, "rejected": 1}
    pool.release(OCTETS)
    pool.unpin_all("session")
    pool.reserve(3 * OCTETS)
    assert len(pool) == 0
    assert pool.utilization == 1


def test_a_pin_is_held_per_owner_and_a_refused_reservation_evicts_nothing():
    pool = BlockPool(2 * OCTETS)
    first, second = filled(pool, 2)
    pool.pin(first, "a")
    pool.pin(first, "b")
    with pytest.raises(CapacityError):
        pool.reserve(2 * OCTETS)
    assert second in pool
    pool.unpin(first, "a")
    pool.unpin(first, "a")
    assert not pool.discard(first)
    pool.unpin(first, "b")
    assert pool.discard(first)
    assert first not in pool
    with pytest.raises(KeyError):
        pool.pin(first, "a")
    assert pool.used == OCTETS


def test_keys_that_continue_a_prefix_are_those_of_the_whole():
    whole = keys([*PROMPT, *range(10)])
    rest = [*PROMPT[2 * SIZE :], *range(10)]
    assert block_keys(SCOPE, ENGINE.descriptor, rest, after=whole[1]) == whole[2:]
