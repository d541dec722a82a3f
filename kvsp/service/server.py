"""Puts the roles of one server process together from its settings.

What a role needs is imported where the role is made: an index starts in a third of the
time that all of them take.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import tempfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvsp.http.app import App, is_loopback
from kvsp.http.auth import Authenticator, LoopbackOnly, PrincipalsFile
from kvsp.http.limits import HttpLimits
from kvsp.http.server import CannotStartError, ServerSettings
from kvsp.http.service import Service
from kvsp.names.identity import Descriptor, Scope
from kvsp.records.records import Link
from kvsp.service.settings import MIB, Settings, SettingsError

if TYPE_CHECKING:
    from kvsp.client.client import Client
    from kvsp.controller.app import ControllerService
    from kvsp.controller.shell import IndexCaller
    from kvsp.holder.app import HolderService
    from kvsp.holder.holder import Holder
    from kvsp.holder.records.publishing import NoIndex, RecordPublisher
    from kvsp.holder.tiers.tiers import TierStorage
    from kvsp.index.app import IndexApp
    from kvsp.instance.app import InstanceService
    from kvsp.instance.engines.engine import Engine
    from kvsp.instance.loading import Fetcher
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
        and what the files and stores of the roles raise."""
        self.settings = settings
        host, port = _address(settings.listen.address)
        if settings.dev and not is_loopback(host):
            raise SettingsError(f"--dev listens on this machine only, not on {host}")
        if settings.data_dir is not None:
            full = _check_folder(settings.data_dir)
            _claim(settings.data_dir)
            if full and "holder" in settings.roles:
                self._free_some(settings.data_dir)
        # the base URI names the port, so a free one is chosen now
        self._host, self._port = host, port or _free_port(host)
        shown = f"[{host}]" if ":" in host else host
        self.base_uri = settings.listen.base_uri or f"http://{shown}:{self._port}/kvsp/"
        self._descriptors: list[Descriptor] = []
        self._holder: Holder | None = None
        self._index: IndexApp | None = None
        self._peers: Peers | None = None
        http = settings.http
        self.app = App(
            self._services(),
            base_uri=self.base_uri,
            authenticator=self._who(),
            limits=HttpLimits(
                bodies_octets=http.bodies_mib * MIB,
                bodies_octets_per_principal=http.bodies_per_principal_mib * MIB,
            ),
        )
        if self._peers is not None:
            self.app.registry.register(self._peers)

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
        listen = self.settings.listen
        return ServerSettings(
            host=self._host,
            port=self._port,
            certificate=listen.certificate,
            key=listen.key,
            client_ca=listen.client_ca,
            insecure=listen.insecure,
            drain_s=listen.drain_s,
        )

    def _who(self) -> Authenticator:
        path = self.settings.listen.principals
        if path is not None:
            return PrincipalsFile(path)
        if not self.settings.dev:
            logger.warning(
                "no principals file is given: every client on this machine may do everything, "
                "with no credential, and no other client anything; set principals under [listen]"
            )
        return LoopbackOnly()

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
        from kvsp.index.service import IndexLimits, IndexService
        from kvsp.index.sqlite import SqliteStore

        limits = IndexLimits(
            max_ttl_ms=self.settings.index.max_ttl_ms, http_loopback=self.settings.dev
        )
        store = SqliteStore(self._file("index.sqlite"))
        return IndexApp(IndexService(store, limits=limits))

    def _make_controller(self) -> ControllerService:
        from kvsp.controller.app import ControllerService
        from kvsp.controller.callers import HttpIndex, HttpInstances, LocalIndex
        from kvsp.controller.core.controller import Controller
        from kvsp.controller.core.limits import ControllerLimits
        from kvsp.controller.journal import Journal
        from kvsp.controller.shell import Shell

        table, peers = self.settings.controller, self._to_peers()
        limits = ControllerLimits(
            min_status_ttl_ms=table.min_status_ttl_ms,
            recovery_ms=table.recovery_ms,
            retry_ms=table.retry_ms,
            http_loopback=self.settings.dev,
        )
        index: IndexCaller
        if self._index is not None:
            index = LocalIndex(self._index)
        else:
            assert self.settings.peers.index is not None
            index = HttpIndex(self.settings.peers.index, peers.caller())
        journal = Journal(self._file("placement.sqlite"))
        shell = Shell(Controller(limits), journal, HttpInstances(peers.caller()), index)
        return ControllerService(shell, token=peers.token_file)

    def _make_holder(self, role: bool) -> HolderService:
        from kvsp.holder.app import HolderService
        from kvsp.holder.descriptors import Descriptors
        from kvsp.holder.holder import Holder, HolderSettings
        from kvsp.holder.records.index_client import HttpIndexClient
        from kvsp.holder.records.publishing import NoIndex, RecordPublisher
        from kvsp.holder.tiers.disk import DiskTier
        from kvsp.holder.tiers.tiers import HostTier

        table, folder = self.settings.holder, self.settings.data_dir
        tiers: list[tuple[TierStorage, int | None]] = []
        host_mib = table.host_mib if role else self.settings.instance.store_mib
        disk_mib = table.disk_mib if role else None
        if host_mib is None and table.disk_mib is None:
            host_mib = _DEFAULT_HOST_MIB
            if folder is not None:
                # who gives a data directory wants blocks to survive a restart
                disk_mib = _DEFAULT_DISK_MIB
        if host_mib is not None:
            tiers.append((HostTier(), host_mib * MIB))
        if disk_mib is not None:
            assert folder is not None
            disk = DiskTier(folder / "blocks", quarantine_octets=table.quarantine_mib * MIB)
            tiers.append((disk, disk_mib * MIB))
        client, uri = None, self._index_uri
        records: NoIndex | RecordPublisher = NoIndex(table.record_ttl_ms)
        if uri is not None:
            client = HttpIndexClient(uri, self._to_peers().caller())
            records = RecordPublisher(client, ttl_ms=table.record_ttl_ms)
        holding = HolderSettings(
            base_uri=self.base_uri,
            uploads=table.uploads,
            uploads_per_client=table.uploads_per_client,
            transcodings=table.transcodings,
            transcodings_per_client=table.transcodings_per_client,
            scrub_octets_per_s=table.scrub_mib_per_s * MIB,
            # leases are as lasting as the blocks they cover
            lease_file=folder / _LEASES if folder and disk_mib is not None else None,
        )
        self._holder = Holder(tiers, holding, records=records)
        kept = None if folder is None else folder / "compat"
        descriptors = Descriptors(self._descriptors, folder=kept, ask=records.descriptor)
        return HolderService(self._holder, records, descriptors, client)

    def _make_instance(self, engine: Engine) -> InstanceService:
        from kvsp.client.client import Client
        from kvsp.instance.app import InstanceService
        from kvsp.instance.callers import HttpPlacement
        from kvsp.instance.core.agent import Agent
        from kvsp.instance.core.limits import InstanceLimits
        from kvsp.instance.epochs import Epochs
        from kvsp.instance.shell import InstanceShell

        table, cafile = self.settings.instance, self.settings.peers.cafile
        peers = self._to_peers()
        assert self._holder is not None
        limits = InstanceLimits(
            pool_octets=table.pool_mib * MIB,
            status_ttl_ms=table.status_ttl_ms,
            sleep_after_ms=table.sleep_after_ms,
            http_loopback=self.settings.dev,
        )
        epochs = Epochs(self.settings.data_dir)
        agent = Agent(
            self.base_uri,
            engine.descriptor,
            [Scope.load(path) for path in table.scopes],
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
        )
        here = "controller" in self.settings.roles
        placement = HttpPlacement(
            self.base_uri if here else str(self.settings.peers.placement), peers.caller()
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
            fetchers=_fetchers(client, cafile),
        )
        return InstanceService(shell)

    def _engine(self) -> Engine:
        table = self.settings.instance
        if table.engine == "toy":
            from kvsp.instance.engines.toy import ToyEngine

            return ToyEngine(block_tokens=table.block_tokens, delay_ms=table.delay_ms)
        assert table.model is not None
        try:
            from kvsp.instance.engines.torch_engine import TorchEngine
        except ImportError as error:
            raise SettingsError(
                f"the engine torch is not installed ({error.name}): pip install kvcs[torch]"
            ) from None
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


def _fetchers(client: Client, cafile: Path | None) -> list[Fetcher]:
    """Ways to blocks besides HTTP: other packages offer them as entry points, each a
    function of the instance's client and the authorities it trusts."""
    return [entry.load()(client, cafile) for entry in entry_points(group=FETCHERS)]


def _check_folder(folder: Path) -> bool:
    """Make the data directory, and write to it now rather than when the first block comes.
    True when it is full. Raises SettingsError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"probe")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        raise SettingsError(
            f"{folder}: cannot be written ({error.strerror or error}); name another folder "
            "with --data-dir"
        ) from None
    return False


def _claim(folder: Path) -> None:
    """Keep other processes out of the data directory for as long as this one lives: two
    would take each other's blocks, records and epochs. Raises CannotStartError."""
    path = folder / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
    except BlockingIOError:
        raise CannotStartError(
            f"{folder}: another process uses this data directory; stop it, or name another "
            "folder with --data-dir"
        ) from None
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}") from None


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise SettingsError(f"{text!r} is not HOST:PORT; for example 127.0.0.1:8080")
    return host, int(port)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((host, 0))
            port: int = probe.getsockname()[1]
            return port
    except OSError as error:
        raise SettingsError(f"{host}: {error.strerror or error}") from None
