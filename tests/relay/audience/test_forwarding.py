"""MOQT "Subscriber Interactions": one upstream subscription, forwarded to all who want it."""

from __future__ import annotations

import random

import pytest

from moqt.receiving.receiver import Via
from moqt.values.codes import GroupOrder, ObjectStatus, PublishDoneCode
from moqt.values.messages import KeyValue, LocationFilter, Parameters
from moqt.values.names import Location
from tests.relay.star import (
    JOIN,
    LIVE,
    NAME,
    NAMESPACE,
    Collector,
    Star,
    end_track,
    everything,
    payload,
    publish,
    track,
)


def test_an_object_published_after_the_subscription_reaches_the_subscriber():
    star, store = Star(), track()
    star.publisher(store)
    _, collector = star.subscriber(LIVE)
    assert collector.accepted.largest is None
    publish(store, 0, 0)
    star.run()
    assert collector.payloads == {Location(0, 0): payload(0, 0)}


def test_an_object_is_forwarded_before_it_is_whole():
    star, store = Star(), track()
    star.publisher(store)
    _, collector = star.subscriber(LIVE)
    growing = store.begin(Location(0, 0), subgroup=0, priority=None, properties=b"", length=100_000)
    store.grow(growing, b"a" * 60_000)
    star.run()
    assert collector.parts == 60_000 and not collector.objects
    store.grow(growing, b"b" * 40_000)
    store.complete(growing)
    star.run()
    assert collector.payloads == {Location(0, 0): b"a" * 60_000 + b"b" * 40_000}


def test_a_late_subscriber_gets_the_growing_object_through_its_fill():
    star, store = Star(), track()
    star.publisher(store)
    star.subscriber(LIVE)
    growing = store.begin(Location(0, 0), subgroup=0, priority=None, properties=b"", length=100_000)
    store.grow(growing, b"a" * 60_000)
    star.run()
    _, late = star.subscriber(JOIN)
    assert late.parts == 60_000
    store.grow(growing, b"b" * 40_000)
    store.complete(growing)
    star.run()
    assert late.locations == [Location(0, 0)]


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_next_object_with_a_fill_brings_everything_once_whenever_one_joins(seed):
    order = [(g, o) for g in range(3) for o in range(4)]
    for first in range(0, 13, 3):
        for second in range(first, 13, 4):
            star, store = Star(seed=seed), track()
            star.publisher(store)
            collectors = []
            for at, (g, o) in enumerate(order):
                if at in (first, second):
                    collectors.append(star.subscriber(JOIN)[1])
                publish(store, g, o)
                star.run()
            while len(collectors) < 2:
                collectors.append(star.subscriber(JOIN)[1])
            end_track(store, 3)
            star.run()
            for collector in collectors:
                assert collector.payloads == everything(3)
                assert collector.repeated == []
                assert collector.done == PublishDoneCode.TRACK_ENDED


@pytest.mark.parametrize("seed", range(4))
def test_joining_while_octets_are_in_flight_loses_and_repeats_nothing(seed):
    rng = random.Random(seed)
    star, store = Star(seed=seed), track()
    star.publisher(store)
    collectors = []
    for g in range(12):
        for o in range(4):
            publish(store, g, o, 3000)
            for _ in range(rng.randrange(3)):
                star.step()
            if rng.random() < 0.2:
                pair = star.connect()
                collector = Collector()
                pair.client.subscribe(NAME, collector, JOIN)
                collectors.append(collector)
    end_track(store, 12)
    star.run()
    assert collectors
    for collector in collectors:
        assert collector.payloads == everything(12, size=3000)
        assert collector.repeated == []
        assert collector.done == PublishDoneCode.TRACK_ENDED


def test_two_subscribers_cost_one_upstream_subscription():
    star, store = Star(), track()
    publisher = star.publisher(store)
    _, one = star.subscriber(LIVE)
    _, two = star.subscriber(LIVE)
    publish(store, 0, 0)
    star.run()
    assert one.payloads == two.payloads == {Location(0, 0): payload(0, 0)}
    assert len(publisher.handler.subscribes) == 1
    assert star.relay.counters.upstream_subscriptions == 1


def test_two_subscribers_at_the_same_moment_cost_one_upstream_subscription():
    star, store = Star(), track()
    publisher = star.publisher(store)
    collectors = []
    for _ in range(5):
        collectors.append(Collector())
        star.connect().client.subscribe(NAME, collectors[-1], LIVE)
    star.run()
    assert all(c.accepted for c in collectors)
    assert len(publisher.handler.subscribes) == 1


def test_upstream_it_asks_for_the_next_object_without_filters_and_without_a_fill():
    star, store = Star(), track(2)
    publisher = star.publisher(store)
    star.subscriber(
        Parameters(
            location_filter=LocationFilter.relative_start(1),
            subscriber_priority=3,
            object_delivery_timeout=100,
            subgroup_delivery_timeout=200,
        )
    )
    [request] = publisher.handler.subscribes
    assert request.parameters == LIVE


def test_track_properties_and_the_largest_object_are_passed_on():
    properties = (KeyValue(0x0E, 7), KeyValue(0x3801, b"app"))
    star, store = Star(), track(2, properties=properties)
    star.publisher(store)
    _, collector = star.subscriber(LIVE)
    assert collector.accepted.properties == properties
    assert collector.accepted.largest == Location(1, 3)
    status = star.connect().client.track_status(NAME)
    star.run()
    assert (status.largest, status.properties) == (Location(1, 3), properties)


def test_newer_track_properties_replace_those_that_were_known():
    star = Star()
    first = star.publisher(track(properties=(KeyValue(0x0E, 7), KeyValue(0x3801, b"old"))))
    star.subscriber(LIVE)
    newer = (KeyValue(0x3801, b"new"),)
    star.publisher(track(properties=newer))
    star.kill(first)
    _, late = star.subscriber(LIVE)
    assert late.accepted.properties == newer


@pytest.mark.parametrize("groups", [(4, 2), (2, 4)])
def test_of_two_publishers_the_larger_largest_object_is_told(groups):
    star = Star()
    for each in groups:
        star.publisher(track(each, ended=False))
    star.subscriber(LIVE)
    _, late = star.subscriber(LIVE)
    assert late.accepted.largest == Location(3, 3)


def test_object_fields_survive_the_relay():
    star, store = Star(), track()
    star.publisher(store)
    _, collector = star.subscriber(LIVE)
    store.append(3, 7, b"x", subgroup=5, priority=9, properties=b"\x10\x05")
    store.append(3, 9, b"", subgroup=5, priority=9)
    store.finish_subgroup(3, 5)
    star.run()
    one, two = collector.objects
    assert (one.location, one.subgroup, one.priority, one.properties) == (
        Location(3, 7),
        5,
        9,
        b"\x10\x05",
    )
    assert (two.location, two.payload, two.status) == (Location(3, 9), b"", ObjectStatus.NORMAL)
    assert two.properties == b""
    fetched = star.fetch(star.connect())
    assert [(o.location, o.subgroup, o.priority, o.properties) for o in fetched.objects] == [
        (Location(3, 7), 5, 9, b"\x10\x05"),
        (Location(3, 9), 5, 9, b""),
    ]


def test_status_objects_are_forwarded():
    star, store = Star(), track()
    star.publisher(store)
    _, collector = star.subscriber(LIVE)
    for o in range(4):
        publish(store, 0, o)
    end_track(store, 1)
    star.run()
    assert [(o.location, o.status) for o in collector.objects if o.status] == [
        (Location(0, 4), ObjectStatus.END_OF_GROUP),
        (Location(1, 0), ObjectStatus.END_OF_TRACK),
    ]
    assert collector.done == PublishDoneCode.TRACK_ENDED


def test_the_end_of_a_group_by_fin_with_end_of_group_is_re_expressed_as_a_status():
    star, store = Star(), track()
    star.publisher(store)
    _, collector = star.subscriber(LIVE)
    store.append(0, 0, b"x")
    store.append(0, 1, b"y")
    star.run()
    store.finish_subgroup(0, 0, end_of_group=True)
    star.run()
    assert [(o.location, o.status) for o in collector.objects if o.status] == [
        (Location(0, 2), ObjectStatus.END_OF_GROUP)
    ]
    assert star.relay.tracks[NAME].store.groups[0].end == 2


def test_first_object_is_set_only_on_a_stream_that_begins_with_it():
    star, store = Star(), track()
    star.publisher(store)
    headers = []

    class Headers(Collector):
        def stream_opened(self, stream):
            headers.append(stream.subgroup)
            super().stream_opened(stream)

    star.connect().client.subscribe(NAME, Headers(), LIVE)
    star.run()
    publish(store, 0, 0)
    star.run()
    star.connect().client.subscribe(NAME, Headers(), LIVE)
    star.run()
    publish(store, 0, 1)
    star.run()
    assert [header.first_object for header in headers] == [True, False]


def test_datagrams_are_forwarded_in_the_order_they_come_and_cached():
    star, store = Star(), track()
    star.publisher(store)
    _, collector = star.subscriber(LIVE)
    for o in (2, 0, 1):
        stored = store.begin(Location(0, o), subgroup=None, priority=5, properties=b"", length=3)
        store.grow(stored, b"%d.." % o)
        store.complete(stored)
        star.run()
    assert [(o.location.object, bytes(o.payload)) for o in collector.objects] == [
        (2, b"2.."),
        (0, b"0.."),
        (1, b"1.."),
    ]
    fetched = star.fetch(star.connect())
    assert [(o.location.object, o.subgroup) for o in fetched.objects] == [
        (0, None),
        (1, None),
        (2, None),
    ]


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("fetched", [False, True])
def test_what_came_on_one_stream_goes_on_in_its_order_and_nothing_is_left_out(seed, fetched):
    star, store, dice = Star(seed=seed), track(), random.Random(seed)
    star.publisher(store, stream_window=150)
    pair = star.connect(stream_window=100)
    collector = star.subscribe(pair, LIVE)
    following, sent = [0] * 4, []
    for _ in range(80):
        subgroup = dice.randrange(4)
        # IDs of a Subgroup need not follow each other, and its Objects go on as they come.
        at = following[subgroup] * 8 + subgroup * 2 + dice.randrange(2)
        following[subgroup] += 1
        store.append(0, at, payload(0, at), subgroup=subgroup)
        sent.append((subgroup, Location(0, at)))
        if dice.random() < 0.3:
            star.run()
    for subgroup in range(4):
        store.finish_subgroup(0, subgroup)
    store.finish(PublishDoneCode.TRACK_ENDED)
    star.run()
    if fetched:
        collector = star.fetch(pair, (0, 0), (0, 1000))
        star.pass_time(60)
        assert collector.locations == sorted(at for _, at in sent)
    else:
        for subgroup in range(4):
            got = [each.location for each in collector.objects if each.subgroup == subgroup]
            assert got == [at for of, at in sent if of == subgroup]
    assert {error for _, error in collector.streams} == {None} and not collector.unknown


def test_a_session_may_subscribe_to_its_own_track():
    star, store = Star(), track()
    publisher = star.publisher(store)
    collector = star.subscribe(publisher, LIVE)
    publish(store, 0, 0)
    star.run()
    assert collector.payloads == {Location(0, 0): payload(0, 0)}


def test_a_skipped_object_id_may_follow_only_what_it_followed_upstream():
    """The "next object" rule of relays: here the upstream stream says it is next."""
    star, store = Star(), track()
    star.publisher(store)
    _, collector = star.subscriber(LIVE)
    for o in (0, 5, 6, 20):
        store.append(0, o, b"x")
    store.finish_subgroup(0, 0)
    star.run()
    assert collector.locations == [Location(0, o) for o in (0, 5, 6, 20)]
    assert collector.streams == [(0, None)]


def test_two_publishers_of_one_namespace_are_both_asked_and_objects_come_once():
    star = Star()
    stores = [track(), track()]
    publishers = [star.publisher(store) for store in stores]
    _, collector = star.subscriber(JOIN)
    for g in range(3):
        for o in range(4):
            for store in stores:
                publish(store, g, o)
            star.run()
    for store in stores:
        end_track(store, 3)
    star.run()
    assert [len(p.handler.subscribes) for p in publishers] == [1, 1]
    assert collector.payloads == everything(3) and collector.repeated == []
    assert collector.done == PublishDoneCode.TRACK_ENDED


def test_when_one_of_two_publishers_is_lost_in_mid_object_the_other_completes_it():
    star = Star()
    stores = [track(), track()]
    publishers = [star.publisher(store) for store in stores]
    _, collector = star.subscriber(LIVE)
    growing = [
        store.begin(Location(0, 0), subgroup=0, priority=None, properties=b"", length=1000)
        for store in stores
    ]
    stores[0].grow(growing[0], b"a" * 600)
    stores[1].grow(growing[1], b"a" * 300)
    star.run()
    star.kill(publishers[0])
    assert collector.parts == 600
    stores[1].grow(growing[1], b"a" * 700)
    stores[1].complete(growing[1])
    star.run()
    assert collector.payloads == {Location(0, 0): b"a" * 1000}
    assert collector.done is None


def test_a_publisher_that_comes_later_is_asked_for_tracks_that_are_open():
    star = Star()
    star.publisher(track())
    _, collector = star.subscriber(LIVE)
    store = track()
    second = star.publisher(store)
    assert len(second.handler.subscribes) == 1
    publish(store, 0, 0)
    star.run()
    assert collector.locations == [Location(0, 0)]


@pytest.mark.parametrize("wide", [(), NAMESPACE[:1]])
def test_the_publishers_of_a_namespace_and_of_its_prefixes_are_all_asked(wide):
    star = Star()
    first, second = track(), track()
    publishers = [star.publisher(first, namespace=wide), star.publisher(second)]
    _, collector = star.subscriber(LIVE)
    assert [len(each.handler.subscribes) for each in publishers] == [1, 1]
    publish(first, 0, 0)
    star.run()
    publish(second, 0, 1)
    star.run()
    assert collector.locations == [Location(0, 0), Location(0, 1)]


def test_a_fetch_goes_first_to_who_published_exactly_the_namespace():
    star = Star()
    wide = star.publisher(track(1), namespace=NAMESPACE[:1])
    exact = star.publisher(track(1))
    pair = star.connect()
    assert star.fetch(pair, (0, 0), (0, 3)).payloads == everything(1)
    assert exact.handler.fetches and not wide.handler.fetches


def test_a_publisher_of_a_namespace_that_has_not_got_the_track_does_not_harm_those_that_have():
    star, store = Star(), track(1)
    without = star.publisher(namespace=NAMESPACE[:1])
    star.publisher(store)
    _, collector = star.subscriber(JOIN)
    assert len(without.handler.subscribes) == 1
    assert collector.payloads == everything(1) and collector.failed is None


def test_a_prefix_is_enough_to_be_asked():
    star, store = Star(), track(1)
    star.publisher(store, namespace=(b"demo",))
    _, collector = star.subscriber(JOIN)
    assert collector.payloads == everything(1)


@pytest.mark.parametrize("streams", [4, 128])
def test_300_groups_cross_a_relay_and_connections_with_few_streams(streams):
    star, store = Star(), track()
    star.publisher(store, max_streams=streams)
    _, collector = star.subscriber(JOIN, max_streams=streams)
    for g in range(300):
        publish(store, g, 0, objects=2)
        publish(store, g, 1, objects=2)
    end_track(store, 300)
    star.run()
    assert collector.payloads == everything(300, 2) and collector.repeated == []
    assert collector.done == PublishDoneCode.TRACK_ENDED


def test_the_relay_holds_an_object_once_however_many_get_it():
    star, store = Star(), track()
    star.publisher(store)
    for _ in range(10):
        star.subscriber(LIVE)
    publish(store, 0, 0, 50_000)
    star.run()
    assert star.relay.cache.octets == 50_000
    assert star.relay.cache.objects == 1


def test_a_status_that_came_as_a_datagram_goes_on_as_one():
    star, store = Star(), track()
    star.publisher(store)
    pair, collector = star.subscriber(LIVE)
    store.append(0, 0, b"one", subgroup=None)
    store.mark_end(Location(0, 1), ObjectStatus.END_OF_GROUP, subgroup=None)
    star.run()
    assert [(o.location, o.status, o.subgroup, o.via) for o in collector.objects] == [
        (Location(0, 0), ObjectStatus.NORMAL, None, Via.DATAGRAM),
        (Location(0, 1), ObjectStatus.END_OF_GROUP, None, Via.DATAGRAM),
    ]
    late = star.fetch(pair)
    assert late.locations == [Location(0, 0)] and not late.unknown


def test_thousands_of_status_datagrams_leave_no_groups_behind():
    star, store = Star(), track()
    star.publisher(store)
    star.subscriber(LIVE)
    for group in range(3000):
        store.mark_end(Location(group, 0), ObjectStatus.END_OF_GROUP, subgroup=None)
        star.run()
    (held,) = star.relay.tracks.values()
    assert not held.store.groups and len(held.store.known) < 10


def test_delivery_timeouts_and_priorities_of_subscribers_stay_between_them_and_the_relay():
    star, store = Star(), track()
    publisher = star.publisher(store)
    asked = Parameters(
        object_delivery_timeout=50,
        subgroup_delivery_timeout=60,
        subscriber_priority=3,
        group_order=GroupOrder.DESCENDING,
        include_properties=0,
        location_filter=LocationFilter.relative_start(1),
    )
    star.subscriber(asked)
    (request,) = publisher.handler.subscribes
    assert request.parameters == Parameters(location_filter=LocationFilter.next_object())
