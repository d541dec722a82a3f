"""The directory in a real server, and in a cluster."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest

from relay.mesh.directory import Change, Has, Place
from tests.redis_server import redis_cluster, redis_server

pytest.importorskip("redis", reason="the extra 'directory' is not installed")
from relay.mesh.directory_store import (
    MAX_LOOKED_AT,
    MAX_RELAYS,
    DirectoryError,
    DirectoryStore,
)

NAMESPACE = (b"demo", b"live")
URL = "moqt://relay.example:4443"


@pytest.fixture(scope="module", params=[redis_server, redis_cluster])
def url(request, tmp_path_factory):
    with request.param(tmp_path_factory.mktemp("directory")) as url:
        yield url


def store_at(url, prefix, **options):
    return DirectoryStore(url, prefix=prefix, timeout_s=2.0, **options)


@pytest.fixture
async def store(url, request):
    store = store_at(url, request.node.name)
    yield store
    await store.close()


async def register(store, relay, *namespaces, scope="/", has=Has.PUBLISHED, ttl=60.0):
    await store.stay(relay, f"{URL}/{relay}", 60.0)
    await store.tell(relay, [Change(scope, each, has) for each in namespaces], ttl)


async def found(store, namespace, scope="/"):
    ((*relays,),) = await store.find([Place(scope, namespace)])
    return [name for name, _ in relays]


async def test_who_has_a_namespace_or_a_prefix_of_it_is_found_with_its_url(store):
    await register(store, "a", (b"demo",))
    await register(store, "b", NAMESPACE)
    assert await store.find([Place("/", each) for each in (NAMESPACE, (b"demo",), (b"none",))]) == [
        [("b", URL + "/b"), ("a", URL + "/a")],
        [("a", URL + "/a")],
        [],
    ]


async def test_who_has_a_publisher_is_named_before_who_has_it_cached(store):
    await register(store, "a", NAMESPACE, has=Has.CACHED)
    await register(store, "b", NAMESPACE)
    assert await found(store, NAMESPACE) == ["b", "a"]
    await register(store, "a", NAMESPACE)
    await register(store, "b", NAMESPACE, has=Has.CACHED)
    assert await found(store, NAMESPACE) == ["a", "b"]


async def test_who_has_a_longer_namespace_or_just_that_is_found_below_a_prefix(store):
    await register(store, "a", NAMESPACE)
    await store.tell("a", [Change("/", NAMESPACE[:1], Has.PUBLISHED, below=True)], 60.0)
    await register(store, "b", NAMESPACE[:1])

    async def below(*prefix, scope="/"):
        ((*relays,),) = await store.find([Place(scope, prefix, below=True)])
        return sorted(relays)

    assert await below(b"demo") == [("a", URL + "/a"), ("b", URL + "/b")]
    assert await below(*NAMESPACE) == [("a", URL + "/a")], "not those that have a prefix of it"
    assert await below(b"demo", scope="/two") == await below(b"none") == []
    assert await found(store, (b"demo", b"none")) == ["b"], "what is below is not what is asked for"
    await store.tell("a", [Change("/", NAMESPACE[:1], Has.NOTHING, below=True)], 60.0)
    assert await below(b"demo") == [("b", URL + "/b")]


async def test_of_many_relays_below_a_prefix_all_are_named(store):
    for number in range(MAX_LOOKED_AT + 1):
        await register(store, f"relay{number}")
        await store.tell(f"relay{number}", [Change("/", (), Has.PUBLISHED, below=True)], 60.0)
    ((*relays,),) = await store.find([Place("/", (), below=True)])
    assert len(relays) == MAX_LOOKED_AT + 1


async def test_scopes_see_nothing_of_each_other(store):
    await register(store, "a", NAMESPACE, scope="/one")
    assert await found(store, NAMESPACE, "/one") == ["a"]
    assert await found(store, NAMESPACE, "/two") == await found(store, NAMESPACE) == []


async def test_what_is_withdrawn_or_expired_is_not_found(store):
    await register(store, "a", NAMESPACE)
    await register(store, "a", NAMESPACE, has=Has.NOTHING)
    assert await found(store, NAMESPACE) == []
    await register(store, "b", NAMESPACE, ttl=0.05)
    await asyncio.sleep(0.1)
    assert await found(store, NAMESPACE) == []


async def test_a_relay_that_has_left_or_is_silent_is_named_no_more(store):
    await register(store, "a", NAMESPACE)
    await store.leave("a")
    await register(store, "b", NAMESPACE)
    await store.stay("b", URL, 0.05)
    await asyncio.sleep(0.1)
    assert await found(store, NAMESPACE) == []


async def test_relays_that_are_gone_hide_none_that_is_there(store):
    for number in range(MAX_LOOKED_AT + 1):
        await register(store, f"gone{number}", NAMESPACE)
        await store.leave(f"gone{number}")
    await register(store, "there", NAMESPACE)
    for number in range(MAX_RELAYS + 1):
        await register(store, f"late{number}", NAMESPACE)
        await store.leave(f"late{number}")
    assert await found(store, NAMESPACE) == ["there"]


async def test_a_relay_learns_that_the_directory_has_forgotten_it(store):
    assert not await store.stay("a", URL, 60.0)
    assert await store.stay("a", URL, 60.0)
    await store.leave("a")
    assert not await store.stay("a", URL, 60.0)


@pytest.mark.parametrize("url", ["unix://{}/none", "redis+cluster://127.0.0.1:1"])
async def test_a_directory_that_is_not_there_says_so(tmp_path, url):
    store = store_at(url.format(tmp_path), "none")
    with pytest.raises(DirectoryError):
        await store.stay("a", URL, 60.0)
    with pytest.raises(DirectoryError):
        await store.find([Place("/", NAMESPACE)])
    with pytest.raises(DirectoryError):
        await register(store, "a", NAMESPACE)
    await store.close()


async def test_nothing_in_the_server_tells_what_a_tenant_publishes(url, store):
    import redis

    if "cluster" in url:
        pytest.skip("looked at on one server")
    await register(store, "a", (b"the-track",), scope="/the-tenant")
    with closing(redis.Redis.from_url(url)) as client:
        keys = b" ".join(client.keys("*"))
    assert b"the-tenant" not in keys and b"the-track" not in keys
