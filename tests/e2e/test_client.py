"""`kvcs.Client` in an engine's place: synchronous code, real relays and producers beside it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvcs import CacheLost, Client, MisuseError, Scope
from kvcs.client.counters import Dropped, Ended, Looked
from tests.e2e.kvsp_support import Server, start
from tests.e2e.support import BIN, Process, eventually, make_cache, path_to, relay

WITHIN = 30.0
"""Seconds that a test waits for what the Client itself ends sooner."""


@contextlib.contextmanager
def client(hub, cache, **settings):
    settings.setdefault("lookup_timeout", 5.0)
    settings.setdefault("stall", 5.0)
    settings.setdefault("timeout", 60.0)
    urls = settings.pop("relays", hub.url)
    with Client(
        urls,
        cafile=hub.cafile,
        scope_keys=settings.pop("scope_keys", cache.scope),
        descriptor=settings.pop("descriptor", cache.compat),
        **settings,
    ) as made:
        yield made


def arrays(cache, layer):
    return cache.tensors[f"layers.{layer}.k"], cache.tensors[f"layers.{layer}.v"]


def publish(made, cache, layers=None):
    save = made.publish(cache.tokens)
    for layer in range(cache.descriptor["layers"] if layers is None else layers):
        assert save.put_layer(layer, *arrays(cache, layer))
    return save


def longer(cache):
    """The prompt of which the cache's tokens are the beginning: one token is left to compute."""
    return [*cache.tokens, 7]


def found_by(made, tokens, *, blocks=1):
    """What is found, as soon as it is announced: in an index block by block, so `blocks` of it."""
    found = []

    def look() -> bool:
        found[:] = [made.directory.longest(tokens)]
        return found[0] is not None and found[0].blocks >= blocks

    eventually(look, "a publication is found")
    return found[0]


def check(load, cache, blocks=None):
    rows = cache.descriptor["block_tokens"]
    blocks = blocks or range(cache.blocks)
    at = slice(blocks.start * rows, blocks.stop * rows)
    for layer in range(cache.descriptor["layers"]):
        assert load.wait_layer(layer, WITHIN), load.error
        for came, sent in zip(load.layer(layer), arrays(cache, layer), strict=True):
            assert came.tobytes() == sent[at].tobytes()
    assert load.wait(WITHIN), load.error


# --- live, and from the relay's cache ------------------------------------------------


def test_each_layer_can_be_used_while_the_next_is_still_computed(hub, cache):
    with client(hub, cache) as producer, client(hub, cache) as consumer:
        save = publish(producer, cache, 1)
        load = consumer.load(found_by(consumer, longer(cache)))
        for layer in range(1, cache.descriptor["layers"]):
            assert load.wait_layer(layer - 1, WITHIN)
            assert not load.over and load.layers == layer
            assert save.put_layer(layer, *arrays(cache, layer))
        check(load, cache)
        assert load.outcome is Ended.LOADED and not load.lost
        assert producer.counters.of("offered") == {hub.url: 1}
        assert consumer.counters.of("loads") == {Ended.LOADED: 1}


def test_what_a_relay_has_is_loaded_when_its_producer_is_gone(hub, cache):
    with client(hub, cache) as consumer:
        with client(hub, cache) as producer:
            publish(producer, cache)
            first = consumer.load(found_by(consumer, longer(cache)))
            check(first, cache)
            found = found_by(consumer, longer(cache))
        check(consumer.load(found), cache)


def test_blocks_that_are_there_already_are_not_fetched(hub, cache):
    with client(hub, cache) as producer, client(hub, cache) as consumer:
        publish(producer, cache)
        found = found_by(consumer, longer(cache))
        before = hub.metric("objects_out_total")
        load = consumer.load(found, range(5, 7))
        check(load, cache, range(5, 7))
        data = 2 * cache.descriptor["layers"] * 2
        assert data <= hub.metric("objects_out_total") - before <= data + 8


def test_a_callback_is_given_every_block_of_every_layer_in_order(hub, cache):
    rows, came = cache.descriptor["block_tokens"], []

    def on_block(layer, block, k, v):
        at = slice(block * rows, (block + 1) * rows)
        for part, tensor in zip((k, v), arrays(cache, layer), strict=True):
            assert part.tobytes() == tensor[at].tobytes()
        came.append((layer, block))

    with client(hub, cache) as producer, client(hub, cache) as consumer:
        publish(producer, cache)
        load = consumer.load(found_by(consumer, longer(cache)), range(1, 8), on_block=on_block)
        assert load.wait(WITHIN), load.error
    layers = range(cache.descriptor["layers"])
    assert came == [(layer, block) for layer in layers for block in range(1, 8)]


def test_a_prefill_in_chunks_is_published_and_loaded_as_it_grows(hub, cache):
    rows, blocks = cache.descriptor["block_tokens"], cache.blocks
    with client(hub, cache) as producer, client(hub, cache) as consumer:
        save = producer.publish(cache.tokens, first_chunk=3 * rows)
        load = None
        for first, stop in ((0, 3), (3, 5), (5, blocks)):
            for layer in range(cache.descriptor["layers"]):
                k, v = (tensor[first * rows : stop * rows] for tensor in arrays(cache, layer))
                assert save.put_chunk(first, layer, k, v)
            if load is None:
                found = found_by(consumer, longer(cache))
                assert (found.blocks, found.most) == (3, blocks)
                load = consumer.load(found, range(2, blocks))
        check(load, cache, range(2, blocks))
        eventually(lambda: save.complete, "the publication ends")


# --- never all tokens, never others' -------------------------------------------------


@pytest.mark.parametrize("more", [0, 1, 3, 4, 5])
def test_one_token_at_least_is_always_left_to_compute(more, hub, cache):
    with client(hub, cache) as producer, client(hub, cache) as consumer:
        publish(producer, cache)
        found = found_by(consumer, [*cache.tokens, *range(more)])
        assert found.tokens < len(cache.tokens) + more
        assert found.blocks == (cache.blocks if more else cache.blocks - 1)
        check(consumer.load(found), cache, range(found.blocks))


@pytest.mark.parametrize("length", [0, 1, 3, 4])
def test_a_prompt_without_a_block_to_spare_is_never_looked_up(length, hub, cache):
    with client(hub, cache) as consumer:
        assert consumer.directory.longest(cache.tokens[:length]) is None
        assert consumer.counters.of("lookups") == {Looked.SHORT: 1}


def test_another_scope_and_other_weights_find_nothing_and_the_same_find_it(hub, cache, tmp_path):
    other_weights = cache.variant("weights", model_digest="sha-256:" + "33" * 32)
    with client(hub, cache) as producer:
        publish(producer, cache)
        with (
            client(hub, cache, scope_keys=Scope.generate()) as stranger,
            client(hub, other_weights) as other,
            client(hub, cache) as consumer,
        ):
            found_by(consumer, longer(cache))
            for each in (stranger, other):
                assert each.directory.longest(longer(cache)) is None
                assert each.counters.of("lookups") == {Looked.MISS: 1}


def test_what_this_client_is_computing_itself_is_not_offered_to_it(hub, cache):
    with client(hub, cache) as both, client(hub, cache) as other:
        save = publish(both, cache, 2)
        found_by(other, longer(cache))
        assert both.directory.longest(longer(cache)) is None
        for layer in range(2, cache.descriptor["layers"]):
            save.put_layer(layer, *arrays(cache, layer))
        check(both.load(found_by(both, longer(cache))), cache)


# --- what fails ----------------------------------------------------------------------


def half_loaded(hub, cache, consumer, blocks):
    """A producer that has produced so many blocks, and the load of what it has."""
    producer = hub.produce(cache)
    producer.say(blocks)
    load = consumer.load(found_by(consumer, longer(cache)))
    layers = blocks // cache.blocks
    if layers:
        assert load.wait_layer(layers - 1, WITHIN)
    return producer, load


def lost_soon(load, outcome):
    """It ends by itself; nothing of it may be used, and a wait says so at once."""
    assert not load.wait(WITHIN)
    assert load.outcome in outcome, (load.outcome, load.error)
    assert load.lost == load.blocks
    assert not load.wait_layer(0, WITHIN)
    assert isinstance(load.failure(), CacheLost)
    assert load.failure().lost == load.blocks


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("blocks", [0, 4 * 8, 7 * 8])
def test_a_producer_that_is_stuck_or_killed_costs_one_stall_and_once(number, blocks, hub, cache):
    with client(hub, cache, stall=1.0) as consumer:
        producer, load = half_loaded(hub, cache, consumer, blocks)
        producer.signal(number)
        lost_soon(load, (Ended.STALLED, Ended.LOST))
        assert consumer.directory.longest(longer(cache)) is None
    producer.kill()


@pytest.mark.parametrize("layers", [0, 4, 7])
def test_a_producer_that_aborts_is_noticed(layers, hub, cache):
    with client(hub, cache) as producer, client(hub, cache, stall=2.0) as consumer:
        save = publish(producer, cache, layers)
        load = consumer.load(found_by(consumer, longer(cache)))
        if layers:
            assert load.wait_layer(layers - 1, WITHIN)
        save.abort()
        lost_soon(load, (Ended.STALLED, Ended.LOST, Ended.VERIFICATION))
        assert not save.put_layer(layers, *arrays(cache, layers))
        eventually(lambda: producer.counters.of("dropped") == {Dropped.ABORTED: 1}, "it counts")


def test_a_relay_that_is_killed_in_mid_load_ends_it_and_is_not_asked_again(hub, cache):
    with client(hub, cache, stall=1.0, lookup_timeout=1.0) as consumer:
        _, load = half_loaded(hub, cache, consumer, 3 * cache.blocks)
        hub.process.kill()
        lost_soon(load, (Ended.STALLED, Ended.LOST))
        assert consumer.directory.longest(longer(cache)) is None


def test_a_frozen_relay_costs_one_stall_and_then_nothing(hub, cache, tmp_path):
    other = make_cache(tmp_path / "other", seed=2, scope=cache.scope)
    with (
        client(hub, cache, stall=1.0, lookup_timeout=1.0) as consumer,
        client(hub, cache) as producer,
    ):
        publish(producer, cache)
        publish(producer, other)
        found = found_by(consumer, longer(cache))
        found_by(consumer, longer(other))
        hub.process.signal(signal.SIGSTOP)
        lost_soon(consumer.load(found), (Ended.STALLED,))
        eventually(lambda: consumer.counters.of("silent") == {hub.url: 1}, "it counts")
        assert consumer.directory.ask(longer(other)).done
        assert consumer.directory.longest(longer(other)) is None
        hub.process.signal(signal.SIGCONT)


def test_one_frozen_producer_does_not_hide_what_others_publish(hub, cache, tmp_path):
    other = make_cache(tmp_path / "other", seed=2, scope=cache.scope)
    frozen = hub.produce(cache, name="frozen")
    frozen.signal(signal.SIGSTOP)
    with client(hub, cache, stall=1.0) as consumer, client(hub, cache) as producer:
        publish(producer, other)
        lost_soon(consumer.load(found_by(consumer, longer(cache))), (Ended.STALLED, Ended.LOST))
        check(consumer.load(found_by(consumer, longer(other))), other)
    frozen.kill()


def test_a_relay_that_is_not_there_is_waited_for_once(cache, hub):
    nobody = "moqt://127.0.0.1:9"
    with client(hub, cache, relays=nobody, lookup_timeout=0.5) as consumer:
        assert consumer.directory.longest(longer(cache)) is None
        assert consumer.counters.of("silent") == {nobody: 1}
        assert consumer.directory.ask(longer(cache)).done
        save = publish(consumer, cache)
        eventually(lambda: save.complete, "what nobody takes is kept all the same")


def test_the_second_relay_has_what_the_first_one_lost(cache, tmp_path):
    with relay(tmp_path / "one") as one, relay(tmp_path / "two") as two:
        ca = tmp_path / "both.pem"
        ca.write_text(one.cafile.read_text() + two.cafile.read_text())
        both = {
            "cafile": ca,
            "scope_keys": cache.scope,
            "descriptor": cache.compat,
            "lookup_timeout": 5.0,
            "stall": 2.0,
        }
        urls = [one.url, two.url]
        with Client(urls, **both) as producer, Client(urls, **both) as consumer:
            publish(producer, cache)

            def at(url):
                found = consumer.directory.longest(longer(cache))
                return found is not None and found.relay == url

            eventually(lambda: at(one.url), "it is found at the first")
            two.reaches(namespaces=1)
            found = consumer.directory.longest(longer(cache))
            one.process.kill()
            lost_soon(consumer.load(found), (Ended.STALLED, Ended.LOST))
            eventually(lambda: at(two.url), "it is found at the second", deadline=5)
            check(consumer.load(found_by(consumer, longer(cache))), cache)


def test_a_relay_that_comes_back_is_told_again_what_is_published(cache, tmp_path):
    with relay(tmp_path) as hub, client(hub, cache, lookup_timeout=1.0) as producer:
        publish(producer, cache)
        hub.reaches(namespaces=1)
        hub.process.signal(signal.SIGTERM)
        hub.process.finish(0)
        address = hub.url.removeprefix("moqt://")
        with relay(tmp_path, "--listen", address) as again, client(again, cache) as consumer:
            check(consumer.load(found_by(consumer, longer(cache))), cache)


@pytest.mark.parametrize("fault", ["--corrupt", "--forge"])
def test_what_is_wrong_is_never_handed_over(fault, hub, cache):
    producer = hub.produce(cache, fault, "3:2")
    producer.say(cache.objects)
    producer.wait_for("produced None")
    came = []

    def on_block(layer, block, k, v):
        at = slice(block * 4, (block + 1) * 4)
        came.append(k.tobytes() == arrays(cache, layer)[0][at].tobytes())

    with client(hub, cache, stall=3.0) as consumer:
        load = consumer.load(found_by(consumer, longer(cache)), on_block=on_block)
        lost_soon(load, (Ended.VERIFICATION, Ended.LOST, Ended.STALLED))
        assert all(came)
        assert consumer.directory.longest(longer(cache)) is None


def test_a_load_that_is_cancelled_writes_nothing_more(hub, cache):
    writes, written = threading.Event(), []

    def on_block(layer, block, k, v):
        writes.set()
        written.append((layer, block))

    with client(hub, cache) as producer, client(hub, cache) as consumer:
        save = publish(producer, cache, 4)
        load = consumer.load(found_by(consumer, longer(cache)), on_block=on_block)
        assert writes.wait(WITHIN)
        load.cancel()
        until = len(written)
        for layer in range(4, cache.descriptor["layers"]):
            save.put_layer(layer, *arrays(cache, layer))
        eventually(lambda: consumer.counters.of("loads") == {Ended.CANCELLED: 1}, "it counts")
        assert len(written) == until
        assert not load.wait_layer(7, WITHIN)
        # that it was cancelled is no fault of the publication
        check(consumer.load(found_by(consumer, longer(cache))), cache)


def test_a_callback_that_raises_fails_its_load_alone(hub, cache):
    def on_block(layer, block, k, v):
        raise RuntimeError("no page")

    with client(hub, cache) as producer, client(hub, cache) as consumer:
        publish(producer, cache)
        found = found_by(consumer, longer(cache))
        lost_soon(consumer.load(found, on_block=on_block), (Ended.FAILED,))
        check(consumer.load(found), cache)


def test_two_hundred_requests_at_once_are_served(hub, cache):
    with client(hub, cache) as producer, client(hub, cache) as consumer:
        publish(producer, cache)
        found = found_by(consumer, longer(cache))
        with ThreadPoolExecutor(16) as threads:
            loads = list(threads.map(lambda _: consumer.load(found), range(200)))
        for load in loads:
            assert load.wait(WITHIN), load.error
            k, _ = load.layer(7)
            assert k.tobytes() == arrays(cache, 7)[0].tobytes()


def test_a_relay_that_wants_tokens_is_shown_the_one_that_is_in_the_file_now(cache, tmp_path):
    names, principals = ("one", "two"), tmp_path / "principals.json"
    paths = [tmp_path / name for name in names]
    for name, path in zip(names, paths, strict=True):
        options = ("--principals", principals, "--scope-key-file", cache.scope)
        Process(tmp_path, name, BIN / "kvcs-keygen", "token", path, *options).finish(0)
    with (
        relay(tmp_path, "--auth", principals) as hub,
        client(hub, cache, token=paths[0]) as producer,
        client(hub, cache) as stranger,
    ):
        publish(producer, cache)
        hub.reaches(namespaces=1)
        assert stranger.directory.longest(longer(cache)) is None
        assert stranger.directory.ask(longer(cache)).done
        # another principal's token in its place, and only that one is let in from now on
        paths[1].rename(paths[0])
        only = json.loads(principals.read_text())
        del only["principals"][0]
        principals.write_text(json.dumps(only))
        hub.reaches(namespaces=0)
        hub.reaches(namespaces=1)
        with client(hub, cache, token=paths[0]) as consumer:
            check(consumer.load(found_by(consumer, longer(cache))), cache)


# --- limits --------------------------------------------------------------------------


def test_over_its_budget_a_client_keeps_what_was_asked_for_last(hub, cache, tmp_path):
    octets = sum(tensor.nbytes for tensor in cache.tensors.values())
    others = [make_cache(tmp_path / f"{n}", seed=n, scope=cache.scope) for n in (2, 3)]
    with client(hub, cache, keep_octets=2 * octets) as producer, client(hub, cache) as consumer:
        for each in (cache, *others[:1]):
            save = publish(producer, each)
            eventually(lambda save=save: save.complete, "it is whole")
        check(consumer.load(found_by(consumer, longer(cache))), cache)
        publish(producer, others[1])
        eventually(lambda: producer.counters.of("dropped") == {Dropped.EVICTED: 1}, "one gives way")
        found_by(consumer, longer(others[1]))
        eventually(lambda: consumer.directory.longest(longer(others[0])) is None, "it is withdrawn")
        assert consumer.directory.longest(longer(cache)) is not None


def test_a_cache_larger_than_the_budget_is_dropped_and_counted_and_waits_for_nobody(hub, cache):
    with client(hub, cache, keep_octets=1000) as producer:
        save = producer.publish(cache.tokens)
        assert "keep_octets" in save.failed
        assert not save.put_layer(0, *arrays(cache, 0))
        assert producer.counters.of("dropped") == {Dropped.BUDGET: 1}


def test_what_nobody_asks_for_is_kept_so_long_and_no_longer(hub, cache):
    with client(hub, cache, keep_seconds=1.0) as producer:
        publish(producer, cache)
        hub.reaches(namespaces=1)
        hub.reaches(namespaces=0)
        assert producer.counters.of("dropped") == {Dropped.EXPIRED: 1}


# --- misuse --------------------------------------------------------------------------


def test_a_forked_process_is_told_to_make_a_client_of_its_own(hub, cache):
    with client(hub, cache) as made:
        forking = multiprocessing.get_context("fork")
        here, there = forking.Pipe()

        def child():
            for call in (made.directory.longest, made.publish):
                with pytest.raises(MisuseError, match="after the fork"):
                    call(longer(cache))
            made.close()
            there.send("told")

        process = forking.Process(target=child)
        process.start()
        assert here.poll(WITHIN) and here.recv() == "told"
        process.join(WITHIN)
        save = publish(made, cache)
        eventually(lambda: save.complete, "the parent goes on")


def test_after_its_end_a_client_says_that_it_was_closed(hub, cache):
    with client(hub, cache) as made:
        save = publish(made, cache, 1)
        waiting = found = None
        with client(hub, cache) as other:
            found = found_by(other, longer(cache))
        waiting = made.load(found)
    assert not waiting.wait(WITHIN)
    for call in (
        lambda: made.publish(cache.tokens),
        lambda: made.load(found),
        lambda: made.directory.longest(longer(cache)),
    ):
        with pytest.raises(MisuseError, match="closed"):
            call()
    assert not save.put_layer(1, *arrays(cache, 1))


def test_arrays_that_do_not_fit_are_refused_where_they_are_given(hub, cache):
    with client(hub, cache) as made:
        save = made.publish(cache.tokens)
        k, v = arrays(cache, 0)
        for args, why in (
            ((1, k, v), "layer 0 of the chunk at block 0 is due"),
            ((0, k.astype(np.float32), v), "elements of float32"),
            ((0, k[:-1], v), "31 tokens, and 32 are needed"),
            ((0, k, v[:, :1]), "shape"),
        ):
            with pytest.raises(MisuseError, match=why):
                save.put_layer(*args)
        assert save.put_layer(0, k, v)


# --- networks and an index service ---------------------------------------------------


@pytest.mark.parametrize(("timeout", "outcome"), [(30.0, Ended.LOADED), (0.7, Ended.TIMEOUT)])
def test_a_slow_network_costs_the_time_that_was_set_at_most(timeout, outcome, tmp_path):
    cache = make_cache(tmp_path / "cache", layers=8, kv_heads=8, head_dim=64, tokens=128)
    with relay(tmp_path) as hub, client(hub, cache) as producer:
        publish(producer, cache)
        with path_to(hub, tmp_path, "--rate", "1MB/s"), client(hub, cache) as consumer:
            load = consumer.load(found_by(consumer, longer(cache)), timeout=timeout)
            assert load.wait(WITHIN) is (outcome is Ended.LOADED)
            assert load.outcome is outcome, load.error


def test_an_index_service_also_names_what_goes_on_with_other_tokens(hub, cache, tmp_path):
    server = Server(tmp_path, "kvsp", "index")
    start(server)
    index = {"kvsp": server.base, "kvsp_http_loopback": True}
    other = [*cache.tokens[:17], 1, 2, 3]
    hub.publish(cache, "--kvsp", server.base, "--kvsp-http-loopback").wait_for("publishing")
    with client(hub, cache) as alone, client(hub, cache, **index) as consumer:
        found_by(alone, longer(cache))
        found = found_by(consumer, other, blocks=4)
        assert found.blocks == 4
        check(consumer.load(found), cache, range(4))
        assert alone.directory.longest(other) is None
