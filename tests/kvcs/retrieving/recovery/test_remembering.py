"""A publication that failed is not waited for again by the process that saw it."""

from __future__ import annotations

import asyncio

import pytest

from kvcs.finding import candidates
from kvcs.finding.listing import Directory
from kvcs.finding.relays import Fallback
from kvcs.keeping.failures import Failures
from kvcs.publishing.publication import Publication
from kvcs.retrieving.consumer import Consumer
from moqt.publisher import Publisher
from tests.kvcs.support import (
    BLOCK,
    BLOCKS,
    DESCRIPTOR,
    SCOPE,
    TOKENS,
    Link,
    kv,
    produced,
    publisher,
    serving,
)


class Mute(Publisher):
    """It serves one publication, and does not answer for another that is announced."""

    def __init__(self, whole: Publication, mute: Publication) -> None:
        super().__init__()
        self.mute = mute.namespace.fields
        self.asked = 0
        self.held: list = []
        serving(self, whole, mute)

    def subscribe_received(self, request) -> None:
        if request.name.namespace == self.mute:
            self.asked += 1
            self.held.append(request)
        else:
            super().subscribe_received(request)


@pytest.mark.parametrize(("remember", "asked"), [(60.0, 1), (0.0, 3)])
async def test_with_a_directory_a_silent_publication_is_waited_for_once(remember, asked):
    shorter = produced(tokens=TOKENS[: 3 * BLOCK], cache=kv(tokens=3 * BLOCK))
    handler = Mute(shorter, Publication(SCOPE, DESCRIPTOR, TOKENS))
    async with Link(handler) as link:
        async with Directory(link.session, SCOPE, DESCRIPTOR, remember=remember) as directory:
            assert [blocks for blocks, _ in directory.find(TOKENS)] == [BLOCKS, 3]
            for _ in range(3):
                stats = await link.consumer(patience=0.1).retrieve()
                assert stats.blocks == 3
            assert handler.asked == asked
        # what a Directory has seen ends with it
        await link.consumer(patience=0.1).retrieve()
        assert handler.asked == asked + 1


async def test_one_that_is_remembered_is_tried_again_when_there_is_nothing_else():
    whole = produced()
    handler = Mute(whole, Publication(SCOPE, DESCRIPTOR, [7] * BLOCK))
    async with (
        Link(handler) as link,
        Directory(link.session, SCOPE, DESCRIPTOR) as directory,
    ):
        directory.failures.note((None, whole.namespace), 1e12)
        assert (await link.consumer().retrieve()).blocks == BLOCKS


async def test_a_relay_that_was_silent_lately_is_not_waited_for(monkeypatch):
    silent, other = "moqt://silent.example", "moqt://other.example"
    failures = Failures()

    async def retrieved() -> str | None:
        async with Link(publisher(produced())) as link:

            async def connect(relay):
                if relay == silent:
                    await asyncio.Event().wait()
                return link.session

            fallback = Fallback(relay=silent, relays=[other], connect=connect)
            consumer = Consumer(
                None, SCOPE, DESCRIPTOR, TOKENS, fallback=fallback, failures=failures, timeout=20
            )
            return (await consumer.retrieve()).source

    monkeypatch.setattr(candidates, "SLOW", 0.1)
    assert await retrieved() == other
    monkeypatch.setattr(candidates, "SLOW", 1e9)
    assert await retrieved() == other
