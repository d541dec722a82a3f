"""Of a request that is over nothing is left to the cyclic collector, which stops every session."""

from __future__ import annotations

import gc

import pytest

from moqt.delivery.stream import StreamDelivery
from moqt.delivery.subscription import SubscriptionDelivery
from moqt.publisher import Publisher
from moqt.requests import OpenRequest
from moqt.requests.stream import RequestStream
from moqt.requests.updates import Updates
from moqt.values.codes import PublishDoneCode
from moqt.values.messages import Parameters
from tests.relay.star import JOIN, LIVE, NAME, NAMESPACE, Collector, Star, track

PARTS = (OpenRequest, RequestStream, Updates, StreamDelivery, SubscriptionDelivery)


class Forgetting(Collector):
    """Refers to nothing of the request that it is the receiver of."""

    def subscribe_accepted(self, request):
        """It is not kept."""

    fetch_accepted = subscribe_accepted


def parts():
    """What there is of requests, in all sessions at both ends."""
    return [each for each in gc.get_objects() if isinstance(each, PARTS)]


def subscription(star, pair, store):
    request = pair.client.subscribe(NAME, Forgetting(), JOIN)
    star.run()
    request.cancel()


def to_the_end(star, pair, store):
    pair.client.subscribe(NAME, Forgetting(), JOIN)
    star.run()
    store.finish(PublishDoneCode.TRACK_ENDED)


def update(star, pair, store):
    request = pair.client.subscribe(NAME, Forgetting(), LIVE)
    star.run()
    request.update(Parameters(forward=0), lambda answer: None)
    star.run()
    request.update(Parameters(forward=1), lambda answer: None)
    star.run()
    request.cancel()


def fetch(star, pair, store):
    pair.client.fetch(NAME, Forgetting(), Parameters())


def fetch_given_up(star, pair, store):
    request = pair.client.fetch(NAME, Forgetting(), Parameters())
    request.cancel()


def refused(star, pair, store):
    pair.client.subscribe(NAME._replace(name=b"other"), Forgetting(), LIVE)


def status(star, pair, store):
    pair.client.track_status(NAME)


def listing(star, pair, store):
    request = pair.client.subscribe_namespace(
        NAMESPACE[:1], on_namespace=lambda *told: None, on_ended=lambda error: None
    )
    star.run()
    request.cancel()


@pytest.mark.parametrize(
    "ask",
    [
        subscription,
        to_the_end,
        update,
        fetch,
        fetch_given_up,
        refused,
        status,
        listing,
    ],
    ids=lambda ask: ask.__name__,
)
def test_what_is_over_is_freed_without_the_cyclic_collector(ask):
    star, store = Star(linger=1, failure_memory=1), track(2)
    star.publisher(store, handler=Publisher())
    pair = star.connect()
    star.fetch(pair)
    star.pass_time(5)
    gc.collect()
    gc.disable()
    try:
        before = {id(each) for each in parts()}
        ask(star, pair, store)
        star.run()
        star.pass_time(5)
        left = [type(each).__name__ for each in parts() if id(each) not in before]
    finally:
        gc.enable()
    assert left == []
