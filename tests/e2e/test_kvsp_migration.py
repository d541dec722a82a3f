"""An instance is killed in the middle of its sentences; another one finishes them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvsp.records.records import Sampler
from tests.e2e.kvsp_support import BLOCK_TOKENS, Model, Reader, Server, start
from tests.e2e.support import eventually

PROMPT = [(11 * number + 5) % 256 for number in range(22)]
GREEDY = Sampler("greedy", {}, 0, 0, True)
TOP_P = Sampler("top-p", {"p": 0.9}, 7, 0, False)


class Deployment:
    """A controller with index and holder, and two instances of one model."""

    def __init__(self, folder: Path, model: Model, engine: Mapping[str, Any]) -> None:
        self.model = model
        self.core = Server(
            folder,
            "core",
            "index,controller,holder",
            controller={"retry_ms": 100},
            holder={"disk_mib": 64},
        )
        settings = {
            "scopes": [str(model.scope_file)],
            "export_to": [self.core.base],
            "status_ttl_ms": 1500,
            "block_tokens": model.descriptor.block_tokens,
            **engine,
        }
        peers = {"index": self.core.base, "placement": self.core.base}
        made = [Server(folder, name, "instance", peers=peers, instance=settings) for name in "ab"]
        self.instances = {each.base: each for each in made}
        start(self.core, *made)
        eventually(self._active, "two active instances")

    def _active(self) -> bool:
        _, known = self.core.ask("GET", "instances")
        return sum(each["state"] == "active" for each in known["instances"]) == 2

    def place(self, session: str) -> tuple[Server, int]:
        """Where a session is to begin, and in which epoch."""
        place = {
            "scope_id": self.model.scope.scope_id.hex(),
            "compat_id": self.model.descriptor.compat_id.hex(),
            "block_keys": [key.hex() for key in self.model.keys(PROMPT)],
            "tokens": len(PROMPT),
            "session": session,
        }
        status, placed = self.core.ask("POST", "place", place)
        assert status == 200, placed
        return self.instances[placed["instance"]], placed["epoch"]

    def begin(self, at: Server, session: str, epoch: int, count: int, sampler: Sampler) -> None:
        begin = {
            "scope_id": self.model.scope.scope_id.hex(),
            "compat_id": self.model.descriptor.compat_id.hex(),
            "prompt": PROMPT,
            "max_tokens": count,
            "sampler": sampler.to_dict(),
            "epoch": epoch,
        }
        status, answer = at.ask("PUT", f"sessions/{session}", begin)
        assert status == 201, answer

    def _other(self, than: Server) -> Server:
        (other,) = (each for each in self.instances.values() if each is not than)
        return other

    def survives(self, samplers: Sequence[Sampler], count: int) -> None:
        """Kill the instance of a session for each sampler; another one completes all texts."""
        sessions = [str(uuid.uuid4()) for _ in samplers]
        # placed before any has begun, so that all go to the same instance
        placed = [self.place(session) for session in sessions]
        ((first, _),) = {(at, epoch) for at, epoch in placed}
        for (_, epoch), session, sampler in zip(placed, sessions, samplers, strict=True):
            self.begin(first, session, epoch, count, sampler)
        readers = [Reader(self.core, session, count) for session in sessions]
        for reader in readers:
            reader.read_until(8)
        first.kill()
        for reader, sampler in zip(readers, samplers, strict=True):
            reader.read_until(count)
            assert [token.index for token in reader.delivered] == list(range(count))
            assert reader.text == self.model.text(PROMPT, count, sampler)
            assert len(reader.epochs) >= 2
        second = self._other(first)
        loaded = second.metric('kvsp_instance_blocks_events_total{event="fetched"}')
        # the prompt's blocks at least: they were not computed again, nobody had the prompt
        assert loaded >= len(PROMPT) // self.model.descriptor.block_tokens
        self._refuses_what_is_old(second, sessions[0], readers[0])
        self._outlives_its_controller(second)
        assert "Traceback" not in second.process.stderr

    def _refuses_what_is_old(self, instance: Server, session: str, reader: Reader) -> None:
        """Who still follows the first epoch is told so, and nothing else happens."""
        checkpoint = {
            "session": session,
            "epoch": 1,
            "compat_id": self.model.descriptor.compat_id.hex(),
            "scope_id": self.model.scope.scope_id.hex(),
            "prompt_blocks": [],
            "prompt_tail": PROMPT,
            "generated": reader.text[:1],
            "output_offset": 1,
            "sampler": GREEDY.to_dict(),
        }
        resume = {"epoch": 1, "checkpoint": checkpoint}
        status, problem = instance.ask("POST", f"sessions/{session}/resume", resume)
        assert (status, problem["type"].rpartition("#")[2]) == (409, "kvsp-stale-epoch")

    def _outlives_its_controller(self, instance: Server) -> None:
        self.core.kill()
        eventually(lambda: instance.health("readyz") == (200, "degraded"), "it to notice")
        assert instance.health("healthz") == (200, "alive")


def test_sessions_survive_kill_9_of_their_instance_without_a_repeated_or_altered_token(tmp_path):
    """One sampler is deterministic, the other not: its tokens wait for a checkpoint."""
    deployment = Deployment(tmp_path, Model(tmp_path), {"delay_ms": 10})
    deployment.survives([GREEDY, TOP_P], 64)


def test_a_session_of_a_real_model_survives_kill_9_of_its_instance(tmp_path):
    pytest.importorskip("torch", reason="the extra `torch` is not installed")
    pytest.importorskip("transformers", reason="the extra `torch` is not installed")
    from kvsp.instance.engines.torch_engine import TorchEngine, make_tiny_model

    folder = tmp_path / "model"
    make_tiny_model(folder, seed=1)
    model = Model(tmp_path, TorchEngine(folder, block_tokens=BLOCK_TOKENS))
    deployment = Deployment(tmp_path, model, {"engine": "torch", "model": str(folder)})
    deployment.survives([Sampler("greedy", {}, 0, 0, False)], 200)
