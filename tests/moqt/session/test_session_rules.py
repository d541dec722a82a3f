"""Rules of the session layer, one test each: SETUP, streams, aliases, GOAWAY, FIN and cancel."""

from __future__ import annotations

import pytest

from moqt.publisher import Publisher
from moqt.receiving.receiver import Receiver
from moqt.requests import RequestState
from moqt.session import SessionConfig, SessionState
from moqt.track.store import TrackStore
from moqt.values.codes import (
    MAX_VI64,
    AliasType,
    GroupOrder,
    MessageType,
    ParameterType,
    PublishDoneCode,
    RequestErrorCode,
    SessionErrorCode,
    SetupOptionType,
    StreamErrorCode,
)
from moqt.values.errors import MalformedTrack, MisuseError, RequestError, SessionClosed, StreamReset
from moqt.values.messages import (
    AuthorizationToken,
    Fetch,
    FetchOk,
    Goaway,
    KeyValue,
    LocationFilter,
    Namespace,
    NamespaceDone,
    Parameters,
    PublishDone,
    PublishNamespace,
    RangeFilter,
    Redirect,
    RequestErrorMessage,
    RequestOk,
    RequestUpdate,
    Setup,
    SubscribeNamespace,
    SubscribeOk,
    TrackStatus,
)
from moqt.values.names import FullTrackName, Location
from moqt.wire.objects import DatagramObject
from tests.moqt.inside import entries, kept, listeners
from tests.moqt.memory import ALPN, MemoryTransport, Pair, assert_clean
from tests.moqt.peers import NAME, Collector, track
from tests.moqt.raw import (
    CODEC,
    SETUP,
    VIDEO,
    Client,
    Manual,
    Raw,
    Server,
    fetch_stream,
    octets,
    subgroup,
    subscribe_message,
)

# -- SETUP -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [b"", b"/", b"?q=1", b"/a/b%20c?x=/?&y", b"/live?x=1"])
@pytest.mark.parametrize("authority", [b"relay.example", b"[::1]:4443", b"10.0.0.1:1"])
def test_well_formed_addresses_are_accepted(path, authority):
    raw = Server(
        setup=octets(
            Setup(
                (
                    KeyValue(SetupOptionType.PATH, path),
                    KeyValue(SetupOptionType.AUTHORITY, authority),
                )
            )
        )
    )
    assert raw.session.state is SessionState.ESTABLISHED


def test_requests_and_data_that_overtake_setup_are_held_until_it_comes():
    raw = Server(setup=None)
    stream_id = raw.ask(subscribe_message())
    assert raw.requests == []
    raw.send_uni(SETUP)
    assert len(raw.requests) == 1
    assert stream_id not in raw.transport.paused


@pytest.mark.parametrize("cut", range(1, 6))
def test_setup_may_come_in_pieces_among_other_streams(cut):
    raw = Server(setup=None)
    request = octets(subscribe_message())
    control = raw.send_uni(SETUP[:1])
    stream_id = raw.send_bidi(request[:cut])
    for octet in SETUP[1:]:
        raw.session.stream_data(control, bytes([octet]), False)
    assert raw.session.state is SessionState.ESTABLISHED
    raw.session.stream_data(stream_id, request[cut:], False)
    assert len(raw.requests) == 1


def test_the_control_stream_gets_its_credit_back_when_much_overtook_setup():
    raw = Server(setup=None, config=SessionConfig(max_held_octets=1 << 20))
    raw.send_uni(subgroup(1, 0, b"x" * 70000))
    control = raw.send_uni(SETUP[:1])
    assert control in raw.transport.paused
    raw.session.stream_data(control, SETUP[1:], False)
    assert raw.session.state is SessionState.ESTABLISHED
    assert control not in raw.transport.paused


def test_a_stream_that_was_reset_before_setup_came_gives_its_credit_back():
    raw = Server(setup=None, config=SessionConfig(max_held_octets=1 << 20))
    streams = [raw.send_uni(subgroup(1, n, b"x" * 70000)) for n in range(3)]
    assert raw.transport.paused == set(streams)
    raw.session.stream_reset(streams[1], StreamErrorCode.CANCELLED)
    raw.send_uni(SETUP)
    assert streams[1] not in raw.transport.paused
    assert raw.transport.paused == set(raw.session.data_streams.waiting)


def test_what_comes_before_the_handshake_is_reported_is_held():
    transport = MemoryTransport(False)
    transport.peer = MemoryTransport(True)
    handler = Manual()
    session = Raw(client=False).session.__class__(transport, handler)
    transport.handler = session
    transport.out[0] = type(transport.peer.out.get(0) or _outgoing())()
    session.stream_data(0, octets(subscribe_message()), False)
    session.stream_data(2, SETUP, False)
    session.connection_established(ALPN)
    assert session.state is SessionState.ESTABLISHED
    assert len(handler.requests) == 1


def _outgoing():
    transport = MemoryTransport(True)
    transport.peer = MemoryTransport(False)
    return transport.out[transport.open_stream(bidirectional=False)]


def test_too_much_before_setup_ends_the_session():
    raw = Server(setup=None, config=SessionConfig(max_held_octets=1000))
    raw.send_uni(b"\x10" + bytes(2000))
    assert raw.closed_with() == SessionErrorCode.INTERNAL_ERROR


def test_a_peer_without_setup_is_given_up_with_control_message_timeout():
    raw = Server(setup=None)
    raw.session.tick(1)
    raw.session.tick(12)
    assert raw.closed_with() == SessionErrorCode.CONTROL_MESSAGE_TIMEOUT


def test_an_unlimited_number_of_updates_cannot_be_announced():
    with pytest.raises(MisuseError):
        SessionConfig(max_request_updates=0)


def test_stop_sending_on_the_control_stream_ends_the_session():
    raw = Server()
    raw.session.stop_sending(raw.own_control, 1)
    assert raw.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


def test_a_reset_control_stream_ends_the_session():
    raw = Server()
    raw.session.stream_reset(raw.control, 1)
    assert raw.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


# -- logging -----------------------------------------------------------------------------


def test_a_reason_from_the_peer_is_escaped_in_an_exceptions_text():
    evil = "ok\x1b[31m\n2026 root: \u2028 é"
    for error in (RequestError(0, evil), SessionClosed(0, evil)):
        text = str(error)
        assert "\x1b" not in text and "\n" not in text and "\u2028" not in text
        assert "é" in text and "\\x1b" in text


# -- Request ID --------------------------------------------------------------------------


def test_request_ids_may_come_in_any_order_and_leave_gaps_for_ever():
    raw = Server(config=SessionConfig(max_requests=10**6))
    for request_id in (10, 4, 0, 6):
        raw.ask(subscribe_message(request_id))
    assert len(raw.requests) == 4
    for n in range(70000):  # with 2 and 8 never used
        raw.session.rules.use_request_id(12 + 2 * n)
    assert raw.session.state is SessionState.ESTABLISHED
    assert raw.session.rules.request_id_gaps == 2
    raw.ask(subscribe_message(6))
    assert raw.closed_with() == SessionErrorCode.INVALID_REQUEST_ID


def test_a_peer_that_only_leaves_gaps_costs_bounded_memory():
    raw = Server()
    for n in range(20000):
        raw.session.rules.use_request_id(4 * n)
    assert raw.session.rules.request_id_gaps <= 4096
    raw.session.rules.use_request_id(MAX_VI64 - 1)


def test_an_update_uses_up_a_request_id_too():
    raw = Server()
    raw.ask(subscribe_message(), RequestUpdate(2))
    raw.ask(subscribe_message(2))
    assert raw.closed_with() == SessionErrorCode.INVALID_REQUEST_ID


def test_a_request_that_gets_no_stream_uses_no_request_id():
    client = Client(config=SessionConfig(max_queued_requests=1))
    client.transport.open_stream = lambda *, bidirectional: None
    queued = client.fetch()
    assert queued.request.state is RequestState.QUEUED
    with pytest.raises(RequestError) as refused:
        client.subscribe()
    assert refused.value.code == RequestErrorCode.EXCESSIVE_LOAD
    queued.request.cancel()
    del client.transport.open_stream
    assert client.subscribe().request.request_id == 0
    assert client.session.data_streams.expected == {}


# -- request streams ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        Goaway(),
        SubscribeOk(1),
        RequestOk(),
        RequestUpdate(0),
        PublishDone(2, 0),
        Namespace((b"a",)),
        FetchOk(False, Location(0, 0)),
    ],
)
def test_a_bidirectional_stream_must_begin_with_a_request(message):
    raw = Server()
    raw.ask(message)
    assert raw.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


@pytest.mark.parametrize(
    "message",
    [RequestOk(), FetchOk(False, Location(0, 0)), PublishDone(2, 0), Namespace(()), SubscribeOk(1)],
)
@pytest.mark.parametrize("kind", ["subscribe", "fetch", "listing", "publish_namespace", "status"])
def test_a_first_answer_of_the_wrong_kind_ends_the_session(kind, message):
    client = Client()
    session = client.session
    right = {
        "subscribe": SubscribeOk,
        "fetch": FetchOk,
        "listing": RequestOk,
        "publish_namespace": RequestOk,
        "status": RequestOk,
    }[kind]
    if kind == "publish_namespace":
        session.publish_namespace((b"a",), on_ended=lambda e: None)
    elif kind == "status":
        session.track_status(VIDEO)
    elif kind == "listing":
        client.listing()
    else:
        getattr(client, kind)()
    session.stream_data(0, octets(message), False)
    if isinstance(message, right):
        assert session.state is SessionState.ESTABLISHED
    else:
        assert client.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


@pytest.mark.parametrize("second", [SubscribeOk(8), RequestOk(), RequestErrorMessage(0)])
def test_a_second_answer_ends_the_session(second):
    client = Client()
    collector = client.subscribe()
    client.accept(collector)
    client.say(collector.request, second)
    assert client.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


@pytest.mark.parametrize("second", [FetchOk(False, Location(0, 1)), SubscribeOk(8), RequestOk()])
def test_a_second_answer_to_a_fetch_ends_the_session(second):
    client = Client()
    collector = client.fetch()
    client.say(collector.request, FetchOk(False, Location(0, 1)))
    assert client.session.state is SessionState.ESTABLISHED
    client.say(collector.request, second)
    assert client.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


def test_a_request_update_on_track_status_ends_the_session():
    raw = Server()
    raw.ask(TrackStatus(0, VIDEO.namespace, VIDEO.name), RequestUpdate(2))
    assert raw.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


def test_fin_right_after_subscribe_is_no_cancellation():
    publisher = Publisher()
    store = TrackStore(NAME)
    publisher.add_track(store)
    pair = Pair(server=publisher)
    collector = Collector()
    request = pair.client.subscribe(NAME, collector)
    request.stream.finish()
    pair.run()
    store.append(0, 0, b"x")
    store.finish_subgroup(0, 0)
    store.finish(PublishDoneCode.TRACK_ENDED)
    pair.run()
    assert collector.locations == [(0, 0)]
    assert collector.done == PublishDoneCode.TRACK_ENDED
    assert_clean(pair.client)
    assert_clean(pair.server)
    with pytest.raises(MisuseError):
        request.update(Parameters(), lambda answer: None)


def test_fin_without_an_answer_fails_the_request():
    client = Client()
    collector = client.subscribe()
    answers = []
    collector.request.on_answer = answers.append
    client.say(collector.request, fin=True)
    assert isinstance(collector.failed, RequestError) and answers == [collector.failed]
    assert_clean(client.session)


def test_fin_of_an_established_subscription_without_publish_done_fails_it():
    client = Client()
    collector = client.subscribe()
    client.accept(collector)
    client.say(collector.request, fin=True)
    assert isinstance(collector.failed, RequestError)
    assert_clean(client.session)


def test_the_end_of_a_fetchs_answer_settles_an_update_and_the_objects_still_come():
    client = Client()
    collector = client.fetch()
    client.say(collector.request, FetchOk(False, Location(0, 0)))
    answers = []
    collector.request.update(Parameters(subscriber_priority=1), answers.append)
    client.say(collector.request, fin=True)
    assert collector.failed is None and [type(a) for a in answers] == [RequestError]
    with pytest.raises(MisuseError):
        collector.request.update(Parameters(subscriber_priority=2), answers.append)
    client.send_uni(fetch_stream(0, (0, 0)), fin=True)
    assert collector.locations == [(0, 0)] and collector.failed is None and len(answers) == 1
    assert_clean(client.session)


def test_fin_after_fetch_ok_leaves_the_fetch_alone():
    client = Client()
    collector = client.fetch()
    client.say(collector.request, FetchOk(False, Location(0, 0)), fin=True)
    client.send_uni(fetch_stream(0, (0, 0)), fin=True)
    assert collector.failed is None and collector.locations == [(0, 0)]
    assert_clean(client.session)


def test_fin_of_the_publisher_ends_a_namespace_subscription():
    client = Client()
    request, events, ends = client.listing()
    client.say(request, RequestOk(), Namespace((b"live",)), fin=True)
    assert events == [((b"demo", b"live"), True)]
    assert ends == [None] and request.namespaces == set()
    assert_clean(client.session)


def test_fin_inside_a_message_ends_the_session():
    client = Client()
    collector = client.subscribe()
    client.session.stream_data(0, octets(SubscribeOk(1))[:-1], True)
    assert client.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION
    assert isinstance(collector.failed, SessionClosed)


def test_an_empty_request_stream_is_closed_without_a_word():
    raw = Server()
    stream_id = raw.send_bidi(b"", fin=True)
    assert raw.transport.out[stream_id].fin
    assert_clean(raw.session)


@pytest.mark.parametrize("pending", [True, False])
@pytest.mark.parametrize("how", ["reset", "stop", "both"])
@pytest.mark.parametrize("fin_first", [True, False])
def test_a_cancelled_request_ends_on_both_directions(pending, how, fin_first):
    raw = Server()
    store = TrackStore(VIDEO)
    stream_id = raw.ask(subscribe_message(location_filter=LocationFilter.absolute_start(0)))
    (request,) = raw.requests
    ended = []
    request.when_ended(lambda: ended.append(1))
    if not pending:
        request.accept(store)
        store.append(0, 0, b"x")
        raw.session.ready_to_send()
    data = [s for s in raw.transport.out if s & 2 and s != raw.own_control]
    assert len(data) == (not pending)
    if fin_first:
        raw.session.stream_data(stream_id, b"", True)
        assert not ended
    if how != "stop" and not fin_first:
        raw.session.stream_reset(stream_id, 1)
    if how != "reset" or fin_first:
        raw.session.stop_sending(stream_id, 1)
    assert ended == [1]
    assert raw.transport.out[stream_id].reset == StreamErrorCode.CANCELLED
    assert all(raw.transport.out[s].reset == StreamErrorCode.CANCELLED for s in data)
    assert_clean(raw.session)
    request.accept(store)  # too late: a no-op
    request.reject(RequestErrorCode.INTERNAL_ERROR)
    assert not listeners(store)


@pytest.mark.parametrize("event", ["stream_reset", "stop_sending"])
def test_a_request_stream_given_up_before_its_request_was_read_is_refused(event):
    raw = Server()
    stream_id = raw.send_bidi(octets(subscribe_message())[:5])
    getattr(raw.session, event)(stream_id, 1)
    assert raw.transport.out[stream_id].reset is not None
    other = raw.bidi
    raw.transport.out[other] = type(raw.transport.out[stream_id])()
    getattr(raw.session, event)(other, 1)
    assert raw.transport.out[other].reset is not None
    assert_clean(raw.session)


@pytest.mark.parametrize("event", ["stream_reset", "stop_sending"])
def test_a_peer_that_cancels_our_request_fails_it(event):
    client = Client()
    collector = client.subscribe()
    answers = []
    collector.request.on_answer = answers.append
    getattr(client.session, event)(0, 0)
    assert isinstance(collector.failed, RequestError) and answers == [collector.failed]
    assert client.reset_code(0) == StreamErrorCode.CANCELLED
    assert_clean(client.session)


def test_stop_sending_that_crosses_our_fin_after_publish_done_loses_nothing():
    client = Client()
    collector = client.subscribe()
    client.accept(collector)
    client.say(collector.request, PublishDone(2, 1), fin=True)
    client.session.stop_sending(0, 1)
    client.send_uni(subgroup(7, 0, b"x"), fin=True)
    assert collector.failed is None
    assert collector.done == PublishDoneCode.TRACK_ENDED and collector.locations == [(0, 0)]
    assert_clean(client.session)


def test_a_request_that_was_refused_does_not_wait_for_the_peers_fin():
    client = Client()
    collector = client.subscribe()
    client.say(collector.request, RequestErrorMessage(0x10, 0, "no"))
    assert collector.failed.code == RequestErrorCode.DOES_NOT_EXIST
    assert client.session.requests.outgoing == {}
    client.session.stream_reset(0, 1)
    assert_clean(client.session)


def test_request_error_to_a_fetch_stops_its_data_stream():
    client = Client()
    collector = client.fetch()
    data = client.send_uni(fetch_stream(0, (0, 0)))
    client.say(collector.request, RequestErrorMessage(0), fin=True)
    assert collector.locations == [(0, 0)] and collector.failed is not None
    assert data in client.stopped
    assert_clean(client.session)


# -- cancelling in a callback -------------------------------------------------------------


@pytest.mark.parametrize("when", ["stream_opened", "object_begun", "object_part", "object_ended"])
@pytest.mark.parametrize("kind", ["subscribe", "fetch"])
@pytest.mark.parametrize("what", ["cancel", "close"])
def test_nothing_is_delivered_after_a_receiver_gave_up_in_its_own_callback(kind, when, what):
    calls = []

    class Quitter(Receiver):
        def __getattribute__(self, name):
            if name in ("stream_opened", "object_begun", "object_part", "object_ended"):

                def call(*_):
                    calls.append(name)
                    if name == when:
                        if what == "cancel":
                            self.request.cancel()
                        else:
                            client.session.close()

                return call
            return super().__getattribute__(name)

    client = Client()
    quitter = Quitter()
    if kind == "subscribe":
        client.subscribe(collector=quitter)
        client.accept(quitter)
        data = client.send_uni(subgroup(7, 0, b"abc", b"def"))
    else:
        quitter.request = client.session.fetch(VIDEO, quitter)
        data = client.send_uni(fetch_stream(0, (0, 0), (0, 1)))
    order = ["stream_opened", "object_begun", "object_part", "object_ended"]
    assert calls == order[: order.index(when) + 1]
    assert what == "close" or data in client.stopped
    assert_clean(client.session)


def test_cancelling_in_subscribe_accepted_drops_the_streams_that_waited():
    class Quitter(Collector):
        def subscribe_accepted(self, request):
            request.cancel()

    client = Client()
    quitter = client.subscribe(collector=Quitter())
    data = client.send_uni(subgroup(7, 0, b"abc"))
    assert client.session.data_streams.held_octets
    client.accept(quitter)
    assert quitter.objects == [] and data in client.stopped
    assert_clean(client.session)


def test_a_handler_that_closes_the_session_hears_of_nothing_more():
    class Closer(Manual):
        def subscribe_received(self, request):
            super().subscribe_received(request)
            request.session.close()

    raw = Server(handler=Closer())
    raw.send_bidi(octets(subscribe_message()) + octets(RequestUpdate(0)))  # a repeated ID
    assert len(raw.requests) == 1
    assert raw.transport.closed[0] == SessionErrorCode.NO_ERROR
    assert_clean(raw.session)


def test_a_handler_that_closes_when_established_sees_no_early_request():
    class Closer(Manual):
        def session_established(self, session):
            session.close()

    raw = Server(handler=Closer(), setup=None)
    told = []
    raw.session.observers.append(told.append)
    raw.ask(subscribe_message())
    raw.send_uni(SETUP)
    assert raw.requests == [] and len(told) == 1 and isinstance(told[0], SessionClosed)
    assert_clean(raw.session)


def test_goaway_and_what_follows_it_are_not_processed_after_close():
    class Closer(Manual):
        def goaway_received(self, session, goaway):
            super().goaway_received(session, goaway)
            session.close()

    raw = Server(handler=Closer())
    raw.session.stream_data(raw.control, octets(Goaway()) + octets(Goaway()), False)
    assert raw.transport.closed[0] == SessionErrorCode.NO_ERROR


# -- Track Alias -------------------------------------------------------------------------


def test_data_that_overtakes_subscribe_ok_is_held_with_its_credit_and_delivered():
    client = Client()
    collector = client.subscribe()
    data = subgroup(7, 0, b"abc", b"def")
    streams = [client.send_uni(data[:n]) for n in (3, 6, len(data))]
    assert len(client.session.data_streams.waiting) == 2  # one header is incomplete
    assert client.transport.paused == set(streams[1:])
    client.accept(collector)
    assert client.transport.paused == set() and client.session.data_streams.held_octets == 0
    for stream, n in zip(streams, (3, 6, len(data)), strict=True):
        client.session.stream_data(stream, data[n:], True)
    assert collector.locations == [(0, 0), (0, 1)] * 3
    assert collector.streams == [(0, None)] * 3


def test_a_stream_that_ended_or_was_reset_while_it_was_held_counts():
    client = Client()
    collector = client.subscribe()
    client.send_uni(subgroup(7, 0, b"abc"), fin=True)
    data = client.send_uni(subgroup(7, 1, b"abc") + b"\x00\x05ab")
    client.session.stream_reset(data, 2)
    client.accept(collector)
    assert collector.locations == [(0, 0), (1, 0)]
    assert collector.streams == [(0, None), (0, 2)]
    client.say(collector.request, PublishDone(2, 2), fin=True)
    assert collector.done == PublishDoneCode.TRACK_ENDED
    assert_clean(client.session)


def test_what_is_held_for_unknown_aliases_is_bounded_in_octets():
    client = Client(config=SessionConfig(max_held_octets=1000))
    for alias in range(5):
        client.send_uni(subgroup(alias, 0, b"x" * 400))
    assert client.session.data_streams.held_octets <= 1000
    assert client.session.counters.streams_dropped == 3
    assert client.session.state is SessionState.ESTABLISHED


def test_empty_objects_of_an_unknown_alias_are_bounded_too():
    client = Client(config=SessionConfig(max_held_octets=10000))
    stream = client.send_uni(subgroup(1, 0))
    for _ in range(100):
        client.session.stream_data(stream, b"\x00\x00\x00" * 500, False)
    assert client.session.data_streams.held_octets == 0 and stream in client.stopped


def test_a_stream_whose_alias_never_becomes_known_is_dropped_after_a_while():
    client = Client()
    stream = client.send_uni(subgroup(9, 0, b"x"))
    client.session.tick(4)
    assert stream not in client.stopped
    client.session.tick(6)
    assert stream in client.stopped
    assert_clean(client.session)


def test_data_of_a_cancelled_subscription_is_discarded_quietly():
    client = Client()
    collector = client.subscribe()
    client.accept(collector)
    open_stream = client.send_uni(subgroup(7, 0, b"x"))
    collector.request.cancel()
    late = client.send_uni(subgroup(7, 1, b"x"))
    client.session.datagram(CODEC.encode_datagram(DatagramObject(7, 2, 0, payload=b"x")))
    assert collector.locations == [(0, 0)]
    assert {open_stream, late} <= set(client.stopped)
    assert_clean(client.session)


def test_dead_aliases_are_remembered_up_to_a_limit():
    client = Client()
    for alias in range(1100):
        collector = client.subscribe()
        client.accept(collector, alias)
        collector.request.cancel()
    assert len(client.session.data_streams.aliases.dead) == 1024


def test_an_alias_may_be_used_again_when_its_subscription_is_over():
    client = Client()
    first = client.subscribe()
    client.accept(first)
    first.request.cancel()
    second = client.subscribe(name=FullTrackName((b"demo",), b"other"))
    client.accept(second)
    client.send_uni(subgroup(7, 0, b"x"))
    assert client.session.state is SessionState.ESTABLISHED and second.locations == [(0, 0)]


def test_a_shared_alias_outlives_the_first_of_its_subscriptions():
    client = Client()
    first, second = client.subscribe(), client.subscribe()
    client.accept(first)
    client.accept(second)
    first.request.cancel()
    client.send_uni(subgroup(7, 0, b"x"))
    assert second.locations == [(0, 0)]
    second.request.cancel()
    assert_clean(client.session)


def test_an_unknown_mandatory_track_property_cancels_the_subscription_and_its_streams():
    client = Client()
    collector = client.subscribe()
    data = client.send_uni(subgroup(7, 0, b"x"))
    client.accept(collector, properties=(KeyValue(0x4001, b"?"),))
    assert collector.failed.code == RequestErrorCode.UNSUPPORTED_EXTENSION
    assert data in client.stopped and client.reset_code(0) == StreamErrorCode.CANCELLED
    assert_clean(client.session)


# -- data streams ------------------------------------------------------------------------


@pytest.mark.parametrize("fin", [True, False])
def test_padding_streams_are_discarded_and_forgotten(fin):
    client = Client()
    padding = bytes.fromhex("f0132b3e28")
    stream = client.send_uni(padding + bytes(100), fin=fin)
    if not fin:
        client.session.stream_data(stream, bytes(100), False)
        client.session.stream_reset(stream, 0)
    later = client.send_uni(padding)
    client.session.stream_data(later, bytes(100), False)
    client.session.stream_data(later, bytes(100), True)
    assert client.session.state is SessionState.ESTABLISHED
    assert_clean(client.session)


@pytest.mark.parametrize("sent", [b"", b"\xf0", b"\x14", b"\x14\x01", b"\x05"])
def test_a_stream_reset_before_its_header_leaves_nothing(sent):
    client = Client()
    stream = client.send_uni(sent)
    client.session.stream_reset(stream, 1)
    assert client.session.state is SessionState.ESTABLISHED
    assert_clean(client.session)


@pytest.mark.parametrize("sent", [b"\xf0", b"\x14", b"\x14\x01", b"\x05", subgroup(7, 0) + b"\x00"])
def test_a_stream_that_ends_inside_a_header_ends_the_session(sent):
    client = Client()
    client.accept(client.subscribe())
    client.send_uni(sent, fin=True)
    assert client.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


def test_an_empty_unidirectional_stream_is_nothing():
    client = Client()
    client.send_uni(b"", fin=True)
    assert_clean(client.session)


def test_a_fetch_stream_for_no_request_of_ours_is_stopped():
    client = Client()
    stream = client.send_uni(fetch_stream(0, (0, 0)))
    assert stream in client.stopped
    assert_clean(client.session)


def test_a_second_fetch_stream_for_one_request_is_stopped():
    client = Client()
    collector = client.fetch()
    client.send_uni(fetch_stream(0, (0, 0)))
    second = client.send_uni(fetch_stream(0, (0, 0)))
    assert second in client.stopped and collector.locations == [(0, 0)]


def test_a_malformed_track_gives_up_every_request_for_it_and_nobody_waits_for_ever():
    class Strict(Collector):
        def object_received(self, received):
            raise MalformedTrack("no")

    client = Client()
    fill = Parameters(group_order=GroupOrder.ASCENDING, fill_parameters=Parameters(group_order=1))
    pending, other = client.subscribe(fill, collector=Strict()), client.fetch()
    unrelated = client.subscribe(name=FullTrackName((b"demo",), b"other"))
    answers = []
    pending.request.on_answer = other.request.on_answer = answers.append
    client.send_uni(fetch_stream(0, (0, 0)))
    assert pending.failed.code == other.failed.code == RequestErrorCode.MALFORMED_TRACK
    assert answers == [pending.failed, other.failed]
    assert client.session.state is SessionState.ESTABLISHED
    assert unrelated.failed is None
    unrelated.request.cancel()
    assert_clean(client.session)


def test_a_malformed_datagram_object_gives_the_subscription_up():
    class Strict(Collector):
        def object_received(self, received):
            raise MalformedTrack("no")

    client = Client()
    strict = client.subscribe(collector=Strict())
    client.accept(strict)
    client.session.datagram(CODEC.encode_datagram(DatagramObject(7, 0, 0, payload=b"x")))
    assert strict.failed.code == RequestErrorCode.MALFORMED_TRACK
    assert_clean(client.session)


def test_a_datagrams_end_of_group_reaches_the_receiver():
    seen = []

    class Marks(Collector):
        def object_begun(self, stream, header):
            super().object_begun(stream, header)
            seen.append(stream.subgroup.end_of_group)

    client = Client()
    client.accept(client.subscribe(collector=Marks()))
    for end in (False, True):
        client.session.datagram(
            CODEC.encode_datagram(DatagramObject(7, 0, int(end), payload=b"x", end_of_group=end))
        )
    assert seen == [False, True]


# -- fills -------------------------------------------------------------------------------


def test_a_fill_may_overtake_subscribe_ok_whatever_the_tracks_group_order():
    descending = (KeyValue(0x22, 2),)
    for properties, order in ((), GroupOrder.ASCENDING), (descending, GroupOrder.DESCENDING):
        client = Client()
        collector = client.subscribe(Parameters(fill_parameters=Parameters()))
        groups = [1, 2, 3] if order is GroupOrder.ASCENDING else [3, 2, 1]
        client.send_uni(fetch_stream(0, *((g, 0) for g in groups), order=order), fin=True)
        assert collector.locations == []
        known = Parameters(largest_object=Location(3, 0))
        client.accept(collector, parameters=known, properties=properties)
        assert collector.locations == [(g, 0) for g in groups]
        collector.request.cancel()
        assert_clean(client.session)


def test_a_fill_whose_order_was_asked_for_is_delivered_before_subscribe_ok():
    client = Client()
    collector = client.subscribe(Parameters(fill_parameters=Parameters(group_order=2)))
    data = client.send_uni(fetch_stream(0, (3, 0), (1, 0), order=GroupOrder.DESCENDING))
    assert collector.locations == [(3, 0), (1, 0)]
    collector.request.cancel()
    assert data in client.stopped
    assert_clean(client.session)


def test_cancelling_a_pending_subscription_drops_a_fill_that_waits_for_the_order():
    client = Client()
    collector = client.subscribe(Parameters(fill_parameters=Parameters()))
    data = client.send_uni(fetch_stream(0, (3, 0)))
    collector.request.cancel()
    assert data in client.stopped
    assert_clean(client.session)


# -- PUBLISH_DONE ------------------------------------------------------------------------


def test_publish_done_waits_for_the_streams_it_counts():
    client = Client()
    collector = client.subscribe()
    client.accept(collector)
    client.say(collector.request, PublishDone(2, 2), fin=True)
    first = client.send_uni(subgroup(7, 0, b"x"))
    client.send_uni(subgroup(7, 1, b"x"), fin=True)
    assert collector.done is None
    client.session.stream_data(first, b"", True)
    assert collector.done == PublishDoneCode.TRACK_ENDED
    assert_clean(client.session)


@pytest.mark.parametrize("count", [3, MAX_VI64])
def test_publish_done_does_not_wait_for_ever(count):
    client = Client()
    collector = client.subscribe()
    client.accept(collector)
    leftover = client.send_uni(subgroup(7, 0, b"x"))
    client.say(collector.request, PublishDone(2, count), fin=True)
    client.session.tick(9)
    assert collector.done is None
    client.session.tick(11)
    assert collector.done == PublishDoneCode.TRACK_ENDED
    assert leftover in client.stopped
    assert_clean(client.session)


@pytest.mark.parametrize("code", [None, StreamErrorCode.DELIVERY_TIMEOUT])
def test_publish_done_is_not_given_up_between_two_streams_of_a_slow_path(code):
    client = Client()
    collector = client.subscribe()
    client.accept(collector)
    client.say(collector.request, PublishDone(2, 4), fin=True)
    for group, now in enumerate((8, 16, 25)):
        client.session.tick(now)
        assert collector.done is None
        stream = client.send_uni(subgroup(7, group, b"x"), fin=code is None)
        if code is not None:
            client.session.stream_reset(stream, code)
    client.session.tick(34)
    assert collector.done is None and len(collector.streams) == 3
    client.session.tick(36)  # nothing has come for as long as is waited
    assert collector.done == PublishDoneCode.TRACK_ENDED
    assert_clean(client.session)


def test_publish_done_waits_at_least_the_larger_delivery_timeout():
    client = Client()
    collector = client.subscribe(Parameters(object_delivery_timeout=20_000))
    client.accept(collector, properties=(KeyValue(0x06, 30_000),))
    client.say(collector.request, PublishDone(2, 1), fin=True)
    client.session.tick(29)
    assert collector.done is None
    client.session.tick(31)
    assert collector.done is not None


@pytest.mark.parametrize("message", [PublishDone(2, 0), RequestOk(), Goaway()])
def test_nothing_may_follow_publish_done(message):
    client = Client()
    collector = client.subscribe()
    client.accept(collector)
    client.say(collector.request, PublishDone(2, 1), message)
    assert client.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


def test_an_update_that_publish_done_overtook_is_answered_as_failed():
    client = Client()
    collector = client.subscribe()
    client.accept(collector)
    answers = []
    collector.request.update(Parameters(forward=0), answers.append)
    client.say(collector.request, PublishDone(2, 0))
    assert collector.done == 2 and [type(a) for a in answers] == [RequestError]


# -- REQUEST_UPDATE ----------------------------------------------------------------------


def test_updates_are_held_back_at_the_peers_max_request_updates():
    client = Client(setup=octets(Setup((KeyValue(SetupOptionType.MAX_REQUEST_UPDATES, 2),))))
    collector = client.subscribe()
    client.accept(collector)
    answers = []
    for n in range(5):
        collector.request.update(Parameters(subscriber_priority=n), answers.append)

    def sent():
        return [m for m in client.answers(0) if isinstance(m, RequestUpdate)]

    assert [m.request_id for m in sent()] == [2, 4]
    client.say(collector.request, RequestOk(Parameters(largest_object=Location(3, 4))))
    assert len(sent()) == 3 and len(answers) == 1
    assert collector.request.largest == (3, 4)
    for _ in range(4):
        client.say(collector.request, RequestOk())
    assert len(answers) == 5
    assert [m.parameters.subscriber_priority for m in sent()] == [0, 1, 2, 3, 4]


def test_a_refused_update_ends_a_fetch_and_a_namespace_request():
    client = Client()
    collector = client.fetch()
    data = client.send_uni(fetch_stream(0, (0, 0)))
    client.say(collector.request, FetchOk(False, Location(0, 0)))
    answers = []
    collector.request.update(Parameters(subscriber_priority=1), answers.append)
    client.say(collector.request, RequestErrorMessage(1, 0, "no"), fin=True)
    assert collector.failed.code == answers[0].code == RequestErrorCode.UNAUTHORIZED
    assert data in client.stopped
    request, _, ends = client.listing()
    client.say(request, RequestOk())
    request.update(Parameters(track_namespace_prefix=(b"x",)), answers.append)
    client.say(request, RequestErrorMessage(0x30, 0, "overlap"), fin=True)
    assert [e.code for e in ends] == [RequestErrorCode.PREFIX_OVERLAP]
    assert_clean(client.session)


def test_a_refused_update_of_a_subscription_is_followed_by_publish_done():
    client = Client()
    collector = client.subscribe()
    client.accept(collector)
    answers = []
    collector.request.update(Parameters(forward=1), answers.append)
    client.say(
        collector.request, RequestErrorMessage(0), PublishDone(PublishDoneCode.UPDATE_FAILED, 0)
    )
    assert isinstance(answers[0], RequestError)
    assert collector.failed is None and collector.done == PublishDoneCode.UPDATE_FAILED


@pytest.mark.parametrize("kind", ["subscribe", "fetch", "namespace", "publish_namespace"])
def test_an_update_that_fails_ends_the_request_and_tells_its_owner(kind):
    raw = Server()
    store = track(1)
    store.ended = False
    opening = {
        "subscribe": subscribe_message(),
        "fetch": Fetch(0, VIDEO.namespace, VIDEO.name),
        "namespace": SubscribeNamespace(0, (b"a",)),
        "publish_namespace": PublishNamespace(0, (b"a",)),
    }[kind]
    stream_id = raw.ask(opening)
    (request,) = raw.requests
    ended = []
    request.when_ended(lambda: ended.append(1))
    request.accept(*([store] if kind in ("subscribe", "fetch") else []))
    unknown = AuthorizationToken(AliasType.USE_ALIAS, 5)
    raw.session.stream_data(
        stream_id, octets(RequestUpdate(2, Parameters(authorization_tokens=(unknown,)))), False
    )
    answers = raw.answers(stream_id)
    assert answers[1].code == RequestErrorCode.UNKNOWN_AUTH_TOKEN_ALIAS
    if kind == "subscribe":
        assert answers[2].code == PublishDoneCode.UPDATE_FAILED
    else:
        assert len(answers) == 2
    assert raw.transport.out[stream_id].fin and ended == [1]
    raw.session.stream_data(stream_id, b"", True)
    assert_clean(raw.session)


def test_a_token_registered_by_an_update_is_known_afterwards():
    raw = Server()
    register = AuthorizationToken(AliasType.REGISTER, 5, 0, b"secret")
    use = AuthorizationToken(AliasType.USE_ALIAS, 5)
    stream_id = raw.ask(subscribe_message())
    raw.requests[0].accept(TrackStore(VIDEO))
    raw.session.stream_data(
        stream_id, octets(RequestUpdate(2, Parameters(authorization_tokens=(register,)))), False
    )
    raw.ask(subscribe_message(4, authorization_tokens=(use,)))
    assert raw.requests[0].tokens == raw.requests[1].tokens == ((0, b"secret"),)


def test_updates_before_the_answer_are_applied_and_answered_after_it_in_order():
    raw = Server()
    stream_id = raw.ask(
        subscribe_message(),
        RequestUpdate(2, Parameters(forward=0, subscriber_priority=9)),
        RequestUpdate(4),
        RequestUpdate(6, Parameters(subscriber_priority=3)),
    )
    (request,) = raw.requests
    request.accept(TrackStore(VIDEO))
    assert [type(m) for m in raw.answers(stream_id)] == [SubscribeOk, *[RequestOk] * 3]
    assert request.delivery.paused and request.delivery.flow.subscriber_priority == 3


def test_an_update_changes_nothing_of_a_subscription_that_it_does_not_carry():
    raw = Server()
    filters = (RangeFilter(ParameterType.OBJECTID_FILTER, 0, None, ((1, 2),)),)
    stream_id = raw.ask(
        subscribe_message(
            forward=0,
            subscriber_priority=9,
            location_filter=LocationFilter.absolute_start(5),
            range_filters=filters,
            object_delivery_timeout=100,
        )
    )
    (request,) = raw.requests
    request.accept(TrackStore(VIDEO))
    for n, change in enumerate(({}, {"subgroup_delivery_timeout": 7}, {"new_group_request": 0})):
        update = RequestUpdate(2 + 2 * n, Parameters(**change))
        raw.session.stream_data(stream_id, octets(update), False)
    delivery = request.delivery
    assert delivery.paused and delivery.flow.subscriber_priority == 9
    assert delivery.selection.start == Location(5, 0) and delivery.selection.filters == filters
    assert (delivery.timeouts.object_ms, delivery.timeouts.subgroup_ms) == (100, 7)


def test_a_flood_of_updates_to_an_unanswered_request_ends_the_session():
    raw = Server()
    stream_id = raw.ask(subscribe_message())
    for n in range(17):
        raw.session.stream_data(stream_id, octets(RequestUpdate(2 + 2 * n)), False)
    assert raw.closed_with() == SessionErrorCode.TOO_MANY_REQUEST_UPDATES


def test_a_flood_of_priority_changes_costs_bounded_memory():
    raw = Server()
    store = TrackStore(VIDEO)
    stream_id = raw.ask(subscribe_message(location_filter=LocationFilter.absolute_start(0)))
    raw.requests[0].accept(store)
    store.append(0, 0, b"x" * 100)
    for n in range(5000):
        raw.session.stream_data(
            stream_id,
            octets(RequestUpdate(2 + 2 * n, Parameters(subscriber_priority=n % 2))),
            False,
        )
        raw.transport.out[stream_id].queue.clear()
    assert len(entries(raw.session.scheduler)) <= 300


# -- namespaces --------------------------------------------------------------------------


def test_namespace_floods_are_cut_off_at_max_namespaces():
    client = Client(config=SessionConfig(max_namespaces_told=10))
    request, events, ends = client.listing()
    client.say(request, RequestOk())
    client.say(request, *(Namespace((b"%d" % n,)) for n in range(20)))
    assert len(events) == 10
    assert [e.code for e in ends] == [RequestErrorCode.NAMESPACE_TOO_LARGE]
    assert client.reset_code(0) == StreamErrorCode.CANCELLED
    assert_clean(client.session)


def test_a_suffix_that_makes_a_namespace_too_long_ends_the_session():
    client = Client()
    request, _, _ = client.listing((b"p",))
    client.say(request, RequestOk(), Namespace((b"x",) * 32))
    assert client.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


def test_a_namespace_is_told_once_however_many_tracks_it_has():
    publisher = Publisher()
    raw = Server(handler=publisher)
    stream_id = raw.ask(SubscribeNamespace(0, (b"demo",)))
    for track_name in (b"a", b"b"):
        publisher.add_track(TrackStore(FullTrackName((b"demo", b"live"), track_name)))
    publisher.remove_track(FullTrackName((b"demo", b"live"), b"a"))
    assert raw.answers(stream_id) == [RequestOk(), Namespace((b"live",))]
    publisher.remove_track(FullTrackName((b"demo", b"live"), b"b"))
    assert raw.answers(stream_id)[2:] == [NamespaceDone((b"live",))]


def test_a_namespace_told_twice_is_reported_once():
    client = Client()
    request, events, _ = client.listing()
    client.say(request, RequestOk(), Namespace(()), Namespace(()), NamespaceDone(()))
    assert events == [((b"demo",), True), ((b"demo",), False)]


def test_suffixes_after_a_prefix_update_are_relative_to_the_new_prefix():
    publisher = Publisher()
    for name in (b"a", b"b"):
        publisher.add_track(TrackStore(FullTrackName((b"demo", name), b"t")))
    pair = Pair(server=publisher)
    events, ends, answers = [], [], []
    request = pair.client.subscribe_namespace(
        (b"demo",), on_namespace=lambda n, p: events.append((n, p)), on_ended=ends.append
    )
    pair.run()
    assert request.namespaces == {(b"demo", b"a"), (b"demo", b"b")}
    request.update(Parameters(track_namespace_prefix=(b"demo", b"a")), answers.append)
    pair.run()
    assert request.namespaces == {(b"demo", b"a")} and len(answers) == 1
    request.update(Parameters(track_namespace_prefix=()), answers.append)
    pair.run()
    assert request.namespaces == {(b"demo", b"a"), (b"demo", b"b")}
    publisher.remove_track(FullTrackName((b"demo", b"a"), b"t"))
    pair.run()
    assert request.namespaces == {(b"demo", b"b")}
    request.cancel()
    pair.run()
    assert ends == [] and not kept(publisher).listings
    assert_clean(pair.client)
    assert_clean(pair.server)


@pytest.mark.parametrize("prefix", [(b".",), (b".session", b"x")])
def test_a_prefix_update_to_a_reserved_namespace_is_refused(prefix):
    pair = Pair(server=Publisher())
    ends = []
    request = pair.client.subscribe_namespace(
        (b"demo",), on_namespace=lambda n, p: None, on_ended=ends.append
    )
    pair.run()
    request.update(Parameters(track_namespace_prefix=prefix), lambda answer: None)
    pair.run()
    assert [e.code for e in ends] == [RequestErrorCode.DOES_NOT_EXIST]


def test_a_prefix_update_that_overlaps_ends_the_request_and_leaves_no_listing():
    publisher = Publisher()
    pair = Pair(server=publisher)
    ends = []
    requests = [
        pair.client.subscribe_namespace(p, on_namespace=lambda n, p: None, on_ended=ends.append)
        for p in ((b"a",), (b"b",))
    ]
    pair.run()
    requests[1].update(Parameters(track_namespace_prefix=(b"a", b"c")), lambda answer: None)
    pair.run()
    assert [e.code for e in ends] == [RequestErrorCode.PREFIX_OVERLAP]
    assert len(kept(publisher).listings) == 1
    pair.client.close()
    pair.run()
    assert not kept(publisher).listings
    assert_clean(pair.server)


def test_a_hostile_number_of_requests_is_answered_excessive_load():
    raw = Server(config=SessionConfig(max_requests=20))
    streams = [raw.ask(SubscribeNamespace(2 * n, (b"%d" % n,))) for n in range(40)]
    assert len(raw.requests) == 20
    refused = [raw.answers(s)[0] for s in streams[20:]]
    assert {m.code for m in refused} == {RequestErrorCode.EXCESSIVE_LOAD}
    assert all(m.retry_interval > 0 for m in refused)
    assert len(raw.session.requests.incoming) == 20


def test_publish_namespace_lives_through_fin_and_ends_when_either_side_cancels():
    for revoke in (True, False):
        handler = Manual()
        pair = Pair(server=handler)
        ends, over = [], []
        request = pair.client.publish_namespace((b"a",), on_ended=ends.append)
        pair.run()
        (incoming,) = handler.requests
        incoming.when_ended(lambda over=over: over.append(1))
        incoming.accept()
        request.stream.finish()
        pair.run()
        assert request.state is RequestState.ESTABLISHED and not over
        if revoke:
            incoming.revoke()
            incoming.revoke()
        else:
            request.cancel()
        pair.run()
        assert over == [1] and len(ends) == revoke
        assert_clean(pair.client)
        assert_clean(pair.server)


# -- GOAWAY ------------------------------------------------------------------------------


def test_after_our_goaway_new_requests_are_refused_and_the_old_go_on():
    publisher = Publisher()
    store = TrackStore(NAME)
    publisher.add_track(store)
    handler = Manual()
    pair = Pair(handler, publisher)
    before, after = Collector(), Collector()
    pair.client.subscribe(NAME, before)
    pair.run()
    pair.server.send_goaway("moqt://b.example/", 5000)
    pair.server.send_goaway("moqt://c.example/", 5000)
    pair.run()
    assert [g.uri for g in handler.goaways] == ["moqt://b.example/"]
    pair.client.subscribe(NAME, after)
    store.append(0, 0, b"x")
    pair.run()
    assert before.locations == [(0, 0)]
    assert after.failed.code == RequestErrorCode.GOING_AWAY
    pair.server.tick(4)
    assert pair.server.state is SessionState.ESTABLISHED
    pair.server.tick(6)
    assert pair.server.closed.code == SessionErrorCode.GOAWAY_TIMEOUT


def test_goaway_timeout_spares_a_session_without_requests():
    pair = Pair()
    pair.server.send_goaway(timeout_ms=1000)
    pair.server.tick(5)
    assert pair.server.state is SessionState.ESTABLISHED


def test_a_client_cannot_send_a_uri_in_goaway():
    pair = Pair()
    with pytest.raises(MisuseError):
        pair.client.send_goaway("moqt://x")


def test_goaway_on_a_request_stream_concerns_that_request_only():
    handler = Manual()
    client = Client(handler=handler)
    collector = client.subscribe()
    client.accept(collector)
    client.say(collector.request, Goaway("moqt://b.example/", 1))
    assert [r for r, _ in handler.request_goaways] == [collector.request]
    assert client.session.goaway is None and handler.goaways == []
    client.say(collector.request, Goaway())
    assert client.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


# -- REQUEST_ERROR -----------------------------------------------------------------------


def test_retry_and_redirect_reach_the_application():
    client = Client()
    collector = client.subscribe()
    client.say(
        collector.request,
        RequestErrorMessage(0x34, 1001, "moved", Redirect("moqt://b/", (b"n",), b"t")),
    )
    assert collector.failed.retry_after_ms == 1000
    assert collector.failed.redirect == ("moqt://b/", (b"n",), b"t")


def test_an_unknown_error_code_is_a_refusal_like_any_other():
    client = Client()
    collector = client.subscribe()
    client.say(collector.request, RequestErrorMessage(0x11C, 0, "grease"))
    assert collector.failed.code == 0x11C and "0x11c" in str(collector.failed)
    assert client.session.state is SessionState.ESTABLISHED


def test_range_filters_beyond_the_limit_are_refused_with_invalid_filter():
    raw = Server(config=SessionConfig(max_filter_ranges=1))
    two = RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((0, 1), (3, 4)))
    one = RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((0, 1),))
    fill = Parameters(range_filters=(one,))
    for n, parameters in enumerate(
        ({"range_filters": (two,)}, {"range_filters": (one,), "fill_parameters": fill})
    ):
        stream_id = raw.ask(subscribe_message(2 * n, **parameters))
        assert raw.answers(stream_id)[0].code == RequestErrorCode.INVALID_FILTER
    assert raw.session.state is SessionState.ESTABLISHED


def test_range_filters_beyond_what_the_peer_announced_are_never_sent():
    one = RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((0, 1),))
    early, none = Client(setup=None), Client()
    allowing = Client(setup=octets(Setup((KeyValue(SetupOptionType.MAX_FILTER_RANGES, 1),))))
    for client in (early, none):
        with pytest.raises(RequestError) as refused:
            client.subscribe(Parameters(range_filters=(one,)))
        assert refused.value.code == RequestErrorCode.INVALID_FILTER
        assert client.session.remembered().streams_read == 0
        assert client.fetch().request.request_id == 0
    allowing.subscribe(Parameters(range_filters=(one,)))
    with pytest.raises(RequestError):
        allowing.subscribe(
            Parameters(range_filters=(one,), fill_parameters=Parameters(range_filters=(one,)))
        )


# -- FETCH -------------------------------------------------------------------------------


def test_a_fetch_the_peer_gives_up_ends_as_if_its_stream_had_been_reset():
    for with_stream in (True, False):
        client = Client()
        collector = client.fetch()
        client.say(collector.request, FetchOk(False, Location(0, 5)))
        if with_stream:
            client.send_uni(fetch_stream(0, (0, 0)))
        client.session.stream_reset(0, StreamErrorCode.UNKNOWN_OBJECT_STATUS)
        if with_stream:
            assert collector.streams == [(2, 6)] and collector.failed is None
        else:
            assert isinstance(collector.failed, StreamReset) and collector.failed.code == 6
        assert_clean(client.session)


def test_the_message_catalogue_of_a_request_stream_is_complete():
    from moqt.requests import REQUEST_TABLE

    openers = {
        MessageType.SUBSCRIBE,
        MessageType.PUBLISH,
        MessageType.FETCH,
        MessageType.TRACK_STATUS,
        MessageType.PUBLISH_NAMESPACE,
        MessageType.SUBSCRIBE_NAMESPACE,
        MessageType.SUBSCRIBE_TRACKS,
    }
    assert set(REQUEST_TABLE) == openers
