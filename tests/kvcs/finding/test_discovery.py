"""Finding publications: by one standing listing, prefix by prefix, or by an index alone."""

from __future__ import annotations

import asyncio

import pytest

from kvcs.finding.listing import Directory
from kvcs.finding.relays import Fallback
from kvcs.names.errors import MisuseError, NotAuthorized, NotFound, RetrievalError, RetrievalTimeout
from kvcs.names.namespace import PublicationNamespace, compat_prefix
from moqt.publisher import Publisher
from moqt.values.codes import RequestErrorCode
from moqt.values.config import SessionConfig
from tests.kvcs.support import (
    BLOCK,
    BLOCKS,
    DESCRIPTOR,
    SCOPE,
    TOKENS,
    Link,
    collect,
    kv,
    produced,
)
from tests.kvcs.support_fallback import FakeClient
from tests.moqt.inside import kept

CACHE = kv()
THREE = compat_prefix(SCOPE.scope_id, DESCRIPTOR.compat_id)


class Telling(Publisher):
    """Knows which prefixes it was asked for; refuses those of three fields with `refuse`."""

    def __init__(self, *publications, refuse: RequestErrorCode | None = None) -> None:
        super().__init__()
        self.prefixes: list = []
        self.refuse = refuse
        for publication in publications:
            self.put(publication)

    def put(self, publication) -> None:
        for store in publication.tracks:
            self.add_track(store)

    def take(self, publication) -> None:
        for store in publication.tracks:
            self.remove_track(store.name)

    def subscribe_namespace_received(self, request) -> None:
        self.prefixes.append(request.prefix)
        if self.refuse is not None and len(request.prefix) == 3:
            request.reject(self.refuse, "not here")
        else:
            super().subscribe_namespace_received(request)


def of(blocks: int):
    """A publication of the first blocks of our tokens."""
    return produced(tokens=TOKENS[: blocks * BLOCK], cache=CACHE)


async def test_one_listing_finds_the_longest_prefix_and_shows_nothing_of_the_prompt() -> None:
    served = Telling(of(1), of(3), of(2))
    async with Link(served) as link:
        consumer = link.consumer(tokens=[*TOKENS[: 4 * BLOCK], *range(3000 * BLOCK)])
        await collect(consumer)
        assert consumer.stats.blocks == 3
        assert served.prefixes == [THREE]
        await link.assert_clean()


@pytest.mark.parametrize("code", [RequestErrorCode.DOES_NOT_EXIST, RequestErrorCode.NOT_SUPPORTED])
async def test_where_a_listing_is_refused_prefixes_are_asked_for_one_by_one(code) -> None:
    served = Telling(of(2), refuse=code)
    async with Link(served) as link:
        consumer = link.consumer()
        await collect(consumer)
        assert consumer.stats.blocks == 2
        assert [len(prefix) for prefix in served.prefixes] == [3, *[4] * BLOCKS]
        await link.assert_clean()


async def test_where_a_listing_is_too_long_for_us_prefixes_are_asked_for_one_by_one() -> None:
    served = Telling(*(of(1) for _ in range(9)), of(2))
    async with Link(served, client_config=SessionConfig(max_namespaces_told=9)) as link:
        consumer = link.consumer()
        await collect(consumer)
        assert consumer.stats.blocks == 2
        await link.assert_clean()


async def test_a_listing_that_is_not_authorized_is_an_error_of_its_own() -> None:
    async with Link(Telling(of(2), refuse=RequestErrorCode.UNAUTHORIZED)) as link:
        with pytest.raises(NotAuthorized):
            await collect(link.consumer())
        with pytest.raises(NotAuthorized):
            async with Directory(link.session, SCOPE, DESCRIPTOR):
                pass
        await link.assert_clean()


async def test_probing_asks_for_no_listing() -> None:
    served = Telling(of(4))
    async with Link(served) as link:
        consumer = link.consumer(discovery="probe")
        await collect(consumer)
        assert consumer.stats.blocks == 4
        assert {len(prefix) for prefix in served.prefixes} == {4}
        await link.assert_clean()


async def test_with_an_index_alone_the_relay_is_asked_for_no_namespace() -> None:
    served, publication = Telling(of(4)), of(2)
    served.put(publication)
    relay = "moqt://relay.example:4443"
    client = FakeClient(blocks=0).knows(publication, CACHE, relay)
    async with Link(served) as link:
        fallback = Fallback(client, relay=relay)
        consumer = link.consumer(discovery="index", fallback=fallback)
        await collect(consumer)
        assert consumer.stats.publication == publication.namespace.publication_id.hex()
        nothing = Fallback(FakeClient(blocks=0), relay=relay)
        with pytest.raises(NotFound):
            await collect(link.consumer(discovery="index", fallback=nothing))
        assert served.prefixes == []
        with pytest.raises(ValueError, match="index"):
            link.consumer(discovery="index")


async def test_what_the_index_knows_at_once_does_not_wait_for_a_relay_that_lists_nothing() -> None:
    publication = of(BLOCKS)
    relay = "moqt://relay.example:4443"

    class Silent(Telling):
        def subscribe_namespace_received(self, request) -> None: ...

    client = FakeClient(blocks=0).knows(publication, CACHE, relay)
    async with Link(Silent(publication)) as link:
        consumer = link.consumer(fallback=Fallback(client, relay=relay, after=60), timeout=5)
        await collect(consumer)
        assert consumer.stats.blocks == BLOCKS


async def test_a_directory_knows_what_comes_and_goes_without_a_packet() -> None:
    served, first = Telling(of(2)), of(4)
    async with Link(served) as link:
        async with Directory(link.session, SCOPE, DESCRIPTOR, grace=0.02) as directory:
            assert [blocks for blocks, _ in directory.find(TOKENS)] == [2]
            served.put(first)
            await link.settle()
            assert directory.find(TOKENS)[0] == (4, first.namespace)
            assert directory.find(TOKENS[: 3 * BLOCK])[0][0] == 2
            assert directory.find(range(9 * BLOCK)) == []
            assert directory.publications == 2
            assert served.prefixes == [THREE]
            served.take(first)
            await link.settle()
            assert [blocks for blocks, _ in directory.find(TOKENS)] == [2]
        with pytest.raises(MisuseError):
            directory.find(TOKENS)
        await link.assert_clean()


async def test_consumers_beside_a_directory_ask_for_no_namespace_and_wait_for_none() -> None:
    served = Telling(of(4))
    async with (
        Link(served) as link,
        Directory(link.session, SCOPE, DESCRIPTOR, grace=0.02),
    ):
        for tokens, blocks in ((TOKENS, 4), (TOKENS[: 4 * BLOCK], 4)):
            # with a grace that would not end: nothing is waited for
            consumer = link.consumer(tokens=tokens, grace=60, timeout=5)
            await collect(consumer)
            assert consumer.stats.blocks == blocks
        with pytest.raises(NotFound):
            await collect(link.consumer(tokens=range(4 * BLOCK), grace=60, timeout=5))
        assert served.prefixes == [THREE]


async def test_consumers_of_one_session_share_a_listing_and_the_last_one_ends_it() -> None:
    served = Telling(of(4))
    async with Link(served) as link:
        await asyncio.gather(*(collect(link.consumer()) for _ in range(3)))
        assert served.prefixes == [THREE]
        await collect(link.consumer())
        assert served.prefixes == [THREE, THREE]
        await link.assert_clean()


async def test_a_directory_says_why_it_knows_nothing_more() -> None:
    served = Telling(of(4))
    async with (
        Link(served) as link,
        Directory(link.session, SCOPE, DESCRIPTOR, grace=0.02) as directory,
    ):
        link.session.close()
        with pytest.raises(RetrievalError):
            directory.find(TOKENS)

    class Silent(Telling):
        def subscribe_namespace_received(self, request) -> None: ...

    async with Link(Silent()) as link:
        with pytest.raises(RetrievalTimeout, match="listed nothing"):
            async with Directory(link.session, SCOPE, DESCRIPTOR, timeout=0.1):
                pass
        await link.assert_clean()


async def test_names_under_the_prefix_that_are_no_publications_are_passed_over() -> None:
    class Odd(Telling):
        def subscribe_namespace_received(self, request) -> None:
            super().subscribe_namespace_received(request)
            request.add((*THREE, b"x"))
            request.add((*THREE, b"y" * 32, b"z"))
            request.remove((*THREE, b"x"))

    async with Link(Odd(of(2))) as link:
        consumer = link.consumer()
        await collect(consumer)
        assert consumer.stats.blocks == 2


async def test_a_listing_that_never_pauses_is_not_waited_for_without_end() -> None:
    namespaces = iter(
        PublicationNamespace.create(SCOPE.scope_id, DESCRIPTOR.compat_id, n.to_bytes(32))
        for n in range(1 << 20)
    )
    served = Telling(of(2))
    async with Link(served) as link:

        def more(_) -> None:
            for listing in tuple(kept(served).listings):
                listing.add(next(namespaces).fields)

        link.on_pump = more
        consumer = link.consumer(grace=0.02, timeout=10)
        await collect(consumer)
        assert consumer.stats.blocks == 2
