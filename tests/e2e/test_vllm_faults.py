"""Whatever fails at a relay or a producer, an engine answers as if it had computed everything
itself, in bounded time, and what is lost is counted."""

from __future__ import annotations

import json
import signal

import pytest

from tests.e2e.support import eventually, path_to
from tests.e2e.vllm_support import (
    BLOCK,
    SHARED,
    TOKENS,
    answer,
    computed_elsewhere,
    engines_at,
    is_offered,
)
from tests.kvcs.vllm.engine import own_token
from tests.kvcs.vllm.stories import LAYERS

LOADS = ("layerwise", "async")


@pytest.fixture
def engines(monkeypatch, tmp_path, hub):
    with engines_at(hub, monkeypatch, tmp_path) as make:
        yield make


@pytest.fixture
def produced(engines, hub, tmp_path):
    """Begins a producer that is a process of its own and has produced so many layers."""

    def begin(layers: int, *options: str):
        producer = hub.produce(computed_elsewhere(tmp_path), *options)
        producer.say(layers * SHARED // BLOCK)
        producer.wait_for("produced")
        return producer

    return begin


def when_it_uses_a_layer(engine, call) -> None:
    """`call` once, before the first layer that the engine's load has is used."""
    worker, wait, fill = (
        engine.worker,
        engine.worker.wait_for_layer_load,
        engine.worker.get_finished,
    )
    pending = [call]

    def first() -> None:
        while pending and engine.worker.shared.under_way:
            pending.pop()()

    def wait_one(name):
        first()
        return wait(name)

    def get_finished(ended):
        first()
        return fill(ended)

    worker.wait_for_layer_load, worker.get_finished = wait_one, get_finished


@pytest.mark.parametrize("layers", [0, LAYERS // 2, LAYERS - 1])
@pytest.mark.parametrize("load, number", [("layerwise", signal.SIGSTOP), ("async", signal.SIGKILL)])
def test_a_producer_that_is_frozen_or_killed_costs_no_wrong_token(
    engines, produced, load, layers, number
) -> None:
    producer = produced(layers)
    decode = engines("kv_consumer", load=load, stall=0.5)
    eventually(lambda: is_offered(decode), "the publication is found")
    when_it_uses_a_layer(decode, lambda: producer.signal(number))
    if not layers:
        producer.signal(number)
    answer(decode, "d")
    counts = decode.counts
    assert not counts["hit"] and counts["stalled"] + counts["miss"] == 1, counts
    again = answer(decode, "again", [*TOKENS, 1])
    assert not again.external, "it is not offered again for a while"
    producer.kill()


@pytest.mark.parametrize("layers", [1, LAYERS - 1])
@pytest.mark.parametrize("load", LOADS)
def test_a_relay_that_is_killed_in_the_middle_of_a_load_costs_no_wrong_token(
    engines, produced, hub, load, layers
) -> None:
    produced(layers)
    decode = engines("kv_consumer", load=load, lookup_timeout=0.5, stall=0.5)
    eventually(lambda: is_offered(decode), "the publication is found")
    when_it_uses_a_layer(decode, hub.process.kill)
    answer(decode, "d")
    assert decode.counts["stalled"] == 1 and not decode.counts["hit"]
    assert not answer(decode, "again", [*TOKENS, 1]).external


def test_a_relay_that_is_killed_while_it_is_asked_costs_no_wrong_token(engines, hub) -> None:
    answer(engines("kv_producer"), "p")
    hub.process.signal(signal.SIGSTOP)
    decode = engines("kv_consumer", lookup_timeout=0.5, stall=0.5)
    request = decode.add("d", TOKENS)
    decode.step()
    assert request.token is None and decode.scheduler.scheduler.remembered, "it is being looked up"
    hub.process.kill()
    decode.run(steps=20_000)
    assert request.token == own_token(TOKENS) and not request.external
    assert not answer(decode, "again", [*TOKENS, 1]).external


@pytest.mark.parametrize("fault", ["--corrupt", "--forge"])
@pytest.mark.parametrize("load", LOADS)
def test_an_object_that_is_not_what_it_should_be_is_in_no_page(
    engines, produced, load, fault
) -> None:
    produced(LAYERS, fault, "1:2").wait_for("produced None")
    decode = engines("kv_consumer", load=load, stall=1.0)
    eventually(lambda: is_offered(decode), "the publication is found")
    answer(decode, "d")
    assert not decode.counts["hit"]
    assert decode.counts["verification"] + decode.counts["stalled"] == 1, decode.counts


def test_other_weights_under_the_same_name_share_nothing(engines, tmp_path) -> None:
    members = json.loads((tmp_path / "compat.json").read_text())
    assert members["model"] == "toy"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(members | {"config_digest": "sha-256:" + 64 * "7"}))
    prefill, same = engines("kv_producer"), engines("kv_consumer")
    stranger = engines("kv_consumer", descriptor=str(other))
    answer(prefill, "p")
    eventually(lambda: is_offered(same), "the publication is found")
    assert not answer(stranger, "d").external
    assert stranger.counts["miss"] == 1
    assert answer(same, "d").external == SHARED


@pytest.mark.parametrize("load", LOADS)
def test_a_network_slower_than_a_load_may_take_costs_that_time_and_no_wrong_token(
    engines, hub, tmp_path, load
) -> None:
    """As 1 MB/s is to a cache of a model, so are 10 kB/s to the 28 kB of this one."""
    answer(engines("kv_producer"), "p")
    with path_to(hub, tmp_path, "--rate", "10kB/s"):
        decode = engines("kv_consumer", load=load, timeout=0.5, lookup_timeout=20.0)
        eventually(lambda: is_offered(decode), "the publication is found")
        answer(decode, "d")
        assert decode.counts["stalled"] == 1 and not decode.counts["hit"]
        decode.close()


@pytest.mark.parametrize("load", [*LOADS, "auto"])
def test_two_hundred_requests_at_once_are_all_right_at_a_real_relay(engines, load) -> None:
    prompts = [[number, *TOKENS[: 60 + number]] for number in range(5)]
    prefill = engines("kv_producer")
    decode = engines("kv_consumer", load=load, loads=4, pages=1500, budget=2_000)
    for number, tokens in enumerate(prompts):
        answer(prefill, f"p{number}", tokens)
    eventually(lambda: all(is_offered(decode, each) for each in prompts), "all are found")
    for number in range(200):
        decode.add(f"d{number}", prompts[number % 5])
    decode.run(steps=20_000)
    for request in decode.requests.values():
        assert request.token == own_token(request.prompt_token_ids)
    assert decode.counts["hit"] >= 5 or decode.counts["busy"]
    assert not decode.scheduler.scheduler.remembered and not decode.worker.worker.remembered
    assert not decode.worker.shared.under_way


@pytest.mark.parametrize("load, layers", [("layerwise", 0), ("async", 0), ("async", 1)])
def test_a_consumer_that_aborts_in_the_middle_keeps_nothing_and_can_ask_again(
    engines, produced, load, layers
) -> None:
    producer = produced(layers)
    decode = engines("kv_consumer", load=load, stall=60.0)
    eventually(lambda: is_offered(decode), "the publication is found")
    free = len(decode.free)
    gone = decode.add("gone", TOKENS)
    eventually(
        lambda: decode.step() or (gone.pages if layers else decode.worker.shared.under_way),
        "its load is under way",
    )
    decode.abort("gone")
    eventually(lambda: decode.step() or len(decode.free) == free, "its pages are free")
    assert not decode.worker.shared.under_way and not decode.counts
    assert not decode.scheduler.scheduler.remembered and not decode.worker.worker.remembered
    producer.say((LAYERS - layers) * SHARED // BLOCK)
    producer.wait_for("produced None")
    assert answer(decode, "d").external == SHARED
