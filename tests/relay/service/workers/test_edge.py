"""Edges behind one home: what one relay would do, they do together."""

from __future__ import annotations

import pytest

from moqt.session import SessionConfig
from moqt.values.codes import RequestErrorCode
from moqt.values.errors import RequestError
from moqt.values.names import ON_DISK, FullTrackName, Location
from relay.rights.policy import Action
from relay.withdrawals import recheck
from tests.relay.peers import Listing, Wanting, offering
from tests.relay.service.workers.cluster import Cluster
from tests.relay.star import (
    NAME,
    NAMESPACE,
    Denying,
    end_track,
    everything,
    publish,
    track,
)


def test_what_is_published_at_an_edge_is_read_at_all_of_them_and_crosses_once_to_each():
    cluster = Cluster(3)
    one, two, three = cluster.connect()
    store = track(2)
    source = one.publisher(store)
    readers = [edge.subscriber()[1] for edge in (one, two, two, three)]
    publish(store, 2, 0)
    one.run()
    for reader in readers:
        assert set(reader.payloads) == set(everything(2)) | {Location(2, 0)}
    assert len(source.handler.subscribes) == 1
    for edge in (one, two, three):
        assert edge.relay.counters.objects_in == 9
    assert cluster.home.counters.objects_in == 9
    assert cluster.home.counters.objects_out == 3 * 9


def test_a_namespace_is_accepted_when_the_home_has_it():
    cluster = Cluster()
    one, two = cluster.connect()
    bringing = cluster.links[one][1][0]
    one.delay(bringing)
    source = one.publisher()
    assert source.published.state.name == "PENDING"
    one.arrive(bringing)
    assert source.published.state.name == "ESTABLISHED"
    listing = Listing(two, two.connect(), (b"demo",))
    assert listing.events == [(NAMESPACE, True)]
    source.published.cancel()
    one.run()
    assert listing.events[1:] == [(NAMESPACE, False)]
    assert not cluster.home.namespaces.publications


def test_a_namespace_of_two_publishers_at_one_edge_stays_until_both_have_left():
    cluster = Cluster()
    one, two = cluster.connect()
    first, second = one.publisher(), one.publisher()
    listing = Listing(two, two.connect(), (b"demo",))
    first.published.cancel()
    one.run()
    assert listing.events == [(NAMESPACE, True)]
    second.published.cancel()
    one.run()
    assert listing.events[1:] == [(NAMESPACE, False)]


def test_a_namespace_given_up_before_the_home_has_answered_is_not_left_there():
    cluster = Cluster()
    one, _ = cluster.connect()
    bringing = cluster.links[one][1][0]
    one.delay(bringing)
    source = one.publisher()
    source.published.cancel()
    one.run()
    one.arrive(bringing)
    assert not cluster.home.namespaces.publications
    assert not one.relay.taking.namespaces.publications


def test_a_track_that_is_published_without_a_namespace_is_found_at_the_other_edge():
    cluster = Cluster()
    one, two = cluster.connect()
    store = track(2)
    offering(one, store)
    _, reader = two.subscriber()
    assert reader.payloads == everything(2)
    wanting = Wanting(two, two.connect())
    assert wanting.names == [NAME]


def test_a_complete_publication_outlives_its_publisher_at_every_edge():
    cluster = Cluster()
    one, two = cluster.connect()
    store = track(2)
    end_track(store, 2)
    source = one.publisher(store)
    _, reader = two.subscriber()
    assert reader.payloads == everything(2)
    one.kill(source)
    cluster.pass_time(3)
    for edge in (one, two):
        listing = Listing(edge, edge.connect(), (b"demo",))
        assert listing.events == [(NAMESPACE, True)]
        fetched = edge.fetch(edge.connect())
        assert fetched.payloads == everything(2)


def test_requests_wait_for_the_home_and_are_served_when_it_is_there():
    cluster = Cluster()
    one, two = cluster.edges
    source = one.publisher(track(2))
    _, reader = two.subscriber()
    listing = Listing(two, two.connect(), (b"demo",))
    assert source.published.state.name == "PENDING" and not reader.payloads
    cluster.link(one)
    assert source.published.state.name == "ESTABLISHED"
    cluster.link(two)
    assert reader.payloads == everything(2)
    assert listing.events == [(NAMESPACE, True)]


def test_requests_that_the_home_does_not_come_for_are_refused_for_now():
    cluster = Cluster(upstream_timeout=2)
    one, _ = cluster.edges
    source = one.publisher()
    _, reader = one.subscriber()
    listing = Listing(one, one.connect(), (b"demo",))
    cluster.pass_time(3)
    (refused,) = source.ended
    for error in (refused, reader.failed, listing.ended[0]):
        assert error.code == RequestErrorCode.INTERNAL_ERROR
        assert error.retry_after_ms is not None


def test_one_session_cannot_have_all_the_room_for_requests_that_wait_for_the_home():
    cluster = Cluster(max_pending=8)
    one, _ = cluster.edges
    greedy = one.connect()
    readers = [one.subscribe(greedy, name=FullTrackName(NAMESPACE, b"%d" % n)) for n in range(8)]
    assert [bool(each.failed) for each in readers] == [False] * 4 + [True] * 4
    _, other = one.subscriber()
    assert not other.failed


def test_edges_tell_a_new_home_what_their_publishers_have():
    cluster = Cluster()
    one, two = cluster.connect()
    one.publisher(track(2))
    for edge in (one, two):
        cluster.cut(edge)
    assert not cluster.home.namespaces.publications
    cluster.connect()
    assert cluster.home.namespaces.publications == 1
    _, reader = two.subscriber()
    assert reader.payloads == everything(2)


def test_what_an_edge_has_is_served_while_the_home_is_gone():
    cluster = Cluster()
    one, two = cluster.connect()
    store = track(2)
    end_track(store, 2)
    one.publisher(store)
    two.subscriber()
    cluster.cut(two)
    fetched = two.fetch(two.connect())
    assert fetched.payloads == everything(2)


@pytest.mark.parametrize("action", [Action.PUBLISH_NAMESPACE, Action.SUBSCRIBE, Action.FETCH])
def test_rights_are_asked_at_the_edge_and_the_home_hears_of_nothing_that_is_refused(action):
    cluster = Cluster(policy=Denying({action}))
    one, _ = cluster.connect()
    if action is Action.PUBLISH_NAMESPACE:
        (error,) = one.publisher().ended
    elif action is Action.SUBSCRIBE:
        error = one.subscriber()[1].failed
    else:
        error = one.fetch(one.connect()).failed
    assert error.code == RequestErrorCode.UNAUTHORIZED
    assert not cluster.home.namespaces.publications and not cluster.home.tracks
    assert one.relay.counters.refused["UNAUTHORIZED"] == 1


def test_who_has_no_right_any_more_is_no_publisher_and_no_reader_any_more():
    policy = Denying(set())
    cluster = Cluster(policy=policy)
    one, two = cluster.connect()
    source = one.publisher(track(2))
    pair, reader = two.subscriber()
    policy.strangers |= {source.server, pair.server}
    for edge in (one, two):
        recheck(edge.relay)
    one.run()
    assert len(source.ended) == 1 and reader.done is not None
    cluster.pass_time(1)
    assert [edge.relay.counters.requests_revoked for edge in (one, two)] == [1, 1]
    assert not cluster.home.namespaces.publications


def test_whether_a_track_is_on_the_disk_is_asked_of_the_home():
    cluster = Cluster()
    one, _ = cluster.connect()
    one.publisher(track(1))
    answers = []
    asking = one.connect()
    asked = asking.client.track_status(FullTrackName((ON_DISK, *NAMESPACE), NAME.name))
    asked.on_answer = answers.append
    one.run()
    (error,) = answers
    assert isinstance(error, RequestError)
    assert error.reason == "the relay has no disk tier"
    assert cluster.home.counters.refused["DOES_NOT_EXIST"] == 1


def test_an_edge_passes_on_what_a_relay_asks_of_it_first_hand():
    cluster = Cluster()
    one, two = cluster.connect()
    one.publisher(track(2))
    pair = two.connect(client_config=SessionConfig(relay_id=99, first_hand=True))
    assert two.subscribe(pair).payloads == everything(2)


def test_nothing_is_left_at_the_home_of_an_edge_that_dies():
    cluster = Cluster()
    one, two = cluster.connect()
    one.publisher(track(2))
    two.subscriber()
    cluster.scopes.edge_gone(0)
    cluster.scopes.edge_gone(1)
    one.run()
    assert not cluster.home.namespaces.publications
    assert not cluster.home.sessions
