"""What the status page is told of a track."""

from __future__ import annotations

from moqt.values.codes import ObjectStatus
from moqt.values.names import FullTrackName, Location
from relay.service.told.grids import LOOKED_AT, ROWS, RUNS, Grid, row
from tests.relay.disk.shelves import Shelves
from tests.relay.star import JOIN, Star, publish, track


def served(store):
    """The row of `store` at a relay that somebody reads it from."""
    star = Star()
    star.publisher(store)
    star.subscriber(JOIN)
    star.run()
    return star, lambda: row(star.relay, None, store.name)


def test_a_track_is_told_by_the_ranges_of_objects_that_are_in_memory():
    store = track(2)
    star, told = served(store)
    assert told()["memory"] == [(0, 0, 0, 3), (1, 0, 1, 3)]
    assert told()["largest"][0] == 1
    assert (told()["readers"], told()["ended"], told()["octets"]) == (1, False, 800)
    publish(store, 2, 1)
    star.run()
    assert told()["memory"][-1] == (2, 1, 2, 1)


def test_objects_that_are_not_whole_or_only_say_an_end_are_in_no_range():
    store = track()
    star, told = served(store)
    publish(store, 0, 0)
    stored = store.begin(Location(0, 1), subgroup=0, priority=128, properties=b"", length=100)
    store.grow(stored, bytes(50))
    store.mark_end(Location(1, 0), ObjectStatus.END_OF_GROUP)
    star.run()
    assert told()["memory"] == [(0, 0, 0, 0)]
    store.grow(stored, bytes(50))
    star.run()
    assert told()["memory"] == [(0, 0, 0, 1)]


def test_a_track_in_many_pieces_costs_no_more_than_is_told():
    store = track()
    star, told = served(store)
    for number in range(RUNS + 10):
        publish(store, 0, 2 * number, objects=10_000)
    star.run()
    assert len(told()["memory"]) == RUNS
    store = track()
    star, told = served(store)
    for number in range(LOOKED_AT + 10):
        publish(store, 0, number, 1, objects=10_000)
    star.run()
    assert told()["memory"] == [(0, 0, 0, LOOKED_AT - 1)]


def test_a_publication_of_many_tracks_says_how_many_and_tells_the_first():
    names = [FullTrackName((b"demo",), f"{n}".encode()) for n in range(ROWS + 5)]
    grid = Grid("/", names[0])
    for name in names:
        grid.add(name)
    assert grid.told()["tracks"] == ROWS + 5 and grid.names == names[:ROWS]


def test_what_only_files_have_is_told_up_to_the_largest_location(tmp_path):
    star = Shelves(tmp_path)
    store = track(3, ended=True)
    publisher = star.publisher(store)
    star.subscriber(JOIN)
    star.pass_time(1)
    star.kill(publisher)
    star.crash()
    (shelf,) = star.disk.shelves.values()
    told = row(None, shelf, store.name)
    ((*first, last, _),) = told["disk"]
    assert (first, last) == ([0, 0], told["largest"][0]) and last >= 2
    assert told["memory"] == [] and told["octets"] == 0 and told["disk_octets"] > 1200
