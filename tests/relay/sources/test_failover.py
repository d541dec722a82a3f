"""Where a track comes from: who is asked first, who next, and what its readers see of that."""

from __future__ import annotations

import pytest

from moqt.values.codes import PublishDoneCode, RequestErrorCode
from moqt.values.errors import RequestError
from moqt.values.names import Location
from tests.relay.chain import Chain
from tests.relay.peers import Refusing, offering
from tests.relay.star import (
    JOIN,
    LIVE,
    NAME,
    NAMESPACE,
    CountingPublisher,
    SilentPublisher,
    Star,
    end_track,
    everything,
    objects,
    payload,
    publish,
    track,
    wants,
)

GROUP_1 = [(1, object_) for object_ in range(4)]


def chained(**settings):
    chain = Chain(**settings)
    chain.connect()
    return chain


# -- who is asked --------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", [NAMESPACE, NAMESPACE[:1]])
@pytest.mark.parametrize(
    "code",
    [
        RequestErrorCode.DOES_NOT_EXIST,
        RequestErrorCode.NOT_SUPPORTED,
        RequestErrorCode.UNAUTHORIZED,
        RequestErrorCode.EXCESSIVE_LOAD,
    ],
)
def test_a_publisher_here_that_refuses_hides_nothing_of_what_upstream_has(namespace, code):
    chain = chained()
    store = track(1)
    chain.top.publisher(store)
    near = chain.bottom.publisher(handler=Refusing(code), namespace=namespace)
    pair, collector = chain.bottom.subscriber(JOIN)
    for at in GROUP_1:
        publish(store, *at)
    chain.top.run()
    assert collector.payloads == everything(2) and not collector.repeated
    assert chain.bottom.fetch(pair).payloads == everything(2)
    status = pair.client.track_status(NAME)
    chain.top.run()
    assert status.largest == Location(1, 3)
    assert len(near.handler.subscribes) == 1


def test_a_publisher_here_that_is_slow_to_answer_hides_nothing_for_longer_than_a_moment():
    chain = chained()
    chain.top.publisher(track(1))
    chain.bottom.publisher(handler=SilentPublisher())
    _, collector = chain.bottom.subscriber(JOIN)
    chain.pass_time(2)
    assert collector.payloads == everything(1)


def test_upstreams_are_asked_in_their_order_until_one_has_the_track():
    star, asked = Star(), []

    class Upstream(CountingPublisher):
        def __init__(self, number, store=None):
            super().__init__()
            self.number = number
            if store is not None:
                self.add_track(store)

        def subscribe_received(self, request):
            asked.append(self.number)
            super().subscribe_received(request)

    for number in range(4):
        upstream = star.connect(Upstream(number, track(1) if number >= 2 else None))
        star.run()
        star.relay.add_upstream(upstream.server)
    _, collector = star.subscriber(JOIN)
    assert asked == [0, 1, 2] and collector.payloads == everything(1)


def test_what_nobody_has_is_refused_when_all_have_been_asked():
    chain = chained()
    near = chain.bottom.publisher(handler=Refusing())
    _, collector = chain.bottom.subscriber(JOIN)
    assert collector.failed.code == RequestErrorCode.DOES_NOT_EXIST
    assert len(near.handler.subscribes) == 1


def test_upstream_is_not_asked_for_what_it_asks_for_when_the_publisher_here_refuses():
    chain = chained(announce=True)
    near = chain.bottom.publisher(handler=Refusing())
    _, collector = chain.top.subscriber(JOIN)
    assert collector.failed.code == RequestErrorCode.DOES_NOT_EXIST
    assert len(near.handler.subscribes) == 1
    # nor does it wait for us while we ask it
    _, here = chain.bottom.subscriber(JOIN)
    assert here.failed.code == RequestErrorCode.DOES_NOT_EXIST


# -- what is lost --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["lost", "refused", PublishDoneCode.GOING_AWAY])
def test_a_publisher_here_that_is_lost_costs_nothing_while_upstream_has_the_track(how):
    chain = chained(publisher_linger=5)
    store = track(1)
    chain.top.publisher(store)
    near = chain.bottom.publisher(store)
    _, collector = chain.bottom.subscriber(JOIN)
    publish(store, 1, 0)
    growing = store.begin(Location(1, 1), subgroup=0, priority=None, properties=b"", length=1000)
    store.grow(growing, b"a" * 500)
    chain.top.run()
    assert collector.parts == 4 * 100 + 100 + 500
    if how == "lost":
        chain.bottom.kill(near)
    elif how == "refused":
        near.handler.subscribes[0].end(PublishDoneCode.UNAUTHORIZED, "no more")
    else:
        near.handler.subscribes[0].end(how, "")
    store.grow(growing, b"b" * 500)
    store.complete(growing)
    for o in (2, 3):
        publish(store, 1, o)
    end_track(store, 2)
    chain.top.run()
    chain.pass_time(1)
    due = everything(2)
    due[Location(1, 1)] = b"a" * 500 + b"b" * 500
    assert collector.payloads == due and not collector.repeated
    assert collector.done == PublishDoneCode.TRACK_ENDED


@pytest.mark.parametrize("first", ["publisher", "offer"])
def test_subscribers_wait_for_a_publisher_that_comes_back(first):
    star, store = Star(publisher_linger=5), track(1)
    publisher = star.publisher(store) if first == "publisher" else offering(star, store)
    _, collector = star.subscriber(JOIN)
    publish(store, 1, 0)
    growing = store.begin(Location(1, 1), subgroup=0, priority=None, properties=b"", length=1000)
    store.grow(growing, b"a" * 500)
    star.run()
    star.kill(publisher)
    star.pass_time(3)
    assert collector.done is None and star.relay.counters.publishers_lost == 1
    store.grow(growing, b"b" * 500)
    store.complete(growing)
    publish(store, 1, 2)
    star.publisher(store)
    publish(store, 1, 3)
    star.run()
    due = everything(2)
    due[Location(1, 1)] = b"a" * 500 + b"b" * 500
    assert collector.payloads == due and not collector.repeated
    assert star.relay.counters.publishers_returned == 1
    star.pass_time(10)
    assert collector.done is None
    end_track(store, 2)
    star.run()
    assert collector.done == PublishDoneCode.TRACK_ENDED


def test_who_subscribes_while_the_publisher_is_away_waits_with_the_others():
    star, store = Star(publisher_linger=5), track(1)
    publisher = star.publisher(store)
    star.subscriber(JOIN)
    star.kill(publisher)
    _, late = star.subscriber(JOIN)
    star.pass_time(2)
    assert late.failed is None
    star.publisher(store)
    assert late.payloads == everything(1)


def test_subscribers_of_a_publisher_that_does_not_come_back_are_told_after_the_linger():
    star, store = Star(publisher_linger=5), track(1)
    publisher = star.publisher(store)
    _, collector = star.subscriber(LIVE)
    star.kill(publisher)
    _, late = star.subscriber(LIVE)
    star.pass_time(4.5)
    assert collector.done is None and late.failed is None
    star.pass_time(1)
    assert collector.done == PublishDoneCode.INTERNAL_ERROR
    assert late.failed.code == RequestErrorCode.DOES_NOT_EXIST
    assert star.relay.counters.publishers_returned == 0


def test_an_upstream_that_has_the_track_a_moment_later_is_found_within_the_linger():
    chain = chained(publisher_linger=5)
    store = track(1)
    near = chain.bottom.publisher(store)
    _, collector = chain.bottom.subscriber(JOIN)
    chain.bottom.kill(near)
    chain.pass_time(1)
    chain.top.publisher(store)
    chain.pass_time(2)
    publish(store, 1, 0)
    chain.top.run()
    assert collector.done is None and collector.locations[-1] == Location(1, 0)


def test_readers_behind_an_upstream_that_comes_back_do_not_notice():
    chain = chained(publisher_linger=5)
    store = track(1)
    chain.top.publisher(store)
    _, collector = chain.bottom.subscriber(JOIN)
    publish(store, 1, 0)
    chain.top.run()
    chain.cut()
    publish(store, 1, 1)
    chain.pass_time(2)
    chain.connect()
    for o in (2, 3):
        publish(store, 1, o)
    end_track(store, 2)
    chain.top.run()
    assert collector.payloads == everything(2) and not collector.repeated
    assert collector.done == PublishDoneCode.TRACK_ENDED


# -- subscriptions of ours that end though the track does not -------------------------------


def refusing_filters(publisher):
    def refuse(parameters):
        if parameters.range_filters:
            raise RequestError(RequestErrorCode.INVALID_FILTER, "no filters later")

    publisher.client.rules.check_filters = refuse


@pytest.mark.parametrize("linger", [0, 5])
def test_a_publisher_that_refuses_to_narrow_later_is_asked_anew_for_everything(linger):
    star, store = Star(linger=1, publisher_linger=linger), track()
    publisher = star.publisher(store)
    _, wide = star.subscriber(LIVE)
    _, narrow = star.subscriber(wants(objects((0, 1))))
    refusing_filters(publisher)
    publish(store, 0, 0)
    star.run()
    wide.request.cancel()
    star.run()
    star.pass_time(3)
    assert [r.state.name for r in publisher.handler.subscribes] == ["CLOSED", "ESTABLISHED"]
    publish(store, 0, 1)
    star.run()
    assert narrow.done is None and narrow.payloads == {
        Location(0, o): payload(0, o) for o in (0, 1)
    }
    star.pass_time(5)
    assert len(publisher.handler.subscribes) == 2, "it is not asked to narrow again"


def test_what_was_on_its_way_when_it_refused_is_fetched():
    star, store = Star(linger=1), track()
    publisher = star.publisher(store)
    _, wide = star.subscriber(LIVE)
    _, narrow = star.subscriber(wants(objects((0, 5))))
    refusing_filters(publisher)
    growing = store.begin(Location(0, 0), subgroup=0, priority=None, properties=b"", length=100)
    store.grow(growing, payload(0, 0)[:50])
    star.run()
    wide.request.cancel()
    star.run()
    star.pass_time(3)
    store.grow(growing, payload(0, 0)[50:])
    store.complete(growing)
    publish(store, 0, 1)
    star.run()
    assert narrow.payloads == {Location(0, o): payload(0, o) for o in (0, 1)}
    assert not narrow.repeated and narrow.done is None
