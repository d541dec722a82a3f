"""The other end where no relay will do: what tells back every code that it is told, and leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType

import moqt
from interop.case import DRAFT
from interop.processes import LOOPBACK
from moqt.quic.accept import by_alpn
from moqt.quic.certificates import fingerprint, make_self_signed
from moqt.quic.transport import Transport, TransportHandler
from moqt.quic.udp import endpoint

SHORT = timedelta(days=13)
"""Browsers take a certificate by its hash that is valid for at most 14 days."""


def make_short_lived(folder: Path) -> tuple[Path, Path]:
    """`(cert.pem, key.pem)` in `folder` for loopback, which a browser takes by its hash."""
    return make_self_signed(folder, ["localhost", LOOPBACK], validity=SHORT)


class Teller(TransportHandler):
    """A session without MOQT: answers octets with one, a reset with a reset, a stop with a stop.

    The answer has the code that came, or what `told_back` has for it. `resets` and `stops` are
    the codes that came; `ended` is how the session did.
    """

    def __init__(
        self, transport: Transport, leave: tuple[int, str] | None, told_back: Mapping[int, int]
    ) -> None:
        self._transport, self._leave, self._told_back = transport, leave, told_back
        self.resets: list[int] = []
        self.stops: list[int] = []
        self.ended: asyncio.Future[tuple[int, str, bool]] = (
            asyncio.get_running_loop().create_future()
        )

    def connection_established(self, alpn: str) -> None:
        if self._leave is not None:
            self._transport.close(*self._leave)

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        if data:
            self._transport.send(stream_id, b"\x00")

    def stream_reset(self, stream_id: int, code: int) -> None:
        self.resets.append(code)
        self._transport.reset(stream_id, self._told_back.get(code, code))

    def stop_sending(self, stream_id: int, code: int) -> None:
        self.stops.append(code)
        self._transport.stop_receiving(stream_id, self._told_back.get(code, code))

    def datagram(self, data: bytes) -> None: ...

    def ready_to_send(self) -> None: ...

    def connection_closed(self, code: int, reason: str, application: bool) -> None:
        if not self.ended.done():
            self.ended.set_result((code, reason, application))


class Listener:
    """A server on loopback with a short-lived certificate."""

    def __init__(self, port: int, certificate: Path) -> None:
        self.url = f"https://{LOOPBACK}:{port}/"
        self.hash = fingerprint(certificate)
        self.tellers: list[Teller] = []


@asynccontextmanager
async def tell(
    folder: Path,
    *,
    leave: tuple[int, str] | None = None,
    told_back: Mapping[int, int] = MappingProxyType({}),
) -> AsyncIterator[Listener]:
    """Serve `Teller`s; with `leave` each closes its session at once with that code and reason."""
    cert, key = make_short_lived(folder)
    tellers: list[Teller] = []

    def make(transport: Transport) -> TransportHandler:
        tellers.append(Teller(transport, leave, told_back))
        return tellers[-1]

    quic = moqt.QuicConfig(certfile=cert, keyfile=key, alpn=(DRAFT, "h3"))
    serving = await endpoint.serve(LOOPBACK, 0, quic, by_alpn(make, (DRAFT,)))
    try:
        listener = Listener(serving.port, cert)
        listener.tellers = tellers
        yield listener
    finally:
        await serving.close()


@asynccontextmanager
async def serve_sessions(folder: Path) -> AsyncIterator[tuple[Listener, moqt.Server]]:
    """Serve MOQT sessions that the case itself has in hand."""
    cert, key = make_short_lived(folder)
    quic = moqt.QuicConfig(certfile=cert, keyfile=key)
    async with await moqt.serve(LOOPBACK, 0, quic=quic, handler=moqt.Publisher()) as server:
        yield Listener(server.port, cert), server
