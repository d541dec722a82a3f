"""The relay as a process: sockets, time and signals around `relay.scopes.Scopes`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import moqt
from moqt.loop_hold import longest_hold
from moqt.quic.config import QuicConfig
from moqt.quic.udp.endpoint import Endpoint
from moqt.uri import parse_uri
from moqt.values.config import SessionConfig
from relay.core import Relay
from relay.disk.threads import loaded, written
from relay.mesh.uplink import Uplink
from relay.mesh.uplink_client import Connect, UplinkClient
from relay.rights.tokens import TokenPolicy
from relay.scopes import Scopes
from relay.service.certificate import ServedCertificate
from relay.service.garbage import Garbage
from relay.service.metrics import RelayMetrics
from relay.service.transport_metrics import TransportMetrics
from relay.withdrawals import recheck

if TYPE_CHECKING:
    from relay.service.admin import Admin

logger = logging.getLogger("relay")

TICK_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """The relay behind which this one stands."""

    url: str
    quic: QuicConfig
    session: SessionConfig = field(default_factory=SessionConfig)
    announce: bool = False
    """Announce there what is published here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """Where a relay listens, and how it leaves."""

    host: str
    port: int
    quic: QuicConfig
    session: SessionConfig = field(default_factory=SessionConfig)
    """What every session is held to."""
    admin: tuple[str, int] | None = None
    """Where to answer over HTTP how it is (`relay.service.admin`)."""
    admin_token: bytes | None = None
    upstream: Upstream | None = None
    policy: TokenPolicy | None = None
    """Looks now and then whether its file has changed."""
    certificate: ServedCertificate | None = None
    """That of `quic`, when it is to be followed."""
    drain_timeout: float = 10.0
    """How long sessions have to leave after GOAWAY."""


async def run(
    scopes: Scopes,
    config: DaemonConfig,
    *,
    ready: Callable[[int, int | None], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT (or `stop`), then drain; a second signal cuts it short.

    SIGHUP has the files of principals and certificate looked at again.
    `ready` is told the real ports, that of the admin listener second. Raises OSError when an
    address cannot be listened on, DiskUnreadable for a folder of the disk tier that cannot be read.
    """
    loop = asyncio.get_running_loop()
    stopping = stop or asyncio.Event()
    hurry = asyncio.Event()

    def signalled() -> None:
        (hurry if stopping.is_set() else stopping).set()

    def hangup() -> None:
        logger.info("SIGHUP: the files of principals and certificate are looked at again")
        if config.certificate is not None:
            config.certificate.look()  # those of principals are with every tick

    numbers = RelayMetrics(scopes)
    ticking: asyncio.Task[None] | None = None
    connecting: asyncio.Task[None] | None = None
    uplink = _uplink(scopes, config.upstream)
    listener = await _admin(scopes, config, numbers, uplink)
    loading: asyncio.Task[None] | None = None
    try:
        if scopes.disk is not None:
            loading = await loaded(scopes.disk)
        server = await moqt.serve(
            config.host, config.port, quic=config.quic, session=config.session, handler=scopes
        )
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, signalled)
            loop.add_signal_handler(signal.SIGHUP, hangup)
            transport = TransportMetrics(server.endpoint)
            numbers.registry.register(transport)
            ticking = asyncio.create_task(
                _tick(scopes, numbers, transport, config, uplink, server.endpoint)
            )
            # without its clock the relay would keep what it should forget: rather stop
            ticking.add_done_callback(lambda _: stopping.set())
            if config.upstream is not None and uplink is not None:
                client = UplinkClient(
                    uplink, config.upstream.url, _connect(uplink.relay, config.upstream)
                )
                connecting = asyncio.create_task(client.run())
                connecting.add_done_callback(lambda _: stopping.set())
            if ready is not None:
                ready(server.port, None if listener is None else listener.port)
            if listener is not None:
                listener.not_ready = None
            _notify("READY=1")
            await stopping.wait()
            if listener is not None:
                listener.not_ready = "the relay is draining"
            _notify("STOPPING=1")
            await _drain(server, config.drain_timeout, hurry)
            if scopes.disk is not None:
                await written(scopes.disk)
            for task in (ticking, connecting):
                if task is not None and task.done():
                    task.result()
        finally:
            await server.close()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)
    finally:
        for task in (ticking, connecting, loading):
            if task is not None:
                task.cancel()
        if scopes.disk is not None:
            scopes.disk.folder.close()
        if listener is not None:
            await listener.close()


def _uplink(scopes: Scopes, upstream: Upstream | None) -> Uplink | None:
    """The upstream relay serves the scope of the path it is dialled with, and no other."""
    if upstream is None:
        return None
    relay = scopes.keep(parse_uri(upstream.url).path)
    return Uplink(relay, announce=upstream.announce)


async def _admin(
    scopes: Scopes, config: DaemonConfig, numbers: RelayMetrics, uplink: Uplink | None
) -> Admin | None:
    if config.admin is None:
        return None
    # an HTTP server takes a tenth of a second to import: who wants none starts without
    from relay.service import admin

    above = None
    if uplink is not None and config.upstream is not None:
        above = admin.Upstream(config.upstream.url, lambda: uplink.session)
    listener = admin.Admin(scopes, numbers.registry, token=config.admin_token, upstream=above)
    await listener.start(*config.admin)
    return listener


def _connect(relay: Relay, upstream: Upstream) -> Connect:
    async def connect(url: str) -> moqt.MoqtSession:
        return await moqt.connect(url, quic=upstream.quic, session=upstream.session, handler=relay)

    return connect


async def _tick(
    scopes: Scopes,
    numbers: RelayMetrics,
    transport: TransportMetrics,
    config: DaemonConfig,
    uplink: Uplink | None,
    endpoint: Endpoint,
) -> None:
    policy, certificate = config.policy, config.certificate
    loop, garbage = asyncio.get_running_loop(), Garbage()
    while True:
        scopes.tick(loop.time())
        counters = scopes.counters
        ended = counters.sessions - len(scopes.sessions())
        garbage.tick(counters.objects_in, ended, counters.requests)
        if uplink is not None:
            uplink.tick(scopes.clock.now)
        if policy is not None and policy.reload():
            for relay in scopes.relays.values():
                recheck(relay)
        if certificate is not None:
            certificate.follow(loop.time(), endpoint.reload_certificate)
        numbers.update(longest_hold() or 0.0)
        transport.update()
        await asyncio.sleep(TICK_SECONDS)


async def _drain(server: moqt.Server, seconds: float, hurry: asyncio.Event) -> None:
    """GOAWAY to all, and time to leave (MOQT "Graceful Session Migration")."""
    deadline = asyncio.get_running_loop().time() + seconds
    left = seconds
    logger.info("draining %d sessions", len(server.sessions))
    while server.sessions and not hurry.is_set():
        server.goaway(timeout_ms=max(1, round(left * 1000)))  # those, too, that have just come
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            logger.info("%d sessions have not left", len(server.sessions))
            return
        await asyncio.sleep(0.05)


def _notify(state: str) -> None:
    """Tell the supervisor that started this process, if one wants to be told (sd_notify(3)).

    One that cannot be reached stops nothing.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    if address[0] == "@":  # of the abstract namespace
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.connect(address)
        to.send(state.encode())
