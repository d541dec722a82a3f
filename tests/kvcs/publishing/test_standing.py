"""A session that stands: opened again, with everything announced on it again."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvcs.publishing.standing import CountingPublisher, Standing
from moqt.aio import MoqtSession
from moqt.requests import RequestState
from moqt.values.codes import RequestErrorCode, SessionErrorCode
from moqt.values.errors import ConnectError
from moqt.values.names import FullTrackName
from tests.kvcs.support import Accepting, produced, until
from tests.moqt.memory import ALPN, Pair


class Relay(Accepting):
    """Notes which namespaces it was told, and refuses some."""

    def __init__(self) -> None:
        self.told = []
        self.refuse = []

    def publish_namespace_received(self, request):
        self.told.append(request.namespace)
        if self.refuse:
            request.reject(*self.refuse.pop(), retry_after_ms=1)
        else:
            request.accept()


class Here(Standing):
    """Sessions in memory to one Relay; delays are not waited for."""

    def __init__(self, relay) -> None:
        super().__init__(CountingPublisher())
        self.relay = relay
        self.said, self.times, self.needed = [], [], False
        self.refuses = 0

    async def connect(self):
        if self.refuses:
            self.refuses -= 1
            raise ConnectError("nobody is there")
        pair = Pair(server=self.relay, client=self.publisher, start=False)
        session = MoqtSession(pair.client)
        pair.client.connection_established(ALPN)
        pair.server.connection_established(ALPN)
        self.pair, self.pump = pair, asyncio.create_task(self._pump(pair))
        return session

    async def _pump(self, pair):
        while True:
            now = asyncio.get_running_loop().time()
            pair.client.tick(now)
            pair.server.tick(now)
            pair.run()
            await asyncio.sleep(0.001)

    def in_use(self):
        return self.needed

    def announced(self, publication):
        self.times.append(publication)

    def lost(self, why, delay):
        self.said.append(why)


@contextlib.asynccontextmanager
async def standing(relay):
    here = Here(relay)
    task = asyncio.create_task(here.stand())
    try:
        yield here
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        here.pump.cancel()


async def test_all_that_is_published_is_announced_on_every_session():
    relay, publications = Relay(), [produced(), produced()]
    async with standing(relay) as here:
        here.add(publications[0])
        await until(lambda: len(here.times) == 1)
        here.add(publications[1])
        await until(lambda: len(here.times) == 2)
        here.pair.server.close(SessionErrorCode.NO_ERROR, "restarting")
        await until(lambda: len(here.times) == 4)
        assert set(relay.told) == {each.namespace.fields for each in publications}
        assert here.times[2:] == publications
        assert "restarting" in here.said[0]


async def test_what_was_removed_is_not_announced_again():
    relay, gone, stays = Relay(), produced(), produced()
    async with standing(relay) as here:
        for each in (gone, stays):
            here.add(each)
        await until(lambda: len(here.times) == 2)
        here.remove(gone)
        here.remove(gone)
        assert {name.namespace for name in here.publisher.tracks} == {stays.namespace.fields}
        here.pair.server.close(SessionErrorCode.NO_ERROR, "restarting")
        await until(lambda: len(here.times) == 3)
        assert here.times[2] is stays


async def test_one_that_is_refused_is_announced_again_and_the_session_stays():
    relay = Relay()
    relay.refuse = [(RequestErrorCode.EXCESSIVE_LOAD, "full")]
    async with standing(relay) as here:
        here.add(produced())
        await until(lambda: here.times)
        assert len(relay.told) == 2
        assert "full" in here.said[0]


async def test_a_relay_that_cannot_be_reached_is_tried_again():
    here = Here(Relay())
    here.refuses = 1
    here.add(produced())
    task = asyncio.create_task(here.stand())
    await until(lambda: here.times)
    assert here.said == ["nobody is there"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    here.pump.cancel()
    assert here.session is None


async def test_a_relay_that_goes_away_is_left_once_nothing_needs_the_session(monkeypatch):
    monkeypatch.setattr("kvcs.publishing.standing.LEAVE_AFTER", 0.05)
    async with standing(Relay()) as here:
        here.add(produced())
        await until(lambda: here.times)
        here.needed, first = True, here.session
        here.pair.server.send_goaway()
        await until(here.publisher.sent_away.is_set)
        await asyncio.sleep(0.2)
        assert here.session is first
        here.needed = False
        await until(lambda: len(here.times) == 2)
        assert here.said == ["the relay is going away"]


async def test_what_its_owner_does_not_bear_with_ends_it():
    here = Here(Relay())
    here.gives_up = lambda error, *, reached: not reached
    here.refuses = 1
    with pytest.raises(ConnectError, match="nobody"):
        await here.stand()


def test_a_request_costs_no_more_the_more_others_have_open():
    looks = 0

    class Open:
        name = FullTrackName((b"n",), b"t")

        def reject(self, *_, **__): ...

        @property
        def state(self):
            nonlocal looks
            looks += 1
            return RequestState.ESTABLISHED

    publisher = CountingPublisher()
    for _ in range(4096):
        publisher.fetch_received(Open())
    assert looks < 2 * 4096 and publisher.active == 4096
