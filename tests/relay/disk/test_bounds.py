"""The disk tier's memory and its jobs are bounded, whatever the disk and the tenants do."""

from __future__ import annotations

import os

import pytest

from moqt.values.names import FullTrackName
from relay.disk.reads import READERS
from tests.relay.disk.shelves import Shelves, at, stored
from tests.relay.inside import left_on_disk
from tests.relay.star import JOIN, NAMESPACE, everything, publish, track


def names(count):
    return [FullTrackName(NAMESPACE, b"%d" % n) for n in range(count)]


def in_pieces(star, name, pieces, path="/"):
    """A track that goes on, of which every other Object has come."""
    store = track(name=name)
    star.publisher(store, **at(path))
    star.subscriber(JOIN, name, **at(path))
    for n in range(pieces):
        publish(store, 0, 2 * n, 1, objects=2 * pieces)
    star.run()


def test_a_disk_that_hangs_is_asked_no_more_than_there_are_threads_and_publishers_serve(tmp_path):
    star = Shelves(tmp_path)
    every = names(12)
    for name in every:
        stored(star, 1, name=name)
    star.crash()
    star.hand.held = True
    for name in every[:READERS]:
        star.subscriber(JOIN, name)
    star.pass_time(6)
    assert star.disk.reads.hung and star.disk.reads.jobs == READERS
    star.publisher(*(track(1, ended=True, name=name) for name in every))
    for _ in range(5):
        for name in every[READERS:]:
            _, collector = star.subscriber(JOIN, name)
            assert collector.payloads == everything(1)  # at once: nobody waits for the disk
    assert star.disk.reads.jobs == READERS and len(star.hand.jobs) < 40
    star.hand.held = False
    star.run()
    assert star.disk.reads.jobs == 0 and not star.disk.reads.hung


def test_a_scope_has_half_of_the_reads_that_may_be_under_way(tmp_path, caplog):
    star = Shelves(tmp_path, disk_reads=4)
    for path in ("/loud", "/quiet"):
        for name in names(4):
            stored(star, 1, name=name, path=path)
    star.crash()
    star.hand.held = True
    for name in names(4):
        star.subscriber(JOIN, name, **at("/loud"))
    assert star.disk.shelf("/loud").reads == star.disk.reads.jobs == 2
    star.subscriber(JOIN, names(1)[0], **at("/quiet"))
    assert star.disk.shelf("/quiet").reads == 1
    assert star.disk.counters.reads_refused and "/loud: as many reads" in caplog.text


def test_what_a_track_in_many_pieces_makes_the_tier_remember_is_billed_and_bounded(
    tmp_path, caplog
):
    star = Shelves(tmp_path, disk_memory_octets=40_000)
    for name in names(5):
        in_pieces(star, name, 60, path="/loud")
    assert 0 < star.disk.remembered == star.disk.shelf("/loud").remembered <= 20_000
    assert star.disk.counters.memory_refused and star.disk.counters.tracks_given_up
    assert "/loud: the bookkeeping of the disk tier has no room" in caplog.text
    stored(star, path="/quiet")
    assert star.disk.shelf("/quiet").entries


def test_nothing_is_billed_for_a_track_that_is_gone(tmp_path):
    star = Shelves(tmp_path, max_tracks=2)
    for name in names(6):
        stored(star, name=name)
    assert len(star.files) == 6
    assert star.disk.remembered == sum(e.billed for e in star.disk.shelf("/").entries.values())
    star.relay.relays["/"].purge(())
    star.run()
    assert star.disk.remembered == 0 and star.disk.tracks == 0


@pytest.mark.parametrize("room", [1500, 4000])
def test_files_whose_bookkeeping_finds_no_room_at_the_start_go_the_oldest_first(tmp_path, room):
    star = Shelves(tmp_path)
    for number, name in enumerate(names(5)):
        before = set(star.files)
        stored(star, 1, name=name)
        [file] = set(star.files) - before
        os.utime(file, (number, number))  # several may be written within a tick of the clock
    star.settings["disk_memory_octets"] = 2 * room
    star.crash()
    kept = list(star.disk.shelf("/").entries)
    assert kept == names(5)[5 - room // 1152 :] and star.disk.remembered <= room


def test_what_is_lost_beyond_what_may_be_remembered_is_never_said_not_to_exist(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("relay.disk.keeping.MAX_SKIPPED", 3)
    star = Shelves(tmp_path)
    store = track()
    star.publisher(store)
    star.subscriber(JOIN)
    star.disk.count_error(OSError(28, "no space"))
    for n in range(8):
        publish(store, 0, 2 * n, 1, objects=40)
    star.pass_time(12)
    kept = star.relay.relays["/"].tracks[store.name].filling.kept
    publish(store, 0, 17, 1, objects=40)
    star.run()
    assert kept.entry is None and not kept.busy and not star.files


def test_a_writer_that_hangs_has_no_job_for_tracks_that_it_never_saw(tmp_path):
    star = Shelves(tmp_path)
    star.hand.held = True
    for name in names(40):
        publisher = star.publisher(track(2, ended=True, name=name))
        star.subscriber(JOIN, name)
        star.kill(publisher)
        star.pass_time(1)
    star.pass_time(400, step=5)
    assert len(star.hand.jobs) <= 3 and star.disk.octets == 0


def test_a_scope_that_the_disk_has_lost_while_nobody_was_in_it_leaves_nothing_behind(tmp_path):
    star = Shelves(tmp_path, max_scopes=2, disk_files=3)
    for number in range(12):
        stored(star, path=f"/{number}")
        for pair in tuple(star.pairs):
            star.kill(pair)
    assert star.disk.counters.evictions >= 9
    assert len(star.disk.shelves) <= 5 and set(left_on_disk(star.relay)) <= set(star.disk.shelves)
