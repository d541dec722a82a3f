"""Never another prompt's cache, and the best publication there is: each program a process."""

from __future__ import annotations

import json
import subprocess

import pytest
from safetensors.numpy import save_file

from kvcs.names.namespace import PublicationNamespace
from kvcs.publishing.replicas import moqt_record
from kvsp.names.identity import Descriptor, Scope, block_keys
from kvsp.names.uris import compat_path
from tests.e2e.kvsp_support import Server, start
from tests.e2e.support import Cache, Process, eventually, interrupt, make_cache, readable

# --- another prompt's cache ------------------------------------------------------------


def told(server: Server, cache: Cache, namespace: str, url: str, other: Cache) -> None:
    """The index is told that a publication has the blocks of `cache`, as records of `other`'s
    cache would say it: what a writer who is wrong, or lies, can do."""
    scope, descriptor = Scope.load(cache.scope), Descriptor.parse(json.dumps(cache.descriptor))
    layers = [
        (other.tensors[f"layers.{n}.k"], other.tensors[f"layers.{n}.v"])
        for n in range(descriptor.layers)
    ]
    compat = compat_path(descriptor.compat_id)
    assert server.ask("PUT", compat, json.loads(descriptor.jcs))[0] in (200, 201)
    for block, key in enumerate(block_keys(scope, descriptor, cache.tokens)):
        record = moqt_record(
            PublicationNamespace.from_text(namespace), key, layers, block, descriptor, url
        )
        status, answer = server.ask("PUT", record.path, json.loads(record.to_json()))
        assert status in (200, 201), answer


@pytest.fixture
def server(tmp_path):
    """An index service."""
    made = Server(tmp_path, "kvsp", "index")
    start(made)
    return made


def test_another_prompts_cache_is_never_written(cache, hub, server, tmp_path):
    """The index names, for our keys, a longer publication of other tokens."""
    other = make_cache(tmp_path / "other", tokens=48, seed=9, scope=cache.scope)
    publisher = hub.publish(other, "--json", name="other")
    namespace = publisher.wait_for(r'"namespace": "([^"]+)"').group(1)
    told(server, cache, namespace, hub.url, cache)
    at = ["--kvsp", server.base, "--kvsp-http-loopback"]
    failed = hub.subscribe(cache, tmp_path / "out", *at, name="wrong").finish(5)
    assert "is not what the index service has a record of" in readable(failed)
    assert not (tmp_path / "out").exists()
    # what is really published of our tokens is found all the same, although it is shorter
    short = part(cache, "short", 5)
    hub.publish(short, name="short").wait_for("publishing")
    result = hub.subscribe(cache, tmp_path / "out", "--json", *at, name="right").finish(0).json()
    cache.check(tmp_path / "out", blocks=5)
    assert result["discarded"] == {"other-tokens": 1}


def test_what_the_records_do_say_is_retrieved(cache, hub, server, tmp_path):
    longer = make_cache(tmp_path / "longer", tokens=48, seed=9, scope=cache.scope)
    publisher = hub.publish(longer, "--json", name="longer")
    namespace = publisher.wait_for(r'"namespace": "([^"]+)"').group(1)
    ours = longer.variant("ours", tokens=longer.tokens[:32])
    told(server, ours, namespace, hub.url, longer)
    at = ["--kvsp", server.base, "--kvsp-http-loopback", "--discovery", "index"]
    hub.subscribe(ours, tmp_path / "out", *at).finish(0)
    longer.check(tmp_path / "out", blocks=8)


# --- segments, codecs and components ---------------------------------------------------


def offer(hub, cache: Cache, segments: str, what: str = "raw") -> Process:
    process = hub.peer(
        "offer", *cache.identity(), "--kv", cache.kv, "--segments", segments, "--offer", what
    )
    process.wait_for("announced")
    return process


@pytest.mark.parametrize("what", ["raw", "component"])
def test_every_segment_is_delivered(what, cache, hub, tmp_path):
    offer(hub, cache, "3,2,3", what)
    result = hub.subscribe(cache, tmp_path / "out", "--json").finish(0).json()
    cache.check(tmp_path / "out")
    assert result["tokens"] == len(cache.tokens) and result["discarded"] == {}


def test_a_codec_we_lack_is_said_to_be_one(cache, hub, tmp_path):
    offer(hub, cache, "8", "codec")
    failed = hub.subscribe(cache, tmp_path / "out").finish(1)
    assert "is offered only as x-new" in readable(failed)


# --- the best publication --------------------------------------------------------------


def part(cache: Cache, name: str, blocks: int) -> Cache:
    """The leading blocks of a cache, with files of their own."""
    tokens = blocks * cache.descriptor["block_tokens"]
    made = cache.variant(name, tokens=cache.tokens[:tokens])
    made.tensors = {key: tensor[:tokens] for key, tensor in cache.tensors.items()}
    save_file(made.tensors, made.kv)
    return made


def dead(hub, cache):
    """Its publisher has left; the namespace is announced by somebody who has nothing."""
    hub.peer("announce", *cache.identity(), name="dead").wait_for("announced")
    return 0


def announced_often(hub, cache):
    for number in range(6):
        hub.peer("announce", *cache.identity(), name=f"dead-{number}")
    hub.reaches(namespaces=6)
    return 0


def corrupt(hub, cache):
    producer = hub.produce(cache, "--corrupt", "0:1", name="corrupt")
    producer.say(64)
    producer.wait_for("produced None")
    return 1


def abandoned(hub, cache):
    """Half of it is in the relay's cache, and its publisher is gone."""
    producer = hub.produce(cache, name="abandoned")
    reader = hub.subscribe(cache, hub.directory / "nothing", name="reader")
    hub.reaches(downstream_subscriptions=3)
    producer.say(20)
    producer.wait_for("produced")
    reader.kill()
    producer.kill()
    return 0


def stalled(hub, cache):
    hub.produce(cache, name="stalled").say(20)
    return 0


@pytest.mark.parametrize("longer", [dead, announced_often, corrupt, abandoned, stalled])
def test_a_longer_publication_that_is_of_no_use_hides_no_shorter_one(longer, cache, hub, tmp_path):
    longer(hub, cache)
    hub.publish(part(cache, "short", 3), name="short").wait_for("publishing")
    consumer = hub.subscribe(cache, tmp_path / "out", "--json", "--timeout", "30")
    result = consumer.finish(0).json()
    cache.check(tmp_path / "out", blocks=3)
    assert result["blocks"] == 3


def test_a_whole_publication_is_taken_although_others_were_announced_first(cache, hub, tmp_path):
    stalled(hub, cache)
    dead(hub, cache)
    publisher = hub.publish(cache, "--json", name="whole")
    whole = publisher.wait_for(r'"publication": "([^"]+)"').group(1)
    hub.reaches(namespaces=3)
    result = hub.subscribe(cache, tmp_path / "out", "--json").finish(0).json()
    cache.check(tmp_path / "out")
    assert result["publication"] == whole and result["mode"] == "fetch"


# --- discovery -------------------------------------------------------------------------


def test_a_few_blocks_under_a_long_prompt_are_found_by_one_listing(cache, hub, tmp_path):
    long = cache.variant("long", tokens=[*cache.tokens[:18], *range(131_072 - 18)])
    hub.publish(part(cache, "short", 4), name="short").wait_for("publishing")
    consumer = hub.subscribe(long, tmp_path / "out", "--json")
    assert consumer.finish(0).json()["blocks"] == 4
    cache.check(tmp_path / "out", blocks=4)
    nothing = cache.variant("nothing", tokens=list(range(131_072)))
    hub.subscribe(nothing, tmp_path / "out", name="nothing").finish(3)


@pytest.mark.parametrize("discovery", ["listing", "probe"])
def test_publications_are_found_in_either_way(discovery, cache, hub, tmp_path):
    hub.publish(part(cache, "short", 4), name="short").wait_for("publishing")
    hub.subscribe(cache, tmp_path / "out", "--discovery", discovery).finish(0)
    cache.check(tmp_path / "out", blocks=4)


def test_discovery_by_an_index_needs_one(cache, hub, tmp_path):
    refused = hub.subscribe(cache, tmp_path / "out", "--discovery", "index").finish(2)
    assert "give --kvsp" in readable(refused)


def test_a_process_that_keeps_a_directory_knows_what_comes_and_goes(cache, hub):
    watch = hub.peer("watch", *cache.identity(), stdin=subprocess.PIPE)
    watch.wait_for("watching")

    def finds(blocks: list[int]) -> bool:
        watch.say("")
        return watch.stdout.splitlines()[-1] == f"found {blocks}"

    eventually(lambda: finds([]), "nothing")
    short = hub.publish(part(cache, "short", 3), "--exit-after-idle", "60", name="short")
    whole = hub.publish(cache, name="whole")
    for publisher in (short, whole):
        publisher.wait_for("publishing")
    eventually(lambda: finds([8, 3]), "both")
    interrupt(whole)
    whole.finish(0)
    eventually(lambda: finds([3]), "the shorter one alone")
