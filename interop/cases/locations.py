"""Location filters of every type (MOQT "Location Filter"), and joining with a fill.

Each case subscribes while the track stands at a known Largest Object, lets more Objects
follow, ends the track, and compares what came with what the filter selects.
"""

from __future__ import annotations

import asyncio

import moqt
from interop.case import Stage, case
from interop.cases.support import FROM_START, TRACK, expect_locations, normal, publisher
from moqt import Location, LocationFilter
from moqt.values.codes import LocationFilterType


async def _selected(
    stage: Stage,
    chosen: LocationFilter | None,
    before: int,
    after: range,
    fill: LocationFilter | None = None,
) -> list[moqt.ReceivedObject]:
    """What a subscription brings: Groups below `before` exist when it is made, `after` follow."""
    source = await publisher(stage)
    for group in range(before):
        source.group(group)
    subscriber = await stage.connect("subscriber")
    subscription = await subscriber.subscribe(
        source.namespace, TRACK, location_filter=chosen, fill=fill
    )
    for group in after:
        source.group(group)
    source.end(after.stop)
    return await normal(subscription)


def _groups(groups: range, objects: range = range(3)) -> set[tuple[int, int]]:
    return {(group, object_id) for group in groups for object_id in objects}


@case("location-none")
async def location_none(stage: Stage) -> None:
    """Filter Type 0 selects everything that is published from then on."""
    chosen = LocationFilter(LocationFilterType.NONE)
    got = await _selected(stage, chosen, 0, range(3))
    expect_locations(got, _groups(range(3)))


@case("location-absent")
async def location_absent(stage: Stage) -> None:
    """No LOCATION_FILTER is the same as Filter Type 0."""
    got = await _selected(stage, None, 0, range(3))
    expect_locations(got, _groups(range(3)))


@case("location-next-group")
async def location_next_group(stage: Stage) -> None:
    """Relative Start 0 begins with the Group after the current one."""
    source = await publisher(stage)
    source.group(0)
    source.put(1, 0)
    subscriber = await stage.connect("subscriber")
    subscription = await subscriber.subscribe(
        source.namespace, TRACK, location_filter=LocationFilter.relative_start(0)
    )
    source.put(1, 1)
    source.store.finish_subgroup(1, 0)
    source.group(2)
    source.end(3)
    expect_locations(await normal(subscription), _groups(range(2, 3)))


@case("location-current-group")
async def location_current_group(stage: Stage) -> None:
    """Relative Start 1, as filter and as fill, brings the current Group whole and no other."""
    current = LocationFilter.relative_start(1)
    next_object = LocationFilter.next_object()
    got = await _selected(stage, next_object, 3, range(3, 5), fill=current)
    expect_locations(got, _groups(range(2, 5)))


@case("location-absolute-start")
async def location_absolute_start(stage: Stage) -> None:
    """Absolute Start begins in the middle of a Group that is still to come."""
    chosen = LocationFilter.absolute_start(2, 1)
    got = await _selected(stage, chosen, 1, range(1, 4))
    expect_locations(got, _groups(range(2, 4)) - {(2, 0)})


@case("location-group-end")
async def location_group_end(stage: Stage) -> None:
    """Absolute Start, Group End takes the last Group whole and nothing after it."""
    chosen = LocationFilter(LocationFilterType.ABSOLUTE_START_GROUP_END, 2, 1, 1)
    got = await _selected(stage, chosen, 1, range(1, 6))
    expect_locations(got, _groups(range(2, 4)) - {(2, 0)})


@case("location-absolute-range")
async def location_absolute_range(stage: Stage) -> None:
    """Both ends of an Absolute Range are inclusive."""
    chosen = LocationFilter.range(Location(2, 1), Location(3, 1))
    got = await _selected(stage, chosen, 1, range(1, 6))
    expect_locations(got, {(2, 1), (2, 2), (3, 0), (3, 1)})


@case("location-next-object")
async def location_next_object(stage: Stage) -> None:
    """Next Object goes on in the current Group, directly after the Largest Object."""
    source = await publisher(stage)
    source.group(0)
    source.put(1, 0)
    subscriber = await stage.connect("subscriber")
    subscription = await subscriber.subscribe(
        source.namespace, TRACK, location_filter=LocationFilter.next_object()
    )
    source.group(1, range(1, 3))
    source.group(2)
    source.end(3)
    expect_locations(await normal(subscription), {(1, 1), (1, 2)} | _groups(range(2, 3)))


@case("location-past")
async def location_past(stage: Stage) -> None:
    """A filter whose end has passed is acceptable, and brings nothing new."""
    chosen = LocationFilter.groups(0, 0)
    got = await _selected(stage, chosen, 3, range(3, 5))
    # What exists already is the publisher's to send or not; nothing else may come.
    seen = {(each.location.group, each.location.object) for each in got}
    expect_locations(got, seen & _groups(range(1)))


@case("fill-exactly-once")
async def fill_exactly_once(stage: Stage) -> None:
    """A joiner gets every Object once, from the first to the last, while the track grows."""
    groups, objects = 40, 4
    source = await publisher(stage)
    for group in range(groups // 4):
        source.group(group, range(objects))

    async def produce() -> None:
        for group in range(groups // 4, groups):
            for object_id in range(objects):
                source.put(group, object_id)
                await asyncio.sleep(0.001)  # lets the SUBSCRIBE arrive in the middle
            source.store.finish_subgroup(group, 0)
        source.end(groups)

    subscriber = await stage.connect("subscriber")
    producing = asyncio.create_task(produce())
    subscription = await subscriber.subscribe(
        source.namespace, TRACK, location_filter=LocationFilter.next_object(), fill=FROM_START
    )
    got = await normal(subscription)
    await producing
    expect_locations(got, _groups(range(groups), range(objects)))


@case("fill-second-subscriber")
async def fill_second_subscriber(stage: Stage) -> None:
    """Who joins a track that the relay has already gets the same Objects as who came first."""
    source = await publisher(stage)
    source.group(0)
    subscriptions = []
    for number in (1, 2):
        subscriber = await stage.connect(f"subscriber_{number}")
        subscription = await subscriber.subscribe(
            source.namespace, TRACK, location_filter=LocationFilter.next_object(), fill=FROM_START
        )
        subscriptions.append(subscription)
        source.group(number)
    source.end(3)
    for subscription in subscriptions:
        expect_locations(await normal(subscription), _groups(range(3)))
