"""Who reads a track is known by session, which costs the same however many they are."""

from __future__ import annotations

import pytest

from moqt.values.codes import RequestErrorCode
from tests.relay.calls import calls
from tests.relay.peers import Wanting
from tests.relay.star import LIVE, NAME, SilentPublisher, Star


def read_from_above(readers):
    """A relay whose two upstream relays have not answered for a track that `readers` sessions wait
    for, and one of the upstream relays, too."""
    star = Star()
    above = [star.connect(SilentPublisher()) for _ in range(2)]
    star.run()
    for pair in above:
        star.relay.add_upstream(pair.server)
    star.publisher(handler=SilentPublisher())
    for _ in range(readers):
        star.subscriber(LIVE)
    star.subscribe(above[0], LIVE)
    (track,) = star.relay.tracks.values()
    assert track.read_above
    return star, track, above


@pytest.mark.parametrize("readers", [100, 400])
def test_who_may_bring_a_track_is_found_at_a_cost_that_does_not_grow_with_its_readers(readers):
    def cost(count):
        star, track, above = read_from_above(count)
        assert [pair.server for pair in above][1:] == star.relay.ranks(track)[-1]
        return calls(lambda: star.relay.ranks(track))

    assert cost(readers) == cost(10)


def test_an_upstream_relay_that_reads_the_track_is_not_asked_until_it_has_left():
    star, track, above = read_from_above(1)
    assert [above[0].server] not in star.relay.ranks(track)
    (request,) = [each for each in track.waiting if each.session is above[0].server]
    request.reject(RequestErrorCode.TIMEOUT, "too late")
    assert [above[0].server] in star.relay.ranks(track)


def test_what_only_upstream_relays_read_is_asked_of_none_of_them():
    star, track, above = read_from_above(0)
    assert len(star.relay.ranks(track)) == 1
    star.subscriber(LIVE)
    assert star.relay.ranks(track)[1:] == [[above[1].server]]


@pytest.mark.parametrize("readers", [100, 400])
def test_an_offer_costs_the_same_however_many_wait_for_the_track(readers):
    def cost(count):
        star = Star()
        star.publisher(handler=SilentPublisher())
        for _ in range(count):
            star.subscriber(LIVE)
        pair = star.connect()
        star.run()
        (track,) = star.relay.tracks.values()
        wanting = Wanting(star, pair, NAME.namespace)
        made = calls(lambda: star.relay.offers.available(track))
        star.run()
        assert wanting.names == [NAME]
        return made

    assert cost(readers) == cost(10)
