"""Publications in several segments, and in codecs and components that are not known here."""

from __future__ import annotations

import pytest

from kvcs.names.errors import Unsupported
from kvcs.programs.common import exit_code
from moqt.publisher import Publisher
from tests.kvcs.support import (
    BLOCK,
    BLOCKS,
    LAYERS,
    TOKENS,
    Link,
    altered,
    collect,
    corrupted,
    kv,
    produced,
    publisher,
)
from tests.kvcs.support_segments import in_codec, segmented, whole, with_component

CACHE = kv()


def check(layers, blocks=BLOCKS) -> None:
    whole(layers, CACHE, blocks)


@pytest.mark.parametrize("mode", ["live", "fetch"])
@pytest.mark.parametrize("sizes", [(3, 2), (1, 1, 3), (4, 1), (1, 1, 1, 1, 1)])
async def test_every_segment_of_our_tokens_is_retrieved_each_object_once(sizes, mode) -> None:
    async with Link(publisher(segmented(sizes, CACHE))) as link:
        consumer = link.consumer(mode=mode)
        check(await collect(consumer))
        assert consumer.stats.tokens == len(TOKENS)
        assert consumer.stats.objects_confirmed == consumer.stats.objects_verified
        assert consumer.stats.objects_verified == 2 * LAYERS * BLOCKS
        assert not consumer.stats.duplicates and not consumer.stats.discarded
        await link.assert_clean()


@pytest.mark.parametrize(("ours", "blocks"), [(5, 5), (4, 3), (3, 3)])
async def test_a_later_segment_is_taken_only_when_all_of_it_is_of_our_tokens(ours, blocks) -> None:
    async with Link(publisher(segmented((3, 2), CACHE))) as link:
        tokens = [*TOKENS[: ours * BLOCK], *range(3 * BLOCK)]
        consumer = link.consumer(tokens=tokens)
        check(await collect(consumer), blocks)
        assert consumer.stats.blocks == blocks


@pytest.mark.parametrize("blocks", [1, 3, 4])
async def test_leading_blocks_may_end_within_any_segment(blocks) -> None:
    async with Link(publisher(segmented((3, 2), CACHE))) as link:
        consumer = link.consumer(blocks=blocks)
        check(await collect(consumer), blocks)
        assert consumer.stats.objects_verified == 2 * LAYERS * blocks


async def test_a_bad_object_of_a_later_segment_is_asked_for_again() -> None:
    publication = segmented((3, 2), CACHE)
    served = publisher(publication)
    bad = altered(publication.tracks[3], corrupted((2, 1)))
    asked = []

    def fetch_received(request) -> None:
        if request.name == bad.name and not asked:
            asked.append(request)
            request.accept(bad)
        else:
            Publisher.fetch_received(served, request)

    served.fetch_received = fetch_received
    async with Link(served) as link:
        consumer = link.consumer()
        check(await collect(consumer))
        assert asked and consumer.stats.discarded == {"digest-mismatch": 1}
        assert consumer.stats.recoveries == 1


async def test_a_codec_we_lack_is_unsupported_and_no_failed_verification() -> None:
    async with Link(publisher(segmented((3, 2), CACHE, change=in_codec("x-new", 0, 1)))) as link:
        consumer = link.consumer()
        with pytest.raises(Unsupported, match=r"is offered only as x-new$") as raised:
            await collect(consumer)
        assert exit_code(raised.value) == 1
        await link.assert_clean()


async def test_a_publication_in_a_codec_we_lack_gives_way_to_another() -> None:
    other, ours = segmented((5,), CACHE, change=in_codec("x-new", 0)), produced(cache=CACHE)
    async with Link(publisher(other, ours)) as link:
        consumer = link.consumer(publications=[other.namespace, ours.namespace])
        check(await collect(consumer))
        assert consumer.stats.publication == ours.namespace.publication_id.hex()


async def test_before_a_segment_in_a_codec_we_lack_the_others_are_retrieved_and_it_is_told() -> (
    None
):
    async with Link(publisher(segmented((3, 2), CACHE, change=in_codec("x-new", 1)))) as link:
        consumer = link.consumer()
        check(await collect(consumer), 3)
        assert consumer.stats.discarded == {"codec-unsupported": 1}


async def test_a_track_of_a_component_we_do_not_know_is_passed_over() -> None:
    async with Link(publisher(segmented((3, 2), CACHE, change=with_component))) as link:
        consumer = link.consumer()
        check(await collect(consumer))
        assert not consumer.stats.discarded


async def test_the_publication_with_most_of_our_blocks_is_taken_however_short_its_first_segment():
    one, grows = produced(tokens=TOKENS[: 3 * BLOCK], cache=CACHE), segmented((1, 1, 2, 1), CACHE)
    async with Link(publisher(one, grows)) as link:
        consumer = link.consumer()
        check(await collect(consumer))
        assert consumer.stats.publication == grows.namespace.publication_id.hex()
        await link.assert_clean()


async def test_layers_that_were_not_handed_over_do_not_count_as_given() -> None:
    bad, good = segmented((3, 2), CACHE), produced(tokens=TOKENS[: 3 * BLOCK], cache=CACHE)
    served = publisher(bad, good)
    wrong = [(layer, block) for layer in range(3) for block in range(2)]
    served.add_track(altered(bad.tracks[3], corrupted(*wrong)))
    async with Link(served) as link:
        consumer = link.consumer(publications=[bad.namespace, good.namespace])
        layers = await collect(consumer)
        check([each for each in layers if each.publication == good.namespace.publication_id], 3)
        assert consumer.stats.whole_blocks == 3
