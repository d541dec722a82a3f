"""`python -m tools.kvsp_rounds`: a whole KVSP deployment, of which any one process is killed.

Two controllers with one journal, in a cluster of three Redis or Valkey servers, two indexes with
one store, in another server, three holders with disks, three instances, all under load. In each
round sessions are under way, blocks are stored and read, and a process drawn by lot is killed with
SIGKILL, or stopped for longer than its lease and its TTLs last, and comes back. Whatever it was,

- every session gives the text of an undisturbed run: no token is lost, repeated or another one;
- every block that is read has the octets that were stored, and none that was acknowledged is gone;
- when all run again, every block that is held is found at both indexes. `findable_s` is the longest
  it took after the process was back, to be compared with `ttl_s`, the time to live of records;
- nobody has had an exception that it did not expect.

Prints one JSON object; a round that fails says what was wrong, and ends the run.

    python -m tools.kvsp_rounds --rounds 100 --seed 1
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvsp.names.uris import block_path, compat_path
from kvsp.records.records import Sampler
from tests.e2e.kvsp_support import Controllers, Model, Reader, Server, start
from tests.e2e.support import Process, eventually
from tests.redis_server import redis_server
from tests.redis_sites import cluster

COUNT: Final = 120
"""Output tokens of a session."""
SAMPLERS: Final = (Sampler("greedy", {}, 0, 0, True), Sampler("top-p", {"p": 0.9}, 7, 0, False))
"""One whose tokens go at once and are made again, one whose tokens wait for a checkpoint."""
RECORD_TTL_MS: Final = 6000
LEASE_MS: Final = 1500
STATUS_TTL_MS: Final = 3000
STOPPED_S: Final = 4.0
SLACK_S: Final = 60.0
"""What a machine that does other things may take besides."""
PROMPTS: Final = 24
"""Prompts whose blocks are looked at; older ones stay, and are not asked for."""
GONE: Final = (OSError, http.client.HTTPException, json.JSONDecodeError)
"""What asking a process gives that is killed meanwhile."""


class Wrong(Exception):
    """Something that may not happen did; the message says what."""


@dataclass(slots=True)
class Stored:
    """A prompt whose blocks a holder has acknowledged."""

    holder: Server
    keys: list[bytes]
    containers: list[bytes]


@dataclass(slots=True)
class Tally:
    """What happened in all rounds."""

    lost: Counter[str] = field(default_factory=Counter)
    sessions: int = 0
    moved: int = 0
    stored: int = 0
    read: int = 0
    begun_again: int = 0
    findable_s: float = 0.0


class Storm:
    """Stores and reads blocks at every holder until it is told to end."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._lot = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.stored: list[Stored] = []
        self.wrong: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join(SLACK_S)
        if self._thread.is_alive():
            raise Wrong("a request to a holder hangs")

    def _run(self) -> None:
        try:
            while not self._over.wait(0.02):
                self._store()
                for _ in range(4):
                    self._read()
        except Exception:  # noqa: BLE001  (told by the round)
            self.wrong.append(traceback.format_exc())

    def _store(self) -> None:
        world, lot = self._world, self._lot
        tokens = [lot.randrange(256) for _ in range(4 * lot.randint(1, 5))]
        at = lot.choice(world.holders)
        made = Stored(at, world.model.keys(tokens), world.model.containers(tokens))
        fields = {"Content-Type": "application/kvsp-block", "If-None-Match": "*"}
        for key, container in zip(made.keys, made.containers, strict=True):
            path = block_path(world.model.block_id(key))
            try:
                status, answer = at.ask("PUT", path, container, headers=fields, timeout=10)
            except GONE:
                return  # nobody knows whether it is there
            if status == 503:
                return
            if status not in (201, 412):
                raise Wrong(f"{at.name} answers a PUT with {status}: {answer!r}")
            fields["Kvsp-Prior-Block"] = key.hex()
            world.tally.stored += 1
        self.stored.append(made)

    def _read(self) -> None:
        if not self.stored:
            return
        chosen = self._lot.choice(self.stored[-PROMPTS:])
        place = self._lot.randrange(len(chosen.keys))
        path = block_path(self._world.model.block_id(chosen.keys[place]))
        try:
            status, octets = chosen.holder.ask("GET", path, timeout=10)
        except GONE:
            return
        if status == 503:
            return
        if status != 200:
            raise Wrong(f"{chosen.holder.name} has lost what it acknowledged: {status} {octets!r}")
        if octets != chosen.containers[place]:
            raise Wrong(f"{chosen.holder.name} gives wrong octets")
        self._world.tally.read += 1


class World:
    """The deployment."""

    def __init__(self, folder: Path, store: str, journal: str, tally: Tally, seed: int) -> None:
        self.tally = tally
        self.lot = random.Random(seed)
        self.model = model = Model(folder / "model")
        redis = {"url": store}
        self.indexes = [
            Server(folder, name, "index", **{"index.redis": redis}) for name in ("index1", "index2")
        ]
        records = {"disk_mib": 256, "record_ttl_ms": RECORD_TTL_MS}
        self.holders = [
            Server(folder, f"holder{n}", "holder", peers=self._peers(n), holder=records)
            for n in (1, 2, 3)
        ]
        leads = {"retry_ms": 100, "recovery_ms": 4000}
        self.controllers = Controllers(
            *(
                Server(
                    folder, f"controller{n}", "controller", peers=self._peers(n), controller=leads,
                    **{"controller.redis": {"url": journal, "lease_ms": LEASE_MS}},
                )
                for n in (1, 2)
            )
        )  # fmt: skip
        settings = {
            "scopes": [str(model.scope_file)],
            "export_to": [each.base for each in self.holders[:2]],
            "status_ttl_ms": STATUS_TTL_MS,
            "block_tokens": model.descriptor.block_tokens,
            "delay_ms": 10,
        }
        placement = [each.base for each in self.controllers.servers]
        self.instances = [
            Server(
                folder,
                f"instance{n}",
                "instance",
                peers={**self._peers(n), "placement": placement},
                instance=settings,
                holder={"record_ttl_ms": RECORD_TTL_MS},
            )
            for n in (1, 2, 3)
        ]
        self.every = [
            *self.indexes,
            *self.holders,
            *self.controllers.servers,
            *self.instances,
        ]
        start(*self.every)
        compat = compat_path(model.descriptor.compat_id)
        self.indexes[0].ask("PUT", compat, json.loads(model.descriptor.jcs))
        self.all_active()
        self.storm = Storm(self, seed)
        self.storm.start()

    def _peers(self, number: int) -> dict[str, Any]:
        return {"index": self.indexes[number % 2].base}

    def all_active(self) -> None:
        """A controller leads, and every instance reports to it."""

        def active() -> bool:
            status, known = self.controllers.ask("GET", "instances")
            return status == 200 and sum(
                each["state"] == "active" for each in known["instances"]
            ) == len(self.instances)

        eventually(active, "a leader that has every instance", SLACK_S)

    # --- sessions --------------------------------------------------------------------

    def begin(self, sampler: Sampler) -> tuple[list[int], Reader]:
        """A session with a checkpoint: its prompt, and who reads it."""
        for _ in range(5):
            prompt = [self.lot.randrange(256) for _ in range(self.lot.randint(5, 24))]
            session = str(uuid.UUID(int=self.lot.getrandbits(128), version=4))
            self._begin(prompt, session, sampler)
            known: dict[str, Any] = {}

            def told(known: dict[str, Any] = known, session: str = session) -> bool:
                status, answer = self.controllers.ask("GET", f"sessions/{session}")
                known |= answer if status == 200 else {}
                return bool(known.get("output_offset")) or known.get("state") == "lost"

            eventually(told, "a first checkpoint", SLACK_S)
            if known["output_offset"]:
                return prompt, Reader(self.controllers, session, COUNT)
            # its instance was too slow to report, and it had no checkpoint yet: ask again
            self.tally.begun_again += 1
        raise Wrong("five sessions after another are lost before their first checkpoint")

    def _begin(self, prompt: list[int], session: str, sampler: Sampler) -> None:
        scope = {
            "scope_id": self.model.scope.scope_id.hex(),
            "compat_id": self.model.descriptor.compat_id.hex(),
        }
        keys = [key.hex() for key in self.model.keys(prompt)]
        place = {**scope, "block_keys": keys, "tokens": len(prompt), "session": session}
        placed: dict[str, Any] = {}

        def is_placed() -> bool:
            status, answer = self.controllers.ask("POST", "place", place)
            placed.update(answer if status == 200 else {})
            return status == 200

        eventually(is_placed, "a place for a session", SLACK_S)
        (at,) = (each for each in self.instances if each.base == placed["instance"])
        begin = {
            **scope,
            "prompt": prompt,
            "max_tokens": COUNT,
            "sampler": sampler.to_dict(),
            "epoch": placed["epoch"],
        }
        status, answer = at.ask("PUT", f"sessions/{session}", begin)
        if status != 201:
            raise Wrong(f"a session does not begin: {status} {answer}")

    def check(self, prompt: list[int], reader: Reader, sampler: Sampler) -> None:
        """The session goes on to its end, with the text that it would have had."""
        reader.read_until(COUNT)
        if [token.index for token in reader.delivered] != list(range(COUNT)):
            raise Wrong("a token is lost or repeated")
        if reader.text != self.model.text(prompt, COUNT, sampler):
            raise Wrong("a session has another text than an undisturbed run")
        self.tally.sessions += 1
        self.tally.moved += max(reader.epochs) > 1

    # --- a round ---------------------------------------------------------------------

    def round(self, victim: Server | None = None) -> None:
        """Lose one process in the midst of everything, and look at what remains."""
        lot = self.lot
        victim = victim or lot.choice(self.every)
        begun = [(*self.begin(sampler), sampler) for sampler in SAMPLERS]
        time.sleep(lot.uniform(0, 0.6))
        how = lot.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
        self.tally.lost[f"{victim.roles} {how.name}"] += 1
        if how is signal.SIGSTOP:
            victim.process.signal(how)
            time.sleep(STOPPED_S)
            victim.process.signal(signal.SIGCONT)
        else:
            self._look_at(victim)
            victim.kill()
            time.sleep(lot.uniform(0, 2.0))
            victim.begin()
        for prompt, reader, sampler in begun:
            self.check(prompt, reader, sampler)
        victim.ready()
        back = time.monotonic()
        self.findable(back)
        self.all_active()
        for server in self.every:
            self._look_at(server)

    def findable(self, since: float) -> None:
        """Every block that is held is found at both indexes."""
        for stored in self.storm.stored[-PROMPTS:]:
            for index in self.indexes:

                def found(stored: Stored = stored, index: Server = index) -> bool:
                    return self.model.lookup(index, stored.keys) == len(stored.keys)

                eventually(found, f"{stored.holder.name}'s blocks at {index.name}", SLACK_S)
        self.tally.findable_s = max(self.tally.findable_s, time.monotonic() - since)
        if self.storm.wrong:
            raise Wrong(self.storm.wrong[0])

    def _look_at(self, server: Server) -> None:
        process = server.process
        if process.popen.poll() is not None:
            raise Wrong(f"{server.name} has ended by itself: {process.stderr[-2000:]}")
        if "Traceback" in process.stderr:
            raise Wrong(f"{server.name} has had an exception: {process.stderr[-4000:]}")


def rounds(
    count: int, seed: int, kept: Path | None = None, roles: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The result of so many rounds; the first ones lose a process of each of `roles`."""
    tally, began = Tally(), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kvsp"))
    wrong, done = None, 0
    try:
        with ExitStack() as stack:
            try:
                store = stack.enter_context(redis_server(folder))
                journal = stack.enter_context(cluster(folder)).url
                world = World(folder, store, journal, tally, seed)
                for role in (*roles, *("" for _ in range(count - len(roles)))):
                    able = [each for each in world.every if each.roles == role]
                    world.round(world.lot.choice(able) if able else None)
                    done += 1
                world.storm.end()
                world.findable(time.monotonic())
            except Exception as error:  # noqa: BLE001  (told like what it looks for)
                told = isinstance(error, Wrong | AssertionError)
                wrong = str(error) if told else traceback.format_exc()
            finally:
                while Process.running:
                    Process.running.pop().kill()
    finally:
        if wrong is not None and kept is not None:
            shutil.copytree(folder, kept, dirs_exist_ok=True, ignore=_no_sockets)
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "rounds": done,
        "seed": seed,
        "wrong": wrong,
        "lost": dict(sorted(tally.lost.items())),
        "sessions": tally.sessions,
        "moved": tally.moved,
        "begun_again": tally.begun_again,
        "blocks_stored": tally.stored,
        "blocks_read": tally.read,
        "findable_s": round(tally.findable_s, 2),
        "ttl_s": RECORD_TTL_MS / 1000,
        "seconds": round(time.monotonic() - began, 1),
    }


def _no_sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_socket()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="where the files of a run that fails go")
    options = parser.parse_args()
    result = rounds(options.rounds, options.seed, options.keep)
    print(json.dumps(result))
    sys.exit(1 if result["wrong"] else 0)


if __name__ == "__main__":
    main()
