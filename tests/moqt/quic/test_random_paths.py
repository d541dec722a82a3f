"""No transfer over any path ends by a time-out that leaves it three times the time it needs.

`RANDOM_PATHS` is how many are tried; `make random-paths` tries 200.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.moqt.quic.links import Path, random_journey, random_path, transfer, travel

TIMES = 3
"""What the path could bring within the time-out, over what is to be brought."""
LIMIT = 20.0
"""Seconds that the largest transfer may take."""
ROUND_TRIPS = 20
"""For the handshake and to find out what the path can do: they count where data is little."""
RESUME = 4.0
"""Seconds after an outage: until the next probe, and to find the way back to the rate."""
MOST = int(os.environ.get("RANDOM_OCTETS", "500_000"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """BBR draws when to probe: the same each time."""
    random.seed(1)


@pytest.mark.parametrize("seed", range(int(os.environ.get("RANDOM_PATHS", "24"))))
def test_a_transfer_is_done_before_the_path_could_have_brought_it_three_times(seed: int) -> None:
    journey = random_journey(seed)
    size = min(MOST, int(journey.rate * LIMIT / TIMES))
    until = TIMES * size / journey.rate + ROUND_TRIPS * journey.round_trip
    if journey.dark:
        until += journey.dark + RESUME
    flow = travel(size, journey, until=until, seed=seed)
    assert flow.seconds is not None, f"{flow.received} of {size} octets in {until} s: {journey}"
    assert flow.received == size


@pytest.mark.parametrize("seed", [88, 178, 185])
def test_paths_that_stopped_a_transfer_for_good_once(seed: int) -> None:
    path = random_path(seed)
    assert path.bandwidth is not None
    until = TIMES * 1_000_000 / path.bandwidth + 2 * ROUND_TRIPS * path.latency
    flow = transfer(1_000_000, path, Path(latency=path.latency), until=until, seed=seed)
    assert flow.seconds is not None


def test_one_run_of_losses_in_startup_does_not_end_it() -> None:
    path = Path(latency=0.1, bandwidth=5e6, queue=4_000_000, blackouts=((0.61, 0.67),))
    flow = transfer(None, path, congestion="bbr", until=2.6)
    assert flow.declared_lost > 6
    assert flow.goodput_between(2, 2.6) > 0.9 * 5e6


def test_after_an_outage_of_any_length_data_comes_again_within_little_more_than_a_second() -> None:
    path = Path(latency=0.01, bandwidth=1e6, blackouts=((1.0, 13.5),))
    flow = transfer(None, path, until=18)
    silent = [each.received for each in flow.history if each.time < 13.5][-1]
    resumed = next(each.time for each in flow.history if each.received > silent)
    assert resumed < 13.5 + 1.2
    assert flow.goodput_between(16.5, 18) > 0.8e6
