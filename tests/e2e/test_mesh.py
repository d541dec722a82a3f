"""Relays that find each other by a directory, or that are in a circle, as processes."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import ExitStack

import pytest

import moqt
from moqt.client import connect
from tests.e2e.support import eventually, readable, relay
from tests.redis_server import redis_server
from tools.bench_mesh import NAMESPACE, Meshed, bench, consume, published

LIMIT = 20.0
"""Seconds for what takes one: the machine may be busy."""


@pytest.fixture
def mesh(tmp_path):
    with ExitStack() as stack:
        yield Meshed(tmp_path, stack, stack.enter_context(redis_server(tmp_path)))


def told(tmp_path):
    """Wait until the directory has been told of a publication, and of all prefixes of its five
    fields."""
    redis = pytest.importorskip("redis", reason="the extra 'directory' is not installed")
    with redis.Redis.from_url(f"unix://{tmp_path}/socket") as client:
        eventually(
            lambda: len(client.keys("kvcs-relay:{*}:*")) >= 6, "the directory is told", LIMIT
        )


def test_while_the_directory_is_dead_nothing_is_said_not_to_be_found(tmp_path, cache):
    with ExitStack() as stack:
        mesh = Meshed(tmp_path, stack, f"unix://{tmp_path}/nobody")
        consumer = mesh.start("alone").subscribe(cache, tmp_path / "out", "--timeout", "60")
        consumer.finish(1)
    assert "cannot tell what is published" in readable(consumer)


@pytest.mark.parametrize(
    ("discovery", "options"),
    [("listing", ()), ("probe", ()), ("listing", ("--workers", "2"))],
    ids=["listing", "probe", "workers"],
)
def test_what_is_published_at_one_relay_of_a_mesh_is_found_at_any_other(
    mesh, tmp_path, cache, discovery, options
):
    asks, has, empty = (mesh.start(name, *options) for name in ("asks", "has", "empty"))
    asking = "--timeout", "60", "--discovery", discovery
    nobody = asks.subscribe(cache, tmp_path / "none", *asking, name="nobody").finish(3)
    assert "no publication" in readable(nobody)
    has.publish(cache).wait_for("publishing")
    told(tmp_path)
    for number, at in enumerate((asks, empty)):
        out = tmp_path / f"out{number}"
        at.subscribe(cache, out, *asking, name=f"subscribe{number}").finish(0)
        cache.check(out)


def test_of_twenty_consumers_at_three_relays_the_origin_sends_each_object_once(tmp_path):
    figures = bench(tmp_path, 20)
    assert figures["from_publisher"] == figures["to_each_other_relay"] == 1
    assert figures["to_consumers"] == 20


async def asked(url, cafile, namespace=NAMESPACE):
    """How a subscription is refused."""
    async with connect(url, cafile=cafile) as session:
        with pytest.raises(moqt.RequestError) as refused:
            await session.subscribe(namespace, b"0")
        return refused.value


def test_what_nobody_in_a_mesh_has_does_not_exist_and_tenants_see_nothing_of_each_other(mesh):
    async def scenario(one, other):
        async with connect(f"{one.url}/tenant", cafile=mesh.cafile) as publisher:
            await published(publisher)
            await asyncio.sleep(1)
            await consume(f"{other.url}/tenant", mesh.cafile)
            return await asked(other.url, mesh.cafile)

    refused = asyncio.run(asyncio.wait_for(scenario(mesh.start("one"), mesh.start("other")), 60))
    assert refused.code == moqt.RequestErrorCode.DOES_NOT_EXIST


def test_a_mesh_whose_directory_is_dead_has_what_is_here_and_upstream(tmp_path):
    async def scenario(origin, edge):
        async with connect(origin.url, cafile=mesh.cafile) as publisher:
            await published(publisher)
            await asyncio.sleep(1)
            began = time.monotonic()
            await consume(edge.url, mesh.cafile)
            assert time.monotonic() - began < LIMIT
            refused = await asked(edge.url, mesh.cafile, (b"nowhere",))
            assert refused.retry_after_ms is not None, "the directory might have known"

    with ExitStack() as stack:
        mesh = Meshed(tmp_path, stack, f"unix://{tmp_path}/nobody")
        origin = mesh.start("origin")
        edge = mesh.start("edge", "--upstream", origin.url, "--upstream-cafile", mesh.cafile)
        edge.reaches(upstream_sessions=1)
        asyncio.run(asyncio.wait_for(scenario(origin, edge), 60))
        eventually(lambda: "the directory does not answer" in edge.process.stderr, "it is told")


def test_a_relay_of_a_mesh_that_was_killed_is_not_asked_for_long(mesh):
    async def scenario(dead, alive, asks):
        async with connect(dead.url, cafile=mesh.cafile) as first:
            await published(first)
            await asyncio.sleep(1)
            dead.process.kill()
            async with connect(alive.url, cafile=mesh.cafile) as second:
                await published(second)
                await asyncio.sleep(1)
                await consume(asks.url, mesh.cafile)

    asyncio.run(asyncio.wait_for(scenario(*map(mesh.start, ("dead", "alive", "asks"))), 90))


async def circle(relays):
    url, cafile = relays[0].url, relays[0].cafile
    began = time.monotonic()
    refused = await asked(url, cafile)
    took = time.monotonic() - began
    async with connect(url, cafile=cafile) as reader:
        async with connect(relays[1].url, cafile=cafile) as publisher:
            store = publisher.publish_track(NAMESPACE, b"0")
            await publisher.publish_namespace(NAMESPACE)
            subscription = await reader.subscribe(NAMESPACE, b"0")
            store.append(0, 0, b"x")
            async for each in subscription:
                assert bytes(each.payload) == b"x"
                break
        async for _ in subscription:
            pass
        return refused, took, subscription.request.done


@pytest.mark.parametrize("count", [2, 3])
def test_in_a_ring_an_unknown_track_is_denied_at_once_and_a_dead_one_ends(tmp_path, count):
    with ExitStack() as stack:
        mesh = Meshed(tmp_path, stack, None)
        ports = [stack.enter_context(relay(tmp_path / f"port{n}")) for n in range(count)]
        addresses = [each.url.removeprefix("moqt://") for each in ports]
        for each in ports:
            each.process.kill()
        relays = []
        for number, address in enumerate(addresses):
            above = f"moqt://{addresses[(number + 1) % count]}"
            relays.append(
                mesh.start(
                    f"ring{number}",
                    *("--listen", address),
                    *("--upstream", above, "--upstream-cafile", mesh.cafile),
                    *("--limit", "publisher_linger=1"),
                )
            )
        for each in relays:
            each.reaches(upstream_sessions=1)
        refused, took, done = asyncio.run(asyncio.wait_for(circle(relays), 60))
    assert refused.code == moqt.RequestErrorCode.DOES_NOT_EXIST
    assert took < 4, "not when somebody has lost patience"
    assert done.code != moqt.PublishDoneCode.TRACK_ENDED


def test_a_relay_that_drains_refuses_who_comes_and_is_found_again_soon(tmp_path):
    async def scenario(hub):
        async with connect(hub.url, cafile=hub.cafile) as stays:
            subscription = asyncio.ensure_future(stays.wait_goaway())
            await stays.publish_namespace((b"stays",))
            hub.process.signal(signal.SIGTERM)
            await asyncio.wait_for(subscription, LIMIT)
            with pytest.raises(moqt.ConnectError) as refused:
                await connect(hub.url, cafile=hub.cafile)
            return str(refused.value)

    with relay(tmp_path) as hub:
        assert "going away" in asyncio.run(asyncio.wait_for(scenario(hub), 60))


def test_behind_a_relay_that_drains_and_comes_back_nobody_notices(tmp_path):
    """Both upstream relays have the publisher; the first one is restarted."""

    async def scenario(first, second, edge, restart):
        stores = []
        for above in (first, second):
            session = await connect(above.url, cafile=above.cafile)
            stores.append(session.publish_track(NAMESPACE, b"0"))
            await session.publish_namespace(NAMESPACE)
        async with connect(edge.url, cafile=edge.cafile) as reader:
            subscription = await reader.subscribe(NAMESPACE, b"0")
            got = []

            async def put(number):
                for store in stores:
                    store.append(0, number, b"%d" % number)
                async for each in subscription:
                    got.append(bytes(each.payload))
                    break

            await put(0)
            first.process.signal(signal.SIGTERM)
            await asyncio.to_thread(
                eventually,
                lambda: second.metric("downstream_subscriptions") == 1,
                "the second one is asked",
            )
            await put(1)
            await asyncio.to_thread(first.process.wait)
            restart()
            await put(2)
            await asyncio.to_thread(edge.reaches, upstream_sessions=2)
            await put(3)
            assert got == [b"0", b"1", b"2", b"3"]

    with ExitStack() as stack:
        mesh = Meshed(tmp_path, stack, None)

        def start(name, *options):
            return mesh.start(name, "--drain-timeout", "2", *options)

        first, second = start("first"), start("second")
        edge = start(
            "edge",
            *("--upstream", first.url, "--upstream", second.url),
            *("--upstream-cafile", mesh.cafile),
        )
        edge.reaches(upstream_sessions=2)
        address = first.url.removeprefix("moqt://")
        asyncio.run(
            asyncio.wait_for(
                scenario(first, second, edge, lambda: start("again", "--listen", address)), 90
            )
        )


def test_the_death_of_an_upstream_that_says_nothing_is_noticed_within_10_s(tmp_path):
    (tmp_path / "far").mkdir()
    with (
        relay(tmp_path / "far") as far,
        relay(tmp_path / "near", "--upstream", far.url, "--upstream-cafile", far.cafile) as near,
    ):
        near.reaches(upstream_sessions=1)
        far.process.signal(signal.SIGSTOP)
        near.reaches(deadline=12.0, upstream_sessions=0)
        refused = asyncio.run(asyncio.wait_for(asked(near.url, near.cafile), 30))
        assert refused.retry_after_ms is not None
        far.process.signal(signal.SIGCONT)
        near.reaches(upstream_sessions=1)
