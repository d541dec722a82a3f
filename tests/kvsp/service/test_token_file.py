"""The token file of a server's [peers] cannot be used for a moment; every role goes on after it."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from kvsp.client import Client
from kvsp.http.server import Server
from kvsp.names.uris import instance_id
from kvsp.principals import Principal, principal_entry
from kvsp.service.server import Assembly
from kvsp.service.sources import read_settings
from tests.e2e.kvsp_support import free_port
from tests.kvsp.client.support import DESCRIPTOR, block_of, container
from tests.kvsp.support_server import Authority

EVERY = {"*": frozenset({"read", "write"})}
FAULTS: dict[str, Callable[[Path], None]] = {
    "open to others": lambda path: path.chmod(0o644),
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_text(""),
}


def token_of(name: str) -> str:
    """No part of any message: a credential is not shown where one repeats it."""
    return f"token-of-{name}"


class Site:
    """A placement controller with its index, and an instance, over TLS with tokens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        authority = Authority(folder)
        self._certificate, self._key = authority.server()
        self.cafile = authority.path
        self.controller, self.instance = (
            f"https://127.0.0.1:{free_port()}/kvsp/" for _ in range(2)
        )
        roles = frozenset({"placement", "operator", "holder", "instance"})
        entries = [
            principal_entry(Principal(name, roles, frozenset(uris), scopes=EVERY), [token_of(name)])
            for name, uris in (
                ("controller", [self.controller]),
                ("instance", [self.instance]),
                ("operator", []),
            )
        ]
        (folder / "principals.json").write_text(json.dumps({"principals": entries}))
        (folder / "principals.json").chmod(0o600)
        for name in ("controller", "instance"):
            self.mend(name)

    def token_file(self, name: str) -> Path:
        return self._folder / f"{name}.token"

    def mend(self, name: str) -> None:
        self.token_file(name).write_text(f"{token_of(name)}\n")
        self.token_file(name).chmod(0o600)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with (
            self._server("controller", self.controller, ["index", "controller"]),
            self._server("instance", self.instance, ["holder", "instance"]),
        ):
            yield

    @asynccontextmanager
    async def _server(self, name: str, base: str, roles: list[str]) -> AsyncIterator[None]:
        peers = {"cafile": str(self.cafile), "token_file": str(self.token_file(name))}
        if name == "instance":
            peers |= {"index": self.controller, "placement": self.controller}
        flags = {
            "roles": roles,
            "listen": {
                "address": base.split("/")[2],
                "base_uri": base,
                "certificate": str(self._certificate),
                "key": str(self._key),
                "principals": str(self._folder / "principals.json"),
                "drain_s": 0.1,
            },
            "peers": peers,
            "instance": {"status_ttl_ms": 300},
        }
        assembly = Assembly(read_settings(None, flags).settings)
        server = Server(assembly.app, assembly.server)
        task = asyncio.create_task(server.serve())
        try:
            while not server.started:
                assert not task.done(), task.exception()
                await asyncio.sleep(0.005)
            yield
        finally:
            server.should_exit = True
            await task

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[aiohttp.ClientSession]:
        tls = ssl.create_default_context(cafile=str(self.cafile))
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls),
            headers={"Authorization": f"Bearer {token_of('operator')}"},
        ) as session:
            yield session


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


async def reasons(session: aiohttp.ClientSession, base: str) -> list[str]:
    async with session.get(base.replace("/kvsp/", "/readyz")) as answer:
        found: list[str] = json.loads(await answer.read())["reasons"]
        return found


async def sample(session: aiohttp.ClientSession, base: str, name: str) -> float:
    """The value of one sample among a server's metrics; 0 for one that is not there."""
    async with session.get(base.replace("/kvsp/", "/metrics")) as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " "))


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    while not await check():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_controller_whose_token_file_cannot_be_used_for_a_moment_goes_on_after_it(
    site: Site, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvsp")
    of_instance = f"{site.controller}instances/{instance_id(site.instance)}"
    taken = 'kvsp_http_requests_total{method="PUT",outcome="200",path="/kvsp/state"}'
    async with site.running(), site.asking() as session, asyncio.timeout(30):

        async def ask(state: str) -> bool:
            async with session.put(f"{of_instance}/state", json={"state": state}) as answer:
                return answer.status == 200

        async def idle() -> bool:
            return not await sample(session, site.controller, "kvsp_placement_commands")

        async def counted() -> bool:
            failures = await sample(session, site.controller, "kvsp_token_file_failures_total")
            return failures > 0

        async def told_again() -> bool:
            return await sample(session, site.instance, taken) > before

        await until(partial(ask, "active"))
        await until(idle)
        FAULTS[fault](site.token_file("controller"))
        before = await sample(session, site.instance, taken)
        assert await ask("draining")
        await until(counted)
        assert "the token for other services cannot be read" in str(
            await reasons(session, site.controller)
        )
        assert not await told_again(), "it had no token to show"
        (said,) = [each for each in caplog.messages if str(site.token_file("controller")) in each]
        async with session.get(of_instance) as answer:
            assert answer.status == 200, "it answers all the while"
        site.mend("controller")
        assert await ask("active")
        await until(told_again)
        assert "token" not in str(await reasons(session, site.controller))
        assert caplog.messages.count(said) == 1, "said once"


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_holder_and_instance_whose_token_file_cannot_be_used_for_a_moment_go_on_after_it(
    site: Site, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvsp")
    async with (
        site.running(),
        site.asking() as session,
        Client(site.controller, token=token_of("operator"), cafile=site.cafile) as client,
        asyncio.timeout(30),
    ):

        async def published(number: int) -> bool:
            block = block_of(number)
            found = await client.lookup(block.scope_id, block.compat_id, [block.block_key])
            return found.matched == 1

        async def well() -> bool:
            return not [
                *await reasons(session, site.controller),
                *await reasons(session, site.instance),
            ]

        async def told() -> bool:
            return await reasons(session, site.instance) == [
                "holder: the index service does not answer",
                "instance: the placement controller does not take the status",
            ]

        await client.put_descriptor(DESCRIPTOR)
        await client.put(site.instance, block_of(0), container(0))
        await until(partial(published, 0))
        await until(well)
        FAULTS[fault](site.token_file("instance"))
        await client.put(site.instance, block_of(1), container(1))
        await until(told)
        assert not await published(1)
        assert await sample(session, site.instance, "kvsp_token_file_failures_total") > 1
        said = [each for each in caplog.messages if "token for other services" in each]
        assert len(said) == 1 and str(site.token_file("instance")) in said[0]
        site.mend("instance")
        await until(partial(published, 1))
        await until(well)
