"""When a load has stalled."""

from __future__ import annotations

import pytest

from kvcs.client.stalls import Line, Stall


def test_the_first_object_is_waited_for_as_long_as_was_set():
    stall = Stall(0.5, 100.0)
    assert stall.until == 100.5
    assert stall.silent


def test_whatever_comes_is_a_reason_to_wait_on():
    stall = Stall(0.5, 100.0)
    stall.look(100.3, heard=1, layers=0)
    assert stall.until == 100.8
    assert not stall.silent
    stall.look(100.6, heard=1, layers=0)
    assert stall.until == 100.8


def fed(gap: float, *, layers: int = 6) -> Stall:
    stall = Stall(0.5, 0.0)
    for number in range(layers):
        stall.look(1.0 + number * gap, heard=number + 1, layers=number + 1)
    return stall


def test_layers_that_come_regularly_are_waited_for_five_median_gaps():
    assert fed(0.3).limit == pytest.approx(1.5)


def test_of_what_exists_already_nothing_comes_for_two_fifths_as_long_at_most():
    stall = fed(0.001)
    stall.producing = False
    assert stall.limit == pytest.approx(0.2)


def test_of_a_cache_in_production_each_layer_may_take_as_long_as_the_first():
    """A burst of layers that were there already says nothing of how long the next one takes."""
    assert fed(0.001).limit == pytest.approx(0.5)


def test_one_long_gap_among_many_changes_nothing():
    stall = Stall(0.5, 0.0)
    now = 1.0
    for number in range(9):
        now += 0.9 if number == 4 else 0.1
        stall.look(now, heard=number + 1, layers=number + 1)
    assert stall.limit == pytest.approx(0.5)


def test_a_process_that_stood_still_itself_waits_so_much_longer():
    stall = Stall(0.5, 0.0)
    stall.overslept(0.01)
    assert stall.until == 0.5
    stall.overslept(3.0)
    assert stall.until == 3.5


def shared(loads: int) -> tuple[Line, Stall]:
    line = Line()
    line.loads = loads
    return line, Stall(0.5, 0.0, line)


def test_while_others_on_the_line_are_served_a_load_waits_for_its_turn():
    line, stall = shared(10)
    now = 0.0
    for _ in range(40):  # 4 s, of which a tenth counts
        now += 0.1
        line.heard += 1
        stall.look(now, heard=0, layers=0)
    assert stall.until == pytest.approx(now + 0.1)
    assert not stall.silent, "the relay speaks, to others"
    stall.look(now + 0.2, heard=0, layers=0)
    assert stall.until == pytest.approx(now + 0.1), "the line was idle: that is silence"


def test_what_others_get_is_no_reason_to_wait_for_a_dead_publication_without_an_end():
    line, stall = shared(2)
    now = 0.0
    while now < stall.until:
        now += 0.1
        line.heard += 1
        stall.look(now, heard=0, layers=0)
    assert now == pytest.approx(1.0, abs=0.11)


def test_what_came_of_a_load_is_heard_on_its_line():
    line, stall = shared(2)
    other = Stall(0.5, 0.0, line)
    stall.look(0.1, heard=3, layers=0)
    assert line.heard == 3
    other.look(0.4, heard=0, layers=0)
    assert other.until == pytest.approx(0.7)
    assert not other.silent


def test_a_load_that_is_alone_on_its_line_waits_no_longer_for_what_came_of_others_before():
    line = Line()
    line.heard, line.loads = 100, 1
    stall = Stall(0.5, 0.0, line)
    assert stall.silent
    stall.look(0.4, heard=0, layers=0)
    assert stall.until == 0.5


def test_waking_late_while_others_are_served_is_not_counted_twice():
    line, stall = shared(100)
    stall.overslept(3.0)
    line.heard += 1
    stall.look(3.0, heard=0, layers=0)
    assert stall.until == 3.5
