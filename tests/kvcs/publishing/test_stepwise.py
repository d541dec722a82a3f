"""Publishing a layer step by step, beside others on the event loop."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter

import pytest

from kvcs import aextend, afinish, aput_layer
from kvcs.names.errors import MisuseError
from kvcs.names.manifest import Manifest
from kvcs.names.manifest_builder import check_progress, leaves_out, with_digests_of
from kvcs.publishing import publication as publications
from kvcs.publishing import stepwise
from kvcs.publishing.limits import manifests_octets
from kvcs.publishing.publication import Publication
from kvcs.trust.producers import ProducerKey
from kvsp.names.codes import Codec
from kvsp.names.content_keys import ContentKey
from kvsp.names.identity import Scope
from tests.kvcs.support import (
    BLOCK,
    BLOCKS,
    DESCRIPTOR,
    LAYERS,
    SCOPE,
    TOKENS,
    descriptor,
    kv,
    manifests,
    produced,
)


@pytest.mark.parametrize("threads", [False, True])
async def test_a_layer_put_step_by_step_is_the_same_and_leaves_before_it_is_all_hashed(
    threads, monkeypatch
):
    monkeypatch.setattr(stepwise, "STEP_OBJECTS", 4)
    monkeypatch.setattr(stepwise, "LEAST_IN_THREAD", 0 if threads else 1 << 30)
    publication, at_once, seen = Publication(SCOPE, DESCRIPTOR, TOKENS), produced(), []

    async def watch():
        while not publication.complete:
            seen.append(publication.next_object)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    for layer, (k, v) in enumerate(kv()):
        await aput_layer(publication, layer, k, v)
    await watching
    # others had their turn within a layer, with a part of it published
    assert {(0, 2), (0, 4), (3, 2)} <= set(seen)
    for one, other in zip(publication.tracks[1:], at_once.tracks[1:], strict=True):
        assert [(s.location, bytes(s.payload), s.priority) for s in one.objects()] == [
            (s.location, bytes(s.payload), s.priority) for s in other.objects()
        ]
    assert manifests(publication)[-1].segments == manifests(at_once)[-1].segments


async def test_what_was_abandoned_while_a_layer_is_put_step_by_step_gets_no_more_of_it(monkeypatch):
    monkeypatch.setattr(stepwise, "STEP_OBJECTS", 4)
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS)
    putting = asyncio.create_task(aput_layer(publication, 0, *kv()[0]))
    while publication.next_object == (0, 0):  # noqa: ASYNC110
        await asyncio.sleep(0)
    publication.abandon()
    with pytest.raises(MisuseError, match="block 2: the publication has ended"):
        await putting
    other = Publication(SCOPE, DESCRIPTOR, TOKENS)
    with pytest.raises(MisuseError, match="layer 0: k has 4 tokens"):
        await aput_layer(other, 0, *(tensor[:4] for tensor in kv()[0]))


# --- segments ----------------------------------------------------------------------------


async def test_one_version_says_that_a_segment_is_whole_and_the_next_has_begun() -> None:
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS[: 3 * BLOCK], growing=True)
    cache = kv()
    for layer, (k, v) in enumerate(cache):
        await aput_layer(publication, layer, k, v, more=True)
    assert publication.version_due and len(manifests(publication)) == 1
    assert not publication.tracks[1].ended, "the manifest says so first"
    assert await aextend(publication, TOKENS[3 * BLOCK :]) == 2
    first, second = manifests(publication)
    assert [entry.complete for entry in second.segments] == [True, False]
    assert publication.tracks[1].ended and not publication.tracks[3].ended
    for layer, (k, v) in enumerate(cache):
        await aput_layer(publication, layer, k[3 * BLOCK :], v[3 * BLOCK :])
    publication.finish()
    *_, last = versions = manifests(publication)
    assert len(versions) == 3 and all(entry.complete for entry in last.segments)
    for earlier, later in itertools.pairwise((first, second, last)):
        check_progress(earlier, later)


async def test_what_was_left_to_an_extension_is_told_when_there_is_none() -> None:
    cache, tokens = kv(), TOKENS[: 3 * BLOCK]
    for end in ("finished", "no block"):
        publication = Publication(SCOPE, DESCRIPTOR, tokens, growing=True)
        for layer, (k, v) in enumerate(cache):
            await aput_layer(publication, layer, k, v, more=True)
        if end == "finished":
            publication.finish()
        else:
            assert await aextend(publication, TOKENS[:1]) == 0
        assert manifests(publication)[-1].segments[0].complete and publication.tracks[1].ended


async def test_manifests_are_signed_in_a_thread_and_a_failure_changes_nothing(monkeypatch) -> None:
    threads, real = [], publications.sign

    def noted(*arguments):
        threads.append(threading.get_ident())
        return real(*arguments)

    def failing(*_):
        raise OSError("no key")

    scope = Scope(bytes(range(32)), (ContentKey.generate(),))
    signer = ProducerKey.generate()
    publication = Publication(scope, DESCRIPTOR, TOKENS[: 3 * BLOCK], growing=True, signer=signer)
    monkeypatch.setattr(publications, "sign", noted)
    for layer, (k, v) in enumerate(kv()):
        await aput_layer(publication, layer, k, v)
    before = publication.tracks, publication.blocks, publication.tracks[0].largest
    monkeypatch.setattr(publications, "sign", failing)
    with pytest.raises(OSError, match="no key"):
        await aextend(publication, TOKENS[3 * BLOCK :])
    assert (publication.tracks, publication.blocks, publication.tracks[0].largest) == before
    monkeypatch.setattr(publications, "sign", noted)
    assert await aextend(publication, TOKENS[3 * BLOCK :]) == 2
    assert len(threads) == 2 and threading.get_ident() not in threads


async def test_no_key_digest_or_manifest_of_a_chunk_is_made_in_the_thread_of_the_loop(monkeypatch):
    """However long the chunk is: 8,192 keys of one of 131,072 tokens would hold it for long."""
    monkeypatch.setattr(stepwise, "LEAST_IN_THREAD", 0)
    here, made = threading.get_ident(), Counter()

    def noted(name):
        real = getattr(publications, name)

        def call(*arguments, **named):
            made[name, threading.get_ident() == here] += 1
            return real(*arguments, **named)

        monkeypatch.setattr(publications, name, call)

    first = TOKENS[: 2 * BLOCK]
    publication = Publication(SCOPE, DESCRIPTOR, first, growing=True, signer=ProducerKey.generate())
    for name in ("block_keys", "data_digest", "sign"):
        noted(name)
    for layer, (k, v) in enumerate(kv()):
        await aput_layer(publication, layer, k, v, more=True)
    assert await aextend(publication, TOKENS[2 * BLOCK :]) == BLOCKS - 2
    for layer, (k, v) in enumerate(kv()):
        await aput_layer(publication, layer, k[2 * BLOCK :], v[2 * BLOCK :], more=True)
    await afinish(publication)
    assert publication.complete
    assert made == {
        ("block_keys", False): 1,
        ("data_digest", False): 2 * LAYERS * BLOCKS,
        ("sign", False): 2,
    }


async def test_one_that_is_abandoned_while_it_is_extended_is_not(monkeypatch) -> None:
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS[: 3 * BLOCK], growing=True)
    for layer, (k, v) in enumerate(kv()):
        publication.put_layer(layer, k, v)
    step = publication.segment_step(TOKENS[3 * BLOCK :])
    assert step is not None
    step.prepare()
    publication.abandon()
    with pytest.raises(MisuseError, match="the publication has ended"):
        step.put()
    assert len(publication.tracks) == 3


def test_the_octets_of_all_versions_are_known_before_they_are_made() -> None:
    assert manifests_octets(DESCRIPTOR, [3]) == 2 * LAYERS * 3 * 67
    assert manifests_octets(DESCRIPTOR, [1, 1, 1]) == 2 * LAYERS * (1 + 2 + 3) * 67
    assert manifests_octets(DESCRIPTOR, [1] * 4) == 2 * LAYERS * (1 + 2 + 1 + 4) * 67
    assert manifests_octets(DESCRIPTOR, [1] * 6) == 2 * LAYERS * (3 + 1 + 4 + 1 + 6) * 67


async def test_what_is_left_to_an_extension_that_has_no_block_is_written_in_a_thread(monkeypatch):
    threads, real = [], publications.sign

    def noted(*arguments):
        threads.append(threading.get_ident())
        return real(*arguments)

    publication = Publication(
        SCOPE, DESCRIPTOR, TOKENS[: 3 * BLOCK], growing=True, signer=ProducerKey.generate()
    )
    monkeypatch.setattr(publications, "sign", noted)
    for layer, (k, v) in enumerate(kv()):
        await aput_layer(publication, layer, k, v, more=True)
    assert not threads
    assert await aextend(publication, TOKENS[:1]) == 0
    assert publication.tracks[1].ended
    assert len(threads) == 1 and threading.get_ident() not in threads


async def test_a_step_has_no_more_objects_in_several_encodings_than_in_one(monkeypatch) -> None:
    monkeypatch.setattr(stepwise, "STEP_OBJECTS", 8)
    most = {}
    for encodings in ([Codec.RAW], [Codec.RAW, Codec.X_ZSTD]):
        publication = Publication(SCOPE, DESCRIPTOR, TOKENS, encodings=encodings)
        seen = [0]

        async def watch(publication=publication, seen=seen):
            while publication.next_object != (1, 0):
                seen.append(sum(store.placed for store in publication.tracks[1:]))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        await aput_layer(publication, 0, *kv()[0])
        await watching
        most[len(encodings)] = max(b - a for a, b in itertools.pairwise(seen))
    assert most[1] <= 8 and most[2] <= 8


@pytest.mark.parametrize("signed", [False, True])
def test_a_version_is_made_of_pieces_that_the_versions_before_it_have(signed) -> None:
    """A copy of all would hold up every thread, and each version would have its own."""
    signer = ProducerKey.generate() if signed else None
    publication = Publication(SCOPE, DESCRIPTOR, TOKENS[:BLOCK], growing=True, signer=signer)
    for number in range(4):
        if number:
            publication.extend(TOKENS[number * BLOCK : (number + 1) * BLOCK])
        for layer, (k, v) in enumerate(kv()):
            rows = slice(number * BLOCK, (number + 1) * BLOCK)
            publication.put_layer(layer, k[rows], v[rows])
    publication.finish()
    *before, last = (each.parts for each in publication.tracks[0].objects())
    shared = {id(part) for parts in before for part in parts} & {id(part) for part in last}
    digests = 3 * 2 * LAYERS * 66
    assert sum(len(part) for part in last if id(part) in shared) >= digests
    # of a whole segment one for each track, and what stands between them
    assert len(last) <= 4 * 2 * 2 + 3


def test_all_versions_have_four_times_the_octets_of_the_last_at_most_however_many_segments() -> (
    None
):
    """A long context in chunks of 256 tokens: 2.9 times, where versions that list all would have
    256.5 times, 22.5 GB."""
    described = descriptor(layers=80, block_tokens=16)
    last = manifests_octets(described, [8192])
    assert last == 1_310_720 * 67
    of_every_version = sum(n * last // 512 for n in range(1, 513))
    assert of_every_version == 256.5 * last > 22.5e9
    assert manifests_octets(described, [16] * 512) < 3 * last
    for segments in range(1, 200):
        assert manifests_octets(described, [1] * segments) <= 4 * segments * 160 * 67


@pytest.mark.parametrize("more", [False, True])
async def test_versions_in_between_list_what_is_new_and_the_last_one_lists_all(more) -> None:
    described = descriptor(layers=LAYERS)
    tokens, cache = list(range(48 * BLOCK)), kv(described, 48 * BLOCK)
    publication = Publication(SCOPE, described, tokens[:BLOCK], growing=True)
    for at in range(48):
        if at:
            await aextend(publication, tokens[at * BLOCK : (at + 1) * BLOCK])
        for layer, (k, v) in enumerate(cache):
            first = publication.first_token
            await aput_layer(publication, layer, k[first:], v[first:], more=more)
    if more:
        await afinish(publication)
    else:
        publication.finish()
    versions = [Manifest.parse(b"".join(v.parts)) for v in publication.tracks[0].objects()]
    listed = [
        sum(
            entry.blocks * entry.listed_groups(track)
            for entry in m.segments
            for track in entry.tracks
        )
        for m in versions
    ]
    every = 48 * 2 * LAYERS
    assert listed[-1] == every and sum(listed) <= 4 * every
    assert len(versions) == (49 if more else 97)
    whole = versions[0]
    for version in versions[1:]:
        check_progress(whole, version)
        whole = with_digests_of(whole, version)
        assert not any(leaves_out(entry, LAYERS) for entry in whole.segments)
    assert whole == versions[-1]


async def test_the_octets_of_all_versions_are_counted_and_are_those_that_were_told_before() -> None:
    described = descriptor(layers=LAYERS)
    tokens = list(range(32 * BLOCK))
    publication = Publication(SCOPE, described, tokens[: 4 * BLOCK], growing=True)
    cache = kv(described, len(tokens))
    for at in range(0, 32, 4):
        if at:
            await aextend(publication, tokens[at * BLOCK : (at + 4) * BLOCK])
        first = publication.first_token
        for layer, (k, v) in enumerate(cache):
            await aput_layer(publication, layer, k[first:], v[first:], more=True)
    await afinish(publication)
    versions = [each.length for each in publication.tracks[0].objects()]
    assert publication.manifest_octets == sum(versions) and len(versions) == 9
    told = manifests_octets(described, [4] * 8)
    frames = sum(versions) - told
    assert 0 < frames < 9 * (1000 + 8 * 400)
