"""REQUEST_UPDATEs of a subscription at any time of its track's life, and what they may cost."""

from __future__ import annotations

import random

import pytest

from moqt.publisher import Publisher
from moqt.session import WRITE_QUANTUM, SessionConfig
from moqt.track.store import TrackStore
from moqt.values.codes import ObjectStatus, ParameterType, PublishDoneCode, RequestErrorCode
from moqt.values.errors import MisuseError, RequestError
from moqt.values.messages import LocationFilter, Parameters, PublishDone, RangeFilter, RequestOk
from moqt.values.names import Location
from tests.moqt.inside import listeners
from tests.moqt.memory import Pair, assert_clean
from tests.moqt.peers import NAME, Collector, publish, track

FROM_START = LocationFilter.absolute_start(0)
FILL = Parameters(location_filter=FROM_START)


class Story:
    """A publisher's track, and a subscription to it."""

    def __init__(self, parameters=Parameters(), **config):  # noqa: B008
        self.store = TrackStore(NAME)
        handler = Publisher()
        handler.add_track(self.store)
        self.pair = Pair(server=handler, server_config=SessionConfig(**config))
        self.collector = Collector()
        self.request = self.pair.client.subscribe(NAME, self.collector, parameters)
        self.pair.run()
        self.log = []
        """What the subscriber heard, in order."""

    def grant_streams(self, granted):
        self.pair.server_transport.max_streams = 128 if granted else 0

    def update(self, **changes):
        self.request.update(Parameters(**changes), self.log.append)

    def end(self):
        self.store.finish(PublishDoneCode.TRACK_ENDED)
        self.pair.run()


def test_forward_0_while_the_last_subgroup_is_blocked_leaves_publish_done_to_be_sent():
    for resumed in (False, True):
        story = Story()
        story.grant_streams(False)
        publish(story.store, 1)
        story.pair.run()
        story.update(forward=0)
        if resumed:
            story.update(forward=1)
        story.pair.run()
        story.grant_streams(True)
        story.pair.run()
        assert story.collector.done == PublishDoneCode.TRACK_ENDED
        assert isinstance(story.log[0], RequestOk)
        assert_clean(story.pair.client)
        assert_clean(story.pair.server)


def test_a_narrower_filter_on_an_ended_track_is_answered_before_publish_done_and_fills_before_it():
    story = Story()
    story.grant_streams(False)
    publish(story.store, 2)
    story.pair.run()
    story.update(location_filter=LocationFilter.absolute_start(9), fill_parameters=FILL)
    story.pair.run()
    (answer,) = story.log
    assert isinstance(answer, RequestOk) and story.collector.done is None
    story.grant_streams(True)
    story.pair.run()
    assert story.collector.done == PublishDoneCode.TRACK_ENDED
    assert story.collector.locations == [(g, o) for g in range(2) for o in range(4)]
    assert_clean(story.pair.client)


@pytest.mark.parametrize("seed", range(60))
def test_every_update_has_one_answer_and_publish_done_comes_once_after_all_of_them(seed):
    dice = random.Random(seed)
    story = Story(Parameters(location_filter=FROM_START))
    store, asked, group, open_groups = story.store, 0, 0, []

    def updated():
        nonlocal asked
        changes = dice.choice(
            (
                {"forward": 0},
                {"forward": 1},
                {"subscriber_priority": dice.randrange(256)},
                {"location_filter": LocationFilter.absolute_start(dice.randrange(4))},
                {"location_filter": LocationFilter.next_object(), "fill_parameters": FILL},
                {"fill_parameters": FILL},
                {"object_delivery_timeout": 1000},
            )
        )
        try:
            story.update(**changes)
            asked += 1
        except MisuseError:
            assert story.request.done is not None

    def stored():
        nonlocal group
        if store.ended:
            return
        if open_groups and dice.random() < 0.5:
            store.finish_subgroup(open_groups.pop(), 0)
            return
        for object_id in range(dice.randrange(1, 4)):
            store.append(group, object_id, [b"octets"])
        open_groups.append(group)
        group += 1

    def ended():
        if not store.ended and dice.random() < 0.2:
            store.finish(PublishDoneCode.TRACK_ENDED)

    steps = (
        updated,
        updated,
        stored,
        stored,
        ended,
        story.pair.run,
        lambda: story.grant_streams(dice.random() < 0.5),
    )
    for _ in range(40):
        dice.choice(steps)()
    if not store.ended:
        for left in open_groups:
            store.finish_subgroup(left, 0)
        store.finish(PublishDoneCode.TRACK_ENDED)
    story.grant_streams(True)
    story.pair.run()
    assert len(story.log) == asked
    assert story.request.done is not None and not story.pair.server.requests.incoming
    # A stream that was reset before its header left is counted, and never seen.
    cut = story.pair.server_transport.cut
    assert story.request.done.stream_count - cut <= story.request.streams_ended
    assert story.request.streams_ended <= story.request.done.stream_count
    story.pair.client.tick(100.0)
    assert story.collector.done == PublishDoneCode.TRACK_ENDED and story.collector.failed is None
    refused = [each for each in story.log if isinstance(each, RequestError)]
    assert all("before its answer" in each.reason for each in refused)
    assert_clean(story.pair.client)
    assert_clean(story.pair.server)


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_raised_priority_reaches_deliveries_that_wait_for_a_stream(at_once):
    handler, names = Publisher(), []
    stores = []
    for number in range(3):
        stores.append(TrackStore(type(NAME)(NAME.namespace, b"%d" % number)))
        handler.add_track(stores[-1])
    pair = Pair(server=handler)
    requests, order = [], []

    class Notes(Collector):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def stream_opened(self, stream):
            order.append(self.number)

    for number, store in enumerate(stores):
        names.append(store.name)
        collector = Notes(number)
        priority = Parameters(subscriber_priority=10 + number)
        requests.append(pair.client.subscribe(store.name, collector, priority))
    pair.run()
    pair.server_transport.max_streams = 0
    for store in stores:
        store.append(0, 0, [b"x"])
    pair.run()
    requests[2].update(Parameters(subscriber_priority=11), lambda answer: None)
    requests[1].update(Parameters(subscriber_priority=99), lambda answer: None)
    pair.run()
    for granted in range(at_once, 4, at_once):
        pair.server_transport.max_streams = pair.server_transport.open_uni + at_once
        pair.run()
        assert len(order) == granted
    assert order == [0, 2, 1]


def test_a_raised_priority_of_a_fetch_applies_to_what_it_has_not_sent():
    store, order = track(10, size=WRITE_QUANTUM), []

    class Notes(Collector):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def object_received(self, received):
            super().object_received(received)
            order.append(self.number)

    handler = Publisher()
    handler.add_track(store)
    pair = Pair(server=handler, server_config=SessionConfig(send_budget=1))
    requests = []
    for number in range(2):
        priority = Parameters(subscriber_priority=10 + number)
        requests.append(pair.client.fetch(NAME, Notes(number), priority))
    while len(order) < 5:
        pair.server.ready_to_send()
        pair.client_transport.deliver()
        pair.server_transport.deliver()
    assert set(order) == {0}
    requests[1].update(Parameters(subscriber_priority=0), lambda answer: None)
    pair.run()
    # Two may be under way already.
    rest = order[7:]
    assert rest[:38] == [1] * 38 and rest[40:] == [0] * (len(rest) - 40)
    assert len(order) == 80


# -- PUBLISH_DONE --------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["track", "publisher", "expiry", "too far behind"])
@pytest.mark.parametrize("fills", [0, 2])
def test_publish_done_comes_when_every_stream_is_closed(ends, fills):
    story = Story(Parameters(location_filter=FROM_START))
    transport = story.pair.server_transport
    control = set(transport.out)
    transport.stream_window = story.pair.client_transport.stream_window = 1000
    publish(story.store, 2, ended=False, size=2000)
    for _ in range(fills):
        story.update(fill_parameters=FILL)
    for _ in range(3):
        story.pair.server.ready_to_send()
        story.pair.client_transport.deliver()
    (incoming,) = story.pair.server.requests.incoming.values()
    open_at_the_end, send = [], incoming.stream.send

    def watched(message, **how):
        if isinstance(message, PublishDone):
            open_at_the_end.append(
                [
                    stream_id
                    for stream_id, stream in transport.out.items()
                    if stream_id & 2 and stream_id not in control
                    if not stream.fin and stream.reset is None and not stream.over
                ]
            )
        send(message, **how)

    incoming.stream.send = watched
    assert any(stream_id & 2 for stream_id in set(transport.out) - control)
    match ends:
        case "track":
            for group in range(2):
                story.store.finish_subgroup(group, 0)
            story.store.finish(PublishDoneCode.TRACK_ENDED)
        case "publisher":
            incoming.end(PublishDoneCode.GOING_AWAY)
        case "expiry":
            incoming.delivery.expire_at(5.0)
            story.pair.server.tick(6.0)
        case "too far behind":
            story.pair.server.scheduler.limits.pending_subgroups = 2
            story.store.append(7, 0, [b"x"])
    story.pair.run()
    assert open_at_the_end == [[]] and story.request.done is not None
    if ends == "track":
        assert len(story.collector.locations) == 8 * (1 + fills)
        assert {error for _, error in story.collector.streams} == {None}


# -- what is owed ----------------------------------------------------------------------------


def test_without_timeouts_a_slow_subscriber_gets_all_that_matches_however_late():
    filters = (RangeFilter(ParameterType.OBJECTID_FILTER, ranges=((1, None),)),)
    story = Story(Parameters(location_filter=FROM_START, range_filters=filters))
    transport = story.pair.server_transport
    story.grant_streams(False)
    expected = []
    for hour in range(48):
        for object_id in range(6):
            story.store.append(hour, object_id, [b"x"])
            expected.append(Location(hour, object_id))
        story.store.finish_subgroup(hour, 0)
        story.pair.server.tick(3600.0 * hour)
        story.pair.run()
    story.store.finish(PublishDoneCode.TRACK_ENDED)
    assert story.collector.locations == []
    transport.max_streams = transport.open_uni + 1
    story.pair.run()
    assert story.collector.locations == [at for at in expected if at.object >= 1]
    assert {error for _, error in story.collector.streams} == {None}
    assert story.collector.done == PublishDoneCode.TRACK_ENDED


@pytest.mark.parametrize("seed", range(30))
def test_at_any_time_one_stream_is_open_for_a_subgroup_header(seed):
    dice = random.Random(seed)
    story = Story(Parameters(location_filter=FROM_START))
    transport, headers = story.pair.server_transport, {}
    story.pair.client.subscribe(NAME, Collector(), Parameters(location_filter=FROM_START))
    story.pair.run()
    send = transport.send

    def watched(stream_id, data, fin=False):
        if stream_id & 2 and stream_id not in headers and data:
            # Behind the flags stand Track Alias, Group ID, Subgroup ID and priority.
            headers[stream_id] = bytes(data)[1:]
            same = [
                other
                for other, header in headers.items()
                if header == headers[stream_id]
                and not (transport.out[other].fin or transport.out[other].over)
                and transport.out[other].reset is None
            ]
            assert same == [stream_id]
        send(stream_id, data, fin)

    headers.update((stream_id, b"") for stream_id in transport.out if stream_id & 2)
    transport.send = watched
    following = [0, 0, 0]
    for _ in range(60):
        group = dice.randrange(3)
        match dice.randrange(6):
            case 0:
                story.update(forward=dice.randrange(2))
            case 1:
                story.update(location_filter=LocationFilter.groups(group, 2))
            case 2:
                story.pair.run()
            case _:
                story.store.append(group, following[group], [b"octets"])
                following[group] += 1
                story.pair.server.ready_to_send()
    story.pair.run()
    assert len(headers) > 4


# -- fills ---------------------------------------------------------------------------------


def test_fills_for_which_no_stream_comes_are_not_waited_for():
    story = Story()
    for _ in range(200):
        story.update(fill_parameters=FILL)  # of a track without Objects
        story.pair.run()
    publish(story.store, 1, ended=False)
    story.pair.run()
    beyond = Parameters(location_filter=LocationFilter.absolute_start(5))
    for _ in range(200):
        story.update(fill_parameters=beyond)
        story.update(forward=0, fill_parameters=FILL)
        story.update(forward=1)
        story.pair.run()
    assert all(isinstance(answer, RequestOk) for answer in story.log)
    assert story.pair.client.remembered().streams_expected == 0
    story.update(fill_parameters=FILL)
    story.pair.run()
    assert story.collector.locations[-4:] == [(0, o) for o in range(4)]
    assert story.pair.client.remembered().streams_expected == 0


def test_a_fill_counts_as_a_request_and_one_too_many_is_refused_with_excessive_load():
    story = Story()
    publish(story.store, 1, ended=False)
    story.pair.run()
    limits = story.pair.server.scheduler.limits
    story.grant_streams(False)
    for _ in range(limits.pending_fills + 1):
        story.update(fill_parameters=FILL)
        story.pair.run()
    *taken, refused = story.log
    assert all(isinstance(answer, RequestOk) for answer in taken)
    assert isinstance(refused, RequestError) and refused.code == RequestErrorCode.EXCESSIVE_LOAD
    assert str(limits.pending_fills) in refused.reason
    assert story.collector.done == PublishDoneCode.UPDATE_FAILED
    assert story.pair.server.scheduler.fills == 0
    assert story.pair.server.counters.fills_over_limit == 1
    assert_clean(story.pair.server)


def test_open_fills_take_room_from_the_requests_of_their_session():
    story = Story(max_requests=3)
    publish(story.store, 1, ended=False)
    story.pair.run()
    story.grant_streams(False)
    for _ in range(2):
        story.update(fill_parameters=FILL)
        story.pair.run()
    late = Collector()
    story.pair.client.subscribe(NAME, late)
    story.pair.run()
    assert late.failed.code == RequestErrorCode.EXCESSIVE_LOAD
    story.grant_streams(True)
    story.pair.run()
    story.pair.client.subscribe(NAME, late := Collector())
    story.pair.run()
    assert late.failed is None and late.accepted


def test_a_fill_without_a_stream_does_not_listen_to_its_track():
    story = Story()
    publish(story.store, 1, ended=False)
    story.pair.run()
    before = len(listeners(story.store))
    story.grant_streams(False)
    for _ in range(20):
        story.update(fill_parameters=FILL)
    story.pair.run()
    assert len(listeners(story.store)) == before
    story.store.mark_end(Location(1, 0), ObjectStatus.END_OF_TRACK)
    story.grant_streams(True)
    story.end()
    assert story.collector.done == PublishDoneCode.TRACK_ENDED
    assert len(listeners(story.store)) == 0
    assert story.pair.server.scheduler.fills == 0
