"""An instance takes blocks from publications, as prefetch directives name them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from importlib.metadata import entry_points

import pytest

from kvcs.names.namespace import publication_uri
from kvcs.retrieving.block_fetcher import MoqtFetcher, fetcher
from kvcs.trust.producers import ProducerKey, Producers
from kvsp.instance.engines.engine import KvBlock
from kvsp.instance.loading.fetchers import LoadError
from kvsp.names.content_keys import ContentKey
from kvsp.names.identity import Scope
from kvsp.names.uris import BlockId
from moqt.publisher import Publisher
from moqt.values.errors import ConnectError
from tests.kvcs.support import (
    BLOCK,
    BLOCKS,
    DESCRIPTOR,
    SCOPE,
    Link,
    altered,
    corrupted,
    produced,
    publisher,
    until,
)
from tests.kvcs.support_fallback import CACHE, OTHER_RELAY, FakeClient
from tests.kvcs.support_segments import grown

URL = OTHER_RELAY


class Index(FakeClient):
    index = "https://is.example/kvsp/"

    async def replicas(self, block):
        return [r for replicas in self.held for r in replicas if r.block == block]


def block_of(client, number) -> BlockId:
    return client.held[number][0].block


async def load(client, link, publication, block, **settings) -> KvBlock:
    async def connecting(url):
        assert url == URL
        return link.session

    made = KvBlock(DESCRIPTOR)
    way = MoqtFetcher(client, connecting, **settings)
    source = publication_uri(URL, publication.namespace)
    assert way.takes(source)
    await way.fetch(source, block, DESCRIPTOR, 1000, made.write)
    return made


@pytest.mark.parametrize("number", [0, 2, BLOCKS - 1])
@pytest.mark.parametrize("sizes", [(BLOCKS,), (2, 1, 2)])
async def test_any_block_of_a_publication_is_told_from_its_record(number, sizes):
    publication = grown(sizes, CACHE)
    client = Index(blocks=0).knows(publication, CACHE, URL)
    async with Link(publisher(publication)) as link:
        made = await load(client, link, publication, block_of(client, number))
    rows = slice(number * BLOCK, (number + 1) * BLOCK)
    assert made.complete
    for got, wanted in zip(made.arrays, CACHE, strict=True):
        assert got[0].tobytes() == wanted[0][rows].tobytes()
        assert got[1].tobytes() == wanted[1][rows].tobytes()


async def test_a_publication_is_retrieved_once_for_all_its_blocks():
    publication = produced(cache=CACHE)
    client = Index(blocks=0).knows(publication, CACHE, URL)
    connected = []
    async with Link(publisher(publication)) as link:

        async def connecting(url):
            connected.append(url)
            return link.session

        way = MoqtFetcher(client, connecting)
        source = publication_uri(URL, publication.namespace)
        for number in range(BLOCKS):
            made = KvBlock(DESCRIPTOR)
            await way.fetch(source, block_of(client, number), DESCRIPTOR, 1000, made.write)
            assert made.complete
    assert connected == [URL]
    assert way.octets == sum(k.nbytes + v.nbytes for k, v in CACHE)


async def test_who_gives_up_takes_nothing_from_the_others_who_wait_for_the_same_publication():
    publication = produced(cache=CACHE)
    client = Index(blocks=0).knows(publication, CACHE, URL)
    connected, may_go_on = [], asyncio.Event()
    async with Link(publisher(publication)) as link:

        async def connecting(url):
            connected.append(url)
            await may_go_on.wait()
            return link.session

        way = MoqtFetcher(client, connecting)
        source = publication_uri(URL, publication.namespace)
        made = [KvBlock(DESCRIPTOR) for _ in range(3)]
        first, *others = (
            asyncio.create_task(
                way.fetch(source, block_of(client, number), DESCRIPTOR, 1000, each.write)
            )
            for number, each in enumerate(made)
        )
        await until(lambda: connected)
        first.cancel()
        await asyncio.wait([first])
        may_go_on.set()
        await asyncio.gather(*others)
    assert first.cancelled() and connected == [URL]
    assert [each.complete for each in made] == [False, True, True]


async def test_what_nobody_waits_for_any_more_is_not_retrieved():
    publication = produced(cache=CACHE)
    client = Index(blocks=0).knows(publication, CACHE, URL)
    connected, ended = [], []

    async def connecting(url):
        connected.append(url)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(url)

    way = MoqtFetcher(client, connecting)
    source = publication_uri(URL, publication.namespace)
    write = KvBlock(DESCRIPTOR).write
    task = asyncio.create_task(way.fetch(source, block_of(client, 0), DESCRIPTOR, 1000, write))
    await until(lambda: connected)
    task.cancel()
    await until(lambda: ended)


async def test_a_relay_that_hangs_keeps_nobody_from_the_same_publication_at_another():
    publication = produced(cache=CACHE)
    client = Index(blocks=0).knows(publication, CACHE, URL)
    silent = "moqt://silent.example"
    connected = []
    async with Link(publisher(publication)) as link:

        async def connecting(url):
            connected.append(url)
            if url == silent:
                await asyncio.Event().wait()
            return link.session

        way = MoqtFetcher(client, connecting)
        made = KvBlock(DESCRIPTOR)
        block = block_of(client, 0)
        hung = publication_uri(silent, publication.namespace)
        waiting = asyncio.create_task(way.fetch(hung, block, DESCRIPTOR, 1000, made.write))
        await until(lambda: connected)
        source = publication_uri(URL, publication.namespace)
        await way.fetch(source, block, DESCRIPTOR, 1000, made.write)
        assert made.complete
        waiting.cancel()


async def reason(client, link, publication, block, **settings) -> str:
    with pytest.raises(LoadError) as raised:
        await load(client, link, publication, block, **settings)
    return raised.value.reason


async def test_what_cannot_be_had_has_the_reason_that_a_directive_tells():
    publication = produced(cache=CACHE)
    client = Index(blocks=0).knows(publication, CACHE, URL)
    block = block_of(client, 0)
    async with Link(publisher(publication)) as link:
        other = BlockId(block.compat_id, SCOPE.scope_id, bytes(32))
        assert await reason(client, link, publication, other) == "kvsp-unknown-resource"
        foreign = BlockId(block.compat_id, bytes(16), block.block_key)
        assert await reason(client, link, publication, foreign) == "kvsp-unknown-resource"
        assert await reason(client, link, publication, block, kept_octets=10) == "capacity"
    async with Link(Publisher()) as link:
        assert await reason(client, link, publication, block, timeout=0.1) == "unreachable"


async def test_octets_that_are_not_those_of_the_record_are_a_digest_mismatch():
    publication = produced(cache=CACHE)
    client = Index(blocks=0).knows(publication, CACHE, URL)
    served = publisher(publication)
    served.add_track(altered(publication.tracks[1], corrupted((1, 0))))
    async with Link(served) as link:
        block = block_of(client, 0)
        assert await reason(client, link, publication, block) == "digest-mismatch"
    wrong = Index(blocks=0).knows(publication, CACHE[::-1], URL)
    async with Link(publisher(publication)) as link:
        assert await reason(wrong, link, publication, block) == "digest-mismatch"


async def test_no_block_is_had_for_two_keys_nor_another_than_the_last_for_the_anchor_key():
    """Whatever the records of an index service say."""
    publication = produced(cache=CACHE)
    client = Index(blocks=0).knows(publication, CACHE, URL)
    keys = [block_of(client, number) for number in range(BLOCKS)]
    lies = [replica[0] for replica in client.held]
    for number, of in ((1, 0), (BLOCKS - 1, 2), (3, BLOCKS - 1)):
        wrong = replace(lies[of], block_key=lies[number].block_key)
        client.held[number] = [wrong]
    async with Link(publisher(publication)) as link:

        async def connecting(url):
            return link.session

        way = MoqtFetcher(client, connecting)
        source = publication_uri(URL, publication.namespace)
        had = []
        for number in range(BLOCKS):
            try:
                await way.fetch(source, keys[number], DESCRIPTOR, 1000, KvBlock(DESCRIPTOR).write)
                had.append(number)
            except LoadError as error:
                assert error.reason == "digest-mismatch" and "another one" in str(error)
    assert had == [0, 2]


@pytest.mark.parametrize("signed", [False, True])
async def test_what_is_sealed_or_must_be_signed_is_taken_on_the_terms_of_its_scope(signed):
    scope = Scope(bytes(range(32)), (ContentKey.generate(),))
    key = ProducerKey.generate()
    accepted = Producers([key.public]) if signed else None
    publication = produced(cache=CACHE, scope=scope, signer=key if signed else None)
    client = Index(blocks=0).knows(publication, CACHE, URL)
    block = block_of(client, 1)
    async with Link(publisher(publication)) as link:
        made = await load(client, link, publication, block, scopes=[scope], producers=accepted)
    assert made.arrays[0][0].tobytes() == CACHE[0][0][BLOCK : 2 * BLOCK].tobytes()

    async def refused(published=publication, **terms) -> str:
        index = Index(blocks=0).knows(published, CACHE, URL)
        async with Link(publisher(published)) as link:
            return await reason(index, link, published, block, **terms)

    assert await refused() == "kvsp-forbidden", "without the content key"
    other = Scope(bytes(range(32)), (ContentKey.generate(),))
    assert await refused(scopes=[other]) == "digest-mismatch"
    nobody = Producers([ProducerKey.generate().public])
    assert await refused(scopes=[scope], producers=nobody) == "digest-mismatch"
    assert await refused(produced(cache=CACHE), scopes=[scope]) == "digest-mismatch"


async def test_a_relay_that_does_not_answer_is_unreachable():
    async def connecting(url):
        raise ConnectError("nobody")

    publication = produced(cache=CACHE)
    client = Index(blocks=0).knows(publication, CACHE, URL)
    way = MoqtFetcher(client, connecting)
    with pytest.raises(LoadError, match="nobody") as raised:
        await way.fetch(
            publication_uri(URL, publication.namespace),
            block_of(client, 0),
            DESCRIPTOR,
            1000,
            KvBlock(DESCRIPTOR).write,
        )
    assert raised.value.reason == "unreachable"


def test_the_server_finds_it_by_its_entry_point():
    (entry,) = entry_points(group="kvsp.fetchers")
    assert entry.load() is fetcher
    assert fetcher(Index(), None).takes("moqt://relay.example/#kvcs:x")
