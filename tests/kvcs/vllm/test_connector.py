"""Engines that share prompts through the connector answer as they would alone, whatever fails."""

from __future__ import annotations

import sys
import time
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

import kvcs.vllm
from kvcs.client.counters import Ended
from kvcs.vllm.describe import RefusedError, most_layerwise
from tests.kvcs.vllm import base
from tests.kvcs.vllm.engine import own_token
from tests.kvcs.vllm.stories import Stage, cache_of, prompt


@pytest.fixture
def stage(monkeypatch) -> Stage:
    return Stage(monkeypatch)


def answers(engine, tokens, name="r", **members):
    """An engine's answer to a prompt; its request."""
    request = engine.add(name, tokens, **members)
    engine.run()
    assert request.token == own_token(tokens)
    return request


# --- prompts of every length -------------------------------------------------------------


@pytest.mark.parametrize("load", ["layerwise", "async", "auto"])
@pytest.mark.parametrize("page", [16, 32, 128])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 256, 257])
def test_a_prompt_of_any_length_gets_its_own_token_from_what_another_engine_has_published(
    monkeypatch, load: str, page: int, block: int, length: int
) -> None:
    stage = Stage(monkeypatch, block)
    tokens = prompt(length)
    stage.published(tokens)
    decode = stage.engine(page=page, role="kv_consumer", extra={"load": load})
    request = answers(decode, tokens)
    usable = (length - 1) // block * block  # of the last block a token is left to compute
    assert request.external == usable // page * page
    assert decode.computed_tokens == length - request.external


@pytest.mark.parametrize("form", ["packed", "halves", "paired"])
def test_pages_of_every_known_form_are_filled_and_read(stage: Stage, form: str) -> None:
    tokens = prompt(100)
    prefill = stage.engine(form=form, role="kv_producer")
    answers(prefill, tokens)
    decode = stage.engine(form=form, role="kv_consumer")
    assert answers(decode, tokens).external == 96


def test_of_a_longer_prompt_the_published_beginning_is_loaded(stage: Stage) -> None:
    stage.published(prompt(64))
    decode = stage.engine(role="kv_consumer")
    assert answers(decode, prompt(200)).external == 64


def test_a_prompt_without_a_whole_block_publishes_nothing_and_looks_nothing_up(stage) -> None:
    engine = stage.engine()
    answers(engine, prompt(15))
    assert not stage.world.publications and not engine.client.asked


# --- what is there already ---------------------------------------------------------------


def test_only_blocks_beyond_the_local_ones_are_asked_for(stage: Stage) -> None:
    stage.published(prompt(128))
    decode = stage.engine(role="kv_consumer", extra={"min_tokens": 16})
    answers(decode, prompt(40), "first")
    request = answers(decode, prompt(140), "second")
    assert request.external == 96 and decode.client.loads[-1][0].blocks == range(2, 8)


def test_a_local_hit_longer_than_what_is_published_loads_nothing(stage: Stage) -> None:
    stage.published(prompt(32))
    decode = stage.engine(role="kv_consumer")
    answers(decode, prompt(100), "first")
    loads = len(decode.client.loads)
    request = answers(decode, prompt(120), "second")
    assert request.external == 0 and len(decode.client.loads) == loads


def test_two_requests_of_one_prefix_publish_it_once_and_both_are_right(stage: Stage) -> None:
    engine = stage.engine()
    first, second = engine.add("a", prompt(100)), engine.add("b", prompt(100))
    engine.run()
    assert first.token == second.token == own_token(prompt(100))
    assert len(stage.world.publications) == 1 and stage.world.publications[0].complete


def test_what_was_loaded_whole_is_not_published_again(stage: Stage) -> None:
    stage.published(prompt(100))
    engine = stage.engine()
    answers(engine, prompt(100))
    assert len(stage.world.publications) == 1


def test_a_prompt_that_goes_on_beyond_what_was_loaded_is_published_whole(stage: Stage) -> None:
    stage.published(prompt(64))
    both = stage.engine()
    assert answers(both, prompt(200)).external == 64
    third = stage.engine(role="kv_consumer")
    assert answers(third, prompt(200)).external == 192


# --- chunks and preemption ---------------------------------------------------------------


@pytest.mark.parametrize("budget", [7, 16, 50, 64])
def test_a_prefill_in_chunks_publishes_every_block_once_in_the_order_of_its_layers(
    stage: Stage, budget: int
) -> None:
    prefill = stage.engine(role="kv_producer", budget=budget)
    answers(prefill, prompt(150))
    (held,) = stage.world.publications
    assert held.complete and len(held.tokens) == 144
    chunks = [(first, count) for first, layer, count in held.puts if layer == 0]
    assert [b for first, count in chunks for b in range(first, first + count)] == list(range(9))
    assert len(held.puts) == 3 * len(chunks)
    decode = stage.engine(role="kv_consumer")
    assert answers(decode, prompt(150)).external == 144


def test_a_load_goes_together_with_chunks_of_the_rest(stage: Stage) -> None:
    stage.published(prompt(64))
    decode = stage.engine(budget=20, extra={"load": "layerwise"})
    assert answers(decode, prompt(150)).external == 64
    assert stage.world.publications[-1].complete


def test_a_preempted_request_is_computed_and_its_publication_goes_on(stage: Stage) -> None:
    engine = stage.engine(budget=40)
    request = engine.add("r", prompt(150))
    engine.step()
    engine.step()
    engine.preempt("r")
    engine.run()
    assert request.token == own_token(prompt(150))
    (held,) = stage.world.publications
    assert held.complete and not held.aborted
    decode = stage.engine(role="kv_consumer")
    assert answers(decode, prompt(150)).external == 144


def test_after_a_preemption_nothing_is_loaded_again(stage: Stage) -> None:
    stage.published(prompt(100))
    decode = stage.engine(role="kv_consumer", budget=4, prefix_caching=False)
    request = decode.add("r", prompt(130))
    while request.state != "running":
        decode.step()
    assert request.external == 96
    decode.preempt("r")
    decode.run()
    assert request.external == 0 and request.token == own_token(prompt(130))
    assert len(decode.client.loads) == 1


# --- aborts ------------------------------------------------------------------------------


def test_a_producer_whose_request_is_aborted_withdraws_the_publication(stage: Stage) -> None:
    engine = stage.engine(role="kv_producer", budget=40)
    engine.add("r", prompt(150))
    engine.step()
    engine.abort("r")
    engine.run()
    assert stage.world.publications[0].aborted


@pytest.mark.parametrize("load", ["layerwise", "async"])
def test_a_consumer_that_is_aborted_while_it_waits_lets_go_of_its_load(stage, load) -> None:
    stage.published(prompt(100))
    decode = stage.engine(role="kv_consumer", extra={"load": load, "stall": 60})
    decode.client.layers = 0
    decode.add("waiting", prompt(100))
    decode.step()
    decode.abort("waiting")
    decode.run()
    assert decode.client.loads[0][0].outcome is Ended.CANCELLED


def test_an_aborted_load_beside_the_batch_gives_its_pages_back(stage: Stage) -> None:
    stage.published(prompt(100))
    decode = stage.engine(role="kv_consumer", extra={"load": "async"})
    free = len(decode.free)
    decode.client.layers, decode.client.ends = 2, False
    request = decode.add("r", prompt(100))
    decode.step()
    assert request.state == "remote" and len(decode.free) < free
    decode.abort("r")
    decode.run()
    assert len(decode.free) == free
    assert decode.client.loads[0][0].outcome is Ended.CANCELLED


# --- while it is produced ----------------------------------------------------------------


def test_a_match_is_reported_once_its_first_layer_is_verified(stage: Stage) -> None:
    stage.published(prompt(100))
    decode = stage.engine(role="kv_consumer", extra={"stall": 60})
    decode.client.layers = 0
    request = decode.add("r", prompt(100))
    decode.step()
    decode.step()
    assert request.state == "waiting" and request.asked == 2
    decode.client.layers = 3
    decode.client.deliver(1)
    decode.client.deliver(3)
    decode.run()
    assert request.token == own_token(prompt(100)) and request.external == 96


def test_others_are_computed_while_a_load_waits_beside_the_batch(stage: Stage) -> None:
    stage.published(prompt(100))
    decode = stage.engine(role="kv_consumer", extra={"load": "async"})
    decode.client.layers, decode.client.ends = 1, False
    slow = decode.add("slow", prompt(100))
    decode.step()
    other = decode.add("other", prompt(50, seed=5))
    decode.step()
    assert slow.state == "remote" and other.token == own_token(prompt(50, seed=5))
    decode.client.ends = True
    decode.client.deliver(3)
    decode.run()
    assert slow.token == own_token(prompt(100))


def test_a_batch_is_not_held_up_by_a_publication_in_production(stage: Stage) -> None:
    stage.published(prompt(100))
    decode = stage.engine(role="kv_consumer", budget=10)
    decode.client.layers, decode.client.producing = 1, True
    decode.add("running", prompt(60, seed=5))
    decode.step()
    decode.budget = 1000
    slow = decode.add("slow", prompt(100))
    decode.step()
    assert slow.state == "remote"
    decode.client.deliver(3)
    decode.run()
    assert slow.token == own_token(prompt(100))


def test_with_nothing_else_to_compute_layers_are_waited_for_in_the_forward_pass(stage) -> None:
    stage.published(prompt(100))
    decode = stage.engine(role="kv_consumer")
    decode.client.producing = True
    request = answers(decode, prompt(100))
    assert request.external == 96
    assert decode.calls[:2] == ["bind", "start"], "a synchronous load starts before the pass"


# --- failures ----------------------------------------------------------------------------


@pytest.mark.parametrize("load", ["layerwise", "async"])
@pytest.mark.parametrize("layers", [0, 1, 2, 3])
@pytest.mark.parametrize("why", [Ended.STALLED, Ended.LOST, Ended.TIMEOUT, Ended.VERIFICATION])
def test_whenever_a_load_fails_its_tokens_are_computed(stage, load, layers, why) -> None:
    stage.published(prompt(100))
    decode = stage.engine(role="kv_consumer", extra={"load": load, "stall": 0.01, "timeout": 0.01})
    decode.client.layers, decode.client.ends = layers, False
    request = decode.add("r", prompt(100))
    decode.step()
    decode.client.fail(why)
    decode.run()
    assert request.token == own_token(prompt(100))
    counts = decode.counts
    wanted = "verification" if why is Ended.VERIFICATION else "stalled"
    if load == "async" or not layers:
        assert counts[wanted] == 1 and "hit" not in counts


@pytest.mark.parametrize("load", ["layerwise", "async"])
def test_what_the_manifest_denies_at_the_end_is_computed_though_every_layer_came(stage, load):
    stage.published(prompt(100))
    decode = stage.engine(role="kv_consumer", extra={"load": load})
    decode.client.corrupt, decode.client.ends = 1, False
    request = decode.add("r", prompt(100))
    layers_are_over = decode.worker.wait_for_save

    def wait_for_save() -> None:
        decode.client.fail(Ended.VERIFICATION)
        layers_are_over()

    decode.worker.wait_for_save = wait_for_save
    decode.run()
    assert request.token == own_token(prompt(100)) and decode.computed_tokens >= 100
    assert decode.counts["verification"] == 1


def test_all_pages_of_a_failed_load_are_reported(stage: Stage) -> None:
    stage.published(prompt(100))
    decode = stage.engine(role="kv_consumer", extra={"load": "layerwise", "timeout": 0.01})
    decode.client.layers, decode.client.ends = 2, False
    request = decode.add("r", prompt(110))
    reported = []
    failed_pages = decode.worker.get_block_ids_with_load_errors
    decode.worker.get_block_ids_with_load_errors = lambda: (
        reported.append(failed_pages()) or reported[-1]
    )
    decode.step()
    assert reported == [set(request.pages[:6])]
    decode.run()
    assert request.token == own_token(prompt(110)) and request.external == 96


def test_what_was_computed_from_pages_that_were_not_filled_is_never_published(stage) -> None:
    stage.published(prompt(64))
    both = stage.engine(extra={"load": "layerwise", "timeout": 0.01})
    both.client.layers, both.client.ends = 2, False
    request = both.add("r", prompt(150))
    both.run()
    assert request.token == own_token(prompt(150))
    for held in stage.world.publications[1:]:
        assert held.aborted, "it has K and V that were computed from garbage"


def test_pages_that_were_not_filled_serve_nobody_when_their_request_is_aborted(stage) -> None:
    stage.published(prompt(100))
    decode = stage.engine(role="kv_consumer", extra={"load": "layerwise", "timeout": 0.01})
    decode.client.layers, decode.client.ends = 1, False
    decode.add("aborted", prompt(100))
    decode.step()
    assert decode.counts["stalled"] == 1
    decode.abort("aborted")
    decode.client.world.publications.clear()
    assert answers(decode, prompt(120), "next").external == 0
    assert decode.computed_tokens >= 120


def test_a_prompt_longer_than_half_a_pass_is_loaded_beside_the_batch(stage: Stage) -> None:
    stage.published(prompt(100))
    decode = stage.engine(role="kv_consumer", extra={"load": "layerwise"}, budget=180)
    decode.client.ends = False
    request = decode.add("r", prompt(100))
    decode.step()
    assert request.state == "remote"
    decode.client.ends = True
    decode.client.deliver(3)
    decode.run()
    assert request.token == own_token(prompt(100))


def test_pages_stay_tainted_until_the_scheduler_knows_of_the_failure(stage: Stage) -> None:
    """With asynchronous scheduling the next step is planned before the failure is told."""
    stage.published(prompt(64))
    both = stage.engine(extra={"load": "layerwise", "timeout": 0.01}, budget=400)
    both.client.layers, both.client.ends = 2, False
    both.add("r", prompt(150))
    heard = both.scheduler.update_connector_output
    both.scheduler.update_connector_output = lambda output: None
    both.step()
    bad = both.requests["r"].pages[:4]
    sharing = both.add("s", prompt(90))
    both.held = {tuple(prompt(150)[: (n + 1) * 16]): page for n, page in enumerate(bad)}
    before = both.computed_tokens
    both.step()
    both.scheduler.update_connector_output = heard
    assert sharing.state == "done" and both.computed_tokens - before >= 90 - 64, "it shared them"
    assert [held.aborted for held in stage.world.publications[1:]] == [True]


# --- what is not looked up ---------------------------------------------------------------


@pytest.mark.parametrize(
    "member, value",
    [("lora_request", object()), ("mm_features", [object()]), ("cache_salt", "tenant")],
)
def test_what_no_name_covers_is_neither_looked_up_nor_published(stage, member, value) -> None:
    stage.published(prompt(100))
    engine = stage.engine()
    answers(engine, prompt(100), **{member: value})
    assert not engine.client.asked and len(stage.world.publications) == 1
    assert engine.counts == {"refused": 1}


def test_a_producer_looks_nothing_up_and_a_consumer_publishes_nothing(stage: Stage) -> None:
    prefill = stage.published(prompt(100))
    assert not prefill.client.asked
    decode = stage.engine(role="kv_consumer")
    answers(decode, prompt(100, seed=9))
    assert decode.client.asked == 1 and len(stage.world.publications) == 1


@pytest.mark.parametrize(
    "length, extra, outcome",
    [
        (100, {}, "hit"),
        (20, {}, "hit"),
        (100, {"min_tokens": 97}, "too_short"),
        (16, {}, "too_short"),
    ],
)
def test_of_every_prompt_is_counted_why_it_was_loaded_or_not(stage, length, extra, outcome):
    stage.published(prompt(length))
    decode = stage.engine(role="kv_consumer", extra=extra)
    answers(decode, prompt(length))
    counts = dict(decode.counts)
    assert counts.pop("tokens", 0) == (length - 1) // 16 * 16 * (outcome == "hit")
    counts.pop("octets", None)
    assert counts == {outcome: 1}


def test_a_prompt_that_nobody_has_is_a_miss_and_asked_for_once(stage: Stage) -> None:
    decode = stage.engine(role="kv_consumer", budget=30)
    answers(decode, prompt(100))
    assert decode.counts == {"miss": 1} and decode.client.asked == 1


def test_what_computing_gives_sooner_is_computed(stage: Stage, caplog) -> None:
    stage.published(prompt(100))
    decode = stage.engine(role="kv_consumer")
    gate = decode.scheduler.shared.gate
    gate.computed(1000, 1e-6)
    gate.loaded(1, 1.0, time.monotonic())
    caplog.set_level("INFO", logger="vllm.kvcs")
    answers(decode, prompt(100))
    assert decode.counts == {"slower": 1} and not decode.client.loads
    assert "request r: slower: 96 tokens would take" in caplog.text


def test_what_computing_gives_sooner_is_loaded_too_where_that_is_wanted(stage: Stage) -> None:
    stage.published(prompt(100))
    decode = stage.engine(role="kv_consumer", extra={"only_faster": False})
    gate = decode.scheduler.shared.gate
    gate.computed(1000, 1e-6)
    gate.loaded(1, 1.0, time.monotonic())
    answers(decode, prompt(100))
    assert decode.counts["hit"] == 1


def test_more_loads_than_allowed_are_computed_instead(stage: Stage) -> None:
    stage.published(prompt(100))
    decode = stage.engine(role="kv_consumer", extra={"loads": 1, "load": "async"}, pages=128)
    decode.client.layers, decode.client.ends = 1, False
    for name in ("a", "b"):
        decode.add(name, prompt(100))
    decode.step()
    assert decode.counts == {"busy": 1}
    decode.client.ends = True
    decode.client.deliver(3)
    decode.run()
    assert {each.token for each in decode.requests.values()} == {own_token(prompt(100))}


@pytest.mark.parametrize("load", ["layerwise", "async", "auto"])
def test_two_hundred_requests_at_once_are_all_right_and_nothing_is_left(stage, load) -> None:
    for seed in range(5):
        stage.world.put(prompt(64, seed), cache_of(prompt(64, seed)))
    engine = stage.engine(extra={"load": load, "loads": 3}, pages=1500, budget=500)
    for number in range(200):
        engine.add(f"r{number}", prompt(65 + number % 7, seed=number % 10))
    engine.run()
    for request in engine.requests.values():
        assert request.token == own_token(request.prompt_token_ids)
    assert engine.counts["hit"] >= 3
    assert not engine.scheduler.scheduler.remembered and not engine.worker.worker.remembered
    assert not engine.worker.shared.under_way


def test_a_look_up_that_is_not_answered_ends_with_its_time(stage: Stage) -> None:
    stage.published(prompt(100))
    decode = stage.engine(role="kv_consumer", extra={"lookup_timeout": 0.001, "stall": 0.001})
    decode.client.pending = True
    answers(decode, prompt(100))
    assert decode.counts == {"stalled": 1}


def test_without_enough_pages_the_answer_stays_the_same_and_nothing_is_loaded_twice(stage) -> None:
    stage.published(prompt(100))
    decode = stage.engine(role="kv_consumer", pages=9, budget=120, prefix_caching=False)
    decode.add("first", prompt(100, seed=3))
    second = decode.add("second", prompt(100))
    decode.step()
    decode.run()
    assert second.token == own_token(prompt(100)) and second.external == 96
    assert second.asked > 1 and len(decode.client.loads) == 1


def test_what_is_counted_becomes_metrics_of_the_server_and_a_line_of_its_log(stage) -> None:
    registry = CollectorRegistry()
    kinds = {each: partial(each, registry=registry) for each in (Counter, Gauge)}
    labels, values = ["model"], {0: ["toy"], 1: ["other"]}
    metrics = stage.connector.build_prom_metrics(base.vllm_config(), kinds, labels, values)
    stats = stage.connector.build_kv_connector_stats({"hit": 2, "tokens": 96})
    stats = stats.aggregate(stage.connector.build_kv_connector_stats({"hit": 1, "octets": 5}))
    assert stats.reduce() == {"kvcs hit": 3, "kvcs tokens": 96, "kvcs octets": 5}
    metrics.observe(stats.data, 0)
    metrics.observe({"stalled": 1}, 1)
    of = registry.get_sample_value
    assert of("vllm:kvcs_requests_total", {"model": "toy", "outcome": "hit"}) == 3
    assert of("vllm:kvcs_requests_total", {"model": "other", "outcome": "stalled"}) == 1
    assert of("vllm:kvcs_tokens_total", {"model": "toy"}) == 96
    assert of("vllm:kvcs_octets_total", {"model": "toy"}) == 5
    stats.reset()
    assert stats.is_empty()


# --- the end -----------------------------------------------------------------------------


def test_the_last_side_that_is_shut_down_closes_the_client(stage: Stage) -> None:
    engine = stage.engine()
    engine.worker.shutdown()
    assert not engine.client.closed
    engine.scheduler.shutdown()
    engine.scheduler.shutdown()
    assert engine.client.closed


def test_nothing_is_kept_of_requests_that_have_ended(stage: Stage) -> None:
    engine = stage.engine(budget=40)
    for number in range(5):
        answers(engine, prompt(100, seed=number), f"r{number}")
    assert not engine.scheduler.scheduler.remembered and not engine.worker.worker.remembered
    assert not engine.worker.shared.under_way


def test_without_vllm_the_connector_is_refused_in_words(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "kvcs.vllm.connector", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"install vLLM, or `pip install 'kvcs\[vllm\]'`"):
        _ = kvcs.vllm.KvcsConnector
    with pytest.raises(AttributeError, match="no attribute 'Connector'"):
        _ = kvcs.vllm.Connector


def test_layer_by_layer_is_refused_where_a_later_pass_may_be_planned_before_a_failure(stage):
    config = base.vllm_config(
        extra={"relay": "moqt://a", "scope_key_file": "b", "load": "layerwise"},
        scheduler_config__async_scheduling=True,
    )
    with pytest.raises(RefusedError, match="--no-async-scheduling"):
        stage.connector(config, base.KVConnectorRole.SCHEDULER, None)
    assert most_layerwise(config) == 0
