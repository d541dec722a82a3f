"""Retrieves layers of blocks from many holders at once: the shell around the planner."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvsp.blocks.layout import Tensor, octets_of
from kvsp.client.caller import within
from kvsp.client.errors import ClientError, RequestRefusedError
from kvsp.client.limits import ClientLimits
from kvsp.client.policy import Fault, fault_of
from kvsp.client.retrieving.flights import Arrived, Cancel, Fetch, Missing
from kvsp.client.retrieving.leasing import Leasing
from kvsp.client.retrieving.planner import Planner
from kvsp.client.retrieving.receiving import Layer
from kvsp.client.retrieving.ways import Way, WayError
from kvsp.names.errors import DecodeError
from kvsp.names.identity import Descriptor
from kvsp.names.prefix import block_tokens_range
from kvsp.names.uris import BlockId

logger = logging.getLogger("kvsp.client")


class Destination(Protocol):
    """Where verified layers go, each once, as soon as it came."""

    def write(self, layer: Layer) -> None:
        """Take a layer of a block. What it raises ends the retrieval."""
        ...


class ArrayDestination:
    """The caller's arrays, by layer: K and V, `[tokens or more, kv_heads, head_dim]`.

    Block i of those asked for goes to rows `(first_block + i) * block_tokens` and on.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        arrays: Mapping[int, tuple[Tensor, Tensor]],
        *,
        first_block: int = 0,
    ) -> None:
        self._descriptor = descriptor
        self._arrays = arrays
        self._first_block = first_block

    def write(self, layer: Layer) -> None:
        rows = block_tokens_range(self._first_block + layer.block, self._descriptor.block_tokens)
        for tensor, raw in zip(self._arrays[layer.layer], (layer.k, layer.v), strict=True):
            octets_of(tensor[rows.start : rows.stop])[:] = raw


@dataclass(frozen=True, slots=True)
class RetrievalResult:
    """Where everything came from, what is missing and why."""

    blocks: int
    """How many blocks were asked for."""

    arrived: tuple[Arrived, ...]
    missing: tuple[Missing, ...]
    octets: int
    """Octets of containers received, those thrown away included."""

    counters: Mapping[str, int] = field(default_factory=dict)
    """`requests`, `hedges`, `stolen`, and failures by name."""

    bad_sources: Mapping[str, int] = field(default_factory=dict)
    """How many answers of a holder failed verification."""

    details: Mapping[Fault, str] = field(default_factory=dict)
    """The last failure of each kind, in words."""

    failures: Mapping[int, ClientError] = field(default_factory=dict)
    """The last failure of each block that had one."""

    late: frozenset[str] = frozenset()
    """Holders that did not answer."""

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def complete_blocks(self) -> int:
        """How many leading blocks came whole: all that may be called a hit."""
        return min((gap.block for gap in self.missing), default=self.blocks)

    def to_dict(self) -> dict[str, Any]:
        """A JSON object; layers are inclusive pairs, as everywhere in KVSP."""
        return {
            "blocks": self.blocks,
            "complete_blocks": self.complete_blocks,
            "octets": self.octets,
            "arrived": [
                {"block": a.block, "layers": _pair(a.layers), "source": a.source}
                for a in self.arrived
            ],
            "missing": [
                {"block": m.block, "layers": _pair(m.layers), "reason": str(m.reason)}
                for m in self.missing
            ],
            "counters": dict(self.counters),
            "bad_sources": dict(self.bad_sources),
            "details": {str(fault): text for fault, text in self.details.items()},
        }


def _pair(layers: range) -> list[int]:
    return [layers.start, layers.stop - 1]


class Retrieval:
    """One run of a planner over the ways to its sources."""

    def __init__(
        self,
        ways: Sequence[Way],
        planner: Planner,
        limits: ClientLimits,
        tell: Callable[[str, BlockId], None],
        leasing: Leasing | None = None,
    ) -> None:
        """Of `ways` the first that takes a source is gone. `tell` is called with a holder and a
        block of which its octets fail verification. Blocks are leased when there is
        `leasing`."""
        self._tell = tell
        self._ways = ways
        self._planner = planner
        self._limits = limits
        self.leasing = leasing
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._octets = 0
        self.errors: dict[Fault, ClientError] = {}
        """The last exception of each kind."""
        self.failures: dict[int, ClientError] = {}
        """The last one of each block."""
        self.unproven: ClientError | None = None
        """Why an answer is not right whose layers all are."""

    async def run(
        self, destination: Destination, blocks: int, deadline_s: float | None
    ) -> RetrievalResult:
        """Fill `destination`. At the deadline, what did not come is missing.

        Raises what the destination raises. Nothing is left behind, however it ends.
        """
        try:
            async with asyncio.timeout(deadline_s) as limit:
                await self._loop(destination)
        except TimeoutError:
            if not limit.expired():
                raise
            self._planner.give_up(Fault.TIMEOUT)
        finally:
            await self._stop()
            if self.leasing is not None:
                self.leasing.end()
        if self._failure is not None:
            raise self._failure
        return self.result(blocks)

    def result(self, blocks: int) -> RetrievalResult:
        """What came and what did not, so far."""
        planner = self._planner
        bad = {s.holder: s.bad for s in planner.sources.values() if s.bad}
        return RetrievalResult(
            blocks,
            tuple(planner.arrivals()),
            tuple(planner.missing()),
            self._octets,
            Counter(planner.counters),
            bad,
            {fault: str(error) for fault, error in self.errors.items()},
            dict(self.failures),
            frozenset(planner.late()),
        )

    async def _loop(self, destination: Destination) -> None:
        now = asyncio.get_running_loop().time
        while not self._planner.done and self._failure is None:
            self._changed.clear()
            for action in self._planner.poll(now()):
                if isinstance(action, Cancel):
                    if (task := self._tasks.get(action.number)) is not None:
                        task.cancel()
                    continue
                task = asyncio.create_task(self._fetch(action, destination))
                self._tasks[action.number] = task
            if self._planner.done:
                return
            time = self._planner.next_time(now())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(time):
                    await self._changed.wait()

    async def _stop(self) -> None:
        """End every request; waits for their connections to be let go."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        cancelled: asyncio.CancelledError | None = None
        while any(not task.done() for task in tasks):
            try:
                await asyncio.wait(tasks)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _fetch(self, fetch: Fetch, destination: Destination) -> None:
        try:
            async with contextlib.aclosing(self.layers(fetch, self._limits.block_s)) as layers:
                async for layer in layers:
                    destination.write(layer)
                    self._changed.set()
        except Exception as error:  # noqa: BLE001  (raised again by `run`)
            self._failure = error
        finally:
            self._tasks.pop(fetch.number, None)
            self._changed.set()

    async def layers(
        self, fetch: Fetch, seconds: float | None = None
    ) -> AsyncGenerator[Layer, None]:
        """The verified layers of one request, as they come; tells the planner how it went.

        `seconds` bounds all of it, the time the caller takes for a layer included.
        """
        now, octets = asyncio.get_running_loop().time, 0

        def received(count: int) -> None:
            nonlocal octets
            octets += count
            self._octets += count

        replica = fetch.record
        way = next(each for each in self._ways if each.takes(replica.holder))
        try:
            async with within(replica.holder, seconds):
                if self.leasing is not None and way.leases:
                    await self.leasing.hold(replica.holder, replica.block)
                async with contextlib.aclosing(way.layers(fetch, received)) as arriving:
                    async for layer in arriving:
                        if self._planner.arrived(fetch.number, layer.layer):
                            yield layer
            self._planner.finished(fetch.number, now(), octets)
        except ClientError as error:
            self._report(fetch, error, now())
        except DecodeError:  # the record's holder is no base URI
            self._planner.failed(fetch.number, Fault.REFUSED, now())
        except Exception as error:
            # A way that somebody else has written: the block's other sources are still there.
            logger.exception("%s: the way to it failed as it should not", replica.holder)
            self._report(fetch, WayError(replica.holder, repr(error), Fault.REFUSED), now())
        if self.leasing is not None and not self._planner.awaits(fetch.block):
            self.leasing.done(replica.block)

    def _report(self, fetch: Fetch, error: ClientError, now: float) -> None:
        retry_after, available = None, None
        if isinstance(error, RequestRefusedError):
            retry_after = error.problem.retry_after
            available = _available(error.problem.members.get("available"))
        fault = error.fault if isinstance(error, WayError) else fault_of(error)
        self.errors[fault] = self.failures[fetch.block] = error
        if fault is Fault.VERIFICATION:
            self._tell(fetch.record.holder, fetch.record.block)
        if fault is Fault.VERIFICATION and not self._planner.needs(fetch.number):
            self.unproven = error
        self._planner.failed(fetch.number, fault, now, retry_after=retry_after, available=available)


def _available(value: Any) -> list[range] | None:
    """The `available` member of `kvsp-layers-unavailable`; None when it is no list of ranges."""
    if not isinstance(value, list):
        return None
    ranges = []
    for item in value:
        if not (isinstance(item, list) and len(item) == 2 and all(type(i) is int for i in item)):
            return None
        ranges.append(range(max(0, item[0]), item[1] + 1))
    return ranges


def needed_runs(layers: Sequence[int] | range) -> list[range]:
    """Ascending disjoint ranges of the given layer numbers."""
    if isinstance(layers, range) and layers.step == 1:
        return [layers] if layers else []
    runs: list[range] = []
    for layer in sorted(set(layers)):
        if runs and runs[-1].stop == layer:
            runs[-1] = range(runs[-1].start, layer + 1)
        else:
            runs.append(range(layer, layer + 1))
    return runs
