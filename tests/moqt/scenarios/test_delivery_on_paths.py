"""Stories of Objects on their way: loss, credit, priorities, fills; in virtual time."""

from __future__ import annotations

from collections import defaultdict

import pytest

from moqt.publisher import Publisher
from moqt.receiving.receiver import Via
from moqt.track.store import TrackStore
from moqt.values.codes import ObjectStatus, PublishDoneCode
from moqt.values.messages import LocationFilter, Parameters
from moqt.values.names import FullTrackName, Location
from tests.moqt.inside import blocked, listeners
from tests.moqt.memory import assert_clean
from tests.moqt.peers import FILL, NAME, Collector, publish, track
from tests.moqt.scenarios.support import HOSTILE, served, world
from tests.moqt.simulator import Path, Simulation


class Timed(Collector):
    """Notes when each Object was there whole."""

    def __init__(self, simulation: Simulation):
        super().__init__()
        self.simulation = simulation
        self.times: dict[Location, float] = {}

    def object_received(self, received):
        super().object_received(received)
        self.times.setdefault(received.location, self.simulation.now)


def end(store: TrackStore, groups: int) -> None:
    store.mark_end(Location(groups, 0), ObjectStatus.END_OF_TRACK)
    store.finish_subgroup(groups, 0)
    store.finish(PublishDoneCode.TRACK_ENDED)


@pytest.mark.parametrize("alpn", [("moqt-22",), ("h3",)])
@pytest.mark.parametrize("ask", ["fetch", "fill"])
@pytest.mark.parametrize("seed", range(3))
def test_objects_many_times_their_streams_window_arrive_whole(seed, ask, alpn):
    """Credit comes bit by bit, and what grants it may be lost."""
    simulation, server, client = served(
        track(12, 1, size=60_000), seed, path=HOSTILE, alpn=alpn, stream_window=4096
    )
    got = Collector()
    if ask == "fetch":
        client.session.fetch(NAME, got)
    else:
        client.session.subscribe(NAME, got, FILL)
    assert simulation.run(lambda: len(got.locations) == 12, limit=120)
    assert sorted(len(received.payload) for received in got.objects)[-12:] == [60_004] * 12
    assert simulation.run(lambda: not blocked(server.session.scheduler), limit=10)


@pytest.mark.parametrize("seed", range(6))
def test_a_live_publication_arrives_once_and_in_order_whatever_the_path_does(seed):
    store = TrackStore(NAME)
    simulation, server, client = served(store, seed, path=HOSTILE)
    got = Collector()
    client.session.subscribe(NAME, got)
    assert simulation.run(lambda: got.accepted is not None)
    for group in range(6):
        for object_id in range(6):
            subgroup = object_id % 2
            store.append(group, object_id, b"%d/%d " % (group, object_id) * 200, subgroup=subgroup)
            simulation.advance(0.05)
        store.finish_subgroup(group, 0)
        store.finish_subgroup(group, 1)
    end(store, 6)
    assert simulation.run(lambda: got.done is not None)
    assert sorted(got.locations) == [Location(g, o) for g in range(6) for o in range(6)]
    by_subgroup = defaultdict(list)
    for received in got.objects:
        by_subgroup[received.location.group, received.subgroup].append(received.location)
        if received.status is ObjectStatus.NORMAL:
            assert received.payload == b"%d/%d " % received.location * 200
    assert all(order == sorted(order) for order in by_subgroup.values())
    assert got.done == PublishDoneCode.TRACK_ENDED
    simulation.advance(1)  # the client's last FIN is on its way
    assert_clean(client.session)
    assert_clean(server.session)


def test_on_a_thin_link_every_layer_comes_after_the_one_before_it():
    store = TrackStore(NAME)
    # that loses nothing: what is lost of a layer comes after what was sent of the next
    thin = Path(latency=0.02, bandwidth=500_000, queue=1 << 20)
    simulation, _, client = served(store, path=thin)
    got = Timed(simulation)
    client.session.subscribe(NAME, got)
    simulation.advance(1)
    published = simulation.now
    for layer in reversed(range(10)):  # the last layer is there first
        store.append(layer, 0, bytes(100_000), priority=layer)
        store.finish_subgroup(layer, 0)
    assert simulation.run(lambda: len(got.locations) == 10)
    assert [at.group for at in got.locations] == list(range(10))
    # each has the whole link while it is its turn: 100,000 octets at 500,000 a second
    # and the link is never idle: a million octets at 500,000 a second, after a slow start
    assert got.times[Location(9, 0)] - published < 2.5


def test_an_urgent_layer_overtakes_a_large_one_that_is_on_its_way():
    store = TrackStore(NAME)
    simulation, _, client = served(store, path=Path(latency=0.02, bandwidth=500_000))
    got = Timed(simulation)
    client.session.subscribe(NAME, got)
    simulation.advance(1)
    store.append(9, 0, bytes(3_000_000), priority=9)
    simulation.advance(1)
    published = simulation.now
    store.append(0, 0, bytes(20_000), priority=0)
    assert simulation.run(lambda: len(got.locations) == 2)
    assert [at.group for at in got.locations] == [0, 9]
    # it waits for what QUIC was given already: the send budget of 256 KiB, half a second
    assert got.times[Location(0, 0)] - published < 1.0


def test_of_two_subscriptions_the_one_with_the_lower_number_goes_first():
    publisher = Publisher()
    stores = [track(1, 4, size=100_000), TrackStore(type(NAME)(NAME.namespace, b"other"))]
    for object_id in range(4):
        stores[1].append(0, object_id, bytes(100_000), priority=0)
    for store in stores:
        publisher.add_track(store)
    simulation, _, client = world(
        handler=publisher, path=Path(latency=0.02, bandwidth=500_000), stream_window=1 << 20
    )
    later, first = Timed(simulation), Timed(simulation)
    for store, got, priority in ((stores[0], later, 200), (stores[1], first, 10)):
        client.session.fetch(store.name, got, Parameters(subscriber_priority=priority))
    assert simulation.run(lambda: len(later.locations) == len(first.locations) == 4)
    assert max(first.times.values()) < min(list(later.times.values())[2:])


def test_300_groups_pass_where_8_streams_are_open_at_a_time_and_grants_get_lost():
    store = TrackStore(NAME)
    simulation, server, client = served(
        store, 4, path=Path(latency=0.02, loss=0.05), max_streams_uni=8
    )
    got = Collector()
    client.session.subscribe(NAME, got)
    assert simulation.run(lambda: got.accepted is not None)
    publish(store, 300, 2, size=300)
    assert simulation.run(lambda: got.done is not None, limit=300)
    assert sorted(got.locations) == [Location(g, o) for g in range(300) for o in range(2)]
    simulation.advance(1)  # the client's last FIN is on its way
    assert_clean(client.session)
    assert_clean(server.session)


@pytest.mark.parametrize("span", [0.1, 0.4, 1.0])
def test_credit_that_is_lost_is_given_again(span):
    """Every so often all that the receiver says, MAX_DATA and MAX_STREAMS among it, is lost."""
    store = TrackStore(NAME)
    simulation, _, client = served(
        store, stream_window=16_384, session_window=32_768, max_streams_uni=4
    )
    got = Collector()
    client.session.subscribe(NAME, got)
    assert simulation.run(lambda: got.accepted is not None)
    publish(store, 60, 2, size=20_000)
    simulation.drop = lambda sender, _: (
        sender == "subscriber" and simulation.now % (3 * span) < span
    )
    assert simulation.run(lambda: got.done is not None, limit=600)
    assert len(got.locations) == 120


def test_a_subscriber_that_joins_in_the_middle_gets_the_past_by_a_fill_and_the_rest_live():
    store = TrackStore(NAME)
    simulation, _, client = served(store, 2, path=HOSTILE)
    got = Collector()
    for group in range(12):
        if group == 6:
            client.session.subscribe(NAME, got, FILL)
            # not a moment's rest: the fill and the live Objects run side by side
        for object_id in range(3):
            store.append(group, object_id, bytes(700), priority=group)
            simulation.advance(0.05)  # so that SUBSCRIBE may be lost twice
        store.finish_subgroup(group, 0)
    end(store, 12)
    assert simulation.run(lambda: got.done is not None)
    assert sorted(got.locations) == [Location(g, o) for g in range(12) for o in range(3)]
    vias = {o.location.group: o.via for o in got.objects if o.status is ObjectStatus.NORMAL}
    assert vias[0] is Via.FILL and vias[11] is Via.SUBSCRIPTION


def test_a_fetch_of_three_megabytes_survives_a_path_of_every_vice():
    store = track(3, 10, size=100_000)
    path = Path(latency=0.04, bandwidth=1_000_000, loss=0.02, reorder=0.1, duplicate=0.05)
    simulation, _, client = served(store, 9, path=path)
    got = Collector()
    client.session.fetch(NAME, got)
    assert simulation.run(lambda: bool(got.streams), limit=120)
    assert got.locations == [Location(g, o) for g in range(3) for o in range(10)]
    assert sum(len(o.payload) for o in got.objects) == 30 * 100_004
    assert simulation.lost > 0


def test_an_outage_of_ten_seconds_costs_ten_seconds_and_no_object():
    store = TrackStore(NAME)
    simulation, _, client = served(store, path=Path(latency=0.02))
    got = Timed(simulation)
    client.session.subscribe(NAME, got)
    simulation.advance(1)
    began = simulation.now
    simulation.drop = lambda *_: began + 2 <= simulation.now < began + 12
    for object_id in range(160):
        store.append(0, object_id, bytes(500))
        simulation.advance(0.1)
    store.finish_subgroup(0, 0)
    assert simulation.run(lambda: len(got.locations) == 160, limit=30)
    assert got.locations == [Location(0, n) for n in range(160)]
    assert max(got.times.values()) < began + 30


def test_datagrams_that_are_lost_are_not_sent_again_and_none_comes_twice_in_the_session():
    store = TrackStore(NAME)
    simulation, _, client = served(store, 3, path=Path(latency=0.02, loss=0.1, duplicate=0.2))
    got = Collector()
    client.session.subscribe(NAME, got)
    simulation.advance(1)
    for object_id in range(100):
        store.append(0, object_id, b"x" * 100, subgroup=None)
        simulation.advance(0.02)
    simulation.advance(5)
    assert 70 < len(got.locations) < 100
    assert len(set(got.locations)) == len(got.locations)
    assert all(o.via is Via.DATAGRAM for o in got.objects)


@pytest.mark.parametrize("kill_at", [0.02, 0.5, 2.0])
def test_a_subscriber_that_dies_leaves_nothing_in_its_publisher(kill_at):
    store = track(100, 2, size=20_000, ended=False)
    simulation, server, client = served(
        store, path=Path(latency=0.02, bandwidth=300_000), idle_timeout=10.0
    )
    client.session.subscribe(NAME, Collector(), FILL)
    client.session.fetch(NAME, Collector())
    simulation.advance(kill_at)
    client.die()
    assert simulation.run(lambda: server.session.closed is not None, limit=60)
    assert_clean(server.session)
    assert not listeners(store)
    assert all(log.readers == 0 for g in store.groups.values() for log in g.subgroups.values())


def test_what_is_too_late_on_a_thin_link_is_given_up_and_what_is_fresh_comes_in_time():
    store = TrackStore(NAME)
    simulation, server, client = served(store, path=Path(latency=0.02, bandwidth=100_000))
    got = Timed(simulation)
    client.session.subscribe(NAME, got, Parameters(object_delivery_timeout=2000))
    simulation.advance(1)
    published = {}
    for group in range(40):  # twice as much as the link carries
        published[group] = simulation.now
        store.append(group, 0, bytes(50_000))
        store.finish_subgroup(group, 0)
        simulation.advance(0.25)
    simulation.advance(10)
    late = [at for at, time in got.times.items() if time - published[at.group] > 8]
    assert late == []  # the timeout, what QUIC was given before it, and a tick
    assert 10 <= len(got.locations) <= 30
    assert server.session.scheduler.counters.expired_objects == 40 - len(got.locations)
    fresh = simulation.now
    store.append(99, 0, bytes(5000))
    assert simulation.run(lambda: Location(99, 0) in got.times)
    assert got.times[Location(99, 0)] - fresh < 1


@pytest.mark.parametrize("seed", range(3))
def test_tracks_that_are_published_to_a_subscriber_come_whole_over_a_bad_path(seed):
    publisher = Publisher()
    stores = [TrackStore(FullTrackName(NAME.namespace, b"%d" % n)) for n in range(5)]
    for store in stores:
        publisher.add_track(store)
        store.append(0, 0, b"before")
    simulation, server, client = world(seed, handler=publisher, path=HOSTILE)
    got: dict[bytes, Collector] = {}

    def published(request):
        got[request.name.name] = Collector()
        request.accept(got[request.name.name])

    asked = Parameters(fill_parameters=Parameters(location_filter=LocationFilter.absolute_start(0)))
    tracks = client.session.subscribe_tracks(
        NAME.namespace, asked, on_publish=published, on_ended=lambda error: None
    )
    simulation.advance(1)
    for store in stores:
        for object_id in range(1, 6):
            store.append(0, object_id, bytes(2000))
        store.finish_subgroup(0, 0)
        store.finish(PublishDoneCode.TRACK_ENDED)
    assert simulation.run(lambda: len(got) == 5 and all(each.done for each in got.values()))
    for each in got.values():
        assert sorted(each.locations) == [Location(0, n) for n in range(6)]
    tracks.cancel()
    simulation.advance(2)
    assert_clean(client.session)
    assert_clean(server.session)
