"""transformers models on both sides of a real relay; needs the extra `torch`."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

from kvcs import Client, Scope  # noqa: E402
from kvcs.client.counters import Ended, Looked  # noqa: E402
from kvcs.torch import PublishingCache, generate_with  # noqa: E402
from tests.e2e.support import eventually  # noqa: E402
from tests.kvcs.torch.support import descriptor, prompt, tiny_model  # noqa: E402

OPTIONS = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def clients(hub):
    scope = Scope.generate()
    settings = {"stall": 5.0, "lookup_timeout": 5.0, "timeout": 30.0, "cafile": hub.cafile}
    made = [
        Client(hub.url, scope_keys=scope, descriptor=descriptor(), **settings) for _ in range(2)
    ]
    yield made
    for each in made:
        each.close()


def prefill(model, client, ids):
    cache = PublishingCache(client, ids, model.config)
    with torch.no_grad():
        model.generate(ids, past_key_values=cache, **OPTIONS)
    return cache.save


@pytest.mark.parametrize("tokens", [64, 65, 200])
def test_a_second_machine_generates_the_tokens_it_would_have_computed_itself(tokens, clients):
    producer, consumer = clients
    model, ids = tiny_model(), prompt(tokens)
    own = model.generate(ids, **OPTIONS)
    save = prefill(model, producer, ids)
    eventually(lambda: save.complete, "it is published")
    eventually(lambda: consumer.directory.longest(ids[0].tolist()), "it is found")
    assert torch.equal(generate_with(model, consumer, ids, **OPTIONS), own)
    assert consumer.counters.of("loads") == {Ended.LOADED: 1}


def test_a_producer_that_was_lost_costs_nothing_but_time(hub, clients):
    producer, consumer = clients
    model, ids = tiny_model(), prompt(100)
    own = model.generate(ids, **OPTIONS)
    prefill(model, producer, ids)
    eventually(lambda: consumer.directory.longest(ids[0].tolist()), "it is found")
    hub.process.kill()
    assert torch.equal(generate_with(model, consumer, ids, **OPTIONS), own)
    assert consumer.counters.of("loads")
    assert Ended.LOADED not in consumer.counters.of("loads")
    assert torch.equal(generate_with(model, consumer, ids, **OPTIONS), own)
    assert consumer.counters.of("lookups")[Looked.MISS] >= 1
