"""Hosts, paths and time in memory: sans-IO sessions over the real QUIC adapter, without sockets.

A `Simulation` owns the clock, the network and the dice. Its hosts run the same `Session` and
`AioquicTransport` as a process does; every datagram travels over a `Link` whose `Path` one can
make slow, narrow, lossy or short of MTU, also while it is in use. Nothing sleeps: time jumps to
whatever happens next. Two simulations of one seed and one story have the same `trace`.
"""

from __future__ import annotations

import datetime
import functools
import heapq
import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path as FilePath

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from moqt.quic.aio.context import QuicContext
from moqt.quic.aio.transport import AioquicTransport
from moqt.quic.config import DEFAULT_ALPN, H3_ALPN, QuicConfig
from moqt.quic.congestion.careful_resume import PathMemory
from moqt.quic.transport import Transport, TransportHandler
from moqt.quic.webtransport.client import WebTransportClient
from moqt.quic.webtransport.server import WebTransportServer
from moqt.session import Session, SessionConfig, SessionHandler, SessionState
from tests.certificates import identified
from tools.path.link import Fate, Link, Path

TICK = 0.5
"""Seconds between two `Session.tick`, as in a process."""
START = 100.0
"""The clock at the beginning: no code may rely on starting at 0."""

Address = tuple[str, int]

__all__ = ["START", "Address", "Host", "Link", "Path", "Simulation", "certificate", "quic_config"]


@functools.cache
def certificate() -> tuple[FilePath, FilePath]:
    """A self-signed certificate and its key. Ed25519: its signatures always have one length,
    so that the handshakes of two runs have the same datagrams."""
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    begin = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=36500))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    )
    built = identified(builder, key, key, authority=True).sign(key, None)
    folder = FilePath(tempfile.mkdtemp(prefix="simulated-"))
    cert, private = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return cert, private


def quic_config(base: QuicConfig | None = None, **changes: object) -> QuicConfig:
    if base is None:
        cert, key = certificate()
        base = QuicConfig(certfile=cert, keyfile=key, cafile=cert, server_name="localhost")
    return replace(base, **changes)  # type: ignore[arg-type]


class End:
    """One host's end of one connection."""

    def __init__(self, host: Host, peer: Address, transport: AioquicTransport) -> None:
        self.host = host
        self.peer = peer
        self.transport = transport
        self.handler: TransportHandler
        transport.on_wake = lambda: host.simulation.awake.setdefault(self)

    @property
    def session(self) -> Session:
        return self.host.sessions[self.transport]


class Host:
    """An address, and the connections that end there."""

    def __init__(self, simulation: Simulation, name: str, address: Address) -> None:
        self.simulation = simulation
        self.name = name
        self.address = address
        self.seen_as = address
        """Where its datagrams seem to come from: change it, as a NAT does."""
        self.ends: dict[Address, End] = {}
        self.sessions: dict[AioquicTransport, Session] = {}
        self.alive = True
        self.context: QuicContext | None = None
        self.speaks_moqt = False
        self.make: Callable[[AioquicTransport], TransportHandler]

    @property
    def end(self) -> End:
        """The only connection of a host that has one."""
        (end,) = self.ends.values()
        return end

    @property
    def session(self) -> Session:
        return self.end.session

    def die(self) -> None:
        """From now on it neither sends nor hears anything, as when its power fails."""
        self.alive = False


class Simulation:
    """The world of one story: its clock, its network, its dice, and what happened."""

    def __init__(self, seed: int = 1, *, path: Path | None = None, tick: float = 0.0) -> None:
        self.now = START
        self.path = path or Path()
        """What a pair of hosts gets that no other path was set for."""
        self.tick = tick
        """Seconds between two looks at the network and the timers, as of an event loop that
        wakes so often; 0 looks whenever something happens."""
        self.seed = seed
        self.random = random.Random(seed)
        self.hosts: dict[Address, Host] = {}
        self.paths: dict[tuple[str, str], Path | Link] = {}
        """By the names of two hosts. A `Link` may stand for many: they share it."""
        self.sent: Counter[str] = Counter()
        self.lost = 0
        self.trace: list[tuple[float, str, str, int, str]] = []
        """(time, from, to, octets, what happened) of every datagram."""
        self.drop: Callable[[str, bytes], bool] | None = None
        """Decides about single datagrams: (sender's name, datagram) -> whether it is lost."""
        self.tickers: list[Callable[[float], None]] = []
        """Called with the time each TICK, as a relay's daemon does."""
        self.awake: dict[End, None] = {}
        self._queue: list[tuple[float, int, Address, Address, bytes]] = []
        self._order = 0
        self._links: dict[tuple[str, str], Link] = {}
        self._tick_at = self.now

    # ---- hosts

    def _host(self, name: str) -> Host:
        number = len(self.hosts) + 1
        host = Host(self, name, (f"192.0.2.{number}", 4433))
        self.hosts[host.address] = host
        return host

    def serve(
        self,
        name: str,
        handler: SessionHandler | Callable[[AioquicTransport], TransportHandler],
        *,
        config: SessionConfig | None = None,
        base: QuicConfig | None = None,
        **quic: object,
    ) -> Host:
        """A host that accepts connections; `handler` serves all of its sessions.

        They are WebTransport's if `alpn` says "h3".
        """
        host = self._host(name)
        host.context = QuicContext(quic_config(base, **quic), is_client=False)
        host.make = self._maker(host, handler, config)
        return host

    def connect(
        self,
        name: str,
        to: Host,
        handler: SessionHandler | Callable[[AioquicTransport], TransportHandler] | None = None,
        *,
        config: SessionConfig | None = None,
        wait: bool = True,
        base: QuicConfig | None = None,
        paths: PathMemory | None = None,
        **quic: object,
    ) -> Host:
        """A new host with a connection to `to`; both sessions are established unless not `wait`.

        `paths`: what its process remembers, nothing by default.
        """
        host = self._host(name)
        context = QuicContext(quic_config(base, **quic), is_client=True, paths=paths)
        make = self._maker(host, handler or SessionHandler(), config, context)
        handlers: list[TransportHandler] = []

        def made(transport: AioquicTransport) -> TransportHandler:
            handlers.append(make(transport))
            return handlers[0]

        transport = context.connect(to.address, made, server_name="localhost", now=self.now)
        end = host.ends[to.address] = End(host, to.address, transport)
        end.handler = handlers[0]
        self.awake[end] = None
        if wait:
            assert self.run(
                lambda: host.address in to.ends and self._established(end, to.ends[host.address])
            ), "no session came about"
        return host

    @staticmethod
    def _established(*ends: End) -> bool:
        for end in ends:
            session = end.host.sessions.get(end.transport)
            if session is not None and session.state is not SessionState.ESTABLISHED:
                return False
            if session is None and (end.host.speaks_moqt or not end.transport.established):
                return False
        return True

    def _maker(
        self,
        host: Host,
        handler: SessionHandler | Callable[[AioquicTransport], TransportHandler],
        config: SessionConfig | None,
        client: QuicContext | None = None,
    ) -> Callable[[AioquicTransport], TransportHandler]:
        """What is above a connection: what `handler` makes, or a session that it serves."""
        if not isinstance(handler, SessionHandler):
            return handler
        host.speaks_moqt = True

        def made(connection: AioquicTransport) -> TransportHandler:
            def session(transport: Transport) -> Session:
                host.sessions[connection] = Session(transport, handler, config, now=self.now)
                return host.sessions[connection]

            if H3_ALPN not in connection.config.alpn:
                return session(connection)
            if client is None:
                return WebTransportServer(connection, session, DEFAULT_ALPN)
            return WebTransportClient(
                connection, session, DEFAULT_ALPN, authority="localhost", path="/"
            )

        return made

    def join(self, a: Host, b: Host, path: Path, back: Path | None = None) -> None:
        """Set the path from `a` to `b` and, the same unless given, the way back."""
        self.paths[a.name, b.name] = path
        self.paths[b.name, a.name] = back or path

    # ---- the network

    def link(self, source: Host, target: Host) -> Link:
        """What the datagrams of `source` to `target` go over now."""
        key = source.name, target.name
        path = self.paths.get(key, self.path)
        if isinstance(path, Link):
            return path
        link = self._links.get(key)
        if link is None:
            seed = f"{self.seed} {source.name} {target.name}"
            link = self._links[key] = Link(path, now=self.now, seed=seed)
        elif link.path is not path:
            link.change(path, self.now)
        return link

    def transmit(
        self, source: Host, target: Address, data: bytes, *, seen_as: Address | None = None
    ) -> None:
        """`seen_as` is where the datagram is addressed to: a NAT forgets where a host was."""
        host = self.hosts[target]
        self.sent[source.name] += 1
        arrivals: tuple[float, ...] = ()
        if self.drop is not None and self.drop(source.name, data):
            fate = "dropped"
        elif seen_as is not None and seen_as != host.seen_as:
            fate = "nobody there"
        else:
            link = self.link(source, host)
            arrivals = link.offer(len(data), self.now, source.name)
            fate = link.fate
        self.trace.append((self.now, source.name, host.name, len(data), fate))
        self.lost += fate != Fate.SENT
        for at in arrivals:
            self._order += 1
            heapq.heappush(self._queue, (at, self._order, source.address, target, data))

    def pump(self, end: End) -> None:
        """Send all that may go now."""
        again = False
        while True:
            datagrams = end.transport.datagrams_to_send(self.now, again=again)
            for data, target in datagrams:
                self.transmit(end.host, end.peer, data, seen_as=target)
            if not end.transport.more:
                return
            again = True

    def _arrive(self, source: Address, host: Host, datagrams: list[bytes]) -> None:
        if not host.alive:
            return
        end = host.ends.get(source)
        if end is None or end.transport.terminated:
            end = self._accept(source, host, datagrams)
            if end is None:
                return
        seen = self.hosts[source].seen_as
        for data, _ in end.transport.receive(datagrams, seen, self.now):
            self.transmit(host, source, data)
        self.awake[end] = None

    def _accept(self, source: Address, host: Host, datagrams: list[bytes]) -> End | None:
        """The end of a new connection, which has read the first of `datagrams`."""
        if host.context is None:
            return None
        transport = host.context.unsolicited(datagrams[0], now=self.now)
        if not isinstance(transport, AioquicTransport):
            return None
        transport.receive(datagrams[:1], self.hosts[source].seen_as, self.now)
        del datagrams[:1]
        if not transport.started:
            return None
        end = host.ends[source] = End(host, source, transport)
        end.handler = host.make(transport)
        transport.attach(end.handler)
        return end

    # ---- time

    def _ends(self) -> list[End]:
        return [end for host in self.hosts.values() if host.alive for end in host.ends.values()]

    def flush(self) -> None:
        while self.awake:
            awake, self.awake = self.awake, {}
            for end in awake:
                if end.host.alive:
                    self.pump(end)

    def _next(self) -> float:
        times = [self._tick_at]
        if self._queue:
            times.append(self._queue[0][0])
        for end in self._ends():
            at = end.transport.timer()
            if at is not None:
                times.append(at)
        return min(times)

    def run(self, until: Callable[[], bool] = lambda: False, limit: float = 60.0) -> bool:
        """Let time pass until `until()`; False when `limit` seconds were not enough."""
        deadline = self.now + limit
        self.flush()
        while not until():
            at = self._next()
            if self.tick:
                at = max(at, math.ceil(at / self.tick) * self.tick)
            if at > deadline:
                self.now = deadline
                return False
            self.now = max(self.now, at)
            arrived: dict[tuple[Address, Address], list[bytes]] = {}
            while self._queue and self._queue[0][0] <= self.now:
                _, _, source, target, data = heapq.heappop(self._queue)
                arrived.setdefault((source, target), []).append(data)
            for (source, target), datagrams in arrived.items():
                self._arrive(source, self.hosts[target], datagrams)
            for end in self._ends():
                timer = end.transport.timer()
                if timer is not None and timer <= self.now:
                    end.transport.handle_timer(self.now)
                    self.awake[end] = None
            if self._tick_at <= self.now:
                self._tick()
            self.flush()
        return True

    def _tick(self) -> None:
        self._tick_at = self.now + TICK
        for ticker in self.tickers:
            ticker(self.now)
        for end in self._ends():
            session = end.host.sessions.get(end.transport)
            if session is not None:
                session.tick(self.now)

    def advance(self, seconds: float) -> None:
        """Let so much time pass."""
        self.run(limit=seconds)
