"""What cannot be sent is a MisuseError of who asks for it, and nothing is kept of it."""

from __future__ import annotations

import pytest

from moqt.session import SessionConfig
from moqt.values.errors import MisuseError
from moqt.values.messages import LocationFilter, Parameters
from moqt.values.names import FullTrackName
from tests.moqt.deliveries import World
from tests.moqt.memory import Pair
from tests.moqt.peers import NAME as TRACK
from tests.moqt.peers import Collector

NAME = FullTrackName((b"d",), b"v")
WRONG = Parameters(subscriber_priority=300)
BAD = {
    "a priority beyond one octet": (NAME, Parameters(subscriber_priority=300)),
    "an empty field": (FullTrackName((b"",), b"v"), Parameters()),
    "33 fields": (FullTrackName((b"x",) * 33, b"v"), Parameters()),
    "a namespace of text": (FullTrackName(("demo",), b"v"), Parameters()),
    "a namespace that is text": (FullTrackName("demo", b"v"), Parameters()),
    "a namespace that is bytes": (FullTrackName(b"demo", b"v"), Parameters()),
    "a list": (FullTrackName([b"d"], b"v"), Parameters()),
    "a name of text": (FullTrackName((b"d",), "v"), Parameters()),
}


@pytest.mark.parametrize("name, parameters", BAD.values(), ids=BAD)
def test_a_request_that_no_message_can_carry_is_refused_and_leaves_nothing(name, parameters):
    pair = Pair()
    before = pair.client.remembered()
    asks = [
        lambda: pair.client.subscribe(name, Collector(), parameters),
        lambda: pair.client.fetch(name, Collector(), parameters),
    ]
    if parameters == Parameters():
        ignore = {"on_ended": lambda error: None}
        asks.append(lambda: pair.client.track_status(name, parameters))
        if name.name == b"v":
            asks.append(lambda: pair.client.publish_namespace(name.namespace, **ignore))
    for ask in asks:
        for _ in range(3):
            with pytest.raises(MisuseError):
                ask()
    assert pair.client.remembered() == before
    pair.run()
    assert pair.server.remembered().requests_incoming == 0


def test_as_many_as_there_are_streams_leave_room_for_a_good_one():
    world = World()
    for _ in range(300):
        with pytest.raises(MisuseError):
            world.pair.client.subscribe(TRACK, Collector(), WRONG)
    collector = Collector()
    world.pair.client.subscribe(TRACK, collector)
    world.pair.run()
    assert collector.accepted is not None


def test_an_update_that_cannot_be_sent_leaves_nothing_and_the_next_one_goes():
    world = World()
    collector = Collector()
    request = world.pair.client.subscribe(TRACK, collector)
    world.pair.run()
    answers = []
    for _ in range(SessionConfig().max_request_updates + 1):
        with pytest.raises(MisuseError):
            request.update(Parameters(subscriber_priority=300), answers.append)
    request.update(Parameters(location_filter=LocationFilter.next_object()), answers.append)
    world.pair.run()
    assert len(answers) == 1 and world.pair.client.remembered().updates == 0
