"""Sessions, a relay and QUIC as targets of `tools.fuzz`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aioquic.tls import Epoch

from moqt.quic.counters import TransportCounters
from moqt.quic.transport import Transport
from moqt.quic.webtransport.client import WebTransportClient
from moqt.quic.webtransport.server import WebTransportServer
from moqt.session import Session
from moqt.values.messages import Parameters
from relay.config import RelayConfig
from relay.core import Relay
from tests.moqt.loose import LIMITS as SESSION_LIMITS
from tests.moqt.loose import NAME, Everything, Lone, Loose, ask, video
from tests.moqt.memory import ALPN, Pair
from tests.moqt.peers import FILL, Collector
from tests.moqt.simulator import Path as NetworkPath
from tests.moqt.simulator import Simulation
from tests.relay.star import Star
from tools.fuzz_base import Case, Target, vectors

EVENTS = ("data", "data", "data", "fin", "reset", "stop", "datagram", "tick")
"""What can happen to a session, as often as it is tried."""
SETUP = bytes.fromhex("af000000")
EARLY = ("early", b"")
"""A relay's case begins so whose peers have not sent SETUP; else they have, before it begins."""


class _Recorder:
    """Stands before a session and writes down what its transport brings."""

    def __init__(self, session: Session, steps: Case, prefix: str = "") -> None:
        self._session, self._steps, self._prefix = session, steps, prefix

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        self._steps.append((f"{self._prefix}{'fin' if fin else 'data'} {stream_id}", data))
        self._session.stream_data(stream_id, data, fin)

    def stream_reset(self, stream_id: int, code: int) -> None:
        self._steps.append((f"{self._prefix}reset {stream_id}", bytes(min(code, 99))))
        self._session.stream_reset(stream_id, code)

    def stop_sending(self, stream_id: int, code: int) -> None:
        self._steps.append((f"{self._prefix}stop {stream_id}", bytes(min(code, 99))))
        self._session.stop_sending(stream_id, code)

    def datagram(self, data: bytes) -> None:
        self._steps.append((f"{self._prefix}datagram 0", data))
        self._session.datagram(data)


def _moved_event(where: str, choose: Callable[[Any], Any]) -> str:
    """The same event on another stream, or another event on the same stream."""
    prefix, _, rest = where.rpartition(":")
    event, _, stream = rest.partition(" ")
    if choose((True, False)):
        stream = str(max(0, int(stream) + choose((-4, 4, 1, -1, 2, -2, 40))))
    else:
        event = choose(EVENTS)
    return f"{prefix}:{event} {stream}" if prefix else f"{event} {stream}"


def recorded(star: Star, publisher: Everything) -> tuple[list[Pair], Case]:
    """A publisher and a subscriber of a relay, and what it hears of either from now on."""
    steps: Case = []
    pairs = [star.connect(publisher), star.connect()]
    for index, pair in enumerate(pairs):
        pair.server_transport.handler = _Recorder(pair.server, steps, f"{index}:")  # type: ignore[assignment]
    return pairs, steps


class SessionTarget(Target):
    """A session that has asked for everything, and whatever a peer may do to it."""

    name = "session"

    def corpus(self) -> list[Case]:
        cases = [self._captured(client, seed) for client in (True, False) for seed in (None, 3)]
        for client in ("client", "server"):
            uni, bidi = (7, 1) if client == "client" else (6, 0)
            cases += [[(client, b""), (f"data {bidi}", v)] for v in vectors("control")]
            cases += [[(client, b""), (f"data {uni - 4}", v)] for v in vectors("control")]
            cases += [
                [(client, b""), (f"fin {uni}", v)]
                for v in vectors("subgroup_stream", "fetch_stream", "padding_stream")
            ]
            cases += [[(client, b""), ("datagram 0", v)] for v in vectors("datagram")]
        return cases

    @staticmethod
    def _captured(client: bool, seed: int | None) -> Case:
        """What one side of a conversation of everything with everything hears after SETUP."""
        sides = [Everything(), Everything()]
        stores = [video(), video()]
        for side, store in zip(sides, stores, strict=True):
            side.add_track(store)
        pair = Pair(
            sides[0],
            sides[1],
            client_config=SESSION_LIMITS,
            server_config=SESSION_LIMITS,
            seed=seed,
        )
        steps: Case = [("client" if client else "server", b"")]
        transport = pair.client_transport if client else pair.server_transport
        transport.handler = _Recorder(transport.handler, steps)  # type: ignore[assignment, arg-type]
        ask(pair.client)
        ask(pair.server)
        pair.run()
        for store in stores:
            store.append(3, 0, b"live" * 10, subgroup=1, priority=3)
            store.append(3, 1, b"datagram", subgroup=None)
        pair.run()
        for store in stores:
            store.finish(0x2)
        pair.run()
        return steps

    def moved(self, where: str, choose: Callable[[Any], Any]) -> str:
        return where if where in ("client", "server") else _moved_event(where, choose)

    def run(self, case: Case) -> None:
        lone = Lone(bool(case) and case[0][0] == "client")
        now = 0.0
        for where, octets in case:
            event, _, stream = where.partition(" ")
            if event in ("client", "server"):
                continue
            if event == "tick":
                now += len(octets)
                lone.session.tick(now)
            else:
                lone.transport.give(event, int(stream), octets)
            lone.session.ready_to_send()
            lone.check()
            if lone.session.closed is not None:
                break
        lone.end()


class RelayTarget(Target):
    """A relay between two peers, a publisher's and a subscriber's, that do anything."""

    name = "relay"
    LIMITS = RelayConfig(
        cache_octets=100_000, max_tracks=50, max_pending=20, max_namespaces=20, linger=1.0
    )
    SESSIONS = SESSION_LIMITS

    def corpus(self) -> list[Case]:
        return [self._captured(seed) for seed in (None, 1, 2)]

    @staticmethod
    def _captured(seed: int | None) -> Case:
        star = Star(RelayTarget.LIMITS, seed=seed)
        store = video()
        handler = Everything()
        handler.add_track(store)
        pairs, steps = recorded(star, handler)
        pairs[0].client.publish_namespace((b"demo",), on_ended=lambda error: None)
        star.run()
        subscriber = pairs[1].client
        subscriber.subscribe_namespace(
            (b"demo",), on_namespace=lambda *_: None, on_ended=lambda error: None
        )
        subscriber.subscribe(NAME, Collector(), FILL)
        star.run()
        store.append(3, 0, b"live" * 50)
        star.run()
        subscriber.fetch(NAME, Collector(), Parameters(group_order=2))
        subscriber.track_status(NAME)
        star.run()
        store.finish(0x2)
        star.run()
        return steps

    def moved(self, where: str, choose: Callable[[Any], Any]) -> str:
        if where == EARLY[0]:
            return where
        if choose((True, True, True, False)):
            return _moved_event(where, choose)
        index, _, rest = where.partition(":")
        return f"{1 - int(index)}:{rest}"

    def run(self, case: Case) -> None:
        relay = Relay(self.LIMITS)
        transports = [Loose(False), Loose(False)]
        sessions = [Session(transport, relay, self.SESSIONS) for transport in transports]
        early = case[:1] == [EARLY]
        for transport, session in zip(transports, sessions, strict=True):
            transport.handler = session
            session.connection_established(ALPN)
            if not early:
                transport.give("data", 2, SETUP)
        now = 0.0
        for where, octets in case:
            if where == EARLY[0]:
                continue
            index, _, rest = where.partition(":")
            event, _, stream = rest.partition(" ")
            if event == "tick":
                now += len(octets)
                self._tick(relay, sessions, now)
            elif sessions[int(index)].closed is None:
                transports[int(index)].give(event, int(stream), octets)
            for session in sessions:
                session.ready_to_send()
            assert relay.cache.billed <= self.LIMITS.cache_octets
            assert len(relay.waiting.pending) <= self.LIMITS.max_pending
        for session in sessions:
            session.close()
        self._tick(relay, sessions, now + 100)
        self._tick(relay, sessions, now + 200)
        assert not relay.sessions and not relay.waiting.pending and not relay.active
        assert relay.namespaces.publications == 0 and not relay.namespaces.listings

    @staticmethod
    def _tick(relay: Relay, sessions: list[Session], now: float) -> None:
        relay.tick(now)
        for session in sessions:
            session.tick(now)


# -- QUIC --------------------------------------------------------------------------------


class _H3Transport(Loose):
    """What HTTP/3 wants of its QUIC transport besides."""

    def __init__(self, is_client: bool) -> None:
        super().__init__(is_client)
        self.counters = TransportCounters()

    def set_deadline(self, seconds: float | None, code: int = 0, reason: str = "") -> None: ...

    def note_refusal(self, reason: str) -> None: ...

    def linger(self, code: int) -> None:
        self.close(code, "lingering")

    def when_acknowledged(self, stream_id: int, action: Callable[[], None]) -> None:
        action()

    @property
    def live_streams(self) -> list[int]:
        return list(self.out)


class WebTransportTarget(Target):
    """A server of WebTransport over HTTP/3 with a MOQT session on it."""

    name = "webtransport"

    def corpus(self) -> list[Case]:
        steps: Case = []
        simulation = Simulation()
        server = simulation.serve(
            "server", lambda quic: _Recorder(self._server(quic), steps), alpn=("h3",)
        )
        sessions: list[Session] = []

        def make(transport: Transport) -> Session:
            sessions.append(Session(transport, Everything(), SESSION_LIMITS))
            return sessions[0]

        client = simulation.connect(
            "client",
            server,
            lambda quic: WebTransportClient(
                quic, make, (ALPN,), authority="localhost", path="/live"
            ),
            wait=False,
            alpn=("h3",),
        )
        simulation.advance(2)
        ask(sessions[0])
        simulation.advance(2)
        assert client.end.transport.established and sessions[0].closed is None
        sessions[0].close()
        simulation.advance(2)
        return [steps]

    @staticmethod
    def _server(quic: Any) -> WebTransportServer:
        handler = Everything()
        handler.add_track(video())
        return WebTransportServer(
            quic, lambda transport: Session(transport, handler, SESSION_LIMITS), (ALPN,)
        )

    def moved(self, where: str, choose: Callable[[Any], Any]) -> str:
        return _moved_event(where, choose)

    def run(self, case: Case) -> None:
        transport = _H3Transport(False)
        server = self._server(transport)
        transport.handler = server
        server.connection_established("h3")
        for where, octets in case:
            event, _, stream = where.partition(" ")
            if event != "tick":
                transport.give(event, int(stream), octets)
            server.ready_to_send()
            if transport.closed is not None:
                break
        server.connection_closed(0, "the end", False)


class _Failures(logging.Handler):
    """The adapter keeps a fault of one connection from the endpoint; here it is a finding."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def _no_failure_logged() -> Iterator[None]:
    failures, log = _Failures(), logging.getLogger("moqt.quic")
    propagate, log.propagate = log.propagate, False
    log.addHandler(failures)
    try:
        yield
    finally:
        log.removeHandler(failures)
        log.propagate = propagate
    for record in failures.records:
        if record.exc_info is not None and record.exc_info[1] is not None:
            raise record.exc_info[1]
        raise AssertionError(record.getMessage())


class TransportTarget(Target):
    """A QUIC server: octets off the path, and well-protected packets with any frames."""

    name = "transport"
    places = ("packet", "raw", "initial")

    def corpus(self) -> list[Case]:
        payloads: list[bytes] = []
        datagrams: list[bytes] = []
        simulation = Simulation(path=NetworkPath(loss=0.05))
        handler = Everything()
        handler.add_track(video())
        server = simulation.serve("server", handler)
        client = simulation.connect("client", server)
        pair = client.end.transport._connection._cryptos[Epoch.ONE_RTT]
        encrypt = pair.send.encrypt_packet

        def keep(header: bytes, payload: bytes, number: int) -> bytes:
            payloads.append(payload)
            datagrams.append(encrypt(header, payload, number))
            return datagrams[-1]

        pair.send.encrypt_packet = keep
        ask(client.session)
        simulation.advance(2)
        client.session.close()
        simulation.advance(2)
        first = Simulation()
        lone = first.connect("client", first.serve("server", handler), wait=False)
        initial = [d for d, _ in lone.end.transport.datagrams_to_send(first.now)]
        cases: list[Case] = [[("packet", p) for p in payloads]]
        cases += [[("packet", p)] for p in (*payloads, *_FRAMES)]
        cases += [[("raw", d)] for d in datagrams] + [[("initial", d)] for d in initial]
        return cases

    def run(self, case: Case) -> None:
        with _no_failure_logged():
            simulation = Simulation()
            handler = Everything()
            handler.add_track(video())
            server = simulation.serve("server", handler)
            client = simulation.connect("client", server)
            connection = client.end.transport._connection
            pair = connection._cryptos[Epoch.ONE_RTT]
            cid = server.end.transport.local_cid
            number = 1000
            for where, octets in case:
                if where == "packet":
                    header = b"\x41" + cid + number.to_bytes(2, "big")
                    octets = octets.ljust(4, b"\0")[:16_000]
                    octets = pair.send.encrypt_packet(header, octets, number)
                    number += 1
                source = client if where != "initial" else simulation._host("stranger")
                simulation.transmit(source, server.address, octets)
                simulation.advance(0.02)
            simulation.advance(1)
            assert len(server.ends) <= len(case) + 1


_FRAMES = tuple(
    bytes.fromhex(frame)
    for frame in (
        "00" * 8, "01", "02050000000005", "030a00000005010203", "0402050a", "05040a",
        "0600044142434400", "0703414243", "08024142", "0f02000003414243", "1044000000", "11024400",
        "1244", "1344", "1444", "150244", "1644", "1744", "1801000800010203040506070011223344"
        "5566778899aabbccddeeff", "1900", "1a0011223344556677", "1b0011223344556677",
        "1c0a00036162",        "1d0a026162", "1e", "30414243", "31034142430001",
        "1f", "40af01054fa003", "40af7f0001004fa0",
    )
)  # fmt: skip
"""One of each frame type (RFC 9000 section 19, RFC 9221), some of them cut short."""
