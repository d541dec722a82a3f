"""`moqt.serve`: accept sessions on a UDP port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import replace
from types import TracebackType
from typing import Self

from moqt.aio import MoqtSession
from moqt.client import keep_ticking
from moqt.quic.config import H3_ALPN, QuicConfig
from moqt.quic.transport import Transport, TransportHandler
from moqt.quic.udp import endpoint
from moqt.quic.udp.sharing import SharedPort
from moqt.session import Session, SessionConfig, SessionHandler
from moqt.uri import for_transport
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
        """Ask every peer to leave (MOQT "GOAWAY"); new requests are refused from now on.

        Each is told `uri` with the scheme that its session has: `moqt`, or `https` over
        WebTransport.
        """
        for each in tuple(self.sessions):
            webtransport = each.session.transport.path is not None
            each.session.send_goaway(for_transport(uri, webtransport=webtransport), timeout_ms)

    def refuse_new(self, why: str) -> None:
        """Take no connection from now on; clients are refused at once, and told `why`."""
        self.endpoint.admission.closed = why

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


class serve:
    """Listen on `host`:`port` (0 picks a free port) with the certificate in `quic`.

    Use it as `server = await serve(...)` (then `await server.close()`), or as
    `async with serve(...) as server`.

    Native QUIC and, unless `quic.webtransport` is false, WebTransport share the port; the
    handshake's ALPN tells them apart.

    `handler` serves every session, or makes a handler for each. `on_session` is called
    with each new session, before its SETUP. With `shared` other processes serve the port, too, and
    its socket says where that is. Raises OSError when the address is taken and
    MisuseError for a draft in `quic.alpn` that has no codec.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        quic: QuicConfig,
        handler: SessionHandler | Callable[[], SessionHandler],
        session: SessionConfig | None = None,
        on_session: Callable[[MoqtSession], None] | None = None,
        shared: SharedPort | None = None,
    ) -> None:
        self._shared = shared
        self._host, self._port, self._quic = host, port, quic
        self._handler = handler
        self._config = session
        self._on_session = on_session
        self._server = Server()

    def __await__(self) -> Generator[None, None, Server]:
        return self._serve().__await__()

    async def __aenter__(self) -> Server:
        return await self._serve()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._server.close()

    def _accept(self, transport: Transport) -> TransportHandler:
        handler, sessions = self._handler, self._server.sessions
        chosen = handler if isinstance(handler, SessionHandler) else handler()
        loop = asyncio.get_running_loop()
        accepted = Session(transport, chosen, self._config, now=loop.time())
        wrapper = MoqtSession(accepted)
        sessions.add(wrapper)
        accepted.observers.append(
            lambda closed: sessions.discard(wrapper) if closed is not None else None
        )
        loop.call_soon(keep_ticking, accepted)
        if self._on_session is not None:
            self._on_session(wrapper)
        return accepted

    async def _serve(self) -> Server:
        from moqt.quic.accept import by_alpn  # HTTP/3, which clients have no use for

        quic = self._quic
        protocols = tuple(name for name in quic.alpn if name != H3_ALPN)
        for name in protocols:
            codec_for(name)
        if quic.webtransport:
            quic = replace(quic, alpn=(*protocols, H3_ALPN))
        accept = by_alpn(self._accept, protocols)
        self._server.endpoint = await endpoint.serve(
            self._host, self._port, quic, accept, shared=self._shared
        )
        return self._server
