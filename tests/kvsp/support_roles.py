"""Holder, Index Service and placement controller in one application, with real credentials."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsp.controller.app import ControllerService
from kvsp.controller.callers import HttpInstances, LocalIndex
from kvsp.controller.core.controller import Controller
from kvsp.controller.journal import Journal
from kvsp.controller.shell import Shell
from kvsp.holder.app import HolderService
from kvsp.holder.descriptors import Descriptors
from kvsp.holder.holder import Holder, HolderSettings
from kvsp.holder.records.publishing import RecordPublisher
from kvsp.holder.tiers.disk import DiskTier
from kvsp.http.app import App
from kvsp.http.auth import PrincipalsFile
from kvsp.http.limits import HttpLimits
from kvsp.index.app import IndexApp
from kvsp.index.service import IndexService
from kvsp.index.sqlite import SqliteStore
from kvsp.names.identity import Descriptor
from kvsp.principals import ROLES, Principal, new_token, principal_entry
from kvsp.records.records import ReplicaRecord, replica_digest
from tests.kvsp.holder.support import (
    DESCRIPTOR,
    OCTETS,
    OTHER_SCOPE,
    SCOPE,
    MemoryIndex,
    block_id,
    container,
)
from tests.kvsp.support_http import BASE, Answer, Client, caller

H2 = "https://h2.example/kvsp/"
II1 = "https://ii1.example/kvsp/"
BOTH = frozenset({"read", "write"})
PRINCIPALS = (
    Principal("owner", scopes={SCOPE.hex(): BOTH}, uris=frozenset({BASE})),
    Principal("tenant", scopes={OTHER_SCOPE.hex(): BOTH}, uris=frozenset({H2})),
    Principal("ii1", roles=frozenset({"instance"}), uris=frozenset({II1})),
    Principal("nobody"),
    Principal("operator", roles=ROLES, scopes={"*": BOTH}),
)


@dataclass
class Roles:
    app: App
    holder: Holder
    index: IndexService
    controller: ControllerService
    tokens: dict[str, str]
    """Bearer tokens by principal."""

    folder: Path

    def client(self, name: str) -> Client:
        return Client(self.app, self.tokens[name])


def make_roles(folder: Path, limits: HttpLimits | None = None, **settings: Any) -> Roles:
    """The roles over files in `folder`; `settings` are the holder's."""
    tokens = {principal.name: new_token() for principal in PRINCIPALS}
    entries = [principal_entry(each, [tokens[each.name]]) for each in PRINCIPALS]
    principals = folder / "principals"
    principals.write_text(json.dumps({"principals": entries}))
    principals.chmod(0o600)
    index = IndexService(SqliteStore(folder / "index.db"))
    index_app = IndexApp(index, sweep_s=3600)
    publisher = RecordPublisher(MemoryIndex(), withdraw_s=0.2)
    holder = Holder(
        [(DiskTier(folder / "blocks"), 10 * OCTETS)],
        HolderSettings(base_uri=BASE, **settings),
        records=publisher,
    )
    controller = ControllerService(
        Shell(
            Controller(),
            Journal(folder / "journal.db"),
            HttpInstances(caller()),
            LocalIndex(index_app),
        )
    )
    app = App(
        [
            HolderService(holder, publisher, Descriptors(ask=publisher.descriptor)),
            index_app,
            controller,
        ],
        base_uri=BASE,
        authenticator=PrincipalsFile(principals),
        limits=limits,
    )
    return Roles(app, holder, index, controller, tokens, folder)


@asynccontextmanager
async def running_roles(folder: Path, **more: Any) -> AsyncIterator[Roles]:
    roles = make_roles(folder, **more)
    async with roles.app.lifespan():
        yield roles


def record(number: int = 1, **changes: Any) -> dict[str, Any]:
    """A Replica Record of this deployment's holder, as JSON."""
    made = container(number)
    digests = list(made.layer_digests())
    block = block_id(number)
    return {
        "block_key": block.block_key.hex(),
        "compat_id": block.compat_id.hex(),
        "scope_id": block.scope_id.hex(),
        "holder": BASE,
        "codec": 1,
        "size": made.header.data_octets,
        "digest": "sha-256:" + replica_digest(digests).hex(),
        "layer_digests": [digest.hex() for digest in digests],
        "ttl_ms": 60_000,
    } | changes


def path_of(tree: dict[str, Any]) -> str:
    """Where a record is published, malformed members included."""
    well_formed = record() | {key: tree[key] for key in ("block_key", "holder") if key in tree}
    return ReplicaRecord.from_json(well_formed, http_loopback=True).path


AS_JSON = {"content-type": "application/json"}


async def store_descriptor(client: Client, descriptor: Descriptor = DESCRIPTOR) -> Answer:
    return await client.request(
        "PUT", f"compat/{descriptor.compat_id.hex()}", descriptor.jcs, AS_JSON
    )
