"""The process that an operator starts with `--workers N`: it has the sockets, starts the home and
the edges, again when they die, passes on what it is told, and answers for all of them.

It serves nobody itself, and what it has outlives any of the others: the sockets of the port, with
what waits in them, and the place of the home. A worker that dies costs its sessions alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from moqt.backoff import Backoff
from moqt.quic.certificates import make_self_signed
from moqt.quic.udp.binding import bound
from moqt.quic.udp.socket import UdpSocket
from relay.config import RelayConfig
from relay.mesh.directory_client import Mesh
from relay.service.admin import Admin
from relay.service.checks import Failure
from relay.service.daemon import DaemonConfig, Orders, Signals, show_address
from relay.service.told.answers import Query
from relay.service.told.logs import LogFormat
from relay.service.workers.channel import Channel, send_settings
from relay.service.workers.gathered import Gathered, NotTold
from relay.service.workers.settings import (
    Secret,
    Sockets,
    WorkerSettings,
    between_quic,
    of_edge,
    of_home,
)

logger = logging.getLogger("relay")

START_SECONDS: Final = 60.0
"""That a worker may take until it serves."""
ASK_SECONDS: Final = 5.0
"""That a worker may take to answer the admin listener."""
BEYOND_SECONDS: Final = 10.0
"""That a worker may take to end, beyond the time that its sessions have; then it is killed."""
FOLLOW_SECONDS: Final = 5.0
"""Between two looks whether the certificate is to be renewed."""
VALIDITY: Final = timedelta(days=3650)
"""Of the certificate between the workers, which is of one start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A relay in several processes."""

    workers: int
    daemon: DaemonConfig
    """As it would be for one process."""
    relay: RelayConfig
    auth: Path | None = None
    cache_dir: Path | None = None
    log_level: int = logging.WARNING
    log_format: LogFormat = LogFormat.TEXT


class Child:
    """One worker, whichever process it is by now."""

    def __init__(self, settings: WorkerSettings, died: Callable[[Child], None]) -> None:
        """`died` is told when it is gone, and before it is started again."""
        self.settings = settings
        self.name = settings.name
        self.up = False
        self.restarts = 0
        self.serving = asyncio.Event()
        """It has served, once."""
        self.failure: str | None = None
        """Why it could not begin to serve."""
        self._died = died
        self._stopping = False
        self._channel: Channel | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._number = 0

    @property
    def title(self) -> str:
        return f"worker {self.name}"

    async def run(self) -> None:
        """Start it, and again when it dies, until it is to stop."""
        loop, backoff = asyncio.get_running_loop(), Backoff(first=0.1, most=10.0)
        while not self._stopping:
            began = loop.time()
            code = await self._live()
            if self._stopping or not self.serving.is_set():
                return
            wait = backoff.next(loop.time() - began)
            logger.error(
                "%s has died (%s): its sessions are lost, it is started again in %.1f s",
                self.title,
                _ended(code),
                wait,
            )
            self._died(self)
            await asyncio.sleep(wait)
            self.restarts += 1

    async def _live(self) -> int:
        """One life of it: its exit status."""
        ours, theirs = socket.socketpair()
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # what lies in the folder where it was started is none of its modules
                "-m",
                "relay.service.workers.process",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *self.settings.sockets.all),
                env={k: v for k, v in os.environ.items() if k != "NOTIFY_SOCKET"},
                start_new_session=True,  # a terminal's signals are for the supervisor
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            with contextlib.suppress(OSError):  # it is gone already
                send_settings(ours, self.settings)
            ours.setblocking(False)
            self._channel = channel = await Channel.over(ours)
            if self._stopping:
                channel.send({"do": "stop"})
            async for message in channel.messages():
                self._heard(message)
            return await process.wait()
        finally:
            self.up = False
            for waiting in self._asked.values():
                if not waiting.done():
                    waiting.set_exception(NotTold(f"{self.title} is gone"))
            if self._channel is not None:
                self._channel.close()
                self._channel = None
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    def _heard(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.up = True
            if self.restarts:
                logger.warning("%s serves again", self.title)
            self.serving.set()
        elif "failed" in message:
            self.failure = message["failed"]
            logger.error("%s cannot serve: %s", self.title, self.failure)
        elif "of" in message:
            waiting = self._asked.get(message["of"])
            if waiting is None or waiting.done():
                return
            if "fault" in message:
                waiting.set_exception(ValueError(message["fault"]))
            elif "told" not in message:
                waiting.set_exception(NotTold(f"{self.title} does not serve"))
            else:
                waiting.set_result(message["told"])

    def tell(self, **message: Any) -> None:
        """Say it, if the worker is there."""
        if self._channel is not None:
            self._channel.send(message)

    async def ask(self, what: str, query: Query) -> Any:
        """Its answer. Raises NotTold, and ValueError for a query that cannot be meant."""
        if not self.up:
            raise NotTold(f"{self.title} is not there")
        self._number += 1
        number = self._number
        waiting = self._asked[number] = asyncio.get_running_loop().create_future()
        self.tell(do="tell", id=number, what=what, query=dict(query))
        try:
            async with asyncio.timeout(ASK_SECONDS):
                return await waiting
        except TimeoutError:
            raise NotTold(f"{self.title} does not answer") from None
        finally:
            del self._asked[number]

    def stop(self) -> None:
        """Have it drain and end; said again, without waiting for its sessions."""
        self._stopping = True
        self.tell(do="stop")

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def _ended(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"


class Supervisor:
    """All workers of a relay."""

    def __init__(self, plan: Plan, children: Sequence[Child]) -> None:
        """The home is the first one."""
        self._plan = plan
        self.children = children
        self._stopping = asyncio.Event()
        self._stops = 0

    def stop(self) -> None:
        """Edges drain first: what they still serve comes from the home. Said again, nobody does."""
        self._stops += 1
        self._stopping.set()
        for child in self.children[0 if self._stops > 1 else 1 :]:
            child.stop()

    def reload(self) -> None:
        """Have the files of principals and certificate looked at again."""
        if self._plan.daemon.certificate is not None:
            self._plan.daemon.certificate.look()
            self._follow()
        for child in self.children:
            child.tell(do="reload")

    def died(self, child: Child) -> None:
        """The others need not find out by time."""
        for other in self.children:
            if other is not child:
                other.tell(do="gone", who=child.name)

    def _follow(self) -> None:
        """Renew a certificate of our own; the edges read what is there."""
        certificate = self._plan.daemon.certificate
        if certificate is not None:
            certificate.follow(asyncio.get_running_loop().time(), lambda: None)

    async def _following(self) -> None:
        while True:
            self._follow()
            await asyncio.sleep(FOLLOW_SECONDS)

    async def run(self, listener: Admin | None, ready: Callable[[], None], orders: Orders) -> None:
        """Until it is told to stop. Raises Failure when a worker cannot begin to serve."""
        lives = [asyncio.ensure_future(child.run()) for child in self.children]
        following = asyncio.ensure_future(self._following())
        try:
            await self._started(lives)
            orders.begin(Gathered(self.children), self.stop, self.reload)
            ready()
            if listener is not None:
                listener.not_ready = None
            await self._until_stopped(lives, following)
            if listener is not None:
                listener.not_ready = "the relay is draining"
            patience = self._plan.daemon.drain_timeout + BEYOND_SECONDS
            await self._ended(lives[1:], patience)
            self.children[0].stop()
            await self._ended(lives[:1], BEYOND_SECONDS + self._plan.daemon.drain_timeout)
        finally:
            orders.end()
            following.cancel()
            for child in self.children:
                child.stop()  # and start nothing again
                child.kill()
            await asyncio.gather(*lives, return_exceptions=True)
            await asyncio.gather(following, return_exceptions=True)

    async def _started(self, lives: Sequence[asyncio.Future[None]]) -> None:
        serving = [asyncio.ensure_future(child.serving.wait()) for child in self.children]
        try:
            left: set[asyncio.Future[Any]] = set(serving)
            async with asyncio.timeout(START_SECONDS):
                while left:
                    done, _ = await asyncio.wait(
                        {*left, *lives}, return_when=asyncio.FIRST_COMPLETED
                    )
                    for child, life in zip(self.children, lives, strict=True):
                        if life.done():
                            life.result()
                            raise Failure(child.failure or f"{child.title} ended at once")
                    left -= done
        except TimeoutError:
            raise Failure(f"a worker has not begun to serve within {START_SECONDS:g} s") from None
        finally:
            for each in serving:
                each.cancel()

    async def _until_stopped(
        self, lives: Sequence[asyncio.Future[None]], following: asyncio.Future[None]
    ) -> None:
        stopping = asyncio.ensure_future(self._stopping.wait())
        watched: set[asyncio.Future[Any]] = {stopping, following, *lives}
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in (following, *lives):
                if task.done():
                    task.result()  # none of them ends by itself
        finally:
            stopping.cancel()

    async def _ended(self, lives: Sequence[asyncio.Future[None]], seconds: float) -> None:
        if lives:
            _, left = await asyncio.wait(lives, timeout=seconds)
            if left:
                logger.error(
                    "%d workers have not ended in %g s: they are killed", len(left), seconds
                )


async def supervise(plan: Plan, *, ready: Callable[[int, int | None], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal cuts that short.

    `ready` is told the real ports, that of the admin listener second. Raises OSError when an
    address cannot be listened on, and Failure when a worker cannot serve.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvcs-relay-"))
    ports: list[UdpSocket] = []
    pairs: list[tuple[socket.socket, socket.socket]] = []
    listener: Admin | None = None
    try:
        ports += await _ports(plan)
        pairs += [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in ports]
        for each in (each for pair in pairs for each in pair):
            each.setblocking(False)
        supervisor: Supervisor
        children = [
            Child(settings, lambda child: supervisor.died(child))
            for settings in _settings(plan, folder, ports, pairs)
        ]
        supervisor = Supervisor(plan, children)
        config = plan.daemon
        if config.admin is not None:
            listener = Admin(Gathered(children), token=config.admin_token)
            await listener.start(*config.admin)
        port = ports[1].address[1]
        admin_port = None if listener is None else listener.port
        await supervisor.run(listener, lambda: ready(port, admin_port), Signals())
    finally:
        if listener is not None:
            await listener.close()
        for udp in ports:
            udp.close()
        for pair in pairs:
            for each in pair:
                each.close()
        shutil.rmtree(folder, ignore_errors=True)


async def _ports(plan: Plan) -> list[UdpSocket]:
    """The home's socket, and one of the port for each edge."""
    config = plan.daemon
    size = config.quic.socket_buffer
    home = await bound("127.0.0.1", 0, buffer_size=size)
    ports = [home]
    try:
        ports.append(await bound(config.host, config.port, buffer_size=size, shared=True))
        at = ports[1].address
        for _ in range(1, plan.workers):
            ports.append(UdpSocket(ports[1].sock.family, local=at, buffer_size=size, shared=True))
    except BaseException:
        for each in ports:
            each.close()
        raise
    return ports


def _settings(
    plan: Plan,
    folder: Path,
    ports: Sequence[UdpSocket],
    pairs: Sequence[tuple[socket.socket, socket.socket]],
) -> list[WorkerSettings]:
    """Of the home, and of the edges."""
    config, workers = plan.daemon, plan.workers
    cert, key = make_self_signed(folder, ["127.0.0.1"], validity=VALIDITY)
    home_port: int = ports[0].address[1]
    outboxes = tuple(outbox.fileno() for _, outbox in pairs[1:])
    quic = config.quic
    if quic.reset_key_file is None:
        # so that those who were served by a worker that has died learn it from the next one
        quic = replace(quic, reset_key_file=folder / "reset.key")
    home = WorkerSettings(
        number=None,
        edges=workers,
        sockets=Sockets(udp=ports[0].sock.fileno(), inbox=pairs[0][0].fileno(), outboxes=()),
        relay=of_home(plan.relay, workers),
        session=config.session,
        quic=replace(
            between_quic(quic, cert),
            cafile=None,
            certfile=cert,
            keyfile=key,
            reset_key_file=folder / "home-reset.key",
        ),
        secret=Secret(key=secrets.token_bytes(32)),
        home_port=home_port,
        home_cert=cert,
        cache_dir=plan.cache_dir,
        upstreams=config.upstreams,
        mesh=_mesh_of(plan, ports[1]),
        drain_timeout=config.drain_timeout,
        log_level=plan.log_level,
        log_format=plan.log_format,
    )
    edge = replace(
        home,
        relay=of_edge(plan.relay, workers),
        quic=quic,
        auth=plan.auth,
        cache_dir=None,
        upstreams=(),
        mesh=None,
    )
    return [
        home,
        *(
            replace(
                edge,
                number=number,
                sockets=Sockets(
                    udp=ports[number + 1].sock.fileno(),
                    inbox=pairs[number + 1][0].fileno(),
                    outboxes=outboxes,
                ),
            )
            for number in range(workers)
        ),
    ]


def _mesh_of(plan: Plan, port: UdpSocket) -> Mesh | None:
    """Other relays of the mesh reach the edges."""
    mesh, config = plan.daemon.mesh, plan.daemon
    if mesh is None or mesh.reached_as is not None:
        return mesh
    return replace(mesh, reached_as=f"moqt://{show_address(config.host, port.address[1])}")
