"""The settings of a KVSP server: its tables, what each setting is, and what cannot be meant.

The sentence under a setting is its line in docs/configuration.md. Limits are the classes that
the roles are held to, so that a limit has one name in a file, in Python and in the log.
`sources` reads settings from a file, the environment and flags.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec

from kvsp.client.limits import ClientLimits
from kvsp.controller.core.limits import ControllerLimits
from kvsp.holder.leases.table import LeaseQuota
from kvsp.http.limits import HttpLimits
from kvsp.index.service import IndexLimits
from kvsp.index.store import StoreLimits
from kvsp.instance.core.limits import InstanceLimits
from kvsp.names.bounds import Count, Rate, Seconds, Whole
from kvsp.names.errors import DecodeError, KvspError
from kvsp.names.uris import check_base_uri

ROLES: Final = ("holder", "index", "controller", "instance")
MIB: Final = 1 << 20


class SettingsError(KvspError):
    """A setting is missing, wrong or unsafe; the message is one sentence that says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenTable:
    """Where to listen, and who may come in."""

    address: str = "127.0.0.1:0"
    """HOST:PORT; port 0 takes a free one."""

    base_uri: str | None = None
    """The base URI that clients and records name; needed unless `dev` is set."""

    certificate: Path | None = None
    """The server's certificate, with those between it and an authority, as PEM."""

    key: Path | None = None
    """The private key of `certificate`, as PEM without a password."""

    client_ca: Path | None = None
    """Certificates of authorities; clients with a certificate of theirs need no token."""

    principals: Path | None = None
    """Who may do what (docs/kvsp.md, The HTTP services); not set: clients on this machine alone."""

    insecure: bool = False
    """Listen beyond this machine even without TLS, behind a proxy that ends it."""

    drain_s: Seconds = 10.0
    """Longest time to tell peers of the end, and as much again for open requests to finish."""

    idle_s: Count = 75
    """How long a connection without a request stays open."""

    moqt: tuple[str, ...] = ()
    """Relays that `/.well-known/kvsp` names to clients, as `moqt://` URIs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersTable:
    """The other services, and what this server shows them."""

    index: str | None = None
    """Base URI of the index service, for servers without the role `index`."""

    placement: tuple[str, ...] = ()
    """Base URIs of the placement controllers, for instances: those that share a journal, of which
    one leads. One may stand without brackets."""

    cafile: Path | None = None
    """Who signed the peers' certificates, when no public authority did."""

    token_file: Path | None = None
    """The bearer token shown to peers, in a file that only its owner may read."""

    certificate: Path | None = None
    """The client certificate shown to peers."""

    key: Path | None = None
    """The private key of `certificate`."""

    index_s: Seconds = 10.0
    """How long a holder waits for an answer of the index service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectsTable:
    """The object storage tier of a holder (tier `remote`; extra `s3`). Several holders may have
    one `url`: an object is named by its digest, and stays while one of them refers to it.
    Credentials come from `credentials_file`, or else from where the provider's tools look for
    them (`AWS_…` variables, the machine's role)."""

    url: str | None = None
    """Where blocks go: `s3://bucket/prefix`, `gs://…`, `az://…`, `https://…` or `file:///…`."""

    mib: Count | None = None
    """The budget, in MiB: of the blocks that this holder has there, whoever stored them; not
    set: without bound."""

    endpoint: str | None = None
    """Base URL of an S3 service that is not Amazon's."""

    region: str | None = None
    """Region of the bucket."""

    credentials_file: Path | None = None
    """A TOML file that only its owner may read, with the provider's options, for example
    `access_key_id` and `secret_access_key`."""

    request_s: Seconds = 30.0
    """Longest time for one request of the store, its retries included."""

    look_s: Rate = 60.0
    """So often the store is listed for blocks that other holders stored, which this one then
    serves and publishes as well, and for those that somebody removed; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderTable:
    """A holder of blocks. The disk tier needs a data directory, and is there by default with
    one when no budget is given; new blocks go to the first tier that outlives the process."""

    host_mib: Count | None = None
    """Budget of the memory tier, in MiB; not set: 1024 when no other budget is given."""

    disk_mib: Count | None = None
    """Budget of the disk tier, in MiB; not set: 16384 when there is a data directory and no
    other budget is given."""

    record_ttl_ms: Count = 600_000
    """TTL of the records that are published; they are kept alive in time."""

    records_per_request: Count = 256
    """Records published by one request, of which an index service takes `index.records`."""

    withdraw_s: Seconds = 2.0
    """How long an eviction waits for its withdrawal at the index; it is repeated later."""

    container_octets: Count = 2 << 30
    """Octets of a container in a PUT; beyond, 413."""

    uploads: Count = 64
    """Blocks being stored at once; one more is answered with 503."""

    uploads_per_client: Count = 32
    """The same of one client; one more is answered with 429."""

    transcodings: Count = 2
    """Blocks being transcoded at once; one more is answered with 503."""

    transcodings_per_client: Count = 1
    """The same of one client; one more is answered with 429."""

    checks: Count = 2
    """Blocks being read at once for no answer of theirs: to verify one that a client doubts, or
    for the digest that a HEAD shows. The others wait their turn."""

    checks_per_client: Count = 1
    """The same of one client; one more is answered with 429."""

    lossy_transcoding: bool = False
    """Serve blocks in lossy codecs, too."""

    scratch_dir: Path | None = None
    """Folder for temporary files of transcodings; not set: the system's."""

    verify_at_start: bool = False
    """Read every block on disk at the start, instead of its ends."""

    verified_s: Seconds = 60.0
    """A copy that was found sound is not read again for somebody who doubts it for so long."""

    scrub_mib_per_s: Rate = 4.0
    """Blocks on disk are read and verified at this rate; 0: never."""

    quarantine_mib: Whole = 256
    """Damaged files on disk that are kept to be looked at, in MiB."""

    leases: LeaseQuota = field(default_factory=LeaseQuota)
    objects: ObjectsTable = field(default_factory=ObjectsTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisServerTable:
    """What is to be known of a Valkey or Redis server."""

    url: str | None = None
    """`redis://HOST:PORT/DB`, `rediss://…` for TLS, or `unix:///PATH`, without a password."""

    username: str | None = None
    """Who this server is there."""

    password_file: Path | None = None
    """The password, in a file that only its owner may read."""

    cafile: Path | None = None
    """Who signed the server's certificate, when no public authority did."""

    prefix: str = "kvsp"
    """What every key begins with: deployments that share a server have different ones."""

    timeout_s: Seconds = 5.0
    """How long the server may take to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisTable(RedisServerTable):
    """A Valkey or Redis server as the store of the index (extra `redis`), which several index
    processes may share; not set: a SQLite file in the data directory, or memory."""

    threads: Count = 8
    """Requests to the server at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexTable(IndexLimits):
    """The Index Service."""

    sweep_s: Seconds = 1.0
    """Pause between removals of expired records."""

    sweep_records: Count = 10_000
    """Records that one removal takes, about."""

    instances: Count = 10_000
    """Instances whose status is known; the one heard of longest ago goes first."""

    cache_octets: Count = 64 * MIB
    """Of the SQLite file in memory."""

    store: StoreLimits = field(default_factory=StoreLimits)
    redis: RedisTable = field(default_factory=RedisTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalTable(RedisServerTable):
    """A Valkey or Redis server as the journal of several placement controllers (extra `redis`),
    of which one leads and the others stand by; not set: a SQLite file in the data directory, or
    memory, of one controller. The server has to keep what it took: `appendonly yes`,
    `appendfsync always`, `maxmemory-policy noeviction`. `url` may also be of Sentinels
    (`redis+sentinel://HOST:PORT,HOST:PORT/NAME`) or of a cluster (`redis+cluster://HOST:PORT`)."""

    replicas: Whole = 0
    """How many replicas have to have a write before it counts: as many as may be promoted, or
    one that is promoted may lack what was acknowledged. With fewer there, nothing is written."""

    timeout_s: Seconds = 1.0
    """How long the server may take to answer."""

    lease_ms: Annotated[int, msgspec.Meta(ge=300)] = 3000
    """How long after the leader was last heard of another controller takes over; the lease is
    renewed three times in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerTable(ControllerLimits):
    """The placement controller."""

    max_cost_us: Count | None = None
    """An instance of higher cost gets no request; not set: the cheapest does, whatever it is."""

    redis: JournalTable = field(default_factory=JournalTable)


class LinkTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link that is known before it is measured."""

    holder: str
    mbit_per_s: Rate
    rtt_us: Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceTable(InstanceLimits):
    """An inference instance."""

    engine: Literal["toy", "torch"] = "toy"
    """What computes: `toy`, or `torch` with a model (extra `torch`)."""

    model: Path | None = None
    """The folder of a model for the engine `torch`."""

    block_tokens: Count = 4
    """Tokens of a block."""

    delay_ms: Rate = 0.0
    """Slows the toy engine down by so much per token."""

    scopes: tuple[Path, ...] = ()
    """Files of the scopes it serves (`kvcs-keygen scope`); publications are opened with their
    content keys."""

    producers: Path | None = None
    """Take of publications only what one in this file has signed (`kvcs-keygen producer`)."""

    export_to: tuple[str, ...] = ()
    """Base URIs of holders that get computed blocks, so that they survive the instance."""

    links: tuple[LinkTable, ...] = ()
    """Links to holders that are known before they are measured: `holder`, `mbit_per_s`,
    `rtt_us` of each."""

    store_mib: Count = 1024
    """Budget of the instance's own store, in MiB, in which others find its blocks."""

    store_tier: Literal["host", "device"] = "host"
    """What records call the memory of that store: `device` where it is the accelerator's own,
    as on machines with one memory for both."""

    keep_prompts: bool = False
    """Checkpoints carry the prompt, so that a session outlives the loss of a prompt block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of the whole process."""

    roles: tuple[str, ...] = ()
    """Any of `holder`, `index`, `controller`, `instance`."""

    data_dir: Path | None = None
    """Keeps what is to survive a restart; one process's own. Not set: nothing survives."""

    dev: bool = False
    """Plain HTTP on this machine, without credentials."""

    listen: ListenTable = field(default_factory=ListenTable)
    peers: PeersTable = field(default_factory=PeersTable)
    client: ClientLimits = field(default_factory=ClientLimits)
    http: HttpLimits = field(default_factory=HttpLimits)
    holder: HolderTable = field(default_factory=HolderTable)
    index: IndexTable = field(default_factory=IndexTable)
    controller: ControllerTable = field(default_factory=ControllerTable)
    instance: InstanceTable = field(default_factory=InstanceTable)


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
        *(("peers.placement", uri) for uri in peers.placement),
        *(("instance.export_to", uri) for uri in settings.instance.export_to),
        *(("instance.links", link.holder) for link in settings.instance.links),
    ):
        _check_uri(name, uri, settings.dev)
    for uri in listen.moqt:
        if not uri.startswith("moqt://"):
            raise SettingsError(f"listen.moqt: {uri!r} does not begin with moqt://")
    _check_roles(settings)
    _check_stores(settings)


def _check_uri(name: str, uri: str | None, dev: bool) -> None:
    if uri is None:
        return
    try:
        check_base_uri(uri, http_loopback=dev)
    except DecodeError as error:
        raise SettingsError(f"{name}: {error.detail}") from None


def _check_roles(settings: Settings) -> None:
    roles, peers = settings.roles, settings.peers
    if "instance" in roles and "controller" not in roles and not peers.placement:
        raise SettingsError("an instance needs a placement controller: set peers.placement")
    if "controller" in roles and "index" not in roles and peers.index is None:
        raise SettingsError("a controller needs an index: add the role or set peers.index")
    if "index" in roles and peers.index is not None:
        raise SettingsError("peers.index is for servers without the role index")
    if settings.instance.engine == "torch" and settings.instance.model is None:
        raise SettingsError("the engine torch needs a folder with a model: set instance.model")
    if not settings.dev and peers.token_file is None and peers.certificate is None:
        asks = set(roles) != {"index"}
        if asks:
            raise SettingsError(
                "other services need a credential of this one: set peers.token_file or "
                "peers.certificate and key"
            )


def _check_stores(settings: Settings) -> None:
    if settings.holder.disk_mib is not None and settings.data_dir is None:
        raise SettingsError("the disk tier of the holder needs --data-dir")
    objects = settings.holder.objects
    if objects.url is None:
        if objects != ObjectsTable():
            raise SettingsError("holder.objects.url is missing: it says where blocks go")
    elif settings.data_dir is None:
        raise SettingsError(
            "blocks in an object store outlive the process, and so have leases "
            "on them to: set --data-dir, which keeps those"
        )
    for name, url in (
        ("holder.objects.url", objects.url),
        ("index.redis.url", _redis("index", settings.index.redis, RedisTable())),
        ("controller.redis.url", _redis("controller", settings.controller.redis, JournalTable())),
    ):
        if url is not None and "@" in urlsplit(url).netloc:
            raise SettingsError(
                f"{name} has a user or a password in it; a file keeps those: "
                f"set {name.rpartition('.')[0]}.{_SECRETS[name]}"
            )


_SECRETS: Final = {
    "holder.objects.url": "credentials_file",
    "index.redis.url": "username and password_file",
    "controller.redis.url": "username and password_file",
}


def _redis(role: str, table: RedisServerTable, unset: RedisServerTable) -> str | None:
    if table.url is None and table != unset:
        raise SettingsError(f"{role}.redis.url is missing: it says where the server is")
    return table.url
