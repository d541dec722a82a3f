"""Relays that are each other's upstream relays: nobody waits for an answer of his own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moqt.values.codes import PublishDoneCode, RequestErrorCode, SessionErrorCode
from moqt.values.config import SessionConfig
from moqt.values.messages import Parameters
from moqt.values.names import Location
from relay.audience.downstream import MAX_RELAYS
from relay.audience.namespaces import HELD_SECONDS
from relay.mesh.uplink import Uplink
from tests.moqt.memory import Pair
from tests.relay.peers import Listing
from tests.relay.ring import Named, Ring
from tests.relay.star import (
    JOIN,
    NAME,
    NAMESPACE,
    Collector,
    CountingPublisher,
    SilentPublisher,
    end_track,
    everything,
    publish,
    track,
)

COUNTS = pytest.mark.parametrize("count", [1, 2, 3, 4])


@COUNTS
def test_a_track_that_nobody_in_a_ring_has_is_denied_at_once(count):
    ring = Ring(count)
    for relay in ring.relays:
        pair, collector = relay.subscriber(JOIN)
        assert collector.failed.code == RequestErrorCode.DOES_NOT_EXIST
        assert relay.fetch(pair).failed.code == RequestErrorCode.DOES_NOT_EXIST
        answers = []
        pair.client.track_status(NAME).on_answer = answers.append
        ring.run()
        assert answers[0].code == RequestErrorCode.DOES_NOT_EXIST


@pytest.mark.parametrize("count", [2, 3, 5])
def test_relays_that_ask_each_other_at_the_same_moment_deny_it_at_once(count):
    ring = Ring(count)
    collectors = []
    for relay in ring.relays:
        pair = relay.connect()
        collectors.append(Collector())
        pair.client.subscribe(NAME, collectors[-1], JOIN)
    ring.run()
    assert [each.failed.code for each in collectors] == [RequestErrorCode.DOES_NOT_EXIST] * count


@COUNTS
def test_a_track_goes_round_a_ring_to_whoever_wants_it(count):
    ring, store = Ring(count), track(1)
    ring.relays[0].publisher(store)
    collectors = [relay.subscriber(JOIN)[1] for relay in ring.relays]
    publish(store, 1, 0)
    ring.run()
    for collector in collectors:
        assert collector.locations[-1] == Location(1, 0)
        assert collector.payloads.items() >= everything(1).items()
        assert not collector.repeated


@pytest.mark.parametrize("linger", [0, 5])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("order", [1, -1])
def test_a_track_whose_publisher_is_gone_ends_in_a_ring(count, order, linger):
    ring, store = Ring(count, publisher_linger=linger), track(1)
    publisher = ring.relays[0].publisher(store)
    collectors = [relay.subscriber(JOIN)[1] for relay in ring.relays[::order]]
    ring.relays[0].kill(publisher)
    ring.pass_time(count * (linger + 1))
    assert [each.done for each in collectors] == [PublishDoneCode.INTERNAL_ERROR] * count


@pytest.mark.parametrize("count", [2, 3])
def test_a_publisher_elsewhere_in_a_ring_takes_over(count):
    ring, store = Ring(count, publisher_linger=5), track(1)
    publisher = ring.relays[0].publisher(store)
    collectors = [relay.subscriber(JOIN)[1] for relay in ring.relays]
    ring.relays[0].kill(publisher)
    ring.relays[-1].publisher(store)
    ring.pass_time(2)
    for at in range(4):
        publish(store, 1, at)
    end_track(store, 2)
    ring.pass_time(2)
    for collector in collectors:
        assert collector.payloads == everything(2) and not collector.repeated
        assert collector.done == PublishDoneCode.TRACK_ENDED


def test_who_waits_with_a_relay_that_has_the_track_elsewhere_gets_it():
    """The second relay asks the first, which asks the third, which may have it of the second."""
    ring = Ring(3)
    first, second, third = ring.relays
    ring.join(third, second, place=-1)
    second.publisher(track(1))
    pair = first.connect()
    _, collector = first.subscriber(JOIN)
    assert collector.payloads == everything(1)
    assert pair.client.closed is None


@COUNTS
def test_a_namespace_that_is_withdrawn_is_gone_in_a_ring(count):
    ring = Ring(count)
    listings = [Listing(relay, relay.connect(), (b"demo",)) for relay in ring.relays]
    ring.pass_time(count)  # each listing waits for the next relay's, in a circle, but not for long
    publisher = ring.relays[0].publisher()
    assert all(each.request.namespaces == {NAMESPACE} for each in listings)
    publisher.published.cancel()
    ring.run()
    assert not any(each.request.namespaces for each in listings)
    ring.pass_time(HELD_SECONDS + 1)
    assert not any(each.request.namespaces for each in listings)


@pytest.mark.parametrize("count", [2, 3])
def test_a_namespace_that_another_relay_of_a_ring_has_stays(count):
    ring = Ring(count)
    listings = [Listing(relay, relay.connect(), (b"demo",)) for relay in ring.relays]
    ring.pass_time(count)
    first, _ = [relay.publisher() for relay in (ring.relays[0], ring.relays[-1])]
    first.published.cancel()
    ring.pass_time(HELD_SECONDS + 1)
    assert all(each.request.namespaces == {NAMESPACE} for each in listings)


@pytest.mark.parametrize(("above", "told"), [(None, None), (9, (1,))])
def test_only_a_relay_that_says_who_it_is_is_told_who_waits(above, told):
    bottom, publisher = Named(1), CountingPublisher()
    publisher.add_track(track(1))
    uplink = Uplink(bottom.relay)
    link = Pair(
        bottom.relay,
        publisher,
        client_config=bottom.session,
        server_config=SessionConfig(relay_id=above),
    )
    bottom.pairs.append(link)
    uplink.attach(link.client)
    _, collector = bottom.subscriber(JOIN)
    assert collector.payloads == everything(1)
    (subscribe,), (fetch, *_) = publisher.subscribes, publisher.fetches
    assert subscribe.parameters.relay_path == fetch.parameters.relay_path == told


def test_a_path_that_nobody_announced_to_understand_ends_the_session():
    pair = Pair(client_config=SessionConfig(relay_id=7))
    assert pair.server.peer_relay == (7, False)
    pair.client.track_status(NAME, Parameters(relay_path=(7,)))
    pair.run()
    assert pair.client.closed.code == SessionErrorCode.PROTOCOL_VIOLATION


def test_a_peer_that_names_many_relays_makes_no_request_look_at_all_of_them():
    relay = Named(1)
    relay.publisher(handler=SilentPublisher())
    for number in range(8):
        pair = relay.connect(client_config=SessionConfig(relay_id=100 + number))
        path = tuple(range(1000 * (number + 1), 1000 * (number + 1) + 200))
        relay.run()
        relay.subscribe(pair, replace(JOIN, relay_path=path))
    (waits,) = relay.relay.tracks.values()
    assert len(waits.waiting) == 8
    assert 200 < len(waits.downstream.relays) <= MAX_RELAYS
