"""The settings of a KVSP server: one TOML file, and what flags say instead."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import msgspec

from kvsp.names.errors import DecodeError, KvspError
from kvsp.names.uris import check_base_uri

ROLES: Final = ("holder", "index", "controller", "instance")
MIB: Final = 1 << 20

Count = Annotated[int, msgspec.Meta(ge=1)]
Rate = Annotated[float, msgspec.Meta(ge=0)]


class SettingsError(KvspError):
    """A setting is missing, wrong or unsafe; the message is one sentence that says how."""


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file: a name that is not known is an error."""


class ListenTable(_Table, frozen=True, kw_only=True):
    """Where to listen, and who may come in."""

    address: str = "127.0.0.1:0"
    base_uri: str | None = None
    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    principals: Path | None = None
    insecure: bool = False
    drain_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0


class PeersTable(_Table, frozen=True, kw_only=True):
    """The other services, and what this server shows them."""

    index: str | None = None
    placement: str | None = None
    cafile: Path | None = None
    token_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


class HttpTable(_Table, frozen=True, kw_only=True):
    """What JSON bodies may take in memory, in MiB: those of all requests under way together,
    and those of one principal, whose only one is always taken."""

    bodies_mib: Count = 256
    bodies_per_principal_mib: Count = 64


class HolderTable(_Table, frozen=True, kw_only=True):
    """Budgets in MiB; the disk tier needs a data directory, and is there by default with one
    when no budget is given.

    At most `uploads` blocks are being stored at once, and `uploads_per_client` of one client;
    at most `transcodings` are being transcoded, and `transcodings_per_client` for one.
    Blocks on disk are read and verified at `scrub_mib_per_s`, 0 for never; up to
    `quarantine_mib` of damaged ones are kept to be looked at.
    """

    host_mib: Count | None = None
    disk_mib: Count | None = None
    record_ttl_ms: Count = 600_000
    uploads: Count = 64
    uploads_per_client: Count = 32
    transcodings: Count = 2
    transcodings_per_client: Count = 1
    scrub_mib_per_s: Rate = 4.0
    quarantine_mib: Annotated[int, msgspec.Meta(ge=0)] = 256


class IndexTable(_Table, frozen=True, kw_only=True):
    """The Index Service."""

    max_ttl_ms: Count = 3_600_000


class ControllerTable(_Table, frozen=True, kw_only=True):
    """The placement controller."""

    min_status_ttl_ms: Count = 300
    recovery_ms: Count = 10_000
    retry_ms: Count = 500


class LinkTable(_Table, frozen=True, kw_only=True):
    """A link that is known before it is measured."""

    holder: str
    mbit_per_s: Rate
    rtt_us: Rate


class InstanceTable(_Table, frozen=True, kw_only=True):
    """An inference instance. `model` is the folder of a model for the engine `torch`.

    `export_to` are holders that get computed blocks, so that they survive the instance.
    `delay_ms` slows the toy engine down by so much per token.
    """

    engine: str = "toy"
    model: Path | None = None
    scopes: list[Path] = []
    export_to: list[str] = []
    links: list[LinkTable] = []
    pool_mib: Count = 1024
    store_mib: Count = 1024
    status_ttl_ms: Annotated[int, msgspec.Meta(ge=300, le=60_000)] = 3000
    sleep_after_ms: Count | None = None
    keep_prompts: bool = False
    block_tokens: Count = 4
    delay_ms: Rate = 0


class Settings(_Table, frozen=True, kw_only=True):
    """Everything of one server process."""

    roles: list[str] = []
    data_dir: Path | None = None
    dev: bool = False
    listen: ListenTable = ListenTable()
    peers: PeersTable = PeersTable()
    http: HttpTable = HttpTable()
    holder: HolderTable = HolderTable()
    index: IndexTable = IndexTable()
    controller: ControllerTable = ControllerTable()
    instance: InstanceTable = InstanceTable()


TABLES: Final = tuple(
    name
    for name, kind in get_type_hints(Settings).items()
    if isinstance(kind, type) and issubclass(kind, _Table)
)
"""Names of the tables of the file."""


def load_settings(path: Path | None, flags: Mapping[str, Any]) -> Settings:
    """Read a file and put flags over it: `flags` are members of the file, nested alike;
    None is a flag that was not given. Raises SettingsError."""
    tree: dict[str, Any] = {}
    where = "the flags" if path is None else str(path)
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text("utf-8"))
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror or error}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path}: {error}") from None
    _overlay(tree, flags)
    try:
        settings = msgspec.convert(tree, Settings, dec_hook=_convert)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{where}: {error}") from None
    check_settings(settings)
    return settings


def _convert(kind: type, value: Any) -> Any:
    """A path is text in the file."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"expected {kind.__name__}")


def _overlay(tree: dict[str, Any], flags: Mapping[str, Any]) -> None:
    for name, value in flags.items():
        if isinstance(value, Mapping):
            inner = tree.setdefault(name, {})
            if isinstance(inner, dict):
                _overlay(inner, value)
        elif value is not None:
            tree[name] = value


def check_settings(settings: Settings) -> None:
    """Raises SettingsError for what cannot work or must not be."""
    roles = settings.roles
    if not roles:
        raise SettingsError(f"no role is given; name some of {', '.join(ROLES)}")
    for role in roles:
        if role not in ROLES:
            raise SettingsError(f"role {role!r} is none of {', '.join(ROLES)}")
    if len(set(roles)) != len(roles):
        raise SettingsError("a role is given twice")
    listen, peers = settings.listen, settings.peers
    if settings.dev:
        given = [listen.certificate, listen.principals, listen.client_ca, listen.base_uri]
        if any(each is not None for each in given) or listen.insecure:
            raise SettingsError(
                "--dev is plain HTTP on this machine without credentials; leave out certificate, "
                "principals, client_ca, base_uri and insecure, or leave out --dev"
            )
    elif listen.base_uri is None:
        raise SettingsError(
            "the base URI that clients use is missing; set base_uri under [listen] in the "
            "--config file, or use --dev"
        )
    for name, table in (("listen", listen), ("peers", peers)):
        if (table.certificate is None) != (table.key is None):
            raise SettingsError(f"{name}: TLS needs both a certificate and its key")
    if listen.certificate is None and listen.client_ca is not None:
        raise SettingsError("client certificates need TLS: give a certificate and key")
    for name, uri in (
        ("listen.base_uri", listen.base_uri),
        ("peers.index", peers.index),
        ("peers.placement", peers.placement),
        *(("instance.export_to", uri) for uri in settings.instance.export_to),
        *(("instance.links", link.holder) for link in settings.instance.links),
    ):
        _check_uri(name, uri, settings.dev)
    _check_roles(settings)


def _check_uri(name: str, uri: str | None, dev: bool) -> None:
    if uri is None:
        return
    try:
        check_base_uri(uri, http_loopback=dev)
    except DecodeError as error:
        raise SettingsError(f"{name}: {error.detail}") from None


def _check_roles(settings: Settings) -> None:
    roles, peers = settings.roles, settings.peers
    if "instance" in roles and "controller" not in roles and peers.placement is None:
        raise SettingsError("an instance needs a placement controller: set peers.placement")
    if "controller" in roles and "index" not in roles and peers.index is None:
        raise SettingsError("a controller needs an index: add the role or set peers.index")
    if "index" in roles and peers.index is not None:
        raise SettingsError("peers.index is for servers without the role index")
    if settings.holder.disk_mib is not None and settings.data_dir is None:
        raise SettingsError("the disk tier of the holder needs --data-dir")
    if settings.instance.engine not in ("toy", "torch"):
        raise SettingsError("instance.engine is 'toy' or 'torch'")
    if settings.instance.engine == "torch" and settings.instance.model is None:
        raise SettingsError("the engine torch needs a folder with a model: set instance.model")
    if not settings.dev and peers.token_file is None and peers.certificate is None:
        asks = set(roles) != {"index"}
        if asks:
            raise SettingsError(
                "other services need a credential of this one: set peers.token_file or "
                "peers.certificate and key"
            )
