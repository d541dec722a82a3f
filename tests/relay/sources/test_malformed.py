"""Objects that contradict each other (MOQT "Malformed Tracks")."""

from __future__ import annotations

import pytest

from moqt.values.codes import ObjectStatus, PublishDoneCode, RequestErrorCode, StreamErrorCode
from moqt.values.names import Location
from tests.relay.star import JOIN, LIVE, NAME, Star, publish, track


def two_publishers(star):
    stores = [track(), track()]
    for store in stores:
        star.publisher(store)
    return stores


def differ_in_payload(one, two):
    one.append(0, 0, b"right")
    yield
    two.append(0, 0, b"wrong")


def differ_in_length(one, two):
    one.append(0, 0, b"short")
    yield
    two.append(0, 0, b"longer")


def differ_in_subgroup(one, two):
    one.append(0, 0, b"x", subgroup=0)
    yield
    two.append(0, 0, b"x", subgroup=1)


def differ_in_priority(one, two):
    one.append(0, 0, b"x", priority=1)
    yield
    two.append(0, 0, b"x", priority=2)


def differ_in_delivery_mode(one, two):
    one.append(0, 0, b"x")
    yield
    stored = two.begin(Location(0, 0), subgroup=None, priority=None, properties=b"", length=1)
    two.grow(stored, b"x")
    two.complete(stored)


def differ_in_immutable_properties(one, two):
    one.append(0, 0, b"x", properties=b"\x0b\x02\x10\x01")
    yield
    two.append(0, 0, b"x", properties=b"\x0b\x02\x10\x02")


def beyond_the_end_of_its_group(one, two):
    one.append(0, 0, b"x")
    one.mark_end(Location(0, 1), ObjectStatus.END_OF_GROUP)
    yield
    two.append(0, 5, b"x")


def beyond_the_end_of_the_track(one, two):
    one.mark_end(Location(1, 0), ObjectStatus.END_OF_TRACK)
    yield
    two.append(2, 0, b"x")


def after_the_final_object_of_its_subgroup(one, two):
    one.append(0, 0, b"x")
    one.finish_subgroup(0, 0)
    yield
    two.append(0, 5, b"x")


def subgroups_that_end_differently(one, two):
    one.append(0, 0, b"x")
    one.append(0, 1, b"x")
    one.finish_subgroup(0, 0)
    yield
    two.append(0, 0, b"x")
    two.finish_subgroup(0, 0)


def a_mandatory_track_property_on_an_object(one, two):
    yield
    one.append(0, 0, b"x", properties=b"\xc0\x40\x00\x01")


def a_gap_that_covers_an_object(one, two):
    one.append(0, 3, b"x")
    yield
    two.append(0, 4, b"x", properties=b"\x3e\x02")


def a_gap_before_group_zero(one, two):
    yield
    one.append(1, 0, b"x", properties=b"\x3c\x02")


@pytest.mark.parametrize(
    "contradiction",
    [
        differ_in_payload,
        differ_in_length,
        differ_in_subgroup,
        differ_in_priority,
        differ_in_delivery_mode,
        differ_in_immutable_properties,
        beyond_the_end_of_its_group,
        beyond_the_end_of_the_track,
        after_the_final_object_of_its_subgroup,
        subgroups_that_end_differently,
        a_mandatory_track_property_on_an_object,
        a_gap_that_covers_an_object,
        a_gap_before_group_zero,
    ],
    ids=lambda function: function.__name__,
)
def test_a_contradiction_ends_the_track_and_nothing_else(contradiction):
    star = Star()
    stores = two_publishers(star)
    pair, collector = star.subscriber(LIVE)
    scenario = contradiction(*stores)
    next(scenario)
    star.run()
    assert star.relay.counters.malformed_tracks == 0 and collector.done is None
    next(scenario, None)
    star.run()
    assert collector.done == PublishDoneCode.MALFORMED_TRACK
    assert star.relay.counters.malformed_tracks == 1
    assert NAME not in star.relay.tracks and star.relay.cache.billed == 0
    assert all(p.client.closed is None for p in star.pairs)
    # It is refused for a while, then the name can be used again.
    refused = star.subscribe(pair, LIVE).failed
    assert refused.code == RequestErrorCode.MALFORMED_TRACK and refused.retry_after_ms > 0
    star.pass_time(refused.retry_after_ms / 1000 + 1, step=10)
    assert star.subscribe(pair, LIVE).accepted


def test_the_payload_of_a_duplicate_is_compared_while_both_are_growing():
    star = Star()
    stores = two_publishers(star)
    _, collector = star.subscriber(LIVE)
    growing = [
        s.begin(Location(0, 0), subgroup=0, priority=None, properties=b"", length=3000)
        for s in stores
    ]
    stores[0].grow(growing[0], b"a" * 1000)
    star.run()
    stores[1].grow(growing[1], b"a" * 2000)
    star.run()
    assert collector.parts == 2000 and star.relay.counters.malformed_tracks == 0
    stores[0].grow(growing[0], b"a" * 999 + b"b")
    star.run()
    assert star.relay.counters.malformed_tracks == 1
    assert collector.done == PublishDoneCode.MALFORMED_TRACK
    assert any(error == StreamErrorCode.MALFORMED_TRACK for _, error in collector.streams)


def test_a_malformed_fetch_ends_everything_that_is_served_of_the_track():
    star = Star()
    stores = [track(3), track()]
    publisher = star.publisher(stores[0])
    pair, live = star.subscriber(LIVE)
    fetch = star.fetch(pair, (0, 0), (0, 3))
    assert len(fetch.locations) == 4
    # The same track from elsewhere, with other octets at {0,1}.
    for o in range(3):
        stores[1].append(0, o, b"other" * 20)
    star.publisher(stores[1])
    growing = stores[1].begin(
        Location(3, 0), subgroup=0, priority=None, properties=b"", length=1000
    )
    stores[1].grow(growing, b"x" * 10)
    star.run()
    slow = star.fetch(star.connect(), (0, 0), (3, 0))
    publisher.handler.tracks[NAME].append(3, 0, b"not the same")
    star.run()
    assert live.done == PublishDoneCode.MALFORMED_TRACK
    assert slow.fetch_resets == [StreamErrorCode.MALFORMED_TRACK]
    assert star.relay.counters.malformed_tracks == 1


def test_a_request_that_waits_for_a_malformed_track_is_refused_as_such():
    star = Star()
    publisher = star.publisher(track())
    publisher.handler.tracks.clear()
    held = []
    publisher.handler.subscribe_received = held.append
    _, collector = star.subscriber(JOIN)
    held[0].reject(RequestErrorCode.MALFORMED_TRACK, "the next relay found it so")
    star.run()
    assert collector.failed.code == RequestErrorCode.MALFORMED_TRACK


def test_the_end_of_a_group_that_comes_before_its_objects_has_the_priority_of_their_subgroup():
    star = Star()
    store = track()
    star.publisher(store)
    store.append(0, 0, b"x", priority=3)
    _, live = star.subscriber(LIVE)
    store.mark_end(Location(0, 1), ObjectStatus.END_OF_GROUP, priority=3)
    star.run()
    assert [each.location for each in live.objects] == [Location(0, 1)]  # the Object is older
    collector = star.fetch(star.connect())
    assert star.relay.counters.malformed_tracks == 0
    assert collector.payloads == {Location(0, 0): b"x"}
    assert [each.priority for each in (*live.objects, *collector.normal)] == [3, 3]


def test_identical_duplicates_are_no_contradiction():
    star = Star()
    stores = two_publishers(star)
    _, collector = star.subscriber(LIVE)
    for store in stores:
        for o in range(4):
            publish(store, 0, o)
        star.run()
    assert len(collector.locations) == 4 and collector.repeated == []
    assert star.relay.counters.malformed_tracks == 0
    assert star.relay.cache.octets == 400


@pytest.mark.parametrize("size", [100, 5_000])
def test_the_final_object_of_a_subgroup_counts_even_if_it_makes_room_for_what_comes_after_it(size):
    star = Star(cache_octets=20_000)
    one, two = two_publishers(star)
    _, collector = star.subscriber(LIVE)
    for group in range(2):
        one.append(group, 0, bytes(9_000))
        one.finish_subgroup(group, 0)
        star.run()
    assert star.relay.cache.objects == 2
    two.append(0, 5, bytes(size))
    star.run()
    assert collector.done == PublishDoneCode.MALFORMED_TRACK
    assert star.relay.cache.billed == 0
