"""Subscriptions that share a Track Alias (MOQT "Track Alias", "Subscription Filters")."""

from __future__ import annotations

import pytest

from moqt.receiving import data_streams
from moqt.receiving.aliases import MAX_COPIES
from moqt.session import SessionConfig
from moqt.values.codes import ParameterType, PublishDoneCode
from moqt.values.messages import (
    KeyValue,
    LocationFilter,
    Parameters,
    Publish,
    PublishDone,
    RangeFilter,
    RequestOk,
)
from moqt.values.names import Location
from moqt.wire.objects import DatagramObject, SubgroupHeader
from moqt.wire.primitives import encode_key_values
from tests.moqt.memory import assert_clean
from tests.moqt.peers import Collector
from tests.moqt.raw import CODEC, VIDEO, Client, Interested, octets, subgroup

EARLY = Parameters(location_filter=LocationFilter.groups(0, 4))
LATE = Parameters(location_filter=LocationFilter.absolute_start(5))


def sharing(*parameters, config=None, **accepted):
    """Subscriptions to one track, all accepted with Track Alias 7."""
    client = Client(config=config)
    client.session.rules.peer_max_filter_ranges = 10
    collectors = [client.subscribe(each) for each in parameters]
    for collector in collectors:
        client.accept(collector, **accepted)
    return client, collectors


def test_the_owner_of_a_stream_on_a_shared_alias_is_the_one_whose_filter_passes():
    client, (early, late) = sharing(EARLY, LATE)
    for group in (2, 9, 4, 5):
        client.send_uni(subgroup(7, group, b"x"), fin=True)
    assert early.locations == [(2, 0), (4, 0)]
    assert late.locations == [(9, 0), (5, 0)]


def test_a_stream_that_comes_in_crumbs_is_read_ahead_once(monkeypatch):
    client, (early, _) = sharing(EARLY, LATE)
    probes = []
    copied = data_streams.deepcopy
    monkeypatch.setattr(
        data_streams, "deepcopy", lambda each: probes.append(copied(each)) or probes[-1]
    )
    properties = encode_key_values((KeyValue(0x3D, b"p" * 500),))
    stream = CODEC.encode_subgroup_header(SubgroupHeader(7, 2, 0, 128), properties=True)
    stream += CODEC.encode_subgroup_object(
        None, 0, properties=properties, with_properties=True, length=1
    )
    stream_id = client.send_uni(b"")
    for n in range(len(stream)):
        client.session.stream_data(stream_id, stream[n : n + 1], False)
    client.session.stream_data(stream_id, b"x", True)
    assert early.locations == [(2, 0)] and len(probes) == 1


def test_range_filters_tell_the_owner_too():
    low = RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((0, 3),))
    high = RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((4, None),))
    client, (first, second) = sharing(*(Parameters(range_filters=(each,)) for each in (low, high)))
    client.send_uni(subgroup(7, 0, b"a", b"b", first=4))
    client.send_uni(subgroup(7, 0, b"a", b"b", first=0))
    assert first.locations == [(0, 0), (0, 1)] and second.locations == [(0, 4), (0, 5)]


def test_the_default_priority_of_the_track_is_what_a_priority_filter_sees():
    urgent = Parameters(
        range_filters=(RangeFilter(ParameterType.PRIORITY_FILTER, ranges=((0, 9),)),)
    )
    other = Parameters(
        range_filters=(RangeFilter(ParameterType.PRIORITY_FILTER, ranges=((10, 255),)),)
    )
    client, (first, second) = sharing(other, urgent, properties=(KeyValue(0x0E, 3),))
    client.session.datagram(CODEC.encode_datagram(DatagramObject(7, 0, 0, None, payload=b"x")))
    assert first.locations == [] and second.locations == [(0, 0)]


@pytest.mark.parametrize("datagrams", [False, True])
def test_what_passes_several_filters_comes_once_for_each_of_them(datagrams):
    client, collectors = sharing(Parameters(), Parameters(), EARLY)
    for group in (0, 1, 9):
        for _ in range(3 if group < 5 else 2):
            if datagrams:
                client.session.datagram(
                    CODEC.encode_datagram(DatagramObject(7, group, 0, 128, payload=b"x"))
                )
            else:
                client.send_uni(subgroup(7, group, b"x"), fin=True)
    assert [c.locations for c in collectors] == [
        [(0, 0), (1, 0), (9, 0)],
        [(0, 0), (1, 0), (9, 0)],
        [(0, 0), (1, 0)],
    ]


def test_a_stream_waits_for_its_first_object_to_say_whose_it_is():
    client, (early, late) = sharing(EARLY, LATE)
    data = subgroup(7, 9, b"abc")
    stream = client.send_uni(data[:5])
    for octet in data[5:]:
        assert late.streams == [] and early.objects == []
        client.session.stream_data(stream, bytes([octet]), False)
    client.session.stream_data(stream, b"", True)
    assert late.locations == [(9, 0)] and len(late.streams) == 1
    assert client.session.data_streams.held_octets == 0 and stream not in client.transport.paused


@pytest.mark.parametrize("how", ["fin", "reset"])
def test_a_stream_that_ends_without_an_object_counts_for_the_oldest_subscription(how):
    client, (early, late) = sharing(EARLY, LATE)
    stream = client.send_uni(subgroup(7, 9), fin=False)
    if how == "fin":
        client.session.stream_data(stream, b"", True)
    else:
        client.session.stream_reset(stream, 1)
    assert len(early.streams) == 1 and late.streams == []
    client.say(early.request, PublishDone(PublishDoneCode.TRACK_ENDED, 1), fin=True)
    assert early.done == PublishDoneCode.TRACK_ENDED
    late.request.cancel()
    assert_clean(client.session)


def test_an_update_moves_the_range_once_it_is_answered():
    client, (early, late) = sharing(EARLY, LATE)
    early.request.update(
        Parameters(location_filter=LocationFilter.next_object()), lambda answer: None
    )
    late.request.update(Parameters(forward=0), lambda answer: None)
    client.say(early.request, RequestOk(Parameters(largest_object=Location(20, 3))))
    client.say(late.request, RequestOk())
    client.send_uni(subgroup(7, 20, b"x", first=4))
    client.send_uni(subgroup(7, 2, b"x"))  # it was on its way: nobody's filter passes it now
    assert early.locations == [(20, 4), (2, 0)] and late.locations == []


def test_a_paused_subscription_owns_nothing_that_another_one_takes():
    client, (paused, other) = sharing(Parameters(forward=0), Parameters())
    client.send_uni(subgroup(7, 0, b"x"))
    assert paused.locations == [] and other.locations == [(0, 0)]
    paused.request.update(Parameters(forward=1), lambda answer: None)
    other.request.update(Parameters(forward=0), lambda answer: None)
    client.say(paused.request, RequestOk())
    client.say(other.request, RequestOk())
    client.send_uni(subgroup(7, 1, b"x"))
    client.send_uni(subgroup(7, 2, b"x"))
    assert paused.locations == [(1, 0), (2, 0)]


def test_next_object_begins_after_the_largest_object_of_the_answer():
    client, (live, past) = sharing(
        Parameters(location_filter=LocationFilter.next_object()),
        Parameters(location_filter=LocationFilter.groups(0, 3)),
        parameters=Parameters(largest_object=Location(3, 1)),
    )
    client.send_uni(subgroup(7, 3, b"x", first=1))
    client.send_uni(subgroup(7, 4, b"x"))
    assert past.locations == [(3, 1)] and live.locations == [(4, 0)]


def test_a_publication_that_shares_the_alias_begins_at_the_next_object():
    client = Client(handler=Interested())
    parameters = Parameters(largest_object=Location(4, 9))
    client.send_bidi(octets(Publish(1, VIDEO.namespace, VIDEO.name, 7, parameters)))
    past = client.subscribe(EARLY)
    client.accept(past)
    client.send_uni(subgroup(7, 5, b"x"))
    client.send_uni(subgroup(7, 4, b"x", first=2))
    assert client.session.handler.got.locations == [(5, 0)] and past.locations == [(4, 2)]


def test_what_remains_of_shared_subscriptions_gets_everything():
    client, (early, late) = sharing(EARLY, LATE)
    early.request.cancel()
    client.send_uni(subgroup(7, 2, b"x"))
    assert late.locations == [(2, 0)]
    late.request.cancel()
    assert_clean(client.session)


def test_what_is_remembered_of_shared_objects_is_bounded():
    client, collectors = sharing(Parameters(), Parameters())
    for group in range(MAX_COPIES + 100):
        client.session.datagram(
            CODEC.encode_datagram(DatagramObject(7, group, 0, 128, payload=b"x"))
        )
    assert client.session.remembered().shared_objects == MAX_COPIES
    assert len(collectors[0].locations) == MAX_COPIES + 100


# -- what is held for an owner that is not known -----------------------------------------


def test_one_publication_nobody_answers_does_not_take_the_room_of_others():
    handler = Interested(accept=False)
    client = Client(handler=handler, config=SessionConfig(max_held_octets=2000))
    client.send_bidi(octets(Publish(1, VIDEO.namespace, VIDEO.name, 7)))
    greedy = [client.send_uni(subgroup(7, group, b"x" * 600)) for group in range(3)]
    collector = client.subscribe()
    small = client.send_uni(subgroup(8, 0, b"x" * 500))
    assert small not in client.stopped and greedy[-1] in client.stopped
    assert client.session.data_streams.held_octets <= 2000
    assert client.session.counters.streams_dropped == 1
    client.accept(collector, alias=8)
    assert collector.locations == [(0, 0)]
    offered = Collector()
    handler.offers[0].accept(offered)
    assert offered.locations == [(0, 0), (1, 0)]
