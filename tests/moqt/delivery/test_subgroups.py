"""What subgroup streams and datagrams say: ends, gaps, bounds, and the order of it all."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moqt.delivery import PaddingDelivery
from moqt.publisher import Publisher
from moqt.receiving.receiver import Via
from moqt.session import SessionConfig
from moqt.track.gaps import Gaps
from moqt.track.store import TrackStore
from moqt.track.stored import MAX_IDS
from moqt.values.codes import (
    GroupOrder,
    ObjectStatus,
    ParameterType,
    PublishDoneCode,
    StreamErrorCode,
)
from moqt.values.messages import LocationFilter, Parameters, RangeFilter
from moqt.values.names import Location
from moqt.wire.primitives import iter_key_values
from tests.moqt.deliveries import ALL, Recorder, World, locations
from tests.moqt.memory import Pair
from tests.moqt.peers import NAME

END = ObjectStatus.END_OF_GROUP


def finished(store, group=0, subgroup=0, **kwargs):
    store.finish_subgroup(group, subgroup, **kwargs)
    return store


# -- END_OF_GROUP ------------------------------------------------------------------------


def test_end_of_group_is_in_the_header_where_the_largest_object_is_known_to_be_there():
    world = World()
    world.store.append(0, 0, b"x", subgroup=0)
    world.store.append(0, 1, b"x", subgroup=1, end_of_group=True)
    for subgroup in range(2):
        finished(world.store, 0, subgroup)
    world.run()
    flags = {s.subgroup.subgroup or 0: s.subgroup.end_of_group for s in world.got.opened}
    assert flags == {0: False, 1: True}
    assert not [o for o in world.got.objects if o.status], "no status has to be made up"
    assert all(error is None for *_, error in world.got.ends)
    world.end()


def test_an_end_of_group_learned_after_the_header_went_out_is_said_by_a_status():
    world = World()
    world.put((0, 0))
    finished(world.store, end_of_group=True)
    world.run()
    assert not world.got.opened[0].subgroup.end_of_group
    assert [(o.location, o.status) for o in world.got.objects if o.status] == [((0, 1), END)]
    world.end()


def test_a_status_the_application_published_is_sent_as_it_is():
    world = World()
    world.store.append(0, 0, b"x")
    world.store.mark_end(Location(0, 1), END)
    finished(world.store)
    world.run()
    assert world.got.opened[0].subgroup.end_of_group
    assert [(o.location, o.status) for o in world.got.objects if o.status] == [((0, 1), END)]
    world.end()


@pytest.mark.parametrize(
    ("parameters", "flag"),
    [
        ({"range_filters": (RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((0, 0),)),)}, False),
        ({"location_filter": LocationFilter.range(Location(0, 0), Location(0, 0))}, False),
        ({"location_filter": LocationFilter.absolute_start(0, 1)}, True),
    ],
)
def test_end_of_group_is_not_claimed_where_a_filter_may_withhold_the_largest(parameters, flag):
    world = World(parameters=Parameters(**{"location_filter": ALL.location_filter} | parameters))
    world.store.append(0, 0, b"x")
    world.store.append(0, 1, b"x", end_of_group=True)
    finished(world.store)
    world.run()
    assert [s.subgroup.end_of_group for s in world.got.opened] == [flag]


def test_a_stream_marked_end_of_group_whose_largest_object_an_update_withholds_gets_no_fin():
    world = World(stream_window=1000)
    world.got.stream_opened = lambda stream: (
        world.got.opened.append(stream),
        world.pair.client_transport.pause_receiving(stream.stream_id),
    )
    world.store.append(0, 0, bytes(3000))
    world.store.append(0, 1, b"x", end_of_group=True)
    finished(world.store)
    world.run()
    assert world.got.opened[0].subgroup.end_of_group
    world.update(range_filters=(RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((0, 0),)),))
    world.pair.client_transport.resume_receiving(world.got.opened[0].stream_id)
    world.run()
    assert world.got.live() == [(0, 0)]
    assert world.got.ends == [(Via.SUBSCRIPTION, 0, StreamErrorCode.CANCELLED)]


# -- gaps --------------------------------------------------------------------------------


def test_gap_properties_are_written_into_the_objects_properties_in_order():
    world = World()
    world.store.append(1, 0, b"x")
    world.store.append(4, 3, b"x", properties=b"\x10\x07", gaps=Gaps(groups=2, objects=3))
    world.run()
    received = next(o for o in world.got.objects if o.location == (4, 3))
    assert list(iter_key_values(received.properties)) == [(0x10, 7), (0x3C, 2), (0x3E, 3)]


# -- REQUEST_UPDATE ----------------------------------------------------------------------


def test_a_stream_of_a_group_an_update_leaves_out_is_reset_at_once():
    world = World()
    world.put((0, 0), (1, 0), (2, 0))
    world.update(location_filter=LocationFilter.groups(1, 1))
    assert sorted(world.got.ends) == [
        (Via.SUBSCRIPTION, 0, StreamErrorCode.CANCELLED),
        (Via.SUBSCRIPTION, 2, StreamErrorCode.CANCELLED),
    ]
    world.put((0, 1), (1, 1), (2, 1))
    world.update(location_filter=LocationFilter(0))
    world.put((0, 2), (2, 2))
    assert sorted(world.got.live()) == locations((0, 0), (0, 2), (1, 0), (1, 1), (2, 0), (2, 2))
    world.end()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 2)),
            st.tuples(st.just("start"), st.integers(0, 3)),
            st.tuples(st.just("end"), st.integers(0, 3)),
            st.tuples(st.just("pause"), st.integers(0, 1)),
            st.tuples(st.just("ids"), st.integers(0, 3)),
        ),
        max_size=14,
    )
)
def test_what_is_delivered_is_what_passes_when_it_is_published(steps):
    """The model: an Object is delivered once, exactly if the filters of its time let it."""
    world = World()
    start, end, forward, modulo, following, expected = 0, 9, 1, None, [0, 0, 0], []
    for what, value in steps:
        match what:
            case "put":
                object_id = following[value]
                following[value] += 1
                world.put((value, object_id))
                if forward and start <= value <= end and (modulo is None or object_id >= modulo):
                    expected.append(Location(value, object_id))
            case "start" | "end":
                start, end = (
                    (value, max(value, end)) if what == "start" else (min(start, value), value)
                )
                world.update(location_filter=LocationFilter.groups(start, end))
            case "pause":
                forward = 1 - value
                world.update(forward=forward)
            case "ids":
                modulo = value
                world.update(
                    range_filters=(
                        RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((value, None),)),
                    )
                )
    assert sorted(world.got.live()) == sorted(expected)
    world.end()


def test_every_subgroup_has_a_stream_with_a_header_of_its_own():
    world = World()
    for object_id in range(6):
        world.store.append(0, object_id, b"x", subgroup=object_id % 3)
    world.run()
    assert sorted(s.subgroup.subgroup for s in world.got.opened) == [0, 1, 2]
    assert len({s.stream_id for s in world.got.opened}) == 3
    assert {(o.location.object, o.subgroup) for o in world.got.objects} == {
        (object_id, object_id % 3) for object_id in range(6)
    }


# -- datagrams ---------------------------------------------------------------------------


def test_objects_and_statuses_in_datagrams_arrive_as_what_they_are():
    world = World()
    world.store.append(0, 0, b"d", subgroup=None, priority=9, properties=b"\x10\x07")
    world.store.append(0, 1, b"e", subgroup=None, end_of_group=True)
    world.store.append(1, 0, b"", subgroup=None)
    world.store.mark_end(Location(1, 5), END, subgroup=None)
    world.store.mark_end(Location(2, 0), ObjectStatus.END_OF_TRACK, subgroup=None)
    world.run()
    assert [(o.location, o.status, bytes(o.payload)) for o in world.got.objects] == [
        ((0, 0), ObjectStatus.NORMAL, b"d"),
        ((0, 1), ObjectStatus.NORMAL, b"e"),
        ((1, 0), ObjectStatus.NORMAL, b""),
        ((1, 5), END, b""),
        ((2, 0), ObjectStatus.END_OF_TRACK, b""),
    ]
    assert {o.via for o in world.got.objects} == {Via.DATAGRAM}
    assert world.got.objects[0].properties == b"\x10\x07" and world.got.objects[0].priority == 9
    assert world.pair.server.scheduler.counters.datagrams_sent == 5


def test_the_largest_object_of_a_group_known_to_be_it_carries_end_of_group():
    world = World()
    sent = []
    world.pair.server_transport.send_datagram = lambda data: sent.append(data) or True
    world.store.append(0, 0, b"d", subgroup=None)
    world.store.append(0, 1, b"e", subgroup=None, end_of_group=True)
    world.run()
    decoded = [world.pair.server.codec.decode_datagram(data) for data in sent]
    assert [each.end_of_group for each in decoded] == [False, True]


def test_a_datagram_the_transport_does_not_take_is_dropped_and_counted_never_put_on_a_stream():
    world = World()
    world.pair.server_transport.send_datagram = lambda data: False
    world.store.append(0, 0, bytes(5000), subgroup=None)
    world.run()
    assert world.got.objects == [] and world.got.opened == []
    assert world.pair.server.scheduler.counters.datagrams_too_large == 1
    assert world.fetch().locations == [(0, 0)], "a FETCH still brings it"


def test_datagrams_beyond_the_queue_are_dropped_and_counted():
    world = World()
    scheduler = world.pair.server.scheduler
    scheduler.limits.pending_datagrams = 10
    for n in range(25):
        world.store.append(0, n, b"d", subgroup=None)
    world.run()
    assert world.got.live() == [(0, n) for n in range(10)]
    assert scheduler.counters.datagrams_dropped == 15
    world.store.append(0, 25, b"d", subgroup=None)
    world.run()
    assert world.got.live()[-1] == (0, 25), "there is room again"


def test_publish_done_comes_after_the_datagrams_that_wait():
    world = World()
    world.store.append(0, 0, b"d", subgroup=None)
    world.store.finish(PublishDoneCode.TRACK_ENDED)
    assert world.got.done is None
    assert world.pair.server.scheduler.counters.datagrams_sent == 0
    world.run()
    assert world.got.done == PublishDoneCode.TRACK_ENDED
    assert world.pair.server.scheduler.counters.datagrams_sent == 1


# -- bounds ------------------------------------------------------------------------------


@pytest.mark.parametrize("authoritative", [True, False])
def test_an_endless_subgroup_with_a_reader_costs_what_is_held_of_it(authoritative):
    store = TrackStore(NAME, authoritative=authoritative)
    world = World(store)
    total = 3 * MAX_IDS
    for n in range(total):
        stored = store.begin(
            Location(0, n), subgroup=0, priority=1, properties=b"", length=0, follows=n - 1
        )
        store.complete(stored)
        if n >= 10:
            store.evict(store.get(Location(0, n - 10)))
        if n % 1000 == 0:
            world.run()
    world.run()
    log = store.groups[0].subgroups[0]
    assert len(log.ids) <= MAX_IDS + 1 and log.forgotten > 0 and log.readers == 1


def test_who_is_too_slow_for_forgotten_ids_gets_no_fin():
    world = World()
    store = world.store
    for n in range(MAX_IDS + 10):
        store.append(0, n, b"")
        if n >= 10:
            store.evict(store.get(Location(0, n - 10)))
    finished(store)
    world.run()
    assert world.got.live() == [(0, MAX_IDS + n) for n in range(10)]
    assert not world.got.opened[-1].subgroup.first_object
    assert world.got.ends[-1] == (Via.SUBSCRIPTION, 0, StreamErrorCode.TOO_FAR_BEHIND)
    world.end()


def test_how_many_subgroups_may_wait_is_a_setting_and_is_counted():
    world = World(max_streams=1)
    scheduler = world.pair.server.scheduler
    scheduler.limits.pending_subgroups = 5
    for group in range(8):
        world.store.append(group, 0, b"x")
    world.run()
    assert world.got.done == PublishDoneCode.TOO_FAR_BEHIND
    assert scheduler.counters.too_far_behind == 1
    world.clean()


def test_sparse_and_huge_ids_cost_one_entry_each():
    top = (1 << 64) - 1
    world = World()
    for group, object_id in ((0, 0), (0, top - 1), (1 << 40, 5), (top, top - 1)):
        world.store.append(group, object_id, b"x")
    world.run()
    expected = locations((0, 0), (0, top - 1), (1 << 40, 5), (top, top - 1))
    assert sorted(world.got.live()) == expected
    assert world.fetch().locations == expected
    world.end()


# -- the order ---------------------------------------------------------------------------

_OBJECTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # group
        st.one_of(st.none(), st.integers(0, 2)),  # subgroup
        st.sampled_from([1, 5]),  # priority
    ),
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(_OBJECTS, st.sampled_from(list(GroupOrder)))
def test_of_what_waits_the_next_to_go_is_the_one_the_priorities_name(published, order):
    store = TrackStore(NAME)
    publisher, sent = Publisher(), []
    store.on_used = lambda store, stored: sent.append(stored.location)
    publisher.add_track(store)
    pair = Pair(server=publisher, server_config=SessionConfig(send_budget=1))
    pair.client.subscribe(NAME, Recorder(), Parameters(group_order=order))
    pair.run()
    priorities, ids = {}, itertools.count()
    for group, subgroup, priority in published:
        if subgroup is not None:
            priority = priorities.setdefault((group, subgroup), priority)
        store.append(group, next(ids), bytes(50), subgroup=subgroup, priority=priority)
    pair.run()
    sign = 1 if order is GroupOrder.ASCENDING else -1

    def place(stored):
        group, object_id = stored.location
        datagram = stored.subgroup is None
        inner = (0, object_id) if datagram else (1, stored.subgroup)
        return (stored.priority, sign * group, *inner, object_id)

    expected = [stored.location for stored in sorted(store.objects(), key=place)]
    assert sent == expected


def test_padding_goes_out_when_nothing_else_does_and_is_discarded():
    world = World(max_streams=4)
    padding = PaddingDelivery(world.pair.server, 100_000)
    world.store.append(0, 0, b"x", priority=255)
    padding.begin()
    pieces = []
    send = world.pair.server_transport.send
    world.pair.server_transport.send = lambda stream_id, data, fin=False: (
        pieces.append((stream_id, len(data))),
        send(stream_id, data, fin),
    )
    world.run()
    of_padding = [stream_id == padding.stream_id for stream_id, _ in pieces]
    assert of_padding == sorted(of_padding) and not all(of_padding)
    assert sum(size for _, size in pieces) >= 100_000 and padding.left == 0
    assert world.got.live() == [(0, 0)] and world.pair.client.closed is None


# -- the peer's limit of streams ---------------------------------------------------------


def pass_time(world, seconds):
    for _ in range(round(seconds / 0.5)):
        world.now = getattr(world, "now", 0.0) + 0.5
        world.pair.server.tick(world.now)
        world.run()


def test_at_the_peers_limit_of_streams_the_one_of_the_lowest_priority_gives_way_and_goes_on_later():
    world = World(max_streams=3)  # one of them is the control stream
    world.store.append(0, 0, b"x", priority=9)
    world.store.append(1, 0, b"x", priority=200)
    world.run()
    world.store.append(2, 0, b"x", priority=5)
    world.run()
    assert world.got.live() == locations((0, 0), (1, 0))
    pass_time(world, 2)
    assert world.got.live() == locations((0, 0), (1, 0), (2, 0))
    assert world.got.ends == [(Via.SUBSCRIPTION, 1, StreamErrorCode.CANCELLED)]
    assert world.pair.server.scheduler.counters.streams_given_up == 1
    world.store.append(1, 1, b"x", priority=200)
    finished(world.store, 0)
    finished(world.store, 2)
    world.run()
    assert world.got.live()[-1] == Location(1, 1)
    world.end()


def test_an_object_whose_stream_gave_way_is_sent_again_whole():
    world = World(max_streams=2)
    large = world.store.begin(
        Location(0, 0), subgroup=0, priority=200, properties=b"", length=100_000
    )
    world.store.grow(large, b"a" * 60_000)
    world.run()
    world.store.append(1, 0, b"x", priority=5)
    pass_time(world, 2)
    assert world.got.live() == locations((1, 0))
    world.store.grow(large, b"a" * 40_000)
    world.store.complete(large)
    finished(world.store, 1)
    world.run()
    assert world.got.live() == locations((1, 0), (0, 0))
    assert len(world.got.objects[-1].payload) == 100_000
    world.end()


def held_back(world):
    """The peer has nothing of what is written from now on, until the set is cleared."""
    lost, transport = set(), world.pair.server_transport
    send, acknowledged = transport.send, transport.acknowledged

    def sent(stream_id, data, fin=False):
        lost.add(stream_id)
        send(stream_id, data, fin)

    transport.send = sent
    transport.acknowledged = lambda stream_id: stream_id not in lost and acknowledged(stream_id)
    return lost


def test_a_stream_that_gives_way_is_not_reset_before_what_it_has_sent_has_arrived():
    """A reset takes back what a lost packet carried: nobody would send it again."""
    world = World(max_streams=2)  # one of them is the control stream
    lost = held_back(world)
    world.store.append(0, 0, b"x", priority=200)
    world.run()
    world.store.append(1, 0, b"x", priority=5)
    world.store.append(0, 1, b"x", priority=200)
    pass_time(world, 5)
    assert not world.got.ends
    lost.clear()
    pass_time(world, 0.5)
    assert world.got.ends == [(Via.SUBSCRIPTION, 0, StreamErrorCode.CANCELLED)]
    assert world.pair.server.scheduler.counters.streams_given_up == 1
    lost.clear()
    finished(world.store, 1)
    world.run()
    assert sorted(world.got.live()) == locations((0, 0), (0, 1), (1, 0))
    world.pair.server_transport.acknowledged = lambda stream_id: True
    world.end()


def test_no_stream_is_reset_for_a_gap_or_a_cut_before_what_it_has_sent_has_arrived():
    world = World(TrackStore(NAME, authoritative=False))
    lost = held_back(world)
    for object_id in (0, 5):
        stored = world.store.begin(
            Location(0, object_id), subgroup=0, priority=None, properties=b"", length=0
        )
        world.store.complete(stored)
    world.run()
    assert world.got.live() == locations((0, 0)) and not world.got.ends
    lost.clear()
    world.run()
    assert world.got.live() == locations((0, 0), (0, 5)) and len(world.got.ends) == 1
    world.store.break_subgroup(0, 0)
    world.run()
    assert len(world.got.ends) == 1
    lost.clear()
    world.run()
    assert len(world.got.ends) == 2


@pytest.mark.parametrize("priority", [200, 201])
def test_no_stream_gives_way_to_one_of_its_own_or_a_lower_priority(priority):
    world = World(max_streams=2)
    world.store.append(0, 0, b"x", priority=200)
    world.run()
    world.store.append(1, 0, b"x", priority=priority)
    pass_time(world, 5)
    assert world.got.live() == locations((0, 0)) and not world.got.ends
    finished(world.store, 0)
    world.run()
    assert world.got.live() == locations((0, 0), (1, 0))
    world.end()


def test_while_the_peer_grants_streams_none_is_taken_from_another():
    world = World(max_streams=3)
    world.store.append(0, 0, b"x", priority=200)
    world.run()
    for group in range(1, 9):
        world.store.append(group, 0, b"x", priority=5)
        pass_time(world, 0.5)
        finished(world.store, group)
        pass_time(world, 0.5)
    assert not [end for end in world.got.ends if end[2] is not None]
    assert world.pair.server.scheduler.counters.streams_given_up == 0
    world.end()


def test_a_subgroup_of_which_nothing_is_left_when_a_stream_is_free_is_told_by_a_reset():
    world = World(max_streams=2)  # one of them is the control stream
    world.put((0, 0), (1, 0))
    world.store.evict(world.store.get(Location(1, 0)))
    world.store.finish_subgroup(1, 0)
    world.run()
    assert world.got.live() == [Location(0, 0)]
    world.end()
    world.run()
    assert world.got.ends == [
        (Via.SUBSCRIPTION, 0, None),
        (Via.SUBSCRIPTION, 1, StreamErrorCode.TOO_FAR_BEHIND),
    ]
    assert world.got.done == PublishDoneCode.TRACK_ENDED
