"""What a peer says as a relay counts from relays alone: from others it changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moqt.token_file import bearer
from moqt.values.codes import RequestErrorCode
from moqt.values.config import SessionConfig
from moqt.values.messages import Parameters
from relay.withdrawals import recheck
from tests.relay.chain import Chain
from tests.relay.peers import Listing
from tests.relay.ring import Named
from tests.relay.star import (
    JOIN,
    NAME,
    NAMESPACE,
    Collector,
    CountingPublisher,
    Denying,
    SilentPublisher,
    everything,
    track,
)

OTHER, LIAR = 2, 7


class OnlyRelays(Denying):
    """Everybody may ask for everything; a relay is who shows the token of one."""

    def __init__(self):
        super().__init__(())
        self.believes = True

    def is_relay(self, session):
        return self.believes and (0, b"relay") in session.peer_tokens


SHOWN = {"setup_tokens": (bearer(b"relay"),)}


def relay_that_believes_nobody():
    return Named(1, policy=OnlyRelays())


def client(star, number, handler=None, **more):
    """A session whose peer says that it is the relay `number`."""
    pair = star.connect(handler, client_config=SessionConfig(relay_id=number, **more))
    star.run()
    return pair


def asked(star, pair, parameters):
    collector = Collector()
    pair.client.subscribe(NAME, collector, parameters)
    star.run()
    return collector


def test_a_client_that_names_the_relay_that_has_the_track_takes_it_from_nobody():
    """It says that OTHER waits for it, so that who asks OTHER would be denied."""
    star = relay_that_believes_nobody()
    pair = client(star, LIAR)
    source = client(star, OTHER, SilentPublisher(), **SHOWN)
    star.relay.add_upstream(source.server)
    lie = asked(star, pair, replace(JOIN, relay_path=(OTHER,)))
    honest = asked(star, star.connect(), JOIN)
    (held,) = star.relay.tracks.values()
    assert held.downstream.relays == frozenset() and not held.read_above
    assert [each.session for each in held.subscriptions] == [source.server]
    assert lie.failed is None and honest.failed is None
    assert star.relay.counters.claims_ignored == 2, "its SETUP, and its request"


def test_a_client_that_takes_the_name_of_a_relay_does_not_keep_it_from_being_asked():
    star = relay_that_believes_nobody()
    silent = SilentPublisher()
    publisher = client(star, OTHER, silent, **SHOWN)
    publisher.client.publish_namespace(NAMESPACE, on_ended=lambda error: None)
    asked(star, client(star, OTHER), JOIN)
    assert len(silent.requests) == 1


def test_a_client_that_names_this_relay_among_those_that_wait_is_served():
    star = relay_that_believes_nobody()
    star.publisher(track(1))
    collector = asked(star, client(star, LIAR), replace(JOIN, relay_path=(1,)))
    assert collector.payloads == everything(1)


def test_who_only_says_that_it_is_a_relay_is_not_told_who_waits():
    star = relay_that_believes_nobody()
    publisher = CountingPublisher()
    publisher.add_track(track(1))
    pair = client(star, LIAR, publisher)
    pair.client.publish_namespace(NAMESPACE, on_ended=lambda error: None)
    collector = asked(star, star.connect(), JOIN)
    assert collector.payloads == everything(1)
    requests = [*publisher.subscribes, *publisher.fetches]
    assert requests and all(each.parameters.relay_path is None for each in requests)


def test_who_shows_that_it_is_a_relay_is_believed_until_that_is_withdrawn():
    star = relay_that_believes_nobody()
    pair = client(star, OTHER, **SHOWN)
    denied = asked(star, pair, replace(JOIN, relay_path=(1,)))
    assert denied.failed.code == RequestErrorCode.DOES_NOT_EXIST
    assert star.relay.counters.claims_ignored == 0
    star.relay.refusals.policy.believes = False
    recheck(star.relay)
    assert pair.server.peer_relay.id is None
    assert star.relay.counters.claims_ignored == 1


def test_a_relay_whose_role_comes_with_a_later_file_is_believed_from_then_on():
    star = relay_that_believes_nobody()
    star.relay.refusals.policy.believes = False
    star.publisher(track(1))
    pair = client(star, OTHER, **SHOWN)
    assert asked(star, pair, replace(JOIN, relay_path=(1,))).payloads == everything(1)
    recheck(star.relay)
    star.relay.refusals.policy.believes = True
    recheck(star.relay)
    denied = asked(star, pair, replace(JOIN, relay_path=(1,)))
    assert denied.failed.code == RequestErrorCode.DOES_NOT_EXIST
    assert star.relay.counters.claims_ignored == 2, "its SETUP, and its first request"


def test_a_relay_that_we_have_dialled_need_not_show_that_it_is_one():
    bottom = Named(1, policy=OnlyRelays())
    above = Named(OTHER)
    link = above.connect(bottom.relay, client_config=bottom.session)
    bottom.pairs = above.pairs
    above.run()
    assert link.client.peer_relay.id == OTHER
    assert bottom.relay.counters.claims_ignored == 0


@pytest.mark.parametrize("first_hand", [False, True])
def test_a_client_that_asks_for_what_is_here_alone_need_not_be_a_relay(first_hand):
    chain = Chain(policy=OnlyRelays())
    chain.bottom.relay.refusals.policy = OnlyRelays()
    chain.connect()
    publisher = chain.top.publisher(track(1))
    pair = client(chain.bottom, LIAR, first_hand=first_hand)
    collector = asked(chain.bottom, pair, JOIN)
    assert (collector.failed is not None) == first_hand
    assert bool(publisher.handler.subscribes) != first_hand


def test_the_log_says_once_who_is_not_believed_to_be_a_relay(caplog):
    star = relay_that_believes_nobody()
    for number in range(3):
        pair = client(star, 10 + number)
        pair.client.track_status(NAME, Parameters())
    star.run()
    (record,) = (each for each in caplog.records if "says as a relay" in each.getMessage())
    assert "role" in record.getMessage()


def test_a_listing_of_who_only_says_that_it_is_a_relay_is_that_of_a_client():
    chain = Chain()
    chain.bottom.relay.refusals.policy = OnlyRelays()
    chain.connect()
    chain.top.publisher(track(1))
    listing = Listing(chain.top, client(chain.bottom, LIAR), NAMESPACE[:1])
    assert listing.request.namespaces == {NAMESPACE}
