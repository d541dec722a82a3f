"""Two sessions and random moves against a model: each Object once, to whom it is owed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from moqt.publisher import Publisher
from moqt.receiving.receiver import Via
from moqt.requests import IncomingPublish
from moqt.session import SessionHandler
from moqt.track.filters import matches
from moqt.track.store import TrackStore
from moqt.values.codes import GroupOrder, ObjectStatus, ParameterType, PublishDoneCode
from moqt.values.messages import LocationFilter, Parameters, RangeFilter, RequestOk
from moqt.values.names import FullTrackName, Location
from tests.moqt.inside import listeners
from tests.moqt.memory import Pair, assert_clean
from tests.moqt.peers import Collector

GROUPS, OBJECTS = 4, 5
PLACES = st.tuples(st.integers(0, GROUPS), st.integers(0, OBJECTS))


@st.composite
def location_filters(draw):
    (g1, o1), (g2, o2) = draw(PLACES), draw(PLACES)
    start, end = sorted((Location(g1, o1), Location(g2, o2)))
    return draw(
        st.sampled_from(
            [
                None,
                LocationFilter(0),
                LocationFilter.next_object(),
                LocationFilter.relative_start(g1),
                LocationFilter.absolute_start(g1, o1),
                LocationFilter.groups(start.group, end.group),
                LocationFilter.range(start, end),
            ]
        )
    )


RANGE_FILTERS = st.lists(
    st.sampled_from(
        [
            RangeFilter(ParameterType.OBJECTID_FILTER, 0, ranges=((1, 2),)),
            RangeFilter(ParameterType.SUBGROUP_FILTER, 0, ranges=((1, None),)),
            RangeFilter(ParameterType.PRIORITY_FILTER, 1, ranges=((0, 1),)),
        ]
    ),
    max_size=2,
    unique=True,
).map(tuple)
ORDERS = st.sampled_from([None, 1, 2])


def subgroup_of(object_id):
    return object_id % 2


def passes(filters, stored):
    return not filters or matches(
        filters,
        object=stored.location.object,
        subgroup=stored.subgroup,
        priority=stored.priority,
        properties=b"",
    )


class Subscriber:
    """What one subscription must, and may, have got."""

    def __init__(self, machine, request, got, parameters):
        self.machine, self.request, self.got = machine, request, got
        self.filter = parameters.location_filter or LocationFilter(0)
        self.ranges = parameters.range_filters
        self.paused = parameters.forward == 0
        self.window = self.filter.resolve(machine.store.largest)
        self.must, self.may = set(), set()
        self.fills = Counter()
        self.cancelled = False
        if parameters.fill_parameters is not None:
            self.fill(parameters.fill_parameters)

    def published(self, stored):
        if (
            not self.paused
            and self.window[0] <= stored.location <= self.window[1]
            and passes(self.ranges, stored)
        ):
            self.must.add(stored.location)
            self.may.add(stored.location)

    def fill(self, fill):
        largest = self.machine.store.largest
        if self.paused or largest is None:
            return
        start, end = (fill.location_filter or self.filter).resolve(largest)
        for stored in self.machine.store.objects():
            if start <= stored.location <= min(end, largest) and passes(
                fill.range_filters or self.ranges, stored
            ):
                self.fills[stored.location] += 1

    def updated(self, parameters):
        """Applied at rest: what was owed has come."""
        largest = self.machine.store.largest
        if parameters.range_filters:
            kinds = {f.type for f in parameters.range_filters}
            kept = tuple(f for f in self.ranges if f.type not in kinds)
            self.ranges = kept + tuple(f for f in parameters.range_filters if f.ranges)
        if parameters.location_filter is not None:
            self.filter = parameters.location_filter
            self.window = self.filter.resolve(largest)
        if parameters.forward is not None:
            self.paused = parameters.forward == 0
        if parameters.fill_parameters is not None:
            self.fill(parameters.fill_parameters)

    def check(self, complete):
        live = Counter(
            o.location
            for o in self.got.objects
            if o.via is not Via.FILL and o.status is ObjectStatus.NORMAL
        )
        filled = Counter(o.location for o in self.got.objects if o.via is Via.FILL)
        assert all(count == 1 for count in live.values()), live
        assert set(live) <= self.may
        assert filled <= self.fills
        if complete and not self.cancelled:
            assert set(live) == self.must
            assert filled == self.fills
        for received in self.got.objects:
            if received.status is ObjectStatus.NORMAL:
                assert bytes(received.payload) == b"%d/%d" % received.location


class Offers(SessionHandler):
    def publish_received(self, request):
        self.last = request


class Sessions(RuleBasedStateMachine):
    @initialize(seed=st.one_of(st.none(), st.integers(0, 5)), window=st.sampled_from([30, 1 << 20]))
    def begin(self, seed, window):
        self.publisher = Publisher()
        self.store = TrackStore(FullTrackName((b"demo",), b"t"))
        self.publisher.add_track(self.store)
        self.offers = Offers()
        self.pair = Pair(
            self.offers, self.publisher, seed=seed, stream_window=window, max_streams=200
        )
        self.subscribers, self.fetches, self.stores = [], [], None
        self.left = [(g, o) for g in range(GROUPS) for o in range(OBJECTS)]
        self.ended = False

    def rest(self, complete=True):
        self.pair.run()
        for subscriber in self.subscribers:
            subscriber.check(complete)

    @precondition(lambda self: not self.ended and self.left)
    @rule(n=st.integers(0, 3), rest=st.booleans())
    def publish(self, n, rest):
        """Mostly in order, now and then out of it."""
        g, o = self.left.pop(min(n, len(self.left) - 1) if n == 3 else 0)
        last = self.store.groups.get(g)
        log = last.subgroups.get(subgroup_of(o)) if last else None
        if log is not None and log.ids and log.ids[-1] > o:
            return  # a subgroup ascends
        stored = self.store.append(
            g, o, b"%d/%d" % (g, o), subgroup=subgroup_of(o), priority=subgroup_of(o)
        )
        for subscriber in self.subscribers:
            subscriber.published(stored)
        if rest:
            self.rest()
        else:
            self.pair.server.ready_to_send()

    @precondition(lambda self: len(self.subscribers) < 4)
    @rule(
        chosen=location_filters(),
        fill=st.one_of(st.none(), location_filters().map(lambda f: Parameters(location_filter=f))),
        ranges=RANGE_FILTERS,
        forward=st.sampled_from([None, None, 0, 1]),
        order=ORDERS,
        fin=st.booleans(),
    )
    def subscribe(self, chosen, fill, ranges, forward, order, fin):
        self.rest()
        parameters = Parameters(
            location_filter=chosen,
            fill_parameters=fill,
            range_filters=ranges,
            forward=forward,
            group_order=order,
        )
        got = Collector()
        request = self.pair.client.subscribe(self.store.name, got, parameters)
        if fin:
            request.stream.finish()
        self.subscribers.append(Subscriber(self, request, got, parameters))
        self.subscribers[-1].fin = fin
        self.rest()
        assert got.accepted is not None and got.failed is None

    @precondition(lambda self: len(self.subscribers) < 4)
    @rule(chosen=location_filters(), forward=st.sampled_from([None, 0, 1]))
    def offer(self, chosen, forward):
        """A subscription that the publisher starts; without a filter from the Next Object on."""
        self.rest()
        asked = Parameters(location_filter=chosen, forward=forward)
        self.pair.server.publish(self.store, asked)
        self.rest()
        got = Collector()
        request = self.offers.last
        in_force = replace(asked, location_filter=chosen or LocationFilter.next_object())
        self.subscribers.append(Subscriber(self, request, got, in_force))
        self.subscribers[-1].fin = False
        request.accept(got)
        self.rest()

    def alive(self):
        return [s for s in self.subscribers if not s.cancelled and s.got.done is None]

    @precondition(lambda self: any(not s.fin for s in self.alive()))
    @rule(
        data=st.data(),
        chosen=location_filters(),
        fill=st.one_of(st.none(), location_filters().map(lambda f: Parameters(location_filter=f))),
        ranges=RANGE_FILTERS,
        forward=st.sampled_from([None, 0, 1]),
        priority=st.sampled_from([None, 0, 255]),
    )
    def update(self, data, chosen, fill, ranges, forward, priority):
        self.rest()
        subscriber = data.draw(st.sampled_from([s for s in self.alive() if not s.fin]))
        parameters = Parameters(
            location_filter=chosen,
            fill_parameters=fill,
            range_filters=ranges,
            forward=forward,
            subscriber_priority=priority,
        )
        answers = []
        subscriber.request.update(parameters, answers.append)
        subscriber.updated(parameters)
        self.rest()
        assert [type(a) for a in answers] == [RequestOk]
        assert answers[0].parameters.largest_object == self.store.largest

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def cancel(self, data):
        subscriber = data.draw(st.sampled_from(self.alive()))
        subscriber.request.cancel()
        subscriber.cancelled = True

    @rule(chosen=location_filters(), order=ORDERS, ranges=RANGE_FILTERS, cancel=st.booleans())
    def fetch(self, chosen, order, ranges, cancel):
        self.rest()
        got = Collector()
        parameters = Parameters(location_filter=chosen, group_order=order, range_filters=ranges)
        request = self.pair.client.fetch(self.store.name, got, parameters)
        if cancel:
            self.pair.client_transport.deliver()
            self.pair.server.ready_to_send()
            self.pair.server_transport.deliver()
            request.cancel()
            self.rest()
            return
        self.rest()
        largest = self.store.largest
        start, end = (chosen or LocationFilter(0)).resolve(largest)
        if largest is None or start > largest or start > end:
            assert got.failed.code == 0x11
            return
        end = min(end, largest)
        expected = [
            o.location
            for o in self.store.objects()
            if start <= o.location <= end and passes(ranges, o)
        ]
        sign = -1 if order == GroupOrder.DESCENDING else 1
        assert got.locations == sorted(expected, key=lambda at: (sign * at.group, at.object))
        assert got.streams == [(Via.FETCH, None)]

    @rule(steps=st.integers(1, 3))
    def some_steps(self, steps):
        for _ in range(steps):
            self.pair.client.ready_to_send()
            self.pair.server.ready_to_send()
            self.pair.client_transport.deliver()
            self.pair.server_transport.deliver()

    def teardown(self):
        if not hasattr(self, "pair"):
            return
        if not self.ended:
            self.ended = True
            for group_id, group in self.store.groups.items():
                for subgroup in tuple(group.subgroups):
                    self.store.finish_subgroup(group_id, subgroup)
            self.store.finish(PublishDoneCode.TRACK_ENDED)
        self.rest()
        self.pair.server.tick(5)
        for subscriber in self.subscribers:
            if subscriber.paused and subscriber.got.done is None:
                # PUBLISH_DONE waits for a paused subscriber, which may want a fill.
                assert isinstance(subscriber.request, IncomingPublish) or subscriber.cancelled
                subscriber.request.cancel()
                subscriber.cancelled = True
        self.rest()
        for subscriber in self.subscribers:
            assert subscriber.cancelled or subscriber.got.done == PublishDoneCode.TRACK_ENDED
        assert_clean(self.pair.client)
        assert_clean(self.pair.server)
        assert not listeners(self.store)
        assert all(
            log.readers == 0 for g in self.store.groups.values() for log in g.subgroups.values()
        )
        for transport in (self.pair.client_transport, self.pair.server_transport):
            assert transport.unsent == 0 and transport.closed is None


TestSessions = Sessions.TestCase
TestSessions.settings = settings(
    max_examples=120,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
