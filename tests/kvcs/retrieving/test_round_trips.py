"""How many round trips the first layer of a cache takes, from a relay far away, in virtual time.

The publisher is beside the relay and has everything; the relay has nothing at first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import log2

import numpy as np
import pytest

from kvcs.names.namespace import PublicationNamespace
from kvcs.publishing.announcing import publish
from kvcs.publishing.publication import Publication
from kvcs.retrieving.consumer import Consumer
from moqt.aio import MoqtSession
from moqt.publisher import Publisher
from moqt.quic.congestion.controller import INITIAL_WINDOW
from relay.config import RelayConfig
from relay.core import Relay
from tests.kvcs.simulated import SimulatedLoop
from tests.kvcs.support import SCOPE, descriptor
from tests.moqt.simulator import Path, Simulation

LAYERS, TOKENS = 8, 1008
DESCRIPTOR = descriptor(layers=LAYERS, kv_heads=8, head_dim=128, block_tokens=16)
LAYER = 2 * TOKENS * 8 * 128 * 2
"""Octets: 4.1 MB."""
TRIP = 0.1
LISTED = REQUESTED = 1
"""Round trips until it is known what is published, and from a request to its first octet."""
LATE = 0.6
"""Of a round trip: event loops, what waits for its turn, the listing that has to pause."""


class Site:
    """A relay with a publisher beside it, and a far host with one consumer after the other."""

    def __init__(self, **quic: int) -> None:
        self.simulation = Simulation(path=Path(latency=0.0002), tick=0.001)
        self.relay = Relay(RelayConfig())
        self.relay.clock.now = self.simulation.now
        self.simulation.tickers.append(self.relay.tick)
        self.host = self.simulation.serve("relay", self.relay, max_datagram_size=1452, **quic)
        self.publication = Publication(SCOPE, DESCRIPTOR, list(range(TOKENS)))
        random = np.random.default_rng(1)
        for layer in range(LAYERS):
            shape = (TOKENS, 8, 128)
            k, v = random.integers(0, 1 << 16, (2, *shape), np.uint16).view(DESCRIPTOR.dtype)
            self.publication.put_layer(layer, k, v)
        self.before_data = sum(each.length for each in self.publication.tracks[0].objects())
        self.consumers = 0

    async def publish(self) -> None:
        host = self.simulation.connect("publisher", self.host, Publisher(), wait=False)
        session = MoqtSession(host.session)
        await session.wait_established()
        await publish(session, self.publication)

    async def retrieve(
        self, layers: int, publications: Sequence[PublicationNamespace] | None = None
    ) -> tuple[float, float]:
        """Seconds until the session is established, and from there to the first of `layers`."""
        simulation, self.consumers = self.simulation, self.consumers + 1
        far = Path(latency=TRIP / 2, bandwidth=60e6, queue=6_000_000)
        simulation.paths["relay", "consumer"] = simulation.paths["consumer", "relay"] = far
        began = simulation.now
        host = simulation.connect("consumer", self.host, wait=False, max_datagram_size=1452)
        host.seen_as = "198.51.100.1", 5000 + self.consumers
        session = MoqtSession(host.session)
        await session.wait_established()
        established = simulation.now
        async with Consumer(
            session, SCOPE, DESCRIPTOR, list(range(TOKENS)), publications=publications
        ) as consumer:
            async for layer in consumer.layers():
                if layer.index + 1 == layers:
                    break
        assert consumer.stats.first_layer_seconds is not None
        session.close()
        await asyncio.sleep(1)  # the relay remembers the path when it has heard so
        return established - began, consumer.stats.first_layer_seconds


def run(story, **quic: int) -> None:
    site = Site(**quic)
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(site.simulation)) as runner:
        runner.run(story(site))


@pytest.mark.parametrize("known", [False, True])
def test_the_first_time_it_takes_the_doublings_of_the_first_window_and_two_trips(known) -> None:
    """Windows of 10, 20, 40, … packets bring the manifest and layer 0, which are asked for together
    when it is known what there is; a publication that is known already is asked for at once."""

    async def story(site: Site) -> None:
        await site.publish()
        found = [site.publication.namespace] if known else None
        handshake, first = await site.retrieve(1, found)
        assert handshake <= (1 + 0.1) * TRIP  # SETUP comes with it
        doublings = log2((LAYER + site.before_data) / (INITIAL_WINDOW * 1200) + 1)
        assert first <= (LISTED * (not known) + REQUESTED + doublings + LATE) * TRIP

    run(story)


def test_the_second_time_it_comes_as_fast_as_the_path_is() -> None:
    """Half of what the path held is under way within the first round trip of the data."""

    async def story(site: Site) -> None:
        await site.publish()
        await site.retrieve(LAYERS)
        _, first = await site.retrieve(1)
        assert first <= (LISTED + REQUESTED + 1 + LATE) * TRIP

    run(story)


def test_where_the_path_is_known_to_hold_a_layer_the_first_one_comes_in_one_flight() -> None:
    """4 MB over 100 ms in at most 0.6 s the first time, instead of eight doublings."""

    async def story(site: Site) -> None:
        await site.publish()
        handshake, first = await site.retrieve(1)
        assert first <= (LISTED + REQUESTED + 1 + LATE) * TRIP
        assert handshake + first <= 0.6

    run(story, first_flight=LAYER + (1 << 20))
