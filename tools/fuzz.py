"""Feed broken octets to everything that reads octets: `python -m tools.fuzz --minutes 5`.

Inputs are mutations of golden vectors and of recorded conversations. A finding is an exception
that is not a typed refusal, a broken promise of the target, an input that takes too long, one that
costs more calls or memory than its octets are worth (`tools.fuzz_budget`), or memory that grows
without end. Each finding is written to a file together with the command that
runs it again; the exit code is then 1. One seed makes one sequence of inputs.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.fuzz_budget import overspent
from tools.fuzz_targets import TARGETS, Case, Target

SLICE_SECONDS = 2.0
"""How long one target runs before the next has its turn."""
MAX_STEPS = 80
MAX_OCTETS = 20_000
GROWTH_EVERY = 256
"""Inputs between two looks at the memory."""
STEP_OCTETS = 16
"""What a step is worth besides its octets: it came in a packet."""
COST_EVERY = 32
"""Every so many inputs, one is run again to see what it costs."""
COST_OCTETS = 1000
"""Inputs of the corpus that are so long are run again in any case."""

INTERESTING = (
    b"\x00",
    b"\x01",
    b"\x3f",
    b"\x7f",
    b"\x80\x00",
    b"\xbf\xff",
    b"\xc0\x00\x00",
    b"\xff" * 9,
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xff\x00\x00\x00\x00\x00\x00\x00\x00",
    b"\x7f\xff",
    b"\xff\xff",
)
"""Lengths and numbers at the edges of their encodings."""


class Hang(BaseException):
    """An input took longer than it may. Nothing on the way may take it for an ordinary error."""


# -- mutation ----------------------------------------------------------------------------


class Mutator:
    """Makes cases from a corpus. `random` decides everything."""

    def __init__(self, target: Target, corpus: list[Case], source: random.Random) -> None:
        self.target = target
        self.corpus = corpus
        self.random = source
        self.pieces = sorted({octets for case in corpus for _, octets in case if octets})
        self._octets: tuple[Callable[[bytearray], None], ...] = (
            self._flip,
            self._flip,
            self._set,
            self._lie,
            self._lie,
            self._cut,
            self._drop,
            self._repeat,
            self._insert,
            self._splice,
        )
        self._steps: tuple[Callable[[Case], None], ...] = (
            self._swap_steps,
            self._repeat_step,
            self._drop_step,
            self._split_step,
            self._split_step,
            self._move_step,
            self._borrow_step,
            self._end_early,
        )

    def case(self) -> Case:
        case = list(self.random.choice(self.corpus))
        for _ in range(self.random.randint(1, 4)):
            if self.random.random() < 0.3 and case:
                self.random.choice(self._steps)(case)
            elif case:
                self._change(case)
        return case[:MAX_STEPS]

    def _change(self, case: Case) -> None:
        index = self.random.randrange(len(case))
        where, octets = case[index]
        changed = bytearray(octets)
        self.random.choice(self._octets)(changed)
        case[index] = where, bytes(changed[:MAX_OCTETS])

    def _at(self, data: bytearray) -> int:
        # Heads decide more than tails.
        if self.random.random() < 0.5:
            return min(len(data), self.random.randrange(16))
        return self.random.randint(0, len(data))

    # octets

    def _flip(self, data: bytearray) -> None:
        if data:
            data[min(self._at(data), len(data) - 1)] ^= 1 << self.random.randrange(8)

    def _set(self, data: bytearray) -> None:
        if data:
            data[min(self._at(data), len(data) - 1)] = self.random.randrange(256)

    def _lie(self, data: bytearray) -> None:
        """Another number, a length perhaps, in the place of one or two octets."""
        at = self._at(data)
        data[at : at + self.random.randint(0, 2)] = self.random.choice(INTERESTING)

    def _cut(self, data: bytearray) -> None:
        del data[self._at(data) :]

    def _drop(self, data: bytearray) -> None:
        at = self._at(data)
        del data[at : at + self.random.randint(1, 8)]

    def _repeat(self, data: bytearray) -> None:
        at = self._at(data)
        piece = data[at : at + self.random.randint(1, 32)]
        data[at:at] = piece * self.random.choice((1, 1, 1, 2, 50))

    def _insert(self, data: bytearray) -> None:
        at = self._at(data)
        data[at:at] = self.random.randbytes(self.random.randint(1, 6))

    def _splice(self, data: bytearray) -> None:
        if self.pieces:
            other = self.random.choice(self.pieces)
            data[self._at(data) :] = other[self.random.randint(0, len(other)) :]

    # steps

    def _pick(self, case: Case) -> int:
        return self.random.randrange(len(case))

    def _swap_steps(self, case: Case) -> None:
        a, b = self._pick(case), self._pick(case)
        case[a], case[b] = case[b], case[a]

    def _repeat_step(self, case: Case) -> None:
        case.insert(self._pick(case), case[self._pick(case)])

    def _drop_step(self, case: Case) -> None:
        del case[self._pick(case)]

    def _split_step(self, case: Case) -> None:
        index = self._pick(case)
        where, octets = case[index]
        cut = self.random.randint(0, len(octets))
        first = where.replace("fin", "data")
        case[index : index + 1] = [(first, octets[:cut]), (where, octets[cut:])]

    def _move_step(self, case: Case) -> None:
        index = self._pick(case)
        where, octets = case[index]
        case[index] = self.target.moved(where, self.random.choice), octets

    def _borrow_step(self, case: Case) -> None:
        other = self.random.choice(self.corpus)
        if other:
            case.insert(self._pick(case), self.random.choice(other))

    def _end_early(self, case: Case) -> None:
        del case[self._pick(case) + 1 :]


# -- running one input -------------------------------------------------------------------


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Hang after `seconds`, where the system has interval timers."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def over(signum: int, frame: object) -> None:
        raise Hang(f"longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def resident() -> int:
    """Octets of memory in use, or at their highest where only that is known."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        return pages * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def failure_of(target: Target, case: Case, seconds: float) -> str | None:
    """Why `case` is a finding; None when all is well."""
    try:
        with time_limit(seconds):
            target.run(case)
    except KeyboardInterrupt:
        raise
    except Hang as hang:
        return f"hang: {hang}\n{traceback.format_exc()}"
    except BaseException:  # noqa: BLE001  whatever comes out is what is looked for
        return traceback.format_exc()
    return None


def cost_of(target: Target, case: Case, seconds: float) -> str | None:
    """What `case`, which is no finding otherwise, costs too much of; None when it is cheap."""
    octets = sum(len(octets) + STEP_OCTETS for _, octets in case)
    try:
        with time_limit(10 * seconds):  # counting is slow
            return overspent(lambda: target.run(case), octets, target.budget)
    except Hang as hang:
        return f"hang: {hang}\n{traceback.format_exc()}"


def shrunk(target: Target, case: Case, seconds: float, budget: float = 5.0) -> Case:
    """A shorter case that still fails, found by leaving steps and octets out."""
    until = time.monotonic() + budget
    size = max(1, len(case) // 2)
    while size and time.monotonic() < until:
        for start in range(0, len(case), size):
            candidate = case[:start] + case[start + size :]
            if len(candidate) < len(case) and failure_of(target, candidate, seconds):
                case = candidate
                break
        else:
            size //= 2
    return case


# -- files -------------------------------------------------------------------------------


def write_case(path: Path, target: str, case: Case, reason: str) -> None:
    lines = [f"target {target}", *(f"{where or '-'} | {octets.hex()}" for where, octets in case)]
    command = f"# python -m tools.fuzz --replay {path}"
    comment = [f"# {text}" for text in reason.rstrip().splitlines()]
    path.write_text("\n".join([command, *comment, *lines]) + "\n", "utf-8")


def read_case(path: Path) -> tuple[str, Case]:
    """The target and the case of a file that `write_case` wrote. Raises ValueError."""
    lines = [text for text in path.read_text("utf-8").splitlines() if text and text[0] != "#"]
    word, _, target = lines[0].partition(" ") if lines else ("", "", "")
    if word != "target" or target not in TARGETS:
        raise ValueError(f"{path} does not begin with 'target' and one of {', '.join(TARGETS)}")
    case: Case = []
    for text in lines[1:]:
        where, bar, octets = text.partition(" | ")
        if not bar:
            raise ValueError(f"{path}: {text!r} is no step ('place | octets in hexadecimal')")
        case.append(("" if where == "-" else where, bytes.fromhex(octets)))
    return target, case


# -- the loop ----------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    runs: int = 0
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one worker is to do."""

    targets: tuple[str, ...]
    seconds: float
    seed: int
    runs: int | None
    """Inputs for each target; None: as many as the time allows."""
    input_seconds: float
    growth: int
    output: Path
    max_findings: int = 10


class Worker:
    """Runs the targets in turn until the time is over."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tallies = {name: Tally() for name in plan.targets}
        self._running: dict[str, tuple[Target, Mutator]] = {}
        self._grown: dict[str, int] = {}
        self._from = 0
        """What the process had when the target at work had kept nothing."""

    def run(self) -> dict[str, Tally]:
        end = time.monotonic() + self.plan.seconds
        waiting = list(self.plan.targets)
        while waiting:
            name = waiting.pop(0)
            if self._turn(name, min(end, time.monotonic() + SLICE_SECONDS)):
                waiting.append(name)
            if time.monotonic() >= end and self.plan.runs is None:
                break
        return self.tallies

    def _turn(self, name: str, until: float) -> bool:
        """One slice of one target; False when it has had all its inputs."""
        tally, plan = self.tallies[name], self.plan
        began = time.monotonic()
        self._from = resident() - self._grown.get(name, 0)
        if name not in self._running:
            target = TARGETS[name]()
            source = random.Random(f"{plan.seed} {name}")
            self._running[name] = target, Mutator(target, target.corpus(), source)
            for case in self._running[name][1].corpus:
                octets = sum(len(octets) for _, octets in case)
                self._one(name, case, count=octets >= COST_OCTETS)
        mutator = self._running[name][1]
        while len(tally.findings) < plan.max_findings:
            if plan.runs is not None and tally.runs >= plan.runs:
                break
            if plan.runs is None and time.monotonic() >= until:
                break
            self._one(name, mutator.case())
        self._grown[name] = resident() - self._from
        tally.seconds += time.monotonic() - began
        enough = plan.runs is not None and tally.runs >= plan.runs
        return not enough and len(tally.findings) < plan.max_findings

    def _one(self, name: str, case: Case, *, count: bool = False) -> None:
        target, tally = self._running[name][0], self.tallies[name]
        tally.runs += 1
        reason = failure_of(target, case, self.plan.input_seconds)
        if reason is None and (count or tally.runs % COST_EVERY == 0):
            before = resident()
            reason = cost_of(target, case, self.plan.input_seconds)
            self._from += resident() - before  # tracemalloc keeps some KiB each time it is stopped
        if reason is None and tally.runs % GROWTH_EVERY == 0:
            reason = self._growth()
        if reason is not None:
            self._found(name, case, reason)

    def _growth(self) -> str | None:
        now = resident()
        grown = now - self._from
        if grown <= self.plan.growth:
            return None
        self._from = now
        return f"memory grew by {grown >> 20} MiB over the inputs up to this one"

    def _found(self, name: str, case: Case, reason: str) -> None:
        last = reason.strip().splitlines()[-1]
        if not reason.startswith(("hang", "memory", "cost")):
            case = shrunk(self._running[name][0], case, self.plan.input_seconds)
        self.plan.output.mkdir(parents=True, exist_ok=True)
        number = len(self.tallies[name].findings) + 1
        path = self.plan.output / f"{name}-{self.plan.seed}-{number}.case"
        write_case(path, name, case, reason)
        self.tallies[name].findings.append(f"{last}\n    python -m tools.fuzz --replay {path}")


def _work(plan: Plan) -> dict[str, Tally]:
    # A relay warns of what every input did wrong.
    log = logging.getLogger("relay")
    log.addFilter(_errors)
    gc.collect()
    gc.freeze()  # what is here already is not looked through for each input that is measured
    try:
        return Worker(plan).run()
    finally:
        gc.unfreeze()
        log.removeFilter(_errors)


def _errors(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def fuzz(plan: Plan, jobs: int = 1) -> dict[str, Tally]:
    """Run `plan`, on `jobs` processes with seeds that follow one another."""
    if jobs == 1:
        return _work(plan)
    fields: dict[str, Any] = {name: getattr(plan, name) for name in Plan.__slots__}
    plans = [Plan(**{**fields, "seed": plan.seed + job}) for job in range(jobs)]
    total = {name: Tally() for name in plan.targets}
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for tallies in pool.map(_work, plans):
            for name, tally in tallies.items():
                total[name].runs += tally.runs
                total[name].seconds += tally.seconds
                total[name].findings += tally.findings
    return total


def report(tallies: dict[str, Tally]) -> int:
    """Print the counts; the number of findings."""
    print(f"{'target':<10} {'inputs':>10} {'per second':>11} {'findings':>9}")
    for name, tally in tallies.items():
        rate = tally.runs / tally.seconds if tally.seconds else 0
        print(f"{name:<10} {tally.runs:>10,} {rate:>11,.0f} {len(tally.findings):>9}")
    findings = [(name, text) for name, tally in tallies.items() for text in tally.findings]
    for name, text in findings:
        print(f"{name}: {text}")
    return len(findings)


def replay(path: Path, seconds: float) -> int:
    name, case = read_case(path)
    target = TARGETS[name]()
    reason = failure_of(target, case, seconds) or cost_of(target, case, seconds)
    print(reason or f"{name}: all is well")
    return int(reason is not None)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fuzz", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="how long, over all targets")
    parser.add_argument("--target", default="all", help=f"all, or some of: {', '.join(TARGETS)}")
    parser.add_argument("--seed", type=int, default=None, help="repeat a run; default: random")
    parser.add_argument("--runs", type=int, default=None, help="inputs for each target, no time")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--input-seconds", type=float, default=5.0, help="longer is a hang")
    parser.add_argument("--growth-mib", type=int, default=200, help="more memory is a finding")
    parser.add_argument("--output", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--replay", type=Path, help="run the one case in this file")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        try:
            return replay(options.replay, options.input_seconds)
        except (OSError, ValueError) as error:
            parser.error(f"cannot replay: {error}")
    names = tuple(TARGETS) if options.target == "all" else tuple(options.target.split(","))
    for name in names:
        if name not in TARGETS:
            parser.error(f"no target {name!r}; there are: {', '.join(TARGETS)}")
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    plan = Plan(
        targets=names,
        seconds=options.minutes * 60,
        seed=seed,
        runs=options.runs,
        input_seconds=options.input_seconds,
        growth=options.growth_mib << 20,
        output=options.output,
    )
    return int(report(fuzz(plan, options.jobs)) > 0)


if __name__ == "__main__":
    sys.exit(main())
