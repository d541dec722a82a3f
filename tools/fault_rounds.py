"""`python -m tools.fault_rounds`: rounds of real processes to which faults happen, drawn by lot.

Each round has a publisher, which serves or pushes, an origin relay with a disk tier, an edge relay
below it, in some with a directory as well (where `redis-server` is installed), networks with up to
10 % loss between these and before consumers. Meanwhile publishers, relays and the directory are
killed or stopped and come back, and the disk is full, hangs, tears what is written or cannot be
read, or its files are damaged or gone. Whatever happens,

- a consumer that ends with 0 has every octet as it was published, and any other has left no file;
- nobody takes longer than its time-out, and nobody says what nobody may say here (wrong usage, not
  authorized, verification failed), or "not found" of what was there all the time;
- a publisher that said "stored" told the truth: what is stored on the disk outlives `kill -9`;
- when all is well again what is published is had, and relays end with 0 when they are asked to.

Prints one JSON object; a round that fails says with which seed it is repeated.

    python -m tools.fault_rounds --rounds 200 --seed 1
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from relay.service.self_signed import self_signed_certificate
from tests.e2e.support import BIN, Process, Relay, make_cache, path_to, relay
from tools.faulty_disk import STATES, VARIABLE

TIMEOUT: Final = 20.0
"""Of consumers and of publishers that push, in seconds."""
SLACK: Final = 15.0
"""How long a program may take to start and to end besides, on a machine that does other things."""
CALM_TIMEOUT: Final = 40.0
"""When all is well again; what a relay had suspended, or had backed off from, is over by then."""
SPAN: Final = 4.0
"""Seconds in which faults begin."""
NEVER: Final = {2: "wrong usage", 4: "not authorized", 5: "verification failed"}
LOSSES: Final = (0.0, 0.01, 0.05, 0.1)
LOST: Final = ("publisher", "origin", "edge", "directory")
"""What is killed or stopped."""
BAD: Final = ("damage", "foreign", "emptied", *STATES)
"""What the disk does. It takes no process away: what is published is found at all times."""


class Wrong(Exception):
    """Something that may not happen did; the message says what."""


@dataclass(slots=True)
class Tally:
    """What happened in all rounds."""

    exits: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Program:
    """A consumer, or a publisher that pushes: when it has to have ended, and where its file is."""

    process: Process
    deadline: float
    out: Path | None


class Place:
    """A relay that comes back at its address after it was killed."""

    def __init__(
        self, world: Round, name: str, program: tuple[str | Path, ...], *options: str | Path
    ):
        self._world, self._name, self._program, self._options = world, name, program, options
        self._starts = 0
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Start it, at the address that it had."""
        self._starts += 1
        world = self._world
        self.running: Relay = world.stack.enter_context(
            relay(
                world.folder / f"{self._name}{self._starts}",
                *("--listen", self.address, "--self-signed", world.folder / "tls"),
                *self._options,
                program=self._program,
                self_signed=False,
            )
        )
        self.running.cafile = world.cafile
        self.address = self.running.url.removeprefix("moqt://")

    def kill(self) -> None:
        self.check()
        self.running.process.kill()

    def check(self) -> None:
        """It runs, unless it was killed, and has had no exception that it did not expect."""
        process = self.running.process
        if process.popen.poll() is not None:
            raise Wrong(f"{self._name} has ended by itself: {process.stderr[-2000:]}")
        if "Traceback" in process.stderr:
            raise Wrong(f"{self._name} has had an exception: {process.stderr[-4000:]}")


class Round:
    """One world, and what happens to it."""

    def __init__(self, folder: Path, seed: int, tally: Tally, stack: ExitStack) -> None:
        self.folder, self.tally, self.stack = folder, tally, stack
        self.lot = lot = random.Random(seed)
        self.cache = make_cache(
            folder / "cache", layers=lot.choice((4, 8)), tokens=lot.choice((16, 64)),
            head_dim=lot.choice((16, 128)), seed=seed,
        )  # fmt: skip
        self.cafile = self_signed_certificate(folder / "tls", "127.0.0.1").cert
        self.pushes = lot.random() < 0.4
        self.meshed = lot.random() < 0.4 and shutil.which("redis-server") is not None
        self.loss = lot.choice(LOSSES)
        self.disk = folder / "disk"
        self.disk_said = folder / "disk-state"
        self.lost: set[str] = set()
        """What was killed or stopped so far."""
        self.damaged = False
        """Files of the disk tier were changed, or could not be read: they may be misses."""
        self.stored: str | None = None
        """What the publisher that pushed was told."""
        self.programs: list[Program] = []
        self.directory: Process | None = None

    # -- the processes -------------------------------------------------------------------

    def start(self) -> None:
        """The relays, the network and the publisher."""
        found: tuple[str | Path, ...] = ()
        if self.meshed:
            self._start_directory()
            found = (
                "--directory",
                f"unix://{self.folder / 'socket'}",
                "--mesh-cafile",
                self.cafile,
            )
        faulty = ("env", f"{VARIABLE}={self.disk_said}", sys.executable, "-m", "tools.faulty_disk")
        self.origin = Place(self, "origin", faulty, "--cache-dir", self.disk, *found)
        # what comes from there comes through the network
        found += ("--upstream", self._lossy(self.origin, "above").url)
        found += ("--upstream-cafile", self.cafile)
        program = (str(BIN / "kvcs-relay"),)
        self.edge = Place(self, "edge", program, *found)
        self.near = self._near(self.origin)
        self.far = self._lossy(self.edge, "far")
        options = ("--push", "--json") if self.pushes else ()
        self.publisher = self.near.publish(self.cache, *options)
        if not self.pushes:
            self.publisher.wait_for("publishing")
            if self.meshed:
                time.sleep(1)  # until the directory has been told

    def _near(self, place: Place) -> Relay:
        """It, for clients: they start in one folder, whatever becomes of the relay."""
        seen = Relay(place.running.process, self.folder)
        seen.url, seen.cafile = place.running.url, self.cafile
        return seen

    def _lossy(self, place: Place, name: str) -> Relay:
        """It, for who is behind a network."""
        seen, folder = self._near(place), self.folder / name
        folder.mkdir()
        self.stack.enter_context(path_to(seen, folder, "--loss", f"{self.loss}", "--delay", "5ms"))
        return seen

    def _start_directory(self) -> None:
        options = ("--port", "0", "--unixsocket", self.folder / "socket", "--save", "")
        self.directory = Process(
            self.folder, "directory", "redis-server", *options, "--dir", self.folder
        )
        deadline = time.monotonic() + SLACK
        while not (self.folder / "socket").exists() and time.monotonic() < deadline:
            time.sleep(0.02)

    # -- what happens --------------------------------------------------------------------

    def run(self) -> None:
        """All of it. Raises Wrong."""
        self.start()
        lot, began = self.lot, time.monotonic()
        if self.pushes:
            self._watch(self.publisher, TIMEOUT + 30, None)
        todo: list[tuple[float, str]] = []
        for _ in range(lot.randint(1, 3)):
            begins = lot.uniform(0, SPAN)
            fault = lot.choice((*LOST, *BAD))
            if fault in LOST:
                fault = f"{lot.choice(('kill', 'stop'))} {fault}"
                after = "back" if fault.startswith("kill") else "go on"
                todo.append((begins + lot.uniform(0.2, 3), f"{after} {fault.split()[1]}"))
            elif fault in STATES:
                todo.append((begins + lot.uniform(0.2, 8), "well"))
            todo.append((begins, fault))
        todo += [(lot.uniform(0, SPAN), "consume") for _ in range(lot.randint(1, 3))]
        for at, what in sorted(todo):
            time.sleep(max(0.0, began + at - time.monotonic()))
            self.happens(what)
        for each in self.programs:
            self._ended(each)
        self.all_is_well()

    def happens(self, what: str) -> None:
        """One thing of the list."""
        self.tally.faults[what] += 1
        verb, _, target = what.rpartition(" ")
        if what == "consume":
            self._consume(TIMEOUT)
        elif what == "damage":
            self._damage()
        elif what == "foreign":
            for name in ("notes.txt", "0.track", f"{'0' * 40}.1.track", f"{'1' * 40}.2.part"):
                (self.disk / name).write_bytes(self.lot.randbytes(300))
        elif what == "emptied":
            self.damaged = True
            for file in self.disk.glob("*.track"):
                file.unlink(missing_ok=True)  # it may be evicted at this moment
        elif what == "well" or what in STATES:
            self.damaged |= what in ("unreadable", "hung")
            self.disk_said.write_text(what)
        elif target in ("origin", "edge"):
            self._relay(verb, self.origin if target == "origin" else self.edge, target)
        elif target == "publisher":
            self._signal(verb, self.publisher, target)
        elif self.directory is not None:
            if verb == "back" and self.directory.popen.poll() is not None:
                self._start_directory()
            else:
                self._signal(verb, self.directory, target)

    def _relay(self, verb: str, place: Place, name: str) -> None:
        process = place.running.process
        if verb == "back" and process.popen.poll() is not None:
            place.start()
        elif process.popen.poll() is None:
            if verb == "kill":
                self.lost.add(name)
                process.signal(signal.SIGCONT)
                place.kill()
            else:
                self._signal(verb, process, name)

    def _signal(self, verb: str, process: Process, name: str) -> None:
        if process.popen.poll() is not None:
            return
        if verb in ("kill", "stop"):
            self.lost.add(name)
        if verb == "kill":
            process.kill()
        else:
            process.signal(signal.SIGSTOP if verb == "stop" else signal.SIGCONT)

    def _damage(self) -> None:
        files = sorted(self.disk.glob("*.track"))
        if files:
            self.damaged = True
            file = self.lot.choice(files)
            octets = bytearray(file.read_bytes())
            if self.lot.random() < 0.3:
                del octets[self.lot.randrange(len(octets)) :]
            else:
                octets[self.lot.randrange(len(octets))] ^= 0xFF
            file.write_bytes(octets)

    def _consume(self, timeout: float) -> Program:
        out = self.folder / f"out{len(self.programs)}"
        process = self.far.subscribe(
            self.cache, out, "--timeout", f"{timeout:g}", "--again-within", f"{timeout / 2:g}",
            name=out.name,
        )  # fmt: skip
        return self._watch(process, timeout, out)

    def _watch(self, process: Process, timeout: float, out: Path | None) -> Program:
        program = Program(process, time.monotonic() + timeout + SLACK, out)
        self.programs.append(program)
        return program

    # -- what may not be -----------------------------------------------------------------

    def _ended(self, program: Program) -> int:
        """How it has ended. Raises Wrong when it may not have."""
        process, out = program.process, program.out
        try:
            code = process.wait(max(0.1, program.deadline - time.monotonic()))
        except AssertionError as error:
            raise Wrong(f"past its time-out: {error}") from None
        said = f"{process.name} ended with {code}: {process.stderr[-2000:]}"
        if code == -signal.SIGKILL and out is None:
            return code  # we did
        self.tally.exits[f"{'push' if out is None else 'consumer'} {code}"] += 1
        if "Traceback" in process.stderr or code < 0 or code in NEVER:
            raise Wrong(f"{NEVER.get(code, 'an exception')}: {said}")
        if code and not process.stderr.strip():
            raise Wrong(f"no word of why: {said}")
        if out is None:
            if code == 0:
                self.stored = process.json()["stored"]
            return code
        if (code == 0) is not out.exists():
            raise Wrong(f"a file that should not be there, or is not: {said}")
        if code == 0:
            try:
                self.cache.check(out)
            except AssertionError as error:
                raise Wrong(f"wrong octets were delivered: {error!r}") from None
        if code == 3 and not self.pushes and not self.lost:
            raise Wrong(f"it was there all the time: {said}")
        return code

    def all_is_well(self) -> None:
        """Nothing happens any more: what is promised is had."""
        self.disk_said.write_text("")
        for place in (self.origin, self.edge):
            if place.running.process.popen.poll() is not None:
                place.start()
        if self.pushes and self.stored == "disk":
            self.origin.kill()  # what it has in memory is not what was promised
            self.origin.start()
        promised = (
            (self.stored == "disk" and not self.damaged)
            or (self.stored == "memory" and "origin" not in self.lost)
            or (not self.pushes and self.publisher.popen.poll() is None)
        )
        deadline = time.monotonic() + CALM_TIMEOUT
        while True:
            # a consumer looks once; an edge finds its way back within seconds
            code = self._ended(self._consume(TIMEOUT))
            if code == 0 or not promised:
                break
            if time.monotonic() > deadline:
                last = self.programs[-1].process
                raise Wrong(f"all is well, and it is not had: {code}, {last.stderr}")
            time.sleep(0.5)
        for place in (self.edge, self.origin):
            place.check()
            process = place.running.process
            process.signal(signal.SIGTERM)
            if process.wait(SLACK) != 0:
                raise Wrong(f"a relay that was asked to stop: {process.stderr[-2000:]}")


def one(seed: int, tally: Tally, kept: Path | None = None) -> str | None:
    """One round: what was wrong in it. Its files go to `kept` then, if that is given."""
    folder = Path(tempfile.mkdtemp(prefix="faults"))
    wrong = None
    try:
        with ExitStack() as stack:
            try:
                Round(folder, seed, tally, stack).run()
            except Wrong as error:
                wrong = str(error)
            except Exception:  # noqa: BLE001  (the round itself: told like what it looks for)
                wrong = traceback.format_exc()
    finally:
        while Process.running:
            process = Process.running.pop()
            process.kill()
        if wrong is not None and kept is not None:
            shutil.copytree(folder, kept / str(seed), dirs_exist_ok=True, ignore=_no_sockets)
        shutil.rmtree(folder, ignore_errors=True)
    return wrong


def _no_sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_socket()]


def rounds(count: int, seed: int, kept: Path | None = None) -> dict[str, Any]:
    """The result of so many rounds, of this seed and those after it."""
    tally, began = Tally(), time.monotonic()
    failed: dict[int, str] = {}
    for each in range(seed, seed + count):
        wrong = one(each, tally, kept)
        if wrong is not None:
            failed[each] = wrong
            again = f"python -m tools.fault_rounds --rounds 1 --seed {each}"
            print(f"wrong in round {each} (again: {again}): {wrong}", file=sys.stderr, flush=True)
    return {
        "rounds": count,
        "seed": seed,
        "failed": {seed: wrong[:300] for seed, wrong in failed.items()},
        "happened": dict(sorted(tally.faults.items())),
        "ended": dict(sorted(tally.exits.items())),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; others follow")
    parser.add_argument("--keep", type=Path, help="where the files of rounds that fail go")
    options = parser.parse_args()
    result = rounds(options.rounds, options.seed, options.keep)
    print(json.dumps(result))
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
