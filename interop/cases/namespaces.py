"""Namespaces, rendezvous and who answers when nobody can (MOQT "Namespace Discovery")."""

from __future__ import annotations

import asyncio

import moqt
from interop.case import Stage, case
from interop.cases.support import (
    TRACK,
    expect,
    expect_locations,
    expect_refused,
    normal,
    publisher,
)
from moqt import Parameters, RequestErrorCode


@case("subscribe-namespace-lifecycle")
async def subscribe_namespace_lifecycle(stage: Stage) -> None:
    """NAMESPACE when a matching namespace is published, NAMESPACE_DONE when it is withdrawn."""
    subscriber = await stage.connect("subscriber")
    listing = await subscriber.subscribe_namespace(stage.namespace())
    source = await stage.connect("publisher")
    name = stage.namespace(b"live")
    announced = await source.publish_namespace(name)
    came = await anext(listing)
    expect(came == (name, True), f"NAMESPACE {name}", came)
    announced.withdraw()
    went = await anext(listing)
    expect(went == (name, False), f"NAMESPACE_DONE {name}", went)


@case("namespace-known-before")
async def namespace_known_before(stage: Stage) -> None:
    """SUBSCRIBE_NAMESPACE tells of what was published before, and not of what does not match."""
    source = await stage.connect("publisher")
    names = {stage.namespace(b"a", b"1"), stage.namespace(b"a", b"2")}
    for name in (*names, stage.namespace(b"ab")):
        await source.publish_namespace(name)
    subscriber = await stage.connect("subscriber")
    listing = await subscriber.subscribe_namespace(stage.namespace(b"a"))
    told = {(await anext(listing)).namespace for _ in names}
    expect(told == names, f"NAMESPACE for {sorted(names)}", sorted(told))


@case("namespace-publisher-lost")
async def namespace_publisher_lost(stage: Stage) -> None:
    """When its publisher's session ends, a namespace is gone."""
    subscriber = await stage.connect("subscriber")
    listing = await subscriber.subscribe_namespace(stage.namespace())
    source = await stage.connect("publisher")
    name = stage.namespace(b"live")
    await source.publish_namespace(name)
    await anext(listing)
    source.close()
    went = await anext(listing)
    expect(went == (name, False), f"NAMESPACE_DONE {name}", went)
    # A second NAMESPACE_DONE would be a breach: the session has to be there still.
    await expect_refused(
        subscriber.track_status(stage.namespace(), TRACK), RequestErrorCode.DOES_NOT_EXIST
    )


@case("prefix-overlap")
async def prefix_overlap(stage: Stage) -> None:
    """A second SUBSCRIBE_NAMESPACE whose prefix overlaps is refused: PREFIX_OVERLAP."""
    subscriber = await stage.connect("subscriber")
    await subscriber.subscribe_namespace(stage.namespace(b"a"))
    await expect_refused(
        subscriber.subscribe_namespace(stage.namespace(b"a", b"b")),
        RequestErrorCode.PREFIX_OVERLAP,
    )


@case("prefix-publisher")
async def prefix_publisher(stage: Stage) -> None:
    """A publisher that announced a prefix is asked for tracks of namespaces below it."""
    source = await publisher(stage)
    below = stage.namespace(b"below")
    source.store = source.session.publish_track(below, TRACK)
    subscriber = await stage.connect("subscriber")
    subscription = await subscriber.subscribe(below, TRACK)
    source.group(0)
    source.end(1)
    expect_locations(await normal(subscription), {(0, object_id) for object_id in range(3)})


@case("rendezvous-timeout")
async def rendezvous_timeout(stage: Stage) -> None:
    """RENDEZVOUS_TIMEOUT runs out without a publisher: REQUEST_ERROR TIMEOUT."""
    subscriber = await stage.connect("subscriber")
    waiting = Parameters(rendezvous_timeout=300)
    await expect_refused(
        subscriber.subscribe(stage.namespace(), TRACK, parameters=waiting),
        RequestErrorCode.TIMEOUT,
    )


@case("rendezvous")
async def rendezvous(stage: Stage) -> None:
    """A SUBSCRIBE with RENDEZVOUS_TIMEOUT waits for its publisher."""
    subscriber = await stage.connect("subscriber")
    waiting = Parameters(rendezvous_timeout=8000)
    asking = asyncio.create_task(subscriber.subscribe(stage.namespace(), TRACK, parameters=waiting))
    # Once this is answered the SUBSCRIBE, sent before it, has most likely come as well.
    await subscriber.subscribe_namespace(stage.namespace(b"other"))
    source = await publisher(stage)
    subscription = await asking
    source.group(0)
    source.end(1)
    expect_locations(await normal(subscription), {(0, object_id) for object_id in range(3)})


class _Silent(moqt.SessionHandler):
    """Takes a SUBSCRIBE and never answers."""

    def subscribe_received(self, request: object) -> None: ...


@case("silent-publisher", seconds=15)
async def silent_publisher(stage: Stage) -> None:
    """A SUBSCRIBE whose publisher never answers is answered by the relay all the same."""
    source = await stage.connect("publisher", _Silent())
    await source.publish_namespace(stage.namespace())
    subscriber = await stage.connect("subscriber")
    try:
        await subscriber.subscribe(stage.namespace(), TRACK)
    except moqt.RequestError:
        return
    expect(False, "REQUEST_ERROR", "SUBSCRIBE_OK for what no publisher has accepted")


@case("publisher-lost")
async def publisher_lost(stage: Stage) -> None:
    """When the publisher's session ends, its subscribers get PUBLISH_DONE, not silence."""
    source = await publisher(stage)
    subscriber = await stage.connect("subscriber")
    subscription = await subscriber.subscribe(source.namespace, TRACK)
    source.group(0)
    source.session.close()
    async for _ in subscription:
        pass
    expect(subscription.done_code is not None, "PUBLISH_DONE", "the end of the session")
