"""Rights that are withdrawn end what was open (MOQT "Authorization")."""

from __future__ import annotations

from moqt.values.codes import PublishDoneCode, RequestErrorCode, StreamErrorCode
from moqt.values.messages import Parameters
from moqt.values.names import FullTrackName, Location
from relay import withdrawals as rights
from relay.rights.policy import Action
from relay.rights.tokens import TokenPolicy
from tests.relay.rights.principals import NAME as SCOPED
from tests.relay.rights.principals import NAMESPACE, READER, RECORDS, WRITER, parameters, write
from tests.relay.star import JOIN, LIVE, NAME, Collector, Star, publish, track


class Permits:
    """Everything, but what has been withdrawn from a session."""

    def __init__(self):
        self.withdrawn = set()

    def allow(self, session, action, namespace, tokens=()):
        return (session, action) not in self.withdrawn

    def check(self, session, token):
        return None


def withdraw(star, pair, *actions):
    star.relay.refusals.policy.withdrawn |= {(pair.server, action) for action in actions}
    rights.recheck(star.relay)
    star.run()


def test_a_subscription_ends_with_unauthorized_and_others_go_on():
    star = Star(policy=Permits())
    store = track(1)
    star.publisher(store)
    (one, lost), (_, kept) = star.subscriber(JOIN), star.subscriber(JOIN)
    withdraw(star, one, Action.SUBSCRIBE)
    publish(store, 1, 0)
    star.run()
    assert lost.done == PublishDoneCode.UNAUTHORIZED and kept.done is None
    assert len(lost.locations) == 4 and len(kept.locations) == 5
    assert star.relay.counters.requests_revoked == 1 and one.client.closed is None
    assert star.subscribe(one).failed.code == RequestErrorCode.UNAUTHORIZED


def test_a_fetch_is_reset_in_mid_object():
    star = Star(policy=Permits())
    store = track()
    star.publisher(store)
    star.subscriber(LIVE)
    growing = store.begin(Location(0, 0), subgroup=0, priority=None, properties=b"", length=1000)
    store.grow(growing, b"x" * 500)
    star.run()
    pair = star.connect()
    collector = star.fetch(pair, (0, 0), (0, 0))
    assert collector.parts == 500
    withdraw(star, pair, Action.FETCH)
    assert collector.fetch_resets == [StreamErrorCode.EXPIRED_AUTH_TOKEN]
    assert star.relay.counters.requests_revoked == 1


def test_a_request_that_waits_is_refused():
    star = Star(policy=Permits())
    pair = star.connect()
    waiting = star.subscribe(
        pair, Parameters(rendezvous_timeout=9000), FullTrackName((b"nobody",), b"yet")
    )
    withdraw(star, pair, Action.SUBSCRIBE)
    assert waiting.failed.code == RequestErrorCode.UNAUTHORIZED
    assert len(star.relay.waiting) == 0


def test_a_publisher_is_listened_to_no_more():
    star = Star(policy=Permits())
    stores = [track(1), track()]
    bad, good = (star.publisher(store) for store in stores)
    _, collector = star.subscriber(LIVE)
    withdraw(star, bad, Action.PUBLISH_NAMESPACE)
    assert len(bad.ended) == 1 and not good.ended and bad.client.closed is None
    stores[0].append(5, 0, b"no right")
    stores[1].append(1, 0, b"right")
    star.run()
    assert [bytes(each.payload) for each in collector.normal] == [b"right"]
    withdraw(star, good, Action.PUBLISH_NAMESPACE)
    assert collector.done == PublishDoneCode.INTERNAL_ERROR
    assert star.relay.upstream_subscriptions == 0


def test_a_publication_and_its_offers_end():
    star = Star(policy=Permits())
    publisher, reader = star.connect(), star.connect()
    ended, over, offered = [], [], []
    publisher.client.publish(track(1), on_ended=ended.append)

    def on_publish(publication):
        collector = Collector()
        offered.append(collector)
        publication.accept(collector)

    reader.client.subscribe_tracks(NAME.namespace[:1], on_publish=on_publish, on_ended=over.append)
    star.run()
    assert len(offered) == 1
    withdraw(star, reader, Action.SUBSCRIBE)
    assert offered[0].done == PublishDoneCode.UNAUTHORIZED and not over
    withdraw(star, reader, Action.SUBSCRIBE_TRACKS)
    assert len(over) == 1 and not star.relay.offers.wanted
    withdraw(star, publisher, Action.PUBLISH)
    assert len(ended) == 1 and star.relay.upstream_subscriptions == 0


def test_a_listing_of_namespaces_ends():
    star = Star(policy=Permits())
    pair, over = star.connect(), []
    pair.client.subscribe_namespace(
        (b"demo",), on_namespace=lambda *event: None, on_ended=over.append
    )
    star.run()
    withdraw(star, pair, Action.SUBSCRIBE_NAMESPACE)
    assert len(over) == 1 and not star.relay.namespaces.listings


def test_who_is_taken_out_of_the_file_loses_what_it_has_open_at_the_next_look(path):
    policy = TokenPolicy(path)
    star = Star(policy=policy)
    publisher = star.connect()
    publisher.client.publish(track(1, name=SCOPED), parameters(WRITER))
    pair = star.connect()
    collector = star.subscribe(pair, parameters(READER), SCOPED)
    assert collector.accepted and not policy.reload()
    write(path, [record for record in RECORDS if record["scopes"].get("*") is None][1:])
    assert policy.reload()
    rights.recheck(star.relay)
    star.run()
    assert collector.done == PublishDoneCode.UNAUTHORIZED
    assert star.relay.upstream_subscriptions == 1, "the writer is still there"
    assert star.relay.tracks[SCOPED].name.namespace == NAMESPACE


def test_a_file_that_cannot_be_read_for_a_moment_ends_nothing_that_is_open(path):
    policy = TokenPolicy(path)
    star = Star(policy=policy)
    star.connect().client.publish(track(1, name=SCOPED), parameters(WRITER))
    pair = star.connect()
    collector = star.subscribe(pair, parameters(READER), SCOPED)
    path.write_text("{")
    assert not policy.reload()
    assert collector.accepted and collector.done is None
    refused = star.subscribe(pair, parameters(READER), SCOPED)
    assert refused.failed.code == RequestErrorCode.UNAUTHORIZED
