"""Two sessions in memory: requests, deliveries, fills, fetches."""

from __future__ import annotations

import pytest

from moqt.publisher import Publisher
from moqt.session import SessionState
from moqt.track.store import TrackStore
from moqt.values.codes import GroupOrder, ObjectStatus, PublishDoneCode
from moqt.values.messages import LocationFilter, Parameters
from moqt.values.names import Location
from tests.moqt.memory import Pair
from tests.moqt.peers import FILL, NAME, Collector, publish, track


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_next_object_with_a_fill_from_0_0_brings_every_object_exactly_once(seed):
    for published in range(13):
        publisher = Publisher()
        store = TrackStore(NAME)
        publisher.add_track(store)
        pair = Pair(server=publisher, seed=seed)
        collector = Collector()
        todo = [(g, o) for g in range(3) for o in range(4)]

        def put(g, o, store=store):
            store.append(g, o, b"x" * 50)
            if o == 3:
                store.mark_end(Location(g, 4), ObjectStatus.END_OF_GROUP)
                store.finish_subgroup(g, 0)

        for g, o in todo[:published]:
            put(g, o)
        pair.client.subscribe(NAME, collector, FILL)
        pair.run()
        assert collector.accepted is not None
        for g, o in todo[published:]:
            put(g, o)
            pair.run()
        store.mark_end(Location(3, 0), ObjectStatus.END_OF_TRACK)
        store.finish_subgroup(3, 0)
        store.finish(PublishDoneCode.TRACK_ENDED)
        pair.run()
        assert sorted(collector.locations) == [Location(g, o) for g, o in todo]
        assert collector.done == PublishDoneCode.TRACK_ENDED


@pytest.mark.parametrize("order", list(GroupOrder))
def test_a_fetch_delivers_groups_in_the_requested_order_and_objects_ascending(order):
    publisher = Publisher()
    publisher.add_track(track(5))
    pair = Pair(server=publisher, seed=7)
    collector = Collector()
    pair.client.fetch(
        NAME,
        collector,
        Parameters(location_filter=LocationFilter.groups(1, 3), group_order=order),
    )
    pair.run()
    groups = [1, 2, 3] if order is GroupOrder.ASCENDING else [3, 2, 1]
    assert collector.locations == [Location(g, o) for g in groups for o in range(4)]
    assert collector.streams[-1][1] is None


def test_300_groups_cross_a_connection_that_grants_8_streams_without_deadlock():
    publisher, store = Publisher(), TrackStore(NAME)
    publisher.add_track(store)
    pair = Pair(server=publisher, max_streams=8)
    collector = Collector()
    pair.client.subscribe(NAME, collector)
    pair.run()
    publish(store, 300, 2)
    pair.run()
    assert len(set(collector.locations)) == 600
    assert collector.done == PublishDoneCode.TRACK_ENDED


def test_an_unknown_track_is_refused_and_the_session_stays_open():
    pair = Pair(server=Publisher())
    collector = Collector()
    pair.client.subscribe(NAME, collector)
    pair.run()
    assert collector.failed.code == 0x10
    assert pair.client.state is SessionState.ESTABLISHED


@pytest.mark.parametrize(("lost", "ended"), [(False, True), (True, False)])
def test_fetch_ok_says_end_of_track_only_when_nothing_can_lie_behind_its_end(lost, ended):
    store = TrackStore(NAME, authoritative=False)
    store.append(0, 0, b"x")
    if not lost:
        store.mark_end(Location(0, 1), ObjectStatus.END_OF_GROUP)
    store.mark_end(Location(1, 0), ObjectStatus.END_OF_TRACK)
    publisher = Publisher()
    publisher.add_track(store)
    pair = Pair(server=publisher)
    collector = Collector()
    pair.client.fetch(NAME, collector)
    pair.run()
    assert collector.locations == [Location(0, 0)]
    assert collector.accepted.end_of_track is ended
