"""Where a relay process has a track from: the next source, one that comes back or begins anew."""

from __future__ import annotations

import asyncio

import moqt
from moqt.client import connect
from tests.e2e.support import relay

NAMESPACE = (b"sources",)
FROM_0 = moqt.LocationFilter.absolute_start(0)


def put(store, octets: bytes, *numbers: int) -> None:
    for number in numbers:
        store.append(0, number, octets + b"%d" % number)


def end(store) -> None:
    store.finish_subgroup(0, 0)
    store.mark_end(moqt.Location(1, 0), moqt.ObjectStatus.END_OF_TRACK)
    store.finish(moqt.PublishDoneCode.TRACK_ENDED)


async def publisher(hub):
    """A session that has published the namespace, and its track."""
    session = await connect(hub.url, cafile=hub.cafile)
    store = session.publish_track(NAMESPACE, b"track")
    await session.publish_namespace(NAMESPACE)
    return session, store


async def came(subscription) -> list[bytes]:
    return sorted([bytes(each.payload) async for each in subscription if each.payload])


async def first_of(subscription, count: int) -> list[bytes]:
    found: list[bytes] = []
    async for each in subscription:
        found.append(bytes(each.payload))
        if len(found) == count:
            break
    return found


async def failed_over(edge, origin) -> None:
    far, far_store = await publisher(origin)
    near, near_store = await publisher(edge)
    async with connect(edge.url, cafile=edge.cafile) as subscriber:
        subscription = await subscriber.subscribe(NAMESPACE, b"track", fill=FROM_0)
        put(near_store, b"x", 0, 1)
        put(far_store, b"x", 0, 1)
        assert await first_of(subscription, 2) == [b"x0", b"x1"]
        near.close()
        put(far_store, b"x", 2, 3)
        end(far_store)
        assert await came(subscription) == [b"x2", b"x3"]
        assert subscription.request.done.code == moqt.PublishDoneCode.TRACK_ENDED
        far.close()


def test_a_publisher_that_is_lost_costs_nothing_while_the_upstream_relay_has_the_track(tmp_path):
    (tmp_path / "origin").mkdir()
    (tmp_path / "edge").mkdir()
    with (
        relay(tmp_path / "origin") as origin,
        relay(
            tmp_path / "edge", "--upstream", origin.url, "--upstream-cafile", origin.cafile
        ) as edge,
    ):
        edge.reaches(upstream_sessions=1)
        asyncio.run(asyncio.wait_for(failed_over(edge, origin), 60))
        edge.reaches(publishers_lost_total=1, publishers_returned_total=1)


async def comes_back(hub) -> None:
    first, store = await publisher(hub)
    async with connect(hub.url, cafile=hub.cafile) as subscriber:
        subscription = await subscriber.subscribe(NAMESPACE, b"track", fill=FROM_0)
        put(store, b"x", 0, 1)
        assert await first_of(subscription, 2) == [b"x0", b"x1"]
        first.close()
        second, again = await publisher(hub)
        put(again, b"x", 0, 1, 2, 3)
        end(again)
        assert await came(subscription) == [b"x2", b"x3"]
        assert subscription.request.done.code == moqt.PublishDoneCode.TRACK_ENDED
        second.close()


def test_a_subscriber_waits_for_a_publisher_that_comes_back(tmp_path):
    with relay(tmp_path, "--limit", "publisher_linger=30") as hub:
        asyncio.run(asyncio.wait_for(comes_back(hub), 60))


async def begins_anew(hub) -> None:
    first, store = await publisher(hub)
    async with connect(hub.url, cafile=hub.cafile) as subscriber:
        put(store, b"old", 0, 1)
        end(store)
        old = await subscriber.subscribe(NAMESPACE, b"track", fill=FROM_0)
        assert await came(old) == [b"old0", b"old1"]
        first.close()
        second, again = await publisher(hub)
        put(again, b"new", 0)
        new = await subscriber.subscribe(NAMESPACE, b"track", fill=FROM_0)
        put(again, b"new", 1, 2)
        end(again)
        assert await came(new) == [b"new0", b"new1", b"new2"]
        second.close()


def test_who_publishes_a_name_that_is_cached_again_is_the_one_that_is_heard(hub):
    asyncio.run(asyncio.wait_for(begins_anew(hub), 60))
    hub.reaches(tracks_renewed_total=1, malformed_tracks_total=0)
