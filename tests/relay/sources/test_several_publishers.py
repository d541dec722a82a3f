"""Several publishers of one track: what one has not brought yet, another does not vouch for."""

from __future__ import annotations

import pytest

from moqt.values.codes import PublishDoneCode, RequestErrorCode, StreamErrorCode
from moqt.values.messages import LocationFilter, Parameters
from moqt.values.names import Location
from tests.relay.star import (
    LIVE,
    CountingPublisher,
    Star,
    end_track,
    everything,
    payload,
    publish,
    track,
)


class NoFetches(CountingPublisher):
    def fetch_received(self, request):
        request.reject(RequestErrorCode.NOT_SUPPORTED, "only what is published")


class Late:
    """A subscriber, a publisher whose Objects are on their way, and one that came after those.

    Both publish `early` before the second is subscribed to, and `rest` then; the first
    publisher's Objects have not arrived when that is over.
    """

    def __init__(self, early, rest, *, marked=True, first=None, second=None):
        """`marked`: the end of a group is published with its last Object."""
        self.marked = marked
        self.star = Star()
        self.stores = [track(), track()]
        self.first = self.star.publisher(self.stores[0], handler=first)
        _, self.collector = self.star.subscriber(LIVE)
        self.star.delay(self.first)
        self.publish(*early)
        self.second = self.star.publisher(self.stores[1], handler=second)
        self.publish(*rest)

    def publish(self, *locations):
        for location in locations:
            for store in self.stores:
                publish(store, *location, objects=4 if self.marked else 0)
                if location[1] == 3:
                    store.finish_subgroup(location[0], 0)
        self.star.run()

    def end(self, groups, *stores):
        for store in stores or self.stores:
            end_track(store, groups)
        self.star.run()

    def assert_whole(self, groups):
        assert self.collector.payloads == everything(groups) and not self.collector.repeated
        assert self.collector.done == PublishDoneCode.TRACK_ENDED


GROUP_0 = [(0, object_) for object_ in range(4)]
GROUP_1 = [(1, object_) for object_ in range(4)]


@pytest.mark.parametrize("early", range(1, 4))
def test_a_fin_is_not_passed_on_before_what_another_publisher_is_to_bring(early):
    late = Late(GROUP_0[:early], GROUP_0[early:])
    assert not late.collector.streams
    late.star.arrive(late.first)
    late.end(1)
    late.assert_whole(1)
    assert all(error is None for _, error in late.collector.streams)


@pytest.mark.parametrize("early", range(1, 4))
def test_what_a_lost_publisher_was_to_bring_of_a_subgroup_is_fetched_from_another(early):
    late = Late(GROUP_0[:early], GROUP_0[early:])
    late.star.kill(late.first)
    late.end(1, late.stores[1])
    late.assert_whole(1)


def test_a_track_does_not_end_before_what_another_publisher_is_to_bring():
    late = Late(GROUP_0, GROUP_1, marked=False)
    late.end(2)
    assert late.collector.done is None
    late.star.arrive(late.first)
    late.assert_whole(2)


def test_a_group_that_only_a_lost_publisher_was_to_bring_is_fetched_although_the_track_goes_on():
    """No stream of the group has begun: there is nothing that could be reset."""
    late = Late(GROUP_0, GROUP_1, marked=False)
    late.star.kill(late.first)
    assert late.collector.payloads == everything(2) and not late.collector.repeated
    assert late.collector.done is None
    late.end(2, late.stores[1])
    late.assert_whole(2)


def test_a_publisher_that_ends_when_all_it_had_has_come_vouches_for_its_whole_time():
    """Nobody has said that nothing lies between 0/3 and 1/0."""
    late = Late(
        [*GROUP_0, (1, 0)], GROUP_1[1:], marked=False, first=NoFetches(), second=NoFetches()
    )
    late.star.arrive(late.first)
    late.end(2, late.stores[0])
    late.end(2, late.stores[1])
    late.assert_whole(2)


@pytest.mark.parametrize("early", [GROUP_0[:1], GROUP_0[:3], GROUP_0])
def test_a_track_of_which_something_missed_cannot_be_had_does_not_end_as_ended(early):
    late = Late(early, (GROUP_0 + GROUP_1)[len(early) :], second=NoFetches())
    late.star.kill(late.first)
    late.end(2, late.stores[1])
    assert late.collector.payloads == {
        at: data for at, data in everything(2).items() if at not in early
    }
    assert late.collector.done == PublishDoneCode.INTERNAL_ERROR


class Holding(CountingPublisher):
    """Answers when told to."""

    def __init__(self):
        super().__init__()
        self.held = []

    def subscribe_received(self, request):
        self.held.append(lambda: CountingPublisher.subscribe_received(self, request))

    def fetch_received(self, request):
        self.held.append(lambda: CountingPublisher.fetch_received(self, request))

    def answer(self, star):
        held, self.held = self.held, []
        for each in held:
            each()
        star.run()


@pytest.mark.parametrize("then", ["answered", "lost", "left"])
def test_what_was_published_between_two_publishers_comes_before_the_end(then):
    star, store = Star(), track()
    first = star.publisher(track())
    _, collector = star.subscriber(LIVE)
    second = star.publisher(store, handler=Holding())
    star.kill(first)
    for location in GROUP_0:
        publish(store, *location)
    second.handler.answer(star)
    end_track(store, 1)
    star.run()
    assert collector.done is None
    if then == "answered":
        second.handler.answer(star)
        assert collector.payloads == everything(1)
        assert collector.done == PublishDoneCode.TRACK_ENDED
    elif then == "lost":
        star.kill(second)
        assert collector.done == PublishDoneCode.INTERNAL_ERROR
    else:
        collector.request.cancel()
        star.run()
        star.pass_time(1)
        assert not star.relay.tracks, "nobody waits for it any more"


def test_a_stream_that_begins_after_the_filter_does_not_end_with_fin():
    """What was there before anybody listened is for a fill or a FETCH; the filter wants it."""
    star, store = Star(), track()
    star.publisher(store)
    for location in GROUP_0[:2]:
        publish(store, *location)
    _, collector = star.subscriber(Parameters(location_filter=LocationFilter.absolute_start(0, 0)))
    for location in GROUP_0[2:]:
        publish(store, *location)
    star.run()
    assert collector.locations == [Location(0, 2), Location(0, 3)]
    assert collector.streams == [(0, StreamErrorCode.CANCELLED)]


def test_what_never_was_before_the_first_object_costs_no_fetch():
    star, store = Star(), track()
    publisher = star.publisher(store)
    store.append(0, 0, payload(0, 0))
    store.append(0, 1, payload(0, 1), subgroup=1)
    _, collector = star.subscriber(LIVE)
    for object_, subgroup in ((7, 0), (8, 1), (20, 0), (30, 1), (31, 2)):
        store.append(0, object_, payload(0, object_), subgroup=subgroup)
    store.append(3, 5, payload(3, 5))
    for group, subgroup in ((0, 0), (0, 1), (0, 2), (3, 0)):
        store.finish_subgroup(group, subgroup)
    star.run()
    assert len(collector.payloads) == 6
    assert [error for _, error in collector.streams] == 4 * [None]
    assert not publisher.handler.fetches


def test_what_was_on_its_way_when_a_request_moved_is_fetched_at_once():
    star, store = Star(), track()
    publisher = star.publisher(store)
    publication = publisher.client.publish(store)
    star.run()
    _, collector = star.subscriber(LIVE)
    publication.send_goaway(timeout_ms=5000)
    publisher.client_transport.deliver()
    star.delay(publisher)
    for location in GROUP_0:
        store.append(*location, payload(*location))
    store.finish_subgroup(0, 0)
    star.run()
    star.arrive(publisher)
    assert collector.payloads == everything(1) and not collector.repeated
    publish(store, 1, 0)
    star.run()
    assert collector.locations[-1] == Location(1, 0) and collector.done is None


def test_a_publication_that_comes_again_does_not_end_who_is_still_brought_all_of_it():
    """The track has ended and is here whole: nothing can come that a fill would lack."""
    star, store = Star(), track(3, size=2000, ended=True)
    first = star.publisher(store)
    star.subscriber()
    star.kill(first)
    slow = star.connect(stream_window=1000)
    streams = [4 * number + 3 for number in range(8)]
    slow.client_transport.paused.update(streams)
    collector = star.subscribe(slow)
    assert collector.accepted is not None and collector.done is None
    star.connect(CountingPublisher()).client.publish(store)
    star.run()
    for stream_id in streams:
        slow.client_transport.resume_receiving(stream_id)
    star.run()
    assert collector.payloads == everything(3, size=2000) and not collector.repeated
    assert collector.done == PublishDoneCode.TRACK_ENDED
    assert all(error is None for _, error in collector.streams)


def test_a_track_that_is_complete_has_ended_when_the_first_publisher_says_so():
    star, stores = Star(), [track(), track()]
    _, second = (star.publisher(store) for store in stores)
    _, collector = star.subscriber(LIVE)
    star.delay(second)
    for store in stores:
        for o in range(4):
            publish(store, 0, o)
        end_track(store, 1)
    star.run()
    assert collector.payloads == everything(1)
    assert collector.done == PublishDoneCode.TRACK_ENDED


def test_an_object_that_a_lost_publisher_had_begun_before_the_other_was_asked_is_fetched():
    """The other's subscription begins behind it, and what is lost was the largest."""
    star, stores = Star(), [track(), track()]
    first = star.publisher(stores[0])
    _, collector = star.subscriber(LIVE)
    for object_ in range(2):
        for store in stores:
            publish(store, 0, object_)
    begun = stores[0].begin(Location(0, 2), subgroup=0, priority=None, properties=b"", length=100)
    stores[0].grow(begun, payload(0, 2)[:50])
    publish(stores[1], 0, 2)
    star.run()
    star.publisher(stores[1])
    star.run()
    star.kill(first)
    star.run()
    assert Location(0, 2) in collector.payloads, "without a word of what comes later"
    publish(stores[1], 0, 3)
    end_track(stores[1], 1)
    star.run()
    star.pass_time(5)
    assert collector.payloads == everything(1) and not collector.repeated
    assert collector.done == PublishDoneCode.TRACK_ENDED
