"""Loading one publication on one session, in memory."""

from __future__ import annotations

import asyncio

import pytest

from kvcs.client.arriving import Arriving, Found
from kvcs.client.counters import Ended
from kvcs.client.loading import Load
from kvcs.client.stalls import Line
from kvcs.names.errors import VerificationFailed
from kvcs.publishing.publication import Publication
from kvcs.publishing.replicas import moqt_record
from kvcs.trust.terms import ANY, Terms
from kvsp.names.identity import block_keys
from moqt.publisher import Publisher
from moqt.session import SessionConfig
from moqt.values.codes import PublishDoneCode
from tests.kvcs.copies import served
from tests.kvcs.support import (
    BLOCK,
    BLOCKS,
    DESCRIPTOR,
    LAYERS,
    SCOPE,
    TOKENS,
    Link,
    altered,
    corrupted,
    kv,
    produced,
    publisher,
    same,
    serve_first_layers,
    until,
)

KEYS = block_keys(SCOPE, DESCRIPTOR, TOKENS)


class Loading:
    """A Load and what was told of it."""

    def __init__(self, link, publication, blocks=range(BLOCKS), on_block=None, **settings):
        self.ended = []
        timeout = settings.pop("timeout", 10.0)
        self.load = Load(DESCRIPTOR, blocks, on_block, lambda _: None, timeout)
        known = settings.pop("known", BLOCKS)
        records = settings.pop("records", ())
        found = Found(known, known * BLOCK, "here", publication.namespace, BLOCKS, KEYS, records)
        self.arriving = Arriving(
            self.load,
            found,
            link.session,
            DESCRIPTOR,
            stall=settings.pop("stall", 5.0),
            terms=settings.pop("terms", ANY),
            ending=self.ended.append,
            **settings,
        )

    async def run(self):
        await self.arriving.run()
        return self.load


def check(load, cache, blocks=range(BLOCKS)):
    assert load.finished and not load.lost, load.error
    rows = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
    for layer, tensors in enumerate(cache):
        for came, sent in zip(load.layer(layer), tensors, strict=True):
            assert same(came, sent[rows])


@pytest.mark.parametrize("blocks", [range(5), range(1), range(1, 4), range(2, 5), range(4, 5)])
@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("filters", [0, 8])
async def test_the_blocks_asked_for_come_and_no_others(filters, live, blocks):
    cache = kv()
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS) if live else produced()
    config = SessionConfig(max_filter_ranges=filters)
    async with Link(publisher(publication), server_config=config) as link:
        loading = Loading(link, publication, blocks)
        running = asyncio.create_task(loading.run())
        for layer in range(LAYERS if live else 0):
            await link.settle()
            assert loading.load.layers <= layer
            publication.put_layer(layer, *cache[layer])
        check(await running, cache, blocks)
        stats = loading.arriving.stats
        assert stats.objects_verified == stats.objects_confirmed == 2 * LAYERS * len(blocks)
        if filters:
            assert not stats.discarded
        await link.assert_clean()


@pytest.mark.parametrize("start", range(4))
async def test_a_publication_that_grows_is_loaded_from_any_block_on(start):
    cache = kv()
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS[: 2 * BLOCK], growing=True)
    handler = Publisher()
    publication.serve(handler)
    async with Link(handler) as link:
        loading = Loading(link, publication, range(start, 5), known=2)
        running = asyncio.create_task(loading.run())
        for first, stop in ((0, 2), (2, 3), (3, 5)):
            if first:
                publication.extend(TOKENS[first * BLOCK : stop * BLOCK])
            for layer, tensors in enumerate(cache):
                rows = slice(first * BLOCK, stop * BLOCK)
                publication.put_layer(layer, *(tensor[rows] for tensor in tensors))
            await link.settle()
        publication.finish()
        check(await running, cache, range(start, 5))
        assert loading.arriving.stats.objects_verified == 2 * LAYERS * (5 - start)


async def test_how_much_there_is_of_one_that_goes_on_with_other_tokens_the_index_tells():
    tokens, cache = [*TOKENS, *range(2 * BLOCK)], kv(tokens=len(TOKENS) + 2 * BLOCK)
    publication = produced(tokens=tokens, cache=cache)
    records = tuple(
        moqt_record(publication.namespace, KEYS[block], cache, block, DESCRIPTOR, "moqt://here")
        for block in range(BLOCKS)
    )
    async with Link(publisher(publication)) as link:
        load = await Loading(link, publication, range(3), records=records).run()
    check(load, cache, range(3))
    assert load.published == 3 and not load.producing


async def test_what_came_whole_of_one_that_ends_early_is_there():
    cache = kv()
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS[: 2 * BLOCK], growing=True)
    for layer, tensors in enumerate(cache):
        publication.put_layer(layer, *(tensor[: 2 * BLOCK] for tensor in tensors))
    publication.finish()
    async with Link(publisher(publication)) as link:
        given = set()
        loading = Loading(
            link,
            publication,
            range(1, 5),
            lambda layer, block, k, v: given.add((layer, block)),
            known=2,
        )
        load = await loading.run()
    assert given == {(layer, 1) for layer in range(LAYERS)}
    assert (load.outcome, load.there, load.lost) == (Ended.SHORT, range(1, 2), range(2, 5))
    assert loading.ended == [Ended.SHORT]
    assert load.layers == 0


@pytest.mark.parametrize("start", [0, 3])
async def test_a_bad_object_among_the_wanted_is_recovered_or_fails_and_others_do_not_matter(start):
    publication = produced()
    handler = Publisher()
    for store in publication.tracks:
        bad = store.name.name == b"k.raw.s0"
        handler.add_track(altered(store, corrupted((2, 1))) if bad else store)
    async with Link(handler) as link:
        load = await Loading(link, publication, range(start, 5)).run()
    if start:
        check(load, kv(), range(3, 5))
    else:
        assert (load.outcome, load.there) == (Ended.VERIFICATION, range(0))
        assert isinstance(load.error, VerificationFailed)
        assert load.layers == 2


@pytest.mark.parametrize("layers", [0, 1, 3])
async def test_a_publication_of_which_nothing_more_comes_has_stalled(layers):
    cache = kv()
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    for layer in range(layers):
        publication.put_layer(layer, *cache[layer])
    async with Link(publisher(publication)) as link:
        loading = Loading(link, publication, stall=0.2)
        load = await loading.run()
        assert load.outcome is Ended.STALLED
        assert load.layers == layers
        assert loading.ended == [Ended.STALLED]
        assert not loading.arriving.silent
        await link.assert_clean()


async def test_a_peer_that_says_nothing_at_all_is_told_apart():
    publication = produced()
    async with Link(publisher(publication)) as link:
        loading = Loading(link, publication, stall=0.2)
        link.step = lambda: None
        assert (await loading.run()).outcome is Ended.STALLED
        assert loading.arriving.silent


async def test_a_load_whose_turn_is_late_has_not_stalled_while_its_neighbours_are_served():
    cache, publication, line = kv(), Publication(SCOPE, DESCRIPTOR, TOKENS), Line()
    line.loads = 100
    async with Link(publisher(publication)) as link:
        running = asyncio.create_task(Loading(link, publication, stall=0.1, line=line).run())
        for layer in range(LAYERS):
            for _ in range(30):
                await asyncio.sleep(0.01)
                line.heard += 1
            publication.put_layer(layer, *cache[layer])
        check(await running, cache)


async def test_a_relay_that_serves_others_is_not_taken_for_silent():
    publication, line = produced(), Line()
    line.loads = 2
    async with Link(publisher(publication)) as link:
        loading = Loading(link, publication, stall=0.2, line=line)
        link.step = lambda: None
        running = asyncio.create_task(loading.run())
        await asyncio.sleep(0)
        line.heard += 1
        assert (await running).outcome is Ended.STALLED
        assert not loading.arriving.silent


@pytest.mark.parametrize("ended", [False, True])
async def test_a_load_has_not_finished_before_the_manifest_has_listed_what_came(ended):
    """A second without a further version is no end, and neither is that of the track: nothing
    vouches for what came of a publisher that was lost before its last version of the manifest."""
    publication, handler = Publication(SCOPE, DESCRIPTOR, TOKENS), Publisher()
    first = served(publication.tracks[0])
    for layer, tensors in enumerate(kv()):
        publication.put_layer(layer, *tensors)
    if ended:
        first.finish(PublishDoneCode.INTERNAL_ERROR)
    for store in (first, *publication.tracks[1:]):
        handler.add_track(store)
    async with Link(handler) as link:
        loading = Loading(link, publication, stall=2.0)
        load = await loading.run()
    assert load.layers == LAYERS
    assert load.lost == range(5)
    assert load.outcome is (Ended.LOST if ended else Ended.STALLED), load.error
    assert ("not list" if ended else "not listed all") in str(load.error)
    assert loading.arriving.stats.objects_verified and not loading.arriving.stats.objects_confirmed


async def test_a_load_takes_no_longer_than_it_may_whatever_comes():
    cache, publication = kv(), Publication(SCOPE, DESCRIPTOR, TOKENS)
    async with Link(publisher(publication)) as link:
        loading = Loading(link, publication, timeout=0.2)
        publication.put_layer(0, *cache[0])
        assert (await loading.run()).outcome is Ended.TIMEOUT


async def test_with_producers_only_what_is_signed_is_taken():
    publication = produced()
    async with Link(publisher(publication)) as link:
        from kvcs.trust.producers import ProducerKey, Producers

        producers = Producers([ProducerKey.generate().public])
        terms = Terms(producers=producers)
        load = await Loading(link, publication, terms=terms, require_listed=True).run()
    assert load.outcome is Ended.VERIFICATION and not load.layers


async def test_one_that_is_cancelled_leaves_nothing_behind():
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    async with Link(publisher(publication)) as link:
        loading = Loading(link, publication)
        running = asyncio.create_task(loading.run())
        await until(lambda: loading.arriving.stats.mode is not None)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert loading.load.outcome is Ended.CANCELLED
        assert not loading.ended
        del running
        await link.assert_clean()


async def test_a_part_that_the_relay_lacks_is_lost():
    publication, handler = produced(), Publisher()
    handler.add_track(publication.tracks[0])
    serve_first_layers(handler, publication, 2)
    async with Link(handler) as link:
        load = await Loading(link, publication, stall=1.0).run()
    assert load.outcome in (Ended.LOST, Ended.STALLED)
    assert load.layers == 2 and load.lost == range(5)
