"""Several upstream relays, in an order; and what is answered while one cannot be asked."""

from __future__ import annotations

import pytest

from moqt.values.codes import PublishDoneCode, RequestErrorCode
from moqt.values.names import FullTrackName
from relay.mesh.uplink import Uplink
from relay.service.metrics import subscriptions
from tests.relay.peers import Listing
from tests.relay.star import (
    JOIN,
    NAME,
    NAMESPACE,
    Star,
    end_track,
    everything,
    publish,
    track,
)


class Below:
    """A relay below `count` others, the first of which is asked first."""

    def __init__(self, count=2, **settings):
        self.below = Star(**settings)
        self.above = [Star(**settings) for _ in range(count)]
        for each in self.above:
            each.pairs = self.below.pairs
        self.uplinks = [Uplink(self.below.relay, place=place) for place in range(count)]

    def connect(self, place):
        link = self.above[place].connect(self.below.relay)
        self.below.run()
        self.uplinks[place].attach(link.client)
        self.below.run()
        return link

    def cut(self, place, link):
        self.below.kill(link)
        link.client.connection_closed(0, "idle time-out", False)
        self.uplinks[place].detach(link.client)
        self.below.run()

    def pass_time(self, seconds, step=0.5):
        until = self.below.now + seconds
        while self.below.now < until:
            now = min(self.below.now + step, until)
            for star in (self.below, *self.above):
                star.now = now
                star.relay.tick(now)
            for uplink in self.uplinks:
                uplink.tick(now)
            for pair in self.below.pairs:
                pair.client.tick(now)
                pair.server.tick(now)
            self.below.run()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_first_upstream_that_has_the_track_is_asked_whichever_was_connected_first(order):
    world = Below(3)
    for place in order:
        world.connect(place)
    publishers = [star.publisher(track(1)) for star in world.above[1:]]
    _, collector = world.below.subscriber(JOIN)
    assert collector.payloads == everything(1)
    assert [len(each.handler.subscribes) for each in publishers] == [1, 0]


def test_while_an_upstream_cannot_be_asked_nothing_is_said_not_to_exist(caplog):
    world = Below(2)
    for connected in ((), (1,), (0, 1)):
        if connected:
            world.connect(connected[0])
        for _ in range(2):
            _, collector = world.below.subscriber(JOIN)
            if len(connected) < 2:
                assert collector.failed.code == RequestErrorCode.INTERNAL_ERROR
                assert collector.failed.retry_after_ms == 1000
                assert "cannot be asked" in collector.failed.reason
            else:
                assert collector.failed.code == RequestErrorCode.DOES_NOT_EXIST
    assert world.below.relay.counters.requests_unreachable == 4
    told = [each for each in caplog.records if "cannot be asked: requests" in each.message]
    assert len(told) == 2, "once for each time"


def test_what_a_reachable_upstream_has_is_served_while_another_is_not_there():
    world = Below(2)
    world.connect(1)
    world.above[1].publisher(track(1))
    _, collector = world.below.subscriber(JOIN)
    assert collector.payloads == everything(1)


def test_what_its_publisher_here_denies_does_not_exist_though_an_upstream_cannot_be_asked():
    world = Below(1)
    near = world.below.publisher(track(1))
    world.below.publisher(namespace=NAMESPACE[:1])
    _, collector = world.below.subscriber(JOIN)
    assert collector.payloads == everything(1)
    pair, other = world.below.connect(), FullTrackName(NAMESPACE, b"other")
    for _ in range(2):
        denied = world.below.subscribe(pair, JOIN, other)
        assert denied.failed.code == RequestErrorCode.DOES_NOT_EXIST
        assert denied.failed.retry_after_ms == 1000, "upstream may have it"
    elsewhere = FullTrackName((*NAMESPACE, b"more"), b"other")
    unknown = world.below.subscribe(pair, JOIN, elsewhere)
    assert unknown.failed.code == RequestErrorCode.INTERNAL_ERROR, "it is published as a prefix"
    near.published.cancel()
    unknown = world.below.subscribe(pair, JOIN, other)
    assert unknown.failed.code == RequestErrorCode.INTERNAL_ERROR


def test_readers_do_not_notice_that_an_upstream_is_left_for_the_next_one():
    world, store = Below(2), track(1)
    links = [world.connect(place) for place in range(2)]
    for star in world.above:
        star.publisher(store)
    _, collector = world.below.subscriber(JOIN)
    links[0].server.send_goaway("", 5000)
    world.below.run()
    world.uplinks[0].leave(links[0].client)
    world.below.run()
    assert subscriptions(world.above[1].relay) == 1
    publish(store, 1, 0)
    world.below.run()
    world.cut(0, links[0])
    for at in range(1, 4):
        publish(store, 1, at)
    end_track(store, 2)
    world.below.run()
    assert collector.payloads == everything(2) and not collector.repeated
    assert collector.done == PublishDoneCode.TRACK_ENDED


def test_a_listing_is_told_what_any_upstream_has_until_none_has():
    world = Below(2)
    links = [world.connect(place) for place in range(2)]
    publishers = [star.publisher() for star in world.above]
    listing = Listing(world.below, world.below.connect(), (b"demo",))
    assert listing.request.namespaces == {NAMESPACE}
    world.cut(0, links[0])
    assert listing.events == [(NAMESPACE, True)]
    publishers[1].published.cancel()
    world.below.run()
    assert listing.events == [(NAMESPACE, True), (NAMESPACE, False)]


def test_a_listing_is_accepted_when_every_upstream_has_answered():
    world = Below(2)
    held = []
    world.above[1].relay.namespaces.events.awaited.append(lambda *asked: held.append(asked[-1]))
    for place in range(2):
        world.connect(place)
    listing = Listing(world.below, world.below.connect(), (b"demo",))
    assert listing.request.state.name == "PENDING"
    held.pop()(True)
    world.below.run()
    assert listing.request.state.name == "ESTABLISHED"


def test_what_was_asked_for_without_an_upstream_is_found_when_it_is_there():
    world = Below(1)
    _, collector = world.below.subscriber(JOIN)
    assert collector.failed.retry_after_ms is not None
    world.connect(0)
    world.above[0].publisher(track(1))
    _, again = world.below.subscriber(JOIN, NAME)
    assert again.payloads == everything(1)
