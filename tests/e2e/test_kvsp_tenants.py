"""Twenty tenants with random keys and the same prompts in one deployment over TLS:
each finds its own blocks, and nothing crosses."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from kvsp.blocks.container import Container
from kvsp.client.client import Client
from kvsp.client.errors import NotAuthorizedError
from kvsp.instance.engines.toy import ToyEngine
from kvsp.names.identity import Scope, block_keys
from kvsp.names.uris import BlockId
from kvsp.principals import Principal, new_token, principal_entry
from tests.e2e.kvsp_support import free_port, toml
from tests.e2e.support import BIN, Process
from tests.kvsp.support_server import Authority

TENANTS = 20
PROMPT = [(9 * number + 2) % 256 for number in range(12)]
BOTH = frozenset({"read", "write"})


class Deployment:
    def __init__(self, folder):
        self.base = f"https://127.0.0.1:{free_port()}/kvsp/"
        self.engine = ToyEngine()
        self.scopes = [Scope.generate() for _ in range(TENANTS)]
        self.tokens = [new_token() for _ in range(TENANTS)]
        authority = Authority(folder)
        self.cafile = authority.path
        certificate, key = authority.server()
        server = new_token()
        (folder / "token").write_text(server)
        (folder / "token").chmod(0o600)
        itself = Principal(
            "server",
            frozenset({"holder"}),
            frozenset({self.base}),
            scopes={"*": frozenset({"write"})},
        )
        tenants = [
            Principal(f"tenant {number}", scopes={scope.scope_id.hex(): BOTH})
            for number, scope in enumerate(self.scopes)
        ]
        entries = [principal_entry(itself, [server])]
        entries += [
            principal_entry(tenant, [token])
            for tenant, token in zip(tenants, self.tokens, strict=True)
        ]
        (folder / "principals.json").write_text(json.dumps({"principals": entries}))
        os.chmod(folder / "principals.json", 0o600)
        listen = {
            "address": self.base.removeprefix("https://").removesuffix("/kvsp/"),
            "base_uri": self.base,
            "certificate": str(certificate),
            "key": str(key),
            "principals": str(folder / "principals.json"),
        }
        peers = {"token_file": str(folder / "token"), "cafile": str(self.cafile)}
        config = folder / "server.toml"
        config.write_text(f'roles = ["index", "holder"]\nlisten = {toml(listen)}\n')
        with config.open("a") as file:
            file.write(f"peers = {toml(peers)}\n")
        self.process = Process(folder, "server", BIN / "kvsp-server", "--config", config)
        # it serves every test of this module
        Process.running.remove(self.process)
        self.process.wait_for(r"ready https://")

    def client(self, tenant):
        return Client(self.base, token=self.tokens[tenant], cafile=self.cafile)

    def keys(self, tenant):
        return block_keys(self.scopes[tenant], self.engine.descriptor, PROMPT)

    def block(self, tenant, place):
        scope_id, compat_id = self.scopes[tenant].scope_id, self.engine.descriptor.compat_id
        return BlockId(compat_id, scope_id, self.keys(tenant)[place])


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    made = Deployment(tmp_path_factory.mktemp("tenants"))
    try:
        yield made
    finally:
        made.process.kill()


@pytest.mark.parametrize("tenant", range(TENANTS))
async def test_a_tenant_finds_its_own_blocks_and_nothing_of_another(deployment, tenant):
    descriptor = deployment.engine.descriptor
    context = deployment.engine.context()
    context.prefill(PROMPT)
    own, scope_id = deployment.keys(tenant), deployment.scopes[tenant].scope_id
    other = (tenant + 1) % TENANTS
    theirs = deployment.keys(other)
    assert not set(own) & set(theirs)
    async with deployment.client(tenant) as client, deployment.client(other) as neighbour:
        await client.put_descriptor(descriptor)
        for sender, number in ((client, tenant), (neighbour, other)):
            for place in range(len(own)):
                container = Container.build(descriptor, context.block(place).sections())
                await sender.put(deployment.base, deployment.block(number, place), container)
        for sender, number in ((client, tenant), (neighbour, other)):
            await until_matched(sender, deployment, number)
        # the same prompt is there twice, and each finds its own alone
        assert (await client.lookup(scope_id, descriptor.compat_id, theirs)).matched == 0
        assert (await client.explain(scope_id, descriptor.compat_id, theirs)).matched == 0
        with pytest.raises(NotAuthorizedError):
            await client.lookup(deployment.scopes[other].scope_id, descriptor.compat_id, theirs)
        foreign = deployment.block(other, 0)
        for attempt in (
            client.get_from(deployment.base, foreign, descriptor),
            client.delete(deployment.base, foreign),
            client.replicas(foreign),
            client.put(
                deployment.base,
                foreign,
                Container.build(descriptor, context.block(0).sections()),
            ),
        ):
            with pytest.raises(NotAuthorizedError):
                await attempt
        with pytest.raises(NotAuthorizedError):
            async with client.lease(
                deployment.base, foreign.scope_id, foreign.compat_id, [foreign.block_key]
            ):
                pass
        mine = await client.get_from(deployment.base, deployment.block(tenant, 0), descriptor)
        assert [layer.layer for layer in mine] == list(range(descriptor.layers))


async def until_matched(client, deployment, tenant):
    """The holder publishes in the background."""
    scope_id, keys = deployment.scopes[tenant].scope_id, deployment.keys(tenant)
    for _ in range(1000):
        found = await client.lookup(scope_id, deployment.engine.descriptor.compat_id, keys)
        if found.matched == len(keys):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the blocks were not published")
