"""Publishing a prompt's cache while, or after, it is computed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

import numpy as np  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from kvcs.names.errors import MisuseError  # noqa: E402
from kvcs.torch import PublishingCache, export  # noqa: E402
from tests.kvcs.torch.support import (  # noqa: E402
    LAYERS,
    FakeClient,
    descriptor,
    prompt,
    tiny_model,
)

MODEL = tiny_model()


def same_layers(save, cache, tokens):
    assert len(save.layers) == LAYERS
    for (k, v), layer in zip(save.layers, cache.layers, strict=True):
        for array, tensor in ((k, layer.keys), (v, layer.values)):
            assert np.array_equal(array, tensor[0, :, :tokens].transpose(0, 1).numpy())


@torch.no_grad()
@pytest.mark.parametrize("passes", [(40,), (16, 24), (1, 38, 1)])
def test_each_layer_is_published_by_the_last_pass_of_prefill_and_only_the_prompt(passes):
    client, ids = FakeClient(descriptor()), prompt(40)
    cache = PublishingCache(client, ids, MODEL.config)
    at = 0
    for tokens in passes:
        assert not cache.save.layers
        MODEL(ids[:, at : at + tokens], past_key_values=cache)
        at += tokens
    same_layers(cache.save, cache, 40)
    MODEL(ids[:, :1], past_key_values=cache)
    assert len(cache.save.layers) == LAYERS and cache.save.tokens == ids[0].tolist()


@torch.no_grad()
def test_layers_go_out_while_later_ones_are_still_computed():
    client, ids, seen = FakeClient(descriptor()), prompt(20), []
    cache = PublishingCache(client, ids, MODEL.config)
    hooks = [
        layer.register_forward_pre_hook(lambda *_: seen.append(len(cache.save.layers)))
        for layer in MODEL.model.layers
    ]
    MODEL(ids, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    assert seen == [0, 1, 2]


@torch.no_grad()
def test_generating_with_it_gives_the_same_tokens():
    client, ids = FakeClient(descriptor()), prompt(20)
    options = {"max_new_tokens": 5, "do_sample": False}
    cache = PublishingCache(client, ids, MODEL.config)
    assert torch.equal(
        MODEL.generate(ids, past_key_values=cache, **options), MODEL.generate(ids, **options)
    )
    assert len(cache.save.layers) == LAYERS


@torch.no_grad()
def test_what_does_not_fit_ends_the_publication_and_not_the_model():
    client, ids = FakeClient(descriptor()), prompt(20)

    def refuses(layer, k, v):
        raise MisuseError("elements of float32 instead of fp16")

    cache = PublishingCache(client, ids, MODEL.config)
    cache.save.put_layer = refuses
    assert MODEL(ids, past_key_values=cache).logits.shape[1] == 20
    assert "float32" in cache.save.failed


@torch.no_grad()
def test_a_cache_that_is_there_already_is_exported():
    client, ids = FakeClient(descriptor()), prompt(40)
    cache = DynamicCache(config=MODEL.config)
    MODEL(ids, past_key_values=cache)
    same_layers(export(cache, client, ids[:, :33]), cache, 33)
    with pytest.raises(MisuseError, match="40 tokens, and 41"):
        export(cache, client, prompt(41))
