"""`moqt.serve`: accept sessions on a UDP port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

from moqt.aio import MoqtSession
from moqt.client import keep_ticking
from moqt.quic.accept import by_alpn
from moqt.quic.config import QuicConfig
from moqt.quic.transport import Transport, TransportHandler
from moqt.quic.udp import endpoint
from moqt.quic.webtransport.session import H3_ALPN
from moqt.session import Session, SessionConfig, SessionHandler
from moqt.values.codes import SessionErrorCode
from moqt.wire.codec import codec_for


class Server:
    """A listening endpoint and the sessions it accepted."""

    def __init__(self) -> None:
        self.sessions: set[MoqtSession] = set()
        self.endpoint: endpoint.Endpoint

    @property
    def port(self) -> int:
        return self.endpoint.port

    def goaway(self, uri: str = "", timeout_ms: int = 0) -> None:
        """Ask every peer to leave (MOQT "GOAWAY"); new requests are refused from now on."""
        for session in tuple(self.sessions):
            session.session.send_goaway(uri, timeout_ms)

    async def close(
        self, code: SessionErrorCode = SessionErrorCode.NO_ERROR, reason: str = ""
    ) -> None:
        """End every session and the socket."""
        for session in tuple(self.sessions):
            session.close(code, reason)
        await self.endpoint.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


async def serve(
    host: str,
    port: int,
    *,
    quic: QuicConfig,
    handler: SessionHandler | Callable[[], SessionHandler],
    session: SessionConfig | None = None,
    on_session: Callable[[MoqtSession], None] | None = None,
) -> Server:
    """Listen on `host`:`port` (0 picks a free port) with the certificate in `quic`.

    Native QUIC and, unless `quic.webtransport` is false, WebTransport share the port; the
    handshake's ALPN tells them apart.

    `handler` serves every session, or makes a handler for each. `on_session` is called
    with each new session, before its SETUP. Raises OSError when the address is taken and
    MisuseError for a draft in `quic.alpn` that has no codec.
    """
    server = Server()

    def make(transport: Transport) -> TransportHandler:
        chosen = handler if isinstance(handler, SessionHandler) else handler()
        accepted = Session(transport, chosen, session, now=asyncio.get_running_loop().time())
        wrapper = MoqtSession(accepted)
        server.sessions.add(wrapper)
        accepted.observers.append(
            lambda closed: server.sessions.discard(wrapper) if closed is not None else None
        )
        asyncio.get_running_loop().call_soon(keep_ticking, accepted)
        if on_session is not None:
            on_session(wrapper)
        return accepted

    protocols = tuple(name for name in quic.alpn if name != H3_ALPN)
    for name in protocols:
        codec_for(name)
    if quic.webtransport:
        quic = replace(quic, alpn=(*protocols, H3_ALPN))
    server.endpoint = await endpoint.serve(host, port, quic, by_alpn(make, protocols))
    return server
