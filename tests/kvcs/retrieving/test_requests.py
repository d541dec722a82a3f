"""What a consumer asks for, in the terms of the draft (KVCS "Consumer Procedures")."""

from __future__ import annotations

import pytest

from kvcs.retrieving import receivers
from moqt.values.codes import GroupOrder, ParameterType
from moqt.values.config import SessionConfig
from moqt.values.messages import LocationFilter, RangeFilter
from tests.kvcs.support import BLOCKS, LAYERS, Link, Split, collect, kv, produced, until

CACHE = kv()
DATA = [b"k.raw.s0", b"v.raw.s0"]


class Noting(Split):
    """Knows every SUBSCRIBE, by Track Name, and every FETCH of data."""

    def __init__(self, publication) -> None:
        super().__init__(publication)
        self.asked: dict = {}

    def subscribe_received(self, request) -> None:
        self.asked[request.name.name] = request.parameters
        super().subscribe_received(request)


async def test_a_track_in_production_is_subscribed_to_with_a_fill_of_what_there_is() -> None:
    publication = produced(cache=CACHE[:2])
    async with Link(handler := Noting(publication)) as link:
        async with link.consumer(mode="live") as consumer:
            async for layer in consumer.layers():
                if layer.index == 1:
                    break
        for name in DATA:
            asked = handler.asked[name]
            assert asked.location_filter == LocationFilter.next_object()
            assert asked.fill_parameters.location_filter == LocationFilter.absolute_start(0, 0)


async def test_the_manifest_is_subscribed_to_with_a_fill_of_the_current_version() -> None:
    async with Link(handler := Noting(produced(cache=CACHE))) as link:
        await collect(link.consumer())
        # of one that does not exist as of the other
        assert [*handler.asked] == [b"manifest.cose", b"manifest"]
        for asked in handler.asked.values():
            assert asked.location_filter == LocationFilter.next_object()
            assert asked.fill_parameters.location_filter == LocationFilter.relative_start(1)
            assert asked.group_order == GroupOrder.DESCENDING, "the newest one goes first"


@pytest.mark.parametrize("layers", [range(LAYERS), range(1, 4), range(5, 6)])
async def test_layers_of_a_completed_track_are_fetched_from_the_first_to_the_last(
    layers, monkeypatch
) -> None:
    monkeypatch.setattr(receivers, "EARLY_OBJECTS", 0)
    async with Link(handler := Noting(produced(cache=CACHE))) as link:
        await collect(link.consumer(layers=layers))
        assert [fetch.name.name for fetch in handler.fetches] == DATA
        for fetch in handler.fetches:
            asked = fetch.parameters
            assert asked.location_filter == LocationFilter.groups(layers.start, layers[-1])
            assert asked.group_order == GroupOrder.ASCENDING and not asked.range_filters


@pytest.mark.parametrize("ranges", [0, 1])
async def test_the_first_blocks_of_a_segment_are_chosen_by_a_filter_where_the_peer_takes_one(
    ranges, monkeypatch
) -> None:
    monkeypatch.setattr(receivers, "EARLY_OBJECTS", 0)
    handler = Noting(produced(cache=CACHE))
    async with Link(handler, server_config=SessionConfig(max_filter_ranges=ranges)) as link:
        await collect(link.consumer(blocks=2))
        due = (RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((0, 1),)),) if ranges else ()
        for fetch in handler.fetches:
            assert fetch.parameters.range_filters == due
            assert fetch.parameters.location_filter == LocationFilter.groups(0, LAYERS - 1)


async def test_nothing_is_asked_for_that_a_fill_or_the_subscription_is_to_bring() -> None:
    publication = produced(cache=CACHE[:2])
    async with Link(handler := Noting(publication)) as link, link.consumer(mode="live") as consumer:
        seen = 0
        async for layer in consumer.layers():
            seen += 1
            if layer.index == 1:
                for index in range(2, LAYERS):
                    publication.put_layer(index, *CACHE[index])
        await until(lambda: publication.complete)
        assert seen == LAYERS and not handler.fetches
        assert consumer.stats.objects_verified == 2 * LAYERS * BLOCKS
