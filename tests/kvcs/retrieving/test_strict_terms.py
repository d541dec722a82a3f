"""Who takes only what is signed or sealed believes no index and no holder, but the manifest."""

from __future__ import annotations

import pytest

from kvcs.finding.relays import Fallback
from kvcs.names.errors import NotFound, PublisherLost, RetrievalTimeout, VerificationFailed
from kvcs.publishing.publication import Publication
from tests.kvcs.copies import served
from tests.kvcs.hostile import MODES, HostileRelay, World, at, data, manifest
from tests.kvcs.support import BLOCK, BLOCKS, DESCRIPTOR, TOKENS, Link, collect, kv, publisher
from tests.kvcs.support_fallback import CACHE, H1, FakeClient, check
from tests.kvcs.support_segments import put_segment, whole

RELAY = "moqt://relay.example:4443"
STRICT = ["signed", "sealed", "both"]


def retrieving(link: Link, world: World, client: FakeClient, **settings):
    settings.setdefault("fallback", Fallback(client, after=0.05, relay=RELAY))
    return link.consumer(scope=world.scope, producers=world.producers, **settings)


def with_gaps(publication: Publication) -> HostileRelay:
    """Two Objects are nowhere to be had over MOQT."""

    def drop(place, copy):
        return None

    tracks = [served(each, at((1, 2), (4, 0))(drop)) for each in data(publication)]
    return HostileRelay([manifest(publication), *tracks])


@pytest.mark.parametrize("mode", STRICT)
async def test_holders_give_what_the_manifest_lists(mode: str) -> None:
    world, client = World(MODES[mode]), FakeClient()
    async with Link(with_gaps(world.publish(CACHE))) as link:
        consumer = retrieving(link, world, client)
        check(await collect(consumer))
        assert set(client.asked) == {(2, 1), (0, 4)}
        assert consumer.stats.over_http == {(2, 1): H1, (0, 4): H1}


@pytest.mark.parametrize("mode", STRICT)
async def test_a_holder_that_has_something_else_is_of_no_use(mode: str) -> None:
    world, client = World(MODES[mode]), FakeClient(kv(seed=9))
    async with Link(with_gaps(world.publish(CACHE))) as link:
        with pytest.raises(PublisherLost):
            await collect(retrieving(link, world, client))
        assert client.asked


@pytest.mark.parametrize("mode", STRICT)
async def test_holders_alone_are_not_believed(mode: str) -> None:
    world, client = World(MODES[mode]), FakeClient()
    async with Link(publisher()) as link:
        with pytest.raises(NotFound):
            await collect(retrieving(link, world, client))
    assert not client.asked


@pytest.mark.parametrize("mode", STRICT)
async def test_nothing_is_taken_beyond_the_publication(mode: str) -> None:
    world, client = World(MODES[mode]), FakeClient()
    short = world.publish(CACHE, TOKENS[: 3 * BLOCK])
    async with Link(publisher(short)) as link:
        consumer = retrieving(link, world, client)
        check(await collect(consumer), blocks=3)
    assert not client.asked


@pytest.mark.parametrize("mode", STRICT)
async def test_what_is_not_listed_yet_is_not_taken_from_holders(mode: str) -> None:
    world, client = World(MODES[mode]), FakeClient()
    live = world.publish(CACHE, layers=2, manifest_every=8)
    async with Link(publisher(live)) as link:
        consumer = retrieving(link, world, client, timeout=0.5)
        handed = []
        with pytest.raises(RetrievalTimeout):
            async for layer in consumer.layers():
                handed.append(layer.index)
        # sealed Objects speak for themselves, signed ones only once they are listed
        assert handed == ([] if world.mode.signed else [0, 1])
        consumer.close()
    assert not client.asked


@pytest.mark.parametrize("mode", MODES)
async def test_no_record_of_an_index_shows_whose_tokens_a_longer_publication_has(mode: str) -> None:
    """An index gives the records of another prompt's cache for our keys: only who trusts it,
    and requires nothing, takes that for ours."""
    world = World(MODES[mode])
    cache = kv(tokens=(BLOCKS + 1) * BLOCK, seed=8)
    other = world.publish(cache, [token + 1 for token in [*TOKENS, *range(BLOCK)]])
    client = FakeClient(blocks=0)
    client.knows(other, cache, RELAY)
    async with Link(publisher(other)) as link:
        consumer = retrieving(link, world, client)
        if mode == "plain":
            check(await collect(consumer), cache)
            return
        with pytest.raises(VerificationFailed, match="keys-mismatch"):
            await collect(consumer)
        assert consumer.stats.layers == 0


@pytest.mark.parametrize("mode", STRICT)
async def test_every_segment_is_signed_and_sealed(mode: str) -> None:
    world = World(MODES[mode])
    first = 3 * BLOCK
    signer = world.producer if world.mode.signed else None
    publication = Publication(world.scope, DESCRIPTOR, TOKENS[:first], growing=True, signer=signer)
    async with Link(publisher(publication)) as link:
        publication.serve(link.handler)
        put_segment(publication, CACHE)
        publication.extend(TOKENS[first:])
        put_segment(publication, CACHE)
        publication.finish()
        names = {store.name.name for store in publication.tracks}
        assert (b"manifest.cose" in names) == world.mode.signed and b"k.raw.s1" in names
        if world.mode.sealed:
            for store in publication.tracks:
                for group in store.groups.values():
                    payloads = [bytes(each.payload) for each in group.objects.values()]
                    assert not any(b"KVO1" in each or b"kvcs" in each for each in payloads)
        consumer = link.consumer(scope=world.scope, producers=world.producers)
        assert whole(await collect(consumer), CACHE, BLOCKS) == 2
        assert consumer.stats.objects_confirmed == consumer.stats.objects_verified
