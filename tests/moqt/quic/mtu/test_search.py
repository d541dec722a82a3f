"""The search for what a path carries (RFC 8899), without a path."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.quic.mtu.search import MAX_PROBES, NEVER, RAISE_SECONDS, PathMtu

SLACK = 1 / 40
"""The part of a size that the search does not look for."""


class Searched:
    """A search over a path that carries `carries` octets; rounds are round trips."""

    def __init__(self, carries: int, limit: int, *, begin: bool = True) -> None:
        self.carries = carries
        self.mtu = PathMtu()
        self.now = 100.0
        self.numbers = count(1)
        self.probes: list[list[int]] = []
        if begin:
            self.mtu.begin(limit, self.now)

    def round(
        self, room: int = 1 << 20, luck: Callable[[int], bool] = lambda size: True
    ) -> list[int]:
        """The sizes of the probes of a round trip; those that are larger, or unlucky, are lost."""
        sent: dict[int, int] = {}
        while self.mtu.probe_at <= self.now:
            number = next(self.numbers)
            size = self.mtu.next_probe(room, number, self.now)
            if size is None:
                break
            sent[number] = size
            room -= size
        self.now += 0.1
        for number, size in sent.items():
            if size <= self.carries and luck(size):
                self.mtu.arrived(number)
            else:
                self.mtu.lost(number)
        sizes = list(sent.values())
        if sizes:
            self.probes.append(sizes)
        return sizes

    def finish(self, luck: Callable[[int], bool] = lambda size: True) -> None:
        while self.round(luck=luck):
            assert len(self.probes) < 100, "the search does not end"


def test_nothing_is_tried_before_it_is_begun() -> None:
    assert Searched(9000, 9000, begin=False).round() == []


@pytest.mark.parametrize(
    ("limit", "rounds"),
    [(1200, []), (1452, [[1452]]), (1472, [[1452, 1472]]), (8952, [[1452, 8952]])],
)
def test_a_path_that_carries_what_the_interface_takes_is_known_after_one_round_trip(
    limit: int, rounds: list[list[int]]
) -> None:
    searched = Searched(limit, limit)
    searched.finish()
    assert (searched.mtu.size, searched.probes) == (limit, rounds)


def test_a_size_of_the_path_that_is_common_is_used_after_one_round_trip() -> None:
    searched = Searched(1460, 16383)
    searched.round()
    assert searched.mtu.size == 1452


def test_a_probe_that_the_window_has_no_room_for_waits_and_the_smaller_ones_do_not() -> None:
    searched = Searched(16383, 16383)
    assert searched.round(room=12000) == [1452, 8952]
    assert searched.mtu.wanted == 16383
    assert searched.mtu.size == 8952
    assert searched.round(room=12000) == []
    assert searched.round() == [16383]
    assert searched.mtu.size == 16383


@given(carries=st.integers(1200, 16383), limit=st.integers(1200, 16383))
def test_every_path_is_found_and_no_packet_is_larger_than_it(carries: int, limit: int) -> None:
    searched = Searched(carries, limit)
    searched.finish()
    most = min(carries, limit)
    assert most - max(16, most * SLACK) <= searched.mtu.size <= most
    assert max(map(max, searched.probes), default=0) <= limit
    assert len(searched.probes) <= 16
    assert sum(map(len, searched.probes)) <= 18


@given(carries=st.integers(1200, 16383), dice=st.randoms(use_true_random=False))
def test_loss_by_chance_costs_probes_and_not_the_size(carries: int, dice: Random) -> None:
    left = [MAX_PROBES - 1]  # a size that is lost more often than that is given up

    def luck(size: int) -> bool:
        unlucky = left[0] > 0 and dice.random() < 0.3
        left[0] -= unlucky
        return not unlucky

    searched = Searched(carries, 16383)
    searched.finish(luck)
    assert carries - max(16, carries * SLACK) <= searched.mtu.size <= carries


def test_a_size_is_given_up_after_three_lost_probes() -> None:
    searched = Searched(1200, 1210)
    searched.finish()
    assert searched.probes == [[1210]] * MAX_PROBES


def test_a_probe_in_an_outage_is_tried_again_and_not_counted() -> None:
    mtu = PathMtu()
    mtu.begin(1452, 100.0)
    for number in range(10):
        assert mtu.probe_at <= 101.0
        assert mtu.next_probe(9000, number, 101.0) == 1452
        assert mtu.done is False
        mtu.untold(number)
    assert mtu.next_probe(9000, 10, 101.0) == 1452
    assert mtu.arrived(10)
    mtu.untold(10)
    assert (mtu.size, mtu.done) == (1452, True)


def test_a_search_that_is_over_begins_again_after_a_while_from_what_is_known() -> None:
    searched = Searched(1300, 1472)
    searched.finish()
    found = searched.mtu.size
    searched.now += RAISE_SECONDS - 1
    assert searched.round() == []
    searched.carries = 1472
    searched.now += 1
    assert searched.round() == [1452, 1472]
    assert found < searched.mtu.size == 1472


def test_a_path_that_carries_all_that_may_be_is_searched_no_more() -> None:
    searched = Searched(1472, 1472)
    searched.finish()
    assert searched.mtu.done and searched.mtu.probe_at == NEVER


@pytest.mark.parametrize("before", [1452, 8952])
def test_after_a_black_hole_the_search_begins_below_the_size_that_was_lost(before: int) -> None:
    searched = Searched(before, before)
    searched.finish()
    searched.carries = 1400
    searched.probes.clear()
    searched.mtu.narrowed()
    assert searched.mtu.size == 1200
    searched.finish()
    assert 1380 <= searched.mtu.size <= 1400
    assert max(map(max, searched.probes)) < before


def test_what_became_of_a_probe_of_another_path_says_nothing_of_this_one() -> None:
    searched = Searched(9000, 1472)
    old = searched.mtu.next_probe(9000, 1, 100.0)
    assert old == 1452
    searched.mtu.begin(1472, 101.0)
    assert not searched.mtu.arrived(1)
    searched.mtu.lost(1)
    assert searched.mtu.size == 1200
    assert searched.mtu.next_probe(9000, 2, 101.0) == 1452
    assert searched.mtu.arrived(2)
