"""A placement controller with its index over HTTP, and instances in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvsp.controller.app import ControllerService, Lead
from kvsp.controller.callers import LocalIndex
from kvsp.controller.core.controller import Controller
from kvsp.controller.core.effects import Report, Unreachable
from kvsp.controller.core.limits import ControllerLimits
from kvsp.controller.election import ALease, Elected
from kvsp.controller.journal import Journal
from kvsp.controller.shell import Shell
from kvsp.http.app import App
from kvsp.index.app import IndexApp
from kvsp.index.service import IndexService
from kvsp.index.sqlite import SqliteStore
from kvsp.names.uris import instance_id
from kvsp.principals import Principal
from tests.kvsp.controller.support import H1, SESSION, A, B, checkpoint, status
from tests.kvsp.support_http import BASE, Client, Principals

EVERY = {"*": frozenset({"read", "write"})}
PRINCIPALS = (
    Principal("a", roles=frozenset({"instance"}), uris=frozenset({A})),
    Principal("b", roles=frozenset({"instance"}), uris=frozenset({B})),
    Principal("h1", uris=frozenset({H1}), scopes=EVERY),
    Principal("operator", roles=frozenset({"operator"}), scopes=EVERY),
    Principal("router", roles=frozenset({"placement"}), scopes={}),
    Principal("blind", roles=frozenset({"cats"}), scopes={}),
)


class Instances:
    """Instances that answer as a test wants, and note what they were sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, Any]] = []
        self.answers: dict[str, Any] = {}
        self.arrived = asyncio.Event()
        self.hanging: set[str] = set()

    async def send(
        self,
        method: str,
        instance: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
    ) -> Report:
        uri = instance + path
        self.sent.append((method, uri, body))
        self.arrived.set()
        if any(uri.startswith(base) for base in self.hanging):
            await asyncio.Event().wait()
        for end, answer in self.answers.items():
            if uri.endswith(end):
                report: Report = answer(body) if callable(answer) else answer
                return report
        return Unreachable()

    async def close(self) -> None: ...

    async def wait_for(self, end: str, count: int = 1) -> Any:
        """The body of the `count`th request whose URI ends so."""
        while True:
            found = [body for _, uri, body in self.sent if uri.endswith(end)]
            if len(found) >= count:
                return found[count - 1]
            self.arrived.clear()
            await asyncio.wait_for(self.arrived.wait(), 10)


class Deployment:
    """A controller with its index in one application, over files that outlive it; with a `lease`
    one among several that share its journal."""

    def __init__(self, folder: Path, lease: ALease | None = None, **limits: Any) -> None:
        self.now = 1_000_000
        self.instances = Instances()
        service = IndexService(SqliteStore(":memory:"))
        index = IndexApp(service, clock_ms=lambda: self.now)
        core = partial(Controller, ControllerLimits(**limits))
        self.lead: Lead
        if lease is None:
            self.journal = Journal(folder / "journal.db")
            self.lead = Shell(
                core(),
                self.journal,
                self.instances,
                LocalIndex(index),
                clock_ms=lambda: self.now,
            )
        else:
            self.lead = Elected(
                lease, core, self.instances, LocalIndex(index), clock_ms=lambda: self.now
            )
        self.service = ControllerService(self.lead)
        self.index = service
        self.app = App([index, self.service], base_uri=BASE, authenticator=Principals(*PRINCIPALS))

    @property
    def shell(self) -> Shell:
        return self.service.shell

    def client(self, name: str) -> Client:
        return Client(self.app, name)

    async def report(self, name: str = "a", uri: str = A, **changes: Any) -> Any:
        path = f"instances/{instance_id(uri)}"
        return await self.client(name).request(
            "PUT", path, json_body=status(uri, **changes).to_dict()
        )

    async def checkpoint(self, offset: int = 3, name: str = "a", **changes: Any) -> Any:
        body = checkpoint(offset, **changes).to_dict()
        path = f"sessions/{SESSION}/checkpoint"
        return await self.client(name).request("PUT", path, json_body=body)

    async def pass_time(self, ms: int) -> None:
        self.now += ms
        await self.shell.call(self.shell.core.tick, self.now)
