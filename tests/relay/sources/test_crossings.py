"""What subscribers change while the publisher ends the track costs nobody anything."""

from __future__ import annotations

import pytest

from moqt.values.codes import PublishDoneCode
from moqt.values.messages import KeyValue, LocationFilter, Parameters, RequestOk
from tests.relay.star import LIVE, Star, end_track, everything, publish, track

DYNAMIC = (KeyValue(0x30, 1),)
CHANGES = {
    "new group": Parameters(new_group_request=7),
    "priority": Parameters(subscriber_priority=1),
    "pause": Parameters(forward=0),
    "filter": Parameters(location_filter=LocationFilter.next_object()),
    "fill": Parameters(
        fill_parameters=Parameters(location_filter=LocationFilter.absolute_start(0))
    ),
}


@pytest.mark.parametrize("offered", [False, True], ids=["SUBSCRIBE", "PUBLISH"])
@pytest.mark.parametrize("change", CHANGES)
def test_an_update_that_crosses_the_end_of_the_track_harms_no_subscription(change, offered):
    star, store = Star(), track(properties=DYNAMIC)
    if offered:
        publisher = star.connect()
        publisher.client.publish(store)
        star.run()
    else:
        publisher = star.publisher(store)
    _, asks = star.subscriber(LIVE)
    _, other = star.subscriber(LIVE)
    for object_id in range(4):
        publish(store, 0, object_id)
    star.run()
    star.delay(publisher)
    for object_id in range(4):
        publish(store, 1, object_id)
    end_track(store, 2)
    star.run()  # all of it is under way when the update reaches the publisher
    answers = []
    asks.request.update(CHANGES[change], answers.append)
    star.run()
    star.arrive(publisher)
    star.pass_time(15)
    assert [type(each) for each in answers] == [RequestOk]
    assert other.payloads == everything(2) and other.done == PublishDoneCode.TRACK_ENDED
    assert other.failed is None and asks.failed is None
    assert asks.done == PublishDoneCode.TRACK_ENDED
    if change != "pause":
        assert asks.payloads == everything(2)
    assert star.relay.upstream_subscriptions == 0


@pytest.mark.parametrize("octets", [100, 200_000])
def test_a_changed_priority_of_a_fetch_that_ends_takes_nothing_from_it(octets):
    star, store = Star(), track(2, size=octets, ended=True)
    publisher = star.publisher(store)
    pair = star.connect()
    star.delay(publisher)
    collector = star.fetch(pair)
    answers = []
    collector.request.update(Parameters(subscriber_priority=1), answers.append)
    star.run()
    star.arrive(publisher)
    assert len(answers) == 1 and collector.failed is None
    assert collector.payloads == everything(2, size=octets)
