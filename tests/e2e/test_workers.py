"""`kvcs-relay --workers N`: several processes that are one relay to its clients and its operator."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

import moqt
from moqt.client import connect
from tests.e2e.support import Relay, eventually, relay

EDGES = ("0", "1")
TOKEN = "admin-token-of-the-workers-0123456789"


class Workers:
    """What the processes of a relay say of themselves."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.base = relay.metrics_url.removesuffix("/metrics")

    def asked(self, path: str, data: bytes | None = None):
        request = Request(self.base + path, data, {"Authorization": f"Bearer {TOKEN}"})
        with urlopen(request, timeout=20) as answer:
            return json.loads(answer.read())

    def shown(self, name: str) -> dict[str, float]:
        found = re.findall(
            rf'^kvcs_relay_{name}{{worker="(\w+)"}} (\S+)$', self.relay.metrics(), re.MULTILINE
        )
        return {worker: float(value) for worker, value in found}

    def metric(self, name: str) -> dict[str, float]:
        """The values of all workers, taken after this call began."""
        before = self.shown("metrics_updates_total")
        eventually(
            lambda: (now := self.shown("metrics_updates_total")).keys() >= before.keys()
            and all(now[each] != before[each] for each in before),
            "fresh metrics",
        )
        return self.shown(name)

    def sessions(self) -> dict[str, int]:
        """Of clients, by edge."""
        found = [each["worker"] for each in self.asked("/sessions.json")["sessions"]]
        return {edge: found.count(edge) for edge in EDGES}

    def pids(self) -> set[int]:
        pid = self.relay.process.popen.pid
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return {int(each) for each in text.split()}

    def pid_of(self, worker: str) -> int:
        text = self.relay.metrics()
        started = re.search(
            rf'^process_start_time_seconds{{worker="{worker}"}} (\S+)$', text, re.MULTILINE
        )
        assert started, text
        return int(float(started.group(1)))


@pytest.fixture
def workers(tmp_path) -> Iterator[Workers]:
    token = tmp_path / "admin.token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with relay(tmp_path, "--workers", "2", "--admin-token-file", token) as running:
        yield Workers(running)


def test_what_is_published_at_one_worker_is_read_at_all_and_crosses_once_to_each(
    workers, cache, tmp_path
):
    hub = workers.relay
    publisher = hub.publish(cache)
    publisher.wait_for("publishing")
    for number in range(40):
        out = tmp_path / f"out{number}"
        hub.subscribe(cache, out, name=f"subscribe{number}").finish(0)
        cache.check(out)
        got = workers.metric("objects_in_total")
        if all(got[edge] for edge in EDGES):
            break
    assert all(got[edge] for edge in EDGES), "nobody has come to one of the workers"
    assert got["home"] >= cache.objects
    assert got["0"] == got["1"]
    out = workers.metric("objects_out_total")
    assert out["home"] == got["0"] + got["1"]
