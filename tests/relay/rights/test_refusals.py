"""A request that cannot be honoured is answered, with the code of the limit that was reached."""

from __future__ import annotations

import pytest

from moqt.values.codes import PublishDoneCode, RequestErrorCode, SessionErrorCode
from moqt.values.messages import Parameters, Subscribe
from moqt.values.names import FullTrackName
from moqt.wire.codec import codec_for
from tests.moqt.memory import ALPN
from tests.relay.star import JOIN, LIVE, NAME, NAMESPACE, SilentPublisher, Star, publish, track


class Answers(SilentPublisher):
    """A publisher that takes every kind of request and answers none."""

    track_status_received = SilentPublisher.subscribe_received


def status(star, pair):
    """What TRACK_STATUS was answered with, in a list that is empty until it is."""
    answers = []
    pair.client.track_status(NAME).on_answer = answers.append
    star.run()
    return answers


def test_every_request_whose_publisher_never_answers_is_answered_within_the_upstream_timeout():
    star = Star(upstream_timeout=5.0)
    star.publisher(handler=Answers())
    pair = star.connect()
    subscribed, fetched = star.subscribe(pair, LIVE), star.fetch(pair)
    answers = status(star, pair)
    assert subscribed.failed is None and fetched.failed is None and not answers
    star.pass_time(6)
    refused = [subscribed.failed, fetched.failed, *answers]
    assert [error.code for error in refused] == [RequestErrorCode.TIMEOUT] * 3
    assert not star.relay.waiting.pending


@pytest.mark.parametrize("kind", [0x06, 0x07, 0x7F])
def test_a_filter_of_an_unknown_type_ends_that_session_and_no_other(kind):
    star = Star()
    star.publisher(track(1, ended=False))
    other, collector = star.subscriber(JOIN)
    pair = star.connect()
    message = Subscribe(0, NAMESPACE, NAME.name, LIVE)
    octets = bytearray(codec_for(ALPN).encode_message(message))
    assert octets[-2:] == b"\x21\x05"
    octets[-1] = kind
    transport = pair.client_transport
    transport.send(transport.open_stream(bidirectional=True), bytes(octets))
    star.run()
    assert pair.client.closed.code == SessionErrorCode.PROTOCOL_VIOLATION
    assert "LOCATION_FILTER" in pair.client.closed.reason
    assert other.client.closed is None and collector.failed is None


def test_a_full_relay_answers_excessive_load_and_says_when_to_come_back():
    star = Star(max_pending=1, retry_after_ms=250)
    star.publisher(handler=SilentPublisher())
    pair = star.connect()
    star.subscribe(pair, LIVE)
    refused = star.subscribe(pair, LIVE, FullTrackName(NAMESPACE, b"other")).failed
    assert refused.code == RequestErrorCode.EXCESSIVE_LOAD == 0x9
    assert refused.retry_after_ms == 250


def test_a_subscriber_of_a_relay_that_is_too_far_behind_is_told_so():
    star, store = Star(), track(20, ended=False)
    star.publisher(store)
    star.subscriber(JOIN)  # now the relay holds the track
    pair = star.connect()
    pair.server.scheduler.limits.pending_subgroups = 8
    filled = star.subscribe(pair, JOIN)
    assert filled.done is None, "a fill is one stream, however long the track"
    pair.server_transport.open_stream = lambda *, bidirectional: None
    late = star.subscribe(pair, Parameters())
    for group in range(20, 40):
        publish(store, group, 0)
    star.run()
    assert late.done == PublishDoneCode.TOO_FAR_BEHIND == 0x5


def test_a_relay_that_leaves_refuses_new_requests_with_going_away_and_keeps_the_old_ones():
    star = Star()
    star.publisher(track(1, ended=False))
    pair, kept = star.subscriber(JOIN)
    pair.server.send_goaway()
    star.run()
    refused = star.subscribe(pair, LIVE, FullTrackName(NAMESPACE, b"other")).failed
    assert refused.code == RequestErrorCode.GOING_AWAY == 0x6
    assert kept.failed is None and kept.done is None
