"""The cases of the public interop suite, under the names and limits it gives them."""

from __future__ import annotations

import asyncio

import moqt
from interop.case import Mismatch, Stage, case
from interop.cases.support import TRACK, expect_refused

NAMESPACE: moqt.TrackNamespace = (b"moq-test", b"interop")
LATER = 0.5
"""Seconds by which the suite lets the publisher come after the subscriber."""


@case("setup-only", seconds=2, public=True)
async def setup_only(stage: Stage) -> None:
    """Both SETUPs cross, and the session ends without an error (MOQT "SETUP")."""
    session = await stage.connect("client")
    session.close()
    closed = await session.wait_closed()
    if closed.code:
        raise Mismatch("the session closed with NO_ERROR", str(closed))


@case("announce-only", seconds=2, public=True)
async def announce_only(stage: Stage) -> None:
    """PUBLISH_NAMESPACE is answered with REQUEST_OK (MOQT "PUBLISH_NAMESPACE")."""
    session = await stage.connect("publisher")
    await session.publish_namespace(NAMESPACE)


@case("publish-namespace-done", seconds=2, public=True)
async def publish_namespace_done(stage: Stage) -> None:
    """A namespace is withdrawn by cancelling its request; the session goes on."""
    session = await stage.connect("publisher")
    published = await session.publish_namespace(NAMESPACE)
    published.withdraw()
    # That another request is answered shows that the session has survived.
    await session.publish_namespace(NAMESPACE)


@case("subscribe-error", seconds=2, public=True)
async def subscribe_error(stage: Stage) -> None:
    """SUBSCRIBE to what nobody publishes is refused: DOES_NOT_EXIST (MOQT "SUBSCRIBE")."""
    session = await stage.connect("subscriber")
    await expect_refused(
        session.subscribe((b"nonexistent", b"namespace"), TRACK),
        moqt.RequestErrorCode.DOES_NOT_EXIST,
    )


@case("announce-subscribe", seconds=3, public=True)
async def announce_subscribe(stage: Stage) -> None:
    """The relay takes a SUBSCRIBE to the publisher of its namespace."""
    source = await stage.connect("publisher")
    source.publish_track(NAMESPACE, TRACK)
    await source.publish_namespace(NAMESPACE)
    subscriber = await stage.connect("subscriber")
    await subscriber.subscribe(NAMESPACE, TRACK)  # returns with SUBSCRIBE_OK


@case("subscribe-before-announce", seconds=3.5, public=True)
async def subscribe_before_announce(stage: Stage) -> None:
    """A SUBSCRIBE that comes too early is refused or held, and the publisher is accepted."""
    subscriber = await stage.connect("subscriber")
    asking = asyncio.create_task(_answered(subscriber))
    await asyncio.sleep(LATER)  # the suite's procedure, not a wait for something to happen
    source = await stage.connect("publisher")
    source.publish_track(NAMESPACE, TRACK)
    await source.publish_namespace(NAMESPACE)
    await asking


async def _answered(subscriber: moqt.MoqtSession) -> None:
    try:
        await subscriber.subscribe(NAMESPACE, TRACK)
    except moqt.RequestError:
        return  # it need not hold the request
