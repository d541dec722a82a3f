"""What a relay says of namespaces while it cannot ask everybody: never that there are none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moqt.requests import RequestState
from moqt.values.codes import RequestErrorCode
from relay.mesh.told import FADING_SECONDS
from relay.mesh.uplink import Uplink
from tests.relay.chain import Chain
from tests.relay.peers import Listing
from tests.relay.star import NAMESPACE, Star

LINGER = 5


def listed(star, prefix=NAMESPACE[:1]):
    return Listing(star, star.connect(), prefix)


def is_told_to_ask_again(listing):
    (error,) = listing.ended
    assert error.code == RequestErrorCode.INTERNAL_ERROR and error.retry_after_ms == 1000
    assert "cannot be asked" in error.reason
    return True


def test_a_listing_of_nothing_is_refused_while_the_upstream_relay_cannot_be_asked():
    chain = Chain()
    assert is_told_to_ask_again(listed(chain.bottom))
    chain.connect()
    answered = listed(chain.bottom)
    assert answered.request.state is RequestState.ESTABLISHED and not answered.events
    chain.cut()
    assert is_told_to_ask_again(listed(chain.bottom))
    assert chain.bottom.relay.counters.requests_unreachable == 2


def test_what_is_here_is_listed_also_while_the_upstream_relay_cannot_be_asked():
    chain = Chain()
    chain.bottom.publisher()
    listing = listed(chain.bottom)
    assert listing.request.namespaces == {NAMESPACE} and not listing.ended
    assert is_told_to_ask_again(listed(chain.bottom, (b"other",)))
    chain.connect()
    chain.top.publisher(namespace=(b"demo", b"far"))
    assert listing.request.namespaces == {NAMESPACE, (b"demo", b"far")}


def test_a_relay_behind_one_that_cannot_ask_everybody_says_so_until_it_can():
    chain = Chain()
    far = Uplink(chain.top.relay)
    chain.connect()
    chain.pass_time(1)
    assert is_told_to_ask_again(listed(chain.bottom))
    above = Star()
    above.pairs = chain.top.pairs
    link = above.connect(chain.top.relay)
    above.run()
    far.attach(link.client)
    above.publisher()
    chain.pass_time(2)
    assert listed(chain.bottom).request.namespaces == {NAMESPACE}


def test_who_asks_for_what_is_here_alone_is_told_that_nothing_is():
    chain = Chain()
    link = chain.top.connect(chain.bottom.relay)
    chain.top.run()
    chain.bottom.relay.add_upstream(link.client)
    listing = Listing(chain.top, SimpleNamespace(client=link.server), NAMESPACE[:1])
    assert listing.request.state is RequestState.ESTABLISHED and not listing.ended


def test_what_a_lost_upstream_relay_has_told_holds_while_it_may_come_back():
    chain = Chain(publisher_linger=LINGER)
    chain.connect()
    chain.top.publisher()
    listing = listed(chain.bottom)
    chain.cut()
    chain.pass_time(LINGER - 1)
    assert listing.events == [(NAMESPACE, True)]
    chain.connect()
    chain.pass_time(2 * LINGER)
    assert listing.events == [(NAMESPACE, True)]
    assert listed(chain.bottom).request.namespaces == {NAMESPACE}


@pytest.mark.parametrize("back", [False, True])
def test_what_a_lost_upstream_relay_has_told_is_gone_when_it_stays_away_or_tells_it_no_more(back):
    chain = Chain(publisher_linger=LINGER)
    chain.connect()
    publisher = chain.top.publisher()
    listing = listed(chain.bottom)
    chain.cut()
    publisher.published.cancel()
    if back:
        chain.connect()
    chain.pass_time(max(LINGER, FADING_SECONDS) + 1)
    assert listing.events == [(NAMESPACE, True), (NAMESPACE, False)]
    assert not len(chain.bottom.relay.namespaces.remote)


def test_a_prefix_that_could_not_be_told_once_is_told_on_whoever_asks_for_a_part_of_it_later():
    chain = Chain()
    far = Uplink(chain.top.relay)
    chain.connect()
    chain.pass_time(1)
    assert is_told_to_ask_again(listed(chain.bottom))
    above = Star()
    above.pairs = chain.top.pairs
    link = above.connect(chain.top.relay)
    above.run()
    far.attach(link.client)
    above.publisher()
    chain.pass_time(2)
    wide = listed(chain.bottom)
    listed(chain.bottom, NAMESPACE)
    chain.pass_time(2)
    above.publisher(namespace=(b"demo", b"later"))
    chain.pass_time(2)
    assert wide.events == [(NAMESPACE, True), ((b"demo", b"later"), True)]
