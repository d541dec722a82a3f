"""What goes first when the cache is full, and what that costs upstream."""

from __future__ import annotations

import pytest

from moqt.values.names import FullTrackName, Location
from relay.cache import OBJECT_OVERHEAD
from tests.relay.star import (
    LIVE,
    NAME,
    NAMESPACE,
    Collector,
    Star,
    everything,
    payload,
    publish,
    track,
)

GROUPS, OBJECTS, SIZE = 25, 4, 10_000
ALL = GROUPS * OBJECTS
PRICE = SIZE + OBJECT_OVERHEAD


class Reader:
    """Fetches all of the track, so many octets at a time."""

    def __init__(self, star):
        self.pair = star.connect(stream_window=2 * SIZE)
        transport = self.pair.client_transport
        for stream in range(8):
            transport.paused.add(4 * stream + 3)
        self.collector = Collector()
        self.pair.client.fetch(NAME, self.collector)

    def read(self):
        transport = self.pair.client_transport
        for stream in [each for each in transport.paused if each in self.pair.server_transport.out]:
            transport.resume_receiving(stream)
            transport.paused.add(stream)


def read_by_four(objects, lag):
    """How often each Object came from upstream, of a track of which the cache holds so many, to
    four readers that begin so many steps after each other; a step is two Objects."""
    star = Star(cache_octets=objects * PRICE + 4000, transit_octets=0, fetch_window=4 * SIZE)
    star.publisher(track(GROUPS, OBJECTS, size=SIZE, ended=True), stream_window=2 * SIZE)
    star.subscriber(LIVE)
    readers = []
    for step in range(3 * lag + ALL):
        if step % lag == 0 and len(readers) < 4:
            readers.append(Reader(star))
        star.pass_time(0.1, step=0.1)
        for reader in readers:
            reader.read()
        star.run()
    for reader in readers:
        assert reader.collector.payloads == everything(GROUPS, OBJECTS, SIZE)
    return star.relay.counters.objects_in / ALL


@pytest.mark.parametrize(
    ("objects", "lag", "most"),
    [(70, 10, 1.05), (50, 10, 1.8), (30, 10, 2.9), (60, 60, 2.6)],
    ids=["all of them fit", "the last three fit", "the last two fit", "one after the other"],
)
def test_what_readers_behind_still_need_goes_last(objects, lag, most):
    """Least recently used first it was 2.2, 3.24, 3.92 and 4."""
    assert read_by_four(objects, lag) <= most


def names(count):
    return [FullTrackName(NAMESPACE, b"%d" % n) for n in range(count)]


def held(star, name):
    return [each.location for each in star.relay.tracks[name].store.objects()]


def test_whole_tracks_go_before_parts_of_tracks():
    star = Star(cache_octets=10 * (1000 + OBJECT_OVERHEAD) + 2000)
    every = names(4)
    star.publisher(*(track(1, 4, size=1000, name=name) for name in every))
    pair = star.connect()
    for name in every[:2]:
        star.fetch(pair, (0, 0), (0, 3), name)
        star.pass_time(1)
    star.fetch(pair, (0, 0), (0, 1), every[2])
    star.pass_time(1)
    star.fetch(pair, (0, 0), (0, 3), every[0])  # used: the second is now out of use for longest
    star.pass_time(1)
    star.fetch(pair, (0, 0), (0, 3), every[3])
    assert [len(held(star, name)) for name in every] == [4, 0, 2, 4]


def test_of_a_track_that_is_out_of_use_the_end_goes_first():
    star = Star(cache_octets=4 * (1000 + OBJECT_OVERHEAD) + 1000)
    every = names(2)
    star.publisher(*(track(1, 4, size=1000, name=name) for name in every))
    pair = star.connect()
    star.fetch(pair, (0, 0), (0, 3), every[0])
    star.pass_time(1)
    star.fetch(pair, (0, 0), (0, 1), every[1])
    assert held(star, every[0]) == [Location(0, 0), Location(0, 1)]


def test_a_track_without_an_end_displaces_its_own_old_objects_before_what_was_used_since():
    star = Star(cache_octets=12 * (1000 + OBJECT_OVERHEAD))
    live, other = names(2)
    stores = [track(name=live), track(1, 4, size=1000, name=other)]
    star.publisher(*stores)
    pair, _ = star.subscriber(LIVE, live)
    for number in range(30):
        publish(stores[0], 0, number, 1000, objects=99)
        star.run()
        star.pass_time(1)
        if number == 5:
            star.fetch(pair, (0, 0), (0, 3), other)
    kept = held(star, other)
    assert len(held(star, live)) + len(kept) <= 12
    for number in range(30, 34):
        star.fetch(pair, (0, 0), (0, 3), other)
        publish(stores[0], 0, number, 1000, objects=99)
        star.run()
        star.pass_time(1)
    assert len(held(star, other)) == 4
    assert star.fetch(pair, (0, 33), (0, 33), live).payloads == {
        Location(0, 33): payload(0, 33, 1000)
    }
