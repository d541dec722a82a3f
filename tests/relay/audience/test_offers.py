"""SUBSCRIBE_TRACKS at a relay (MOQT "Subscribing to Tracks", "Publisher Interactions")."""

from __future__ import annotations

from moqt.values.codes import GroupOrder, ParameterType, PublishDoneCode, RequestErrorCode
from moqt.values.errors import RequestError
from moqt.values.messages import KeyValue, LocationFilter, Parameters, RangeFilter
from moqt.values.names import FullTrackName, Location
from relay.rights.policy import Action
from tests.relay.peers import Wanting, offering, paused
from tests.relay.star import (
    JOIN,
    LIVE,
    NAME,
    NAMESPACE,
    Denying,
    Star,
    end_track,
    everything,
    publish,
    track,
)

OTHER = FullTrackName((b"demo", b"later"), b"audio")


def test_every_matching_track_known_now_or_later_is_offered_once():
    star = Star()
    first = offering(star, track())
    wanting = Wanting(star, star.connect())
    other = Wanting(star, star.connect(), (b"else",))
    second = offering(star, track(name=OTHER))
    offering(star, track())  # a second publisher of the first track
    assert wanting.names == [NAME, OTHER] and other.names == []
    assert star.relay.counters.publications_offered == 2
    assert not paused(first) and not paused(second)


def test_objects_flow_from_the_publisher_to_who_asked_for_such_tracks():
    star, store = Star(), track()
    wanting = Wanting(star, star.connect())
    offering(star, store)
    for at in range(4):
        publish(store, 0, at)
    end_track(store, 1)
    star.run()
    star.pass_time(3)
    collector = wanting.got[NAME]
    assert collector.payloads == everything(1)
    assert collector.done == PublishDoneCode.TRACK_ENDED


def test_a_subscriber_is_not_offered_what_it_publishes_itself():
    star = Star()
    publisher = offering(star, track())
    mine = Wanting(star, publisher)
    offering(star, track(name=OTHER))
    assert mine.names == [OTHER]


def test_a_session_whose_subscribe_is_held_gets_the_answer_and_no_offer():
    star, store = Star(), track()
    pair = star.connect()
    wanting = Wanting(star, pair)
    collector = star.subscribe(
        pair, Parameters(rendezvous_timeout=5000, location_filter=LocationFilter.next_object())
    )
    elsewhere = Wanting(star, star.connect())
    offering(star, store)
    assert collector.accepted and wanting.names == [] and elsewhere.names == [NAME]


def test_a_track_that_somebody_has_subscribed_to_is_offered_too():
    star, store = Star(), track(1)
    star.publisher(store)
    wanting = Wanting(star, star.connect())
    assert wanting.names == []
    star.subscriber(JOIN)
    assert wanting.names == [NAME]


def test_offers_say_what_was_asked_for():
    star, store = Star(), track(2, properties=(KeyValue(0x78, 5),))
    offering(star, store)
    wanting = Wanting(
        star,
        star.connect(),
        parameters=Parameters(
            forward=0,
            group_order=GroupOrder.DESCENDING,
            subscriber_priority=7,
            include_properties=0,
        ),
        accept=False,
    )
    (offer,) = wanting.offers
    asked = offer.parameters
    assert (asked.forward, asked.group_order, asked.subscriber_priority) == (0, 2, 7)
    assert offer.properties == () and asked.largest_object == Location(1, 3)


def test_a_paused_offer_leaves_the_publisher_paused_until_it_is_resumed_and_joins_exactly():
    star, store = Star(), track()
    publisher = offering(star, store)
    wanting = Wanting(star, star.connect(), parameters=Parameters(forward=0))
    assert wanting.names == [NAME] and paused(publisher)
    for at in range(2):
        publish(store, 0, at)
    star.run()
    assert wanting.got[NAME].objects == []
    answers = []
    wanting.offers[0].update(
        Parameters(
            forward=1,
            location_filter=LocationFilter.next_object(),
            fill_parameters=Parameters(location_filter=LocationFilter.absolute_start(0)),
        ),
        answers.append,
    )
    star.run()
    assert answers[0].parameters.largest_object == Location(0, 1)
    for at in range(2, 4):
        publish(store, 0, at)
    star.run()
    assert wanting.got[NAME].payloads == everything(1)


def test_track_property_filters_choose_among_the_tracks():
    star = Star()
    offering(star, track(properties=(KeyValue(0x0E, 5),)))
    offering(star, track(name=OTHER, properties=(KeyValue(0x0E, 200),)))
    chosen = RangeFilter(ParameterType.TRACK_PROPERTY_FILTER, 0, 0x0E, ((0, 10),))
    pair = star.connect()
    wanting = Wanting(star, pair, parameters=Parameters(range_filters=(chosen,)))
    assert wanting.names == [NAME]
    wider = RangeFilter(ParameterType.TRACK_PROPERTY_FILTER, 0, 0x0E, ((0, 255),))
    wanting.request.update(Parameters(range_filters=(wider,)), lambda answer: None)
    star.run()
    assert wanting.names == [NAME, OTHER]


def test_a_refused_offer_lets_the_publisher_be_paused_again():
    star, store = Star(linger=2.0), track()
    publisher = offering(star, store)
    wanting = Wanting(star, star.connect(), accept=False)
    assert not paused(publisher), "the offer may send Objects before it is answered"
    wanting.offers[0].reject(RequestErrorCode.UNINTERESTED)
    star.run()
    star.pass_time(6)
    assert paused(publisher)


def test_a_track_published_again_is_offered_again():
    star, store = Star(), track()
    wanting = Wanting(star, star.connect())
    publisher = offering(star, store)
    publish(store, 0, 0)
    star.run()
    star.kill(publisher)
    star.pass_time(2)
    assert wanting.got[NAME].done == PublishDoneCode.INTERNAL_ERROR
    offering(star, store)
    assert wanting.names == [NAME, NAME]


def test_a_complete_cached_track_without_a_publisher_is_offered():
    star, store = Star(), track(1, ended=True)
    publisher = star.publisher(store)
    star.subscriber(JOIN)
    star.kill(publisher)
    assert Wanting(star, star.connect()).names == [NAME]


def test_what_a_subscriber_has_no_right_to_is_not_offered():
    policy = Denying({Action.SUBSCRIBE})
    star = Star(policy=policy)
    offering(star, track())
    wanting = Wanting(star, star.connect())
    assert wanting.names == wanting.skipped == []


def test_a_new_prefix_is_authorized_before_it_is_answered():
    policy = Denying(set())
    star = Star(policy=policy)
    offering(star, track())
    wanting = Wanting(star, star.connect(), (b"else",))
    answers = []
    policy.denied = {Action.SUBSCRIBE_TRACKS}
    wanting.request.update(Parameters(track_namespace_prefix=(b"demo",)), answers.append)
    star.run()
    assert answers[0].code == RequestErrorCode.UNAUTHORIZED
    assert wanting.names == [] and wanting.ended and not star.relay.offers.wanted


def test_an_overlapping_prefix_of_one_session_is_refused():
    star = Star()
    pair = star.connect()
    Wanting(star, pair)
    second = Wanting(star, pair, NAMESPACE)
    assert second.ended[0].code == RequestErrorCode.PREFIX_OVERLAP


def test_a_track_that_cannot_be_offered_is_skipped_and_can_be_subscribed_to():
    star = Star()
    for number in range(4):
        offering(star, track(name=FullTrackName(NAMESPACE, b"%d" % number)))
    pair = star.connect()

    def full(*arguments, **options):
        raise RequestError(RequestErrorCode.EXCESSIVE_LOAD, "too many requests wait already")

    pair.server.publish = full
    wanting = Wanting(star, pair)
    assert wanting.names == [] and len(wanting.skipped) == 4
    assert star.subscribe(pair, LIVE, wanting.skipped[0]).accepted


def test_goaway_on_an_offer_brings_another_and_ends_the_first():
    star, store = Star(), track()
    wanting = Wanting(star, star.connect())
    offering(star, store)
    wanting.offers[0].send_goaway(timeout_ms=5000)
    star.run()
    assert wanting.names == [NAME, NAME]
    publish(store, 0, 0)
    star.run()
    assert wanting.got[NAME].locations == [Location(0, 0)]


def test_a_malformed_track_ends_its_offers():
    star, stores = Star(), [track(), track()]
    wanting = Wanting(star, star.connect())
    for store in stores:
        offering(star, store)
    stores[0].append(0, 0, b"one")
    stores[1].append(0, 0, b"two")
    star.run()
    star.pass_time(12)
    assert wanting.got[NAME].done == PublishDoneCode.MALFORMED_TRACK


def test_cancelling_ends_the_offers_and_leaves_the_accepted_ones():
    star, store = Star(), track()
    wanting = Wanting(star, star.connect())
    offering(star, store)
    wanting.request.cancel()
    star.run()
    offering(star, track(name=OTHER))
    publish(store, 0, 0)
    star.run()
    assert wanting.names == [NAME]
    assert wanting.got[NAME].locations == [Location(0, 0)]


def test_everybody_gone_nothing_is_left():
    star = Star(linger=0)
    pair = star.connect()
    Wanting(star, pair)
    publisher = offering(star, track())
    star.kill(pair)
    star.kill(publisher)
    star.pass_time(2)
    star.assert_empty()
