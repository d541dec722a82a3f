"""Several encodings of a cache side by side: which is taken, and what is made of it."""

from __future__ import annotations

import numpy as np
import pytest

from kvcs.finding.relays import Fallback
from kvcs.names.encoding import Encoding
from kvcs.names.errors import MisuseError, Unsupported, VerificationFailed
from kvcs.names.payload import data_digest
from kvcs.publishing.publication import Publication
from kvsp.blocks.layout import Tensor
from kvsp.names.codes import Codec
from moqt.values.names import Location
from tests.kvcs.support import (
    BLOCK,
    BLOCKS,
    DESCRIPTOR,
    LAYERS,
    SCOPE,
    TOKENS,
    Link,
    altered,
    collect,
    corrupted,
    produced,
    publisher,
    same,
)
from tests.kvcs.support_fallback import FakeClient

RELAY = "moqt://relay.example"


def finite(seed: int = 1, tokens: int = len(TOKENS)):
    random = np.random.default_rng(seed)
    shape = (tokens, DESCRIPTOR.kv_heads, DESCRIPTOR.head_dim)

    def tensor() -> Tensor:
        return random.normal(size=shape).astype(DESCRIPTOR.dtype)

    return [(tensor(), tensor()) for _ in range(DESCRIPTOR.layers)]


CACHE = finite()
RAW, ZLIB, Q8, ZSTD = Codec.RAW, Codec.X_ZLIB, Codec.X_Q8, Codec.X_ZSTD


def offered(*encodings: Encoding | Codec, cache=CACHE, **settings) -> Publication:
    return produced(cache=cache, encodings=encodings, **settings)


def check(layers, cache=CACHE, *, lossy: bool = False, blocks: int = BLOCKS) -> None:
    assert [layer.index for layer in layers] == list(range(LAYERS))
    for layer in layers:
        for got, wanted in zip((layer.k, layer.v), cache[layer.index], strict=True):
            due = wanted[: blocks * BLOCK]
            if not lossy:
                assert same(got, due)
                continue
            error = np.abs(got.astype(float) - due.astype(float))
            peak = np.abs(due.astype(float)).max(axis=2, keepdims=True)
            # half a step of x-q8, and what bfloat16 rounds
            assert (error <= peak / 254 + peak / 256).all() and error.any()


@pytest.mark.parametrize("mode", ["live", "fetch"])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("codec", list(Codec))
async def test_every_encoding_alone_is_retrieved_and_decoded(codec, joint, mode) -> None:
    async with Link(publisher(offered(Encoding(codec, joint)))) as link:
        consumer = link.consumer(mode=mode, allow_lossy=True)
        check(await collect(consumer), lossy=not codec.lossless)
        stats = consumer.stats
        assert stats.codecs == [codec.label]
        assert stats.objects_verified == stats.objects_confirmed
        assert stats.objects_verified == (1 if joint else 2) * LAYERS * BLOCKS
        assert stats.octets == 2 * LAYERS * BLOCKS * DESCRIPTOR.section_octets()
        assert not stats.discarded and not stats.duplicates
        await link.assert_clean()


@pytest.mark.parametrize(
    ("settings", "taken"),
    [
        ({}, RAW),
        ({"codecs": [ZSTD]}, ZSTD),
        ({"codecs": [ZSTD, RAW]}, ZSTD),
        ({"codecs": [RAW, ZSTD]}, RAW),
        ({"allow_lossy": True}, RAW),
        ({"codecs": [Q8, RAW], "allow_lossy": True}, Q8),
        ({"codecs": [ZLIB, Q8, RAW], "allow_lossy": True}, Q8),
    ],
)
async def test_of_several_encodings_the_one_preferred_is_taken_and_no_other(
    settings, taken
) -> None:
    publication = offered(RAW, ZSTD, Q8)
    assert len(publication.tracks) == 1 + 6
    async with Link(publisher(publication)) as link:
        consumer = link.consumer(**settings)
        check(await collect(consumer), lossy=taken is Q8)
        assert consumer.stats.codecs == [taken.label]
        assert consumer.stats.objects_verified == 2 * LAYERS * BLOCKS


async def test_a_pair_of_tracks_comes_before_a_joint_one_of_the_same_codec() -> None:
    async with Link(publisher(offered(Encoding(ZSTD, joint=True), Encoding(ZSTD)))) as link:
        consumer = link.consumer(codecs=[ZSTD])
        check(await collect(consumer))
        assert consumer.stats.objects_verified == 2 * LAYERS * BLOCKS


@pytest.mark.parametrize("settings", [{}, {"codecs": [RAW]}, {"codecs": [ZLIB, ZSTD]}])
async def test_a_lossy_codec_is_never_taken_unasked(settings) -> None:
    async with Link(publisher(offered(Q8))) as link:
        with pytest.raises(Unsupported, match=r"offered only as x-q8 \(lossy\)"):
            await collect(link.consumer(**settings))
        with pytest.raises(ValueError, match="lossy ones are not allowed"):
            link.consumer(codecs=[Q8])


async def test_one_in_another_codec_gives_way_to_the_next_publication() -> None:
    lossy, lossless = offered(Q8), offered(ZSTD)
    for order in ((lossy, lossless), (lossless, lossy)):
        async with Link(publisher(*order)) as link:
            consumer = link.consumer(publications=[each.namespace for each in order])
            check(await collect(consumer))
            assert consumer.stats.codecs == ["x-zstd"]
            assert consumer.stats.publication == lossless.namespace.publication_id.hex()


async def test_segments_are_each_in_the_encodings_of_the_publication() -> None:
    publication = Publication(
        SCOPE, DESCRIPTOR, TOKENS[: 3 * BLOCK], growing=True, encodings=(ZSTD, Q8)
    )
    for tokens in (slice(0, 3 * BLOCK), slice(3 * BLOCK, None)):
        if tokens.start:
            publication.extend(TOKENS[tokens])
        for layer, (k, v) in enumerate(CACHE):
            publication.put_layer(layer, k[tokens], v[tokens])
    publication.finish()
    names = [store.name.name.decode() for store in publication.tracks[1:]]
    assert names == [
        f"{component}.{codec}.s{segment}"
        for segment in (0, 1)
        for codec in ("x-zstd", "x-q8")
        for component in "kv"
    ]


async def test_an_encoded_object_that_was_changed_is_asked_for_again() -> None:
    publication = offered(ZSTD)
    served = publisher(publication)
    served.add_track(altered(publication.tracks[1], corrupted((2, 1))))
    asked = []
    fetch = served.fetch_received

    def mended(request) -> None:
        asked.append(request)
        served.add_track(publication.tracks[1])
        fetch(request)

    served.fetch_received = mended
    async with Link(served) as link:
        consumer = link.consumer(mode="live")
        check(await collect(consumer))
        assert consumer.stats.discarded == {"digest-mismatch": 1} and len(asked) == 1


async def test_data_that_does_not_decode_is_never_handed_over_whatever_its_digest_says() -> None:
    publication = offered(ZSTD)

    def undecodable(location: Location, payload: bytes) -> bytes:
        data = payload[68:-1] + bytes([payload[-1] ^ 1])
        return payload[:36] + data_digest(data) + data

    served = publisher(publication)
    for store in publication.tracks[1:]:
        served.add_track(altered(store, undecodable))
    async with Link(served) as link:
        with pytest.raises(VerificationFailed):
            await collect(link.consumer())


def test_values_that_a_codec_cannot_hold_are_refused_and_nothing_of_the_block_goes_out() -> None:
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS, encodings=(RAW, Q8))
    k, v = (tensor.copy() for tensor in CACHE[0])
    v[BLOCK, 1, 2] = np.inf
    with pytest.raises(MisuseError, match="layer 0, block 1: x-q8 holds finite numbers only"):
        publication.put_layer(0, k, v)
    assert publication.next_object == (0, 1)
    assert [store.placed for store in publication.tracks[1:]] == [1, 1, 1, 1]


@pytest.mark.parametrize("encodings", [(), (RAW, RAW), (RAW, Encoding(RAW))])
def test_there_is_an_encoding_and_each_is_there_once(encodings) -> None:
    with pytest.raises(ValueError, match="each once"):
        Publication(SCOPE, DESCRIPTOR, TOKENS, encodings=encodings)


# --- records and holders -------------------------------------------------------------

LONGER = [*TOKENS, *range(2 * BLOCK)]
LONG = finite(5, len(LONGER))


def of_longer(*encodings: Encoding | Codec, cache=LONG) -> Publication:
    return produced(DESCRIPTOR, LONGER, cache, encodings=encodings)


@pytest.mark.parametrize("encoding", [ZSTD, ZLIB, Encoding(ZSTD, joint=True)])
async def test_what_a_lossless_codec_gives_is_compared_with_the_raw_records(encoding) -> None:
    publication = of_longer(encoding)
    for recorded, right in ((LONG, True), (finite(6, len(LONGER)), False)):
        client = FakeClient(blocks=0).knows(publication, recorded, RELAY)
        async with Link(publisher(publication)) as link:
            consumer = link.consumer(fallback=Fallback(client, relay=RELAY), discovery="index")
            if right:
                check(await collect(consumer), LONG)
                continue
            with pytest.raises(VerificationFailed, match="not what the index service"):
                await collect(consumer)


async def test_a_lossy_codec_cannot_be_compared_with_a_record_and_is_not_taken_for_equal() -> None:
    settings = {"allow_lossy": True, "discovery": "index"}
    publication = of_longer(Q8)
    client = FakeClient(blocks=0).knows(publication, LONG, RELAY)
    async with Link(publisher(publication)) as link:
        fallback = Fallback(client, relay=RELAY)
        with pytest.raises(Unsupported, match="x-q8"):
            await collect(link.consumer(fallback=fallback, **settings))
    both = of_longer(Q8, ZSTD)
    client = FakeClient(blocks=0).knows(both, LONG, RELAY)
    async with Link(publisher(both)) as link:
        consumer = link.consumer(
            fallback=Fallback(client, relay=RELAY), codecs=[Q8, ZSTD], **settings
        )
        check(await collect(consumer), LONG)
        assert consumer.stats.codecs == ["x-zstd"]


@pytest.mark.parametrize("codec", [ZSTD, Q8])
async def test_a_holders_block_takes_the_place_of_a_bad_object_of_the_same_production(
    codec,
) -> None:
    publication = offered(codec)
    served = publisher(publication)
    served.add_track(altered(publication.tracks[1], corrupted((2, 1))))
    async with Link(served) as link:
        consumer = link.consumer(
            fallback=Fallback(FakeClient(CACHE), relay=RELAY), codecs=[codec], allow_lossy=True
        )
        layers = await collect(consumer)
        assert list(consumer.stats.over_http) == [(1, 2)]
        check(layers, lossy=codec is Q8)


@pytest.mark.parametrize("codec", [ZSTD, Q8])
async def test_a_block_of_another_production_is_never_mixed_in(codec) -> None:
    publication = offered(codec)
    served = publisher(publication)
    served.add_track(altered(publication.tracks[1], corrupted((2, 1))))
    other = finite(9)
    async with Link(served) as link:
        consumer = link.consumer(
            fallback=Fallback(FakeClient(other), relay=RELAY), codecs=[codec], allow_lossy=True
        )
        layers = await collect(consumer)
        last = layers[-LAYERS:]
        # all of the one or all of the other
        if consumer.stats.over_http:
            check(last, other)
            assert len(consumer.stats.over_http) == LAYERS * BLOCKS
        else:
            check(last, lossy=codec is Q8)
