"""PUBLISH both ways (MOQT "PUBLISH", "Subscriptions", "PUBLISH_DONE")."""

from __future__ import annotations

import pytest

from moqt.receiving.receiver import Via
from moqt.requests import RequestState
from moqt.session import SessionConfig, SessionHandler, SessionState
from moqt.track.store import TrackStore
from moqt.values.codes import (
    GroupOrder,
    MessageType,
    ObjectStatus,
    PublishDoneCode,
    RequestErrorCode,
    SessionErrorCode,
    StreamErrorCode,
)
from moqt.values.errors import MisuseError, RequestError, SessionClosed
from moqt.values.messages import (
    AuthorizationToken,
    Goaway,
    KeyValue,
    LocationFilter,
    Parameters,
    Publish,
    PublishDone,
    PublishStateNotify,
    RequestErrorMessage,
    RequestOk,
    RequestUpdate,
)
from moqt.values.names import FullTrackName, Location
from moqt.wire.objects import ObjectHeader
from tests.moqt.inside import listeners
from tests.moqt.memory import Pair, assert_clean
from tests.moqt.peers import NAME, Collector, track
from tests.moqt.raw import (
    CODEC,
    VIDEO,
    Client,
    Interested,
    Server,
    octets,
    offered,
    publish_message,
    subgroup,
)

RESUME = Parameters(
    forward=1,
    location_filter=LocationFilter.next_object(),
    fill_parameters=Parameters(location_filter=LocationFilter.absolute_start(0)),
)


def live_store():
    store = TrackStore(NAME)
    store.append(0, 0, b"old")
    return store


# -- the publisher's side ------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_publish_delivers_from_the_next_object_on_and_ends_with_publish_done(seed):
    handler = Interested()
    pair = Pair(server=handler, seed=seed)
    store = live_store()
    ends = []
    request = pair.client.publish(store, on_ended=ends.append)
    pair.run()
    assert request.state is RequestState.ESTABLISHED
    assert handler.offers[0].largest == Location(0, 0)
    store.append(0, 1, b"new")
    store.finish_subgroup(0, 0)
    store.append(1, 0, b"newer")
    store.finish_subgroup(1, 0)
    store.finish(PublishDoneCode.TRACK_ENDED, "all said")
    pair.run()
    pair.client.tick(2)
    pair.run()
    assert sorted(handler.got.locations) == [Location(0, 1), Location(1, 0)]
    assert handler.got.done == PublishDoneCode.TRACK_ENDED and ends == [None]
    assert handler.offers[0].done.stream_count == 2
    pair.server.tick(2)
    assert_clean(pair.client)
    assert_clean(pair.server)


def test_objects_go_out_before_the_answer_unless_forward_is_0():
    for forward in (None, 1, 0):
        handler = Interested(accept=False)
        pair = Pair(server=handler)
        store = live_store()
        pair.client.publish(store, Parameters(forward=forward))
        store.append(1, 0, b"new")
        pair.run()
        (offer,) = handler.offers
        assert offer.paused is (forward == 0)
        assert bool(pair.server.data_streams.held_octets) is (forward != 0)
        collector = Collector()
        offer.accept(collector)
        pair.run()
        assert collector.locations == ([] if forward == 0 else [Location(1, 0)])
        assert pair.server.data_streams.held_octets == 0


def test_a_paused_publication_is_joined_exactly_once_by_an_update_with_a_fill():
    handler = Interested(update=RESUME)
    pair = Pair(server=handler)
    store = track(2, 3, ended=False)
    pair.client.publish(store, Parameters(forward=0))
    pair.run()
    store.append(2, 0, b"live")
    store.finish_subgroup(2, 0)
    pair.run()
    assert sorted(handler.got.locations) == [
        *(Location(g, o) for g in range(2) for o in range(3)),
        Location(2, 0),
    ]
    vias = {o.location.group: o.via for o in handler.got.objects}
    assert vias == {0: Via.FILL, 1: Via.FILL, 2: Via.SUBSCRIPTION}


def test_publish_done_of_an_ended_track_waits_for_a_paused_subscriber_to_fill():
    handler = Interested()
    pair = Pair(server=handler)
    ends = []
    pair.client.publish(track(2, 3), Parameters(forward=0), on_ended=ends.append)
    pair.run()
    pair.client.tick(50)
    pair.run()
    assert ends == []
    handler.offers[0].update(RESUME, lambda answer: None)
    pair.run()
    assert len(handler.got.locations) == 6
    assert handler.got.done == PublishDoneCode.TRACK_ENDED and ends == [None]
    assert handler.offers[0].done.stream_count == 1


def test_publish_done_waits_a_little_after_the_answer_so_that_a_fill_can_be_asked_for():
    handler = Interested()
    pair = Pair(server=handler)
    pair.client.publish(track(1))
    pair.run()
    pair.client.tick(0.5)
    pair.run()
    assert handler.got.done is None
    pair.client.tick(1.5)
    pair.run()
    assert handler.got.done == PublishDoneCode.TRACK_ENDED


def test_publish_states_the_parameters_in_force_and_the_track_properties():
    client = Client()
    store = TrackStore(VIDEO, (KeyValue(0x0E, 100),))
    store.append(3, 4, b"x")
    parameters = Parameters(
        forward=0,
        expires=5000,
        subscriber_priority=9,
        group_order=2,
        location_filter=LocationFilter.relative_start(1),
        object_delivery_timeout=100,
    )
    request = client.session.publish(store, parameters)
    (message,) = client.answers(0)
    assert message == Publish(
        0,
        VIDEO.namespace,
        VIDEO.name,
        request.track_alias,
        Parameters(
            forward=0,
            expires=5000,
            subscriber_priority=9,
            group_order=2,
            location_filter=LocationFilter.relative_start(1),
            object_delivery_timeout=100,
            largest_object=Location(3, 4),
        ),
        (KeyValue(0x0E, 100),),
    )
    assert request.delivery.group_order is GroupOrder.DESCENDING
    client.session.publish(store, include_properties=False)
    assert client.answers(4)[0].properties == ()


def test_a_refused_publish_resets_its_streams_and_tells_why():
    pair = Pair()  # the default handler
    store = live_store()
    ends = []
    request = pair.client.publish(store, on_ended=ends.append)
    store.append(1, 0, b"new")
    pair.run()
    assert [e.code for e in ends] == [RequestErrorCode.UNINTERESTED]
    assert request.state is RequestState.CLOSED
    assert not listeners(store)
    assert_clean(pair.client)
    assert_clean(pair.server)


def test_a_subscriber_that_cancels_a_publication_resets_its_streams():
    handler = Interested()
    pair = Pair(server=handler)
    store = live_store()
    ends = []
    pair.client.publish(store, on_ended=ends.append)
    store.append(1, 0, b"new")
    pair.run()
    over = []
    handler.offers[0].when_ended(lambda: over.append(1))
    handler.offers[0].cancel()
    handler.offers[0].cancel()
    pair.run()
    assert len(ends) == 1 and isinstance(ends[0], RequestError)
    assert over == [1] and handler.got.failed is None
    assert handler.got.locations == [Location(1, 0)]
    assert not listeners(store)
    pair.client.tick(2)
    assert_clean(pair.client)
    assert_clean(pair.server)


def test_a_publisher_that_cancels_fails_the_subscription():
    handler = Interested()
    pair = Pair(server=handler)
    request = pair.client.publish(live_store())
    pair.run()
    over = []
    handler.offers[0].when_ended(lambda: over.append(1))
    request.cancel()
    pair.run()
    assert isinstance(handler.got.failed, RequestError) and over == [1]
    assert_clean(pair.server)


def test_withdrawing_a_publication_sends_publish_done_once_it_is_established():
    for accept in (True, False):
        handler = Interested(accept=accept)
        pair = Pair(server=handler)
        ends = []
        request = pair.client.publish(live_store(), on_ended=ends.append)
        pair.run()
        request.withdraw(PublishDoneCode.GOING_AWAY, "later")
        pair.run()
        assert ends == [None]
        if accept:
            assert handler.got.done == PublishDoneCode.GOING_AWAY
        else:
            assert handler.offers[0].state is RequestState.CLOSED
        pair.client.tick(2)
        assert_clean(pair.client)
        assert_clean(pair.server)


def test_a_failed_update_of_a_publication_ends_it_with_update_failed():
    handler = Interested()
    pair = Pair(server=handler)
    pair.client.publish(live_store())
    pair.run()
    unknown = AuthorizationToken(2, 5)
    answers = []
    handler.offers[0].update(Parameters(authorization_tokens=(unknown,)), answers.append)
    pair.run()
    assert answers[0].code == RequestErrorCode.UNKNOWN_AUTH_TOKEN_ALIAS
    assert handler.got.done == PublishDoneCode.UPDATE_FAILED
    pair.client.tick(2)
    assert_clean(pair.client)
    assert_clean(pair.server)


def test_a_paused_subscriber_gets_nothing_and_resumes_with_what_comes_then():
    handler = Interested()
    pair = Pair(server=handler)
    store = live_store()
    pair.client.publish(store)
    pair.run()
    offer = handler.offers[0]
    offer.update(Parameters(forward=0), lambda answer: None)
    pair.run()
    store.append(1, 0, b"missed")
    pair.run()
    offer.update(Parameters(forward=1), lambda answer: None)
    pair.run()
    store.append(2, 0, b"seen")
    pair.run()
    assert handler.got.locations == [Location(2, 0)]


def test_each_publication_of_a_session_has_a_track_alias_of_its_own():
    pair = Pair(server=Interested())
    requests = [pair.client.publish(live_store()) for _ in range(3)]
    pair.run()
    requests[0].withdraw()
    pair.run()
    requests.append(pair.client.publish(live_store()))
    assert len({r.track_alias for r in requests}) == 4


def test_subscribing_to_ones_own_track_is_legal():
    class Both(Interested):
        def subscribe_received(self, request):
            request.accept(self.store)

    handler = Both()
    pair = Pair(handler, Both())
    handler.store = store = live_store()
    pair.client.publish(store)
    pair.run()
    collector = Collector()
    pair.server.subscribe(NAME, collector)
    pair.run()
    store.append(1, 0, b"new")
    pair.run()
    assert collector.locations[-1] == Location(1, 0)
    assert pair.server.handler.got.locations == [Location(1, 0)]


def test_publish_state_notify_tells_largest_object_and_what_changed():
    handler = Interested()
    pair = Pair(server=handler)
    store = live_store()
    request = pair.client.publish(store)
    pair.run()
    states = []
    handler.offers[0].on_state = states.append
    store.append(4, 2, b"x")
    request.notify_state(forward=0, location_filter=LocationFilter.groups(2, 9))
    pair.run()
    assert states == [
        Parameters(
            forward=0,
            location_filter=LocationFilter.groups(2, 9),
            largest_object=Location(4, 2),
        )
    ]
    assert handler.offers[0].largest == Location(4, 2)


def test_publish_state_notify_alters_nothing_at_either_end():
    handler = Interested()
    pair = Pair(server=handler)
    store = live_store()
    request = pair.client.publish(store)
    pair.run()
    (offer,) = handler.offers
    request.notify_state(forward=0, location_filter=LocationFilter.groups(7, 9))
    pair.run()
    assert not request.delivery.paused and not offer.paused
    store.append(1, 0, b"new")
    pair.run()
    assert handler.got.locations == [Location(1, 0)]
    assert offer.selects(ObjectHeader(1, 1, 0, 128, b"", 1))


# -- the subscriber's side -----------------------------------------------------------------


def test_data_that_comes_before_publish_is_answered_is_held_and_delivered():
    client, stream_id = offered(Interested(accept=False))
    early = client.send_uni(subgroup(7, 0, b"abc"), fin=True)
    client.session.tick(60)
    assert early not in client.stopped  # its owner is known and only has to be accepted
    (offer,) = client.session.handler.offers
    collector = Collector()
    offer.accept(collector)
    assert collector.locations == [Location(0, 0)]
    assert client.answers(stream_id) == [RequestOk()]


def test_data_that_overtakes_publish_itself_is_held_as_for_any_unknown_alias():
    client = Client(handler=Interested())
    client.send_uni(subgroup(7, 0, b"abc"), fin=True)
    client.send_bidi(octets(publish_message()))
    assert client.session.handler.got.locations == [Location(0, 0)]


def test_rejecting_a_publish_stops_its_streams():
    client, stream_id = offered(Interested(accept=False))
    data = client.send_uni(subgroup(7, 0, b"abc"))
    (offer,) = client.session.handler.offers
    offer.reject(RequestErrorCode.UNINTERESTED, "no")
    late = client.send_uni(subgroup(7, 1, b"abc"))
    assert {data, late} <= set(client.stopped)
    (answer,) = client.answers(stream_id)
    assert answer.code == RequestErrorCode.UNINTERESTED
    assert client.transport.out[stream_id].fin
    client.session.stream_data(stream_id, b"", True)
    assert_clean(client.session)


def test_an_alias_that_names_another_track_ends_the_session():
    client = Client(handler=Interested())
    client.accept(client.subscribe(name=FullTrackName((b"demo",), b"other")), alias=7)
    client.send_bidi(octets(publish_message(alias=7)))
    assert client.closed_with() == SessionErrorCode.DUPLICATE_TRACK_ALIAS


def test_a_second_publish_with_the_alias_of_an_unanswered_one_ends_the_session():
    client, _ = offered(Interested(accept=False))
    other = FullTrackName((b"demo",), b"other")
    client.send_bidi(octets(publish_message(3, name=other)))
    assert client.closed_with() == SessionErrorCode.DUPLICATE_TRACK_ALIAS


def test_a_publish_for_a_subscribed_track_may_share_the_alias_or_not():
    for alias in (7, 8):
        client = Client(handler=Interested())
        collector = client.subscribe()
        client.accept(collector, alias=7)
        client.send_bidi(octets(publish_message(alias=alias)))
        assert client.session.state is SessionState.ESTABLISHED
        client.send_uni(subgroup(alias, 0, b"x"))
        assert len(collector.locations + client.session.handler.got.locations) == 1


def test_publish_done_before_the_answer_counts_once_it_is_accepted():
    client, stream_id = offered(
        Interested(accept=False), publish_message(), PublishDone(PublishDoneCode.TRACK_ENDED, 1)
    )
    client.session.stream_data(stream_id, b"", True)
    (offer,) = client.session.handler.offers
    client.send_uni(subgroup(7, 0, b"abc"), fin=True)
    collector = Collector()
    offer.accept(collector)
    assert collector.locations == [Location(0, 0)]
    assert collector.done == PublishDoneCode.TRACK_ENDED
    assert_clean(client.session)


def test_a_publisher_that_ends_its_stream_without_publish_done_fails_the_subscription():
    client, stream_id = offered()
    client.session.stream_data(stream_id, b"", True)
    assert isinstance(client.session.handler.got.failed, RequestError)
    assert_clean(client.session)


def test_a_publish_that_is_cancelled_before_its_answer_is_over_and_accept_does_nothing():
    client, stream_id = offered(Interested(accept=False))
    (offer,) = client.session.handler.offers
    over = []
    offer.when_ended(lambda: over.append(1))
    client.session.stream_reset(stream_id, 1)
    collector = Collector()
    offer.accept(collector)
    offer.reject(RequestErrorCode.UNINTERESTED)
    assert over == [1] and collector.failed is None
    assert_clean(client.session)


def test_the_end_of_the_session_fails_an_accepted_publication():
    client, _ = offered()
    client.session.close()
    assert isinstance(client.session.handler.got.failed, SessionClosed)
    assert_clean(client.session)


@pytest.mark.parametrize("message", [RequestOk(), RequestErrorMessage(0)])
def test_a_publisher_cannot_answer_before_it_was_asked_anything(message):
    for accept in (True, False):
        client, _ = offered(Interested(accept=accept), publish_message(), message)
        assert client.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


def test_an_update_of_the_publisher_may_carry_tokens_but_not_what_is_the_subscribers():
    token = AuthorizationToken(3, None, 0, b"fresh")
    client, stream_id = offered(
        Interested(), publish_message(), RequestUpdate(3, Parameters(authorization_tokens=(token,)))
    )
    assert client.answers(stream_id) == [RequestOk(), RequestOk()]
    assert client.session.handler.offers[0].tokens == ((0, b"fresh"),)
    client.session.stream_data(stream_id, octets(RequestUpdate(5, Parameters(forward=0))), False)
    assert client.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


def test_updates_of_the_subscriber_are_answered_in_order_on_the_publishers_stream():
    client, stream_id = offered()
    (offer,) = client.session.handler.offers
    answers = []
    offer.update(Parameters(forward=0), lambda a: answers.append(("pause", a)))
    offer.update(RESUME, lambda a: answers.append(("resume", a)))
    sent = [m for m in client.answers(stream_id) if isinstance(m, RequestUpdate)]
    assert [m.request_id for m in sent] == [0, 2]
    largest = Parameters(largest_object=Location(5, 5), expires=3000)
    client.session.stream_data(stream_id, octets(RequestOk()) + octets(RequestOk(largest)), False)
    assert [name for name, _ in answers] == ["pause", "resume"]
    assert offer.largest == Location(5, 5) and offer.expires_at == 3
    fill = CODEC.fetch_encoder(2, GroupOrder.ASCENDING).header()
    client.send_uni(fill, fin=True)
    assert client.session.handler.got.streams == [(Via.FILL, None)]


@pytest.mark.parametrize(
    ("properties", "code"),
    [
        ((KeyValue(0x4001, b"?"),), RequestErrorCode.UNSUPPORTED_EXTENSION),
        ((KeyValue(0x0B, b"\xc0\x40\x01\x01?"),), RequestErrorCode.UNSUPPORTED_EXTENSION),
        ((KeyValue(0x0B, b""), KeyValue(0x0B, b"")), RequestErrorCode.MALFORMED_TRACK),
        ((KeyValue(0x0B, b"\x0b\x00"),), RequestErrorCode.MALFORMED_TRACK),
        ((KeyValue(0x0B, b"\x01\x09x"),), RequestErrorCode.MALFORMED_TRACK),
    ],
)
def test_track_properties_that_cannot_be_accepted_refuse_the_publish(properties, code):
    client, stream_id = offered(Interested(), publish_message(properties=properties))
    (answer,) = client.answers(stream_id)
    assert answer.code == code and client.session.handler.offers == []
    assert client.session.state is SessionState.ESTABLISHED
    client.session.stream_data(stream_id, b"", True)
    assert_clean(client.session)


def test_a_mandatory_property_that_the_application_knows_is_accepted():
    config = SessionConfig(known_properties=frozenset({0x4001}))
    client, _ = offered(
        Interested(), publish_message(properties=(KeyValue(0x4001, b"?"),)), config=config
    )
    assert client.session.handler.offers[0].state is RequestState.ESTABLISHED


def test_publications_beyond_the_limit_of_aliases_are_refused_with_excessive_load():
    client = Client(handler=Interested(), config=SessionConfig(max_track_aliases=2))
    streams = [
        client.send_bidi(
            octets(publish_message(2 * n + 1, n, name=FullTrackName((b"d",), b"%d" % n)))
        )
        for n in range(4)
    ]
    answers = [client.answers(s)[0] for s in streams]
    assert [m.TYPE for m in answers[:2]] == [MessageType.REQUEST_OK] * 2
    assert {m.code for m in answers[2:]} == {RequestErrorCode.EXCESSIVE_LOAD}
    assert all(m.retry_interval for m in answers[2:])
    assert client.session.counters.requests_over_limit == 2
    assert len(client.session.data_streams.aliases) == 2


def test_expires_of_a_publish_and_its_answer_are_known_to_both_ends():
    handler = Interested(accept=False)
    pair = Pair(server=handler)
    request = pair.client.publish(live_store(), Parameters(expires=4000))
    pair.run()
    (offer,) = handler.offers
    assert offer.expires_at == 4
    offer.accept(Collector(), expires_ms=2500)
    pair.run()
    assert request.expires_at == 2.5


def test_goaway_on_a_publication_moves_only_that_and_resets_it_after_its_time():
    goaways = []

    class Watching(Interested):
        def request_goaway_received(self, request, goaway):
            goaways.append((request, goaway))

    watching = Watching()
    pair = Pair(watching, Interested())
    ends = []
    request = pair.client.publish(live_store(), on_ended=ends.append)
    pair.run()
    pair.server.handler.offers[0].send_goaway("moqt://b.example/", 3000)
    pair.run()
    assert goaways == [(request, Goaway("moqt://b.example/", 3000))]
    pair.server.tick(4)
    pair.run()
    assert len(ends) == 1
    assert pair.server.handler.got.failed.code == RequestErrorCode.GOING_AWAY
    assert pair.client.state is SessionState.ESTABLISHED
    assert pair.server_transport.out[0].reset == StreamErrorCode.GOING_AWAY


def test_a_session_that_says_goaway_refuses_publications_with_going_away():
    pair = Pair(server=Interested())
    pair.server.send_goaway()
    pair.run()
    ends = []
    pair.client.publish(live_store(), on_ended=ends.append)
    pair.run()
    assert [e.code for e in ends] == [RequestErrorCode.GOING_AWAY]


def test_a_malformed_track_gives_up_publications_of_it_too():
    client, _ = offered()
    collector = client.subscribe()
    client.session.track_malformed(collector.request, "differs")
    assert client.session.handler.got.failed.code == RequestErrorCode.MALFORMED_TRACK
    assert_clean(client.session)


def test_publish_state_notify_from_the_subscriber_ends_the_session():
    server = Server()
    server.session.publish(live_store())
    server.session.stream_data(1, octets(RequestOk()) + octets(PublishStateNotify()), False)
    assert server.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


def test_a_publish_of_an_end_of_track_reaches_the_subscriber():
    handler = Interested()
    pair = Pair(server=handler)
    store = live_store()
    pair.client.publish(store)
    pair.run()
    store.mark_end(Location(1, 0), ObjectStatus.END_OF_TRACK)
    store.finish_subgroup(1, 0)
    pair.run()
    assert [o.status for o in handler.got.objects] == [ObjectStatus.END_OF_TRACK]


def test_a_request_that_is_over_cannot_be_updated():
    client, _ = offered()
    (offer,) = client.session.handler.offers
    offer.cancel()
    with pytest.raises(MisuseError):
        offer.update(Parameters(forward=0), lambda answer: None)


def pending_offer(**config):
    """A PUBLISH that has no answer yet, at its subscriber."""
    handler = Interested(accept=False)
    pair = Pair(client=handler, client_config=SessionConfig(**config))
    publication = pair.server.publish(live_store())
    pair.run()
    (offer,) = handler.offers
    return pair, publication, offer


def test_an_update_before_the_answer_follows_it():
    for later in (None, Parameters(subscriber_priority=9)):
        pair, publication, offer = pending_offer()
        answers = []
        offer.update(Parameters(subscriber_priority=3), answers.append)
        pair.run()
        assert not answers
        offer.accept(Collector(), update=later)
        pair.run()
        assert [type(each) for each in answers] == [RequestOk]
        assert publication.delivery.flow.subscriber_priority == (9 if later else 3)
        offer.cancel()
        pair.run()
        assert_clean(pair.client)


def test_the_end_of_a_publication_settles_the_updates_that_have_no_answer():
    def ended(how):
        pair, _, offer = pending_offer(request_timeout=5.0)
        answers = []
        if how not in (rejected, cancelled):  # those come before an answer
            offer.accept(Collector())
        offer.update(Parameters(subscriber_priority=3), answers.append)
        how(offer)
        pair.run()
        assert_clean(pair.client)
        with pytest.raises(MisuseError):
            offer.update(Parameters(), answers.append)
        return [each.reason for each in answers]

    def rejected(offer):
        offer.reject(RequestErrorCode.UNINTERESTED)

    def cancelled(offer):
        offer.cancel()

    def refuse_theirs(offer):
        offer.update_failed(RequestError(RequestErrorCode.UNAUTHORIZED, "no"))

    for how in (rejected, refuse_theirs, cancelled, lambda offer: offer.revoke()):
        assert ended(how) == ["the request ended before its answer"]


def test_only_the_side_that_asks_has_something_to_update():
    class Keeps(SessionHandler):
        def subscribe_received(self, request):
            self.request = request

    handler = Keeps()
    pair = Pair(server=handler)
    pair.client.subscribe(NAME, Collector())
    pair.run()
    for _ in range(2):
        with pytest.raises(MisuseError, match="nothing to update"):
            handler.request.update(Parameters(), lambda answer: None)
        assert pair.server.remembered().updates == 0
        handler.request.accept(live_store())
