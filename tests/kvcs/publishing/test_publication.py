"""Publications: what is in their tracks, in which order, and by reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import kvcs
from kvcs.names.codes import Component
from kvcs.names.errors import KvcsError, MisuseError, NothingToPublish
from kvcs.names.manifest_builder import check_progress
from kvcs.names.payload import check_payload
from kvcs.publishing.announcing import publish, unpublish
from kvcs.publishing.publication import Publication
from kvcs.trust.producers import ProducerKey
from kvsp.names.codes import Codec
from kvsp.names.identity import block_keys
from moqt.publisher import Publisher
from moqt.values.codes import ObjectStatus, PropertyType, PublishDoneCode, RequestErrorCode
from moqt.values.errors import RequestError
from moqt.values.messages import KeyValue
from moqt.values.names import FullTrackName, Location
from tests.dlpack import ByDlpack
from tests.kvcs.support import (
    BLOCK,
    BLOCKS,
    DESCRIPTOR,
    LAYERS,
    SCOPE,
    TOKENS,
    Accepting,
    Link,
    descriptor,
    kv,
    manifests,
    produced,
    publisher,
)
from tests.moqt.memory import Pair
from tests.moqt.peers import Collector


def statuses(store):
    return {
        stored.location: stored.status
        for group in store.groups.values()
        for stored in group.objects.values()
        if stored.status is not ObjectStatus.NORMAL
    }


def test_a_publication_has_one_group_per_layer_and_one_object_per_block():
    cache = kv()
    publication = produced(cache=cache)
    manifest, k, v = publication.tracks
    assert [s.name.name for s in publication.tracks] == [b"manifest", b"k.raw.s0", b"v.raw.s0"]
    locations = [Location(g, o) for g in range(LAYERS) for o in range(BLOCKS)]
    for store, component, index in ((k, Component.K, 0), (v, Component.V, 1)):
        assert [o.location for o in store.objects()] == locations
        for stored in store.objects():
            group, block = stored.location
            data = check_payload(
                stored.parts,
                component=component,
                layer=group,
                block=block,
                first_block=0,
                block_tokens=BLOCK,
                codec=Codec.RAW,
                raw_octets=DESCRIPTOR.section_octets(),
            )
            rows = cache[group][index][block * BLOCK : (block + 1) * BLOCK]
            assert bytes(data) == rows.tobytes()
            assert stored.subgroup == 0
            assert stored.priority == 128 * group // LAYERS
        assert statuses(store) == {
            **{Location(g, BLOCKS): ObjectStatus.END_OF_GROUP for g in range(LAYERS)},
            Location(LAYERS, 0): ObjectStatus.END_OF_TRACK,
        }
        assert store.ended
        assert store.end_code == PublishDoneCode.TRACK_ENDED
        assert all(log.finished for g in store.groups.values() for log in g.subgroups.values())
    assert manifest.ended
    assert all(stored.priority == 0 for stored in manifest.objects())


def test_the_namespace_has_the_anchor_key_and_a_fresh_publication_id():
    a, b = produced(), produced()
    keys = block_keys(SCOPE, DESCRIPTOR, TOKENS)
    assert a.namespace.anchor_key == keys[-1]
    assert a.namespace.scope_id == SCOPE.scope_id
    assert a.namespace.publication_id != b.namespace.publication_id
    assert len(a.namespace.fields) == 5


@pytest.mark.parametrize("cache_ms", [600_000, 5])
def test_every_track_has_max_cache_duration_and_no_delivery_timeout(cache_ms):
    publication = produced(cache_ms=cache_ms)
    for store in publication.tracks:
        assert store.properties == (KeyValue(PropertyType.MAX_CACHE_DURATION, cache_ms),)
    assert Publication(SCOPE, DESCRIPTOR, TOKENS).tracks[0].properties[0].value == 600_000


def test_payloads_refer_to_the_arrays_and_copy_nothing():
    k, v = kv()[0]
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    publication.put_layer(0, k, v)
    for store, tensor in zip(publication.tracks[1:], (k, v), strict=True):
        for stored in store.objects():
            header, data = stored.parts
            assert len(header) == 68
            assert isinstance(data, memoryview)
            seen = np.frombuffer(data, np.uint8)
            assert np.shares_memory(seen, tensor)
            start = tensor.ctypes.data + stored.location.object * DESCRIPTOR.section_octets()
            assert seen.ctypes.data == start


def test_an_object_can_be_sent_as_soon_as_its_block_is_put():
    cache = kv()
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    pair = Pair(server=publisher(publication))
    seen = [Collector(), Collector()]
    for store, collector in zip(publication.tracks[1:], seen, strict=True):
        pair.client.subscribe(store.name, collector)
    pair.run()
    for layer in range(2):
        for block in range(BLOCKS):
            rows = slice(block * BLOCK, (block + 1) * BLOCK)
            publication.put_block(layer, block, cache[layer][0][rows], cache[layer][1][rows])
            pair.run()
            for collector in seen:
                assert collector.locations[-1] == Location(layer, block)


def test_objects_out_of_order_are_refused_and_the_error_names_layer_and_block():
    (k, v), *_ = kv()
    block = k[:BLOCK], v[:BLOCK]
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    with pytest.raises(MisuseError, match="layer 1, block 0 is out of order: layer 0, block 0"):
        publication.put_layer(1, k, v)
    with pytest.raises(MisuseError, match="layer 0, block 1 is out of order"):
        publication.put_block(0, 1, *block)
    publication.put_block(0, 0, *block)
    with pytest.raises(MisuseError, match="layer 0, block 0 is out of order"):
        publication.put_block(0, 0, *block)
    with pytest.raises(MisuseError, match="layer 0, block 0 is out of order"):
        publication.put_layer(0, k, v)
    assert publication.next_object == (0, 1)
    done = produced()
    assert done.next_object is None
    with pytest.raises(MisuseError, match="has ended"):
        done.put_layer(LAYERS, k, v)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k: k.astype(np.float16), "elements of float16"),
        (lambda k: k[:, :1], "shape"),
        (lambda k: k[: BLOCK * (BLOCKS - 1)], "16 tokens"),
        (lambda k: np.asfortranarray(k), "C-contiguous"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name_and_nothing_is_published(change, message):
    k, v = kv()[0]
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    with pytest.raises(MisuseError, match=rf"layer 0: v.*{message}"):
        publication.put_layer(0, k, change(v))
    assert publication.next_object == (0, 0)
    assert not list(publication.tracks[1].objects())


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1])
def test_tokens_that_fill_no_block_are_nothing_to_publish(count):
    with pytest.raises(NothingToPublish, match=f"{count} tokens fill no block of {BLOCK}"):
        Publication(SCOPE, DESCRIPTOR, TOKENS[:count])


@pytest.mark.parametrize("count", [BLOCK, BLOCK + 1, 2 * BLOCK - 1])
def test_only_complete_blocks_are_published(count):
    publication = produced(tokens=TOKENS[:count])
    assert publication.blocks == 1
    assert publication.tokens == BLOCK
    assert publication.namespace.anchor_key == block_keys(SCOPE, DESCRIPTOR, TOKENS)[0]


def test_the_first_manifest_is_there_before_the_first_object():
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    (manifest,) = manifests(publication)
    (entry,) = manifest.segments
    assert not entry.complete
    assert [str(t) for t in entry.tracks] == ["k.raw.s0", "v.raw.s0"]
    assert entry.blocks == BLOCKS
    assert manifest.publication == publication.namespace.publication_id


@pytest.mark.parametrize("signed", [False, True])
def test_of_the_two_manifest_tracks_one_is_there_and_the_other_said_not_to_be(signed):
    signer = ProducerKey.generate() if signed else None
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS, signer=signer, cache_ms=5000)
    served = Publisher()
    publication.serve(served)
    pair = Pair(server=served)
    plain, cose = Collector(), Collector()
    for name, collector in ((b"manifest", plain), (b"manifest.cose", cose)):
        pair.client.subscribe(FullTrackName(publication.namespace.fields, name), collector)
    pair.run()
    there, absent = (cose, plain) if signed else (plain, cose)
    assert there.accepted is not None and there.failed is None
    assert absent.failed.code == RequestErrorCode.DOES_NOT_EXIST
    assert absent.failed.retry_after_ms == 5000


def test_a_new_manifest_comes_every_eight_layers_and_at_the_end():
    described = descriptor(layers=20)
    publication = Publication(SCOPE, described, TOKENS)
    for layer, (k, v) in enumerate(kv(described)):
        publication.put_layer(layer, k, v)
        listed = [
            m.segments[0].listed_groups(m.segments[0].tracks[0]) for m in manifests(publication)
        ]
        assert listed == [n for n in (0, 8, 16) if n <= layer + 1] + [20] * (layer == 19)
    versions = manifests(publication)
    for earlier, later in itertools.pairwise(versions):
        check_progress(earlier, later)
    assert versions[-1].segments[0].complete
    assert [s.location for s in publication.tracks[0].objects()] == [
        Location(version, 0) for version in range(4)
    ]


def test_all_versions_together_list_three_times_the_digests_of_the_last_at_most():
    for layers, every in ((80, 8), (32, 8), (80, 1), (33, 7)):
        described = descriptor(layers=layers)
        publication = Publication(SCOPE, described, TOKENS, manifest_every=every)
        for layer, (k, v) in enumerate(kv(described)):
            publication.put_layer(layer, k, v)
        listed = [
            m.segments[0].listed_groups(m.segments[0].tracks[0]) for m in manifests(publication)
        ]
        assert listed[-1] == layers and sum(listed) <= 3 * layers
        # and they do not stop coming: each but the last two is followed by one twice as long
        for version, later in itertools.pairwise(listed[1:-1]):
            assert later <= max(2 * version, version + 2 * every), listed


def test_the_final_manifest_is_published_before_the_tracks_end():
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    order = []

    class Watch:
        def __init__(self, store):
            self.store = store

        def store_changed(self, log):
            store = self.store
            order.append((store.name.name, store.largest, store.ended))

    for store in publication.tracks:
        store.add_listener(Watch(store))
    for layer, (k, v) in enumerate(kv()):
        publication.put_layer(layer, k, v)
    final = order.index((b"manifest", Location(1, 0), False))
    assert final < min(i for i, (_, _, ended) in enumerate(order) if ended)


def test_an_abandoned_publication_ends_with_an_error_code():
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    publication.put_layer(0, *kv()[0])
    publication.abandon()
    publication.abandon()
    assert all(s.end_code == PublishDoneCode.INTERNAL_ERROR for s in publication.tracks)
    assert not publication.complete
    with pytest.raises(MisuseError, match="layer 1, block 0: the publication has ended"):
        publication.put_layer(1, *kv()[1])


def test_a_manifest_that_would_be_too_large_is_refused_before_anything_is_published():
    with pytest.raises(KvcsError, match="larger blocks"):
        Publication(SCOPE, descriptor(layers=200, block_tokens=1), list(range(11_000)))


async def test_an_unpublished_cache_is_neither_served_nor_referred_to_any_more():
    link = Link(Accepting())
    handler = link.pair.client.handler = Publisher()
    async with link:
        publication = produced()
        announced = await publish(link.session, publication)
        assert set(handler.tracks.values()) == set(publication.tracks)
        unpublish(link.session, publication, announced)
        assert not handler.tracks
        await link.assert_clean()


async def test_a_publication_whose_namespace_is_refused_is_not_served():
    relay = Accepting()
    relay.accepts = False
    link = Link(relay)
    handler = link.pair.client.handler = Publisher()
    async with link:
        with pytest.raises(RequestError):
            await publish(link.session, produced())
        assert not handler.tracks


def test_the_function_that_makes_an_array_contiguous_is_named_and_exported():
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    k, v = kv()[0]
    turned = k.transpose(1, 0, 2).copy().transpose(1, 0, 2)
    with pytest.raises(MisuseError, match="to_layout_1"):
        publication.put_layer(0, turned, v)
    publication.put_layer(0, kvcs.to_layout_1(turned), v)
    assert publication.next_object == (1, 0)


def test_tensors_of_others_are_published_where_they_are():
    described = descriptor(kv_dtype="fp16")
    cache = kv(described)
    publication = Publication(SCOPE, described, TOKENS)
    for layer, (k, v) in enumerate(cache):
        publication.put_layer(layer, ByDlpack(k), ByDlpack(v))
    stored = [bytes(each.payload)[68:] for each in publication.tracks[1].objects()]
    assert b"".join(stored) == b"".join(k.tobytes() for k, _ in cache)


def test_an_array_that_does_not_fit_is_told_with_the_function_that_makes_one_that_does():
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    k, v = kv()[0]
    wrong = np.asfortranarray(k)
    with pytest.raises(MisuseError, match=r"layer 0: k: .* convert it with to_layout_1") as raised:
        publication.put_layer(0, wrong, v)
    name = str(raised.value).rpartition(" ")[2]
    publication.put_layer(0, getattr(kvcs, name)(wrong), v)
    with pytest.raises(MisuseError, match="layer 1: v: list is no tensor"):
        publication.put_layer(1, k, [[[1.0]]])
