"""Of several publications the best that can be had, whatever others are like."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcs.finding.candidates import OF_ONE_PREFIX
from kvcs.finding.relays import Fallback
from kvcs.names.errors import NotFound, PublisherLost, RetrievalError, VerificationFailed
from kvcs.publishing.publication import Publication
from moqt.publisher import Publisher
from moqt.values.codes import RequestErrorCode
from moqt.values.names import Location
from tests.kvcs.support import (
    BLOCK,
    BLOCKS,
    LAYERS,
    TOKENS,
    Link,
    altered,
    collect,
    kv,
    produced,
    publisher,
    until,
)
from tests.kvcs.support_fallback import CACHE, FakeClient, check
from tests.kvcs.support_segments import in_codec, segmented

SHORT = 2
RELAY = "moqt://relay.example:4443"


def of(blocks: int) -> Publication:
    return produced(tokens=TOKENS[: blocks * BLOCK], cache=CACHE)


def live(layers: int = 0, blocks: int = BLOCKS) -> Publication:
    """One that is still being produced."""
    return produced(tokens=TOKENS[: blocks * BLOCK], cache=CACHE[:layers])


class Scope(Publisher):
    """What the writers of a scope have published: by how each behaves."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: set = set()
        self.refusing: dict = {}

    def put(self, publication, how: str = "") -> None:
        for store in publication.tracks:
            self.add_track(store)
        namespace = publication.namespace.fields
        if how == "silent":
            self.silent.add(namespace)
        elif how:
            self.refusing[namespace] = RequestErrorCode[how]

    def _serve(self, request, serve) -> None:
        if request.name.namespace in self.silent:
            return
        refused = self.refusing.get(request.name.namespace)
        if refused is not None:
            request.reject(refused, "no")
        else:
            serve(request)

    def subscribe_received(self, request) -> None:
        self._serve(request, super().subscribe_received)

    def fetch_received(self, request) -> None:
        self._serve(request, super().fetch_received)


def dead(scope: Scope) -> None:
    scope.put(of(BLOCKS), "DOES_NOT_EXIST")


def unauthorized(scope: Scope) -> None:
    scope.put(of(BLOCKS), "UNAUTHORIZED")


def merely_announced(scope: Scope) -> None:
    scope.put(of(BLOCKS), "silent")


def announced_many_times(scope: Scope) -> None:
    for _ in range(9):
        scope.put(of(BLOCKS), "silent")


def abandoned(scope: Scope) -> None:
    publication = live(2)
    publication.abandon("out of memory")
    scope.put(publication)


def stalled(scope: Scope) -> None:
    scope.put(live(2))


def never_begun(scope: Scope) -> None:
    scope.put(live())


def corrupt(scope: Scope) -> None:
    publication = of(BLOCKS)
    scope.put(publication)
    scope.add_track(altered(publication.tracks[1], lambda at, octets: octets[:-1] + b"x"))


def without_objects(scope: Scope) -> None:
    publication = of(BLOCKS)
    scope.put(publication)
    scope.add_track(altered(publication.tracks[2], lambda at, octets: None))


def bad_manifest(scope: Scope) -> None:
    publication = of(BLOCKS)
    scope.put(publication)
    scope.add_track(altered(publication.tracks[0], lambda at, octets: b"{}"))


def unsupported(scope: Scope) -> None:
    scope.put(segmented((BLOCKS,), CACHE, change=in_codec("x-new", 0)))


WRONG = [
    dead,
    unauthorized,
    merely_announced,
    announced_many_times,
    abandoned,
    stalled,
    never_begun,
    corrupt,
    without_objects,
    bad_manifest,
    unsupported,
]


@pytest.mark.parametrize("discovery", ["listing", "probe"])
@pytest.mark.parametrize("wrong", WRONG)
async def test_a_longer_publication_that_is_of_no_use_hides_no_shorter_one(
    wrong, discovery
) -> None:
    scope = Scope()
    wrong(scope)
    scope.put(of(SHORT))
    async with Link(scope) as link:
        consumer = link.consumer(discovery=discovery, patience=0.1, timeout=10)
        check((await collect(consumer))[-LAYERS:], blocks=SHORT)
        assert consumer.stats.blocks == SHORT
        await link.assert_clean()


@pytest.mark.parametrize("wrong", WRONG)
async def test_nor_does_it_hide_a_whole_one_of_the_same_length(wrong) -> None:
    scope = Scope()
    wrong(scope)
    scope.put(of(BLOCKS))
    async with Link(scope) as link:
        consumer = link.consumer(patience=0.1, timeout=10)
        check((await collect(consumer))[-LAYERS:])
        await link.assert_clean()


async def test_a_whole_publication_comes_before_one_in_production_of_the_same_length() -> None:
    slow, whole = live(1), of(BLOCKS)
    async with Link(publisher(slow, whole)) as link:
        for _ in range(4):
            consumer = link.consumer(patience=60, timeout=10)
            check(await collect(consumer))
            assert consumer.stats.publication == whole.namespace.publication_id.hex()
            assert consumer.stats.mode == "fetch"


async def test_a_longer_one_in_production_comes_before_a_shorter_whole_one() -> None:
    slow, short = live(1), of(SHORT)
    async with Link(publisher(slow, short)) as link:
        layers = []
        async with link.consumer(patience=5) as consumer:
            async for layer in consumer.layers():
                layers.append(layer)
                if slow.next_object:
                    slow.put_layer(layer.index + 1, *CACHE[layer.index + 1])
        check(layers)


async def retrieved(consumer, slow, when) -> list:
    """The layers handed over; `slow` goes on after its first one `when` the stats say so."""

    async def go_on() -> None:
        await until(lambda: when(consumer.stats))
        for layer in range(1, LAYERS):
            slow.put_layer(layer, *CACHE[layer])

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(go_on())
        return [layer async for layer in consumer.layers()]


async def test_one_that_stalled_is_gone_back_to_when_all_others_have_failed() -> None:
    slow, bad = live(1), of(SHORT)
    served = publisher(slow, bad)
    served.add_track(altered(bad.tracks[0], lambda at, octets: b"{}"))
    async with Link(served) as link, link.consumer(patience=0.1, timeout=10) as consumer:
        layers = await retrieved(consumer, slow, lambda stats: "missing-member" in stats.discarded)
        check(layers[-LAYERS:])


@pytest.mark.parametrize("how", ["", "silent"])
async def test_one_that_stalled_is_gone_back_to_when_those_that_are_left_bring_nothing(how) -> None:
    slow, never = live(1), live(0, SHORT)
    scope = Scope()
    scope.put(slow)
    scope.put(never, how)
    async with Link(scope) as link, link.consumer(patience=0.1, timeout=10) as consumer:
        layers = await retrieved(consumer, slow, lambda stats: stats.publications_tried >= 2)
        check(layers[-LAYERS:])


async def test_one_whose_object_comes_drop_by_drop_hides_no_other() -> None:
    slow, short = live(1), of(SHORT)
    store = slow.tracks[1]
    first = store.get(Location(0, 0))
    async with Link(publisher(slow, short)) as link:
        growing = store.begin(
            Location(1, 0),
            subgroup=0,
            priority=first.priority,
            properties=b"",
            length=len(bytes(first.payload)),
        )

        async def drip() -> None:
            for _ in range(growing.length - 1):
                store.grow(growing, b"x")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        layers = await collect(link.consumer(patience=0.1, timeout=4))
        dripping.cancel()
        check(layers[-LAYERS:], blocks=SHORT)


@pytest.mark.parametrize("longer", [merely_announced, announced_many_times, stalled, never_begun])
async def test_a_longer_one_that_brings_nothing_does_not_hide_what_holders_have(longer) -> None:
    scope = Scope()
    longer(scope)
    holders = FakeClient(CACHE, blocks=SHORT)
    async with Link(scope) as link:
        consumer = link.consumer(
            patience=0.1, timeout=10, fallback=Fallback(holders, after=0.05, relay=RELAY)
        )
        check((await collect(consumer))[-LAYERS:], blocks=SHORT)
        await link.assert_clean()


async def test_when_all_have_failed_the_failure_that_tells_most_is_told() -> None:
    scope = Scope()
    dead(scope)
    corrupt(scope)
    async with Link(scope) as link:
        with pytest.raises(VerificationFailed, match="bad Objects"):
            await collect(link.consumer(patience=0.1))
        await link.assert_clean()
    scope = Scope()
    dead(scope)
    dead(scope)
    async with Link(scope) as link:
        with pytest.raises(PublisherLost, match="no manifest to be had"):
            await collect(link.consumer(patience=0.1))


OTHER = kv(tokens=(BLOCKS + 2) * BLOCK, seed=8)


def of_other_tokens(scope: Scope) -> Publication:
    """A longer one, which the index names for our tokens."""
    tokens = [*TOKENS, *range(2 * BLOCK)]
    publication = produced(tokens=[token + 1 for token in tokens], cache=OTHER)
    scope.put(publication)
    return publication


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_what_is_retrieved_is_the_true_cache_of_the_longest_prefix_that_somebody_has(data) -> None:
    """Whatever else is published, announced, or said by the index."""
    wholes = data.draw(st.lists(st.integers(1, BLOCKS), max_size=3), "whole ones")
    wrongs = data.draw(st.lists(st.sampled_from(WRONG), max_size=2), "others")
    lies = data.draw(st.booleans(), "the index lies")
    listing = data.draw(st.sampled_from(["listing", "probe"]), "discovery")
    order = data.draw(st.permutations([*wholes, *wrongs]), "order")

    async def run() -> None:
        scope = Scope()
        for each in order:
            scope.put(of(each)) if isinstance(each, int) else each(scope)
        client = FakeClient(blocks=0)
        if lies:
            client.knows(of_other_tokens(scope), kv(tokens=len(OTHER[0][0]), seed=5), RELAY)
        async with Link(scope) as link:
            consumer = link.consumer(
                discovery=listing,
                # one that is only slow here must not be taken for one that stands still
                patience=1,
                timeout=30,
                fallback=Fallback(client, after=5, relay=RELAY),
            )
            if wholes:
                layers = (await collect(consumer))[-LAYERS:]
                blocks = consumer.stats.blocks
                check(layers, blocks=blocks)
                # where many that are dead share a prefix, a shorter one may have its turn first
                many = announced_many_times in wrongs or len(wrongs) + lies >= OF_ONE_PREFIX
                assert blocks in wholes if many else blocks == max(wholes)
            else:
                # one that stands still for good ends with the time that is allowed
                consumer = link.consumer(discovery=listing, patience=0.05, timeout=0.5)
                with pytest.raises(RetrievalError):
                    await collect(consumer)

    asyncio.run(run())


async def test_of_a_prompt_that_one_publication_covers_no_other_is_asked_anything() -> None:
    publications = [of(n) for n in range(1, BLOCKS + 1)]
    async with Link(publisher(*publications)) as link:
        consumer = link.consumer()
        await collect(consumer)
        assert consumer.stats.publications_tried == 1


async def test_a_publication_that_has_fewer_blocks_than_are_asked_for_is_not_retrieved():
    short = produced(tokens=TOKENS[: 3 * BLOCK], cache=kv(tokens=3 * BLOCK))
    whole = produced()
    async with Link(publisher(short, whole)) as link:
        named = [short.namespace]
        with pytest.raises(NotFound, match="has 3 blocks of these tokens, and at least 4 are"):
            await link.consumer(publications=named, min_blocks=4).retrieve()
        assert (await link.consumer(publications=named, min_blocks=3).retrieve()).blocks == 3
        named = [short.namespace, whole.namespace]
        stats = await link.consumer(publications=named, min_blocks=4).retrieve()
        assert stats.publication == whole.namespace.publication_id.hex()
        await link.assert_clean()
