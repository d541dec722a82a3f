"""SUBSCRIBE_TRACKS both ways (MOQT "SUBSCRIBE_TRACKS", "Subscribing to Tracks")."""

from __future__ import annotations

import pytest

from moqt.publisher import Publisher
from moqt.receiving.receiver import Via
from moqt.requests import RequestState
from moqt.session import SessionConfig, SessionHandler, SessionState
from moqt.track.store import TrackStore
from moqt.values.codes import GroupOrder, ParameterType, RequestErrorCode, SessionErrorCode
from moqt.values.errors import SessionClosed
from moqt.values.messages import (
    AuthorizationToken,
    KeyValue,
    LocationFilter,
    Namespace,
    Parameters,
    Publish,
    PublishSkipped,
    RangeFilter,
    RequestOk,
    RequestUpdate,
    SubscribeNamespace,
    SubscribeTracks,
)
from moqt.values.names import FullTrackName, Location
from tests.moqt.inside import kept
from tests.moqt.memory import Pair, assert_clean
from tests.moqt.peers import Collector, Wanting
from tests.moqt.raw import Client, Server, octets


def name(*fields, track=b"video"):
    return FullTrackName(tuple(f.encode() for f in fields), track)


def stocked(full_name, objects=2, properties=()):
    store = TrackStore(full_name, properties)
    for object_id in range(objects):
        store.append(0, object_id, b"old")
    return store


ALICE, BOB, OTHER = name("demo", "a"), name("demo", "b"), name("other")
DEMO = (b"demo",)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_every_matching_track_present_and_future_is_published_once(seed):
    publisher = Publisher()
    publisher.add_track(stocked(ALICE))
    publisher.add_track(stocked(OTHER))
    pair = Pair(server=publisher, seed=seed)
    wanting = Wanting(pair.client, DEMO)
    pair.run()
    assert list(wanting.offers) == [ALICE]
    bob = stocked(BOB)
    publisher.add_track(bob)
    publisher.add_track(stocked(name("other", "x")))
    pair.run()
    assert list(wanting.offers) == [ALICE, BOB]
    bob.append(1, 0, b"new")
    pair.run()
    assert wanting.got[BOB].locations == [Location(1, 0)]
    wanting.request.update(Parameters(), lambda answer: None)  # the tracks are looked at again
    pair.run()
    assert list(wanting.offers) == [ALICE, BOB]
    assert wanting.request.state is RequestState.ESTABLISHED


def test_an_offer_that_overtakes_the_answer_is_taken_all_the_same():
    client = Client()
    wanting = Wanting(client.session, DEMO)
    client.send_bidi(octets(Publish(1, ALICE.namespace, ALICE.name, 7)))
    assert list(wanting.offers) == [ALICE]
    client.say(wanting.request, RequestOk())
    assert wanting.request.state is RequestState.ESTABLISHED


def test_a_publish_outside_the_prefix_goes_to_the_handler():
    client = Client(handler=SessionHandler())
    wanting = Wanting(client.session, DEMO)
    stream_id = client.send_bidi(octets(Publish(1, OTHER.namespace, OTHER.name, 7)))
    assert client.answers(stream_id)[0].code == RequestErrorCode.UNINTERESTED
    assert wanting.offers == {}


def test_publishes_carry_explicitly_what_subscribe_tracks_asked_for_but_no_token():
    server = Server(handler=Publisher())
    store = stocked(ALICE, properties=(KeyValue(0x0E, 9),))
    server.session.handler.add_track(store)
    asked = Parameters(
        authorization_tokens=(AuthorizationToken(3, None, 0, b"secret"),),
        forward=0,
        group_order=2,
        subscriber_priority=7,
        object_delivery_timeout=50,
        subgroup_delivery_timeout=60,
        location_filter=LocationFilter.relative_start(1),
        include_properties=0,
    )
    stream_id = server.ask(SubscribeTracks(0, DEMO, asked))
    assert server.answers(stream_id) == [RequestOk()]
    (publish,) = server.answers(1)
    assert publish.request_id == 1
    assert publish.parameters == Parameters(
        forward=0,
        group_order=2,
        subscriber_priority=7,
        object_delivery_timeout=50,
        subgroup_delivery_timeout=60,
        location_filter=LocationFilter.relative_start(1),
        largest_object=Location(0, 1),
    )
    assert publish.properties == ()
    (outgoing,) = server.session.requests.outgoing.values()
    assert outgoing.delivery.group_order is GroupOrder.DESCENDING
    assert outgoing.delivery.paused


def test_a_fill_asked_for_in_subscribe_tracks_comes_under_the_request_id_of_the_publish():
    for seed in range(6):
        publisher = Publisher()
        publisher.add_track(stocked(ALICE, 3))
        pair = Pair(server=publisher, seed=seed)
        fill = Parameters(location_filter=LocationFilter.absolute_start(0))
        wanting = Wanting(pair.client, DEMO, Parameters(fill_parameters=fill))
        pair.run()
        assert wanting.got[ALICE].locations == [Location(0, o) for o in range(3)]
        assert {o.via for o in wanting.got[ALICE].objects} == {Via.FILL}


def test_track_property_filters_select_the_tracks_that_are_offered():
    publisher = Publisher()
    publisher.add_track(stocked(ALICE, properties=(KeyValue(0x0E, 5),)))
    publisher.add_track(stocked(BOB, properties=(KeyValue(0x0E, 50),)))
    low = RangeFilter(ParameterType.TRACK_PROPERTY_FILTER, 0, 0x0E, ((0, 10),))
    high = RangeFilter(ParameterType.TRACK_PROPERTY_FILTER, 0, 0x0E, ((11, 99),))
    pair = Pair(server=publisher)
    wanting = Wanting(pair.client, DEMO, Parameters(range_filters=(low,)))
    pair.run()
    assert list(wanting.offers) == [ALICE]
    wanting.request.update(Parameters(range_filters=(high,)), lambda answer: None)
    pair.run()
    assert list(wanting.offers) == [ALICE, BOB]


def test_object_filters_of_subscribe_tracks_are_applied_and_asked_for_again():
    publisher = Publisher()
    store = stocked(ALICE, 0)
    publisher.add_track(store)
    even = RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((0, 0), (2, 2)))
    pair = Pair(server=publisher)
    wanting = Wanting(pair.client, DEMO, Parameters(range_filters=(even,)))
    for object_id in range(4):
        store.append(0, object_id, b"x")
    pair.run()
    for object_id in range(3):
        store.append(1, object_id, b"x")
    [publish] = pair.client.requests.incoming.values()
    assert publish.updates.asked_filters == (even,)
    pair.run()
    assert {at.object for at in wanting.got[ALICE].locations} <= {0, 2}
    assert Location(1, 2) in wanting.got[ALICE].locations
    server_side = next(iter(pair.server.requests.outgoing.values()))
    assert server_side.range_filters == (even,)
    assert pair.server.counters.updates_received == 1
    assert wanting.offers[ALICE].updates.asked_filters == (even,)


def test_object_filters_of_subscribe_tracks_hold_before_the_subscriber_has_answered():
    publisher = Publisher()
    store = stocked(ALICE, 0)
    even = RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((0, 0), (2, 2)))
    pair = Pair(server=publisher)
    wanting = Wanting(pair.client, DEMO, Parameters(range_filters=(even,)))
    pair.run()
    publisher.add_track(store)
    for object_id in range(4):
        store.append(0, object_id, b"x")
    pair.run()
    assert {at.object for at in wanting.got[ALICE].locations} == {0, 2}


def test_forward_in_an_update_concerns_future_publications_only():
    publisher = Publisher()
    publisher.add_track(stocked(ALICE))
    pair = Pair(server=publisher)
    wanting = Wanting(pair.client, DEMO)
    pair.run()
    wanting.request.update(Parameters(forward=0), lambda answer: None)
    pair.run()
    publisher.add_track(stocked(BOB))
    wanting.request.update(Parameters(), lambda answer: None)
    pair.run()
    carol = FullTrackName(BOB.namespace, b"carol")
    publisher.add_track(stocked(carol))
    pair.run()
    assert [wanting.offers[n].paused for n in (ALICE, BOB, carol)] == [False, True, True]


def test_cancelling_stops_new_offers_and_leaves_the_accepted_ones():
    publisher = Publisher()
    store = stocked(ALICE)
    publisher.add_track(store)
    pair = Pair(server=publisher)
    wanting = Wanting(pair.client, DEMO)
    pair.run()
    wanting.request.cancel()
    pair.run()
    assert not kept(publisher).wanted
    publisher.add_track(stocked(BOB))
    store.append(3, 0, b"still")
    pair.run()
    assert list(wanting.offers) == [ALICE]
    assert wanting.got[ALICE].locations == [Location(3, 0)]
    wanting.offers[ALICE].cancel()
    pair.run()
    pair.server.tick(2)
    assert_clean(pair.client)
    assert_clean(pair.server)


@pytest.mark.parametrize("second", [(), DEMO, (b"demo", b"a")])
def test_an_overlapping_subscribe_tracks_is_refused_with_prefix_overlap(second):
    pair = Pair(server=Publisher())
    first, other = Wanting(pair.client, DEMO), Wanting(pair.client, second)
    apart = Wanting(pair.client, (b"demo2",))
    pair.run()
    assert [e.code for e in other.ends] == [RequestErrorCode.PREFIX_OVERLAP]
    assert not first.ends and not apart.ends


def test_subscribe_tracks_and_subscribe_namespace_do_not_overlap_each_other():
    server = Server(handler=Publisher())
    streams = [server.ask(SubscribeTracks(0, DEMO)), server.ask(SubscribeNamespace(2, DEMO))]
    assert [server.answers(s)[0] for s in streams] == [RequestOk(), RequestOk()]


def test_a_new_prefix_brings_the_tracks_under_it_and_overlaps_end_the_request():
    publisher = Publisher()
    publisher.add_track(stocked(ALICE))
    publisher.add_track(stocked(OTHER))
    pair = Pair(server=publisher)
    wanting, answers = Wanting(pair.client, DEMO), []
    third = Wanting(pair.client, (b"third",))
    pair.run()
    wanting.request.update(Parameters(track_namespace_prefix=(b"other",)), answers.append)
    pair.run()
    assert list(wanting.offers) == [ALICE, OTHER] and [type(a) for a in answers] == [RequestOk]
    third.request.update(Parameters(track_namespace_prefix=()), answers.append)
    pair.run()
    assert [e.code for e in third.ends] == [RequestErrorCode.PREFIX_OVERLAP]
    assert len(kept(publisher).wanted) == 1


def test_a_track_that_cannot_be_published_is_skipped_once_and_may_come_back_later():
    publisher = Publisher()
    store = stocked(ALICE)
    publisher.add_track(store)
    pair = Pair(server=publisher, server_config=SessionConfig(max_queued_requests=0))
    grant = pair.server_transport.open_stream

    def no_bidirectional(*, bidirectional):
        return None if bidirectional else grant(bidirectional=False)

    pair.server_transport.open_stream = no_bidirectional
    wanting = Wanting(pair.client, DEMO)
    pair.run()
    pair.server_transport.open_stream = grant
    (request,) = kept(publisher).wanted
    request.offer(store)
    request.skip(ALICE)
    pair.run()
    assert wanting.skipped == [ALICE] and wanting.offers == {}
    assert pair.server.counters.tracks_skipped == 1
    publisher.remove_track(ALICE)
    publisher.add_track(store)
    pair.run()
    assert list(wanting.offers) == [ALICE]


def test_publishes_wait_for_streams_and_come_in_order():
    publisher = Publisher()
    for n in range(5):
        publisher.add_track(stocked(name("demo", str(n))))
    pair = Pair(server=publisher)
    grant = pair.server_transport.open_stream
    room = [2]

    def limited(*, bidirectional):
        if bidirectional and not room[0]:
            return None
        room[0] -= bidirectional
        return grant(bidirectional=bidirectional)

    pair.server_transport.open_stream = limited
    wanting = Wanting(pair.client, DEMO)
    pair.run()
    assert len(wanting.offers) == 2 and pair.server.requests_waiting == 3
    room[0] = 10
    pair.run()
    assert [n.namespace[1] for n in wanting.offers] == [b"0", b"1", b"2", b"3", b"4"]


def test_a_skipped_tracks_name_is_the_prefix_and_the_suffix():
    client = Client()
    wanting = Wanting(client.session, DEMO)
    client.say(wanting.request, RequestOk(), PublishSkipped((b"live",), b"audio"))
    assert wanting.skipped == [FullTrackName((b"demo", b"live"), b"audio")]
    client.say(wanting.request, PublishSkipped((b"x",) * 32, b"audio"))
    assert client.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


@pytest.mark.parametrize("message", [PublishSkipped((), b"t"), Namespace(())])
def test_any_other_message_before_the_answer_ends_the_session(message):
    client = Client()
    wanting = Wanting(client.session, DEMO)
    client.say(wanting.request, message)
    assert client.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION
    assert isinstance(wanting.ends[0], SessionClosed)


def test_a_publisher_that_ends_the_stream_ends_the_offers_only():
    client = Client()
    wanting = Wanting(client.session, DEMO)
    client.say(wanting.request, RequestOk())
    client.send_bidi(octets(Publish(1, ALICE.namespace, ALICE.name, 7)))
    client.say(wanting.request, fin=True)
    assert wanting.ends == [None]
    assert wanting.offers[ALICE].state is RequestState.ESTABLISHED


def test_a_reserved_prefix_is_refused():
    pair = Pair(server=Publisher())
    wanting = Wanting(pair.client, (b".session",))
    pair.run()
    assert [e.code for e in wanting.ends] == [RequestErrorCode.DOES_NOT_EXIST]


def test_an_endpoint_without_tracks_answers_not_supported():
    pair = Pair()
    wanting = Wanting(pair.client, DEMO)
    pair.run()
    assert [e.code for e in wanting.ends] == [RequestErrorCode.NOT_SUPPORTED]
    assert_clean(pair.client)
    assert_clean(pair.server)


def test_a_track_somebody_waits_for_answers_the_subscribe_and_is_not_published_twice():
    publisher = Publisher()
    pair = Pair(server=publisher)
    wanting, collector = Wanting(pair.client, DEMO), Collector()
    pair.client.subscribe(ALICE, collector, Parameters(rendezvous_timeout=5000))
    pair.run()
    publisher.add_track(stocked(ALICE))
    pair.run()
    assert collector.accepted is not None and wanting.offers == {}


def test_an_update_that_carries_what_subscribe_tracks_cannot_change_ends_the_session():
    server = Server(handler=Publisher())
    stream_id = server.ask(SubscribeTracks(0, DEMO))
    server.session.stream_data(
        stream_id, octets(RequestUpdate(2, Parameters(subscriber_priority=1))), False
    )
    assert server.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


def test_the_end_of_the_session_ends_everything():
    publisher = Publisher()
    publisher.add_track(stocked(ALICE))
    pair = Pair(server=publisher)
    wanting = Wanting(pair.client, DEMO)
    pair.run()
    pair.client.close()
    pair.run()
    assert isinstance(wanting.ends[0], SessionClosed)
    assert isinstance(wanting.got[ALICE].failed, SessionClosed)
    assert not kept(publisher).wanted
    assert pair.client.state is pair.server.state is SessionState.CLOSED
    assert_clean(pair.client)
    assert_clean(pair.server)
