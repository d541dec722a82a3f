"""Puts the roles of one server process together from its settings.

What a role needs is imported where the role is made: an index starts in a third of the
time that all of them take.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
from collections.abc import Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvsp.http.app import App
from kvsp.http.server import ServerSettings
from kvsp.http.service import Service
from kvsp.names.codes import Tier
from kvsp.names.identity import Descriptor, Scope
from kvsp.records.records import Link
from kvsp.service.checking import address_of, authenticator_of, check_files, listening
from kvsp.service.data_folder import DataFolder
from kvsp.service.settings import MIB, Settings, SettingsError

if TYPE_CHECKING:
    from kvsp.client.client import Client
    from kvsp.controller.app import ControllerService, Lead
    from kvsp.controller.shell import IndexCaller
    from kvsp.holder.app import HolderService
    from kvsp.holder.holder import Holder
    from kvsp.holder.records.index import NoIndex
    from kvsp.holder.records.publishing import RecordPublisher
    from kvsp.holder.tiers.tiers import TierStorage
    from kvsp.index.app import IndexApp
    from kvsp.instance.app import InstanceService
    from kvsp.instance.engines.engine import Engine
    from kvsp.instance.loading.fetchers import Fetcher
    from kvsp.service.peers import Peers

logger = logging.getLogger("kvsp.server")

_DEFAULT_HOST_MIB: Final = 1024
_DEFAULT_DISK_MIB: Final = 16 * 1024
_LEASES: Final = "leases.sqlite"
_STARTING_OCTETS: Final = MIB
"""Room on a full disk in which the databases of the roles can be opened."""

FETCHERS: Final = "kvsp.fetchers"
"""Group of entry points that offer a `Fetcher` to instances."""


class Assembly:
    """One process: its application and how it listens."""

    def __init__(self, settings: Settings) -> None:
        """Raises SettingsError, CannotStartError while another process has the data directory,
        and what the files and stores of the roles raise. Then nothing is left of it."""
        self.settings = settings
        self._host, self._port = address_of(settings)
        check_files(settings)
        who = authenticator_of(settings)
        self._descriptors: list[Descriptor] = []
        self._holder: Holder | None = None
        self._index: IndexApp | None = None
        self._peers: Peers | None = None
        self._folder: DataFolder | None = None
        try:
            if settings.data_dir is not None:
                self._folder = DataFolder(settings.data_dir)
                if self._folder.full and "holder" in settings.roles:
                    self._free_some(settings.data_dir)
            # the base URI names the port, so a free one is chosen now
            self._port = self._port or _free_port(self._host)
            shown = f"[{self._host}]" if ":" in self._host else self._host
            self.base_uri = settings.listen.base_uri or f"http://{shown}:{self._port}/kvsp/"
            self.app = App(
                self._services(),
                base_uri=self.base_uri,
                authenticator=who,
                limits=settings.http,
                moqt=settings.listen.moqt,
            )
        except BaseException:
            self.undo()
            raise
        if self._peers is not None:
            self.app.registry.register(self._peers)

    def undo(self) -> None:
        """The start has failed: leave no data directory behind that was not there before."""
        if self._folder is not None:
            self._folder.undo()

    @staticmethod
    def _free_some(folder: Path) -> None:
        """Let the oldest blocks go, so that what the other roles keep can be opened."""
        from kvsp.holder.leases.journal import leased_blocks
        from kvsp.holder.tiers.disk import remove_oldest

        leased = leased_blocks(folder / _LEASES)
        removed = remove_oldest(folder / "blocks", _STARTING_OCTETS, leased)
        gone = f"its {removed} oldest blocks are removed" if removed else "no block of it can go"
        logger.warning("%s is full: %s", folder, gone)

    @property
    def server(self) -> ServerSettings:
        """How it listens."""
        return listening(self.settings, self._host, self._port)

    def _services(self) -> list[Service]:
        roles = self.settings.roles
        engine = self._engine() if "instance" in roles else None
        if engine is not None:
            self._descriptors.append(engine.descriptor)
        services: list[Service] = []
        if "index" in roles:
            self._index = self._make_index()
            services.append(self._index)
        if "controller" in roles:
            services.append(self._make_controller())
        if "holder" in roles or engine is not None:
            # an instance is the holder of what is in its memory
            services.append(self._make_holder("holder" in roles))
        if engine is not None:
            services.append(self._make_instance(engine))
        return services

    # --- roles -----------------------------------------------------------------------

    def _make_index(self) -> IndexApp:
        from kvsp.index.app import IndexApp
        from kvsp.index.service import IndexService
        from kvsp.index.status import StatusBoard
        from kvsp.service.stores import replica_store

        table = self.settings.index
        late_s = 2 * self.settings.http.request_s
        store = replica_store(table, self._file("index.sqlite"), late_s)
        limits = dataclasses.replace(table, http_loopback=self.settings.dev)
        return IndexApp(
            IndexService(store, StatusBoard(table.instances), limits=limits),
            sweep_s=table.sweep_s,
            sweep_records=table.sweep_records,
        )

    def _make_controller(self) -> ControllerService:
        from kvsp.controller.app import ControllerService
        from kvsp.controller.callers import HttpIndex, HttpInstances, LocalIndex
        from kvsp.controller.core.controller import Controller
        from kvsp.controller.core.placement import LowestCost
        from kvsp.controller.election import Elected
        from kvsp.controller.journal import Journal
        from kvsp.controller.shell import Shell
        from kvsp.service.stores import shared_journal

        table, peers = self.settings.controller, self._to_peers()
        limits = dataclasses.replace(table, http_loopback=self.settings.dev)
        index: IndexCaller
        if self._index is not None:
            index = LocalIndex(self._index)
        else:
            assert self.settings.peers.index is not None
            index = HttpIndex(
                self.settings.peers.index, peers.caller(), timeout_s=table.command_ms / 1000
            )
        core = partial(Controller, limits, LowestCost(table.max_cost_us))
        instances = HttpInstances(peers.caller())
        lead: Lead
        if table.redis.url is None:
            lead = Shell(core(), Journal(self._file("placement.sqlite")), instances, index)
        else:
            lead = Elected(shared_journal(table.redis), core, instances, index)
        return ControllerService(lead, token=peers.token_file, http_loopback=self.settings.dev)

    def _make_holder(self, role: bool) -> HolderService:
        from kvsp.holder.app import HolderService
        from kvsp.holder.descriptors import Descriptors
        from kvsp.holder.holder import Holder, HolderSettings
        from kvsp.holder.records.index import NoIndex
        from kvsp.holder.records.index_client import HttpIndexClient
        from kvsp.holder.records.publishing import RecordPublisher

        table, folder = self.settings.holder, self.settings.data_dir
        tiers = self._role_tiers() if role else self._instance_tiers()
        lasting = any(tier.lasts for tier, _ in tiers)
        client, uri = None, self._index_uri
        records: NoIndex | RecordPublisher = NoIndex(table.record_ttl_ms)
        if uri is not None:
            client = HttpIndexClient(
                uri, self._to_peers().caller(), timeout_s=self.settings.peers.index_s
            )
            records = RecordPublisher(
                client,
                holder=self.base_uri,
                many=client,
                most=table.records_per_request,
                ttl_ms=table.record_ttl_ms,
                withdraw_s=table.withdraw_s,
            )
        holding = HolderSettings(
            base_uri=self.base_uri,
            max_container_octets=table.container_octets,
            uploads=table.uploads,
            uploads_per_client=table.uploads_per_client,
            transcodings=table.transcodings,
            transcodings_per_client=table.transcodings_per_client,
            checks=table.checks,
            checks_per_client=table.checks_per_client,
            lossy_transcoding=table.lossy_transcoding,
            scrub_octets_per_s=table.scrub_mib_per_s * MIB,
            look_s=table.objects.look_s,
            verified_s=table.verified_s,
            # leases are as lasting as the blocks they cover
            lease_file=folder / _LEASES if folder and lasting else None,
            scratch=table.scratch_dir,
        )
        self._holder = Holder(tiers, holding, records=records, quota=table.leases)
        kept = None if folder is None else folder / "compat"
        descriptors = Descriptors(self._descriptors, folder=kept, ask=records.descriptor)
        return HolderService(self._holder, records, descriptors, client)

    def _role_tiers(self) -> list[tuple[TierStorage, int | None]]:
        """The tiers of the role `holder` with their budgets, fastest first."""
        from kvsp.holder.tiers.disk import DiskTier
        from kvsp.holder.tiers.tiers import MemoryTier

        table, folder = self.settings.holder, self.settings.data_dir
        host_mib, disk_mib, objects = table.host_mib, table.disk_mib, table.objects
        if host_mib is None and disk_mib is None and objects.url is None:
            host_mib = _DEFAULT_HOST_MIB
            if folder is not None:
                # who gives a data directory wants blocks to survive a restart
                disk_mib = _DEFAULT_DISK_MIB
        tiers: list[tuple[TierStorage, int | None]] = []
        if host_mib is not None:
            tiers.append((MemoryTier(), host_mib * MIB))
        if disk_mib is not None:
            assert folder is not None
            disk = DiskTier(
                folder / "blocks",
                verify_digests=table.verify_at_start,
                quarantine_octets=table.quarantine_mib * MIB,
            )
            tiers.append((disk, disk_mib * MIB))
        if objects.url is not None:
            from kvsp.holder.tiers.objects import ObjectTier
            from kvsp.service.stores import object_store

            budget = None if objects.mib is None else objects.mib * MIB
            tiers.append((ObjectTier(object_store(objects), self.base_uri), budget))
        return tiers

    def _instance_tiers(self) -> list[tuple[TierStorage, int | None]]:
        from kvsp.holder.tiers.tiers import MemoryTier

        table = self.settings.instance
        return [(MemoryTier(Tier(table.store_tier)), table.store_mib * MIB)]

    def _make_instance(self, engine: Engine) -> InstanceService:
        from kvsp.client.client import Client
        from kvsp.instance.app import InstanceService
        from kvsp.instance.callers import HttpPlacement
        from kvsp.instance.core.agent import Agent
        from kvsp.instance.epochs import Epochs
        from kvsp.instance.shell import InstanceShell

        table, cafile = self.settings.instance, self.settings.peers.cafile
        folder = self.settings.data_dir
        peers = self._to_peers()
        assert self._holder is not None
        limits = dataclasses.replace(table, http_loopback=self.settings.dev)
        epochs = Epochs(folder)
        # caches on MOQT are opened with their content keys; what is stored here stands in clear
        scopes = [Scope.load(path, sealing=True) for path in table.scopes]
        agent = Agent(
            self.base_uri,
            engine.descriptor,
            scopes,
            epoch=epochs.next(),
            bit_identical=engine.bit_identical,
            keep_prompts=table.keep_prompts,
            limits=limits,
        )
        client = Client(
            self._index_uri,
            token=peers.token,
            cafile=cafile,
            client_cert=peers.certificate,
            http_loopback=self.settings.dev,
            limits=self.settings.client,
        )
        here = "controller" in self.settings.roles
        placement = HttpPlacement(
            [*([self.base_uri] if here else ()), *self.settings.peers.placement],
            peers.caller(),
            timeout_s=table.service_ms / 1000,
        )
        shell = InstanceShell(
            agent,
            engine,
            self._holder,
            client,
            placement,
            epochs,
            export_to=table.export_to,
            links=[Link(each.holder, each.mbit_per_s, each.rtt_us) for each in table.links],
            fetchers=_fetchers(client, cafile, scopes, table.producers),
            directives=None if folder is None else folder / "directives",
        )
        return InstanceService(shell)

    def _engine(self) -> Engine:
        table = self.settings.instance
        if table.engine == "toy":
            from kvsp.instance.engines.toy import ToyEngine

            return ToyEngine(block_tokens=table.block_tokens, delay_ms=table.delay_ms)
        assert table.model is not None
        from kvsp.instance.engines.torch_engine import TorchEngine

        return TorchEngine(table.model, block_tokens=table.block_tokens)

    # --- ways to others --------------------------------------------------------------

    @property
    def _index_uri(self) -> str | None:
        return self.base_uri if self._index is not None else self.settings.peers.index

    def _to_peers(self) -> Peers:
        """What the roles that ask others share; an index alone needs none of it."""
        from kvsp.service.peers import Peers

        if self._peers is None:
            self._peers = Peers(self.settings, self.base_uri)
        return self._peers

    def _file(self, name: str) -> str:
        folder = self.settings.data_dir
        return ":memory:" if folder is None else str(folder / name)


def _fetchers(
    client: Client, cafile: Path | None, scopes: Sequence[Scope], producers: Path | None
) -> list[Fetcher]:
    """Ways to blocks besides HTTP: other packages offer them as entry points, each a function of
    the instance's client, the authorities it trusts, its scopes and the file of producers."""
    found = entry_points(group=FETCHERS)
    return [entry.load()(client, cafile, scopes, producers) for entry in found]


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((host, 0))
            port: int = probe.getsockname()[1]
            return port
    except OSError as error:
        raise SettingsError(f"{host}: {error.strerror or error}") from None
