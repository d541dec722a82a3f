"""The longest hold of an event loop; the clock is the test's."""

from __future__ import annotations

import asyncio
import selectors

import pytest

from moqt import loop_hold
from moqt.loop_hold import forget_holds, longest_hold, watched_loop


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(loop_hold, "perf_counter", lambda: Clock.now)
    return Clock


def run(main) -> None:
    with asyncio.Runner(loop_factory=watched_loop) as runner:
        runner.run(main())


def test_the_longest_turn_of_the_loop_is_its_longest_hold(clock) -> None:
    async def main() -> None:
        for seconds in (0.5, 3.0, 1.0):
            clock.now += seconds
            await asyncio.sleep(0)
        assert longest_hold() == 3.0

    run(main)


def test_what_runs_one_after_another_without_a_look_at_the_sockets_is_one_hold(clock) -> None:
    async def hold() -> None:
        clock.now += 2.0

    async def main() -> None:
        await asyncio.gather(hold(), hold(), hold())
        await asyncio.sleep(0)
        assert longest_hold() == 6.0

    run(main)


def test_waiting_is_no_hold(clock, monkeypatch) -> None:
    select = selectors.DefaultSelector.select

    def waited(self, timeout=None):
        clock.now += 60.0
        return select(self, timeout)

    monkeypatch.setattr(selectors.DefaultSelector, "select", waited)

    async def main() -> None:
        for _ in range(3):
            clock.now += 1.0
            await asyncio.sleep(0)
        assert longest_hold() == 1.0

    run(main)


def test_holds_before_are_forgotten_on_demand(clock) -> None:
    async def main() -> None:
        clock.now += 5.0
        forget_holds()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        clock.now += 1.0
        await asyncio.sleep(0)
        assert longest_hold() == 1.0

    run(main)


async def test_a_loop_that_is_not_watched_has_no_hold() -> None:
    forget_holds()
    assert longest_hold() is None
