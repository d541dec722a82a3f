"""What a publisher says does not exist, or cannot tell, is remembered at a price, up to a bound."""

from __future__ import annotations

import logging

import pytest

from moqt.track.knowledge import INTERVAL_OCTETS
from moqt.track.store import TrackStore
from moqt.values.codes import EndOfRange
from moqt.values.messages import LocationFilter, Parameters
from moqt.values.names import Location
from relay.sources.fetches import MAX_RANGES
from relay.sources.missing import Ranges
from tests.relay.star import NAME, Collector, Star, payload


class Markers(Collector):
    def __init__(self):
        super().__init__()
        self.markers = []

    def range_marker(self, stream, marker):
        self.markers.append(marker)
        super().range_marker(stream, marker)


def fetch(pair, start, end):
    collector = Markers()
    chosen = Parameters(location_filter=LocationFilter.range(start, end))
    pair.client.fetch(NAME, collector, chosen)
    return collector


def alternating(count):
    """A publisher that knows of each second Object that it does not exist, and nothing else."""
    store = TrackStore(NAME, authoritative=False, max_intervals=count)
    for n in range(0, count, 2):
        assert store.mark_nonexistent(Location(0, n), Location(0, n))
    store.append(0, count, payload(0, count))
    return store


def test_an_answer_of_markers_costs_no_more_than_its_track_may(caplog):
    star = Star(max_intervals_per_track=50, linger=0, cache_octets=100_000)
    star.publisher(alternating(2000))
    pair = star.connect()
    collector = fetch(pair, Location(0, 0), Location(0, 2000))
    star.run()
    star.pass_time(3)
    cache, held = star.relay.cache, star.relay.tracks[NAME].store
    assert len(held.known) <= 50 + 1 and held.knowledge.refused > 900
    assert cache.intervals == held.knowledge.billed <= 50
    assert cache.intervals_refused == held.knowledge.refused
    assert [r.levelno for r in caplog.records if "max_intervals_per_track" in r.getMessage()] == [
        logging.WARNING
    ]
    assert cache.intervals * INTERVAL_OCTETS < cache.billed <= cache.budget
    # Nothing is said not to exist that may, nothing to be unknown that came.
    assert collector.payloads == {Location(0, 2000): payload(0, 2000)}
    absent, position = set(), 0
    for marker in collector.markers:
        if marker.kind is EndOfRange.NON_EXISTENT:
            absent |= set(range(position, marker.location.object + 1))
        position = marker.location.object + 1
    assert all(n % 2 == 0 for n in absent)
    star.kill(pair)
    cache.forget(held)
    assert cache.billed == cache.intervals == 0


def test_what_a_fetch_leaves_out_is_billed_while_it_runs_and_free_beside_what_came():
    star = Star()
    store = TrackStore(NAME)
    for n in range(0, 200, 2):
        store.append(0, n, payload(0, n))
    star.publisher(store)
    pair = star.connect()
    cache, seen = star.relay.cache, []
    count = cache.count_intervals
    cache.count_intervals = lambda more: (count(more), seen.append(cache.intervals))
    collector = fetch(pair, Location(0, 0), Location(0, 198))
    star.run()
    held = star.relay.tracks[NAME].store
    assert len(collector.payloads) == 100 and max(seen) == 99
    assert len(held.known) == 1 and cache.intervals == 0


def test_what_could_not_be_told_or_stored_is_kept_as_a_few_ranges_that_leave_nothing_out():
    star = Star(max_intervals_per_track=10, linger=0)
    star.publisher(alternating(4000))
    pair = star.connect()
    over = []
    fetch_over = Ranges.fetch_over
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranges, "fetch_over", lambda *args: (over.append(args), fetch_over(*args)))
        fetch(pair, Location(0, 0), Location(0, 4000))
        star.run()
    _, _, unknown, rejected = over[0]
    assert len(unknown) <= MAX_RANGES and len(rejected) <= MAX_RANGES
    covered = [range(low.object, high.object + 1) for low, high, *_ in (*unknown, *rejected)]
    known = star.relay.tracks[NAME].store.known
    for n in range(4000):
        assert Location(0, n) in known or any(n in each for each in covered)
