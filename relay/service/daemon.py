"""The relay as a process: sockets, time and signals around `relay.scopes.Scopes`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Protocol

import moqt
from moqt.loop_hold import forget_holds, longest_hold, longest_work
from moqt.quic.config import QuicConfig
from moqt.quic.udp.endpoint import Endpoint
from moqt.quic.udp.sharing import SharedPort
from moqt.session import Session
from moqt.uri import parse_uri
from moqt.values.config import SessionConfig
from relay.core import Relay
from relay.disk.threads import loaded, written
from relay.mesh.directory_client import Connect as Dial
from relay.mesh.directory_client import DirectoryClient, Mesh
from relay.mesh.uplink import Uplink
from relay.mesh.uplink_client import Connect, UplinkClient, Upstream
from relay.rights.tokens import TokenPolicy
from relay.scopes import Scopes
from relay.service.certificate import ServedCertificate
from relay.service.garbage import Garbage
from relay.service.metrics import RelayMetrics
from relay.service.told.answers import Answers, OwnAnswers
from relay.service.told.answers import Upstream as Above
from relay.service.told.process import ProcessMetrics
from relay.service.told.transport import TransportMetrics
from relay.withdrawals import recheck

if TYPE_CHECKING:
    from relay.service.admin import Admin

logger = logging.getLogger("relay")

TICK_SECONDS = 0.5
LOOKS = 5
"""Times in each tick that it is looked how many Objects have come."""
EXPIRED_AT_ONCE = 1024
"""Objects that expire before the sockets have a turn, some milliseconds' worth."""

UPSTREAM_IDLE = 8.0
"""Seconds without a word after which an upstream relay is taken for dead; one that lives is heard
three times in that."""


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
    upstreams: tuple[Upstream, ...] = ()
    """The first is asked first."""
    mesh: Mesh | None = None
    """The directory of relays that this one is of."""
    policy: TokenPolicy | None = None
    """Looks now and then whether its file has changed."""
    certificate: ServedCertificate | None = None
    """That of `quic`, when it is to be followed."""
    drain_timeout: float = 10.0
    """How long sessions have to leave after GOAWAY."""
    shared: SharedPort | None = None
    """The port's socket, where other processes are on it, too."""


class Orders(Protocol):
    """Who tells a relay to stop, or to look at its files again."""

    def begin(self, answers: Answers, stop: Callable[[], None], reload: Callable[[], None]) -> None:
        """It serves: call `stop` to have it drain, once more to cut that short. `answers` are what
        it has to tell."""

    def end(self) -> None:
        """It serves no more: call nothing."""


class Signals:
    """SIGTERM and SIGINT to stop, SIGHUP to look again; whoever started the process is told how it
    is (sd_notify(3))."""

    def begin(self, answers: Answers, stop: Callable[[], None], reload: Callable[[], None]) -> None:
        def hangup() -> None:
            logger.info("SIGHUP: the files of principals and certificate are looked at again")
            notify(f"RELOADING=1\nMONOTONIC_USEC={monotonic_ns() // 1000}")
            reload()
            notify("READY=1")

        def stopping() -> None:
            notify("STOPPING=1")
            stop()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping)
        loop.add_signal_handler(signal.SIGHUP, hangup)
        notify("READY=1")

    def end(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def run(
    scopes: Scopes,
    config: DaemonConfig,
    *,
    ready: Callable[[int, int | None], None] | None = None,
    stop: asyncio.Event | None = None,
    orders: Orders | None = None,
) -> None:
    """Serve until `orders` (those of signals unless given), or `stop`, say not to, then drain.

    `ready` is told the real ports, that of the admin listener second. Raises OSError when an
    address cannot be listened on, DiskUnreadable for a folder of the disk tier that cannot be read.
    """
    orders = orders or Signals()
    stopping = stop or asyncio.Event()
    hurry = asyncio.Event()

    def signalled() -> None:
        (hurry if stopping.is_set() else stopping).set()

    numbers = RelayMetrics(scopes)
    tasks: list[asyncio.Task[None]] = []
    loading: asyncio.Task[None] | None = None
    mesh: DirectoryClient | None = None
    relay_id = config.session.relay_id or secrets.randbits(62)
    uplinks = _uplinks(scopes, config.upstreams)
    answers = _answers(scopes, config, numbers, uplinks)
    listener = await _admin(config, answers)
    try:
        if scopes.disk is not None:
            loading = await loaded(scopes.disk)
            if config.mesh is not None:
                scopes.restore()
        server = await moqt.serve(
            config.host,
            config.port,
            quic=config.quic,
            session=replace(config.session, relay_id=relay_id),
            handler=scopes,
            shared=config.shared,
        )
        try:
            transport = TransportMetrics(server.endpoint)
            numbers.registry.register(transport)
            process = ProcessMetrics(server.endpoint.backend)

            def reload() -> None:
                _reload(scopes, config, server.endpoint, process)

            def look() -> None:
                if config.certificate is not None:
                    config.certificate.look()
                reload()

            numbers.registry.register(process)
            tasks.append(asyncio.create_task(_tick(scopes, numbers, transport, uplinks, reload)))
            for uplink, upstream in zip(uplinks, config.upstreams, strict=True):
                connect = _connect(uplink.relay, upstream, relay_id)
                tasks.append(asyncio.create_task(UplinkClient(uplink, upstream.url, connect).run()))
            if config.mesh is not None:
                here = f"moqt://{show_address(config.host, server.port)}"
                mesh = _mesh(scopes, config.mesh, relay_id, config.mesh.reached_as or here)
                tasks.append(asyncio.create_task(mesh.run()))
            for task in tasks:
                # without its clock the relay would keep what it should forget: rather stop
                task.add_done_callback(lambda _: stopping.set())
            gc.freeze()  # what was imported is no garbage: a look at it takes 40 ms
            forget_holds()  # those of the start
            orders.begin(answers, signalled, look)
            if ready is not None:
                ready(server.port, None if listener is None else listener.port)
            if listener is not None:
                listener.not_ready = None
            await stopping.wait()
            if listener is not None:
                listener.not_ready = "the relay is draining"
            if mesh is not None:
                mesh.leave()
            await _drain(server, config.drain_timeout, hurry)
            if scopes.disk is not None:
                await written(scopes.disk)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await server.close()
            orders.end()
    finally:
        for task in tasks:
            task.cancel()
        if loading is not None:
            loading.cancel()
        if scopes.disk is not None:
            scopes.disk.folder.close()
        if listener is not None:
            await listener.close()


def _uplinks(scopes: Scopes, upstreams: Sequence[Upstream]) -> list[Uplink]:
    """An upstream relay serves the scope of the path it is dialled with, and no other."""
    return [
        Uplink(scopes.keep(parse_uri(each.url).path), announce=each.announce, place=place)
        for place, each in enumerate(upstreams)
    ]


def _answers(
    scopes: Scopes, config: DaemonConfig, numbers: RelayMetrics, uplinks: Sequence[Uplink]
) -> Answers:
    above = [
        Above(upstream.url, partial(_session, uplink))
        for upstream, uplink in zip(config.upstreams, uplinks, strict=True)
    ]
    return OwnAnswers(scopes, numbers.registry, above)


async def _admin(config: DaemonConfig, answers: Answers) -> Admin | None:
    if config.admin is None:
        return None
    # an HTTP server takes a tenth of a second to import: who wants none starts without
    from relay.service.admin import Admin

    listener = Admin(answers, token=config.admin_token)
    await listener.start(*config.admin)
    return listener


def show_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _mesh(scopes: Scopes, mesh: Mesh, relay_id: int, reached_as: str) -> DirectoryClient:
    # a library that only this needs
    from relay.mesh.directory_store import DirectoryError, DirectoryStore

    store = DirectoryStore(
        mesh.url,
        prefix=mesh.prefix,
        timeout_s=mesh.timeout,
        password=mesh.password,
        cafile=mesh.cafile,
    )
    return DirectoryClient(
        scopes,
        store,
        f"{relay_id:016x}",
        reached_as,
        _dialler(mesh.quic, replace(mesh.session, relay_id=relay_id, first_hand=True)),
        failures=(DirectoryError, OSError),
    )


def _session(uplink: Uplink) -> Session | None:
    return uplink.session


def _connect(relay: Relay, upstream: Upstream, relay_id: int) -> Connect:
    dial = _dialler(upstream.quic, replace(upstream.session, relay_id=relay_id))
    return lambda url: dial(url, relay)


def _dialler(quic: QuicConfig, session: SessionConfig) -> Dial:
    """Dials other relays, whose death is to be noticed soon."""
    quic = replace(quic, idle_timeout=min(quic.idle_timeout, UPSTREAM_IDLE))

    async def dial(url: str, relay: Relay) -> moqt.MoqtSession:
        return await moqt.connect(url, quic=quic, session=session, handler=relay)

    return dial


def _reload(
    scopes: Scopes, config: DaemonConfig, endpoint: Endpoint, process: ProcessMetrics
) -> None:
    """Look whether the files of principals and certificate have changed."""
    policy, certificate = config.policy, config.certificate
    if policy is not None and policy.reload():
        for relay in scopes.relays.values():
            recheck(relay)
    if certificate is not None:
        certificate.follow(asyncio.get_running_loop().time(), endpoint.reload_certificate)
        process.certificate = certificate.expires


async def _tick(
    scopes: Scopes,
    numbers: RelayMetrics,
    transport: TransportMetrics,
    uplinks: Sequence[Uplink],
    reload: Callable[[], None],
) -> None:
    loop, garbage = asyncio.get_running_loop(), Garbage()
    while True:
        scopes.tick(loop.time(), EXPIRED_AT_ONCE)
        while scopes.cache.expire_more(EXPIRED_AT_ONCE):  # noqa: ASYNC110  (it is not waited for)
            await asyncio.sleep(0)
        counters = scopes.counters
        ended = counters.sessions - len(scopes.sessions())
        garbage.tick(counters.objects_in, ended, counters.requests)
        for uplink in uplinks:
            uplink.tick(scopes.clock.now)
        reload()
        numbers.update(longest_hold() or 0.0, longest_work() or 0.0, len(asyncio.all_tasks()))
        transport.update()
        for _ in range(LOOKS):
            await asyncio.sleep(TICK_SECONDS / LOOKS)
            garbage.grown(counters.objects_in)


async def _drain(server: moqt.Server, seconds: float, hurry: asyncio.Event) -> None:
    """GOAWAY to all, and time to leave (MOQT "Graceful Session Migration")."""
    deadline = asyncio.get_running_loop().time() + seconds
    left = seconds
    logger.info("draining %d sessions", len(server.sessions))
    server.refuse_new("the relay is going away; another may take its place here")
    while server.sessions and not hurry.is_set():
        server.goaway(timeout_ms=max(1, round(left * 1000)))  # those, too, that have just come
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            logger.info("%d sessions have not left", len(server.sessions))
            return
        await asyncio.sleep(0.05)


def notify(state: str) -> None:
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
