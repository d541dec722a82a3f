"""A KV cache crosses a relay: live, afterwards, in part, to several, from the relay's cache."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.e2e.support import PEER, Process, interrupt, make_cache, relay

TRACKS = 3


def check_live(result: dict, cache) -> None:
    """The multiset of Objects is that of the publication, each once."""
    assert result["ok"] is True
    assert result["objects_verified"] == result["objects_confirmed"] == cache.objects
    assert result["duplicates"] == result["recoveries"] == 0
    assert result["discarded"] == {}
    assert result["publications_tried"] == 1
    assert (result["tokens"], result["layers"]) == (len(cache.tokens), cache.descriptor["layers"])


def test_consumers_that_join_before_during_and_after_production_get_every_object_once(
    cache, hub, tmp_path
):
    """Blocks are four tokens of one layer, eight a layer."""
    producer = hub.produce(cache)
    consumers, produced = {}, 0
    for missed in (0, 1, 28, 63, 64):
        producer.say(missed - produced)
        produced = missed
        for mode in {1: ("live",), 63: ("auto",)}.get(missed, ("live", "auto")):
            consumers[missed, mode] = hub.subscribe(
                cache,
                tmp_path / f"{mode}-{missed}",
                *("--mode", mode, "--json", "--timeout", "40"),
                name=f"subscribe-{mode}-{missed}",
            )
        if missed < 64:
            hub.reaches(downstream_subscriptions=len(consumers) * TRACKS)
    for (missed, mode), consumer in consumers.items():
        result = consumer.finish().json()
        check_live(result, cache)
        assert result["mode"] == ("live" if missed < 64 else {"auto": "fetch"}.get(mode, mode))
        cache.check(tmp_path / f"{mode}-{missed}")
    for track in ("k.raw.s0", "v.raw.s0", "manifest"):
        assert producer.stdout.splitlines().count(f"SUBSCRIBE {track}") == 1


@pytest.mark.parametrize("mode", ["live", "auto"])
def test_a_first_consumer_that_joins_in_the_middle_of_a_layer_gets_every_object_once(
    mode, cache, hub, tmp_path
):
    producer = hub.produce(cache)
    producer.say(28)
    producer.wait_for("produced")
    consumer = hub.subscribe(cache, tmp_path / "out", "--mode", mode, "--json")
    hub.reaches(downstream_subscriptions=TRACKS)
    producer.say(36)
    check_live(consumer.finish().json(), cache)
    cache.check(tmp_path / "out")


def test_layers_are_usable_while_later_ones_are_produced(cache, hub, tmp_path):
    # the second layer is due in ten minutes
    hub.publish(cache, "--live-delay", "600000").wait_for("publishing")
    out = tmp_path / "out.safetensors"
    result = hub.subscribe(cache, out, "--layers", "0", "--json").finish().json()
    assert result["mode"] == "live" and result["objects_verified"] == 2 * cache.blocks
    cache.check(out, range(1))


@pytest.mark.parametrize("mode", ["fetch", "live"])
def test_a_part_of_a_completed_cache_is_retrieved(mode, cache, hub, tmp_path):
    hub.publish(cache).wait_for("publishing")
    parts = {
        "layers": (range(3, 8), None, ["--layers", "3-7"]),
        "blocks": (range(8), 4, ["--blocks", "4"]),
        "both": (range(3, 8), 4, ["--layers", "3-7", "--blocks", "4"]),
        "more than there are": (range(8), None, ["--blocks", "4000"]),
    }
    consumers = {
        name: hub.subscribe(
            cache, tmp_path / name, *options, "--mode", mode, "--json", name=f"subscribe-{name}"
        )
        for name, (_, _, options) in parts.items()
    }
    for name, (layers, blocks, _) in parts.items():
        result = consumers[name].finish().json()
        assert result["objects_verified"] == 2 * len(layers) * (blocks or cache.blocks)
        assert result["tokens"] == (blocks or cache.blocks) * 4
        assert (result["first_layer"], result["last_layer"]) == (layers[0], layers[-1])
        assert result["recoveries"] == 0
        cache.check(tmp_path / name, layers, blocks)
    told = f"{cache.blocks} of the 4000 blocks asked for were to be had"
    for name, consumer in consumers.items():
        assert (told in consumer.stderr) == (name == "more than there are")


def test_two_consumers_at_once_cost_the_publisher_one_subscription_of_each_track(
    cache, hub, tmp_path
):
    producer = hub.produce(cache)
    consumers = [
        hub.subscribe(cache, tmp_path / f"out-{n}", "--json", name=f"subscribe-{n}")
        for n in range(2)
    ]
    hub.reaches(downstream_subscriptions=2 * TRACKS)
    producer.say(64)
    for number, consumer in enumerate(consumers):
        check_live(consumer.finish().json(), cache)
        cache.check(tmp_path / f"out-{number}")
    asked = sorted(re.findall(r"(?:SUBSCRIBE|FETCH) \S+", producer.stdout))
    # that there is no signed manifest is for the publisher to say, to each
    refused = [each for each in asked if each == "SUBSCRIBE manifest.cose"]
    assert 1 <= len(refused) <= 2
    asked = [each for each in asked if each not in refused]
    # the first manifest was there before: both consumers' fills want it, one FETCH gets it
    fetched = ["FETCH manifest"]
    assert asked == fetched + [f"SUBSCRIBE {t}" for t in ("k.raw.s0", "manifest", "v.raw.s0")]
    hub.reaches(
        upstream_subscriptions_total=TRACKS + len(refused),
        downstream_subscriptions_total=2 * TRACKS,
    )
    assert hub.metric("upstream_fetches_total") == 1
    # each Object came in once and went out twice; manifests are Objects too
    hub.reaches(sessions_total=3)
    hub.reaches(sessions=1)
    sent = hub.metric("objects_out_total") - hub.metric("objects_in_total")
    assert sent >= cache.objects


def test_blocks_that_no_consumer_wants_do_not_come_to_the_relay_until_one_does(
    cache, hub, tmp_path
):
    producer = hub.produce(cache)
    consumer = hub.subscribe(cache, tmp_path / "some", "--blocks", "2", "--json", name="some")
    hub.reaches(downstream_subscriptions=TRACKS)
    producer.say(64)
    producer.wait_for("produced")
    assert consumer.finish().json()["tokens"] == 2 * 4
    cache.check(tmp_path / "some", None, 2)
    wanted = cache.objects * 2 // cache.blocks
    assert wanted <= hub.metric("objects_in_total") < cache.objects
    hub.subscribe(cache, tmp_path / "all", name="all").finish(0)
    cache.check(tmp_path / "all")
    assert hub.metric("objects_in_total") >= cache.objects


@pytest.mark.parametrize("end", ["killed", "killed and noticed", "stopped"])
def test_a_second_request_is_served_from_the_cache_and_survives_its_publisher(
    end, cache, hub, tmp_path
):
    producer = hub.produce(cache, "--idle", "1.5" if "noticed" in end else "30")
    producer.say(64)
    producer.wait_for("produced")
    first = hub.subscribe(cache, tmp_path / "out-0", "--json", name="subscribe-0")
    check_live(first.finish().json(), cache)
    hub.reaches(sessions_total=2)
    hub.reaches(sessions=1)
    hits, stored = hub.metric("cache_hits_total"), hub.metric("objects_in_total")
    asked = hub.metric("upstream_subscriptions_total") + hub.metric("upstream_fetches_total")
    check_live(hub.subscribe(cache, tmp_path / "out-1", "--json").finish().json(), cache)
    hub.reaches(sessions_total=3)
    hub.reaches(sessions=1)
    assert hub.metric("cache_hits_total") - hits >= cache.objects
    assert hub.metric("objects_in_total") == stored

    if end == "stopped":
        producer.say("leave")
        producer.finish(0)
    else:
        producer.kill()
    if end != "killed":
        hub.reaches(sessions=0)
    consumers = {
        mode: hub.subscribe(
            cache, tmp_path / mode, "--json", "--mode", mode, "--timeout", "15", name=mode
        )
        for mode in ("auto", "live", "fetch")
    }
    for mode, consumer in consumers.items():
        check_live(consumer.finish().json(), cache)
        cache.check(tmp_path / mode)
    hub.reaches(sessions_total=6)
    hub.reaches(sessions=0 if end != "killed" else 1)
    assert hub.metric("objects_in_total") == stored
    now = hub.metric("upstream_subscriptions_total") + hub.metric("upstream_fetches_total")
    assert now == asked


@pytest.mark.parametrize("mode", ["live", "fetch"])
def test_a_consumer_that_wants_more_than_is_cached_gets_all_of_it(mode, cache, hub, tmp_path):
    """A part is asked for first, then all of it: only what is missing comes from upstream."""
    hub.publish(cache).wait_for("publishing")
    hub.subscribe(cache, tmp_path / "part", "--layers", "2-5", "--mode", "fetch").finish()
    cache.check(tmp_path / "part", range(2, 6))
    result = hub.subscribe(cache, tmp_path / "all", "--mode", mode, "--json").finish().json()
    check_live(result, cache)
    cache.check(tmp_path / "all")
    hub.reaches(sessions_total=3)
    hub.reaches(sessions=1)
    assert hub.metric("cache_objects") == hub.metric("objects_in_total")


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """300 layers: more Groups than streams that QUIC grants at a time."""
    return make_cache(tmp_path_factory.mktemp("deep"), layers=300, kv_heads=1, head_dim=8, tokens=8)


def test_300_layers_cross_one_connection_live_and_afterwards(deep, hub, tmp_path):
    producer = hub.produce(deep)
    live = hub.subscribe(deep, tmp_path / "live", "--mode", "live", "--json", name="live")
    hub.reaches(downstream_subscriptions=TRACKS)
    producer.say(deep.objects)
    check_live(live.finish().json(), deep)
    deep.check(tmp_path / "live")
    late = {
        mode: hub.subscribe(deep, tmp_path / f"{mode}-2", "--mode", mode, "--json", name=mode)
        for mode in ("live", "fetch")
    }
    for mode, consumer in late.items():
        check_live(consumer.finish().json(), deep)
        deep.check(tmp_path / f"{mode}-2")


@pytest.mark.parametrize("streams", [16, 128, 1024])
def test_300_layers_arrive_complete_whatever_the_limit_of_streams(streams, deep, tmp_path):
    """The limit is the relay's and the consumers'."""
    with relay(tmp_path, program=(*PEER, "relay", str(streams))) as hub:
        producer = hub.produce(deep)

        def consume(mode: str) -> Process:
            options = [*deep.identity(), "--streams", streams, "--mode", mode]
            return hub.peer("consume", *options, name=f"consume-{mode}")

        live = consume("live")
        hub.reaches(downstream_subscriptions=TRACKS)
        producer.say(deep.objects)
        results = {"live": live.finish().json(), "fetch": consume("fetch").finish().json()}
        for mode, result in results.items():
            check_live({"ok": True, **result}, deep)
            assert len(result["digests"]) == 300
            print(f"{streams} streams, {mode}: consumer {result['memory'] >> 20} MiB", end=", ")
        assert results["live"]["digests"] == results["fetch"]["digests"]
        print(f"relay {hub.process.anonymous_memory() >> 20} MiB")


def test_the_longest_published_prefix_is_found(cache, hub, tmp_path):
    """Consumers with more tokens get what there is; of two publications the longer one."""
    short = make_cache(tmp_path / "short", tokens=12, scope=cache.scope)
    short = dataclasses.replace(short, tokens=cache.tokens[:12])
    short.tokens_file.write_text(str(short.tokens))
    asking = cache.variant("asking", tokens=[*cache.tokens, 7, 7, 7, 7, 7, 7])
    other_end = cache.variant("other-end", tokens=[*cache.tokens[:14], *range(40)])

    def retrieve(identity, name: str) -> dict:
        process = hub.subscribe(identity, tmp_path / name, "--json", name=f"subscribe-{name}")
        return process.finish().json()

    publisher = hub.publish(short, name="publish-short")
    publisher.wait_for("publishing")
    assert retrieve(asking, "one")["tokens"] == 12
    short.check(tmp_path / "one")
    hub.publish(cache, name="publish-long").wait_for("publishing")
    assert retrieve(asking, "two")["tokens"] == 32
    cache.check(tmp_path / "two")
    assert retrieve(other_end, "three")["tokens"] == 12
    short.check(tmp_path / "three")
    interrupt(publisher)
    publisher.finish()


def test_two_scopes_through_one_relay_find_only_their_own(cache, hub, tmp_path):
    """The same tokens and model, two scope keys."""
    other = make_cache(tmp_path / "other", seed=2)
    other.tokens[:] = cache.tokens
    other.tokens_file.write_text(str(other.tokens))
    stranger = make_cache(tmp_path / "stranger", seed=3)
    stranger.tokens_file.write_text(str(cache.tokens))
    hub.publish(cache, name="publish-0").wait_for("publishing")
    missing = hub.subscribe(other, tmp_path / "early", name="early").finish(3)
    hub.publish(other, name="publish-1").wait_for("publishing")
    consumers = [
        hub.subscribe(c, tmp_path / f"out-{n}", "--json", name=f"subscribe-{n}")
        for n, c in enumerate((cache, other))
    ]
    for number, (consumer, mine) in enumerate(zip(consumers, (cache, other), strict=True)):
        assert consumer.finish().json()["publications_tried"] == 1
        mine.check(tmp_path / f"out-{number}")
    third = hub.subscribe(stranger, tmp_path / "third", name="third").finish(3)
    assert third.stderr == missing.stderr
    assert not (tmp_path / "early").exists()
    assert not (tmp_path / "third").exists()
