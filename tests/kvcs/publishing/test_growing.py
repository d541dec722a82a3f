"""Publications of several segments: passes over the tokens, one after the other."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest

from kvcs.names import codes
from kvcs.names.encoding import Encoding
from kvcs.names.errors import KvcsError, MisuseError
from kvcs.names.limits import REACHED
from kvcs.names.manifest import Manifest, keys_digest
from kvcs.names.manifest_builder import check_progress
from kvcs.publishing import publication as publications
from kvcs.publishing.announcing import publish, unpublish
from kvcs.publishing.publication import Publication
from kvcs.trust.cose import open_message
from kvcs.trust.producers import ProducerKey
from kvsp.names.codes import Codec
from kvsp.names.content_keys import ContentKey
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Scope, block_keys
from moqt.publisher import Publisher
from moqt.values.codes import ObjectStatus, PublishDoneCode
from moqt.values.names import Location
from tests.kvcs.support import (
    BLOCK,
    BLOCKS,
    DESCRIPTOR,
    LAYERS,
    SCOPE,
    TOKENS,
    Accepting,
    Link,
    kv,
    manifests,
    publisher,
)
from tests.kvcs.support_segments import grown, put_segment
from tests.moqt.memory import Pair
from tests.moqt.peers import Collector

CACHE = kv()


def test_each_segment_has_tracks_and_an_entry_of_its_own_and_the_keys_go_on():
    publication = grown((3, 2), CACHE)
    keys = block_keys(SCOPE, DESCRIPTOR, TOKENS)
    names = [b"manifest", b"k.raw.s0", b"v.raw.s0", b"k.raw.s1", b"v.raw.s1"]
    assert [store.name.name for store in publication.tracks] == names
    first, second = manifests(publication)[-1].segments
    assert (first.first_block, first.blocks, second.first_block, second.blocks) == (0, 3, 3, 2)
    assert first.block_keys_sha256 == keys_digest(keys[:3])
    assert second.block_keys_sha256 == keys_digest(keys[3:])
    assert publication.namespace.anchor_key == keys[2]
    assert (publication.blocks, publication.tokens) == (BLOCKS, len(TOKENS))
    for store in publication.tracks:
        assert store.end_code == PublishDoneCode.TRACK_ENDED
    for store in publication.tracks[1:]:
        ends = store.groups[LAYERS].objects[0]
        assert ends.status is ObjectStatus.END_OF_TRACK


def test_layer_0_of_a_chunk_is_out_before_the_next_chunk_is_put():
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS[: 3 * BLOCK], growing=True)
    served = Publisher()
    publication.serve(served)
    pair = Pair(server=served)
    put_segment(publication, CACHE)
    publication.extend(TOKENS[3 * BLOCK :])
    seen = [Collector(), Collector()]
    for store, collector in zip(publication.tracks[3:], seen, strict=True):
        pair.client.subscribe(store.name, collector)
    pair.run()
    publication.put_layer(0, *(tensor[3 * BLOCK :] for tensor in CACHE[0]))
    pair.run()
    for collector in seen:
        objects = [at for at in collector.locations if at.object < 2]
        assert objects == [Location(0, 0), Location(0, 1)]
    assert publication.next_object == (1, 0)


def test_a_segment_is_named_before_its_first_object_and_said_to_be_complete_after_its_last():
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS[: 3 * BLOCK], growing=True)
    put_segment(publication, CACHE)
    (entry,) = manifests(publication)[-1].segments
    assert entry.complete and not publication.complete
    assert publication.next_object is None
    publication.extend(TOKENS[3 * BLOCK :])
    entry = manifests(publication)[-1].segments[1]
    assert not entry.complete and not any(publication.tracks[3].objects())
    put_segment(publication, CACHE)
    assert manifests(publication)[-1].segments[1].complete
    assert publication.tracks[3].ended and not publication.tracks[0].ended
    publication.finish()
    assert publication.tracks[0].ended and publication.complete
    versions = manifests(publication)
    for earlier, later in itertools.pairwise(versions):
        check_progress(earlier, later)


def test_tokens_that_fill_no_block_begin_the_next_segment():
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS[: 2 * BLOCK + 1], growing=True)
    put_segment(publication, CACHE)
    at = 2 * BLOCK + 1
    assert publication.extend(TOKENS[at : at + 1]) == 0
    assert publication.extend([]) == 0
    assert publication.extend(np.array(TOKENS[at + 1 : at + 7])) == 2
    assert (publication.segment, publication.segment_blocks) == (1, 2)
    assert publication.first_token == 2 * BLOCK
    put_segment(publication, CACHE)
    publication.finish()
    assert publication.tokens == 4 * BLOCK
    last = manifests(publication)[-1].segments[1]
    assert last.block_keys_sha256 == keys_digest(block_keys(SCOPE, DESCRIPTOR, TOKENS)[2:4])


def test_each_wrong_order_is_told_in_a_plain_sentence_and_changes_nothing():
    single = Publication(SCOPE, DESCRIPTOR, TOKENS)
    with pytest.raises(MisuseError, match=r"cannot be extended: it has one .* with growing=True"):
        single.extend(TOKENS)
    put_segment(single, CACHE)
    with pytest.raises(MisuseError, match="cannot be finished: it has ended, with its last layer"):
        single.finish()
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS[: 3 * BLOCK], growing=True)
    publication.put_layer(0, *CACHE[0])
    for call, what in ((lambda: publication.extend(TOKENS), "extended"), (publication.finish, "f")):
        with pytest.raises(MisuseError, match=f"cannot be {what}.* yet: layer 1, block 0 of seg"):
            call()
    for layer in range(1, LAYERS):
        publication.put_layer(layer, *CACHE[layer])
    with pytest.raises(MisuseError, match="segment 0 has every layer: extend or finish"):
        publication.put_layer(0, *CACHE[0])
    with pytest.raises(DecodeError, match="bad-token"):
        publication.extend([1, 2, -3, 4])
    publication.extend(TOKENS[3 * BLOCK :])
    with pytest.raises(MisuseError, match="8 are to be published, from token 12 on"):
        publication.put_layer(0, *(tensor[:BLOCK] for tensor in CACHE[0]))
    put_segment(publication, CACHE)
    publication.finish()
    for call, what in ((lambda: publication.extend([1]), "extended"), (publication.finish, "f")):
        with pytest.raises(MisuseError, match=f"cannot be {what}.*: it has ended$"):
            call()
    with pytest.raises(MisuseError, match="the publication has ended"):
        publication.put_block(0, 0, *(tensor[:BLOCK] for tensor in CACHE[0]))
    assert publication.next_object is None


def test_more_segments_than_a_publication_may_have_are_refused_and_warned_of_by_both_sides(caplog):
    assert codes.MAX_SEGMENTS == 1024
    REACHED.clear()
    whole = manifests(grown((1, 1, 1), CACHE))[-1].to_json()
    publication = grown((1, 1), CACHE, finish=False, max_segments=2)
    with pytest.raises(KvcsError, match=r"has 2 segments, and no more are allowed \(max_segments"):
        publication.extend(TOKENS[2 * BLOCK :])
    said = "a publication is at its limit of 2 segments (max_segments; said once, and counted)"
    assert said in caplog.messages
    publication.finish()
    with pytest.raises(DecodeError, match=r"bad-manifest.* 3 segments, and at most 2 are read: al"):
        Manifest.parse(whole, max_segments=2)
    assert len(caplog.messages) == 1 and REACHED["max_segments"] == 2, "said once, and counted"
    REACHED.clear()
    with pytest.raises(DecodeError):
        Manifest.parse(whole, max_segments=2)
    assert "a manifest was not read: it has 3 segments" in caplog.messages[-1]
    assert len(Manifest.parse(whole, max_segments=3).segments) == 3


@pytest.mark.parametrize("sealed", [False, True])
def test_a_segment_whose_manifest_cannot_be_signed_has_not_begun(monkeypatch, sealed):
    scope = Scope(bytes(range(32)), (ContentKey.generate(),) if sealed else ())
    signer = ProducerKey.generate()
    publication = Publication(scope, DESCRIPTOR, TOKENS[:BLOCK], growing=True, signer=signer)
    served = Publisher()
    publication.serve(served)
    put_segment(publication, CACHE)

    def state():
        stores = publication.tracks
        return (
            *(publication.segment, publication.blocks, publication.first_token, stores),
            *([store.largest for store in stores], set(served.tracks), publication.next_object),
        )

    before = state()
    monkeypatch.setattr(publications, "sign", failing)
    for _ in range(2):
        with pytest.raises(OSError, match="no key"):
            publication.extend(TOKENS[BLOCK : 2 * BLOCK])
        assert state() == before
    monkeypatch.undo()
    assert publication.extend(TOKENS[BLOCK : 3 * BLOCK]) == 2
    put_segment(publication, CACHE)
    publication.finish()
    assert publication.tokens == 3 * BLOCK and publication.complete
    assert [store.name.name[-2:] for store in publication.tracks[1:]] == [b"s0"] * 2 + [b"s1"] * 2


def test_a_segment_whose_end_cannot_be_signed_ends_before_anything_else(monkeypatch):
    signer = ProducerKey.generate()
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS[:BLOCK], growing=True, signer=signer)
    put_segment(publication, CACHE, range(LAYERS - 1))
    monkeypatch.setattr(publications, "sign", failing)
    with pytest.raises(OSError, match="no key"):
        publication.put_layer(LAYERS - 1, *CACHE[-1])
    for call in (lambda: publication.extend(TOKENS[BLOCK:]), publication.finish):
        with pytest.raises(OSError, match="no key"):
            call()
        assert not publication.complete and publication.segment == 0
    monkeypatch.undo()
    publication.finish()
    last = publication.tracks[0].groups[publication.tracks[0].group_ids[-2]].objects[0].payload
    manifest = Manifest.parse(open_message(bytes(last), None), publication.namespace)
    assert manifest.segments[0].complete
    assert all(store.end_code == PublishDoneCode.TRACK_ENDED for store in publication.tracks)


def failing(*_):
    raise OSError("no key")


def test_the_more_encodings_the_fewer_segments_so_that_a_manifest_can_list_all_tracks():
    joint = [Encoding(codec, joint=True) for codec in (Codec.RAW, Codec.X_ZLIB, Codec.X_ZSTD)]
    settings = {"encodings": [Codec.RAW, *joint], "max_segments": 3}
    publication = grown((1, 1), CACHE, finish=False, **settings)
    with pytest.raises(KvcsError, match="has 2 segments, and no more are allowed"):
        publication.extend(TOKENS[2 * BLOCK : 3 * BLOCK])
    publication.finish()
    assert len(manifests(publication)[-1].segments) == 2


def test_an_abandoned_publication_leaves_its_whole_segments_ended():
    publication = grown((3,), CACHE, finish=False)
    publication.extend(TOKENS[3 * BLOCK :])
    publication.put_layer(0, *(tensor[3 * BLOCK :] for tensor in CACHE[0]))
    publication.abandon()
    codes = [store.end_code for store in publication.tracks]
    ended, lost = PublishDoneCode.TRACK_ENDED, PublishDoneCode.INTERNAL_ERROR
    assert codes == [lost, ended, ended, lost, lost]


async def test_a_session_serves_the_segments_to_come_until_it_is_unpublished():
    link = Link(Accepting())
    handler = link.pair.client.handler = Publisher()
    async with link:
        publication = Publication(SCOPE, DESCRIPTOR, TOKENS[:BLOCK], growing=True)
        announced = await publish(link.session, publication)
        put_segment(publication, CACHE)
        publication.extend(TOKENS[BLOCK : 2 * BLOCK])
        assert set(handler.tracks.values()) == set(publication.tracks)
        unpublish(link.session, publication, announced)
        put_segment(publication, CACHE)
        publication.extend(TOKENS[2 * BLOCK :])
        assert not handler.tracks
        await link.assert_clean()


def test_a_publisher_that_is_gone_is_not_kept():
    publication = grown((1,), CACHE, finish=False)
    served = publisher(publication)
    publication.serve(served)
    gone = weakref.ref(served)
    del served
    gc.collect()
    assert gone() is None
    publication.extend(TOKENS[BLOCK:])


def test_a_publisher_says_how_large_its_manifest_may_be() -> None:
    for octets, fits in ((10_000, True), (1_000, False)):
        try:
            publication = Publication(SCOPE, DESCRIPTOR, TOKENS, max_manifest_octets=octets)
        except KvcsError as error:
            assert not fits and "--max-manifest" in str(error) and "1000 are allowed" in str(error)
            continue
        put_segment(publication, CACHE)
        assert fits and publication.complete
    with pytest.raises(ValueError, match="the limits are at least 1"):
        Publication(SCOPE, DESCRIPTOR, TOKENS, max_manifest_octets=0)
