"""When a relay holds all of a track, wherever its upstream subscription began."""

from __future__ import annotations

import pytest

from moqt.values.names import Location
from tests.relay.star import Star, end_track, everything, publish, track

OBJECTS = [(group, object_) for group in range(3) for object_ in range(4)]


@pytest.mark.parametrize("joined", range(len(OBJECTS) + 1))
def test_a_track_joined_at_any_point_is_complete_once_its_end_has_come(joined):
    star = Star()
    store = track(0)
    star.publisher(store)
    for location in OBJECTS[:joined]:
        publish(store, *location)
    star.run()
    _, collector = star.subscriber()
    star.run()
    for location in OBJECTS[joined:]:
        publish(store, *location)
        star.run()
    end_track(store, 3)
    star.run()
    assert collector.payloads == everything(3)
    (held,) = star.relay.tracks.values()
    assert held.store.is_complete()
    assert held.store.first_unknown(Location(0, 0), held.store.largest) is None
