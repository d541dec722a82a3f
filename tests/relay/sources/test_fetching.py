"""FETCH and fill through a relay (MOQT "Relay Fetch Handling")."""

from __future__ import annotations

import pytest

import relay.sources.missing
from moqt.session import SessionHandler
from moqt.values.codes import (
    EndOfRange,
    GroupOrder,
    PublishDoneCode,
    RequestErrorCode,
    StreamErrorCode,
)
from moqt.values.messages import FetchOk, LocationFilter, Parameters
from moqt.values.names import Location
from moqt.wire.objects import ObjectHeader, RangeMarker
from tests.relay.inside import accept_fetch, queued
from tests.relay.star import (
    JOIN,
    NAME,
    Collector,
    CountingPublisher,
    Star,
    end_track,
    everything,
    payload,
    publish,
    track,
)


class ScriptedPublisher(CountingPublisher):
    """Serves SUBSCRIBE from its stores; tests answer the FETCHes by hand."""

    def fetch_received(self, request):
        self.fetches.append(request)


class Answer:
    """The answer to one FETCH, piece by piece."""

    def __init__(self, request):
        self.request, self.session = request, request.session
        self.stream = self.session.transport.open_stream(bidirectional=False)
        self.encoder = self.session.codec.fetch_encoder(request.request_id, GroupOrder.ASCENDING)
        self.send(self.encoder.header())

    def send(self, data, fin=False):
        self.session.transport.send(self.stream, data, fin)

    def ok(self, group, object_, *, end_of_track=False):
        accept_fetch(self.request, FetchOk(end_of_track, Location(group, object_)))

    def object(self, group, object_, data=None, length=None):
        data = payload(group, object_) if data is None else data
        length = len(data) if length is None else length
        self.send(self.encoder.object(ObjectHeader(group, object_, 0, 128, b"", length)) + data)

    def marker(self, kind, group, object_):
        self.send(self.encoder.marker(RangeMarker(kind, Location(group, object_))))

    def fin(self):
        self.send(b"", fin=True)

    def reset(self, code=StreamErrorCode.INTERNAL_ERROR):
        self.session.transport.reset(self.stream, code)


def scripted(star, groups=3, **kwargs):
    return star.publisher(track(groups, **kwargs), handler=ScriptedPublisher())


@pytest.mark.parametrize("ended", [False, True])
def test_fetch_0_to_3_then_2_to_7_of_a_track_brings_all_8_groups(ended):
    """FETCH_OK must not end at what happens to be cached."""
    star = Star()
    publisher = star.publisher(track(8, ended=ended))
    pair = star.connect()
    one = star.fetch(pair, (0, 0), (3, 3))
    two = star.fetch(pair, (2, 0), (7, 3))
    assert one.payloads == {k: v for k, v in everything(8).items() if k.group <= 3}
    assert two.payloads == {k: v for k, v in everything(8).items() if k.group >= 2}
    assert one.accepted.end_location == Location(3, 3)
    assert two.accepted.end_location == Location(7, 3)
    # Only the difference is fetched.
    assert publisher.handler.fetch_ranges == [
        (Location(0, 0), Location(3, 3)),
        (Location(3, 4), Location(7, 3)),
    ]


def test_two_equal_fetches_cost_one_upstream_fetch():
    star = Star()
    publisher = star.publisher(track(8, size=20_000))
    collectors = []
    for _ in range(3):
        collector = Collector()
        star.connect().client.fetch(NAME, collector)
        collectors.append(collector)
    star.run()
    for collector in collectors:
        assert collector.payloads == everything(8, size=20_000)
        assert collector.streams == [(2, None)]
    assert len(publisher.handler.fetches) == 1
    again = star.fetch(star.connect())
    assert again.payloads == everything(8, size=20_000)
    assert len(publisher.handler.fetches) == 1


def test_a_fetch_streams_on_before_the_upstream_fetch_has_ended():
    """A gap at a group's end must not hold the stream until the upstream FIN."""
    star = Star()
    publisher = scripted(star)
    pair = star.connect()
    collector = star.fetch(pair, (0, 0), (2, 3))
    answer = Answer(publisher.handler.fetches[0])
    for g in range(2):
        for o in range(4):
            answer.object(g, o)
    star.run()
    assert collector.locations == [Location(g, o) for g in range(2) for o in range(4)]
    for o in range(4):
        answer.object(2, o)
    answer.ok(2, 3)
    star.run()
    assert collector.payloads == everything(3) and collector.streams == []
    answer.fin()
    star.run()
    assert collector.streams == [(2, None)]
    assert len(publisher.handler.fetches) == 1


def test_a_gap_forwarded_before_it_was_proven_resets_the_stream_when_upstream_fails():
    star = Star()
    publisher = scripted(star)
    collector = star.fetch(star.connect(), (0, 0), (2, 3))
    answer = Answer(publisher.handler.fetches[0])
    answer.ok(2, 3)
    answer.object(0, 0)
    answer.object(2, 3)  # everything between is claimed not to exist, if FIN follows
    star.run()
    assert collector.locations == [Location(0, 0), Location(2, 3)]
    answer.reset()
    star.run()
    # What the answer had left out is asked for by itself; only then the relay gives up.
    assert publisher.handler.fetch_ranges[1:] == [(Location(0, 1), Location(2, 2))]
    publisher.handler.fetches[1].reject(RequestErrorCode.INTERNAL_ERROR, "no")
    star.run()
    assert collector.fetch_resets == [StreamErrorCode.UNKNOWN_OBJECT_STATUS]
    assert Location(0, 1) not in star.relay.tracks[NAME].store.known


def test_an_upstream_error_after_a_partial_answer_marks_the_rest_as_unknown():
    """The relay holds groups 0 to 2 of 5, the publisher refuses the rest."""
    star = Star()
    publisher = scripted(star, 5)
    pair = star.connect()
    collector = star.fetch(pair, (0, 0), (2, 3))
    answer = Answer(publisher.handler.fetches[0])
    for g in range(3):
        for o in range(4):
            answer.object(g, o)
    answer.ok(2, 3)
    answer.fin()
    star.run()
    assert collector.payloads == everything(3)
    collector = star.fetch(pair, (0, 0), (4, 3))
    assert collector.payloads == everything(3) and not collector.streams
    publisher.handler.fetches[1].reject(RequestErrorCode.INTERNAL_ERROR, "disk on fire")
    star.run()
    assert collector.unknown == [Location(4, 3)] and not collector.fetch_resets
    # The same range is not asked for again at once, but later it is.
    assert star.fetch(pair, (3, 0), (4, 3)).unknown
    assert len(publisher.handler.fetches) == 2
    star.pass_time(2)
    star.fetch(pair, (3, 0), (4, 3))
    assert len(publisher.handler.fetches) == 3


def test_a_fetch_that_fails_at_one_publisher_goes_on_at_the_next_from_where_it_stopped():
    star = Star()
    first = scripted(star)
    second = star.publisher(track(3))
    collector = star.fetch(star.connect(), (0, 0), (2, 3))
    answer = Answer(first.handler.fetches[0])
    for o in range(4):
        answer.object(0, o)
    answer.object(1, 0, payload(1, 0)[:50], length=100)
    star.run()
    answer.reset()
    star.run()
    # The Object that was cut had begun downstream: that stream cannot go on.
    assert collector.fetch_resets
    assert second.handler.fetch_ranges == [(Location(1, 0), Location(2, 3))]
    assert star.fetch(star.connect(), (1, 0), (2, 3)).locations == [
        at for at in sorted(everything(3)) if at >= (1, 0)
    ]


def test_unmarked_gaps_of_a_finished_fetch_do_not_exist_and_are_not_asked_for_again():
    star = Star()
    store = track()
    for g, o in ((0, 0), (0, 7), (5, 2)):
        store.append(g, o, b"x")
    publisher = star.publisher(store)
    for _ in range(2):
        collector = star.fetch(star.connect(), (0, 0), (5, 2))
        assert collector.locations == [Location(0, 0), Location(0, 7), Location(5, 2)]
    assert len(publisher.handler.fetches) == 1


@pytest.mark.parametrize("kind", [EndOfRange.UNKNOWN, EndOfRange.TIMED_OUT])
def test_a_range_marked_unknown_stays_unknown(kind):
    star = Star()
    publisher = scripted(star)
    collector = star.fetch(star.connect(), (0, 0), (2, 3))
    answer = Answer(publisher.handler.fetches[0])
    answer.ok(2, 3)
    answer.object(0, 0)
    answer.marker(kind, 1, 3)
    answer.object(2, 0)
    answer.fin()
    star.run()
    assert collector.locations == [Location(0, 0), Location(2, 0)]
    assert collector.unknown == [Location(1, 3)] and not collector.fetch_resets
    known = star.relay.tracks[NAME].store.known
    assert Location(0, 1) not in known and Location(1, 3) not in known
    assert Location(2, 0) in known and Location(2, 1) in known and Location(1, 4) in known


def test_a_range_marked_non_existent_is_known_at_once():
    star = Star()
    publisher = scripted(star)
    collector = star.fetch(star.connect(), (0, 0), (2, 3))
    answer = Answer(publisher.handler.fetches[0])
    answer.object(0, 0)
    answer.marker(EndOfRange.NON_EXISTENT, 1, 3)
    answer.object(2, 0)
    star.run()
    assert Location(1, 0) in star.relay.tracks[NAME].store.known
    answer.ok(2, 3)
    answer.fin()
    star.run()
    assert collector.locations == [Location(0, 0), Location(2, 0)]
    assert collector.streams == [(2, None)]


def test_a_fetch_answer_that_ends_early_says_nothing_beyond_its_end_location():
    star = Star()
    publisher = scripted(star)
    collector = star.fetch(star.connect(), (0, 0), (2, 3))
    answer = Answer(publisher.handler.fetches[0])
    answer.object(0, 0)
    answer.ok(1, 1)
    answer.fin()
    star.run()
    known = star.relay.tracks[NAME].store.known
    assert Location(1, 1) in known and Location(1, 2) not in known
    assert collector.unknown == [Location(2, 3)]


def test_a_publisher_that_does_not_answer_a_fetch_is_given_up():
    star = Star()
    scripted(star)
    collector = star.fetch(star.connect(), (0, 0), (2, 3))
    star.pass_time(4.5)
    assert not collector.streams
    star.pass_time(2)
    assert collector.unknown
    assert star.relay.counters.upstream_timeouts == 1


def test_objects_got_by_fetch_do_not_move_the_largest_object():
    star = Star()
    star.publisher(track(4))
    pair = star.connect()
    star.fetch(pair)
    assert star.relay.tracks[NAME].store.largest == Location(3, 3)
    assert star.fetch(pair, (0, 0), (9, 9)).accepted.end_location == Location(3, 3)


def test_a_fetch_of_nothing_published_is_an_invalid_range():
    star = Star()
    star.publisher(track())
    assert star.fetch(star.connect()).failed.code == RequestErrorCode.INVALID_RANGE


@pytest.mark.parametrize("order", list(GroupOrder))
def test_fetches_and_fills_come_in_the_order_asked_for(order):
    star = Star()
    star.publisher(track(5))
    collector = star.fetch(star.connect(), (1, 2), (3, 1), group_order=order)
    groups = [1, 2, 3] if order is GroupOrder.ASCENDING else [3, 2, 1]
    wanted = [Location(g, o) for g in groups for o in range(4)]
    assert collector.locations == [at for at in wanted if (1, 2) <= at <= (3, 1)]
    assert collector.streams == [(2, None)]


def test_a_fill_from_a_relay_that_joined_in_mid_track_is_fetched_upstream():
    star, store = Star(), track(2)
    publisher = star.publisher(store)
    star.subscriber(JOIN)
    publish(store, 2, 0)
    star.run()
    _, late = star.subscriber(JOIN)
    assert late.payloads == {**everything(2), Location(2, 0): payload(2, 0)}
    # Up to the Largest Object of then; the rest came through the subscription.
    assert publisher.handler.fetch_ranges == [(Location(0, 0), Location(1, 3))]


def test_when_no_request_stream_is_free_the_fetch_waits_for_one():
    star = Star()
    publisher = star.publisher(track(3))
    pair = star.connect()
    star.subscribe(pair)
    transport = publisher.server_transport
    opened, transport.open_stream = transport.open_stream, lambda *, bidirectional: None
    collector = star.fetch(pair, (0, 0), (2, 9))
    other = star.fetch(pair, (0, 0), (1, 9))
    store = publisher.handler.tracks[NAME]
    publish(store, 3, 0)
    star.run()
    more = star.fetch(pair, (0, 0), (9, 9))
    star.pass_time(1)
    transport.open_stream = opened
    star.pass_time(1)
    for each in (collector, other, more):
        assert each.failed is None and not each.fetch_resets


def test_a_subscribe_waits_for_a_request_stream_too():
    star = Star()
    publisher = star.publisher(track(1))
    transport = publisher.server_transport
    opened, transport.open_stream = transport.open_stream, lambda *, bidirectional: None
    _, collector = star.subscriber(JOIN)
    star.pass_time(1)
    assert collector.accepted is None and collector.failed is None
    transport.open_stream = opened
    star.pass_time(1)
    assert collector.payloads == everything(1)


def test_at_most_so_many_upstream_fetches_run_at_once():
    star = Star(max_fetches_per_track=2)
    publisher = scripted(star, 20)
    pair = star.connect()
    collectors = [star.fetch(pair, (g, 0), (g, 3)) for g in range(6)]
    assert len(publisher.handler.fetches) == 2
    for index in range(6):
        answer = Answer(publisher.handler.fetches[index])
        for o in range(4):
            answer.object(index, o)
        answer.ok(index, 3)
        answer.fin()
        star.run()
    assert all(len(c.locations) == 4 for c in collectors)


def test_a_cancelled_fetch_stops_the_upstream_fetch():
    star = Star()
    publisher = scripted(star)
    collector = star.fetch(star.connect(), (0, 0), (2, 3))
    ended = []
    publisher.handler.fetches[0].when_ended(lambda: ended.append(1))
    collector.request.cancel()
    star.run()
    star.pass_time(1)
    assert ended == [1]
    assert not star.relay.tracks[NAME].ranges.fetches


def test_end_of_track_is_learnt_from_fetch_ok():
    star = Star()
    publisher = scripted(star)
    collector = star.fetch(star.connect(), (0, 0), (2, 3))
    answer = Answer(publisher.handler.fetches[0])
    for at in sorted(everything(3)):
        answer.object(*at)
    answer.ok(2, 3, end_of_track=True)
    answer.fin()
    star.run()
    store = star.relay.tracks[NAME].store
    assert collector.payloads == everything(3)
    assert store.end_of_track == Location(2, 4) and store.is_complete()


def test_a_fetch_of_a_track_that_ended_before_the_relay_knew_it():
    star = Star()
    publisher = star.publisher(track(4, ended=True))
    _, collector = star.subscriber(JOIN)
    assert collector.payloads == everything(4)
    assert collector.done == PublishDoneCode.TRACK_ENDED
    _, collector = star.subscriber(JOIN)
    assert collector.payloads == everything(4)
    assert collector.done == PublishDoneCode.TRACK_ENDED
    assert len(publisher.handler.subscribes) == len(publisher.handler.fetches) == 1


def test_a_fetch_and_a_live_subscription_share_what_is_growing():
    star, store = Star(), track(1)
    publisher = star.publisher(store)
    star.subscriber(JOIN)
    growing = store.begin(Location(1, 0), subgroup=0, priority=None, properties=b"", length=1000)
    store.grow(growing, b"a" * 500)
    star.run()
    collector = star.fetch(star.connect(), (0, 0), (1, 0))
    assert collector.parts == 900
    store.grow(growing, b"a" * 500)
    store.complete(growing)
    star.run()
    assert collector.locations[-1] == Location(1, 0) and collector.streams == [(2, None)]
    assert publisher.handler.fetch_ranges == [(Location(0, 0), Location(0, 3))]


def test_fetch_refused_by_a_publisher_that_publishes_nothing():
    star = Star()
    star.publisher(handler=CountingPublisher())
    assert star.fetch(star.connect()).failed.code == RequestErrorCode.DOES_NOT_EXIST
    star2 = Star()
    pair = star2.connect(SessionHandler())
    pair.client.publish_namespace(NAME.namespace, on_ended=lambda error: None)
    star2.run()
    assert star2.fetch(star2.connect()).failed.code == RequestErrorCode.NOT_SUPPORTED


def test_end_of_the_track_is_told_downstream():
    star, store = Star(), track(2)
    star.publisher(store)
    star.subscriber(JOIN)
    end_track(store, 2)
    star.run()
    collector = star.fetch(star.connect())
    assert collector.accepted.end_of_track and collector.accepted.end_location == Location(1, 3)


def test_who_waits_for_its_own_range_does_not_look_at_all_others(monkeypatch):
    adds, wants = [], []

    class Counting(relay.sources.missing.IntervalSet):
        def add(self, start, end):
            adds.append(start)
            super().add(start, end)

    monkeypatch.setattr(relay.sources.missing, "IntervalSet", Counting)
    want = relay.sources.missing.Ranges.want
    monkeypatch.setattr(
        relay.sources.missing.Ranges, "want", lambda *a: wants.append(a) or want(*a)
    )
    star = Star()
    star.publisher(track(400, 1))
    pair = star.connect()
    collectors = [Collector() for _ in range(100)]
    for number, collector in enumerate(collectors):
        chosen = LocationFilter.range(Location(4 * number, 0), Location(4 * number + 2, 0))
        pair.client.fetch(NAME, collector, Parameters(location_filter=chosen))
    star.run()
    assert all(len(collector.payloads) == 3 for collector in collectors)
    # A few FETCHes run at once; 100 readers ask, and each range is queued once.
    assert len(adds) < 8 * len(wants)
    (only,) = star.relay.tracks.values()
    assert only.ranges.idle and not queued(only.ranges)


def test_what_a_fetch_brings_puts_no_live_subscriber_too_far_behind():
    star = Star(pending_subgroups=4)
    star.publisher(track(50))
    _, live = star.subscriber(Parameters())
    reader = star.fetch(star.connect(), (0, 0), (49, 3))
    assert reader.payloads == everything(50)
    assert star.relay.numbers().deliveries.too_far_behind == 0
    assert live.done is None and not live.normal


def test_a_range_that_is_full_of_holes_is_fetched_a_few_at_a_time_and_all_of_it_comes():
    star = Star(linger=100)
    star.publisher(track(1, objects=400, ended=True))
    pair = star.connect()
    for n in range(0, 400, 2):
        star.fetch(pair, (0, n), (0, n))
    track_, wanted = star.relay.tracks[NAME], (Location(0, 0), Location(0, 399))
    assert track_.ranges.want(*wanted)
    assert len(track_.ranges.queue) <= relay.sources.missing.MAX_WANTED
    while track_.store.first_unknown(*wanted) is not None:
        star.run()
        assert track_.ranges.want(*wanted)
    assert star.fetch(pair, (0, 0), (0, 399)).payloads == everything(1, objects=400)


def test_readers_of_more_than_may_wait_to_be_fetched_all_get_theirs(monkeypatch):
    monkeypatch.setattr(relay.sources.missing, "MAX_QUEUED", 5)
    star = Star(max_fetches_per_track=1)
    star.publisher(track(1, objects=40, ended=True))
    pair, collectors = star.connect(), []
    for n in range(40):
        collectors.append(Collector())
        chosen = Parameters(location_filter=LocationFilter.range(Location(0, n), Location(0, n)))
        pair.client.fetch(NAME, collectors[-1], chosen)
    waiting = []
    while star.step():
        waiting += [len(each.ranges.queue) for each in star.relay.tracks.values()]
    assert max(waiting) == 5
    for n, collector in enumerate(collectors):
        assert collector.payloads == {Location(0, n): payload(0, n)}
