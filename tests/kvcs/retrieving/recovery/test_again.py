"""Recovery begins with trying again at the same relay, and asks for nothing twice."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvcs.finding.relays import Fallback
from kvcs.names.errors import PublisherLost
from kvcs.publishing.publication import Publication
from kvcs.retrieving.consumer import Consumer
from kvcs.trust.producers import ProducerKey
from moqt.publisher import Publisher
from moqt.values.errors import ConnectError
from tests.kvcs.support import (
    BLOCK,
    BLOCKS,
    DESCRIPTOR,
    LAYERS,
    SCOPE,
    TOKENS,
    Link,
    altered,
    block_by_block,
    kv,
    produced,
    publisher,
    serve_first_layers,
)
from tests.kvcs.support_fallback import OTHER_RELAY, check
from tests.kvcs.support_segments import put_segment, whole

RELAY = "moqt://relay.example"
CACHE = kv()
OBJECTS = 2 * LAYERS * BLOCKS


class Relay:
    """One that is lost again and again: each session is with the next of `handlers`, or is refused
    where there is None."""

    def __init__(self, stack, *handlers) -> None:
        self.stack = stack
        self.handlers = list(handlers)
        self.links: list[Link] = []
        self.dialled: list[str] = []

    async def connect(self, url):
        self.dialled.append(url)
        handler = self.handlers.pop(0) if self.handlers else None
        if handler is None:
            raise ConnectError("nobody is there")
        link = await self.stack.enter_async_context(Link(handler))
        self.links.append(link)
        return link.session

    def lose(self) -> None:
        self.links[-1].pair.server.close(reason="dying")

    def consumer(self, *, again_within=5.0, relays=(), **settings):
        fallback = Fallback(
            relay=RELAY, connect=self.connect, relays=relays, again_within=again_within
        )
        settings.setdefault("timeout", 20)
        return Consumer(None, SCOPE, DESCRIPTOR, TOKENS, fallback=fallback, grace=0.02, **settings)


async def retrieved(relay, consumer, lose_after, then=lambda: None):
    """The layers of a retrieval whose session is lost after so many of them, each time."""
    layers, due = [], list(lose_after)
    async with consumer:
        async for layer in consumer.layers():
            layers.append(layer)
            if due and len(layers) == due[0]:
                due.pop(0)
                await relay.links[-1].settle()
                relay.lose()
                then()
    return layers


@pytest.mark.parametrize("refused", [0, 2])
@pytest.mark.parametrize("signed", [False, True])
async def test_what_a_lost_session_has_brought_is_not_asked_for_again(signed, refused):
    settings = {"signer": ProducerKey.generate()} if signed else {}
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS, **settings)
    steps = block_by_block(publication, CACHE)
    for _ in range(3 * BLOCKS + 2):
        next(steps)
    async with contextlib.AsyncExitStack() as stack:
        served = [publisher(publication), *[None] * refused, publisher(publication)]
        relay = Relay(stack, *served)
        consumer = relay.consumer()
        check(await retrieved(relay, consumer, [3], lambda: list(steps)))
    stats = consumer.stats
    assert stats.objects_verified == stats.objects_confirmed == OBJECTS
    assert not stats.duplicates and not stats.discarded
    assert relay.dialled == [RELAY] * len(served)


async def test_a_complete_publication_goes_on_in_the_middle_of_a_layer():
    publication = produced(cache=CACHE)
    first = publisher(publication)
    for store in publication.tracks[1:]:
        first.add_track(altered(store, lambda at, data: data if at < (1, 2) else None))
    async with contextlib.AsyncExitStack() as stack:
        relay = Relay(stack, first, publisher(publication))
        consumer = relay.consumer(mode="live")
        check(await retrieved(relay, consumer, [1]))
    assert consumer.stats.objects_verified == OBJECTS
    assert not consumer.stats.duplicates and not consumer.stats.discarded


async def test_the_publisher_is_waited_for_that_comes_back_after_the_relay():
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    steps = block_by_block(publication, CACHE)
    for _ in range(2 * BLOCKS):
        next(steps)
    back = Publisher()
    async with contextlib.AsyncExitStack() as stack:
        relay = Relay(stack, publisher(publication), back)
        consumer = relay.consumer()

        def later() -> None:
            loop = asyncio.get_running_loop()
            loop.call_later(0.6, publication.serve, back)
            list(steps)

        check(await retrieved(relay, consumer, [2], later))
    assert relay.dialled == [RELAY] * 2, "a session that is there is used again"
    assert consumer.stats.objects_verified == OBJECTS and not consumer.stats.duplicates


async def test_a_follower_goes_on_with_the_segments_that_it_has_not():
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS[: 2 * BLOCK], growing=True)
    put_segment(publication, CACHE)
    async with contextlib.AsyncExitStack() as stack:
        relay = Relay(stack, publisher(publication), publisher(publication))
        for handler in relay.handlers:
            publication.serve(handler)

        def grow() -> None:
            publication.extend(TOKENS[2 * BLOCK :])
            put_segment(publication, CACHE)
            publication.finish()

        consumer = relay.consumer(follow=True)
        layers = await retrieved(relay, consumer, [LAYERS], grow)
    assert whole(layers, CACHE, BLOCKS) == 2
    assert consumer.stats.objects_verified == OBJECTS and not consumer.stats.duplicates


async def test_each_session_that_brings_something_begins_the_time_anew_and_no_other():
    publication = produced(cache=CACHE)

    def first(layers: int) -> Publisher:
        handler = publisher(publication)
        serve_first_layers(handler, publication, layers)
        return handler

    async with contextlib.AsyncExitStack() as stack:
        relay = Relay(stack, first(2), first(4), publisher(publication))
        check(await retrieved(relay, relay.consumer(mode="live"), [2, 4]))
    async with contextlib.AsyncExitStack() as stack:
        relay = Relay(stack, first(2))
        with pytest.raises(PublisherLost, match="the relay was lost"):
            await retrieved(relay, relay.consumer(mode="live", again_within=0.5), [2])
        assert 2 <= len(relay.dialled) <= 5


async def test_who_has_another_relay_tries_once():
    publication = produced(cache=CACHE)
    first = publisher(publication)
    serve_first_layers(first, publication, 2)
    async with contextlib.AsyncExitStack() as stack:
        relay = Relay(stack, first, None, publisher(publication))
        consumer = relay.consumer(relays=[OTHER_RELAY], mode="live", patience=0.5)
        layers = await retrieved(relay, consumer, [2])
    assert relay.dialled == [RELAY, RELAY, OTHER_RELAY]
    check(layers[2:])


async def test_without_time_for_it_nothing_is_tried_again():
    publication = produced(cache=CACHE)
    first = publisher(publication)
    serve_first_layers(first, publication, 2)
    async with contextlib.AsyncExitStack() as stack:
        relay = Relay(stack, first, publisher(publication))
        with pytest.raises(PublisherLost, match="the relay was lost"):
            await retrieved(relay, relay.consumer(mode="live", again_within=0), [2])
        assert relay.dialled == [RELAY]
