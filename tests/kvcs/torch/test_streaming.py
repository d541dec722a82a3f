"""Computing with a cache while it comes."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

from transformers import DynamicCache  # noqa: E402

from kvcs.client.counters import Ended  # noqa: E402
from kvcs.client.loading import CacheLost, Load  # noqa: E402
from kvcs.names.errors import MisuseError  # noqa: E402
from kvcs.retrieving.layers import Layer  # noqa: E402
from kvcs.torch import (  # noqa: E402
    StreamedCache,
    export,
    generate_with,
    load_into,
)
from tests.kvcs.torch.support import (  # noqa: E402
    BLOCK,
    LAYERS,
    FakeClient,
    descriptor,
    prompt,
    tiny_model,
)

MODEL = tiny_model()


@torch.no_grad()
def published(ids, kv_dtype="fp32", model=MODEL):
    """A client that has the cache of a prompt."""
    client, cache = FakeClient(descriptor(kv_dtype)), DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    export(cache, client, ids)
    return client


@torch.no_grad()
def at_the_same_split(ids, tokens, model=MODEL):
    """The logits of the rest of a prompt, computed here in the same two passes."""
    whole, cache = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(ids, past_key_values=whole)
    for index, layer in enumerate(whole.layers):
        cache.update(layer.keys[:, :, :tokens], layer.values[:, :, :tokens], index)
    return model(ids[:, tokens:], past_key_values=cache).logits


@torch.no_grad()
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("tokens", [17, 32, 33, 63, 64, 65])
def test_the_logits_are_those_of_the_same_split_to_the_last_bit(tokens, kv_dtype):
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    model, ids = tiny_model(dtypes[kv_dtype]), prompt(tokens)
    client = published(ids, kv_dtype, model)
    found = client.directory.longest(ids[0].tolist())
    assert found.blocks * BLOCK < tokens
    cache = StreamedCache(client, client.load(found), model.config)
    rest = found.blocks * BLOCK
    assert cache.get_seq_length() == rest
    logits = model(ids[:, rest:], past_key_values=cache).logits
    assert (logits - at_the_same_split(ids, rest, model)).abs().max() == 0.0
    assert cache.get_seq_length() == tokens


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 64, 65])
def test_a_prompt_generates_what_it_would_have_anyway(tokens):
    ids, options = prompt(tokens), {"max_new_tokens": 8, "do_sample": False}
    client = published(ids)
    assert torch.equal(generate_with(MODEL, client, ids, **options), MODEL.generate(ids, **options))
    taken = [load.tokens for load in client.loads]
    assert taken == ([(tokens - 1) // BLOCK * BLOCK] if tokens > BLOCK else [])


@torch.no_grad()
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_beams_begin_with_the_same_prompt(options):
    ids, options = prompt(40), {"max_new_tokens": 8, "do_sample": False, **options}
    client = published(ids)
    assert torch.equal(generate_with(MODEL, client, ids, **options), MODEL.generate(ids, **options))
    assert len(client.loads) == 1


@torch.no_grad()
def test_a_layer_is_used_while_later_ones_are_on_the_wire():
    ids, described = prompt(33), descriptor()
    save = published(ids).saves[0]
    load = Load(described, range(2), None, lambda _: None, 30.0)
    used, let = [], [threading.Event() for _ in range(LAYERS)]

    def wire():
        for index, tensors in enumerate(save.layers):
            assert let[index].wait(30)
            arrays = load.arrays(index, 2 * BLOCK)
            for array, tensor in zip(arrays, tensors, strict=True):
                array[:] = tensor[: 2 * BLOCK]
            load.came(Layer(index, *arrays, b""), 0)
        load.end(Ended.LOADED, None, range(2))

    def used_one(_module, _inputs, index):
        used.append((index, load.layers))
        if index < LAYERS:
            let[index].set()

    hooks = [
        layer.register_forward_pre_hook(lambda m, i, n=n: used_one(m, i, n))
        for n, layer in enumerate(MODEL.model.layers)
    ]
    thread = threading.Thread(target=wire)
    thread.start()
    cache = StreamedCache(FakeClient(described), load, MODEL.config)
    logits = MODEL(ids[:, 32:], past_key_values=cache).logits
    for hook in hooks:
        hook.remove()
    thread.join(30)
    # when each layer began, those before it had been used, and it was not there
    assert used == [(0, 0), (1, 1), (2, 2)]
    assert (logits - at_the_same_split(ids, 32)).abs().max() == 0.0


@torch.no_grad()
@pytest.mark.parametrize(("gives", "confirms"), [(0, True), (1, True), (2, True), (3, False)])
def test_what_is_lost_raises_before_a_token_and_is_computed_here(gives, confirms):
    ids, options = prompt(40), {"max_new_tokens": 8, "do_sample": False}
    client = published(ids)
    client.gives, client.confirms = gives, confirms
    found = client.directory.longest(ids[0].tolist())
    cache = StreamedCache(client, client.load(found), MODEL.config)
    with pytest.raises(CacheLost, match="nothing came"):
        MODEL(ids[:, 32:], past_key_values=cache)
    assert torch.equal(generate_with(MODEL, client, ids, **options), MODEL.generate(ids, **options))


@torch.no_grad()
def test_a_prompt_with_masked_tokens_is_neither_looked_up_nor_published():
    ids, options = prompt(40), {"max_new_tokens": 8, "do_sample": False}
    client, mask = published(ids), torch.ones(1, 40, dtype=torch.int64)
    generate_with(MODEL, client, ids, attention_mask=mask, **options)
    assert (len(client.loads), len(client.saves)) == (1, 1)
    mask[:, :20] = 0
    options["attention_mask"] = mask
    came = generate_with(MODEL, client, ids, publish=True, **options)
    assert torch.equal(came, MODEL.generate(ids, **options))
    assert (len(client.loads), len(client.saves)) == (1, 1)


@torch.no_grad()
def test_what_is_computed_here_is_published_where_that_is_asked_for():
    ids, client = prompt(40), FakeClient(descriptor())
    generate_with(MODEL, client, ids, max_new_tokens=2, do_sample=False)
    assert not client.saves
    generate_with(MODEL, client, ids, publish=True, max_new_tokens=2, do_sample=False)
    assert len(client.saves[0].layers) == LAYERS


@torch.no_grad()
def test_an_empty_cache_is_filled_whole_or_not_at_all():
    ids = prompt(40)
    client = published(ids)
    found = client.directory.longest(ids[0].tolist())
    cache = DynamicCache(config=MODEL.config)
    assert load_into(cache, client, client.load(found)) == 32
    logits = MODEL(ids[:, 32:], past_key_values=cache).logits
    assert (logits - at_the_same_split(ids, 32)).abs().max() == 0.0
    with pytest.raises(MisuseError, match="empty"):
        load_into(cache, client, client.load(found))
    client.gives, cache = 2, DynamicCache(config=MODEL.config)
    with pytest.raises(CacheLost):
        load_into(cache, client, client.load(found))
    assert cache.get_seq_length() == 0


def test_what_cannot_be_streamed_is_refused_with_the_reason():
    ids = prompt(40)
    client = published(ids)
    found = client.directory.longest(ids[0].tolist())
    with pytest.raises(MisuseError, match="block 0"):
        StreamedCache(client, client.load(found, range(1, 2)), MODEL.config)
    with pytest.raises(MisuseError, match="one prompt"):
        generate_with(MODEL, client, torch.zeros(2, 20, dtype=torch.int64))
    with pytest.raises(MisuseError, match="past_key_values"):
        generate_with(MODEL, client, ids, past_key_values=DynamicCache())
