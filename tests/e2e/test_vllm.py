"""The vLLM connector over real relays: engines that call it as vLLM does, each with its own client.

`make test-vllm` does the same with vLLM itself; `test_vllm_faults.py` has what fails.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvcs import Scope
from tests.e2e.support import eventually
from tests.e2e.vllm_support import TOKENS, answer, engines_at, is_offered
from tests.kvcs.vllm.stories import LAYERS


@pytest.fixture
def engines(monkeypatch, tmp_path, hub):
    with engines_at(hub, monkeypatch, tmp_path) as make:
        yield make


@pytest.mark.parametrize("load", ["layerwise", "async", "auto"])
def test_what_one_engine_has_computed_another_one_loads(engines, load: str) -> None:
    prefill, decode = engines("kv_producer"), engines("kv_consumer", load=load)
    answer(prefill, "p")
    eventually(lambda: is_offered(decode), "the publication is found")
    request = answer(decode, "d")
    assert request.external == 144 and decode.computed_tokens == 6
    counts = decode.counts
    assert counts["hit"] == 1 and counts["tokens"] == 144 and counts["octets"] > 0


def test_a_layer_is_used_before_the_last_one_is_computed(engines) -> None:
    prefill, decode = engines("kv_producer"), engines("kv_consumer", load="layerwise")
    used, order = threading.Event(), []
    save, wait = prefill.worker.save_kv_layer, decode.worker.wait_for_layer_load

    def save_one(name, cache, meta):
        if name == prefill.names[-1]:
            assert used.wait(30)
        save(name, cache, meta)
        order.append(("computed", name))

    def wait_one(name):
        wait(name)
        order.append(("used", name))
        used.set()

    prefill.worker.save_kv_layer, decode.worker.wait_for_layer_load = save_one, wait_one
    prefill.add("p", TOKENS)
    computing = threading.Thread(target=prefill.run)
    computing.start()
    eventually(lambda: is_offered(decode), "the publication is found")
    assert answer(decode, "d").external == 144
    computing.join()
    assert order.index(("used", decode.names[0])) < order.index(("computed", prefill.names[-1]))


def test_an_engine_goes_on_from_the_relays_cache_when_the_producer_is_gone(engines, hub) -> None:
    prefill, first = engines("kv_producer"), engines("kv_consumer")
    answer(prefill, "p")
    eventually(lambda: is_offered(first), "the publication is found")
    assert answer(first, "d").external == 144
    before = hub.metric("objects_in_total")
    second = engines("kv_consumer")
    eventually(lambda: is_offered(second), "the publication is found")
    assert answer(second, "d").external == 144
    assert hub.metric("objects_in_total") == before


def test_a_prompt_that_was_computed_in_chunks_is_loaded_whole(engines) -> None:
    prefill, decode = engines("kv_producer", budget=40), engines("kv_consumer")
    answer(prefill, "p")
    eventually(lambda: is_offered(decode), "the publication is found")
    assert answer(decode, "d").external == 144
    beginning = [*TOKENS[:60], *TOKENS[:90]]
    other = engines("kv_consumer")
    eventually(lambda: is_offered(other), "the publication is found")
    assert answer(other, "e", beginning).external == 32, "the second chunk is of other tokens"


@pytest.mark.parametrize("computed", [0, 1, LAYERS - 1])
@pytest.mark.parametrize("load", ["layerwise", "async"])
def test_a_producer_that_stops_in_the_middle_costs_no_wrong_token(engines, load, computed) -> None:
    prefill, decode = engines("kv_producer"), engines("kv_consumer", load=load, stall=0.5)
    save = prefill.worker.save_kv_layer
    looked = threading.Event()

    def save_some(name, cache, meta):
        if prefill.names.index(name) < computed:
            save(name, cache, meta)
        elif prefill.names.index(name) == computed:
            assert looked.wait(30)

    prefill.worker.save_kv_layer = save_some
    prefill.add("p", TOKENS)
    computing = threading.Thread(target=prefill.run)
    computing.start()
    eventually(lambda: is_offered(decode), "the publication is found")
    looked.set()
    answer(decode, "d")
    computing.join()
    assert decode.counts["stalled"] == 1
    again = answer(decode, "again", [*TOKENS, 1])
    assert not again.external, "it is not offered again for a while"


def test_a_relay_that_is_gone_costs_no_wrong_token(engines, hub) -> None:
    prefill, decode = engines("kv_producer"), engines("kv_consumer", lookup_timeout=0.3, stall=0.5)
    answer(prefill, "p")
    eventually(lambda: is_offered(decode), "the publication is found")
    hub.process.kill()
    assert answer(decode, "d").external == 0
    assert answer(decode, "e", TOKENS[5:]).external == 0


def test_engines_of_another_scope_share_nothing(engines, tmp_path: Path) -> None:
    Scope.generate().save(tmp_path / "other.json")
    prefill = engines("kv_producer")
    same = engines("kv_consumer")
    other = engines("kv_consumer", scope_key_file=str(tmp_path / "other.json"))
    answer(prefill, "p")
    eventually(lambda: is_offered(same), "the publication is found")
    assert answer(other, "d").external == 0 and answer(same, "d").external == 144
