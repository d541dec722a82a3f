"""Two controllers with one journal: one leads, and when it is gone the other one does."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsp.records.records import Sampler
from tests.e2e.kvsp_support import Controllers, Model, Reader, Server, start
from tests.e2e.support import eventually
from tests.redis_server import redis_server

PROMPT = [(11 * number + 5) % 256 for number in range(22)]
COUNT = 200
GREEDY = Sampler("greedy", {}, 0, 0, True)
TOP_P = Sampler("top-p", {"p": 0.9}, 7, 0, False)


class Deployment:
    """Two controllers over one journal, an index with a holder, two instances of one model."""

    def __init__(self, folder: Path, url: str) -> None:
        self.model = Model(folder)
        self.store = Server(folder, "store", "index,holder", holder={"disk_mib": 64})
        self.pair = Controllers(
            *(
                Server(
                    folder,
                    name,
                    "controller",
                    peers={"index": self.store.base},
                    controller={"retry_ms": 100, "recovery_ms": 4000},
                    **{"controller.redis": {"url": url}},
                )
                for name in ("first", "second")
            )
        )
        settings = {
            "scopes": [str(self.model.scope_file)],
            "export_to": [self.store.base],
            "status_ttl_ms": 1500,
            "block_tokens": self.model.descriptor.block_tokens,
            "delay_ms": 20,
        }
        peers = {
            "index": self.store.base,
            "placement": [server.base for server in self.pair.servers],
        }
        made = [Server(folder, name, "instance", peers=peers, instance=settings) for name in "ab"]
        self.instances = {each.base: each for each in made}
        start(self.store, *self.pair.servers, *made)
        eventually(self._active, "two active instances")

    def _active(self) -> bool:
        status, known = self.pair.ask("GET", "instances")
        return status == 200 and sum(i["state"] == "active" for i in known["instances"]) == 2

    def begin(self, sampler: Sampler) -> tuple[Server, Reader]:
        """A session that has begun: where, and who reads it."""
        session = str(uuid.uuid4())
        scope = {
            "scope_id": self.model.scope.scope_id.hex(),
            "compat_id": self.model.descriptor.compat_id.hex(),
        }
        keys = [key.hex() for key in self.model.keys(PROMPT)]
        place = {**scope, "block_keys": keys, "tokens": len(PROMPT), "session": session}
        status, placed = self.pair.ask("POST", "place", place)
        assert status == 200, placed
        at = self.instances[placed["instance"]]
        begin = {
            **scope,
            "prompt": PROMPT,
            "max_tokens": COUNT,
            "sampler": sampler.to_dict(),
            "epoch": placed["epoch"],
        }
        assert at.ask("PUT", f"sessions/{session}", begin)[0] == 201
        reader = Reader(self.pair, session, COUNT)
        reader.read_until(8)
        return at, reader

    def is_whole(self, reader: Reader, sampler: Sampler) -> None:
        """No token is lost, repeated or another than in an undisturbed run."""
        reader.read_until(COUNT)
        assert [token.index for token in reader.delivered] == list(range(COUNT))
        assert reader.text == self.model.text(PROMPT, COUNT, sampler)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with redis_server(tmp_path) as url:
        yield Deployment(tmp_path, url)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_sessions_survive_the_loss_of_the_leader_and_of_their_instance_without_a_lost_token(
    deployment: Deployment, how: signal.Signals
) -> None:
    begun = [(*deployment.begin(sampler), sampler) for sampler in (GREEDY, TOP_P)]
    leader = deployment.pair.leader()
    leader.process.signal(how)
    successor = deployment.pair.leader(other_than=leader)
    # what the one before gave out is known: the sessions go on in the epoch after theirs
    begun[0][0].kill()
    if how is signal.SIGSTOP:
        leader.process.signal(signal.SIGCONT)
    for _, reader, sampler in begun:
        deployment.is_whole(reader, sampler)
    assert any(max(reader.epochs) == 2 for _, reader, _ in begun)
    assert all(max(reader.epochs) <= 2 for _, reader, _ in begun)
    assert successor.metric("kvsp_placement_leading") == 1
    if how is signal.SIGSTOP:
        assert leader.ask("GET", "instances")[0] == 503
        assert leader.metric("kvsp_placement_leading") == 0
        # and it can lead again
        successor.kill()
        deployment.pair.leader(other_than=successor)
    for server in (leader, successor):
        assert "Traceback" not in server.process.stderr
