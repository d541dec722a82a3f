"""PUBLISH at a relay (MOQT "Publisher Interactions", "Paused Subscription Handling")."""

from __future__ import annotations

import pytest

from moqt.track.store import TrackStore
from moqt.values.codes import PublishDoneCode, RequestErrorCode
from moqt.values.messages import KeyValue, LocationFilter, Parameters
from moqt.values.names import FullTrackName, Location
from tests.relay.peers import Publishing, offering, paused
from tests.relay.star import (
    JOIN,
    LIVE,
    NAME,
    NAMESPACE,
    Star,
    end_track,
    everything,
    payload,
    publish,
    track,
)

PAUSED = Parameters(forward=0)


@pytest.mark.parametrize("parameters", [Parameters(), PAUSED])
def test_a_publish_nobody_asked_for_is_accepted_and_paused(parameters):
    star = Star()
    publisher = offering(star, track(1), parameters)
    assert publisher.answers == [None] and paused(publisher)
    assert list(star.relay.tracks) == [NAME]
    assert star.relay.upstream_subscriptions == star.relay.counters.publications == 1


@pytest.mark.parametrize("parameters", [Parameters(), PAUSED])
def test_a_subscribe_resumes_the_publication_and_makes_no_second_subscription(parameters):
    star, store = Star(), track()
    publisher = offering(star, store, parameters)
    publish(store, 0, 0)  # the relay has paused it, and does not hear of this
    star.run()
    _, collector = star.subscriber(JOIN)
    assert not paused(publisher) and collector.accepted
    for at in range(1, 4):
        publish(store, 0, at)
    end_track(store, 1)
    star.run()
    star.pass_time(2)
    assert collector.payloads == everything(1) and not collector.repeated
    assert collector.done == PublishDoneCode.TRACK_ENDED
    assert publisher.handler.subscribes == []


class PublishOnly(Publishing):
    """Has its tracks for who takes its PUBLISHes, and for no FETCH."""

    def fetch_received(self, request):
        request.reject(RequestErrorCode.NOT_SUPPORTED, "only published tracks")


@pytest.mark.parametrize("parameters", [Parameters(), PAUSED])
@pytest.mark.parametrize("ended", [False, True])
def test_what_was_offered_and_published_before_anyone_asked_comes_with_the_resumption(
    parameters, ended
):
    star, store = Star(), track()
    publisher = offering(star, store, parameters, handler=PublishOnly())
    for group in range(2):
        for at in range(4):
            publish(store, group, at)
    if ended:
        end_track(store, 2)
    star.run()
    star.pass_time(10)
    updates = publisher.client.counters.updates_received
    _, collector = star.subscriber(JOIN)
    assert publisher.client.counters.updates_received == updates + 1
    if not ended:
        for at in range(4):
            publish(store, 2, at)
        end_track(store, 3)
        star.run()
    assert collector.payloads == everything(2 if ended else 3) and not collector.repeated
    star.pass_time(2)
    assert collector.done == PublishDoneCode.TRACK_ENDED and publisher.ended == [None]
    assert star.fetch(star.connect()).payloads == everything(2 if ended else 3)


def test_who_wants_only_what_comes_has_nothing_older_brought():
    star, store = Star(), track()
    offering(star, store, handler=PublishOnly())
    for at in range(3):
        publish(store, 0, at)
    star.run()
    _, collector = star.subscriber(LIVE)
    publish(store, 0, 3)
    star.run()
    assert collector.locations[:1] == [Location(0, 3)]
    assert star.relay.counters.objects_in == 1


def test_a_publisher_that_is_lost_in_a_fill_leaves_the_rest_to_the_others():
    star, store = Star(), track(3, size=3000)
    publisher = offering(star, store, handler=PublishOnly(), stream_window=4000)
    publisher.server_transport.paused.update(4 * n + 2 for n in range(1, 9))
    _, collector = star.subscriber(JOIN)
    other = star.publisher(store, namespace=NAMESPACE)
    assert len(collector.payloads) < 12 and not other.handler.fetches
    star.kill(publisher)
    star.pass_time(1)
    assert star.relay.tracks[NAME].store.octets == 12 * 3000
    assert len(other.handler.fetches) == 1, "whoever reads on finds the rest"
    assert star.fetch(star.connect()).payloads == everything(3, size=3000)


def test_subscribe_ok_tells_the_largest_object_upstream_had_when_it_resumed():
    star, store = Star(), track()
    offering(star, store)
    for at in range(3):
        publish(store, 0, at)
    _, collector = star.subscriber(LIVE)
    assert collector.request.largest == Location(0, 2)
    publish(store, 0, 3)
    star.run()
    assert collector.locations[:1] == [Location(0, 3)]


def test_a_fetch_of_a_paused_publication_asks_for_its_largest_object_and_leaves_it_paused():
    star, store = Star(), track()
    publisher = offering(star, store)
    for at in range(4):
        publish(store, 0, at)
    fetched = star.fetch(star.connect())
    assert fetched.payloads == everything(1) and paused(publisher)
    answers = []
    request = star.connect().client.track_status(NAME)
    request.on_answer = answers.append
    star.run()
    assert answers == [None] and request.largest == Location(0, 3)


def test_the_publication_is_paused_again_a_while_after_its_last_subscriber_left():
    star, store = Star(linger=10.0), track(1)
    publisher = offering(star, store)
    pair, collector = star.subscriber(JOIN)
    collector.request.cancel()
    star.run()
    star.pass_time(5)
    assert not paused(publisher)
    star.pass_time(8)
    assert paused(publisher) and NAME in star.relay.tracks
    star.pass_time(5)
    assert not star.relay.active, "a paused publication costs nothing on tick"
    assert star.subscribe(pair, JOIN).payloads == everything(1)
    assert not paused(publisher)


def test_a_paused_subscriber_leaves_the_publication_paused_until_it_resumes():
    star, store = Star(), track(1)
    publisher = offering(star, store)
    _, collector = star.subscriber(
        Parameters(location_filter=LocationFilter.next_object(), forward=0)
    )
    assert collector.accepted and paused(publisher)
    publish(store, 1, 0)
    publish(store, 1, 1)
    star.run()
    answers = []
    collector.request.update(
        Parameters(
            forward=1,
            location_filter=LocationFilter.next_object(),
            fill_parameters=Parameters(location_filter=LocationFilter.absolute_start(0)),
        ),
        answers.append,
    )
    star.run()
    assert not paused(publisher)
    # The answer waited for upstream's, so the fill reaches as far as the subscription begins.
    assert answers[0].parameters.largest_object == Location(1, 1)
    publish(store, 1, 2)
    publish(store, 1, 3)
    star.run()
    assert collector.payloads == everything(2) and not collector.repeated


def test_updates_behind_one_that_waits_for_upstream_are_applied_in_order():
    star, store = Star(), track(1)
    publisher = offering(star, store)
    _, collector = star.subscriber(
        Parameters(location_filter=LocationFilter.next_object(), forward=0)
    )
    answers = []
    for forward in (1, 0, 1):
        collector.request.update(Parameters(forward=forward), answers.append)
    star.run()
    assert len(answers) == 3 and not paused(publisher)


def test_a_publisher_that_never_answers_the_resumption_holds_nobody_up_for_ever():
    star, store = Star(upstream_timeout=2.0), track(1)
    publisher = offering(star, store)
    publisher.publication.updates.gate = lambda request, update: False
    _, collector = star.subscriber(LIVE)
    assert collector.accepted is None
    star.pass_time(3)
    assert collector.accepted and star.relay.counters.upstream_timeouts == 1


def test_a_rendezvous_ends_with_the_publish_of_its_track_and_not_of_another():
    star, store = Star(), track()
    _, collector = star.subscriber(
        Parameters(rendezvous_timeout=5000, location_filter=LocationFilter.next_object())
    )
    offering(star, track(name=FullTrackName(NAMESPACE, b"other")))
    assert collector.accepted is None and collector.failed is None
    publisher = offering(star, store)
    assert collector.accepted and not paused(publisher)
    publish(store, 0, 0)
    star.run()
    assert collector.locations == [Location(0, 0)]


def test_publish_done_ends_the_subscribers_and_the_cache_serves_later_ones():
    star, store = Star(), track()
    publisher = offering(star, store)
    _, collector = star.subscriber(JOIN)
    for at in range(4):
        publish(store, 0, at)
    end_track(store, 1)
    star.run()
    star.pass_time(2)
    assert collector.done == PublishDoneCode.TRACK_ENDED and publisher.ended == [None]
    star.kill(publisher)
    _, late = star.subscriber(JOIN)
    assert late.payloads == everything(1) and late.done == PublishDoneCode.TRACK_ENDED


def test_a_publisher_lost_without_a_word_ends_its_subscribers():
    star, store = Star(), track()
    publisher = offering(star, store)
    _, collector = star.subscriber(LIVE)
    publish(store, 0, 0)
    star.run()
    star.kill(publisher)
    assert collector.done == PublishDoneCode.INTERNAL_ERROR
    _, refused = star.subscriber(LIVE)
    assert refused.failed.code == RequestErrorCode.DOES_NOT_EXIST


def test_a_subscriber_that_waits_for_a_publication_that_ends_is_answered():
    star, store = Star(), track(1)
    publisher = offering(star, store)
    publisher.publication.updates.gate = lambda request, update: False
    _, collector = star.subscriber(LIVE)
    star.kill(publisher)
    assert collector.failed.code == RequestErrorCode.DOES_NOT_EXIST
    star.kill(star.pairs[0])
    star.pass_time(40)
    star.assert_empty()


def test_several_publishers_of_one_track_are_all_resumed_and_objects_come_once():
    star, stores = Star(), [track(), track()]
    publishers = [offering(star, store) for store in stores]
    _, collector = star.subscriber(JOIN)
    assert not paused(publishers[0]) and not paused(publishers[1])
    for at in range(2):
        for store in stores:
            publish(store, 0, at)
        star.run()
    star.kill(publishers[0])
    for at in range(2, 4):
        publish(stores[1], 0, at)
    star.run()
    assert collector.done is None
    assert collector.payloads == everything(1) and not collector.repeated


def test_a_second_publish_of_one_session_is_kept_as_a_spare():
    star, store = Star(), track()
    publisher = offering(star, store)
    second = publisher.client.publish(store)
    star.run()
    _, collector = star.subscriber(JOIN)
    assert not paused(publisher) and second.delivery.paused
    publisher.publication.withdraw(PublishDoneCode.GOING_AWAY)
    star.run()
    assert not second.delivery.paused, "the spare is used when the first one ends"
    for at in range(4):
        publish(store, 0, at)
    star.run()
    assert collector.payloads == everything(1) and collector.done is None


def test_publish_and_publish_namespace_of_one_session_make_one_subscription():
    star, store = Star(), track()
    publisher = offering(star, store)
    publisher.client.publish_namespace(NAMESPACE, on_ended=lambda error: None)
    star.run()
    _, collector = star.subscriber(JOIN)
    _, other = star.subscriber(LIVE, FullTrackName(NAMESPACE, b"other"))
    assert collector.accepted
    # The other track was never offered, so the publisher of its namespace is asked.
    assert [r.name.name for r in publisher.handler.subscribes] == [b"other"]
    assert other.failed.code == RequestErrorCode.NOT_SUPPORTED


@pytest.mark.parametrize("parameters", [Parameters(), PAUSED])
def test_the_first_user_of_a_publication_has_those_asked_who_published_its_namespace(parameters):
    star, stores = Star(), [track(), track()]
    other = star.publisher(stores[1], namespace=NAMESPACE[:1])
    offering(star, stores[0], parameters)
    assert not other.handler.subscribes
    _, first = star.subscriber(LIVE)
    _, second = star.subscriber(LIVE)
    assert len(other.handler.subscribes) == 1
    for at, store in enumerate(stores):
        publish(store, 0, at)
        star.run()
    for collector in (first, second):
        assert collector.locations == [Location(0, 0), Location(0, 1)]


def test_a_subscribe_that_crosses_the_publish_of_the_same_publisher_is_given_up():
    star, store = Star(), track()
    handler = Publishing()
    handler.subscribe_received = handler.subscribes.append  # it answers none
    publisher = star.publisher(store, handler=handler)
    _, collector = star.subscriber(LIVE)
    publisher.client.publish(store)
    star.run()
    assert collector.accepted and len(handler.subscribes) == 1
    assert not handler.subscribes[0].pending
    publish(store, 0, 0)
    star.run()
    assert collector.locations == [Location(0, 0)]


def test_a_publisher_may_subscribe_to_its_own_published_track():
    star, store = Star(), track()
    publisher = offering(star, store)
    collector = star.subscribe(publisher, LIVE)
    publish(store, 0, 0)
    star.run()
    assert collector.locations == [Location(0, 0)]


def test_filters_are_applied_downstream():
    star, store = Star(), track()
    offering(star, store)
    _, some = star.subscriber(Parameters(location_filter=LocationFilter.groups(1, 1)))
    _, all_ = star.subscriber(LIVE)
    for group in range(3):
        for at in range(4):
            publish(store, group, at)
    star.run()
    assert {each.location.group for each in some.normal} == {1}
    assert all_.payloads == everything(3)


def test_objects_that_came_before_the_answer_are_served_from_the_cache():
    star, store = Star(), track()
    handler = Publishing()
    pair = star.connect(handler)
    pair.client.publish(store)
    publish(store, 0, 0)  # before the relay has seen the PUBLISH
    star.run()
    _, collector = star.subscriber(JOIN)
    assert collector.payloads == {Location(0, 0): payload(0, 0)}


def test_an_unknown_mandatory_property_refuses_the_publish():
    star = Star()
    publisher = offering(star, track(properties=(KeyValue(0x4000, 1),)))
    assert publisher.answers[0].code == RequestErrorCode.UNSUPPORTED_EXTENSION
    assert not star.relay.tracks


def test_beyond_the_limit_of_tracks_a_publish_is_refused_for_now():
    star = Star(max_tracks=1)
    offering(star, track())
    other = offering(star, track(name=FullTrackName(NAMESPACE, b"other")))
    assert other.answers[0].code == RequestErrorCode.EXCESSIVE_LOAD
    assert other.answers[0].retry_after_ms == 1000


def test_a_new_group_request_goes_to_the_publisher_once():
    star = Star()
    store = track(1, properties=(KeyValue(0x30, 1),))
    asked = []
    store.on_new_group = lambda store, value: asked.append(value)
    offering(star, store)
    _, collector = star.subscriber(LIVE)
    _, second = star.subscriber(LIVE)
    for each, value in ((collector, 1), (second, 1), (second, 5), (collector, 0)):
        each.request.update(Parameters(new_group_request=value), lambda answer: None)
        star.run()
    assert asked == [1, 5], "0 and equal values are outstanding already"
    publish(store, 1, 0)
    star.run()
    collector.request.update(Parameters(new_group_request=0), lambda answer: None)
    star.run()
    assert asked == [1, 5, 0]


def test_a_subscribe_that_opens_the_track_carries_the_new_group_request_upstream():
    star = Star()
    publisher = star.publisher(track(1, properties=(KeyValue(0x30, 1),)))
    star.subscriber(Parameters(location_filter=LocationFilter.next_object(), new_group_request=0))
    (request,) = publisher.handler.subscribes
    assert request.parameters.new_group_request == 0


def test_a_subscription_that_expires_is_extended_as_long_as_it_is_used():
    star, store = Star(), track()
    publisher = offering(star, store, Parameters(expires=10_000))
    star.subscriber(LIVE)
    star.pass_time(60)
    assert publisher.ended == [] and star.relay.upstream_subscriptions == 1


def test_goaway_on_a_publication_moves_it_to_a_subscription_of_the_relays_own():
    star, store = Star(), track()
    publisher = star.publisher(store)
    publication = publisher.client.publish(store)
    star.run()
    _, collector = star.subscriber(LIVE)
    publication.send_goaway(timeout_ms=5000)
    star.run()
    assert len(publisher.handler.subscribes) == 1
    publish(store, 0, 0)
    star.run()
    star.pass_time(10)
    publish(store, 0, 1)
    star.run()
    assert collector.locations == [Location(0, 0), Location(0, 1)] and collector.done is None


def test_a_malformed_publication_is_refused_for_a_while():
    star, stores = Star(), [track(), track()]
    for store in stores:
        offering(star, store)
    _, collector = star.subscriber(LIVE)
    stores[0].append(0, 0, b"one")
    stores[1].append(0, 0, b"two")
    star.run()
    assert collector.done == PublishDoneCode.MALFORMED_TRACK
    again = offering(star, track())
    assert again.answers[0].code == RequestErrorCode.MALFORMED_TRACK


def test_what_was_published_between_two_publications_is_fetched_for_who_listens():
    star, store = Star(), track()
    publisher = offering(star, store)
    spare = publisher.client.publish(store)
    _, collector = star.subscriber(LIVE)
    publish(store, 0, 0)
    star.run()
    publisher.publication.withdraw(PublishDoneCode.GOING_AWAY)
    publish(store, 0, 1)
    publish(store, 0, 2)
    star.run()
    publish(store, 0, 3)
    star.run()
    assert not spare.delivery.paused and collector.done is None
    assert collector.payloads == everything(1) and not collector.repeated


def test_killed_publishers_and_subscribers_leave_nothing_behind():
    star = Star(linger=0)
    stores = [track(), track()]
    publishers = [offering(star, store) for store in stores]
    pair, _ = star.subscriber(JOIN)
    for each in (*publishers, pair):
        star.kill(each)
    star.pass_time(2)
    star.assert_empty()


def test_a_store_of_the_relay_holds_no_properties_of_its_own():
    properties = (KeyValue(0x04, 60_000), KeyValue(0x0B, b"\x10\x05"), KeyValue(0x78, 7))
    star = Star()
    offering(star, TrackStore(NAME, properties))
    _, collector = star.subscriber(LIVE)
    assert collector.request.properties == properties


def test_a_track_that_ended_while_it_was_paused_is_not_taken_for_what_was_seen_of_it():
    star, store = Star(linger=0), track(1)
    publisher = offering(star, store)
    pair, collector = star.subscriber(JOIN)
    collector.request.cancel()
    star.run()
    star.pass_time(2)
    assert paused(publisher)
    for at in range(4):
        publish(store, 1, at)
    publisher.publication.withdraw(PublishDoneCode.TRACK_ENDED)
    star.run()
    assert star.subscribe(pair, JOIN).failed.code == RequestErrorCode.DOES_NOT_EXIST
    again = offering(star, store)
    assert star.subscribe(pair, JOIN).payloads == everything(2)
    assert again.handler.subscribes == []


def test_a_publication_whose_cache_is_purged_goes_on():
    star, store = Star(linger=1), track(1)
    publisher = offering(star, store)
    pair, collector = star.subscriber(JOIN)
    assert collector.payloads == everything(1)
    star.kill(pair)
    star.pass_time(3)
    assert star.relay.purge(NAMESPACE) == (1, 400, 0)
    star.run()
    assert star.relay.cache.objects == 0 and publisher.ended == []
    late = star.subscriber(JOIN)[1]
    publish(store, 1, 0)
    star.run()
    assert late.payloads == {**everything(1), Location(1, 0): payload(1, 0)}


def test_a_publication_that_ends_takes_nothing_from_the_fetch_in_its_fills_place():
    star, store, streams = Star(stall_timeout=3), track(3, size=3000), range(2, 40, 4)
    publisher = offering(star, store, handler=PublishOnly(), stream_window=4000)
    publisher.server_transport.paused.update(streams)  # its fill stalls
    collector = star.subscriber(JOIN)[1]
    other = star.publisher(store, stream_window=4000)
    other.server_transport.paused.update(streams)
    star.pass_time(4)
    assert len(other.handler.fetches) == 1
    star.kill(publisher)
    for stream in streams:
        other.server_transport.resume_receiving(stream)
    star.run()
    assert star.relay.tracks[NAME].store.octets == 12 * 3000
    assert len(other.handler.fetches) == 1 and collector.accepted
