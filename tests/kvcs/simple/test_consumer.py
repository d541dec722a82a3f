"""Consumers of the second profile, joined in memory to a publisher."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvcs.names.errors import (
    NotAuthorized,
    NotFound,
    PublisherLost,
    RetrievalTimeout,
    VerificationFailed,
)
from kvcs.simple.consumer import PromptConsumer
from kvcs.simple.elements import decode_tokens, encode_tokens
from kvcs.simple.names import Compression
from kvcs.simple.publication import PromptPublication
from moqt.publisher import Publisher
from moqt.values.codes import RequestErrorCode
from tests.kvcs.simple.support import layers_of, of_type, random_values
from tests.kvcs.support import Link, publisher, serving, until

PROMPT = b"You are kind. Hello"
DESCRIPTOR = of_type("fp16")
CHUNK = 4
CACHE = random_values(DESCRIPTOR, 10)


def published(prompt: bytes = PROMPT, cache=CACHE, **settings) -> PromptPublication:
    settings.setdefault("chunk_tokens", CHUNK)
    publication = PromptPublication(DESCRIPTOR, prompt, list(Compression), **settings)
    publication.put_tokens(layers_of(cache))
    publication.finish()
    return publication


def consumer(link: Link, compression=Compression.FP16, prompt=PROMPT, **settings) -> PromptConsumer:
    settings.setdefault("timeout", 10)
    settings.setdefault("chunk_tokens", CHUNK)
    return PromptConsumer(link.session, DESCRIPTOR, prompt, compression, **settings)


async def retrieved(made: PromptConsumer):
    """The cache as `put_tokens` was given it, [tokens, layers, 2, heads, dim]."""
    async with made:
        chunks = [chunk async for chunk in made.chunks()]
    assert [chunk.first_token for chunk in chunks] == list(range(0, made.tokens, CHUNK))
    k, v = (
        np.concatenate([getattr(chunk, half) for chunk in chunks], axis=1) for half in ("k", "v")
    )
    return np.stack((k, v), axis=2).swapaxes(0, 1)


class NoSubscribe(Publisher):
    """Answers FETCH alone, as a relay that has lost the publisher."""

    def subscribe_received(self, request) -> None:
        request.reject(RequestErrorCode.DOES_NOT_EXIST, "gone")


class Denying(Publisher):
    def subscribe_namespace_received(self, request) -> None:
        request.reject(RequestErrorCode.UNAUTHORIZED, "no")


class EndingListings(Publisher):
    """Ends every listing at once, with nothing in it."""

    def subscribe_namespace_received(self, request) -> None:
        request.accept()
        request.stream.finish()


class DenyingTracks(Publisher):
    def subscribe_received(self, request) -> None:
        request.reject(RequestErrorCode.UNAUTHORIZED, "no")


@pytest.mark.parametrize("handler", [Publisher, NoSubscribe])
@pytest.mark.parametrize("compression", list(Compression))
async def test_a_complete_cache_is_retrieved(handler, compression) -> None:
    async with Link(serving(handler(), published())) as link:
        made = consumer(link, compression)
        came = await retrieved(made)
        due = decode_tokens(compression, encode_tokens(compression, CACHE, DESCRIPTOR), DESCRIPTOR)
        assert came.tobytes() == due.tobytes() and made.tokens == len(CACHE)
        assert compression is not Compression.FP16 or came.tobytes() == CACHE.tobytes()
        await link.assert_clean()


@pytest.mark.parametrize("tokens", [1, CHUNK, 2 * CHUNK])
@pytest.mark.parametrize("handler", [Publisher, NoSubscribe])
async def test_the_last_chunk_may_be_full_and_the_only_one(handler, tokens) -> None:
    async with Link(serving(handler(), published(cache=CACHE[:tokens]))) as link:
        assert (await retrieved(consumer(link))).tobytes() == CACHE[:tokens].tobytes()


async def test_who_joins_in_the_middle_gets_all_of_it_and_each_chunk_as_it_is_produced() -> None:
    publication = PromptPublication(DESCRIPTOR, PROMPT, chunk_tokens=CHUNK)
    publication.put_tokens(layers_of(CACHE[:6]))
    async with Link(publisher(publication)) as link:
        made = consumer(link)
        chunks = made.chunks()
        first = await anext(chunks)
        assert first.first_token == 0 and first.tokens == CHUNK and not publication.complete
        publication.put_tokens(layers_of(CACHE[6:]))
        publication.finish()
        rest = [chunk async for chunk in chunks]
        assert [chunk.first_token for chunk in rest] == [4, 8]
        k = np.concatenate([chunk.k for chunk in (first, *rest)], axis=1)
        assert k.tobytes() == CACHE[:, :, 0].swapaxes(0, 1).tobytes()
        await link.assert_clean()


async def test_the_longest_prompt_that_ours_begins_with_is_taken() -> None:
    shorter = published(b"You", CACHE[:2])
    longer = published(b"You are kind. ", CACHE[:7])
    others = published(b"You are kind. Hello, world"), published(b"Go")
    async with Link(publisher(shorter, *others, longer)) as link:
        made = consumer(link)
        assert (await retrieved(made)).tobytes() == CACHE[:7].tobytes()
        assert made.found == longer.namespace.fields


async def test_one_that_brings_nothing_gives_way_to_a_shorter_prompt() -> None:
    dead = PromptPublication(DESCRIPTOR, PROMPT, chunk_tokens=CHUNK)
    dead.abandon()
    other = PromptPublication(DESCRIPTOR, b"You are", [Compression.INT4], chunk_tokens=CHUNK)
    wider = of_type("fp16", head_dim=6)
    wrong = PromptPublication(wider, b"You are kind.", chunk_tokens=CHUNK)
    wrong.put_tokens(layers_of(random_values(wider, 10)))
    wrong.finish()
    good = published(b"You")
    async with Link(publisher(dead, other, wrong, good)) as link:
        made = consumer(link)
        assert (await retrieved(made)).tobytes() == CACHE.tobytes()
        assert made.found == good.namespace.fields
        await link.assert_clean()


async def test_a_publisher_that_stops_in_the_middle_is_lost() -> None:
    publication = PromptPublication(DESCRIPTOR, PROMPT, chunk_tokens=CHUNK)
    publication.put_tokens(layers_of(CACHE[:6]))
    async with Link(publisher(publication)) as link:
        chunks = consumer(link).chunks()
        assert (await anext(chunks)).tokens == CHUNK
        publication.abandon()
        with pytest.raises(PublisherLost, match="no more than 6 tokens"):
            await anext(chunks)
        await link.assert_clean()


async def test_one_that_goes_on_producing_nothing_ends_with_the_time_allowed() -> None:
    publication = PromptPublication(DESCRIPTOR, PROMPT, chunk_tokens=CHUNK)
    publication.put_tokens(layers_of(CACHE[:6]))
    async with Link(publisher(publication)) as link:
        with pytest.raises(RetrievalTimeout, match=r"4 tokens came within 0\.3 s"):
            await retrieved(consumer(link, timeout=0.3))
        await link.assert_clean()


async def test_nothing_published_is_not_found() -> None:
    for publications in ((), (published(b"Go"),)):
        async with Link(publisher(*publications)) as link:
            with pytest.raises(NotFound, match="nothing is published as FP16"):
                await retrieved(consumer(link))
            await link.assert_clean()


async def test_nothing_is_found_in_a_listing_that_the_peer_ends() -> None:
    async with Link(EndingListings()) as link:
        with pytest.raises(NotFound, match="nothing is published as FP16"):
            await retrieved(consumer(link))


@pytest.mark.parametrize("handler", [Denying, DenyingTracks])
async def test_a_refusal_for_lack_of_rights_says_so(handler) -> None:
    async with Link(serving(handler(), published())) as link:
        with pytest.raises(NotAuthorized):
            await retrieved(consumer(link))


async def test_another_geometry_is_refused_by_the_length_which_is_all_there_is_to_check() -> None:
    other = of_type("fp16", layers=3)
    publication = PromptPublication(other, PROMPT, chunk_tokens=CHUNK)
    publication.put_tokens(layers_of(random_values(other, 3)))
    publication.finish()
    async with Link(publisher(publication)) as link:
        for compression in (Compression.FP16,):
            with pytest.raises(VerificationFailed, match="octets"):
                await retrieved(consumer(link, compression))
        await link.assert_clean()


async def test_more_tokens_than_are_allowed_are_refused() -> None:
    async with Link(publisher(published())) as link:
        with pytest.raises(VerificationFailed, match="more than 9 tokens"):
            await retrieved(consumer(link, max_tokens=9))


async def test_a_cancelled_retrieval_leaves_no_request_behind() -> None:
    publication = PromptPublication(DESCRIPTOR, PROMPT, chunk_tokens=CHUNK)
    publication.put_tokens(layers_of(CACHE[:6]))
    async with Link(publisher(publication)) as link:
        made = consumer(link)
        task = asyncio.ensure_future(retrieved(made))
        await until(lambda: made.tokens)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await link.assert_clean()
