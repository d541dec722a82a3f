"""Tracks offered with PUBLISH, and SUBSCRIBE_TRACKS (MOQT "PUBLISH", "SUBSCRIBE_TRACKS")."""

from __future__ import annotations

import asyncio
import contextlib

import moqt
from interop.case import NotOffered, Stage, case
from interop.cases.support import (
    TRACK,
    Source,
    expect,
    expect_locations,
    expect_refused,
    normal,
    take,
)
from moqt import FullTrackName, Location, Parameters, RequestErrorCode, TrackStore

PACE = 0.01
"""Seconds between Groups while the relay has not resumed the publication yet."""


async def _offer(stage: Stage) -> Source:
    """A publisher that has offered its track with PUBLISH, paused, and nothing else."""
    session = await stage.connect("publisher")
    store = TrackStore(FullTrackName(stage.namespace(), TRACK))
    try:
        await session.publish(store, parameters=Parameters(forward=0))
    except moqt.RequestError as error:
        if error.code == RequestErrorCode.UNINTERESTED:
            raise NotOffered("the relay is not interested in a track nobody asked for") from None
        raise
    return Source(session, store)


async def _taken_up(offers: moqt.TrackOffers, wanted: FullTrackName) -> moqt.Subscription:
    """The next PUBLISH, which is of `wanted`, accepted and not paused."""
    offer = await anext(offers)
    expect(not offer.skipped, "PUBLISH", "PUBLISH_SKIPPED")
    expect(offer.name == wanted, f"PUBLISH of {wanted}", offer.name)
    paused = offer.publish is not None and offer.publish.paused
    return offer.accept(update=Parameters(forward=1) if paused else None)


async def _flows(source: Source, subscription: moqt.Subscription) -> None:
    """Objects published from when the relay resumes on arrive, to the end of the track.

    How many Groups pass before that is the relay's affair; the rest has to be whole.
    """
    first = asyncio.create_task(take(subscription, 1))
    group = 0
    while not first.done():
        source.group(group)
        group += 1
        await asyncio.wait({first}, timeout=PACE)
    (begun,) = await first
    for _ in range(3):
        source.group(group)
        group += 1
    source.end(group)
    got = [begun, *await normal(subscription)]
    start = min(each.location for each in got)
    locations = [Location(g, o) for g in range(group) for o in range(3)]
    expect_locations(got, [location for location in locations if location >= start])


@case("publish-track-only")
async def publish_track_only(stage: Stage) -> None:
    """PUBLISH of a track nobody asked for is answered: PUBLISH_OK, or UNINTERESTED."""
    with contextlib.suppress(NotOffered):
        source = await _offer(stage)
        source.end(0)


@case("publish-track-subscribe")
async def publish_track_subscribe(stage: Stage) -> None:
    """A SUBSCRIBE is served from a track that was offered with PUBLISH alone."""
    source = await _offer(stage)
    subscriber = await stage.connect("subscriber")
    await _flows(source, await subscriber.subscribe(source.namespace, TRACK))


@case("subscribe-tracks")
async def subscribe_tracks(stage: Stage) -> None:
    """A track that is published under the prefix later is offered with PUBLISH, and flows."""
    subscriber = await stage.connect("subscriber")
    offers = await subscriber.subscribe_tracks(stage.namespace())
    # A relay may keep the publisher waiting until somebody has taken its offer up.
    offering = asyncio.create_task(_offer(stage))
    subscription = await _taken_up(offers, FullTrackName(stage.namespace(), TRACK))
    await _flows(await offering, subscription)


@case("subscribe-tracks-known-before")
async def subscribe_tracks_known_before(stage: Stage) -> None:
    """A track that was offered before the SUBSCRIBE_TRACKS comes too."""
    source = await _offer(stage)
    subscriber = await stage.connect("subscriber")
    offers = await subscriber.subscribe_tracks(stage.namespace())
    await _flows(source, await _taken_up(offers, source.store.name))


@case("subscribe-tracks-overlap")
async def subscribe_tracks_overlap(stage: Stage) -> None:
    """A second SUBSCRIBE_TRACKS with an overlapping prefix is refused: PREFIX_OVERLAP."""
    subscriber = await stage.connect("subscriber")
    await subscriber.subscribe_tracks(stage.namespace(b"a"))
    await expect_refused(
        subscriber.subscribe_tracks(stage.namespace(b"a", b"b")), RequestErrorCode.PREFIX_OVERLAP
    )
