"""Blocks over HTTP where MOQT does not bring them: relay, index, holder and programs, each a
process."""

from __future__ import annotations

import json

import pytest

from tests.e2e.kvsp_support import Server, start
from tests.e2e.support import (
    BIN,
    Cache,
    Process,
    eventually,
    interrupt,
    make_cache,
    relay,
)

ALL_BLOCKS = [0, 7]
ALL_LAYERS = [0, 7]
NOBODY = "moqt://127.0.0.1:9"


@pytest.fixture
def server(tmp_path):
    """An index service and holder."""
    made = Server(tmp_path, "kvsp", "index,holder")
    start(made)
    return made


def at(server: Server) -> list[str]:
    return ["--kvsp", server.base, "--kvsp-http-loopback"]


def put(server: Server, cache: Cache, tmp_path) -> None:
    """Store a cache at the holder."""
    Process(
        tmp_path,
        "put",
        BIN / "kvsp",
        "put",
        server.base,
        "--http-loopback",
        *cache.identity(),
        "--kv",
        cache.kv,
    ).finish(0)
    eventually(lambda: looked_up(server, cache) == cache.blocks, "the records")


def looked_up(server: Server, cache: Cache) -> int:
    status, answer = server.ask("POST", "lookup", request(cache))
    assert status == 200
    return answer["matched"]


def request(cache: Cache) -> dict:
    from kvsp.names.identity import Descriptor, Scope, block_keys

    scope, descriptor = Scope.load(cache.scope), Descriptor.parse(json.dumps(cache.descriptor))
    return {
        "scope_id": scope.scope_id.hex(),
        "compat_id": descriptor.compat_id.hex(),
        "block_keys": [key.hex() for key in block_keys(scope, descriptor, cache.tokens)],
    }


def subscribe(cache: Cache, url: str, cafile, tmp_path, *options, name="consumer") -> Process:
    return Process(
        tmp_path,
        name,
        BIN / "kvcs-subscribe",
        url,
        *(() if cafile is None else ("--cafile", cafile)),
        *cache.identity(),
        "--out",
        tmp_path / "out",
        *options,
    )


def test_a_relay_killed_half_way_is_made_up_for_by_holders(cache, hub, server, tmp_path):
    put(server, cache, tmp_path)
    producer = hub.produce(cache)
    consumer = hub.subscribe(
        cache, tmp_path / "out", "--json", "--kvsp-after", "2", *at(server), name="consumer"
    )
    hub.reaches(downstream_subscriptions=3)
    producer.say(28)
    hub.reaches(objects_in_total=2 * 28 + 1)
    hub.reaches(objects_out_total=2 * 28 + 1)
    hub.process.kill()
    result = consumer.finish(0).json()
    cache.check(tmp_path / "out")
    found = {source["source"] for source in result["sources"]}
    assert found == {hub.url, server.base}
    assert result["layers"] == 8


def test_without_a_relay_everything_comes_over_http(cache, server, tmp_path):
    put(server, cache, tmp_path)
    consumer = subscribe(cache, NOBODY, None, tmp_path, *at(server), "--kvsp-after", "0.2")
    consumer.finish(0)
    cache.check(tmp_path / "out")
    assert f"8 blocks by {server.base}" in consumer.stdout
    # another scope finds nothing, by neither way
    other = cache.variant("other", scope=make_cache(tmp_path / "else").scope)
    (tmp_path / "out").unlink()
    with relay(tmp_path / "hub") as hub:
        lost = subscribe(other, hub.url, hub.cafile, tmp_path, *at(server), name="lost")
        lost.finish(3)
    assert not (tmp_path / "out").exists()


def test_a_longer_publication_is_found_through_the_index(cache, hub, server, tmp_path):
    publisher = hub.publish(cache, *at(server))
    publisher.wait_for("publishing")
    eventually(lambda: looked_up(server, cache) == cache.blocks, "the records")
    shorter = cache.variant("shorter", tokens=[*cache.tokens[:14], 7, 7])
    consumer = hub.subscribe(shorter, tmp_path / "out", "--json", *at(server), name="consumer")
    result = consumer.finish(0).json()
    cache.check(tmp_path / "out", blocks=3)
    assert result["sources"] == [{"blocks": [0, 2], "layers": ALL_LAYERS, "source": hub.url}]
    # without the index it cannot be found
    hub.subscribe(shorter, tmp_path / "out", name="alone").finish(3)
    # the records end with the publisher
    interrupt(publisher)
    publisher.finish(0)
    assert looked_up(server, cache) == 0


def test_an_index_that_is_down_is_told_and_costs_nothing(cache, hub, tmp_path):
    hub.publish(cache).wait_for("publishing")
    down = ["--kvsp", "http://127.0.0.1:9/kvsp/", "--kvsp-http-loopback"]
    consumer = hub.subscribe(cache, tmp_path / "out", *down, name="consumer").finish(0)
    cache.check(tmp_path / "out")
    assert "by MOQT alone: the index service" in consumer.stderr
    assert "8 blocks by moqt" in consumer.stdout
