"""Publishers and subscribers that go away, never answer, or reset what they send."""

from __future__ import annotations

import random

import pytest

from moqt.publisher import Publisher
from moqt.track.store import TrackStore
from moqt.values.codes import PublishDoneCode, RequestErrorCode, StreamErrorCode
from moqt.values.messages import LocationFilter, Parameters
from moqt.values.names import FullTrackName, Location
from tests.relay.star import (
    JOIN,
    LIVE,
    NAME,
    NAMESPACE,
    Collector,
    SilentPublisher,
    Star,
    end_track,
    everything,
    payload,
    publish,
    track,
)


def test_after_the_publisher_left_every_consumer_completes_from_the_cache():
    """What is cached must not be asked of a publisher that is gone."""
    star, store = Star(), track()
    publisher = star.publisher(store)
    _, first = star.subscriber(JOIN)
    for g in range(3):
        for o in range(4):
            publish(store, g, o)
    end_track(store, 3)
    star.run()
    assert first.done == PublishDoneCode.TRACK_ENDED
    asked = len(publisher.handler.subscribes) + len(publisher.handler.fetches)
    star.kill(publisher)
    star.pass_time(120)
    for _ in range(3):
        pair, collector = star.subscriber(JOIN)
        assert collector.payloads == everything(3) and collector.repeated == []
        assert collector.done == PublishDoneCode.TRACK_ENDED
        assert star.fetch(pair).payloads == everything(3)
    told = []
    star.connect().client.subscribe_namespace(
        (b"demo",), on_namespace=lambda *event: told.append(event), on_ended=lambda error: None
    )
    star.run()
    assert told == [(NAMESPACE, True)]
    assert len(publisher.handler.subscribes) + len(publisher.handler.fetches) == asked


def test_a_complete_track_whose_publisher_vanished_without_a_word_ends_as_ended():
    star, store = Star(), track()
    publisher = star.publisher(store)
    _, collector = star.subscriber(JOIN)
    for o in range(4):
        publish(store, 0, o)
    store.mark_end(Location(1, 0), 4)
    star.run()
    star.kill(publisher)
    assert collector.done == PublishDoneCode.TRACK_ENDED
    _, late = star.subscriber(JOIN)
    assert late.payloads == everything(1) and late.done == PublishDoneCode.TRACK_ENDED


def test_a_publisher_lost_in_mid_group_ends_subscriptions_and_resets_streams():
    star, store = Star(), track()
    publisher = star.publisher(store)
    _, collector = star.subscriber(LIVE)
    publish(store, 0, 0)
    growing = store.begin(Location(0, 1), subgroup=0, priority=None, properties=b"", length=1000)
    store.grow(growing, b"a" * 500)
    star.run()
    assert collector.parts == 600
    star.kill(publisher)
    assert collector.locations == [Location(0, 0)]
    assert collector.streams == [(0, StreamErrorCode.INTERNAL_ERROR)]
    assert collector.done == PublishDoneCode.INTERNAL_ERROR
    store = star.relay.tracks[NAME].store
    assert store.groups[0].subgroups[0].broken and not store.groups[0].subgroups[0].finished


def test_a_publisher_lost_between_objects_is_no_silence_either():
    star, store = Star(), track()
    publisher = star.publisher(store)
    _, collector = star.subscriber(LIVE)
    publish(store, 0, 0)
    star.run()
    star.kill(publisher)
    assert collector.streams == [(0, StreamErrorCode.INTERNAL_ERROR)]
    assert collector.done == PublishDoneCode.INTERNAL_ERROR


@pytest.mark.parametrize(
    "code", [PublishDoneCode.GOING_AWAY, PublishDoneCode.EXPIRED, PublishDoneCode.UNAUTHORIZED]
)
def test_publish_done_is_passed_on_with_the_same_meaning(code):
    star, store = Star(), track()
    publisher = star.publisher(store)
    _, collector = star.subscriber(LIVE)
    publish(store, 0, 0)
    star.run()
    publisher.handler.subscribes[0].end(code, "because")
    star.run()
    assert collector.done == code


def test_a_publisher_that_comes_back_is_used_again():
    star, store = Star(), track()
    publisher = star.publisher(store)
    _, old = star.subscriber(JOIN)
    for o in range(4):
        publish(store, 0, o)
    star.run()
    star.kill(publisher)
    assert old.done == PublishDoneCode.INTERNAL_ERROR
    refused = star.subscriber(JOIN)[1]
    assert refused.failed.code == RequestErrorCode.DOES_NOT_EXIST
    again = star.publisher(store)
    _, new = star.subscriber(JOIN)
    assert new.payloads == everything(1)
    # Only what the relay does not have is fetched, and one Object to compare.
    assert again.handler.fetch_ranges == [(Location(0, 3), Location(0, 3))]
    for o in range(4):
        publish(store, 1, o)
    end_track(store, 2)
    star.run()
    assert new.payloads == everything(2) and new.done == PublishDoneCode.TRACK_ENDED
    assert old.payloads == everything(1)


def test_what_was_published_while_nobody_was_connected_is_fetched():
    star, store = Star(), track(1)
    publisher = star.publisher(store)
    star.subscriber(JOIN)
    star.kill(publisher)
    for o in range(4):
        publish(store, 1, o)
    star.publisher(store)
    _, new = star.subscriber(JOIN)
    assert new.payloads == everything(2) and new.repeated == []


def test_a_fetch_of_a_dead_publishers_unfinished_track_brings_what_is_cached():
    star, store = Star(), track(2)
    publisher = star.publisher(store)
    star.subscriber(JOIN)
    publish(store, 2, 0)
    publish(store, 2, 2)
    star.run()
    star.kill(publisher)
    collector = star.fetch(star.connect())
    # Whether there is an Object {2,1} nobody can tell any more.
    held = {Location(2, o): payload(2, o) for o in (0, 2)}
    assert collector.payloads == {**everything(2), **held}
    assert collector.unknown == [Location(2, 1)] and not collector.fetch_resets


def test_a_publisher_that_never_answers_a_subscribe_is_a_timeout():
    """A request the relay cannot satisfy must be answered too."""
    star = Star()
    publisher = star.publisher(handler=SilentPublisher())
    _, collector = star.subscriber(JOIN)
    star.pass_time(4.5)
    assert collector.failed is None
    star.pass_time(2)
    assert collector.failed.code == RequestErrorCode.TIMEOUT
    assert publisher.handler.requests[0].state.name == "CLOSED"
    star.pass_time(2)
    assert not star.relay.tracks and not star.relay.waiting.pending


def test_a_publisher_that_leaves_before_it_answers():
    star = Star()
    publisher = star.publisher(handler=SilentPublisher())
    _, collector = star.subscriber(JOIN)
    star.kill(publisher)
    assert collector.failed.code == RequestErrorCode.INTERNAL_ERROR
    assert collector.failed.retry_after_ms is not None


def test_an_unknown_namespace_and_an_unknown_track_of_a_known_one_look_the_same():
    star = Star()
    star.publisher(track(1))
    _, one = star.subscriber(JOIN, FullTrackName((b"nobody",), b"video"))
    _, two = star.subscriber(JOIN, FullTrackName(NAMESPACE, b"other"))
    assert one.failed.code == two.failed.code == RequestErrorCode.DOES_NOT_EXIST
    assert (one.failed.reason, one.failed.retry_after_ms) == (
        two.failed.reason,
        two.failed.retry_after_ms,
    )


def test_rendezvous_waits_for_a_publisher_and_then_goes_on():
    star = Star()
    _, collector = star.subscriber(
        Parameters(rendezvous_timeout=3000, location_filter=LIVE.location_filter)
    )
    star.pass_time(2)
    assert collector.failed is None
    store = track()
    star.publisher(store)
    publish(store, 0, 0)
    star.run()
    assert collector.locations == [Location(0, 0)]
    assert not star.relay.waiting.pending


def test_rendezvous_ends_with_a_timeout_and_is_capped():
    star = Star(max_rendezvous=10)
    collectors = [star.subscriber(Parameters(rendezvous_timeout=ms))[1] for ms in (3000, 3_600_000)]
    star.pass_time(4)
    assert collectors[0].failed.code == RequestErrorCode.TIMEOUT
    assert collectors[1].failed is None
    star.pass_time(7)
    assert collectors[1].failed.code == RequestErrorCode.TIMEOUT


def test_rendezvous_does_not_begin_anew_when_it_is_seen_again_who_has_the_track():
    star = Star()
    _, collector = star.subscriber(Parameters(rendezvous_timeout=5000))
    for _ in range(4):
        star.pass_time(1.5)
        for request in star.relay.waiting.under(()):
            star.relay.looked(request)  # as whoever looks for relays that have it
    assert collector.failed.code == RequestErrorCode.TIMEOUT
    assert not star.relay.waiting.pending


def test_the_upstream_subscription_lingers_and_then_is_cancelled_and_the_cache_stays():
    star, store = Star(), track()
    publisher = star.publisher(store)
    pair, collector = star.subscriber(JOIN)
    publish(store, 0, 0)
    star.run()
    collector.request.cancel()
    star.run()
    star.pass_time(20)
    assert publisher.handler.subscribes[0].state.name == "ESTABLISHED"
    again = star.subscribe(pair, LIVE)
    star.pass_time(60)
    assert publisher.handler.subscribes[0].state.name == "ESTABLISHED"
    again.request.cancel()
    star.run()
    star.pass_time(32)
    assert publisher.handler.subscribes[0].state.name == "CLOSED"
    assert star.relay.cache.objects == 1
    for o in (1, 2, 3):
        publish(store, 0, o)
    fresh = star.subscribe(pair, JOIN)
    assert fresh.payloads == everything(1) and fresh.repeated == []
    assert len(publisher.handler.subscribes) == 2


def test_a_subgroup_ends_downstream_as_it_ended_upstream():
    star, store = Star(), track()
    star.publisher(store)
    _, collector = star.subscriber(LIVE)
    for group in range(2):
        publish(store, group, 0)
    star.run()
    store.break_subgroup(0, 0)
    star.run()
    store.finish_subgroup(1, 0)
    star.run()
    assert len(collector.locations) == 2
    assert [error is None for _, error in collector.streams] == [False, True]


def test_64_concurrent_subgroups_with_random_resets():
    for seed in range(4):
        rng = random.Random(seed)
        star, store = Star(seed=seed), track()
        star.publisher(store)
        collectors = [star.subscriber(LIVE)[1] for _ in range(2)]
        growing, whole = {}, {}
        for step in range(600):
            subgroup = rng.randrange(64)
            current = growing.get(subgroup)
            if current is None:
                group, object_ = step, subgroup
                current = growing[subgroup] = store.begin(
                    Location(group, object_),
                    subgroup=subgroup,
                    priority=None,
                    properties=b"",
                    length=300,
                )
            store.grow(current, bytes([subgroup]) * 100)
            if not current.complete and rng.random() < 0.15:
                del growing[subgroup]
                store.abort(current)
                store.break_subgroup(current.location.group, subgroup)
            elif current.complete:
                del growing[subgroup]
                whole[current.location] = bytes([subgroup]) * 300
                store.complete(current)
                store.finish_subgroup(current.location.group, subgroup)
            if rng.random() < 0.3:
                star.step()
        star.run()
        for collector in collectors:
            assert collector.done is None and collector.failed is None
            assert collector.payloads == whole and collector.repeated == []
        assert any(error is not None for _, error in collectors[0].streams)


@pytest.mark.parametrize("octets", [0, 10])
def test_a_subgroup_that_is_cut_before_any_of_it_went_on_is_told_by_a_reset_too(octets):
    star, store = Star(), track(1)
    publisher = star.publisher(store)
    _, collector = star.subscriber(LIVE)
    cut = store.begin(Location(1, 0), subgroup=0, priority=None, properties=b"", length=100)
    store.grow(cut, bytes(octets))
    publisher.client.ready_to_send()
    publisher.client_transport.deliver()
    store.abort(cut)
    store.break_subgroup(1, 0)
    star.run()
    end_track(store, 2)
    star.run()
    assert collector.done == PublishDoneCode.TRACK_ENDED
    assert any(error is not None for _, error in collector.streams)


def watched(star, parameters=LIVE):
    """A subscriber, and how each subgroup stream that it sees from now on begins and ends."""
    _, collector = star.subscriber(parameters)
    collector.headers, collector.ends = [], []
    ended = collector.stream_ended

    def stream_ended(stream, error):
        collector.ends.append((stream.subgroup.group, error))
        ended(stream, error)

    collector.stream_opened = lambda stream: collector.headers.append(stream.subgroup)
    collector.stream_ended = stream_ended
    return collector


def test_a_subgroup_that_is_cut_right_after_its_header_is_told_with_its_id_and_priority():
    star, store = Star(), track(1)
    star.publisher(store)
    collector = watched(star)
    store.break_subgroup(1, 3, priority=7)
    star.run()
    (header,) = collector.headers
    assert (header.group, header.subgroup, header.priority) == (1, 3, 7)
    assert not header.first_object and not header.end_of_group
    assert collector.ends == [(1, StreamErrorCode.INTERNAL_ERROR)]
    assert 1 not in star.relay.tracks[NAME].store.groups
    end_track(store, 2)
    star.run()
    assert collector.done == PublishDoneCode.TRACK_ENDED


def test_what_follows_a_subgroup_that_was_cut_right_after_its_header_comes_on_another_stream():
    star, store = Star(), track(1)
    star.publisher(store)
    collector = watched(star)
    store.break_subgroup(1, 0)
    star.run()
    store.subgroup(1, 0).broken = False
    publish(store, 1, 0, objects=1)
    star.run()
    assert collector.payloads == {Location(1, 0): payload(1, 0)}
    assert collector.ends == [(1, StreamErrorCode.INTERNAL_ERROR), (1, None)]


def test_a_cut_is_told_to_who_has_subscribed_behind_all_that_came_of_the_subgroup():
    star, store = Star(), track(1)
    star.publisher(store)
    first = watched(star)
    publish(store, 1, 0)
    star.run()
    second = watched(star)
    store.break_subgroup(1, 0)
    star.run()
    assert first.ends == second.ends == [(1, StreamErrorCode.INTERNAL_ERROR)]
    # What was lost before it subscribed is no loss of its own.
    late = watched(star)
    end_track(store, 2)
    star.run()
    assert late.ends == [(2, None)] and late.done == PublishDoneCode.TRACK_ENDED


def test_a_cut_outside_the_location_filter_is_not_told():
    star, store = Star(), track(1)
    star.publisher(store)
    star.subscriber(LIVE)
    ranged = [
        watched(
            star, Parameters(location_filter=LocationFilter.range(Location(*low), Location(*high)))
        )
        for low, high in (((1, 0), (1, 9)), ((2, 0), (2, 9)), ((3, 0), (3, 9)))
    ]
    store.break_subgroup(2, 0)
    star.run()
    told = [(2, StreamErrorCode.INTERNAL_ERROR)]
    assert [collector.ends for collector in ranged] == [[], told, []]


def lose_streams(publisher):
    """What the peer has written on its open data streams never arrives."""
    publisher.client.ready_to_send()
    for stream_id, stream in publisher.client_transport.out.items():
        if stream_id & 2 and not stream.over and stream.queue:
            stream.queue.clear()
            stream.over = True


@pytest.mark.parametrize("lost", [False, True])
def test_a_track_that_ends_with_fewer_streams_than_it_counts_did_not_end_well(lost):
    star, store = Star(), track(1)
    publisher = star.publisher(store)
    _, collector = star.subscriber(LIVE)
    publish(store, 1, 0, objects=1)
    if lost:
        lose_streams(publisher)
    star.run()
    publish(store, 2, 0, objects=1)
    end_track(store, 3)
    star.run()
    star.pass_time(60)
    assert Location(2, 0) in collector.payloads
    assert (Location(1, 0) in collector.payloads) is not lost
    ended = PublishDoneCode.INTERNAL_ERROR if lost else PublishDoneCode.TRACK_ENDED
    assert collector.done == ended


def test_killed_sessions_leave_no_state_behind():
    star = Star(linger=0)
    stores = [TrackStore(FullTrackName((b"n", b"%d" % n), b"t")) for n in range(5)]
    publishers = [star.publisher(s, namespace=s.name.namespace) for s in stores]
    silent = star.publisher(handler=SilentPublisher(), namespace=(b"silent",))
    pairs = []
    for store in stores:
        pair = star.connect()
        pairs.append(pair)
        star.subscribe(pair, LIVE, store.name)
        star.fetch(pair, name=store.name)
        pair.client.subscribe_namespace(
            (b"n",), on_namespace=lambda *event: None, on_ended=lambda error: None
        )
        star.subscribe(pair, JOIN, FullTrackName((b"silent",), b"t"))
        star.subscribe(
            pair, Parameters(rendezvous_timeout=20_000), FullTrackName((b"later",), b"t")
        )
    growing = stores[0].begin(
        Location(0, 0), subgroup=0, priority=None, properties=b"", length=1000
    )
    stores[0].grow(growing, b"x" * 10)
    star.run()
    assert len(star.relay.waiting.pending) == 10 and star.relay.cache.billed
    for pair in [*pairs, *publishers, silent]:
        star.kill(pair)
    star.pass_time(2)
    star.assert_empty()


def test_killed_publishers_first():
    star = Star(linger=0)
    store = track(1)
    publisher = star.publisher(store)
    pair, _ = star.subscriber(JOIN)
    star.fetch(pair)
    star.kill(publisher)
    star.kill(pair)
    star.pass_time(2)
    # What is cached stays, and is forgotten with its last Object.
    assert list(star.relay.tracks) == [NAME]
    star.relay.cache.forget(star.relay.tracks[NAME].store)
    star.relay.track_busy(star.relay.tracks[NAME])
    star.pass_time(1)
    star.assert_empty()


def test_a_subscriber_killed_in_mid_object_disturbs_nobody():
    star, store = Star(), track()
    star.publisher(store)
    dying, _ = star.subscriber(LIVE)
    _, other = star.subscriber(LIVE)
    growing = store.begin(Location(0, 0), subgroup=0, priority=None, properties=b"", length=1000)
    store.grow(growing, b"a" * 500)
    star.run()
    star.kill(dying)
    store.grow(growing, b"a" * 500)
    store.complete(growing)
    star.run()
    assert other.payloads == {Location(0, 0): b"a" * 1000}


def test_a_publisher_that_said_goaway_is_asked_only_when_there_is_no_other():
    star = Star()
    leaving, staying = star.publisher(track(1)), star.publisher(track(1))
    leaving.client.send_goaway()
    star.run()
    asked = leaving.server_transport.opened[True]
    star.subscriber(JOIN)
    assert leaving.server_transport.opened[True] == asked and staying.handler.subscribes
    star.kill(staying)
    star.pass_time(10)
    asked, other = leaving.server_transport.opened[True], FullTrackName(NAMESPACE, b"other")
    _, collector = star.subscriber(JOIN, other)
    assert leaving.server_transport.opened[True] == asked + 1
    assert collector.failed.reason == "the publisher said GOING_AWAY"


def test_a_relay_that_drains_refuses_new_requests():
    star, store = Star(), track()
    star.publisher(store)
    pair, old = star.subscriber(LIVE)
    for each in star.pairs:
        each.server.send_goaway()
    star.run()
    assert star.subscribe(pair, LIVE).failed.code == RequestErrorCode.GOING_AWAY
    publish(store, 0, 0)
    star.run()
    assert old.locations == [Location(0, 0)]


def test_1000_races_of_announcing_and_subscribing():
    """Once PUBLISH_NAMESPACE is answered, SUBSCRIBE finds the track."""
    rng = random.Random(66)
    star = Star(seed=66, linger=0)
    handler = Publisher()
    for n in range(1000):
        if n % 25 == 0:  # the in-memory transport slows down with every stream it has seen
            for pair in tuple(star.pairs):
                star.kill(pair)
            asking, publisher = star.connect(), star.connect(handler)
            star.pass_time(1)
        name = FullTrackName((b"race", b"%d" % n), b"t")
        store = TrackStore(name)
        store.append(0, 0, b"x")
        handler.add_track(store)
        answered = []
        published = publisher.client.publish_namespace(
            name.namespace, on_ended=lambda error, answered=answered: answered.append(error)
        )
        published.on_answer = answered.append
        early = Collector()
        early.request = asking.client.subscribe(name, early, JOIN)
        for _ in range(rng.randrange(4)):
            star.step()
        while not answered:
            star.step()
        assert answered == [None]
        late = Collector()
        late.request = asking.client.subscribe(name, late, JOIN)
        star.run()
        assert late.locations == [Location(0, 0)]
        assert early.locations == [Location(0, 0)] or (
            early.failed.code == RequestErrorCode.DOES_NOT_EXIST
        )
        late.request.cancel()
        early.request.cancel()
        published.cancel()
        handler.remove_track(name)
        star.run()
    star.pass_time(2)
    assert star.relay.namespaces.publications == 0 and not star.relay.waiting.pending


def test_when_the_first_of_two_publishers_says_track_ended_the_fill_is_not_disturbed():
    for seed in range(20):
        star = Star(seed=seed)
        for _ in range(2):
            star.publisher(track(1, ended=True))
        _, collector = star.subscriber(JOIN)
        assert collector.payloads == everything(1)
        assert collector.done == PublishDoneCode.TRACK_ENDED


def test_a_publisher_lost_while_another_has_not_answered_yet_does_not_end_subscriptions():
    star, store = Star(), track()
    publisher = star.publisher(store)
    _, collector = star.subscriber(LIVE)
    silent = star.publisher(handler=SilentPublisher())
    star.kill(publisher)
    assert collector.done is None
    silent.handler.requests[0].accept(store)
    publish(store, 0, 0)
    star.run()
    assert collector.locations == [Location(0, 0)]


def test_and_if_that_one_refuses_they_end_as_the_first_one_did():
    star, store = Star(), track()
    publisher = star.publisher(store)
    _, collector = star.subscriber(LIVE)
    silent = star.publisher(handler=SilentPublisher())
    publisher.handler.subscribes[0].end(PublishDoneCode.EXPIRED, "")
    star.run()
    assert collector.done is None
    silent.handler.requests[0].reject(RequestErrorCode.DOES_NOT_EXIST, "")
    star.run()
    assert collector.done == PublishDoneCode.EXPIRED
