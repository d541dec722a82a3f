"""The relay as a process: sockets, time and signals around `relay.core.Relay`."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import start_http_server

import moqt
from moqt.quic.config import QuicConfig
from relay.core import Relay
from relay.metrics import RelayMetrics

logger = logging.getLogger("relay")

TICK_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """Where a relay listens, and how it leaves."""

    host: str
    port: int
    quic: QuicConfig
    metrics: tuple[str, int] | None = None
    drain_timeout: float = 10.0
    """How long sessions have to leave after GOAWAY."""


async def run(
    relay: Relay,
    config: DaemonConfig,
    *,
    ready: Callable[[int, int | None], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT (or `stop`), then drain; a second signal cuts it short.

    `ready` is told the real ports, that of the metrics second. Raises OSError when an
    address cannot be listened on.
    """
    loop = asyncio.get_running_loop()
    stopping = stop or asyncio.Event()
    hurry = asyncio.Event()

    def signalled() -> None:
        (hurry if stopping.is_set() else stopping).set()

    numbers = RelayMetrics(relay)
    exporter, metrics_port = None, None
    if config.metrics is not None:
        host, port = config.metrics
        exporter, _ = start_http_server(port, host, registry=numbers.registry)
        metrics_port = exporter.server_port
    ticking: asyncio.Task[None] | None = None
    try:
        server = await moqt.serve(config.host, config.port, quic=config.quic, handler=relay)
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, signalled)
            ticking = asyncio.create_task(_tick(relay, numbers))
            # without its clock the relay would keep what it should forget: rather stop
            ticking.add_done_callback(lambda _: stopping.set())
            if ready is not None:
                ready(server.port, metrics_port)
            await stopping.wait()
            await _drain(server, config.drain_timeout, hurry)
            if ticking.done():
                ticking.result()
        finally:
            await server.close()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
    finally:
        if ticking is not None:
            ticking.cancel()
        if exporter is not None:
            exporter.shutdown()
            exporter.server_close()


async def _tick(relay: Relay, numbers: RelayMetrics) -> None:
    loop = asyncio.get_running_loop()
    while True:
        relay.tick(loop.time())
        numbers.update()
        await asyncio.sleep(TICK_SECONDS)


async def _drain(server: moqt.Server, seconds: float, hurry: asyncio.Event) -> None:
    """GOAWAY to all, and time to leave (MOQT "Graceful Session Migration")."""
    deadline = asyncio.get_running_loop().time() + seconds
    server.goaway(timeout_ms=round(seconds * 1000))
    logger.info("draining %d sessions", len(server.sessions))
    while server.sessions and not hurry.is_set():
        if asyncio.get_running_loop().time() >= deadline:
            logger.info("%d sessions have not left", len(server.sessions))
            return
        await asyncio.sleep(0.05)
