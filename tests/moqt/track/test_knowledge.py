"""What a store knows costs what is billed, has a bound, and is never wrong when forgotten."""

from __future__ import annotations

import random

import pytest

from moqt.track.gaps import Gaps, with_gaps
from moqt.track.store import TrackStore
from moqt.values.codes import MAX_VI64
from moqt.values.intervals import IntervalSet
from moqt.values.names import FullTrackName, Location
from tests.moqt.inside import keep_in

NAME = FullTrackName((b"demo",), b"t")


class Account:
    """Pays for so many intervals."""

    def __init__(self, budget=1 << 60):
        self.left = budget
        self.intervals = 0
        self.refused = []

    def room(self, octets):
        return self.left - self.intervals * octets >= octets

    def count_statuses(self, more): ...

    def count_intervals(self, more):
        self.intervals += more

    def count_properties(self, more): ...

    def count_refused(self, limit):
        self.refused.append(limit)


def held(limit=8, account=None):
    store = TrackStore(NAME, authoritative=False, max_intervals=limit)
    store.knowledge.account = account
    return store


def put(store, group, object_id, properties=b""):
    return store.begin(
        Location(group, object_id),
        subgroup=0,
        priority=0,
        properties=properties,
        length=1,
        payload=b"x",
    )


def test_beyond_the_limit_what_lies_apart_is_not_learned_and_what_touches_is():
    store = held(limit=8)
    learned = [store.mark_nonexistent(Location(0, 2 * n), Location(0, 2 * n)) for n in range(100)]
    assert learned == [True] * 8 + [False] * 92
    assert len(store.known) == 8 and store.knowledge.refused == 92
    assert Location(0, 16) not in store.known
    for n in range(8):
        assert store.mark_nonexistent(Location(0, 2 * n + 1), Location(0, 2 * n + 1))
    assert len(store.known) == 1
    assert store.mark_nonexistent(Location(7, 0), Location(7, 0))


def test_each_object_held_may_have_an_interval_of_its_own_in_its_price():
    account = Account()
    store = held(limit=4, account=account)
    objects = [put(store, 0, 2 * n) for n in range(100)]
    assert len(store.known) == 100 and account.intervals == 0
    assert store.mark_nonexistent(Location(0, 1), Location(0, 1))  # it touches
    assert not store.mark_nonexistent(Location(9, 0), Location(9, 0))
    for stored in objects:
        store.evict(stored)
    assert account.intervals == store.knowledge.billed == len(store.known) <= 4


@pytest.mark.parametrize("order", ["ascending", "descending", "any"])
def test_what_lay_between_objects_that_are_evicted_is_forgotten_beyond_the_limit(order):
    account = Account()
    store = held(limit=16, account=account)
    objects = []
    for group in range(20):
        for n in range(0, 20, 2):
            objects.append(put(store, group, n))
        store.set_end_of_group(Location(group, 19))
    for group in range(20):
        for n in range(1, 19, 2):
            assert store.mark_nonexistent(Location(group, n), Location(group, n))
    store.set_end_of_track(Location(20, 0))
    assert len(store.known) == 1 and account.intervals == 0
    if order == "any":
        random.Random(5).shuffle(objects)
    elif order == "descending":
        objects.reverse()
    for count, stored in enumerate(objects, 1):
        store.subgroup(stored.location.group, 0).readers += 1  # its group is not forgotten
        store.evict(stored)
        assert stored.location not in store.known
        assert len(store.known) <= 16 + len(objects) - count + 1
        assert account.intervals == store.knowledge.billed
        assert account.intervals >= len(store.known) - (len(objects) - count)
    assert Location(20, 0) in store.known and Location(MAX_VI64, MAX_VI64) in store.known
    assert store.knowledge.whole == 0


def test_nothing_is_ever_known_that_was_not_said():
    source = random.Random(1)
    for _ in range(30):
        store = held(limit=source.choice((0, 1, 3, 8)), account=Account(source.choice((0, 500))))
        absent, there = set(), {}
        for _ in range(200):
            group, at = source.randrange(3), source.randrange(12)
            location = Location(group, at)
            if source.random() < 0.3 and there:
                store.evict(there.pop(source.choice(sorted(there))))
            elif location in absent:
                continue
            elif source.random() < 0.5:
                if location not in there:
                    there[location] = put(store, group, at)
            elif location not in there:
                absent.add(location)
                store.mark_nonexistent(location, location)
            for n in range(36):
                each = Location(n // 12, n % 12)
                assert each not in store.known or each in absent or each in there
                assert each not in there or each in store.known


def test_declared_gaps_are_bounded_and_a_forgotten_one_makes_no_track_malformed():
    account = Account()
    store = held(limit=8, account=account)
    for n in range(100):
        put(store, 0, 4 * n + 2, with_gaps(b"", Gaps(objects=1)))
    assert len(store.knowledge.gaps) == 8 and account.intervals == store.knowledge.billed == 8
    assert account.refused == [8] * 92
    put(store, 0, 4 * 50 + 1)  # what was forgotten may come
    assert Location(0, 4 * 50 + 1) in store.known


def test_without_room_nothing_is_learned_but_where_the_track_ends():
    account = Account(0)
    store = held(account=account)
    assert not store.mark_nonexistent(Location(0, 0), Location(0, 5))
    store.set_end_of_group(Location(1, 3))
    assert len(store.known) == 0 and store.knowledge.refused == 2
    assert account.refused == [0, 0], "for want of room, not at the limit of the track"
    store.set_end_of_track(Location(2, 0))
    assert Location(2, 0) in store.known


class Moved(list):
    """A list that counts the entries that an insertion moves up."""

    moved = 0

    def __setitem__(self, key, value):
        if isinstance(key, slice) and key.stop - key.start != len(value):
            Moved.moved += len(self) - key.stop
        super().__setitem__(key, value)


def test_an_interval_beyond_the_bound_moves_none_of_those_that_are_there():
    intervals = IntervalSet()
    for n in range(0, 400, 2):
        intervals.add(Location(1, n), Location(1, n), 100)
    assert len(intervals) == 100
    keep_in(intervals, Moved)
    for n in range(1000):
        assert not intervals.add(Location(0, 2 * n), Location(0, 2 * n), 100)
        assert intervals.add(Location(1, 0), Location(1, 0), 100)
    assert Moved.moved == 0 and len(intervals) == 100
