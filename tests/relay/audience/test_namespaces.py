"""MOQT "Publishing Namespaces" and "Subscribing to Namespaces" at a relay."""

from __future__ import annotations

from moqt.values.codes import RequestErrorCode
from moqt.values.names import FullTrackName, Location
from relay.audience.prefixes import PrefixMap
from tests.relay.inside import is_empty
from tests.relay.peers import Listing
from tests.relay.star import JOIN, LIVE, NAME, NAMESPACE, Star, end_track, publish, track


def test_published_namespaces_are_told_to_every_matching_subscriber():
    star = Star()
    early = Listing(star, star.connect(), (b"demo",))
    other = Listing(star, star.connect(), (b"else",))
    publisher = star.publisher()
    late = Listing(star, star.connect(), ())
    assert early.events == late.events == [(NAMESPACE, True)]
    assert other.events == []
    publisher.published.cancel()
    star.run()
    assert early.events == late.events == [(NAMESPACE, True), (NAMESPACE, False)]


def test_a_session_is_told_of_its_own_namespaces():
    star = Star()
    publisher = star.publisher()
    listing = Listing(star, publisher, (b"demo",))
    assert listing.events == [(NAMESPACE, True)]
    other = (*NAMESPACE, b"later")
    publisher.client.publish_namespace(other, on_ended=lambda error: None)
    star.run()
    assert listing.events[1:] == [(other, True)]


def test_a_namespace_stays_as_long_as_one_publisher_has_it():
    star = Star()
    publishers = [star.publisher(), star.publisher()]
    listing = Listing(star, star.connect(), (b"demo",))
    star.kill(publishers[0])
    assert listing.events == [(NAMESPACE, True)]
    star.kill(publishers[1])
    assert listing.events == [(NAMESPACE, True), (NAMESPACE, False)]


def test_a_namespace_with_a_complete_cached_track_stays_until_the_cache_drops_it():
    star, store = Star(), track()
    publisher = star.publisher(store)
    listing = Listing(star, star.connect(), (b"demo",))
    star.subscriber(JOIN)
    for o in range(4):
        publish(store, 0, o)
    end_track(store, 1)
    star.run()
    star.kill(publisher)
    assert listing.events == [(NAMESPACE, True)]
    # Making room for others drops one Object: the track is complete no more.
    star.relay.cache.budget = star.relay.cache.billed
    star.relay.cache.reserve(store, 1)
    star.run()
    assert listing.events == [(NAMESPACE, True), (NAMESPACE, False)]


def test_a_prefix_publisher_that_leaves_a_complete_track_leaves_its_exact_namespace():
    star, store = Star(), track(1, ended=True)
    publisher = star.publisher(store, namespace=(b"demo",))
    listing = Listing(star, star.connect(), ())
    star.subscriber(JOIN)
    star.kill(publisher)
    assert listing.events[0] == ((b"demo",), True)
    assert sorted(listing.events[1:]) == [((b"demo",), False), (NAMESPACE, True)]
    again = star.publisher(store, namespace=(b"demo",))
    assert listing.request.namespaces == {(b"demo",)}
    star.kill(again)
    assert listing.request.namespaces == {NAMESPACE}


def test_an_incomplete_track_does_not_keep_its_namespace():
    star, store = Star(), track()
    publisher = star.publisher(store)
    listing = Listing(star, star.connect(), ())
    star.subscriber(LIVE)
    publish(store, 0, 0)
    star.run()
    star.kill(publisher)
    assert listing.request.namespaces == set()


def test_overlapping_namespace_subscriptions_of_one_session_are_refused():
    star = Star()
    pair = star.connect()
    Listing(star, pair, (b"a",))
    second = Listing(star, pair, (b"a", b"b"))
    assert second.ended[0].code == RequestErrorCode.PREFIX_OVERLAP
    Listing(star, pair, (b"b", b"c", b"d"))
    for prefix in ((b"b", b"c"), (b"b",), ()):
        assert Listing(star, pair, prefix).ended[0].code == RequestErrorCode.PREFIX_OVERLAP


def test_a_withdrawn_namespace_is_asked_no_more_but_what_runs_goes_on():
    star, store = Star(), track()
    publisher = star.publisher(store)
    _, collector = star.subscriber(LIVE)
    publisher.published.cancel()
    star.run()
    publish(store, 0, 0)
    star.run()
    assert collector.locations == [Location(0, 0)]
    _, second = star.subscriber(LIVE)
    assert second.accepted  # the upstream subscription is there
    _, other = star.subscriber(LIVE, FullTrackName(NAMESPACE, b"other"))
    assert other.failed.code == RequestErrorCode.DOES_NOT_EXIST


def test_published_twice_by_one_session_it_is_withdrawn_once():
    star = Star()
    publisher = star.publisher()
    second = publisher.client.publish_namespace(NAMESPACE, on_ended=lambda error: None)
    star.run()
    listing = Listing(star, star.connect(), ())
    second.cancel()
    star.run()
    assert listing.request.namespaces == {NAMESPACE}
    publisher.published.cancel()
    star.run()
    assert listing.request.namespaces == set()
    assert star.relay.namespaces.publications == 0


def test_prefix_map_finds_in_both_directions_and_leaves_nothing_behind():
    table = PrefixMap()
    a, ab, abc, b = (b"a",), (b"a", b"b"), (b"a", b"b", b"c"), (b"b",)
    for namespace in (a, ab, abc, b):
        table.add(namespace, b"/".join(namespace))
    assert list(table.above(ab)) == [b"a/b", b"a"]
    assert sorted(table.under(a)) == [b"a", b"a/b", b"a/b/c"]
    assert sorted(table.under(())) == [b"a", b"a/b", b"a/b/c", b"b"]
    assert table.at(ab) == [b"a/b"] and table.at((b"x",)) == []
    for namespace in (a, ab, abc, b):
        table.remove(namespace, b"/".join(namespace))
        table.remove(namespace, b"never added")
    assert is_empty(table) and len(table) == 0


def test_a_namespace_of_no_fields_matches_everything():
    star, store = Star(), track(1)
    star.publisher(store, namespace=())
    _, collector = star.subscriber(JOIN, NAME)
    assert len(collector.locations) == 4


def test_a_publisher_that_comes_and_goes_costs_little_for_each_track_that_goes_on():
    star = Star()
    names = [FullTrackName(NAMESPACE, b"%d" % number) for number in range(100)]
    first = star.publisher(*(track(1, name=name) for name in names))
    pair = star.connect()
    for name in names:
        star.fetch(pair, (0, 0), (0, 3), name=name)
    star.kill(first)
    star.kill(pair)
    star.pass_time(1)
    assert len(star.relay.tracks) == 100
    published = star.relay.namespaces.published
    looks = []
    above = published.above
    published.above = lambda namespace: looks.append(namespace) or above(namespace)
    second = star.publisher(namespace=NAMESPACE[:1])
    star.kill(second)
    assert len(looks) < 20
