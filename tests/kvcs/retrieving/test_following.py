"""A publication that grows, followed: chunked prefill, and tokens that are appended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcs.names.errors import PublisherLost
from kvcs.names.manifest_builder import check_progress
from kvcs.publishing.publication import Publication
from kvcs.retrieving import assembly as assemblies
from kvcs.retrieving import manifest_track
from kvcs.retrieving.asking import waits
from kvcs.retrieving.destinations import ArrayDestination
from kvcs.trust.producers import ProducerKey, Producers
from kvcs.trust.terms import Terms
from kvsp.blocks.layout import allocate
from kvsp.names.content_keys import ContentKey
from kvsp.names.identity import Scope
from moqt.publisher import Publisher
from moqt.values.codes import PublishDoneCode, RequestErrorCode
from tests.kvcs.support import (
    BLOCK,
    BLOCKS,
    DESCRIPTOR,
    LAYERS,
    SCOPE,
    TOKENS,
    Link,
    Split,
    altered,
    collect,
    descriptor,
    kv,
    produced,
    same,
)
from tests.kvcs.support_segments import grown, put_segment, whole

CACHE = kv()
SIZES = (2, 1, 2)
STEPS = len(SIZES) * LAYERS


class Production:
    """A publication in segments, put layer by layer; it is served from the beginning."""

    def __init__(
        self,
        sizes=SIZES,
        cache=CACHE,
        *,
        described=DESCRIPTOR,
        tokens=TOKENS,
        handler=None,
        scope=SCOPE,
        **publication,
    ) -> None:
        self.rows = described.block_tokens
        self.handler = handler or Publisher()
        first = tokens[: sizes[0] * self.rows]
        self.publication = Publication(scope, described, first, growing=True, **publication)
        self.publication.serve(self.handler)
        self._steps = self._produced(sizes, cache, tokens)

    def _produced(self, sizes, cache, tokens) -> Iterator[None]:
        at = 0
        for number, blocks in enumerate(sizes):
            chunk = tokens[at : at + blocks * self.rows]
            at += len(chunk)
            if number:
                self.publication.extend(chunk)
            for layer in range(len(cache)):
                put_segment(self.publication, cache, [layer])
                yield
        self.publication.finish()

    def put(self, layers: int) -> None:
        """As many layers, of one segment after the other; the end comes with one more."""
        for _ in range(layers):
            next(self._steps, None)

    async def put_all(self) -> None:
        while not self.publication.complete:
            self.put(1)
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("how", ["in clear", "signed", "sealed"])
async def test_a_long_manifest_is_read_and_compared_in_a_thread_and_all_comes_once(
    monkeypatch, how
):
    monkeypatch.setattr(manifest_track, "BESIDE_OCTETS", 1)
    threads, read = set(), Terms.read

    def noted(*arguments):
        threads.add(threading.get_ident())
        return read(*arguments)

    def compared(*versions):
        threads.add(threading.get_ident())
        check_progress(*versions)

    monkeypatch.setattr(Terms, "read", noted)
    monkeypatch.setattr(manifest_track, "check_progress", compared)
    monkeypatch.setattr(assemblies, "check_progress", compared)
    key, scope = None if how == "in clear" else ProducerKey.generate(), SCOPE
    if how == "sealed":
        scope = Scope(bytes(range(32)), (ContentKey.generate(),))
    production = Production(scope=scope, signer=key)
    production.put(LAYERS + 2)
    async with Link(production.handler) as link:
        producers = None if key is None else Producers([key.public])
        consumer = link.consumer(follow=True, scope=scope, producers=producers)
        _, layers = await asyncio.gather(production.put_all(), collect(consumer))
        assert whole(layers, CACHE, BLOCKS) == len(SIZES)
        stats = consumer.stats
        assert stats.objects_verified == stats.objects_confirmed == 2 * LAYERS * BLOCKS
        assert not stats.duplicates and not stats.discarded
        await link.assert_clean()
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize("before", range(0, STEPS + 2, 2))
async def test_who_joins_at_any_point_gets_every_object_once(before):
    production = Production()
    production.put(before)
    async with Link(production.handler) as link:
        consumer = link.consumer(follow=True)
        _, layers = await asyncio.gather(production.put_all(), collect(consumer))
        assert whole(layers, CACHE, BLOCKS) == len(SIZES)
        stats = consumer.stats
        assert stats.objects_verified == stats.objects_confirmed == 2 * LAYERS * BLOCKS
        assert not stats.duplicates and not stats.discarded
        assert (stats.segments, stats.whole_blocks, stats.layers) == (3, BLOCKS, LAYERS)
        await link.assert_clean()


async def test_a_layer_is_handed_over_before_the_next_chunk_is_put():
    production = Production()
    production.put(1)
    async with Link(production.handler) as link, link.consumer(follow=True) as consumer:
        layers = consumer.layers()
        for segment in range(len(SIZES)):
            for index in range(LAYERS):
                layer = await anext(layers)
                assert (layer.segment, layer.index) == (segment, index)
                assert production.publication.segment == segment
                production.put(1)
        with pytest.raises(StopAsyncIteration):
            await anext(layers)


async def test_without_follow_the_segments_that_have_begun_are_retrieved():
    production = Production()
    production.put(LAYERS + 1)
    async with Link(production.handler) as link:
        async with link.consumer() as consumer:
            layers = []
            async for layer in consumer.layers():
                layers.append(layer)
                if len(layers) == LAYERS + 1:
                    production.put(STEPS)
        assert whole(layers, CACHE, 3) == 2
        assert consumer.stats.tokens == 3 * BLOCK


async def test_of_a_publication_that_ends_before_our_tokens_all_that_it_has_is_retrieved():
    production = Production((2, 1))
    production.put(LAYERS + 1)
    async with Link(production.handler) as link:
        consumer = link.consumer(follow=True)
        _, layers = await asyncio.gather(production.put_all(), collect(consumer))
        assert whole(layers, CACHE, 3) == 2
        assert consumer.stats.blocks == 3
        await link.assert_clean()


@pytest.mark.parametrize("known", [3, 4])
async def test_a_publication_is_followed_until_our_tokens_are_covered_or_it_goes_on_with_others(
    known,
):
    production = Production()
    production.put(1)
    async with Link(production.handler) as link:
        tokens = [*TOKENS[: known * BLOCK], *range(2 * BLOCK)][: max(3, known + 1) * BLOCK]
        consumer = link.consumer(follow=True, tokens=TOKENS[: 3 * BLOCK] if known == 3 else tokens)
        collecting = asyncio.ensure_future(collect(consumer))
        for _ in range(STEPS - 2):  # so the last segment is not whole
            production.put(1)
            await asyncio.sleep(0.001)
        assert whole(await collecting, CACHE, 3) == 2
        assert not production.publication.complete


async def test_no_more_segments_are_waited_for_than_there_are_blocks_wanted():
    production = Production()
    production.put(1)
    async with Link(production.handler) as link:
        collecting = asyncio.ensure_future(collect(link.consumer(follow=True, blocks=2)))
        production.put(LAYERS)
        assert whole(await collecting, CACHE, 2) == 1


async def test_what_was_whole_is_given_when_the_publisher_is_lost_in_a_later_segment():
    production = Production()
    production.put(2 * LAYERS + 3)
    async with Link(production.handler) as link:
        consumer, layers = link.consumer(follow=True), []

        async def consume():
            async for layer in consumer.layers():
                layers.append(layer)
                if len(layers) == 2 * LAYERS + 3:
                    production.publication.abandon("the power failed")

        with pytest.raises(PublisherLost, match=r"k\.raw\.s2 has no layer 3, block 0: its publ"):
            await consume()
        assert whole(layers[: 2 * LAYERS], CACHE, 3) == 2
        assert consumer.stats.whole_blocks == 3
        await link.assert_clean()


async def test_a_publisher_that_is_lost_between_two_segments_is_told():
    production = Production()
    production.put(LAYERS)
    async with Link(production.handler) as link:
        consumer = link.consumer(follow=True)

        async def consume():
            async for layer in consumer.layers():
                if layer.index == LAYERS - 1:
                    production.publication.abandon()

        with pytest.raises(PublisherLost, match="its publisher was lost before it ended"):
            await consume()
        assert consumer.stats.whole_blocks == 2
        await link.assert_clean()


async def test_the_arrays_are_made_once_for_all_tokens_that_may_come():
    class Counting(ArrayDestination):
        begun: list = []  # noqa: RUF012

        def begin(self, tokens, layers):
            self.begun.append((tokens, layers))
            super().begin(tokens, layers)

    rows = len(TOKENS)
    arrays = {n: (allocate(DESCRIPTOR, rows), allocate(DESCRIPTOR, rows)) for n in range(LAYERS)}
    production = Production()
    async with Link(production.handler) as link:
        destination = Counting(arrays)
        consumer = link.consumer(follow=True, destination=destination)
        await asyncio.gather(production.put_all(), consumer.retrieve())
        assert destination.begun == [(rows, range(LAYERS))]
        for n, pair in arrays.items():
            assert all(same(*each) for each in zip(pair, CACHE[n], strict=True))
        assert consumer.octets_held == 0


async def test_segments_are_asked_for_in_order_and_only_so_many_at_once(monkeypatch):
    monkeypatch.setattr(waits, "SEGMENTS_AT_ONCE", 2)
    handler = Split()
    publication = grown((1,) * BLOCKS, CACHE)
    publication.serve(handler)
    async with Link(handler) as link:
        most = 0

        def count(_):
            nonlocal most
            most = max(most, link.pair.server.remembered().requests_incoming)

        link.on_pump = count
        consumer = link.consumer(follow=True)
        assert whole(await collect(consumer), CACHE, BLOCKS) == BLOCKS
        early, fetches = handler.fetches[:2], handler.fetches[2:]
        assert {fetch.name.name for fetch in early} == {b"k.raw.s0", b"v.raw.s0"}
        asked = [fetch.name.name.decode() for fetch in fetches]
        assert asked == [f"{half}.raw.s{n}" for n in range(BLOCKS) for half in "kv"]
        priorities = [fetch.parameters.subscriber_priority for fetch in fetches]
        assert priorities[::2] == [None, 129, 130, 131, 132]
        assert most <= 2 * 2 + 2  # the manifest and the listing beside them


async def test_nothing_begins_again_with_a_publication_that_has_no_more_than_was_given_whole():
    production, other = Production(), produced(tokens=TOKENS[: 2 * BLOCK], cache=CACHE)
    production.put(LAYERS + 2)
    other.serve(production.handler)
    async with Link(production.handler) as link:
        consumer, seen = link.consumer(), set()

        async def consume():
            async for layer in consumer.layers():
                seen.add(layer.publication)
                if (layer.segment, layer.index) == (1, 1):
                    production.publication.abandon()

        with pytest.raises(PublisherLost, match=r"k\.raw\.s1 has no layer 2, block 0"):
            await consume()
        assert seen == {production.publication.namespace.publication_id}
        assert consumer.stats.whole_blocks == 2


async def test_what_was_given_whole_counts_no_more_when_another_publication_has_begun_and_failed():
    first = Production((1, 2))
    first.put(LAYERS + 2)
    first.publication.abandon()
    bad = produced(tokens=TOKENS[: 3 * BLOCK], cache=CACHE)
    last = produced(tokens=TOKENS[:BLOCK], cache=CACHE)
    for each in (bad, last):
        each.serve(first.handler)
    first.handler.add_track(
        altered(bad.tracks[1], lambda at, octets: octets[:-1] if at.group else octets)
    )
    async with Link(first.handler) as link:
        order = [each.namespace for each in (first.publication, bad, last)]
        consumer = link.consumer(publications=order)
        layers = await collect(consumer)
        assert {layer.publication for layer in layers} == {each.publication_id for each in order}
        assert whole(layers[-LAYERS:], CACHE, 1) == 1
        assert consumer.stats.blocks == consumer.stats.whole_blocks == 1
        await link.assert_clean()


async def test_layers_of_segments_are_kept_for_another_deterministic_publication():
    first = Production((2, 1), deterministic=True)
    first.put(LAYERS + 2)
    whole_one = grown((2, 1), CACHE, deterministic=True)
    whole_one.serve(first.handler)
    async with Link(first.handler) as link:
        consumer = link.consumer(
            publications=[first.publication.namespace, whole_one.namespace],
            tokens=TOKENS[: 3 * BLOCK],
            mode="live",
        )
        layers = []
        async with consumer:
            async for layer in consumer.layers():
                layers.append(layer)
                if (layer.segment, layer.index) == (1, 1):
                    first.publication.abandon()
        assert whole(layers, CACHE, 3) == 2
        publications = [layer.publication for layer in layers]
        assert publications == [first.publication.namespace.publication_id] * (LAYERS + 2) + [
            whole_one.namespace.publication_id
        ] * (LAYERS - 2)


class Losing(Publisher):
    """Ends subscriptions to data tracks after so many pumps."""

    def __init__(self):
        super().__init__()
        self.live = []

    def subscribe_received(self, request):
        super().subscribe_received(request)
        if request.name.name != b"manifest":
            self.live.append(request)

    def lose(self):
        live, self.live = self.live, []
        for request in live:
            request.end(PublishDoneCode.INTERNAL_ERROR, "lost")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_the_segments_the_join_and_the_losses_what_comes_is_the_whole_once(data):
    described = descriptor(layers=2)
    sizes = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6), "sizes"))
    count = sum(sizes) * BLOCK
    ids = st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count)
    tokens = data.draw(ids, "tokens")
    steps = len(sizes) * described.layers
    joined = data.draw(st.integers(0, steps + 1), "joined after")
    losses = data.draw(st.sets(st.integers(0, steps), max_size=3), "losses after")
    cache = kv(described, len(tokens), seed=len(tokens))

    async def story():
        production = Production(
            sizes, cache, described=described, tokens=tokens, handler=(handler := Losing())
        )
        production.put(joined)
        async with Link(handler) as link:
            consumer = link.consumer(follow=True, described=described, tokens=tokens)
            collecting = asyncio.ensure_future(collect(consumer))
            for step in range(joined, steps + 1):
                await asyncio.sleep(0.001)
                if step in losses:
                    handler.lose()
                production.put(1)
            assert whole(await collecting, cache, sum(sizes), described) == len(sizes)
            stats = consumer.stats
            assert stats.objects_verified == 2 * described.layers * sum(sizes)
            assert stats.objects_confirmed == stats.objects_verified
            assert stats.octets == sum(k.nbytes + v.nbytes for k, v in cache)
            await link.assert_clean()

    asyncio.run(story())


class Noting(Publisher):
    """Takes note of what is fetched of the manifest."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list = []

    def fetch_received(self, request) -> None:
        if request.name.name.startswith(b"manifest"):
            self.fetched.append(request.parameters)
        super().fetch_received(request)


@pytest.mark.parametrize("segments", [5, 7, 8, 11])
@pytest.mark.parametrize("signed", [False, True])
async def test_who_joins_late_asks_for_what_the_last_manifest_leaves_out_and_has_all_listed(
    segments, signed
):
    tokens = list(range(BLOCK * 12))
    cache, key = kv(tokens=len(tokens)), ProducerKey.generate() if signed else None
    production = Production((1,) * 12, cache, tokens=tokens, handler=Noting(), signer=key)
    production.put(segments * LAYERS)
    handler, asked = production.handler, int(not production.publication.told_all)
    async with Link(handler) as link:
        terms = {"producers": Producers([key.public])} if signed else {}
        consumer = link.consumer(follow=True, require_listed=True, tokens=tokens, **terms)
        async with consumer:
            layers = consumer.layers()
            for number in range(segments * LAYERS):
                layer = await anext(layers)
                assert (layer.segment, layer.index) == divmod(number, LAYERS)
            assert not production.publication.complete
            assert len(handler.fetched) == asked
            production.put(STEPS * 12)
            rest = [layer async for layer in layers]
        assert len(rest) == (12 - segments) * LAYERS
        assert len(handler.fetched) == asked, "who follows is told of each segment"
        stats = consumer.stats
        assert stats.objects_confirmed == stats.objects_verified == 2 * LAYERS * 12
        assert not stats.duplicates and not stats.discarded
        await link.assert_clean()


async def test_versions_that_are_not_to_be_had_any_more_are_not_asked_for_for_ever():
    tokens = list(range(BLOCK * 12))
    cache = kv(tokens=len(tokens))

    class Forgetting(Noting):
        def fetch_received(self, request) -> None:
            if request.name.name.startswith(b"manifest"):
                self.fetched.append(request.parameters)
                request.reject(RequestErrorCode.DOES_NOT_EXIST, "it is gone")
            else:
                super().fetch_received(request)

    production = Production((1,) * 12, cache, tokens=tokens, handler=Forgetting())
    production.put(7 * LAYERS)
    async with Link(production.handler) as link:
        consumer = link.consumer(follow=True, tokens=tokens)
        _, layers = await asyncio.gather(production.put_all(), collect(consumer))
        assert whole(layers, cache, 12) == 12
        # as often for those that come to be left out later; not for ever
        assert 1 <= len(production.handler.fetched) <= 12 * manifest_track.MANIFEST_FETCHES
        assert consumer.stats.objects_confirmed == 2 * LAYERS * 12, "the last one lists all"
        await link.assert_clean()
