"""The directory at work: relays register, find each other, and go on without it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace

import pytest

from moqt.requests import RequestState
from moqt.values.errors import ConnectError
from relay.config import RelayConfig
from relay.mesh import directory_client
from relay.mesh.directory import MAX_FAILURES, Has, Place
from relay.mesh.directory_client import DIALLED_AT_ONCE, DirectoryClient
from relay.scopes import Scopes
from tests.relay.peers import Listing
from tests.relay.star import NAMESPACE, Star


class Shared:
    """What stands in the server."""

    def __init__(self):
        self.urls = {}
        self.has = defaultdict(dict)
        self.dead = False
        self.found = 0


def key_of(place):
    """Under which a namespace stands there, or what is below one."""
    return place if place.below else place[:2]


class FakeStore:
    def __init__(self, shared):
        self.shared = shared

    def _alive(self):
        if self.shared.dead:
            raise OSError("nobody is there")

    async def stay(self, relay, url, alive_s):
        self._alive()
        old = self.shared.urls.get(relay)
        self.shared.urls[relay] = url
        return old is not None

    async def leave(self, relay):
        self._alive()
        self.shared.urls.pop(relay, None)

    async def tell(self, relay, changes, ttl_s):
        self._alive()
        for each in changes:
            self.shared.has[key_of(each.place)][relay] = each.has

    async def find(self, asked):
        self._alive()
        self.shared.found += len(asked)
        return [
            [
                (relay, self.shared.urls[relay])
                for relay, has in self.shared.has[key_of(place)].items()
                if has and relay in self.shared.urls
            ]
            for place in asked
        ]

    async def close(self):
        """Nothing is open."""


class FakeSession:
    """A session that lives until it is closed."""

    peer_relay = None

    def __init__(self):
        self.session, self.busy, self.closed, self.goaway = self, False, None, None
        self.scheduler = SimpleNamespace()
        self._over = asyncio.Event()
        self.listed = []
        """The prefixes of its SUBSCRIBE_NAMESPACEs."""

    def subscribe_namespace(self, prefix, *, on_namespace, on_ended, on_full):
        self.listed.append(prefix)
        self.on_namespace = on_namespace
        return SimpleNamespace(state=RequestState.ESTABLISHED, cancel=lambda: None)

    async def wait_closed(self):
        await self._over.wait()

    def close(self):
        self.closed = True
        self._over.set()


class Running:
    """One relay's client of a directory."""

    def __init__(self, shared, name, *, refuse=False, **limits):
        self.scopes = Scopes(RelayConfig(**limits))
        self.relay = self.scopes.keep("/")
        self.dialled, self.made = [], []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.refuse = refuse
        self.client = DirectoryClient(
            self.scopes, FakeStore(shared), name, f"moqt://{name}", self.connect
        )
        self.task = asyncio.create_task(self.client.run())

    async def connect(self, url, relay):
        self.dialled.append(url)
        if self.refuse:
            raise ConnectError("nobody there")
        await self.go_on.wait()
        self.made.append(FakeSession())
        return self.made[-1]

    async def look(self, namespace=NAMESPACE):
        """The sessions that are found, when they are."""
        done = asyncio.Event()
        self.relay.askable.finder.look_up(namespace, done.set)
        await asyncio.wait_for(done.wait(), 20)
        return self.relay.askable.finder.found(namespace)

    async def stop(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(directory_client, "CHANGES_SECONDS", 0.0)
    monkeypatch.setattr(directory_client, "STAY_SECONDS", 0.02)


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def published(running):
    """A publisher at that relay."""
    star = Star()
    star.relay = running.relay
    return star.publisher()


async def test_what_is_published_at_one_is_found_by_another_until_it_is_withdrawn():
    shared = Shared()
    one, other = Running(shared, "one"), Running(shared, "other")
    publisher = published(one)
    await until(lambda: shared.has["/", NAMESPACE].get("one") is Has.PUBLISHED)
    assert len(await other.look()) == 1 and other.dialled == ["moqt://one/"]
    assert await one.look() == [], "nobody dials himself"
    publisher.published.cancel()
    publisher.run()
    await until(lambda: shared.has["/", NAMESPACE]["one"] is Has.NOTHING)
    await one.stop()
    await other.stop()
    assert shared.urls == {}


def below(*prefix):
    return Place("/", prefix, below=True)


async def test_who_lists_has_the_relays_dialled_that_have_something_below_the_prefix():
    shared = Shared()
    one, other = Running(shared, "one"), Running(shared, "other")
    star = published(one)
    await until(lambda: shared.has[below(*NAMESPACE[:1])].get("one") is Has.PUBLISHED)
    assert not other.dialled
    asks = Star()
    asks.relay = other.relay
    listing = Listing(asks, asks.connect(), NAMESPACE[:1])
    await until(lambda: other.made and other.made[0].listed == [NAMESPACE[:1]])
    other.made[0].on_namespace(NAMESPACE, True)
    asks.run()
    assert other.dialled == ["moqt://one/"] and listing.request.namespaces == {NAMESPACE}
    star.published.cancel()
    star.run()
    await until(lambda: shared.has[below(*NAMESPACE[:1])]["one"] is Has.NOTHING)
    await one.stop()
    await other.stop()


async def test_more_relays_are_dialled_for_a_listing_than_for_one_namespace():
    shared = Shared()
    asks = Running(shared, "asks")
    shared.urls |= {f"relay{n}": f"moqt://relay{n}" for n in range(DIALLED_AT_ONCE + 2)}
    shared.has[below(*NAMESPACE[:1])] = dict.fromkeys(shared.urls, Has.PUBLISHED)
    star = Star()
    star.relay = asks.relay
    Listing(star, star.connect(), NAMESPACE[:1])
    await until(lambda: len(asks.made) == DIALLED_AT_ONCE + 2)
    await asks.stop()


async def test_a_directory_that_lost_everything_is_told_again():
    shared = Shared()
    one = Running(shared, "one")
    published(one)
    await until(lambda: shared.has["/", NAMESPACE])
    shared.has.clear()
    shared.urls.clear()
    await until(lambda: shared.has["/", NAMESPACE])
    await one.stop()


async def test_a_directory_that_is_dead_is_asked_a_few_times_and_then_left_alone(caplog):
    shared = Shared()
    shared.dead = True
    one = Running(shared, "one")
    for _ in range(3 * MAX_FAILURES):
        assert await one.look() == []
    await until(lambda: "does not answer" in caplog.text)
    assert one.relay.askable.unreachable
    failures = one.scopes.counters.directory_failures
    await one.look()
    assert one.scopes.counters.directory_lookups <= failures + MAX_FAILURES
    await one.stop()


async def test_a_relay_that_cannot_be_dialled_is_not_dialled_for_every_look_up():
    shared = Shared()
    one, other = Running(shared, "one"), Running(shared, "other", refuse=True)
    published(one)
    await until(lambda: shared.has["/", NAMESPACE])
    for _ in range(5):
        assert await other.look() == []
    assert len(other.dialled) == 1
    await one.stop()
    await other.stop()


async def test_no_more_sessions_are_made_than_the_limit_says(caplog):
    shared = Shared()
    asks = Running(shared, "asks", max_mesh_sessions=4)  # half of them are for one scope
    shared.urls |= {f"relay{n}": f"moqt://relay{n}" for n in range(3)}
    for number in range(2):
        shared.has["/", (b"%d" % number,)] = {f"relay{number}": Has.PUBLISHED}
        (session,) = await asks.look((b"%d" % number,))
        session.busy = True
    shared.has["/", (b"2",)] = {"relay2": Has.PUBLISHED}
    assert await asks.look((b"2",)) == []
    assert "max_mesh_sessions" in caplog.text
    assert asks.scopes.counters.mesh_sessions_refused == 1
    finder = asks.scopes.keep("/other").askable.finder
    shared.has["/other", NAMESPACE] = {"relay2": Has.PUBLISHED}
    done = asyncio.Event()
    finder.look_up(NAMESPACE, done.set)
    await asyncio.wait_for(done.wait(), 20)
    assert len(finder.found(NAMESPACE)) == 1, "what one scope takes keeps no other from its own"
    await asks.stop()


async def test_a_relay_that_is_leaving_is_found_no_more():
    shared = Shared()
    one, other = Running(shared, "one"), Running(shared, "other")
    published(one)
    await until(lambda: shared.has["/", NAMESPACE] and "one" in shared.urls)
    one.client.leave()
    await until(lambda: "one" not in shared.urls)
    await asyncio.sleep(0.1)
    assert "one" not in shared.urls
    assert await other.look() == []
    await one.stop()
    await other.stop()


@pytest.mark.parametrize("path", [".elsewhere.example/", "0/x", "/x#y", "@elsewhere.example/"])
async def test_a_path_that_would_name_another_host_or_scope_is_not_dialled(path, caplog):
    """Over WebTransport a client may dial any path."""
    shared = Shared()
    asks = Running(shared, "asks")
    finder = asks.scopes.keep(path).askable.finder
    shared.urls["one"] = "moqt://relay.example"
    shared.has[path, NAMESPACE] = {"one": Has.PUBLISHED}
    done = asyncio.Event()
    finder.look_up(NAMESPACE, done.set)
    await asyncio.wait_for(done.wait(), 20)
    assert asks.dialled == [] and "relay.example" in caplog.text
    await asks.stop()


async def test_sessions_that_make_room_for_others_make_it_once():
    shared = Shared()
    asks = Running(shared, "asks", max_mesh_sessions=4)  # half of them are for one scope
    shared.urls |= {f"relay{n}": f"moqt://relay{n}" for n in range(6)}
    for number in range(2):
        shared.has["/", (b"%d" % number,)] = {f"relay{number}": Has.PUBLISHED}
        await asks.look((b"%d" % number,))
    shared.has["/", NAMESPACE] = {f"relay{n}": Has.PUBLISHED for n in range(2, 6)}
    assert len(await asks.look()) == 2 and len(asks.dialled) == 4
    assert asks.client.sessions == 2
    await asks.stop()


async def test_of_a_scope_that_is_gone_the_directory_knows_nothing_any_more():
    shared = Shared()
    one = Running(shared, "one")
    relay = one.scopes.enter(FakeSession(), "/x")
    relay.namespaces.on_disk.add(NAMESPACE, "a track")
    relay.namespaces.tell(NAMESPACE)
    await until(lambda: shared.has["/x", NAMESPACE].get("one") is Has.CACHED)
    relay.sessions.clear()
    one.scopes.tick(1.0)
    assert "/x" not in one.scopes.relays
    await until(lambda: shared.has["/x", NAMESPACE]["one"] is Has.NOTHING)
    await until(lambda: shared.has[Place("/x", (), True)]["one"] is Has.NOTHING)
    await until(lambda: one.client.registered == 0)
    await one.stop()


async def test_a_session_to_another_relay_that_comes_when_the_scope_is_gone_is_closed():
    shared = Shared()
    asks = Running(shared, "asks")
    shared.urls["one"] = "moqt://one"
    shared.has["/x", NAMESPACE] = {"one": Has.PUBLISHED}
    relay = asks.scopes.enter(FakeSession(), "/x")
    asks.go_on.clear()
    relay.askable.finder.look_up(NAMESPACE, lambda: None)
    await until(lambda: asks.dialled)
    relay.sessions.clear()
    asks.scopes.tick(1.0)
    asks.go_on.set()
    await until(lambda: asks.made and asks.made[0].closed)
    assert asks.client.sessions == 0
    await asks.stop()
