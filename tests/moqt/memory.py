"""Two sessions joined in memory: no socket, no clock, deterministic or shuffled delivery."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from moqt.quic.transport import TransportHandler
from moqt.session import Session, SessionConfig, SessionHandler
from tests.moqt.inside import blocked

ALPN = "moqt-22"


@dataclass
class _Outgoing:
    """One direction of a stream: octets written, and what the peer lets us write."""

    queue: deque = field(default_factory=deque)
    written: int = 0
    consumed: int = 0
    fin: bool = False
    reset: int | None = None
    over: bool = False


class MemoryTransport:
    """A `moqt.quic.transport.Transport` without QUIC underneath."""

    qlog = None
    authority: str | None = None
    path: str | None = None

    def __init__(
        self,
        is_client: bool,
        *,
        stream_window: int = 1 << 20,
        max_streams: int = 128,
        rng: random.Random | None = None,
    ) -> None:
        self.is_client = is_client
        self.stream_window = stream_window
        self.max_streams = max_streams
        self.rng = rng
        self.peer: MemoryTransport
        self.handler: TransportHandler
        self.out: dict[int, _Outgoing] = {}
        self.opened = {True: 0, False: 0}
        self.open_uni = 0
        self.refused: set[int] = set()
        self.paused: set[int] = set()
        self.held: dict[int, int] = {}
        self.datagrams: deque[bytes] = deque()
        self.events: deque = deque()
        self.closed: tuple[int, str] | None = None
        self.max_unsent = 0
        self.cut = 0
        """Streams reset before all that was written on them was delivered."""
        self.credited: set[int] = set()

    def open_stream(self, *, bidirectional: bool, urgent: bool = False) -> int | None:
        if not bidirectional and self.open_uni >= self.max_streams:
            return None
        index = self.opened[bidirectional]
        self.opened[bidirectional] += 1
        if not bidirectional:
            self.open_uni += 1
        stream_id = index * 4 + (0 if self.is_client else 1) + (0 if bidirectional else 2)
        self.out[stream_id] = _Outgoing()
        if bidirectional:
            self.peer.out[stream_id] = _Outgoing()
        return stream_id

    def send(self, stream_id, data, fin=False) -> None:
        stream = self.out[stream_id]
        if self.closed or stream.reset is not None or stream.over:
            return
        assert not stream.fin, "send after FIN"
        data = bytes(data)
        if data:
            stream.queue.append(data)
            stream.written += len(data)
        stream.fin = stream.fin or fin
        self.max_unsent = max(self.max_unsent, self.unsent)

    def reset(self, stream_id, code) -> None:
        stream = self.out[stream_id]
        if not stream.over and stream.reset is None:
            self.cut += bool(stream.queue)
            stream.reset = code
            stream.queue.clear()

    def stop_receiving(self, stream_id, code) -> None:
        if stream_id not in self.refused:
            self.refused.add(stream_id)
            self.paused.discard(stream_id)
            self.events.append(("stop", stream_id, code))

    def send_datagram(self, data: bytes) -> bool:
        self.datagrams.append(data)
        return True

    def pause_receiving(self, stream_id) -> None:
        self.paused.add(stream_id)

    def resume_receiving(self, stream_id) -> None:
        self.paused.discard(stream_id)
        stream = self.peer.out.get(stream_id)
        if stream is not None:
            stream.consumed += self.held.pop(stream_id, 0)
            self.peer.credited.add(stream_id)

    @property
    def unsent(self) -> int:
        return sum(len(d) for s in self.out.values() for d in s.queue)

    def send_room(self, stream_id) -> int:
        stream = self.out[stream_id]
        return max(0, stream.consumed + self.peer.stream_window - stream.written)

    def acknowledged(self, stream_id) -> bool:
        return not self.out[stream_id].queue

    def take_credited(self):
        credited, self.credited = self.credited, set()
        return credited

    packet_sizes = 0, 0
    peer_certificate = None
    connection_id = "0011"
    peer_address = ""

    def wake(self) -> None: ...

    def close(self, code, reason) -> None:
        if self.closed is None:
            self.closed = (int(code), reason)

    def deliver(self) -> bool:
        """Give the peer's handler what was sent; True when there was something."""
        if self.closed is not None:
            if not self.peer.closed:
                self.peer.closed = self.closed
                self.peer.handler.connection_closed(*self.closed, True)
                return True
            return False
        moved = False
        while self.events:
            _, stream_id, code = self.events.popleft()
            self.peer.reset(stream_id, code)
            self.peer.handler.stop_sending(stream_id, code)
            moved = True
        streams = list(self.out.items())
        if self.rng is not None:
            self.rng.shuffle(streams)
        for stream_id, stream in streams:
            while not stream.over and (stream.queue or stream.fin or stream.reset is not None):
                moved = True
                if stream.reset is not None:
                    self._over(stream_id, stream)
                    if stream_id not in self.peer.refused:
                        self.peer.handler.stream_reset(stream_id, stream.reset)
                    break
                data = stream.queue.popleft() if stream.queue else b""
                if self.rng is not None and len(data) > 1:
                    cut = self.rng.randrange(1, len(data))
                    stream.queue.appendleft(data[cut:])
                    data = data[:cut]
                fin = stream.fin and not stream.queue
                if stream_id in self.peer.paused:
                    self.peer.held[stream_id] = self.peer.held.get(stream_id, 0) + len(data)
                else:
                    stream.consumed += len(data)
                    self.credited.add(stream_id)
                if fin:
                    self._over(stream_id, stream)
                if stream_id not in self.peer.refused:
                    self.peer.handler.stream_data(stream_id, data, fin)
                if self.rng is not None and self.rng.random() < 0.5:
                    break
        while self.datagrams:
            moved = True
            self.peer.handler.datagram(self.datagrams.popleft())
        return moved

    def _over(self, stream_id, stream) -> None:
        stream.over = True
        if stream_id & 2:
            self.open_uni -= 1


class Pair:
    """A client and a server session, connected."""

    def __init__(
        self,
        client: SessionHandler | None = None,
        server: SessionHandler | None = None,
        *,
        client_config: SessionConfig | None = None,
        server_config: SessionConfig | None = None,
        seed: int | None = None,
        start: bool = True,
        **transport,
    ) -> None:
        rng = random.Random(seed) if seed is not None else None
        self.client_transport = MemoryTransport(True, rng=rng, **transport)
        self.server_transport = MemoryTransport(False, rng=rng, **transport)
        self.client_transport.peer = self.server_transport
        self.server_transport.peer = self.client_transport
        self.client = Session(self.client_transport, client or SessionHandler(), client_config)
        self.server = Session(self.server_transport, server or SessionHandler(), server_config)
        self.client_transport.handler = self.client
        self.server_transport.handler = self.server
        if start:
            self.client.connection_established(ALPN)
            self.server.connection_established(ALPN)
            self.run()

    def run(self, rounds: int = 100_000) -> None:
        """Deliver until nothing moves."""
        for _ in range(rounds):
            self.client.ready_to_send()
            self.server.ready_to_send()
            a = self.client_transport.deliver()
            b = self.server_transport.deliver()
            if not (a or b):
                return
        raise AssertionError("the sessions never came to rest")


def assert_clean(session: Session) -> None:
    """Nothing of any request or data stream is left in `session`."""
    left = session.remembered().of_requests
    assert not any(left.values()), left
    assert session.data_streams.reading == {}
    scheduler = session.scheduler
    scheduler.unblock(list(blocked(scheduler)))
    while scheduler.write_next(0):  # what is over says so and is not queued again
        pass
    assert scheduler.idle
    assert not blocked(scheduler)
