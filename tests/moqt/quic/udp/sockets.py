"""Endpoints on loopback sockets: an echoing server and who dials it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moqt.quic.aio.transport import AioquicTransport
from moqt.quic.config import QuicConfig
from moqt.quic.udp.endpoint import Endpoint, connect, serve
from tests.moqt.quic_pair import Recorder, quic_config


class Echo(Recorder):
    """Returns what comes on bidirectional streams."""

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        super().stream_data(stream_id, data, fin)
        if not stream_id & 2:
            self.transport.send(stream_id, data, fin)


class Server:
    def __init__(self) -> None:
        self.handlers: list[Echo] = []
        self.failing = False
        self.endpoint: Endpoint

    def make(self, transport: AioquicTransport) -> Echo:
        if self.failing:
            raise RuntimeError("no handler today")
        self.handlers.append(Echo(transport))
        return self.handlers[-1]


async def until(condition: Callable[[], bool], within: float = 10.0) -> None:
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def start(config: QuicConfig | None = None, host: str = "127.0.0.1") -> Server:
    server = Server()
    server.endpoint = await serve(host, 0, config or quic_config(), server.make)
    return server


async def dial(
    server: Server, config: QuicConfig | None = None, host: str = "127.0.0.1", within: float = 5.0
) -> tuple[Endpoint, Recorder]:
    """A client's endpoint, and the handler of its connection."""
    made: list[Recorder] = []

    def make(transport: AioquicTransport) -> Recorder:
        made.append(Recorder(transport))
        return made[-1]

    port = server.endpoint.port
    client = await connect(host, port, config or quic_config(), make, within=within)
    return client, made[-1]


async def hang_up(client: Endpoint) -> None:
    await client.close(0, "done")


async def echo(record: Recorder, payload: bytes) -> None:
    stream_id = record.transport.open_stream(bidirectional=True)
    assert stream_id is not None
    record.transport.send(stream_id, payload, True)
    await until(lambda: stream_id in record.finished)
    assert bytes(record.data[stream_id]) == payload
