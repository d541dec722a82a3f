"""As many namespaces and tracks on one session as an aggregator has, through two relays."""

from __future__ import annotations

import asyncio

from moqt.client import connect
from tests.e2e.support import relay

MANY = 5000


async def stream(origin, edge):
    async with (
        connect(origin.url, cafile=origin.cafile) as publisher,
        connect(edge.url, cafile=edge.cafile) as subscriber,
    ):
        names = [(b"fleet", b"%d" % n) for n in range(MANY)]
        stores = [publisher.publish_track(name, b"track") for name in names]
        await asyncio.gather(*(publisher.publish_namespace(name) for name in names))
        subscriptions = await asyncio.gather(
            *(subscriber.subscribe(name, b"track") for name in names)
        )
        for number, store in enumerate(stores):
            store.append(0, 0, [b"%d" % number])
        for number, subscription in enumerate(subscriptions):
            received = await asyncio.wait_for(anext(subscription), 60)
            assert bytes(received.payload) == b"%d" % number
        assert len(publisher.session.requests.incoming) == MANY
        assert len(subscriber.session.requests.outgoing) == MANY
        for subscription in subscriptions:
            subscription.cancel()
        assert not any(subscriber.session.remembered().of_requests.values())


def test_one_session_carries_5000_namespaces_and_5000_live_tracks_through_two_relays(tmp_path):
    # All are asked for at once, and how many wait for a publisher depends on who is faster.
    # On a busy machine the last ones have their answer late.
    room = ("--limit", f"max_pending={2 * MANY}", "--limit", "upstream_timeout=60")
    with relay(tmp_path / "origin", *room) as origin:
        above = ("--upstream", origin.url, "--upstream-cafile", origin.cafile)
        with relay(tmp_path / "edge", *room, *above) as edge:
            asyncio.run(stream(origin, edge))
