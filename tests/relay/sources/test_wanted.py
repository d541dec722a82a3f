"""MOQT "Subscriber Interactions": filters are propagated upstream, as far as all have some."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.track.filters import either, matches, merge_update, update_to
from moqt.values.codes import ObjectStatus, ParameterType, RequestErrorCode
from moqt.values.config import SessionConfig
from moqt.values.errors import RequestError
from moqt.values.messages import LocationFilter, Parameters, RangeFilter
from moqt.values.names import MAX_LOCATION, Location
from relay.sources.wanted import EVERYTHING, MOST_RANGES, Wanted
from tests.relay.chain import Chain
from tests.relay.star import (
    JOIN,
    LIVE,
    NAME,
    NEXT,
    Collector,
    CountingPublisher,
    Star,
    end_track,
    everything,
    objects,
    payload,
    publish,
    subgroups,
    track,
    wants,
)


def asked(publisher):
    """The range filters in force at the publisher, of the relay's one subscription."""
    (request,) = publisher.handler.subscribes
    return request.range_filters


def chosen(groups, *ids):
    return {Location(g, o): payload(g, o) for g in range(groups) for o in ids}


# -- the filters that let through what either does -----------------------------------------


def test_ranges_of_one_kind_become_one_filter_and_no_filter_takes_all_others_away():
    assert either((objects((0, 3)),), (objects((2, 7), (9, None)),)) == (
        objects((0, 7), (9, None)),
    )
    assert either((objects((0, 3)),), ()) == either((), (objects((0, 3)),)) == ()
    both = either((objects((0, 1)),), (subgroups((5, 5)),))
    assert {each.set_id for each in both} == {0, 1}


FILTERS = st.lists(
    st.builds(
        RangeFilter,
        st.sampled_from([ParameterType.OBJECTID_FILTER, ParameterType.SUBGROUP_FILTER]),
        st.integers(0, 2),
        st.none(),
        st.lists(
            st.tuples(st.integers(0, 6), st.none() | st.integers(0, 9)).filter(
                lambda each: each[1] is None or each[0] <= each[1]
            ),
            min_size=1,
            max_size=3,
        ).map(tuple),
    ),
    max_size=4,
    unique_by=lambda each: (each.type, each.set_id),
).map(tuple)


@given(FILTERS, FILTERS, st.integers(0, 10), st.none() | st.integers(0, 10))
def test_either_lets_through_exactly_what_one_of_the_two_does(first, second, object_, subgroup):
    def passes(filters):
        return matches(filters, object=object_, subgroup=subgroup, priority=0)

    both = either(first, second)
    assert passes(both) == (passes(first) or passes(second))
    assert both == either(second, first) == either(both, both)


@given(FILTERS, FILTERS)
def test_an_update_puts_one_set_of_filters_in_the_place_of_another(first, second):
    assert set(merge_update(first, update_to(first, second))) == set(second)


def test_what_is_wanted_has_one_location_filter_and_no_more_ranges_than_the_peer_takes():
    first = Wanted.by(LocationFilter.groups(3, 4), (), None)
    assert first.location_filter == LocationFilter.groups(3, 4)
    both = first | Wanted.by(LocationFilter.range(Location(1, 2), Location(2, 3)), (), None)
    assert (both.start, both.end) == (Location(1, 2), first.end)
    assert (both | Wanted.by(NEXT, (), None)) == EVERYTHING
    later = Wanted.by(LocationFilter.absolute_start(5), (), Location(2, 0))
    assert later == Wanted(Location(5, 0), MAX_LOCATION)
    assert Wanted.by(LocationFilter.absolute_start(5), (), Location(5, 0)) == EVERYTHING
    scattered = Wanted.by(None, (objects((0, 0), (2, 2), (4, 4)),), None)
    assert scattered.in_ranges(3) == scattered and scattered.in_ranges(2) == EVERYTHING


@pytest.mark.parametrize("kinds", [1, 2])
def test_what_many_want_is_kept_within_a_bound_that_does_not_grow_with_them(kinds):
    together, most = Wanted.by(NEXT, (objects((0, 0)), subgroups((0, 0))), None), 0
    for number in range(0, 400, 2):
        filters = (objects((number, number)), subgroups((number, number)))[:kinds]
        together |= Wanted.by(NEXT, filters, None)
        most = max(most, sum(len(each.ranges) for each in together.filters))
    assert together == EVERYTHING and 0 < most <= MOST_RANGES


# -- at the publisher ----------------------------------------------------------------------


def test_upstream_is_asked_for_what_its_subscribers_filters_let_through_and_no_more():
    star, store = Star(), track()
    publisher = star.publisher(store)
    _, collector = star.subscriber(wants(objects((0, 1))))
    assert asked(publisher) == (objects((0, 1)),)
    for o in range(4):
        publish(store, 0, o)
    star.run()
    assert collector.payloads == chosen(1, 0, 1)
    assert star.relay.counters.objects_in == 2
    assert [error for _, error in collector.streams] == [None]


def test_what_a_fetch_alone_had_asked_for_is_narrowed_as_soon_as_somebody_listens():
    star, store = Star(), track()
    publisher = star.publisher(store)
    publish(store, 0, 0)
    pair = star.connect()
    assert star.fetch(pair, (0, 0), (0, 1)).payloads == chosen(1, 0)
    assert asked(publisher) == ()
    collector = star.subscribe(pair, wants(objects((0, 1))))
    assert asked(publisher) == (objects((0, 1)),)
    for o in range(1, 4):
        publish(store, 0, o)
    star.run()
    assert collector.payloads == chosen(1, 1)
    assert star.relay.counters.objects_in == 2


def test_who_listens_together_with_a_fetch_has_no_more_asked_for_than_all_listeners_want():
    star, store = Star(), track()
    publisher = star.publisher(store)
    publish(store, 0, 0)
    pair = star.connect()
    requests = [Collector() for _ in range(3)]
    pair.client.fetch(
        NAME, requests[0], wants(location=LocationFilter.range(Location(0, 0), Location(0, 1)))
    )
    for collector, first in zip(requests[1:], (0, 2), strict=True):
        pair.client.subscribe(NAME, collector, wants(objects((first, first))))
    star.run()
    assert asked(publisher) == (objects((0, 0), (2, 2)),)
    for o in range(1, 4):
        publish(store, 0, o)
    star.run()
    assert requests[2].payloads == chosen(1, 2)
    assert star.relay.counters.objects_in == 2


def test_a_second_filter_widens_what_is_asked_for_and_leaving_narrows_it_after_a_while():
    star, store = Star(linger=5), track()
    publisher = star.publisher(store)
    star.subscriber(wants(objects((0, 0))))
    _, second = star.subscriber(wants(objects((2, 3))))
    assert asked(publisher) == (objects((0, 0), (2, 3)),)
    second.request.cancel()
    star.run()
    star.pass_time(4)
    assert asked(publisher) == (objects((0, 0), (2, 3)),)
    star.pass_time(3)
    assert asked(publisher) == (objects((0, 0)),)


def test_one_without_filters_has_everything_asked_for_before_it_is_answered():
    star, store = Star(), track()
    publisher = star.publisher(store)
    _, narrow = star.subscriber(wants(objects((0, 0))))
    publish(store, 0, 0)
    publish(store, 0, 1)
    star.run()
    star.delay(publisher)
    _, all_of_it = star.subscriber(LIVE)
    assert all_of_it.accepted is None
    star.arrive(publisher)
    assert asked(publisher) == ()
    assert all_of_it.accepted.largest == Location(0, 1), "although it was left out here"
    publish(store, 0, 2)
    publish(store, 0, 3)
    star.run()
    assert all_of_it.payloads == chosen(1, 2, 3)
    assert narrow.payloads == chosen(1, 0)
    assert [e for _, e in narrow.streams + all_of_it.streams] == [None, None]


def test_one_who_comes_before_a_narrow_subscription_is_answered_waits_until_it_is_widened():
    star, store = Star(), track()
    publisher = star.publisher(store)
    star.delay(publisher)
    star.subscriber(wants(objects((0, 0))))
    _, second = star.subscriber(LIVE)
    publish(store, 0, 0)
    publish(store, 0, 1)
    star.run()
    star.arrive(publisher)
    assert asked(publisher) == ()
    assert second.accepted.largest == Location(0, 1)
    publish(store, 0, 2)
    star.run()
    assert second.payloads == chosen(1, 2)


def test_what_was_left_out_upstream_is_unknown_and_fetched_for_who_wants_it():
    star, store = Star(), track()
    publisher = star.publisher(store)
    star.subscriber(wants(objects((1, 1))))
    for g in range(3):
        for o in range(4):
            publish(store, g, o)
            star.run()
    end_track(store, 3)
    star.run()
    assert not publisher.handler.fetches
    fetched = star.fetch(star.connect())
    assert fetched.payloads == everything(3)
    assert fetched.unknown == []
    _, late = star.subscriber(JOIN)
    assert late.payloads == everything(3)


def test_the_end_of_a_track_that_was_left_out_in_part_is_not_taken_for_its_largest_object():
    star, store = Star(), track()
    star.publisher(store)
    _, narrow = star.subscriber(wants(objects((0, 0))))
    for o in range(3):
        store.append(0, o, payload(0, o))
    store.finish_subgroup(0, 0)
    store.finish(0x2)
    star.run()
    assert narrow.done == 0x2 and narrow.payloads == chosen(1, 0)
    assert star.relay.tracks[NAME].store.end_of_track is None
    fetched = star.fetch(star.connect())
    assert fetched.payloads == chosen(1, 0, 1, 2)


def test_an_update_that_asks_for_more_waits_until_upstream_brings_it():
    star, store = Star(), track()
    publisher = star.publisher(store)
    _, narrow = star.subscriber(wants(objects((0, 0))))
    star.delay(publisher)
    answers = []
    narrow.request.update(Parameters(range_filters=(objects((0, 2)),)), answers.append)
    star.run()
    assert not answers
    star.arrive(publisher)
    assert len(answers) == 1 and asked(publisher) == (objects((0, 2)),)
    for o in range(4):
        publish(store, 0, o)
    star.run()
    assert narrow.payloads == chosen(1, 0, 1, 2)


def test_a_second_update_waits_for_upstream_too():
    star, store = Star(), track()
    publisher = star.publisher(store)
    _, narrow = star.subscriber(wants(objects((0, 0))))
    star.delay(publisher)
    answers = []
    for filters in ((objects((1, 1)),), (objects(),)):
        narrow.request.update(Parameters(range_filters=filters), answers.append)
    star.run()
    star.arrive(publisher)
    assert len(answers) == 2 and asked(publisher) == ()
    for o in range(4):
        publish(store, 0, o)
    star.run()
    assert narrow.payloads == everything(1)


def test_a_location_filter_with_an_end_is_propagated_and_widened():
    star, store = Star(), track(1)
    publisher = star.publisher(store)
    _, some = star.subscriber(wants(location=LocationFilter.groups(2, 3)))
    (request,) = publisher.handler.subscribes
    assert request.filter == LocationFilter.groups(2, 3)
    for g in (1, 2):
        for o in range(4):
            publish(store, g, o)
    star.run()
    assert star.relay.counters.objects_in == 4
    _, rest = star.subscriber(LIVE)
    assert rest.accepted.largest == Location(2, 3)
    for g in (3, 4):
        for o in range(4):
            publish(store, g, o)
    star.run()
    assert set(some.payloads) == {Location(g, o) for g in (2, 3) for o in range(4)}
    assert set(rest.payloads) == {Location(g, o) for g in (3, 4) for o in range(4)}


def test_to_a_publisher_that_takes_no_filters_none_are_sent():
    star, store = Star(), track()
    publisher = star.publisher(store, client_config=SessionConfig(max_filter_ranges=0))
    _, narrow = star.subscriber(wants(objects((0, 1))))
    assert asked(publisher) == ()
    for o in range(4):
        publish(store, 0, o)
    star.run()
    assert narrow.payloads == chosen(1, 0, 1)


class Unfiltering(CountingPublisher):
    """Refuses every filter, although it has announced that it takes them."""

    def subscribe_received(self, request):
        if request.range_filters:
            self.subscribes.append(request)
            request.reject(RequestErrorCode.INVALID_FILTER, "no filters")
        else:
            super().subscribe_received(request)


def test_filters_of_ours_that_a_publisher_refuses_cost_the_subscriber_nothing():
    star, store = Star(), track()
    publisher = star.publisher(store, handler=Unfiltering())
    _, narrow = star.subscriber(wants(objects((0, 1))))
    assert [bool(r.range_filters) for r in publisher.handler.subscribes] == [True, False]
    for o in range(4):
        publish(store, 0, o)
    star.run()
    assert narrow.payloads == chosen(1, 0, 1)


def test_a_publisher_that_has_refused_filters_of_ours_is_not_asked_to_take_them_later():
    star, store = Star(linger=1), track()
    publisher = star.publisher(store)

    def refuse(parameters):
        if parameters.range_filters:
            raise RequestError(RequestErrorCode.INVALID_FILTER, "no filters")

    publisher.client.rules.check_filters = refuse
    _, narrow = star.subscriber(wants(objects((0, 1))))
    star.pass_time(5)
    for o in range(4):
        publish(store, 0, o)
    star.run()
    assert narrow.done is None and narrow.payloads == chosen(1, 0, 1)


def test_who_comes_at_the_end_of_a_track_takes_nothing_from_who_has_filters():
    star, store = Star(), track()
    publisher = star.publisher(store)
    _, narrow = star.subscriber(wants(objects((0, 1))))
    streams = [4 * number + 2 for number in range(1, 8)]  # of data
    late_data, take = [], publisher.server.stream_data

    def slow(stream_id, data, fin):
        if stream_id in streams:
            late_data.append((stream_id, data, fin))
        else:
            take(stream_id, data, fin)

    publisher.server.stream_data = slow
    for o in range(4):
        publish(store, 0, o, 1000)
    end_track(store, 1)
    star.run()
    assert not narrow.payloads
    _, late = star.subscriber(JOIN)
    publisher.server.stream_data = take
    for each in late_data:
        take(*each)
    star.run()
    assert set(narrow.payloads) == {Location(0, 0), Location(0, 1)}
    assert set(late.payloads) == {Location(0, o) for o in range(4)}
    assert narrow.done == late.done == 0x2
    assert {error for _, error in narrow.streams} == {None}


def test_who_is_paused_wants_nothing_and_is_waited_for_when_it_resumes():
    star, store = Star(linger=1), track()
    publisher = star.publisher(store)
    _, full = star.subscriber(LIVE)
    star.subscriber(wants(objects((0, 0))))
    full.request.update(Parameters(forward=0), lambda _: None)
    star.run()
    star.pass_time(3)
    assert asked(publisher) == (objects((0, 0)),)
    for o in range(2):
        publish(store, 0, o)
    star.run()
    full.request.update(Parameters(forward=1), lambda _: None)
    star.run()
    assert asked(publisher) == ()
    for o in range(2, 4):
        publish(store, 0, o)
    star.run()
    assert full.payloads == chosen(1, 2, 3)


def test_what_a_filter_left_out_at_one_publisher_comes_from_another_that_is_behind():
    star, first, second = Star(), track(), track()
    star.publisher(first)
    ahead = star.publisher(second)
    star.subscriber(wants(objects((0, 0), (5, 5))))
    for store in (first, second):
        publish(store, 0, 0, objects=8)
    star.run()
    star.delay(ahead)
    for o in range(1, 6):
        publish(second, 0, o, objects=8)
    star.run()
    _, late = star.subscriber(LIVE)
    assert late.accepted.largest == Location(0, 0)
    star.arrive(ahead)
    for o in range(1, 8):
        publish(first, 0, o, objects=8)
        star.run()
    for o in range(6, 8):
        publish(second, 0, o, objects=8)
    end_track(first, 1)
    end_track(second, 1)
    star.run()
    star.pass_time(10)
    assert late.payloads == chosen(1, *range(1, 8))


def test_what_other_filters_left_out_is_not_said_to_be_nothing_to_who_has_changed_its_own():
    """A stream on which an Object follows another says that nothing selected lies between."""
    star, store = Star(), track()
    star.publisher(store)
    pair, some = star.subscriber(wants(objects((0, 0), (3, 3), (5, 5))), stream_window=150)
    for stream in range(1, 16):
        pair.client_transport.paused.add(4 * stream + 3)
    for o in range(6):
        publish(store, 0, o, objects=9)
    star.run()
    some.request.update(
        Parameters(range_filters=(objects((0, 0), (4, 4), (6, 8)),)), lambda _: None
    )
    star.run()
    for o in range(6, 9):
        publish(store, 0, o, objects=9)
    star.run()
    for stream_id in tuple(pair.client_transport.paused):
        pair.client_transport.resume_receiving(stream_id)
    star.run()
    assert set(some.payloads) == {Location(0, o) for o in (0, 3, 6, 7, 8)} and not some.repeated
    assert len(some.streams) == 2 and some.streams[0][1] is not None


def test_a_relay_near_the_publisher_narrows_as_soon_as_the_next_one_says_that_it_has():
    chain = Chain(linger=5)
    chain.connect()
    publisher = chain.top.publisher(track())
    chain.bottom.subscriber(wants(objects((0, 0))))
    _, second = chain.bottom.subscriber(wants(objects((2, 3))))
    second.request.cancel()
    chain.top.run()
    chain.pass_time(4)
    assert asked(publisher) == (objects((0, 0), (2, 3)),)
    chain.pass_time(3)
    assert asked(publisher) == (objects((0, 0)),)


# -- whoever comes and goes ----------------------------------------------------------------


CHOICES = [
    ((), lambda at: True),
    ((objects((0, 1)),), lambda at: at.object <= 1),
    ((objects((1, 1), (3, None)),), lambda at: at.object == 1 or at.object >= 3),
    ((objects((2, 2)),), lambda at: at.object == 2),
]


class Reader:
    def __init__(self, star, pair, choice, *, join):
        self.filters, self.passes = choice
        self.since = len(star.published)
        self.until = None
        self.join = join
        self.collector = Collector()
        fill = Parameters(location_filter=LocationFilter.absolute_start(0)) if join else None
        self.collector.request = pair.client.subscribe(
            NAME, self.collector, wants(*self.filters, fill=fill)
        )


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_whoever_comes_and_goes_each_gets_what_its_filters_select_and_gets_it_once(seed, hops):
    draw = random.Random(seed)
    chain = None
    if hops == 1:
        top = bottom = Star(seed=seed, linger=1)
    else:
        chain = Chain(seed=seed, linger=1)
        top, bottom = chain.top, chain.bottom
        chain.connect()
    store = track()
    top.publisher(store)
    bottom.published = []
    pairs = [bottom.connect() for _ in range(4)]
    readers = []
    for g in range(6):
        for o in range(5):
            what = draw.random()
            if what < 0.35:
                join = draw.random() < 0.5
                readers.append(Reader(bottom, draw.choice(pairs), draw.choice(CHOICES), join=join))
                bottom.run()
            elif what < 0.5 and readers:
                gone = readers[draw.randrange(len(readers))]
                if gone.until is None:
                    bottom.run()
                    gone.until = len(bottom.published)
                    gone.collector.request.cancel()
            elif what < 0.6:
                (chain or top).pass_time(1.5)
            publish(store, g, o, objects=5)
            bottom.published.append(Location(g, o))
            if draw.random() < 0.5:
                bottom.run()
        bottom.run()
    end_track(store, 6)
    bottom.run()
    assert len(readers) > 3
    for reader in readers:
        until = len(bottom.published) if reader.until is None else reader.until
        due = {at for at in bottom.published[reader.since : until] if reader.passes(at)}
        if reader.join:
            due |= {at for at in bottom.published[: reader.since] if reader.passes(at)}
        got = reader.collector.locations
        assert len(got) == len(set(got))
        assert due <= set(got) and all(map(reader.passes, got))
        assert all(o.payload == payload(*o.location) for o in reader.collector.normal)
        if reader.until is None:
            assert reader.collector.done is not None
            ends = [o for o in reader.collector.objects if o.status is ObjectStatus.END_OF_TRACK]
            assert len(ends) == 1
