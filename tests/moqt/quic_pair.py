"""Two QUIC connections in memory, and handlers that write down what they are told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from moqt.quic.aio.transport import AioquicTransport
from moqt.quic.config import QuicConfig
from moqt.quic.transport import Transport, TransportHandler
from tests.moqt.probe import Probe
from tests.moqt.simulator import Address, Host, Path, Simulation, certificate, quic_config

__all__ = ["CLIENT", "SERVER", "Pair", "Recorder", "Side", "Source", "certificate", "quic_config"]

SERVER, CLIENT = ("192.0.2.1", 4433), ("192.0.2.2", 4433)


class Recorder:
    """A handler that writes down what it is told; `on_data` and `on_ready` may act."""

    def __init__(self, transport: Transport) -> None:
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
    """One of the two: its host, its connection, and what that talks to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.host: Host
        self.handler: Recorder | None = None

    @property
    def address(self) -> Address:
        """Where its datagrams seem to come from; one can change it."""
        return self.host.seen_as

    @address.setter
    def address(self, address: Address) -> None:
        self.host.seen_as = address

    @property
    def transport(self) -> AioquicTransport | None:
        return next((end.transport for end in self.host.ends.values()), None)

    @property
    def live(self) -> AioquicTransport:
        assert self.transport is not None
        return self.transport

    @property
    def probe(self) -> Probe:
        """What its connection has inside."""
        return Probe(self.live)

    @property
    def record(self) -> Recorder:
        assert self.handler is not None
        return self.handler

    @property
    def connected(self) -> bool:
        return self.transport is not None and self.transport.established


class Pair:
    """A client and a server joined by a network one can spoil: the smallest `Simulation`.

    `drop(side, datagram)` decides about single datagrams. Time moves only in `run`.
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
        path = Path(latency=latency, loss=loss, reorder=reorder)
        self.simulation = Simulation(seed, path=path)
        self.sent = self.simulation.sent
        self.client, self.server = Side("client"), Side("server")
        self.server.host = self.simulation.serve(
            "server", lambda transport: self.handler(self.server, transport), base=server
        )
        self.client.host = self.simulation.connect(
            "client",
            self.server.host,
            lambda transport: self.handler(self.client, transport),
            base=client,
            wait=False,
        )
        if connect:
            assert self.run(lambda: self.client.connected and self.server.connected)

    def handler(self, side: Side, transport: AioquicTransport) -> TransportHandler:
        """What a side's connection talks to; sets `side.handler`, at once or later."""
        side.handler = Recorder(transport)
        return side.handler

    @property
    def now(self) -> float:
        return self.simulation.now

    @property
    def drop(self) -> Callable[[Side, bytes], bool] | None:
        return self._drop

    @drop.setter
    def drop(self, drop: Callable[[Side, bytes], bool] | None) -> None:
        self._drop = drop
        sides = {"client": self.client, "server": self.server}
        self.simulation.drop = drop and (lambda name, data: drop(sides[name], data))

    def pump(self, side: Side) -> None:
        """Transmit all that may go now."""
        self.simulation.pump(side.host.end)

    def inject(self, side: Side, data: bytes) -> None:
        """`data` leaves `side` and may arrive."""
        peer = self.server if side is self.client else self.client
        self.simulation.transmit(side.host, peer.host.address, data)

    def run(self, until: Callable[[], bool] = lambda: False, limit: float = 60.0) -> bool:
        """Let time pass until `until()`; False when `limit` seconds were not enough."""
        for side in (self.client, self.server):
            if side.transport is not None:
                self.pump(side)
        return self.simulation.run(until, limit)


class Source:
    """Sends `payload` on one stream, keeping at most `BUDGET` octets unsent."""

    BUDGET = 256 << 10

    def __init__(
        self, transport: Transport, stream_id: int, payload: bytes, piece: int = 16384
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


def write_frames(pair: Pair, frames: bytes) -> None:
    """A 1-RTT packet of the client with `frames` in it, whatever its own code would send."""
    pair.inject(pair.client, pair.client.probe.seal(frames))
