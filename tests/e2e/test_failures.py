"""What a consumer does when there is nothing, when it ends half-way, or when it is wrong."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess

import pytest

from tests.e2e.support import Process, eventually, interrupt, make_cache, readable

TRACKS = 3


def nothing_left(folder) -> None:
    left = [p.name for p in folder.iterdir()]
    assert left == []


# --- publishers that go away ---------------------------------------------------------


@pytest.mark.parametrize("mode", ["live", "auto"])
def test_a_publisher_killed_in_the_middle_of_a_layer(mode, cache, hub, tmp_path):
    producer = hub.produce(cache)
    (folder := tmp_path / "received").mkdir()
    consumer = hub.subscribe(
        cache, folder / "out", "--mode", mode, "--timeout", "5", "--json", name="consumer"
    )
    hub.reaches(downstream_subscriptions=TRACKS)
    producer.say(28)
    hub.reaches(objects_in_total=2 * 28 + 1)
    producer.kill()
    consumer.finish(1)
    assert "3 of 8 layers came within the 5 s of --timeout" in readable(consumer)
    result = consumer.json()
    assert (result["ok"], result["exit_code"], result["layers"]) == (False, 1, 3)
    nothing_left(folder)


def test_a_publisher_killed_between_layers_by_the_installed_program(cache, hub, tmp_path):
    publisher = hub.publish(cache, "--live-delay", "5000")
    publisher.wait_for("publishing")
    (folder := tmp_path / "received").mkdir()
    consumer = hub.subscribe(cache, folder / "out", "--timeout", "5")
    eventually(lambda: list(folder.iterdir()), "the consumer begins to write")
    publisher.kill()
    consumer.finish(1)
    readable(consumer)
    nothing_left(folder)


def test_a_publisher_interrupted_half_way_ends_its_consumers_before_their_timeout(
    cache, hub, tmp_path
):
    """The failure is told, nobody waits for a timeout, which is longer than a test may take."""
    publisher = hub.publish(cache, "--live-delay", "1500")
    publisher.wait_for("publishing")
    (folder := tmp_path / "received").mkdir()
    consumer = hub.subscribe(cache, folder / "out", "--timeout", "600")
    eventually(lambda: list(folder.iterdir()), "the consumer begins to write")
    interrupt(publisher)
    publisher.finish(0)
    consumer.finish(1)
    assert "its publisher stopped or was lost" in readable(consumer)
    nothing_left(folder)


def test_a_relay_killed_half_way_ends_its_consumers_within_their_timeout(cache, hub, tmp_path):
    hub.publish(cache, "--live-delay", "1500").wait_for("publishing")
    (folder := tmp_path / "received").mkdir()
    consumer = hub.subscribe(cache, folder / "out", "--timeout", "5")
    eventually(lambda: list(folder.iterdir()), "the consumer begins to write")
    hub.process.kill()
    consumer.finish(1)
    readable(consumer)
    nothing_left(folder)


# --- nothing to be found -------------------------------------------------------------

CHANGES = {
    "model": "another",
    "model_digest": "sha-256:" + "12" * 32,
    "tokenizer_digest": "sha-256:" + "23" * 32,
    "adapters": ["sha-256:" + "33" * 32],
    "layers": 9,
    "kv_heads": 1,
    "head_dim": 8,
    "kv_dtype": "bf16",
    "positional": "none",
    "block_tokens": 8,
}


def test_whoever_differs_in_anything_finds_nothing_and_learns_nothing(cache, hub, tmp_path):
    """Another scope key or any other descriptor member."""
    (folder := tmp_path / "received").mkdir()

    def answer(identity, name: str) -> Process:
        return hub.subscribe(identity, folder / "out", "--timeout", "10", name=name)

    nothing_published = answer(cache, "nothing-published").finish(3)
    hub.publish(cache).wait_for("publishing")
    stranger = make_cache(tmp_path / "stranger", tokens=4)
    asking = {
        "scope": cache.variant("scope", scope=stranger.scope),
        "tokens": cache.variant("tokens", tokens=[cache.tokens[0] ^ 1, *cache.tokens[1:]]),
        **{name: cache.variant(name, **{name: value}) for name, value in CHANGES.items()},
    }
    names = list(asking)
    for pair in zip(names[::2], names[1::2], strict=True):
        for name, process in [(n, answer(asking[n], n)) for n in pair]:
            assert process.wait() == 3, name
            assert process.stderr == nothing_published.stderr, name
            assert process.stdout == nothing_published.stdout == "", name
    assert "/" not in readable(nothing_published)
    nothing_left(folder)
    # and whoever differs in nothing does find it: the answers above meant something
    answer(cache, "same").finish(0)
    cache.check(folder / "out")


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_prompts_shorter_than_a_block(tokens, cache, hub, tmp_path):
    hub.publish(cache).wait_for("publishing")
    short = cache.variant("short", tokens=cache.tokens[:tokens])
    (folder := tmp_path / "received").mkdir()
    consumer = hub.subscribe(short, folder / "out")
    publisher = hub.publish(short, name="publish-short", kv=cache.kv)
    consumer.finish(3)
    assert "no block of 4 tokens" in readable(consumer)
    publisher.finish(2)
    assert f"nothing to publish: {tokens} tokens" in readable(publisher, "kvcs-publish")
    nothing_left(folder)


@pytest.mark.parametrize("tokens", [4, 5])
def test_prompts_of_one_block_and_a_token_more_are_one_block(tokens, hub, tmp_path):
    cache = make_cache(tmp_path / "cache", tokens=tokens)
    publisher = hub.publish(cache)
    publisher.wait_for("publishing 4 tokens")
    result = hub.subscribe(cache, tmp_path / "out", "--json").finish().json()
    assert (result["tokens"], result["blocks"]) == (4, 1)
    cache.check(tmp_path / "out", blocks=1)


# --- wrong contents ------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["live", "fetch"])
@pytest.mark.parametrize("how", ["corrupt", "forge"])
def test_a_corrupted_object_is_discarded_counted_and_ends_it(how, mode, cache, hub, tmp_path):
    """Corrupt: its digest is wrong. Forge: its own digest is right, the manifest's differs."""
    producer = hub.produce(cache, f"--{how}", "2:3")
    (folder := tmp_path / "received").mkdir()
    if mode == "fetch":
        producer.say(64)
        producer.wait_for("produced")
    consumer = hub.subscribe(
        cache, folder / "out", "--mode", mode, "--timeout", "20", "--json", name="consumer"
    )
    if mode == "live":
        hub.reaches(downstream_subscriptions=TRACKS)
        producer.say(64)
    consumer.finish(5)
    readable(consumer)
    result = consumer.json()
    assert (result["ok"], result["exit_code"]) == (False, 5)
    assert sum(result["discarded"].values()) >= 1
    nothing_left(folder)


# --- no room -------------------------------------------------------------------------


def no_large_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))


def test_no_room_for_the_output(cache, hub, tmp_path):
    hub.publish(cache).wait_for("publishing")
    (folder := tmp_path / "received").mkdir()
    consumer = hub.subscribe(cache, folder / "out", preexec_fn=no_large_files)
    consumer.finish(1)
    assert os.strerror(errno.EFBIG) in readable(consumer)
    nothing_left(folder)


def test_a_full_disk(cache, hub, tmp_path):
    (folder := tmp_path / "received").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount: test_no_room_for_the_output covers it")
    if mounted.returncode:
        pytest.skip("mount is not permitted: test_no_room_for_the_output covers it")
    try:
        hub.publish(cache).wait_for("publishing")
        consumer = hub.subscribe(cache, folder / "out")
        consumer.finish(1)
        assert os.strerror(errno.ENOSPC) in readable(consumer)
        nothing_left(folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_consumer_leaves_no_file(number, cache, hub, tmp_path):
    hub.publish(cache, "--live-delay", "2000").wait_for("publishing")
    (folder := tmp_path / "received").mkdir()
    consumer = hub.subscribe(cache, folder / "out")
    eventually(lambda: list(folder.iterdir()), "the consumer begins to write")
    consumer.signal(number)
    consumer.finish(128 + number)
    assert readable(consumer) == "kvcs-subscribe: interrupted"
    nothing_left(folder)
    hub.reaches(sessions=1)
