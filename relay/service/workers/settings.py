"""What a worker is told when it starts: all is in here, and nothing on its command line."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from moqt.quic.config import QuicConfig
from moqt.token_file import bearer
from moqt.values.config import SessionConfig
from relay.config import RelayConfig
from relay.mesh.directory_client import Mesh
from relay.mesh.uplink_client import Upstream
from relay.service.told.logs import LogFormat

HOME: Final = "home"
"""The name of the home; edges are called by their numbers."""
MOST: Final = 64
"""Workers of one relay: no machine gains by more."""
PASSING_OCTETS: Final = 16 << 20
"""What an edge may keep of what publishers bring, while the home has not got it yet."""
_MANY: Final = 1 << 30
_STREAMS: Final = (1 << 20) - 1


class Way(StrEnum):
    """What a session from an edge to the home is for."""

    SERVING = "serving"
    """The edge asks for what its clients want."""
    BRINGING = "bringing"
    """The home asks for what publishers at the edge have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """Of one start of a relay: by what is made from it the home knows its edges."""

    key: bytes = field(repr=False)

    def value(self, way: Way, number: int) -> bytes:
        """The token's value of the edge `number` on that way."""
        return hmac.digest(self.key, f"{way}:{number}".encode(), "sha256").hex().encode()

    def token(self, way: Way, number: int) -> bytes:
        """The same as SETUP has it."""
        return bearer(self.value(way, number))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sockets:
    """Numbers of inherited files: what a worker listens on (`moqt.quic.udp.sharing`)."""

    udp: int
    inbox: int
    outboxes: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        return self.udp, self.inbox, *self.outboxes


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One worker's."""

    number: int | None
    """Of an edge; None for the home."""
    edges: int
    sockets: Sockets
    relay: RelayConfig
    session: SessionConfig
    quic: QuicConfig
    secret: Secret
    home_port: int
    """Where the home listens, on 127.0.0.1."""
    home_cert: Path
    auth: Path | None = None
    cache_dir: Path | None = None
    upstreams: tuple[Upstream, ...] = ()
    mesh: Mesh | None = None
    drain_timeout: float = 10.0
    log_level: int = 30
    log_format: LogFormat = LogFormat.TEXT

    @property
    def name(self) -> str:
        return HOME if self.number is None else str(self.number)


def of_home(config: RelayConfig, workers: int) -> RelayConfig:
    """Its part of what the relay may hold: half of the cache, and all of the disk. Namespaces of
    one session are those of an edge, which has held its clients to what one may have."""
    return replace(
        config,
        cache_octets=max(1, config.cache_octets // 2),
        cache_octets_per_scope=config.cache_octets_per_scope // 2,
        max_namespaces_per_session=config.max_namespaces,
    )


def of_edge(config: RelayConfig, workers: int) -> RelayConfig:
    """The other half of the cache is shared out to the edges; the disk is the home's."""
    per_scope = config.cache_octets_per_scope // (2 * workers)
    return replace(
        config,
        cache_octets=max(1, config.cache_octets // (2 * workers)),
        cache_octets_per_scope=max(1, per_scope) if config.cache_octets_per_scope else 0,
    )


def passing(config: RelayConfig) -> RelayConfig:
    """For what publishers bring to an edge: it is kept by the home."""
    return replace(
        config, cache_octets=min(config.cache_octets, PASSING_OCTETS), cache_octets_per_scope=0
    )


def between(session: SessionConfig) -> SessionConfig:
    """Of sessions between edges and home: they are of many clients, each of which is held to the
    limits of one where it comes in."""
    return replace(
        session,
        max_requests=_STREAMS,
        max_request_rate=_MANY,
        max_request_octets=_MANY,
        max_queued_requests=_STREAMS,
        max_track_aliases=_STREAMS,
        max_held_octets=max(session.max_held_octets, 64 << 20),
    )


def between_quic(quic: QuicConfig, cert: Path) -> QuicConfig:
    """The same of their connections, on loopback, with a certificate of this start."""
    return replace(
        quic,
        certfile=None,
        keyfile=None,
        reset_key_file=None,
        cafile=cert,
        server_name=None,
        qlog_dir=None,
        keylog_file=None,
        webtransport=False,
        max_connections=_STREAMS,
        max_connections_per_address=_STREAMS,
        max_open_streams_bidi=_STREAMS,
        max_open_streams_uni=_STREAMS,
    )
