"""Delivery timeouts, EXPIRES and NEW_GROUP_REQUEST as the publisher applies them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.delivery.timeouts import Timeouts, subgroup_timeouts
from moqt.publisher import Publisher
from moqt.receiving.receiver import Via
from moqt.track.store import TrackStore
from moqt.track.stored import SubgroupLog
from moqt.values.codes import PropertyType, PublishDoneCode, StreamErrorCode
from moqt.values.deadlines import Deadlines
from moqt.values.errors import MisuseError
from moqt.values.messages import KeyValue, Parameters
from moqt.values.names import Location
from moqt.wire.primitives import encode_key_values
from tests.moqt.deliveries import ALL, Recorder, World, locations
from tests.moqt.inside import listeners, noted
from tests.moqt.memory import Pair
from tests.moqt.peers import NAME

OBJECT, SUBGROUP = (
    PropertyType.OBJECT_DELIVERY_TIMEOUT,
    PropertyType.SUBGROUP_DELIVERY_TIMEOUT,
)


class Clocked(World):
    """A world whose publisher's peer reads only when told to, with a clock in the hand."""

    def __init__(self, parameters=ALL, properties=(), **kwargs):
        self.now = 1000.0
        super().__init__(TrackStore(NAME, properties), None, stream_window=1000, **kwargs)
        self.session = self.pair.server
        self.counters = self.session.scheduler.counters
        self.got.stream_opened = self._opened
        self.reading = True
        self.wait(0)
        if parameters is not None:
            self.request = self.pair.client.subscribe(NAME, self.got, parameters)
            self.run()

    def _opened(self, stream):
        self.got.opened.append(stream)
        if not self.reading and stream.stream_id >= 0:
            self.pair.client_transport.pause_receiving(stream.stream_id)

    def wait(self, seconds):
        self.now += seconds
        self.pair.server.tick(self.now)
        self.run()

    def stall(self):
        self.reading = False

    def read(self):
        self.reading = True
        for stream in self.got.opened:
            self.pair.client_transport.resume_receiving(stream.stream_id)
        self.run()

    def publish(self, group, object_id, size=1, **kwargs):
        self.store.append(group, object_id, bytes(size), **kwargs)
        self.run()

    @property
    def resets(self):
        return [(group, error) for via, group, error in self.got.ends if via is Via.SUBSCRIPTION]


def asked(**kwargs):
    return Parameters(location_filter=ALL.location_filter, **kwargs)


# -- whose value counts ------------------------------------------------------------------


@given(*[st.integers(0, 5)] * 4)
def test_of_publisher_and_subscriber_the_smaller_timeout_that_is_one_counts(a, b, c, d):
    merged = Timeouts(a, b).merged(Timeouts(c, d))
    assert merged.object_ms == min((x for x in (a, c) if x), default=0)
    assert merged.subgroup_ms == min((x for x in (b, d) if x), default=0)
    assert merged.datagram_ms == min((x for x in merged if x), default=0)


@pytest.mark.parametrize(
    ("track_ms", "object_ms", "asked_ms", "expected"),
    [
        (None, None, None, None),
        (0, None, 0, None),
        (300, None, None, 300),
        (None, None, 300, 300),
        (300, None, 500, 300),
        (500, None, 300, 300),
        (300, 500, None, 500),  # a property of the first Object goes before the track's
        (300, 500, 400, 400),
        (300, 0, None, 300),
    ],
)
def test_an_object_not_sent_within_its_timeout_resets_its_stream(
    track_ms, object_ms, asked_ms, expected
):
    properties = () if track_ms is None else (KeyValue(OBJECT, track_ms),)
    first = b"" if object_ms is None else encode_key_values((KeyValue(OBJECT, object_ms),))
    world = Clocked(asked(object_delivery_timeout=asked_ms), properties)
    world.stall()
    world.publish(0, 0, 2000, properties=first)
    world.publish(0, 1)
    world.wait((expected or 10_000) / 1000 - 0.01)
    assert world.counters.expired_streams == 0
    world.wait(0.02)
    world.read()
    if expected is None:
        assert world.got.live() == locations((0, 0), (0, 1)) and world.resets == []
        return
    # Object 0 was on its way: what has begun is finished, and the next one is looked at.
    assert world.got.live() == [(0, 0)]
    assert world.resets == [(0, StreamErrorCode.DELIVERY_TIMEOUT)]
    assert world.counters.expired_objects == world.counters.expired_streams == 1


def test_a_timeout_on_a_later_object_of_the_subgroup_is_ignored():
    world = Clocked()
    world.stall()
    world.publish(0, 0, 2000)
    world.publish(0, 1, properties=encode_key_values((KeyValue(OBJECT, 1),)))
    world.wait(10)
    world.read()
    assert world.got.live() == locations((0, 0), (0, 1))


def test_a_timeout_on_a_later_object_is_ignored_also_by_who_subscribes_after_the_first():
    world = Clocked(None)
    world.publish(0, 0)
    world.request = world.pair.client.subscribe(NAME, world.got)
    world.run()
    world.stall()
    world.publish(0, 1, 2000, properties=encode_key_values((KeyValue(OBJECT, 1),)))
    world.publish(0, 2)
    world.wait(10)
    world.read()
    assert world.got.live() == locations((0, 1), (0, 2)) and world.counters.expired_objects == 0


def test_the_property_of_a_subgroups_first_object_goes_before_the_tracks():
    log = SubgroupLog(0, 0, 128)
    track = Timeouts(100, 200)
    assert subgroup_timeouts(log, track) == track
    log.first_id = 3
    log.begin(3, encode_key_values((KeyValue(OBJECT, 500),)))
    assert subgroup_timeouts(log, track) == Timeouts(500, 200)
    log.first_id = 2
    assert subgroup_timeouts(log, track) == track, "another Object was the first"


def test_a_subgroup_that_timed_out_is_not_opened_again_and_others_go_on():
    world = Clocked(asked(object_delivery_timeout=100))
    world.stall()
    world.publish(0, 0, 2000)
    world.publish(0, 1)
    world.wait(1)
    world.read()
    world.publish(0, 2)
    world.publish(1, 0)
    assert world.got.live() == locations((0, 0), (1, 0))
    assert len(world.got.opened) == 2


def test_an_object_published_in_time_is_sent_however_old_the_subgroup_is():
    world = Clocked(asked(object_delivery_timeout=100))
    for n in range(5):
        world.publish(0, n)
        world.wait(1)
    assert world.got.live() == [(0, n) for n in range(5)]
    assert world.counters.expired_objects == 0
    world.end()


def test_what_has_expired_before_its_turn_is_left_out_and_the_rest_is_sent():
    store = TrackStore(NAME)
    publisher = Publisher()
    publisher.add_track(store)
    pair = Pair(server=publisher)
    pair.server.tick(1000.0)
    got = Recorder()
    pair.client.subscribe(NAME, got, asked(object_delivery_timeout=100))
    pair.run()
    for n, now in ((0, 10.0), (1, 10.0), (2, 999.95)):
        store.append(0, n, b"x", now=now)
    pair.run()
    assert got.live() == [(0, 2)] and not got.opened[0].subgroup.first_object
    store.finish_subgroup(0, 0)
    pair.run()
    assert got.ends == [(Via.SUBSCRIPTION, 0, StreamErrorCode.DELIVERY_TIMEOUT)], "not a FIN"


def test_a_subgroup_not_delivered_within_its_timeout_after_its_end_is_reset():
    world = Clocked(asked(subgroup_delivery_timeout=300), (KeyValue(SUBGROUP, 500),))
    world.stall()
    world.publish(0, 0, 5000)
    world.wait(10)
    assert world.counters.expired_streams == 0, "the clock starts when all of it is published"
    world.store.finish_subgroup(0, 0)
    world.wait(0.29)
    assert world.counters.expired_streams == 0
    world.wait(0.02)
    assert world.counters.expired_streams == 1
    world.read()
    assert world.got.live() == [] and world.resets == [(0, StreamErrorCode.DELIVERY_TIMEOUT)]


def test_a_subgroup_delivered_in_time_ends_with_fin_and_leaves_no_deadline():
    world = Clocked(asked(subgroup_delivery_timeout=300, object_delivery_timeout=200))
    world.publish(0, 0)
    world.store.finish_subgroup(0, 0)
    world.run()
    assert world.resets == [(0, None)]
    assert len(world.session.scheduler.deadlines) == 0
    world.end()


def test_a_datagram_is_dropped_after_the_smaller_of_both_timeouts():
    world = Clocked(asked(object_delivery_timeout=500, subgroup_delivery_timeout=200))
    world.store.append(0, 0, b"old", subgroup=None, now=world.now - 0.3)
    world.store.append(0, 1, b"new", subgroup=None, now=world.now - 0.1)
    world.run()
    assert world.got.live() == [(0, 1)] and world.counters.expired_objects == 1


def test_a_request_update_changes_the_timeouts_it_carries():
    world = Clocked(asked(object_delivery_timeout=100))
    world.stall()
    world.publish(0, 0, 2000)
    world.update(object_delivery_timeout=0)
    world.publish(0, 1)
    world.wait(5)
    world.update(subscriber_priority=3)
    world.read()
    assert world.got.live() == locations((0, 0), (0, 1))
    world.end()


def test_a_fetch_knows_no_delivery_timeout():
    world = Clocked(properties=(KeyValue(OBJECT, 1), KeyValue(SUBGROUP, 1)))
    world.store.append(0, 0, b"x", now=1.0)
    world.wait(100)
    assert world.fetch().locations == [(0, 0)]


# -- EXPIRES -----------------------------------------------------------------------------


class Lending(Publisher):
    def subscribe_received(self, request):
        request.accept(self.tracks[request.name], expires_ms=2000)


def test_a_subscription_that_expires_ends_with_publish_done_expired():
    publisher, store, got = Lending(), TrackStore(NAME), Recorder()
    publisher.add_track(store)
    pair = Pair(server=publisher)
    pair.server.tick(50.0)
    pair.client.subscribe(NAME, got, ALL)
    pair.run()
    store.append(0, 0, b"x")
    pair.run()
    for now, done in ((51.9, None), (52.0, PublishDoneCode.EXPIRED)):
        pair.server.tick(now)
        pair.run()
        assert got.done == done
    assert got.ends == [(Via.SUBSCRIPTION, 0, StreamErrorCode.CANCELLED)]
    assert pair.server.scheduler.counters.expired_subscriptions == 1
    assert not listeners(store) and len(pair.server.scheduler.deadlines) == 0


# -- NEW_GROUP_REQUEST -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dynamic", "value", "told"),
    [(1, 0, True), (1, 4, True), (1, 9, True), (1, 3, False), (1, 1, False), (0, 0, False)],
)
def test_a_new_group_is_asked_of_the_application_when_the_rule_says_so(dynamic, value, told):
    asked_for = []
    store = TrackStore(NAME, (KeyValue(PropertyType.DYNAMIC_GROUPS, dynamic),))
    store.on_new_group = lambda store, group: asked_for.append(group)
    store.append(3, 0, b"x")
    world = World(store, asked(new_group_request=value))
    assert asked_for == [value] * told
    if dynamic:
        world.update(new_group_request=value)
    else:
        with pytest.raises(MisuseError):
            world.update(new_group_request=value)
    assert asked_for == [value] * told * 2


def test_a_track_property_without_a_legal_value_is_refused_where_it_is_set():
    for type_, value in ((PropertyType.DYNAMIC_GROUPS, 2), (0x22, 3), (0x0E, 256)):
        with pytest.raises(MisuseError):
            TrackStore(NAME, (KeyValue(type_, value),))


# -- the heap ----------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=200))
def test_deadlines_happen_in_order_once_and_never_when_cancelled(entries):
    deadlines, happened = Deadlines(), []
    made = [
        (when, cancelled, deadlines.at(when, lambda n=n: happened.append(n)))
        for n, (when, cancelled) in enumerate(entries)
    ]
    for _, cancelled, deadline in made:
        if cancelled:
            deadlines.cancel(deadline)
            deadlines.cancel(deadline)
    left = [(when, n) for n, (when, cancelled, _) in enumerate(made) if not cancelled]
    assert len(deadlines) == len(left)
    for now in range(0, 21, 5):
        assert deadlines.next == min((w for w, n in left if n not in happened), default=None)
        deadlines.run(now)
        assert happened == [n for when, n in sorted(left) if when <= now]
    assert len(deadlines) == 0 and deadlines.next is None


def test_cancelled_deadlines_do_not_pile_up():
    deadlines = Deadlines()
    for n in range(10_000):
        deadlines.cancel(deadlines.at(1e9 + n, lambda: None))
    assert len(noted(deadlines)) < 100


def test_pausing_and_location_filters_do_not_start_clocks_of_what_is_not_wanted():
    world = Clocked(asked(object_delivery_timeout=100))
    world.update(forward=0)
    world.publish(0, 0)
    world.wait(1)
    world.update(forward=1)
    world.publish(0, 1)
    assert world.got.live() == [Location(0, 1)] and world.counters.expired_objects == 0


def test_an_object_that_waits_for_credit_expires_in_time_also_after_an_earlier_one_was_sent():
    world = Clocked(properties=[KeyValue(OBJECT, 1000)])
    world.stall()
    world.publish(0, 0)
    transport = world.pair.server_transport
    stream_id = world.got.opened[0].stream_id
    stream = transport.out[stream_id]

    def room(octets):
        stream.consumed = stream.written + octets - world.pair.client_transport.stream_window
        transport.credited.add(stream_id)

    room(0)
    world.publish(0, 1)  # due at 1.0
    world.wait(0.5)
    room(100)
    world.run()
    assert transport.send_room(stream_id) < 100
    room(0)
    world.wait(0.3)
    world.publish(0, 2)  # due at 1.8
    world.wait(0.3)
    assert world.counters.expired_objects == 0 and world.resets == []
    world.wait(0.8)
    assert world.counters.expired_objects == 1
    assert world.resets == [(0, StreamErrorCode.DELIVERY_TIMEOUT)]
