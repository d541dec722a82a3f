"""Stories with a caching relay in the middle, in virtual time."""

from __future__ import annotations

import pytest

from moqt.publisher import Publisher
from moqt.session import SessionState
from moqt.track.store import TrackStore
from moqt.values.codes import ObjectStatus, PublishDoneCode
from moqt.values.names import Location
from relay.config import RelayConfig
from relay.core import Relay
from tests.moqt.peers import FILL, NAME, Collector
from tests.moqt.scenarios.support import HOSTILE
from tests.moqt.simulator import Host, Path, Simulation

GROUPS, OBJECTS = 8, 4
ALL = [Location(g, o) for g in range(GROUPS) for o in range(OBJECTS)]


class Network:
    """publisher -> relay -> subscribers."""

    def __init__(self, seed: int = 1, *, path: Path | None = None, **config):
        self.simulation = Simulation(seed, path=path)
        self.relay = Relay(RelayConfig(**config))
        self.relay.clock.now = self.simulation.now
        self.simulation.tickers.append(self.relay.tick)
        self.host = self.simulation.serve("relay", self.relay, idle_timeout=10.0)
        self.store = TrackStore(NAME)

    def publisher(self, name: str = "publisher") -> Host:
        handler = Publisher()
        handler.add_track(self.store)
        host = self.simulation.connect(name, self.host, handler, idle_timeout=10.0)
        host.session.publish_namespace(NAME.namespace, on_ended=lambda error: None)
        self.simulation.advance(1)
        return host

    def subscriber(self, name: str, path: Path | None = None) -> tuple[Host, Collector]:
        if path is not None:
            self.simulation.paths[name, "relay"] = self.simulation.paths["relay", name] = path
        host = self.simulation.connect(name, self.host, idle_timeout=10.0)
        got = Collector()
        host.session.subscribe(NAME, got, FILL)
        return host, got

    def publish(self, groups: range, *, size: int = 500, pause: float = 0.02) -> None:
        for group in groups:
            for object_id in range(OBJECTS):
                self.store.append(group, object_id, self.payload(group, object_id, size))
                self.simulation.advance(pause)
            self.store.mark_end(Location(group, OBJECTS), ObjectStatus.END_OF_GROUP)
            self.store.finish_subgroup(group, 0)

    def end(self) -> None:
        self.store.mark_end(Location(GROUPS, 0), ObjectStatus.END_OF_TRACK)
        self.store.finish_subgroup(GROUPS, 0)
        self.store.finish(PublishDoneCode.TRACK_ENDED)

    @staticmethod
    def payload(group: int, object_id: int, size: int = 500) -> bytes:
        return (b"%d/%d;" % (group, object_id) * size)[:size]


def check_everything_came_once(got: Collector) -> None:
    assert sorted(got.locations) == ALL
    for received in got.objects:
        if received.status is ObjectStatus.NORMAL:
            assert bytes(received.payload) == Network.payload(*received.location)


@pytest.mark.parametrize("seed", range(4))
def test_two_lossy_hops_deliver_everything_once_to_who_is_early_and_who_is_late(seed):
    net = Network(seed, path=HOSTILE)
    net.publisher()
    early = net.subscriber("early")[1]
    net.publish(range(4))
    late = net.subscriber("late")[1]
    net.publish(range(4, GROUPS))
    net.end()
    assert net.simulation.run(lambda: early.done is not None and late.done is not None)
    check_everything_came_once(early)
    check_everything_came_once(late)


def test_one_seed_has_one_trace_with_a_relay_too():
    def story() -> list:
        net = Network(5, path=HOSTILE)
        net.publisher()
        net.subscriber("early")
        net.publish(range(GROUPS))
        net.subscriber("late")
        net.end()
        net.simulation.advance(5)
        return net.simulation.trace

    assert story() == story()


def test_a_slow_subscriber_holds_back_neither_its_neighbour_nor_the_publisher():
    net = Network()
    net.publisher()
    slow_path = Path(latency=0.02, bandwidth=20_000)
    slow, fast = net.subscriber("slow", slow_path)[1], net.subscriber("fast")[1]
    net.publish(range(GROUPS), size=8000)
    net.end()
    assert net.simulation.run(lambda: fast.done is not None, limit=3)
    assert slow.done is None and len(slow.locations) < len(ALL)
    assert net.simulation.run(lambda: slow.done is not None, limit=60)
    assert sorted(slow.locations) == ALL


def test_when_the_publisher_dies_another_takes_over_and_nothing_is_missing_or_doubled():
    net = Network(2, path=Path(latency=0.02))
    first = net.publisher("first")
    got = net.subscriber("subscriber")[1]
    net.publish(range(3))
    first.die()
    net.publisher("second")
    net.publish(range(3, GROUPS))
    net.end()
    assert net.simulation.run(lambda: got.done is not None)
    check_everything_came_once(got)


def test_what_the_relay_holds_complete_is_served_when_its_publisher_is_long_gone():
    net = Network(3, path=Path(latency=0.02, loss=0.05))
    publisher = net.publisher()
    first = net.subscriber("first")[1]
    net.publish(range(GROUPS))
    net.end()
    assert net.simulation.run(lambda: first.done is not None)
    publisher.die()
    net.simulation.advance(120)
    assert not net.relay.namespaces.publications
    late = net.subscriber("late")[1]
    assert net.simulation.run(lambda: late.done is not None)
    check_everything_came_once(late)


def test_sessions_that_die_one_after_the_other_leave_the_relay_empty():
    net = Network(4, path=Path(latency=0.02), linger=1.0)
    hosts = [net.publisher()]
    hosts += [net.subscriber(f"subscriber {n}")[0] for n in range(4)]
    net.publish(range(4))
    for host in reversed(hosts):
        host.die()
        net.simulation.advance(3)
    net.simulation.advance(60)
    relay = net.relay
    assert not relay.sessions and not relay.waiting.pending and not relay.active
    assert relay.namespaces.publications == 0
    for track in relay.tracks.values():
        assert not track.subscriptions and not track.requests and track.ranges.idle
    for end in net.host.ends.values():
        assert end.session.state is SessionState.CLOSED
