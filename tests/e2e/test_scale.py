"""As many namespaces and tracks on one session as an aggregator has, through two relays."""

from __future__ import annotations

import asyncio
from urllib.request import urlopen

from moqt.client import connect
from tests.e2e.support import relay

MANY = 5000


async def stream(publisher_url, subscriber_url, cafile):
    async with (
        connect(publisher_url, cafile=cafile) as publisher,
        connect(subscriber_url, cafile=cafile) as subscriber,
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
    with relay(tmp_path, metrics=True) as origin:
        above = ("--upstream", origin.url, "--upstream-cafile", origin.cafile)
        with relay(tmp_path, *above, name="edge") as edge:
            asyncio.run(asyncio.wait_for(stream(origin.url, edge.url, origin.cafile), 110))
