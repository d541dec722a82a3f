"""A relay behind a relay: unknown names are asked upstream, published ones announced."""

from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace

import pytest

from moqt.backoff import Backoff
from moqt.requests import RequestState
from moqt.values.codes import PublishDoneCode, RequestErrorCode
from moqt.values.errors import ConnectError, RequestError, SessionClosed
from moqt.values.messages import Goaway, LocationFilter, Parameters
from moqt.values.names import Location
from relay.mesh.interests import UNWANTED_SECONDS, Interests
from relay.mesh.uplink_client import UplinkClient
from relay.service.metrics import subscriptions
from tests.relay.chain import Chain
from tests.relay.peers import Listing, Wanting, offering, paused
from tests.relay.star import (
    JOIN,
    LIVE,
    NAME,
    NAMESPACE,
    end_track,
    everything,
    publish,
    track,
)


@pytest.fixture
def chain():
    chain = Chain()
    chain.connect()
    return chain


def test_a_subscribe_a_fetch_and_a_track_status_nobody_here_serves_are_asked_upstream(chain):
    store = track(2)
    chain.top.publisher(store)
    pair, collector = chain.bottom.subscriber(JOIN)
    assert collector.payloads == everything(2)
    fetched = chain.bottom.fetch(pair)
    assert fetched.payloads == everything(2)
    request = pair.client.track_status(NAME)
    chain.top.run()
    assert request.largest == Location(1, 3)
    publish(store, 2, 0)
    chain.top.run()
    assert collector.locations[-1] == Location(2, 0)
    _, refused = chain.bottom.subscriber(LIVE, NAME._replace(name=b"other"))
    assert refused.failed.code == RequestErrorCode.DOES_NOT_EXIST


@pytest.mark.parametrize("status", [True, False])
@pytest.mark.parametrize("asked", [(), ((0, 0), (9, 9)), ((1, 2), (1, 3))])
def test_that_a_track_ends_is_in_the_first_fetch_ok_through_two_relays(chain, status, asked):
    store = track(2)
    if status:
        end_track(store, 2)
    else:
        store.finish(PublishDoneCode.TRACK_ENDED)
    chain.top.publisher(store)
    for _ in range(2):
        fetched = chain.bottom.fetch(chain.bottom.connect(), *asked)
        assert fetched.request.end_of_track and fetched.request.end_location == Location(1, 3)
        assert fetched.payloads == {
            at: data for at, data in everything(2).items() if not asked or at >= asked[0]
        }
    part = chain.bottom.fetch(chain.bottom.connect(), (0, 0), (1, 2))
    assert not part.request.end_of_track


def test_a_track_that_goes_on_has_no_end_in_fetch_ok_through_two_relays(chain):
    chain.top.publisher(track(2))
    fetched = chain.bottom.fetch(chain.bottom.connect())
    assert fetched.payloads == everything(2) and not fetched.request.end_of_track


def test_two_subscribers_cost_upstream_one_subscription(chain):
    publisher = chain.top.publisher(track(1))
    chain.bottom.subscriber(JOIN)
    chain.bottom.subscriber(JOIN)
    assert subscriptions(chain.top.relay) == 1
    assert len(publisher.handler.subscribes) == 1


def test_a_publisher_here_is_preferred_to_upstream(chain):
    far = chain.top.publisher(track(1))
    near = chain.bottom.publisher(track(1))
    _, collector = chain.bottom.subscriber(JOIN)
    assert collector.payloads == everything(1)
    assert far.handler.subscribes == [] and len(near.handler.subscribes) == 1


@pytest.fixture
def slow():
    """Upstream accepts a SUBSCRIBE_NAMESPACE when it is told to."""
    held = []

    class Slow(Chain):
        def answer(self):
            while held:
                held.pop()(True)
            self.top.run()

    chain = Slow()
    chain.top.relay.namespaces.events.awaited.append(lambda *asked: held.append(asked[-1]))
    chain.connect()
    return chain


def accepted(listing):
    return listing.request.state is RequestState.ESTABLISHED


def test_a_listing_is_accepted_when_upstream_has_answered_and_tells_all_at_once(slow):
    slow.top.publisher()
    pair = slow.bottom.connect()
    listing = Listing(slow.bottom, pair, (b"demo",))
    assert listing.request.state is RequestState.PENDING
    slow.answer()
    assert accepted(listing) and listing.request.namespaces == {NAMESPACE}
    # what is asked for upstream already is known here: nothing is waited for
    again = Listing(slow.bottom, slow.bottom.connect(), NAMESPACE)
    assert accepted(again) and again.request.namespaces == {NAMESPACE}


def test_a_listing_waits_neither_for_an_upstream_that_is_slow_nor_for_one_that_is_lost(slow):
    slow.bottom.publisher()
    listing = Listing(slow.bottom, slow.bottom.connect(), (b"demo",))
    assert listing.request.state is RequestState.PENDING
    slow.pass_time(1)
    assert accepted(listing) and listing.request.namespaces == {NAMESPACE}
    other = Listing(slow.bottom, slow.bottom.connect(), (b"other",))
    assert other.request.state is RequestState.PENDING
    slow.cut()
    (refused,) = other.ended
    assert refused.code == RequestErrorCode.INTERNAL_ERROR and refused.retry_after_ms == 1000
    slow.answer()


def test_namespaces_upstream_are_listed_here_for_as_long_as_they_are_there(chain):
    pair = chain.bottom.connect()
    listing = Listing(chain.top, pair, (b"demo",))
    publisher = chain.top.publisher()
    assert listing.events == [(NAMESPACE, True)]
    near = chain.bottom.publisher()
    chain.top.kill(publisher)
    assert listing.events == [(NAMESPACE, True)], "a publisher here still has it"
    chain.top.kill(near)
    assert listing.events == [(NAMESPACE, True), (NAMESPACE, False)]


def test_without_upstream_its_namespaces_are_gone_and_come_back_with_it(chain):
    chain.top.publisher()
    listing = Listing(chain.top, chain.bottom.connect(), ())
    chain.cut()
    assert listing.request.namespaces == set()
    chain.connect()
    assert listing.request.namespaces == {NAMESPACE}


def test_a_track_completed_from_upstream_is_published_here_when_upstream_has_gone(chain):
    chain.top.publisher(track(2, ended=True))
    pair, collector = chain.bottom.subscriber(JOIN)
    assert collector.payloads == everything(2)
    listing = Listing(chain.top, pair, (b"demo",))
    chain.pass_time(1)
    chain.cut()
    assert listing.events == [(NAMESPACE, True)]
    assert chain.bottom.subscribe(pair, JOIN).payloads == everything(2)


def test_tracks_offered_upstream_are_offered_here_and_resumed_all_the_way(chain):
    store = track()
    wanting = Wanting(chain.top, chain.bottom.connect())
    publisher = offering(chain.top, store)
    assert wanting.names == [NAME] and not paused(publisher)
    publish(store, 0, 0)
    chain.top.run()
    assert wanting.got[NAME].locations == [Location(0, 0)]


def test_what_is_published_here_is_announced_upstream_when_that_is_wanted():
    chain = Chain(announce=True)
    store = track(1)
    publisher = chain.bottom.publisher(store)
    chain.connect()
    far = Listing(chain.top, chain.top.connect(), ())
    assert far.request.namespaces == {NAMESPACE}
    _, collector = chain.top.subscriber(JOIN)
    assert collector.payloads == everything(1)
    second = chain.bottom.publisher(namespace=NAMESPACE)
    chain.top.kill(publisher)
    assert far.request.namespaces == {NAMESPACE}
    chain.top.kill(second)
    assert far.request.namespaces == set()


def test_it_is_not_announced_unless_told_to(chain):
    chain.bottom.publisher()
    assert Listing(chain.top, chain.top.connect(), ()).request.namespaces == set()


def test_upstream_is_not_told_its_own_namespaces_nor_asked_for_what_it_asks_for():
    chain = Chain(announce=True)
    chain.connect()
    chain.top.publisher(namespace=(b"else",))
    Listing(chain.top, chain.bottom.connect(), ())
    chain.bottom.publisher(track(1))
    seen = []
    chain.link.server.subscribe_namespace(
        (), on_namespace=lambda *event: seen.append(event), on_ended=lambda error: None
    )
    _, refused = chain.top.subscriber(LIVE, NAME._replace(name=b"nothing"))
    assert seen == [(NAMESPACE, True)]
    assert refused.failed.code == RequestErrorCode.DOES_NOT_EXIST


def test_a_redirect_of_upstream_is_passed_on_whole(chain):
    chain.top.relay.subscribe_received = lambda request: request.redirect(
        "moqt://elsewhere.example/x", (b"moved",), b"there", retry_after_ms=5
    )
    _, collector = chain.bottom.subscriber(LIVE)
    error = collector.failed
    assert error.code == RequestErrorCode.REDIRECT and error.retry_after_ms == 5
    assert error.redirect == ("moqt://elsewhere.example/x", (b"moved",), b"there")


def test_a_rendezvous_waits_upstream_too_and_nobody_else_waits_with_it(chain):
    wait = Parameters(rendezvous_timeout=20_000, location_filter=LocationFilter.next_object())
    _, collector = chain.bottom.subscriber(wait)
    _, impatient = chain.bottom.subscriber(LIVE)
    chain.pass_time(6)
    assert collector.failed is None
    assert impatient.failed.code == RequestErrorCode.TIMEOUT
    store = track()
    chain.top.publisher(store)
    publish(store, 0, 0)
    chain.top.run()
    assert collector.locations == [Location(0, 0)]


def test_after_a_reconnection_next_object_repeats_nothing_and_a_fill_brings_all():
    chain = Chain(linger=0)
    chain.connect()
    store = track(1)
    chain.top.publisher(store)
    pair, collector = chain.bottom.subscriber(LIVE)
    publish(store, 1, 0)
    chain.top.run()
    chain.cut()
    assert collector.done == PublishDoneCode.INTERNAL_ERROR
    publish(store, 1, 1)
    chain.connect()
    again = chain.bottom.subscribe(pair, LIVE)
    publish(store, 1, 2)
    chain.top.run()
    assert again.locations == [Location(1, 2)]
    publish(store, 1, 3)
    chain.top.run()
    assert chain.bottom.subscribe(pair, JOIN).payloads == everything(2)


def test_goaway_of_upstream_moves_its_subscriptions_without_a_hole():
    chain = Chain()
    old = chain.connect()
    store = track()
    chain.top.publisher(store)
    _, collector = chain.bottom.subscriber(JOIN)
    publish(store, 0, 0)
    chain.top.run()
    chain.connect()
    assert subscriptions(chain.top.relay) == 1
    old.client.drain()
    chain.top.run()
    assert old.client.closed is not None
    chain.uplink.detach(old.client)
    for at in range(1, 4):
        publish(store, 0, at)
    end_track(store, 1)
    chain.top.run()
    assert collector.payloads == everything(1) and not collector.repeated
    assert collector.done == PublishDoneCode.TRACK_ENDED


def test_prefixes_that_one_covers_are_asked_for_once():
    asked, ended = [], {}

    class Request:
        def __init__(self, prefix):
            self.prefix = prefix

        def cancel(self):
            asked.append(("-", self.prefix))

    def ask(session, prefix, end):
        asked.append(("+", prefix))
        ended[prefix] = end
        return Request(prefix)

    interests = Interests(ask)
    interests.attach("session")
    a, ab, ac = (b"a",), (b"a", b"b"), (b"a", b"c")
    interests.add(ab, 1)
    interests.add(ac, 2)
    interests.add(ab, 3)
    assert asked == [("+", ab), ("+", ac)]
    asked.clear()
    interests.add(a, 4)
    assert sorted(asked) == [("+", a), ("-", ab), ("-", ac)]
    asked.clear()
    interests.remove(a, 4)
    interests.tick(UNWANTED_SECONDS - 1)
    interests.add(a, 4)
    interests.tick(UNWANTED_SECONDS + 1)
    interests.remove(a, 4)
    assert asked == []
    interests.tick(2 * UNWANTED_SECONDS + 1)
    assert sorted(asked) == [("+", ab), ("+", ac), ("-", a)]
    asked.clear()
    interests.remove(ab, 1)
    assert asked == []
    interests.remove(ab, 3)
    assert asked == [("-", ab)]
    asked.clear()
    now = 2 * UNWANTED_SECONDS + 1
    ended[ac](None)
    interests.tick(now + 0.5)
    assert asked == []
    interests.tick(now + 1.5)
    assert asked == [("+", ac)]


def test_nothing_is_left_of_a_wait_for_an_upstream_that_does_not_answer():
    class Unanswered:
        state = RequestState.PENDING

        def cancel(self):
            """Nobody is told."""

    class Waiter:
        called = 0

        def __call__(self, known):
            self.called += known

    interests = Interests(lambda session, prefix, end: Unanswered())
    interests.attach("session")
    interests.add((b"a",), 1)
    waiter = Waiter()
    enough = interests.await_answer((b"a", b"b"), waiter)
    assert waiter.called == 0
    enough()
    assert waiter.called == 1
    left = weakref.ref(waiter)
    del waiter, enough
    gc.collect()
    assert left() is None


def test_an_overlap_that_upstream_still_sees_is_asked_for_again(chain):
    pair = chain.bottom.connect()
    narrow = Listing(chain.top, pair, (b"demo", b"live"))
    chain.top.publisher()
    wide = Listing(chain.top, chain.bottom.connect(), (b"demo",))
    chain.pass_time(3)
    assert narrow.request.namespaces == wide.request.namespaces == {NAMESPACE}


def test_who_lists_waits_on_where_upstream_still_sees_an_overlap_that_is_not_its_own():
    asked, told = [], []

    class Pending:
        state = RequestState.PENDING

        def cancel(self):
            """Nobody hears of it."""

    def ask(session, prefix, ended):
        asked.append((prefix, ended))
        return Pending()

    def wait(*prefix):
        interests.await_answer(prefix, lambda known: told.append((prefix, known)))

    interests = Interests(ask)
    interests.attach(object())
    interests.add((b"a",), 1)
    wait(b"a")
    wait(b"a", b"b")
    asked[-1][1](RequestError(RequestErrorCode.PREFIX_OVERLAP, "another one overlaps"))
    wait(b"a")
    assert told == []
    interests.tick(60)
    assert told == [] and [prefix for prefix, _ in asked] == [(b"a",), (b"a",)]
    interests.accepted((b"a",))
    assert told == [((b"a",), True), ((b"a", b"b"), True), ((b"a",), True)]
    asked[-1][1](RequestError(RequestErrorCode.PREFIX_OVERLAP, "another one overlaps"))
    wait(b"a")
    interests.attach(None)
    assert told[3:] == [((b"a",), False)]


# -- the connection ----------------------------------------------------------------------------


class FakeSession:
    """A session that was accepted, and ends as told."""

    def __init__(self, goaway=None):
        self.session, self.closed = self, None
        self.transport = SimpleNamespace(connection_id="0011", peer_address="")
        self._goaway = goaway

    async def wait_goaway(self):
        if self._goaway is not None:
            return Goaway(self._goaway, 0)
        raise SessionClosed(0, "ended at once")

    async def wait_closed(self):
        return self.closed

    def drain(self):
        self.closed = SessionClosed(0, "drained")

    def close(self):
        self.closed = SessionClosed(0, "closed")


class FakeUplink:
    session = None

    def leave(self, session):
        """Nobody else is there."""

    def attach(self, session):
        self.session = session

    def detach(self, session):
        if self.session is session:
            self.session = None


class Enough(Exception):
    pass


def run_client(make, *, sleeps, connects=1000):
    """The URLs connected to and the delays between, until `sleeps` delays were asked for."""
    urls, delays = [], []

    async def connect(url):
        urls.append(url)
        if len(urls) > connects:
            raise Enough
        return make(len(urls))

    async def sleep(seconds):
        delays.append(seconds)
        if len(delays) >= sleeps:
            raise Enough

    client = UplinkClient(
        FakeUplink(), "moqt://home", connect, backoff=Backoff(jitter=lambda: 0.0), sleep=sleep
    )
    with pytest.raises(Enough):
        asyncio.run(client.run())
    return urls, delays


def test_a_server_that_accepts_and_closes_20_times_is_tried_with_growing_delays():
    urls, delays = run_client(lambda number: FakeSession(), sleeps=20)
    assert urls == ["moqt://home"] * 20
    assert delays[:6] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0] and set(delays[6:]) == {30.0}


def test_a_server_that_is_not_there_is_tried_with_growing_delays():
    def refuse(number):
        raise ConnectError("nobody there")

    _, delays = run_client(refuse, sleeps=4)
    assert delays == [0.5, 1.0, 2.0, 4.0]


def test_relays_that_send_each_other_their_clients_do_not_make_it_spin():
    def circle(number):
        return FakeSession("moqt://b" if number % 2 else "moqt://a")

    urls, delays = run_client(circle, sleeps=3)
    assert urls[:3] == ["moqt://home", "moqt://b", "moqt://a"]
    assert len(urls) == 7, "four moves at once, then one for each delay"
    assert delays == [0.5, 1.0, 2.0]


def test_goaway_without_a_uri_connects_to_the_same_again():
    urls, _ = run_client(lambda number: FakeSession(""), sleeps=1)
    assert set(urls) == {"moqt://home"}
