"""A relay that is killed and started again: who was connected hears it from the new process."""

from __future__ import annotations

import asyncio
import stat
import time

import pytest

import moqt
from moqt.client import connect
from tests.e2e.support import eventually, relay

MANIFESTS = 5
"""More than the versions of one that a publication of eight layers has."""


async def outlive(address: str, directory) -> moqt.SessionClosed:
    """How a session ends whose relay is killed, and another one is there at `address`."""
    with relay(directory, "--listen", address) as first:
        quic = moqt.QuicConfig(cafile=first.cafile, idle_timeout=600, keep_alive=0.5)
        async with connect(first.url, quic=quic) as session:
            await session.publish_namespace((b"restart",))
            await asyncio.to_thread(first.process.kill)
            with relay(directory, "--listen", address) as second:
                closed = await asyncio.wait_for(session.wait_closed(), 60)
                assert await asyncio.to_thread(second.metric, "quic_resets_sent_total") > 0
                return closed


def test_a_session_ends_as_soon_as_the_relay_that_was_killed_is_back(hub, tmp_path):
    address = hub.url.removeprefix("moqt://")
    hub.process.kill()
    closed = asyncio.run(outlive(address, tmp_path))
    assert closed.transport and "it was restarted" in closed.reason
    (key,) = tmp_path.glob("tls/reset-*.key")
    assert key.name == f"reset-{address.rpartition(':')[2]}.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_publisher_whose_relay_was_killed_announces_again_at_the_next_one(cache, hub, tmp_path):
    address = hub.url.removeprefix("moqt://")
    hub.process.kill()
    with relay(tmp_path, "--listen", address) as first:
        publisher = first.publish(cache)
        publisher.wait_for("publishing")
        first.process.kill()
    with relay(tmp_path, "--listen", address) as again:
        again.reaches(namespaces=1)
        eventually(lambda: "announced again" in publisher.stderr, "the publisher is back")
        assert "it was restarted; trying again in" in publisher.stderr
        again.subscribe(cache, tmp_path / "out").finish(0)
    cache.check(tmp_path / "out")


@pytest.mark.parametrize("how", ["at once", "later"])
def test_a_retrieval_goes_on_when_its_relay_was_killed_and_started_again(cache, hub, tmp_path, how):
    address = hub.url.removeprefix("moqt://")
    hub.process.kill()
    out = tmp_path / "out"
    with relay(tmp_path, "--listen", address) as first:
        publisher = first.publish(cache, "--live-delay", "1000")
        publisher.wait_for("publishing")
        consumer = first.subscribe(cache, out, "--json", "--again-within", "30")
        half = cache.blocks * cache.descriptor["layers"]
        eventually(lambda: first.metric("cache_objects") >= half, "half of it has come")
        first.process.kill()
    if how == "later":
        time.sleep(1)
    with relay(tmp_path, "--listen", address) as again:
        result = consumer.finish(0).json()
        # what there is of it is what was asked for
        assert again.metric("cache_objects") <= cache.objects - half + MANIFESTS
    cache.check(out)
    assert result["objects_verified"] == cache.objects
    assert result["duplicates"] == 0 and result["discarded"] == {}
