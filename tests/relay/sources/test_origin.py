"""The origin is the authority: what its restart contradicts of the cache is dropped."""

from __future__ import annotations

import pytest

from moqt.values.codes import PublishDoneCode, RequestErrorCode
from moqt.values.names import Location
from tests.relay.inside import make_room
from tests.relay.peers import Listing, Refusing, Wanting, offering
from tests.relay.star import (
    JOIN,
    LIVE,
    NAME,
    CountingPublisher,
    Star,
    end_track,
    everything,
    payload,
    publish,
    track,
)


def other(group, object_, size=100):
    return b"other" * (size // 5)


def republished(groups, *, ended=False):
    """The same track, begun anew with other octets."""
    store = track()
    for g in range(groups):
        for o in range(4):
            store.append(g, o, other(g, o))
        store.finish_subgroup(g, 0)
    if ended:
        end_track(store, groups)
    return store


def anew(groups):
    return {Location(g, o): other(g, o) for g in range(groups) for o in range(4)}


def cached(star, groups=2, **first):
    """A track that has ended, is cached whole, and has no publisher any more."""
    publisher = star.publisher(track(groups, ended=True), **first)
    pair, collector = star.subscriber(JOIN)
    assert collector.payloads == everything(groups)
    star.kill(publisher)
    return pair


COMERS = pytest.mark.parametrize("come", [lambda star, store: star.publisher(store), offering])


@COMERS
@pytest.mark.parametrize("groups", [0, 1, 2, 3])
def test_a_publisher_that_begins_an_ended_track_anew_is_believed_and_not_the_cache(come, groups):
    star = Star()
    pair = cached(star)
    store = republished(groups)
    come(star, store)
    late = star.subscribe(pair, JOIN)
    for o in range(4):
        store.append(groups, o, other(groups, o))
    store.finish_subgroup(groups, 0)
    end_track(store, groups + 1)
    star.run()
    star.pass_time(2)
    assert late.payloads == anew(groups + 1) and not late.repeated
    assert late.done == PublishDoneCode.TRACK_ENDED
    assert star.relay.counters.tracks_renewed == 1 and star.relay.counters.malformed_tracks == 0
    assert star.fetch(pair).payloads == anew(groups + 1)


def test_a_track_that_has_ended_again_with_other_octets_is_found_to_be_another():
    star = Star()
    pair = cached(star)
    star.publisher(republished(2, ended=True))
    assert star.subscribe(pair, JOIN).payloads == anew(2)
    assert star.relay.counters.tracks_renewed == 1


def test_a_publisher_that_says_nothing_else_costs_one_object_and_the_cache_serves():
    star = Star()
    pair = cached(star)
    again = star.publisher(track(2, ended=True))
    for _ in range(3):
        late = star.subscribe(pair, JOIN)
        assert late.payloads == everything(2) and late.done == PublishDoneCode.TRACK_ENDED
    assert again.handler.fetch_ranges == [(Location(1, 3), Location(1, 3))]
    assert len(again.handler.subscribes) == 1
    assert star.relay.counters.tracks_renewed == 0


class Without(CountingPublisher):
    """Has not got what a FETCH asks for."""

    def fetch_received(self, request):
        request.reject(RequestErrorCode.DOES_NOT_EXIST, "there is no such Object")


def skipping(groups):
    """A track with every second group, each with other octets than the first publisher's."""
    store = track()
    for g in range(0, groups, 2):
        for o in range(4):
            store.append(g, o, other(g, o))
        store.finish_subgroup(g, 0)
    return store


@pytest.mark.parametrize(
    ("handler", "store"), [(Without, republished(2)), (CountingPublisher, skipping(3))]
)
def test_a_publisher_that_has_not_got_what_is_cached_is_believed(handler, store):
    star = Star()
    publisher = star.publisher(track(2))
    pair, _ = star.subscriber(LIVE)
    star.fetch(pair)
    star.kill(publisher)
    star.publisher(store, handler=handler())
    late = star.subscribe(pair, LIVE)
    star.pass_time(1)
    assert star.relay.counters.tracks_renewed == 1
    store.append(4, 0, other(4, 0))
    star.run()
    assert late.payloads == {Location(4, 0): other(4, 0)} and late.done is None


def test_a_publisher_that_has_not_got_the_track_takes_nothing_from_the_cache():
    star = Star()
    pair = cached(star)
    star.publisher(handler=Refusing())
    for _ in range(2):
        late = star.subscribe(pair, JOIN)
        assert late.payloads == everything(2) and late.done == PublishDoneCode.TRACK_ENDED


def test_who_listens_to_a_publisher_that_comes_back_as_another_is_told_and_gets_the_new():
    star, store = Star(publisher_linger=5), track(1)
    publisher = star.publisher(store)
    pair, old = star.subscriber(JOIN)
    for o in range(2):
        publish(store, 1, o)
    star.run()
    star.kill(publisher)
    star.pass_time(1)
    new = republished(1)
    star.publisher(new)
    star.run()
    for o in range(2):
        new.append(1, o, other(1, o))
        star.run()
    assert old.done == PublishDoneCode.INTERNAL_ERROR
    assert set(old.payloads.values()) <= set(everything(2).values())
    late = star.subscribe(pair, JOIN)
    new.append(1, 2, other(1, 2))
    star.run()
    assert late.payloads == {**anew(1), **{Location(1, o): other(1, o) for o in range(3)}}
    assert star.relay.counters.tracks_renewed == 1 and star.relay.counters.malformed_tracks == 0


@pytest.mark.parametrize("parts", [1, 3])
def test_an_object_that_comes_with_other_octets_is_what_shows_it(parts):
    """Nothing could be compared before: the publisher had nothing of what is cached."""
    star, store = Star(publisher_linger=5), track(1)
    publisher = star.publisher(store)
    pair, old = star.subscriber(JOIN)
    star.kill(publisher)
    new = track()
    star.publisher(new)
    for o in range(4):
        growing = new.begin(Location(0, o), subgroup=0, priority=None, properties=b"", length=300)
        for _ in range(parts):
            new.grow(growing, b"n" * (300 // parts))
            star.run()
        new.complete(growing)
    new.finish_subgroup(0, 0)
    star.run()
    assert old.done == PublishDoneCode.INTERNAL_ERROR and old.payloads == everything(1)
    late = star.subscribe(pair, JOIN)
    assert late.payloads == {Location(0, o): b"n" * 300 for o in range(4)}
    assert star.relay.counters.tracks_renewed == 1
    assert star.relay.cache.octets == star.relay.tracks[NAME].store.octets
    for each in tuple(star.pairs):
        star.kill(each)
    star.pass_time(60)
    star.relay.cache.forget(star.relay.tracks[NAME].store)
    star.relay.track_busy(star.relay.tracks[NAME])
    star.pass_time(1)
    star.assert_empty()


def test_who_asked_for_such_tracks_is_offered_the_new_one():
    star = Star()
    cached(star)
    wanting = Wanting(star, star.connect())
    assert len(wanting.offers) == 1
    store = republished(1)
    offering(star, store)
    assert len(wanting.offers) == 2 and wanting.names == [NAME, NAME]
    listing = Listing(star, star.connect(), (b"demo",))
    assert listing.events == []
    store.append(1, 0, other(1, 0))
    star.run()
    assert wanting.got[NAME].locations[-1] == Location(1, 0)


def test_publishers_that_are_there_together_and_contradict_each_other_make_a_track_malformed():
    star = Star()
    cached(star)
    stores = [republished(0), track()]
    for store in stores:
        star.publisher(store)
    _, late = star.subscriber(LIVE)
    stores[0].append(0, 0, other(0, 0))
    star.run()
    stores[1].append(0, 0, payload(0, 0))
    star.run()
    assert late.done == PublishDoneCode.MALFORMED_TRACK
    assert star.relay.counters.tracks_renewed == star.relay.counters.malformed_tracks == 1


@pytest.mark.parametrize("leave", ["withdraws", "dies"])
def test_a_publisher_that_goes_before_it_was_asked_leaves_the_cache_as_it_was(leave):
    star = Star()
    pair = cached(star)
    passing = star.publisher(track(1))
    if leave == "dies":
        star.kill(passing)
    else:
        passing.published.cancel()
        star.run()
    late = star.subscribe(pair, JOIN)
    assert late.payloads == everything(2) and late.done == PublishDoneCode.TRACK_ENDED


class NoFetches(CountingPublisher):
    """Never answers a FETCH."""

    def fetch_received(self, request):
        self.fetches.append(request)


def test_a_fetch_that_waits_for_the_publishers_answer_is_answered_when_the_cache_is_dropped():
    star = Star()
    publisher = star.publisher(track(1))
    pair = star.subscriber(JOIN)[0]
    star.kill(publisher)
    star.fetch(pair, (0, 0), (0, 2))
    cache = star.relay.cache
    make_room(cache, cache.budget - cache.billed + 1)
    assert cache.objects == 3
    new, comer = track(), NoFetches()
    star.publisher(new, handler=comer)
    star.subscribe(pair, LIVE)
    waiting = star.fetch(pair, (0, 3), (0, 3))
    assert len(comer.fetches) == 1 and not waiting.accepted and waiting.failed is None
    new.append(0, 0, other(0, 0))
    star.run()
    assert star.relay.counters.tracks_renewed == 1
    star.pass_time(1)
    assert waiting.failed.code == RequestErrorCode.INVALID_RANGE
