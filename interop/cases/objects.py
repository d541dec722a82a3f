"""Objects as they cross a relay: ends, sizes, numbers, priorities, properties, range filters."""

from __future__ import annotations

import hashlib
from typing import Any

import moqt
from interop.case import NotOffered, Stage, case
from interop.cases.support import (
    FROM_START,
    TRACK,
    Source,
    expect,
    expect_locations,
    normal,
    payload,
    publisher,
    take,
    update,
)
from moqt import KeyValue, Location, LocationFilter, ObjectStatus, Parameters, RangeFilter, Via
from moqt.values.codes import ParameterType

APPLICATION_PROPERTY = 0x3800
"""The first Property type left to applications."""
PROPERTY_FIVE = bytes.fromhex("b80005")
"""It, with the value 5, as an Object carries it."""
LARGE = 4 << 20
MANY = 300


async def _subscribed(stage: Stage, source: Source, **options: object) -> moqt.Subscription:
    subscriber = await stage.connect("subscriber")
    return await subscriber.subscribe(source.namespace, TRACK, **options)  # type: ignore[arg-type]


@case("data-subgroup-basic")
async def data_subgroup_basic(stage: Stage) -> None:
    """Three Groups of five Objects arrive once each, and PUBLISH_DONE says TRACK_ENDED."""
    source = await publisher(stage)
    subscription = await _subscribed(stage, source)
    for group in range(3):
        source.group(group, range(5))
    source.end(3)
    expect_locations(await normal(subscription), {(g, o) for g in range(3) for o in range(5)})
    code = subscription.done_code
    expect(code == moqt.PublishDoneCode.TRACK_ENDED, "PUBLISH_DONE TRACK_ENDED", code)


@case("data-subgroups")
async def data_subgroups(stage: Stage) -> None:
    """The Objects of a Group keep the Subgroup they were published in."""
    source = await publisher(stage)
    subscription = await _subscribed(stage, source)
    for object_id in range(9):
        source.store.append(0, object_id, payload(0, object_id), subgroup=object_id % 3)
    for subgroup in range(3):
        source.store.finish_subgroup(0, subgroup)
    source.end(1)
    got = await normal(subscription)
    expect_locations(got, {(0, object_id) for object_id in range(9)})
    placed = {each.location.object: each.subgroup for each in got}
    expect(placed == {o: o % 3 for o in range(9)}, "Subgroup IDs as published", placed)


@case("data-datagrams")
async def data_datagrams(stage: Stage) -> None:
    """Objects in Delivery Mode Datagram arrive as datagrams, none of them twice."""
    source = await publisher(stage)
    subscription = await _subscribed(stage, source)
    for object_id in range(20):
        source.datagram(0, object_id)
    # Datagrams may be lost, though hardly all of them on one machine.
    got = await take(subscription, 1)
    source.end(1)
    got += await normal(subscription)
    expect_locations(got, {(each.location.group, each.location.object) for each in got})
    ways = {each.via for each in got}
    expect(ways == {Via.DATAGRAM}, "datagrams", ways)


@case("data-empty-objects")
async def data_empty_objects(stage: Stage) -> None:
    """An Object without payload is an Object like any other."""
    source = await publisher(stage)
    subscription = await _subscribed(stage, source)
    for object_id in range(3):
        source.store.append(0, object_id, b"")
    source.store.finish_subgroup(0, 0)
    source.end(1)
    got = [(each.location.object, bytes(each.payload)) for each in await normal(subscription)]
    expect(sorted(got) == [(o, b"") for o in range(3)], "three empty Objects", sorted(got))


class _GroupEnds(moqt.Subscription):
    """A subscription that remembers which Groups have ended, however it was told."""

    def __init__(self) -> None:
        super().__init__(max_octets=1 << 20)
        self.last: dict[int, Location] = {}
        self.ends: set[Location] = set()

    def object_received(self, received: moqt.ReceivedObject) -> None:
        super().object_received(received)
        if received.status is ObjectStatus.END_OF_GROUP:
            self.ends.add(received.location)

    def object_ended(self, stream: Any, header: Any) -> None:
        super().object_ended(stream, header)
        self.last[stream.stream_id] = Location(header.group, header.object + 1)

    def stream_ended(self, stream: Any, error: int | None) -> None:
        super().stream_ended(stream, error)
        flagged = stream.subgroup is not None and stream.subgroup.end_of_group
        if flagged and error is None and stream.stream_id in self.last:
            self.ends.add(self.last[stream.stream_id])


@case("end-of-group")
async def end_of_group(stage: Stage) -> None:
    """The end of a Group arrives, as the status or as END_OF_GROUP on a stream with FIN."""
    source = await publisher(stage)
    subscriber = await stage.connect("subscriber")
    subscription = _GroupEnds()
    await subscriber.subscribe_with(source.namespace, TRACK, subscription, Parameters())
    source.put(0, 0)
    source.put(0, 1)
    source.store.mark_end(Location(0, 2), ObjectStatus.END_OF_GROUP)
    source.store.finish_subgroup(0, 0)
    source.group(1)
    source.end(2)
    await normal(subscription)
    expect(Location(0, 2) in subscription.ends, "Group 0 ended at 0/2", subscription.ends)
    expect(Location(1, 3) not in subscription.ends, "no end of Group 1", subscription.ends)


@case("end-of-track")
async def end_of_track(stage: Stage) -> None:
    """The status End of Track arrives, then PUBLISH_DONE with TRACK_ENDED."""
    source = await publisher(stage)
    subscription = await _subscribed(stage, source)
    source.group(0)
    source.end(1)
    ends = [
        each.location async for each in subscription if each.status is ObjectStatus.END_OF_TRACK
    ]
    expect(ends == [Location(1, 0)], "End of Track at 1/0", ends)
    code = subscription.done_code
    expect(code == moqt.PublishDoneCode.TRACK_ENDED, "PUBLISH_DONE TRACK_ENDED", code)


@case("large-object", seconds=30)
async def large_object(stage: Stage) -> None:
    """An Object of 4 MiB crosses the relay byte for byte."""
    source = await publisher(stage)
    subscription = await _subscribed(stage, source)
    octets = payload(0, 0, LARGE)
    source.store.append(0, 0, octets)
    source.store.finish_subgroup(0, 0)
    source.end(1)
    (received,) = await normal(subscription)
    digest = hashlib.sha256(received.payload).hexdigest()
    wanted = hashlib.sha256(octets).hexdigest()
    expect(digest == wanted, f"SHA-256 {wanted}", f"{len(received.payload)} octets, {digest}")


@case("many-groups", seconds=30)
async def many_groups(stage: Stage) -> None:
    """300 Groups, a stream each, all arrive: more than may be open at a time."""
    source = await publisher(stage)
    subscription = await _subscribed(stage, source)
    for group in range(MANY):
        source.group(group, range(2))
    source.end(MANY)
    expect_locations(await normal(subscription), {(g, o) for g in range(MANY) for o in range(2)})


@case("priorities")
async def priorities(stage: Stage) -> None:
    """Objects keep their Publisher Priority; SUBSCRIBER_PRIORITY and GROUP_ORDER are taken."""
    source = await publisher(stage)
    subscription = await _subscribed(
        stage, source, priority=7, group_order=moqt.GroupOrder.DESCENDING
    )
    published = {0: 0, 1: 7, 2: 128, 3: 255}
    for group, priority in published.items():
        source.store.append(group, 0, payload(group, 0), priority=priority)
        source.store.finish_subgroup(group, 0)
    source.end(4)
    got = await normal(subscription)
    expect_locations(got, {(group, 0) for group in published})
    # None means the track's default, which is 128 when the track names none.
    kept = {e.location.group: 128 if e.priority is None else e.priority for e in got}
    expect(kept == published, f"priorities {published}", kept)


@case("properties")
async def properties(stage: Stage) -> None:
    """Track and Object Properties that a relay does not know pass it unchanged."""
    of_track = (KeyValue(APPLICATION_PROPERTY, 9), KeyValue(APPLICATION_PROPERTY + 1, b"nine"))
    source = await publisher(stage, properties=of_track)
    subscription = await _subscribed(stage, source)
    source.store.append(0, 0, payload(0, 0), properties=PROPERTY_FIVE)
    source.store.finish_subgroup(0, 0)
    source.end(1)
    kept = [each for each in subscription.properties if each.type >= APPLICATION_PROPERTY]
    expect(kept == list(of_track), f"Track Properties {of_track}", kept)
    (received,) = await normal(subscription)
    same = received.properties == PROPERTY_FIVE
    expect(same, f"Object Properties {PROPERTY_FIVE.hex()}", received.properties.hex())


async def _filtered(stage: Stage, *filters: RangeFilter) -> list[moqt.ReceivedObject]:
    """What range filters let through of 2 Groups with 6 Objects in 2 Subgroups each."""
    source = await publisher(stage)
    subscriber = await stage.connect("subscriber")
    if not subscriber.session.peer_max_filter_ranges:
        raise NotOffered("the relay announces no MAX_FILTER_RANGES")
    subscription = await subscriber.subscribe(source.namespace, TRACK, range_filters=filters)
    for group in range(2):
        for object_id in range(6):
            subgroup = object_id % 2
            source.store.append(
                group,
                object_id,
                payload(group, object_id),
                subgroup=subgroup,
                priority=10 * (1 + subgroup),
                properties=PROPERTY_FIVE if object_id == 4 else b"",
            )
        for subgroup in range(2):
            source.store.finish_subgroup(group, subgroup)
    source.end(2)
    return await normal(subscription)


@case("range-filter-object")
async def range_filter_object(stage: Stage) -> None:
    """OBJECTID_FILTER with a closed and an open range."""
    ranges = ((0, 1), (4, None))
    got = await _filtered(stage, RangeFilter(ParameterType.OBJECTID_FILTER, ranges=ranges))
    expect_locations(got, {(g, o) for g in range(2) for o in (0, 1, 4, 5)})


@case("range-filter-subgroup")
async def range_filter_subgroup(stage: Stage) -> None:
    """SUBGROUP_FILTER lets one Subgroup of each Group through."""
    got = await _filtered(stage, RangeFilter(ParameterType.SUBGROUP_FILTER, ranges=((1, 1),)))
    expect_locations(got, {(g, o) for g in range(2) for o in (1, 3, 5)})


@case("range-filter-priority")
async def range_filter_priority(stage: Stage) -> None:
    """PRIORITY_FILTER compares the Publisher Priority."""
    got = await _filtered(stage, RangeFilter(ParameterType.PRIORITY_FILTER, ranges=((0, 15),)))
    expect_locations(got, {(g, o) for g in range(2) for o in (0, 2, 4)})


@case("range-filter-property")
async def range_filter_property(stage: Stage) -> None:
    """OBJECT_PROPERTY_FILTER: an Object without the Property does not match."""
    chosen = RangeFilter(
        ParameterType.OBJECT_PROPERTY_FILTER,
        property_type=APPLICATION_PROPERTY,
        ranges=((5, 6),),
    )
    expect_locations(await _filtered(stage, chosen), {(g, 4) for g in range(2)})


@case("range-filter-sets")
async def range_filter_sets(stage: Stage) -> None:
    """Filters of one SetID must all pass; one SetID that passes is enough."""
    subgroup = RangeFilter(ParameterType.SUBGROUP_FILTER, 0, ranges=((1, 1),))
    low = RangeFilter(ParameterType.OBJECTID_FILTER, 0, ranges=((0, 3),))
    five = RangeFilter(ParameterType.OBJECTID_FILTER, 1, ranges=((4, 4),))
    got = await _filtered(stage, subgroup, low, five)
    expect_locations(got, {(g, o) for g in range(2) for o in (1, 3, 4)})


@case("pause-and-resume")
async def pause_and_resume(stage: Stage) -> None:
    """FORWARD 0 holds Objects back until a REQUEST_UPDATE says FORWARD 1."""
    source = await publisher(stage)
    subscriber = await stage.connect("subscriber")
    paused = Parameters(forward=0, location_filter=LocationFilter.next_object())
    subscription = await subscriber.subscribe(source.namespace, TRACK, parameters=paused)
    source.group(0)
    resumed = Parameters(
        forward=1,
        location_filter=LocationFilter.absolute_start(1),
        fill_parameters=None,
    )
    await update(subscription, resumed)
    source.group(1)
    source.end(2)
    expect_locations(await normal(subscription), {(1, object_id) for object_id in range(3)})


@case("two-subscribers")
async def two_subscribers(stage: Stage) -> None:
    """Two subscribers of one track get every Object each."""
    source = await publisher(stage)
    subscriptions = []
    for number in (1, 2):
        subscriber = await stage.connect(f"subscriber_{number}")
        subscriptions.append(await subscriber.subscribe(source.namespace, TRACK))
    for group in range(4):
        source.group(group)
    source.end(4)
    for subscription in subscriptions:
        expect_locations(await normal(subscription), {(g, o) for g in range(4) for o in range(3)})


@case("two-subscriptions")
async def two_subscriptions(stage: Stage) -> None:
    """A session may hold two subscriptions to one track; each brings what its filter selects."""
    source = await publisher(stage)
    subscriber = await stage.connect("subscriber")
    early = await subscriber.subscribe(
        source.namespace, TRACK, location_filter=LocationFilter.groups(0, 1)
    )
    late = await subscriber.subscribe(
        source.namespace, TRACK, location_filter=LocationFilter.absolute_start(2)
    )
    for group in range(4):
        source.group(group)
    source.end(4)
    expect_locations(await normal(early), {(g, o) for g in (0, 1) for o in range(3)})
    expect_locations(await normal(late), {(g, o) for g in (2, 3) for o in range(3)})


@case("join-in-the-middle")
async def join_in_the_middle(stage: Stage) -> None:
    """A joiner that fills from the start gets what was published before and what follows."""
    source = await publisher(stage)
    for group in range(3):
        source.group(group)
    subscription = await _subscribed(
        stage, source, location_filter=LocationFilter.next_object(), fill=FROM_START
    )
    expect(subscription.largest == Location(2, 2), "LARGEST_OBJECT 2/2", subscription.largest)
    before = await take(subscription, 9)
    expect({each.via for each in before} == {Via.FILL}, "the fill", {e.via for e in before})
    source.group(3)
    source.end(4)
    got = before + await normal(subscription)
    expect_locations(got, {(g, o) for g in range(4) for o in range(3)})
