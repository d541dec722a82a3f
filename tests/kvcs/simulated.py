"""asyncio in the virtual time of a `Simulation`: consumers over real QUIC, without a socket.

with asyncio.Runner(loop_factory=lambda: SimulatedLoop(simulation)) as runner:
    runner.run(story())
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

from tests.moqt.simulator import Simulation

LONGEST = 600.0
"""Seconds of virtual time in which something happens, or never will."""


class _Network(selectors.SelectSelector):
    """Where the loop waits: time passes in the simulation until something is to be called."""

    loop: SimulatedLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        loop = self.loop
        loop.called = False
        if timeout is None or timeout > 0:
            limit = LONGEST if timeout is None else timeout
            happened = loop.simulation.run(lambda: loop.called, limit=limit)
            assert happened or timeout is not None, "nothing happens any more"
        else:
            loop.simulation.flush()
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is a simulation's."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.called = False
        network = _Network()
        network.loop = self
        super().__init__(network)

    def time(self) -> float:
        return self.simulation.now

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        self.called = True
        return super().call_soon(callback, *args, context=context)
