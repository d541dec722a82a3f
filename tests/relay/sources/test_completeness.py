"""When a relay holds all of a track, wherever its upstream subscription began."""

from __future__ import annotations

import pytest

from moqt.track.store import TrackStore
from moqt.values.names import Location
from tests.relay.star import JOIN, NAME, Star, end_track, everything, publish, track

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


def test_whether_a_track_is_complete_is_told_without_a_look_at_each_object(monkeypatch):
    star = Star()
    store = track(3)
    star.publisher(store)
    star.subscriber(JOIN)
    end_track(store, 3)
    star.run()
    (held,) = star.relay.tracks.values()
    monkeypatch.setattr(TrackStore, "objects", lambda _: pytest.fail("it looks at all of them"))
    assert held.store.is_complete()


def test_a_track_of_which_an_object_is_still_growing_is_not_complete():
    held = TrackStore(NAME, authoritative=False)
    for number, payload in ((0, b"x"), (1, None)):
        grown = held.begin(
            Location(0, number), subgroup=0, priority=0, properties=b"", length=1, payload=payload
        )
    held.set_end_of_track(Location(1, 0))
    held.mark_nonexistent(Location(0, 0), Location(0, 9))
    assert not held.is_complete()
    held.grow(grown, b"y")
    held.complete(grown)
    assert held.is_complete()
