"""FETCH and TRACK_STATUS through a relay (MOQT "FETCH", "TRACK_STATUS")."""

from __future__ import annotations

import moqt
from interop.case import Stage, case
from interop.cases.support import (
    TRACK,
    Source,
    expect,
    expect_order,
    expect_refused,
    normal,
    publisher,
)
from moqt import GroupOrder, KeyValue, Location, LocationFilter, RequestErrorCode

GROUPS, OBJECTS = range(4), range(3)


async def _filled(stage: Stage) -> tuple[Source, moqt.MoqtSession]:
    """A publisher with four Groups of three Objects, and a subscriber."""
    source = await publisher(stage, properties=(KeyValue(0x3800, 9),))
    for group in GROUPS:
        source.group(group, OBJECTS)
    return source, await stage.connect("subscriber")


@case("fetch")
async def fetch(stage: Stage) -> None:
    """FETCH without a filter brings the whole track, in ascending order."""
    source, subscriber = await _filled(stage)
    response = await subscriber.fetch(source.namespace, TRACK)
    expect_order(await normal(response), [(g, o) for g in GROUPS for o in OBJECTS])


@case("fetch-range")
async def fetch_range(stage: Stage) -> None:
    """Both ends of the range are inclusive, in the middle of Groups too."""
    source, subscriber = await _filled(stage)
    chosen = LocationFilter.range(Location(1, 1), Location(2, 1))
    response = await subscriber.fetch(source.namespace, TRACK, chosen)
    expect_order(await normal(response), [(1, 1), (1, 2), (2, 0), (2, 1)])


@case("fetch-groups")
async def fetch_groups(stage: Stage) -> None:
    """Absolute Start, Group End takes the last Group whole."""
    source, subscriber = await _filled(stage)
    response = await subscriber.fetch(source.namespace, TRACK, LocationFilter.groups(1, 2))
    expect_order(await normal(response), [(g, o) for g in (1, 2) for o in OBJECTS])


@case("fetch-current-group")
async def fetch_current_group(stage: Stage) -> None:
    """Relative Start 1 fetches the current Group up to the Largest Object."""
    source, subscriber = await _filled(stage)
    response = await subscriber.fetch(source.namespace, TRACK, LocationFilter.relative_start(1))
    expect_order(await normal(response), [(3, o) for o in OBJECTS])


@case("fetch-descending")
async def fetch_descending(stage: Stage) -> None:
    """Descending order turns the Groups round, never the Objects of a Group."""
    source, subscriber = await _filled(stage)
    response = await subscriber.fetch(source.namespace, TRACK, group_order=GroupOrder.DESCENDING)
    expect_order(await normal(response), [(g, o) for g in reversed(GROUPS) for o in OBJECTS])


@case("fetch-beyond-largest")
async def fetch_beyond_largest(stage: Stage) -> None:
    """A FETCH that starts beyond the Largest Object is refused: INVALID_RANGE."""
    source, subscriber = await _filled(stage)
    beyond = LocationFilter.absolute_start(9)
    await expect_refused(
        subscriber.fetch(source.namespace, TRACK, beyond), RequestErrorCode.INVALID_RANGE
    )


@case("fetch-no-such-track")
async def fetch_no_such_track(stage: Stage) -> None:
    """A FETCH of what nobody publishes is refused: DOES_NOT_EXIST."""
    subscriber = await stage.connect("subscriber")
    await expect_refused(
        subscriber.fetch(stage.namespace(b"nobody"), TRACK), RequestErrorCode.DOES_NOT_EXIST
    )


@case("fetch-again")
async def fetch_again(stage: Stage) -> None:
    """The same FETCH twice gives the same Objects, whoever serves the second one."""
    source, subscriber = await _filled(stage)
    wanted = [(g, o) for g in GROUPS for o in OBJECTS]
    for _ in range(2):
        expect_order(await normal(await subscriber.fetch(source.namespace, TRACK)), wanted)


@case("track-status")
async def track_status(stage: Stage) -> None:
    """A relay that is subscribed tells the Largest Object and the Track Properties."""
    source, subscriber = await _filled(stage)
    await subscriber.subscribe(source.namespace, TRACK)
    await _tell_status(source, subscriber)


@case("track-status-unsubscribed")
async def track_status_unsubscribed(stage: Stage) -> None:
    """A relay that is not subscribed may find out or refuse, but must not tell what is wrong."""
    source, subscriber = await _filled(stage)
    try:
        await _tell_status(source, subscriber)
    except moqt.RequestError:
        return  # forwarding or subscribing in order to answer is the relay's choice


async def _tell_status(source: Source, subscriber: moqt.MoqtSession) -> None:
    largest, properties = await subscriber.track_status(source.namespace, TRACK)
    expect(largest == Location(3, 2), "LARGEST_OBJECT 3/2", largest)
    kept = KeyValue(0x3800, 9) in properties
    expect(kept, "the Track Properties as published", properties)


@case("track-status-no-such-track")
async def track_status_no_such_track(stage: Stage) -> None:
    """TRACK_STATUS of what nobody publishes is refused: DOES_NOT_EXIST."""
    subscriber = await stage.connect("subscriber")
    await expect_refused(
        subscriber.track_status(stage.namespace(b"nobody"), TRACK),
        RequestErrorCode.DOES_NOT_EXIST,
    )
