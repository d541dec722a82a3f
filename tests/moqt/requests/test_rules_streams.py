"""The control stream and request streams, rule by rule (MOQT "Sessions", "Control Messages")."""

from __future__ import annotations

import re

import pytest

from moqt.publisher import Publisher
from moqt.redirects import FollowLimits, follow
from moqt.requests import RequestState
from moqt.session import SessionConfig, SessionHandler, SessionState
from moqt.track.store import TrackStore
from moqt.values.codes import (
    MessageType,
    PublishDoneCode,
    RequestErrorCode,
    SessionErrorCode,
    SetupOptionType,
    StreamErrorCode,
)
from moqt.values.errors import RequestError
from moqt.values.messages import (
    Fetch,
    FetchOk,
    Goaway,
    KeyValue,
    LocationFilter,
    Namespace,
    NamespaceDone,
    Parameters,
    Publish,
    PublishDone,
    PublishNamespace,
    PublishSkipped,
    PublishStateNotify,
    Redirect,
    RequestErrorMessage,
    RequestOk,
    RequestUpdate,
    Setup,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
    TrackStatus,
)
from moqt.values.names import FullTrackName, Location
from tests.moqt.inside import kept
from tests.moqt.memory import Pair, assert_clean
from tests.moqt.peers import NAME, Collector, Wanting
from tests.moqt.raw import (
    SETUP,
    VIDEO,
    Client,
    Interested,
    Manual,
    Server,
    fetch_stream,
    octets,
    offered,
    subgroup,
    subscribe_message,
)

M = MessageType


class Keeping(Manual):
    """Keeps every kind of request."""

    publish_received = subscribe_tracks_received = Manual.subscribe_received


# -- SETUP and the control stream --------------------------------------------------------


@pytest.mark.parametrize("kind", [Client, Server])
def test_each_end_opens_one_control_stream_and_sends_setup_without_waiting(kind):
    raw = kind(setup=None)
    assert raw.transport.opened == {True: 0, False: 1}
    (sent,) = raw.answers(raw.own_control)
    assert isinstance(sent, Setup)
    assert b"".join(raw.transport.out[raw.own_control].queue)[:2] == bytes.fromhex("af00")
    raw.send_uni(SETUP)
    assert raw.transport.opened[False] == 1


def test_a_client_names_path_and_authority_and_a_server_does_not():
    config = SessionConfig(path="/live?x=1", authority="relay.example:4443")
    for kind, named in ((Client, True), (Server, False)):
        (setup,) = (raw := kind(setup=None, config=config)).answers(raw.own_control)
        options = {each.type: each.value for each in setup.options}
        assert (options.get(SetupOptionType.PATH) == b"/live?x=1") is named
        assert (options.get(SetupOptionType.AUTHORITY) == b"relay.example:4443") is named
        assert re.fullmatch(rb"[a-z]+/\d+", options[SetupOptionType.MOQT_IMPLEMENTATION])
        assert {SetupOptionType.MAX_FILTER_RANGES, SetupOptionType.MAX_REQUEST_UPDATES} <= set(
            options
        )


@pytest.mark.parametrize("message", [Setup(), RequestOk(), subscribe_message(), Namespace(())])
def test_after_setup_only_goaway_belongs_on_the_control_stream(message):
    raw = Server()
    raw.session.stream_data(raw.control, octets(message), False)
    assert raw.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


def test_the_control_stream_stays_open_until_the_session_ends():
    pair = Pair()
    pair.client.send_goaway()
    pair.run()
    pair.client.close()
    for transport in (pair.client_transport, pair.server_transport):
        (control,) = (s for s in transport.out if s & 2)
        assert not transport.out[control].fin and transport.out[control].reset is None


class Scoped(SessionHandler):
    """Serves one authority and path."""

    def check_scope(self, session, authority, path):
        self.asked = authority, path
        if authority not in (None, "relay.example"):
            return SessionErrorCode.INVALID_AUTHORITY
        return None if path == "/live" else SessionErrorCode.INVALID_PATH


@pytest.mark.parametrize(
    ("authority", "path", "code"),
    [
        (b"relay.example", b"/live", None),
        (None, b"/live", None),
        (b"relay.example", b"/other", SessionErrorCode.INVALID_PATH),
        (b"relay.example", None, SessionErrorCode.INVALID_PATH),
        (b"b.example", b"/live", SessionErrorCode.INVALID_AUTHORITY),
    ],
)
def test_a_server_that_does_not_serve_the_authority_or_path_says_so(authority, path, code):
    options = tuple(
        KeyValue(type_, value)
        for type_, value in ((SetupOptionType.PATH, path), (SetupOptionType.AUTHORITY, authority))
        if value is not None
    )
    raw = Server(handler=Scoped(), setup=octets(Setup(options)))
    assert raw.session.handler.asked == tuple(v and v.decode() for v in (authority, path))
    if code is None:
        assert raw.session.state is SessionState.ESTABLISHED
        assert raw.session.path == "/live"
    else:
        assert raw.closed_with() == code


@pytest.mark.parametrize("code", [0x7, 0x15, 0x9D, 2**62 - 1])
def test_a_session_may_be_closed_with_a_code_nobody_knows(code):
    client = Client()
    collector = client.subscribe()
    client.session.connection_closed(code, "grease", True)
    assert client.session.closed.code == code and hex(code) in str(client.session.closed)
    assert collector.failed is client.session.closed


# -- what each request stream may carry --------------------------------------------------

OPENING = {
    M.SUBSCRIBE: Subscribe(0, VIDEO.namespace, VIDEO.name),
    M.PUBLISH: Publish(0, VIDEO.namespace, VIDEO.name, 7),
    M.FETCH: Fetch(0, VIDEO.namespace, VIDEO.name),
    M.TRACK_STATUS: TrackStatus(0, VIDEO.namespace, VIDEO.name),
    M.PUBLISH_NAMESPACE: PublishNamespace(0, (b"demo",)),
    M.SUBSCRIBE_NAMESPACE: SubscribeNamespace(0, (b"demo",)),
    M.SUBSCRIBE_TRACKS: SubscribeTracks(0, (b"demo",)),
}
EVERY = [
    *OPENING.values(),
    Setup(),
    Goaway(),
    SubscribeOk(7),
    RequestUpdate(1),
    RequestOk(),
    RequestErrorMessage(0),
    PublishDone(PublishDoneCode.TRACK_ENDED, 0),
    PublishStateNotify(),
    FetchOk(False, Location(9, 9)),
    Namespace(()),
    NamespaceDone(()),
    PublishSkipped((), b"t"),
]
BY_REQUESTER = {
    M.SUBSCRIBE: {M.REQUEST_UPDATE, M.GOAWAY},
    M.PUBLISH: {
        M.REQUEST_UPDATE,
        M.GOAWAY,
        M.PUBLISH_STATE_NOTIFY,
        M.PUBLISH_DONE,
        M.REQUEST_OK,
        M.REQUEST_ERROR,
    },
    M.FETCH: {M.REQUEST_UPDATE, M.GOAWAY},
    M.TRACK_STATUS: {M.GOAWAY},
    M.PUBLISH_NAMESPACE: {M.REQUEST_UPDATE, M.GOAWAY},
    M.SUBSCRIBE_NAMESPACE: {M.REQUEST_UPDATE, M.GOAWAY},
    M.SUBSCRIBE_TRACKS: {M.REQUEST_UPDATE, M.GOAWAY},
}
FIRST = {
    opening: {
        {M.SUBSCRIBE: M.SUBSCRIBE_OK, M.FETCH: M.FETCH_OK}.get(opening, M.REQUEST_OK),
        M.REQUEST_ERROR,
        M.GOAWAY,
    }
    for opening in OPENING
}
UPDATE_ANSWERS = {M.REQUEST_OK, M.REQUEST_ERROR, M.GOAWAY}
LATER = {
    M.SUBSCRIBE: UPDATE_ANSWERS | {M.PUBLISH_STATE_NOTIFY, M.PUBLISH_DONE},
    M.PUBLISH: UPDATE_ANSWERS | {M.REQUEST_UPDATE},
    M.FETCH: UPDATE_ANSWERS,
    M.PUBLISH_NAMESPACE: UPDATE_ANSWERS,
    M.SUBSCRIBE_NAMESPACE: UPDATE_ANSWERS | {M.NAMESPACE, M.NAMESPACE_DONE},
    M.SUBSCRIBE_TRACKS: UPDATE_ANSWERS | {M.PUBLISH_SKIPPED},
}


def check(raw, message, allowed):
    if message.TYPE in allowed:
        assert raw.session.state is SessionState.ESTABLISHED, raw.session.closed
    else:
        assert raw.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION


@pytest.mark.parametrize("opening", OPENING, ids=lambda type_: type_.name)
def test_the_requester_may_send_only_what_belongs_on_its_stream(opening):
    for message in EVERY:
        raw = Server(handler=Keeping())
        stream_id = raw.ask(OPENING[opening])
        (request,) = raw.requests
        if opening is M.PUBLISH:  # so that there is an update to answer
            request.accept(Collector(), update=Parameters(forward=1))
        if isinstance(message, RequestUpdate):
            message = RequestUpdate(2)
        raw.session.stream_data(stream_id, octets(message), False)
        check(raw, message, BY_REQUESTER[opening])


def ask(client, opening):
    session = client.session
    ignore = {"on_ended": lambda error: None}
    makers = {
        M.SUBSCRIBE: lambda: session.subscribe(VIDEO, Collector()),
        M.PUBLISH: lambda: session.publish(TrackStore(VIDEO), Parameters(forward=0)),
        M.FETCH: lambda: session.fetch(VIDEO, Collector()),
        M.TRACK_STATUS: lambda: session.track_status(VIDEO),
        M.PUBLISH_NAMESPACE: lambda: session.publish_namespace((b"demo",), **ignore),
        M.SUBSCRIBE_NAMESPACE: lambda: session.subscribe_namespace(
            (b"demo",), on_namespace=lambda n, p: None, **ignore
        ),
        M.SUBSCRIBE_TRACKS: lambda: session.subscribe_tracks(
            (b"demo",), on_publish=lambda publish: None, **ignore
        ),
    }
    return makers[opening]()


@pytest.mark.parametrize("opening", OPENING, ids=lambda type_: type_.name)
def test_the_first_answer_is_one_of_those_that_the_request_has(opening):
    for message in EVERY:
        client = Client()
        client.say(ask(client, opening), message)
        check(client, message, FIRST[opening])


@pytest.mark.parametrize("opening", LATER, ids=lambda type_: type_.name)
def test_after_its_answer_the_answering_side_sends_only_what_belongs_on_the_stream(opening):
    answers = {M.SUBSCRIBE: SubscribeOk(7), M.FETCH: FetchOk(False, Location(9, 9))}
    for message in EVERY:
        client = Client()
        request = ask(client, opening)
        client.say(request, answers.get(opening, RequestOk()))
        request.update(Parameters(), lambda answer: None)
        before = (Namespace(()),) if isinstance(message, NamespaceDone) else ()
        if opening is M.SUBSCRIBE_NAMESPACE:
            client.say(request, *before)
        client.say(request, message)
        check(client, message, LATER[opening])


def test_after_a_track_status_is_answered_nothing_more_comes():
    for message in EVERY:
        client = Client()
        client.say(ask(client, M.TRACK_STATUS), RequestOk(), message)
        check(client, message, {M.GOAWAY})


@pytest.mark.parametrize("namespace", [(b".",), (b".", b"x"), (b".session",), (b".session", b"x")])
@pytest.mark.parametrize("opening", OPENING, ids=lambda type_: type_.name)
def test_a_request_for_a_reserved_namespace_is_answered_does_not_exist(opening, namespace):
    raw = Server(handler=Keeping())
    kind = type(OPENING[opening])
    if opening in (M.PUBLISH_NAMESPACE, M.SUBSCRIBE_NAMESPACE, M.SUBSCRIBE_TRACKS):
        message = kind(0, namespace)
    else:
        message = kind(0, namespace, b"", *([7] if opening is M.PUBLISH else []))
    stream_id = raw.ask(message)
    (answer,) = raw.answers(stream_id)
    assert answer.code == RequestErrorCode.DOES_NOT_EXIST and raw.requests == []
    assert raw.transport.out[stream_id].fin
    raw.session.stream_data(stream_id, b"", True)
    assert_clean(raw.session)


# -- answers -----------------------------------------------------------------------------


@pytest.mark.parametrize(("retry_after_ms", "interval"), [(None, 0), (0, 1), (1000, 1001)])
def test_a_retry_interval_is_milliseconds_plus_one_and_0_for_never(retry_after_ms, interval):
    raw = Server()
    stream_id = raw.ask(subscribe_message())
    raw.requests[0].reject(RequestErrorCode.EXCESSIVE_LOAD, "", retry_after_ms=retry_after_ms)
    (answer,) = raw.answers(stream_id)
    assert answer.retry_interval == interval and raw.transport.out[stream_id].fin
    client = Client()
    collector = client.subscribe()
    client.say(collector.request, answer)
    assert collector.failed.retry_after_ms == retry_after_ms


async def test_a_retry_waits_its_interval_and_some_jitter(monkeypatch):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    async def refused(session, name):
        raise RequestError(RequestErrorCode.EXCESSIVE_LOAD, retry_after_ms=1000)

    monkeypatch.setattr("moqt.redirects.asyncio.sleep", sleep)
    with pytest.raises(RequestError):
        await follow(None, NAME, refused, None, limits=FollowLimits(max_retries=20))
    assert len(waits) == 20 and len(set(waits)) > 1
    assert min(waits) >= 1 and max(waits) < 2


def test_the_largest_object_is_told_wherever_one_exists_and_nowhere_else():
    for largest in (None, Location(3, 4)):
        store = TrackStore(VIDEO)
        if largest:
            store.append(*largest, b"x")
        raw = Server()
        subscribe = raw.ask(subscribe_message(), RequestUpdate(2))
        status = raw.ask(TrackStatus(4, VIDEO.namespace, VIDEO.name))
        for request in raw.requests:
            request.accept(store)
        ok, updated = raw.answers(subscribe)
        (status_ok,) = raw.answers(status)
        raw.session.publish(store)
        (publish,) = raw.answers(1)
        for message in (ok, updated, status_ok, publish):
            assert message.parameters.largest_object == largest, message


@pytest.mark.parametrize("wanted", [0, 1, None])
def test_track_properties_are_left_out_when_they_are_not_wanted(wanted):
    properties = (KeyValue(0x0E, 9),)
    store = TrackStore(VIDEO, properties)
    store.append(0, 0, b"x")
    raw = Server()
    asked = Parameters(include_properties=wanted)
    streams = [
        raw.ask(kind(2 * n, VIDEO.namespace, VIDEO.name, asked))
        for n, kind in enumerate((Subscribe, Fetch, TrackStatus))
    ]
    for request in tuple(raw.requests):
        request.accept(store)
    for stream_id in streams:
        assert raw.answers(stream_id)[0].properties == (() if wanted == 0 else properties)


@pytest.mark.parametrize("opening", [M.SUBSCRIBE, M.SUBSCRIBE_NAMESPACE])
def test_a_refused_update_carries_no_redirect_that_its_request_could_not(opening):
    if opening is M.SUBSCRIBE:
        raw, redirect = Server(), Redirect("moqt://b.example/", (b"n",), b"t")
    else:
        raw, redirect = Client(), Redirect("", (b"n",), b"t")
    request = ask(raw, opening)
    ok = SubscribeOk(7) if opening is M.SUBSCRIBE else RequestOk()
    request.on_answer = lambda error: request.update(Parameters(), lambda answer: None)
    data = octets(ok) + octets(RequestErrorMessage(0x34, 0, "", redirect))
    raw.session.stream_data(request.stream.stream_id, data, False)
    assert raw.closed_with() == SessionErrorCode.PROTOCOL_VIOLATION
    assert "REDIRECT" in raw.session.closed.reason


def test_when_everything_is_said_the_requester_finishes_its_side_too():
    client = Client()
    collector = client.subscribe()
    client.accept(collector)
    stream_id = collector.request.stream.stream_id
    assert not client.transport.out[stream_id].fin
    client.say(collector.request, PublishDone(PublishDoneCode.TRACK_ENDED, 0), fin=True)
    assert client.transport.out[stream_id].fin
    assert_clean(client.session)
    client = Client()
    collector = client.fetch()
    client.say(collector.request, FetchOk(False, Location(0, 0)), fin=True)
    assert not client.transport.out[0].fin
    client.send_uni(fetch_stream(0, (0, 0)), fin=True)
    assert client.transport.out[0].fin
    assert_clean(client.session)


@pytest.mark.parametrize("fin_first", [True, False])
def test_a_fetch_that_is_cancelled_resets_both_its_streams(fin_first):
    raw = Server()
    stream_id = raw.ask(Fetch(0, VIDEO.namespace, VIDEO.name), fin=fin_first)
    store = TrackStore(VIDEO)
    store.append(0, 0, b"x")
    growing = store.begin(Location(0, 1), subgroup=0, priority=None, properties=b"", length=5)
    store.grow(growing, b"ab")  # the fetch goes on until its end has come
    (request,) = raw.requests
    request.accept(store)
    raw.session.ready_to_send()
    (data,) = (s for s in raw.transport.out if s & 2 and s != raw.own_control)
    raw.session.stop_sending(stream_id, StreamErrorCode.CANCELLED)
    assert raw.transport.out[stream_id].reset == StreamErrorCode.CANCELLED
    assert raw.transport.out[data].reset == StreamErrorCode.CANCELLED
    assert_clean(raw.session)


@pytest.mark.parametrize("fin_sent", [True, False])
def test_cancelling_ends_every_direction_that_is_open(fin_sent):
    client = Client()
    collector = client.subscribe()
    client.accept(collector)
    stream_id = collector.request.stream.stream_id
    if fin_sent:
        collector.request.stream.finish()
    collector.request.cancel()
    assert client.reset_code(stream_id) == (None if fin_sent else StreamErrorCode.CANCELLED)
    assert stream_id in client.stopped
    assert_clean(client.session)


# -- EXPIRES -----------------------------------------------------------------------------

ACCEPTED = [M.PUBLISH, M.PUBLISH_NAMESPACE, M.SUBSCRIBE_NAMESPACE, M.SUBSCRIBE_TRACKS]


@pytest.mark.parametrize("opening", ACCEPTED, ids=lambda type_: type_.name)
def test_what_was_accepted_for_a_time_is_cancelled_after_it_unless_an_update_extends_it(opening):
    raw = Server(handler=Keeping())
    stream_id = raw.ask(OPENING[opening])
    (request,) = raw.requests
    ended, collector = [], Collector()
    request.when_ended(lambda: ended.append(1))
    request.accept(*([collector] if opening is M.PUBLISH else []), expires_ms=4000)
    raw.session.tick(3)
    raw.session.stream_data(stream_id, octets(RequestUpdate(2)), False)
    assert [m.parameters.expires for m in raw.answers(stream_id)] == [4000, 4000]
    raw.session.tick(6.5)
    assert ended == []
    raw.session.tick(7.5)
    assert ended == [1] and request.state is RequestState.CLOSED
    assert raw.transport.out[stream_id].reset == StreamErrorCode.CANCELLED
    assert isinstance(collector.failed, RequestError) is (opening is M.PUBLISH)
    assert_clean(raw.session)


@pytest.mark.parametrize("opening", ACCEPTED, ids=lambda type_: type_.name)
def test_a_request_that_ends_before_it_expires_leaves_no_deadline(opening):
    raw = Server(handler=Keeping())
    stream_id = raw.ask(OPENING[opening])
    raw.requests[0].accept(*([Collector()] if opening is M.PUBLISH else []), expires_ms=4000)
    raw.session.stream_reset(stream_id, StreamErrorCode.CANCELLED)
    assert_clean(raw.session)


# -- a peer that does not read, or does not go on ------------------------------------------


def test_a_peer_that_does_not_read_what_is_skipped_loses_the_request():
    publisher = Publisher()
    pair = Pair(server=publisher, stream_window=200)
    wanting = Wanting(pair.client, ())
    pair.run()
    (request,) = kept(publisher).wanted
    for n in range(100):
        request.skip(FullTrackName((b"namespace %d" % n,), b"t"))
    assert pair.server_transport.unsent < 300
    assert pair.server_transport.out[0].reset is None
    pair.server.tick(1)
    assert pair.server_transport.out[0].reset == StreamErrorCode.EXCESSIVE_LOAD
    assert not kept(publisher).wanted
    pair.run()
    assert len(wanting.ends) == 1
    assert_clean(pair.client)
    assert_clean(pair.server)


def test_updates_whose_answers_are_not_read_count_as_unanswered():
    limit = SessionConfig().max_request_updates
    raw = Server()
    raw.transport.peer.stream_window = 20
    stream_id = raw.ask(subscribe_message())
    raw.requests[0].accept(TrackStore(VIDEO))
    sent = 0
    while raw.transport.send_room(stream_id) > 0:
        raw.session.stream_data(stream_id, octets(RequestUpdate(2 + 2 * sent)), False)
        sent += 1
    for n in range(limit):
        assert raw.session.state is SessionState.ESTABLISHED, n
        raw.session.stream_data(stream_id, octets(RequestUpdate(2 + 2 * (sent + n))), False)
    raw.session.stream_data(stream_id, octets(RequestUpdate(2 + 2 * (sent + limit))), False)
    assert raw.closed_with() == SessionErrorCode.TOO_MANY_REQUEST_UPDATES


def test_a_peer_that_reads_its_answers_may_update_without_end():
    raw = Server()
    raw.transport.peer.stream_window = 20
    stream_id = raw.ask(subscribe_message())
    raw.requests[0].accept(TrackStore(VIDEO))
    for n in range(200):
        raw.session.stream_data(stream_id, octets(RequestUpdate(2 + 2 * n)), False)
        out = raw.transport.out[stream_id]
        out.consumed = out.written
    assert raw.session.state is SessionState.ESTABLISHED


@pytest.mark.parametrize("data", [b"\xf0", b"\x14", b"\x14\x07\x00", b"\x05"])
def test_a_data_stream_whose_header_does_not_come_is_stopped_after_a_while(data):
    client = Client()
    client.accept(client.subscribe())
    stream = client.send_uni(data)
    client.session.tick(4)
    assert stream not in client.stopped
    client.session.tick(6)
    assert stream in client.stopped and client.session.counters.streams_dropped == 1
    assert client.session.state is SessionState.ESTABLISHED and len(client.session.clock) == 0


def test_a_header_in_pieces_leaves_no_deadline():
    client = Client()
    collector = client.subscribe()
    client.accept(collector)
    data = subgroup(7, 0, b"abc")
    stream = client.send_uni(data[:2])
    client.session.stream_data(stream, data[2:], False)
    client.session.tick(100)
    assert stream not in client.stopped and collector.locations == [(0, 0)]
    padding = bytes.fromhex("f0132b3e28")
    other = client.send_uni(padding[:3])
    client.session.stream_data(other, padding[3:], False)
    client.session.tick(200)
    assert other not in client.stopped and len(client.session.clock) == 0


# -- subscriptions -----------------------------------------------------------------------


def test_two_subscriptions_to_one_track_get_each_object_once_each():
    publisher = Publisher()
    store = TrackStore(NAME)
    publisher.add_track(store)
    pair = Pair(server=publisher)
    whole, first = Collector(), Collector()
    pair.client.subscribe(NAME, whole, Parameters(location_filter=LocationFilter.groups(0, 9)))
    pair.client.subscribe(NAME, first, Parameters(location_filter=LocationFilter.groups(0, 0)))
    pair.run()
    for group in range(2):
        for object_id in range(2):
            store.append(group, object_id, b"x")
    pair.run()
    assert sorted(whole.locations) == [(g, o) for g in range(2) for o in range(2)]
    assert first.locations == [(0, 0), (0, 1)]


def test_a_subscription_that_ended_for_another_reason_than_the_track_may_be_made_again():
    handler = Manual()
    pair = Pair(server=handler)
    again = []
    for code in (PublishDoneCode.EXPIRED, PublishDoneCode.TOO_FAR_BEHIND):
        collector = Collector()
        pair.client.subscribe(NAME, collector)
        pair.run()
        handler.requests[-1].accept(TrackStore(NAME))
        handler.requests[-1].end(code)
        pair.run()
        again.append(collector.done)
    assert again == [PublishDoneCode.EXPIRED, PublishDoneCode.TOO_FAR_BEHIND]
    assert_clean(pair.client)


def test_an_offer_that_is_refused_ends_with_fin():
    client, stream_id = offered(Interested(accept=False))
    client.session.handler.offers[0].reject(RequestErrorCode.UNINTERESTED)
    assert client.transport.out[stream_id].fin
