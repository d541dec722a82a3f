"""Random publishers, subscribers and losses: nobody gets what was not published, or twice."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moqt.requests import RequestState
from moqt.track.knowledge import INTERVAL_OCTETS
from moqt.values.codes import ObjectStatus, PublishDoneCode
from moqt.values.messages import LocationFilter, Parameters
from moqt.values.names import Location
from relay.cache import OBJECT_OVERHEAD, bill
from tests.relay.inside import feeds, gaps_left_out
from tests.relay.star import (
    JOIN,
    LIVE,
    NAME,
    Collector,
    CountingPublisher,
    Star,
    end_track,
    payload,
    track,
)

GROUP = 3


class Scenario(RuleBasedStateMachine):
    """One track, published in order by one or two sessions that may die and come back."""

    def __init__(self):
        super().__init__()
        self.star = Star(seed=1, cache_octets=60_000, linger=1)
        self.store = track()
        self.published = {}
        self.next = (0, 0)
        self.growing = None
        self.ended = False
        self.publishers = [self.star.publisher(self.store)]
        self.pairs = [self.star.connect() for _ in range(3)]
        self.joined, self.lived, self.fetched = [], [], []
        self.wanting = []

    def advance(self):
        g, o = self.next
        self.next = (g, o + 1) if o + 1 < GROUP else (g + 1, 0)
        if o + 1 == GROUP:
            self.store.mark_end(Location(g, GROUP), ObjectStatus.END_OF_GROUP)
            self.store.finish_subgroup(g, 0)

    @precondition(lambda self: not self.ended and self.growing is None)
    @rule(size=st.sampled_from([0, 10, 1000, 9000]))
    def publish(self, size):
        g, o = self.next
        self.published[Location(g, o)] = data = payload(g, o, size)
        self.store.append(g, o, data)
        self.advance()

    @precondition(lambda self: not self.ended and self.growing is None)
    @rule()
    def begin(self):
        g, o = self.next
        self.growing = self.store.begin(
            Location(g, o), subgroup=0, priority=None, properties=b"", length=3000
        )
        self.published[Location(g, o)] = payload(g, o, 3000)

    @precondition(lambda self: self.growing is not None)
    @rule()
    def grow(self):
        at = self.growing.received
        self.store.grow(self.growing, payload(*self.growing.location, 3000)[at : at + 1000])
        if self.growing.complete:
            self.store.complete(self.growing)
            self.growing = None
            self.advance()

    @precondition(lambda self: not self.ended and self.growing is None and self.next[1] == 0)
    @rule()
    def end(self):
        end_track(self.store, self.next[0])
        self.ended = True

    @rule(steps=st.integers(1, 6))
    def some_steps(self, steps):
        for _ in range(steps):
            self.star.step()

    @rule()
    def run(self):
        self.star.run()

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds):
        self.star.pass_time(seconds)

    def subscribe(self, parameters, n):
        collector = Collector()
        collector.request = self.pairs[n].client.subscribe(NAME, collector, parameters)
        return collector

    @rule(n=st.integers(0, 2))
    def join(self, n):
        self.joined.append(self.subscribe(JOIN, n))

    @rule(n=st.integers(0, 2))
    def follow(self, n):
        self.lived.append(self.subscribe(LIVE, n))

    @rule(n=st.integers(0, 2), low=st.integers(0, 4), high=st.integers(0, 6))
    def fetch(self, n, low, high):
        collector = Collector()
        collector.range = Location(low, 0), Location(max(low, high), GROUP - 1)
        collector.request = self.pairs[n].client.fetch(
            NAME, collector, Parameters(location_filter=LocationFilter.range(*collector.range))
        )
        self.fetched.append(collector)

    @precondition(lambda self: self.joined)
    @rule(data=st.data())
    def cancel(self, data):
        data.draw(st.sampled_from(self.joined)).request.cancel()

    @precondition(lambda self: self.publishers)
    @rule()
    def lose_publisher(self):
        self.star.kill(self.publishers.pop())

    @precondition(lambda self: len(self.publishers) < 2)
    @rule()
    def new_namespace(self):
        self.new_publisher()

    def new_publisher(self):
        self.publishers.append(self.star.publisher(self.store))

    @precondition(lambda self: len(self.publishers) < 2)
    @rule(forward=st.sampled_from([None, 0]), settle=st.booleans())
    def new_publication(self, forward, settle):
        """A publisher that offers the track with PUBLISH, and answers FETCHes of it."""
        handler = CountingPublisher()
        handler.add_track(self.store)
        pair = self.star.connect(handler)
        pair.client.publish(self.store, Parameters(forward=forward))
        self.publishers.append(pair)
        if settle:
            self.star.run()

    @rule(n=st.integers(0, 2), forward=st.sampled_from([None, 0]))
    def want_tracks(self, n, forward):
        def offered(publication):
            collector = Collector()
            collector.request = publication
            self.lived.append(collector)
            publication.accept(collector)

        if self.pairs[n] not in self.wanting:
            self.wanting.append(self.pairs[n])
            self.pairs[n].client.subscribe_tracks(
                NAME.namespace[:1],
                Parameters(forward=forward),
                on_publish=offered,
                on_ended=lambda error: None,
            )

    @precondition(lambda self: self.lived)
    @rule(data=st.data(), forward=st.sampled_from([0, 1]))
    def pause_or_resume(self, data, forward):
        request = data.draw(st.sampled_from(self.lived)).request
        if request.state is RequestState.ESTABLISHED and request.done is None:
            request.update(Parameters(forward=forward), lambda answer: None)

    @rule(n=st.integers(0, 2))
    def lose_subscriber(self, n):
        self.star.kill(self.pairs[n])
        self.pairs[n] = self.star.connect()

    @invariant()
    def what_arrives_was_published_and_comes_once(self):
        for collector in (*self.joined, *self.lived, *self.fetched):
            for location, data in collector.payloads.items():
                assert self.published[location] == data
            assert collector.repeated == []

    @invariant()
    def the_books_of_the_cache_are_right(self):
        cache, tracks = self.star.relay.cache, self.star.relay.tracks
        assert cache.billed <= cache.budget + cache.transit
        objects = sum(bill(o) for t in tracks.values() for o in t.store.objects())
        knowledge = cache.statuses * OBJECT_OVERHEAD + cache.intervals * INTERVAL_OCTETS
        assert cache.billed == objects + knowledge + cache.properties
        assert cache.properties == sum(t.store.knowledge.properties for t in tracks.values())
        left_out = sum(gaps_left_out(fetch) for t in tracks.values() for fetch in t.ranges.fetches)
        assert cache.intervals == sum(t.store.knowledge.billed for t in tracks.values()) + left_out
        assert cache.statuses == sum(t.store.statuses for t in tracks.values())
        assert self.star.relay.counters.malformed_tracks == 0

    def teardown(self):
        self.star.run()
        if not self.publishers:
            self.new_publisher()
        while self.growing is not None:
            self.grow()
        if not self.ended:
            while self.next[1]:
                self.publish(10)
            end_track(self.store, self.next[0])
        self.star.run()
        for collector in self.fetched:
            start, end = collector.range
            if collector.streams == [(2, None)] and not collector.unknown:
                got = set(collector.locations)
                last = min(end, collector.accepted.end_location)
                assert got == {at for at in self.published if start <= at <= last}
        for collector in self.joined:
            clean = all(error is None for _, error in collector.streams) and not collector.unknown
            if collector.done == PublishDoneCode.TRACK_ENDED and clean:
                assert set(collector.locations) == set(self.published)
        # Whatever happened before: who comes now gets everything, once its publisher is known.
        self.star.pass_time(3)
        if not self.star.relay.namespaces.publications:
            self.new_publisher()
        last = self.star.subscriber(JOIN)[1]
        self.star.run()
        assert set(last.locations) == set(self.published) and last.repeated == []
        assert last.done == PublishDoneCode.TRACK_ENDED
        self.what_arrives_was_published_and_comes_once()
        for pair in tuple(self.star.pairs):
            waiting = pair.server.data_streams.waiting
            assert pair.server_transport.paused <= waiting.keys()
            self.star.kill(pair)
        self.star.pass_time(4)
        relay = self.star.relay
        assert not relay.sessions and not relay.offers.wanted and not relay.upstream_subscriptions
        assert not relay.waiting.pending and not relay.active
        assert relay.namespaces.publications == 0 and not relay.namespaces.listings
        for each in relay.tracks.values():
            assert not each.subscriptions and not each.requests and each.ranges.idle
            assert not feeds(each.filling) and not each.filling.bringing


TestScenario = Scenario.TestCase
TestScenario.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_who_comes_while_a_paused_subscription_waits_for_lost_streams_has_it_asked_for_anew():
    """PUBLISH_DONE has come, and counts a stream that the pause cut off before its header."""
    story = Scenario()
    story.new_namespace()
    story.run()
    story.fetch(n=1, low=0, high=1)
    story.run()
    story.publish(0)
    story.publish(0)
    story.want_tracks(n=0, forward=0)
    story.run()
    story.publish(9000)
    story.some_steps(1)
    story.teardown()
