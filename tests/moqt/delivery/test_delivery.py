"""How Objects leave a store: filters, updates, pause, fills, growing and evicted Objects."""

from __future__ import annotations

import itertools

import pytest

from moqt.delivery.scheduler import DeliveryLimits
from moqt.publisher import Publisher
from moqt.receiving.receiver import Via
from moqt.track.store import TrackStore
from moqt.values.codes import (
    GroupOrder,
    ObjectStatus,
    ParameterType,
    PublishDoneCode,
    RequestErrorCode,
    StreamErrorCode,
)
from moqt.values.messages import KeyValue, LocationFilter, Parameters, RangeFilter, RequestOk
from moqt.values.names import Location
from moqt.wire.primitives import encode_key_values
from tests.moqt.deliveries import ALL, NEXT, Recorder, World, grow, locations
from tests.moqt.inside import considered
from tests.moqt.memory import Pair
from tests.moqt.peers import NAME, Collector, publish, track

# -- filters -----------------------------------------------------------------------------


LATER = [(0, 2), (0, 3), (1, 3), (2, 0), (2, 1)]
"""What is published after the subscription; its Largest Object is 1/2."""


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (LocationFilter.absolute_start(1, 2), [(1, 3), (2, 0), (2, 1)]),
        (LocationFilter.groups(0, 1), [(0, 2), (0, 3), (1, 3)]),
        (LocationFilter.range(Location(0, 3), Location(2, 0)), [(0, 3), (1, 3), (2, 0)]),
        (LocationFilter.next_object(), [(1, 3), (2, 0), (2, 1)]),
        (LocationFilter.relative_start(0), [(2, 0), (2, 1)]),
        (LocationFilter.relative_start(1), [(1, 3), (2, 0), (2, 1)]),
        (LocationFilter.relative_start(9), LATER),
        (LocationFilter(0), LATER),
        (None, LATER),
    ],
)
def test_a_subscription_gets_what_its_filter_selects_of_what_is_published_from_then_on(
    chosen, expected
):
    store = TrackStore(NAME)
    for g, o in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2)):
        store.append(g, o, b"x")
    world = World(store, Parameters(location_filter=chosen))
    assert world.got.opened == []
    world.put(*LATER)
    assert sorted(world.got.live()) == locations(*expected)
    world.end()


@pytest.mark.parametrize("chosen", [None, LocationFilter.absolute_start(0)])
def test_what_is_there_comes_by_a_fill_or_a_fetch_and_what_has_begun_counts_as_there(chosen):
    store = track(1, ended=False)
    growing = grow(store, (1, 0))
    world = World(store, Parameters(location_filter=chosen, fill_parameters=Parameters()))
    store.grow(growing, b"0123456789")
    store.complete(growing)
    world.run()
    past = [(0, o) for o in range(4)] + [(1, 0)]
    assert world.got.live() == [] and world.got.filled() == locations(*past)
    assert world.fetch().locations == locations(*past)
    world.put((1, 1))
    assert world.got.live() == [(1, 1)]
    world.end()


def test_an_object_that_comes_late_is_sent_although_it_lies_before_the_largest():
    world = World(parameters=None)
    world.store.append(5, 5, b"x")
    world.request = world.pair.client.subscribe(NAME, world.got)
    world.run()
    world.put((5, 2), (3, 0))
    assert sorted(world.got.live()) == locations((3, 0), (5, 2))


def test_filter_type_0_in_an_update_removes_the_filter():
    world = World(track(2, ended=False), Parameters(location_filter=LocationFilter.groups(0, 1)))
    world.put((2, 0))
    assert world.got.live() == []
    world.update(location_filter=LocationFilter(0))
    world.put((2, 1), (3, 0))
    assert world.got.live() == locations((2, 1), (3, 0))
    world.end()


def test_a_relative_filter_in_an_update_counts_from_the_largest_object_of_then():
    world = World(track(1, ended=False), NEXT)
    world.put((1, 0))
    world.update(location_filter=LocationFilter.relative_start(0))
    world.put((1, 1), (2, 0))
    assert world.got.live() == locations((1, 0), (2, 0))
    world.end()


def test_no_datagram_outside_the_filter_is_sent():
    chosen = LocationFilter.range(Location(1, 0), Location(1, 1))
    world = World(parameters=Parameters(location_filter=chosen))
    for location in locations((0, 0), (1, 0), (1, 1), (1, 2), (2, 0)):
        world.store.append(*location, b"d", subgroup=None)
    world.run()
    assert world.got.live() == locations((1, 0), (1, 1))
    world.end()


def test_what_only_a_fetch_brings_into_the_store_is_not_for_the_subscriptions():
    store = TrackStore(NAME, authoritative=False)
    store.append(5, 5, b"x")
    world = World(store, Parameters())
    for object_id, subgroup in ((0, 0), (1, None)):
        stored = grow(store, (4, object_id), 1, subgroup=subgroup, live=False)
        store.grow(stored, b"f")
        store.complete(stored)
    world.run()
    assert world.got.objects == []
    world.put((5, 6))
    assert world.got.live() == [(5, 6)]


@pytest.mark.parametrize(
    ("chosen", "error"),
    [
        (None, None),
        (LocationFilter(0), None),
        (LocationFilter.next_object(), None),
        (LocationFilter.absolute_start(0, 3), None),
        (LocationFilter.absolute_start(0, 1), StreamErrorCode.CANCELLED),
        (LocationFilter.relative_start(1), StreamErrorCode.CANCELLED),
    ],
)
def test_a_stream_that_leaves_out_what_was_there_gets_a_fin_unless_the_filter_asked_for_it(
    chosen, error
):
    store = TrackStore(NAME)
    for o in range(3):
        store.append(0, o, b"x")
    world = World(store, Parameters(location_filter=chosen))
    world.put((0, 3))
    store.finish_subgroup(0, 0)
    world.run()
    assert world.got.live() == [(0, 3)]
    assert world.got.ends == [(Via.SUBSCRIPTION, 0, error)]
    assert not world.got.opened[0].subgroup.first_object
    world.end()


@pytest.mark.parametrize("subgroup", [0, None])
def test_a_status_beyond_the_largest_object_is_told_although_it_was_there(subgroup):
    store = TrackStore(NAME)
    store.append(0, 0, b"x")
    store.mark_end(Location(0, 1), ObjectStatus.END_OF_GROUP, subgroup=subgroup)
    store.append(1, 0, b"x")
    store.mark_end(Location(2, 0), ObjectStatus.END_OF_TRACK, subgroup=subgroup)
    world = World(store, Parameters())
    assert [(o.location, o.status) for o in world.got.objects] == [
        ((2, 0), ObjectStatus.END_OF_TRACK)
    ]


def test_a_filter_end_inside_a_subgroup_resets_the_stream_and_one_at_its_end_finishes_it():
    for end, error in ((1, StreamErrorCode.CANCELLED), (3, None)):
        world = World(
            parameters=Parameters(
                location_filter=LocationFilter.range(Location(0, 0), Location(0, end))
            )
        )
        world.put(*((0, o) for o in range(4)))
        world.store.finish_subgroup(0, 0)
        world.run()
        assert world.got.live() == [Location(0, o) for o in range(end + 1)]
        assert world.got.ends == [(Via.SUBSCRIPTION, 0, error)]
        world.end()


def test_a_finished_subgroup_is_cut_by_a_filter_end_with_a_reset_too():
    world = World(
        parameters=Parameters(location_filter=LocationFilter.range(Location(0, 0), Location(0, 1)))
    )
    publish(world.store, 1, ended=False)
    world.run()
    assert world.got.ends == [(Via.SUBSCRIPTION, 0, StreamErrorCode.CANCELLED)]
    world.end()


def test_a_filter_entirely_in_the_past_is_accepted_and_the_subscription_stays():
    world = World(track(3, ended=False), Parameters(location_filter=LocationFilter.groups(0, 0)))
    world.put((5, 0))
    assert world.got.accepted and world.got.done is None and world.got.objects == []
    world.end()


@pytest.mark.parametrize(
    ("filters", "passes"),
    [
        ([RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((0, 0), (3, None)))], {0, 3}),
        ([RangeFilter(ParameterType.SUBGROUP_FILTER, ranges=((1, 1),))], {1, 3}),
        ([RangeFilter(ParameterType.PRIORITY_FILTER, ranges=((0, 9),))], {0, 2}),
        (
            [
                RangeFilter(
                    ParameterType.OBJECT_PROPERTY_FILTER, property_type=0x10, ranges=((2, 3),)
                )
            ],
            {2, 3},
        ),
        (
            [
                RangeFilter(ParameterType.SUBGROUP_FILTER, 0, ranges=((1, 1),)),
                RangeFilter(ParameterType.OBJECTID_FILTER, 0, ranges=((3, 9),)),
                RangeFilter(ParameterType.OBJECTID_FILTER, 1, ranges=((0, 0),)),
            ],
            {0, 3},
        ),
    ],
)
def test_range_filters_select_alike_for_subscription_fill_and_fetch(filters, passes):
    store = TrackStore(NAME)

    def publish(group):
        for o in range(4):
            store.append(
                group,
                o,
                b"x",
                subgroup=o % 2,
                priority=5 + 10 * (o % 2),
                properties=encode_key_values((KeyValue(0x10, o),)),
            )
        for subgroup in range(2):
            store.finish_subgroup(group, subgroup)

    publish(0)
    world = World(
        store,
        Parameters(
            location_filter=LocationFilter.next_object(),
            range_filters=tuple(filters),
            fill_parameters=Parameters(location_filter=LocationFilter.absolute_start(0)),
        ),
    )
    publish(1)
    world.run()
    assert sorted(world.got.filled()) == [(0, o) for o in sorted(passes)]
    assert sorted(world.got.live()) == [(1, o) for o in sorted(passes)]
    assert all(error is None for *_, error in world.got.ends), "left out by a filter: FIN"
    fetched = world.fetch(range_filters=tuple(filters))
    assert fetched.locations == [(g, o) for g in range(2) for o in sorted(passes)]
    world.end()


def test_first_object_is_set_exactly_when_the_stream_begins_with_the_subgroups_first():
    store = TrackStore(NAME)
    for o in range(3):
        store.append(0, o, b"x")
    skip_0 = RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((1, None),))
    for parameters, expected in (
        (Parameters(), [False, True]),
        (ALL, [False, True]),
        (NEXT, [False, True]),
        (Parameters(location_filter=LocationFilter.absolute_start(0, 1)), [False, True]),
        (Parameters(location_filter=ALL.location_filter, range_filters=(skip_0,)), [False, False]),
    ):
        copy = TrackStore(NAME)
        for stored in store.objects():
            copy.append(*stored.location, b"x")
        world = World(copy, parameters)
        world.put((0, 3), (1, 0), (1, 1))
        assert [s.subgroup.first_object for s in world.got.opened] == expected
        world.end()


# -- REQUEST_UPDATE ----------------------------------------------------------------------


def test_widening_the_start_does_not_send_the_past():
    world = World(track(3, ended=False), NEXT)
    world.update(location_filter=LocationFilter.absolute_start(0))
    assert world.got.live() == []
    world.put((3, 0))
    assert world.got.live() == [(3, 0)]
    world.update(location_filter=LocationFilter(0))
    assert world.got.live() == [(3, 0)]
    world.end()


def test_widening_the_start_does_not_send_what_lay_before_it():
    world = World(parameters=Parameters(location_filter=LocationFilter.absolute_start(1, 1)))
    world.put((0, 0), (1, 0), (1, 1))
    world.update(location_filter=LocationFilter.absolute_start(0))
    world.put((0, 1), (1, 2))
    assert sorted(world.got.live()) == locations((0, 1), (1, 1), (1, 2))
    world.end()


def test_widening_the_end_does_not_send_what_lay_beyond_it():
    world = World(
        parameters=Parameters(location_filter=LocationFilter.range(Location(0, 0), Location(0, 1)))
    )
    world.put((0, 0), (0, 1), (0, 2), (1, 0))
    world.update(location_filter=LocationFilter.absolute_start(0))
    world.put((0, 3), (1, 1), (2, 0))
    assert sorted(world.got.live()) == locations((0, 0), (0, 1), (0, 3), (1, 1), (2, 0))
    world.store.finish_subgroup(0, 0)
    world.run()
    assert (Via.SUBSCRIPTION, 0, None) not in world.got.ends, "it lacks Object 2: no FIN"
    world.end()


def test_narrowing_the_start_leaves_out_what_comes_before_it_and_ends_with_a_reset():
    world = World()
    world.put((0, 0), (0, 1))
    world.update(location_filter=LocationFilter.absolute_start(0, 4))
    world.put((0, 2), (0, 3), (0, 4))
    world.store.finish_subgroup(0, 0)
    world.run()
    assert world.got.live() == locations((0, 0), (0, 1), (0, 4))
    assert world.got.ends == [(Via.SUBSCRIPTION, 0, StreamErrorCode.CANCELLED)]
    world.end()


def test_narrowing_the_end_stops_at_it():
    world = World()
    world.put((0, 0))
    world.update(location_filter=LocationFilter.range(Location(0, 0), Location(0, 1)))
    world.put((0, 1), (0, 2), (1, 0))
    assert world.got.live() == locations((0, 0), (0, 1))
    world.end()


def test_range_filters_are_replaced_by_type_and_removed_by_an_empty_one():
    world = World()
    world.update(range_filters=(RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((1, 1),)),))
    world.put((0, 0), (0, 1))
    world.update(range_filters=(RangeFilter(ParameterType.SUBGROUP_FILTER, ranges=((0, 0),)),))
    world.put((0, 2))
    world.update(range_filters=(RangeFilter(ParameterType.OBJECTID_FILTER),))
    world.put((0, 3))
    assert world.got.live() == locations((0, 1), (0, 3))
    world.end()


def test_an_update_beyond_max_filter_ranges_ends_the_subscription_with_update_failed():
    world = World()
    world.pair.client.rules.peer_max_filter_ranges = 100
    many = RangeFilter(
        ParameterType.OBJECTID_FILTER, ranges=tuple((2 * n, 2 * n) for n in range(17))
    )
    world.update(range_filters=(many,))
    assert world.got.answers[0].code == RequestErrorCode.INVALID_FILTER
    assert world.got.done == PublishDoneCode.UPDATE_FAILED
    world.clean()


# -- pause -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_pause_leaves_out_exactly_what_is_published_meanwhile(seed):
    world = World(seed=seed)
    world.put((0, 0), (0, 1))
    world.update(forward=0)
    assert world.got.ends == [(Via.SUBSCRIPTION, 0, StreamErrorCode.CANCELLED)]
    world.put((0, 2), (1, 0))
    world.update(forward=1)
    world.put((0, 3), (1, 1), (2, 0))
    assert sorted(world.got.live()) == locations((0, 0), (0, 1), (0, 3), (1, 1), (2, 0))
    assert not any(
        stream.subgroup.first_object for stream in world.got.opened if stream.subgroup.group == 1
    )
    world.end()


def test_a_subscription_that_begins_paused_gets_nothing_until_it_is_resumed():
    world = World(
        track(1, ended=False),
        Parameters(forward=0, fill_parameters=Parameters(), location_filter=ALL.location_filter),
    )
    world.put((1, 0))
    assert world.got.objects == [] and world.got.streams == []
    world.update(forward=1)
    assert world.got.objects == [], "the fill was ignored for good"
    world.put((1, 1))
    assert world.got.live() == [(1, 1)]
    world.end()


def test_resume_with_a_filter_and_a_fill_in_one_update_brings_everything_once():
    for chosen in (LocationFilter.next_object(), LocationFilter.absolute_start(0), None):
        world = World(parameters=Parameters(forward=0))
        world.put((0, 0), (0, 1), (1, 0))
        world.update(
            forward=1,
            location_filter=chosen,
            fill_parameters=Parameters(location_filter=LocationFilter.absolute_start(0)),
        )
        assert world.got.answers == [RequestOk(Parameters(largest_object=Location(1, 0)))]
        world.put((1, 1), (2, 0))
        assert world.got.filled() == locations((0, 0), (0, 1), (1, 0))
        assert sorted(world.got.live()) == locations((1, 1), (2, 0))
        world.end()


def test_pausing_twice_and_resuming_twice_changes_nothing():
    world = World()
    for forward in (1, 0, 0, 1, 1):
        world.update(forward=forward)
    world.put((0, 0))
    assert world.got.live() == [(0, 0)] and len(world.got.answers) == 5
    world.end()


def test_a_datagram_published_during_a_pause_is_not_sent_after_it():
    world = World()

    def datagram(group):
        stored = world.store.begin(
            Location(group, 0), subgroup=None, priority=1, properties=b"", length=1
        )
        world.store.grow(stored, b"d")
        world.store.complete(stored)
        world.run()

    datagram(0)
    world.update(forward=0)
    datagram(1)
    world.update(forward=1)
    datagram(2)
    assert world.got.live() == locations((0, 0), (2, 0))
    assert all(o.via is Via.DATAGRAM and o.subgroup is None for o in world.got.objects)


def test_a_fetch_brings_no_statuses():
    store = TrackStore(NAME)
    store.append(0, 0, b"x")
    store.mark_end(Location(0, 1), ObjectStatus.END_OF_GROUP)
    store.append(1, 0, b"x")
    got = World(store, None).fetch()
    assert [(o.location, o.payload) for o in got.objects] == [((0, 0), b"x"), ((1, 0), b"x")]


def test_datagrams_there_before_the_subscription_come_by_fetch_only():
    store = TrackStore(NAME)
    for group in range(2):
        store.append(group, 0, b"d", subgroup=None)
    world = World(store, Parameters(location_filter=LocationFilter.absolute_start(1)))
    assert world.got.objects == []
    store.append(0, 1, b"d", subgroup=None)
    store.append(1, 1, b"d", subgroup=None)
    world.run()
    assert world.got.live() == [(1, 1)]
    fetched = world.fetch()
    assert fetched.locations == locations((0, 0), (0, 1), (1, 0), (1, 1))
    assert {o.subgroup for o in fetched.objects} == {None} and len(fetched.opened) == 1


# -- fills -------------------------------------------------------------------------------


@pytest.mark.parametrize("published", [0, 2])
def test_an_empty_fill_opens_no_stream(published):
    store = TrackStore(NAME)
    for o in range(published):
        store.append(0, o, b"x")
    world = World(
        store,
        Parameters(
            location_filter=LocationFilter.next_object(),
            fill_parameters=Parameters(location_filter=LocationFilter.absolute_start(5)),
        ),
    )
    assert world.got.opened == []
    world.end()


def test_a_fill_of_a_range_without_objects_opens_an_empty_stream():
    store = TrackStore(NAME)
    store.append(5, 0, b"x")
    world = World(
        store,
        Parameters(
            location_filter=LocationFilter.next_object(),
            fill_parameters=Parameters(location_filter=LocationFilter.groups(0, 3)),
        ),
    )
    assert world.got.ends == [(Via.FILL, None, None)] and world.got.objects == []
    world.end()


def test_a_fill_started_by_an_update_carries_the_updates_request_id():
    world = World(track(2, ended=False), NEXT)
    for _ in range(3):
        world.update(fill_parameters=Parameters(location_filter=LocationFilter.groups(0, 0)))
    assert [s.request_id for s in world.got.opened if s.via is Via.FILL] == [2, 4, 6]
    assert world.got.filled() == [(0, o) for o in range(4)] * 3
    assert world.pair.client.data_streams.expected == {}
    world.end()


def test_a_fill_inherits_the_subscriptions_filter_and_is_not_remembered():
    world = World(
        track(3, ended=False),
        Parameters(location_filter=LocationFilter.groups(1, 9), fill_parameters=Parameters()),
    )
    assert world.got.filled() == [(g, o) for g in (1, 2) for o in range(4)]
    world.update(subscriber_priority=3)
    assert len(world.got.filled()) == 8
    world.end()


def blocked_by_its_reader(world):
    """What is sent to the subscriber from now on waits until it is called."""
    transport, got = world.pair.client_transport, world.got
    got.stream_opened = lambda stream: (
        got.opened.append(stream),
        transport.pause_receiving(stream.stream_id),
    )

    def read():
        del got.stream_opened
        for stream in got.opened:
            transport.resume_receiving(stream.stream_id)
        world.run()

    return read


def test_several_fills_at_once_are_each_delivered_whole():
    world = World(track(2, ended=False, size=100_000), NEXT, stream_window=50_000)
    read = blocked_by_its_reader(world)
    for group in range(2):
        world.update(
            fill_parameters=Parameters(location_filter=LocationFilter.groups(group, group))
        )
    assert world.got.filled() == []
    read()
    assert sorted(world.got.filled()) == [(g, o) for g in range(2) for o in range(4)]
    assert [error for via, _, error in world.got.ends if via is Via.FILL] == [None, None]
    world.end()


def test_a_track_that_ends_says_publish_done_after_the_last_fill():
    world = World(track(1, ended=False, size=100_000), NEXT, stream_window=50_000)
    read = blocked_by_its_reader(world)
    world.update(fill_parameters=Parameters(location_filter=LocationFilter.absolute_start(0)))
    world.store.finish(PublishDoneCode.TRACK_ENDED)
    world.run()
    assert world.request.done is None and world.got.filled() == []
    read()
    assert len(world.got.filled()) == 4
    assert world.request.done.stream_count == len(world.got.ends)
    world.clean()


def test_stopping_a_fill_leaves_the_subscription_and_other_fills_alone():
    store = track(2, ended=False, size=100_000)
    world = World(store, NEXT, stream_window=50_000)
    world.got.stream_opened = lambda stream: (
        world.got.opened.append(stream),
        world.pair.client_transport.pause_receiving(stream.stream_id),
    )
    for _ in range(2):
        world.update(fill_parameters=Parameters(location_filter=LocationFilter.groups(0, 1)))
    first, _ = (s for s in world.got.opened if s.via is Via.FILL)
    world.pair.client_transport.stop_receiving(first.stream_id, 1)
    world.run()
    for stream in world.got.opened:
        world.pair.client_transport.resume_receiving(stream.stream_id)
    del world.got.stream_opened
    world.pair.client.stream_reset(first.stream_id, 1)
    world.run()
    assert [error for via, _, error in world.got.ends if via is Via.FILL] == [1, None]
    world.put((5, 0))
    assert world.got.live() == [(5, 0)]
    world.end()


def test_cancelling_the_subscription_resets_its_fills_and_streams():
    store = TrackStore(NAME)
    store.append(0, 0, bytes(100_000))
    world = World(store, None, stream_window=1000)
    got = Recorder()
    request = world.pair.client.subscribe(
        NAME,
        got,
        Parameters(location_filter=ALL.location_filter, fill_parameters=Parameters()),
    )
    for _ in range(2):
        world.pair.server.ready_to_send()
        world.pair.client_transport.deliver()
    for group in (5, 6):
        store.append(group, 0, bytes(100_000))
    for _ in range(3):
        world.pair.server.ready_to_send()
        world.pair.client_transport.deliver()
    assert world.pair.server.remembered().streams_sent == 3
    request.cancel()
    world.run()
    world.clean()
    codes = {
        s.reset for i, s in world.pair.server_transport.out.items() if i & 2 and s.reset is not None
    }
    assert codes == {StreamErrorCode.CANCELLED}


@pytest.mark.parametrize("opened", [True, False])
def test_publish_done_counts_a_fill_exactly_when_its_stream_was_opened(opened):
    world = World(track(2, ended=False, size=100_000), NEXT, stream_window=1000)
    world.got.stream_opened = lambda stream: world.pair.client_transport.pause_receiving(
        stream.stream_id
    )
    if not opened:
        world.pair.server_transport.max_streams = world.pair.server_transport.open_uni
    before = world.request.streams_ended
    world.update(fill_parameters=Parameters(location_filter=LocationFilter.absolute_start(0)))
    assert world.pair.server.remembered().streams_sent == opened
    (incoming,) = world.pair.server.requests.incoming.values()
    incoming.end(PublishDoneCode.GOING_AWAY)
    world.run()
    assert world.request.done.stream_count == before + opened
    assert world.got.done == PublishDoneCode.GOING_AWAY
    world.clean()


# -- growing, aborted and evicted Objects -------------------------------------------------


@pytest.mark.parametrize("kind", ["subscribe", "fetch", "fill"])
def test_an_object_is_sent_before_it_is_complete(kind):
    parts = []

    class Parts(Recorder):
        def object_part(self, stream, part):
            super().object_part(stream, part)
            parts.append(bytes(part))

    store = TrackStore(NAME)
    world = World(store, None)
    got = Parts()
    if kind == "subscribe":
        world.pair.client.subscribe(NAME, got)
        world.run()
    stored = grow(store, (0, 0))
    store.grow(stored, b"01234")
    if kind == "fetch":
        world.pair.client.fetch(NAME, got)
    elif kind == "fill":
        fill = Parameters(location_filter=LocationFilter(0))
        world.pair.client.subscribe(
            NAME,
            got,
            Parameters(location_filter=LocationFilter.next_object(), fill_parameters=fill),
        )
    world.run()
    assert b"".join(parts) == b"01234" and got.objects == []
    store.grow(stored, b"56789")
    store.complete(stored)
    world.run()
    assert [bytes(o.payload) for o in got.objects] == [b"0123456789"]


def test_an_object_aborted_in_mid_send_resets_its_stream_and_is_sent_whole_when_it_returns():
    world = World()
    world.put((0, 0))
    stored = grow(world.store, (0, 1))
    world.store.grow(stored, b"012")
    world.run()
    world.store.abort(stored)
    world.run()
    assert world.got.live() == [(0, 0)]
    assert world.got.ends == [(Via.SUBSCRIPTION, 0, StreamErrorCode.INTERNAL_ERROR)]
    world.put((0, 1), (0, 2))
    assert world.got.live() == locations((0, 0), (0, 1), (0, 2))
    world.end()


def test_a_fetch_of_an_object_that_is_aborted_is_reset():
    store = TrackStore(NAME)
    stored = grow(store, (0, 0))
    store.grow(stored, b"012")
    world = World(store, None)
    got = Recorder()
    world.pair.client.fetch(NAME, got)
    world.run()
    store.abort(stored)
    world.run()
    assert [error for *_, error in got.ends] == [StreamErrorCode.INTERNAL_ERROR]
    world.clean()


def test_an_evicted_object_without_a_source_is_skipped_and_the_stream_is_reset():
    world = World()
    publish(world.store, 1, ended=False)
    world.store.evict(world.store.get(Location(0, 1)))
    world.run()
    assert world.got.live() == locations((0, 0), (0, 2), (0, 3))
    assert {error for *_, error in world.got.ends} == {StreamErrorCode.TOO_FAR_BEHIND}
    world.end()


def test_a_subscription_too_far_behind_ends_and_leaves_no_cursor():
    world = World()
    for g in range(DeliveryLimits().pending_subgroups + 50):
        world.store.append(g, 0, b"x")
    world.run()
    assert world.got.done == PublishDoneCode.TOO_FAR_BEHIND
    world.clean()


def test_what_the_subscriber_stops_is_not_sent_again():
    world = World()
    world.put((0, 0), (1, 0))
    stream = next(s for s in world.got.opened if s.subgroup.group == 0)
    world.pair.client_transport.stop_receiving(stream.stream_id, 1)
    world.run()
    world.put((0, 1), (1, 1))
    assert sorted(world.got.live()) == locations((0, 0), (1, 0), (1, 1))


# -- fetch -------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(GroupOrder))
@pytest.mark.parametrize("start", [(0, 0), (0, 2), (1, 3), (1, 5), (2, 0)])
@pytest.mark.parametrize("end", [(0, 3), (1, 1), (2, 9), (7, 7)])
def test_a_fetch_brings_exactly_its_range_in_order(order, start, end):
    store = track(3, ended=False)
    start, end = Location(*start), Location(*end)
    if end < start:
        return
    world = World(store, None)
    got = world.fetch(location_filter=LocationFilter.range(start, end), group_order=order)
    expected = [o.location for o in store.objects() if start <= o.location <= end]
    sign = 1 if order is GroupOrder.ASCENDING else -1
    assert got.locations == sorted(expected, key=lambda at: (sign * at.group, at.object))
    assert got.accepted.end_location == min(end, Location(2, 3))
    assert [error for *_, error in got.ends] == [None]
    world.clean()


@pytest.mark.parametrize(
    ("published", "parameters"),
    [
        (False, {}),
        (True, {"location_filter": LocationFilter.absolute_start(0, 4)}),
        (True, {"location_filter": LocationFilter.next_object()}),
        (True, {"location_filter": LocationFilter.relative_start(0)}),
        (True, {"location_filter": LocationFilter.range(Location(0, 2), Location(0, 1))}),
    ],
)
def test_a_fetch_of_nothing_is_an_invalid_range(published, parameters):
    world = World(track(1, ended=False) if published else TrackStore(NAME), None)
    got = world.fetch(**parameters)
    assert got.failed.code == RequestErrorCode.INVALID_RANGE
    world.clean()


def test_a_fetch_without_objects_in_its_range_still_opens_a_stream():
    store = TrackStore(NAME)
    store.append(5, 0, b"x")
    world = World(store, None)
    got = world.fetch(location_filter=LocationFilter.groups(0, 3))
    assert [error for *_, error in got.ends] == [None] and got.objects == []


def test_a_fetch_never_goes_beyond_largest_of_when_it_was_accepted():
    store = track(1, ended=False, size=100_000)
    world = World(store, None)
    got = Recorder()
    world.pair.client.fetch(NAME, got)
    world.pair.client_transport.deliver()
    store.append(1, 0, b"late")
    world.run()
    assert got.locations == [(0, o) for o in range(4)]
    assert not got.accepted.end_of_track


@pytest.mark.parametrize("kind", ["subgroup", "fill"])
def test_publish_done_waits_until_every_stream_is_closed(kind):
    world = World(track(1, ended=False, size=100_000), NEXT, stream_window=1000)
    opened = []

    def stall(stream):
        opened.append(stream.stream_id)
        world.pair.client_transport.pause_receiving(stream.stream_id)

    world.got.stream_opened = stall
    if kind == "fill":
        world.update(fill_parameters=Parameters(location_filter=LocationFilter.absolute_start(0)))
    else:
        world.store.append(1, 0, bytes(100_000))
        world.store.finish_subgroup(1, 0)
        world.run()
    world.store.finish(PublishDoneCode.TRACK_ENDED)
    world.run()
    assert len(opened) == 1 and world.request.done is None
    world.pair.client_transport.resume_receiving(opened[0])
    world.run()
    assert world.got.done == PublishDoneCode.TRACK_ENDED
    world.clean()


@pytest.mark.parametrize("default", [None, GroupOrder.ASCENDING, GroupOrder.DESCENDING])
@pytest.mark.parametrize("asked", [None, GroupOrder.ASCENDING, GroupOrder.DESCENDING])
def test_without_a_group_order_the_tracks_default_holds_but_a_fetch_ascends(default, asked):
    properties = () if default is None else (KeyValue(0x22, default),)
    store = TrackStore(NAME, properties)
    publish(store, 3, 1, ended=False)
    fill = Parameters(location_filter=LocationFilter.absolute_start(0))
    world = World(
        store,
        Parameters(
            location_filter=LocationFilter.next_object(), group_order=asked, fill_parameters=fill
        ),
    )
    (incoming,) = world.pair.server.requests.incoming.values()
    expected = asked or default or GroupOrder.ASCENDING
    assert incoming.delivery.group_order is expected
    groups = [0, 1, 2]
    filled = groups[::-1] if expected is GroupOrder.DESCENDING else groups
    assert [at.group for at in world.got.locations] == filled
    fetched = groups[::-1] if asked is GroupOrder.DESCENDING else groups
    assert [at.group for at in world.fetch(group_order=asked).locations] == fetched


def test_fetch_ok_says_whether_the_track_ends_there():
    world = World(track(3), None)
    assert world.fetch().accepted.end_of_track
    assert not world.fetch(location_filter=LocationFilter.groups(0, 1)).accepted.end_of_track


class Source:
    """What a relay's upstream does, step by step."""

    def __init__(self, store, had):
        self.store, self.had, self.wanted = store, had, []
        store.source = self

    def assumed(self, start):
        return None

    def want(self, start, end):
        self.wanted.append((start, end))
        return self.had is not None

    def deliver(self):
        wanted, self.wanted = self.wanted, []
        for start, end in wanted:
            for at in self.had:
                if start <= at <= end and self.store.get(at) is None:
                    stored = grow(self.store, at, 1, live=False)
                    self.store.grow(stored, b"s")
                    self.store.complete(stored)
            self.store.mark_nonexistent(start, end)
        self.store.changed()


@pytest.mark.parametrize("order", list(GroupOrder))
def test_a_fetch_has_the_source_bring_what_the_store_does_not_know(order):
    had = [Location(g, o) for g, o in itertools.product((0, 2, 5), range(3))]
    store = TrackStore(NAME, authoritative=False)
    source = Source(store, had)
    stored = grow(store, (5, 2), 1)
    store.grow(stored, b"s")
    store.complete(stored)
    world = World(store, None)
    got = Recorder()
    world.pair.client.fetch(NAME, got, Parameters(group_order=order))
    for _ in range(20):
        world.run()
        source.deliver()
    world.run()
    sign = 1 if order is GroupOrder.ASCENDING else -1
    assert got.locations == sorted(had, key=lambda at: (sign * at.group, at.object))
    assert [error for *_, error in got.ends] == [None]


# -- the "next object" rule ---------------------------------------------------------------


def test_a_relays_stream_is_continued_only_by_the_object_known_to_be_next():
    def relay_world():
        store = TrackStore(NAME, authoritative=False)
        return World(store)

    def put(world, object_id, follows=None):
        stored = grow(world.store, (0, object_id), 1, follows=follows)
        world.store.grow(stored, b"x")
        world.store.complete(stored)
        world.run()

    for object_id, follows, known, streams in (
        (1, None, None, 1),
        (5, 0, None, 1),
        (5, 3, None, 2),
        (5, None, (1, 4), 1),
        (5, None, (1, 3), 2),
    ):
        world = relay_world()
        put(world, 0)
        if known:
            world.store.mark_nonexistent(Location(0, known[0]), Location(0, known[1]))
        put(world, object_id, follows)
        assert len(world.got.opened) == streams
        assert world.got.live() == locations((0, 0), (0, object_id))


def test_status_objects_come_with_their_stream_and_end_nothing_by_themselves():
    world = World()
    publish(world.store, 2)
    world.run()
    statuses = [(o.location, o.status) for o in world.got.objects if o.status]
    assert sorted(statuses) == [
        (Location(0, 4), ObjectStatus.END_OF_GROUP),
        (Location(1, 4), ObjectStatus.END_OF_GROUP),
        (Location(2, 0), ObjectStatus.END_OF_TRACK),
    ]
    assert world.got.done == PublishDoneCode.TRACK_ENDED
    world.clean()


def test_a_filter_that_begins_late_looks_at_no_group_before_it(monkeypatch):
    looked_at = considered(monkeypatch)
    publisher, store = Publisher(), TrackStore(NAME)
    publisher.add_track(store)
    for group in range(200):
        store.append(group, 0, b"x")
        store.finish_subgroup(group, 0)
    pair, collector = Pair(None, publisher), Collector()
    request = pair.client.subscribe(NAME, collector, NEXT)
    pair.run()
    looked_at.clear()
    last = LocationFilter.range(Location(190, 0), Location(194, 0))
    request.update(Parameters(location_filter=last), lambda answer: None)
    pair.run()
    assert looked_at == [190, 191, 192, 193, 194]
