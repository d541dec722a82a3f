"""One worker: `python -m relay.service.workers.process FD`, started by a supervisor.

It does what that says over the channel at FD, and ends when that is gone; signals are the
supervisor's to get.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest

from moqt.loop_hold import watched_loop
from moqt.quic.udp.sharing import SharedPort
from moqt.values.errors import MoqtError
from relay.config import Clock
from relay.disk.threads import DiskUnreadable
from relay.rights.tokens import PrincipalsFileError, TokenPolicy
from relay.scopes import Scopes
from relay.service.certificate import ServedCertificate
from relay.service.checks import Failure, disk_in
from relay.service.daemon import DaemonConfig, run
from relay.service.told.answers import Answers
from relay.service.told.logs import begin
from relay.service.workers.channel import Channel, receive_settings
from relay.service.workers.edge import EdgeRelay
from relay.service.workers.home import HomeScopes
from relay.service.workers.links import Links
from relay.service.workers.settings import (
    HOME,
    Sockets,
    Way,
    WorkerSettings,
    between,
    between_quic,
)


class Told:
    """What the supervisor says, as the orders that a relay follows."""

    def __init__(self, channel: Channel, gone: Callable[[str], None]) -> None:
        """`gone` is told of each other worker that has died."""
        self._channel = channel
        self._gone = gone
        self._answers: Answers | None = None
        self._stop: Callable[[], None] | None = None
        self._reload: Callable[[], None] | None = None
        self._stops = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, answers: Answers, stop: Callable[[], None], reload: Callable[[], None]) -> None:
        self._answers, self._stop, self._reload = answers, stop, reload
        for _ in range(self._stops):
            stop()

    def end(self) -> None:
        self._answers = self._stop = self._reload = None

    def stop(self) -> None:
        self._stops += 1
        if self._stop is not None:
            self._stop()

    async def listen(self) -> None:
        """Until the supervisor is gone: then this relay leaves at once."""
        async for message in self._channel.messages():
            match message.get("do"):
                case "stop":
                    self.stop()
                case "reload" if self._reload is not None:
                    self._reload()
                case "gone":
                    self._gone(message["who"])
                case "tell":
                    task = asyncio.ensure_future(self._tell(message))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        self.stop()
        self.stop()

    async def _tell(self, asked: dict[str, Any]) -> None:
        answers, what = self._answers, asked["what"]
        answer: dict[str, Any] = {"of": asked["id"]}
        try:
            if answers is None:
                pass  # it does not serve
            elif what == "numbers":
                answer["told"] = generate_latest(await answers.numbers()).decode()
            elif what == "not_ready":
                answer["told"] = await answers.not_ready()
            else:
                answer["told"] = await answers.tell(what, asked["query"])
        except ValueError as error:
            answer["fault"] = str(error)
        self._channel.send(answer)


def shared_port(number: int | None, sockets: Sockets) -> SharedPort:
    """What was inherited."""
    udp, inbox, *outboxes = (socket.socket(fileno=each) for each in sockets.all)
    return SharedPort(number or 0, udp, inbox, outboxes)


def _home(settings: WorkerSettings) -> tuple[Scopes, DaemonConfig, Callable[[str], None]]:
    clock, folder = Clock(), settings.cache_dir
    disk = None if folder is None else disk_in(folder, settings.relay, clock)
    scopes = HomeScopes(settings.relay, settings.secret, settings.edges, clock=clock, disk=disk)
    config = DaemonConfig(
        host="127.0.0.1",
        port=settings.home_port,
        quic=settings.quic,
        session=between(settings.session),
        upstreams=settings.upstreams,
        mesh=settings.mesh,
        drain_timeout=settings.drain_timeout,
        shared=shared_port(None, settings.sockets),
    )
    return scopes, config, lambda who: None if who == HOME else scopes.edge_gone(int(who))


def _edge(settings: WorkerSettings) -> tuple[Scopes, DaemonConfig, Callable[[str], None]]:
    number, relay_id = settings.number, secrets.randbits(62)
    assert number is not None
    policy = None if settings.auth is None else TokenPolicy(settings.auth)
    scopes = Scopes(settings.relay, policy, make=EdgeRelay)
    own = between(settings.session)
    links = Links(
        scopes,
        settings.home_port,
        between_quic(settings.quic, settings.home_cert),
        replace(own, setup_tokens=(settings.secret.token(Way.SERVING, number),), relay_id=relay_id),
        # another relay to the home: what is asked on one may come from the other
        replace(
            own,
            setup_tokens=(settings.secret.token(Way.BRINGING, number),),
            relay_id=secrets.randbits(62),
        ),
    )
    cert, key = settings.quic.certfile, settings.quic.keyfile
    assert cert is not None and key is not None
    config = DaemonConfig(
        host="",
        port=0,
        quic=settings.quic,
        session=replace(settings.session, relay_id=relay_id),
        policy=policy,
        certificate=ServedCertificate(Path(cert), Path(key)),
        drain_timeout=settings.drain_timeout,
        shared=shared_port(number, settings.sockets),
    )
    return scopes, config, lambda who: links.home_gone() if who == HOME else None


async def _work(settings: WorkerSettings, sock: socket.socket) -> None:
    channel = await Channel.over(sock)
    try:
        make = _home if settings.number is None else _edge
        scopes, config, gone = make(settings)
        told = Told(channel, gone)
        listening = asyncio.ensure_future(told.listen())
        await run(scopes, config, ready=lambda port, _: channel.send({"ready": port}), orders=told)
        listening.cancel()
    except (Failure, DiskUnreadable, PrincipalsFileError, OSError, ValueError, MoqtError) as error:
        channel.send({"failed": str(error)})
        await channel.flush()
        raise SystemExit(1) from None
    finally:
        channel.close()


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    try:
        settings = receive_settings(sock)
    except EOFError:
        sys.exit(1)
    begin(settings.log_level, settings.log_format, settings.name)
    sock.setblocking(False)
    with asyncio.Runner(loop_factory=watched_loop) as runner:
        runner.run(_work(settings, sock))


if __name__ == "__main__":
    main()
