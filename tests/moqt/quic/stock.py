"""aioquic's own connection as the peer of ours."""

from __future__ import annotations

from collections import defaultdict

from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import StreamDataReceived

from moqt.quic.aio.transport import AioquicTransport
from tests.moqt.quic_pair import CLIENT, SERVER


class Stock:
    """A stock connection that echoes what comes on bidirectional streams."""

    def __init__(self, connection: QuicConnection) -> None:
        self.connection = connection
        self.data: dict[int, bytearray] = defaultdict(bytearray)
        self.finished: set[int] = set()
        self.echo = not connection.configuration.is_client

    def handle(self) -> None:
        while (event := self.connection.next_event()) is not None:
            if isinstance(event, StreamDataReceived):
                self.data[event.stream_id] += event.data
                if event.end_stream:
                    self.finished.add(event.stream_id)
                if self.echo:
                    self.connection.send_stream_data(event.stream_id, event.data, event.end_stream)


def exchange(ours: AioquicTransport, stock: Stock, done: object, rounds: int = 5000) -> None:
    """Move datagrams to and fro, a millisecond each way, until `done()`."""
    now = 100.0
    peer = SERVER if ours.is_client else CLIENT
    mine = CLIENT if ours.is_client else SERVER
    for _ in range(rounds):
        assert callable(done)
        if done():
            return
        for side in (ours, stock.connection):
            at = side.timer() if side is ours else side.get_timer()  # type: ignore[union-attr]
            if at is not None and at <= now:
                side.handle_timer(now)
        for data, _ in ours.datagrams_to_send(now):
            stock.connection.receive_datagram(data, mine, now)
        now += 0.001
        stock.handle()
        datagrams = [data for data, _ in stock.connection.datagrams_to_send(now)]
        if datagrams:
            ours.receive(datagrams, peer, now)
        now += 0.001
    raise AssertionError("not done in time")
