"""Transfers over virtual links: how a connection of ours fills a path, told in numbers.

    flow = transfer(5_000_000, Path(latency=0.05, bandwidth=2e6, queue=200_000, loss=0.01))
    assert flow.goodput > 0.85 * 2e6

Two real QUIC connections with a virtual clock and no sockets. `compete` sends several flows over
one bottleneck; `change` in either alters the path while they run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

from moqt.quic.aio.transport import AioquicTransport
from moqt.quic.congestion.careful_resume import PathMemory
from tests.moqt.probe import Probe
from tests.moqt.quic_pair import Recorder
from tests.moqt.simulator import Host, Link, Path, Simulation

BUDGET = 256 << 10
"""Octets that a flow keeps queued with its connection, as the session layer does."""
PIECE = memoryview(bytes(64 << 10))
SAMPLE = 0.05
"""Seconds between two samples of a flow's history."""
EVENT_LOOP = 0.001
"""Seconds: an event loop wakes at best so often."""
DATAGRAM = 1452
"""Octets of a datagram at most unless a story says otherwise: Ethernet's."""


def random_path(seed: int) -> Path:
    """A path as one may meet it: 0.1 to 50 MB/s, 2 to 600 ms, and some vices, often none."""
    dice = random.Random(seed)

    def between(least: float, most: float) -> float:
        return float(least * (most / least) ** dice.random())

    def sometimes(value: float) -> float:
        return value if dice.random() < 0.3 else 0.0

    bandwidth, latency = between(1e5, 5e7), between(0.001, 0.3)
    return Path(
        bandwidth=bandwidth,
        latency=latency,
        queue=max(20_000, int(bandwidth * 2 * latency * between(0.2, 4))),
        jitter=sometimes(latency * between(0.05, 0.5)),
        loss=sometimes(between(0.0001, 0.03)),
        burst=sometimes(between(0.00001, 0.001)),
        burst_length=between(2, 30),
        reorder=sometimes(between(0.001, 0.3)),
        reorder_by=between(0.001, 0.02),
        duplicate=sometimes(between(0.001, 0.05)),
        police=bandwidth * between(0.3, 0.9) if dice.random() < 0.1 else None,
    )


class Journey(NamedTuple):
    """What a transfer meets from its first datagram to its last."""

    up: Path
    """What its data goes over."""
    down: Path
    """The way of the acknowledgments."""
    changes: Mapping[float, Path]
    """What `up` is like from some moments on."""
    moves: tuple[float, ...]
    """When the client is seen at another port ..."""
    roams: tuple[float, ...]
    """... and when at another host."""
    download: bool

    @property
    def rate(self) -> float:
        """Octets a second that it can bring at least, when nothing is lost."""
        paths = self.up, *self.changes.values()
        return min(min(path.bandwidth or inf, path.police or inf) for path in paths)

    @property
    def round_trip(self) -> float:
        """The longest, in seconds, with an empty queue."""
        ways = [path.latency + path.jitter for path in (self.up, *self.changes.values())]
        return max(ways) + self.down.latency + self.down.jitter

    @property
    def dark(self) -> float:
        """Seconds in which nothing passes."""
        return sum(end - begin for path in (self.up, self.down) for begin, end in path.blackouts)


def random_journey(seed: int) -> Journey:
    """A transfer over `random_path(seed)`, and what else may happen to it: losses on the way back,
    an outage, a tunnel with little MTU, another path under way, another port of a NAT's."""
    dice = random.Random(f"journey {seed}")

    def happens(odds: float = 0.2) -> bool:
        return dice.random() < odds

    up = random_path(seed)
    if happens():
        begin = dice.uniform(0, 3)
        up = replace(up, blackouts=((begin, begin + dice.uniform(0.1, 4)),))
    if happens():
        up = replace(up, mtu=dice.randrange(1200, 1452))
    down = Path(latency=up.latency, jitter=up.jitter)
    if happens():
        down = replace(down, loss=up.loss, burst=up.burst, burst_length=up.burst_length)
    if happens():
        down = replace(down, reorder=up.reorder, reorder_by=up.reorder_by, duplicate=up.duplicate)
    if happens():
        down = replace(down, blackouts=up.blackouts, mtu=up.mtu)
    changes = {}
    if happens(0.1):
        other = random_path(seed + 1000)
        changes[dice.uniform(0.5, 5)] = replace(other, blackouts=up.blackouts, mtu=up.mtu)
    moves = (dice.uniform(0.2, 4),) if happens() else ()
    download = happens(0.5)
    roams = (dice.uniform(0.2, 4),) if happens(0.1) else ()
    return Journey(up, down, changes, moves, roams, download)


class Sample(NamedTuple):
    """A flow at one moment: seconds since it began, octets, seconds."""

    time: float
    received: int
    window: int
    in_flight: int
    rtt: float
    """Smoothed, as the sender has it."""
    queue: int
    """Octets that wait at the bottleneck, of all flows."""


@dataclass(kw_only=True)
class Flow:
    """One transfer from a client to its server; what it is first, what became of it below."""

    octets: int | None = None
    """None sends for as long as the story lasts."""
    congestion: str | None = None
    """The sender's congestion control; None is the default of QuicConfig."""
    start: float = 0.0
    """When it begins, in seconds since the story did."""
    pauses: tuple[tuple[float, float], ...] = ()
    """`(begin, end)` in seconds since it began: the application has nothing to say then."""
    rate: float | None = None
    """Octets a second that the application has to say at most; None is no limit."""
    quic: Mapping[str, Any] = field(default_factory=dict)
    """More settings of both connections."""
    download: bool = False
    """Whether the server sends, and not the client."""
    moves: tuple[float, ...] = ()
    """When the client is seen at another port, in seconds since it began ..."""
    roams: tuple[float, ...] = ()
    """... and when at another host, as one that leaves its Wi-Fi."""
    known: PathMemory | None = None
    """What the sender's process remembers. Flows that share it go to one server."""

    began: float | None = None
    """When its connection began, on the clock of the simulation."""
    seconds: float | None = None
    """From the connection's first datagram to the last octet; None if that never came."""
    received: int = 0
    """Octets the receiver's application has."""
    history: list[Sample] = field(default_factory=list)
    sender: Probe | None = None
    """The inside of the sending connection, once there is one."""
    up: Link = field(init=False)
    """What the flow's data went over; shared by all flows of the story."""
    down: Link = field(init=False)
    lost_notes: list[int] = field(default_factory=list)
    repeated_notes: list[int] = field(default_factory=list)
    ended: float | None = None

    @property
    def goodput(self) -> float:
        """Octets a second, from the connection's first datagram on."""
        assert self.began is not None and self.ended is not None
        return self.received / max(self.ended - self.began, 1e-9)

    def goodput_between(self, begin: float, end: float) -> float:
        """Octets a second that arrived in a span of the flow's time, by its history."""
        span = [each for each in self.history if begin <= each.time <= end]
        assert len(span) > 1, f"no history between {begin} and {end} s"
        return (span[-1].received - span[0].received) / (span[-1].time - span[0].time)

    @property
    def declared_lost(self) -> int:
        """STREAM frames that the sender took for lost."""
        return len(self.lost_notes)

    @property
    def spurious(self) -> int:
        """STREAM frames of which octets arrived a second time."""
        return len(self.repeated_notes)

    @property
    def queue_max(self) -> int:
        """Most octets that ever waited at the bottleneck, of all flows."""
        return self.up.queue_max

    @property
    def rtts(self) -> list[float]:
        """The smoothed round trip, each `SAMPLE` seconds."""
        return [each.rtt for each in self.history]


class _Sender:
    """Queues a flow's octets on one stream as there is room."""

    def __init__(self, flow: Flow, simulation: Simulation) -> None:
        self.flow, self.simulation = flow, simulation
        self.host: Host
        self.stream: int | None = None
        self.given = 0

    def due(self) -> int:
        """Octets that the application has said until now, none of them twice."""
        flow = self.flow
        assert flow.began is not None
        age = self.simulation.now - flow.began
        if any(begin <= age < end for begin, end in flow.pauses):
            return self.given
        total = (1 << 60) if flow.octets is None else flow.octets
        if flow.rate is None:
            return total
        age -= sum(end - begin for begin, end in flow.pauses if end <= age)
        return min(total, int(age * flow.rate))

    def __call__(self) -> None:
        transport = self.host.end.transport
        if self.stream is None:
            self.stream = transport.open_stream(bidirectional=False)
            assert self.stream is not None
            transport.send(self.stream, PIECE[:1])
            self.given = 1
            assert self.flow.sender is not None
            self.flow.lost_notes = self.flow.sender.note_lost(self.stream)
        due = self.due()
        while self.given < due and transport.unsent < BUDGET:
            octets = min(len(PIECE), due - self.given)
            self.given += octets
            transport.send(self.stream, PIECE[:octets], self.given == self.flow.octets)


class _Receiver(Recorder):
    """Counts what comes and keeps none of it."""

    def __init__(self, transport: AioquicTransport, flow: Flow, simulation: Simulation) -> None:
        super().__init__(transport)
        self.flow, self.simulation, self.probe = flow, simulation, Probe(transport)

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        flow = self.flow
        if not flow.received and stream_id in self.probe.streams:
            flow.repeated_notes = self.probe.note_repeated(stream_id)
        flow.received += len(data)
        if fin:
            assert flow.began is not None
            flow.ended = self.simulation.now
            flow.seconds = flow.ended - flow.began


class Story:
    """Flows over one bottleneck, all their data over `up`, all acknowledgments over `down`."""

    def __init__(
        self, *flows: Flow, up: Path, down: Path | None = None, seed: int = 1, tick: float
    ) -> None:
        self.flows = flows
        self.simulation = Simulation(seed, tick=tick)
        self.began = self.simulation.now
        self.up = Link(up, now=self.began, seed=f"{seed} up")
        back = down or Path(latency=up.latency)
        self.down = Link(back, now=self.began, seed=f"{seed} down")
        self._waiting = sorted(flows, key=lambda flow: flow.start)
        self._moving: list[tuple[float, Host, bool]] = []
        self._senders: dict[int, _Sender] = {}
        self._sample_at = self.began
        self._servers: dict[int, Host] = {}
        self._accepts: dict[str, Callable[[AioquicTransport], Recorder]] = {}
        """What a server does with the connection that it accepts next."""

    def _start(self, flow: Flow) -> None:
        simulation, number = self.simulation, len(self._senders)
        quic: dict[str, Any] = {
            "max_datagram_size": DATAGRAM,
            **flow.quic,
        }
        if flow.congestion is not None:
            quic["congestion_control_algorithm"] = flow.congestion
        sender = self._senders[id(flow)] = _Sender(flow, simulation)

        def receives(transport: AioquicTransport) -> Recorder:
            return _Receiver(transport, flow, simulation)

        def sends(transport: AioquicTransport) -> Recorder:
            recorder = Recorder(transport)
            recorder.on_ready = sender
            flow.sender = Probe(transport)
            return recorder

        accepts = sends if flow.download else receives
        server = None if flow.known is None else self._servers.get(id(flow.known))
        if server is None:
            served = f"server {number}"
            server = self._servers[id(flow.known)] = simulation.serve(
                served, lambda transport: self._accepts[served](transport), **quic
            )
        self._accepts[server.name] = accepts
        # The client's first datagram leaves in here: its paths are set by name before.
        name = f"client {number}"
        there, back = (self.down, self.up) if flow.download else (self.up, self.down)
        simulation.paths[name, server.name] = there
        simulation.paths[server.name, name] = back
        flow.began, flow.up, flow.down = simulation.now, self.up, self.down
        client = simulation.connect(
            name,
            server,
            receives if flow.download else sends,
            wait=False,
            paths=flow.known,
            **quic,
        )
        sender.host = server if flow.download else client
        self._moving += [(flow.began + at, client, False) for at in flow.moves]
        self._moving += [(flow.began + at, client, True) for at in flow.roams]

    def _note(self) -> bool:
        """Take samples and start who is due; whether all flows are over."""
        now = self.simulation.now
        while self._waiting and self._waiting[0].start <= now - self.began:
            self._start(self._waiting.pop(0))
        for move in [move for move in self._moving if move[0] <= now]:
            self._moving.remove(move)
            _, client, roams = move
            host, port = client.seen_as
            client.seen_as = f"198.51.100.{port % 250}" if roams else host, port + 1
        if now >= self._sample_at:
            self._sample_at = now + SAMPLE
            queue = int(self.up.waiting(now))
            for flow in self.flows:
                if flow.began is not None and flow.ended is None and flow.sender is not None:
                    probe = flow.sender
                    flow.history.append(
                        Sample(
                            now - flow.began,
                            flow.received,
                            probe.window,
                            probe.in_flight,
                            probe.rtt,
                            queue,
                        )
                    )
                    if flow.rate is not None or flow.pauses:
                        self._senders[id(flow)].host.end.transport.wake()
                elif flow.known is not None and flow.ended is not None:
                    self._senders[id(flow)].host.end.transport.close(0, "")
        return not self._waiting and all(flow.ended is not None for flow in self.flows)

    def run(self, until: float, changes: Mapping[float, Path] | None = None) -> None:
        """Let the flows send until they are done or so many seconds have passed.

        `changes` says what `up` is like from some moments on, in seconds since the beginning.
        """
        for at, path in [*sorted((changes or {}).items()), (until, self.up.path)]:
            # starts and samples need the clock to move also while no datagram does
            while self.simulation.now < self.began + at:
                step = min(SAMPLE, self.began + at - self.simulation.now)
                if self.simulation.run(self._note, limit=step):
                    break
            if at < until:
                self.up.change(path, self.simulation.now)
        for flow in self.flows:
            if flow.began is not None and flow.ended is None:
                flow.ended = self.simulation.now


def transfer(
    octets: int | None,
    up: Path,
    down: Path | None = None,
    *,
    congestion: str | None = None,
    until: float = 60.0,
    changes: Mapping[float, Path] | None = None,
    seed: int = 1,
    tick: float = EVENT_LOOP,
    pauses: tuple[tuple[float, float], ...] = (),
    rate: float | None = None,
    **quic: Any,
) -> Flow:
    """One flow of `octets` (None: as many as go) from a client over `up`; `down` carries the
    acknowledgments, by default without loss or limit. It ends after `until` seconds at the latest.
    """
    flow = Flow(octets=octets, congestion=congestion, pauses=pauses, rate=rate, quic=quic)
    Story(flow, up=up, down=down, seed=seed, tick=tick).run(until, changes)
    return flow


def travel(octets: int, journey: Journey, *, until: float, seed: int = 1, **quic: Any) -> Flow:
    """One flow of `octets` that meets what `journey` says."""
    flow = Flow(
        octets=octets,
        download=journey.download,
        moves=journey.moves,
        roams=journey.roams,
        quic=quic,
    )
    Story(flow, up=journey.up, down=journey.down, seed=seed, tick=EVENT_LOOP).run(
        until, journey.changes
    )
    return flow


def compete(
    *flows: Flow,
    up: Path,
    down: Path | None = None,
    until: float,
    changes: Mapping[float, Path] | None = None,
    seed: int = 1,
    tick: float = EVENT_LOOP,
) -> tuple[Flow, ...]:
    """The same for several flows over one bottleneck; returns them."""
    Story(*flows, up=up, down=down, seed=seed, tick=tick).run(until, changes)
    return flows
