"""What a subscriber changes while the publisher ends the track, through a relay process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

import moqt
from moqt import RequestError
from moqt.client import connect
from moqt.values.messages import KeyValue, Parameters, RequestOk

NAMESPACE = (b"crossing",)
DYNAMIC = (KeyValue(0x30, 1),)
CHANGES = {
    "priority": Parameters(subscriber_priority=1),
    "new group": Parameters(new_group_request=0),
    "both": Parameters(subscriber_priority=1, new_group_request=0),
}
OBJECTS = 8


def end(store, group: int) -> None:
    """A last Group, and the end of the track."""
    for number in range(OBJECTS):
        store.append(group, number, b"%d/%d" % (group, number))
    store.finish_subgroup(group, 0)
    store.mark_end(moqt.Location(group + 1, 0), moqt.ObjectStatus.END_OF_TRACK)
    store.finish_subgroup(group + 1, 0)
    store.finish(moqt.PublishDoneCode.TRACK_ENDED)


async def sent() -> None:
    """What sessions have to say has left; what has come since is not read."""
    await asyncio.sleep(0)  # the turn in which it leaves, and no turn for what comes
    time.sleep(0.3)  # noqa: ASYNC251  the relay reads, answers and passes on, and nobody here reads


def heard_on_requests(session) -> list[bytes]:
    """What comes on its request streams from now on."""
    heard, stream_data = [], session.stream_data

    def hear(stream_id: int, data: bytes, fin: bool) -> None:
        if data and not stream_id & 2:
            heard.append(data)
        stream_data(stream_id, data, fin)

    session.stream_data = hear
    return heard


def deafened(session, requests: int) -> tuple[asyncio.Event, Callable[[], None]]:
    """It is told nothing that comes on its streams, until what is returned is called; the event is
    that the peer has ended so many requests."""
    missed, stream_data, ended = [], session.stream_data, asyncio.Event()

    def miss(*each) -> None:
        missed.append(each)
        if sum(fin for stream_id, _, fin in missed if not stream_id & 2) >= requests:
            ended.set()

    def tell() -> None:
        session.stream_data = stream_data
        for each in missed:
            stream_data(*each)

    session.stream_data = miss
    return ended, tell


async def cross(hub, change: str, first: str) -> None:
    """One is on its way when the other is said, whichever is `first`."""
    async with (
        connect(hub.url, cafile=hub.cafile) as publisher,
        connect(hub.url, cafile=hub.cafile) as subscriber,
    ):
        store = publisher.publish_track(NAMESPACE, b"track", DYNAMIC)
        asked = []
        store.on_new_group = lambda store, value: asked.append(value)
        await publisher.publish_namespace(NAMESPACE)
        subscriptions = [await subscriber.subscribe(NAMESPACE, b"track") for _ in range(2)]
        answers, late = [], heard_on_requests(publisher.session)
        if first == "update":
            subscriptions[0].request.update(CHANGES[change], answers.append)
            await sent()
            end(store, 0)
        else:
            ended, tell = deafened(subscriber.session, len(subscriptions))
            end(store, 0)
            await ended.wait()
            subscriptions[0].request.update(CHANGES[change], answers.append)
            tell()
        for subscription in subscriptions:
            came = [each async for each in subscription if each.payload]
            assert [bytes(each.payload) for each in came] == [b"0/%d" % n for n in range(OBJECTS)]
            assert subscription.request.done.code == moqt.PublishDoneCode.TRACK_ENDED
        # After its end there is nothing to update: PUBLISH_DONE settles it.
        assert [type(each) for each in answers] == [
            RequestOk if first == "update" else RequestError
        ]
        assert not asked, "it had ended when that came"
        assert bool(late) is (first == "update" and change != "priority")
        for session in (publisher, subscriber):
            assert session.closed is None


@pytest.mark.parametrize("first", ["update", "end"])
@pytest.mark.parametrize("change", CHANGES)
def test_an_update_that_crosses_the_end_of_its_track_costs_no_subscriber_an_object(
    change, first, hub
):
    asyncio.run(asyncio.wait_for(cross(hub, change, first), 60))
    hub.reaches(sessions=0, malformed_tracks_total=0)
