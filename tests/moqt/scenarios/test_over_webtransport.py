"""Stories over WebTransport, in virtual time."""

from __future__ import annotations

import pytest

from moqt.receiving.receiver import Via
from moqt.session import SessionState
from moqt.track.store import TrackStore
from moqt.values.codes import ObjectStatus, PublishDoneCode, SessionErrorCode
from moqt.values.names import Location
from tests.moqt.memory import assert_clean
from tests.moqt.peers import FILL, NAME, Collector, track
from tests.moqt.scenarios.support import HOSTILE, served
from tests.moqt.simulator import Path

H3 = ("h3",)


@pytest.mark.parametrize("seed", range(4))
def test_who_joins_late_over_a_bad_path_has_every_object_once(seed):
    store = TrackStore(NAME)
    simulation, server, client = served(store, seed, path=HOSTILE, alpn=H3)
    got = Collector()
    for group in range(12):
        if group == 6:
            client.session.subscribe(NAME, got, FILL)
        for object_id in range(3):
            store.append(group, object_id, bytes(700), priority=group)
            simulation.advance(0.02)
        store.finish_subgroup(group, 0)
    store.mark_end(Location(12, 0), ObjectStatus.END_OF_TRACK)
    store.finish_subgroup(12, 0)
    store.finish(PublishDoneCode.TRACK_ENDED)
    assert simulation.run(lambda: got.done is not None)
    assert sorted(got.locations) == [Location(g, o) for g in range(12) for o in range(3)]
    vias = {o.location.group: o.via for o in got.objects if o.status is ObjectStatus.NORMAL}
    assert vias[0] is Via.FILL and vias[11] is Via.SUBSCRIPTION
    simulation.advance(1)
    assert_clean(client.session)
    assert_clean(server.session)


def test_a_goaway_drains_what_runs():
    slow = Path(latency=0.02, bandwidth=100_000, loss=0.05)
    simulation, server, client = served(track(50, 2, size=2000), 2, path=slow, alpn=H3)
    running, late = Collector(), Collector()
    client.session.fetch(NAME, running)
    simulation.advance(0.5)
    server.session.send_goaway(timeout_ms=20_000)
    assert simulation.run(lambda: client.session.goaway is not None, limit=3)
    assert not running.streams
    client.session.fetch(NAME, late)
    assert simulation.run(lambda: bool(running.streams))
    assert len(running.locations) == 100
    assert late.failed.code == 0x6  # GOING_AWAY
    client.session.close()
    assert simulation.run(lambda: server.session.closed is not None, limit=5)
    assert server.session.closed.code == SessionErrorCode.NO_ERROR


@pytest.mark.parametrize("seed", range(6))
def test_who_closes_with_a_code_is_heard_though_half_of_what_it_sends_is_lost(seed):
    """CLOSE_WEBTRANSPORT_SESSION is stream data: what is lost of it is sent again."""
    simulation, server, client = served(track(40, 4, size=1500), seed, alpn=H3)
    client.session.fetch(NAME, Collector())
    simulation.advance(0.05)
    simulation.drop = lambda sender, _: sender == "publisher" and simulation.random.random() < 0.5
    server.session.close(SessionErrorCode.GOAWAY_TIMEOUT, "enough")
    assert simulation.run(lambda: client.session.state is SessionState.CLOSED, limit=5)
    assert client.session.closed.code == SessionErrorCode.GOAWAY_TIMEOUT
    assert client.session.closed.reason == "enough"
    assert_clean(client.session)
    assert_clean(server.session)
