"""The queue of requests, deadlines, rendezvous, redirects, drain, GOAWAY, states, counters."""

from __future__ import annotations

import pytest

from moqt.publisher import Publisher
from moqt.requests import RequestState
from moqt.session import SESSION_MOVES, SessionConfig, SessionState
from moqt.track.store import TrackStore
from moqt.values.codes import (
    ParameterType,
    PublishDoneCode,
    RequestErrorCode,
    SessionErrorCode,
    SetupOptionType,
    StreamErrorCode,
)
from moqt.values.errors import MisuseError, RequestError, SessionClosed
from moqt.values.messages import (
    Goaway,
    KeyValue,
    Parameters,
    PublishDone,
    RangeFilter,
    Redirect,
    RequestErrorMessage,
    RequestOk,
    RequestUpdate,
    Setup,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
)
from moqt.values.names import FullTrackName, Location
from moqt.values.states import move
from tests.moqt.inside import kept, read_through
from tests.moqt.memory import Pair, assert_clean
from tests.moqt.peers import NAME, Collector, publish, track
from tests.moqt.raw import VIDEO, Client, Manual, Server, octets, subscribe_message


class Gate:
    """Grants `room` more bidirectional streams."""

    def __init__(self, transport, room=0):
        self.room, self._grant = room, transport.open_stream
        transport.open_stream = self

    def __call__(self, *, bidirectional):
        if bidirectional:
            if self.room <= 0:
                return None
            self.room -= 1
        return self._grant(bidirectional=bidirectional)


def named(n):
    return FullTrackName((b"demo",), b"%d" % n)


# -- the queue -----------------------------------------------------------------------------


def test_requests_wait_for_streams_and_are_sent_in_the_order_they_were_made():
    client = Client()
    gate = Gate(client.transport)
    session = client.session
    kinds = [
        session.subscribe(named(0), Collector()),
        session.fetch(named(1), Collector()),
        session.track_status(named(2)),
        session.publish_namespace((b"n",), on_ended=lambda e: None),
        session.subscribe_namespace((b"n",), on_namespace=print, on_ended=lambda e: None),
        session.subscribe_tracks((b"n",), on_publish=print, on_ended=lambda e: None),
        session.publish(TrackStore(named(6))),
    ]
    assert {r.state for r in kinds} == {RequestState.QUEUED}
    assert session.requests_waiting == session.counters.requests_queued == 7
    gate.room = 3
    session.ready_to_send()
    assert [r.state is RequestState.PENDING for r in kinds] == [True] * 3 + [False] * 4
    gate.room = 10
    kinds.append(session.fetch(named(7), Collector()))  # there is room, and others were first
    assert kinds[-1].state is RequestState.QUEUED
    session.ready_to_send()
    sent = [client.answers(4 * n)[0] for n in range(8)]
    assert [m.TYPE for m in sent] == [r.message_sent.TYPE for r in kinds]
    assert [m.request_id for m in sent] == [r.request_id for r in kinds] == list(range(0, 16, 2))
    assert client.transport.out[8].fin  # TRACK_STATUS: nothing more from us


def test_a_request_that_cannot_be_sent_is_refused_at_once_and_not_queued():
    client = Client()
    Gate(client.transport)
    waits = client.session.fetch(named(0), Collector())
    with pytest.raises(MisuseError):
        client.session.fetch(named(1), Collector(), Parameters(subscriber_priority=300))
    assert waits.state is RequestState.QUEUED
    assert client.session.remembered().requests_queued == 1


def test_a_request_made_while_others_wait_does_not_overtake_them():
    client = Client()
    gate = Gate(client.transport)
    first = client.session.fetch(named(0), Collector())
    gate.room = 1
    second = client.session.fetch(named(1), Collector())
    assert first.state is second.state is RequestState.QUEUED
    client.session.tick(1)
    assert first.state is RequestState.PENDING and second.state is RequestState.QUEUED


def test_a_queued_request_that_is_cancelled_leaves_no_trace():
    client = Client()
    gate = Gate(client.transport)
    collector = client.fetch()
    answers = []
    collector.request.update(Parameters(subscriber_priority=1), answers.append)
    collector.request.cancel()
    gate.room = 1
    client.session.ready_to_send()
    assert collector.failed is None and [type(each) for each in answers] == [RequestError]
    assert_clean(client.session)
    assert client.session.requests.next_id() == 0


def test_updates_of_a_queued_request_follow_it_in_order():
    client = Client()
    gate = Gate(client.transport)
    collector = client.subscribe()
    other = client.fetch()
    collector.request.update(Parameters(forward=0), lambda answer: None)
    collector.request.update(Parameters(forward=1), lambda answer: None)
    gate.room = 2
    client.session.ready_to_send()
    sent = client.answers(0)
    assert [type(m) for m in sent] == [Subscribe, RequestUpdate, RequestUpdate]
    assert [m.request_id for m in sent] == [0, 2, 4]
    assert other.request.request_id == 6


def test_the_queue_is_bounded_and_says_so_here():
    client = Client(config=SessionConfig(max_queued_requests=2))
    Gate(client.transport)
    for n in range(2):
        client.session.fetch(named(n), Collector())
    with pytest.raises(RequestError) as refused:
        client.session.fetch(named(2), Collector())
    assert refused.value.code == RequestErrorCode.EXCESSIVE_LOAD
    assert refused.value.retry_after_ms is not None
    assert client.session.requests_waiting == 2


def test_queued_requests_fail_with_the_session():
    client = Client()
    Gate(client.transport)
    collector = client.fetch()
    client.session.close()
    assert isinstance(collector.failed, SessionClosed)
    assert_clean(client.session)


# -- deadlines -----------------------------------------------------------------------------


def test_a_request_that_is_not_answered_in_time_fails_here_and_is_cancelled():
    client = Client(config=SessionConfig(request_timeout=5))
    collector, answers = client.subscribe(), []
    collector.request.on_answer = answers.append
    client.session.tick(4)
    assert collector.failed is None
    client.session.tick(6)
    assert collector.failed.code == RequestErrorCode.TIMEOUT and answers == [collector.failed]
    assert client.reset_code(0) == StreamErrorCode.CANCELLED
    assert client.session.counters.requests_timed_out == 1
    assert client.session.state is SessionState.ESTABLISHED
    assert_clean(client.session)


def test_a_rendezvous_gives_the_peer_that_much_longer_to_answer():
    client = Client(config=SessionConfig(request_timeout=5))
    collector = client.subscribe(Parameters(rendezvous_timeout=20_000))
    client.session.tick(24)
    assert collector.failed is None
    client.session.tick(26)
    assert collector.failed.code == RequestErrorCode.TIMEOUT


def test_an_answered_request_has_no_deadline():
    client = Client(config=SessionConfig(request_timeout=5))
    collector = client.subscribe()
    client.accept(collector)
    client.session.tick(100)
    assert collector.failed is None and len(client.session.clock) == 0


def test_an_update_that_is_not_answered_in_time_fails_the_request():
    client = Client(config=SessionConfig(request_timeout=5))
    collector, answers = client.subscribe(), []
    client.accept(collector)
    collector.request.update(Parameters(forward=0), answers.append)
    client.session.tick(6)
    assert collector.failed.code == RequestErrorCode.TIMEOUT
    assert [type(a) for a in answers] == [RequestError]
    assert_clean(client.session)


def test_without_a_request_timeout_a_request_waits_for_ever():
    client = Client(config=SessionConfig(request_timeout=None))
    collector = client.subscribe()
    client.session.tick(1e9)
    assert collector.failed is None


# -- RENDEZVOUS_TIMEOUT --------------------------------------------------------------------


def test_a_subscribe_waits_for_its_track_within_the_rendezvous_timeout():
    publisher = Publisher()
    pair = Pair(server=publisher)
    collector = Collector()
    pair.client.subscribe(NAME, collector, Parameters(rendezvous_timeout=5000))
    pair.run()
    assert collector.failed is None
    store = TrackStore(NAME)
    publisher.add_track(store)
    pair.run()
    publish(store, 1)
    pair.run()
    assert len(collector.locations) == 4
    assert kept(publisher).waiting == 0


@pytest.mark.parametrize("timeout", [None, 0])
def test_without_a_rendezvous_timeout_a_missing_track_is_refused_at_once(timeout):
    pair = Pair(server=Publisher())
    collector = Collector()
    pair.client.subscribe(NAME, collector, Parameters(rendezvous_timeout=timeout))
    pair.run()
    assert collector.failed.code == RequestErrorCode.DOES_NOT_EXIST


def test_a_rendezvous_that_runs_out_is_answered_timeout_and_the_publisher_caps_it():
    publisher = Publisher()
    pair = Pair(server=publisher)
    short, long = Collector(), Collector()
    pair.client.subscribe(NAME, short, Parameters(rendezvous_timeout=2000))
    pair.client.subscribe(NAME, long, Parameters(rendezvous_timeout=10**9))
    pair.run()
    pair.server.tick(3)
    pair.run()
    assert short.failed.code == RequestErrorCode.TIMEOUT and long.failed is None
    pair.server.tick(31)
    pair.run()
    assert long.failed.code == RequestErrorCode.TIMEOUT
    assert kept(publisher).waiting == 0
    assert_clean(pair.client)
    assert_clean(pair.server)


def test_waiting_subscribes_are_bounded_and_forgotten_when_they_are_cancelled():
    publisher = Publisher()
    publisher.max_waiting = 2
    pair = Pair(server=publisher)
    collectors = [Collector() for _ in range(3)]
    parameters = Parameters(rendezvous_timeout=5000)
    requests = [pair.client.subscribe(NAME, c, parameters) for c in collectors]
    pair.run()
    assert collectors[2].failed.code == RequestErrorCode.EXCESSIVE_LOAD
    for request in requests[:2]:
        request.cancel()
    pair.run()
    assert kept(publisher).waiting == 0
    assert_clean(pair.server)


# -- REQUEST_ERROR -------------------------------------------------------------------------


def test_a_server_redirects_a_track_and_the_requester_sees_where_to():
    class Moved(Manual):
        def subscribe_received(self, request):
            request.redirect("moqt://b/", (b"n",), b"t", reason="moved", retry_after_ms=250)

    pair = Pair(server=Moved())
    collector = Collector()
    pair.client.subscribe(NAME, collector)
    pair.run()
    assert collector.failed.code == RequestErrorCode.REDIRECT
    assert collector.failed.redirect == ("moqt://b/", (b"n",), b"t")
    assert collector.failed.retry_after_ms == 250


def test_a_client_cannot_redirect_to_another_uri():
    handler = Manual()
    pair = Pair(handler)
    collector = Collector()
    pair.server.subscribe(NAME, collector)
    pair.run()
    (request,) = handler.requests
    with pytest.raises(MisuseError):
        request.redirect("moqt://b/", (b"n",), b"t")
    request.redirect("", (b"n",), b"t")
    pair.run()
    assert collector.failed.redirect == ("", (b"n",), b"t")


@pytest.mark.parametrize("kind", ["namespace", "tracks", "publish_namespace"])
def test_a_redirect_of_a_namespace_request_carries_no_track_name(kind):
    client = Client()
    session = client.session
    {
        "namespace": lambda: client.listing(),
        "tracks": lambda: session.subscribe_tracks(
            (b"a",), on_publish=print, on_ended=lambda e: None
        ),
        "publish_namespace": lambda: session.publish_namespace((b"a",), on_ended=lambda e: None),
    }[kind]()
    session.stream_data(
        0, octets(RequestErrorMessage(0x34, 0, "", Redirect("", (b"n",), b"t"))), False
    )
    assert client.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


# -- GOAWAY --------------------------------------------------------------------------------


def test_a_drained_session_closes_with_no_error_when_its_last_subscription_ends():
    publisher = Publisher()
    store = TrackStore(NAME)
    publisher.add_track(store)
    pair = Pair(server=publisher)
    collector = Collector()
    request = pair.client.subscribe(NAME, collector)
    pair.run()
    pair.server.send_goaway("moqt://b.example/", 60_000)
    pair.run()
    pair.client.drain()
    pair.run()
    assert pair.client.closed is None
    request.cancel()
    pair.run()
    assert pair.client.closed.code == SessionErrorCode.NO_ERROR
    assert pair.server.closed.code == SessionErrorCode.NO_ERROR


def test_draining_a_session_without_subscriptions_closes_it_at_once():
    pair = Pair(server=Publisher())
    ends = []
    pair.client.subscribe_namespace((), on_namespace=print, on_ended=ends.append)
    pair.run()
    pair.client.drain()
    assert len(ends) == 1
    assert pair.client.closed.code == SessionErrorCode.NO_ERROR


def test_goaway_is_sent_once_per_request_stream_and_reaches_its_own_observer():
    handler = Manual()
    pair = Pair(handler, Publisher())
    pair.server.handler.add_track(TrackStore(NAME))
    request = pair.client.subscribe(NAME, Collector())
    pair.run()
    seen = []
    request.on_goaway = seen.append
    (incoming,) = pair.server.requests.incoming.values()
    incoming.send_goaway("moqt://b.example/")
    incoming.send_goaway("moqt://c.example/")
    pair.run()
    assert seen == [Goaway("moqt://b.example/", 0)]
    assert handler.request_goaways == [(request, seen[0])]
    with pytest.raises(MisuseError):
        request.send_goaway("moqt://b.example/")


def test_a_request_that_overstays_our_goaway_is_reset_with_going_away():
    publisher = Publisher()
    store = track(1, ended=False)
    publisher.add_track(store)
    pair = Pair(server=publisher)
    stays, leaves = Collector(), Collector()
    pair.client.subscribe(NAME, stays)
    request = pair.client.subscribe(NAME, leaves)
    pair.run()
    over = []
    for incoming in tuple(pair.server.requests.incoming.values()):
        incoming.when_ended(lambda: over.append(1))
        incoming.send_goaway("", 2000)
    pair.run()
    request.cancel()
    pair.run()
    pair.server.tick(3)
    pair.run()
    assert over == [1, 1]
    assert isinstance(stays.failed, RequestError) and leaves.failed is None
    assert pair.server_transport.out[0].reset == StreamErrorCode.GOING_AWAY
    assert_clean(pair.client)
    assert_clean(pair.server)


def test_our_own_request_is_reset_too_when_the_answerer_does_not_move_it():
    pair = Pair(server=Publisher())
    pair.server.handler.add_track(TrackStore(NAME))
    collector = Collector()
    request = pair.client.subscribe(NAME, collector)
    pair.run()
    request.send_goaway(timeout_ms=1000)
    pair.client.tick(2)
    assert collector.failed.code == RequestErrorCode.GOING_AWAY


# -- updates -------------------------------------------------------------------------------


def test_one_update_only_is_sent_before_the_peers_setup_says_how_many_it_takes():
    client = Client(setup=None)
    collector = client.subscribe()
    for priority in range(3):
        collector.request.update(Parameters(subscriber_priority=priority), lambda answer: None)
    assert len(client.answers(0)) == 2
    client.send_uni(octets(Setup()))
    client.accept(collector)
    client.say(collector.request, RequestOk())
    assert len(client.answers(0)) == 4


def test_updates_count_towards_the_peers_max_filter_ranges_with_what_is_in_force():
    client = Client(setup=octets(Setup((KeyValue(SetupOptionType.MAX_FILTER_RANGES, 2),))))
    one = RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((0, 1),))
    two = RangeFilter(ParameterType.SUBGROUP_FILTER, ranges=((0, 1), (3, 4)))
    collector = client.subscribe(Parameters(range_filters=(one,)))
    client.accept(collector)
    with pytest.raises(RequestError) as refused:
        collector.request.update(Parameters(range_filters=(two,)), lambda answer: None)
    assert refused.value.code == RequestErrorCode.INVALID_FILTER
    removed = RangeFilter(ParameterType.OBJECTID_FILTER)
    collector.request.update(Parameters(range_filters=(removed, two)), lambda answer: None)
    assert len(client.answers(0)) == 2


def test_an_update_without_parameters_extends_what_expires():
    client = Client()
    collector = client.subscribe()
    client.accept(collector, parameters=Parameters(expires=4000))
    assert collector.request.expires_at == 4
    client.session.tick(3)
    collector.request.update(Parameters(), lambda answer: None)
    client.say(collector.request, RequestOk())
    assert collector.request.expires_at == 4
    collector.request.update(Parameters(), lambda answer: None)
    client.say(collector.request, RequestOk(Parameters(expires=4000)))
    assert collector.request.expires_at == 7
    collector.request.update(Parameters(), lambda answer: None)
    client.say(collector.request, RequestOk(Parameters(expires=0)))
    assert collector.request.expires_at is None


def test_expires_of_namespace_requests_is_told_and_known():
    class Short(Manual):
        def publish_namespace_received(self, request):
            request.accept(expires_ms=1500)

        subscribe_namespace_received = publish_namespace_received

        def subscribe_tracks_received(self, request):
            request.accept(expires_ms=1500)

    pair = Pair(server=Short())
    ended = []
    requests = [
        pair.client.publish_namespace((b"a",), on_ended=ended.append),
        pair.client.subscribe_namespace((b"a",), on_namespace=print, on_ended=ended.append),
        pair.client.subscribe_tracks((b"a",), on_publish=print, on_ended=ended.append),
    ]
    pair.run()
    assert [r.expires_at for r in requests] == [1.5] * 3 and ended == []


def test_an_expired_subscription_ends_with_publish_done_expired_unless_it_is_extended():
    handler = Manual()
    pair = Pair(server=handler)
    collector = Collector()
    request = pair.client.subscribe(NAME, collector)
    pair.run()
    handler.requests[0].accept(TrackStore(NAME), expires_ms=4000)
    pair.run()
    for now in (3, 6):
        pair.client.tick(now)
        pair.server.tick(now)
        request.update(Parameters(), lambda answer: None)
        pair.run()
        assert request.expires_at == now + 4
    pair.server.tick(9)
    pair.run()
    assert collector.done is None
    pair.server.tick(11)
    pair.run()
    assert collector.done == PublishDoneCode.EXPIRED


def test_an_expired_publication_ends_with_publish_done_expired():
    class Taking(Manual):
        def publish_received(self, request):
            self.got = Collector()
            request.accept(self.got)

    handler = Taking()
    pair = Pair(server=handler)
    pair.client.publish(TrackStore(NAME), Parameters(expires=4000))
    pair.run()
    pair.client.tick(3)
    pair.run()
    assert handler.got.done is None
    pair.client.tick(5)
    pair.run()
    assert handler.got.done == PublishDoneCode.EXPIRED


def test_a_peer_that_does_not_read_its_namespaces_loses_the_listing():
    publisher = Publisher()
    pair = Pair(server=publisher, stream_window=200)
    ends = []
    pair.client.subscribe_namespace((), on_namespace=lambda n, p: None, on_ended=ends.append)
    pair.run()
    for n in range(100):
        publisher.add_track(TrackStore(FullTrackName((b"namespace %d" % n,), b"t")))
    assert pair.server_transport.unsent < 300
    assert pair.server_transport.out[0].reset is None
    pair.server.tick(1)
    assert pair.server_transport.out[0].reset == StreamErrorCode.EXCESSIVE_LOAD
    assert not kept(publisher).listings
    pair.run()
    assert len(ends) == 1
    assert_clean(pair.client)
    assert_clean(pair.server)


# -- TRACK_STATUS --------------------------------------------------------------------------


def test_track_status_tells_largest_object_and_properties_unless_they_are_not_wanted():
    publisher = Publisher()
    store = TrackStore(NAME, (KeyValue(0x0E, 9),))
    store.append(2, 5, b"x")
    publisher.add_track(store)
    pair = Pair(server=publisher)
    full = pair.client.track_status(NAME)
    bare = pair.client.track_status(NAME, Parameters(include_properties=0))
    pair.run()
    assert full.largest == bare.largest == Location(2, 5)
    assert full.properties == (KeyValue(0x0E, 9),) and bare.properties == ()
    assert_clean(pair.client)
    assert_clean(pair.server)


def test_track_status_of_a_missing_track_is_refused_and_cannot_be_updated():
    pair = Pair(server=Publisher())
    request, answers = pair.client.track_status(NAME), []
    request.on_answer = answers.append
    with pytest.raises(MisuseError):
        request.update(Parameters(), lambda answer: None)
    pair.run()
    assert [a.code for a in answers] == [RequestErrorCode.DOES_NOT_EXIST]


# -- states, limits, grease ----------------------------------------------------------------


def test_every_move_the_sessions_table_does_not_allow_is_an_error():
    table = SESSION_MOVES
    for at, allowed in table.items():
        for to in table:
            if to in allowed:
                assert move(table, at, to) is to
            else:
                with pytest.raises(MisuseError):
                    move(table, at, to)


def test_requests_and_refusals_are_counted():
    server = Server(config=SessionConfig(max_requests=3))
    for n in range(5):
        server.ask(SubscribeNamespace(2 * n, (b"%d" % n,)))
    counters = server.session.counters
    assert (counters.requests_received, counters.requests_refused) == (5, 2)
    assert counters.requests_over_limit == 2
    client = Client()
    client.subscribe()
    assert client.session.counters.requests_sent == 1


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_greased_setup_options_are_sent_when_asked_and_ignored_when_received(n):
    pair = Pair(client_config=SessionConfig(grease=n), server_config=SessionConfig(grease=n + 1))
    assert pair.client.state is pair.server.state is SessionState.ESTABLISHED
    for grease in (n, None):
        client = Client(setup=None, config=SessionConfig(grease=grease))
        (setup,) = client.answers(client.own_control)
        reserved = [each.type for each in setup.options if (each.type - 0x9D) % 0x7F == 0]
        assert reserved == ([] if grease is None else [0x7F * n + 0x9D])


@pytest.mark.parametrize("code", [0x9D, 0x11C, 2**62 - 1])
def test_greased_codes_of_every_registry_leave_the_session_open(code):
    client = Client()
    collector = client.subscribe()
    client.accept(collector, properties=(KeyValue(0x11C, 5),))
    client.session.stream_reset(client.send_uni(b"\x10"), code)
    client.say(collector.request, PublishDone(code, 0, "grease"))
    assert collector.done == code
    other = client.fetch()
    client.session.stream_reset(4, code)
    assert isinstance(other.failed, RequestError)
    assert client.session.state is SessionState.ESTABLISHED


def test_a_second_subscribe_ok_for_the_same_request_ends_the_session():
    client = Client()
    collector = client.subscribe(name=VIDEO)
    client.say(collector.request, SubscribeOk(1), SubscribeOk(1))
    assert client.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


def test_requests_of_the_peer_go_on_while_ours_wait_for_streams():
    client = Client(handler=Manual())
    Gate(client.transport)
    client.fetch()
    client.send_bidi(octets(subscribe_message(1)))
    assert len(client.session.handler.requests) == 1


def test_the_end_of_a_request_looks_at_no_stream_of_the_others():
    class Counted(dict):
        looks = 0

        def values(self):
            Counted.looks += 1
            return super().values()

    publisher = Publisher()
    stores = [TrackStore(FullTrackName((b"a",), b"%d" % n)) for n in range(50)]
    for store in stores:
        publisher.add_track(store)
    pair, collector = Pair(None, publisher), Collector()
    requests = [pair.client.subscribe(store.name, collector) for store in stores]
    pair.run()
    for store in stores:
        store.append(0, 0, b"x")
    pair.run()
    assert len(pair.client.data_streams.reading) == 50
    read_through(pair.client, Counted)
    for request in requests:
        request.cancel()
    pair.run()
    assert Counted.looks == 0
    assert_clean(pair.client)
