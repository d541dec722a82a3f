"""Several publishers of one track: what one has not brought yet, another does not vouch for."""

from __future__ import annotations

import pytest

from moqt.values.codes import PublishDoneCode, StreamErrorCode
from moqt.values.messages import LocationFilter, Parameters
from moqt.values.names import Location
from tests.relay.star import (
    LIVE,
    Star,
    end_track,
    everything,
    payload,
    publish,
    track,
)


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
