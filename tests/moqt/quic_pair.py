"""Two QUIC transports in memory: a virtual clock, latency, loss and reordering, no sockets."""

from __future__ import annotations

import functools
import heapq
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from moqt.quic.aioquic import AioquicTransport, QuicContext
from moqt.quic.certs import make_self_signed
from moqt.quic.config import QuicConfig

CLIENT = ("192.0.2.1", 1000)
SERVER = ("192.0.2.2", 4433)


@functools.cache
def certificate() -> tuple[Path, Path]:
    return make_self_signed(tempfile.mkdtemp(prefix="quic-test-"))


def quic_config(**changes: object) -> QuicConfig:
    cert, key = certificate()
    base = QuicConfig(certfile=cert, keyfile=key, cafile=cert, server_name="localhost")
    return replace(base, **changes)  # type: ignore[arg-type]


class Recorder:
    """A handler that writes down what it is told; `on_data` and `on_ready` may act."""

    def __init__(self, transport: AioquicTransport) -> None:
        self.transport = transport
        self.alpn: str | None = None
        self.data: dict[int, bytearray] = defaultdict(bytearray)
        self.finished: set[int] = set()
        self.resets: dict[int, int] = {}
        self.stops: dict[int, int] = {}
        self.datagrams: list[bytes] = []
        self.closed: list[tuple[int, str, bool]] = []
        self.calls = 0
        self.on_data: Callable[[int, bytes, bool], None] | None = None
        self.on_ready: Callable[[], None] | None = None

    def connection_established(self, alpn: str) -> None:
        assert self.alpn is None
        self.alpn = alpn

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        assert isinstance(data, bytes)
        assert stream_id not in self.finished, "data after the end"
        assert not self.closed, "data after close"
        self.calls += 1
        self.data[stream_id] += data
        if fin:
            self.finished.add(stream_id)
        if self.on_data is not None:
            self.on_data(stream_id, data, fin)

    def stream_reset(self, stream_id: int, code: int) -> None:
        assert stream_id not in self.resets and stream_id not in self.finished
        self.resets[stream_id] = code

    def stop_sending(self, stream_id: int, code: int) -> None:
        assert stream_id not in self.stops
        self.stops[stream_id] = code

    def datagram(self, data: bytes) -> None:
        self.datagrams.append(data)

    def ready_to_send(self) -> None:
        if self.on_ready is not None:
            self.on_ready()

    def connection_closed(self, code: int, reason: str, application: bool) -> None:
        self.closed.append((code, reason, application))

    @property
    def received(self) -> int:
        return sum(map(len, self.data.values()))


class Side:
    def __init__(self, name: str, address: tuple[str, int]) -> None:
        self.name = name
        self.address = address
        self.transport: AioquicTransport | None = None
        self.handler: Recorder | None = None

    @property
    def live(self) -> AioquicTransport:
        assert self.transport is not None
        return self.transport

    @property
    def record(self) -> Recorder:
        assert self.handler is not None
        return self.handler


class Pair:
    """A client and a server joined by a network one can spoil.

    `loss` and `reorder` are probabilities per datagram; `drop(side, datagram)` decides about
    single ones (after `loss`). Time is `now`, in seconds, and moves only in `run`.
    """

    def __init__(
        self,
        client: QuicConfig | None = None,
        server: QuicConfig | None = None,
        *,
        latency: float = 0.01,
        loss: float = 0.0,
        reorder: float = 0.0,
        seed: int = 1,
        connect: bool = True,
    ) -> None:
        self.now = 100.0
        self.latency, self.loss, self.reorder = latency, loss, reorder
        self.random = random.Random(seed)
        self.drop: Callable[[Side, bytes], bool] | None = None
        self.sent: dict[str, int] = {"client": 0, "server": 0}
        self.client, self.server = Side("client", CLIENT), Side("server", SERVER)
        self._server_context = QuicContext(server or quic_config(), is_client=False)
        self._queue: list[tuple[float, int, str, bytes]] = []
        self._order = 0
        context = QuicContext(client or quic_config(), is_client=True)

        def make(transport: AioquicTransport) -> Recorder:
            self.client.handler = Recorder(transport)
            return self.client.handler

        self.client.transport = context.connect(SERVER, make, server_name="localhost", now=self.now)
        self.pump(self.client)
        if connect:
            assert self.run(lambda: bool(self.client.record.alpn and self.server.record.alpn))

    # ---- the network

    def pump(self, side: Side) -> None:
        """Transmit all that may go now."""
        transport = side.live
        datagrams = transport.datagrams_to_send(self.now)
        while True:
            for data, _ in datagrams:
                self.inject(side, data)
            if not transport.more:
                break
            datagrams = transport.datagrams_to_send(self.now, again=True)

    def inject(self, side: Side, data: bytes) -> None:
        """`data` leaves `side` and may arrive."""
        self.sent[side.name] += 1
        if self.random.random() < self.loss or (self.drop is not None and self.drop(side, data)):
            return
        delay = self.latency
        if self.random.random() < self.reorder:
            delay += self.random.random() * self.latency
        self._order += 1
        to = "server" if side is self.client else "client"
        heapq.heappush(self._queue, (self.now + delay, self._order, to, data))

    def _deliver(self, to: str, datagrams: list[bytes]) -> None:
        side, peer = (self.server, self.client) if to == "server" else (self.client, self.server)
        if side.transport is None:
            answer = self._server_context.unsolicited(datagrams[0], now=self.now)
            if not isinstance(answer, AioquicTransport):
                return
            answer.receive(datagrams[:1], peer.address, self.now)
            if not answer.started:
                return
            side.transport = answer
            side.handler = Recorder(answer)
            answer.attach(side.handler)
            datagrams = datagrams[1:]
        for data, _ in side.transport.receive(datagrams, peer.address, self.now):
            self.inject(side, data)
        self.pump(side)

    def run(self, until: Callable[[], bool] = lambda: False, limit: float = 60.0) -> bool:
        """Let time pass until `until()`; False when `limit` seconds were not enough."""
        deadline = self.now + limit
        for side in (self.client, self.server):
            if side.transport is not None:
                self.pump(side)
        while not until():
            times = [self._queue[0][0]] if self._queue else []
            for side in (self.client, self.server):
                if side.transport is not None and (at := side.transport.timer()) is not None:
                    times.append(at)
            if not times or min(times) > deadline:
                self.now = max(self.now, deadline)
                return until()
            self.now = max(self.now, min(times))
            arrived: dict[str, list[bytes]] = defaultdict(list)
            while self._queue and self._queue[0][0] <= self.now:
                _, _, to, data = heapq.heappop(self._queue)
                arrived[to].append(data)
            for to, datagrams in arrived.items():
                self._deliver(to, datagrams)
            for side in (self.client, self.server):
                transport = side.transport
                if transport is None:
                    continue
                at = transport.timer()
                if at is not None and at <= self.now:
                    transport.handle_timer(self.now)
                    self.pump(side)
        return True


class Source:
    """Sends `payload` on one stream, keeping at most `BUDGET` octets unsent."""

    BUDGET = 256 << 10

    def __init__(
        self, transport: AioquicTransport, stream_id: int, payload: bytes, piece: int = 16384
    ) -> None:
        self.transport, self.stream_id = transport, stream_id
        self.view, self.piece = memoryview(payload), piece
        self.position = 0
        self.done = False

    def __call__(self) -> None:
        while not self.done and self.transport.unsent < self.BUDGET:
            stop = min(self.position + self.piece, len(self.view))
            self.done = stop == len(self.view)
            self.transport.send(self.stream_id, self.view[self.position : stop], self.done)
            self.position = stop
