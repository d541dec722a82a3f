"""What readers make a relay hold that have stopped reading, in virtual time."""

from __future__ import annotations

import pytest

from moqt.publisher import Publisher
from relay.config import RelayConfig
from relay.core import Relay
from tests.moqt.peers import FILL, NAME, Collector, track
from tests.moqt.probe import Probe
from tests.moqt.simulator import Host, Path, Simulation

SIZE = 20_000
GROUPS, OBJECTS = 20, 4
"""Of the track: 1.6 MB."""
CACHE = 400_000


class Stopped(Collector):
    """Reads nothing of what comes to it after the first Objects."""

    def __init__(self) -> None:
        super().__init__()
        self.host: Host
        self.paused: list[int] = []

    def stream_opened(self, stream) -> None:
        self.paused.append(stream.stream_id)
        self.host.end.transport.pause_receiving(stream.stream_id)
        super().stream_opened(stream)

    def go_on(self) -> None:
        self.stream_opened = super().stream_opened
        for stream_id in self.paused:
            self.host.end.transport.resume_receiving(stream_id)
        self.host.end.transport.wake()


class Crowd:
    """A relay whose cache holds a quarter of the track, and readers of it."""

    def __init__(self, readers: int, *, frozen: bool) -> None:
        self.simulation = Simulation(path=Path(latency=0.01, bandwidth=5e6, queue=200_000))
        self.relay = Relay(RelayConfig(cache_octets=CACHE, stall_timeout=5))
        self.relay.clock.now = self.simulation.now
        self.simulation.tickers.append(self.relay.tick)
        self.host = self.simulation.serve("relay", self.relay)
        publisher = Publisher()
        publisher.add_track(track(GROUPS, OBJECTS, size=SIZE))
        source = self.simulation.connect("publisher", self.host, publisher)
        source.session.publish_namespace(NAME.namespace, on_ended=lambda error: None)
        self.simulation.advance(1)
        self.readers = [self.reader(f"reader {number}", Stopped()) for number in range(readers)]
        for host, got in self.readers:
            host.session.subscribe(NAME, got, FILL)
        if frozen:
            assert self.simulation.run(self.freeze, limit=5)
        self.simulation.advance(5)

    def reader(self, name: str, got: Collector) -> tuple[Host, Collector]:
        host = self.simulation.connect(
            name, self.host, stream_window=32 << 10, session_window=64 << 10
        )
        if isinstance(got, Stopped):
            got.host = host
        return host, got

    def freeze(self) -> bool:
        """Readers die while something is on its way to them; whether all have."""
        for (host, _), held in zip(self.readers, self.held, strict=True):
            host.alive = host.alive and not held
        return not any(host.alive for host, _ in self.readers)

    @property
    def held(self) -> list[int]:
        """Octets that wait at the relay to be sent to each reader, or to be acknowledged."""
        probes = [Probe(self.host.ends[host.address].transport) for host, _ in self.readers]
        return [
            sum(len(chunk) for stream in probe.streams for chunk in probe.chunks(stream))
            for probe in probes
        ]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_reader_that_has_stopped_costs_a_relay_no_more_than_its_credit(frozen):
    crowd = Crowd(24, frozen=frozen)
    # What was acknowledged is forgotten, and beyond the credit nothing is begun but one Object.
    assert max(crowd.held) <= (64 << 10) + SIZE
    assert not frozen or min(crowd.held) > 0
    assert crowd.relay.cache.octets <= CACHE
    host, got = crowd.reader("reads", Collector())
    host.session.subscribe(NAME, got, FILL)
    assert crowd.simulation.run(lambda: len(got.locations) == GROUPS * OBJECTS, limit=30)


def test_readers_that_go_on_after_a_while_get_everything():
    crowd = Crowd(6, frozen=False)
    crowd.simulation.advance(10)
    for _, got in crowd.readers:
        assert isinstance(got, Stopped) and len(got.locations) < GROUPS * OBJECTS
        got.go_on()
    assert crowd.simulation.run(
        lambda: all(len(set(got.locations)) == GROUPS * OBJECTS for _, got in crowd.readers),
        limit=60,
    )
