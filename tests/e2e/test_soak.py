"""A relay that publishers, consumers and tenants come to and leave keeps nothing of them."""

from __future__ import annotations

from argparse import Namespace

import pytest

from tools.soak import EMPTY, GROWTH, grown, left, soak


def test_a_relay_under_churn_keeps_nothing_of_who_has_left(tmp_path):
    told = soak(Namespace(minutes=0.2, seed=1), tmp_path)
    assert told["faults"] == []
    assert sum(told["happened"].values()) >= 10


@pytest.mark.parametrize("name", GROWTH)
def test_what_grows_is_named(name):
    def sample(value):
        return dict.fromkeys(GROWTH, 1000.0) | {name: value}

    times, more = GROWTH[name]
    bound = 1000.0 * times + more
    assert grown([sample(1000.0)] * 8 + [sample(bound)] * 2) == []
    assert grown([sample(1000.0)] * 8 + [sample(bound + 1)] * 2) == [
        f"{name} went from 1000 to {bound + 1:g}"
    ]


def test_what_stays_behind_is_named():
    empty = dict.fromkeys((*EMPTY, "kvcs_relay_tasks", "process_open_fds"), 0.0)
    assert left(empty, empty) == []
    assert left(empty, empty | {EMPTY[0]: 2.0}) == [f"{EMPTY[0]} is 2"]
    assert left(empty, empty | {"process_open_fds": 5.0}) == ["process_open_fds was 0 and is 5"]
