"""A timeout names what had not come."""

from __future__ import annotations

import asyncio

import pytest

from kvcs.finding.relays import Fallback
from kvcs.names.errors import RetrievalTimeout
from kvcs.publishing.publication import Publication
from kvcs.retrieving.consumer import Consumer
from kvcs.retrieving.recovery import awaited as module
from moqt.publisher import Publisher
from tests.kvcs.support import BLOCK, DESCRIPTOR, SCOPE, TOKENS, Link, kv, publisher
from tests.kvcs.support_fallback import FakeClient


class SilentIndex(FakeClient):
    """An index service that does not answer."""

    async def lookup(self, *_, **__):
        await asyncio.Event().wait()


class NoManifest(Publisher):
    """It is announced, and never answers."""

    def subscribe_received(self, request) -> None:
        self.request = request


async def never(relay: str):
    await asyncio.Event().wait()


async def said(consumer) -> str:
    with pytest.raises(RetrievalTimeout) as raised:
        await consumer.retrieve()
    assert raised.value.awaited in str(raised.value)
    return raised.value.awaited


@pytest.mark.parametrize("within", [0.01, 0.1])
async def test_a_silent_relay_is_named_however_short_the_timeout_was(within):
    relay = "moqt://r.example"
    fallback = Fallback(SilentIndex(kv()), relay=relay, connect=never)
    consumer = Consumer(None, SCOPE, DESCRIPTOR, TOKENS, timeout=within, fallback=fallback)
    text = await said(consumer)
    assert text == f"{relay} has not answered; the index service has not answered"


async def test_a_publisher_whose_manifest_does_not_come_is_named():
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    async with Link(NoManifest()) as link:
        consumer = link.consumer(publications=[publication.namespace], timeout=0.2)
        assert await said(consumer) == (
            "no manifest has come of 1 publication: its publisher is lost"
        )


@pytest.mark.parametrize(
    ("quiet", "words"), [(99.0, "was still coming"), (0.0, "its publisher or r is lost")]
)
async def test_a_publication_that_stands_still_is_named(monkeypatch, quiet, words):
    monkeypatch.setattr(module, "QUIET", quiet)
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    k, v = kv()[0]
    publication.put_block(0, 0, k[:BLOCK], v[:BLOCK])
    async with Link(publisher(publication)) as link:
        consumer = link.consumer(publications=[publication.namespace], timeout=0.3, source="r")
        text = await said(consumer)
        assert words in text and publication.namespace.publication_id.hex() in text
