"""The disk tier's memory and its jobs are bounded, whatever the disk and the tenants do."""

from __future__ import annotations

import os
import tracemalloc

import pytest

from moqt.values.messages import KeyValue
from moqt.values.names import FullTrackName, Location
from relay.disk.files import Sealed
from relay.disk.reads import READERS
from relay.disk.records import Summary
from relay.published_here import OnDisk
from tests.relay.disk.shelves import Shelves, at, stored
from tests.relay.inside import left_on_disk
from tests.relay.star import JOIN, NAME, NAMESPACE, end_track, everything, publish, track


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


@pytest.mark.parametrize("room", [4000, 10_000])
def test_files_whose_bookkeeping_finds_no_room_at_the_start_go_the_oldest_first(tmp_path, room):
    star = Shelves(tmp_path)
    for number, name in enumerate(names(5)):
        before = set(star.files)
        stored(star, 1, name=name)
        [file] = set(star.files) - before
        os.utime(file, (number, number))  # several may be written within a tick of the clock
    star.settings["disk_memory_octets"] = 2 * room
    star.crash()
    entries = star.disk.shelf("/").entries
    assert star.disk.remembered == sum(entry.billed for entry in entries.values()) <= room
    assert list(entries) == names(5)[5 - room // 3200 :]


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


@pytest.mark.parametrize("fields", [1, 6, 32])
def test_what_a_track_on_the_disk_takes_of_memory_is_within_what_it_is_billed(tmp_path, fields):
    tier = Shelves(tmp_path, disk_memory_octets=1 << 30).disk
    shelf, count = tier.shelf("/"), 200
    table = OnDisk(shelf).table
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for n in range(count):
            namespace = tuple(b"%d of %d" % (field, n) for field in range(fields))
            name = FullTrackName(namespace, b"track %d" % n)
            properties = (KeyValue(0x41, b"%d" % n * 40),)
            summary = Summary(
                scope="/", name=name, properties=properties, largest=Location(0, 300 + n),
                end=Location(1, 300 + n), objects=1, octets=1, arrived=1000.0 + n,
                known=((Location(0, 0), Location(1, 300 + n)),),
            )  # fmt: skip
            path = tmp_path / f"{n:040}.{n}.track"
            shelf.add(summary, Sealed(path, 300 + n, 400 + n, 500 + n, 600 + n, 70_000 + n))
        assert tracemalloc.get_traced_memory()[0] - before <= tier.remembered < count * 30_000
    finally:
        tracemalloc.stop()
    assert len(table) == count


def test_tracks_with_long_names_and_properties_on_the_disk_are_within_the_memory_it_may_take(
    tmp_path,
):
    star = Shelves(tmp_path, disk_memory_octets=60_000)
    for n in range(40):
        name = FullTrackName((*NAMESPACE, b"%d" % n * 500), b"video")
        stored(star, 1, name=name, properties=(KeyValue(0x41, b"x" * 700),))
    assert star.disk.remembered <= 30_000 and star.disk.counters.evictions > 20
    assert 0 < star.disk.tracks < 20 and star.disk.tracks == len(star.files)


def test_who_has_no_publisher_waits_until_one_read_more_may_be_under_way(tmp_path):
    star = Shelves(tmp_path, disk_reads=2)
    for name in names(5):
        stored(star, name=name)
    star.crash()
    star.hand.held = True
    readers = [star.subscriber(JOIN, name)[1] for name in names(5)]
    assert star.disk.shelf("/").reads == 1 and not any(reader.payloads for reader in readers)
    star.hand.held = False
    star.run()
    assert all(reader.payloads == everything(3) for reader in readers)
    assert not any(reader.fetch_resets for reader in readers)


def test_who_waits_to_read_waits_no_longer_than_a_read_may_take(tmp_path):
    star = Shelves(tmp_path, disk_reads=2)
    for name in names(3):
        stored(star, 1, name=name)
    star.crash()
    star.hand.held = True
    readers = [star.subscriber(JOIN, name)[1] for name in names(3)]
    star.pass_time(12)
    assert star.disk.reads.overdue == 1 and not star.disk.reads.hung
    assert all(reader.unknown and not reader.payloads for reader in readers)  # they are told
    assert not star.disk.shelf("/").turns


def republished(name=NAME):
    """A track of that name, begun anew with other octets, of which as much is known."""
    store = track(name=name)
    for group in range(2):
        for number in range(4):
            store.append(group, number, b"other" * 20)
        store.finish_subgroup(group, 0)
    end_track(store, 2)
    return store


@pytest.mark.parametrize("fault", ["busy", "hung", "slow"])
def test_what_the_disk_does_not_let_be_compared_is_not_taken_for_what_the_publisher_has(
    tmp_path, fault
):
    star = Shelves(tmp_path, disk_reads=2 if fault == "busy" else 256)
    others = names(READERS)
    for name in (*others, NAME):
        stored(star, 2, name=name)
    star.crash()
    star.hand.held = True
    for name in others:
        if fault != "slow":
            star.subscriber(JOIN, name)
    if fault == "hung":
        star.pass_time(6)
        assert star.disk.reads.hung
    star.publisher(republished())
    pair = star.connect()
    star.fetch(pair, (0, 0), (0, 3))
    star.pass_time(1 if fault == "busy" else 7)
    star.hand.held = False
    star.run()
    star.pass_time(40)
    anew = dict.fromkeys(everything(2), b"other" * 20)
    last = {at: octets for at, octets in anew.items() if at.group == 1}
    assert star.fetch(pair, (1, 0), (1, 3)).payloads == last
    assert star.fetch(pair).payloads == anew


def test_what_can_be_read_soon_is_compared_then_and_kept(tmp_path):
    star = Shelves(tmp_path, disk_reads=2)
    for name in (names(1)[0], NAME):
        stored(star, 2, name=name)
    star.crash()
    star.hand.held = True
    star.subscriber(JOIN, names(1)[0])
    publisher = star.publisher(track(2, ended=True))
    _, late = star.subscriber(JOIN)
    star.pass_time(1)
    assert not late.payloads
    star.hand.held = False
    star.run()
    star.pass_time(1)
    assert late.payloads == everything(2) and star.relay.counters.tracks_renewed == 0
    assert publisher.handler.fetch_ranges == [(Location(1, 3), Location(1, 3))]


def test_a_track_that_is_read_and_not_written_is_not_said_to_be_written(tmp_path):
    star = Shelves(tmp_path)
    stored(star)
    star.crash()
    star.hand.held = True
    star.subscriber(JOIN)
    kept = star.relay.relays["/"].tracks[NAME].filling.kept
    assert kept.busy and not kept.writing


def test_what_the_log_was_told_of_a_scope_goes_with_it(tmp_path):
    star = Shelves(tmp_path, disk_octets_per_scope=100, linger=1)
    stored(star, path="/a")
    assert star.disk.shelf("/a").told == {"quota"}
    star.pass_time(5)
    star.relay.relays["/a"].purge(())
    for pair in tuple(star.pairs):
        star.kill(pair)
    star.pass_time(5)
    assert "/a" not in star.disk.shelves
