"""What a relay tells of publications: by its listing, or prefix by prefix."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvcs.client.links import RelayLink
from kvsp.names.identity import block_keys
from moqt.publisher import Publisher
from moqt.values.codes import RequestErrorCode, SessionErrorCode
from moqt.values.errors import ConnectError
from tests.kvcs.support import (
    BLOCK,
    BLOCKS,
    DESCRIPTOR,
    SCOPE,
    TOKENS,
    Link,
    produced,
    serving,
    until,
)

KEYS = block_keys(SCOPE, DESCRIPTOR, TOKENS)


class Refusing(Publisher):
    """A peer that lists no whole model, only a prompt at a time."""

    refuses = True
    code = RequestErrorCode.NOT_SUPPORTED

    def __init__(self) -> None:
        super().__init__()
        self.taken = []

    def subscribe_namespace_received(self, request) -> None:
        if self.refuses and len(request.prefix) == 3:
            request.reject(self.code, "not here")
        else:
            self.taken.append(request)
            super().subscribe_namespace_received(request)


@contextlib.asynccontextmanager
async def linked(handler):
    """A RelayLink whose first session is one in memory to `handler`."""
    async with Link(handler) as link:
        sessions = [link.session]

        async def opening(url, publisher):
            if not sessions:
                raise ConnectError("nobody is there")
            return sessions.pop()

        made = RelayLink(
            "moqt://here",
            opening,
            SCOPE,
            DESCRIPTOR,
            asked=lambda _: None,
            offered=lambda *_: None,
        )
        task = asyncio.create_task(made.stand())
        try:
            yield made, link
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def blocks_of(found):
    return [blocks for blocks, _ in found]


async def test_what_is_listed_is_known_without_asking_and_as_it_changes():
    short, whole = produced(tokens=TOKENS[: 2 * BLOCK]), produced()
    handler = serving(Publisher(), short)
    async with linked(handler) as (relay, _):
        await asyncio.wait_for(relay.ready.wait(), 10)
        assert not relay.refuses
        assert blocks_of(relay.known(KEYS)) == [2]
        serving(handler, whole)
        await until(lambda: blocks_of(relay.known(KEYS)) == [BLOCKS, 2])
        assert relay.known(KEYS)[0][1] == whole.namespace


async def test_a_relay_that_lists_nothing_is_asked_prefix_by_prefix():
    short, whole = produced(tokens=TOKENS[: 2 * BLOCK]), produced()
    async with linked(serving(Refusing(), short, whole)) as (relay, link):
        await asyncio.wait_for(relay.ready.wait(), 10)
        assert relay.refuses and relay.known(KEYS) == []
        assert blocks_of(await relay.probe(KEYS))[0] == BLOCKS
        assert blocks_of(await relay.probe(KEYS[:3])) == [2]
        assert await relay.probe(KEYS[:1]) == []
        await link.settle()
        assert not link.pair.server.remembered().prefixes


async def test_the_relay_itself_answers_what_no_publisher_has_to_answer():
    async with linked(Publisher()) as (relay, link):
        await asyncio.wait_for(relay.ready.wait(), 10)
        assert await relay.answers(5.0)
        link.step = lambda: None
        assert not await relay.answers(0.05)


async def test_without_a_session_nothing_is_known_and_nobody_is_asked():
    async with linked(serving(Publisher(), produced())) as (relay, link):
        await asyncio.wait_for(relay.ready.wait(), 10)
        assert relay.known(KEYS)
        link.pair.server.close(SessionErrorCode.NO_ERROR, "restarting")
        await until(lambda: not relay.ready.is_set())
        assert relay.known(KEYS) == []
        assert await relay.probe(KEYS) == []
        assert not await relay.answers(5.0)


async def test_without_rights_nothing_is_found_nobody_is_asked_and_rights_may_come(monkeypatch):
    monkeypatch.setattr("kvcs.client.links.RIGHTS_SECONDS", 0.1)
    handler = serving(Refusing(), produced())
    handler.code = RequestErrorCode.UNAUTHORIZED
    async with linked(handler) as (relay, _):
        await asyncio.wait_for(relay.ready.wait(), 10)
        assert relay.known(KEYS) == [] and not relay.refuses
        handler.refuses = False
        await until(lambda: relay.known(KEYS))
        assert not relay.refuses


@pytest.mark.parametrize("later", [False, True])
async def test_a_listing_that_ends_gives_way_to_asking_prefix_by_prefix(later):
    handler = serving(Refusing(), produced())
    handler.refuses = not later
    async with linked(handler) as (relay, _):
        await asyncio.wait_for(relay.ready.wait(), 10)
        if later:
            assert blocks_of(relay.known(KEYS)) == [BLOCKS]
            handler.taken.pop().revoke()
        await until(lambda: relay.refuses)
        assert blocks_of(await relay.probe(KEYS)) == [BLOCKS]
