"""Limits, authorization and numbers of a relay (MOQT "Authorization", "Resource Exhaustion")."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import generate_latest

from moqt.track.store import TrackStore
from moqt.values.codes import RequestErrorCode
from moqt.values.messages import KeyValue, Parameters
from moqt.values.names import FullTrackName
from relay.config import RelayConfig
from relay.rights.policy import Action
from relay.scopes import Scopes
from relay.service.metrics import RelayMetrics
from tests.relay.star import JOIN, LIVE, NAME, NAMESPACE, Denying, SilentPublisher, Star, track


def publish_namespace(star, pair, namespace):
    answers = []
    request = pair.client.publish_namespace(namespace, on_ended=lambda error: None)
    request.on_answer = answers.append
    star.run()
    [answer] = answers
    return request, answer


def test_every_kind_of_request_is_authorized():
    policy = Denying(set(Action))
    star = Star(policy=policy)
    pair = star.connect()
    _, answer = publish_namespace(star, pair, NAMESPACE)
    answers = [answer]
    for make in (
        lambda: pair.client.track_status(NAME),
        lambda: pair.client.subscribe_namespace(
            (b"demo",), on_namespace=lambda *event: None, on_ended=lambda error: None
        ),
        lambda: pair.client.subscribe_tracks(
            (b"demo",), on_publish=lambda publish: None, on_ended=lambda error: None
        ),
        lambda: pair.client.publish(track(1)),
    ):
        make().on_answer = answers.append
        star.run()
    answers += [star.subscribe(pair).failed, star.fetch(pair).failed]
    assert [error.code for error in answers] == [RequestErrorCode.UNAUTHORIZED] * 7
    assert {action for action, _ in policy.asked} == set(Action)
    assert all(namespace in (NAMESPACE, (b"demo",)) for _, namespace in policy.asked)
    policy.asked.clear()
    pair.client.subscribe_namespace(
        (), on_namespace=lambda *event: None, on_ended=lambda error: None
    ).on_answer = answers.append
    pair.client.subscribe_tracks(
        (), on_publish=lambda publish: None, on_ended=lambda error: None
    ).on_answer = answers.append
    star.run()
    assert policy.asked == [(Action.SUBSCRIBE_NAMESPACE, ()), (Action.SUBSCRIBE_TRACKS, ())]
    assert [error.code for error in answers[7:]] == [RequestErrorCode.UNAUTHORIZED] * 2
    assert star.relay.counters.requests_refused == 9


def test_who_may_publish_one_track_may_not_publish_others_or_a_namespace():
    class OneTrack(Denying):
        def allow(self, session, action, namespace, tokens=()):
            return action is Action.PUBLISH and namespace == NAMESPACE

    star = Star(policy=OneTrack(set()))
    pair, answers = star.connect(), []
    other = FullTrackName((b"other",), b"track")
    for store in (track(1, ended=False), TrackStore(other)):
        pair.client.publish(store).on_answer = answers.append
        star.run()
    answers.append(publish_namespace(star, pair, NAMESPACE)[1])
    assert [error and error.code for error in answers] == [
        None,
        RequestErrorCode.UNAUTHORIZED,
        RequestErrorCode.UNAUTHORIZED,
    ]
    assert list(star.relay.tracks) == [NAME] and not star.relay.namespaces.publications


def test_a_subscriber_is_authorized_by_itself_also_when_the_track_is_open():
    policy = Denying(set())
    star = Star(policy=policy)
    star.publisher(track(1))
    star.subscriber(JOIN)
    stranger = star.connect()
    policy.strangers.add(stranger.server)
    for collector in (star.subscribe(stranger), star.fetch(stranger)):
        assert collector.failed.code == RequestErrorCode.UNAUTHORIZED
        assert not collector.objects


def test_too_many_namespaces_of_one_session_or_in_all_are_refused_for_now():
    star = Star(max_namespaces_per_session=2, max_namespaces=3)
    one, two = star.connect(), star.connect()
    results = [
        publish_namespace(star, pair, (b"n", b"%d" % n))[1]
        for n, pair in enumerate((one, one, one, two, two))
    ]
    assert [r and r.code for r in results] == [
        None,
        None,
        RequestErrorCode.EXCESSIVE_LOAD,
        None,
        RequestErrorCode.EXCESSIVE_LOAD,
    ]
    assert results[2].retry_after_ms == 1000
    star.kill(one)
    assert publish_namespace(star, two, (b"n", b"x"))[1] is None


def test_too_many_waiting_requests_are_refused_for_now():
    star = Star(max_pending=4)  # half of them are for one session
    star.publisher(handler=SilentPublisher())
    pair = star.connect()
    collectors = [star.subscribe(pair, LIVE) for _ in range(2)]
    refused = [
        star.subscribe(pair, LIVE),
        star.subscribe(pair, LIVE, FullTrackName(NAMESPACE, b"other")),
        star.subscribe(pair, Parameters(rendezvous_timeout=9), FullTrackName((b"x",), b"y")),
    ]
    assert all(c.failed is None for c in collectors)
    for collector in refused:
        assert collector.failed.code == RequestErrorCode.EXCESSIVE_LOAD
        assert collector.failed.retry_after_ms == 1000
    assert len(star.relay.tracks) == 1


def test_sessions_that_wait_with_all_they_may_leave_room_for_who_waits_with_none():
    star, wait = Star(max_pending=64), Parameters(rendezvous_timeout=9_000)

    def waits(pair, number):
        name = FullTrackName((b"nobody", b"%d" % number), b"track")
        return star.subscribe(pair, wait, name).failed is None

    greedy = [star.connect() for _ in range(3)]
    held = [sum(waits(pair, n) for n in range(40)) for pair in greedy]
    assert held == [32, 16, 8]
    assert waits(star.connect(), 0)
    greedy[0].client.close()
    star.run()
    assert star.relay.waiting.of_session(greedy[0].server) == 0
    late = star.connect()
    assert sum(waits(late, n) for n in range(40)) == 20


def test_beyond_the_limit_of_tracks_an_idle_one_makes_room_and_a_busy_one_does_not():
    star = Star(max_tracks=2, linger=0)
    names = [FullTrackName(NAMESPACE, b"%d" % n) for n in range(4)]
    star.publisher(*(track(1, name=name) for name in names))
    pair = star.connect()
    collectors = [star.subscribe(pair, JOIN, name) for name in names[:2]]
    refused = star.subscribe(pair, JOIN, names[2])
    assert refused.failed.code == RequestErrorCode.EXCESSIVE_LOAD
    collectors[0].request.cancel()
    star.run()
    star.pass_time(2)
    assert star.relay.cache.objects == 8
    assert star.subscribe(pair, JOIN, names[2]).accepted
    assert names[0] not in star.relay.tracks
    assert star.relay.cache.objects == 8


def limits_told(caplog):
    return [r.getMessage().partition(":")[0] for r in caplog.records if "at its limit" in r.msg]


def test_at_each_limit_of_the_relay_who_asks_and_the_log_hear_its_name_and_it_is_counted(caplog):
    star = Star(max_tracks=1, max_pending=1, max_namespaces=2, max_namespaces_per_session=1)
    star.publisher(handler=SilentPublisher())
    pair = star.connect()
    star.subscribe(pair, LIVE)
    reasons = [star.subscribe(pair, LIVE).failed.reason for _ in range(2)]
    pair = star.connect()
    stores = [TrackStore(FullTrackName((b"other",), b"%d" % n)) for n in range(3)]
    answers = []
    for store in stores:
        pair.client.publish(store).on_answer = answers.append
        star.run()
    reasons.append(answers[-1].reason)
    reasons += [publish_namespace(star, pair, (b"n", b"%d" % n))[1] for n in range(2)]
    reasons.append(publish_namespace(star, star.connect(), (b"n", b"x"))[1])
    assert [str(each and getattr(each, "reason", each)) for each in reasons] == [
        *["there are 1 requests that wait for a publisher, and no more may be (max_pending)"] * 2,
        "there are 1 tracks, and no more may be (max_tracks)",
        "None",
        "there are 1 namespaces that one session publishes, and no more may be "
        "(max_namespaces_per_session)",
        "there are 2 published namespaces, and no more may be (max_namespaces)",
    ]
    assert limits_told(caplog) == [
        "the relay is at its limit of 1 requests that wait for a publisher (max_pending)",
        "the relay is at its limit of 1 tracks (max_tracks)",
        "the relay is at its limit of 1 namespaces that one session publishes "
        "(max_namespaces_per_session)",
        "the relay is at its limit of 2 published namespaces (max_namespaces)",
    ]
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    assert star.relay.counters.requests_over_limit == 7


def properties(octets):
    """Track Properties that nobody here knows, of some `octets`."""
    return (KeyValue(0x3FFF, bytes(octets)),)


def test_track_properties_are_billed_to_the_cache_while_their_track_is_known():
    star = Star(linger=0)
    publisher = star.publisher(track(1, properties=properties(5000)))
    pair, _ = star.subscriber(JOIN)
    cache = star.relay.cache
    assert cache.properties > 5000 and cache.billed > cache.properties
    star.kill(publisher)
    star.kill(pair)
    star.pass_time(2)
    assert cache.properties > 5000, "the track is cached"
    cache.forget(star.relay.tracks[NAME].store)
    assert cache.properties == cache.billed == 0


@pytest.mark.parametrize("how", ["PUBLISH", "SUBSCRIBE"])
def test_a_track_whose_properties_have_no_room_is_refused_and_takes_no_room_from_the_others(how):
    star = Star(cache_octets=40_000)
    names = [FullTrackName(NAMESPACE, b"%d" % n) for n in range(10)]
    stores = [track(1, name=name, properties=properties(10_000)) for name in names]
    if how == "PUBLISH":
        publisher, answers = star.connect(), []
        for store in stores:
            publisher.client.publish(store).on_answer = answers.append
            star.run()
    else:
        star.publisher(*stores)
        pair = star.connect()
        answers = [star.subscribe(pair, LIVE, name).failed for name in names]
    assert [answer and answer.code for answer in answers] == [
        *[None] * 3,
        *[RequestErrorCode.EXCESSIVE_LOAD] * 7,
    ]
    assert answers[-1].reason == "the cache has no room for the Track Properties"
    assert answers[-1].retry_after_ms == 1000
    cache = star.relay.cache
    assert 30_000 < cache.properties <= cache.billed <= cache.budget


def test_a_limit_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="max_tracks must be positive, not 0"):
        RelayConfig(max_tracks=0)


def test_the_numbers_are_there_for_prometheus():
    star = Star()
    star.relay = Scopes()
    star.publisher(track(2))
    pair, _ = star.subscriber(JOIN)
    star.fetch(pair)
    metrics = RelayMetrics(star.relay)
    text = generate_latest(metrics.registry).decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    expected = {
        "kvcs_relay_sessions": 2,
        "kvcs_relay_sessions_total": 2,
        "kvcs_relay_namespaces": 1,
        "kvcs_relay_tracks": 1,
        "kvcs_relay_upstream_subscriptions": 1,
        "kvcs_relay_upstream_subscriptions_total": 1,
        "kvcs_relay_upstream_fetches_total": 1,
        "kvcs_relay_downstream_subscriptions": 1,
        "kvcs_relay_downstream_fetches_total": 1,
        "kvcs_relay_cache_objects": 8,
        "kvcs_relay_cache_bytes": 800,
        "kvcs_relay_cache_ranges_missed_total": 1,
        "kvcs_relay_cache_misses_total": 8,
        "kvcs_relay_cache_hits_total": 16,
        "kvcs_relay_objects_in_total": 8,
        "kvcs_relay_out_bytes_total": 1600,
    }
    assert {name: float(lines[name]) for name in expected} == expected


def test_a_session_that_changes_its_prefix_is_authorized_again():
    policy = Denying(set())
    star = Star(policy=policy)
    star.publisher()
    pair = star.connect()
    seen, ended, answers = [], [], []
    request = pair.client.subscribe_namespace(
        (b"other",), on_namespace=lambda *event: seen.append(event), on_ended=ended.append
    )
    star.run()
    request.prefix = (b"demo",)
    request.update(Parameters(track_namespace_prefix=(b"demo",)), answers.append)
    star.run()
    assert seen == [(NAMESPACE, True)]
    policy.denied = {Action.SUBSCRIBE_NAMESPACE}
    request.update(Parameters(track_namespace_prefix=(b"secret",)), answers.append)
    star.run()
    assert answers[-1].code == RequestErrorCode.UNAUTHORIZED, "asked before it was answered"
    assert ended and not star.relay.namespaces.listings
