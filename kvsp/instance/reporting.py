"""Keeps the placement controller informed (KVSP "Instance Status and Lifecycle")."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable

from kvsp.instance.callers import PlacementCaller, PlacementRefusedError, PlacementUnavailableError
from kvsp.instance.core.agent import Agent
from kvsp.instance.core.sessions import Serving
from kvsp.instance.epochs import Epochs
from kvsp.records.problems import ProblemName
from kvsp.records.records import Link

logger = logging.getLogger("kvsp.instance")

_WARN_AFTER = 2
"""Failures before it is logged: one is common when processes start together."""

_NEW_EPOCH = (ProblemName.STALE_EPOCH, ProblemName.INSTANCE_FAILED)


class Reporter:
    """A status at once and then every third of its TTL; the answer is obeyed."""

    def __init__(
        self,
        agent: Agent,
        placement: PlacementCaller,
        epochs: Epochs,
        links: Callable[[], Iterable[Link]],
        clock_ms: Callable[[], int],
        *,
        dropped: Callable[[list[Serving]], None],
        reported: Callable[[], Awaitable[None]],
    ) -> None:
        """`dropped` takes the sessions that a new epoch ended, `reported` runs after every
        status that was taken."""
        self._agent = agent
        self._placement = placement
        self._epochs = epochs
        self._links = links
        self._clock_ms = clock_ms
        self._dropped = dropped
        self._reported = reported
        self._wake = asyncio.Event()
        self.failures = 0
        """Statuses in a row that the controller did not take."""

    @property
    def unavailable(self) -> bool:
        """Whether the controller did not take the last status."""
        return self.failures > 0

    def hurry(self) -> None:
        """Report now: something changed that the controller wants to know."""
        self._wake.set()

    async def run(self) -> None:
        """Report until cancelled."""
        interval_s = self._agent.limits.status_ttl_ms / 3000
        while True:
            self._wake.clear()
            try:
                await self.report()
            except (PlacementUnavailableError, PlacementRefusedError) as error:
                self.failures += 1
                if self.failures == _WARN_AFTER:
                    logger.warning("the placement controller does not take the status: %s", error)
            with contextlib.suppress(TimeoutError):
                # a little early: the network takes its time, too
                async with asyncio.timeout(0.9 * interval_s):
                    await self._wake.wait()

    async def report(self) -> None:
        """One status, in a new epoch when the controller does not accept the current one.

        Raises PlacementUnavailableError, PlacementRefusedError.
        """
        try:
            await self._send()
        except PlacementRefusedError as error:
            if error.name not in _NEW_EPOCH:
                raise
            logger.warning("reporting in a new epoch: %s", error.name)
            above = max(error.epoch, self._agent.epoch)
            epoch = await asyncio.to_thread(self._epochs.next, above)
            self._dropped(self._agent.begin_epoch(epoch))
            await self._send()

    async def _send(self) -> None:
        agent = self._agent
        wanted = await self._placement.report(agent.status(self._links(), self._clock_ms()))
        self.failures = 0
        before = agent.state
        agent.obey(wanted, self._clock_ms())
        if agent.state is not before:
            self.hurry()
        await self._reported()
