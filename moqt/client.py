"""`moqt.connect`: a session over our own UDP endpoint."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from moqt.aio import MoqtSession
from moqt.publisher import Publisher
from moqt.quic.aio.transport import AioquicTransport
from moqt.quic.config import H3_ALPN, NO_ANSWER, QuicConfig
from moqt.quic.transport import Transport, TransportHandler, connection_of
from moqt.quic.udp import endpoint
from moqt.session import Session, SessionConfig, SessionHandler
from moqt.uri import parse_uri
from moqt.values.codes import SessionErrorCode
from moqt.values.errors import ConnectError, SessionClosed
from moqt.wire.codec import codec_for

TICK_SECONDS = 0.5

logger = logging.getLogger("moqt.client")


class connect:
    """Connect to `url` and establish a session.

    `moqt://host[:port]/path` is native QUIC, `https://host[:port]/path` is WebTransport.

    Use it as `session = await connect(url)` (then `session.close()` and
    `await session.wait_closed()`), or as `async with connect(url) as session`.

    `cafile` holds the authorities that may have signed the server's certificate.
    `handler` answers what the peer asks; by default a `Publisher` without tracks.
    Raises ConnectError within `timeout` seconds when there is nobody, the certificate
    is not trusted or no draft is shared, and MisuseError for a URL that is none and for a
    draft in `quic.alpn` that has no codec.
    """

    def __init__(
        self,
        url: str,
        *,
        cafile: str | Path | None = None,
        quic: QuicConfig | None = None,
        session: SessionConfig | None = None,
        handler: SessionHandler | None = None,
        timeout: float = 10.0,
    ) -> None:
        self._uri = parse_uri(url)
        self._quic = quic or QuicConfig(cafile=cafile)
        if quic is not None and cafile is not None:
            self._quic = replace(quic, cafile=cafile)
        self._config = replace(
            session or SessionConfig(), path=self._uri.path, authority=self._uri.authority
        )
        self._handler = handler or Publisher()
        self._timeout = timeout
        self._session: MoqtSession | None = None

    def __await__(self) -> Generator[None, None, MoqtSession]:
        return self._connect().__await__()

    async def __aenter__(self) -> MoqtSession:
        return await self._connect()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            self._session.close()
            await self._session.wait_closed()

    async def _connect(self) -> MoqtSession:
        made: list[MoqtSession] = []

        def make_session(transport: Transport) -> TransportHandler:
            session = Session(
                transport, self._handler, self._config, now=asyncio.get_running_loop().time()
            )
            made.append(MoqtSession(session))
            return session

        def make(transport: AioquicTransport) -> TransportHandler:
            if not self._uri.webtransport:
                return make_session(transport)
            from moqt.quic.webtransport.client import WebTransportClient  # HTTP/3, for few

            return WebTransportClient(
                transport,
                make_session,
                self._quic.alpn,
                authority=self._uri.authority,
                path=self._uri.path or "/",
            )

        quic = self._quic
        for name in quic.alpn:
            codec_for(name)
        if self._uri.webtransport:
            quic = replace(quic, alpn=(H3_ALPN,))
        connected = False
        try:
            async with asyncio.timeout(self._timeout):
                await endpoint.connect(
                    self._uri.host, self._uri.port, quic, make, within=self._timeout
                )
                connected = True
                session = made[-1]  # one is made for each address tried
                keep_ticking(session.session)
                await session.wait_established()
        except SessionClosed as closed:
            raise ConnectError(
                f"{self._uri.authority} ended the session at once: {closed}"
            ) from closed
        except TimeoutError:
            if made:
                made[-1].close(SessionErrorCode.CONTROL_MESSAGE_TIMEOUT, "no SETUP in time")
            raise ConnectError(
                f"{self._uri.authority} did not answer within {self._timeout:g} s"
                + ("" if connected else f": {NO_ANSWER}")
            ) from None
        except asyncio.CancelledError:
            if made:
                made[-1].close()
            raise
        self._session = session
        return session


def keep_ticking(session: Session) -> None:
    """Bring the time to `session` until it is closed."""
    loop = asyncio.get_running_loop()
    deadlines = session.scheduler.deadlines
    session.scheduler.clock = loop.time
    timer = loop.call_soon(lambda: None)

    def arm() -> None:
        nonlocal timer
        timer.cancel()
        at = loop.time() + TICK_SECONDS
        timer = loop.call_at(at if deadlines.next is None else min(at, deadlines.next), tick)

    def tick() -> None:
        try:
            session.tick(loop.time())
        except Exception:  # a fault of a handler costs its session, as in the transport
            logger.exception(
                "%s: a deadline failed, closing the session", connection_of(session.transport)
            )
            session.close(SessionErrorCode.INTERNAL_ERROR, "internal error")
        if session.closed is None:
            arm()

    deadlines.on_sooner = arm
    tick()
