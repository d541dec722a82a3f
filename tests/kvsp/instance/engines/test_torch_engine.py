"""A real model gives the same greedy text with and without a loaded cache."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the extra `torch` is not installed")
pytest.importorskip("transformers", reason="the extra `torch` is not installed")

from kvsp.blocks.container import Container, LayerSections, decode
from kvsp.instance.engines.engine import KvBlock
from kvsp.instance.engines.samplers import SamplerState
from kvsp.instance.engines.torch_engine import TorchEngine, make_tiny_model
from kvsp.records.records import Sampler

PROMPT = [(7 * number + 3) % 256 for number in range(37)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, seed=1)
    return TorchEngine(folder, block_tokens=8)


def greedy(context, count=24):
    sampler = SamplerState.of(Sampler("greedy", {}, 0, 0, False))
    text = []
    for _ in range(count):
        text.append(context.next_token(sampler))
        context.prefill(text[-1:])
    return text


def through_a_container(engine, block):
    """The block as another instance gets it: over the wire format and back."""
    container = Container.build(engine.descriptor, block.sections())
    _, layers = decode(b"".join(bytes(part) for part in container), engine.descriptor)
    made = KvBlock(engine.descriptor)
    for layer in layers:
        assert isinstance(layer, LayerSections)
        made.write(layer.layer, layer.k, layer.v)
    return made


def test_greedy_text_is_the_same_with_and_without_a_loaded_cache(engine):
    alone = engine.context()
    alone.prefill(PROMPT)
    blocks = [through_a_container(engine, alone.block(index)) for index in range(4)]
    loaded = engine.context()
    for block in blocks:
        loaded.attach(block)
    assert loaded.tokens == 32
    loaded.prefill(PROMPT[32:])
    text = greedy(alone)
    assert greedy(loaded) == text
    assert len(set(text)) > 4


def test_a_wrong_block_changes_the_text_of_a_real_model(engine):
    alone = engine.context()
    alone.prefill(PROMPT)
    other = engine.context()
    other.prefill(PROMPT[::-1])
    loaded = engine.context()
    for index in range(4):
        loaded.attach((other if index == 2 else alone).block(index))
    loaded.prefill(PROMPT[32:])
    assert greedy(loaded) != greedy(alone)


def test_the_descriptor_of_a_model_is_that_of_its_files(engine):
    descriptor = engine.descriptor
    shape = (descriptor.layers, descriptor.kv_heads, descriptor.head_dim, descriptor.kv_dtype)
    assert shape == (3, 2, 8, "fp32")
    context = engine.context()
    context.prefill(PROMPT[:8])
    k, v = context.block(0).arrays[0]
    assert k.shape == v.shape == (8, 2, 8)
    assert k.dtype == descriptor.dtype
