"""What a session may have open: granted as it is needed, refused in words, and no wait for ever."""

from __future__ import annotations

import gc
import logging
import tracemalloc

import pytest

from moqt.publisher import Publisher
from moqt.session import SessionConfig, SessionHandler
from moqt.session.prefixes import Prefixes
from moqt.track.store import TrackStore
from moqt.values.codes import RequestErrorCode, SessionErrorCode
from moqt.values.errors import RequestError
from moqt.values.messages import KeyValue, Parameters, PublishNamespace, RequestErrorMessage
from moqt.values.names import FullTrackName, is_prefix
from moqt.wire.codec import codec_for
from tests.moqt.loose import Lone
from tests.moqt.memory import ALPN, Pair, assert_clean
from tests.moqt.peers import NAME, Collector
from tests.moqt.raw import Server
from tests.moqt.simulator import Simulation
from tests.moqt.tokens import value


class Accepts(SessionHandler):
    def publish_namespace_received(self, request):
        request.accept()


def test_a_session_opens_thousands_of_requests_by_a_first_grant_of_128_and_all_of_them_end():
    simulation = Simulation()
    publisher = Publisher()
    stores = [TrackStore(FullTrackName((b"n", b"%d" % n), b"t")) for n in range(600)]
    for store in stores:
        publisher.add_track(store)
    server = simulation.serve("server", publisher)
    client = simulation.connect("client", server)
    session, answers = client.session, []
    got = [Collector() for _ in stores]
    requests = [session.subscribe(s.name, c) for s, c in zip(stores, got, strict=True)]
    for request in requests:
        request.on_answer = answers.append
    assert simulation.run(lambda: len(answers) == len(stores))
    assert answers == [None] * len(stores)
    for store in stores:
        store.append(0, 0, [b"x"])
    assert simulation.run(lambda: all(each.locations == [(0, 0)] for each in got))
    for request in requests:
        request.cancel()
    simulation.advance(2)
    assert_clean(session)
    assert not server.session.requests.incoming


def test_an_idle_request_costs_a_few_thousand_octets_at_both_ends_together():
    simulation = Simulation()
    server = simulation.serve("server", Accepts())
    client = simulation.connect("client", server)

    def announce(numbers):
        for number in numbers:
            client.session.publish_namespace((b"%d" % number,), on_ended=lambda error: None)
        simulation.advance(5)
        assert len(server.session.requests.incoming) == numbers.stop
        simulation.trace.clear()
        gc.collect()

    announce(range(50))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        announce(range(50, 550))
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used / 500 < 8000


def test_as_many_streams_are_open_as_max_open_streams_says_and_more_follow_as_some_end(caplog):
    simulation = Simulation()
    server = simulation.serve("server", Accepts(), max_streams_bidi=4, max_open_streams_bidi=10)
    client = simulation.connect("client", server, config=SessionConfig(stream_timeout=None))
    with caplog.at_level(logging.WARNING):
        requests = [
            client.session.publish_namespace((b"%d" % n,), on_ended=lambda error: None)
            for n in range(15)
        ]
        simulation.advance(1)
    assert len(server.session.requests.incoming) == 10 and client.session.requests_waiting == 5
    (said,) = [r.getMessage() for r in caplog.records if "max_open_streams_bidi" in r.getMessage()]
    assert "10 bidirectional streams" in said
    for request in requests[:3]:
        request.cancel()
    simulation.advance(1)
    assert len(server.session.requests.incoming) == 10 and client.session.requests_waiting == 2


def test_a_request_waits_for_a_stream_no_longer_than_stream_timeout():
    pair = Pair(server=Accepts(), client_config=SessionConfig(stream_timeout=3.0))
    pair.client_transport.open_stream = lambda **_: None
    told = []
    request = pair.client.publish_namespace((b"n",), on_ended=told.append)
    answers = []
    request.on_answer = answers.append
    pair.client.tick(2.9)
    assert not answers and pair.client.requests_waiting == 1
    pair.client.tick(3.1)
    (error,) = answers
    assert isinstance(error, RequestError) and error.code == RequestErrorCode.EXCESSIVE_LOAD
    assert "grants no more request streams" in error.reason and told == [error]
    assert pair.client.counters.requests_streamless == 1
    assert_clean(pair.client)


def test_a_request_beyond_the_queue_fails_at_once_and_the_log_says_so_once(caplog):
    pair = Pair(client_config=SessionConfig(max_queued_requests=1))
    pair.client_transport.open_stream = lambda **_: None
    pair.client.subscribe(NAME, Collector())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(RequestError, match="1 requests wait already"):
                pair.client.subscribe(NAME, Collector())
    assert [r.getMessage() for r in caplog.records] == [
        "[0011]: a session is at its limit of 1 (max_queued_requests): what goes beyond is refused"
    ]


def test_a_peer_beyond_max_requests_is_told_the_limit_and_the_log_says_so_once(caplog):
    pair = Pair(server=Accepts(), server_config=SessionConfig(max_requests=2))
    ended = []
    with caplog.at_level(logging.WARNING):
        for n in range(5):
            pair.client.publish_namespace((b"%d" % n,), on_ended=ended.append)
        pair.run()
    assert [error.code for error in ended] == [RequestErrorCode.EXCESSIVE_LOAD] * 3
    assert "2 requests and fills" in ended[0].reason
    assert len(caplog.records) == 1 and "max_requests" in caplog.records[0].getMessage()


def test_a_message_carries_no_more_tokens_than_max_tokens():
    config = SessionConfig(max_tokens=2)
    tokens = tuple(value(b"%d" % n) for n in range(3))
    pair = Pair(server=Accepts(), server_config=config)
    ended = []
    pair.client.publish_namespace(
        (b"n",), Parameters(authorization_tokens=tokens), on_ended=ended.append
    )
    pair.run()
    assert ended[0].code == RequestErrorCode.EXCESSIVE_LOAD and "at most 2" in ended[0].reason
    assert pair.server.closed is None


def test_a_session_whose_setup_carries_many_tokens_is_closed_before_one_of_them_is_looked_at():
    class Judges(Accepts):
        asked = 0

        def check_token(self, session, token):
            self.asked += 1

    encode = codec_for(ALPN).encode_token
    config = SessionConfig(setup_tokens=tuple(encode(value(b"%04x" % n)) for n in range(5000)))
    handler = Judges()
    pair = Pair(server=handler, client_config=config)
    assert pair.server.closed.code == SessionErrorCode.UNAUTHORIZED
    assert "at most 16" in pair.server.closed.reason
    assert handler.asked == 0 and pair.server.peer_tokens == ()


def namespace(n, size):
    return (b"%04d" % n, b"x" * size)


def test_the_octets_of_requests_that_are_open_are_billed_and_those_beyond_are_refused(caplog):
    config = SessionConfig(max_request_octets=5000)
    pair = Pair(server=Accepts(), server_config=config)
    ended = []
    requests = [
        pair.client.publish_namespace(namespace(n, 1000), on_ended=ended.append) for n in range(4)
    ]
    pair.run()
    assert not ended and 4000 < pair.server.remembered().request_octets < 4400
    with caplog.at_level(logging.WARNING):
        for n in range(4, 8):
            pair.client.publish_namespace(namespace(n, 1000), on_ended=ended.append)
        pair.run()
    assert [error.code for error in ended] == [RequestErrorCode.EXCESSIVE_LOAD] * 4
    assert "5000 may be" in ended[0].reason and pair.server.counters.requests_over_limit == 4
    assert len(caplog.records) == 1 and "max_request_octets" in caplog.records[0].getMessage()
    requests[0].cancel()
    pair.client.publish_namespace(namespace(9, 1000), on_ended=ended.append)
    pair.run()
    assert len(ended) == 4
    pair.client.close()
    pair.run()
    assert pair.server.remembered().request_octets == 0


class Waits(SessionHandler):
    """Answers no PUBLISH."""

    def publish_received(self, request):
        pass


def test_track_properties_of_open_requests_are_billed_at_what_they_cost_here():
    """Two octets on the wire make a value of a hundred."""
    properties = tuple(KeyValue(0x10000 + 2 * n, 1000 + n) for n in range(1000))
    pair = Pair(server=Waits(), server_config=SessionConfig(max_request_octets=1 << 20))
    ended = []

    def publish(number):
        store = TrackStore(FullTrackName((b"demo",), b"%d" % number), properties)
        pair.client.publish(store, Parameters(forward=0), on_ended=ended.append)
        pair.run()

    publish(0)
    tracemalloc.start()
    before, billed = tracemalloc.get_traced_memory()[0], pair.server.remembered().request_octets
    for number in range(1, 6):
        publish(number)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert not ended and grown <= pair.server.remembered().request_octets - billed
    for number in range(6, 10):
        publish(number)
    assert [error.code for error in ended] == [RequestErrorCode.EXCESSIVE_LOAD] * 2


@pytest.mark.parametrize("size", [1, 100])
def test_messages_without_an_end_are_billed_and_end_the_session_when_they_are_too_many(size):
    config = SessionConfig(max_request_octets=3000, max_held_octets=1000)
    lone = Lone(False, asks=False, config=config)
    given = 0
    beginning = bytes.fromhex("0344e8") + bytes(900)  # of a message of 1,256 octets
    for stream_id in range(0, 400, 4):
        for at in range(0, len(beginning), size):
            if lone.session.closed is None:
                lone.transport.give("data", stream_id, beginning[at : at + size])
                given += len(beginning[at : at + size])
                assert lone.session.remembered().request_octets in (given, 0)
    assert lone.session.closed.code == SessionErrorCode.INTERNAL_ERROR
    assert "max_request_octets" in lone.session.closed.reason and 4000 < given <= 4000 + size


def test_more_requests_in_a_second_than_may_come_are_refused_until_time_has_passed(caplog):
    config = SessionConfig(max_requests=10, max_request_rate=20)
    server = Server(handler=Accepts(), config=config)
    asked = 0

    def ask(count):
        """Requests that begin and end, one after the other; how many of them are refused."""
        nonlocal asked
        refused = []
        for _ in range(count):
            stream = server.ask(PublishNamespace(2 * asked, (b"%d" % asked,)))
            (answer,) = server.answers(stream)
            if isinstance(answer, RequestErrorMessage):
                refused.append(answer)
            server.session.stream_reset(stream, 0)
            asked += 1
        assert all(each.code == RequestErrorCode.EXCESSIVE_LOAD for each in refused)
        assert all("(max_request_rate)" in each.reason for each in refused)
        assert all(each.retry_interval for each in refused)
        return len(refused)

    server.session.tick(100.0)
    assert ask(30) == 0 and ask(5) == 5
    server.session.tick(100.5)
    assert ask(15) == 5, "ten in half a second"
    server.session.tick(200.0)
    assert ask(40) == 10, "what was not asked for in all that time does not add up"
    assert server.session.counters.requests_over_limit == 20
    assert ["(max_request_rate)" in r.getMessage() for r in caplog.records] == [True]


def test_a_claim_on_a_prefix_is_refused_exactly_when_it_overlaps_another():
    names = [(), (b"a",), (b"b",), (b"a", b"b"), (b"a", b"c"), (b"a", b"b", b"c"), (b"b", b"a")]
    for first in names:
        for second in names:
            prefixes = Prefixes()
            assert prefixes.claim(1, first)
            overlap = is_prefix(first, second) or is_prefix(second, first)
            assert prefixes.claim(2, second) is not overlap
            # What claims may claim something else, unless that is another's.
            assert prefixes.claim(1, (*second, b"x")) is (len(prefixes) == 1)
            prefixes.release(1)
            prefixes.release(2)
            assert prefixes.claim(3, first) and len(prefixes) == 1
