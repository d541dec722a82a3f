"""Consumers: discovery, retrieval, verification, recovery, and what is left behind."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvcs.names.errors import (
    MisuseError,
    NotAuthorized,
    NotFound,
    PublisherLost,
    RetrievalTimeout,
    VerificationFailed,
)
from kvcs.names.manifest import Manifest
from kvcs.publishing.publication import Publication
from kvcs.retrieving.destinations import ArrayDestination, FileDestination
from kvcs.retrieving.receivers import DataReceiver
from kvcs.retrieving.retrieval import Retrieval
from kvsp.blocks.kv_files import KvFile
from kvsp.blocks.layout import allocate
from kvsp.names import ijson
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Scope
from moqt.publisher import Publisher
from moqt.session import SessionConfig
from moqt.values.codes import PublishDoneCode, RequestErrorCode, StreamErrorCode
from moqt.values.names import Location
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
    block_by_block,
    collect,
    corrupted,
    descriptor,
    kv,
    produced,
    publisher,
    same,
)
from tests.moqt.inside import fills, kept

OBJECTS = 2 * LAYERS * BLOCKS


def check(layers, cache, tokens=BLOCK * BLOCKS, first=0):
    assert [layer.index for layer in layers] == list(range(first, first + len(layers)))
    for layer in layers:
        k, v = cache[layer.index]
        assert same(layer.k, k[:tokens])
        assert same(layer.v, v[:tokens])


@pytest.fixture
def count_objects(monkeypatch):
    """Counts every Object a Retrieval is given, by track and Location."""
    counts: dict = {}
    original = Retrieval.object_received

    def counted(self, state, header, parts, **more):
        key = (str(state.track), header.location)
        counts[key] = counts.get(key, 0) + 1
        return original(self, state, header, parts, **more)

    monkeypatch.setattr(Retrieval, "object_received", counted)
    return counts


ALL_ONCE = {
    (track, Location(layer, block)): 1
    for track in ("k.raw.s0", "v.raw.s0")
    for layer in range(LAYERS)
    for block in range(BLOCKS)
}


# --- retrieval -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("joined", [0, 1, LAYERS // 2, LAYERS, "mid-layer"])
async def test_a_live_join_at_any_point_brings_every_object_exactly_once(
    joined, seed, count_objects
):
    cache = kv()
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    before = 2 if joined == "mid-layer" else joined
    for layer in range(before):
        publication.put_layer(layer, *cache[layer])
    steps = block_by_block(publication, cache, range(before, LAYERS))
    if joined == "mid-layer":
        next(steps)
        next(steps)
    async with Link(publisher(publication), seed=seed) as link:
        link.on_pump = lambda n: next(steps, None) if n > 20 and n % 2 else None
        consumer = link.consumer(mode="live")
        layers = await collect(consumer)
        check(layers, cache)
        assert count_objects == ALL_ONCE
        stats = consumer.stats
        assert (stats.duplicates, stats.recoveries, stats.discarded) == (0, 0, {})
        assert stats.objects_verified == stats.objects_confirmed == OBJECTS
        assert stats.mode == "live"
        await link.assert_clean()


async def test_each_layer_is_handed_over_while_later_ones_are_still_to_be_produced():
    cache = kv()
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    async with Link(publisher(publication)) as link, link.consumer() as consumer:
        seen = []
        publication.put_layer(0, *cache[0])
        async for layer in consumer.layers():
            seen.append(layer)
            assert len(seen) == layer.index + 1
            if layer.index + 1 < LAYERS:
                assert publication.next_object == (layer.index + 1, 0)
                publication.put_layer(layer.index + 1, *cache[layer.index + 1])
        check(seen, cache)
        assert consumer.stats.mode == "live"


async def test_a_completed_cache_is_fetched(count_objects):
    cache = kv()
    async with Link(Split(produced(cache=cache))) as link:
        consumer = link.consumer(source="here")
        check(await collect(consumer), cache)
        assert count_objects == ALL_ONCE
        assert consumer.stats.mode == "fetch"
        assert len(link.handler.fetches) == 4  # of each track layer 0 at once, then the rest
        stats = consumer.stats.as_dict()
        assert stats["tokens"] == len(TOKENS)
        assert stats["octets"] == sum(k.nbytes + v.nbytes for k, v in cache)
        assert stats["megabytes_per_second"] > 0
        assert 0 < stats["first_layer_seconds"] <= stats["seconds"]
        assert stats["source"] == "here"
        assert len(stats["publication"]) == 32
        await link.assert_clean()


@pytest.mark.parametrize("mode", ["fetch", "live"])
async def test_layers_a_to_b_are_retrieved_alone(mode, count_objects):
    described = descriptor(layers=12)
    cache = kv(described)
    async with Link(publisher(produced(described, cache=cache))) as link:
        consumer = link.consumer(described=described, layers=range(3, 8), mode=mode)
        check(await collect(consumer), cache, first=3)
        assert consumer.stats.layers == 5
        needed = {k: n for k, n in count_objects.items() if 3 <= k[1].group <= 7}
        assert len(needed) == 2 * 5 * BLOCKS
        assert set(needed.values()) == {1}
        if mode == "fetch":
            assert count_objects == needed
        await link.assert_clean()


@pytest.mark.parametrize("mode", ["fetch", "live"])
@pytest.mark.parametrize("ranges", [16, 0])
async def test_the_first_n_blocks_are_filtered_by_the_peer_or_the_excess_discarded(
    ranges, mode, count_objects
):
    cache = kv()
    config = SessionConfig(max_filter_ranges=ranges)
    async with Link(publisher(produced(cache=cache)), server_config=config) as link:
        consumer = link.consumer(blocks=4, mode=mode)
        check(await collect(consumer), cache, tokens=4 * BLOCK)
        stats = consumer.stats
        assert stats.blocks == 4
        assert stats.tokens == 4 * BLOCK
        assert stats.objects_verified == stats.objects_confirmed == 2 * LAYERS * 4
        excess = [key for key in count_objects if key[1].object >= 4]
        # of layer 0 only what is needed was asked for, before the manifest was known
        layers = LAYERS - (mode == "fetch")
        assert len(excess) == (0 if ranges else 2 * layers)
        assert stats.discarded.get("not-needed", 0) == len(excess)
        await link.assert_clean()


async def test_a_refused_filter_is_left_out():
    class NoFilters(Publisher):
        def fetch_received(self, request):
            if request.parameters.range_filters:
                request.reject(RequestErrorCode.INVALID_FILTER, "none here")
            else:
                super().fetch_received(request)

    cache = kv()
    handler = NoFilters()
    for store in produced(cache=cache).tracks:
        handler.add_track(store)
    async with Link(handler) as link:
        check(await collect(link.consumer(blocks=2)), cache, tokens=2 * BLOCK)


@pytest.mark.parametrize("dtype", ["bf16", "fp8-e4m3", "fp8-e5m2", "fp16", "fp32", "int8"])
async def test_every_element_type_arrives_bit_by_bit(dtype):
    described = descriptor(kv_dtype=dtype)
    cache = kv(described)
    async with Link(publisher(produced(described, cache=cache))) as link:
        layers = await collect(link.consumer(described=described))
        check(layers, cache)
        assert all(layer.k.dtype == described.dtype for layer in layers)


async def test_many_layers_cross_a_connection_that_grants_few_streams():
    described = descriptor(layers=40)
    cache = kv(described)
    publication = Publication(SCOPE, described, TOKENS)
    async with Link(publisher(publication), max_streams=4) as link:
        link.on_pump = lambda n: (
            publication.put_layer(publication.next_object[0], *cache[publication.next_object[0]])
            if publication.next_object
            else None
        )
        check(await collect(link.consumer(described=described, mode="live")), cache)


async def test_layers_are_written_once_into_the_callers_arrays(monkeypatch):
    cache = kv()
    rows = len(TOKENS) + 3  # an engine's arrays have room for the tokens to come
    arrays = {i: (allocate(DESCRIPTOR, rows), allocate(DESCRIPTOR, rows)) for i in range(LAYERS)}
    async with Link(publisher(produced(cache=cache))) as link:
        consumer = link.consumer(destination=ArrayDestination(arrays))
        layers = await collect(consumer)
        check(layers, cache)
        for layer in layers:
            for tensor, target in zip((layer.k, layer.v), arrays[layer.index], strict=True):
                assert np.shares_memory(tensor, target)
                assert tensor.ctypes.data == target.ctypes.data
                assert not target[len(TOKENS) :].astype(np.float32).any()


async def test_arrays_that_do_not_fit_end_the_retrieval_with_what_is_wrong():
    async with Link(publisher(produced())) as link:
        with pytest.raises(ValueError, match="no arrays for layer 0"):
            await collect(link.consumer(destination=ArrayDestination({})))
        short = {i: (allocate(DESCRIPTOR, 4), allocate(DESCRIPTOR, 4)) for i in range(LAYERS)}
        with pytest.raises(ValueError, match="4 rows cannot hold 20 tokens"):
            await collect(link.consumer(destination=ArrayDestination(short)))
        await link.assert_clean()


async def test_a_file_is_written_through_its_map_and_appears_only_when_it_is_whole(tmp_path):
    cache = kv()
    path = tmp_path / "out.safetensors"
    async with Link(publisher(produced(cache=cache))) as link:
        with FileDestination(path, DESCRIPTOR) as out:
            await link.consumer(destination=out, layers=range(1, 3)).retrieve()
            assert not path.exists()
            out.commit()
        file = KvFile.open(path, DESCRIPTOR, layers=range(1, 3))
        for layer in (1, 2):
            assert same(file.k(layer), cache[layer][0])
            assert same(file.v(layer), cache[layer][1])
        with FileDestination(path.with_name("bad"), DESCRIPTOR) as out, pytest.raises(NotFound):
            await link.consumer(destination=out, scope=Scope(bytes(32))).retrieve()
        assert [p.name for p in tmp_path.iterdir()] == ["out.safetensors"]


async def test_arrays_are_let_go_as_layers_are_handed_over():
    cache = kv()
    async with Link(publisher(produced(cache=cache))) as link, link.consumer() as consumer:
        held = [consumer.octets_held async for _ in consumer.layers()]
        assert held[-1] == 0
        assert consumer.octets_held == 0


# --- discovery -----------------------------------------------------------------------


@pytest.mark.parametrize("published", [1, 2, BLOCKS])
async def test_the_longest_published_prefix_is_found(published):
    tokens = TOKENS[: published * BLOCK]
    cache = kv(tokens=len(tokens))
    shorter = produced(tokens=TOKENS[:BLOCK], cache=kv(tokens=BLOCK, seed=1))
    longest = produced(tokens=tokens, cache=cache)
    async with Link(publisher(shorter, longest)) as link:
        consumer = link.consumer()
        layers = await collect(consumer)
        if published > 1:
            assert consumer.stats.publication == longest.namespace.publication_id.hex()
            check(layers, cache, tokens=len(tokens))
        assert consumer.stats.tokens == len(tokens)
        await link.assert_clean()


@pytest.mark.parametrize("probes", [1, 3, 64])
async def test_a_prefix_far_shorter_than_the_prompt_is_found_with_bounded_concurrency(probes):
    tokens = list(range(40 * BLOCK))
    most = 0

    class Counting(Publisher):
        def subscribe_namespace_received(self, request):
            nonlocal most
            super().subscribe_namespace_received(request)
            most = max(most, len(kept(self).listings))

    handler = Counting()
    cache = kv(tokens=7 * BLOCK)
    for store in produced(tokens=tokens[: 7 * BLOCK], cache=cache).tracks:
        handler.add_track(store)
    async with Link(handler) as link:
        layers = await collect(
            link.consumer(tokens=tokens, discovery="probe", probes=probes, grace=0.005)
        )
        check(layers, cache, tokens=7 * BLOCK)
        assert most <= probes
        await link.assert_clean()


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1])
async def test_a_prompt_without_a_complete_block_asks_for_nothing(count):
    async with Link(Split(produced())) as link:
        with pytest.raises(NotFound, match="fill no block"):
            await collect(link.consumer(tokens=TOKENS[:count]))
        assert link.pair.client.requests.next_id() == 0


@pytest.mark.parametrize("count", [BLOCK, BLOCK + 1])
async def test_a_prompt_of_one_block_and_some_tokens_gets_one_block(count):
    cache = kv(tokens=BLOCK)
    async with Link(publisher(produced(tokens=TOKENS[:BLOCK], cache=cache))) as link:
        check(await collect(link.consumer(tokens=TOKENS[:count])), cache, tokens=BLOCK)


async def test_another_scope_key_looks_exactly_as_if_nothing_were_published():
    async def error(handler, scope):
        async with Link(handler) as link:
            with pytest.raises(NotFound) as caught:
                await collect(link.consumer(scope=scope))
            await link.assert_clean()
            return type(caught.value), str(caught.value)

    other = Scope(b"another key".ljust(32))
    assert await error(publisher(produced()), other) == await error(Publisher(), SCOPE)
    # and the same scope does find it
    async with Link(publisher(produced())) as link:
        assert len(await collect(link.consumer())) == LAYERS


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"model_digest": "sha-256:" + "33" * 32},
        {"tokenizer_digest": "sha-256:" + "33" * 32},
        {"adapters": ["sha-256:" + "44" * 32]},
        {"layers": LAYERS + 1},
        {"kv_heads": 4},
        {"head_dim": 16},
        {"kv_dtype": "fp16"},
        {"positional": "rope;base=500000"},
        {"block_tokens": 2},
        {"layout": "x-other"},
        {"x-unknown": 1},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_a_descriptor_that_differs_in_any_member_finds_nothing(change):
    async with Link(publisher(produced())) as link:
        other = descriptor(**change)
        if other.layout != DESCRIPTOR.layout:
            with pytest.raises(DecodeError, match="codec-unsupported"):
                link.consumer(described=other)
            return
        with pytest.raises(NotFound):
            await collect(link.consumer(described=other))


async def test_a_refused_scope_is_an_error_of_its_own():
    class Refusing(Publisher):
        def subscribe_namespace_received(self, request):
            request.reject(RequestErrorCode.UNAUTHORIZED, "not yours")

    async with Link(Refusing()) as link:
        with pytest.raises(NotAuthorized):
            await collect(link.consumer())
        await link.assert_clean()


@pytest.mark.parametrize("kind", ["subscribe_received", "fetch_received"])
async def test_refused_tracks_are_an_error_of_their_own(kind):
    handler = publisher(produced())
    setattr(handler, kind, lambda r: r.reject(RequestErrorCode.UNAUTHORIZED, "not yours"))
    async with Link(handler) as link:
        with pytest.raises(NotAuthorized):
            await collect(link.consumer())


async def test_two_consumers_of_one_prefix_share_a_session():
    cache = kv()
    async with Link(publisher(produced(cache=cache))) as link:
        a, b = await asyncio.gather(
            collect(link.consumer(layers=range(3))), collect(link.consumer(layers=range(3, 6)))
        )
        check(a, cache)
        check(b, cache, first=3)
        await link.assert_clean()


async def test_an_overload_answer_is_tried_again():
    class Busy(Publisher):
        busy = 6

        def _later(self, request, serve):
            if self.busy:
                self.busy -= 1
                request.reject(RequestErrorCode.EXCESSIVE_LOAD, "busy", retry_after_ms=1)
            else:
                serve(request)

        def subscribe_namespace_received(self, request):
            self._later(request, super().subscribe_namespace_received)

        def subscribe_received(self, request):
            self._later(request, super().subscribe_received)

    for mode in ("live", "fetch"):
        handler = Busy()
        cache = kv()
        for store in produced(cache=cache).tracks:
            handler.add_track(store)
        async with Link(handler) as link:
            check(await collect(link.consumer(tokens=TOKENS, mode=mode)), cache)


async def test_publications_known_already_need_no_discovery():
    cache = kv()
    publication = produced(cache=cache)
    async with Link(publisher(publication)) as link:
        consumer = link.consumer(publications=[publication.namespace])
        check(await collect(consumer), cache)
        # one that goes beyond our tokens may be of any tokens: only an index can tell
        consumer = link.consumer(tokens=TOKENS[: 2 * BLOCK], publications=[publication.namespace])
        with pytest.raises(VerificationFailed, match="no record of an index"):
            await collect(consumer)
        assert consumer.stats.layers == 0
        with pytest.raises(ValueError, match="another scope"):
            link.consumer(scope=Scope(bytes(32)), publications=[publication.namespace])


# --- verification --------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fetch", "live"])
async def test_a_corrupted_object_is_discarded_counted_and_ends_in_a_failed_verification(mode):
    publication = produced()
    handler = publisher(publication)
    bad = altered(publication.tracks[2], corrupted((3, 2)))
    handler.tracks[bad.name] = bad
    async with Link(handler) as link, link.consumer(mode=mode) as consumer:
        seen = []
        with pytest.raises(VerificationFailed, match="digest-mismatch 4"):
            async for layer in consumer.layers():
                seen.append(layer.index)
        assert 3 not in seen
        assert consumer.stats.discarded["digest-mismatch"] == 4
        assert consumer.octets_held == 0
        await link.assert_clean()


@pytest.mark.parametrize("mode", ["fetch", "live"])
async def test_more_than_three_bad_objects_end_the_publication(mode):
    publication = produced()
    handler = publisher(publication)
    bad = altered(publication.tracks[1], corrupted(*[(0, b) for b in range(BLOCKS)]))
    handler.tracks[bad.name] = bad
    async with Link(handler) as link:
        consumer = link.consumer(mode=mode)
        with pytest.raises(VerificationFailed):
            await collect(consumer)
        assert consumer.stats.discarded["digest-mismatch"] == 4
        assert consumer.stats.layers == 0


def longer(*locations):
    """A change for `altered`: the payload at these Locations is one octet too long."""
    wanted = {Location(*location) for location in locations}
    return lambda location, payload: payload + b"x" if location in wanted else payload


@pytest.mark.parametrize("mode", ["fetch", "live"])
async def test_an_object_longer_than_a_block_can_be_is_thrown_away_as_it_comes(mode, monkeypatch):
    thrown = []
    tell = DataReceiver.object_too_large

    def object_too_large(self, stream, header):
        assert stream.state is None
        thrown.append(header.location)
        tell(self, stream, header)

    monkeypatch.setattr(DataReceiver, "object_too_large", object_too_large)
    publication = produced()
    handler = publisher(publication)
    bad = altered(publication.tracks[1], longer((2, 1)))
    handler.tracks[bad.name] = bad
    async with Link(handler) as link, link.consumer(mode=mode) as consumer:
        with pytest.raises(VerificationFailed, match="trailing-octets 4"):
            await collect(consumer)
        assert set(thrown) == {(2, 1)}
        await link.assert_clean()


async def test_a_manifest_larger_than_one_can_be_is_not_assembled(monkeypatch):
    monkeypatch.setattr("kvcs.retrieving.manifest_track.ROOM_TO_GO_ON", 100)
    monkeypatch.setattr("kvcs.retrieving.manifest_track.max_octets", lambda objects, most: 100)
    async with Link(publisher(produced())) as link, link.consumer() as consumer:
        with pytest.raises(VerificationFailed, match="a manifest of"):
            await collect(consumer)
        await link.assert_clean()


async def test_a_corrupted_object_is_had_again_from_the_same_publication():
    cache = kv()
    publication = produced(cache=cache)
    handler = Split(publication)
    handler.subscribed[publication.tracks[2].name] = altered(
        publication.tracks[2], corrupted((2, 1), (4, 0))
    )
    async with Link(handler) as link:
        consumer = link.consumer(mode="live")
        check(await collect(consumer), cache)
        assert consumer.stats.discarded == {"digest-mismatch": 2}
        assert consumer.stats.duplicates == 0
        assert 1 <= consumer.stats.recoveries <= 2
        await link.assert_clean()


@pytest.mark.parametrize("live", [True, False])
async def test_a_dropped_object_makes_its_layer_unusable_until_it_is_recovered(live):
    cache = kv()
    publication = produced(cache=cache)
    handler = Split(publication)
    store = publication.tracks[2]
    dropped = altered(store, lambda at, payload: None if at == (2, 3) else payload)
    handler.subscribed[store.name] = dropped
    if not live:
        handler.tracks[store.name] = dropped
    async with Link(handler) as link, link.consumer(mode="live", timeout=600) as consumer:
        seen = []
        if live:  # FETCH still has it
            async for layer in consumer.layers():
                seen.append(layer)
            check(seen, cache)
            assert consumer.stats.recoveries == 1
            (fetch,) = handler.fetches
            assert fetch.name == store.name
            assert consumer.stats.duplicates == 0
        else:
            with pytest.raises(PublisherLost, match=r"v\.raw\.s0 has no layer 2, block 3"):
                async for layer in consumer.layers():
                    seen.append(layer.index)
            assert seen == [0, 1]
        await link.assert_clean()


def change_manifest(publication, change, *, versions=None):
    """A manifest store whose versions went through `change(tree)`."""

    def changed(location, payload):
        if versions is not None and location.group not in versions:
            return payload
        tree = ijson.loads(payload)
        change(tree)
        return ijson.canonical(tree)

    return altered(publication.tracks[0], changed)


def other_keys(tree):
    tree["segments"][0]["block_keys_sha256"] = "00" * 32


def other_compat(tree):
    tree["compat"]["model"] = "other"


def other_publication(tree):
    tree["publication"] = "00" * 16


def no_json(tree):
    tree["segments"] = []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_keys, "keys-mismatch"),
        (other_compat, "compat-mismatch"),
        (other_publication, "bad-manifest"),
        (no_json, "bad-manifest"),
    ],
)
@pytest.mark.parametrize("second", [True, False])
async def test_a_publication_with_a_wrong_manifest_is_discarded(change, reason, second):
    cache = kv()
    bad = produced(cache=kv(seed=9))
    good = produced(cache=cache)
    handler = publisher(bad)
    wrong = change_manifest(bad, change)
    handler.tracks[wrong.name] = wrong
    if second:
        for store in good.tracks:
            handler.add_track(store)
    async with Link(handler) as link:
        consumer = link.consumer()
        if second:
            consumer = link.consumer(publications=[bad.namespace, good.namespace])
            check(await collect(consumer), cache)
            assert consumer.stats.publication == good.namespace.publication_id.hex()
            assert consumer.stats.publications_tried == 2
        else:
            with pytest.raises(VerificationFailed, match=reason):
                await collect(consumer)
        assert consumer.stats.discarded == {reason: 1}
        await link.assert_clean()


async def test_a_manifest_that_goes_backwards_is_refused_and_the_publication_discarded():
    described = descriptor(layers=20)
    cache = kv(described)
    publication = Publication(SCOPE, described, TOKENS)
    for layer in range(10):
        publication.put_layer(layer, *cache[layer])

    def backwards(tree):
        digests = tree["segments"][0]["object_digests"]
        digests["k.raw.s0"][0][0] = "00" * 32

    handler = publisher(publication)
    manifest = altered(publication.tracks[0], lambda at, payload: payload)
    handler.tracks[manifest.name] = manifest
    async with Link(handler) as link, link.consumer(described=described) as consumer:
        seen = []
        with pytest.raises(VerificationFailed, match="does not list every layer"):
            async for layer in consumer.layers():
                seen.append(layer)
                if layer.index == 9:
                    for later in range(10, 20):
                        publication.put_layer(later, *cache[later])
                    wrong = change_manifest(publication, backwards, versions=(2, 3))
                    for version in (2, 3):
                        stored = wrong.get(Location(version, 0))
                        manifest.append(version, 0, bytes(stored.payload), priority=0)
                        manifest.finish_subgroup(version, 0)
                    manifest.finish(PublishDoneCode.TRACK_ENDED)
        assert consumer.stats.discarded["bad-manifest"] == 2
        await link.assert_clean()


async def test_objects_that_came_before_they_were_listed_are_compared_when_they_are():
    """The manifest lists another digest than that of an Object whose own digest fits."""
    cache = kv()
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    other = produced(cache=kv(seed=5))
    handler = publisher(publication)
    k = publication.tracks[1]
    # the v track is another production's: each Object fits its own header
    foreign = altered(other.tracks[2], lambda at, payload: payload)
    foreign.name = publication.tracks[2].name
    handler.tracks[foreign.name] = foreign
    for layer in range(LAYERS - 1):
        publication.put_layer(layer, *cache[layer])
    async with Link(handler) as link, link.consumer(mode="live") as consumer:
        with pytest.raises(VerificationFailed, match="not what the manifest lists"):
            async for layer in consumer.layers():
                if layer.index == LAYERS - 2:
                    publication.put_layer(LAYERS - 1, *cache[LAYERS - 1])
        assert consumer.stats.discarded["digest-mismatch"] >= 1
        assert k.ended
        await link.assert_clean()


async def test_layers_can_be_held_back_until_the_manifest_lists_them():
    described = descriptor(layers=20)
    cache = kv(described)
    publication = Publication(SCOPE, described, TOKENS)
    for layer in range(10):
        publication.put_layer(layer, *cache[layer])
    async with (
        Link(publisher(publication)) as link,
        link.consumer(described=described, require_listed=True) as consumer,
    ):
        listed = []
        async for layer in consumer.layers():
            assert consumer.stats.objects_confirmed >= 2 * BLOCKS * (layer.index + 1)
            listed.append(layer)
            if layer.index == 7:
                for later in range(10, 20):
                    publication.put_layer(later, *cache[later])
        check(listed, cache)


# --- publications: one after the other -----------------------------------------------


async def test_the_second_publication_is_used_when_the_first_is_bad_and_nothing_is_mixed():
    cache = kv()
    bad, good = produced(cache=kv(seed=3)), produced(cache=cache)
    handler = publisher(bad, good)
    wrong = altered(bad.tracks[2], corrupted(*[(4, b) for b in range(BLOCKS)]))
    handler.tracks[wrong.name] = wrong
    async with Link(handler) as link:
        consumer = link.consumer(publications=[bad.namespace, good.namespace])
        layers = await collect(consumer)
        last = [x for x in layers if x.publication == good.namespace.publication_id]
        check(last, cache)
        assert len(last) == LAYERS
        first = [x.index for x in layers if x.publication == bad.namespace.publication_id]
        assert first == list(range(len(first)))
        assert len(first) <= 4
        assert consumer.stats.objects_verified == OBJECTS
        await link.assert_clean()


async def test_the_second_publication_is_found_by_discovery_as_well():
    cache = kv()
    publications = [produced(cache=cache) for _ in range(4)]
    handler = publisher(*publications)
    for bad in publications[:3]:
        wrong = change_manifest(bad, other_keys)
        handler.tracks[wrong.name] = wrong
    async with Link(handler) as link:
        consumer = link.consumer()
        check(await collect(consumer), cache)
        assert consumer.stats.publication == publications[3].namespace.publication_id.hex()


@pytest.mark.parametrize("deterministic", [True, False])
async def test_layers_are_kept_from_another_publication_only_if_both_are_deterministic(
    deterministic,
):
    cache = kv()
    bad = produced(cache=cache, deterministic=True)
    good = produced(cache=cache, deterministic=deterministic)
    handler = publisher(bad, good)
    wrong = altered(bad.tracks[2], lambda at, payload: None if at.group == 3 else payload)
    handler.tracks[wrong.name] = wrong
    async with Link(handler) as link:
        consumer = link.consumer(publications=[bad.namespace, good.namespace])
        layers = await collect(consumer)
        indices = [layer.index for layer in layers]
        if deterministic:
            assert indices == list(range(LAYERS))
            check(layers, cache)
        else:
            assert indices == [0, 1, 2, *range(LAYERS)]
        assert consumer.stats.layers == LAYERS


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "as it came"])
async def test_layers_that_the_other_publication_lists_otherwise_are_not_kept(listed):
    """Two that are called deterministic, and are not: nothing is mixed."""
    cache = kv()
    bad = produced(cache=kv(seed=3), deterministic=True)
    good = produced(cache=cache, deterministic=True)
    handler = publisher(bad, good)
    wrong = altered(bad.tracks[2], lambda at, payload: None if at.group == 3 else payload)
    handler.tracks[wrong.name] = wrong
    if not listed:
        unlisted = altered(bad.tracks[0], lambda at, payload: payload if at.group == 0 else None)
        handler.tracks[unlisted.name] = unlisted
    async with Link(handler) as link:
        consumer = link.consumer(publications=[bad.namespace, good.namespace])
        layers = await collect(consumer)
        assert [layer.index for layer in layers] == [0, 1, 2, *range(LAYERS)]
        check(layers[-LAYERS:], cache)
        assert {layer.publication for layer in layers[-LAYERS:]} == {good.namespace.publication_id}
        await link.assert_clean()


# --- publishers that vanish ----------------------------------------------------------


@pytest.mark.parametrize("how", ["abandon", "close", "reset"])
async def test_a_publisher_that_dies_mid_layer_is_a_typed_error_long_before_the_timeout(how):
    cache = kv()
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    for layer in range(3):
        publication.put_layer(layer, *cache[layer])
    rows = slice(0, BLOCK)
    publication.put_block(3, 0, cache[3][0][rows], cache[3][1][rows])
    handler = publisher(publication)
    async with Link(handler) as link, link.consumer(timeout=600) as consumer:
        seen = []
        why = "the relay was lost" if how == "close" else "its publisher stopped or was lost"
        with pytest.raises(PublisherLost, match=why):
            async for layer in consumer.layers():
                seen.append(layer.index)
                if layer.index == 2:
                    await link.settle()
                    if how == "abandon":
                        publication.abandon("out of memory")
                    elif how == "close":
                        link.pair.server.close(reason="dying")
                    else:
                        for request in list(link.pair.server.requests.incoming.values()):
                            if request.__class__.__name__ == "IncomingSubscribe":
                                request.delivery.cancel(StreamErrorCode.GOING_AWAY)
                                request.stream.cancel()
                                request.ended()
        assert seen == [0, 1, 2]
        assert consumer.octets_held == 0
        if how != "close":
            await link.assert_clean()


async def test_what_a_relay_still_holds_of_a_vanished_publication_is_had_by_fetch():
    """All was produced, the subscription broke: FETCH brings the rest."""
    cache = kv()
    publication = produced(cache=cache)
    handler = Split(publication)
    for store in publication.tracks[1:]:
        half = altered(store, lambda at, payload: payload if at < (2, 3) else None)
        half.end_code = PublishDoneCode.INTERNAL_ERROR
        handler.subscribed[store.name] = half
    async with Link(handler) as link:
        consumer = link.consumer(mode="live")
        check(await collect(consumer), cache)
        assert consumer.stats.recoveries >= 2
        assert consumer.stats.duplicates == 0
        await link.assert_clean()


@pytest.mark.parametrize("unseen", [False, True])
async def test_reset_fill_streams_are_recovered_by_fetch(unseen):
    """Also when the reset overtakes the header, so that nobody knows whose stream it was."""
    cache = kv()
    publication = produced(cache=cache)

    class Resetting(Split):
        resets = 0

        def reset(self, request):
            for fill in list(fills(request.delivery)):
                self.resets += 1
                link.pair.server_transport.reset(fill.stream_id, StreamErrorCode.INTERNAL_ERROR)

        def subscribe_received(self, request):
            super().subscribe_received(request)
            if unseen and not request.name.name.startswith(b"manifest"):
                link.pair.server.ready_to_send()
                self.reset(request)

        def reset_all(self, _):
            for request in list(link.pair.server.requests.incoming.values()):
                if getattr(request, "name", publication.tracks[0].name).name != b"manifest":
                    self.reset(request)

    handler = Resetting(publication)
    async with Link(handler, stream_window=600) as link:
        transport = link.pair.client_transport
        if not unseen:
            original = link.pair.client.stream_data

            def stream_data(stream_id, data, fin):
                original(stream_id, data, fin)
                if len(data) > 100 and handler.resets < 2 and link.handler.subscribes == 4:
                    handler.reset_all(0)

            link.pair.client.stream_data = stream_data
        consumer = link.consumer(mode="live")
        check(await collect(consumer), cache)
        assert handler.resets == 2
        assert consumer.stats.recoveries >= 2
        assert not transport.closed
        await link.assert_clean()


async def test_a_publisher_that_never_goes_on_is_a_timeout():
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    publication.put_layer(0, *kv()[0])
    async with Link(publisher(publication)) as link:
        consumer = link.consumer(timeout=0.3)
        with pytest.raises(RetrievalTimeout, match=r"1 of 6 layers came within 0\.3 s"):
            await collect(consumer)
        assert consumer.octets_held == 0
        await link.assert_clean()


async def test_a_peer_that_never_answers_is_a_timeout():
    class Silent(Publisher):
        def subscribe_namespace_received(self, request): ...

    async with Link(Silent()) as link:
        with pytest.raises(RetrievalTimeout):
            await collect(link.consumer(timeout=0.2))
        await link.assert_clean()


async def test_a_session_that_ended_before_is_an_error_at_once():
    async with Link(publisher(produced())) as link:
        link.session.close()
        with pytest.raises(PublisherLost):
            await collect(link.consumer())


async def test_fetching_what_is_not_produced_yet_ends_with_what_is_missing():
    cache = kv()
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    for layer in range(3):
        publication.put_layer(layer, *cache[layer])
    async with Link(publisher(publication)) as link:
        check(await collect(link.consumer(mode="fetch", layers=range(1))), cache[:1])
        with pytest.raises(PublisherLost, match="layer 3, block 0: it is still being produced"):
            await collect(link.consumer(mode="fetch"))
        await link.assert_clean()


async def test_the_final_manifest_is_fetched_when_its_subscription_breaks():
    cache = kv()
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    handler = Split(publication)
    name = publication.tracks[0].name
    first = altered(publication.tracks[0], lambda at, payload: payload)
    handler.subscribed[name] = first
    async with Link(handler) as link, link.consumer() as consumer:
        publication.put_layer(0, *cache[0])
        async for layer in consumer.layers():
            if layer.index == 0:
                for later in range(1, LAYERS):
                    publication.put_layer(later, *cache[later])
                first.finish(PublishDoneCode.INTERNAL_ERROR)
        assert consumer.stats.objects_confirmed == OBJECTS
        assert [f.name for f in handler.fetches if f.name == name] == [name]


# --- leaving nothing behind ----------------------------------------------------------


async def test_a_consumer_that_stops_early_cancels_every_request():
    async with Link(publisher(produced(cache=kv()))) as link:
        async with link.consumer(mode="live") as consumer:
            async for layer in consumer.layers():
                if layer.index == 1:
                    break
        assert consumer.octets_held == 0
        await link.settle()
        await link.assert_clean()


@pytest.mark.parametrize("mode", ["live", "fetch"])
async def test_a_cancellation_at_any_point_leaves_nothing_behind(mode):
    cache = kv()
    finished = 0
    for point in range(400):
        publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
        done = LAYERS if mode == "fetch" else 3
        for layer in range(done):
            publication.put_layer(layer, *cache[layer])
        async with Link(publisher(publication), stream_window=2000) as link:
            task = asyncio.create_task(collect(link.consumer(mode=mode)))
            for turn in range(point):
                await asyncio.sleep(0)
                if turn == 40 and mode == "live":
                    for layer in range(done, LAYERS):
                        publication.put_layer(layer, *cache[layer])
                if task.done():
                    break
            if task.done():
                check(task.result(), cache)
                finished += 1
            else:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await link.assert_clean()
        if finished:
            break
    assert finished


async def test_a_consumer_retrieves_once():
    async with Link(publisher(produced())) as link:
        consumer = link.consumer()
        await consumer.retrieve()
        with pytest.raises(MisuseError):
            await consumer.retrieve()


@pytest.mark.parametrize(
    "settings",
    [
        {"layers": range(0)},
        {"layers": range(3, LAYERS + 1)},
        {"layers": range(0, 4, 2)},
        {"blocks": 0},
        {"mode": "sometimes"},
        {"timeout": 0},
    ],
)
async def test_settings_that_make_no_sense_are_refused(settings):
    async with Link(Publisher()) as link:
        with pytest.raises(ValueError):
            link.consumer(**settings)


def test_manifests_of_the_tests_are_what_they_claim():
    publication = produced()
    wrong = change_manifest(publication, other_keys)
    stored = wrong.get(Location(1, 0))
    assert Manifest.parse(stored.payload).segments[0].block_keys_sha256 == bytes(32)


async def test_a_publication_that_stalls_gives_way_to_another_one_that_is_known():
    cache = kv()
    stalled, complete = Publication(SCOPE, DESCRIPTOR, TOKENS), produced(cache=cache)
    for layer, (k, v) in enumerate(cache[:2]):
        stalled.put_layer(layer, k, v)
    async with Link(publisher(stalled, complete)) as link:
        consumer = link.consumer(
            publications=[stalled.namespace, complete.namespace], patience=0.1, timeout=10
        )
        layers = await collect(consumer)
        assert [layer.publication for layer in layers][-1] == complete.namespace.publication_id
        assert consumer.stats.publications_tried == 2
        check(layers[-LAYERS:], cache)
        await link.assert_clean()
