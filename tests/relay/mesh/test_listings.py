"""What one client lists changes nothing of what others are told of upstream's namespaces."""

from __future__ import annotations

import pytest

from moqt.requests import RequestState
from moqt.values.config import SessionConfig
from relay.rights.policy import Action
from tests.relay.chain import Chain
from tests.relay.peers import Listing
from tests.relay.star import Denying

MINE = [(b"mine", b"%d" % number) for number in range(3)]
OTHERS = [(b"others", b"%d" % number) for number in range(3)]


class Narrow(Denying):
    """Lets nobody list everything."""

    def __init__(self):
        super().__init__(())

    def allow(self, session, action, namespace, tokens=()):
        return action is not Action.SUBSCRIBE_NAMESPACE or len(namespace) > 0


def publish(chain, *namespaces):
    return [chain.top.publisher(namespace=each) for each in namespaces]


def listed(chain, prefix):
    return Listing(chain.top, chain.bottom.connect(), prefix)


@pytest.mark.parametrize("wide_first", [False, True])
def test_a_listing_that_upstream_refuses_silences_no_narrower_one(wide_first):
    chain = Chain()
    chain.top.relay.refusals.policy = Narrow()
    chain.connect()
    publish(chain, *MINE)
    wide = listed(chain, ()) if wide_first else None
    narrow = listed(chain, (b"mine",))
    if wide is None:
        wide = listed(chain, ())
        chain.pass_time(5)
    assert sorted(narrow.events) == [(each, True) for each in MINE]
    assert narrow.request.namespaces == set(MINE)
    assert wide.request.namespaces == set(MINE), "what others are told here"
    (more,) = publish(chain, (b"mine", b"later"))
    chain.top.run()
    assert (b"mine", b"later") in narrow.request.namespaces
    more.published.cancel()
    chain.pass_time(5)
    assert (b"mine", b"later") not in narrow.request.namespaces


def test_who_lists_everything_now_and_then_takes_nothing_from_others_meanwhile():
    chain = Chain()
    chain.connect()
    publish(chain, *MINE, *OTHERS)
    narrow = listed(chain, (b"mine",))
    for _ in range(3):
        wide = listed(chain, ())
        chain.pass_time(1)
        assert wide.request.namespaces == {*MINE, *OTHERS}
        wide.request.cancel()
        chain.pass_time(30)
    assert sorted(narrow.events) == [(each, True) for each in MINE]


def small(chain, limit):
    """The connection of a relay that keeps no more than `limit` namespaces of a listing."""
    link = chain.top.connect(
        chain.bottom.relay, client_config=SessionConfig(max_namespaces_told=limit)
    )
    chain.top.run()
    chain.uplink.attach(link.client)
    chain.top.run()


def test_of_a_listing_that_is_too_large_as_much_is_told_as_is_kept():
    chain = Chain()
    small(chain, 4)
    publish(chain, *MINE, *OTHERS)
    wide = listed(chain, ())
    assert len(wide.request.namespaces) == 4 and wide.ended == []
    chain.pass_time(90)
    assert len(wide.request.namespaces) == 4 and wide.ended == []


@pytest.mark.parametrize("wide_first", [False, True])
def test_a_listing_that_is_too_large_takes_nothing_from_narrower_ones(wide_first):
    chain = Chain()
    small(chain, 4)
    publish(chain, *OTHERS, *MINE)
    wide = listed(chain, ()) if wide_first else None
    narrow = [listed(chain, prefix) for prefix in ((b"mine",), (b"others",))]
    wide = wide or listed(chain, ())
    chain.pass_time(10)
    assert [each.request.namespaces for each in narrow] == [set(MINE), set(OTHERS)]
    assert all(present for each in narrow for _, present in each.events)
    assert wide.request.namespaces == {*MINE, *OTHERS}
    (late,) = publish(chain, (b"mine", b"late"))
    chain.top.run()
    assert (b"mine", b"late") in narrow[0].request.namespaces
    late.published.cancel()
    chain.pass_time(5)
    assert narrow[0].request.namespaces == set(MINE)


def test_a_listing_that_waits_for_upstream_waits_on_when_a_wider_one_is_asked_for_instead():
    chain = Chain()
    chain.connect()
    publish(chain, *MINE)
    asked = []
    chain.top.relay.namespaces.events.awaited.append(
        lambda session, prefix, then: asked.append(then)
    )
    narrow, wide = listed(chain, (b"mine",)), listed(chain, ())
    assert narrow.request.state is wide.request.state is RequestState.PENDING
    for then in asked:
        then(True)
    chain.top.run()
    for each in narrow, wide:
        assert each.request.state is RequestState.ESTABLISHED
        assert each.request.namespaces == set(MINE)
