"""The disk tier: what is served again after a crash, and what never is."""

from __future__ import annotations

import errno

import pytest

import relay.disk.files
from moqt.values.codes import PublishDoneCode, RequestErrorCode
from moqt.values.messages import KeyValue
from moqt.values.names import FullTrackName, Location
from relay.disk.files import Folder, InUse
from tests.relay.calls import calls
from tests.relay.disk.shelves import Shelves, at, stored
from tests.relay.inside import expiries, make_room
from tests.relay.peers import Listing, Wanting, offering
from tests.relay.star import (
    JOIN,
    LIVE,
    NAME,
    NAMESPACE,
    end_track,
    everything,
    payload,
    publish,
    track,
)

MAX_CACHE_DURATION = 0x04


@pytest.fixture
def star(tmp_path):
    return Shelves(tmp_path)


def test_a_complete_track_is_served_again_after_a_crash(star):
    stored(star)
    assert len(star.files) == 1
    star.crash()
    assert star.disk.tracks == 1 and star.relay.cache.objects == 0
    _, late = star.subscriber(JOIN)
    assert late.payloads == everything(3) and not late.repeated
    assert late.done == PublishDoneCode.TRACK_ENDED
    assert star.fetch(star.connect(), (1, 0), (1, 2)).payloads == {
        Location(1, o): payload(1, o) for o in range(3)
    }
    assert star.disk.counters.hits == 12 and star.relay.counters.objects_in == 0


def test_who_lists_namespaces_after_a_crash_is_told_of_what_the_disk_has(star):
    stored(star)
    star.crash()
    listing = Listing(star, star.connect(), NAMESPACE[:1])
    assert listing.events == [(NAMESPACE, True)]


def test_a_track_that_was_not_complete_leaves_nothing(star):
    store = track(2)
    star.publisher(store)
    star.subscriber(LIVE)
    publish(store, 2, 0)
    star.run()
    star.pass_time(1)
    assert list(star.folder.glob("*.part")) and not star.files
    star.crash()
    assert [each.name for each in star.folder.iterdir()] == ["lock"]
    _, nobody = star.subscriber(JOIN)
    assert nobody.failed.code == RequestErrorCode.DOES_NOT_EXIST


def test_a_track_larger_than_the_memory_is_kept_and_served_whole(tmp_path):
    star = Shelves(tmp_path, cache_octets=20_000)
    stored(star, 10, size=2000)
    assert star.relay.cache.evictions > 25 and star.disk.tracks == 1
    star.crash()
    _, late = star.subscriber(JOIN)
    assert late.payloads == everything(10, size=2000) and late.done == PublishDoneCode.TRACK_ENDED
    assert star.relay.cache.billed <= 20_000


def test_what_memory_has_evicted_is_read_from_the_disk_and_not_asked_for(tmp_path):
    star = Shelves(tmp_path, cache_octets=20_000)
    publisher = star.publisher(track(10, size=2000, ended=True))
    star.subscriber(JOIN)
    star.pass_time(1)
    asked = len(publisher.handler.fetches)
    _, late = star.subscriber(JOIN)
    assert late.payloads == everything(10, size=2000)
    assert len(publisher.handler.fetches) == asked and star.disk.counters.hits > 0


def test_gaps_and_empty_objects_are_kept(star):
    store = track()
    publisher = star.publisher(store)
    store.append(0, 3, b"three")
    store.append(0, 9, b"")
    store.append(7, 0, b"seven", subgroup=2, priority=9, properties=bytes([0x3C, 5]))
    store.append(7, 1, b"datagram", subgroup=None)
    for group, subgroup in ((0, 0), (7, 2)):
        store.finish_subgroup(group, subgroup)
    end_track(store, 9)
    _, first = star.subscriber(JOIN)
    star.pass_time(1)
    star.kill(publisher)
    star.crash()
    collector = star.fetch(star.connect())
    assert collector.normal == [
        each._replace(via=collector.normal[0].via)
        for each in sorted(first.normal, key=lambda one: one.location)
    ]
    assert len(collector.normal) == 4 and not collector.unknown


@pytest.mark.parametrize("at", [0.1, 0.5, 0.7, 0.9, 0.97, -1])
@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_a_damaged_file_is_a_miss(star, how, at):
    stored(star)
    star.crash()
    (file,) = star.files
    octets = bytearray(file.read_bytes())
    where = int(at * len(octets)) if at >= 0 else len(octets) - 1
    if how == "flipped":
        octets[where] ^= 1
    else:
        del octets[where:]
    file.write_bytes(octets)
    star.crash()
    star.publisher(track(3, ended=True))
    _, collector = star.subscriber(JOIN)
    assert collector.payloads == everything(3)
    assert star.disk.counters.files_bad == 1


def test_a_file_that_is_damaged_while_the_relay_runs_is_a_miss_too(star):
    stored(star)
    star.crash()
    (file,) = star.files
    file.write_bytes(file.read_bytes()[:200])
    _, collector = star.subscriber(JOIN)
    assert not collector.payloads
    assert all(error is not None for _, error in collector.streams) or collector.unknown
    assert star.disk.counters.files_bad == 1 and star.disk.tracks == 0


@pytest.mark.parametrize("left", [0.1, 0.5, 0.99])
def test_a_file_that_is_cut_off_after_it_was_checked_is_a_miss_too(tmp_path, left, caplog):
    star = Shelves(tmp_path, cache_octets=20_000)
    stored(star, 10, size=2000)
    (file,) = star.files
    octets = file.read_bytes()
    file.write_bytes(octets[: int(left * len(octets))])
    _, collector = star.subscriber(JOIN)
    assert collector.payloads != everything(10, size=2000)
    assert star.disk.counters.files_bad == 1 and star.disk.tracks == 0
    assert not [record for record in caplog.records if record.exc_info]


def test_a_file_that_cannot_be_read_stops_no_start(star):
    stored(star)
    (file,) = star.files
    other = file.with_name("0" * 40 + ".1.track")
    other.mkdir()
    star.crash()
    assert star.disk.counters.files_bad == 1 and star.disk.tracks == 1
    _, collector = star.subscriber(JOIN)
    assert collector.payloads == everything(3)


def test_files_of_others_are_left_alone(star):
    (star.folder / "notes.txt").write_text("mine")
    star.crash()
    assert (star.folder / "notes.txt").read_text() == "mine"


def test_a_full_disk_degrades_to_memory_and_goes_on_when_there_is_room(star, monkeypatch, caplog):
    write_all = relay.disk.files.write_all

    def full(descriptor, buffers):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(relay.disk.files, "write_all", full)
    stored(star)
    assert star.disk.failing and star.disk.counters.errors >= 1 and not star.files
    assert "No space left on device" in caplog.text
    _, collector = star.subscriber(JOIN)
    assert collector.payloads == everything(3)
    monkeypatch.setattr(relay.disk.files, "write_all", write_all)
    star.pass_time(12)
    stored(star, name=FullTrackName(NAMESPACE, b"other"))
    assert len(star.files) == 1 and star.disk.octets == star.files[0].stat().st_size


def test_a_disk_that_hangs_holds_nobody(star):
    stored(star)
    star.crash()
    star.hand.held = True
    publisher = star.publisher(track(3, ended=True))
    _, collector = star.subscriber(JOIN)
    star.pass_time(8)
    assert collector.payloads == everything(3)
    assert star.disk.counters.timeouts == 1 and publisher.handler.fetches


def test_what_never_is_written_is_given_up_in_time(star):
    star.hand.held = True
    publisher = star.publisher(track(3, ended=True))
    star.subscriber(JOIN)
    star.pass_time(1)
    star.kill(publisher)
    assert star.disk.busy
    star.pass_time(62)
    assert not star.disk.busy and star.disk.counters.errors == 1 and star.disk.octets == 0


def test_what_the_queue_has_no_room_for_is_written_later(tmp_path):
    star = Shelves(tmp_path, disk_queue_octets=2000)
    star.hand.held = True
    publisher = star.publisher(track(5, size=500, ended=True))
    star.subscriber(JOIN)
    assert star.disk.counters.objects_skipped > 10 and star.disk.queued <= 2000
    star.hand.held = False
    star.pass_time(3)
    star.kill(publisher)
    star.crash()
    _, late = star.subscriber(JOIN)
    assert late.payloads == everything(5, size=500)


def test_the_track_out_of_use_for_longest_makes_room(tmp_path):
    star = Shelves(tmp_path, disk_octets=20_000)
    names = [FullTrackName(NAMESPACE, b"%d" % n) for n in range(5)]
    for name in names:
        stored(star, 1, size=1500, name=name)
    assert star.disk.octets <= 20_000 and star.disk.counters.evictions == 2
    assert list(star.disk.shelf("/").entries) == names[2:]
    star.crash()
    assert list(star.disk.shelf("/").entries) == names[2:]


def test_a_scope_that_fills_the_disk_displaces_its_own(tmp_path):
    star = Shelves(tmp_path, disk_octets=20_000)
    for path, count in (("/quiet", 1), ("/loud", 9)):
        for n in range(count):
            name = FullTrackName(NAMESPACE, b"%d" % n)
            stored(star, 1, size=1500, name=name, path=path)
    assert list(star.disk.shelf("/quiet").entries) == [FullTrackName(NAMESPACE, b"0")]
    assert star.disk.counters.evictions == 7 and star.disk.octets <= 20_000


def test_a_scope_takes_no_more_than_its_quota(tmp_path, caplog):
    star = Shelves(tmp_path, disk_octets_per_scope=7000)
    for n in range(3):
        stored(star, 1, size=1500, name=FullTrackName(NAMESPACE, b"%d" % n))
    assert star.disk.octets <= 7000 and star.disk.tracks == 1
    stored(star, 2, size=1500)
    assert star.disk.octets <= 7000 and "disk_octets_per_scope" in caplog.text


def test_max_cache_duration_counts_from_when_it_came_whatever_happens(star):
    properties = (KeyValue(MAX_CACHE_DURATION, 60_000),)
    stored(star, properties=properties)
    star.crash(seconds=30)
    _, collector = star.subscriber(JOIN)
    assert collector.payloads == everything(3)
    star.pass_time(31)
    assert star.relay.cache.objects == 0 and star.disk.tracks == 0 and not star.files
    _, collector = star.subscriber(JOIN)
    assert not collector.payloads


def test_a_track_that_expired_while_the_relay_was_away_is_gone(star):
    stored(star, properties=(KeyValue(MAX_CACHE_DURATION, 60_000),))
    star.crash(seconds=61)
    star.run()
    assert star.disk.tracks == 0 and not star.files and star.disk.counters.expirations == 1


@pytest.mark.parametrize("said", [None, 3_600_000])
def test_an_operator_limits_how_long_anything_is_kept(tmp_path, said):
    star = Shelves(tmp_path, max_cache_duration=60.0)
    stored(star, properties=() if said is None else (KeyValue(MAX_CACHE_DURATION, said),))
    star.crash(seconds=30)
    assert star.disk.tracks == 1
    star.crash(seconds=31)
    assert star.disk.tracks == 0


def test_a_publisher_that_contradicts_what_the_disk_has_counts(star):
    stored(star)
    star.crash()
    store = track(3, size=50, ended=True)
    star.publisher(store)
    _, collector = star.subscriber(JOIN)
    assert collector.payloads == everything(3, size=50)
    assert star.relay.counters.tracks_renewed == 1
    star.pass_time(1)
    star.crash()
    _, late = star.subscriber(JOIN)
    assert late.payloads == everything(3, size=50)


def test_a_publisher_that_has_the_same_as_the_disk_is_asked_for_one_object(star):
    stored(star)
    star.crash()
    publisher = star.publisher(track(3, ended=True))
    _, collector = star.subscriber(JOIN)
    assert collector.payloads == everything(3)
    assert star.relay.counters.tracks_renewed == 0 and star.relay.counters.objects_in <= 1
    assert len(publisher.handler.fetches) == 1


def test_a_folder_has_one_relay(star):
    with pytest.raises(InUse, match="in use by another relay"):
        Folder(star.folder)


def test_what_is_purged_is_on_no_tier(star):
    stored(star)
    (relay,) = star.relay.relays.values()
    tracks, octets, used = relay.purge(NAMESPACE)
    star.run()
    assert tracks == 1 and octets > 2 * 12 * 100 and not used
    assert not star.files and star.disk.octets == 0
    _, nobody = star.subscriber(JOIN)
    assert nobody.failed.code == RequestErrorCode.DOES_NOT_EXIST


def test_scopes_share_no_files(star):
    stored(star)
    star.crash()
    _, other = star.subscriber(JOIN, **at("/other"))
    assert other.failed.code == RequestErrorCode.DOES_NOT_EXIST


def test_what_was_read_of_a_track_that_has_ended_is_kept_once_it_is_quiet(star):
    publisher = star.publisher(track(6, ended=True))
    pair = star.connect()
    star.fetch(pair, (2, 0), (3, 3))
    star.pass_time(1)
    assert star.disk.files == 0
    star.pass_time(2.5)
    star.fetch(pair, (0, 0), (0, 3))
    star.pass_time(3.5)
    assert star.disk.tracks == 1 and star.disk.files == 2
    star.kill(publisher)
    star.crash()
    parts = everything(6)
    late = star.fetch(star.connect())
    assert late.payloads == {at: parts[at] for at in parts if at.group in (0, 2, 3)}
    assert late.unknown  # and nothing is said not to exist that was not asked for
    listing = Listing(star, star.connect(), NAMESPACE[:1])
    assert listing.events == []
    publisher = star.publisher(track(6, ended=True))
    whole = star.fetch(star.connect())
    assert whole.payloads == parts
    asked = [
        at for low, high in publisher.handler.fetch_ranges for at in parts if low <= at <= high
    ]
    compared = Location(3, 3)
    assert [at for at in asked if at.group in (0, 2, 3)] == [compared]


def test_a_relay_that_leaves_finishes_its_files(star):
    star.publisher(track(6, ended=True))
    star.fetch(star.connect(), (2, 0), (3, 3))
    for each in tuple(star.disk.open):
        each.finish()
    star.run()
    star.crash()
    assert star.disk.tracks == 1
    late = star.fetch(star.connect())
    assert {at.group for at in late.payloads} == {2, 3}


def test_a_file_that_is_lost_takes_nothing_but_its_own_with_it(star):
    star.publisher(track(6, ended=True))
    pair = star.connect()
    for group in (1, 3):
        star.fetch(pair, (group, 0), (group, 3))
        star.pass_time(4)
    assert star.disk.files == 2
    star.files[0].unlink()
    star.crash()
    star.publisher(track(6, ended=True))
    assert star.fetch(star.connect()).payloads == everything(6)


def test_a_track_that_memory_evicts_and_the_disk_has_goes_on_to_be_published(star):
    """And what that costs does not grow with those who want its tracks."""

    def cost(wanting):
        star.crash()
        pairs = [star.connect() for _ in range(wanting)]
        star.run()
        wants = [Wanting(star, each, NAMESPACE) for each in pairs]
        star.subscriber(JOIN)
        star.pass_time(1)
        cache = star.relay.cache
        assert cache.objects > 10
        made = calls(lambda: make_room(cache, cache.budget))
        assert cache.objects == 0
        star.run()
        (relay,) = star.relay.relays.values()
        assert all(track.published_here for track in relay.tracks.values())
        assert all(len(each.names) <= 1 for each in wants)
        return made

    stored(star, 10)
    assert cost(20) == cost(1)


def test_a_track_on_the_disk_for_which_there_is_no_place_is_not_said_not_to_exist(tmp_path):
    star = Shelves(tmp_path, max_tracks=1)
    stored(star)
    star.crash()
    other = FullTrackName((b"other",), b"")
    star.publisher(track(1, name=other), namespace=other.namespace)
    star.subscriber(LIVE, other)
    _, refused = star.subscriber(JOIN)
    assert refused.failed.code == RequestErrorCode.EXCESSIVE_LOAD


def test_files_that_go_before_they_expire_leave_nothing_behind(tmp_path):
    star = Shelves(tmp_path, disk_files=2)
    properties = (KeyValue(MAX_CACHE_DURATION, 10**12),)
    for number in range(90):
        stored(star, 1, name=NAME._replace(name=b"%d" % number), properties=properties)
        for pair in tuple(star.pairs):
            star.kill(pair)
    assert star.disk.counters.files_written == 90 and star.disk.files <= 3
    assert expiries(star.disk) < 80


def test_a_scope_stays_published_for_as_long_as_the_disk_has_something_of_it(star):
    stored(star, path="/one")
    for pair in tuple(star.pairs):
        star.kill(pair)
    star.crash()
    star.relay.restore()
    (relay,) = star.relay.relays.values()
    star.pass_time(2)
    assert list(star.relay.relays) == ["/one"] and NAMESPACE in relay.namespaces.on_disk
    star.disk.shelf("/one").purge((), ())
    star.pass_time(2)
    assert star.relay.relays == {} and NAMESPACE not in relay.namespaces.on_disk


def test_a_purge_while_the_disk_is_read_to_be_compared_leaves_nobody_waiting(star):
    stored(star)
    star.crash()
    star.hand.held = True
    offering(star, track(3, ended=True))
    (relay,) = star.relay.relays.values()
    (held,) = relay.tracks.values()
    assert held.origin.probing
    relay.purge(NAMESPACE)
    assert not held.origin.probing
    star.hand.held = False
    _, collector = star.subscriber(JOIN)
    assert collector.payloads == everything(3)


def left_for_another(folder, count):
    """A scope with so many tracks on the disk, whose place another one has taken."""
    star = Shelves(folder, max_scopes=1)
    for number in range(count):
        stored(star, name=FullTrackName(NAMESPACE, b"%d" % number))
    for pair in tuple(star.pairs):
        star.kill(pair)
    star.subscriber(JOIN, **at("/other"))
    assert list(star.relay.relays) == ["/other"]
    return star


def test_who_enters_a_scope_again_does_not_wait_for_a_look_at_all_that_the_disk_has(tmp_path):
    def cost(count):
        star = left_for_another(tmp_path / str(count), count)
        return calls(lambda: star.relay.keep("/"))

    (tmp_path / "2").mkdir(), (tmp_path / "12").mkdir()
    assert cost(2) == cost(12)


@pytest.mark.parametrize("purged", [False, True])
def test_what_the_disk_loses_while_nobody_is_in_the_scope_is_not_listed_later(tmp_path, purged):
    star = left_for_another(tmp_path, 2)
    if purged:
        star.disk.shelves["/"].purge((), ())
    for pair in tuple(star.pairs):
        star.kill(pair)
    listing = Listing(star, star.connect(**at("/")), NAMESPACE[:1])
    assert listing.request.namespaces == (set() if purged else {NAMESPACE})
