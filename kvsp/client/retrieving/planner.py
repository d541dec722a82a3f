"""Which layers are asked for from whom, next (sans-IO; times in seconds, given).

Every needed layer of every block ends as arrived, once, or as missing with its reason,
whatever the sources do. The index is advisory: a source that does not hold what a record
says is a miss, and the next replica is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count

from kvsp.client.limits import ClientLimits
from kvsp.client.policy import SEVERITY, Fault
from kvsp.client.retrieving.flights import (
    Arrived,
    Cancel,
    Fetch,
    Flight,
    Missing,
    State,
    runs_of,
)
from kvsp.client.retrieving.sources import (
    Candidate,
    Replica,
    Source,
    Task,
    candidate_of,
    common_ranges,
)
from kvsp.names import uris
from kvsp.records.records import Link

_STEAL_LOOKS = 16
_BACKOFF_S = 0.05


class Planner:
    """The state of one retrieval of layers of blocks.

    `poll` says what to do; `arrived`, `finished` and `failed` take what happened.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[Replica]],
        wanted: Sequence[Iterable[range]],
        layers: int,
        *,
        limits: ClientLimits | None = None,
        links: Mapping[str, Link] | None = None,
        codec: int | None = None,
        allow_lossy: bool = False,
        ordered: bool = False,
        by_block: bool = False,
        late: Collection[str] = (),
        takes: Callable[[str], bool] = lambda source: not uris.is_moqt(source),
        budget_octets: int | None = None,
        now: float = 0.0,
    ) -> None:
        """`blocks` are the replicas of each block, `wanted` the ascending disjoint ranges of
        layers needed of each, `layers` those of the descriptor. `links` are known links, by
        holder. With `ordered` one layer after the other is asked for, each from one source.
        With `by_block` the first blocks come first, whole, else the lower layers of all, so
        that computing can start while the rest is loaded. Holders in `late`, which did not
        answer lately, are asked after the others; `takes` says to which there is a way.
        Blocks after the first that does not fit into `budget_octets` are missing, reason
        `capacity`.
        """
        self._limits = limits or ClientLimits()
        self._layers = layers
        self._ordered = ordered
        self._by_block = by_block
        self._numbers = count()
        self._flights: dict[int, Flight] = {}
        self._cancels: list[Cancel] = []
        self._octets = 0
        self.sources: dict[str, Source] = {}
        self.counters: Counter[str] = Counter()
        """`requests`, `hedges`, `stolen`, and every fault by its name."""

        self._candidates = [
            [
                candidate_of(
                    r, self._source(r.holder, links or {}), layers, codec, allow_lossy, takes
                )
                for r in replicas
            ]
            for replicas in blocks
        ]
        for candidate in (each for replicas in self._candidates for each in replicas):
            candidate.attempts = int(candidate.record.holder in late)
        self._states = [bytearray(layers) for _ in blocks]
        self._origins: list[dict[int, str]] = [{} for _ in blocks]
        self._reasons: list[dict[int, Fault]] = [{} for _ in blocks]
        self._unresolved = 0
        self._plan(wanted, budget_octets, now)

    # --- what the caller asks --------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether every needed layer has arrived or is missing, and no request is open."""
        return not self._unresolved and not self._flights

    @property
    def octets_in_flight(self) -> int:
        return self._octets

    def poll(self, now: float) -> list[Fetch | Cancel]:
        """What to do now; to be called again after every event and at `next_time`."""
        actions: list[Fetch | Cancel] = []
        most = 1 if self._ordered else self._limits.requests
        while len(self._flights) < most and (fetch := self._next(now)) is not None:
            actions.append(fetch)
        cancels, self._cancels = self._cancels, []
        return cancels + actions

    def next_time(self, now: float) -> float | None:
        """When `poll` has something to do although nothing happened; None for never."""
        waiting = [source for source in self.sources.values() if len(source)]
        times = [source.ready_at for source in waiting]
        times += [self._late_at(flight) for flight in self._flights.values() if not flight.hedged]
        if waiting and any(s.free(self._limits, now) and not len(s) for s in self.sources.values()):
            times.append(now + self._limits.hedge_s)
        return min((time for time in times if time > now), default=None)

    def needs(self, number: int) -> bool:
        """Whether a request still has layers to bring."""
        flight = self._flights.get(number)
        return flight is not None and bool(self._left(flight))

    def awaits(self, block: int) -> bool:
        """Whether layers of a block are still to come."""
        states = self._states[block]
        return State.QUEUED in states or State.ASKED in states

    def late(self) -> set[str]:
        """The holders that did not answer, as far as they were asked."""
        return {each.holder for each in self.sources.values() if each.strikes or each.lost}

    def arrivals(self) -> list[Arrived]:
        """Where each layer came from, in order of block and layer."""
        return [
            Arrived(block, layers, source)
            for block, origins in enumerate(self._origins)
            for layers, source in runs_of(origins)
        ]

    def missing(self) -> list[Missing]:
        """What is missing and why, in order of block and layer."""
        return [
            Missing(block, layers, reason)
            for block, reasons in enumerate(self._reasons)
            for layers, reason in runs_of(reasons)
        ]

    # --- what the caller reports -----------------------------------------------------

    def arrived(self, number: int, layer: int) -> bool:
        """A layer came and was verified. True when it is to be used; False when it was not
        needed, or came from elsewhere before."""
        flight = self._flights.get(number)
        if flight is None:
            return False
        block = flight.fetch.block
        states = self._states[block]
        if states[layer] not in (State.QUEUED, State.ASKED):
            return False
        source = flight.fetch.candidate.source
        source.strikes = source.waits = source.lost = 0
        flight.brought = True
        states[layer] = State.ARRIVED
        self._origins[block][layer] = source.holder
        self._unresolved -= 1
        for other, rival in list(self._flights.items()):
            if other != number and rival.fetch.block == block and not self._left(rival):
                self._abandon(other)
        return True

    def finished(self, number: int, now: float, octets: int) -> None:
        """A request ended well; `octets` is what its answer had."""
        flight = self._flights.get(number)
        if flight is None:
            return
        candidate = flight.fetch.candidate
        candidate.source.measured(octets, now - flight.started)
        self._land(number)
        if self._left(flight):
            # an answer has every layer asked for; this one is not asked for a second time
            candidate.fault = Fault.VERIFICATION
        self._again(flight, now)

    def failed(
        self,
        number: int,
        fault: Fault,
        now: float,
        *,
        retry_after: float | None = None,
        available: list[range] | None = None,
    ) -> None:
        """A request failed. `retry_after` is in seconds; `available` are the layers a holder
        has that does not have all that were asked for."""
        flight = self._land(number)
        if flight is None:
            return
        self.counters[fault] += 1
        self._blame(flight, fault, now, retry_after, available)
        source = flight.fetch.candidate.source
        if source.fault is not None:
            for task in source.take_all():
                self._assign(task.block, task.layers, now)
        self._again(flight, now)

    def give_up(self, fault: Fault) -> None:
        """Nothing is waited for any more: what did not come is missing."""
        for number in list(self._flights):
            self._abandon(number)
        for source in self.sources.values():
            source.take_all()
        for block, states in enumerate(self._states):
            for layer, state in enumerate(states):
                if state in (State.QUEUED, State.ASKED):
                    self._miss(block, layer, fault)

    # --- planning --------------------------------------------------------------------

    def _source(self, holder: str, links: Mapping[str, Link]) -> Source:
        if holder not in self.sources:
            self.sources[holder] = Source.of(holder, links.get(holder))
        return self.sources[holder]

    def _plan(self, wanted: Sequence[Iterable[range]], budget: int | None, now: float) -> None:
        pieces: list[tuple[int, int, int, range]] = []
        left = budget
        for block, runs in enumerate(wanted):
            needed = list(runs)
            size = max((c.record.size for c in self._candidates[block]), default=0)
            per_layer = max(1, size // self._layers)
            if left is not None:
                left -= per_layer * sum(map(len, needed))
            step = max(1, self._limits.piece_octets // per_layer)
            if self._ordered:
                step = self._layers
            for run in needed:
                self._states[block][run.start : run.stop] = bytes([State.QUEUED]) * len(run)
                self._unresolved += len(run)
                if left is not None and left < 0:
                    for layer in run:
                        self._miss(block, layer, Fault.CAPACITY)
                    continue
                for start in range(run.start, run.stop, step):
                    piece = range(start, min(start + step, run.stop))
                    pieces.append((*self._order(block, piece), block, piece))
        # with equal sources all queues are then filled in order
        pieces.sort(key=lambda each: each[:2])
        for _, _, block, piece in pieces:
            self._assign(block, piece, now)

    def _order(self, block: int, layers: range) -> tuple[int, int]:
        return (block, layers.start) if self._by_block else (layers.start, block)

    def _task(self, block: int, layers: range, candidate: Candidate) -> Task:
        return Task(block, layers, candidate, self._order(block, layers))

    def _assign(self, block: int, run: range, now: float) -> None:
        """Put a run of layers into the queues of the best replicas, or say it is missing."""
        while run:
            best: tuple[tuple[int, float, str], Candidate, range] | None = None
            for candidate in self._candidates[block]:
                if not candidate.usable or not (part := candidate.part(run)):
                    continue
                finish = candidate.source.finish_us(candidate.load_us(part), now)
                key = (candidate.attempts, finish / len(part), candidate.record.holder)
                if best is None or key < best[0]:
                    best = (key, candidate, part)
            if best is None:
                self._miss(block, run.start, self._reason(block, run.start))
                run = range(run.start + 1, run.stop)
                continue
            _, candidate, part = best
            self._queue(self._task(block, part, candidate))
            run = range(part.stop, run.stop)

    def _queue(self, task: Task) -> None:
        states = self._states[task.block]
        for layer in task.layers:
            states[layer] = State.QUEUED
        task.candidate.source.push(task)

    def _reason(self, block: int, layer: int) -> Fault:
        """The most telling reason why a layer of a block cannot be had."""
        # a usable replica is there no more only because its holder said so
        faults = [
            candidate.fault or candidate.source.fault or Fault.NOT_HELD
            for candidate in self._candidates[block]
            if any(layer in held for held in candidate.record.held_layers(self._layers))
        ]
        return max(faults, key=SEVERITY.__getitem__, default=Fault.NO_REPLICA)

    def _miss(self, block: int, layer: int, reason: Fault) -> None:
        self._states[block][layer] = State.MISSING
        self._reasons[block][layer] = reason
        self._unresolved -= 1

    # --- choosing --------------------------------------------------------------------

    def _next(self, now: float) -> Fetch | None:
        if not self._unresolved:
            return None
        free = [s for s in self.sources.values() if s.free(self._limits, now)]
        for source in self.sources.values():
            self._drop_stale(source, now)
        heads = [head for source in free if (head := source.head) is not None]
        if heads:
            task = min(heads, key=lambda each: each.order)
            if self._ordered and task.layers.start != self._first_unresolved(task.block):
                return None
            return self._start(task, now, queue=task.candidate.source)
        if self._ordered:
            return None
        for source in free:
            if (fetch := self._steal(source, now) or self._hedge(source, now)) is not None:
                return fetch
        return None

    def _drop_stale(self, source: Source, now: float) -> None:
        """Queue anew what stands first but cannot be had there any more."""
        while (head := source.head) is not None:
            queued = self._queued(head)
            held = head.candidate.usable and head.candidate.part(head.layers) == head.layers
            if held and len(queued) == len(head.layers):
                return
            source.pop()
            for run, _ in runs_of(dict.fromkeys(queued, True)):
                self._assign(head.block, run, now)

    def _queued(self, task: Task) -> list[int]:
        """The layers of a task that nobody was asked for since."""
        states = self._states[task.block]
        return [layer for layer in task.layers if states[layer] == State.QUEUED]

    def _first_unresolved(self, block: int) -> int:
        states = self._states[block]
        return next(i for i, state in enumerate(states) if state in (State.QUEUED, State.ASKED))

    def _steal(self, thief: Source, now: float) -> Fetch | None:
        """Take from the end of the queue that will take longest what is done sooner here."""
        busy = [source for source in self.sources.values() if len(source) and source is not thief]
        busy.sort(key=lambda source: self._drained_us(source, now), reverse=True)
        for victim in busy:
            for index, task in enumerate(victim.last(_STEAL_LOOKS)):
                candidate = self._at(thief, task.block, task.layers)
                if candidate is None or len(self._queued(task)) < len(task.layers):
                    continue
                if candidate.attempts > task.candidate.attempts:
                    continue  # it failed here before
                if thief.finish_us(candidate.load_us(task.layers), now) < self._drained_us(
                    victim, now
                ):
                    fetch = self._start(self._task(task.block, task.layers, candidate), now)
                    if fetch is not None:
                        victim.pop(index)
                        self.counters["stolen"] += 1
                    return fetch
        return None

    def _drained_us(self, source: Source, now: float) -> float:
        """When a source will be through with everything, from now; one that is late with a
        request stays so."""
        late = max(
            (
                now - flight.started - flight.expected
                for flight in self._flights.values()
                if flight.fetch.candidate.source is source
            ),
            default=0.0,
        )
        return source.finish_us(0.0, now) + max(0.0, late) * 1e6

    def _hedge(self, helper: Source, now: float) -> Fetch | None:
        """Ask a free source, too, for what another is late with."""
        for flight in list(self._flights.values()):
            if flight.hedged or self._late_at(flight) > now or not (left := self._left(flight)):
                continue
            if flight.fetch.candidate.source is helper:
                continue
            run = range(left[0], left[-1] + 1)
            candidate = self._at(helper, flight.fetch.block, run)
            if candidate is None:
                continue
            fetch = self._start(self._task(flight.fetch.block, run, candidate), now)
            if fetch is not None:
                flight.hedged = self._flights[fetch.number].hedged = True
                self.counters["hedges"] += 1
            return fetch
        return None

    def _at(self, source: Source, block: int, run: range) -> Candidate | None:
        """A replica of the block at a source that holds the whole run."""
        for candidate in self._candidates[block]:
            if candidate.source is source and candidate.usable and candidate.part(run) == run:
                return candidate
        return None

    def _late_at(self, flight: Flight) -> float:
        limits = self._limits
        return flight.started + max(limits.hedge_s, limits.hedge_factor * flight.expected)

    def _start(self, task: Task, now: float, queue: Source | None = None) -> Fetch | None:
        """Make a request of a task, unless too much is in flight already."""
        candidate, source = task.candidate, task.candidate.source
        octets = candidate.octets(task.layers)
        if self._octets and self._octets + octets > self._limits.octets_in_flight:
            return None
        if queue is not None:
            queue.pop()
        layers = task.layers if candidate.by_layer else range(self._layers)
        fetch = Fetch(next(self._numbers), task.block, layers, candidate)
        expected = source.finish_us(candidate.load_us(task.layers), now) / 1e6
        states = self._states[task.block]
        # of a whole block, everything that is needed comes along
        needed = [i for i in layers if i in task.layers or states[i] == State.QUEUED]
        for layer in needed:
            if states[layer] == State.QUEUED:
                states[layer] = State.ASKED
        self._flights[fetch.number] = Flight(fetch, needed, now, expected, octets)
        source.active += 1
        source.outstanding += octets
        self._octets += octets
        self.counters["requests"] += 1
        return fetch

    # --- after a request -------------------------------------------------------------

    def _left(self, flight: Flight) -> list[int]:
        """What a request was made for and is still to come."""
        states = self._states[flight.fetch.block]
        return [layer for layer in flight.needed if states[layer] == State.ASKED]

    def _land(self, number: int) -> Flight | None:
        flight = self._flights.pop(number, None)
        if flight is not None:
            source = flight.fetch.candidate.source
            source.active -= 1
            source.outstanding -= flight.octets
            self._octets -= flight.octets
        return flight

    def _abandon(self, number: int) -> None:
        """End a request that nobody needs any more."""
        flight = self._land(number)
        if flight is not None and not flight.brought:
            flight.fetch.candidate.source.lost += 1
        self._cancels.append(Cancel(number))

    def _again(self, flight: Flight, now: float) -> None:
        """Queue what an ended request did not bring and no other is to bring."""
        block = flight.fetch.block
        elsewhere = {
            layer
            for other in self._flights.values()
            if other.fetch.block == block
            for layer in other.needed
        }
        left = [layer for layer in self._left(flight) if layer not in elsewhere]
        for run, _ in runs_of(dict.fromkeys(left, True)):
            self._assign(block, run, now)

    def _blame(
        self,
        flight: Flight,
        fault: Fault,
        now: float,
        retry_after: float | None,
        available: list[range] | None,
    ) -> None:
        """Remember what a failure says of the replica and of its holder."""
        candidate = flight.fetch.candidate
        source, limits = candidate.source, self._limits
        match fault:
            case Fault.NOT_HELD if available is not None:
                before = candidate.held
                candidate.held = common_ranges(before, available)
                if not candidate.held or candidate.part(flight.fetch.layers) == flight.fetch.layers:
                    # it has nothing, or says that it has what it refused
                    candidate.fault = fault
            case Fault.NOT_AUTHORIZED:
                source.fault = fault
            case Fault.BUSY:
                source.waits += 1
                wait = retry_after or limits.hedge_s
                source.ready_at = max(source.ready_at, now + wait)
                if wait > limits.max_wait_s or source.waits >= limits.attempts * limits.strikes:
                    source.fault = fault
            case Fault.VERIFICATION:
                candidate.fault = fault
                source.bad += 1
                if source.bad >= limits.bad_answers:
                    source.fault = fault
            case Fault.UNREACHABLE | Fault.TIMEOUT:
                candidate.attempts += 1
                source.strikes += 1
                source.ready_at = max(source.ready_at, now + _BACKOFF_S * 2**source.strikes)
                if candidate.attempts >= limits.attempts:
                    candidate.fault = fault
                if source.strikes >= limits.strikes:
                    source.fault = fault
            case _:
                candidate.fault = fault
